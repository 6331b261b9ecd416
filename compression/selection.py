"""Selects exactly the k largest values of an array in two reads of it.

A sample of the array gives a threshold slightly below rank k. One read collects the values above the threshold, and
only these are ranked.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from narrows.compression.buffers import Counts, FloatArray, IndexArray, Values, chunks_of, read_only, scratch
from narrows.compression.kernels import cpu
from narrows.compression.kernels.select import COUNTS, DIGITS, SAMPLE_LINE

SAMPLE_COUNT_MIN = 1 << 16  # below this, three passes over values in cache cost less than the sampling saves
SAMPLE_RANK = 2048  # values of the sample above the threshold; its rank then has a relative error of 1/sqrt(2048), 2 %
GROUP_LINES_MIN, GROUP_LINES_MAX = 16, 128  # one cache line of so many is sampled
ANY_SIGN = 0x7FFFFFFF  # the mask of a key


class SamplePlan(NamedTuple):
    """How a sample gives the threshold of rank k."""

    group_lines: int  # one cache line of so many is sampled
    keys: int  # keys in the sample
    rank: int  # the key of this rank in the sample is the threshold
    room: int  # the largest number of values above the threshold for which there is room


def sample_plan(count: int, k: int, share: float = 0.5) -> SamplePlan | None:
    """Return the plan for the k largest of `count` values; None if sampling does not pay.

    Args:
        count: the number of values.
        k: the number that is selected.
        share: the largest share of the sample above the threshold for which it pays.
    """
    wanted = max(k // SAMPLE_RANK, GROUP_LINES_MIN)
    group_lines = min(1 << (wanted.bit_length() - 1), GROUP_LINES_MAX)
    rank = k / group_lines
    rank += 4 * math.sqrt(rank) + 8  # four standard deviations, so that nearly every selection succeeds
    keys = count // (SAMPLE_LINE * group_lines) * SAMPLE_LINE
    if count < SAMPLE_COUNT_MIN or rank > share * keys:
        return None
    return SamplePlan(group_lines, keys, int(rank), min(count, int(2 * group_lines * rank)))


def select_top(values: Values, k: int, dropped_bits: int = 0) -> tuple[IndexArray, FloatArray]:
    """Select the k largest values by magnitude, as `TopK` defines them.

    If the sample misleads (too few values above the threshold, far too many, or many equal ones), four reads of the
    array find the exact threshold instead.

    Args:
        values: float32[count], any values, or in chunks.
        k: 1 <= k <= count.
        dropped_bits: the lowest mantissa bits that are ignored.

    Returns:
        Rising indices, uint32[kept], and their values, float32[kept], kept <= k: zeros are never selected. Both are
        scratch memory of this thread, valid until its next selection.
    """
    counts: Counts = np.empty(COUNTS, np.int64)
    mask = ANY_SIGN >> dropped_bits << dropped_bits
    candidates = _candidates(values, k, counts, mask)
    if candidates is not None:
        indices, kept = candidates
        if kept.size > k:
            threshold, above = cpu.kth_largest_key(_masked(kept, mask), k, counts)
            cpu.keep_top(mask, threshold, k - above, indices, kept)
            indices, kept = indices[:k], kept[:k]
    else:
        threshold, above = 0, 0
        for digit in range(DIGITS):
            counts[:] = 0
            for _, bits in bits_of(values):
                cpu.count_digit(_masked(bits, mask), digit, threshold, counts)
            threshold, above = cpu.find_digit(counts, digit, threshold, above, k)
        ties = k - above if threshold else 0
        indices, kept = pairs(above + ties)
        found = compact(values, threshold, ties, indices, kept, mask)
        assert found == above + ties
    return read_only(indices), read_only(kept.view(np.float32))


def bits_of(values: Values) -> Iterator[tuple[int, IndexArray]]:
    """Yield (begin, bits) for each chunk of values: uint32[n], read-only."""
    return ((begin, part.view(np.uint32)) for begin, part in chunks_of(values))


def compact(values: Values, above: int, ties: int, indices: IndexArray, kept: IndexArray, mask: int = ANY_SIGN) -> int:
    """Write indices and bits of all keys > `above`, and of the first `ties` keys equal to it. Return their number.

    If they do not fit, return indices.size + 1. `mask` has the bits of a value that are its key.
    """
    found = 0
    for begin, bits in bits_of(values):
        places, chosen = indices[found:], kept[found:]
        more = cpu.compact(_masked(bits, mask), above, ties, places, chosen)
        if more > places.size:
            return indices.size + 1
        places, chosen = places[:more], chosen[:more]
        if mask != ANY_SIGN:
            chosen[:] = bits[places]
        if ties:
            ties -= int(np.count_nonzero(chosen & np.uint32(mask) == above))
        if begin:
            places += np.uint32(begin)
        found += more
    return found


def _masked(bits: IndexArray, mask: int) -> IndexArray:
    """Return the bits without those that `mask` drops. Kernels drop the sign themselves."""
    return read_only(bits if mask == ANY_SIGN else bits & np.uint32(mask))


def pairs(count: int) -> tuple[IndexArray, IndexArray]:
    """Return scratch memory for indices and for the bits of their values, uint32[count] each."""
    return scratch("indices", count), scratch("kept", count)


def _candidates(values: Values, k: int, counts: Counts, mask: int) -> tuple[IndexArray, IndexArray] | None:
    """Return indices and bits of a superset of the k largest, or of all non-zero values if these are at most k.

    None: sampling does not pay, or the sample misled.
    """
    # chunks are computed on each read, so one read pays for any share
    plan = sample_plan(values.size, k, 0.5 if isinstance(values, np.ndarray) else 1.0)
    if plan is None:
        return None
    keys = scratch("keys", plan.keys)
    if isinstance(values, np.ndarray):
        cpu.sample_keys(values.view(np.uint32), plan.group_lines, keys)
    else:  # the lines that the kernel samples
        groups = np.arange(plan.keys // SAMPLE_LINE)
        turns = (groups * 2654435769 & 0xFFFFFFFF) >> 25
        lines = values.lines(groups * plan.group_lines + (turns & plan.group_lines - 1), SAMPLE_LINE)
        np.bitwise_and(lines.view(np.uint32).ravel(), np.uint32(ANY_SIGN), out=keys)
    threshold = cpu.kth_largest_key(read_only(keys), plan.rank, counts)[0]
    smallest = mask & -mask  # the smallest key that counts as non-zero: 1 if no bits are dropped
    threshold = max(threshold & mask, smallest)
    indices, kept = pairs(plan.room)
    found = compact(values, threshold - 1, 0, indices, kept)
    if found > plan.room or (found < k and threshold > smallest):
        return None
    return indices[:found], kept[:found]
