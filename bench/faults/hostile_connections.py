"""Who dials a port and means no good: connections that never speak, floods of frames, and a listener that has nothing to lose.

    python bench/faults/hostile_connections.py ...    with the words of one row:

    silent PORT 10000 0 connected   connected | greeting | handshake; 0 a second are opened again
    frames PORT 100000 noise        noise | ours: frames that begin as ours do
    resets PORT 500 old             old | handshake: connections that are reset behind a message
    drain                           takes all that it is sent and throws it away; prints its port

Rules
- Nothing but Python's own library: it starts at once, and speaks ZMTP 3.1 by hand, so one process reaches the rates of many.
- Each prints a line of JSON a second, of what it has done since it began, and ends with its stdin.
- A flood goes on over another connection where the other end has closed one, at once.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32)
TYPE = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
READY = b"\x05READY" + TYPE + b"\x08Identity" + bytes(4)
HANDSHAKE = GREETING + bytes((4, len(READY))) + READY
HALF = {"connected": b"", "greeting": GREETING[:11], "handshake": HANDSHAKE}
# All that a connection sends before it is reset: two frames of ZMTP 1.0, which needs no answer, or a handshake and a frame.
RESETS = {"old": b"\x01\x00\x02\x00x", "handshake": HANDSHAKE + b"\x00\x01x"}
RESET = struct.pack("ii", 1, 0)  # as SO_LINGER: close() sends RST
AT_ONCE = 500  # that are dialled between two looks
BATCH = 1_000  # frames that are sent at once
CONNECTIONS = 4  # of a flood
OURS = b"NRWS\x15"  # as protocols/wire.py has it; a test compares them


def frame(body: bytes, more: bool = False) -> bytes:
    """One ZMTP frame."""
    long = len(body) > 255
    return bytes((2 * long + more,)) + len(body).to_bytes(8 if long else 1, "big") + body


def noise(rng: random.Random, kind: str) -> bytes:
    """A random frame: bytes, or some that begin as a message of ours."""
    body = rng.randbytes(rng.randrange(1, 120))
    return frame(OURS + body if kind == "ours" else body)


def dialled(port: int) -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.connect_ex(("127.0.0.1", port))
    return made


def shaken(port: int) -> socket.socket:
    """A connection that is good for frames. Raises OSError where the other end hangs up."""
    made = socket.create_connection(("127.0.0.1", port), 10)
    made.sendall(HANDSHAKE)
    heard = 0
    while heard <= len(GREETING):  # its own, and some of its READY
        heard += len(piece := made.recv(1 << 16))
        if not piece:
            raise ConnectionError("it was not let in")
    return made


def turns() -> Iterator[float]:
    """Until stdin ends; the time in seconds, twenty times a second and no oftener."""
    while not select.select([0], [], [], 0.05)[0]:
        yield time.monotonic()


def tell(last: float, now: float, **facts: float) -> float:
    if now - last < 1.0:
        return last
    print(json.dumps(facts), flush=True)
    return now


def silent(port: int, count: int, again: int, kind: str) -> None:
    """Open so many connections, and say no more there than `kind`. Those that are ended are opened anew, so many a second."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    said, poller = HALF[kind], select.epoll()
    held: dict[int, socket.socket] = {}
    opened, told = 0, time.monotonic()
    began = told
    for now in turns():
        allowed = count + int(again * (now - began)) - opened
        for _ in range(min(count - len(held), allowed, AT_ONCE)):
            made = dialled(port)
            held[made.fileno()] = made
            poller.register(made, select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if said else 0))
            opened += 1
        for fd, events in poller.poll(0):
            if events & select.EPOLLOUT and not events & (select.EPOLLHUP | select.EPOLLERR):
                held[fd].send(said)
                poller.modify(fd, select.EPOLLIN | select.EPOLLRDHUP)
            elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR) or not held[fd].recv(1 << 16):
                poller.unregister(fd)
                held.pop(fd).close()
        told = tell(told, now, opened=opened, open=len(held))


def frames(port: int, rate: int, kind: str) -> None:
    """Send random frames, so many a second, or as fast as it goes where `rate` is 0, over a few connections."""
    rng = random.Random(0)
    batches = [b"".join(noise(rng, kind) for _ in range(BATCH)) for _ in range(16)]
    links: list[socket.socket | None] = [None] * CONNECTIONS
    heard = [0] * CONNECTIONS  # bytes of each: frames before the handshake is over end it
    left = [memoryview(b"")] * CONNECTIONS  # of a batch that is being sent
    sent = dials = 0
    began = told = time.monotonic()
    while not select.select([0], [], [], 0)[0]:
        now = time.monotonic()
        if rate and sent > rate * (now - began):
            time.sleep(0.001)
        for index, link in enumerate(links):
            if rate and sent > rate * (now - began):
                break
            try:
                if link is None:
                    links[index], left[index], heard[index] = dialled(port), memoryview(HANDSHAKE), 0
                    dials += 1
                    continue
                if not left[index] and heard[index] > len(GREETING):
                    sent += BATCH
                    left[index] = memoryview(rng.choice(batches))
                left[index] = left[index][link.send(left[index]) if left[index] else 0 :]
                if not (piece := link.recv(1 << 16)):
                    raise ConnectionError
                heard[index] += len(piece)
            except BlockingIOError:
                continue
            except OSError:
                if link is not None:
                    link.close()
                links[index] = None
        told = tell(told, now, sent=sent, dials=dials, per_second=sent / (now - began))


def reset(port: int, kind: str) -> None:
    """One connection that sends a message and is reset before the other end can have answered."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        made.sendall(RESETS[kind])


def resets(port: int, rate: int, kind: str) -> None:
    """Reset so many connections a second."""
    opened = 0
    began = told = time.monotonic()
    for now in turns():
        for _ in range(min(int(rate * (now - began)) - opened, AT_ONCE)):
            reset(port, kind)
            opened += 1
        told = tell(told, now, opened=opened, open=0)


def drain() -> None:
    """Take all that comes, and answer with a handshake and no more."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        print(listener.getsockname()[1], flush=True)
        poller = select.epoll()
        for source in (0, listener.fileno()):
            poller.register(source, select.EPOLLIN)
        held: dict[int, socket.socket] = {}
        while True:
            for fd, _ in poller.poll():
                if fd == 0:
                    return
                if fd == listener.fileno():
                    made, _ = listener.accept()
                    made.setblocking(False)
                    made.send(HANDSHAKE)
                    held[made.fileno()] = made
                    poller.register(made, select.EPOLLIN)
                    continue
                try:
                    gone = not held[fd].recv(1 << 18)
                except OSError:
                    gone = True
                if gone:
                    poller.unregister(fd)
                    held.pop(fd).close()


def main() -> None:
    match sys.argv[1:]:
        case ["silent", port, count, again, kind]:
            silent(int(port), int(count), int(again), kind)
        case ["frames", port, rate, kind]:
            frames(int(port), int(rate), kind)
        case ["resets", port, rate, kind]:
            resets(int(port), int(rate), kind)
        case ["drain"]:
            drain()
        case _:
            raise SystemExit(__doc__)
    os._exit(0)  # ten thousand connections are closed by the system faster than by us


if __name__ == "__main__":
    main()
