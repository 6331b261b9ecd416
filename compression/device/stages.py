"""The stages of a chain on a device: memory for sections and selections, the order of a top-k, readers of indices.

`kernels` comes from kernels_for(). Functions with a counterpart for the CPU name it; the counterpart has the reasons.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import ByteArray
from narrows.compression.index_codings import (
    FIXED,
    GROUPED_RICE,
    RICE,
    STRATA,
    STRIDE_UNIT,
    STRIDED_RICE,
    bytes_of,
)
from narrows.compression.kernels.record import Sum
from narrows.compression.payload import Header
from narrows.compression.selection import sample_plan

DeviceArray: TypeAlias = Any
ALIGNED = 16  # bytes: sections begin at multiples, so four values of any type can be loaded at once


class Arena(NamedTuple):
    """The sections of one payload in one array of bytes. It is valid until the next one is made."""

    whole: DeviceArray  # uint8
    begins: tuple[int, ...]  # byte offset of each section
    parts: tuple[DeviceArray, ...]  # a view of each section, in its dtype


def arena(kernels: Any, parts: Sequence[tuple[Any, int]]) -> Arena:
    """Make an arena.

    Args:
        kernels: from `kernels_for`.
        parts: (dtype, largest number of items) of each section.
    """
    begins, end = [], 0
    for dtype, size in parts:
        begins.append(end)
        end += (
            np.dtype(dtype).itemsize * size // ALIGNED + 1
        ) * ALIGNED  # no part is empty, for a slice of nothing has no place
    whole = kernels.scratch("sections", end, np.uint8)
    views = [
        whole[begin:finish].view(dtype)[:size]
        for begin, finish, (dtype, size) in zip(begins, [*begins[1:], end], parts, strict=True)
    ]
    return Arena(whole, tuple(begins), tuple(views))


def pairs(kernels: Any, count: int) -> tuple[DeviceArray, DeviceArray]:
    """Return scratch memory for rising indices and for the bits of their values, uint32[count] each."""
    return kernels.scratch("indices kept", count, np.uint32), kernels.scratch("bits kept", count, np.uint32)


def select_top(
    kernels: Any, source: Any, k: int, dropped_bits: int, sampled: bool,
    places: DeviceArray, kept: DeviceArray, record: DeviceArray,
) -> None:  # fmt: skip
    """Do selection.select_top on the device.

    Args:
        kernels: from `kernels_for`.
        source: a Sum, which is made, or an array of bit patterns, uint32.
        k: the number of values.
        dropped_bits: the lowest mantissa bits that are ignored.
        sampled: a sample may choose the threshold, if that pays. If it misleads, record[MISLED] is set.
        places: uint32[k], gets the rising indices.
        kept: uint32[k], gets the bits of the values.
        record: gets the number of values that are fewer than k.
    """
    key_mask = 0x7FFFFFFF >> dropped_bits << dropped_bits
    summed = isinstance(source, Sum)
    bits = source.sums.view(np.uint32) if summed else source
    plan = sample_plan(bits.size, k) if sampled else None
    if plan is not None:
        kernels.top_sampled(source, plan, k, key_mask, places, kept, record)
        return
    if summed:
        kernels.sum_of(source)
    kernels.top(bits, k, key_mask, places, kept, record)


class BitStream(NamedTuple):
    """Bytes that a decoder reads as 64-bit words, with SPARE_WORDS zeros after them (`words_of`)."""

    part: ByteArray


UploadPart: TypeAlias = npt.NDArray[Any] | BitStream


class IndexReader(NamedTuple):
    """How a device reads the indices of a payload.

    Attributes:
        parts: what it needs of the section.
        read: (kernels, these parts on the device, places): writes the indices to places.
    """

    parts: list[UploadPart]
    read: Callable[[Any, list[DeviceArray], DeviceArray], None]


def _rice(part: ByteArray, header: Header) -> IndexReader:
    return _codes(part, header.kept, header.parameter)


def _codes(part: ByteArray, kept: int, r: int) -> IndexReader:
    lows = bytes_of(kept * r)
    return IndexReader(
        [BitStream(part[:lows]), BitStream(part[lows:])],
        lambda kernels, there, places: kernels.rice_decode(*there, r, places),
    )


def _strided_rice(part: ByteArray, header: Header) -> IndexReader:
    codes = _codes(part[1:], header.kept, int(part[0]))

    def read(kernels: Any, there: list[DeviceArray], places: DeviceArray) -> None:
        codes.read(kernels, there, places)
        kernels.stretch(*divmod(header.parameter, STRIDE_UNIT), places)

    return IndexReader(codes.parts, read)


def _grouped(part: ByteArray, header: Header) -> IndexReader:
    parameters, lows, unary = GROUPED_RICE.split(part, header.parameter, header.kept)
    return IndexReader(
        [parameters, BitStream(lows), BitStream(unary)],
        lambda kernels, there, places: kernels.grouped_decode(*there, header.count, places),
    )


def _fixed(part: ByteArray, header: Header) -> IndexReader:
    return IndexReader(
        [BitStream(part)], lambda kernels, there, places: kernels.fixed_decode(*there, header.parameter, places)
    )


def _strata(part: ByteArray, header: Header) -> IndexReader:
    return IndexReader(
        [],
        lambda kernels, _, places: kernels.strata(header.parameter, 0, header.kept, header.count, None, places),
    )


# A turn of Cycle is not among them: `add_strided_as` needs no list of indices.
INDEX_READERS: dict[int, Callable[[ByteArray, Header], IndexReader]] = {
    RICE.wire_id: _rice,
    FIXED.wire_id: _fixed,
    GROUPED_RICE.wire_id: _grouped,
    STRATA.wire_id: _strata,
    STRIDED_RICE.wire_id: _strided_rice,
}


class DeviceCodes:
    """The coded values of one payload, in memory of the device that later encodes leave alone.

    `add` does what `accumulate` does with the payload, which is neither checked nor copied to the device again. An own
    update stands in for its mean that way (protocols/member/replica.py).

    Args:
        pool: has lent `buffer`, and gets it back.
        buffer: uint8, the value sections as they lie in `sections`, and after them the indices.
        name: of the value coding.
        sections: the sections of the payload. Only their places count.
        end: the bytes of the value sections.
        placed: indices, uint32, follow the value sections.
        turn: phase and stride of a turn of Cycle, if its indices do not.

    Attributes:
        sizes: the items of each value section; empty until the payload has landed.
        kept: the number of values, likewise.
    """

    def __init__(
        self,
        pool: "DevicePool",
        buffer: DeviceArray,
        name: str,
        sections: Arena,
        end: int,
        placed: bool,
        turn: tuple[int, int] | None,
    ) -> None:
        self.pool, self.buffer, self.name, self.sections = pool, buffer, name, sections
        self.end, self.placed, self.turn = end, placed, turn
        self.sizes: Sequence[int] = ()
        self.kept = 0

    def landed(self, kept: int, sizes: Sequence[int]) -> None:
        """Note how many values there are, which only the device knew before."""
        self.kept, self.sizes = kept, sizes

    def add(self, weight: float, out: DeviceArray) -> None:
        """Set out += float32(weight) * values, for float32[count] on the device."""
        buffer, end, parts = self.buffer, self.end, []
        for begin, part, size in zip(self.sections.begins, self.sections.parts, self.sizes, strict=False):
            parts.append(buffer[begin : begin + size * part.itemsize].view(part.dtype))
        places = buffer[end : end + 4 * self.kept].view(np.uint32) if self.placed else None
        add_values(self.pool.kernels, self.name, tuple(parts), self.kept, places, self.turn, np.float32(weight), out)

    def __del__(self) -> None:
        self.pool.take_back(self.buffer)


def add_values(
    kernels: Any,
    name: str,
    parts: tuple[DeviceArray, ...],
    kept: int,
    places: DeviceArray | None,
    turn: tuple[int, int] | None,
    weight: np.float32,
    out: DeviceArray,
) -> None:
    """Set out += weight * values.

    Args:
        kernels: from `kernels_for`.
        name: of the value coding.
        parts: the value sections.
        kept: the number of values.
        places: their indices, uint32[kept]; None: all indices, or those of `turn`.
        turn: phase and stride of a turn of Cycle.
        weight: the factor.
        out: float32[count].
    """
    if not kept:
        return
    if turn is not None:
        kernels.add_strided_as(name, parts, *turn, kept, weight, out)
    elif places is not None:
        kernels.scatter_add_as(name, parts, places, weight, out)
    else:
        kernels.add_as(name, parts, weight, out)


FREE_MAX = 4  # the most free buffers; with more updates in flight more buffers are lent


class DevicePool:
    """Lends memory of the device to `DeviceCodes`.

    The launches that use a buffer run in the order of the queue. So a buffer that is back may be lent while the device
    still reads it: the next launch that writes to it comes later.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.free: list[DeviceArray] = []

    def lend(self, size: int) -> DeviceArray:
        """Return uint8[size] with any content."""
        for i, buffer in enumerate(self.free):  # other threads only append to the list
            if size <= buffer.size <= 2 * size + 4096:
                return self.free.pop(i)
        del self.free[:1]  # this buffer does not fit: the new one takes its place
        return self.kernels.empty(size + size // 8, np.uint8)

    def take_back(self, buffer: DeviceArray) -> None:
        if len(self.free) < FREE_MAX:
            self.free.append(buffer)


class Staging:
    """Lends buffers, and takes each back once no view of it is left.

    A payload is sent without a copy, sent again if it is lost, and added to the replica while it stands in. So only the
    garbage collector knows when it is no longer used.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.free: list[ByteArray] = []
        self.lent = 0  # buffers lent so far, including those that are back

    def lend(self, size: int) -> memoryview:
        """Return uint8[size]. Its slices keep it lent, and so do arrays that np.frombuffer makes of it."""
        fitting = [i for i, buffer in enumerate(self.free) if buffer.size >= size]
        if fitting:  # other threads only append to the list
            buffer = self.free.pop(min(fitting, key=lambda i: self.free[i].size))
        else:
            del self.free[:1]  # this buffer is too small: the new one takes its place
            buffer = self.kernels.pinned(size + size // 8)
        self.lent += 1
        view = buffer[:size]
        weakref.finalize(view, self._back, buffer).atexit = False
        return view.data

    def _back(self, buffer: ByteArray) -> None:
        """Take a buffer back. The thread that drops the last view calls this."""
        if len(self.free) < FREE_MAX:
            self.free.append(buffer)
