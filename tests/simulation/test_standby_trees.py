"""Trees whose root and clusters have standbys, under faults: nothing is lost on either level, and nobody joins again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from narrows.protocols.effects import NS, Send
from narrows.protocols.messages import name_of
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.members import Members
from narrows.ps.parent.parent_link import ParentSeat, ParentSession
from simulation.bug_hunt import hunt
from simulation.mirror import Violation
from simulation.standby_trees import House, PairCase, Pairs, Serving, Strike, fenced, pair_case

RUNS = 10
QUIET, FENCED = 4, 2
PLANTED_RUNS = 150  # within so many a planted bug is found


def test_nothing_is_lost_on_either_level() -> None:
    struck: Counter[str] = Counter()
    for seed in range(RUNS):
        struck += Pairs(pair_case(seed)).run().sim.struck
    assert min(struck[what] for what in ("root lost", "cluster lost", "shard killed", "cuts", "lost", "turned")) > 1, (
        struck
    )


def test_where_machines_alone_are_lost_each_has_its_standby() -> None:
    lost = 0
    for seed in range(QUIET):
        struck = Pairs(pair_case(seed, quiet=True)).run().sim.struck
        lost += struck["root lost"] + struck["cluster lost"]
        assert struck["took over"] == struck["root lost"] + struck["cluster lost"] and not struck["deposed"]
    assert lost > QUIET // 2


@pytest.mark.parametrize("seed", [30337, 33299, 37501, 37981])
def test_what_the_campaign_found(seed: int) -> None:
    """30337: a shard was killed in the event in which it took over, and once more (the simulator's fault). 33299: another
    standby came while one was lost, and shards took each its own for whole. 37501, 37981: a shard 0 that had just taken over
    was killed, and knew neither its other shards nor in whose place it served."""
    Pairs(pair_case(seed)).run()


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_server_that_has_gone_on_alone_may_hang(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members had voted for it, and did not know that it was elected: they turned to the standby that was lost."""
    stands_by = House._stand_by
    monkeypatch.setattr(House, "_stand_by", lambda node: stands_by(node) if len(node.sites) == 1 else None)
    pairs = Pairs(replace(pair_case(seed, quiet=True), paired=("root",), strikes=(Strike("standby", "root", 2 * NS),)))
    root = pairs.root
    assert isinstance(root, House)

    def hangs() -> None:
        assert not root.over
        for shard in root.serving.shards.values():
            assert isinstance(shard, Serving)
            shard.stop(3 * NS)

    pairs.sim.at(9 * NS, hangs)
    assert pairs.run().sim.struck["alone"] == 1


def test_a_server_that_lives_on_does_no_harm_above() -> None:
    for seed in range(FENCED):
        struck = Pairs(fenced(seed)).run().sim.struck
        assert struck["took over"] == 1 == struck["deposed"]


# Planted bugs: what guards this, taken out.


def ungated(serving: Serving) -> None:
    """Messages go up before the standby has their cause."""
    for row in [row for row in serving.held if isinstance(row[1], Send) and isinstance(row[1].peer, int)]:
        serving.held.remove(row)
        serving.site.lets_out(serving.index, row[0])
        serving._let_out(row[1])
    release(serving)


def elsewhere(place: ParentSeat, before: ParentSeat | None) -> bool:
    """A place at another server is taken as a new one."""
    return False


def forgets(coordinator: Coordinator, place: bytes, epoch: int, now_ns: int) -> Any:
    """The other shards do not hear where the server above is."""
    coordinator.parent_place.place = place
    return []


def impatient(roster: Members, peer: bytes, now_ns: int) -> None:
    """A cluster whose connection has ended is taken for dead, though it has a standby."""
    for seat in roster.run.seats.values():
        if seat.name == name_of(peer) and now_ns >= roster.dialled_ns:
            seat.cut_ns = seat.cut_ns or now_ns


def waits(seat: ParentSession, place: ParentSeat) -> bool:
    """Messages that were under way to the server before are not said again, at once or later."""
    seat.place = place
    seat.session.pushes.clear()
    return False


release = Serving._release
PLANTED: dict[str, tuple[type, str, Any, str]] = {
    "sent up before the standby has the cause": (
        Serving,
        "_release",
        ungated,
        "has told of|has not given|is another one",
    ),
    "a place is taken again at the standby": (ParentSeat, "turned", elsewhere, "not ended|blames|after"),
    "shards are not told of the standby above": (Coordinator, "turned_above", forgets, "not ended"),
    "a cluster with a standby is taken for dead": (Members, "unreached", impatient, "joined again"),
    "what was under way is forgotten": (ParentSession, "turn", waits, "not ended|lacks"),
}


def hunted(number: int) -> PairCase:
    return pair_case(number - 1, quiet=number % 2 == 1) if number else fenced(0)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *where, complaint = PLANTED[bug]
    monkeypatch.setattr(*where)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda number: Pairs(hunted(number)).run(), PLANTED_RUNS, complaint)
