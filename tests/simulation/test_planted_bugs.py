"""Bugs that are planted in a campaign: each is found by that one of its first thousand runs which `FOUND` names."""

from __future__ import annotations

import pytest

from simulation.planted_bugs import WITHIN, says
from simulation.run_kinds import mixed, shares

# bug -> the run of the campaign that finds it first, its seed and kind
FOUND = {
    "an ack before the standby has the update": (107, 8, "standbys"),
    "a dedupe entry not copied": (38, 2, "felled"),
    "a server that needs no votes": (107, 8, "standbys"),
    "a standby that needs no votes": (969, 77, "standbys"),
    "keys with two shards": (9, 0, "moves"),
    "an update folded on both sides": (9, 0, "moves"),
    "a replayed update folded twice": (3, 0, "kills"),
    "an effect sent before its event is written": (5, 0, "felled"),
    "an event of the journal lost": (3, 0, "kills"),
    "an identity unchecked": (16, 1, "restarts"),
    "an epoch unchecked": (9, 0, "moves"),
    "an epoch reused by a new life of shard 0": (16, 1, "restarts"),
    "a dedupe entry dropped": (1, 0, "runs"),
    "the bound off by one": (1, 0, "runs"),
    "a barrier closed one early": (1, 0, "runs"),
    "an update taken in part": (1, 0, "runs"),
    "a checkpoint that not all shards have": (2, 0, "restarts"),
    "a checkpoint altered and not noticed": (78, 6, "restarts"),
    "a jump of a clock taken for silence": (12, 2, "runs"),
    "a cluster folds twice, in a tree": (5, 0, "felled"),
    "updates go up twice, in a tree": (4, 0, "trees"),
    "a range done when its update is held": (21, 5, "runs"),
    "a dead worker's range kept": (45, 3, "moves"),
    "a dead worker's range handed out at once": (21, 5, "runs"),
    "ranges that a restart forgets": (145, 11, "moves"),
    "the last clock of a start closes before all know": (33, 1, "starts"),
    "workers are not told to take over": (10, 0, "starts"),
    "a start that is not begun again": (60, 2, "starts"),
}


@pytest.mark.parametrize("bug", FOUND)
def test_a_campaign_finds_it(bug: str) -> None:
    run, seed, kind = FOUND[bug]
    assert mixed(shares(WITHIN))[run - 1][:2] == (kind, seed)
    assert says(bug, kind, seed)


def test_there_are_as_many_as_is_said() -> None:
    assert len(FOUND) == 28
