"""Hyper-parameters of pushed gradients: one member's lead nobody astray, and no honest schedule is touched."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import store_of
from kit.scripts import Array, build, loss_of, run
from kit.seed import SEED

from narrows.protocols.config.settings import Settings
from narrows.protocols.wire import pack
from narrows.ps.shard.folding import FoldAtOnce
from narrows.ps.store.hyperparameter_vote import FAR, HyperparameterVote, most_agreed
from narrows.worker import DistributedOptimizer, clock, rank, world_size

STEPS = 8
USUAL: dict[str, Any] = {
    "lr": 0.1,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "maximize": False,
    "foreach": None,
}
# A step of any of these leads the model away, at once or as soon as a gradient is 0.
LIES: tuple[dict[str, Any], ...] = (
    {"lr": 0.1 * FAR * 1.01},
    {"betas": [0.9999999, 0.999]},
    {"betas": [0.9, 0.0]},
    {"eps": 0.0},
    {"weight_decay": 10.0},
    {"maximize": True},
)
TOTAL = 400
SCHEDULES: dict[str, Callable[[int], dict[str, Any]]] = {
    "warm-up from 0": lambda at: {"lr": 0.1 * min(at, 300) / 300},
    "cosine to 0": lambda at: {"lr": 0.05 * (1 + math.cos(math.pi * min(at, TOTAL) / TOTAL))},
    "warm restarts": lambda at: {"lr": 0.05 * (1 + math.cos(math.pi * (at % 50) / 50))},
    "steps": lambda at: {"lr": 0.1 * 0.1 ** (at // 100)},
    "one cycle": lambda at: {
        "lr": 1e-4 + 0.1 * math.sin(math.pi * at / TOTAL),
        "betas": [0.95 - 0.1 * math.sin(math.pi * at / TOTAL), 0.999],
    },
    "a decay of weights that grows": lambda at: {"weight_decay": 0.04 + 0.36 * at / TOTAL},
}


def said(**changes: Any) -> bytes:
    return pack([USUAL | changes])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("workers", "apart"), [(2, 1), (2, 16), (4, 2), (5, 64)])
def test_an_honest_schedule_is_never_touched(name: str, workers: int, apart: int) -> None:
    """Members are so many clocks apart at most, and go on in any order."""
    rng = random.Random(f"{SEED} {name} {workers} {apart}")
    print(f"NARROWS_TEST_SEED={SEED}")
    clocks, hypers = [0] * workers, HyperparameterVote()
    while min(clocks) < TOTAL:
        worker = rng.choice([each for each in range(workers) if clocks[each] < min(clocks) + apart])
        own = said(**SCHEDULES[name](clocks[worker]))
        assert hypers.hold(worker, own) == own
        clocks[worker] += 1


@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("others", [1, 3])
def test_one_member_is_not_followed(lie: dict[str, Any], others: int) -> None:
    hypers = HyperparameterVote()
    for worker in range(1, 1 + others):
        assert hypers.hold(worker, said()) == said()
    for _ in range(3):
        assert hypers.hold(9, said(**lie)) in (said(), said(lr=0.05))
        assert hypers.hold(1, said(lr=0.05)) == said(lr=0.05), "the others go on"


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_at_a_barrier_those_hold_that_most_agree_with(lie: dict[str, Any]) -> None:
    assert most_agreed([said(**lie), said(), said()]) == 1
    assert most_agreed([said(), said(**lie), said(lr=0.2)]) == 0
    assert most_agreed([said(lr=0.2), said(), said(lr=0.3)]) == 0, "all agree: the longest-standing member's"
    assert most_agreed([said(lr=1e6), said()]) == 1, "of two that differ, the smaller rate"


def script(worker: int, lies: Callable[[], bool]) -> None:
    net = build()
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e6 if lies() else 1e-2
        optimizer.zero_grad()
        loss_of(net, step, rank(), world_size()).backward()
        optimizer.step()
    optimizer.finish()


def ended(settings: Settings, lies: Callable[[], bool]) -> tuple[Array, set[int]]:
    """The model of a run, and whose updates were stepped with others' hyper-parameters."""
    struck: set[int] = set()
    pieces = []
    with run(settings) as started:
        started.together(lambda worker: script(worker, lies))
        for server in started.cluster.servers:
            planned = server.shard.model_shard
            assert planned is not None
            pieces.append(store_of(server).x)
            struck |= planned.folding.hypers.struck if isinstance(planned.folding, FoldAtOnce) else set()
    return np.concatenate(pieces), struck


def test_a_rate_of_a_million_costs_nothing_at_a_barrier() -> None:
    """The liar is the longest-standing member."""
    settings = Settings(sync="bsp", workers=3, shards=2)
    honest, _ = ended(settings, lambda: False)
    assert np.array_equal(ended(settings, lambda: rank() == 0)[0], honest)


def test_a_rate_of_a_million_is_not_followed_where_gradients_are_folded_at_once() -> None:
    """From clock 2 on the others have said theirs."""
    settings = Settings(sync="ssp", push="gradient", workers=3)
    assert ended(settings, lambda: False)[1] == set()
    x, struck = ended(settings, lambda: rank() == 2 and clock() >= 2)
    assert np.abs(x).max() < 10 and struck == {2}
