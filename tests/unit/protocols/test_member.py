"""A member that leaves."""

from __future__ import annotations

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import Send
from narrows.protocols.member.member import Member, MemberPhase


def test_a_server_that_has_never_answered_is_told_once_and_not_waited_for() -> None:
    ours = Member("token", "host")
    ours.join(0)
    assert ours.leave(-1, 1) == [Send(0, m.Leave("token", -1)), e.MemberLeft()] and ours.phase is MemberPhase.OVER
    assert ours.tick(1 << 40) == []


def test_one_that_has_answered_is_waited_for() -> None:
    ours = Member("token", "host")
    ours.join(0)
    ours.receive(0, m.HeartbeatAck(-1, 0, 0, 0, 0, ""), 1)
    assert ours.leave(-1, 2) == [Send(0, m.Leave("token", -1))] and ours.phase is MemberPhase.LEAVING
