"""The stages of a chain on the device: top-k and its relatives, and the codings of indices, as orders of kernels.

Each function says whose twin it is; the twin has the reasons. `kernels` is what kernels_for() returns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from narrows.compression.buffers import SPARE_WORDS, ByteArray, words_of
from narrows.compression.index_codings import (
    FIXED,
    GROUPED_RICE,
    RICE,
    STRATA,
    STRIDE,
    STRIDE_UNIT,
    STRIDED_RICE,
    bytes_of,
    stride_count,
)
from narrows.compression.kernels.rice import RICE_GROUP
from narrows.compression.payload import Header
from narrows.compression.selection import sample_plan

DeviceArray: TypeAlias = Any
Pairs: TypeAlias = tuple[DeviceArray, DeviceArray]  # rising indices, and the bits of their values


class CodedIndices(NamedTuple):
    """As index_codings.CodedIndices, the section in parts: (array, its first bytes that count)."""

    wire_id: int
    parameter: int
    parts: list[tuple[Any, int]]


def pairs(kernels: Any, count: int) -> tuple[DeviceArray, DeviceArray]:
    return kernels.scratch("indices kept", count, np.uint32), kernels.scratch("bits kept", count, np.uint32)


def select_top(kernels: Any, addends: Any, k: int, dropped_bits: int) -> tuple[DeviceArray, DeviceArray]:
    """select_top of the sum: the addends are read once, and the sum again only where the sample misled."""
    bits = addends.sums.view(np.uint32)
    if sample_plan(bits.size, k) is None:
        kernels.sum_of(addends)
    return _select_top(
        kernels,
        bits,
        k,
        dropped_bits,
        lambda group_lines, keys: kernels.sample_sum_keys(addends, group_lines, keys),
        lambda above, places, kept: kernels.compact_sum(addends, above, places, kept),
    )


def select_top_of(kernels: Any, bits: DeviceArray, k: int) -> Pairs:
    """select_top of values that are there already."""
    return _select_top(
        kernels,
        bits,
        k,
        0,
        lambda group_lines, keys: kernels.sample_keys(bits, group_lines, keys),
        lambda above, places, kept: kernels.compact(bits, above, 0, places, kept),
    )


def _select_top(
    kernels: Any,
    bits: DeviceArray,
    k: int,
    dropped_bits: int,
    sample: Callable[[int, DeviceArray], None],
    collect: Callable[[int, DeviceArray, DeviceArray], int],
) -> Pairs:
    """sample and collect: the first two reads, which may fill `bits`."""
    mask = 0x7FFFFFFF >> dropped_bits << dropped_bits
    plan = sample_plan(bits.size, k)
    if plan is not None:
        keys = kernels.scratch("sample", plan.keys, np.uint32)
        sample(plan.group_lines, keys)
        smallest = mask & -mask
        threshold = max(kernels.kth_largest_key(keys, plan.rank)[0] & mask, smallest)
        places, kept = pairs(kernels, plan.room)
        found = collect(threshold - 1, places, kept)
        if found <= plan.room and (found >= k or threshold == smallest):
            places, kept = places[:found], kept[:found]
            if found > k:
                threshold, above = kernels.kth_largest_key(_masked(kernels, kept, mask), k)
                kernels.keep_top(mask, threshold, k - above, k, places, kept)
            return places[:k], kept[:k]
    keys = _masked(kernels, bits, mask)
    threshold, above = kernels.kth_largest_key(keys, k)
    ties = k - above if threshold else 0
    places, kept = pairs(kernels, above + ties)
    kernels.compact(keys, threshold, ties, places, kept, above + ties)
    if dropped_bits:
        kernels.take(bits, places, kept)
    return places, kept


def _masked(kernels: Any, bits: DeviceArray, mask: int) -> DeviceArray:
    """Kernels drop the sign themselves."""
    if mask == 0x7FFFFFFF:
        return bits
    keys = kernels.scratch("masked", bits.size, np.uint32)
    kernels.masked(bits, mask, keys)
    return keys


def select_above(kernels: Any, reducer: Any, sums: DeviceArray) -> Pairs:
    """Threshold.reduce."""
    bits = sums.view(np.uint32)
    below = int(np.float32(reducer.threshold).view(np.uint32)) - 1
    found = kernels.count_above(bits, below)
    places, kept = pairs(kernels, found)
    kernels.compact(bits, below, 0, places, kept, found)
    return places, kept


def select_blocks(kernels: Any, reducer: Any, sums: DeviceArray) -> Pairs:
    """BlockTopK.reduce."""
    places, kept = pairs(kernels, reducer.kept_max(sums.size))
    found = kernels.compact_blocks(sums.view(np.uint32), reducer.k, reducer.block, None, None, places, kept)
    return places[:found], kept[:found]


def _zeroed(kernels: Any, name: str, bits: int) -> tuple[DeviceArray, int]:
    array = kernels.scratch(f"{name} to send", (bits + 63) // 64 + SPARE_WORDS, np.uint64)
    kernels.zero(array)
    return array, bytes_of(bits)


def _rice(kernels: Any, indices: DeviceArray, r: int, unary_bits: int) -> CodedIndices:
    """RICE.encode."""
    lows, unary = _zeroed(kernels, "lows", indices.size * r), _zeroed(kernels, "unary", unary_bits)
    kernels.rice_encode(indices, r, lows[0], unary[0])
    return CodedIndices(RICE.wire_id, r, [lows, unary])


def encode_strided(
    kernels: Any, positions: DeviceArray, phase: int, stride: int, count: int
) -> Callable[[], CodedIndices]:
    """STRIDED_RICE.encode, as encode_indices below."""
    kept = positions.size
    first = RICE.first(kept, stride_count(phase, stride, count))
    costs = kernels.rice_costs(positions, first)

    def code() -> CodedIndices:
        _, r, unary_bits = RICE.cheapest_of(kept, first, [int(cost) for cost in costs])
        head = np.full(1, r, np.uint8)
        parts = [(head, head.size), *_rice(kernels, positions, r, unary_bits).parts]
        return CodedIndices(STRIDED_RICE.wire_id, phase * STRIDE_UNIT + stride, parts)

    return code


def encode_indices(kernels: Any, indices: DeviceArray, count: int) -> Callable[[], CodedIndices]:
    """index_codings.encode_indices on the device. What each way costs is launched at once; the host asks for it, and the way
    is chosen, when what is returned is called."""
    kept = indices.size
    first = RICE.first(kept, count)
    parameters = kernels.scratch("parameters", -(-kept // RICE_GROUP), np.uint8)
    costs = kernels.rice_costs(indices, first)
    group_bits = kernels.group_parameters(indices, parameters)
    gap = kernels.largest_gap(indices)

    def fixed(width: int) -> CodedIndices:
        gaps = _zeroed(kernels, "lows", kept * width)
        kernels.fixed_encode(indices, width, gaps[0])
        return CodedIndices(FIXED.wire_id, width, [gaps])

    def grouped(low_bits: int, unary_bits: int) -> CodedIndices:
        lows, unary = _zeroed(kernels, "lows", low_bits), _zeroed(kernels, "unary", unary_bits)
        kernels.grouped_encode(indices, parameters, lows[0], unary[0])
        pairs = np.append(kernels.read(parameters), np.zeros(parameters.size % 2, np.uint8))
        nibbles = pairs[0::2] | pairs[1::2] << np.uint8(4)
        return CodedIndices(GROUPED_RICE.wire_id, low_bits, [(nibbles, nibbles.size), lows, unary])

    def code() -> CodedIndices:
        rice_size, r, unary_bits = RICE.cheapest_of(kept, first, [int(cost) for cost in costs])
        low_bits, grouped_bits = (int(bits) for bits in group_bits)
        width = int(gap).bit_length()
        ways: list[tuple[int, int, Callable[[], CodedIndices]]] = [
            (rice_size, RICE.wire_id, lambda: _rice(kernels, indices, r, unary_bits)),
            (bytes_of(kept * width), FIXED.wire_id, lambda: fixed(width)),
            (
                bytes_of(4 * parameters.size) + bytes_of(low_bits) + bytes_of(grouped_bits),
                GROUPED_RICE.wire_id,
                lambda: grouped(low_bits, grouped_bits),
            ),
        ]
        return min(ways, key=lambda way: way[:2])[2]()

    return code


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
