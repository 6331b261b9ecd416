"""The stages of a chain on a device: memory for sections and selections, the order of a top-k, readers of indices.

`kernels` comes from kernels_for(). Functions with a counterpart for the CPU name it; the counterpart has the reasons.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from narrows.compression.buffers import ByteArray, words_of
from narrows.compression.index_codings import (
    FIXED,
    GROUPED_RICE,
    RICE,
    STRATA,
    STRIDE,
    STRIDE_UNIT,
    STRIDED_RICE,
    bytes_of,
)
from narrows.compression.kernels.record import Sum
from narrows.compression.kernels.rice import RICE_GROUP
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


def _words(kernels: Any, name: str, part: ByteArray) -> DeviceArray:
    return kernels.upload(name, words_of(part))


def _read_rice(kernels: Any, part: ByteArray, header: Header, places: DeviceArray) -> None:
    _read_codes(kernels, part, header.parameter, places)


def _read_strided_rice(kernels: Any, part: ByteArray, header: Header, places: DeviceArray) -> None:
    _read_codes(kernels, part[1:], int(part[0]), places)
    kernels.stretch(*divmod(header.parameter, STRIDE_UNIT), places)


def _read_codes(kernels: Any, part: ByteArray, r: int, places: DeviceArray) -> None:
    low_bytes = bytes_of(places.size * r)
    lows, unary = _words(kernels, "lows", part[:low_bytes]), _words(kernels, "unary", part[low_bytes:])
    kernels.rice_decode(lows, unary, r, places)


def _read_grouped(kernels: Any, part: ByteArray, header: Header, places: DeviceArray) -> None:
    groups = -(-header.kept // RICE_GROUP)
    head = bytes_of(4 * groups)
    low_end = head + bytes_of(header.parameter)
    parameters = np.column_stack((part[:head] & 15, part[:head] >> 4)).ravel()[:groups]
    lows, unary = _words(kernels, "lows", part[head:low_end]), _words(kernels, "unary", part[low_end:])
    kernels.grouped_decode(kernels.upload("parameters", parameters), lows, unary, header.count, places)


def _read_fixed(kernels: Any, part: ByteArray, header: Header, places: DeviceArray) -> None:
    kernels.fixed_decode(_words(kernels, "lows", part), header.parameter, places)


def _read_strata(kernels: Any, part: ByteArray, header: Header, places: DeviceArray) -> None:
    kernels.strata(header.parameter, 0, header.kept, header.count, None, places)


def _read_stride(kernels: Any, part: ByteArray, header: Header, places: DeviceArray) -> None:
    kernels.strided(*divmod(header.parameter, STRIDE_UNIT), 0, places)


INDEX_READERS: dict[int, Callable[[Any, ByteArray, Header, DeviceArray], None]] = {
    RICE.wire_id: _read_rice,
    FIXED.wire_id: _read_fixed,
    GROUPED_RICE.wire_id: _read_grouped,
    STRATA.wire_id: _read_strata,
    STRIDE.wire_id: _read_stride,
    STRIDED_RICE.wire_id: _read_strided_rice,
}


FREE_MAX = 4  # the most free buffers; with more updates in flight more buffers are lent


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
