"""Payloads: the byte layout, and the way back (`check`, `decode`, `accumulate`). No SPEC is needed to read one.

Little endian. A header of 16 bytes, so that a body is aligned where its buffer is:

    0  u8   layout version, 1          4  u32  count: values in the dense array
    1  u8   index coding               8  u32  kept: values in the body (= count with index coding 0)
    2  u8   value coding              12  u32  parameter of the index coding, 0 where it has none
    3  u8   byte coding               16  the body

    index coding  0 every index · 1 Rice · 2 fixed width · 3 grouped Rice · 4 strata · 5 stride · 7 strided Rice
    value coding  0 float32 · 1 half · 2 int8 · 3 bf16 · 4 int4 · 5 2bit · 6 sign · 7 uint8minmax
    byte coding   0 none · 1 lz4: the body is u32 raw byte count + an LZ4 block of what follows

Body: the value section, whose length follows from value coding and kept, then the index section, all that is left.
docs/compression.md has each section bit by bit.
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
from narrows.compression.index_codings import EVERY_INDEX, INDEX_CODINGS, ReadIndices
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.value_codings import CHUNK, VALUE_CODINGS, CodedValues

LAYOUT_VERSION = 1
HEADER = struct.Struct("<BBBBIII")
HEADER_BYTES = HEADER.size
COUNT_MAX = 2**32 - 1  # indices are 32 bits: 16 GiB of float32 in one payload, more than any shard holds


@dataclass(frozen=True, slots=True)
class Header:
    """The 16 bytes before a body; field meanings are in the module docstring."""

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
    """A payload in which everything was checked; borrows the payload's memory (but not with lz4). Good for one reading."""

    header: Header
    values: CodedValues
    index_part: ByteArray
    read_indices: ReadIndices | None

    def chunks(self) -> Iterator[tuple[int, FloatArray]]:
        """(place of the first, values) of all that is kept, in scratch memory that the next one overwrites."""
        scratch = np.empty(min(CHUNK, self.header.kept), np.float32)
        for begin in range(0, self.header.kept, CHUNK):
            yield begin, self.values.part(begin, scratch[: self.header.kept - begin])

    def indices(self) -> Iterator[IndexArray]:
        """The indices of each chunk, likewise."""
        scratch: IndexArray = np.empty(min(CHUNK, self.header.kept), np.uint32)
        for begin in range(0, self.header.kept, CHUNK):
            assert self.read_indices is not None
            part = scratch[: self.header.kept - begin]
            self.read_indices(begin, part)
            yield read_only(part)

    def write(self, out: FloatArray) -> None:
        if self.header.index_coding == EVERY_INDEX:
            values = self.values.part(0, out)
            if not np.may_share_memory(values, out):
                np.copyto(out, values)
        else:
            out.fill(0.0)
            self.accumulate(np.float32(1.0), out)

    def accumulate(self, weight: np.float32, out: FloatArray) -> None:
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
    if index_coding is None:
        return CheckedPayload(header, values, index_part, None)
    return CheckedPayload(
        header, values, index_part, index_coding.open(index_part, header.parameter, header.kept, count)
    )


def check(payload: Payload, count: int, *, finite: bool = False) -> float:
    """Raises PayloadError, one sentence, unless `payload` is valid for exactly `count` values; reads no dense array.

    Costs a read of the index section and the scales (and a decompression with lz4). The values themselves may be any:
    fp32, fp16 and bf16 carry NaN and infinity if the sender put them there, unless `finite`, which reads these codings'
    values once more. It returns a bound on the sum of their squares then: as if all were as large as the largest, which is
    known of the other codings by their scales. Any bytes are safe to pass.
    """
    opened = open_payload(payload, count)
    if not finite or not opened.header.kept:
        return 0.0
    largest = opened.values.largest()
    if largest is None:
        key = max(cpu.largest_key(values) for _, values in opened.chunks())
        if key >= INFINITY_KEY:
            raise NonFinitePayloadError("payload holds NaN or infinity")
        largest = float(np.uint32(key).view(np.float32))
    return opened.header.kept * largest**2


def indices(payload: Payload, count: int) -> IndexArray | None:
    """Rising uint32[kept], the indices of the values that `payload` holds; None where it holds all. PayloadError."""
    opened = open_payload(payload, count)
    if opened.header.index_coding == EVERY_INDEX:
        return None
    return np.concatenate([np.empty(0, np.uint32), *(part.copy() for part in opened.indices())])


def decode(payload: Payload, out: FloatArray) -> None:
    """Writes all values into out (float32[count], contiguous): zero where a sparse payload has none.

    payload: any C-contiguous buffer at any alignment. PayloadError leaves out as it was; TypeError for a wrong out.
    """
    check_out(out)
    open_payload(payload, out.size).write(out)


def accumulate(payload: Payload, weight: float, out: FloatArray) -> None:
    """out[i] = out[i] + float32(weight) * value[i] for each value in the payload, straight from its bytes.

    Indices and values are decoded a chunk at a time, which stays in a core's own cache, and added: one pass over the bytes.
    Product and sum are rounded to float32 one after the other, in index order: bit-identical on every machine. A sparse
    payload touches the entries it holds and no others. Arguments and errors as for `decode`.
    """
    check_out(out)
    open_payload(payload, out.size).accumulate(np.float32(weight), out)


def add_raw(raw: Payload, weight: float, out: FloatArray) -> None:
    """out += float32(weight) * values, for bytes that are float32[count] and nothing else; rounded as in `accumulate`.

    PayloadError, with out as it was, where there are more or fewer than 4 * count bytes.
    """
    check_out(out)
    cpu.add_fp32(raw_values(raw, out.size), np.float32(weight), out)


def raw_values(raw: Payload, count: int) -> FloatArray:
    """float32[count], read-only, of bytes that are it and nothing else; PayloadError."""
    data = bytes_view(raw)
    if data.size != 4 * count:
        raise PayloadError(f"{count} raw values are {4 * count} bytes, not {data.size}")
    return section(data, 0, count, np.float32)
