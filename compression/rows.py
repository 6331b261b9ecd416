"""Rows of a table as they travel, and the values that they begin with. Pure.

Little endian. A header of 20 bytes, so that the values are aligned where their buffer is:

    0  u8   layout version, 1        8  u32  dim: values of a row; 0: indices alone
    1  u8   index coding            12  u32  kept: rows in the body
    2  u16  table                   16  u32  parameter of the index coding
    4  u32  rows that the shard has of this table

Body: float32[kept, dim], then the index section (index_codings.py) of `kept` rising rows of the shard.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import FloatArray, IndexArray, Payload, bytes_view, section
from narrows.compression.errors import NonFinitePayloadError, PayloadError
from narrows.compression.index_codings import INDEX_CODINGS, encode_indices
from narrows.compression.value_codings import CHUNK

LAYOUT_VERSION = 1
KEPT_MAX = 1 << 19  # rows of one payload: indices may take no byte, and memory is asked for by no more
HEADER = struct.Struct("<BBHIIII")
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (Steele et al. 2014)
WORD = (1 << 64) - 1
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Rows:
    """`indices`: rising uint32[kept], of the `count` rows that a shard has of `table`; `values`: float32[kept, dim]."""

    table: int
    count: int
    indices: IndexArray
    values: FloatArray


def encode(table: int, count: int, indices: IndexArray, values: FloatArray | None = None) -> bytes:
    """Of at least one row; `values` None: of indices alone."""
    dim = 0 if values is None else values.shape[1]
    coded = encode_indices(indices, count)
    header = HEADER.pack(LAYOUT_VERSION, coded.wire_id, table, count, dim, indices.size, coded.parameter)
    return b"".join((header, b"" if values is None else values.tobytes(), coded.section.tobytes()))


def decode(payload: Payload) -> Rows:
    """Raises PayloadError for what is none; any bytes are safe to pass."""
    data = bytes_view(payload)
    if data.size < HEADER.size:
        raise PayloadError(f"rows are truncated: {data.size} bytes are fewer than a header's {HEADER.size}")
    version, coding, table, count, dim, kept, parameter = HEADER.unpack(data[: HEADER.size].tobytes())
    if version != LAYOUT_VERSION or coding not in INDEX_CODINGS:
        raise PayloadError(
            f"rows have layout version {version} and index coding {coding}, which this side does not read"
        )
    at = HEADER.size + 4 * kept * dim
    if not 0 < kept <= min(count, KEPT_MAX) or not at <= data.size <= at + INDEX_CODINGS[coding].bytes_max(kept, count):
        raise PayloadError(f"rows are corrupt: {data.size} bytes cannot be {kept} of {count} rows of {dim} values")
    read = INDEX_CODINGS[coding].open(data[at:], parameter, kept, count)
    indices: IndexArray = np.empty(kept, np.uint32)
    for begin in range(0, kept, CHUNK):
        read(begin, indices[begin : begin + CHUNK])
    return Rows(table, count, indices, section(data, HEADER.size, kept * dim, np.float32).reshape(kept, dim))


def check(payload: Payload, count: int, finite: bool) -> float:
    """As `codecs.Codec.check`: rows have no keys."""
    if count:
        raise PayloadError(f"rows have no keys, and these are said to have {count}")
    values = decode(payload).values
    with np.errstate(invalid="ignore"):
        squared = float(np.square(values, dtype=np.float64).sum())
    if finite and not math.isfinite(squared):
        raise NonFinitePayloadError("a row holds NaN or infinity")
    return squared


def first_values(rows: Words, dim: int, seed: int, std: float) -> FloatArray:
    """float32[n, dim], normal with deviation `std`: they follow from the seed and the number of a row alone."""
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
    """The words of splitmix64 at these places of its sequence."""
    z = words * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
