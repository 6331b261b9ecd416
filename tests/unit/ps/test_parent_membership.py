"""A cluster that leaves the run above, and one that cannot join it."""

from __future__ import annotations

import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, Log, Send, StopProcess
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow
from narrows.protocols.member.member import Member, MemberPhase
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ShardResources
from narrows.ps.shard.shard import Shard


def cluster(stands: bool = False) -> tuple[Server, Coordinator, Member]:
    settings = Settings(sync="bsp").validated()
    coordinator, member = Coordinator(settings, 7, child=True), Member("token", "here")
    means = ShardResources(child=True, member=member, coordinator=coordinator)
    server = Server(Shard(0, settings, 1, 5, (), means), coordinator, member, "tcp://above:1", stands=stands)
    server.happen(MachineEvent(EventKind.START, NS))
    return server, coordinator, member


@pytest.mark.parametrize("done", [True, False])
def test_one_that_is_done_ends_with_the_answer_and_not_with_what_its_own_shards_say_then(done: bool) -> None:
    """All was at rest when it said good-bye. A shard that is killed then is not, and asks other clusters that are gone. A
    cluster without workers says the same good-bye, and stays."""
    server, coordinator, member = cluster()
    assert server.membership is not None
    server.happen(MachineEvent(EventKind.ABOVE, NS, message=m.HeartbeatAck(-1, 0, 0, 0, 0, "")))  # somebody is there
    told = server.membership.leave(NS) if done else member.leave(-1, NS)
    assert [type(effect.message) for effect in told if isinstance(effect, Send)] == [m.Leave]
    assert not coordinator.checkpoint_schedule.at_rest
    answer = MachineEvent(EventKind.ABOVE, 2 * NS, message=m.LeaveAck("token"))
    assert server.happen(answer) == ([StopProcess()] if done else []) and member.phase is MemberPhase.OVER
    assert server.happen(answer) == [], "an answer that comes twice is none"


def test_one_to_which_no_server_above_has_answered_waits_for_no_answer() -> None:
    server, _, _ = cluster()
    assert server.membership is not None
    said, end = server.membership.leave(NS)
    assert isinstance(said, Send) and isinstance(said.message, m.Leave) and end == StopProcess()


@pytest.mark.parametrize("stands", [True, False])
def test_one_that_may_have_a_standby_does_not_gossip(stands: bool) -> None:
    """Other clusters would not find it where the standby is."""
    server, _, _ = cluster(stands)
    above = Settings(sync="gossip").validated()
    server.happen(MachineEvent(EventKind.ABOVE, 2 * NS, message=m.Welcome("token", 0, 0, 1, 1, above.packed(), (9,))))
    assert server.membership is not None
    assert ("leave out --replicas" in server.membership.final.text) == stands


def test_a_cluster_does_not_join_a_server_with_shards_on_other_machines() -> None:
    settings = Settings(sync="bsp", push="update", shards=2).validated()
    coordinator, member = Coordinator(settings, 7, child=True), Member("token", "here")
    means = ShardResources(child=True, member=member, coordinator=coordinator)
    server = Server(Shard(0, settings, 1, 5, (), means), coordinator, member, "tcp://above:1")
    server.happen(MachineEvent(EventKind.START, NS))
    welcome = m.Welcome("token", 0, 0, 1, 3, settings.packed(), (1, 2), ("", "10.0.0.2"))
    server.happen(MachineEvent(EventKind.ABOVE, 2 * NS, message=welcome))
    assert server.membership is not None and coordinator.over
    end = server.membership.final
    assert end.code == m.RefuseCode.INCOMPATIBLE and "end ps-serve --join there first" in end.text


def test_the_clocks_of_those_below_go_up_as_they_are_at_one_moment() -> None:
    """Each of their heartbeats was at another: between these a member at the same clock would look far behind."""
    server, coordinator, member = cluster()
    run, rounds = coordinator.run, coordinator.clocks
    for rank, (clock, told) in enumerate(((12, 11), (11, 3), (0, -1))):
        seat = run.sit(m.Hello(f"token {rank}", f"host {rank}"), b"peer", NS)
        seat.declare(5, clock, "")
        rounds.enter(seat, NS)
        deeper = SummaryRow((rank, 4), "", "", Summary(clock=7))
        seat.rows = (SummaryRow((rank,), seat.host, "", Summary(clock=told, steps=told)), deeper) if told >= 0 else ()
    own, *below = member.figures.rows()
    assert own.path == () and server.membership is not None
    assert [(row.path, row.summary.clock) for row in below] == [((0,), 12), ((0, 4), 7), ((1,), 11), ((1, 4), 7)]
    assert [row.summary.steps for row in below if len(row.path) == 1] == [11, 3]


def test_who_goes_before_it_is_done_is_lost_and_the_server_above_is_told_how_many() -> None:
    _, coordinator, member = cluster()
    run, rounds = coordinator.run, coordinator.clocks
    for token, clock, epoch, how in (("done", 0, 5, "left"), ("crashed", -1, 5, "stopped"), ("idle", -1, 0, "left")):
        seat = run.sit(m.Hello(token, "host"), b"peer", NS)
        if epoch:
            seat.declare(epoch, 0, "")
            rounds.enter(seat, NS)
        told = coordinator.handle(b"peer", m.Leave(token, clock), 2 * NS)
        assert [each.values["how"] for each in told if isinstance(each, Log) and each.event == "member"] == [how]
        assert member.figures.rows()[0].summary.lost == (token != "done")
