"""The events of a server's machine since its newest writing, in one file. Large frames are read where they lie.

How it works

    file: | serial, begin | pages given back | held frame | pages given back | event | event | ... | 0 | remains |
                                                                               ^ begin                ^ end

    event: | bytes of the description | description: the event, and the length of each frame | ... | frame | ... | frame |

1. `append` writes an event. It returns the frames for the machine: a frame of `least` bytes or more as a view of the
   file. So a payload that waits in the machine is in memory once, and not as the network's and as the journal's. A frame
   in the kept pool of a peer (frame_pools.py) may stay there: the event then names its place.
2. `restart` begins the events anew. They follow the last frame that the machine still holds.
3. `place` finds a view again, so the journal writes where it is in its place; `view` makes the view of a place.

Rules
- `append` writes the first word of an event last. An event without it does not count.
- Each frame begins at a multiple of ALIGNMENT. NumPy copies float32 values that begin elsewhere before it computes with them.
- An event with a large frame is copied into the mapped file: a write(2) to a memfd takes three times as long. A page that the
  system lacks would end the process there, so `append` has the system allocate the pages first.
- A peer's frame is held as long as an event names it, at most until `restart`. Its peer sends no other frame there.
- A frame counts as held while an array or a memoryview refers to it. Its bytes never change meanwhile.
- `restart` gives back the pages before the first event, but those of held frames. Behind it stay as many pages as both
  the last events and those before them took: first weights come once. A machine that was written before may name frames
  that are gone: it must not be needed any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from narrows.protocols.config.memory import PEER_BYTES_MAX
from narrows.protocols.errors import NarrowsError
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.shared_memory import FrameHold, of_peer, owned
from narrows.protocols.wire import pack, unpack
from narrows.ps.journal.frame_pools import FramePools
from narrows.ps.replication.events import MachineEvent

HEAD = struct.Struct("<QQ")  # serial number of the machine that the events follow, and the offset of the first event
RECORD = struct.Struct("<I")  # bytes of the description of an event, 0: no event follows
OWN = 0  # stands for the file in place of the number of a pool
LEAST_BYTES = 1 << 18  # of a frame that the machine reads in the file
WINDOW_BYTES = 1 << 32  # of addresses that are mapped at once
PAGE = mmap.ALLOCATIONGRANULARITY
ALIGNMENT = 64  # bytes: a cache line


def _padding(offset: int) -> int:
    """The bytes from an offset to the next frame."""
    return -offset % ALIGNMENT


class EventFile:
    """The events in a file.

    Args:
        file: descriptor of the file; what it has is kept.
        maps: False: no frame is read in the file. The file is no memory, or the system gives no pages back.
        pools: the kept pools of peers; None: there are none.
    """

    def __init__(self, file: int, maps: bool = True, pools: FramePools | None = None) -> None:
        self.pools = pools
        self.file, self.least = os.dup(file), LEAST_BYTES if maps else sys.maxsize  # views may outlive the journal
        weakref.finalize(self, os.close, self.file)
        found = os.pread(file, HEAD.size, 0)
        head: tuple[int, int] = HEAD.unpack(found) if len(found) == HEAD.size else (0, HEAD.size)
        self.serial, self.begin = head
        self.end = self.begin  # offset of the next event; `events` moves it behind those of an earlier process
        self.windows: list[tuple[int, int, mmap.mmap, int]] = []  # offset, bytes, mapped there, address
        self.allocated = (0, 0)  # each byte of the file between these offsets has a page
        self.held: dict[int, tuple[int, int]] = {}  # number of a view -> offsets of its first byte, and behind its last
        self.waiting = 0  # bytes of held frames of the events
        self.before = 0  # bytes of the events before the last `restart`
        self.gone: deque[int] = deque()  # numbers of views that nothing refers to, as finalizers have noted them
        self.numbers = count()
        self.peer_held: dict[int, int] = {}  # number of a peer's frame that the machine holds -> its bytes
        self.holds: list[FrameHold | None] = []  # of the peers' frames that events name
        self.bytes_of: Counter[int] = Counter()  # number of a pool -> bytes of its frames that events name
        self.dropped = False

    @property
    def past_bytes(self) -> int:
        """Bytes of the events, but for held frames: these are a part of the machine."""
        self._settle()
        return self.end - self.begin - self.waiting

    @property
    def past_peer_bytes(self) -> int:
        """Bytes of the peers' frames that events name, but for those that the machine holds."""
        self._settle()
        return self.bytes_of.total() - sum(self.peer_held.values())

    def append(self, event: MachineEvent, frames: Sequence[Buffer], in_place: bool = False) -> Sequence[Buffer]:
        """Write an event.

        Args:
            event: the event.
            frames: the frames of its message, as received.
            in_place: a frame in the kept pool of a peer may stay there. The peer may change it: replay may see other bytes.

        Returns:
            The same frames. A large frame is a view of the file, unless it stays in its peer's pool. Without `in_place`
            a small one in a peer's memory is copied first: the machine gets the bytes that the file has.

        Raises:
            OSError: the system has no memory for it.
        """
        if not in_place and any(len(frame) < self.least for frame in frames if of_peer(frame) is not None):
            frames = owned(frames)
        stay = [self._stays(frame) if in_place else None for frame in frames]
        lengths = [[*place, len(frame)] if place else len(frame) for frame, place in zip(frames, stay, strict=True)]
        about = pack([event.described(), lengths])
        begin, large = self.end + RECORD.size, False
        parts, ends, at = list[Buffer]([about]), list[int](), begin + len(about)
        for frame, place in zip(frames, stay, strict=True):
            if place is None:
                parts += [bytes(_padding(at)), frame]
                at += _padding(at) + len(frame)
                large |= len(frame) >= self.least
            ends.append(at)
        parts.append(RECORD.pack(0))
        size = at + RECORD.size - begin
        first = RECORD.pack(len(about))
        if not large:
            if (written := os.pwritev(self.file, parts, begin)) != size:
                raise OSError(f"{written} of {size} bytes were written")
            os.pwrite(self.file, first, self.end)
            self.end = at
            self._hold(frames, stay)
            return frames
        room, start = self._room(self.end, RECORD.size + size)
        put = start + RECORD.size
        for part in parts:
            room[put : put + len(part)] = part
            put += len(part)
        room[start : start + RECORD.size] = first
        self.end = at
        self._hold(frames, stay)
        return [
            frame if place is not None or len(frame) < self.least else self.view(OWN, end - len(frame), len(frame))
            for frame, place, end in zip(frames, stay, ends, strict=True)
        ]

    def _stays(self, frame: Buffer) -> tuple[int, int] | None:
        """Return the place where a frame stays; None: it must be copied."""
        place = self.pools.place(frame) if self.pools is not None else None
        return place if place is not None and self.bytes_of[place[0]] + len(frame) <= PEER_BYTES_MAX else None

    def _hold(self, frames: Sequence[Buffer], places: Sequence[tuple[int, int] | None]) -> None:
        """Hold the frames that have a place."""
        for frame, place in zip(frames, places, strict=True):
            if place is not None and (array := of_peer(frame)) is not None:
                number = next(self.numbers)
                self.peer_held[number] = len(frame)
                self.bytes_of[place[0]] += len(frame)
                self.holds.append(array.hold)
                weakref.finalize(array, self._release, number).atexit = False

    def _room(self, offset: int, size: int) -> tuple[mmap.mmap, int]:
        """Return a mapping with the bytes [offset, offset + size), which have pages, and the place of the first one there.

        Raises:
            OSError: the system has no memory for the pages.
        """
        low, high = self.allocated
        if not low <= offset <= high:
            low = high = offset
        if offset + size > high:
            os.posix_fallocate(self.file, high, offset + size - high)
        self.allocated = low, max(high, offset + size)
        first, _, window, _ = self._window(offset, size)
        return window, offset - first

    def events(self) -> Iterator[MachineEvent]:
        """Read each event. `append` then writes behind the last one.

        Raises:
            NarrowsError: an event names a frame of a pool that is not there.
        """
        size = os.fstat(self.file).st_size
        while self.end + RECORD.size <= size:
            (length,) = RECORD.unpack(os.pread(self.file, RECORD.size, self.end))
            if not length:
                break
            described: Any = unpack(os.pread(self.file, length, self.end + RECORD.size))
            about, lengths = described
            at, frames = self.end + RECORD.size + length, list[Buffer]()
            for each in lengths:
                if not isinstance(each, int):
                    number, offset, length = each
                    try:
                        frames.append(self.view(number, offset, length))
                    except ValueError as error:
                        raise NarrowsError(f"the journal cannot be read: {error}") from None
                    continue
                at += _padding(at)
                frames.append(self.view(OWN, at, each) if each >= self.least else os.pread(self.file, each, at))
                at += each
            yield MachineEvent.of(about, frames)
            self.end = at

    def restart(self, serial: int) -> None:
        """Begin the events anew.

        Args:
            serial: number of the machine that they follow.

        Raises:
            OSError: the file cannot be written.
        """
        self._settle()
        took = self.end - self.begin + RECORD.size
        behind, self.before = min(took, self.before), took
        self.begin, self.waiting = max((high for _, high in self.held.values()), default=HEAD.size), 0
        self._truncate(min(os.fstat(self.file).st_size, self.begin + behind))
        os.pwrite(self.file, RECORD.pack(0), self.begin)
        os.pwrite(self.file, HEAD.pack(serial, self.begin), 0)
        self.serial, self.end = serial, self.begin
        self._give_back(self.begin)
        self._take_back()

    def _take_back(self) -> None:
        """Let go of the peers' frames: no event names one any more, and the machine alone may hold it."""
        self.peer_held, self.holds, self.bytes_of = {}, [], Counter()
        if self.pools is not None:
            self.pools.forget()

    def drop(self) -> None:
        """Remove all events, and every page as soon as no frame is held there."""
        self.dropped = True
        self._settle()
        self._take_back()
        with contextlib.suppress(OSError):
            os.pwrite(self.file, HEAD.pack(0, HEAD.size), 0)
            if not self.held:
                self._truncate(0)
            self._give_back(os.fstat(self.file).st_size)

    # Views.

    def view(self, pool: int, offset: int, length: int) -> memoryview:
        """Return a view, uint8[length], of the bytes at an offset of a peer's pool, or of the file if `pool` is OWN.

        Raises:
            ValueError: there are no such bytes.
        """
        if pool != OWN:
            if self.pools is None:
                raise ValueError("no pool of a peer is kept")
            return self.pools.view(pool, offset, length)
        if not 0 <= offset <= offset + length <= os.fstat(self.file).st_size:
            raise ValueError(f"{length} bytes at {offset} are beyond the events")
        first, _, window, _ = self._window(offset, length)
        array = np.frombuffer(window, np.uint8, length, offset - first)
        array.flags.writeable = False
        number = next(self.numbers)
        self.held[number] = (offset, offset + length)
        self.waiting += length if offset >= self.begin else 0
        weakref.finalize(array, self._release, number).atexit = False
        return array.data

    def place(self, view: Buffer) -> tuple[int, int] | None:
        """Return the pool and the offset of the bytes of a view that `view` has made, or of a part of it.

        None for bytes that are elsewhere.
        """
        if not isinstance(view, memoryview) or not view.nbytes or not view.c_contiguous:
            return None
        if self.pools is not None and of_peer(view) is not None:
            return self.pools.place(view)
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        for first, size, _, begin in self.windows:
            if begin <= address < begin + size:
                return OWN, first + int(address) - begin
        return None

    def _release(self, number: int) -> None:
        self.gone.append(number)
        if self.dropped:
            self.drop()

    def _settle(self) -> None:
        """Forget the views that nothing refers to."""
        while self.gone:
            number = self.gone.popleft()
            self.peer_held.pop(number, 0)
            low, high = self.held.pop(number, (0, 0))
            self.waiting -= high - low if low >= self.begin else 0

    def _window(self, offset: int, length: int) -> tuple[int, int, mmap.mmap, int]:
        """Return the mapping that has this range."""
        for window in self.windows:
            if window[0] <= offset and offset + length <= window[0] + window[1]:
                return window
        first = offset // PAGE * PAGE
        room = max(WINDOW_BYTES, length + PAGE)
        size = os.fstat(self.file).st_size
        os.ftruncate(self.file, first + room)  # mmap wants a file of this length; it may be shorter afterwards
        mapped = mmap.mmap(self.file, room, offset=first)
        os.ftruncate(self.file, size)
        address = np.frombuffer(mapped, np.uint8, 1).__array_interface__["data"][0]
        self.windows.append((first, room, mapped, int(address)))
        return self.windows[-1]

    def _truncate(self, size: int) -> None:
        os.ftruncate(self.file, size)
        self.allocated = min(self.allocated[0], size), min(self.allocated[1], size)

    def _give_back(self, end: int) -> None:
        """Give back the pages before `end` but those of held frames, and the addresses that have none."""
        at, kept = HEAD.size, max(end, self.allocated[0])
        self.allocated = kept, max(kept, self.allocated[1])
        for low, high in [*sorted(self.held.values()), (end, end)]:
            begin, until = -(-at // PAGE) * PAGE, low // PAGE * PAGE
            for first, room, window, _ in self.windows:
                left, right = max(begin, first), min(until, first + room)
                if left < right:
                    with contextlib.suppress(OSError):
                        window.madvise(mmap.MADV_REMOVE, left - first, right - left)
            at = max(at, high)
        ranges = self.held.values()
        used = [w for w in self.windows if any(w[0] < high and low < w[0] + w[1] for low, high in ranges)]
        self.windows = used or self.windows[:1]
