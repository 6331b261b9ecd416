"""A standby and its server under every fault: nothing that a member was told is lost, and there is one server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, MemberEffect, Send
from narrows.protocols.member.failover_view import FailoverView
from narrows.protocols.member.member import Member
from narrows.ps.replication import replication_stream
from narrows.ps.replication.replication_primary import ReplicationPrimary
from narrows.ps.replication.standby import Standby
from simulation.actors import PLANS
from simulation.bug_hunt import hunt
from simulation.mirror import Violation
from simulation.simulator import MS
from simulation.standbys import LEASE_S, Shard, Theatre

RUNS = 24
PLANTED_RUNS = 150  # within so many a planted bug is found


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box is small, and yet several parts."""
    monkeypatch.setattr(replication_stream, "PART_BYTES", 1024)


def test_nothing_is_lost_and_one_serves() -> None:
    struck: Counter[str] = Counter()
    for seed in range(RUNS):
        struck += Theatre(seed).run().sim.struck
    faults = ("took over", "alone", "moved", "machine lost", "process killed", "failed by itself", "cuts")
    assert min(struck[what] for what in faults) > 2, struck


def lose(theatre: Theatre, server: str) -> None:
    theatre.servers[server].end()


def part(theatre: Theatre, one: str, other: str) -> None:
    ours, theirs = ([shard.name for shard in theatre.servers[name].shards] for name in (one, other))
    for name in ours:
        for there in theirs:
            theatre.sim.cut(name, there, theatre.sim.now_ns + 10 * NS)


@pytest.mark.parametrize(("fault", "words"), [(lose, "a"), (lose, "b"), (part, "ab")])
def test_one_fault_delays_nobody_by_more_than_a_lease(fault: Callable[..., None], words: str) -> None:
    for seed in range(5):
        theatre = Theatre(seed, quiet=True)
        theatre.sim.at(10 * NS, fault, theatre, *words)
        theatre.run()
        assert not any(guest.failed for guest in theatre.guests)
        assert max(guest.stall_ns for guest in theatre.guests) < (LEASE_S + 1) * NS
        assert {guest.server for guest in theatre.guests} == {"b" if words == "a" else "a"}


@pytest.mark.parametrize("index", [0, 1])
def test_a_standby_copies_anew_what_begins_from_a_checkpoint(index: int) -> None:
    """A shard fails while it is being copied. Its standby needs no help, and can take over."""
    for seed in range(5):
        theatre = Theatre(seed, quiet=True)
        if index >= theatre.shards:
            continue

        def fail(theatre: Theatre = theatre) -> None:
            standby = theatre.servers["b"].shards[index].standby if "b" in theatre.servers else None
            if standby is not None and (standby.parts or standby.machine):
                theatre.servers["a"].fail(index)
            else:
                theatre.sim.at(theatre.sim.now_ns + MS, fail)

        theatre.sim.at(MS, fail)
        theatre.sim.at(20 * NS, lose, theatre, "a")
        theatre.run()
        assert theatre.sim.struck["failed by itself"] == 1
        assert {guest.server for guest in theatre.guests} == {"b"} and not any(guest.failed for guest in theatre.guests)


def contested() -> Theatre:
    """One of four members, w0, turns to the standby, hears the server again, and is asked by it. Then w1 turns too."""
    theatre = Theatre(2, quiet=True)
    assert len(theatre.guests) == 4
    cuts = [("b", 30), ("w0", 3.2), ("w1", 30)]

    def cut() -> None:
        sim, ends = theatre.sim, {name: [shard.name for shard in each.shards] for name, each in theatre.servers.items()}
        for other, seconds in cuts:
            for one in ends["a"]:
                for there in ends.get(other, [other]):
                    sim.cut(one, there, sim.now_ns + int(seconds * NS))
        for one in ends["b"]:
            sim.cut(one, "w1", sim.now_ns + 6 * NS)

    theatre.sim.at(10 * NS, cut)
    return theatre


def parted() -> Theatre:
    """The standby hears nothing of the server for a while, and nor does one of four members."""
    theatre = Theatre(2, quiet=True)

    def cut() -> None:
        sim, (one, other) = theatre.sim, [[shard.name for shard in theatre.servers[name].shards] for name in "ab"]
        for ours in one:
            for theirs in (*other, "w0"):
                sim.cut(ours, theirs, sim.now_ns + 6 * NS)

    theatre.sim.at(10 * NS, cut)
    return theatre


def halved() -> Theatre:
    """Two of four members and the standby are cut off from the server for long, the others from the standby for a while."""
    theatre = Theatre(2, quiet=True)
    assert len(theatre.guests) == 4

    def cut() -> None:
        sim, (one, other) = theatre.sim, [[shard.name for shard in theatre.servers[name].shards] for name in "ab"]
        for ours in one:
            for theirs in (*other, "w0", "w1"):
                sim.cut(ours, theirs, sim.now_ns + 40 * NS)
        for ours in other:
            for theirs in ("w2", "w3"):
                sim.cut(ours, theirs, sim.now_ns + 8 * NS)

    theatre.sim.at(10 * NS, cut)
    return theatre


