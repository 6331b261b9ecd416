"""The first runs of a campaign, as `bench/faults/simulate.py --campaign` does them."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.actors import Kit
from simulation.run_kinds import KINDS, mixed, shares

EACH = 20  # runs of one test: a failure names its seed, and the time limit is per test
# Fifty of a campaign; of kinds whose fault is rare or that take little time, as many as have it.
RUNS = shares(50) | {"gossips": 6, "standbys": 8, "pairs": 2}
LINKS = {"lost": 0.9, "duplicated": 0.9, "reordered": 0.9}
# Faults, and how many runs of the kind have each at least.
STRUCK = {
    "runs": LINKS | {"worker crashed": 0.9, "cuts": 0.1},
    "restarts": LINKS | {"worker crashed": 0.9, "shard restarted": 0.8},
    "kills": LINKS | {"worker crashed": 0.9, "shard killed": 0.6},
    "trees": LINKS | {"worker crashed": 0.9, "worker restarted": 0.9, "cuts": 0.2},
    "felled": LINKS | {"shard killed": 0.7},
    "gossips": {"lost": 0.1, "duplicated": 0.3, "reordered": 0.1, "worker crashed": 0.1},
    "standbys": {"took over": 0.1},
    "pairs": {"took over": 0.5},
    "moves": LINKS | {"keys moved": 0.5},
    "starts": LINKS | {"start over": 0.9},
}


@pytest.mark.parametrize(("kind", "first", "count"), mixed(RUNS, EACH))
def test_every_invariant_holds(kind: str, first: int, count: int) -> None:
    runs = [KINDS[kind].make(seed, Kit(), None) for seed in range(first, first + count)]
    struck = Counter[str]()
    for run in runs:
        run.run()
        struck.update(fault for fault, times in run.sim.struck.items() if times)
    assert all(struck[fault] >= least * count for fault, least in STRUCK[kind].items()), struck


def test_a_campaign_has_all_kinds_from_the_beginning() -> None:
    pieces = mixed(shares(100), EACH)
    assert {kind for kind, *_ in pieces[: len(KINDS)]} == {*KINDS}
    for kind, total in shares(100).items():
        seeds = [seed for of, first, count in pieces if of == kind for seed in range(first, first + count)]
        assert seeds == list(range(total))
    assert sum(shares(100).values()) == 100
