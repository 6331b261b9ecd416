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
MARGIN_S = 1.5  # of a round: for what is said before and after it, and for a lost packet or two
FIRST_ROUND_S = 8.0  # at most, of a first visit: connections, round trips, and a first reading
FIRST_S, FIRST_TRIPS, FIRST_BYTES = 0.5, 3, MIB  # of a first reading: seconds and round trips, and bytes each way
DOUBT = 1.15  # four streams that have more than so many times the rate of one: the one is read once more
EXTRA = 1.25  # a stream may send so many times what the first reading lets expect,
BUFFERED = 1 << 17  # and so many bytes a second more, which kernels take and do not deliver;
UNEVEN = 1.5  # and each of four half as much again as its part of that
LEAST_BYTES = 1 << 16  # that each stream may send
Marks = Sequence[tuple[float, int]]  # ascending: time, and bytes that had passed by then


@dataclass(frozen=True, slots=True)
class FlowPhase:
    """Streams at the same time. `ways`: of each, 0 is from listener to dialler. `weight`: its part of the round's
    time."""

    streams: int
    ways: tuple[int, ...]
    weight: float

    def share(self, phase_bytes: float) -> int:
        """Bytes that each stream of one way may send, of what all are to send."""
        return max(LEAST_BYTES, int(phase_bytes * (UNEVEN if self.streams > 1 else 1.0) / self.streams))


ONE, FOUR, AGAIN, BOTH, FIRST = (0, 1), (2, 3), (4, 5), 6, (7, 8)  # numbers of phases, by way where there are two
PHASES = (
    *(FlowPhase(1, (way,), 4.0) for way in (0, 1)),
    *(FlowPhase(4, (way,), 2.0) for way in (0, 1)),
    *(FlowPhase(1, (way,), 3.0) for way in (0, 1)),  # where the one stream is in doubt
    FlowPhase(1, (0, 1), 1.0),
    *(FlowPhase(1, (way,), 1.0) for way in (0, 1)),  # a visit of its own, before all others
)
SPARE = 2.0  # weight that is kept for AGAIN, until it is known whether that is needed
PINGED = len(PHASES)  # in place of a phase: the round trips
VISITS = ((*ONE, *FOUR, *AGAIN, BOTH), FIRST)  # phases of a visit, by whether it is the first
STREAMS = sum(PHASES[number].streams * len(PHASES[number].ways) for number in VISITS[False])
# Of the seconds of a round, those in which one way may be full, as `FlowPhase.share` counts them.
WAY = (PHASES[ONE[0]].weight + UNEVEN * PHASES[FOUR[0]].weight + PHASES[BOTH].weight + SPARE) / (
    sum(PHASES[number].weight for number in (*ONE, *FOUR, BOTH)) + SPARE
)

# All that a row of a report may say: seconds, bytes, bit/s, counts, cores.
FIGURES = frozenset(
    {
        *("bits_per_second", "delivered_bits_per_second", "seconds", "bytes", "sent_bytes", "retransmits", "segments"),
        *("receiver_cores", "sender_cores", "min_rtt", "p50_rtt", "p95_rtt", "pings", "peak_bits_per_second"),
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
    """bit/s of a flow once it had found its rate, by its sender, whom holes do not disturb. A receiver waits for what
    was lost, and then has all at once that came behind it: on a slow link that is seconds. It says the rate where a
    system tells its senders nothing."""
    return figures.get("delivered_bits_per_second") or figures["bits_per_second"]


def by_size(marks: Marks) -> dict[int, float]:
    """bit/s of a message of each of SIZES that this stream has reached: it begins as they do. The time begins with the
    first byte, so the delay of the link is no part of it."""
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


def peak(marks: Marks) -> float:
    """bit/s of the fastest quarter of a stream's bytes, 0: it had no time. In slow start the newest half comes at the
    rate of the link; before that the link is idle for most of a round trip. A receiver that was late makes it too
    high."""
    least, first, best = marks[-1][1] / 4 if marks else 0.0, 0, 0.0
    for time_s, size in marks:
        while size - marks[first][1] >= least > 0:
            if time_s > marks[first][0]:
                best = max(best, 8 * (size - marks[first][1]) / (time_s - marks[first][0]))
            first += 1
    return best


def begun(rows: Sequence[Flow]) -> tuple[float, list[float]] | None:
    """The shortest round trip, and bit/s of each way, of both ends' rows of a first visit; None where one is not
    there."""
    trip = next((row.figures.get("min_rtt") for row in rows if row.phase == PINGED), None)
    rates = {row.way: row.figures.get("peak_bits_per_second") for row in rows if row.phase in FIRST}
    found = [rate for way in (0, 1) if (rate := rates.get(way)) is not None]
    return None if trip is None or len(found) < 2 else (trip, found)


def whole(rows: Sequence[Flow]) -> bool:
    """Whether both ends' rows of the second visit are all there, and have rates."""
    asked = {(number, way) for number in (*ONE, *FOUR, BOTH) for way in PHASES[number].ways}
    said = {"bits_per_second", "bytes", "seconds", "retransmits", "segments"}
    return asked <= {
        (row.phase, row.way) for row in rows if said <= row.figures.keys() and stream_rate(row.figures) > 0
    }


def doubtful(rows: Sequence[Flow]) -> list[int]:
    """The phases that read one stream once more, by the rows of one end: where four have much more than one, it lost a
    packet at a bad time, or it loses many."""
    rate = {
        row.phase: row.figures.get("delivered_bits_per_second") or row.figures.get("bits_per_second", 0.0)
        for row in rows
        if row.phase in (*ONE, *FOUR)
    }
    return [AGAIN[way] for way in (0, 1) if rate[FOUR[way]] > DOUBT * rate[ONE[way]] > 0]


def spared(more: Sequence[int]) -> float:
    """By how much a phase of weight 1 gets shorter, where these take what was kept for them and BOTH its part of it."""
    weight = PHASES[BOTH].weight
    return (weight + SPARE) / (weight + sum(PHASES[number].weight for number in more))


def unit_seconds(left_s: float, numbers: Sequence[int], spare: float, round_trip_s: float) -> float:
    """Seconds of a phase of weight 1, so that these phases end in `left_s`, and those of the weight `spare`. Each takes
    two round trips more, for its row and until both know that it is over, and what is queued by then."""
    weight = sum(PHASES[number].weight for number in numbers) + spare
    return max(0.0, left_s - (2 * round_trip_s + QUEUED_S) * (len(numbers) + (spare > 0))) / weight


def allowed(bits_per_second: float) -> float:
    """Bytes a second that may go one way, where the first reading has this rate."""
    return EXTRA * bits_per_second / 8 + BUFFERED


def pair_bytes(bytes_s: Sequence[float], seconds: float) -> float:
    """Bytes that the streams of a round of `seconds` send at most, with so many bytes a second allowed each way."""
    return sum(bytes_s) * (seconds - MARGIN_S) * WAY + LEAST_BYTES * STREAMS


def cut(bytes_s: Sequence[float], seconds: float, most: float) -> list[float]:
    """The same, less where needed: so much that `pair_bytes` is not above `most`, or each stream has LEAST_BYTES."""
    least = LEAST_BYTES * STREAMS
    share = max(0.0, most - least) / (pair_bytes(bytes_s, seconds) - least)
    return [each * min(1.0, share) for each in bytes_s]
