"""Decentralized SGD in one loop: the reference of a run in which workers or clusters gossip."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kit.scripts import Array, build, flat, loss_of
from narrows.compression.sampling import gossip_sample
from narrows.protocols.config.topology import edges
from narrows.protocols.gossip.gain import SMOOTHING, WINDOW

Matrix = npt.NDArray[np.float64]


def matrix(topology: str, number: int, count: int) -> Matrix:
    """Return the mixing matrix of one round, float64[count, count]. All references here use it."""
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


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)


class Gains:
    """The gains of all workers, from the sums that partners exchange: the reference of protocols/gossip/gain.py."""

    def __init__(self, count: int, size: int, degree: float) -> None:
        self.degree, self.at = degree, gossip_sample(size)
        self.made: list[Matrix] = []
        self.common: list[float | None] = [None] * count
        self.knows: set[tuple[int, int]] = set()  # (sender, receiver) of sums of the newest window

    def factors(self) -> Matrix:
        """Return the gain of each worker, float64[count, 1]."""
        count = len(self.common)
        share = [min(max(c, 0.0), 1.0) if c is not None else 1.0 for c in self.common]
        return np.array([[(c + (1 - c) / count) ** (-(1 - self.degree) / 2)] for c in share])

    def took(self, moved: Matrix) -> None:
        self.made.append(moved[:, self.at])
        if len(self.made) % WINDOW == 0:
            self.knows.clear()

    @property
    def sums(self) -> Matrix:
        """The sums over the newest whole window."""
        whole = len(self.made) // WINDOW * WINDOW
        total: Matrix = np.sum(self.made[whole - WINDOW : whole], axis=0)
        return total

    def told(self, topology: str, number: int) -> dict[tuple[int, int], Matrix]:
        """Return the sums that workers send in this round, by (sender, receiver)."""
        pairs = {pair for a, b, _ in edges(topology, number, range(len(self.common))) for pair in ((a, b), (b, a))}
        told = {pair: self.sums[pair[0]] for pair in pairs - self.knows if len(self.made) >= WINDOW}
        self.knows |= told.keys()
        return told

    def heard(self, told: dict[tuple[int, int], Matrix]) -> None:
        for (_, worker), theirs in sorted(told.items(), key=lambda each: each[0]):
            mine = self.sums[worker]
            common = float(2 * (mine @ theirs) / (mine @ mine + theirs @ theirs))
            before = self.common[worker]
            self.common[worker] = common if before is None else SMOOTHING * before + (1 - SMOOTHING) * common


def reference(
    topology: str,
    count: int,
    bound: int,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    degree: float = 1.0,
    steps: int = STEPS,
    outer: tuple[float, float] = (1.0, 0.0),
) -> Array:
    """Train all workers of D-SGD, or with another optimizer, in one loop, with float32 models.

    outer: rate and momentum of an outer optimizer.
    """
    nets = [build() for _ in range(count)]
    optimizers = [make(net) for net in nets]
    x = np.stack([flat(net) for net in nets]).astype(np.float64)
    late, velocity = np.zeros_like(x), np.zeros_like(x)
    gains, telling = Gains(count, x.shape[1], degree), dict[tuple[int, int], Matrix]()
    for step in range(steps):
        for worker, net in enumerate(nets):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(x[worker].astype(np.float32)), net.parameters())
            optimizers[worker].zero_grad()
            loss_of(net, step, worker, count).backward()
            optimizers[worker].step()
        moved = np.stack([flat(net) for net in nets]).astype(np.float64) - x.astype(np.float32)
        scaled = gains.factors() * moved
        velocity = outer[1] * velocity + scaled
        x = x + outer[0] * (scaled + outer[1] * velocity) + late
        gains.took(moved)
        if bound:
            gains.heard(telling)
        telling = gains.told(topology, step)
        if not bound:
            gains.heard(telling)
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
