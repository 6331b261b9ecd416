"""Bugs that are planted, and how soon a campaign finds each: a guard is taken out of a machine, and the runs of a campaign go
by in its order until one fails.

    find("keys with two shards")        the run that finds it; None: none of the first WITHIN

The tests of each kind have most of them, each with the invariant that must fail. Those of a standby and of its copies that no
such test has are here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from narrows.ps.replication.replication_primary import ReplicationPrimary
from narrows.ps.shard.push_assembler import PushSequence
from simulation import (
    test_campaigns,
    test_replans,
    test_resharding,
    test_sample_ranges,
    test_shard_kills,
    test_standbys,
    test_starts,
    test_trees,
)
from simulation.actors import Bug, planted
from simulation.run_kinds import KINDS, mixed, shares

WITHIN = 1000  # runs of a campaign


class Found(NamedTuple):
    """By the campaign's run of this number, from 1 on."""

    run: int
    kind: str
    seed: int
    says: str


def not_held(original: ReplicationPrimary) -> bool:
    """The effects of an event are sent at once, acks too, though the standby lacks the event."""
    return False


def lags(seat: PushSequence) -> Any:
    """A machine that is copied knows all but the newest update of each member: that one counts as new when it comes again."""
    values = {name: getattr(seat, name) for name in PushSequence.__slots__}
    return None, values | {"clock": max(seat.clock - 1, seat.taken, 0)}


COPIES: dict[str, Bug] = {
    "an ack before the standby has the update": [(ReplicationPrimary, "holds", property(not_held))],
    "a dedupe entry not copied": [(PushSequence, "__getstate__", lags)],
}
PLANTED: dict[str, Bug] = (
    COPIES
    | {bug: row[0] for bug, row in test_campaigns.PLANTED.items()}
    | {bug: row[0] for bug, row in test_shard_kills.PLANTED.items()}
    | {bug: row[0] for bug, row in test_resharding.PLANTED.items()}
    | {bug: row[0] for bug, row in test_sample_ranges.PLANTED.items()}
    | {bug: row[0] for bug, row in test_replans.PLANTED.items()}
    | {bug: row[0] for bug, row in test_starts.PLANTED.items()}
    | {bug: [row] for bug, row in test_standbys.PLANTED.items()}
    | {f"{bug}, in a tree": row[0] for bug, row in test_trees.PLANTED.items()}
)

# Bugs of what only these runs have: no other run can find them.
OF_STANDBYS = {"an ack before the standby has the update", *test_standbys.PLANTED}


def says(bug: str, kind: str, seed: int) -> str:
    """The failure of this run with this bug, "" where nothing fails."""
    with pytest.MonkeyPatch.context() as patch:
        kit = planted(PLANTED[bug], patch)
        try:
            KINDS[kind].make(seed, kit, None).run()
        except Exception as error:  # a bug may break a machine before it breaks an invariant
            return f"{error}".partition(": ")[2] or f"{error!r}"
    return ""


def find(bug: str, within: int = WITHIN) -> Found | None:
    """The first run of a campaign that fails with this bug."""
    for number, (kind, seed, _) in enumerate(mixed(shares(within)), 1):
        if (bug not in OF_STANDBYS or kind == "standbys") and (text := says(bug, kind, seed)):
            return Found(number, kind, seed, text)
    return None
