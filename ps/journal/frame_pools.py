"""The pools of peers whose frames a journal names. Their descriptors outlive the process, in a socket that ps-serve holds.

How it works

    link ── keep(pool, descriptor) ──> number, descriptor ──> [ the socket's queue ] ── recall ──> the next process

1. ps-serve makes a pair of sockets with the files of a journal, and reads neither. A descriptor in the queue of a socket
   stays open (unix(7), SCM_RIGHTS), also when the processes that had it are gone.
2. `keep` puts a pool's descriptor into the queue. `place` then gives the number of a pool and an offset for a frame, and
   `view` returns the frame at such a place. The next process looks at the pools in the queue, and leaves them there.
3. `forget` takes those pools out that nothing refers to: no link, no frame of the machine, and no event.

Rules
- A pool is in the queue at least once at each moment until it is forgotten.
- A queue that is full keeps no further pool: its frames are then copied.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import weakref
from collections.abc import Iterator, Sequence

from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.shared_memory import POOL_BYTES, PeerPool, of_peer

NUMBER = struct.Struct("<Q")  # of a pool; its descriptor comes with it
PEEK_OFFSET = 42  # SO_PEEK_OFF: where the next look begins; the queue moves it on
NO_OFFSET = -1  # each look sees the oldest one
DESCRIPTOR = struct.Struct("@i")


def sockets() -> tuple[int, ...]:
    """Make the pair, and return the descriptors; () where the system cannot look at a queue without taking."""
    if sys.platform != "linux":
        return ()
    return tuple(each.detach() for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))


class FramePools:
    """The pools of the peers of one process.

    Args:
        ends: descriptors of the pair, as `sockets` returns them; what is queued is kept.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self.into, self.out = (socket.socket(fileno=os.dup(each)) for each in ends)
        for each in (self.into, self.out):
            each.setblocking(False)
            weakref.finalize(self, each.close)
        self.pools: weakref.WeakValueDictionary[int, PeerPool] = weakref.WeakValueDictionary()
        self.queued: list[int] = []  # numbers, oldest first
        self.recalled = [*self._recall()]  # pools of an earlier process, until `forget`

    def keep(self, pool: PeerPool, file: int) -> None:
        """Keep a pool beyond this process, if the queue has room. `file`: its descriptor."""
        if self._put(pool.number, file):
            self.pools[pool.number] = pool

    def _put(self, number: int, file: int) -> bool:
        try:
            socket.send_fds(self.into, [NUMBER.pack(number)], [file])
        except OSError:  # the queue is full
            return False
        self.queued.append(number)
        return True

    def place(self, frame: Buffer) -> tuple[int, int] | None:
        """Return the number of the pool that these bytes lie in, and their offset there; None: they lie in no kept pool."""
        found = of_peer(frame)
        if found is None or self.pools.get(found.pool.number) is not found.pool:
            return None
        return (found.pool.number, found.pool.offset(frame)) if memoryview(frame).c_contiguous else None

    def view(self, number: int, offset: int, size: int) -> memoryview:
        """Return bytes that `place` has named, uint8[size]. Raises ValueError: there are none."""
        pool = self.pools.get(number)
        if pool is None or not 0 <= offset <= offset + size <= POOL_BYTES:
            raise ValueError(f"{size} bytes at {offset} of pool {number} are not kept")
        return pool.view(offset, size)

    def forget(self) -> None:
        """Let go of the pools that nothing refers to."""
        self.recalled = []
        if all(number in self.pools for number in self.queued):
            return
        self.out.setsockopt(socket.SOL_SOCKET, PEEK_OFFSET, NO_OFFSET)
        with contextlib.suppress(OSError):
            for _ in range(len(self.queued)):
                with self._next(socket.MSG_PEEK) as (number, file):
                    if number in self.pools and not self._put(number, file):
                        return
                with self._next(0):
                    self.queued.pop(0)

    def _recall(self) -> Iterator[PeerPool]:
        """Find the pools of the queue. One that cannot be mapped is left out: `view` does not find it."""
        self.out.setsockopt(socket.SOL_SOCKET, PEEK_OFFSET, 0)
        with contextlib.suppress(OSError):
            while True:
                with self._next(socket.MSG_PEEK) as (number, file):
                    self.queued.append(number)
                    with contextlib.suppress(OSError, ValueError):
                        if number not in self.pools:
                            self.pools[number] = pool = PeerPool(file, number)
                            yield pool

    @contextlib.contextmanager
    def _next(self, flags: int) -> Iterator[tuple[int, int]]:
        """Yield the number and the descriptor of the next pool in the queue. Raises OSError if there is none."""
        said, more, _, _ = self.out.recvmsg(NUMBER.size, socket.CMSG_LEN(DESCRIPTOR.size), flags)
        if not more:
            raise OSError("this process may have no further descriptor")
        (file,) = DESCRIPTOR.unpack(more[0][2])
        try:
            yield NUMBER.unpack(said)[0], file
        finally:
            os.close(file)
