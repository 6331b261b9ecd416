"""--max-update-norm: one member that sends what is far too long, or no number, does not take the run with it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import store_of
from kit.scripts import Array, build, flat, loss_of, run

from narrows.protocols.errors import UsageError
from narrows.protocols.settings import Settings
from narrows.ps.limit import FIRST, RECENT, Limit
from narrows.worker import DistributedOptimizer, rank, world_size

STEPS = 24
WORKERS = 4
LIAR = 2


def reference(lengths: list[float], most: float) -> list[float]:
    """By what each update is scaled that is folded as it comes: the rule, at its slowest. The weights are 1 long."""
    kept: list[float] = []
    factors = []
    for length in lengths:
        usual = float(np.median(kept[-RECENT:])) if len(kept) >= 2 else FIRST
        factor = 0.0 if not np.isfinite(length) else min(1.0, most * usual / length)
        factors.append(factor)
        kept += [length * factor] if factor else []
    return factors


def test_the_rule_is_that_of_the_page() -> None:
    rng = np.random.default_rng(0)
    lengths = [float(x) for x in 0.05 * rng.lognormal(0, 1, 300)]
    lengths[5], lengths[50], lengths[200] = 1e9, float("nan"), float("inf")
    limit = Limit(0, 2.0, lambda update: lengths[int(str(update))], lambda: 1.0)
    found = [limit.factors([(number % 3, number, number)])[0] for number in range(len(lengths))]
    np.testing.assert_allclose(found, reference(lengths, 2.0), rtol=1e-12)
    assert len(limit.take()) == 3, "the first of each worker"
    assert sum(limit.struck.values()) == sum(factor != 1 for factor in found)


def test_a_set_is_looked_at_together() -> None:
    """The first clock too, when nothing is known yet."""
    lengths = [1.0, 1.1, 1e6, 0.9]
    limit = Limit(0, 3.0, lambda update: lengths[int(str(update))], lambda: 1.0)
    found = limit.factors([(worker, 0, worker) for worker in range(4)])
    assert found[:2] == [1.0, 1.0] and found[3] == 1.0 and found[2] == pytest.approx(3 * 1.05 / 1e6)
    assert Limit(0, 0.0, lambda update: 1e9, lambda: 1.0).factors([(0, 0, 0)]) == [1.0], "no limit is none"


def script(worker: int, times: float) -> Array:
    net = build()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, rank(), world_size()).backward()
        if rank() == LIAR:
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad *= times
        optimizer.step()
    optimizer.finish()
    return flat(net)


def loss(x: Array) -> float:
    net = build()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(x.copy()), net.parameters())
    with torch.no_grad():
        return float(np.mean([loss_of(net, step).item() for step in range(STEPS)]))


def ended(settings: Settings, times: float) -> tuple[Array, dict[int, int]]:
    """The model of a run with a liar, and how often each worker was struck."""
    with run(settings) as started:
        started.together(partial(script, times=times))
        struck: Counter[int] = Counter()
        pieces = []
        for server in started.cluster.servers:
            store, planned = store_of(server), server.shard.planned
            assert store is not None and planned is not None
            pieces.append(store.x)
            struck += planned.limit.struck
        return np.concatenate(pieces), dict(struck)


@pytest.mark.parametrize("flags", [
    {"sync": "bsp"},
    {"sync": "bsp", "push": "update", "update_gain": 1.0},
    {"sync": "bsp", "shards": 2},
    {"sync": "ssp", "staleness": 1, "update_gain": 1.0, "look_ahead": 0.0},
    {"sync": "ssp", "push": "gradient"},
    {"sync": "local", "local_steps": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("times", [1e6, float("nan")])
def test_a_liar_costs_its_own_share_and_no_more(flags: dict[str, Any], times: float) -> None:
    settings = Settings(workers=WORKERS, **flags)
    honest, _ = ended(settings, 1.0)
    x, struck = ended(Settings(workers=WORKERS, max_update_norm=2.0, **flags), times)
    assert np.isfinite(x).all() and struck[LIAR] >= 4
    assert sum(struck.values()) - struck[LIAR] <= WORKERS * settings.shards * settings.shards, (
        "honest workers are let alone, but for a clock in which all change"
    )
    begun = loss(flat(build()))
    assert loss(x) - loss(honest) < 0.35 * (begun - loss(honest)), "it is one of four, and pulls where it likes"
    if np.isfinite(times) and flags["sync"] == "bsp":
        without, _ = ended(settings, times)
        assert not np.abs(without).max() < 100, "the limit is what holds it"


def test_a_limit_that_makes_no_sense_is_refused() -> None:
    for flags, text in (
        ({"max_update_norm": 0.5}, "--max-update-norm 0.5: give a value from 1"),
        ({"max_update_norm": 5.0, "sync": "gossip"}, "--max-update-norm: under --sync gossip no update goes"),
        ({"max_update_norm": 5.0, "sync": "local", "fragments": 2}, "--max-update-norm: fragments differ in length"),
    ):
        with pytest.raises(UsageError, match=text):
            Settings(**flags).validated()
