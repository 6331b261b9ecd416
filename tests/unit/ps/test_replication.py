"""A shard and its standby, message by message: what is copied, when the other side is lost, whose votes count."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.timing import (
    DEPOSE_NS,
    ELECTION_TIMEOUT_NS,
    FAILOVER_CUT_NS,
    REPLICATION_RETRY,
    STANDBY_MISSED_NS,
    standby_lost_ns,
)
from narrows.protocols.config.timing import REPLICATION_BEAT_NS as BEAT_NS
from narrows.protocols.config.timing import REPLICATION_CUT_NS as CUT_NS
from narrows.protocols.effects import NS, CopyEffect, Log, Send, SendToPeer, StartServing, StopProcess
from narrows.protocols.wire import decode, encode
from narrows.ps.replication import replication_stream
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.replication.replication_primary import ReplicationPrimary
from narrows.ps.replication.replication_stream import PARTS_AHEAD, ReplicatedMember
from narrows.ps.replication.standby import MachineParts, PeerShards, Standby
from narrows.ps.shard.reports import COORDINATOR

LOST_NS = 2 * NS
AGAIN_NS = REPLICATION_RETRY.first_ns
LIFE = 7
THERE, OTHER = "tcp://there:1", "tcp://other:1"
STANDBY, SIBLING = b"standby", b"sibling"
TICK = MachineEvent(EventKind.TICK, 5)


@dataclass
class Seat:
    worker: int

    def __post_init__(self) -> None:
        self.name = m.name_of(b"worker %d" % self.worker)
        self.peer = self.name + b"link"


@dataclass
class Machine:
    view: int = 0
    standby: str = ""
    happened: int = 0
    incarnation: int = LIFE
    viewed: int = 0
    before: str = ""
    members: list[ReplicatedMember] = field(default_factory=list)
    handled: list[MachineEvent] = field(default_factory=list)


def original(
    machine: Machine | None = None, parts: int = 1, siblings: PeerShards | None = None, before: str = ""
) -> ReplicationPrimary:
    """The original of shard 0, whose machine takes two bytes for each part."""
    siblings = siblings or PeerShards(1, LOST_NS)
    return ReplicationPrimary(
        0, machine or Machine(), 4711, LOST_NS, lambda: bytes(range(2 * parts)), siblings, 100, before
    )


def copied(machine: Machine, siblings: PeerShards | None = None) -> ReplicationPrimary:
    """One whose standby has all that has happened, at time 0."""
    ours = original(machine, siblings=siblings)
    ours.receive(STANDBY, copy(-1), 0)
    ours.receive(STANDBY, copy(machine.happened), 0)
    assert ours.feed.copied(0)
    return ours


def copy(have: int, machine: int = -1, parts: int = 0, address: str = THERE, life: int = LIFE) -> m.ReplicationFollow:
    return m.ReplicationFollow(0, have, life, machine, parts, address)


def happen(ours: ReplicationPrimary, event: MachineEvent = TICK, size: int = 0) -> list[CopyEffect]:
    """An event whose message has a payload of `size` bytes."""
    effects = ours.note(event, [b"", bytes(size)])
    assert isinstance(ours.machine, Machine)
    ours.machine.happened += 1
    return [*effects]


def sent(effects: list[CopyEffect], kind: type[m.Message] = m.ReplicationEntry) -> list[m.Message]:
    return [each.message for each in effects if isinstance(each, (Send, SendToPeer)) and isinstance(each.message, kind)]


def events(effects: list[CopyEffect]) -> list[int]:
    return [each.number for each in sent(effects) if isinstance(each, m.ReplicationEntry) and not each.parts]


def parts(effects: list[CopyEffect]) -> list[int]:
    return [each.part for each in sent(effects) if isinstance(each, m.ReplicationEntry) and each.parts]


def serves(effects: list[CopyEffect]) -> list[tuple[int, str]]:
    return [(each.view, each.standby) for each in effects if isinstance(each, StartServing)]


def told(effects: list[CopyEffect]) -> list[tuple[bytes, m.FailoverNotice]]:
    sends = [each for each in effects if isinstance(each, Send)]
    return [
        (each.peer, each.message)
        for each in sends
        if isinstance(each.message, m.FailoverNotice) and isinstance(each.peer, bytes)
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_stream, "PART_BYTES", 2)


def test_the_other_side_is_lost_after_a_quarter_of_a_lease_or_a_second() -> None:
    assert [standby_lost_ns(lease) for lease in (1.0, 4.0, 10.0)] == [NS, NS, 5 * NS // 2]


# The events that are copied.


def test_nothing_is_kept_where_nobody_copies() -> None:
    ours = original()
    assert not happen(ours) and not ours.feed.tail and not ours.tick(NS) and not ours.holds


def test_a_machine_comes_in_parts_so_many_at_a_time_and_then_each_event(small: None) -> None:
    ours = original(Machine(happened=3), parts=40)
    effects = ours.receive(STANDBY, copy(-1), 0)
    assert parts(effects) == list(range(PARTS_AHEAD))
    first = sent(effects)[1]
    assert isinstance(first, m.ReplicationEntry) and (first.life, first.number, first.parts) == (LIFE, 3, 40)
    assert bytes(first.payload) == bytes([2, 3])
    assert not happen(ours), "it has no machine yet"
    assert parts(ours.receive(STANDBY, copy(-1, 3, 10), 1)) == list(range(PARTS_AHEAD, PARTS_AHEAD + 10))
    for there in (10, 9, 10):
        assert parts(ours.receive(STANDBY, copy(-1, 3, there), 2)) == []
    assert parts(ours.receive(STANDBY, copy(-1, 3, 35), 3)) == list(range(PARTS_AHEAD + 10, 40))
    assert not ours.feed.copied(3)
    assert events(ours.receive(STANDBY, copy(3), 4)) == [4] and ours.feed.copied(4)
    assert events(happen(ours)) == [5]
    assert [each.number for each in ours.feed.tail] == [4, 5]
    assert not ours.receive(STANDBY, copy(5), 5) and not ours.feed.tail and ours.feed.acked == 5


def test_an_event_goes_with_its_message() -> None:
    machine = Machine()
    ours = copied(machine)
    message = m.Push(1, 2, 3, 0, 1, 0, 4, 1, b"", 0, bytes(16))
    event = MachineEvent(EventKind.BELOW, 9, b"peer", message)
    (effect,) = ours.note(event, encode(message))
    assert isinstance(effect, Send) and effect.peer == STANDBY and isinstance(effect.message, m.ReplicationEntry)
    assert effect.message.frames == 2 and ours.feed.tail_bytes == len(effect.message.header) + 16
    assert decode([effect.message.header, effect.message.payload]) == message
    ours.again(event)
    assert ours.feed.tail[0] == ours.feed.tail[1]
    machine.happened += 1
    (effect,) = ours.note(TICK, [])
    assert isinstance(effect, Send) and isinstance(effect.message, m.ReplicationEntry) and effect.message.frames == 0


def test_parts_that_were_lost_are_sent_again_after_as_long_as_they_may_take(small: None) -> None:
    ours = original(parts=40)
    ours.receive(STANDBY, copy(-1), 0)
    assert parts(ours.receive(STANDBY, copy(-1, 0, 2), NS)) == [PARTS_AHEAD, PARTS_AHEAD + 1]
    assert parts(ours.receive(STANDBY, copy(-1, 0, 2), NS + AGAIN_NS)) == []  # 16 parts take a little longer than that
    assert parts(ours.receive(STANDBY, copy(-1, 0, 2), NS + AGAIN_NS + NS // 1000)) == list(range(2, 2 + PARTS_AHEAD))
    assert parts(ours.receive(STANDBY, copy(-1, 0, 2), 2 * NS + AGAIN_NS)) == []
    assert len(parts(ours.receive(STANDBY, copy(-1), 5 * NS))) == PARTS_AHEAD, "it has begun anew"


def test_events_that_were_lost_are_sent_again_after_as_long_as_they_may_take() -> None:
    ours = copied(Machine())
    for _ in range(3):
        happen(ours, size=REPLICATION_RETRY.bytes_per_second)
    assert not events(ours.receive(STANDBY, copy(0), AGAIN_NS + 2 * NS))
    assert not events(ours.receive(STANDBY, copy(1), AGAIN_NS + 3 * NS - 1)), "that is progress"
    assert not events(ours.receive(STANDBY, copy(1), 2 * AGAIN_NS + 5 * NS - 2))
    assert events(ours.receive(STANDBY, copy(1), 2 * AGAIN_NS + 5 * NS - 1)) == [2, 3]
    assert not events(ours.receive(STANDBY, copy(1), 2 * AGAIN_NS + 5 * NS))
    assert not ours.receive(STANDBY, copy(0), 2 * AGAIN_NS + 5 * NS) and ours.feed.acked == 1, "a late one"


def test_a_standby_that_begins_anew_gets_the_machine_as_it_is(small: None) -> None:
    machine = Machine()
    for late in (False, True):
        ours = original(machine, parts=3)
        ours.receive(STANDBY, copy(-1), 0)
        ours.receive(STANDBY, copy(-1, machine.happened, 2), 0)
        if late:
            ours.receive(STANDBY, copy(machine.happened), 0)
        happen(ours, size=5)
        if not late:
            ours.feed.forget()  # before it had all
        effects = ours.receive(STANDBY, copy(-1), 9 * NS)
        assert (
            parts(effects) == [0, 1, 2]
            and not ours.feed.tail
            and not ours.feed.tail_bytes
            and not ours.feed.copied(9 * NS)
        )
        assert {each.number for each in sent(effects) if isinstance(each, m.ReplicationEntry)} == {machine.happened}
        happen(ours)
        assert not parts(ours.receive(STANDBY, copy(-1, machine.happened - 1, 1), 9 * NS + AGAIN_NS))
        assert not parts(ours.receive(STANDBY, copy(-1, machine.happened - 1, 1), 10 * NS + AGAIN_NS - 1)), (
            "that was progress"
        )
        ours.receive(STANDBY, copy(machine.happened - 1), 10 * NS)
        assert ours.feed.copied(10 * NS)
        assert parts(ours.receive(STANDBY, copy(machine.happened + 1), 10 * NS)) == [0, 1, 2], "what has not happened"


def test_who_lags_by_too_much_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_stream, "TAIL_BYTES", 100)
    for size, most in ((1, 100), (300, 600)):
        ours = original(Machine(), parts=1)
        ours.feed.freeze = partial(bytes, size)
        ours.receive(STANDBY, copy(-1), 0)
        ours.receive(STANDBY, copy(0), 0)
        assert events(happen(ours, size=most)) == [1]
        assert not happen(ours, size=1) and not ours.feed.copied(0) and not ours.feed.tail and not ours.feed.tail_bytes
        assert not happen(ours), "nobody is there"
        assert parts(ours.receive(STANDBY, copy(2), 1)) == [0]
        assert events(ours.receive(STANDBY, copy(3), 2)) == [] and ours.feed.copied(2)


def test_one_standby_at_a_time() -> None:
    ours = original()
    ours.receive(STANDBY, copy(-1), 0)
    (refusal,) = sent(ours.receive(b"other", copy(-1, address=OTHER), LOST_NS), m.Refuse)
    assert isinstance(refusal, m.Refuse) and THERE in refusal.text and ours.feed.peer == STANDBY
    assert parts(ours.receive(b"other", copy(-1, address=OTHER), LOST_NS + 1)) == [0]
    assert ours.feed.peer == b"other" and ours.feed.address == OTHER
    ours = copied(Machine(standby=THERE))
    assert sent(ours.receive(b"other", copy(-1, address=OTHER), 9 * LOST_NS), m.Refuse), "members know the one"
    assert not sent(ours.receive(b"again", copy(0), 9 * LOST_NS), m.Refuse) and ours.feed.peer == b"again"


def test_a_life_that_is_over_counts_for_nothing(small: None) -> None:
    """A copy of that life may have as many events as this one, and is something else."""
    ours = original(Machine(happened=3), parts=3)
    assert parts(ours.receive(STANDBY, copy(3, life=LIFE - 1), 0)) == [0, 1, 2]
    assert not ours.feed.copied(0) and not parts(ours.receive(STANDBY, copy(-1, 3, 2, life=LIFE - 1), 1))
    assert ours.feed.parts.acked == 0
    ours.receive(STANDBY, copy(3), 2)
    assert ours.feed.copied(2)


def test_all_is_copied_where_it_follows_knows_the_view_and_was_heard() -> None:
    ours = copied(Machine(happened=4))
    assert ours.feed.copied(LOST_NS) and not ours.feed.copied(LOST_NS + 1)
    ours.machine.viewed = 5
    assert not ours.feed.copied(0)
    ours.machine.happened = 5
    ours.receive(STANDBY, copy(5), 0)
    assert ours.feed.copied(0)
    ours.feed.forget()
    assert not ours.feed.copied(0)


def test_a_process_that_goes_on_by_its_journal_keeps_what_the_standby_lacks() -> None:
    ours = original(Machine(standby=THERE, happened=8))
    ours.again(TICK)
    ours.machine.happened += 1
    assert events(ours.receive(STANDBY, copy(8), 0)) == [9] and ours.known == 8
    ours = original(Machine(standby=THERE, happened=8))
    happen(ours)
    assert parts(ours.receive(STANDBY, copy(7), 0)) == [0], "from before all that is known here"


# Views.


def test_a_shard_takes_newer_views_alone() -> None:
    ours = original(Machine(view=3))
    assert [serves(ours.hear_view(m.FailoverNotice(view, THERE, True))) for view in (2, 3, 4)] == [[], [], [(4, THERE)]]
    assert not ours.receive(THERE.encode(), m.FailoverNotice(3, "", True), 0)
    (stop,) = ours.receive(THERE.encode(), m.FailoverNotice(4, "", True), 0)
    assert isinstance(stop, StopProcess) and stop.code == m.RefuseCode.SERVER_LOST


def vote(ours: ReplicationPrimary, worker: int, view: int, attempt: int = 0, name: bytes = b"") -> list[CopyEffect]:
    return ours.receive(name or Seat(worker).peer, m.FailoverVote(worker, 1, view, attempt), 0)


def test_a_vote_counts_of_a_member_under_its_name_and_for_no_later_view() -> None:
    ours = original(Machine(view=3, members=[Seat(0), Seat(1)]))
    for worker, view, name in ((0, 4, b"another"), (2, 4, b""), (0, 5, b"")):
        assert not vote(ours, worker, view, name=name) and not ours.votes
    vote(ours, 0, 4)
    vote(ours, 0, 3)
    vote(ours, 1, 2)
    assert ours.votes == {0: 4, 1: 2}


def test_who_has_turned_to_us_is_told_our_ports_once_all_shards_are_there() -> None:
    siblings = PeerShards(2, LOST_NS)
    ours = original(Machine(view=3), siblings=siblings)
    assert not vote(ours, 0, 4, attempt=1)
    siblings.hear(SIBLING, m.ReplicationProgress(1, 2, THERE, 4712), 0)
    assert not vote(ours, 0, 4, attempt=1)
    siblings.hear(SIBLING, m.ReplicationProgress(1, 3, THERE, 4712), 0)
    assert not vote(ours, 0, 4), "who has not turned needs none"
    ((peer, view),) = told(vote(ours, 0, 4, attempt=1))
    assert peer == Seat(0).peer and view == m.FailoverNotice(3, "", True, (4711, 4712))


def test_more_than_half_of_each_roster_that_the_standby_may_have_elect() -> None:
    machine = Machine(view=1, standby=THERE, members=[Seat(0), Seat(1)])
    ours = copied(machine)
    happen(ours)
    machine.members = [Seat(0)]
    happen(ours)
    vote(ours, 0, 2)
    assert not ours._elected(2), "of the older roster that is half"
    vote(ours, 1, 2)
    assert ours._elected(2), "who has left since may vote"
    assert not ours._elected(3) and len(ours.rosters) == 2, "one for each set of members"
    ours.votes.clear()
    vote(ours, 0, 2)
    machine.members = [Seat(0), Seat(2)]
    happen(ours)
    happen(ours)
    ours.receive(STANDBY, copy(2), 0)
    assert not ours._elected(2), "of the newest that is half"
    vote(ours, 2, 2)
    assert ours._elected(2)
    machine.members = []
    ours.votes.clear()
    assert not ours._elected(2)
    ours.receive(STANDBY, copy(machine.happened), 0)
    assert ours._elected(2), "nobody is there to be asked"


def test_a_process_that_knows_no_older_roster_is_elected_by_nobody() -> None:
    """The standby may have one from before the kill."""
    ours = original(Machine(view=1, standby=THERE, happened=8, members=[Seat(0)]))
    vote(ours, 0, 2)
    assert not ours._elected(2)
    ours.receive(STANDBY, copy(8), 0)
    assert ours._elected(2)
    later = original(Machine(view=1, standby=THERE, happened=8, viewed=9, members=[Seat(0)]))
    vote(later, 0, 2)
    assert later._elected(2), "the view began after the journal: the standby has that event"


def test_rosters_of_a_server_without_a_standby_take_no_memory() -> None:
    machine = Machine(members=[Seat(0)])
    ours = original(machine)
    for worker in range(1, 100):
        happen(ours)
        machine.happened, machine.members = worker, [Seat(worker)]
    happen(ours)
    assert len(ours.rosters) == 2 and [member.worker for member in ours._electors()] == [0, 99]


# Time.


def test_a_standby_that_is_silent_before_it_has_all_is_forgotten() -> None:
    ours = copied(Machine())
    ours.tick(LOST_NS)
    assert ours.feed.peer
    ours.tick(LOST_NS + BEAT_NS)
    assert not ours.feed.peer and not ours.feed.address
    ours = copied(Machine(view=1, standby=THERE, members=[Seat(0)]))
    ours.tick(LOST_NS + BEAT_NS)
    assert ours.feed.peer, "members know it: it is for them to say"


def test_a_standby_whose_connection_has_ended_is_lost_soon() -> None:
    ours = copied(Machine(view=1, standby=THERE, members=[Seat(0)]))
    ours.feed.cut(5)
    ours.feed.cut(9)
    assert ours.feed.copied(CUT_NS + 5) and not ours.feed.copied(CUT_NS + 6)
    ours.receive(STANDBY, copy(0), CUT_NS + 6)
    assert ours.feed.copied(CUT_NS + 6), "it is there again"
    ours.feed.cut(NS)
    missed_ns = NS + CUT_NS + 1
    assert not told(ours.tick(missed_ns))
    asked = told(ours.tick(missed_ns + STANDBY_MISSED_NS))
    assert asked == [(Seat(0).peer, m.FailoverNotice(2, "", False))] and not ours.tick(
        missed_ns + STANDBY_MISSED_NS + 1
    )
    vote(ours, 0, 2)
    assert serves(ours.tick(missed_ns + STANDBY_MISSED_NS + 2)) == [(2, "")], "at once"


def test_a_standby_that_was_lost_before_it_had_all_leaves_room_for_another() -> None:
    ours = original()
    ours.receive(STANDBY, copy(-1), 0)
    ours.feed.cut(1)
    assert sent(ours.receive(OTHER.encode(), copy(-1, address=OTHER), CUT_NS + 1), m.Refuse)
    assert not sent(ours.receive(OTHER.encode(), copy(-1, address=OTHER), CUT_NS + 2), m.Refuse)
    assert ours.feed.address == OTHER


def test_other_shards_hear_of_a_view_with_the_next_tick() -> None:
    siblings = PeerShards(2, LOST_NS)
    ours = copied(Machine(view=1, members=[Seat(0)]), siblings)
    siblings.hear(SIBLING, m.ReplicationProgress(1, 1, THERE, 5), 0)
    assert serves(ours.tick(BEAT_NS)) == [(100, THERE)]
    assert isinstance(ours.machine, Machine)
    ours.machine.view, ours.machine.standby = 100, THERE
    assert (SIBLING, m.FailoverNotice(100, THERE, True)) in told(ours.tick(BEAT_NS + 1))


def test_it_says_so_twice_a_second() -> None:
    ours = original(Machine(view=1, members=[Seat(0)]))
    assert told(ours.tick(BEAT_NS)) and not told(ours.tick(2 * BEAT_NS - 1)) and told(ours.tick(2 * BEAT_NS))
    vote(ours, 0, 1)
    assert told(ours.tick(3 * BEAT_NS)), "its vote does not say that it knows who was elected"
    begun = copied(Machine(members=[Seat(0)]), PeerShards(2, LOST_NS))
    assert not begun.tick(BEAT_NS), "the first view needs no vote"
    alone = original(Machine(view=0, members=[Seat(0)]))
    assert not alone.tick(BEAT_NS)
    alone.machine.view = 1
    assert told(alone.tick(2 * BEAT_NS)), "there was one"


def test_the_one_before_is_told_for_a_while() -> None:
    assert original(Machine(before=OTHER)).before == OTHER, "a process that was killed said so too"
    ours = original(Machine(view=2, before=THERE), before=OTHER)
    count = 0
    for turn in range(1, DEPOSE_NS // BEAT_NS + 5):
        for effect in ours.tick(turn * BEAT_NS):
            if isinstance(effect, SendToPeer):
                count += 1
                assert effect == SendToPeer(OTHER, m.FailoverNotice(2, "", True))
    assert count == DEPOSE_NS // BEAT_NS


def test_who_was_killed_while_it_took_over_learns_from_its_journal_in_whose_place_it_serves() -> None:
    machine = Machine(view=1)
    ours = original(machine)
    assert not ours.before
    machine.view, machine.before = 2, OTHER  # as its journal is done again
    assert SendToPeer(OTHER, m.FailoverNotice(2, "", True)) in ours.tick(BEAT_NS)


def test_other_shards_tell_shard_0() -> None:
    machine = Machine(view=1)
    ours = ReplicationPrimary(1, machine, 4712, LOST_NS, bytes, PeerShards(2, LOST_NS))
    (said,) = ours.tick(BEAT_NS)
    assert said == Send(COORDINATOR, m.ReplicationProgress(1, 1, "", 4712))
    ours.receive(STANDBY, copy(-1), BEAT_NS)
    ours.receive(STANDBY, copy(0), BEAT_NS)
    (said,) = ours.tick(2 * BEAT_NS)
    assert said == Send(COORDINATOR, m.ReplicationProgress(1, 1, THERE, 4712))


def test_a_standby_stands_by_once_all_shards_are_copied_and_know_the_view() -> None:
    siblings = PeerShards(2, LOST_NS)
    ours = copied(Machine(), siblings)
    for view, there, heard_ns, now_ns, wanted in (
        (0, "", 0, BEAT_NS, []),
        (0, THERE, 0, LOST_NS + BEAT_NS, []),  # heard too long ago
        (0, OTHER, 2 * LOST_NS, 2 * LOST_NS, []),  # its standby is the one that came when ours was lost
        (0, THERE, 2 * LOST_NS, 2 * LOST_NS, [(100, THERE)]),  # the first view of this life
    ):
        siblings.hear(SIBLING, m.ReplicationProgress(1, view, there, 4712), heard_ns)
        ours.receive(STANDBY, copy(0), now_ns)
        ours.said_ns = 0
        assert serves(ours.tick(now_ns)) == wanted
    ours.machine.view, ours.said_ns = 100, 0
    effects = ours.tick(2 * LOST_NS)
    assert not serves(effects) and (SIBLING, m.FailoverNotice(100, "", True)) in told(effects), (
        "that shard does not know the view"
    )
    siblings.hear(SIBLING, m.ReplicationProgress(1, 100, THERE, 4712), 2 * LOST_NS)
    ours.said_ns = 0
    effects = ours.tick(2 * LOST_NS)
    assert serves(effects) == [(101, THERE)] and SIBLING not in dict(told(effects))


def test_a_shard_0_that_begins_from_a_checkpoint_catches_up_with_the_views_of_the_others() -> None:
    siblings = PeerShards(2, LOST_NS)
    ours = original(siblings=siblings)
    ours.receive(STANDBY, copy(-1), 0)
    for theirs, wanted in ((0, []), (40, [(100, "")]), (100, [(101, "")])):
        siblings.hear(SIBLING, m.ReplicationProgress(1, theirs, "", 4712), 0)
        ours.said_ns = 0
        assert serves(ours.tick(BEAT_NS)) == wanted


def standing(members: int = 2) -> tuple[ReplicationPrimary, Machine]:
    """A standby stands by since view 1."""
    machine = Machine(view=1, standby=THERE, members=[Seat(worker) for worker in range(members)])
    return copied(machine), machine


def test_members_hear_of_a_standby_that_has_all_and_the_console_once_they_know() -> None:
    ours, machine = standing()
    effects = ours.tick(BEAT_NS)
    assert told(effects) == [(Seat(worker).peer, m.FailoverNotice(1, THERE, True)) for worker in range(2)]
    assert not any(isinstance(effect, Log) for effect in effects)
    vote(ours, 0, 1)
    assert not any(isinstance(effect, Log) for effect in ours.tick(2 * BEAT_NS))
    vote(ours, 1, 1)
    (log,) = [effect for effect in ours.tick(3 * BEAT_NS) if isinstance(effect, Log)]
    assert log.values["there"] and not any(isinstance(effect, Log) for effect in ours.tick(4 * BEAT_NS)), "once"
    machine.viewed = machine.happened + 1
    assert not told(ours.tick(5 * BEAT_NS)), "it does not know of the view itself"


def test_who_has_left_hears_of_it_until_the_standby_knows() -> None:
    """Its answer waits for the standby. Where that is lost just then, silence would make it turn there."""
    ours, machine = standing()
    happen(ours)
    del machine.members[1]
    assert [peer for peer, _ in told(ours.tick(BEAT_NS))] == [Seat(0).peer, Seat(1).peer]
    happen(ours)
    ours.receive(STANDBY, copy(machine.happened), BEAT_NS)
    assert [peer for peer, _ in told(ours.tick(2 * BEAT_NS))] == [Seat(0).peer]


def test_new_members_hear_of_it_at_once() -> None:
    ours, machine = standing(1)
    ours.tick(BEAT_NS)
    assert told(ours.tick(BEAT_NS + 1)) == [(Seat(0).peer, m.FailoverNotice(1, THERE, True))]
    assert not ours.tick(BEAT_NS + 2)
    machine.members.append(Seat(1))
    assert told(ours.tick(BEAT_NS + 3)) == [(Seat(1).peer, m.FailoverNotice(1, THERE, True))]
    del machine.members[1]
    ours.tick(BEAT_NS + 4)
    machine.members.append(Seat(1))
    assert told(ours.tick(BEAT_NS + 5)), "it has joined again"
    machine.members.append(Seat(2))
    ours.missed_ns = 1
    assert not ours.tick(BEAT_NS + 6)
    ours.missed_ns, machine.standby = 0, ""
    assert not ours.tick(BEAT_NS + 7)
    machine.standby = THERE
    ours.feed.heard_ns = -LOST_NS
    assert not ours.tick(BEAT_NS + 7), "it may be lost"
    ours.feed.heard_ns = 0
    ours.siblings = PeerShards(2, LOST_NS)
    assert not ours.tick(BEAT_NS + 8)


def test_a_server_goes_on_without_its_standby_once_most_members_agree() -> None:
    ours, machine = standing(3)
    for worker in range(3):
        vote(ours, worker, 1)
    assert told(ours.tick(BEAT_NS))
    happen(ours)
    del machine.members[2]  # the standby may count it
    missed_ns = LOST_NS + BEAT_NS
    assert not ours.tick(missed_ns), "it may be there again"
    effects = ours.tick(missed_ns + STANDBY_MISSED_NS)
    assert told(effects) == [(Seat(worker).peer, m.FailoverNotice(2, "", False)) for worker in range(3)] and not serves(
        effects
    )
    vote(ours, 0, 2)
    assert not serves(ours.tick(missed_ns + STANDBY_MISSED_NS + BEAT_NS))
    vote(ours, 1, 2)
    effects = ours.tick(missed_ns + STANDBY_MISSED_NS + 2 * BEAT_NS)
    assert serves(effects) == [(2, "")] and [
        effect.values["there"] for effect in effects if isinstance(effect, Log)
    ] == [False]
    machine.view, machine.standby = 2, ""
    ours.tick(missed_ns + STANDBY_MISSED_NS + 3 * BEAT_NS)
    assert not ours.missed_ns, "the next one has its time"


def test_a_standby_that_is_there_again_needs_a_view_that_those_know_who_had_given_it_up() -> None:
    ours, machine = standing(3)
    ours.tick(LOST_NS + BEAT_NS)
    ours.tick(LOST_NS + BEAT_NS + STANDBY_MISSED_NS)
    vote(ours, 0, 2)
    ours.receive(STANDBY, copy(0), LOST_NS + 2 * STANDBY_MISSED_NS)
    assert serves(ours.tick(LOST_NS + 2 * STANDBY_MISSED_NS + BEAT_NS)) == [(3, THERE)]
    machine.view = 3
    assert told(ours.tick(LOST_NS + 2 * STANDBY_MISSED_NS + 2 * BEAT_NS)) and not ours.missed_ns


def test_a_server_that_hears_neither_its_standby_nor_its_members_ends() -> None:
    ours, _ = standing()
    missed_ns = LOST_NS + BEAT_NS
    ours.tick(missed_ns)
    assert told(ours.tick(missed_ns + ELECTION_TIMEOUT_NS))
    (stop,) = ours.tick(missed_ns + ELECTION_TIMEOUT_NS + BEAT_NS)
    assert isinstance(stop, StopProcess) and stop.code == m.RefuseCode.SERVER_LOST


def test_a_view_waits_until_all_shards_have_come_to_it() -> None:
    machine, siblings = Machine(view=1, standby=THERE, members=[Seat(0)]), PeerShards(2, LOST_NS)
    ours = copied(machine, siblings)
    siblings.hear(SIBLING, m.ReplicationProgress(1, 0, THERE, 4712), 0)
    assert told(ours.tick(BEAT_NS)) == [(SIBLING, m.FailoverNotice(1, THERE, True))], "members are not told"
    siblings.hear(SIBLING, m.ReplicationProgress(1, 1, "", 4712), BEAT_NS)
    assert not ours.tick(2 * BEAT_NS) and ours.missed_ns
    siblings.hear(SIBLING, m.ReplicationProgress(1, 1, THERE, 4712), BEAT_NS)
    assert told(ours.tick(3 * BEAT_NS)) == [(Seat(0).peer, m.FailoverNotice(1, THERE, True))] and not ours.missed_ns


def test_siblings_are_shards_of_this_server() -> None:
    siblings = PeerShards(3, LOST_NS)
    for shard in (-1, 0, 3):
        siblings.hear(SIBLING, m.ReplicationProgress(shard, 1, THERE, 5), 0)
    assert not siblings.known
    siblings.hear(SIBLING, m.ReplicationProgress(2, 1, THERE, 6), 0)
    assert not siblings.whole(0, THERE) and not siblings.at(1)
    siblings.hear(SIBLING, m.ReplicationProgress(1, 1, THERE, 5), 0)
    assert siblings.whole(LOST_NS, THERE) and not siblings.whole(LOST_NS + 1, THERE) and not siblings.whole(0, OTHER)
    assert siblings.at(1) and not siblings.at(0)
    assert siblings.ports(4) == (4, 5, 6) and siblings.newest == 1


# The other side.


class Following:
    """A standby of shard 0, with what it has handled."""

    def __init__(self, machine: Machine | None = None, siblings: PeerShards | None = None) -> None:
        self.machine = machine or Machine(view=1, standby=THERE, members=[Seat(0), Seat(1)])
        self.thawed: list[bytes] = []
        siblings = siblings or PeerShards(1, LOST_NS)
        self.standby = Standby(
            0, "tcp://here:1", THERE, 4711, LOST_NS, siblings, self.thaw, self.machine.handled.append
        )

    def thaw(self, packed: MachineParts) -> Machine:
        self.thawed.append(packed.read())
        return self.machine

    def part(self, part: int, of: int = 1, number: int = 4, life: int = LIFE, payload: bytes = b"x") -> None:
        self.standby.receive(m.ReplicationEntry(life, number, part, of, b"", 0, b"", payload), 0)

    def event(self, number: int, life: int = LIFE, now_ns: int = 0) -> None:
        self.standby.receive(m.ReplicationEntry(life, number, 0, 0, TICK.described(), 0, b"", b""), now_ns)

    def vote(
        self, worker: int, view: int = 2, attempt: int = 1, now_ns: int = LOST_NS + 1, name: bytes = b""
    ) -> list[m.Message]:
        return sent(
            self.standby.vote(name or Seat(worker).peer, m.FailoverVote(worker, 1, view, attempt), now_ns),
            m.KeepServing,
        )


def test_a_standby_takes_each_event_once_and_in_its_order() -> None:
    ours = Following()
    ours.event(5)
    assert ours.standby.have == -1, "without a machine"
    ours.part(0)
    for number in (6, 5, 5, 4, 7, 6):
        ours.event(number)
    assert ours.standby.have == 6 and not ours.machine.handled
    ours.standby.handle()
    assert ours.machine.handled == [TICK, TICK]


def test_a_standby_puts_a_machine_together() -> None:
    ours = Following()
    for part, payload in ((1, b"b"), (0, b"a"), (0, b"a"), (2, b"c"), (1, b"b")):
        ours.part(part, 3, payload=payload)
    assert ours.standby.coming == 2 and not ours.thawed
    (said,) = ours.standby.acknowledge(1)
    assert said == SendToPeer(
        "tcp://here:1", m.ReplicationFollow(0, -1, LIFE, 4, 2, THERE)
    ) and not ours.standby.acknowledge(2), "once"
    ours.part(2, 3, payload=b"c")
    assert ours.thawed == [b"abc"] and ours.standby.coming == 0
    (said,) = ours.standby.acknowledge(3)
    assert said == SendToPeer("tcp://here:1", m.ReplicationFollow(0, 4, LIFE, -1, 0, THERE))
    for part in range(3):
        ours.part(part, 3)
        ours.part(part, 3, number=3)
    assert ours.thawed == [b"abc"] and ours.standby.have == 4, "late ones"
    for number in (5, 6, 7):
        ours.event(number)
    ours.part(0, 3, number=4)
    ours.part(0, 3, number=6)
    assert ours.standby.have == 7 and ours.standby.machine is not None
    ours.part(0, 2, number=9)
    assert ours.standby.have == -1 and ours.standby.machine is None and not ours.standby.events
    ours.part(1, 2, number=8)
    ours.part(1, 2, number=9)
    assert ours.thawed == [b"abc", b"xx"] and ours.standby.have == 9


def test_a_server_whose_connection_has_ended_is_lost_before_members_ask() -> None:
    ours = Following()
    ours.part(0)
    ours.standby.cut(5)
    ours.standby.cut(9)
    assert CUT_NS < FAILOVER_CUT_NS and not ours.standby.lost(CUT_NS + 5) and ours.standby.lost(CUT_NS + 6)
    assert not ours.vote(0, now_ns=CUT_NS + 6) and ours.standby.votes == {0: 2}
    ours.event(5, now_ns=CUT_NS)
    assert not ours.standby.lost(2 * CUT_NS), "it is there again"


def test_a_standby_begins_anew_with_a_new_life_of_its_server() -> None:
    ours = Following()
    ours.part(0, number=50)
    ours.event(51)
    ours.part(0, 2, number=2, life=LIFE + 1)
    assert ours.standby.have == -1 and ours.standby.machine is None
    (said,) = ours.standby.acknowledge(1)
    assert said == SendToPeer("tcp://here:1", m.ReplicationFollow(0, -1, LIFE + 1, 2, 1, THERE))
    ours.standby.heard_ns = -1
    ours.part(0, number=52)
    ours.event(51)
    assert ours.standby.heard_ns == -1 and not ours.standby.owes, "what is left of the one before"
    ours.part(1, 2, number=2, life=LIFE + 1)
    ours.event(3, LIFE + 1)
    assert ours.standby.have == 3
    ours.event(4, LIFE + 2)
    assert ours.standby.machine is None and ours.standby.acknowledge(2) == [
        SendToPeer("tcp://here:1", m.ReplicationFollow(0, -1, LIFE + 2, -1, 0, THERE))
    ]


def test_a_vote_for_a_standby_counts_where_the_server_is_lost() -> None:
    ours = Following()
    ours.part(0)
    assert ours.vote(0, now_ns=LOST_NS) == [m.KeepServing(2, 1)] and not ours.standby.votes
    assert ours.vote(0) == [m.KeepServing(2, 1)] and not ours.standby.votes, "of an attempt that was given back"
    assert ours.vote(0, attempt=2) == [] and ours.standby.votes == {0: 2}
    for worker, view, name in ((1, 3, b""), (1, 1, b""), (2, 2, b""), (1, 2, b"another")):
        assert ours.vote(worker, view, name=name) == [] and ours.standby.votes == {0: 2}, "not given back either"
    assert ours.vote(0, attempt=3, now_ns=0) == [m.KeepServing(2, 3)] and not ours.standby.votes, (
        "the server is there again"
    )
    assert ours.vote(0, attempt=2, now_ns=0) == [m.KeepServing(2, 2)] and ours.standby.void[0] == 3
    assert ours.vote(0, attempt=3) == [m.KeepServing(2, 3)] and not ours.standby.votes
    ours.machine.standby = OTHER
    assert ours.vote(1) == [] and not ours.standby.votes, "of which nobody knows that it stands by"


def test_votes_take_no_more_memory_than_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "WORKERS_MAX", 2)
    ours = Following()
    assert [ours.vote(worker, now_ns=0) != [] for worker in (5, 6, 7)] == [True, True, False]


def elected(ours: Following, now_ns: int = LOST_NS + 1) -> list[tuple[int, str]]:
    return serves(ours.standby.tick(now_ns))


def test_a_standby_serves_with_the_votes_of_half() -> None:
    ours = Following()
    ours.part(0)
    assert not elected(ours)
    ours.vote(0)
    assert not elected(ours, LOST_NS) and elected(ours) == [(2, "")]
    ours.standby.votes[0] = 1
    assert not elected(ours)
    ours.standby.votes[0] = 2
    ours.machine.members.append(Seat(2))
    assert not elected(ours), "one of three"
    ours.machine.members.clear()
    assert not elected(ours), "nobody is there to be served"
    ours.machine.members.append(Seat(0))
    ours.machine.standby = OTHER
    assert not elected(ours)
    ours.machine.standby, ours.standby.index = THERE, 1
    assert not elected(ours), "shard 0 decides"


def test_a_standby_serves_with_all_its_shards_in_one_view() -> None:
    siblings = PeerShards(2, LOST_NS)
    ours = Following(siblings=siblings)
    ours.part(0)
    ours.vote(0)
    for view, there, wanted in ((1, "", []), (0, THERE, []), (2, THERE, []), (1, THERE, [(2, "")])):
        siblings.hear(SIBLING, m.ReplicationProgress(1, view, there, 4712), LOST_NS)
        assert elected(ours) == wanted


def test_a_shard_of_a_standby_follows_its_shard_0() -> None:
    ours = Following()
    assert not ours.standby.hear_view(m.FailoverNotice(2, "", True))
    ours.part(0)
    ours.event(5)
    assert not ours.standby.hear_view(m.FailoverNotice(1, "", True)) and not ours.machine.handled
    assert serves(ours.standby.hear_view(m.FailoverNotice(2, "", True))) == [(2, "")] and ours.machine.handled == [TICK]


def test_a_standby_says_twice_a_second_how_far_it_is() -> None:
    ours = Following()
    ours.standby.index = 1
    ours.standby.owes = False
    assert not ours.standby.tick(BEAT_NS - 1)
    effects = ours.standby.tick(BEAT_NS)
    assert effects == [
        SendToPeer("tcp://here:1", m.ReplicationFollow(1, -1, -1, -1, 0, THERE)),
        Send(COORDINATOR, m.ReplicationProgress(1, 0, "", 4711)),
    ]
    assert not ours.standby.tick(BEAT_NS + 1)
    ours.part(0)
    assert Send(COORDINATOR, m.ReplicationProgress(1, 1, THERE, 4711)) in ours.standby.tick(2 * BEAT_NS)
    ours.standby.owes = True
    ours.standby.acknowledge(3 * BEAT_NS - 1)
    ours.machine.standby = OTHER
    assert Send(COORDINATOR, m.ReplicationProgress(1, 1, "", 4711)) in ours.standby.tick(3 * BEAT_NS)
