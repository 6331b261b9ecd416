"""A visit of two machines: a listener and a dialler go through its phases (flows.VISITS) together, over plain TCP.

The dialler opens all connections at once, and each shows the token. The first is the line: on it go round trips, then a row for
each phase, with its seconds and the bytes of a stream each way. With that row both begin. Every wait ends with the visit.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from narrows.ps.probe import flows
from narrows.ps.probe.flows import (
    BOTH,
    FIRST,
    FOUR,
    MARGIN_S,
    ONE,
    PHASES,
    PINGED,
    PINGS,
    PINGS_S,
    VISITS,
    Flow,
)
from narrows.ps.probe.messages import ProbeDial
from narrows.ps.probe.tcp_streams import (
    MeasurementError,
    MeasurementTime,
    ReceivingStream,
    SendingStream,
    received_figures,
)

CONNECT_S = 5.0
HELLO = struct.Struct("!4s32sbb")  # magic, token, phase (-1: the line), stream
ROW = struct.Struct(
    "!bdQQ"
)  # a phase, its seconds, and bytes of each stream by its way; or PING with a number; or OVER
MAGIC = b"NRWP"
LINE, PING, OVER = -1, -2, -3
# Phase and number of each connection of a visit, the line first. The streams of a phase are in the order of its ways.
STREAMS = [
    [(LINE, 0), *((i, n) for i in visit for n in range(PHASES[i].streams * len(PHASES[i].ways)))] for visit in VISITS
]
Streams = dict[tuple[int, int], socket.socket]
STRANGERS_MAX = 64  # connections that show another token


class MeasuringEnd:
    """One end of a measurement. `way`: that in which this end sends, 0 at the listener."""

    def __init__(self, line: socket.socket, way: int, clock: MeasurementTime) -> None:
        self.line, self.way, self.clock = line, way, clock
        self.flows: list[Flow] = []
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, kind: int, value: float = 0.0, *sizes: int) -> None:
        self.line.settimeout(self.clock.turn(CONNECT_S))
        self.line.sendall(ROW.pack(kind, value, *(sizes or (0, 0))))

    def hear(self) -> tuple[int, float, int, int]:
        return ROW.unpack(_exactly(self.line, ROW.size, self.clock))

    def streams(self, phase: int, opened: Sequence[socket.socket], seconds: float, sizes: Sequence[int]) -> None:
        """All streams of a phase, from now on. The i-th of `opened` goes the i-th of its ways. `sizes`: bytes by way."""
        ways = [way for way in PHASES[phase].ways for _ in range(PHASES[phase].streams)]
        clock = MeasurementTime(min(self.clock.end_s, time.monotonic() + seconds + CONNECT_S), self.clock.stop)
        over: list[float] = []
        ends: list[tuple[int, SendingStream | ReceivingStream]] = [
            (way, SendingStream(each) if way == self.way else ReceivingStream(each, over))
            for way, each in zip(ways, opened, strict=True)
        ]
        threads = [
            threading.Thread(target=end.run, args=(clock, seconds, sizes[way]), daemon=True) for way, end in ends
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for way in PHASES[phase].ways:
            here = [end for each, end in ends if each == way]
            sent = [end for end in here if isinstance(end, SendingStream)]
            received = [end for end in here if isinstance(end, ReceivingStream)]
            self._add(phase, way, [end.figures() for end in sent] or [received_figures(received, phase in FIRST)])

    def _add(self, phase: int, way: int, rows: Sequence[dict[str, float]]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        self.flows.append(Flow(phase, way, {name: sum(row[name] for row in rows) for name in names}))


def _exactly(source: socket.socket, size: int, clock: MeasurementTime) -> bytes:
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
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=16, dualstack_ipv6=True)
        return socket.create_server((host, port), backlog=16)
    except OSError as error:
        raise MeasurementError(f"cannot open port {port} on {host or 'this machine'}: {error.strerror}") from None


def _accepted(listener: socket.socket, token: str, first: bool, clock: MeasurementTime, stack: ExitStack) -> Streams:
    """All connections that show the token, and the line, by phase and number. All others are closed."""
    found: Streams = {}
    strangers = 0
    while len(found) < len(STREAMS[first]):
        listener.settimeout(clock.turn())
        try:
            made = stack.enter_context(listener.accept()[0])
        except (TimeoutError, ConnectionError):  # nobody dials, or who did has reset the connection by now
            continue
        with suppress(OSError, struct.error):
            limit = MeasurementTime(min(clock.end_s, time.monotonic() + CONNECT_S), clock.stop)
            magic, shown, *place = HELLO.unpack(_exactly(made, HELLO.size, limit))
            if magic == MAGIC and hmac.compare_digest(shown, token.encode()) and tuple(place) in STREAMS[first]:
                found[place[0], place[1]] = made
                continue
        made.close()
        if (strangers := strangers + 1) > STRANGERS_MAX:
            raise ConnectionError("only strangers dial this port")
    return found


def _of_phase(found: Streams, phase: int) -> list[socket.socket]:
    return [made for place, made in sorted(found.items()) if place[0] == phase]


def listen(listener: socket.socket, token: str, seconds: float, first: bool, stop: threading.Event) -> list[Flow]:
    """The side of the listener. Raises MeasureError."""
    clock = MeasurementTime(time.monotonic() + seconds + CONNECT_S, stop)
    with ExitStack() as stack, listener:
        try:
            found = _accepted(listener, token, first, clock, stack)
            pair = MeasuringEnd(found[LINE, 0], 0, clock)
            pair.line.sendall(b"k")
            while (row := pair.hear())[0] != OVER:
                kind, phase_s, *sizes = row
                if kind == PING:
                    pair.say(*row)
                elif kind in VISITS[first] and 0 <= phase_s <= seconds:
                    pair.streams(kind, _of_phase(found, kind), phase_s, sizes)
                else:
                    raise ConnectionError("the other end is out of step")
        except OSError as error:
            raise MeasurementError(f"the measurement broke off: {error}") from None
    return pair.flows


def dial(host: str, asked: ProbeDial, stop: threading.Event) -> list[Flow]:
    """The side of the dialler, which reaches the other at `host`. Raises MeasureError."""
    clock = MeasurementTime(time.monotonic() + asked.seconds, stop)

    def connect(place: tuple[int, int]) -> socket.socket:
        made = socket.create_connection((host.strip("[]"), asked.port), timeout=clock.turn(CONNECT_S))
        made.sendall(HELLO.pack(MAGIC, asked.token.encode(), *place))
        return made

    with ExitStack() as stack:
        try:
            line, *places = STREAMS[asked.first]
            found = {line: stack.enter_context(connect(line))}
            with ThreadPoolExecutor(len(places)) as pool:  # so that it is one round trip
                for place, made in zip(places, pool.map(connect, places), strict=True):
                    found[place] = stack.enter_context(made)
            pair = MeasuringEnd(found[line], 1, clock)
            if _exactly(pair.line, 1, MeasurementTime(min(clock.end_s, time.monotonic() + CONNECT_S), stop)) != b"k":
                raise ConnectionError("no ps-probe is there")
        except OSError as error:
            why = "nothing answers" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise MeasurementError(f"port {asked.port} of {host} cannot be dialled: {why}") from None
        try:
            (_first if asked.first else _streams)(pair, found, asked)
            pair.say(OVER)
        except OSError as error:
            raise MeasurementError(f"the measurement with {host} broke off: {error}") from None
    return pair.flows


def _first(pair: MeasuringEnd, found: Streams, asked: ProbeDial) -> None:
    """Round trips, and what the link roughly has."""
    times = _round_trips(pair)
    low, half, high = min(times), flows.quantile(times, 0.5), flows.quantile(times, 0.95)
    pair.flows.append(Flow(PINGED, 0, {"min_rtt": low, "p50_rtt": half, "p95_rtt": high, "pings": float(len(times))}))
    seconds = min(flows.FIRST_S + flows.FIRST_TRIPS * low, asked.seconds)
    sizes = (asked.most_0, asked.most_1)
    for number in FIRST:
        pair.say(number, seconds, *sizes)
        pair.streams(number, _of_phase(found, number), seconds, sizes)


def _streams(pair: MeasuringEnd, found: Streams, asked: ProbeDial) -> None:
    """What the link has, in as many seconds as there are."""
    todo, spare, unit_s = [*ONE, *FOUR, BOTH], flows.SPARE, math.inf
    while todo:
        # A phase that was over early leaves no time to the next: bytes were promised by these seconds.
        left_s = pair.clock.left() - MARGIN_S
        unit_s = min(unit_s, flows.unit_seconds(left_s, todo, spare, asked.round_trip_s))
        number = todo.pop(0)
        phase = PHASES[number]
        seconds = max(0.1, unit_s * phase.weight)
        sizes = [phase.share(each * seconds) for each in (asked.most_0, asked.most_1)]
        pair.say(number, seconds, *sizes)
        pair.streams(number, _of_phase(found, number), seconds, sizes)
        if number == FOUR[-1] and (more := flows.doubtful(pair.flows)):
            todo, spare, unit_s = [*more, *todo], 0.0, unit_s * flows.spared(more)


def _round_trips(pair: MeasuringEnd, now: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each; PINGS of them, or as many as PINGS_S allow, and at least one."""
    times, end = list[float](), now() + PINGS_S
    while len(times) < PINGS and (not times or now() < end):
        begin = now()
        pair.say(PING)
        pair.hear()
        times.append(now() - begin)
    return times
