"""Which values travel: the first axis of a chain. A member picks indices; how they are written is its index coding's.

Top-k: Aji & Heafield 2017 (1704.05021), Stich et al. 2018 (1809.07599); with error feedback it converges as SGD does.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from narrows.compression.buffers import Counts, FloatArray, IndexArray, read_only
from narrows.compression.index_codings import RICE, IndexCoding
from narrows.compression.kernels import cpu
from narrows.compression.kernels.select import SAMPLE_LINE
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.value_codings import non_finite


class Selection(NamedTuple):
    """indices: uint32[kept], rising; values: float32[kept], values[j] = x[indices[j]] bit for bit. Both read-only."""

    indices: IndexArray
    values: FloatArray


class Sparsifier(Protocol):
    """A member of the axis. It changes neither its input nor itself."""

    @property
    def index_coding(self) -> IndexCoding:
        """How its indices are written."""

    @property
    def spec(self) -> str:
        """As parse() reads it."""

    def kept_max(self, count: int) -> int:
        """The most values that select() returns of `count`."""

    def select(self, values: FloatArray) -> Selection:
        """Picks from float32[count], read-only; NonFiniteError if any of them is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class TopK:
    """The k = max(1, round(density * count)) largest by magnitude; of equal ones those with the lowest indices.

    Zeros are never sent: with fewer than k non-zero values, all of these and no more.
    """

    density: float
    index_coding: IndexCoding = RICE

    @property
    def spec(self) -> str:
        return f"topk:{self.density!r}"

    def kept_max(self, count: int) -> int:
        return min(count, max(1, round(self.density * count)))

    def select(self, values: FloatArray) -> Selection:
        if not values.size:
            return _selection(np.empty(0, np.uint32), np.empty(0, np.uint32))
        selection = select_top(values, self.kept_max(values.size))
        # NaN and infinity have the largest keys: if there are any, some were selected.
        if cpu.largest_key(selection.values) >= INFINITY_KEY:
            raise non_finite(values)
        return selection


SAMPLE_COUNT_MIN = 1 << 16  # below this, three passes over values in cache cost less than the sampling saves
SAMPLE_RANK = 2048  # sampled values above the threshold: its error is then about 2 %
GROUP_LINES_MIN, GROUP_LINES_MAX = 16, 128


def select_top(values: FloatArray, k: int) -> Selection:
    """The selection of TopK for 1 <= k <= values.size, exact whatever the data.

    A sample places a threshold slightly below rank k, one read collects what lies above it, and the exact rank is found
    among these few. Where the sample misled (too few or far too many; many equal values), four reads settle it.
    """
    bits = values.view(np.uint32)
    counts = np.empty(2048, np.int64)
    candidates = _candidates(bits, k, counts)
    if candidates is None:
        return _selection(*_exact(bits, k, counts))
    indices, kept = candidates
    if kept.size > k:
        places, kept = _exact(read_only(kept), k, counts)
        indices = indices[places]
    return _selection(indices, kept)


def _selection(indices: IndexArray, kept: IndexArray) -> Selection:
    return Selection(read_only(indices), read_only(kept.view(np.float32)))


def _candidates(bits: IndexArray, k: int, counts: Counts) -> tuple[IndexArray, IndexArray] | None:
    """Indices and bits of a superset of the top k, or of all non-zero values if they are at most k; None: failed."""
    if bits.size < SAMPLE_COUNT_MIN:
        return None
    wanted = max(k // SAMPLE_RANK, GROUP_LINES_MIN)
    group_lines = min(1 << (wanted.bit_length() - 1), GROUP_LINES_MAX)
    rank = k / group_lines
    margin = 4 * math.sqrt(rank) + 8  # four standard deviations, so that nearly every selection succeeds
    keys = np.empty(bits.size // (SAMPLE_LINE * group_lines) * SAMPLE_LINE, np.uint32)
    if 2 * (rank + margin) > keys.size:
        return None
    cpu.sample_keys(bits, group_lines, keys)
    threshold = max(cpu.kth_largest_key(read_only(keys), int(rank + margin), counts)[0], 1)
    room = min(bits.size, int(2 * group_lines * (rank + margin)))
    indices, kept = np.empty(room, np.uint32), np.empty(room, np.uint32)
    found = cpu.compact(bits, threshold - 1, 0, indices, kept)
    if found > room or (found < k and threshold > 1):
        return None
    return indices[:found], kept[:found]


def _exact(bits: IndexArray, k: int, counts: Counts) -> tuple[IndexArray, IndexArray]:
    """Indices and bits of the k largest keys, ties by index, zeros left out: three reads to rank and one to collect."""
    threshold, above = cpu.kth_largest_key(bits, k, counts)
    ties = k - above if threshold else 0
    indices, kept = np.empty(above + ties, np.uint32), np.empty(above + ties, np.uint32)
    found = cpu.compact(bits, threshold, ties, indices, kept)
    assert found == above + ties
    return indices, kept