def test_a_member_leaves_a_server_that_can_serve_nobody_once_it_reaches_the_standby() -> None:
    """The server lacks the votes to go on alone, and holds back all. Its members heard it for the whole cut."""
    theatre = halved().run()
    assert {guest.server for guest in theatre.guests} == {"b"} and theatre.sim.struck["failed"] <= 1, "leases are short"
    assert max(guest.stall_ns for guest in theatre.guests) < 10 * NS


def test_a_standby_that_is_cut_off_alone_does_not_serve() -> None:
    theatre = parted().run()
    assert {guest.server for guest in theatre.guests} == {"a"} and theatre.sim.struck["failed"] <= 1, (
        "its lease is short"
    )
    assert theatre.sim.struck["alone"] == theatre.shards and not theatre.sim.struck["took over"]


def test_members_that_are_asked_by_both_have_one_server() -> None:
    theatre = contested().run()
    assert {guest.server for guest in theatre.guests if not guest.failed} == {"b"}


FIRST = (contested, parted, halved)

# Planted bugs: what guards this, taken out.


def too_early(shard: Shard) -> None:
    """The effects of an event are sent before the standby has the event."""
    while shard.held:
        _, to, message = shard.held.popleft()
        shard._send(to, message)


def without_votes(standby: Standby, now_ns: int) -> Any:
    """A standby takes over that nobody has turned to."""
    if standby.machine is not None:
        standby.votes |= {member.worker: standby.machine.view + 1 for member in standby.machine.members}
    return standby_tick(standby, now_ns)


def alone_at_once(original: ReplicationPrimary, view: int) -> bool:
    """A server goes on without its standby, and without votes."""
    return True


def newest_members(original: ReplicationPrimary, view: int) -> bool:
    """Votes are counted by the newest roster, which the standby may not have."""
    members = [member.worker for member in original.machine.members]
    return 2 * sum(original.votes.get(worker, 0) >= view for worker in members) > len(members)


def without_leave(views: FailoverView, view: m.FailoverNotice) -> list[MemberEffect]:
    """A member comes back from the standby without its leave."""
    views.turned = False
    return told_of(views, view)


def both(views: FailoverView, view: m.FailoverNotice) -> list[MemberEffect]:
    """A member votes for both in one view."""
    if views.turned and not view.decided:
        return [Send(0, m.FailoverVote(views.worker, views.epoch, view.view, 0))]
    return told_of(views, view)


def with_gaps(standby: Standby, copied: m.ReplicationEntry, now_ns: int) -> None:
    """A standby takes an event though it lacks the one before."""
    if not copied.parts and copied.number > standby.have and standby.machine is not None:
        standby.have = copied.number - 1
    received(standby, copied, now_ns)


def once_more(standby: Standby, copied: m.ReplicationEntry, now_ns: int) -> None:
    """A standby handles an event that comes again."""
    if not copied.parts and standby.machine is not None and copied.number <= standby.have:
        standby.have = copied.number - 1
    received(standby, copied, now_ns)


standby_tick, told_of, received = Standby.tick, FailoverView.told, Standby.receive
PLANTED: dict[str, tuple[type, str, Any]] = {
    "sent before the standby has the cause": (Shard, "_release", too_early),
    "a standby that needs no votes": (Standby, "tick", without_votes),
    "a server that needs no votes": (ReplicationPrimary, "_elected", alone_at_once),
    "votes by the newest roster": (ReplicationPrimary, "_elected", newest_members),
    "back without leave": (FailoverView, "told", without_leave),
    "two votes in a view": (FailoverView, "told", both),
    "an event left out": (Standby, "receive", with_gaps),
    "an event handled twice": (Standby, "receive", once_more),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    with pytest.raises(Violation):
        hunt(
            bug,
            lambda number: FIRST[number]().run() if number < len(FIRST) else Theatre(number - len(FIRST)).run(),
            PLANTED_RUNS,
        )


def test_who_has_declared_votes_before_its_place_is_here_and_once() -> None:
    """The server counts it from its Declare on, and may hold the Ready back for a standby that is lost."""
    settings, plan = Settings(sync="ssp").validated(), PLANS[0.0]
    member = Member("token", "here")
    member.join(0)
    member.receive(0, m.Welcome("token", 3, 0, 1, 9, settings.packed(), (1,)), 0)
    member.declare(plan, 0)
    asked = member.receive(0, m.FailoverNotice(2, "", False), 0)
    assert asked == [Send(0, m.FailoverVote(3, 0, 2, 0))]
    member.receive(0, m.Ready(3, 9, 0, ((0, 7),), b""), 0)
    assert (member.views.view, member.views.worker, member.views.epoch) == (2, 3, 9)
