"""--max-update-norm: one member that sends what is far too long, or no number, does not take the run with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit.lying_worker import LIAR, NOISY, ended

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.ps.filters.norm_clip import FIRST, RECENT, NormClip
from narrows.ps.filters.update_sample import UpdateSample

WORKERS = 4


def reference(lengths: list[float], most: float) -> list[float]:
    """By what each update is scaled that is folded as it comes: the rule, at its slowest. The weights are 1 long."""
    kept: list[float] = []
    factors = []
    for length in lengths:
        usual = float(np.median(kept[-RECENT:])) if len(kept) >= 2 else FIRST
        factors.append(1.0 if length <= most * usual else usual / length)
        kept.append(min(length, most * usual))
    return factors


def look(worker: int, length: float, clock: int = 0) -> UpdateSample:
    return UpdateSample(worker, clock, length, np.zeros(1, np.float32))


def test_the_rule_is_that_of_the_page() -> None:
    rng = np.random.default_rng(0)
    lengths = [float(x) for x in 0.05 * rng.lognormal(0, 1, 300)]
    lengths[5] = lengths[50] = lengths[200] = 1e9
    limit = NormClip(0, 2.0, lambda: 1.0)
    found = [limit.factors([look(number % 3, length, number)])[0] for number, length in enumerate(lengths)]
    np.testing.assert_allclose(found, reference(lengths, 2.0), rtol=1e-12)
    assert len(limit.logs) == 3, "the first of each worker"
    assert sum(limit.struck.values()) == sum(factor != 1 for factor in found)


def test_a_set_is_looked_at_together() -> None:
    """The first clock too, when nothing is known yet."""
    limit = NormClip(0, 3.0, lambda: 1.0)
    found = limit.factors([look(worker, length) for worker, length in enumerate([1.0, 1.1, 1e6, 0.9])])
    assert found[:2] == [1.0, 1.0] and found[3] == 1.0 and found[2] == pytest.approx(1.05 / 1e6)
    assert limit.factors([]) == []


def test_a_run_whose_updates_all_grow_goes_on() -> None:
    limit = NormClip(0, 2.0, lambda: 1.0)
    found = [limit.factors([look(0, 0.1 if number < RECENT else 10.0)])[0] for number in range(6 * RECENT)]
    assert found[RECENT] == pytest.approx(0.01) and found[-1] == 1.0


@pytest.mark.parametrize("flags", [
    {"sync": "bsp", "shards": 2},
    {"sync": "bsp", "push": "update", "update_gain": 1.0},
    {"sync": "ssp", "staleness": 1, "update_gain": 1.0, "look_ahead": 0.0},
    {"sync": "ssp", "push": "gradient"},
    {"sync": "local", "local_steps": 2},
], ids=str)  # fmt: skip
def test_a_liar_costs_its_own_share_and_no_more(flags: dict[str, Any]) -> None:
    settings = Settings(workers=WORKERS, **flags)
    honest, _ = ended(settings, NOISY, 1.0)
    for times in (1e6, float("nan")):
        x, struck = ended(Settings(workers=WORKERS, max_update_norm=2.0, **flags), NOISY, times)
        assert np.isfinite(x).all() and struck[LIAR] >= 4
        assert sum(struck.values()) - struck[LIAR] <= WORKERS * settings.shards * settings.shards, (
            "honest workers are let alone, but for a clock in which all change"
        )
        assert NOISY.loss(x) - NOISY.loss(honest) < 0.35 * (NOISY.begun - NOISY.loss(honest)), (
            "it is one of four, and pulls where it likes"
        )
    if flags["sync"] == "bsp":
        without, _ = ended(settings, NOISY, 1e6)
        assert not np.abs(without).max() < 100, "the limit is what holds it"


def test_a_limit_that_makes_no_sense_is_refused() -> None:
    for flags, text in (
        ({"max_update_norm": 0.5}, "--max-update-norm 0.5: give a value from 1"),
        ({"max_update_norm": 5.0, "sync": "gossip"}, "--max-update-norm: under --sync gossip no update goes"),
        (
            {"max_update_norm": 5.0, "sync": "local", "fragments": 2},
            "--max-update-norm: fragments differ, and are not compared",
        ),
    ):
        with pytest.raises(UsageError, match=text):
            Settings(**flags).validated()
