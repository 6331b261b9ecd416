"""Top-k selection by magnitude over the bit patterns of float32: exact, and in two reads of the array or less.

A *key* is the pattern without its sign, `bits & 0x7fffffff`: for floats it grows as |x| grows, infinity is 0x7f800000
and every NaN lies above it. Keys are compared as integers, so that ties are exact and NaN has a place.
"""

import numpy as np

from narrows.compression.buffers import Counts, IndexArray
from narrows.compression.kernels.jit import kernel, trailing_zeros

SAMPLE_LINE = 16  # values sampled together: one cache line of 64 bytes


@kernel
def sample_keys(bits: IndexArray, group_lines: int, keys: IndexArray) -> None:
    """Keys of one cache line of bits in each group of `group_lines` (a power of two, at most 128), 16 per whole group.

    Which line of a group is taken walks with a Weyl sequence: a fixed offset would see only the first columns of a
    matrix whose rows are as long as a group.
    """
    for group in range(keys.size // SAMPLE_LINE):
        turn = ((group * 2654435769) & 0xFFFFFFFF) >> 25
        line = group * group_lines + (turn & (group_lines - 1))
        for j in range(SAMPLE_LINE):
            keys[group * SAMPLE_LINE + j] = bits[line * SAMPLE_LINE + j] & np.uint32(0x7FFFFFFF)


@kernel
def kth_largest_key(bits: IndexArray, k: int, counts: Counts) -> tuple[int, int]:
    """(key of rank k, number of keys above it) for 1 <= k <= bits.size, by radix over 11, 10 and 10 bits.

    counts: int64[2048], overwritten. One read of bits per digit; no order of equal keys is involved.
    """
    prefix = np.uint32(0)
    above = 0
    for digit in range(3):
        shift = np.uint32(20 - 10 * digit)
        width = 2048 if digit == 0 else 1024
        for j in range(width):
            counts[j] = 0
        if digit == 0:
            for i in range(bits.size):
                counts[(bits[i] & np.uint32(0x7FFFFFFF)) >> shift] += 1
        else:
            parent = shift + np.uint32(10)
            for i in range(bits.size):
                key = bits[i] & np.uint32(0x7FFFFFFF)
                if (key >> parent) == prefix:
                    counts[(key >> shift) & np.uint32(1023)] += 1
        j = width - 1
        while j > 0 and above + counts[j] < k:
            above += counts[j]
            j -= 1
        prefix = np.uint32((prefix << np.uint32(0 if digit == 0 else 10)) | np.uint32(j))
    return int(prefix), above


@kernel
def compact(bits: IndexArray, above: int, ties: int, indices: IndexArray, kept: IndexArray) -> int:
    """Indices and bits of all keys > `above` and of the first `ties` keys equal to it, by index; the number found.

    Stops with indices.size + 1 when they do not fit; what was written by then is of no use. One read of bits, 64 at a
    time: the comparisons become one mask word without a branch, and only its set bits are walked.
    """
    room = indices.size
    found = 0
    threshold = np.uint32(above) if ties > 0 else np.uint32(above + 1)
    for group in range((bits.size + 63) // 64):
        base = np.uint64(group * 64)
        mask = np.uint64(0)
        if group * 64 + 64 <= bits.size:
            for j in range(64):
                key = bits[base + np.uint64(j)] & np.uint32(0x7FFFFFFF)
                mask |= np.uint64(key >= threshold) << np.uint64(j)
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
