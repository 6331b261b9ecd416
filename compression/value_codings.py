"""How values travel: the second axis of a chain. A member turns float32 values into bytes of a fixed count and back.

VALUE_CODINGS is the wire's table; a number, once given, is never used for anything else. What a decoder opens is
checked in full first, so the three ways to use it (write, add, scatter_add) cannot fail.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrows.compression.buffers import ByteArray, FloatArray, IndexArray, section
from narrows.compression.errors import NonFiniteError, PayloadError
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY, INT8_BLOCK, INT8_SCALE_MAX, Codes, Halves


class CodedValues(Protocol):
    """Checked values inside a payload, whose memory it borrows. Products and sums are each rounded to float32 once."""

    def write(self, out: FloatArray) -> None:
        """out[i] = value[i]."""

    def add(self, weight: np.float32, out: FloatArray) -> None:
        """out[i] = out[i] + weight * value[i]."""

    def scatter_add(self, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
        """out[indices[i]] = out[indices[i]] + weight * value[i]; indices were proved to be below out.size."""


class ValueCoding(Protocol):
    """A member of the axis: stateless, so one object serves every thread."""

    wire_id: int
    lossless: bool

    def byte_count(self, count: int) -> int:
        """Bytes that `count` values take: exact, whatever the values."""

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        """Fills out, of byte_count(values.size) bytes at an address aligned for float32; NonFiniteError if lossy."""

    def open(self, body: ByteArray, count: int) -> CodedValues:
        """The values in a body of byte_count(count) bytes, or PayloadError."""


def non_finite(values: FloatArray) -> NonFiniteError:
    """The error for values that hold NaN or infinity; scans them once more, to say how many and where."""
    (places,) = np.nonzero(~np.isfinite(values))
    first = places[0]
    return NonFiniteError(
        f"{places.size} of {values.size} values are NaN or infinite, the first ({values[first]}) at index {first}"
    )


@dataclass(frozen=True, slots=True)
class _Fp32Values:
    values: FloatArray

    def write(self, out: FloatArray) -> None:
        np.copyto(out, self.values)

    def add(self, weight: np.float32, out: FloatArray) -> None:
        if weight == 1.0:
            np.add(out, self.values, out=out)
        else:
            cpu.add_fp32(self.values, weight, out)

    def scatter_add(self, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
        cpu.scatter_add_fp32(self.values, indices, weight, out)


class Fp32:
    """The values as they are: count x float32. The identity of this axis; NaN and infinity travel."""

    wire_id = 0
    lossless = True

    def byte_count(self, count: int) -> int:
        return 4 * count

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        out.view(np.float32)[:] = values

    def open(self, body: ByteArray, count: int) -> CodedValues:
        return _Fp32Values(section(body, 0, count, np.float32))


@dataclass(frozen=True, slots=True)
class _Fp16Values:
    halves: Halves

    def write(self, out: FloatArray) -> None:
        cpu.decode_fp16(self.halves, out)

    def add(self, weight: np.float32, out: FloatArray) -> None:
        cpu.add_fp16(self.halves, weight, out)

    def scatter_add(self, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
        cpu.scatter_add_fp16(self.halves, indices, weight, out)


class Fp16:
    """count x IEEE half, to nearest even, saturated at 65504 (error feedback sends the rest later)."""

    wire_id = 1
    lossless = False

    def byte_count(self, count: int) -> int:
        return 2 * count

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        if cpu.encode_fp16(values, out.view(np.uint16)) >= INFINITY_KEY:
            raise non_finite(values)

    def open(self, body: ByteArray, count: int) -> CodedValues:
        return _Fp16Values(section(body, 0, count, np.uint16))


@dataclass(frozen=True, slots=True)
class _Int8Values:
    scales: Halves
    codes: Codes

    def write(self, out: FloatArray) -> None:
        cpu.decode_int8(self.scales, self.codes, out)

    def add(self, weight: np.float32, out: FloatArray) -> None:
        cpu.add_int8(self.scales, self.codes, weight, out)

    def scatter_add(self, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
        cpu.scatter_add_int8(self.scales, self.codes, indices, weight, out)


class Int8:
    """A bf16 scale for each block of 256 values (the last may be shorter), then count x int8; see encode_int8.

    |x - decoded| <= scale / 2, where scale <= (1 + 2**-7) * max |x| of the block / 127 or is the smallest bf16,
    2**-133; blocks that reach beyond 127 * INT8_SCALE_MAX (3.36e38) saturate. The difference is exact in float32.
    """

    wire_id = 2
    lossless = False

    def byte_count(self, count: int) -> int:
        return 2 * -(-count // INT8_BLOCK) + count

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        scale_bytes = out.size - values.size
        if cpu.encode_int8(values, out[:scale_bytes].view(np.uint16), out[scale_bytes:].view(np.int8)) >= INFINITY_KEY:
            raise non_finite(values)

    def open(self, body: ByteArray, count: int) -> CodedValues:
        blocks = -(-count // INT8_BLOCK)
        scales = section(body, 0, blocks, np.uint16)
        if blocks and int(scales.max()) > INT8_SCALE_MAX:
            raise PayloadError("payload is corrupt: an int8 scale is negative, not finite or too large")
        return _Int8Values(scales, section(body, 2 * blocks, count, np.int8))


FP32, FP16, INT8 = Fp32(), Fp16(), Int8()
VALUE_CODINGS: dict[int, ValueCoding] = {coding.wire_id: coding for coding in (FP32, FP16, INT8)}
