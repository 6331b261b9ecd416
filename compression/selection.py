"""Selects exactly the k largest values of an array in two reads of it.

A sample of the array gives a threshold slightly below rank k. One read collects the values above the threshold, and
only these are ranked.
"""

import math
from typing import NamedTuple

import numpy as np

from narrows.compression.buffers import Counts, FloatArray, IndexArray, read_only, scratch
from narrows.compression.kernels import cpu
from narrows.compression.kernels.select import COUNTS, SAMPLE_LINE

SAMPLE_COUNT_MIN = 1 << 16  # below this, three passes over values in cache cost less than the sampling saves
SAMPLE_RANK = 2048  # values of the sample above the threshold; its rank then has a relative error of 1/sqrt(2048), 2 %
GROUP_LINES_MIN, GROUP_LINES_MAX = 16, 128  # one cache line of so many is sampled


class SamplePlan(NamedTuple):
    """How a sample gives the threshold of rank k."""

    group_lines: int  # one cache line of so many is sampled
    keys: int  # keys in the sample
    rank: int  # the key of this rank in the sample is the threshold
    room: int  # the largest number of values above the threshold for which there is room


def sample_plan(count: int, k: int) -> SamplePlan | None:
    """Return the plan for the k largest of `count` values; None if sampling does not pay, or k is too large a share."""
    wanted = max(k // SAMPLE_RANK, GROUP_LINES_MIN)
    group_lines = min(1 << (wanted.bit_length() - 1), GROUP_LINES_MAX)
    rank = k / group_lines
    rank += 4 * math.sqrt(rank) + 8  # four standard deviations, so that nearly every selection succeeds
    keys = count // (SAMPLE_LINE * group_lines) * SAMPLE_LINE
    if count < SAMPLE_COUNT_MIN or 2 * rank > keys:
        return None
    return SamplePlan(group_lines, keys, int(rank), min(count, int(2 * group_lines * rank)))


def select_top(values: FloatArray, k: int, dropped_bits: int = 0) -> tuple[IndexArray, FloatArray]:
    """Select the k largest values by magnitude, as `TopK` defines them.

    If the sample misleads (too few values above the threshold, far too many, or many equal ones), four reads of the
    array find the exact threshold instead.

    Args:
        values: float32[count], any values.
        k: 1 <= k <= count.
        dropped_bits: the lowest mantissa bits that are ignored.

    Returns:
        Rising indices, uint32[kept], and their values, float32[kept], kept <= k: zeros are never selected. Both are
        scratch memory of this thread, valid until its next selection.
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
    """Return the bits without those that `mask` drops. Kernels drop the sign themselves."""
    return read_only(bits if mask == 0x7FFFFFFF else bits & np.uint32(mask))


def pairs(count: int) -> tuple[IndexArray, IndexArray]:
    """Return scratch memory for indices and for the bits of their values, uint32[count] each."""
    return scratch("indices", count), scratch("kept", count)


def _candidates(bits: IndexArray, k: int, counts: Counts, mask: int) -> tuple[IndexArray, IndexArray] | None:
    """Return indices and bits of a superset of the k largest, or of all non-zero values if these are at most k.

    None: sampling does not pay, or the sample misled.
    """
    plan = sample_plan(bits.size, k)
    if plan is None:
        return None
    keys = scratch("keys", plan.keys)
    cpu.sample_keys(bits, plan.group_lines, keys)
    threshold = cpu.kth_largest_key(read_only(keys), plan.rank, counts)[0]
    smallest = mask & -mask  # the smallest key that counts as non-zero: 1 if no bits are dropped
    threshold = max(threshold & mask, smallest)
    indices, kept = pairs(plan.room)
    found = cpu.compact(bits, threshold - 1, 0, indices, kept)
    if found > plan.room or (found < k and threshold > smallest):
        return None
    return indices[:found], kept[:found]
