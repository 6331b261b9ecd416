"""The cost of encryption for a process: the rate at which this machine seals, and a warning near that rate.

ZeroMQ seals all that a process sends, and opens all that it receives, in one thread of its own: one core at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from narrows.protocols.runtime.network import curve_auth

CHUNK_BYTES, CHUNKS = 1 << 20, 16
LIMIT_MS = 2000  # of the measurement, which mostly takes 30 ms
WINDOW_S = 10.0  # over which a process's rate is measured
NEAR = 0.5  # share of the core from which the user is warned: beyond it steps may wait for encryption


def rate() -> float:
    """Return the bytes a second that one thread of this machine seals or opens; 0 if that took more than LIMIT_MS."""
    pair = curve_auth.new_pair()
    with zmq.Context(io_threads=1) as context, context.socket(zmq.PULL) as takes, context.socket(zmq.PUSH) as gives:
        for end in (takes, gives):
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
            end.setsockopt(zmq.SNDTIMEO, LIMIT_MS)
        curve_auth.listens(takes, pair)
        curve_auth.dials(gives, pair, pair.public)
        gives.connect(f"tcp://127.0.0.1:{takes.bind_to_random_port('tcp://127.0.0.1')}")
        chunk = bytes(CHUNK_BYTES)
        try:
            gives.send(chunk)
            takes.recv()  # the handshake is done
            began = time.perf_counter()
            for _ in range(CHUNKS):
                gives.send(chunk, copy=False)
            for _ in range(CHUNKS):
                takes.recv(copy=False)
        except zmq.Again:
            return 0.0
        return 2 * CHUNKS * CHUNK_BYTES / (time.perf_counter() - began)  # the one thread sealed and opened each chunk


class EncryptionCost:
    """The encryption of one process.

    Args:
        most: bytes a second that a core seals; 0: the process encrypts nothing, or the rate is unknown.
        clock: seconds.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = most, clock
        self.passed = 0  # bytes sent and received since the window began
        self.since = clock()  # when the window began
        self.warned = False  # the user was warned

    def add(self, size: int) -> None:
        """Count bytes that were sent or received."""
        self.passed += size

    def look(self) -> str:
        """Return a sentence, once, if the run may wait for encryption; else ""."""
        took = self.clock() - self.since
        if self.warned or not self.most or took < WINDOW_S:
            return ""
        share = self.passed / took / self.most
        self.passed, self.since = 0, self.clock()
        if share < NEAR:
            return ""
        self.warned = True
        return (
            f"encryption takes {share:.0%} of a core, and a core seals {self.most / 1e6:,.0f} MB/s here: more --shards "
            "share it, and a sparser --compress sends less"
        )
