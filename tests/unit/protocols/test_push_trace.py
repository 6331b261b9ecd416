"""The times of updates between a child and its shards, and what is known of their clocks."""

from __future__ import annotations

from typing import Any

import pytest

from narrows.protocols import messages as m
from narrows.protocols.member import push_trace
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.push_trace import FIELDS, PushTrace, offset


def push(clock: int, part: int = 0, parts: int = 1, size: int = 8, epoch: int = 7) -> m.Push:
    return m.Push(3, epoch, clock, part, parts, 0, 2, 1, b"", 0, bytes(size))


def ack(clock: int, status: m.PushStatus, received_ns: int, epoch: int = 7) -> m.PushAck:
    return m.PushAck(3, epoch, clock, status, 1.0, False, received_ns, received_ns + 1)


def state(settled: int, sent_ns: int, part: int = 0, parts: int = 1, contains: Any = ()) -> m.State:
    return m.State(3, 7, 0, part, parts, 0, 2, False, True, 1, settled, settled, contains, sent_ns, 0, b"")


def told(row: list[int]) -> dict[str, int]:
    return dict(zip(FIELDS, row, strict=True))


def test_a_row_has_each_time_of_an_update() -> None:
    trace = PushTrace(1)
    trace.sent(1, push(4, 0, 2), 100)
    trace.sent(1, push(4, 1, 2), 110)
    trace.sent(1, push(4, 0, 2), 900)  # again: the first time counts
    trace.heard(1, ack(4, m.PushStatus.FOLDED, 5000), 120)
    trace.heard(0, state(5, 6000), 125)  # of another shard
    trace.heard(1, state(4, 6100), 126)  # without this update
    assert not trace.take()
    trace.heard(1, state(5, 6200, 0, 2), 130)
    trace.heard(1, state(5, 6300, 1, 2), 140)
    (row,) = trace.take()
    assert told(row) == {
        "shard": 1, "worker": 3, "epoch": 7, "clock": 4, "bytes": 16, "sent": 100, "left": 110, "received": 5000,
        "folded": 5001, "acked": 120, "published": 6200, "arrived": 140,
    }  # fmt: skip
    assert not trace.take() and not trace.pending


def test_a_held_update_is_not_folded_yet() -> None:
    trace = PushTrace(1)
    trace.sent(0, push(4), 100)
    trace.heard(0, ack(4, m.PushStatus.HELD, 5000), 120)
    trace.heard(0, ack(4, m.PushStatus.FOLDED, 7000), 220)  # to a copy: it says nothing of when
    (row,) = trace.take(last=True)
    assert told(row)["received"] == 5000 and told(row)["folded"] == 0 and told(row)["arrived"] == 0


def test_a_state_may_contain_an_update_beyond_those_that_are_settled() -> None:
    trace = PushTrace(1)
    trace.sent(0, push(4), 100)
    trace.heard(0, state(2, 6000, contains=((3, 1.0),)), 120)
    assert not trace.take()
    trace.heard(0, state(2, 6000, contains=((4, 0.5),)), 130)
    assert told(trace.take()[0])["arrived"] == 130


def test_only_updates_of_each_nth_clock_are_traced() -> None:
    trace = PushTrace(3)
    for clock in range(9):
        trace.sent(0, push(clock), clock)
    trace.sent(0, m.Pull(3, 7, 0, 3), 1)
    assert [clock for _, _, clock in trace.pending] == [0, 3, 6]


def test_buffers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_trace, "PENDING_MAX", 4)
    monkeypatch.setattr(push_trace, "ROWS_MAX", 5)
    trace = PushTrace(1)
    for clock in range(20):
        trace.sent(0, push(clock), clock)
    assert [clock for _, _, clock in trace.pending] == [16, 17, 18, 19] and trace.dropped == 11
    assert [told(row)["clock"] for row in trace.take()] == [0, 1, 2, 3, 4]


def test_the_offset_is_half_the_difference_of_the_least_delays() -> None:
    """Clocks that differ by 1000, 30 up and 50 down at least: the offset is 990, and wrong by 40 at most."""
    meter = LinkMeter()
    assert offset(meter) is None
    for sent, more in ((0, 9), (100, 0), (200, 4)):
        meter.up.passed(sent, sent + 1000 + 30 + more)
    assert offset(meter) is None
    for sent, more in ((2000, 3), (2100, 0)):
        meter.down.passed(sent, sent - 1000 + 50 + more)
    found = offset(meter)
    assert found == [990, 40] and abs(found[0] - 1000) <= found[1]
