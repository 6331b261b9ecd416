"""Connections of a peer that means no good, by ZMTP 3.1 written by hand: Python's own library is enough."""

from __future__ import annotations

import random
import socket
import struct
from contextlib import suppress

from kit.one_port import DIRECTLY, dialled

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32)
TYPE = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
READY = b"\x05READY" + TYPE + b"\x08Identity" + bytes(4)
HANDSHAKE = GREETING + bytes((4, len(READY))) + READY
# All that a connection sends before it is reset: two frames of ZMTP 1.0, which needs no answer, or a handshake and a frame.
RESETS = {"old": b"\x01\x00\x02\x00x", "handshake": HANDSHAKE + b"\x00\x01x"}
RESET = struct.pack("ii", 1, 0)  # as SO_LINGER: close() sends RST
OURS = b"NRWS\x1b"  # as protocols/wire.py has it; a test compares them


def frame(body: bytes, more: bool = False) -> bytes:
    """One ZMTP frame."""
    long = len(body) > 255
    return bytes((2 * long + more,)) + len(body).to_bytes(8 if long else 1, "big") + body


def noise(rng: random.Random, kind: str) -> bytes:
    """A random frame: bytes, or some that begin as a message of ours."""
    body = rng.randbytes(rng.randrange(1, 120))
    return frame(OURS + body if kind == "ours" else body)


def shaken(port: int, shard: int = DIRECTLY) -> socket.socket:
    """A connection that is good for frames; `shard` as of `dialled`. Raises OSError where the other end hangs up."""
    made = dialled(port, shard)
    made.sendall(HANDSHAKE)
    heard = 0
    while heard <= len(GREETING):  # its own, and some of its READY
        heard += len(piece := made.recv(1 << 16))
        if not piece:
            raise ConnectionError("it was not let in")
    return made


def reset(port: int, kind: str, shard: int = DIRECTLY) -> None:
    """One connection that sends a message and is reset before the other end can have answered."""
    with suppress(OSError), dialled(port, shard) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        made.sendall(RESETS[kind])
