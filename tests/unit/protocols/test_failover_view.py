"""Which server a member listens to: what it says in each view, when it turns to the standby, and when it comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import split
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import (
    FAILOVER_CUT_NS,
    FAILOVER_SILENCE_NS,
    FAILOVER_STAY_NS,
    SUMMARY_BYTES_PER_SECOND,
    VOTE_RETRY,
)
from narrows.protocols.effects import NS, MemberEffect, Send, SendToPeer, ServerChanged
from narrows.protocols.member.failover_view import FailoverView
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow
from narrows.protocols.member.member import Member

THERE = "tcp://there:1"
WORKER, EPOCH = 3, 9
PLAN = ModelSpec((TensorSpec("w", (7,), "float32"),), "SGD", ((0,),)).packed()


def known(view: int = 1, standby: str = THERE) -> FailoverView:
    """A member that was told of a view."""
    ours = FailoverView(WORKER, EPOCH)
    ours.told(m.FailoverNotice(view, standby, True))
    return ours


def turned() -> FailoverView:
    ours = known()
    assert ours.tick(0, 1, FAILOVER_SILENCE_NS + 1) and ours.turned
    return ours


def votes(effects: list[MemberEffect]) -> list[tuple[int | str, int, int]]:
    """(to whom, view, attempt)"""
    said = []
    for effect in effects:
        if isinstance(effect, (Send, SendToPeer)) and isinstance(effect.message, m.FailoverVote):
            assert (effect.message.worker, effect.message.epoch) == (WORKER, EPOCH)
            to = effect.peer if isinstance(effect, Send) else effect.address
            assert not isinstance(to, bytes)
            said.append((to, effect.message.view, effect.message.attempt))
    return said


def test_a_member_votes_for_the_server_that_it_hears() -> None:
    ours = FailoverView(WORKER, EPOCH)
    assert votes(ours.told(m.FailoverNotice(2, THERE, True))) == [(0, 2, 0)] and ours.standby == THERE
    assert votes(ours.told(m.FailoverNotice(1, "tcp://old:1", True))) == [(0, 2, 0)] and ours.standby == THERE
    assert votes(ours.told(m.FailoverNotice(3, "", False))) == [(0, 3, 0)] and ours.standby == THERE, (
        "it is asked, and not decided"
    )
    assert votes(ours.told(m.FailoverNotice(3, "", True))) == [(0, 3, 0)] and not ours.standby
    assert votes(ours.told(m.FailoverNotice(3, THERE, True))) == [(0, 3, 0)] and ours.standby == THERE


def test_it_turns_to_the_standby_after_a_silence_and_says_so_twice_a_second() -> None:
    ours = known()
    assert not ours.tick(5, 1, FAILOVER_SILENCE_NS + 5) and not ours.turned
    assert votes(ours.tick(5, 1, FAILOVER_SILENCE_NS + 6)) == [(THERE, 2, 1)] and ours.turned
    assert not ours.tick(5, 1, FAILOVER_SILENCE_NS + 5 + VOTE_RETRY.first_ns)
    assert votes(ours.tick(5, 1, FAILOVER_SILENCE_NS + 6 + VOTE_RETRY.first_ns)) == [(THERE, 2, 1)]
    alone = known(standby="")
    assert not alone.tick(0, 1, 9 * FAILOVER_SILENCE_NS) and not alone.turned


def test_it_turns_soon_where_the_connections_to_all_shards_have_ended() -> None:
    ours = known()
    ours.cut = {0: 5}
    assert not ours.tick(5, 2, FAILOVER_CUT_NS + 6), "a shard that was killed alone is back in a moment"
    ours.cut[1] = 7
    assert not ours.tick(5, 2, FAILOVER_CUT_NS + 7) and votes(ours.tick(5, 2, FAILOVER_CUT_NS + 8)) == [(THERE, 2, 1)]
    single = known()
    single.cut = {0: 5}
    assert not single.tick(5, 1, FAILOVER_SILENCE_NS + 5), "and so is the only one"
    ours.hear(m.FailoverNotice(2, "", True, (1, 2)), FAILOVER_CUT_NS + 9)
    assert not ours.cut, "that was another server"


def a_member(shards: int) -> Member:
    """One that has a place, in a run whose server has a standby."""
    settings, ports = Settings(sync="ssp", shards=shards).validated(), tuple(range(1, 1 + shards))
    member = Member("token", "here")
    member.join(0)
    member.receive(0, m.Welcome("token", WORKER, 0, 1, EPOCH, settings.packed(), ports), 0)
    member.declare(PLAN, 0)
    member.receive(0, m.Ready(WORKER, EPOCH, 0, tuple(split(7, shards)), b""), 0)
    member.receive(0, m.FailoverNotice(1, THERE, True), 0)
    member.tick(0)
    return member


def failed_over(member: Member, until_ns: int) -> list[ServerChanged]:
    """The member, once its server is lost at time 0 and the standby serves."""
    assert (THERE, 2, 1) in [
        (effect.address, effect.message.view, effect.message.attempt)
        for effect in member.tick(until_ns)
        if isinstance(effect, SendToPeer) and isinstance(effect.message, m.FailoverVote)
    ]
    effects = member.receive_standby(m.FailoverNotice(2, "", True, (5, 6)), until_ns)
    return [effect for effect in effects if isinstance(effect, ServerChanged)]


def requests(member: Member, now_ns: int) -> list[type[m.Message]]:
    asked = [effect.message for effect in member.tick(now_ns) if isinstance(effect, Send)]
    return [type(message) for message in asked if isinstance(message, (m.Hello, m.Declare))]


def test_a_member_without_a_place_yet_goes_on_with_the_standby_too() -> None:
    """Whichever of its requests the server has not answered: it repeats that one to the standby, and is let in."""
    settings = Settings(sync="ssp", shards=2).validated()
    welcome = m.Welcome("token", WORKER, 0, 1, EPOCH, settings.packed(), (1, 2), ("", "other"), 1, THERE)
    member, lost_ns = Member("token", "here"), FAILOVER_SILENCE_NS + 1
    member.join(0)
    member.receive(0, welcome, 0)
    assert failed_over(member, lost_ns) == [ServerChanged(THERE, (5, 6))]
    assert member.ports == (5, 6) and not requests(member, lost_ns), "nothing was declared yet"

    member = Member("token", "here")
    member.join(0)
    member.receive(0, welcome, 0)
    member.declare(PLAN, 0)
    assert failed_over(member, lost_ns) == [ServerChanged(THERE, (5, 6))]
    assert requests(member, lost_ns) == [m.Declare]
    member.receive(0, m.Ready(WORKER, EPOCH, 0, tuple(split(7, 2)), b""), lost_ns)
    assert len(member.sessions) == 2 and member.sessions[0].meter is member.sessions[1].meter, "one machine now"

    member.receive(0, m.FailoverNotice(2, THERE, True), lost_ns)  # which has a standby again, and drops this member
    member.receive(0, m.Refuse(m.RefuseCode.NOT_A_MEMBER, WORKER, EPOCH, "no"), lost_ns)
    assert member.views.standby == THERE and member.tick(2 * lost_ns)
    member.receive_standby(m.FailoverNotice(3, "", True, (7, 8)), 2 * lost_ns)
    assert member.ports == (7, 8) and requests(member, 2 * lost_ns) == [m.Hello]


def test_a_word_of_a_shard_says_that_it_is_connected() -> None:
    member = a_member(2)
    for shard in range(3):
        member.cut(shard, 5)
    assert member.views.cut == {0: 5, 1: 5}
    member.cut(0, 9)
    assert member.views.cut[0] == 5, "tunnels hang up again and again"
    member.receive(1, m.HeartbeatAck(WORKER, EPOCH, 0, 6, 6), 6)
    assert member.views.cut == {0: 5} and not votes(member.tick(FAILOVER_CUT_NS + 6))
    member.cut(1, 7)
    assert votes(member.tick(FAILOVER_CUT_NS + 8)) == [(THERE, 2, 1)]


def test_it_beats_at_once_where_the_server_is_heard_after_a_silence() -> None:
    """Its heartbeats may have been lost, too: most of its lease may be over."""
    member = a_member(1)
    silent = member.timing.silent_ns(member.settings.lease)
    for heard_ns, beats in ((silent, 0), (2 * silent + 1, 1)):
        member.beat_ns = heard_ns - 1
        member.receive(0, m.HeartbeatAck(WORKER, EPOCH, 0, heard_ns, heard_ns), heard_ns)
        said = [effect.message for effect in member.tick(heard_ns) if isinstance(effect, Send)]
        assert sum(isinstance(message, m.Heartbeat) for message in said) == beats


@pytest.mark.parametrize(
    ("lease", "rows", "beat_s"), [(10, 0, 1.0), (2, 0, 0.5), (10, 150, 1.85), (10, 2000, 2.5), (2, 150, 0.5)]
)
def test_a_summary_goes_once_a_second_and_those_of_many_below_take_no_more_of_the_link(
    lease: float, rows: int, beat_s: float
) -> None:
    """Who looks at a run sees figures within two seconds (ps/dashboard/web.py)."""
    member = a_member(1)
    member.settings = replace(member.settings, lease=lease)
    below = [SummaryRow((rank,), "x" * 20, "", Summary()) for rank in range(rows)]
    member.figures.read_from(lambda: (SummaryRow((), "", "", Summary()), *below))
    said = list[int]()
    for tick in range(150):
        member.heard_ns = now_ns = tick * NS // 20
        beats = [
            each for each in member.tick(now_ns) if isinstance(each, Send) and isinstance(each.message, m.Heartbeat)
        ]
        said += [now_ns] * len(beats)
    assert said[-1] - said[-2] == beat_s * NS
    assert lease < 10 or member.figures.size <= 1.02 * SUMMARY_BYTES_PER_SECOND * beat_s


def test_who_has_turned_takes_nothing_of_the_server_but_that_it_goes_on_without_a_standby() -> None:
    for view, standby, decided in ((1, THERE, True), (2, "", False), (2, THERE, False), (1, "", False), (0, "", True)):
        ours = turned()
        assert (
            not ours.told(m.FailoverNotice(view, standby, decided))
            and ours.turned
            and (ours.view, ours.standby) == (1, THERE)
        )
    for view, standby in ((1, ""), (2, ""), (2, "tcp://next:1")):
        ours = turned()
        assert votes(ours.told(m.FailoverNotice(view, standby, True))) == [(0, view, 0)]
        assert not ours.turned and (ours.view, ours.standby) == (view, standby)


def test_the_standby_gives_the_vote_of_this_attempt_back() -> None:
    ours = turned()
    for view, attempt in ((1, 1), (3, 1), (2, 0), (2, 2)):
        assert not ours.hear(m.KeepServing(view, attempt), 7) and ours.turned
    assert not ours.hear(m.KeepServing(2, 1), 2 * FAILOVER_SILENCE_NS) and not ours.turned
    assert not ours.tick(0, 1, 2 * FAILOVER_SILENCE_NS + FAILOVER_STAY_NS), "it was given back a moment ago"
    assert not ours.tick(2 * FAILOVER_SILENCE_NS, 1, 2 * FAILOVER_SILENCE_NS + FAILOVER_STAY_NS + 1), (
        "the server is heard"
    )
    assert votes(ours.tick(0, 1, 2 * FAILOVER_SILENCE_NS + FAILOVER_STAY_NS + 1)) == [(THERE, 2, 2)]


def test_it_moves_to_a_standby_that_serves_with_all_its_shards() -> None:
    ours = turned()
    assert (
        not ours.hear(m.FailoverNotice(2, "", True), 0)
        and not ours.hear(m.FailoverNotice(0, "", True, (5, 6)), 0)
        and ours.turned
    )
    assert ours.hear(m.FailoverNotice(2, "tcp://next:1", True, (5, 6)), 0) == [ServerChanged(THERE, (5, 6))]
    assert not ours.turned and (ours.view, ours.standby) == (2, "tcp://next:1")
    assert not ours.hear(m.FailoverNotice(3, "", True, (5, 6)), 0), "it has not turned"


def test_it_asks_the_standby_too_where_the_server_lacks_votes_and_stays_meanwhile() -> None:
    ours = known()
    for now in range(4):
        ours.told(m.FailoverNotice(2, "", False))  # the server asks for a vote, again and again
        assert not ours.tick(now * NS, 1, now * NS) or now * NS > FAILOVER_SILENCE_NS
    assert ours.asking and not ours.turned
    assert votes(ours.told(m.FailoverNotice(2, "", False))) == [(0, 2, 0)], "its vote is with the server"
    assert votes(ours.tick(4 * NS, 1, 4 * NS)) == [(THERE, 3, 1)], "which counts for nobody: the view is the one after"
    assert not ours.hear(m.KeepServing(3, 1), 4 * NS) and ours.asking
    assert ours.hear(m.FailoverNotice(2, "", True, (5,)), 4 * NS) == [ServerChanged(THERE, (5,))] and not ours.listens


def test_it_asks_no_more_once_the_server_is_elected() -> None:
    ours = known()
    ours.tick(0, 1, 0)
    ours.told(m.FailoverNotice(2, "", False))
    assert votes(ours.tick(FAILOVER_SILENCE_NS + 1, 1, FAILOVER_SILENCE_NS + 1)) == [(THERE, 3, 1)]
    ours.told(m.FailoverNotice(2, "", True))
    assert not ours.tick(2 * FAILOVER_SILENCE_NS, 1, 2 * FAILOVER_SILENCE_NS) and not ours.listens
    assert not ours.hear(m.FailoverNotice(2, "", True, (5,)), 2 * FAILOVER_SILENCE_NS)
