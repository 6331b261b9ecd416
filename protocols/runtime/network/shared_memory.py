"""Shared memory for large frames between two processes of one machine. A ZeroMQ message then carries a reference to its frame.

How it works

    sender                                            receiver
    FramePool, a memfd       <── mapped, read-only ── SharedLink.open: a view of the frame, without a copy
    SharedLink.put: a copy
       │ reference: link, ticket, sequence, offset, bytes
       └──────── ZeroMQ, with the message's header ──> once nothing refers to the view:
    the frame is free again  <── mapped, read-only ── returned[ticket] = sequence, in a memfd of the receiver

1. `SharedMemory.listen` opens a Unix socket beside that of ZeroMQ. `dial` connects to it. Both sides hand their memfds over
   (SCM_RIGHTS): hello, answer, ready. Until then, and whenever there is no link, frames go through ZeroMQ.
2. `put` copies a frame into the pool and takes a ticket. A frame that goes to several peers in one turn is copied once.
   A process that dials has a pool for each link. One that listens has one pool for all that dialled it.
3. `open` returns a view. Once nothing refers to it (a queue, a shard that waits for other parts, a standby's stream), the
   receiver writes the frame's sequence number into its table of returned tickets.
4. The Unix socket stays open. Its end is the end of the link: its references are void. A pool of one link ends with it.
   So no frame changes that the receiver's journal names: the process that replaces the receiver may read it there.

Rules
- Only processes of one user share memory (SO_PEERCRED), and only where the system has memfd_create(2).
- Each process writes to its own memfds alone. Their size is fixed by seals, which the receiver checks: else a peer could
  shrink a file that is mapped here, and so end this process.
- The sender can change a frame at any time. A receiver that does not trust it copies the frame before it reads it.
- memfds have no name. They are gone with the last process that maps them, also after kill -9.
- `put` returns None if the pool is full, or all tickets are taken: the frame then goes through ZeroMQ.
- No wait, and no exception for anything that a peer does: the link ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.protocols.config.memory import SHARED_BYTES_MIN
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.hosts import peer_uid

LEAST_BYTES = SHARED_BYTES_MIN  # of a frame in shared memory
POOL_BYTES = 1 << 30  # of a pool; pages are taken as frames are
TICKETS = 1 << 12  # frames of one link that its receiver may hold
TABLE_BYTES = 8 * TICKETS
LINKS_MAX = 4096  # of one process
TRIM_S = 10.0  # a range that no frame took for this long gives its pages back
HELLO_BYTES_MAX = 256
HELLO = struct.Struct("<8sQ")  # MAGIC, number of the link; the routing id of the dialler follows
MAGIC = b"NRWSMEM1"
REFERENCE = struct.Struct("<QQQQQ")  # number of the link, ticket, sequence, offset, bytes
SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
ADD_SEALS, GET_SEALS = 1033, 1034  # F_ADD_SEALS, F_GET_SEALS

Peer = str | bytes
Table = npt.NDArray[np.uint64]


def available() -> bool:
    """True if this system has what shared memory needs."""
    return hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED") and hasattr(socket, "SOCK_SEQPACKET")


def door(endpoint: str) -> str:
    """Return the abstract name of the Unix socket on which a process that listens at ipc://@NAME hands over its memory."""
    return f"\0{endpoint.removeprefix('ipc://@')}-memory"


def _file(name: str, size: int) -> int:
    """Make a memfd of this size, which nobody can change. Raises OSError."""
    made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    fcntl.fcntl(made, ADD_SEALS, SEALS)
    return made


def _mapped(file: int, size: int) -> mmap.mmap:
    """Map a peer's file for reading. Raises OSError or ValueError: it has another size, or one that can change."""
    if os.fstat(file).st_size != size or fcntl.fcntl(file, GET_SEALS) & SEALS != SEALS:
        raise ValueError("a peer's memory has no fixed size")
    return mmap.mmap(file, size, prot=mmap.PROT_READ)


