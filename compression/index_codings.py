"""Index codings: how the indices of kept values travel.

INDEX_CODINGS has the wire ids; 0 stands for all values in order. `encode_indices` takes the shortest coding of the
given indices, and the header names it. A decoder checks a whole section before it reads it, then reads a chunk at a
time.

    gaps between rising indices  ── Rice          one parameter for the payload
                                 ── GroupedRice   one for every 64 gaps: clustered indices
                                 ── Fixed         one width for all: indices at regular distances
    nothing but a parameter      ── Strata        a seed, of randk
                                 ── Stride        phase and distance, of cycle
    some places of a Stride      ── StridedRice   cycle with a share
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from narrows.compression.buffers import SPARE_WORDS, ByteArray, IndexArray, WordArray, read_only, words_of
from narrows.compression.errors import PayloadError
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.rice import RICE_GROUP

EVERY_INDEX = 0  # wire id of a payload that holds all values and so no index section

# (begin, out): writes the indices from place `begin` on to out, uint32. Calls go from chunk to chunk, begin a multiple
# of CHUNK.
ReadIndices = Callable[[int, IndexArray], None]


class CodedIndices(NamedTuple):
    """Coded indices, in the parts that the header and the body of a payload carry."""

    wire_id: int  # of the coding
    parameter: int  # of the coding, 32 bits in the header
    section: ByteArray  # the index section of the body


class IndexCoding(Protocol):
    """Codes `kept` rising indices below `count`, 1 <= kept <= count. It has no state."""

    wire_id: int

    def bytes_max(self, kept: int, count: int) -> int:
        """Return the largest size of a section in bytes. It never falls as `kept` grows; longer ones are refused."""

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        """Check a section where it is: the call copies nothing, and holds no GIL while it reads.

        Args:
            part: the index section, not trusted.
            parameter: from the header.
            kept: the number of indices.
            count: the number of values of the dense array.

        Raises:
            PayloadError: the section is not exactly `kept` rising indices below `count`.
        """

    def reader(self, part: ByteArray, parameter: int, kept: int, count: int) -> ReadIndices:
        """Return a reader of a section that `check` has passed, with the same arguments. Its memory must not have changed."""


def _wrong_size(part: ByteArray, kept: int, count: int) -> PayloadError:
    return PayloadError(f"payload is corrupt: {part.size} bytes cannot be the indices of {kept} of {count} values")


def _not_rising(kept: int, count: int) -> PayloadError:
    return PayloadError(f"payload is corrupt: its indices are not {kept} below {count}")


def _spare_bits(part: ByteArray, bits: int) -> None:
    """Raise PayloadError if a bit is set in the last byte of `part` after the first `bits` bits."""
    if bits % 8 and part[bits // 8] >> (bits % 8):
        raise PayloadError("payload is corrupt: bits are set after the last index")


def bytes_of(bits: int) -> int:
    """Return the number of bytes that hold so many bits."""
    return (bits + 7) // 8


def _zeroed(bits: int) -> WordArray:
    return np.zeros((bits + 63) // 64 + SPARE_WORDS, np.uint64)


def _first_bytes(words: WordArray, bits: int) -> ByteArray:
    return words.view(np.uint8)[: bytes_of(bits)]


RICE_PARAMETER_MAX = 31
BOUNDS_MAX = 1024  # of pairs (kept, count), for which the bound of a section is remembered


def _rice_bytes(kept: int, r: int, unary_bits: int) -> int:
    return bytes_of(kept * r) + bytes_of(unary_bits)


@lru_cache(maxsize=BOUNDS_MAX)
def _rice_bound(kept: int, count: int) -> tuple[int, int]:
    """Return (bytes, r) of the best r if only the sum of gaps is known: sum of (gap >> r) <= (count - kept) >> r."""
    return min((_rice_bytes(kept, r, kept + ((count - kept) >> r)), r) for r in range(RICE_PARAMETER_MAX + 1))


class Rice:
    """Rice-coded gaps in two streams (kernels/rice.py), with one parameter r <= 31 for the payload, in the header.

    Section: ceil(kept * r / 8) bytes of low bits, then the unary stream. Spare bits of the last byte of each are zero,
    and the unary stream ends with the byte that has its last one bit. So indices have exactly one coding for each r.
    With r = 0 the section is the bitmap of the indices up to the last one, so there is no coding for bitmaps.
    Random indices at density 1 % take 8.11 bits each (entropy 8.08), at 5 % 5.79 (5.73).
    """

    wire_id = 1

    def bytes_max(self, kept: int, count: int) -> int:
        return _rice_bound(kept, count)[0]

    def first(self, kept: int, count: int) -> int:
        """Return the smallest of the four r whose exact costs are computed.

        It lies two below the best r for the sum of the gaps, because clustered indices want a smaller one.
        """
        return min(max(_rice_bound(kept, count)[1] - 2, 0), RICE_PARAMETER_MAX - 3)

    def cheapest_of(self, kept: int, first: int, costs: list[int]) -> tuple[int, int, int]:
        """Return (bytes, r, bits of the unary stream) of the cheapest r, from the costs that rice_costs computed."""
        return min((_rice_bytes(kept, r, bits - kept * r), r, bits - kept * r) for r, bits in enumerate(costs, first))

    def cheapest(self, indices: IndexArray, count: int) -> tuple[int, int, int]:
        """Return (bytes, r, bits of the unary stream) of the cheapest r for these indices."""
        first, costs = self.first(indices.size, count), np.empty(4, np.int64)
        cpu.rice_costs(indices, first, costs)
        return self.cheapest_of(indices.size, first, costs.tolist())

    def encode(self, indices: IndexArray, r: int, unary_bits: int) -> CodedIndices:
        low_bits = indices.size * r
        lows, unary = _zeroed(low_bits), _zeroed(unary_bits)
        written = cpu.rice_encode(indices, r, lows, unary)
        assert written == unary_bits
        part = np.concatenate((_first_bytes(lows, low_bits), _first_bytes(unary, unary_bits)))
        return CodedIndices(self.wire_id, r, part)

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        if parameter > RICE_PARAMETER_MAX:
            raise PayloadError(f"payload is corrupt: Rice parameter {parameter} is above {RICE_PARAMETER_MAX}")
        low_bytes = bytes_of(kept * parameter)
        if part.size <= low_bytes or part.size > self.bytes_max(kept, count) or not part[-1]:
            raise _wrong_size(part, kept, count)
        _spare_bits(part, kept * parameter)
        if cpu.rice_last_index(part[:low_bytes], part[low_bytes:], kept, parameter, count) < 0:
            raise _not_rising(kept, count)

    def reader(self, part: ByteArray, parameter: int, kept: int, count: int) -> ReadIndices:
        low_bytes = bytes_of(kept * parameter)
        lows, unary = words_of(part[:low_bytes]), words_of(part[low_bytes:])
        cursor: WordArray = np.zeros(4, np.uint64)
        return lambda _, indices: cpu.rice_decode(lows, unary, parameter, cursor, indices)


class GroupedRice:
    """Rice-coded gaps with a parameter r <= 15 for every 64 of them. The header's parameter is the bits of all lows.

    Section: a nibble for each group, the first in the low half of a byte; the low bits; the unary stream. Spare bits and
    the end are as in Rice. It suits clustered indices: those of a GPT's gradient at density 1 % take 3.9 bits each,
    with Rice 8.5.
    """

    wire_id = 3

    def bytes_max(self, kept: int, count: int) -> int:
        return RICE.bytes_max(kept, count)

    def cheapest(self, indices: IndexArray) -> tuple[int, ByteArray, int, int]:
        """Return (bytes, parameter of each group, bits of the lows, bits of the unary stream)."""
        parameters = np.empty(-(-indices.size // RICE_GROUP), np.uint8)
        low_bits, unary_bits = cpu.group_parameters(indices, parameters)
        return (
            bytes_of(4 * parameters.size) + bytes_of(low_bits) + bytes_of(unary_bits),
            parameters,
            low_bits,
            unary_bits,
        )

    def encode(self, indices: IndexArray, parameters: ByteArray, low_bits: int, unary_bits: int) -> CodedIndices:
        lows, unary = _zeroed(low_bits), _zeroed(unary_bits)
        written = cpu.grouped_encode(indices, read_only(parameters), lows, unary)
        assert written == unary_bits
        pairs = np.append(parameters, np.zeros(parameters.size % 2, np.uint8))
        nibbles = pairs[0::2] | pairs[1::2] << np.uint8(4)
        part = np.concatenate((nibbles, _first_bytes(lows, low_bits), _first_bytes(unary, unary_bits)))
        return CodedIndices(self.wire_id, low_bits, part)

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        groups = -(-kept // RICE_GROUP)
        head = bytes_of(4 * groups)
        low_end = head + bytes_of(parameter)
        if part.size <= low_end or part.size > self.bytes_max(kept, count) or not part[-1]:
            raise _wrong_size(part, kept, count)
        nibbles, lows = part[:head], part[head:low_end]
        _spare_bits(nibbles, 4 * groups)
        _spare_bits(lows, parameter)
        last = int(nibbles[-1] >> 4 * (1 - groups % 2))
        whole = int((nibbles & 15).sum(dtype=np.int64)) + int((nibbles >> 4).sum(dtype=np.int64))
        if RICE_GROUP * whole - last * (RICE_GROUP * groups - kept) != parameter:
            raise _wrong_size(part, kept, count)
        if cpu.grouped_last_index(nibbles, lows, part[low_end:], kept, count) < 0:
            raise _not_rising(kept, count)

    def reader(self, part: ByteArray, parameter: int, kept: int, count: int) -> ReadIndices:
        parameters, lows, unary = self.split(part, parameter, kept)
        low_words, unary_words = words_of(lows), words_of(unary)
        cursor: WordArray = np.zeros(6, np.uint64)

        def read(_: int, indices: IndexArray) -> None:
            cpu.grouped_decode(parameters, low_words, unary_words, count, cursor, indices)

        return read

    def split(self, part: ByteArray, parameter: int, kept: int) -> tuple[ByteArray, ByteArray, ByteArray]:
        """Return (the parameter of each group, the bytes of the lows, those of the unary stream) of a checked section."""
        groups = -(-kept // RICE_GROUP)
        head = bytes_of(4 * groups)
        low_end = head + bytes_of(parameter)
        parameters = np.column_stack((part[:head] & 15, part[:head] >> 4)).ravel()[:groups]
        return read_only(parameters), part[head:low_end], part[low_end:]


class Fixed:
    """Gaps of `parameter` bits each: ceil(kept * parameter / 8) bytes. It suits indices at regular distances."""

    wire_id = 2

    def bytes_max(self, kept: int, count: int) -> int:
        return RICE.bytes_max(kept, count)

    def encode(self, indices: IndexArray, width: int) -> CodedIndices:
        words = _zeroed(indices.size * width)
        cpu.fixed_encode(indices, width, words)
        return CodedIndices(self.wire_id, width, _first_bytes(words, indices.size * width))

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        if parameter > 32 or part.size != bytes_of(kept * parameter) or part.size > self.bytes_max(kept, count):
            raise _wrong_size(part, kept, count)
        _spare_bits(part, kept * parameter)
        if cpu.fixed_last_index(part, parameter, kept) >= count:
            raise _not_rising(kept, count)

    def reader(self, part: ByteArray, parameter: int, kept: int, count: int) -> ReadIndices:
        words = words_of(part)
        cursor: WordArray = np.zeros(2, np.uint64)
        return lambda _, indices: cpu.fixed_decode(words, parameter, cursor, indices)


class Strata:
    """One random index from each of `kept` equal parts of the array. The parameter is the seed, and the section empty.

    kernels/random.py defines the indices of a seed.
    """

    wire_id = 4

    def bytes_max(self, kept: int, count: int) -> int:
        return 0

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        """Do nothing: each seed is valid, and the section has no room."""

    def reader(self, part: ByteArray, parameter: int, kept: int, count: int) -> ReadIndices:
        words: IndexArray = np.empty(RANDOM_BLOCK, np.uint32)
        return lambda begin, indices: cpu.strata(parameter, begin, kept, count, words, indices)


class Stride:
    """Every S-th index, from a phase below S on. The parameter is 65536 * phase + S, and the section empty."""

    wire_id = 5

    def bytes_max(self, kept: int, count: int) -> int:
        return 0

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        phase, stride = divmod(parameter, STRIDE_UNIT)
        if phase >= stride or kept != stride_count(phase, stride, count):
            raise PayloadError(f"payload is corrupt: {kept} of {count} values are not every {stride}th from {phase} on")

    def reader(self, part: ByteArray, parameter: int, kept: int, count: int) -> ReadIndices:
        phase, stride = divmod(parameter, STRIDE_UNIT)
        return lambda begin, indices: cpu.strided(phase, stride, begin, indices)


class StridedRice:
    """Some indices of a Stride: its parameter, and a section of u8 r and the Rice-coded positions in that sequence."""

    wire_id = 7  # 6 was the factors of powersgd, which a peer of an earlier release may still send

    def bytes_max(self, kept: int, count: int) -> int:
        """Return the largest size of a section.

        Args:
            kept: the number of indices.
            count: the length of the sequence, or that of the dense array, which is not shorter.
        """
        return 1 + RICE.bytes_max(kept, count)

    def encode(self, positions: IndexArray, phase: int, stride: int, count: int) -> CodedIndices:
        _, r, unary_bits = RICE.cheapest(positions, stride_count(phase, stride, count))
        section = np.append(np.uint8(r), RICE.encode(positions, r, unary_bits).section)
        return CodedIndices(self.wire_id, phase * STRIDE_UNIT + stride, section)

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        phase, stride = divmod(parameter, STRIDE_UNIT)
        if phase >= stride or kept > stride_count(phase, stride, count):
            raise PayloadError(
                f"payload is corrupt: {kept} of {count} values are not among every {stride}th from {phase} on"
            )
        if not part.size:
            raise _wrong_size(part, kept, count)
        RICE.check(part[1:], int(part[0]), kept, stride_count(phase, stride, count))

    def reader(self, part: ByteArray, parameter: int, kept: int, count: int) -> ReadIndices:
        phase, stride = divmod(parameter, STRIDE_UNIT)
        read_positions = RICE.reader(part[1:], int(part[0]), kept, stride_count(phase, stride, count))

        def read(begin: int, indices: IndexArray) -> None:
            read_positions(begin, indices)
            cpu.stretch(phase, stride, indices)

        return read


STRIDE_UNIT = 1 << 16  # the parameter of Stride is phase * STRIDE_UNIT + stride
STRIDE_MAX = STRIDE_UNIT - 1


def stride_count(phase: int, stride: int, count: int) -> int:
    """Return how many indices below `count` are phase, phase + stride, ..."""
    return max(0, -(-(count - phase) // stride))


RICE, FIXED, GROUPED_RICE, STRATA = Rice(), Fixed(), GroupedRice(), Strata()
STRIDE, STRIDED_RICE = Stride(), StridedRice()
INDEX_CODINGS: dict[int, IndexCoding] = {
    coding.wire_id: coding for coding in (RICE, FIXED, GROUPED_RICE, STRATA, STRIDE, STRIDED_RICE)
}


def encode_indices(indices: IndexArray, count: int) -> CodedIndices:
    """Code indices in the shortest way: Rice, Fixed or GroupedRice. Of equal sizes the lower wire id wins.

    Args:
        indices: rising, uint32[kept], kept >= 1, each below `count`.
        count: the number of values of the dense array.
    """
    rice_size, r, unary_bits = RICE.cheapest(indices, count)
    grouped_bytes, parameters, low_bits, grouped_unary_bits = GROUPED_RICE.cheapest(indices)
    width = cpu.largest_gap(indices).bit_length()
    ways: list[tuple[int, int, Callable[[], CodedIndices]]] = [
        (rice_size, RICE.wire_id, lambda: RICE.encode(indices, r, unary_bits)),
        (bytes_of(indices.size * width), FIXED.wire_id, lambda: FIXED.encode(indices, width)),
        (
            grouped_bytes,
            GROUPED_RICE.wire_id,
            lambda: GROUPED_RICE.encode(indices, parameters, low_bits, grouped_unary_bits),
        ),
    ]
    return min(ways, key=lambda way: way[:2])[2]()


def indices_max_bytes(kept: int, count: int) -> int:
    """Return the largest size in bytes of a section of `encode_indices`."""
    return RICE.bytes_max(kept, count) if kept else 0
