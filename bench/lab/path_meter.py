"""Measures the path between two hosts of the lab, with one TCP stream and with single packets."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from narrows.ps.probe.flows import SKIPPED, last_part
from narrows.ps.probe.tcp_streams import MeasurementTime, ReceivingStream, SendingStream

if TYPE_CHECKING:
    from lab.netns import Host

ENDLESS = 1 << 62  # bytes of a stream that its time ends
PING_BYTES = 64  # with its headers
HEADERS = 28  # of UDP over IPv4
PATIENCE_S = 30.0  # longer than any round trip and TCP's first retransmissions


__all__ = ["SKIPPED", "Stream", "round_trips", "stream"]


class Stream(NamedTuple):
    """The figures of one TCP stream."""

    rate: float  # bit/s of payload, once it had found its rate
    payload: int  # bytes that the receiver's program has read
    received: int  # the same at the receiver's interface, as the kernel counts
    sent: int  # at the sender's: with what was lost or still under way


def stream(source: Host, sink: Host, seconds: float) -> Stream:
    """One stream for so long."""
    (received, _), (_, sent) = sink.bytes(), source.bytes()
    with sink.socket() as listener, source.socket() as sender:
        listener.bind((sink.address, 0))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        sender.settimeout(PATIENCE_S)
        sender.connect(listener.getsockname())
        there, here = SendingStream(sender), ReceivingStream(listener.accept()[0])
        clock = MeasurementTime(time.monotonic() + seconds + PATIENCE_S)
        thread = threading.Thread(target=there.run, args=(clock, seconds, ENDLESS), name="pour")
        thread.start()
        here.run(clock, seconds, ENDLESS)
        received, sent = sink.bytes()[0] - received, source.bytes()[1] - sent
        thread.join()
    if len(here.marks.rows) < 2:
        raise ConnectionError("the stream has ended early")
    return Stream(last_part(here.marks.rows), here.marks.rows[-1][1], received, sent)


def round_trips(near: Host, far: Host, count: int, limit_s: float) -> list[float]:
    """Seconds of each, of packets of 64 bytes that come back; up to `count`, in about `limit_s`. Raises TimeoutError."""
    times = []
    with near.socket(socket.SOCK_DGRAM) as here, far.socket(socket.SOCK_DGRAM) as there:
        there.bind((far.address, 0))
        there.settimeout(limit_s)
        here.connect(there.getsockname())
        here.settimeout(limit_s / 3)

        def echo() -> None:
            with suppress(TimeoutError):  # the last may be lost
                while (packet := there.recvfrom(PING_BYTES))[0] != b"":
                    there.sendto(*packet)

        thread = threading.Thread(target=echo, name="echo")
        thread.start()
        end = time.monotonic() + limit_s
        for number in range(count):
            if time.monotonic() > end:
                break
            packet = struct.pack("q", number).ljust(PING_BYTES - HEADERS)
            begin = time.perf_counter()
            here.send(packet)
            with suppress(TimeoutError):
                while here.recv(PING_BYTES) != packet:
                    pass  # one that was given up and came late
                times.append(time.perf_counter() - begin)
        here.send(b"")
        thread.join()
    if not times:
        raise TimeoutError(f"of {PING_BYTES}-byte packets none came back within {limit_s / 3:g} s")
    return times
