"""A run in one process with a lying worker: it trains as the others do, but pushes other values.

Its own checks do not see the false values, just as those of a member with other code would not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from kit import scripts
from kit.in_process import store_of
from kit.scripts import Array, flat, run, seeded
from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.worker import DistributedOptimizer, rank, world_size

STEPS = 24
LIAR = 2
HELD_OUT = range(1000, 1010)  # steps that no run comes to
INPUTS, OUTPUTS, ROWS = 64, 8, 32


def linear() -> nn.Module:
    return seeded(lambda: nn.Linear(INPUTS, OUTPUTS))


def taught(net: nn.Module, step: int, worker: int = 0, workers: int = 1) -> Tensor:
    """Return the loss of `net` against a linear teacher with noise, on rows that no other worker has."""
    x, y = lesson(step, worker)
    return nn.functional.mse_loss(net(x), y)


@cache
def lesson(step: int, worker: int) -> tuple[Tensor, Tensor]:
    """Return rows and what the teacher says of them, with noise."""
    rng = np.random.default_rng((step, worker))
    teacher = np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS))
    x = rng.standard_normal((ROWS, INPUTS))
    y = x @ teacher + rng.standard_normal((ROWS, OUTPUTS))
    return torch.from_numpy(x).float(), torch.from_numpy(y).float()


class Problem(NamedTuple):
    """A training problem.

    loss_of: the loss of a net at a step, on one worker's share of the rows. held_out: the steps on which a model is
    evaluated.
    """

    build: Callable[[], nn.Module]
    loss_of: Callable[..., Tensor]
    held_out: range

    def loss(self, x: Array) -> float:
        net = self.build()
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x.copy()), net.parameters())
        with torch.no_grad():
            return float(np.mean([self.loss_of(net, step).item() for step in self.held_out]))

    @property
    def begun(self) -> float:
        """The loss before the first step."""
        return self.loss(flat(self.build()))


NOISY = Problem(scripts.build, scripts.loss_of, range(STEPS))  # workers have next to nothing in common
TAUGHT = Problem(linear, taught, HELD_OUT)  # workers agree


def lie(optimizer: DistributedOptimizer, times: float) -> None:
    """Multiply all later pushes of this worker by `times`."""
    assert optimizer._engine is not None
    link: Any = cast(Any, optimizer._engine.link)
    say = link.send

    def altered(message: m.Message) -> m.Message:
        if not isinstance(message, m.Push) or not message.samples:
            return message
        assert message.codec == RAW
        with np.errstate(over="ignore", invalid="ignore"):
            return replace(message, payload=(np.frombuffer(message.payload, np.float32) * np.float32(times)).tobytes())

    def lying(shard: int, messages: Sequence[m.Message]) -> None:
        say(shard, [altered(each) for each in messages])

    link.send = lying


def script(worker: int, problem: Problem, times: float, steps: int, samples: int, since: int) -> None:
    net = problem.build()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for step in range(steps):
        if rank() == LIAR and step == since:
            lie(optimizer, times)
        optimizer.zero_grad()
        problem.loss_of(net, step, rank(), world_size()).backward()
        optimizer.step_samples(samples if rank() == LIAR else ROWS)
        optimizer.step()
    optimizer.finish()


def ended(
    settings: Settings, problem: Problem, times: float, steps: int = STEPS, samples: int = ROWS, since: int = 0
) -> tuple[Array, dict[int, int]]:
    """Run with a liar that pushes `times` its update from step `since` on.

    Returns:
        The model, and the number of updates of each worker that filters changed.
    """
    with run(settings) as started:
        started.together(partial(script, problem=problem, times=times, steps=steps, samples=samples, since=since))
        struck: Counter[int] = Counter()
        pieces = []
        for server in started.cluster.servers:
            store, planned = store_of(server), server.shard.model_shard
            assert planned is not None
            pieces.append(store.x)
            for struck_by in (planned.filters.void, *(check.struck for check in planned.filters.checks)):
                struck += struck_by
        return np.concatenate(pieces), dict(struck)
