"""The large arrays of a server's machine, in memory that outlives the process, and a copy of them for the journal.

How it works

    file "live" | x ......... | p ......... | no array | momentum .. |   the machine computes here
    file "copy" | x ......... | p ......... |          | momentum .. |   as they were at one event

1. The machine takes each array from `empty`. `place` finds it again, so the journal writes an offset in its place.
2. `keep` copies all arrays from "live" to "copy". The machine must be between two events.
3. A process that was killed may have left "live" in the middle of an event. The next process maps both files, and `at`
   copies an array back.

Rules
- Both files are of the journal (journal.py): ps-serve holds them, so they outlive the process and end with ps-serve.
- An array of fewer than `least` bytes is no part of the segment. Nor is one for which the system has no memory left.
- A range of the files is free once nothing refers to its array. An array of the same size takes it over. A range that
  was free from one `keep` to the next gives its pages back.
- So the two files together have at most twice the bytes of the arrays, and of those freed since the last `keep`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.ps.store.changes import FloatArray

LEAST_BYTES = 1 << 16  # of an array in a segment; a smaller one is written with the machine
SLAB_BYTES = 1 << 32  # of addresses that are mapped at once; pages are taken as arrays are
PAGE = mmap.ALLOCATIONGRANULARITY


@dataclass(slots=True)
class ArrayRange:
    """A range of both files, for one array.

    Attributes:
        offset: its first byte in either file.
        room: its bytes, whole pages.
        array: the array, a weak reference.
        address: of the array.
        copied: "copy" has pages for it.
        idle: it was free at the last `keep`.
    """

    offset: int
    room: int
    array: Any = None
    address: int = 0
    copied: bool = False
    idle: bool = False


class ArraySegment:
    """The arrays of one process.

    Args:
        live: descriptor of the file that the arrays lie in.
        copy: descriptor of the file with their copy.
    """

    least = LEAST_BYTES

    def __init__(self, live: int, copy: int) -> None:
        self.files = (live, copy)
        self.slabs: list[tuple[int, int, mmap.mmap, mmap.mmap]] = []  # offset, bytes, "live" and "copy" mapped there
        self.end = os.fstat(live).st_size  # offset of the next slab
        self.fill = self.end  # offset of the next range; a process that replaces another begins behind its ranges
        self.used: dict[int, ArrayRange] = {}  # by offset
        self.room = 0  # bytes of the ranges in use
        self.free: list[ArrayRange] = []
        self.freed: deque[int] = deque()  # offsets of arrays that nothing refers to, as finalizers have noted them
        self.places: dict[int, int] = {}  # address -> offset, of ranges in use

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        self._settle()
        return self.room

    def empty(self, count: int) -> FloatArray:
        """Return an array, float32[count], of any values."""
        room = -(-4 * count // PAGE) * PAGE
        if 4 * count < self.least:
            return np.empty(count, np.float32)
        self._settle()
        found = next((each for each in self.free if each.room == room), None)
        if found is not None:
            self.free.remove(found)
            return self._array(found, count)
        offset = self.fill if self.fill + room <= self.end else self.end
        try:
            self._slab(offset, room)
            os.posix_fallocate(self.files[0], offset, room)  # else a page that the system lacks ends the process
        except OSError:
            return np.empty(count, np.float32)
        self.fill = offset + room
        return self._array(ArrayRange(offset, room), count)

    def place(self, array: npt.NDArray[Any]) -> int:
        """Return the offset of an array that `empty` has made, or of a view of all of it; -1 for any other array."""
        offset = self.places.get(array.__array_interface__["data"][0], -1)
        here = self.used[offset].array() if offset >= 0 else None
        same = here is not None and array.shape == here.shape and array.dtype == here.dtype
        return offset if same and array.flags.c_contiguous else -1

    def at(self, offset: int, count: int, back: bool) -> FloatArray:
        """Return the array of this offset, float32[count].

        Args:
            offset: as `place` returned it, in this process or in the one before.
            count: the number of values.
            back: copy the values from "copy".

        Raises:
            ValueError: the files have no such range.
        """
        self._settle()
        here: FloatArray | None = self.used[offset].array() if offset in self.used else None
        if here is not None and len(here) == count:
            return here
        room = -(-4 * count // PAGE) * PAGE
        if here is not None or offset < 0 or offset % PAGE or offset + room > os.fstat(self.files[0]).st_size:
            raise ValueError(f"{count} values at {offset} are beyond the arrays' file")
        self.free = [each for each in self.free if each.offset != offset]
        found = ArrayRange(offset, room, copied=back)
        array = self._array(found, count)
        if back:
            self._copy(found, back=True)
        return array

    def keep(self) -> None:
        """Copy all arrays to "copy". Raises OSError: the system has no memory for the copy."""
        self._settle()
        for each in self.free:
            if each.idle:
                self._give_back(each)
        self.free = [each for each in self.free if not each.idle]
        for each in self.free:
            each.idle = True
        for each in self.used.values():
            if not each.copied:
                os.posix_fallocate(self.files[1], each.offset, each.room)
                each.copied = True
            self._copy(each)

    def begun(self) -> None:
        """Give back the pages of all ranges but those in use: a process has taken over the arrays of another."""
        self._settle()
        if self.end:
            self._slab(0, self.end)
        at = 0
        for offset, room in [*sorted((each.offset, each.room) for each in self.used.values()), (self.end, 0)]:
            if offset > at:
                self._give_back(ArrayRange(at, offset - at))
            at = offset + room

    def drop_copy(self) -> None:
        """Give back the pages of "copy": the journal has ended."""
        for each in self.used.values():
            each.copied = False
        with contextlib.suppress(OSError):
            size = os.fstat(self.files[1]).st_size
            for offset, room, _, copy in self.slabs:
                copy.madvise(mmap.MADV_REMOVE, 0, min(room, size - offset))

    # Ranges.

    def _settle(self) -> None:
        """Make the ranges free whose arrays are gone."""
        while self.freed:
            found = self.used.pop(self.freed.popleft())
            self.room -= found.room
            del self.places[found.address]
            self.free.append(found)

    def _array(self, found: ArrayRange, count: int) -> FloatArray:
        offset, _, live, _ = self._slab(found.offset, found.room)
        array: FloatArray = np.frombuffer(live, np.float32, count, found.offset - offset)
        weakref.finalize(array, self.freed.append, found.offset).atexit = False
        found.array, found.idle = weakref.ref(array), False
        self.used[found.offset] = found
        self.room += found.room
        found.address = array.__array_interface__["data"][0]
        self.places[found.address] = found.offset
        return array

    def _slab(self, offset: int, room: int) -> tuple[int, int, mmap.mmap, mmap.mmap]:
        """Return the mapping that has this range. Raises OSError."""
        for slab in self.slabs:
            if slab[0] <= offset and offset + room <= slab[0] + slab[1]:
                return slab
        first, size = (0, self.end) if offset < self.end else (self.end, max(SLAB_BYTES, room))
        for file in self.files:
            os.ftruncate(file, max(first + size, os.fstat(file).st_size))
        live, copy = (mmap.mmap(file, size, offset=first) for file in self.files)
        self.slabs.append((first, size, live, copy))
        self.end = max(self.end, first + size)
        return self.slabs[-1]

    def _copy(self, found: ArrayRange, back: bool = False) -> None:
        first, _, live, copy = self._slab(found.offset, found.room)
        source, target = (copy, live) if back else (live, copy)
        at = found.offset - first
        np.copyto(np.frombuffer(target, np.uint8, found.room, at), np.frombuffer(source, np.uint8, found.room, at))

    def _give_back(self, found: ArrayRange) -> None:
        """Give back the pages of a range in both files."""
        for slab in self.slabs:
            low, high = max(slab[0], found.offset), min(slab[0] + slab[1], found.offset + found.room)
            for each in slab[2:] if low < high else ():
                with contextlib.suppress(OSError):
                    each.madvise(mmap.MADV_REMOVE, low - slab[0], high - low)
