"""Decentralized SGD in one loop: the reference of a run in which workers or clusters gossip."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kit.scripts import Array, build, flat, loss_of
from narrows.protocols.gossip.topology import edges

Matrix = npt.NDArray[np.float64]


def matrix(topology: str, number: int, count: int) -> Matrix:
    """The mixing matrix of one round, float64[count, count]: the reference of all below."""
    w = np.eye(count)
    for a, b, weight in edges(topology, number, range(count)):
        w[a, a] -= weight
        w[b, b] -= weight
        w[a, b] += weight
        w[b, a] += weight
    return w


STEPS = 12


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def reference(topology: str, count: int, bound: int) -> Array:
    """All workers of D-SGD in one loop, float32 models."""
    nets = [build() for _ in range(count)]
    x = np.stack([flat(net) for net in nets]).astype(np.float64)
    late = np.zeros_like(x)
    for step in range(STEPS):
        for worker, net in enumerate(nets):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(x[worker].astype(np.float32)), net.parameters())
            optimizer = sgd(net)
            optimizer.zero_grad()
            loss_of(net, step, worker, count).backward()
            optimizer.step()
        moved = np.stack([flat(net) for net in nets])
        x = x + (moved - x.astype(np.float32)) + late
        mixed = matrix(topology, step, count) @ x - x
        x, late = (x + mixed, late) if bound == 0 else (x, mixed)
    mean: Array = (x + late).mean(0).astype(np.float32)
    return mean


TRAINS = """
import sys, time, torch
from narrows.worker import DistributedOptimizer, rank, step_count
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
while step_count() < 60:
    torch.manual_seed(1000 * rank() + step_count())
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step_count() == 10: print("trains", rank(), flush=True)
optimizer.finish()
print("ends", model.weight.flatten().tolist(), flush=True)
"""


def ends(text: str) -> set[str]:
    return {line for line in text.splitlines() if line.startswith("ends")}
