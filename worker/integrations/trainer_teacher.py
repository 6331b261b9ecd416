"""Soft targets under Hugging Face's Trainer: `distributed(Trainer, teacher=0.5)`.

How it works
1. The loader of the training data asks the teachers for each batch DEPTH batches before the Trainer gets it. The batch
   carries its `Asked` under the name SOFT.
2. compute_loss takes the soft targets after the forward pass, and adds `teacher_weight` of their loss.

Rules
- The loader asks before Accelerate moves a batch to the device: no copy from a GPU is waited for, and Accelerate alone
  knows which batch is the last one.
- A batch that comes another way is asked for in compute_loss. A batch without an answer has the Trainer's own loss.
- Evaluation asks nothing, and its loss is the Trainer's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from narrows.protocols.errors import UsageError
from narrows.worker.distillation.batches import Inputs
from narrows.worker.distillation.student import LABELS, ask, asked_ahead

Base: Any = object
SOFT = "soft_targets"  # the name of a batch's `Asked`
IGNORED = -100  # a label that no loss counts


class AskingLoader:
    """A DataLoader whose batches are asked for ahead. In all else it is that loader.

    Args:
        loader: yields batches by name.
        labels: names that the teacher's model does not get.
    """

    def __init__(self, loader: Any, labels: tuple[str, ...]) -> None:
        self.loader, self.labels = loader, labels

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that has no field yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the loader: Accelerate asks whether this is a DataLoader."""
        return type(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch, asked in asked_ahead(self.loader, lambda batch: inputs_of(batch, self.labels)):
            yield type(batch)({**batch, SOFT: asked})


class DistillationOverrides(Base):  # type: ignore[misc]
    """The methods that a Trainer overrides to learn from teachers.

    Attributes:
        teacher_weight: of the soft targets' loss, above 0 and at most 1. The rest is the weight of the Trainer's own loss.
        step_batches: the batches of the present step.
    """

    teacher_weight: float
    step_batches: tuple[Any, ...] = ()

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        labels = (*LABELS, *self.label_names)
        if not hasattr(loader, "base_dataloader"):
            return AskingLoader(loader, labels)
        loader.base_dataloader = AskingLoader(loader.base_dataloader, labels)
        return loader

    def get_batch_samples(self, *args: Any, **values: Any) -> Any:
        found = super().get_batch_samples(*args, **values)
        self.step_batches = (*found[0],)
        return found

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **values: Any) -> Any:
        """Compute the Trainer's loss, and in training add the loss against the soft targets.

        Raises:
            UsageError: the model returns no logits.
            IncompatibleError: the teacher has other classes or positions; or it cannot answer.
        """
        asked = inputs.pop(SOFT, None)
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, *args, **values)
        if asked is None:
            asked = ask(inputs_of(inputs, (*LABELS, *self.label_names)))
        given = dict(inputs)  # the Trainer may take labels out
        loss, outputs = super().compute_loss(model, inputs, True, *args, **values)
        if (soft := asked.take()) is not None:
            logits = logits_of(outputs)
            taught = soft.loss(logits, counted(given, logits.dim() - 1))
            items = args[0] if args else values.get("num_items_in_batch")
            if self._divides_itself(items):
                taught = taught * self._share(given, logits.dim() - 1)
            loss = (1 - self.teacher_weight) * loss + self.teacher_weight * taught
        return (loss, outputs) if return_outputs else loss

    def _divides_itself(self, items: Any) -> bool:
        """True if the Trainer's loss is that of a whole step's batches; else Trainer divides it by their number."""
        told = getattr(self, "loss_is_scaled_for_ga", None)  # an attribute of transformers 5
        if told is not None:
            return bool(told)
        return (bool(self.model_accepts_loss_kwargs) and items is not None) or self.compute_loss_func is not None

    def _share(self, inputs: Mapping[str, Any], dimensions: int) -> Any:
        """Return the share of a batch in the predictions of its step."""
        step = sum(predictions(batch, dimensions) for batch in self.step_batches)
        return predictions(inputs, dimensions) / step if self.step_batches else 1.0


def inputs_of(batch: Any, labels: tuple[str, ...]) -> Inputs:
    """Return what the teacher's model gets of a batch. Raises UsageError if the batch has no tensors by name."""
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"distributed(Trainer, teacher=...): a batch is a {type(batch).__name__}, and no tensors by name"
        )
    return {name: each for name, each in batch.items() if isinstance(each, torch.Tensor) and name not in labels}


def logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits of a model's outputs. Raises UsageError if there are none."""
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    else:
        found = outputs[1] if isinstance(outputs, tuple) and len(outputs) > 1 else getattr(outputs, "logits", None)
    if not isinstance(found, torch.Tensor) or found.dim() < 2:
        raise UsageError(
            "distributed(Trainer, teacher=...): the model returns no logits in training; a fused loss, as Liger's, makes none"
        )
    return found


def counted(inputs: Mapping[str, Any], dimensions: int) -> torch.Tensor | None:
    """Return which predictions of a batch count: bool of so many dimensions; None: all.

    A model with a decoder predicts at the positions of its labels, any other one at those of its inputs.
    """
    decodes = "decoder_input_ids" in inputs
    mask = inputs.get("decoder_attention_mask" if decodes else "attention_mask")
    if mask is None and decodes and isinstance(labels := inputs.get("labels"), torch.Tensor):
        mask = labels != IGNORED
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == dimensions else None


def predictions(inputs: Mapping[str, Any], dimensions: int) -> Any:
    """Return how many predictions of a batch count; where all do, how many samples it has."""
    mask = counted(inputs, dimensions)
    return len(next(each for each in inputs.values() if isinstance(each, torch.Tensor))) if mask is None else mask.sum()
