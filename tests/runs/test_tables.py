"""Embedding tables on the servers: rows travel as rows, and are stepped as torch.optim steps sparse gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.scripts import run
from torch import nn

from narrows.protocols.errors import UsageError
from narrows.protocols.settings import Settings
from narrows.worker import DistributedOptimizer, Embedding, session

ROWS, DIM, BAG, BATCH, STEPS = 61, 5, 3, 16, 12
Optimizers = list[torch.optim.Optimizer]


def optimizers(kind: str, model: Model) -> Optimizers:
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    table = model.table.parameters()
    return {
        "SGD": lambda: [torch.optim.SGD(model.parameters(), lr=0.3)],
        "Adagrad": lambda: [dense, torch.optim.Adagrad(table, lr=0.2, initial_accumulator_value=0.01)],
        "SparseAdam": lambda: [dense, torch.optim.SparseAdam([*table], lr=0.05)],
    }[kind]()


class Model(nn.Module):
    """A bag of rows and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = Embedding(ROWS, DIM, sparse=True, seed=11)
        self.head = nn.Linear(DIM, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.squeeze(self.head(torch.tanh(self.table(indices).sum(1))), 1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(500 + step)
    indices = (torch.rand(BATCH, BAG, generator=generator) ** 3 * ROWS).long()  # some rows often, some hardly
    return indices, torch.randn(BATCH, generator=generator)


def loss_of(model: Model, step: int, worker: int = 0, of: int = 1) -> torch.Tensor:
    indices, wanted = batch(step)
    return nn.functional.mse_loss(model(indices[worker::of]), wanted[worker::of])


def alone(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The table and the weights of the head, of one process on the whole batch."""
    model = Model()
    each = optimizers(kind, model)
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns where nobody says
        train(model, each)
    return model.table.weight.detach(), model.head.weight.detach()


def train(model: Model, each: Optimizers) -> None:
    for step in range(STEPS):
        for optimizer in each:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.95
        loss_of(model, step).backward()
        for optimizer in each:
            optimizer.step()


@pytest.fixture
def of_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(session, "of_run", lambda: True)
    yield
    monkeypatch.undo()


def script(kind: str, worker: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = Model()
    assert sum(p.numel() for p in model.table.parameters()) == 0, "no worker holds the table"
    each = optimizers(kind, model)
    optimizer = DistributedOptimizer(each if len(each) > 1 else each[0], model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.95
        loss_of(model, step, worker, of).backward()
        model.table.prefetch(batch(step + 1)[0][worker::of])
        optimizer.step()
    with optimizer.shared(), torch.no_grad():
        whole = model.table(torch.arange(ROWS))
        head = model.head.weight.clone()
    optimizer.finish()
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        model(batch(0)[0])
    return whole, head


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("push", ["gradient", "update"])
def test_bsp_is_one_process_on_the_whole_batch(kind: str, push: str, of_run: None, monkeypatch: Any) -> None:
    with run(Settings(sync="bsp", push=push, workers=2, shards=3)) as started:
        results = started.together(lambda worker: script(kind, worker, 2))
    monkeypatch.undo()
    table, head = alone(kind)
    for whole, own in results:
        assert torch.allclose(whole, table, atol=2e-6)
        assert torch.allclose(own, head, atol=2e-6)
