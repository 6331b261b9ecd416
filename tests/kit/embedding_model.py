"""A small model with an embedding table, its data, and its training in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from narrows.worker import Embedding

ROWS, DIM, BAG, BATCH = 61, 5, 3, 16
_seeding = threading.Lock()
Optimizers = list[torch.optim.Optimizer]


class Bags(nn.Module):
    """A bag of rows and a head."""

    def __init__(self) -> None:
        super().__init__()
        with _seeding:  # workers in threads have one generator
            torch.manual_seed(3)
            self.table = Embedding(ROWS, DIM, sparse=True)
            self.head = nn.Linear(DIM, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.squeeze(self.head(torch.tanh(self.table(indices).sum(1))), 1)


def _beside(table: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Callable[[Bags], Optimizers]:
    return lambda model: [torch.optim.SGD(model.head.parameters(), lr=0.1), table([model.table.weight])]


OPTIMIZERS: dict[str, Callable[[Bags], Optimizers]] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.3)],
    "Adagrad": _beside(lambda rows: torch.optim.Adagrad(rows, lr=0.2, initial_accumulator_value=0.01)),
    "SparseAdam": _beside(lambda rows: torch.optim.SparseAdam(rows, lr=0.05)),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(500 + step)
    indices = (torch.rand(BATCH, BAG, generator=generator) ** 3 * ROWS).long()  # some rows often, some hardly
    return indices, torch.randn(BATCH, generator=generator)


def loss_of(model: nn.Module, step: int, worker: int = 0, of: int = 1) -> torch.Tensor:
    indices, wanted = batch(step)
    return nn.functional.mse_loss(model(indices[worker::of]), wanted[worker::of])


def slower(optimizer: torch.optim.Optimizer) -> None:
    """Return a learning-rate schedule."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.95


def alone(kind: str, steps: int, scheduled: bool = True, lost: int = -1) -> Bags:
    """Train in one process on the whole batch, and return the model. Step `lost` does not update the parameters."""
    model = Bags()
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns where nobody says
        each = OPTIMIZERS[kind](model)
        for step in range(steps):
            for optimizer in each:
                optimizer.zero_grad()
                if scheduled:
                    slower(optimizer)
            torch.autograd.backward(loss_of(model, step))
            for optimizer in each if step != lost else ():
                optimizer.step()
    return model
