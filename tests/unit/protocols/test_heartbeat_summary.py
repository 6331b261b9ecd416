"""A member's summary of itself: whole or refused, bounded, and never a reason to lose the member that says it."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
from kit.seed import SEED

from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.heartbeat_summary import (
    COLUMNS,
    LEVELS_MAX,
    NAME_MAX,
    ROWS_BYTES_MAX,
    STALE,
    Summary,
    SummaryRow,
    packed,
    unpacked,
)
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.metrics import MemberMetrics
from narrows.protocols.wire import pack, unpack

SOME = Summary(seconds=2.5, clock=7, steps=7, loss=-0.5, stale=(1, 6, *[0] * (len(STALE) - 1)), held_back=3.25)
ROWS = (
    SummaryRow((), "", "--sync bsp", SOME),
    SummaryRow((0,), "leipzig", "", replace(SOME, loss=None)),
    SummaryRow((0, 3), "leipzig", "", Summary()),
)
# A value of every type that msgpack knows, and beyond the limits of those that are let in.
INTRUDERS: tuple[Any, ...] = (
    *(None, True, -1, 7, 1 << 53 | 1, -0.5, 0.5, float("nan"), float("inf"), "text", "two\nlines", "\x1b[2J"),
    *("x" * (NAME_MAX + 1), b"raw", {}, [], [1], [-1], [1] * (LEVELS_MAX + 1), [0.5], ["1"], [[]]),
)


def test_rows_come_back_as_they_were() -> None:
    assert unpacked(packed(ROWS)) == ROWS
    assert unpacked(b"") == ()


@pytest.mark.parametrize("column", range(len(COLUMNS)), ids=[name for name, _ in COLUMNS])
def test_what_does_not_fit_a_column_is_refused_by_its_name(column: int) -> None:
    refused = 0
    for value in INTRUDERS:
        rows: Any = unpack(packed(ROWS))
        rows[1][column] = value
        if COLUMNS[column][1](value):
            continue
        refused += 1
        with pytest.raises(RemoteProtocolError, match=f"for {COLUMNS[column][0]}$") as error:
            unpacked(pack(rows))
        assert "\n" not in str(error.value) and len(str(error.value)) < 120
    assert refused >= len(INTRUDERS) // 2


@pytest.mark.parametrize("rows", [[], {}, 7, [[]], [7], [[1, 2]], None])
def test_what_is_no_rows_is_refused(rows: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        unpacked(pack(rows))


def test_a_summary_begins_with_its_sender() -> None:
    first, second, _ = ROWS
    for wrong in ((second,), (second, first), (first, first)):
        with pytest.raises(RemoteProtocolError, match="begins with its sender"):
            unpacked(packed(wrong))


def test_bytes_that_were_changed_are_refused_or_taken_whole() -> None:
    rng, good = random.Random(f"{SEED} summary"), packed(ROWS)
    refused, said = 0, ""
    for _ in range(3_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            rows = unpacked(bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data))
        except RemoteProtocolError as error:
            refused, said = refused + 1, said + str(error)
        else:
            assert all(isinstance(row, SummaryRow) for row in rows)
    assert 300 < refused < 3_000 and "\n" not in said, f"NARROWS_TEST_SEED={SEED}"


def test_a_member_is_not_refused_for_what_it_has_counted() -> None:
    odd = Summary(loss=float("nan"), held_back=float("inf"), clock=-1, bytes_up=1 << 60, rate_up=-1.0)
    ((row),) = unpacked(packed([SummaryRow((), "", "", odd)]))
    found = row.summary
    assert (found.loss, found.held_back, found.clock, found.bytes_up, found.rate_up) == (None, 0.0, 0, 1 << 53, 0.0)


def test_a_heartbeat_is_bounded_and_says_what_it_leaves_out() -> None:
    many = [ROWS[0], *(SummaryRow((rank,), "h" * NAME_MAX, "", SOME) for rank in range(2_000))]
    told = packed(many)
    rows = unpacked(told)
    assert len(told) <= ROWS_BYTES_MAX and len(rows) > 60
    assert rows[0].summary.hidden == len(many) - len(rows) and rows[1:] == tuple(many[1 : len(rows)])


def test_a_server_sees_its_own_ranks_and_hosts() -> None:
    first, second, third = (row.below(4, "bordeaux") for row in ROWS)
    assert [row.path for row in (first, second, third)] == [(4,), (4, 0), (4, 0, 3)]
    assert [row.host for row in (first, second, third)] == ["bordeaux", "leipzig", "leipzig"]


def test_a_member_adds_what_its_link_does_and_says_nothing_of_itself_otherwise() -> None:
    figures, meter = MemberMetrics(), LinkMeter()
    assert figures.packed(meter, 1, 5) == b""
    for sent in range(0, 4_000_000_000, 500_000_000):
        meter.up.passed(sent, sent + 10_000_000)
        meter.down.passed(sent + 10_000_000, sent + 20_000_000)
        meter.up.passed(sent, sent + 110_000_000, 1_000_000)  # 0.1 s for 1 MB beside what an idle link takes
    figures.read_from(lambda: (SummaryRow((), "", "--sync bsp", SOME),))
    figures.packed(meter, 2, 1_000_000_000)
    (row,) = unpacked(figures.packed(meter, 2, 3_500_000_000))
    assert row.summary.seconds == 2.5 and row.summary.loss == SOME.loss
    assert row.summary.rate_up == pytest.approx(2e7)  # of both streams of a cluster, of which the meter has seen one
    assert row.summary.round_trip_seconds == pytest.approx(0.02)
    assert row.summary.busy_up_seconds == pytest.approx(0.8)


def test_what_is_read_of_a_link_is_what_came_since() -> None:
    meter = LinkMeter()
    meter.up.passed(0, 10)
    meter.up.passed(100, 160, 500)
    first, second = meter.read(), meter.read()
    assert (first.up_bytes, first.up_ns) == (500, 50) and (second.up_bytes, second.up_ns) == (0, 0)
    assert meter.up.bytes == 500  # for the summary it is a counter


def test_a_rows_figures_of_teachers_come_back_and_are_bounded() -> None:
    figures: dict[str, Any] = {"teacher_bytes_up": 5, "teacher_bytes_down": 1 << 60, "teacher_seconds": float("nan")}
    (row,) = unpacked(packed([SummaryRow((), "", "", replace(SOME, teacher_missed=3, **figures))]))
    found = row.summary
    assert (found.teacher_bytes_up, found.teacher_bytes_down) == (5, 1 << 53)
    assert (found.teacher_missed, found.teacher_seconds) == (3, 0.0)


def test_each_figure_has_a_column() -> None:
    assert [name for name, _ in COLUMNS] == ["path", "host", "runs", *(each.name for each in fields(Summary))]
