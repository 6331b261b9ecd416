"""Top-k selection by magnitude over the bit patterns of float32: exact, in two reads of a large array, four after a bad sample.

A *key* is the pattern without its sign, `bits & 0x7fffffff`. It grows as |x| grows, infinity is 0x7f800000, and each
NaN lies above infinity. Keys are compared as integers, so ties are exact and NaN has a place in the order.
"""

import numpy as np

from narrows.compression.buffers import Counts, IndexArray
from narrows.compression.kernels.jit import at_least, kernel, trailing_zeros

COUNTS = 4 * 2048  # counters of kth_largest_key
DIGITS = 3  # of a key, for kth_largest_key
SAMPLE_LINE = 16  # values sampled together: one cache line of 64 bytes


@kernel
def sample_keys(bits: IndexArray, group_lines: int, keys: IndexArray) -> None:
    """Write the keys of one cache line of bits of each group of `group_lines` lines: 16 keys a whole group.

    group_lines is a power of two, at most 128. A Weyl sequence gives the line within a group: a fixed line would sample
    only the first columns of a matrix whose rows are as long as a group.
    """
    for group in range(keys.size // SAMPLE_LINE):
        turn = ((group * 2654435769) & 0xFFFFFFFF) >> 25
        line = group * group_lines + (turn & (group_lines - 1))
        for j in range(SAMPLE_LINE):
            keys[group * SAMPLE_LINE + j] = bits[line * SAMPLE_LINE + j] & np.uint32(0x7FFFFFFF)


@kernel
def count_digit(bits: IndexArray, digit: int, prefix: int, counts: Counts) -> None:
    """Count keys by their next digit, of those that begin with the digits `prefix`. Digits have 11, 10 and 10 bits.

    counts: int64[COUNTS], which grows. Neighbours are counted in four tables: most keys share a digit, and a counter
    cannot be raised in each cycle.
    """
    shift = np.uint32(20 - 10 * digit)
    if digit == 0:
        for i in range(bits.size):
            digit_value = (bits[i] & np.uint32(0x7FFFFFFF)) >> shift
            counts[np.uint64(((i & 3) << 11) | np.int64(digit_value))] += 1
    else:
        parent, wanted = shift + np.uint32(10), np.uint32(prefix)
        for i in range(bits.size):
            key = bits[i] & np.uint32(0x7FFFFFFF)
            digit_value = (key >> shift) & np.uint32(1023)
            counts[np.uint64(((i & 3) << 11) | np.int64(digit_value))] += np.int64((key >> parent) == wanted)


@kernel
def find_digit(counts: Counts, digit: int, prefix: int, above: int, k: int) -> tuple[int, int]:
    """Return (the digits of the key of rank k up to this one, number of keys above them).

    counts: of `count_digit`. above: the number of keys above `prefix`.
    """
    j = 2047 if digit == 0 else 1023
    here = counts[j] + counts[2048 + j] + counts[4096 + j] + counts[6144 + j]
    while j > 0 and above + here < k:
        above += here
        j -= 1
        here = counts[j] + counts[2048 + j] + counts[4096 + j] + counts[6144 + j]
    return (prefix << (0 if digit == 0 else 10)) | j, above


@kernel
def kth_largest_key(bits: IndexArray, k: int, counts: Counts) -> tuple[int, int]:
    """Return (key of rank k, number of keys above it) for 1 <= k <= bits.size, by radix over DIGITS digits.

    counts: int64[COUNTS], overwritten. Each digit is one read of bits; the order of equal keys does not matter.
    """
    prefix, above = 0, 0
    for digit in range(DIGITS):
        counts[:] = 0
        count_digit(bits, digit, prefix, counts)
        prefix, above = find_digit(counts, digit, prefix, above, k)
    return prefix, above


@kernel
def keep_top(mask: int, above: int, ties: int, indices: IndexArray, kept: IndexArray) -> int:
    """Move pairs with (kept & mask) > `above`, and the first `ties` equal to it, to the front. Return their number.

    The pairs keep their order.
    """
    found = 0
    threshold = np.uint32(above)
    for i in range(kept.size):
        index, value = indices[i], kept[i]
        key = value & np.uint32(mask)
        tie = int(key == threshold) & int(ties > 0)
        indices[found] = index
        kept[found] = value
        ties -= tie
        found += int(key > threshold) | tie
    return found


@kernel
def compact(bits: IndexArray, above: int, ties: int, indices: IndexArray, kept: IndexArray) -> int:
    """Write indices and bits of all keys > `above`, and of the first `ties` keys equal to it. Return their number.

    If they do not fit, the kernel returns indices.size + 1, and the outputs are useless. It reads bits once, 64 at a
    time: the comparisons become one mask word without a branch, and only its set bits are walked.
    """
    room = indices.size
    found = 0
    threshold = np.uint32(above) if ties > 0 else np.uint32(above + 1)
    for group in range((bits.size + 63) // 64):
        base = np.uint64(group * 64)
        mask = np.uint64(0)
        if group * 64 + 64 <= bits.size:
            mask = at_least(bits, group * 64, np.uint32(0x7FFFFFFF), threshold)
        else:
            for j in range(bits.size - group * 64):
                key = bits[base + np.uint64(j)] & np.uint32(0x7FFFFFFF)
                mask |= np.uint64(key >= threshold) << np.uint64(j)
        while mask:
            i = base + trailing_zeros(mask)
            mask &= mask - np.uint64(1)
            if ties > 0 and (bits[i] & np.uint32(0x7FFFFFFF)) == np.uint32(above):
                ties -= 1
                if ties == 0:
                    # The rest of this mask was built under the old threshold: drop the ties that are left in it.
                    threshold = np.uint32(above + 1)
                    rest = mask
                    while rest:
                        t = trailing_zeros(rest)
                        rest &= rest - np.uint64(1)
                        if (bits[base + t] & np.uint32(0x7FFFFFFF)) < threshold:
                            mask &= ~(np.uint64(1) << t)
            if found == room:
                return room + 1
            indices[found] = i
            kept[found] = bits[i]
            found += 1
    return found


@kernel
def count_above(bits: IndexArray, above: int) -> int:
    """Return the number of keys > `above`."""
    count = 0
    for i in range(bits.size):
        count += int((bits[i] & np.uint32(0x7FFFFFFF)) > np.uint32(above))
    return count


@kernel
def _block_threshold(keys: IndexArray, k: int, lowest: np.uint32) -> tuple[np.uint32, int]:
    """Return (threshold, ties): the k largest keys are those above the threshold, and `ties` of those equal to it.

    1 <= k < keys.size, and all keys >= lowest. The bisection of [lowest, largest key] ends once a threshold has exactly
    k keys above it.
    """
    low, high = np.uint32(lowest), np.uint32(0)
    above = np.int64(0)  # signed: k minus an unsigned integer is a float to Numba
    for i in range(keys.size):
        high = max(high, keys[i])
    high = np.uint32(high + np.uint32(1))
    # More than k keys are >= low; `above` keys are >= high, fewer than k.
    while np.uint32(high - low) > np.uint32(1):
        tried = np.uint32(low + ((high - low) >> np.uint32(1)))
        count = np.uint32(0)
        for i in range(keys.size):
            count += np.uint32(keys[i] >= tried)
        if count == np.uint32(k):
            return np.uint32(tried - np.uint32(1)), 0
        if count > np.uint32(k):
            low = tried
        else:
            high, above = tried, np.int64(count)
    return low, int(k - above)


@kernel
def compact_blocks(
    bits: IndexArray, k: int, block: int, places: IndexArray, keys: IndexArray, indices: IndexArray, kept: IndexArray
) -> int:
    """Write indices and bits of the k largest keys of every `block` values. Return their number.

    Ties go by index, and zeros are never kept. A shorter last block gives ceil(k * its size / block). places, keys:
    scratch, uint32[block] each. indices and kept need room for the values of all blocks. Each block is first reduced to
    the keys above 7/8 of the threshold of the block before. If fewer than k are left, the whole block is searched.
    """
    found = 0
    guess = np.uint32(1)
    for begin in range(0, bits.size, block):
        part = bits[begin : begin + block]
        wanted = (k * part.size + block - 1) // block
        near = 0
        for group in range((part.size + 63) // 64):
            mask = np.uint64(0)
            if group * 64 + 64 <= part.size:
                mask = at_least(part, group * 64, np.uint32(0x7FFFFFFF), guess)
            else:
                for j in range(part.size - group * 64):
                    key = part[group * 64 + j] & np.uint32(0x7FFFFFFF)
                    mask |= np.uint64(key >= guess) << np.uint64(j)
            while mask:
                place = np.uint64(group * 64) + trailing_zeros(mask)
                mask &= mask - np.uint64(1)
                places[near] = place
                keys[near] = part[place] & np.uint32(0x7FFFFFFF)
                near += 1
        if near < wanted and guess > np.uint32(1):
            near, guess = 0, np.uint32(1)
            for i in range(part.size):
                key = part[i] & np.uint32(0x7FFFFFFF)
                places[near] = i
                keys[near] = key
                near += int(key > np.uint32(0))
        threshold = np.uint32(1)
        ties = near
        if near > wanted:
            threshold, ties = _block_threshold(keys[:near], wanted, guess)
        # No branch: a branch on whether a candidate is kept would be mispredicted often, at 15 cycles each time.
        chosen = 0
        for i in range(near):
            key, place = keys[i], places[i]
            tie = int(key == threshold) & int(ties > 0)
            places[chosen] = place
            chosen += int(key > threshold) | tie
            ties -= tie
        for i in range(chosen):
            indices[found + i] = np.uint32(begin + np.int64(places[i]))
            kept[found + i] = part[places[i]]
        found += chosen
        # An eighth of an octave lower: the threshold of the next block is seldom below this.
        guess = np.uint32(1)
        if near > wanted:
            guess = np.uint32(max(threshold, np.uint32(0x00800001)) - np.uint32(0x00180000))
    return found
