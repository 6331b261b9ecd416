"""The soft targets of a Trainer, without its library: tests/examples/test_trainers.py has the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from narrows.protocols.errors import UsageError
from narrows.worker.distillation import student
from narrows.worker.distillation.soft_targets import SoftTargets
from narrows.worker.integrations import trainer_teacher
from narrows.worker.integrations.trainer_teacher import SOFT, AskingLoader, DistillationOverrides, counted, logits_of

CLASSES, WEIGHT = 5, 0.25


class Answered:
    """What was asked for a batch: the teacher finds class (token + 1) most likely."""

    def __init__(self, asked: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
        asked.append(inputs["input_ids"])
        self.inputs = inputs

    def take(self) -> SoftTargets:
        logits = torch.nn.functional.one_hot((self.inputs["input_ids"] + 1) % CLASSES, CLASSES) * 2.0
        return SoftTargets(torch.arange(CLASSES).expand_as(logits), logits.log_softmax(-1), CLASSES)


class Shard:
    """Accelerate's loader: it reads one batch ahead of the Trainer."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader.__iter__()


class Library:
    """What a Trainer has of its own."""

    label_names = ("labels",)
    model_accepts_loss_kwargs = True
    compute_loss_func = None
    rows: Any = ()

    def get_train_dataloader(self) -> Any:
        return Shard(DataLoader(self.rows, batch_size=2))

    def get_batch_samples(self, batches: Iterator[Any], count: int, device: Any) -> Any:
        found = [next(batches) for _ in range(count)]
        return found, sum(int((batch["labels"] != -100).sum()) for batch in found)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert SOFT not in inputs
        inputs.pop("labels")
        logits = model(inputs["input_ids"])
        loss = logits.sum() * 0 + 7.0
        return (loss, {"logits": logits}) if return_outputs else loss


class Taught(DistillationOverrides, Library):
    teacher_weight = WEIGHT


def rows(count: int) -> Any:
    drawn = torch.Generator().manual_seed(1)
    found = []
    for row in range(count):
        tokens = torch.randint(0, CLASSES, (6,), generator=drawn)
        mask = (torch.arange(6) < 2 + row % 5).long()
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)})
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    for module in (student, trainer_teacher):
        monkeypatch.setattr(module, "ask", lambda inputs, ids=None: Answered(found, inputs))
    return found


def divergences(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Of each position, in NumPy: the sum of p log(p / q)."""
    teacher = np.eye(CLASSES)[(batch["input_ids"].numpy() + 1) % CLASSES] * 2.0
    own = model(batch["input_ids"]).detach().numpy().astype(np.float64)
    p, q = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (teacher, own))
    return (p * np.log(p / q)).sum(-1)


@pytest.mark.parametrize("whole_step", [True, False])
def test_accumulated_batches_are_weighted_as_the_trainer_weighs_its_own(
    asked: list[torch.Tensor], whole_step: bool
) -> None:
    """Positions of the whole step count alike, or the Trainer divides the batches' means by their number."""
    torch.manual_seed(0)
    model, trainer = torch.nn.Embedding(CLASSES, CLASSES), Taught()
    trainer.rows, trainer.model_accepts_loss_kwargs = rows(8), whole_step
    batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 3, "cpu")
    assert len(asked) == 4, "all batches of the epoch, as far as the look-ahead goes"
    plain = [{name: value for name, value in batch.items() if name != SOFT} for batch in batches]
    losses = [trainer.compute_loss(model, batch, num_items_in_batch=items) for batch in batches]
    places = [float(batch["attention_mask"].sum()) for batch in plain]
    for loss, batch, place in zip(losses, plain, places, strict=True):
        summed = (divergences(model, batch) * batch["attention_mask"].numpy()).sum()
        soft = summed / (sum(places) if whole_step else place)
        assert float(loss.detach()) == pytest.approx((1 - WEIGHT) * 7.0 + WEIGHT * soft, rel=1e-5)


def test_an_evaluation_asks_nothing_and_another_batch_is_asked_for_when_it_comes(asked: list[torch.Tensor]) -> None:
    model, trainer = torch.nn.Embedding(CLASSES, CLASSES), Taught()
    (batch,) = DataLoader(rows(2), batch_size=2)
    assert float(trainer.compute_loss(model.eval(), dict(batch)).detach()) == 7.0 and not asked
    loss, outputs = trainer.compute_loss(model.train(), dict(batch), return_outputs=True)
    assert len(asked) == 1 and float(loss.detach()) != 7.0 and outputs["logits"].shape == (2, 6, CLASSES)


def test_batches_are_asked_for_ahead_without_their_labels(asked: list[torch.Tensor]) -> None:
    loader = AskingLoader(DataLoader(rows(20), batch_size=2), ("labels",))
    assert len(loader) == 10 and isinstance(loader, DataLoader) and loader.batch_size == 2
    for read in range(2):
        asked.clear()
        for number, batch in enumerate(loader, 1):
            assert len(asked) == min(10, number + student.DEPTH)
            assert {*batch} == {"input_ids", "attention_mask", "labels", SOFT}
            assert {*batch[SOFT].inputs} == {"input_ids", "attention_mask"}
            assert batch[SOFT].inputs["input_ids"] is batch["input_ids"]
        assert number == 10, read


def test_which_positions_count() -> None:
    mask, labels = torch.tensor([[1, 0, 0]]), torch.tensor([[4, 4, -100]])
    assert counted({"attention_mask": mask}, 1) is None, "a model with one prediction for a sample"
    assert counted({"input_ids": mask}, 2) is None
    decoded = counted({"attention_mask": mask, "decoder_input_ids": mask, "labels": labels}, 2)
    assert decoded is not None and decoded.tolist() == [[True, True, False]]
    masked = counted({"attention_mask": mask, "labels": labels}, 2)
    assert masked is not None and masked.tolist() == [[True, False, False]]


def test_a_model_without_logits_is_named() -> None:
    assert logits_of((torch.zeros(()), torch.ones(2, 3))).shape == (2, 3)
    for outputs in ({"loss": 1}, {"logits": None}, (torch.zeros(()),), object()):
        with pytest.raises(UsageError, match="returns no logits in training"):
            logits_of(outputs)


def test_what_asks_ahead_is_read_again_and_has_a_length(asked: list[torch.Tensor]) -> None:
    ahead = student.ahead(DataLoader(rows(20), batch_size=2), depth=3)
    assert len(ahead) == 10
    for _ in range(2):
        asked.clear()
        seen = [len(asked) for _, soft in ahead if soft is not None]
        assert seen == [4, 5, 6, 7, 8, 9, 10, 10, 10, 10]
    assert len([*student.ahead(batch for batch in DataLoader(rows(4), batch_size=2))]) == 2
    with pytest.raises(UsageError, match="depth=0"):
        student.ahead([], depth=0)