class FrameHold:
    """Holds a frame: the sender may use its range again once nothing refers to this object."""

    __slots__ = ("__weakref__",)


class PeerBytes(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a frame in a peer's memory, uint8[bytes].

    Attributes:
        pool: the peer's pool.
        hold: what holds the frame; None: the link has ended, and no frame of the pool changes.
    """

    pool: PeerPool
    hold: FrameHold | None

    def belongs(self, pool: PeerPool, hold: FrameHold | None) -> None:
        """Note the pool and the hold."""
        self.pool, self.hold = pool, hold


class PeerPool:
    """A peer's pool, mapped for reading.

    Args:
        file: its descriptor; the caller closes it.
        number: names the pool in this process and in one that replaces it; no peer knows it.

    Raises:
        OSError, ValueError: it is no pool.
    """

    def __init__(self, file: int, number: int) -> None:
        self.number = number
        self.memory = _mapped(file, POOL_BYTES)
        self.address: int = np.frombuffer(self.memory, np.uint8, 1).__array_interface__["data"][0]

    def offset(self, frame: Buffer) -> int:
        """Return the offset of bytes that lie in the pool."""
        address: int = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
        return address - self.address

    def view(self, offset: int, size: int, hold: FrameHold | None = None) -> memoryview:
        """Return a view of the pool's bytes [offset, offset + size)."""
        array = np.frombuffer(self.memory, np.uint8, size, offset).view(PeerBytes)
        array.belongs(self, hold)
        return array.data


def of_peer(frame: Buffer) -> PeerBytes | None:
    """Return the frame of a peer's memory that these bytes are, or are a part of; None: they are of this process."""
    found = frame.obj if isinstance(frame, memoryview) else None
    return found if isinstance(found, PeerBytes) else None


def owned(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return frames that no peer can change: those in a peer's memory are copied."""
    if any(of_peer(frame) is not None for frame in frames):
        return [bytes(frame) for frame in frames]
    return frames


@dataclass(slots=True)
class FrameRange:
    """A range of the pool.

    Attributes:
        offset: its first byte.
        room: its bytes, a power of two.
        pages: its first bytes that have pages.
        holders: tickets for the frame in it.
        idle: it was free at the last `trim`.
    """

    offset: int
    room: int
    pages: int = 0
    holders: int = 0
    idle: bool = False


@dataclass(slots=True)
class Turn:
    """One turn of the loop that owns the pool. A buffer that was sent to several peers must not change before `done`."""

    done: bool = False


class FramePool:
    """Frames that this process sends, in one memfd."""

    def __init__(self) -> None:
        self.file = _file("narrows-frames", POOL_BYTES)
        weakref.finalize(self, os.close, self.file)
        self.readable = os.open(f"/proc/self/fd/{self.file}", os.O_RDONLY)  # what peers get
        weakref.finalize(self, os.close, self.readable)
        self.map = mmap.mmap(self.file, POOL_BYTES)
        self.values = np.frombuffer(self.map, np.uint8)
        self.end = 0  # offset of the first byte that no range has
        self.free: dict[int, list[FrameRange]] = {}  # by room
        self.fresh: dict[tuple[int, int], tuple[Buffer, FrameRange]] = {}  # (address, bytes) -> frames of this turn
        self.present = Turn()

    def put(self, frame: Buffer, again: bool) -> FrameRange | None:
        """Copy a frame into the pool, and count a further holder of its range. Return None if the pool has no room.

        Args:
            frame: the frame.
            again: the same buffer may go to other peers in this turn. It must not change before the turn is over.
        """
        values = np.frombuffer(frame, np.uint8)
        key = (values.__array_interface__["data"][0], values.size)
        if again and key in self.fresh:
            self.fresh[key][1].holders += 1
            return self.fresh[key][1]
        found = self._range(values.size)
        if found is not None:
            np.copyto(self.values[found.offset : found.offset + values.size], values)
            found.holders = 1
            if again:
                found.holders, self.fresh[key] = 2, (frame, found)
        return found

    def turn(self) -> None:
        """End a turn: from now on a buffer that was sent may have other bytes."""
        fresh, self.fresh = self.fresh, {}
        self.present.done, self.present = True, Turn()
        for _, found in fresh.values():
            self.give_back(found)

    def give_back(self, found: FrameRange) -> None:
        """Count one holder less."""
        found.holders -= 1
        if not found.holders:
            found.idle = False
            self.free.setdefault(found.room, []).append(found)

    def _range(self, size: int) -> FrameRange | None:
        room = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
        if free := self.free.get(room):
            found = free.pop()
        elif self.end + room <= POOL_BYTES:
            found, self.end = FrameRange(self.end, room), self.end + room
        else:
            return None
        if found.pages < size:
            try:
                os.posix_fallocate(self.file, found.offset + found.pages, size - found.pages)
            except OSError:  # else a page that the system lacks would end the process
                self.free.setdefault(room, []).append(found)
                return None
            found.pages = size
        return found

    def trim(self) -> None:
        """Return pages to the system: those of ranges that no frame has taken since the previous call, TRIM_S ago."""
        for free in self.free.values():
            for found in free:
                if found.idle and found.pages:
                    with contextlib.suppress(OSError):
                        self.map.madvise(mmap.MADV_REMOVE, found.offset, found.room)
                        found.pages = 0
                found.idle = True


class SharedLink:
    """Sends frames to one peer and opens those that come from it.

    Args:
        number: of the link, which both sides know.
        pool: of this process.
    """

    def __init__(self, number: int, pool: FramePool) -> None:
        self.number, self.pool = number, pool
        self.ready = False  # the peer can open references
        self.table = _file("narrows-returned", TABLE_BYTES)
        self.own: Table = np.frombuffer(mmap.mmap(self.table, TABLE_BYTES), np.uint64)  # what this process has returned
        self.theirs: Table | None = None  # what the peer has returned
        self.peer_pool: PeerPool | None = None
        self.sequence = 0  # of the newest frame sent
        self.tickets = deque(range(TICKETS))  # free ones
        self.sent: deque[tuple[int, int, FrameRange]] = deque()  # ticket, sequence and range, oldest first
        self.lock, self.process = threading.Lock(), os.getpid()

    @property
    def files(self) -> list[int]:
        """The descriptors that the peer gets."""
        return [self.pool.readable, self.table]

    def meet(self, files: list[int]) -> None:
        """Take the peer's descriptors. Raises OSError or ValueError if they are not what they should be."""
        memory, table = files
        self.peer_pool = PeerPool(memory, int.from_bytes(os.urandom(8), "little"))
        self.theirs = np.frombuffer(_mapped(table, TABLE_BYTES), np.uint64)

    def begin(self) -> None:
        """Send frames by reference from now on: the peer can open references."""
        self.ready = True

    def close(self) -> None:
        """End the link: the frames that were sent are free."""
        self.ready = False
        if self.table >= 0:
            os.close(self.table)
        self.table = -1
        while self.sent:
            self.pool.give_back(self.sent.popleft()[2])

    # Sending.

    def put(self, frame: Buffer, again: bool) -> bytes | None:
        """Copy a frame into the pool. Return the reference for the peer, or None if it has to go through ZeroMQ.

        Args:
            frame: the frame.
            again: as of `FramePool.put`.
        """
        self.settle()
        found = self.pool.put(frame, again) if self.tickets else None
        if found is None:
            return None
        ticket, self.sequence = self.tickets.popleft(), self.sequence + 1
        self.sent.append((ticket, self.sequence, found))
        return REFERENCE.pack(self.number, ticket, self.sequence, found.offset, len(frame))

    def unsend(self) -> None:
        """Take back the newest frame: its message did not leave."""
        ticket, _, found = self.sent.pop()
        self.tickets.append(ticket)
        self.pool.give_back(found)

    def settle(self) -> None:
        """Free the frames that the peer has returned. It holds some for long: all are looked at."""
        if self.theirs is None:
            return
        for _ in range(len(self.sent)):
            ticket, sequence, found = self.sent.popleft()
            if int(self.theirs[ticket]) == sequence:
                self.tickets.append(ticket)
                self.pool.give_back(found)
            else:
                self.sent.append((ticket, sequence, found))

    # Receiving.

    def open(self, reference: Buffer) -> memoryview | None:
        """Return a view of the frame that a reference names; None: it names none."""
        if self.peer_pool is None or len(reference) != REFERENCE.size:
            return None
        number, ticket, sequence, offset, size = REFERENCE.unpack(reference)
        if number != self.number or ticket >= TICKETS or not 0 < size <= POOL_BYTES - offset:
            return None
        hold = FrameHold()
        weakref.finalize(hold, self._return, ticket, sequence).atexit = False
        return self.peer_pool.view(offset, size, hold)

    def _return(self, ticket: int, sequence: int) -> None:
        if os.getpid() == self.process:  # a fork has views of its own, and the parent may read the frame still
            with self.lock:  # all reads of the frame come before this write
                self.own[ticket] = sequence


@dataclass(slots=True)
class Line:
    """A Unix socket to a process of this machine, and the link that it stands for, if it stands for one yet."""

    socket: socket.socket
    peer: Peer = b""
    link: SharedLink | None = None
    dialled: bool = False


@dataclass
class SharedMemory:
    """The links of one process. Its owner calls `called` of `watch` when a descriptor can be read.

    Args:
        watch: watches a descriptor.
        unwatch: ends that.
        keep: gets the pool of each peer that dials, and its descriptor, which it may duplicate.
    """

    watch: Callable[[int, Callable[[], object]], None]
    unwatch: Callable[[int], None]
    keep: Callable[[PeerPool, int], None] = lambda pool, file: None
    links: dict[Peer, SharedLink] = field(default_factory=dict)  # by peer
    lines: dict[int, Line] = field(default_factory=dict)  # by descriptor
    names: dict[str, bytes] = field(default_factory=dict)  # address -> the routing id under which it is dialled
    met: set[Peer] = field(default_factory=set)  # addresses with which there is a link, or was one
    listening: socket.socket | None = None
    trimmed_s: float = 0.0  # time of the last `trim` of the pools
    _pool: FramePool | None = None

    def __post_init__(self) -> None:
        self.on = available()  # False: there is no link, and all frames go through ZeroMQ

    @property
    def pool(self) -> FramePool:
        """The pool of all links that were not dialled. Raises OSError: the system has no memory for it."""
        if self._pool is None:
            self._pool = FramePool()
        return self._pool

    def keep_pools(self, keep: Callable[[PeerPool, int], None]) -> None:
        """Have this function keep the pools of peers that dial from now on."""
        self.keep = keep

    # The links.

    def listen(self, endpoint: str) -> None:
        """Let processes of this user dial the door beside this endpoint, unless another process has taken its name."""
        if not self.on:
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        try:
            made.bind(door(endpoint))
            made.listen()
        except OSError:
            made.close()
            return
        self.listening = made
        self.watch(made.fileno(), self._accept)

    def dial(self, address: str, name: bytes = b"") -> None:
        """Connect to the door beside an address, if there is one. `name`: the own routing id; b"": as before."""
        name = self.names[address] = name or self.names.get(address, b"")
        self.drop(address)
        if not (self.on and name and address.startswith("ipc://@") and len(self.lines) < LINKS_MAX):
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        try:
            made.connect(door(address))
            if peer_uid(made) != os.getuid():
                raise OSError("another user listens")
            link = SharedLink(int.from_bytes(os.urandom(8), "little"), FramePool())
            socket.send_fds(made, [HELLO.pack(MAGIC, link.number) + name], link.files)
        except OSError:  # no door, or none of this user: frames go through ZeroMQ
            made.close()
            return
        self._add(Line(made, address, link, dialled=True))

    def drop(self, peer: Peer) -> None:
        """End the link of a peer, if there is one."""
        for line in [line for line in self.lines.values() if line.peer == peer and line.link is not None]:
            self._end(line)

    def forget(self, address: str) -> None:
        """End the link to an address that is dialled no longer."""
        self.names.pop(address, None)
        self.met.discard(address)
        self.drop(address)

    def close(self) -> None:
        for line in [*self.lines.values()]:
            self._end(line)
        if self.listening is not None:
            self.unwatch(self.listening.fileno())
            self.listening.close()

    def _add(self, line: Line) -> None:
        self.lines[line.socket.fileno()] = line
        self.watch(line.socket.fileno(), lambda: self._read(line))

    def _end(self, line: Line) -> None:
        self.unwatch(line.socket.fileno())
        del self.lines[line.socket.fileno()]
        line.socket.close()
        if line.link is not None:
            line.link.close()
            if self.links.get(line.peer) is line.link:
                del self.links[line.peer]

    def _accept(self) -> None:
        assert self.listening is not None
        with contextlib.suppress(OSError):
            made, _ = self.listening.accept()
            made.setblocking(False)
            if peer_uid(made) != os.getuid() or len(self.lines) >= LINKS_MAX:
                made.close()
                return
            self._add(Line(made))

    def _read(self, line: Line) -> None:
        files = list[int]()
        try:
            said, files, _, _ = socket.recv_fds(line.socket, HELLO_BYTES_MAX, 2)
            if not said:
                raise OSError("the peer has ended the link")
            self._hear(line, said, files)
        except BlockingIOError:
            return
        except (OSError, ValueError, struct.error):
            self._end(line)
        finally:
            for file in files:
                os.close(file)

    def _hear(self, line: Line, said: bytes, files: list[int]) -> None:
        """Take the next message of a handshake. Raises OSError, ValueError or struct.error for one that is not valid."""
        magic, number = HELLO.unpack(said[: HELLO.size])
        if magic != MAGIC:
            raise ValueError("another version")
        if line.link is None:  # hello
            line.link = SharedLink(number, self.pool)
            line.link.meet(files)
            if not (name := said[HELLO.size :]):
                raise ValueError("a peer without a name")
            assert line.link.peer_pool is not None
            self.keep(line.link.peer_pool, files[0])
            self.drop(name)
            line.peer = name
            socket.send_fds(line.socket, [HELLO.pack(MAGIC, number)], line.link.files)
            self.links[name] = line.link
            return
        if number != line.link.number or line.link.ready:
            raise ValueError("a message of another link")
        if line.dialled:  # answer
            line.link.meet(files)
            self.links[line.peer] = line.link
            self.met.add(line.peer)
            line.socket.send(HELLO.pack(MAGIC, number))
        line.link.begin()

    # Frames.

    def link(self, peer: Peer, frame: Buffer) -> SharedLink | None:
        """Return the link over which a frame can go to this peer, if there is one."""
        link = self.links.get(peer)
        return link if link is not None and link.ready and len(frame) >= LEAST_BYTES else None

    def turn(self) -> None:
        """Begin another turn of the owner's loop."""
        if self._pool is not None and self._pool.fresh:
            self._pool.turn()
        if (now_s := time.monotonic()) - self.trimmed_s >= TRIM_S:
            self.trimmed_s = now_s
            dialled = (line.link.pool for line in self.lines.values() if line.dialled and line.link is not None)
            for pool in (*dialled, *([self._pool] if self._pool is not None else ())):
                pool.trim()
