"""Soft targets: the top K log-probabilities of a teacher, and the loss against them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrows.protocols.errors import IncompatibleError, UsageError


@dataclass(frozen=True)
class SoftTargets:
    """What a teacher predicts for a batch. Moves to the student's device when it is first used there.

    Attributes:
        ids: int64[samples, *positions, K], the classes that the teacher finds most likely, rising.
        log_probs: float32 of the same shape, their log-probabilities at `temperature`.
        classes: of the teacher's model.
        temperature: by which the teacher divided its logits.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    classes: int
    temperature: float = 1.0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SoftTargets:
        """Return these soft targets on a device, as a trainer moves a batch there."""
        ids, log_probs = (each.to(device, non_blocking=non_blocking) for each in (self.ids, self.log_probs))
        return replace(self, ids=ids, log_probs=log_probs)

    def loss(self, logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean Kullback-Leibler divergence of the student from the teacher (Hinton et al., 1503.02531).

        The classes beyond the top K count as one: what is left of the teacher's probability is compared with what the
        student gives them together. So the loss is a lower bound of the divergence over all classes, and 0 for equal models.
        It is multiplied by the square of the temperature, so that its gradient keeps its size (1503.02531, section 2).

        Args:
            logits: float[samples, *positions, classes], of the student.
            mask: bool[samples, *positions]: positions that count; None: all.

        Raises:
            IncompatibleError: the student has other classes or positions than the teacher.
            UsageError: the mask has another shape.
        """
        if logits.shape[-1] != self.classes or logits.shape[:-1] != self.ids.shape[:-1]:
            raise IncompatibleError(
                f"the student's logits have shape {tuple(logits.shape)}, the teacher's answer "
                f"{(*self.ids.shape[:-1], self.classes)}: both models need the same classes (tokenizer) and the same inputs"
            )
        ids, teacher = self.ids.to(logits.device), self.log_probs.to(logits.device)
        divergence: torch.Tensor = _Divergence.apply(logits, ids, teacher, self.temperature)  # type: ignore[no-untyped-call]
        divergence = divergence * self.temperature**2
        if mask is None:
            return divergence.mean()
        if mask.shape != divergence.shape:
            raise UsageError(
                f"the mask has shape {tuple(mask.shape)}: give one value for each of {tuple(divergence.shape)}"
            )
        counted = mask.to(divergence.device).bool()
        return divergence.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


class _Divergence(torch.autograd.Function):
    """The divergence of each prediction, whose gradient is written down: a third of the time of autograd's own.

    Let q be the student's probabilities, p those of the teacher's top K, r what is left of the teacher's, and o what the
    student gives the other classes together. The gradient by a logit is q - p in the top K, and q (1 - r / o) beyond.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, teacher: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        log_q = (logits.float() / temperature if temperature != 1 else logits.float()).log_softmax(-1)
        p, log_q_top = teacher.exp(), log_q.gather(-1, ids)
        # A class that both rule out counts 0, and not 0 times infinity.
        divergence = torch.where(p > 0, p * (teacher - log_q_top), 0.0).sum(-1)
        q = log_q.exp()
        if ids.shape[-1] < logits.shape[-1]:
            rest = (1 - p.sum(-1)).clamp(min=0)
            q.scatter_(-1, ids, 0)
            # Not below the least float: where the student gives the others nothing, its top K alone have gradients.
            others = q.sum(-1).clamp(min=torch.finfo(q.dtype).tiny)
            divergence = divergence + torch.xlogy(rest, rest) - rest * others.log()
            if ctx.needs_input_grad[0]:
                q.mul_((1 - rest / others).unsqueeze(-1))
        if ctx.needs_input_grad[0]:
            gradient = q.scatter_(-1, ids, log_q_top.exp_().sub_(p)).div_(temperature)
            ctx.save_for_backward(gradient.to(logits.dtype))
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, along: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * along.to(gradient.dtype).unsqueeze(-1), None, None, None
