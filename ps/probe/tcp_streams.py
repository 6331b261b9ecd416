"""Plain TCP streams for a measurement: the end that sends, and the end that receives.

Rules
- Buffers are fixed, and every wait ends with the measurement: `MeasurementTime` says how long that is.
- A receiver ends a stream, by a reset: at 1 Mbit/s what is still buffered would take seconds. A sender stops at its
  bytes.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from narrows.protocols.errors import NarrowsError
from narrows.ps.probe import flows

CHUNK = bytes(1 << 16)
BUFFER_BYTES = 1 << 18
UNSENT_BYTES = 1 << 17  # that the kernel takes from a sender before they can leave
MARK_S = 0.005  # from one mark of a stream to the next
MARKS_MAX = 1 << 14
GIVEN_UP_S = 1.0  # after its time a sender waits so long for the receiver to end a stream: its reset may be lost
TURN_S = 0.5  # a blocked call looks at the clock so often
LOOK_S = 0.05  # and a sender at what has been delivered
INFO = struct.Struct("=16xI80xI52xI32xI4xQ8xI")  # of struct tcp_info: its fields of Info


class MeasurementError(NarrowsError):
    """A measurement that came to nothing, in one sentence."""


@dataclass
class MeasurementTime:
    """When a measurement must be over. `stop` ends it at once."""

    end_s: float
    stop: threading.Event = field(default_factory=threading.Event)

    def left(self) -> float:
        return 0.0 if self.stop.is_set() else max(0.0, self.end_s - time.monotonic())

    def turn(self, most: float = TURN_S) -> float:
        """Seconds that a call may block. Raises TimeoutError when there are none."""
        if not (left := self.left()):
            raise TimeoutError("the time of the measurement is over")
        return min(left, most)


class TcpInfo(NamedTuple):
    """The kernel's figures of a connection so far, in its segments. Zeros where the system does not say."""

    mss: int = 0  # bytes
    retransmits: int = 0
    segments: int = 0  # with data, retransmitted ones included
    delivered: int = 0  # acknowledged, also those behind a hole, and those that were there already
    bytes: int = 0  # sent, with retransmitted ones
    repeated: int = 0  # of those delivered, there already: a full queue lets a sender repeat what is not lost


class StreamMarks:
    """Times, and what had passed by then: one each MARK_S, and the last."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int]] = []

    def add(self, now_s: float, passed: int, now: bool = False) -> None:
        """`now`: this one must be kept."""
        rows = self.rows
        if len(rows) < 2 or ((now or rows[-1][0] - rows[-2][0] >= MARK_S) and len(rows) < MARKS_MAX):
            rows.append((now_s, passed))
        else:
            rows[-1] = (now_s, passed)


class SendingStream:
    """The end of a stream that sends. `figures` once it is over."""

    def __init__(self, sender: socket.socket) -> None:
        self.sender, self.early, self.late = sender, TcpInfo(), TcpInfo()
        self.first = _info(sender)  # it has shown its token
        self.marks, self.cores = StreamMarks(), 0.0

    def run(self, clock: MeasurementTime, seconds: float, size: int) -> None:
        """Send until the receiver ends the stream, `size` bytes at most."""
        sender, begin, spent, left = self.sender, time.monotonic(), time.thread_time(), size
        clock = MeasurementTime(min(clock.end_s, begin + seconds + GIVEN_UP_S), clock.stop)
        with suppress(OSError):
            sender.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25), UNSENT_BYTES)
            while left and clock.left():
                sender.settimeout(clock.turn(LOOK_S))
                with suppress(TimeoutError):
                    left -= sender.send(memoryview(CHUNK)[:left])
                now_s, info = time.monotonic(), _info(sender)
                self.marks.add(now_s, (info.delivered - info.repeated) * info.mss)
                if now_s - begin < flows.SKIPPED * seconds:
                    self.early = info
            self.cores = (time.thread_time() - spent) / max(1e-9, time.monotonic() - begin)
            if not left:
                sender.shutdown(socket.SHUT_WR)
            while clock.left():
                sender.settimeout(clock.turn())
                with suppress(TimeoutError):
                    if not sender.recv(1):
                        break
        self.cores = self.cores or (time.thread_time() - spent) / max(1e-9, time.monotonic() - begin)
        self.late = _info(sender)
        _reset(sender)

    def figures(self) -> dict[str, float]:
        return {
            "delivered_bits_per_second": flows.last_part(self.marks.rows),
            "retransmits": float(self.late.retransmits - self.early.retransmits),
            "segments": float(self.late.segments - self.early.segments),
            "sent_bytes": float(self.late.bytes - self.first.bytes),
            "sender_cores": self.cores,
        }


def _info(sender: socket.socket) -> TcpInfo:
    with suppress(OSError, AttributeError, struct.error):
        return TcpInfo(*INFO.unpack_from(sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)))
    return TcpInfo()


class ReceivingStream:
    """The other end. `ends`: when all streams of its phase end, which the first byte of any of them says. One that
    begins late would have the link for itself at last."""

    def __init__(self, receiver: socket.socket, ends: list[float] | None = None) -> None:
        self.receiver, self.marks, self.cores = receiver, StreamMarks(), 0.0
        self.ends = [] if ends is None else ends

    def run(self, clock: MeasurementTime, seconds: float, size: int) -> None:
        """For `seconds` from the first byte on, or until the sender ends it."""
        receiver, buffer, spent = self.receiver, bytearray(BUFFER_BYTES), 0.0
        got, end_s, now_s = 0, 0.0, 0.0
        with suppress(OSError):
            while clock.left() and (not end_s or now_s < end_s):
                receiver.settimeout(min(clock.turn(), max(1e-3, end_s - now_s) if end_s else TURN_S))
                try:
                    count = receiver.recv_into(buffer, 0 if end_s else 1)  # a short stream may have come whole by then
                except TimeoutError:
                    count = -1
                now_s = time.monotonic()
                if not count:
                    break
                if not end_s and count > 0:
                    self.ends.append(now_s + seconds)
                    end_s, spent = self.ends[0], time.thread_time()
                    self.marks.add(now_s, 0)
                if count > 0:
                    got += count
                    self.marks.add(now_s, got, now=_crosses(got - count, got))
        if end_s:
            self.cores = (time.thread_time() - spent) / max(1e-9, now_s - self.marks.rows[0][0])
        _reset(receiver)


def _reset(stream: socket.socket) -> None:
    """Close it, and throw away what is buffered."""
    with suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


def _crosses(before: int, now: int) -> bool:
    return any(before < size <= now for size in flows.SIZES)


def received_figures(streams: Sequence[ReceivingStream], first: bool = False) -> dict[str, float]:
    """Return the figures of all streams of one way of a phase, those by size of a stream that is alone. `first`: it is
    the first reading. Raises MeasureError where nothing came."""
    marks = [stream.marks.rows for stream in streams]
    if not all(len(rows) > 1 for rows in marks):
        raise MeasurementError("a stream was opened and nothing came through it")
    rate = sum(map(flows.last_part, marks))
    found: dict[str, float] = {
        "bits_per_second": rate,
        "seconds": max(rows[-1][0] - rows[0][0] for rows in marks),
        "bytes": float(sum(rows[-1][1] for rows in marks)),
        "receiver_cores": sum(stream.cores for stream in streams),
    }
    if first:
        found["peak_bits_per_second"] = flows.peak(marks[0])
    elif len(streams) == 1:
        found |= {f"bits_per_second_{size}": value for size, value in flows.by_size(marks[0]).items()}
    return found
