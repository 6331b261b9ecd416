"""How the indices of kept values travel. INDEX_CODINGS is the wire's table; 0 is kept for "all, in order"."""

from typing import Protocol

import numpy as np

from narrows.compression.buffers import SPARE_WORDS, ByteArray, IndexArray, WordArray, read_only, words_of
from narrows.compression.errors import PayloadError
from narrows.compression.kernels import cpu

EVERY_INDEX = 0  # wire id of a payload that holds all values and so no index section


class IndexCoding(Protocol):
    """A member of the axis: stateless. `kept` rising indices below `count`, 1 <= kept <= count."""

    wire_id: int

    def bytes_max(self, kept: int, count: int) -> int:
        """A bound on the section of any such indices, never falling as kept grows; longer sections are refused."""

    def encode(self, indices: IndexArray, count: int) -> tuple[int, ByteArray]:
        """(parameter for the header, section)."""

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        """PayloadError unless the section decodes to exactly `kept` rising indices below count."""

    def decode(self, part: ByteArray, parameter: int, kept: int) -> IndexArray:
        """The indices of a section that was checked."""


RICE_PARAMETER_MAX = 31


def _rice_bytes(kept: int, r: int, unary_bits: int) -> int:
    return (kept * r + 7) // 8 + (unary_bits + 7) // 8


def _rice_bound(kept: int, count: int) -> tuple[int, int]:
    """(bytes, r): the best r if all is known of the gaps is their sum; sum of (gap >> r) <= (count - kept) >> r."""
    return min((_rice_bytes(kept, r, kept + ((count - kept) >> r)), r) for r in range(RICE_PARAMETER_MAX + 1))


class Rice:
    """Rice-coded gaps, one parameter r <= 31 for the payload (header), two streams: see kernels/rice.py.

    Section: ceil(kept * r / 8) bytes of low bits, then the unary stream. Bits of the last byte of either that carry
    nothing are zero, and the unary stream ends with the byte that holds its last one: a list of indices has one coding
    for each r. Random indices at density 1 % take 8.11 bits each (entropy 8.08), at 5 % 5.79 (5.73).
    """

    wire_id = 1

    def bytes_max(self, kept: int, count: int) -> int:
        return _rice_bound(kept, count)[0]

    def encode(self, indices: IndexArray, count: int) -> tuple[int, ByteArray]:
        kept = indices.size
        # Clustered indices want a smaller r than their sum says: the exact costs of the neighbours decide.
        first = min(max(_rice_bound(kept, count)[1] - 2, 0), RICE_PARAMETER_MAX - 3)
        costs = np.empty(4, np.int64)
        cpu.rice_costs(indices, first, costs)
        size, r, unary_bits = min(
            (_rice_bytes(kept, r, bits - kept * r), r, bits - kept * r) for r, bits in enumerate(costs.tolist(), first)
        )
        lows: WordArray = np.zeros((kept * r + 63) // 64 + SPARE_WORDS, np.uint64)
        unary: WordArray = np.zeros((unary_bits + 63) // 64, np.uint64)
        written = cpu.rice_encode(indices, r, lows, unary)
        assert written == unary_bits
        low_bytes = (kept * r + 7) // 8
        return r, np.concatenate((lows.view(np.uint8)[:low_bytes], unary.view(np.uint8)[: size - low_bytes]))

    def check(self, part: ByteArray, parameter: int, kept: int, count: int) -> None:
        if parameter > RICE_PARAMETER_MAX:
            raise PayloadError(f"payload is corrupt: Rice parameter {parameter} is above {RICE_PARAMETER_MAX}")
        low_bits = kept * parameter
        low_bytes = (low_bits + 7) // 8
        if part.size <= low_bytes or part.size > self.bytes_max(kept, count) or not part[-1]:
            raise PayloadError(
                f"payload is corrupt: {part.size} bytes cannot be the indices of {kept} of {count} values"
            )
        if low_bits % 8 and part[low_bytes - 1] >> (low_bits % 8):
            raise PayloadError("payload is corrupt: bits are set after the last index")
        lows, unary = words_of(part[:low_bytes]), words_of(part[low_bytes:])
        if cpu.rice_last_index(lows, unary, kept, parameter, count) < 0:
            raise PayloadError(f"payload is corrupt: its indices are not {kept} below {count}")

    def decode(self, part: ByteArray, parameter: int, kept: int) -> IndexArray:
        low_bytes = (kept * parameter + 7) // 8
        indices: IndexArray = np.empty(kept, np.uint32)
        cpu.rice_decode(words_of(part[:low_bytes]), words_of(part[low_bytes:]), parameter, indices)
        return read_only(indices)


RICE = Rice()
INDEX_CODINGS: dict[int, IndexCoding] = {RICE.wire_id: RICE}
