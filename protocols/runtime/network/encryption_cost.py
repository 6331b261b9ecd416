"""The cost of encryption for a process: how fast this machine seals, and whether its messages come near to that.

ZeroMQ seals and opens what a process sends and takes in one thread, its own, which so has one core at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from narrows.protocols.runtime.network import curve_auth

CHUNK_BYTES, CHUNKS = 1 << 20, 16
LIMIT_MS = 2000  # of the measurement; 30 ms are usual
WINDOW_S = 10.0
NEAR = 0.5  # of the core: more on top of it, and the steps wait for it


def rate() -> float:
    """Bytes a second that one thread of this machine seals, or opens; 0 where that took longer than LIMIT_MS."""
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
        return 2 * CHUNKS * CHUNK_BYTES / (time.perf_counter() - began)  # that thread did both


class SealingCost:
    """The encryption of one process. `most`: bytes a second that a core seals, 0: it seals nothing, or nobody knows."""

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = most, clock
        self.passed = 0  # bytes, since the window began
        self.since = clock()
        self.told = False

    def look(self) -> str:
        """A sentence, once, where encryption may be what the run waits for."""
        took = self.clock() - self.since
        if self.told or not self.most or took < WINDOW_S:
            return ""
        share = self.passed / took / self.most
        self.passed, self.since = 0, self.clock()
        if share < NEAR:
            return ""
        self.told = True
        return (
            f"encryption takes {share:.0%} of a core, and a core seals {self.most / 1e6:,.0f} MB/s here: more --shards "
            "share it, and a sparser --compress sends less"
        )
