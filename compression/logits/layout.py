"""The byte layout of coded log-probabilities: the header of a payload, the sections of a record, the value codings.

Little endian. A payload is a header of 12 bytes and a record of fixed size for each token:

    0  u8   layout version, 1        4  u32  classes
    1  u8   value coding             8  u32  tokens
    2  u16  top: classes of a token  12 the records

A record has its values, then its ids, each in whole bytes, least significant bits first; spare bits are zero.

    head         u16 half: -log of the share of all other classes. int8, int4: u16 half: the span
    int8, int4   a code for each value, whose depth below the largest is span * fractions[code]
    fp16         u16 half for each value: its depth
    ids          rising, as Elias-Fano coding of id_i - i: the low bits of all; then their high bits in unary, as rises:
                 classes - top >> low bits zeros in all, and a one for each id. No section if all classes are kept

docs/logits.md has it bit by bit, with an example.
"""

import struct
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from narrows.compression.buffers import ByteArray, FloatArray, read_only
from narrows.compression.logits.kernels import GUESSES, HALF_BITS, PLACE_BITS

LAYOUT_VERSION = 1
HEADER = struct.Struct("<BBHII")
TOP_MAX = 1 << PLACE_BITS  # classes of a token: more are no narrow answer, and a sort key has so many places
CLASSES_MAX = 2**32 - 1
TOKENS_MAX = 2**32 - 1
LOW_BITS_MAX = 32
LAYOUTS_MAX = 256  # of pairs (top, classes), whose sections are remembered
SHARE_BYTES, SPAN_BYTES = 2, 2


@dataclass(frozen=True, slots=True, eq=False)
class LogitValueCoding:
    """One row of VALUE_CODINGS."""

    spec: str
    wire_id: int
    code_bits: int
    deepest: float = 0.0  # nats below the largest value; values below are coded as this deep
    # What share of the span a code is: rising from 0 to 1, float32[2**code_bits]. None where a code is a half.
    fractions: FloatArray = field(repr=False, default_factory=lambda: read_only(np.zeros(0, np.float32)))
    # For `nearest_code`: the middle of each fraction and the next, and infinity; middles below each of GUESSES parts.
    middles: FloatArray = field(init=False, repr=False)
    guesses: ByteArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        middles = np.append((self.fractions[:-1] + self.fractions[1:]) * np.float32(0.5), np.float32(np.inf))
        parts = np.arange(GUESSES + 1, dtype=np.float32) / np.float32(GUESSES)
        object.__setattr__(self, "middles", read_only(middles))
        object.__setattr__(self, "guesses", read_only(np.searchsorted(middles, parts).astype(np.uint8)))

    def byte_count(self, top: int) -> int:
        """Return the bytes of the values of a record."""
        return SHARE_BYTES + (SPAN_BYTES if self.fractions.size else 0) + (top * self.code_bits + 7) // 8


def _fractions(codes: int, growth: int) -> FloatArray:
    """Return the fractions of so many codes, float32[codes], with steps that grow evenly.

    Args:
        growth: the last step is (1 + growth) times the first; 0 or 1.
    """
    code, last = np.arange(codes, dtype=np.float64), codes - 1
    first = 2 * (last - 1)  # twice the first step, if each step is longer than the one before by 1
    return read_only(
        (code * (code + first - 1) / (last * (last + first - 1)) if growth else code / last).astype(np.float32)
    )


# int4: the last step is twice the first. On most distributions that costs less KL than equal steps, since a class far below the
# largest has little probability (docs/logits.md). The 255 steps of int8 are fine enough to be equal.
INT8 = LogitValueCoding("int8", 1, 8, 16.0, _fractions(256, 0))
INT4 = LogitValueCoding("int4", 2, 4, 12.0, _fractions(16, 1))
FP16 = LogitValueCoding("fp16", 3, HALF_BITS)
# By name in a SPEC. A wire id is never given twice.
VALUE_CODINGS: dict[str, LogitValueCoding] = {coding.spec: coding for coding in (INT8, INT4, FP16)}


@lru_cache(maxsize=LAYOUTS_MAX)
def id_section(top: int, classes: int) -> tuple[int, int]:
    """Return (low bits, bytes) of the ids of a record: the low bits that take fewest bits in all, the least of equal ones.

    Args:
        top: ids of a record, from 1 to `classes`.
        classes: the number of classes.
    """
    gaps = classes - top
    if not gaps:
        return 0, 0
    bits, low_bits = min((top * low + top + (gaps >> low), low) for low in range(LOW_BITS_MAX + 1))
    return low_bits, (bits + 7) // 8
