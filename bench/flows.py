"""What the path between two hosts of the lab does to one TCP stream and to single packets."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lab import Host

CHUNK = bytes(1 << 18)
PING_BYTES = 64  # with its headers
HEADERS = 28  # of UDP over IPv4
PATIENCE_S = 30.0  # longer than any round trip and TCP's first retransmissions
SKIPPED = 0.4  # of a stream's time, before its rate is taken: slow start, and the loss that ends it


class Stream(NamedTuple):
    """What a TCP stream has done."""

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
        receiver, _ = listener.accept()
        receiver.settimeout(PATIENCE_S)
        end = time.monotonic() + seconds

        def pour() -> None:
            with suppress(OSError):  # the receiver has closed, or nothing comes through any more
                while time.monotonic() < end:
                    sender.send(CHUNK)

        thread = threading.Thread(target=pour, name="pour")
        thread.start()
        with receiver:
            skipped = _read_until(receiver, end - (1 - SKIPPED) * seconds)
            begin = time.monotonic()
            payload = _read_until(receiver, end)
            rate = 8 * payload / (time.monotonic() - begin)
            received, sent = sink.bytes()[0] - received, source.bytes()[1] - sent
            # Neither end waits for what is still buffered: at 1 Mbit/s that takes seconds.
            for each in receiver, sender:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sender.shutdown(socket.SHUT_RDWR)
        thread.join()
    return Stream(rate, skipped + payload, received, sent)


def _read_until(receiver: socket.socket, end: float) -> int:
    size = 0
    buffer = bytearray(1 << 20)
    while time.monotonic() < end:
        if not (got := receiver.recv_into(buffer)):
            raise ConnectionError("the stream has ended early")
        size += got
    return size


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
