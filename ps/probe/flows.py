"""The figures of a pair's streams, and the rates of the link that follow from them. No I/O; times are in seconds.

How it works

    first visit    round trips, then FIRST: one stream each way -> a rough rate -> the bytes that the second visit may
    send second visit   ONE: a stream each way   FOUR: four streams each way   [AGAIN]   BOTH: a stream each way at once

1. A stream keeps marks: times, and the bytes that had passed by then.
2. `last_part` takes the rate of a stream from its marks, without slow start. `by_size` takes the rate of a message of
   each of SIZES from the beginning of the stream, slow start included. `peak` takes the rough rate of a first visit.
3. If four streams together are much faster than one, the one lost a packet at a bad time, or loses many. Then
   `doubtful` has it measured once more (AGAIN), in time that was kept for that (SPARE).
4. The weights of phases divide the time of a visit (`unit_seconds`).

Names and units are those of iperf3 where iperf3 has them: bits_per_second, seconds, bytes, retransmits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrows.protocols.errors import RemoteProtocolError

SKIPPED = 0.4  # share of a stream's time before its rate is taken: slow start, and the loss that ends it
MIB = 1 << 20
SIZES = (MIB >> 4, MIB, 8 * MIB)  # bytes of messages whose rates are read off the beginning of a stream
STREAM_BYTES = 1 << 30  # a message so long that slow start does not count: its rate is that of a stream's last part
PINGS = 30  # round trips of a first visit
PINGS_S = 1.5  # limit of their time: a long link has fewer round trips
QUEUED_S = 0.2  # until a queue that a stream has filled is empty
FLOWS_MAX = 32  # rows of a report
MARGIN_S = 1.5  # of a round: for the messages before and after the streams, and for a lost packet or two
FIRST_ROUND_S = 8.0  # limit of a first visit: connections, round trips, and the streams of FIRST
FIRST_S, FIRST_TRIPS, FIRST_BYTES = 0.5, 3, MIB  # a FIRST stream: seconds, plus round trips; bytes at most
DOUBT = 1.15  # if four streams have more than this multiple of one stream's rate, the one is measured once more
EXTRA = 1.25  # a direction may send this multiple of the bytes that the first visit's rate lets expect,
BUFFERED = 1 << 17  # plus so many bytes a second, which kernels take and do not deliver;
UNEVEN = 1.5  # and each of four streams may send this multiple of its even share
LEAST_BYTES = 1 << 16  # that every stream may send
Marks = Sequence[tuple[float, int]]  # ascending: time, and bytes that had passed by then


@dataclass(frozen=True, slots=True)
class FlowPhase:
    """Streams that run at the same time."""

    streams: int  # in each direction of `ways`
    ways: tuple[int, ...]  # directions: 0 is from listener to dialler, 1 back
    weight: float  # share of the visit's time, beside the weights of the other phases

    def share(self, phase_bytes: float) -> int:
        """Return the most bytes of one stream, where all streams of a direction together may send `phase_bytes`."""
        return max(LEAST_BYTES, int(phase_bytes * (UNEVEN if self.streams > 1 else 1.0) / self.streams))


ONE, FOUR, AGAIN, BOTH, FIRST = (0, 1), (2, 3), (4, 5), 6, (7, 8)  # numbers of phases; of two, one a direction
PHASES = (
    *(FlowPhase(1, (way,), 4.0) for way in (0, 1)),
    *(FlowPhase(4, (way,), 2.0) for way in (0, 1)),
    *(FlowPhase(1, (way,), 3.0) for way in (0, 1)),  # only where the one stream is in doubt
    FlowPhase(1, (0, 1), 1.0),
    *(FlowPhase(1, (way,), 1.0) for way in (0, 1)),  # the first visit
)
SPARE = 2.0  # weight that is kept for AGAIN until `doubtful` has decided
PINGED = len(PHASES)  # the number that stands for round trips in the place of a phase
VISITS = ((*ONE, *FOUR, *AGAIN, BOTH), FIRST)  # phases of a visit, by "is a first visit"
STREAMS = sum(PHASES[number].streams * len(PHASES[number].ways) for number in VISITS[False])
# Share of a round's seconds in which one direction may be full, with the bytes that `FlowPhase.share` allows.
WAY = (PHASES[ONE[0]].weight + UNEVEN * PHASES[FOUR[0]].weight + PHASES[BOTH].weight + SPARE) / (
    sum(PHASES[number].weight for number in (*ONE, *FOUR, BOTH)) + SPARE
)

# Names of the figures in a row of a report: seconds, bytes, bit/s, counts, cores.
FIGURES = frozenset(
    {
        *("bits_per_second", "delivered_bits_per_second", "seconds", "bytes", "sent_bytes", "retransmits", "segments"),
        *("receiver_cores", "sender_cores", "min_rtt", "p50_rtt", "p95_rtt", "pings", "peak_bits_per_second"),
        *(f"bits_per_second_{size}" for size in SIZES),
    }
)


@dataclass(frozen=True, slots=True)
class Flow:
    """The figures that one end has of all streams of a phase in one direction."""

    phase: int
    way: int
    figures: dict[str, float]

    def plain(self) -> list[Any]:
        return [self.phase, self.way, self.figures]


def checked(rows: Any) -> list[Flow]:
    """Check the rows of a report, and return them. Raise RemoteProtocolError for a wrong row."""
    if type(rows) is not list or len(rows) > FLOWS_MAX:
        raise RemoteProtocolError("a report of ps-probe is no list of flows, or too long")
    for row in rows:
        sound = type(row) is list and len(row) == 3 and type(row[2]) is dict
        sound = sound and row[0] in range(PINGED + 1) and row[1] in (0, 1) and row[2].keys() <= FIGURES
        if not sound or not all(type(v) in (int, float) and 0 <= v < math.inf for v in row[2].values()):
            raise RemoteProtocolError(f"a report of ps-probe has an invalid row: {str(row)[:80]}")
    return [Flow(*row) for row in rows]


def last_part(marks: Marks) -> float:
    """Return the bit/s of a stream after the first SKIPPED of its time; 0 if the stream had no time."""
    if len(marks) < 2 or marks[-1][0] == marks[0][0]:
        return 0.0
    begin_s = marks[0][0] + SKIPPED * (marks[-1][0] - marks[0][0])
    time_s, size = next(mark for mark in marks if mark[0] >= begin_s)
    if time_s == marks[-1][0]:  # the stream was too short: take all of it
        time_s, size = marks[0]
    return 8 * (marks[-1][1] - size) / (marks[-1][0] - time_s)


def stream_rate(figures: Mapping[str, float]) -> float:
    """Return the bit/s of a flow after slow start, by the figures of its sender.

    A lost packet does not disturb the sender's figure. A receiver waits for the lost packet and then gets all bytes
    behind it at
    once: on a slow link it waits for seconds. The receiver's figure counts where the system tells senders nothing.
    """
    return figures.get("delivered_bits_per_second") or figures["bits_per_second"]


def by_size(marks: Marks) -> dict[int, float]:
    """Return the bit/s of a message of each of SIZES that this stream has reached.

    A message begins like a stream. The time begins with the first byte, so it does not contain the delay of the link.
    """
    found = {}
    for size in SIZES:
        end = next((mark for mark in marks if mark[1] >= size), marks[0])
        if end[0] > marks[0][0]:
            found[size] = 8 * end[1] / (end[0] - marks[0][0])
    return found


def rates(figures: Mapping[str, float]) -> dict[int, float]:
    """Return the bit/s of messages of each of SIZES and of STREAM_BYTES, from a stream that was alone.

    Of a message longer than the stream, the rest counts at the rate of the stream.
    """
    rate = stream_rate(figures)
    found = {STREAM_BYTES: rate}
    for size in SIZES:
        rest_s = 8 * (size - figures["bytes"]) / rate if rate else 0.0
        found[size] = figures.get(f"bits_per_second_{size}", 0.0) or (
            8 * size / (figures["seconds"] + rest_s) if rest_s > 0 else rate
        )
    return {size: found[size] for size in sorted(found) if found[size] > 0}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def peak(marks: Marks) -> float:
    """Return the bit/s of the fastest quarter of a stream's bytes; 0 if the stream had no time.

    In slow start the newest half of the bytes arrives at the rate of the link; before, the link is idle for most of a
    round trip. A receiver that reads late makes the rate too high.
    """
    least, first, best = marks[-1][1] / 4 if marks else 0.0, 0, 0.0
    for time_s, size in marks:
        while size - marks[first][1] >= least > 0:
            if time_s > marks[first][0]:
                best = max(best, 8 * (size - marks[first][1]) / (time_s - marks[first][0]))
            first += 1
    return best


def begun(rows: Sequence[Flow]) -> tuple[float, list[float]] | None:
    """Read a first visit from both ends' rows.

    Returns:
        The shortest round trip, and the bit/s of each direction; None where a row is missing.
    """
    trip = next((row.figures.get("min_rtt") for row in rows if row.phase == PINGED), None)
    rates = {row.way: row.figures.get("peak_bits_per_second") for row in rows if row.phase in FIRST}
    found = [rate for way in (0, 1) if (rate := rates.get(way)) is not None]
    return None if trip is None or len(found) < 2 else (trip, found)


def whole(rows: Sequence[Flow]) -> bool:
    """Return True if the rows of both ends of a second visit are complete and have rates."""
    asked = {(number, way) for number in (*ONE, *FOUR, BOTH) for way in PHASES[number].ways}
    said = {"bits_per_second", "bytes", "seconds", "retransmits", "segments"}
    return asked <= {
        (row.phase, row.way) for row in rows if said <= row.figures.keys() and stream_rate(row.figures) > 0
    }


def doubtful(rows: Sequence[Flow]) -> list[int]:
    """Return the phases of AGAIN that are needed, by the rows of one end.

    Where four streams are much faster than one, the one lost a packet at a bad time, or it loses many.
    """
    rate = {
        row.phase: row.figures.get("delivered_bits_per_second") or row.figures.get("bits_per_second", 0.0)
        for row in rows
        if row.phase in (*ONE, *FOUR)
    }
    return [AGAIN[way] for way in (0, 1) if rate[FOUR[way]] > DOUBT * rate[ONE[way]] > 0]


def spared(more: Sequence[int]) -> float:
    """Return the factor on the time of a phase of weight 1, once the phases `more` and BOTH share the time of SPARE."""
    weight = PHASES[BOTH].weight
    return (weight + SPARE) / (weight + sum(PHASES[number].weight for number in more))


def unit_seconds(left_s: float, numbers: Sequence[int], spare: float, round_trip_s: float) -> float:
    """Return the seconds of a phase of weight 1.

    Each phase takes two round trips more, for its row and until both ends know that it is over, and the time of a
    queue.

    Args:
        left_s: seconds in which all phases must end.
        numbers: the phases that are left.
        spare: weight that is kept for further phases.
        round_trip_s: the round trip.
    """
    weight = sum(PHASES[number].weight for number in numbers) + spare
    return max(0.0, left_s - (2 * round_trip_s + QUEUED_S) * (len(numbers) + (spare > 0))) / weight


def allowed(bits_per_second: float) -> float:
    """Return the bytes a second that one direction may send, by the rate that the first visit has measured."""
    return EXTRA * bits_per_second / 8 + BUFFERED


def pair_bytes(bytes_s: Sequence[float], seconds: float) -> float:
    """Return the most bytes that a pair sends in a round of `seconds`, with `bytes_s` allowed in each direction."""
    return sum(bytes_s) * (seconds - MARGIN_S) * WAY + LEAST_BYTES * STREAMS


def cut(bytes_s: Sequence[float], seconds: float, most: float) -> list[float]:
    """Return `bytes_s`, reduced so that `pair_bytes` does not exceed `most`; each stream keeps LEAST_BYTES."""
    least = LEAST_BYTES * STREAMS
    share = max(0.0, most - least) / (pair_bytes(bytes_s, seconds) - least)
    return [each * min(1.0, share) for each in bytes_s]
