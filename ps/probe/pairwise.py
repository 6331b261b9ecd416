"""A visit of two machines: a listener and a dialler go through its phases (flows.VISITS) together, over plain TCP.

How it works

    dialler                                        listener
       | -- connection, HELLO with the token -------> |    once for the line, then once for each stream
       | <------------------------------------- "k" - |    all connections have shown the token
       | -- PING, and <- PING back, PINGS times ----- |    first visit: round trips (`_round_trips`)
       | -- ROW: phase, seconds, bytes -------------> |    both begin the phase with this row
       | <============= streams of the phase =======> |    `MeasuringEnd.streams`
       | -- ROW: the next phase, ... ---------------> |
       | -- OVER -----------------------------------> |

1. The dialler opens the line, then all streams at once, so that opening takes one round trip. The listener closes
   connections that show another token.
2. A first visit measures round trips and a rough rate each way (`_first`). A second visit measures one stream and four
   streams each way, then both ways at once (`_streams`). Where one stream was in doubt, it is measured again.
3. Each end has figures of the streams that it sent and of those that it received. The director merges both ends'
   figures.

Every wait ends with the visit.
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

CONNECT_S = 5.0  # a connection must have opened and shown its token within this
HELLO = struct.Struct("!4s32sbb")  # magic, token, phase (-1: the line), number of the stream
ROW = struct.Struct(
    "!bdQQ"
)  # a phase, its seconds, and the bytes of each stream by direction; or PING with a number; or OVER
MAGIC = b"NRWP"
LINE, PING, OVER = -1, -2, -3
# By "is a first visit": phase and number of each connection, the line first. Streams of a phase follow its directions.
STREAMS = [
    [(LINE, 0), *((i, n) for i in visit for n in range(PHASES[i].streams * len(PHASES[i].ways)))] for visit in VISITS
]
Streams = dict[tuple[int, int], socket.socket]
STRANGERS_MAX = 64  # connections without the token; after so many the listener gives up


class MeasuringEnd:
    """One end of a visit.

    Args:
        line: the connection for rows and round trips.
        way: the direction in which this end sends: 0 at the listener, 1 at the dialler.
        clock: the end of the visit.
    """

    def __init__(self, line: socket.socket, way: int, clock: MeasurementTime) -> None:
        self.line, self.way, self.clock = line, way, clock
        self.flows: list[Flow] = []
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: int, value: float = 0.0, *sizes: int) -> None:
        """Send a row over the line."""
        self.line.settimeout(self.clock.turn(CONNECT_S))
        self.line.sendall(ROW.pack(kind, value, *(sizes or (0, 0))))

    def hear(self) -> tuple[int, float, int, int]:
        """Receive a row from the line."""
        return ROW.unpack(_exactly(self.line, ROW.size, self.clock))

    def streams(self, phase: int, opened: Sequence[socket.socket], seconds: float, sizes: Sequence[int]) -> None:
        """Run all streams of a phase, from now on, and add their figures to `flows`.

        Args:
            phase: the number of the phase.
            opened: the connections; the i-th stream goes in the i-th direction of the phase.
            seconds: the time of the phase.
            sizes: for each direction, the most bytes of a stream.
        """
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
    """Receive exactly `size` bytes. Raise OSError where the connection or the time ends before."""
    got = b""
    while len(got) < size:
        source.settimeout(clock.turn())
        with suppress(TimeoutError):
            if not (more := source.recv(size - len(got))):
                raise ConnectionError("the other end has hung up")
            got += more
    return got


def open_port(host: str, port: int) -> socket.socket:
    """Open the listener's port; 0 is any free one. Raise MeasurementError where that fails."""
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=16, dualstack_ipv6=True)
        return socket.create_server((host, port), backlog=16)
    except OSError as error:
        raise MeasurementError(f"cannot open port {port} on {host or 'this machine'}: {error.strerror}") from None


