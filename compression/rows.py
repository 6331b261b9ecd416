"""Payloads of rows of an embedding table, and the initial values of rows. Pure.

Little endian. A header of 20 bytes, so that the values are aligned where their buffer is:

    0  u8   layout version, 2        8  u16  dim: values of a row; 0: indices alone
    1  u8   index coding            10  u8   value coding, of CODINGS: of the values here, or of the requested values
    2  u16  table                   11  u8   0
    4  u32  rows that the shard     12  u32  kept: rows in the body
            has of this table       16  u32  parameter of the index coding

Body: the values of `kept` rows, then the index section (index_codings.py) of `kept` rising rows of the shard. Each row
is coded by itself, so no two rows share a scale. The body has the first section of all rows, then the second of all.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import FloatArray, IndexArray, Payload, bytes_view, read_only, section
from narrows.compression.errors import NonFinitePayloadError, PayloadError
from narrows.compression.index_codings import INDEX_CODINGS, encode_indices
from narrows.compression.value_codings import BF16, CHUNK, FP16, FP32, INT8, Fp32, Key, Sectioned

LAYOUT_VERSION = 2
KEPT_MAX = 1 << 19  # the most rows of a payload. Indices can take 0 bytes, so this limits the memory that is allocated
HEADER = struct.Struct("<BBHIHBBII")
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (Steele et al. 2014)
WORD = (1 << 64) - 1
CODINGS: dict[int, Fp32 | Sectioned] = {coding.wire_id: coding for coding in (FP32, FP16, BF16, INT8)}
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class CodedRows:
    """The content of a payload of rows."""

    table: int  # the number of the embedding table
    count: int  # rows of the table that the shard has
    indices: IndexArray  # rising uint32[kept], each below `count`
    values: FloatArray  # float32[kept, dim]; dim 0: the payload has indices alone
    coding: int  # the value coding, a key of CODINGS


def encode(
    table: int, count: int, indices: IndexArray, values: FloatArray | None = None, coding: int = FP32.wire_id
) -> bytes:
    """Encode rows as a payload.

    Args:
        table: the number of the embedding table.
        count: rows of the table that the shard has.
        indices: rising uint32[kept], 1 <= kept <= KEPT_MAX, each below `count`.
        values: float32[kept, dim]; None: a request, with indices alone.
        coding: the value coding, a key of CODINGS. If a value is not finite, all values travel as float32.
    """
    dim, body = 0, b""
    if values is not None:
        dim = values.shape[1]
        body, coding = encode_values(values, coding)
    coded = encode_indices(read_only(indices), count)
    header = HEADER.pack(LAYOUT_VERSION, coded.wire_id, table, count, dim, coding, 0, indices.size, coded.parameter)
    return b"".join((header, body, coded.section.tobytes()))


def encode_values(values: FloatArray, coding: int) -> tuple[bytes, int]:
    """Encode the values of at least one row, float32[kept, dim].

    Returns:
        The value section of a body, and its coding: FP32 if a value is not finite.
    """
    lossy, (kept, dim) = CODINGS[coding], values.shape
    if not isinstance(lossy, Sectioned) or not np.isfinite(values).all():
        return values.tobytes(), FP32.wire_id
    arrays = [np.empty((kept, part.size(dim)), part.dtype) for part in lossy.sections]
    for begin, end, padded in _chunks(lossy, kept, dim):
        padded[:, :dim] = values[begin:end]
        body, at = np.empty(lossy.byte_count(padded.size), np.uint8), 0
        lossy.encode(read_only(padded.reshape(-1)), Key(0, 0), body)
        for part, array in zip(lossy.sections, arrays, strict=True):
            size = part.byte_count(padded.size)
            array[begin:end] = body[at : at + size].view(part.dtype).reshape(end - begin, -1)[:, : part.size(dim)]
            at += size
    return b"".join(array.tobytes() for array in arrays), coding


def decode_values(payload: Payload, kept: int, dim: int, coding: int) -> FloatArray:
    """Decode a value section to float32[kept, dim]. Raises PayloadError for any other bytes."""
    data, lossy = bytes_view(payload), CODINGS.get(coding)
    if lossy is None or data.size != kept * row_bytes(dim, coding):
        raise PayloadError(f"{data.size} bytes of value coding {coding} cannot be {kept} rows of {dim} values")
    if not isinstance(lossy, Sectioned) or not dim:
        return section(data, 0, kept * dim, np.float32).reshape(kept, dim)
    arrays, at, values = [], 0, np.empty((kept, dim), np.float32)
    for part in lossy.sections:
        arrays.append(section(data, at, kept * part.size(dim), part.dtype).reshape(kept, -1))
        at += arrays[-1].nbytes
    for begin, end, padded in _chunks(lossy, kept, dim):
        body, at = np.zeros(lossy.byte_count(padded.size), np.uint8), 0
        for part, array in zip(lossy.sections, arrays, strict=True):
            size = part.byte_count(padded.size)
            body[at : at + size].view(part.dtype).reshape(end - begin, -1)[:, : part.size(dim)] = array[begin:end]
            at += size
        lossy.open(read_only(body), padded.size).part(0, padded.reshape(-1))
        values[begin:end] = padded[:, :dim]
    return values


def row_bytes(dim: int, coding: int) -> int:
    """Return the bytes of one row in a body."""
    lossy = CODINGS[coding]
    return sum(part.byte_count(dim) for part in lossy.sections) if isinstance(lossy, Sectioned) else 4 * dim


def _chunks(coding: Sectioned, kept: int, dim: int) -> Iterator[tuple[int, int, FloatArray]]:
    """Yield (begin, end, zeros) of consecutive rows.

    The zeros are float32[end - begin, width], with `width` the dim rounded up to whole blocks of the coding.
    """
    unit = math.lcm(*(part.per for part in coding.sections))
    width = -(-dim // unit) * unit
    step = max(1, CHUNK // width)
    for begin in range(0, kept, step):
        end = min(begin + step, kept)
        yield begin, end, np.zeros((end - begin, width), np.float32)


def decode(payload: Payload) -> CodedRows:
    """Decode a payload of rows. Any bytes are safe to pass. Raises PayloadError if they are not valid."""
    data = bytes_view(payload)
    if data.size < HEADER.size:
        raise PayloadError(f"rows are truncated: {data.size} bytes are fewer than a header's {HEADER.size}")
    version, coding, table, count, dim, valued, spare, kept, parameter = HEADER.unpack(data[: HEADER.size].tobytes())
    if version != LAYOUT_VERSION or coding not in INDEX_CODINGS or valued not in CODINGS or spare:
        raise PayloadError(
            f"rows have layout version {version}, index coding {coding} and value coding {valued}: this side does not read them"
        )
    at = HEADER.size + kept * row_bytes(dim, valued)
    if not 0 < kept <= min(count, KEPT_MAX) or not at <= data.size <= at + INDEX_CODINGS[coding].bytes_max(kept, count):
        raise PayloadError(f"rows are corrupt: {data.size} bytes cannot be {kept} of {count} rows of {dim} values")
    INDEX_CODINGS[coding].check(data[at:], parameter, kept, count)
    read = INDEX_CODINGS[coding].reader(data[at:], parameter, kept, count)
    indices: IndexArray = np.empty(kept, np.uint32)
    for begin in range(0, kept, CHUNK):
        read(begin, indices[begin : begin + CHUNK])
    return CodedRows(table, count, indices, decode_values(data[HEADER.size : at], kept, dim, valued), valued)


def check(payload: Payload, count: int, finite: bool) -> float:
    """Check a payload of rows, as `codecs.check` does. Rows have no keys, so `count` must be 0."""
    if count:
        raise PayloadError(f"rows have no keys, and these are said to have {count}")
    values = decode(payload).values
    with np.errstate(invalid="ignore"):
        squared = float(np.square(values, dtype=np.float64).sum())
    if finite and not math.isfinite(squared):
        raise NonFinitePayloadError("a row holds NaN or infinity")
    return squared


def first_values(rows: Words, dim: int, seed: int, std: float) -> FloatArray:
    """Return the initial values of rows: normal, determined by the seed and the number of a row alone.

    Args:
        rows: numbers of rows in the table, uint64[n].
        dim: values of a row.
        seed: the seed of the table.
        std: the standard deviation.

    Returns:
        float32[n, dim], by the method of Box and Muller 1958.
    """
    pairs = -(-dim // 2)
    places: Words = np.arange(pairs, dtype=np.uint64)
    counter: Words = rows[:, None] * np.uint64(pairs) + places
    words = _mixed(counter + _mixed(np.array([seed & WORD], np.uint64)))
    scale = np.float32(2.0**-32)
    uniform = ((words >> np.uint64(32)).astype(np.float32) + np.float32(1.0)) * scale
    angle = (words & np.uint64(0xFFFFFFFF)).astype(np.float32) * (scale * np.float32(2 * np.pi))
    length = np.sqrt(np.float32(-2.0) * np.log(np.minimum(uniform, np.float32(1.0)))) * np.float32(std)
    values: FloatArray = np.stack((length * np.cos(angle), length * np.sin(angle)), axis=-1)  # Box and Muller 1958
    return np.ascontiguousarray(values.reshape(rows.size, 2 * pairs)[:, :dim])


def _mixed(words: Words) -> Words:
    """Return the words of splitmix64 at these places of its sequence, uint64."""
    z = words * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
