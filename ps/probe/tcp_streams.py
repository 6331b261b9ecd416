"""Plain TCP streams for a measurement: the sending end and the receiving end.

How it works

    SendingStream.run                        ReceivingStream.run
      | ---- zeros, in chunks -------------> |    first byte: the end of all streams of the phase is set
      |   marks: bytes delivered, by TcpInfo |    marks: bytes received
      | <------------------------- reset --- |    at that end; or the sender has sent all its bytes and stops

Each end then makes figures of its marks (flows.py). `figures` has those of a sender, `received_figures` those of all
receivers of a phase.

Rules
- Buffers have a fixed size, and every wait ends with the measurement (`MeasurementTime`).
- The receiver ends a stream by a reset, because at 1 Mbit/s the buffered bytes would take seconds. A sender stops after
  its bytes.
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
UNSENT_BYTES = 1 << 17  # bytes that the kernel takes from a sender before they can leave
MARK_S = 0.005  # from one mark of a stream to the next
MARKS_MAX = 1 << 14
GIVEN_UP_S = 1.0  # a sender waits so long beyond its time for the receiver's reset, which may be lost
TURN_S = 0.5  # a blocked call looks at the clock after this
LOOK_S = 0.05  # a sender looks at the kernel's figures after this
INFO = struct.Struct("=16xI80xI52xI32xI4xQ8xI")  # the fields of `TcpInfo` in the kernel's struct tcp_info


class MeasurementError(NarrowsError):
    """A measurement has failed; the text is one sentence."""


@dataclass
class MeasurementTime:
    """The end of a measurement. `stop` ends it at once."""

    end_s: float  # seconds of time.monotonic
    stop: threading.Event = field(default_factory=threading.Event)

    def left(self) -> float:
        return 0.0 if self.stop.is_set() else max(0.0, self.end_s - time.monotonic())

    def turn(self, most: float = TURN_S) -> float:
        """Return the seconds that a call may block, `most` at most. Raise TimeoutError once the measurement is over."""
        if not (left := self.left()):
            raise TimeoutError("the time of the measurement is over")
        return min(left, most)


class TcpInfo(NamedTuple):
    """The kernel's figures of a connection so far, in segments. They are 0 where the system does not tell them."""

    mss: int = 0  # bytes of a segment
    retransmits: int = 0
    segments: int = 0  # sent with data, retransmitted ones included
    delivered: int = 0  # acknowledged, also those behind a lost one, and those that had arrived before
    bytes: int = 0  # sent, retransmitted ones included
    repeated: int = 0  # delivered ones that had arrived before: at a full queue a sender repeats segments not lost


class StreamMarks:
    """Times, and the bytes that had passed by then: one mark each MARK_S, and the last."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int]] = []

    def add(self, now_s: float, passed: int, now: bool = False) -> None:
        """Add a mark. `now` keeps it even if the one before is less than MARK_S old."""
        rows = self.rows
        if len(rows) < 2 or ((now or rows[-1][0] - rows[-2][0] >= MARK_S) and len(rows) < MARKS_MAX):
            rows.append((now_s, passed))
        else:
            rows[-1] = (now_s, passed)


class SendingStream:
    """The sending end of a stream. `figures` holds once `run` has returned."""

    def __init__(self, sender: socket.socket) -> None:
        self.sender, self.early, self.late = sender, TcpInfo(), TcpInfo()
        self.first = _info(sender)  # before the stream, with the bytes of the token
        self.marks, self.cores = StreamMarks(), 0.0

    def run(self, clock: MeasurementTime, seconds: float, size: int) -> None:
        """Send until the receiver ends the stream, or `size` bytes are sent.

        Args:
            clock: the end of the measurement.
            seconds: the time of the stream, which the receiver measures.
            size: the most bytes.
        """
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
    """The receiving end of a stream.

    Args:
        receiver: the connection.
        ends: shared by all streams of a phase: the time at which all end, set by the first byte of any stream. Else a
            stream that begins late would have the link for itself at its end.
    """

    def __init__(self, receiver: socket.socket, ends: list[float] | None = None) -> None:
        self.receiver, self.marks, self.cores = receiver, StreamMarks(), 0.0
        self.ends = [] if ends is None else ends

    def run(self, clock: MeasurementTime, seconds: float, size: int) -> None:
        """Receive for `seconds` from the first byte of the phase on, or until the sender ends the stream."""
        receiver, buffer, spent = self.receiver, bytearray(BUFFER_BYTES), 0.0
        got, end_s, now_s = 0, 0.0, 0.0
        with suppress(OSError):
            while clock.left() and (not end_s or now_s < end_s):
                receiver.settimeout(min(clock.turn(), max(1e-3, end_s - now_s) if end_s else TURN_S))
                try:
                    count = receiver.recv_into(buffer, 0 if end_s else 1)  # one byte first: a short stream may be whole
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
    """Close a connection by a reset, which drops the bytes in its buffers."""
    with suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


def _crosses(before: int, now: int) -> bool:
    return any(before < size <= now for size in flows.SIZES)


def received_figures(streams: Sequence[ReceivingStream], first: bool = False) -> dict[str, float]:
    """Return the figures of all streams of one direction of a phase.

    Args:
        streams: the receiving ends.
        first: the phase belongs to a first visit, so the figures have the peak rate; else a stream that was alone has
            rates by size of a message.

    Raises:
        MeasurementError: a stream has carried no byte.
    """
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