def _accepted(listener: socket.socket, token: str, first: bool, clock: MeasurementTime, stack: ExitStack) -> Streams:
    """Accept the line and all streams, by (phase, number). Connections without the token are closed."""
    found: Streams = {}
    strangers = 0
    while len(found) < len(STREAMS[first]):
        listener.settimeout(clock.turn())
        try:
            made = stack.enter_context(listener.accept()[0])
        except (TimeoutError, ConnectionError):  # no connection yet, or the other end has reset it already
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
    """Go through a visit as its listener.

    Args:
        listener: the open port.
        token: the token that the dialler's connections show.
        seconds: the longest time of the visit.
        first: the visit is the pair's first.
        stop: set to end the visit at once.

    Returns:
        The figures of this end.

    Raises:
        MeasurementError: the visit broke off.
    """
    clock = MeasurementTime(time.monotonic() + seconds + CONNECT_S, stop)
    with ExitStack() as stack, listener:
        try:
            found = _accepted(listener, token, first, clock, stack)
            pair = MeasuringEnd(found[LINE, 0], 0, clock)
            pair.line.sendall(b"k")
            while (row := pair.hear())[0] != OVER:
                kind, phase_s, *sizes = row
                if kind == PING:
                    pair.send(*row)
                elif kind in VISITS[first] and 0 <= phase_s <= seconds:
                    pair.streams(kind, _of_phase(found, kind), phase_s, sizes)
                else:
                    raise ConnectionError("the other end is out of step")
        except OSError as error:
            raise MeasurementError(f"the measurement broke off: {error}") from None
    return pair.flows


def dial(host: str, asked: ProbeDial, stop: threading.Event) -> list[Flow]:
    """Go through a visit as its dialler.

    Args:
        host: the address of the listener.
        asked: the director's order.
        stop: set to end the visit at once.

    Returns:
        The figures of this end.

    Raises:
        MeasurementError: the listener cannot be dialled, or the visit broke off.
    """
    clock = MeasurementTime(time.monotonic() + asked.seconds, stop)

    def connect(place: tuple[int, int]) -> socket.socket:
        made = socket.create_connection((host.strip("[]"), asked.port), timeout=clock.turn(CONNECT_S))
        made.sendall(HELLO.pack(MAGIC, asked.token.encode(), *place))
        return made

    with ExitStack() as stack:
        try:
            line, *places = STREAMS[asked.first]
            found = {line: stack.enter_context(connect(line))}
            with ThreadPoolExecutor(len(places)) as pool:  # all connections take one round trip together
                for place, made in zip(places, pool.map(connect, places), strict=True):
                    found[place] = stack.enter_context(made)
            pair = MeasuringEnd(found[line], 1, clock)
            if _exactly(pair.line, 1, MeasurementTime(min(clock.end_s, time.monotonic() + CONNECT_S), stop)) != b"k":
                raise ConnectionError("no ps-probe answers there")
        except OSError as error:
            why = "nothing answers" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise MeasurementError(f"port {asked.port} of {host} cannot be dialled: {why}") from None
        try:
            (_first if asked.first else _streams)(pair, found, asked)
            pair.send(OVER)
        except OSError as error:
            raise MeasurementError(f"the measurement with {host} broke off: {error}") from None
    return pair.flows


def _first(pair: MeasuringEnd, found: Streams, asked: ProbeDial) -> None:
    """Measure the round trip of the link and a rough rate each way."""
    times = _round_trips(pair)
    low, half, high = min(times), flows.quantile(times, 0.5), flows.quantile(times, 0.95)
    pair.flows.append(Flow(PINGED, 0, {"min_rtt": low, "p50_rtt": half, "p95_rtt": high, "pings": float(len(times))}))
    seconds = min(flows.FIRST_S + flows.FIRST_TRIPS * low, asked.seconds)
    sizes = (asked.most_0, asked.most_1)
    for number in FIRST:
        pair.send(number, seconds, *sizes)
        pair.streams(number, _of_phase(found, number), seconds, sizes)


def _streams(pair: MeasuringEnd, found: Streams, asked: ProbeDial) -> None:
    """Measure the rates of the link in the seconds that are left."""
    todo, spare, unit_s = [*ONE, *FOUR, BOTH], flows.SPARE, math.inf
    while todo:
        # A phase that ends early gives no time to the next: the budget of bytes was computed from these seconds.
        left_s = pair.clock.left() - MARGIN_S
        unit_s = min(unit_s, flows.unit_seconds(left_s, todo, spare, asked.round_trip_s))
        number = todo.pop(0)
        phase = PHASES[number]
        seconds = max(0.1, unit_s * phase.weight)
        sizes = [phase.share(each * seconds) for each in (asked.most_0, asked.most_1)]
        pair.send(number, seconds, *sizes)
        pair.streams(number, _of_phase(found, number), seconds, sizes)
        if number == FOUR[-1] and (more := flows.doubtful(pair.flows)):
            todo, spare, unit_s = [*more, *todo], 0.0, unit_s * flows.spared(more)


def _round_trips(pair: MeasuringEnd, now: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the seconds of round trips: PINGS of them, or as many as PINGS_S allow, and at least one."""
    times, end = list[float](), now() + PINGS_S
    while len(times) < PINGS and (not times or now() < end):
        begin = now()
        pair.send(PING)
        pair.hear()
        times.append(now() - begin)
    return times
