"""Plain TCP streams between two machines, for one measurement: a listener and a dialler go through flows.PHASES together.

The dialler's first connection is the line. On it go round trips, then a row for each phase (seconds, bytes of a stream). The
dialler opens its streams, and both begin when the listener has them all. Every connection shows the token first.

Rules
- Buffers are fixed, and every wait ends with the measurement: `Clock` says how long that is.
- A receiver ends a stream, by a reset: at 1 Mbit/s what is still buffered would take seconds. A sender stops at its bytes.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from narrows.protocols.errors import NarrowsError
from narrows.protocols.planning import flows
from narrows.protocols.planning.flows import PHASES, PINGED, PINGS, PINGS_S, Flow

CHUNK = bytes(1 << 16)
BUFFER_BYTES = 1 << 18
UNSENT_BYTES = 1 << 17  # that the kernel takes from a sender before they can leave
MARK_S = 0.005  # from one mark of a stream to the next
MARKS_MAX = 1 << 14
MARGIN_S = 2.0  # of a round: for what is said before and after it, and for a lost packet or two
GIVEN_UP_S = 1.0  # after its time a sender waits so long for the receiver to end a stream: its reset may be lost
CONNECT_S = 5.0
TURN_S = 0.5  # a blocked call looks at the clock so often
LOOK_S = 0.05  # and a sender at what has been delivered
HELLO = struct.Struct("!4s32sbb")  # magic, token, phase (-1: the line), stream
ROW = struct.Struct("!bdQ")  # a phase, its seconds, and bytes of each stream; or PING with a number; or OVER
MAGIC = b"NRWP"
LINE, PING, OVER = -1, -2, -3
STRANGERS_MAX = 64  # connections that show another token
INFO = struct.Struct("=16xI80xI52xI32xI4xQ")  # of struct tcp_info: its fields of Info


class MeasureError(NarrowsError):
    """A measurement that came to nothing, in one sentence."""


@dataclass
class Clock:
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


class Info(NamedTuple):
    """What the kernel says of a connection so far, in its segments. Zeros where the system does not say."""

    mss: int = 0  # bytes
    retransmits: int = 0
    segments: int = 0  # with data, retransmitted ones included
    delivered: int = 0  # acknowledged, also those behind a hole
    bytes: int = 0  # sent, with retransmitted ones


class Marks:
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


class Sent:
    """The end of a stream that sends. `figures` once it is over."""

    def __init__(self, sender: socket.socket) -> None:
        self.sender, self.early, self.late = sender, Info(), Info()
        self.marks, self.cores = Marks(), 0.0

    def run(self, clock: Clock, seconds: float, size: int) -> None:
        """Until the receiver ends it. Of `size` bytes, at most."""
        sender, begin, spent, left = self.sender, time.monotonic(), time.thread_time(), size
        clock = Clock(min(clock.end_s, begin + seconds + GIVEN_UP_S), clock.stop)
        with suppress(OSError):
            sender.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25), UNSENT_BYTES)
            while left and clock.left():
                sender.settimeout(clock.turn(LOOK_S))
                with suppress(TimeoutError):
                    left -= sender.send(memoryview(CHUNK)[:left])
                now_s, info = time.monotonic(), _info(sender)
                self.marks.add(now_s, info.delivered * info.mss)
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
            "sent_bytes": float(self.late.bytes),
            "sender_cores": self.cores,
        }


def _info(sender: socket.socket) -> Info:
    with suppress(OSError, AttributeError, struct.error):
        return Info(*INFO.unpack_from(sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)))
    return Info()


class Received:
    """The other end."""

    def __init__(self, receiver: socket.socket) -> None:
        self.receiver, self.marks, self.cores = receiver, Marks(), 0.0

    def run(self, clock: Clock, seconds: float, size: int) -> None:
        """For `seconds` from its first byte on, or until the sender ends it."""
        receiver, buffer, spent = self.receiver, bytearray(BUFFER_BYTES), 0.0
        got, end_s, now_s = 0, 0.0, 0.0
        with suppress(OSError):
            while clock.left() and (not end_s or now_s < end_s):
                receiver.settimeout(min(clock.turn(), max(1e-3, end_s - now_s) if end_s else TURN_S))
                try:
                    count = receiver.recv_into(buffer)
                except TimeoutError:
                    count = -1
                now_s = time.monotonic()
                if not count:
                    break
                if not end_s and count > 0:
                    end_s, spent = now_s + seconds, time.thread_time()
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


def received_figures(streams: Sequence[Received]) -> dict[str, float]:
    """Of all streams of one way of a phase. Sizes are of a stream that is alone. Raises MeasureError where nothing came."""
    marks = [stream.marks.rows for stream in streams]
    if not all(len(rows) > 1 for rows in marks):
        raise MeasureError("a stream was opened and nothing came through it")
    rate = sum(map(flows.last_part, marks))
    found: dict[str, float] = {
        "bits_per_second": rate,
        "seconds": max(rows[-1][0] - rows[0][0] for rows in marks),
        "bytes": float(sum(rows[-1][1] for rows in marks)),
        "receiver_cores": sum(stream.cores for stream in streams),
    }
    if len(streams) == 1:
        found |= {f"bits_per_second_{size}": value for size, value in flows.by_size(marks[0]).items()}
    return found


class Pair:
    """What both ends of a measurement do. `way`: that in which this end sends; 0 at the listener."""

    def __init__(self, line: socket.socket, way: int, clock: Clock) -> None:
        self.line, self.way, self.clock = line, way, clock
        self.flows: list[Flow] = []
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, kind: int, value: float = 0.0, size: int = 0) -> None:
        self.line.settimeout(self.clock.turn(CONNECT_S))
        self.line.sendall(ROW.pack(kind, value, size))

    def hear(self) -> tuple[int, float, int]:
        return ROW.unpack(_exactly(self.line, ROW.size, self.clock))

    def streams(self, phase: int, opened: Sequence[socket.socket], seconds: float, size: int) -> None:
        """All streams of a phase, from now on. The i-th of `opened` goes the i-th of its ways."""
        ways = [way for way in PHASES[phase].ways for _ in range(PHASES[phase].streams)]
        clock = Clock(min(self.clock.end_s, time.monotonic() + seconds + CONNECT_S), self.clock.stop)
        ends = [(way, (Sent if way == self.way else Received)(each)) for way, each in zip(ways, opened, strict=True)]
        threads = [threading.Thread(target=end.run, args=(clock, seconds, size), daemon=True) for _, end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for way in PHASES[phase].ways:
            here = [end for each, end in ends if each == way]
            sent = [end for end in here if isinstance(end, Sent)]
            received = [end for end in here if isinstance(end, Received)]
            self._add(phase, way, [end.figures() for end in sent] or [received_figures(received)])

    def _add(self, phase: int, way: int, rows: Sequence[dict[str, float]]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        self.flows.append(Flow(phase, way, {name: sum(row[name] for row in rows) for name in names}))


def _exactly(source: socket.socket, size: int, clock: Clock) -> bytes:
    """So many bytes. Raises OSError."""
    got = b""
    while len(got) < size:
        source.settimeout(clock.turn())
        with suppress(TimeoutError):
            if not (more := source.recv(size - len(got))):
                raise ConnectionError("the other end has hung up")
            got += more
    return got


def open_port(host: str, port: int) -> socket.socket:
    """Raises MeasureError."""
    try:
        return socket.create_server((host, port), backlog=16)
    except OSError as error:
        raise MeasureError(f"cannot open port {port} on {host or 'this machine'}: {error.strerror}") from None


def _accept(listener: socket.socket, token: str, clock: Clock, phase: int) -> tuple[int, socket.socket]:
    """A connection that shows the token and is of this phase, and its number there. All others are closed."""
    for _ in range(STRANGERS_MAX):
        while True:
            listener.settimeout(clock.turn())
            with suppress(TimeoutError):
                made, _ = listener.accept()
                break
        with suppress(OSError, struct.error):
            limit = Clock(min(clock.end_s, time.monotonic() + CONNECT_S), clock.stop)
            magic, shown, of, number = HELLO.unpack(_exactly(made, HELLO.size, limit))
            if magic == MAGIC and hmac.compare_digest(shown, token.encode()) and of == phase:
                return number, made
        made.close()
    raise ConnectionError("only strangers dial this port")


def listen(listener: socket.socket, token: str, seconds: float, stop: threading.Event) -> list[Flow]:
    """The side of the listener. Raises MeasureError."""
    clock = Clock(time.monotonic() + seconds + CONNECT_S, stop)
    with ExitStack() as stack, listener:
        try:
            line = stack.enter_context(_accept(listener, token, clock, LINE)[1])
            pair = Pair(line, 0, clock)
            line.sendall(b"k")
            while (row := pair.hear())[0] != OVER:
                kind, phase_s, size = row
                if kind == PING:
                    pair.say(*row)
                elif 0 <= kind < len(PHASES) and 0 <= phase_s <= seconds:
                    count = PHASES[kind].streams * len(PHASES[kind].ways)
                    opened = dict(_accept(listener, token, clock, kind) for _ in range(count))
                    for each in opened.values():
                        stack.enter_context(each)
                    pair.say(kind)
                    pair.streams(kind, [opened[number] for number in sorted(opened)], phase_s, size)
                else:
                    raise ConnectionError("the other end is out of step")
        except OSError as error:
            raise MeasureError(f"the measurement broke off: {error}") from None
    return pair.flows


def dial(host: str, port: int, token: str, seconds: float, size: int, stop: threading.Event) -> list[Flow]:
    """The side of the dialler. Raises MeasureError."""
    clock = Clock(time.monotonic() + seconds, stop)

    def connect(phase: int, number: int = 0) -> socket.socket:
        made = socket.create_connection((host, port), timeout=clock.turn(CONNECT_S))
        made.sendall(HELLO.pack(MAGIC, token.encode(), phase, number))
        return made

    with ExitStack() as stack:
        try:
            line = stack.enter_context(connect(LINE))
            if _exactly(line, 1, Clock(min(clock.end_s, time.monotonic() + CONNECT_S), stop)) != b"k":
                raise ConnectionError("no ps-probe is there")
        except OSError as error:
            why = "nothing answers" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise MeasureError(f"port {port} of {host} cannot be dialled: {why}") from None
        try:
            pair = Pair(line, 1, clock)
            times = _round_trips(pair)
            low, half, high = min(times), flows.quantile(times, 0.5), flows.quantile(times, 0.95)
            figures = {"min_rtt": low, "p50_rtt": half, "p95_rtt": high, "pings": float(len(times))}
            pair.flows.append(Flow(PINGED, 0, figures))
            for number, phase in enumerate(PHASES):
                phase_s = flows.phase_seconds(clock.left() - MARGIN_S, number, low)
                each = flows.phase_bytes(size, number)
                pair.say(number, phase_s, each)
                count = phase.streams * len(phase.ways)
                opened = [stack.enter_context(connect(number, index)) for index in range(count)]
                if pair.hear()[0] != number:
                    raise ConnectionError("the other end is out of step")
                pair.streams(number, opened, phase_s, each)
            pair.say(OVER)
        except OSError as error:
            raise MeasureError(f"the measurement with {host} broke off: {error}") from None
    return pair.flows


def _round_trips(pair: Pair, now: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each; PINGS of them, or as many as PINGS_S allow, and at least one."""
    times, end = list[float](), now() + PINGS_S
    while len(times) < PINGS and (not times or now() < end):
        begin = now()
        pair.say(PING)
        pair.hear()
        times.append(now() - begin)
    return times
