"""A run in one process, one of whose workers lies: it trains as the others do, and other values leave it. No check of its own
sees them, as those of a member with other code would not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
    """How far `net` is from a linear teacher, with noise, on rows that nobody else has."""
    rng = np.random.default_rng((step, worker))
    teacher = np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS))
    x = rng.standard_normal((ROWS, INPUTS))
    y = x @ teacher + rng.standard_normal((ROWS, OUTPUTS))
    return nn.functional.mse_loss(net(torch.from_numpy(x).float()), torch.from_numpy(y).float())


class Problem(NamedTuple):
    """`loss_of`: of a net at a step, of one worker's share of the rows. `held_out`: the steps that a model is judged at."""

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
    """From now on the updates of this worker leave it so many times as long."""
    assert optimizer._engine is not None
    link: Any = cast(Any, optimizer._engine.link)
    say = link.say

    def altered(message: m.Message) -> m.Message:
        if not isinstance(message, m.Push) or not message.samples:
            return message
        assert message.codec == RAW
        with np.errstate(over="ignore", invalid="ignore"):
            return replace(message, payload=(np.frombuffer(message.payload, np.float32) * np.float32(times)).tobytes())

    def lying(shard: int, messages: Sequence[m.Message]) -> None:
        say(shard, [altered(each) for each in messages])

    link.say = lying


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
    """The model of a run whose liar sends so many times its update, from a step on, and how many updates of each worker were
    changed."""
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
