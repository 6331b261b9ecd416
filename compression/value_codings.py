"""Value codings, the second stage of a chain: float32 values as bytes, whose number follows from the number of values.

VALUE_CODINGS has the wire ids; an id is never used again for another coding. `open` checks everything, so reading
cannot fail. A lossy coding is a row of data, `Sectioned`: its sections, which follow each other in the payload, and two
kernels, encode(values, *sections) and decode(*sections, values).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from narrows.compression.buffers import ByteArray, FloatArray, Values, chunks_of, read_only, section
from narrows.compression.errors import NonFiniteError, PayloadError
from narrows.compression.kernels import cpu
from narrows.compression.kernels.levels import LEVEL_MAX, MINMAX_BLOCK, SIGN_BLOCK, TWO_BIT_BLOCK
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.values import (
    INFINITY_KEY,
    INT4_BLOCK,
    INT4_SCALE_MAX,
    INT8_BLOCK,
    INT8_SCALE_MAX,
    INT12_BLOCK,
    INT12_SCALE_MAX,
)

CHUNK = 1 << 16  # values decoded at once: with their indices 512 KiB, which stay in a core's own cache
# Chunks begin at whole blocks of each coding: decoding never begins inside a block.
assert all(
    CHUNK % block == 0 for block in (INT8_BLOCK, INT4_BLOCK, INT12_BLOCK, SIGN_BLOCK, TWO_BIT_BLOCK, MINMAX_BLOCK)
)


class Key(NamedTuple):
    """The key of the random numbers of one encode: the seed and the step of the stream, 32 bits each."""

    seed: int
    step: int


class CodedValues(Protocol):
    """Checked values in a payload. The object borrows the memory of the payload."""

    def part(self, begin: int, scratch: FloatArray) -> FloatArray:
        """Decode values.

        Args:
            begin: the place of the first, a multiple of CHUNK.
            scratch: float32; its size is the number of values.

        Returns:
            The values: in `scratch`, or, if the payload has float32 values, a view of the payload.
        """

    def largest(self) -> float | None:
        """Return an upper bound on the magnitudes; None if the coding has no scales. There must be values."""

    @property
    def measured(self) -> bool:
        """True if a receiver is to measure the norm of the values, and not to bound it."""


class ValueCoding(Protocol):
    """Codes float32 values as bytes. It has no state, so one object serves all threads."""

    @property
    def spec(self) -> str:
        """The stage in a SPEC, as parse() reads it."""

    @property
    def wire_id(self) -> int:
        """The key in VALUE_CODINGS."""

    @property
    def lossless(self) -> bool:
        """True if decoded values are the encoded ones, bit for bit."""

    @property
    def finite(self) -> bool:
        """True if all valid bytes decode to finite values."""

    @property
    def unbiased(self) -> bool:
        """True if the mean of the decoded values, over keys, is the encoded value."""

    def byte_count(self, count: int) -> int:
        """Return the exact size in bytes of `count` values, whatever the values."""

    def encode(self, values: Values, key: Key, out: ByteArray) -> None:
        """Encode values.

        Args:
            values: float32[count], read-only, or in chunks.
            key: the key of the random numbers.
            out: uint8[byte_count(count)] at an address aligned for float32; overwritten.

        Raises:
            NonFiniteError: the coding is lossy, and a value is NaN or infinite.
        """

    def open(self, body: ByteArray, count: int) -> CodedValues:
        """Check coded values.

        Args:
            body: uint8[byte_count(count)], not trusted.
            count: the number of values.

        Raises:
            PayloadError: a scale is out of range, or spare bits are set.
        """


def non_finite(values: Values) -> NonFiniteError:
    """Make the error for values with NaN or infinity. Scan the values again for their number and the first place."""
    wrong, first, value = 0, 0, np.float32(0)
    for begin, part in chunks_of(values):
        places = np.flatnonzero(~np.isfinite(part))
        if places.size and not wrong:
            first, value = begin + int(places[0]), part[places[0]]
        wrong += places.size
    return non_finite_at(wrong, values.size, first, value)


def non_finite_at(wrong: int, count: int, first: int, value: np.float32) -> NonFiniteError:
    return NonFiniteError(f"{wrong} of {count} values are NaN or infinite, the first ({value}) at index {first}")


@dataclass(frozen=True, slots=True)
class _Fp32Values:
    values: FloatArray
    measured = False

    def part(self, begin: int, scratch: FloatArray) -> FloatArray:
        return self.values[begin : begin + scratch.size]

    def largest(self) -> float | None:
        return None


class Fp32:
    """The identity: count x float32. NaN and infinity travel."""

    spec = ""
    wire_id = 0
    lossless = unbiased = True
    finite = False

    def byte_count(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Values, key: Key, out: ByteArray) -> None:
        target = out.view(np.float32)
        for begin, part in chunks_of(values):
            target[begin : begin + part.size] = part

    def open(self, body: ByteArray, count: int) -> CodedValues:
        return _Fp32Values(section(body, 0, count, np.float32))


class Section(NamedTuple):
    """A section of a lossy coding: `items` items for every `per` values, of which the last group may have fewer."""

    dtype: Any
    items: int
    per: int

    def size(self, count: int) -> int:
        """Return the number of items for `count` values."""
        return self.items * -(-count // self.per)

    def byte_count(self, count: int) -> int:
        return int(np.dtype(self.dtype).itemsize) * self.size(count)

    def spare_bits(self, array: Any, count: int) -> bool:
        """Return whether bits are set after those of the last value, if whole bytes hold several values."""
        used, bits = count % self.per, 8 * self.items
        if self.dtype is not np.uint8 or not used or bits < self.per:
            return False
        return int.from_bytes(array[-self.items :].tobytes(), "little") >> bits // self.per * used > 0


def _cut(sections: Sequence[Section], arrays: Sequence[Any], begin: int, end: int) -> list[Any]:
    """Return the part of each section that has values [begin, end); `begin` is the first of a block of each coding."""
    return [array[each.size(begin) : each.size(end)] for each, array in zip(sections, arrays, strict=True)]


@dataclass(frozen=True, slots=True)
class _Sections:
    sections: tuple[Section, ...]
    arrays: tuple[Any, ...]
    decode: Callable[..., None]
    bound: Callable[[Any], float] | None
    measured: bool

    def part(self, begin: int, scratch: FloatArray) -> FloatArray:
        self.decode(*_cut(self.sections, self.arrays, begin, begin + scratch.size), scratch)
        return read_only(scratch)

    def largest(self) -> float | None:
        return self.bound(self.arrays[0]) if self.bound is not None else None


@dataclass(frozen=True, slots=True)
class Sectioned:
    """A lossy coding: its sections, its kernels, and the check of its scales."""

    spec: str
    wire_id: int
    sections: tuple[Section, ...]
    encode_kernel: Callable[..., int]
    decode_kernel: Callable[..., None]
    valid: Callable[[Any], bool] | None = None  # checks the first section; in the others any code is a value
    bound: Callable[[Any], float] | None = None  # the largest magnitude of values with this valid first section
    random: bool = False  # the encode kernel takes (stochastic, key, key, first block, words) after the values
    unbiased: bool = False  # random rounding
    measured: bool = (
        False  # `payload.check` measures the values' norm, where other codings have a bound from their scales
    )
    lossless = False

    @property
    def finite(self) -> bool:
        return self.valid is not None

    def byte_count(self, count: int) -> int:
        return sum(section.byte_count(count) for section in self.sections)

    def encode(self, values: Values, key: Key, out: ByteArray) -> None:
        arrays, end = [], 0
        for each in self.sections:
            begin, end = end, end + each.byte_count(values.size)
            arrays.append(out[begin:end].view(each.dtype))
        words = np.empty(RANDOM_BLOCK, np.uint32)
        for begin, part in chunks_of(values, CHUNK):
            pieces = _cut(self.sections, arrays, begin, begin + part.size)
            extra = (self.unbiased, key.seed, key.step, begin // self.sections[0].per, words) if self.random else ()
            if self.encode_kernel(part, *extra, *pieces) >= INFINITY_KEY:
                raise non_finite(values)

    def open(self, body: ByteArray, count: int) -> CodedValues:
        arrays, end = [], 0
        for part in self.sections:
            begin, end = end, end + part.byte_count(count)
            arrays.append(section(body, begin, part.size(count), part.dtype))
            if part.spare_bits(arrays[-1], count):
                raise PayloadError("payload is corrupt: bits are set after the last value")
        if count and self.valid and not self.valid(arrays[0]):
            name = self.spec.partition(":")[0]
            raise PayloadError(f"payload is corrupt: {'an' if name[0] == 'i' else 'a'} {name} scale is out of range")
        return _Sections(self.sections, tuple(arrays), self.decode_kernel, self.bound, self.measured)


def _top_level(levels: ByteArray) -> int:
    first, middle, last = (levels[j::3].astype(np.uint16) for j in range(3))
    low, high = first | (middle & 15) << 8, middle >> 4 | last << 4
    return int(max(low.max(), high.max()))


def _valid_levels(levels: ByteArray) -> bool:
    return _top_level(levels) <= LEVEL_MAX


def _level_bound(levels: ByteArray) -> float:
    return float(np.uint32(_top_level(levels) << 19).view(np.float32))


def _valid_ranges(ranges: FloatArray) -> bool:
    low, step = ranges[0::2], ranges[1::2]
    with np.errstate(all="ignore"):
        return bool(np.all((step >= 0) & np.isfinite(low) & np.isfinite(low + np.float32(255) * step)))


def _range_bound(ranges: FloatArray) -> float:
    low, step = ranges[0::2], ranges[1::2]
    return float(max(np.abs(low).max(), np.abs(low + np.float32(255) * step).max()))


def _at_most(largest: int, scales: Any) -> bool:
    return int(scales.max()) <= largest


def _scale_at_most(largest: int) -> Callable[[Any], bool]:
    return partial(_at_most, largest)


def _scaled(code: int, scales: Any) -> float:
    return code * float(np.uint32(int(scales.max()) << 16).view(np.float32))


def _scale_bound(code: int) -> Callable[[Any], float]:
    """Return `bound` for scales that are bf16 patterns.

    Args:
        code: the largest magnitude of a code.
    """
    return partial(_scaled, code)


BIT_PLANE = Section(np.uint8, 1, 8)
HALF = Section(np.uint16, 1, 1)
FP32 = Fp32()
FP16 = Sectioned("fp16", 1, (HALF,), cpu.encode_fp16, cpu.decode_fp16)
BF16 = Sectioned("bf16", 3, (HALF,), cpu.encode_bf16, cpu.decode_bf16)
INT8 = Sectioned(
    "int8", 2, (Section(np.uint16, 1, INT8_BLOCK), Section(np.int8, 1, 1)),
    cpu.encode_int8, cpu.decode_int8, _scale_at_most(INT8_SCALE_MAX), _scale_bound(128), random=True,
)  # fmt: skip
INT4 = Sectioned(
    "int4", 4, (Section(np.uint16, 1, INT4_BLOCK), Section(np.uint8, 1, 2)),
    cpu.encode_int4, cpu.decode_int4, _scale_at_most(INT4_SCALE_MAX), _scale_bound(8), random=True,
)  # fmt: skip
INT8_STOCHASTIC, INT4_STOCHASTIC = (replace(c, spec=f"{c.spec}:stochastic", unbiased=True) for c in (INT8, INT4))
# Of a worker's last update (`LAST`, compressor.py), and in no SPEC: a GPU has no kernels for it.
INT12 = Sectioned(
    "int12", 8, (Section(np.uint16, 1, INT12_BLOCK), Section(np.uint8, 3, 2)),
    cpu.encode_int12, cpu.decode_int12, _scale_at_most(INT12_SCALE_MAX), _scale_bound(2048), measured=True,
)  # fmt: skip
TWO_BIT = Sectioned(
    "2bit", 5, (Section(np.uint8, 3, TWO_BIT_BLOCK), BIT_PLANE, BIT_PLANE),
    cpu.encode_2bit, cpu.decode_2bit, _valid_levels, _level_bound,
)  # fmt: skip
SIGN = Sectioned(
    "sign", 6, (Section(np.uint16, 1, SIGN_BLOCK), BIT_PLANE),
    cpu.encode_sign, cpu.decode_sign, _scale_at_most((INFINITY_KEY >> 16) - 1), _scale_bound(1),
)  # fmt: skip
UINT8_MINMAX = Sectioned(
    "uint8minmax", 7, (Section(np.float32, 2, MINMAX_BLOCK), Section(np.uint8, 1, 1)),
    cpu.encode_uint8minmax, cpu.decode_uint8minmax, _valid_ranges, _range_bound,
)  # fmt: skip
VALUE_CODINGS: dict[int, ValueCoding] = {
    coding.wire_id: coding for coding in (FP32, FP16, INT8, BF16, INT4, TWO_BIT, SIGN, UINT8_MINMAX, INT12)
}
# Codings of an edge between two stages of a pipeline: of activations, and of gradients, which int8 rounds at random.
EDGE_CODINGS: dict[str, tuple[ValueCoding, ValueCoding]] = {
    "dense": (FP32, FP32),
    "fp16": (FP16, FP16),
    "int8": (INT8, INT8_STOCHASTIC),
}
SPECS: dict[str, ValueCoding] = {
    coding.spec: coding for coding in (*VALUE_CODINGS.values(), INT8_STOCHASTIC, INT4_STOCHASTIC)
}


def by_spec(spec: str) -> ValueCoding:
    """Return the value coding of this SPEC. Raises KeyError for any other."""
    return SPECS[spec]
