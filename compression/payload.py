"""Payloads: their byte layout, and how they are read (`check`, `decode`, `accumulate`). A reader needs no SPEC.

Little endian. A header of 16 bytes, so that a body is aligned where its buffer is:

    0  u8   layout version, 1          4  u32  count: values in the dense array
    1  u8   index coding               8  u32  kept: values in the body (= count with index coding 0)
    2  u8   value coding              12  u32  parameter of the index coding, 0 where it has none
    3  u8   byte coding               16  the body

    index coding  0 every index · 1 Rice · 2 fixed width · 3 grouped Rice · 4 strata · 5 stride · 7 strided Rice
    value coding  0 float32 · 1 half · 2 int8 · 3 bf16 · 4 int4 · 5 2bit · 6 sign · 7 uint8minmax
    byte coding   0 none · 1 lz4: the body is u32 raw byte count + an LZ4 block of what follows

Body: the value section, whose length follows from value coding and kept, then the index section, to the end.
docs/compression.md has each section bit by bit.

How it works
1. `open_payload` reads the header, undoes the byte coding, and has value coding and index coding check their sections.
   After that no read can fail.
2. `CheckedPayload` decodes CHUNK values and indices at a time, which stay in a core's own cache.
3. `accumulate` adds each chunk to the dense array before it decodes the next one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from narrows.compression.buffers import (
    ByteArray,
    FloatArray,
    IndexArray,
    Payload,
    bytes_view,
    check_out,
    read_only,
    section,
)
from narrows.compression.byte_codings import BYTE_CODINGS, PLAIN_BYTES
from narrows.compression.errors import NonFinitePayloadError, PayloadError
from narrows.compression.index_codings import EVERY_INDEX, INDEX_CODINGS, IndexCoding
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.value_codings import CHUNK, FP32, VALUE_CODINGS, CodedValues

LAYOUT_VERSION = 1
HEADER = struct.Struct("<BBBBIII")
HEADER_BYTES = HEADER.size
COUNT_MAX = 2**32 - 1  # indices are 32 bits: 16 GiB of float32 in one payload, more than any shard holds


@dataclass(frozen=True, slots=True)
class Header:
    """The 16 bytes before a body. The docstring of the module explains the fields."""

    index_coding: int
    value_coding: int
    byte_coding: int
    count: int
    kept: int
    parameter: int

    def pack(self) -> bytes:
        return HEADER.pack(
            LAYOUT_VERSION,
            self.index_coding,
            self.value_coding,
            self.byte_coding,
            self.count,
            self.kept,
            self.parameter,
        )


@dataclass(frozen=True, slots=True)
class CheckedPayload:
    """A payload that has been checked whole, by one pass over the bytes of its index section and of its scales.

    Without lz4 it borrows the memory of the payload, which must not change meanwhile.
    """

    header: Header
    values: CodedValues
    index_part: ByteArray
    index_coding: IndexCoding | None  # None: all values, in order

    def chunks(self) -> Iterator[tuple[int, FloatArray]]:
        """Yield the kept values by chunks: the place of the first, and the values, which the next chunk overwrites."""
        scratch = np.empty(min(CHUNK, self.header.kept), np.float32)
        for begin in range(0, self.header.kept, CHUNK):
            yield begin, self.values.part(begin, scratch[: self.header.kept - begin])

    def indices(self) -> Iterator[IndexArray]:
        """Yield the indices of each chunk, uint32, which the next chunk overwrites."""
        scratch: IndexArray = np.empty(min(CHUNK, self.header.kept), np.uint32)
        if self.index_coding is None:
            return
        read = self.index_coding.reader(self.index_part, self.header.parameter, self.header.kept, self.header.count)
        for begin in range(0, self.header.kept, CHUNK):
            part = scratch[: self.header.kept - begin]
            read(begin, part)
            yield read_only(part)

    def write(self, out: FloatArray) -> None:
        """Write all values to `out`, float32[count]: zero where the payload has none."""
        if self.header.index_coding == EVERY_INDEX:
            values = self.values.part(0, out)
            if not np.may_share_memory(values, out):
                np.copyto(out, values)
        else:
            out.fill(0.0)
            self.accumulate(np.float32(1.0), out)

    def accumulate(self, weight: np.float32, out: FloatArray) -> None:
        """Add weight * value to `out`, float32[count], for each value of the payload."""
        header = self.header
        if header.index_coding == EVERY_INDEX:
            for begin, values in self.chunks():
                part = out[begin : begin + values.size]
                if weight == 1.0:
                    np.add(part, values, out=part)
                else:
                    cpu.add_fp32(values, weight, part)
        else:
            for (_, values), indices in zip(self.chunks(), self.indices(), strict=True):
                cpu.scatter_add_fp32(values, indices, weight, out)


def _read_header(data: ByteArray, count: int) -> Header:
    if data.size < HEADER_BYTES:
        raise PayloadError(f"payload is truncated: {data.size} bytes are fewer than a header's {HEADER_BYTES}")
    version, *fields = HEADER.unpack(data[:HEADER_BYTES].tobytes())
    header = Header(*fields)
    if version != LAYOUT_VERSION:
        raise PayloadError(f"payload has layout version {version}; this side reads {LAYOUT_VERSION}")
    if header.index_coding not in (EVERY_INDEX, *INDEX_CODINGS):
        raise PayloadError(f"payload has index coding {header.index_coding}, which this side does not know")
    if header.value_coding not in VALUE_CODINGS:
        raise PayloadError(f"payload has value coding {header.value_coding}, which this side does not know")
    if header.byte_coding != PLAIN_BYTES and header.byte_coding not in BYTE_CODINGS:
        raise PayloadError(f"payload has byte coding {header.byte_coding}, which this side does not know")
    if header.count != count:
        raise PayloadError(f"payload is for {header.count} values where {count} are expected")
    if header.kept > count or (header.index_coding == EVERY_INDEX and header.kept != count):
        raise PayloadError(f"payload is corrupt: it claims to hold {header.kept} of {count} values")
    if header.parameter and (header.index_coding == EVERY_INDEX or not header.kept):
        raise PayloadError(f"payload is corrupt: index parameter {header.parameter} without indices")
    return header


def open_payload(payload: Payload, count: int) -> CheckedPayload:
    """Check a payload whole. Raises PayloadError unless it is valid for exactly `count` values."""
    data = bytes_view(payload)
    header = _read_header(data, count)
    body = data[HEADER_BYTES:]
    value_coding = VALUE_CODINGS[header.value_coding]
    value_bytes = value_coding.byte_count(header.kept)
    index_coding = INDEX_CODINGS.get(header.index_coding) if header.kept else None
    index_bytes_max = index_coding.bytes_max(header.kept, count) if index_coding else 0
    if header.byte_coding != PLAIN_BYTES:
        body = BYTE_CODINGS[header.byte_coding].decode(body, value_bytes + index_bytes_max)
    if not value_bytes <= body.size <= value_bytes + index_bytes_max:
        raise PayloadError(
            f"payload is truncated or too long: a body of {body.size} bytes for {header.kept} of {count} values, "
            f"which take {value_bytes} and at most {index_bytes_max} for indices"
        )
    values = value_coding.open(body[:value_bytes], header.kept)
    index_part = body[value_bytes:]
    if index_coding is not None:
        index_coding.check(index_part, header.parameter, header.kept, count)
    return CheckedPayload(header, values, index_part, index_coding)


def check(payload: Payload, count: int, *, finite: bool = False) -> float:
    """Check that a payload is valid for exactly `count` values. Any bytes are safe to pass.

    The check reads the index section and the scales, and decompresses lz4. It needs no dense array.

    Args:
        payload: any C-contiguous buffer.
        count: the number of values of the dense array.
        finite: also refuse NaN and infinity. fp32, fp16 and bf16 can carry them, so their values are read once more.

    Returns:
        With `finite` an upper bound on the sum of the squares of the values: all count as if they were as large as the
        largest one, which other codings know from their scales. Of int12 it is the sum itself. Without `finite`, 0.0.

    Raises:
        PayloadError: the payload is not valid, in one sentence.
        NonFinitePayloadError: with `finite`, the payload holds NaN or infinity.
    """
    opened = open_payload(payload, count)
    if not finite or not opened.header.kept:
        return 0.0
    if opened.values.measured:
        return sum(float(np.square(values, dtype=np.float64).sum()) for _, values in opened.chunks())
    largest = opened.values.largest()
    if largest is None:
        key = max(cpu.largest_key(values) for _, values in opened.chunks())
        if key >= INFINITY_KEY:
            raise NonFinitePayloadError("payload holds NaN or infinity")
        largest = float(np.uint32(key).view(np.float32))
    return opened.header.kept * largest**2


def no_values(count: int) -> bytes:
    """Return a payload of `count` zeros that holds none of them: a header."""
    return Header(next(iter(INDEX_CODINGS)), FP32.wire_id, PLAIN_BYTES, count, 0, 0).pack()


def indices(payload: Payload, count: int) -> IndexArray | None:
    """Return the indices of the values in a payload, rising uint32[kept]; None if it has all values.

    Args:
        payload: any C-contiguous buffer.
        count: the number of values of the dense array.

    Raises:
        PayloadError: the payload is not valid for `count` values.
    """
    opened = open_payload(payload, count)
    if opened.header.index_coding == EVERY_INDEX:
        return None
    return np.concatenate([np.empty(0, np.uint32), *(part.copy() for part in opened.indices())])


def decode(payload: Payload, out: FloatArray) -> None:
    """Write all values of a payload to an array: zero where a sparse payload has none.

    Args:
        payload: any C-contiguous buffer at any alignment.
        out: float32[count], contiguous and writable.

    Raises:
        PayloadError: the payload is not valid for `count` values; `out` has not changed.
        TypeError: `out` has another dtype or shape, or is read-only.
    """
    check_out(out)
    open_payload(payload, out.size).write(out)


def accumulate(payload: Payload, weight: float, out: FloatArray) -> None:
    """Set out[i] = out[i] + float32(weight) * value[i] for each value of a payload, straight from its bytes.

    Indices and values are decoded and added a chunk at a time, in one pass over the bytes. Product and sum are rounded
    to float32 one after the other, in index order, so the result is the same bit for bit on every machine. A sparse
    payload changes the entries that it holds and no others.

    Args:
        payload: any C-contiguous buffer at any alignment.
        weight: the factor, rounded to float32.
        out: float32[count], contiguous and writable.

    Raises:
        PayloadError: the payload is not valid for `count` values; `out` has not changed.
        TypeError: `out` has another dtype or shape, or is read-only.
    """
    check_out(out)
    open_payload(payload, out.size).accumulate(np.float32(weight), out)


def add_raw(raw: Payload, weight: float, out: FloatArray) -> None:
    """Set out += float32(weight) * values for the bytes of a plain float32[count], rounded as in `accumulate`.

    Args:
        raw: 4 * count bytes, little endian.
        weight: the factor, rounded to float32.
        out: float32[count], contiguous and writable.

    Raises:
        PayloadError: there are more or fewer bytes; `out` has not changed.
        TypeError: `out` has another dtype or shape, or is read-only.
    """
    check_out(out)
    cpu.add_fp32(raw_values(raw, out.size), np.float32(weight), out)


def raw_values(raw: Payload, count: int) -> FloatArray:
    """Return the bytes of a plain float32[count] as a read-only array. Raises PayloadError for another size."""
    data = bytes_view(raw)
    if data.size != 4 * count:
        raise PayloadError(f"{count} raw values are {4 * count} bytes, not {data.size}")
    return section(data, 0, count, np.float32)
