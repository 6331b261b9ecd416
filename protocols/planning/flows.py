"""The figures of one stream of a pair, and what they say of the link. Pure arithmetic; times are in seconds.

Names and units are those of iperf3 where it has them: bits_per_second, seconds, bytes, retransmits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrows.protocols.errors import RemoteProtocolError

SKIPPED = 0.4  # of a stream's time, before its rate is taken: slow start, and the loss that ends it
MIB = 1 << 20
SIZES = (MIB >> 4, MIB, 8 * MIB)  # bytes of a message, whose rates are read off the beginning of a stream
STREAM_BYTES = 1 << 30  # a message of which slow start is no part: its rate is that of the last part of a stream
PINGS = 30
PINGS_S = 1.5  # they are fewer on a long link
QUEUED_S = 0.2  # until a queue is empty that a stream has filled
FLOWS_MAX = 32  # rows of a report
Marks = Sequence[tuple[float, int]]  # ascending: time, and bytes that had passed by then


@dataclass(frozen=True, slots=True)
class Phase:
    """Streams at the same time. `ways`: of each, 0 is from listener to dialler. `weight`: its part of the round's time."""

    streams: int
    ways: tuple[int, ...]
    weight: float


PHASES = (
    Phase(1, (0,), 4.0),
    Phase(1, (1,), 4.0),
    Phase(4, (0,), 2.0),
    Phase(4, (1,), 2.0),
    Phase(1, (0, 1), 2.0),
)
PINGED = len(PHASES)  # in place of a phase: the round trips

# All that a row of a report may say: seconds, bytes, bit/s, counts, cores.
FIGURES = frozenset(
    {
        *("bits_per_second", "delivered_bits_per_second", "seconds", "bytes", "sent_bytes", "retransmits", "segments"),
        *("receiver_cores", "sender_cores", "min_rtt", "p50_rtt", "p95_rtt", "pings"),
        *(f"bits_per_second_{size}" for size in SIZES),
    }
)


@dataclass(frozen=True, slots=True)
class Flow:
    """The figures that one end has of all streams of a phase in one way."""

    phase: int
    way: int
    figures: dict[str, float]

    def plain(self) -> list[Any]:
        return [self.phase, self.way, self.figures]


def checked(rows: Any) -> list[Flow]:
    """Rows of a report. Raises RemoteProtocolError where they are none."""
    if type(rows) is not list or len(rows) > FLOWS_MAX:
        raise RemoteProtocolError("a report of ps-probe is no list of flows, or too long")
    for row in rows:
        sound = type(row) is list and len(row) == 3 and type(row[2]) is dict
        sound = sound and row[0] in range(PINGED + 1) and row[1] in (0, 1) and row[2].keys() <= FIGURES
        if not sound or not all(type(v) in (int, float) and 0 <= v < math.inf for v in row[2].values()):
            raise RemoteProtocolError(f"a report of ps-probe has a row that is none: {str(row)[:80]}")
    return [Flow(*row) for row in rows]


def last_part(marks: Marks) -> float:
    """bit/s of a stream once it had found its rate: the time after the first SKIPPED of it. 0: it had no time."""
    if len(marks) < 2 or marks[-1][0] == marks[0][0]:
        return 0.0
    begin_s = marks[0][0] + SKIPPED * (marks[-1][0] - marks[0][0])
    time_s, size = next(mark for mark in marks if mark[0] >= begin_s)
    if time_s == marks[-1][0]:  # it was over at once
        time_s, size = marks[0]
    return 8 * (marks[-1][1] - size) / (marks[-1][0] - time_s)


def stream_rate(figures: Mapping[str, float]) -> float:
    """bit/s of a flow once it had found its rate, by its sender, whom holes do not disturb. A receiver waits for what was
    lost, and then has all at once that came behind it: on a slow link that is seconds. It says the rate where a system tells
    its senders nothing."""
    return figures.get("delivered_bits_per_second") or figures["bits_per_second"]


def by_size(marks: Marks) -> dict[int, float]:
    """bit/s of a message of each of SIZES that this stream has reached: it begins as they do. The time begins with the first
    byte, so the delay of the link is no part of it."""
    found = {}
    for size in SIZES:
        end = next((mark for mark in marks if mark[1] >= size), marks[0])
        if end[0] > marks[0][0]:
            found[size] = 8 * end[1] / (end[0] - marks[0][0])
    return found


def rates(figures: Mapping[str, float]) -> dict[int, float]:
    """bit/s of each of SIZES and of STREAM_BYTES, of a stream that was alone. Where a message is longer than the stream
    was, the rest goes at the rate of the stream."""
    rate = stream_rate(figures)
    found = {STREAM_BYTES: rate}
    for size in SIZES:
        rest_s = 8 * (size - figures["bytes"]) / rate if rate else 0.0
        found[size] = figures.get(f"bits_per_second_{size}", 0.0) or (
            8 * size / (figures["seconds"] + rest_s) if rest_s > 0 else rate
        )
    return {size: found[size] for size in sorted(found) if found[size] > 0}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so much of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def phase_seconds(left_s: float, number: int, round_trip_s: float) -> float:
    """Seconds of the streams of phase `number`, so that all phases from there on end in `left_s`. Each of them takes two
    round trips more, for its row and until both know that it is over, and what is queued by then."""
    weights = [phase.weight for phase in PHASES[number:]]
    streams_s = left_s - (2 * round_trip_s + QUEUED_S) * len(weights)
    return max(0.1, streams_s * weights[0] / sum(weights))


def phase_bytes(pair_bytes: int, number: int) -> int:
    """Bytes that each stream of a phase may send, so that all streams of all phases send `pair_bytes`."""
    phase = PHASES[number]
    return max(1 << 16, pair_bytes // (len(PHASES) + 1) // phase.streams)
