"""Steps whose gradient is not finite: a worker skips them, counts them, and ends after too many in a row.

The main thread owns it.

How it works
1. `SkippedSteps.look` checks the gradients of a step before the script's optimizer steps, or before they are pushed. So
   no NaN reaches weights, the optimizer's state, a residual, a peer or a server, in any mode and with any SPEC.
2. `first_not_finite` computes the norms of all gradients, fused by torch, and the host waits for them once. The norm of
   finite values beyond 1e19 overflows too; so if the norm is not finite, each tensor is checked. A GradScaler has
   checked the gradients already, and its result is used.
3. All ranks of a group skip the same steps (`ModelSlice.tallied`).
4. The mode's `SyncStep` closes the clock with an update of weight 0 (`ShardExchanges.skip`). A clock of several local
   steps still pushes the other steps.
5. `Engine.step` counts skipped steps. The session tells ps-worker, and raises the sentence of `too_many`.

If gradients leave during the backward pass, the parts that have left have no effect: the first part of the update
leaves at step(), and says that the update has no samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch._utils import _flatten_dense_tensors

from narrows.worker.model.flat import FlatModel, alike, local_part

FLOAT_BYTES = 4
Named = Sequence[tuple[str, torch.Tensor]]


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values in this process: stored values of a sparse one, the local part of a DTensor."""
    local = local_part(gradient)
    return (local._values() if local.is_sparse else local).detach()


@torch.no_grad()
def first_not_finite(gradients: Named) -> str:
    """Name the first gradient that has a NaN or an infinity; "" if all are finite.

    The host waits for the device once if all are finite.
    """
    values = [gradient for _, gradient in gradients]
    if alike(values) and values[0].is_cpu:  # a norm of each would take longer than the sum of all
        values = [_flatten_dense_tensors(values)]
    else:
        values = [each for gradient in values if (each := plain(gradient)).numel()]
    half = [each for each in values if each.element_size() < FLOAT_BYTES]  # their norms would overflow early
    full = [each for each in values if each.element_size() >= FLOAT_BYTES]
    norms = [*(torch._foreach_norm(half, 2, dtype=torch.float32) if half else ())]
    norms += torch._foreach_norm(full, 2) if full else ()
    if not norms or bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all()):
        return ""
    return next((name for name, each in gradients if not torch.isfinite(plain(each)).all()), "")


@torch.no_grad()
def unscale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Divide gradients in place by a GradScaler's scale, as its unscale_() does, without waiting for the device."""
    inverse = scale.double().reciprocal().float()
    for gradient in gradients:
        plain(gradient).mul_(inverse.to(gradient.device))


class NotFiniteError(Exception):
    """Ends a step of the script's optimizer whose closure has made a gradient that is not finite.

    `loss` is what the closure returned.
    """

    def __init__(self, loss: object) -> None:
        super().__init__("the gradient is not finite")
        self.loss = loss


class RowGradients(Protocol):
    """The gradients of rows of embedding tables on the servers, which no parameter has."""

    def gradients(self) -> Named:
        """Return the gradients since the last push, each with the name of its table."""

    def drop(self) -> None:
        """Forget these gradients."""


class SkippedSteps:
    """Checks the gradients of each step of one worker, and counts the skipped steps.

    Args:
        limit: skipped steps in a row after which the worker ends.
        rank: the rank of this process in the run, for messages.
        flat: the parameters whose gradients are checked.
        rows: the other gradients that are checked.
        hides: with --dp-noise, gradients of a skipped step are set to zero: noise is pushed in their place.

    Attributes:
        newest: the tensor whose gradient was not finite in the newest step; "" if the step was not skipped.
        quiet: a GradScaler has found the overflow, which it needs to find its scale; the user is not told.
    """

    def __init__(self, limit: int, rank: int, flat: FlatModel, rows: RowGradients, hides: bool) -> None:
        self.limit, self.rank, self.flat, self.rows, self.hides = limit, rank, flat, rows, hides
        self.scale: torch.Tensor | None = None  # scale of this step's gradients (torch.amp.GradScaler)
        self.overflow: torch.Tensor | None = None  # not 0 if these gradients have overflowed
        self.steps = self.row = 0  # skipped steps so far, and in a row until now
        self.newest, self.quiet, self.said = "", False, False

    def scaled(self, scale: torch.Tensor | None, overflow: torch.Tensor | None) -> None:
        """Take what a GradScaler says of this step's gradients.

        Args:
            scale: the factor on the gradients; None without a GradScaler, or if it has unscaled them.
            overflow: not 0 if the gradients have overflowed; None without a GradScaler.
        """
        self.scale, self.overflow = scale, overflow

    def begin(self) -> None:
        """Begin a step."""
        self.newest, self.quiet = "", False

    def check(self) -> tuple[bool, float]:
        """Check the gradients of this process. If they are not finite, this step is skipped.

        Returns:
            Whether all are finite, and the scale that a GradScaler has put on them; 1.0 without one.
        """
        value = 1.0
        if self.overflow is not None:  # the host waits for the device once
            scale = torch.ones_like(self.overflow) if self.scale is None else self.scale
            overflow, value = torch.cat([self.overflow.reshape(1), scale.reshape(1)]).tolist()
            self.quiet = bool(overflow)
            if not overflow:
                return True, value
        each = zip(self.flat.names, self.flat.parameters, strict=True)
        named = [(name, parameter.grad) for name, parameter in each if parameter.grad is not None]
        return self.look([*named, *self.rows.gradients()], "some tensor" if self.quiet else ""), value

    def usable(self) -> bool:
        """Return whether the gradients of this process are finite, and unscale those that a GradScaler has scaled."""
        finite, _ = self.check()
        if self.scale is not None and not self.quiet:
            unscale([parameter.grad for parameter in self.flat.parameters if parameter.grad is not None], self.scale)
        return finite

    def look(self, gradients: Named, unless: str = "") -> bool:
        """Return whether these gradients of a step are finite, and note the first tensor whose gradient is not.

        If they are not, gradients of embedding rows are dropped, and with --dp-noise the others are set to zero.

        Args:
            gradients: pairs of a tensor's name and its gradient.
            unless: the tensor's name to note if all are finite, because a GradScaler has found an overflow; "": none.
        """
        self.newest = repr(name) if (name := first_not_finite(gradients)) else unless
        if self.newest:
            self.rows.drop()
            for _, gradient in gradients if self.hides else ():
                gradient.zero_()
        return not self.newest

    def skip(self, tensor: str) -> None:
        """Skip this step, since `tensor` of another process of the group has a gradient that is not finite."""
        self.newest = tensor

    def stepped(self) -> None:
        """End a step, and count it if it was skipped."""
        self.steps += bool(self.newest)
        self.row = self.row + 1 if self.newest else 0

    def first(self, step: int) -> str:
        """Return the sentence for the console about the first skipped step; "" if none was skipped, or after that."""
        if not self.newest or self.quiet or self.said:
            return ""
        self.said = True
        return (
            f"rank {self.rank}: the gradient of step {step} is not finite, first in {self.newest}: the step is skipped; "
            "more of them are only counted"
        )

    def too_many(self) -> str:
        """Return the sentence with which this worker ends; "" below the limit."""
        if self.row < self.limit:
            return ""
        return (
            f"rank {self.rank}: the gradients of {self.row} steps in a row were not finite, the newest first in {self.newest}: "
            "look at the data and the loss, lower the learning rate or clip; --skip-limit says how many may be skipped"
        )
