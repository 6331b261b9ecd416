"""The exact k largest of all, in two reads of the array: a sample places a threshold, what lies above it is ranked."""

import math
from typing import NamedTuple

import numpy as np

from narrows.compression.buffers import Counts, FloatArray, IndexArray, read_only, scratch
from narrows.compression.kernels import cpu
from narrows.compression.kernels.select import COUNTS, SAMPLE_LINE

SAMPLE_COUNT_MIN = 1 << 16  # below this, three passes over values in cache cost less than the sampling saves
SAMPLE_RANK = 2048  # sampled values above the threshold: its error is then about 2 %
GROUP_LINES_MIN, GROUP_LINES_MAX = 16, 128


class SamplePlan(NamedTuple):
    """How rank k is looked for: in `keys` keys, of one line in each `group_lines`. The one of rank `rank` of these is the
    threshold, above which no more than `room` values should lie."""

    group_lines: int
    keys: int
    rank: int
    room: int


def sample_plan(count: int, k: int) -> SamplePlan | None:
    """None where sampling does not pay, or where k is too large a part of all for a sample to help."""
    wanted = max(k // SAMPLE_RANK, GROUP_LINES_MIN)
    group_lines = min(1 << (wanted.bit_length() - 1), GROUP_LINES_MAX)
    rank = k / group_lines
    rank += 4 * math.sqrt(rank) + 8  # four standard deviations, so that nearly every selection succeeds
    keys = count // (SAMPLE_LINE * group_lines) * SAMPLE_LINE
    if count < SAMPLE_COUNT_MIN or 2 * rank > keys:
        return None
    return SamplePlan(group_lines, keys, int(rank), min(count, int(2 * group_lines * rank)))


def select_top(values: FloatArray, k: int, dropped_bits: int = 0) -> tuple[IndexArray, FloatArray]:
    """Rising indices and values of the selection of TopK, for 1 <= k <= values.size, whatever the data.

    Both are scratch of this thread, good until its next selection.

    A sample places a threshold slightly below rank k, one read collects what lies above it, and the rank is found among
    these few. Where the sample misled (too few or far too many; many equal values), four reads settle it.
    """
    bits = values.view(np.uint32)
    counts: Counts = np.empty(COUNTS, np.int64)
    mask = 0x7FFFFFFF >> dropped_bits << dropped_bits
    candidates = _candidates(bits, k, counts, mask)
    if candidates is not None:
        indices, kept = candidates
        if kept.size > k:
            threshold, above = cpu.kth_largest_key(_masked(kept, mask), k, counts)
            cpu.keep_top(mask, threshold, k - above, indices, kept)
            indices, kept = indices[:k], kept[:k]
    else:
        keys = _masked(bits, mask)
        threshold, above = cpu.kth_largest_key(keys, k, counts)
        ties = k - above if threshold else 0
        indices, kept = pairs(above + ties)
        found = cpu.compact(keys, threshold, ties, indices, kept)
        assert found == above + ties
        if dropped_bits:
            kept = bits[indices]
    return read_only(indices), read_only(kept.view(np.float32))


def _masked(bits: IndexArray, mask: int) -> IndexArray:
    """Kernels drop the sign themselves."""
    return read_only(bits if mask == 0x7FFFFFFF else bits & np.uint32(mask))


def pairs(count: int) -> tuple[IndexArray, IndexArray]:
    """Scratch for indices and for the bits of their values."""
    return scratch("indices", count), scratch("kept", count)


def _candidates(bits: IndexArray, k: int, counts: Counts, mask: int) -> tuple[IndexArray, IndexArray] | None:
    """Indices and bits of a superset of the top k, or of all non-zero values if they are at most k; None: failed."""
    plan = sample_plan(bits.size, k)
    if plan is None:
        return None
    keys = scratch("keys", plan.keys)
    cpu.sample_keys(bits, plan.group_lines, keys)
    threshold = cpu.kth_largest_key(read_only(keys), plan.rank, counts)[0]
    smallest = mask & -mask  # of what counts as non-zero: 1 if all bits are looked at
    threshold = max(threshold & mask, smallest)
    indices, kept = pairs(plan.room)
    found = cpu.compact(bits, threshold - 1, 0, indices, kept)
    if found > plan.room or (found < k and threshold > smallest):
        return None
    return indices[:found], kept[:found]
