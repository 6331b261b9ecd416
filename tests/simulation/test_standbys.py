"""A standby and its server under every fault: nothing that a member was told is lost, and there is one server."""

from __future__ import annotations

from collections import Counter

from simulation.standbys import Theatre

RUNS = 60


def test_nothing_is_lost_and_one_serves() -> None:
    struck: Counter[str] = Counter()
    for seed in range(RUNS):
        struck += Theatre(seed).run().sim.struck
    assert (
        min(struck[what] for what in ("took over", "alone", "moved", "machine lost", "process killed", "cuts")) > 5
    ), struck
