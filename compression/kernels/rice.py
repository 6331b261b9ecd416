"""Rice coding of rising indices (Rice 1971, Golomb 1966), in two streams instead of one.

With gap_i = index_i - index_{i-1} - 1 (index_{-1} = -1) and parameter r: the low r bits of every gap, packed at fixed
width, and gap >> r in unary, as that many zero bits and a one. Bits run from the least significant of each byte. The
size is that of interleaved Rice codes, but the last index follows from counts alone:
(zeros << r) + sum of lows + kept - 1, and indices rise by construction. So a stream is proved in range
before anything is written, at a fraction of the price of decoding it, and decoding does not hang on its own output.
"""

import numpy as np

from narrows.compression.buffers import Counts, IndexArray, WordArray
from narrows.compression.kernels.jit import kernel, one_bits, trailing_zeros


@kernel
def rice_costs(indices: IndexArray, first: int, costs: Counts) -> None:
    """costs[j] = bits that both streams take with r = first + j, for int64 costs[4]; 0 <= first <= 28."""
    a, b, c, d = 0, 0, 0, 0
    previous = -1
    for i in range(indices.size):
        high = (int(indices[i]) - previous - 1) >> first
        previous = int(indices[i])
        a += high
        b += high >> 1
        c += high >> 2
        d += high >> 3
    costs[0] = a + indices.size * (1 + first)
    costs[1] = b + indices.size * (2 + first)
    costs[2] = c + indices.size * (3 + first)
    costs[3] = d + indices.size * (4 + first)


@kernel
def rice_encode(indices: IndexArray, r: int, lows: WordArray, unary: WordArray) -> int:
    """Writes both streams into zeroed words, lows with SPARE_WORDS to spare; returns the number of unary bits."""
    mask = (np.uint64(1) << np.uint64(r)) - np.uint64(1)
    previous = -1
    low_bit = np.uint64(0)
    bit = np.uint64(0)
    for i in range(indices.size):
        gap = np.uint64(int(indices[i]) - previous - 1)
        previous = int(indices[i])
        low = gap & mask
        word, offset = low_bit >> np.uint64(6), low_bit & np.uint64(63)
        lows[word] |= low << offset
        lows[word + np.uint64(1)] |= (low >> np.uint64(1)) >> (np.uint64(63) - offset)
        low_bit += np.uint64(r)
        bit += gap >> np.uint64(r)
        unary[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))
        bit += np.uint64(1)
    return int(bit)


@kernel
def rice_last_index(lows: WordArray, unary: WordArray, kept: int, r: int, count: int) -> int:
    """The index that the last of `kept` >= 1 codes decodes to; negative where they are not `kept` codes below count.

    Reads the words only; lows must hold kept * r bits and SPARE_WORDS. Cannot overflow: zeros are compared with
    count >> r before they are shifted.
    """
    ones = np.uint64(0)
    last = -1
    for i in range(unary.size):
        ones += one_bits(unary[i])
        if unary[i] != np.uint64(0):
            last = i
    if int(ones) != kept:
        return -1
    word = unary[last]
    top = 0
    for step in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(top + step):
            top += step
    zeros = last * 64 + top + 1 - kept
    if zeros > count >> r:
        return -1
    mask = (np.uint64(1) << np.uint64(r)) - np.uint64(1)
    total = np.uint64(0)
    for i in range(kept):
        low_bit = np.uint64(i) * np.uint64(r)
        word, offset = low_bit >> np.uint64(6), low_bit & np.uint64(63)
        total += (
            (lows[word] >> offset) | ((lows[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - offset))
        ) & mask
    index = (zeros << r) + int(total) + kept - 1
    return index if index < count else -1


@kernel
def rice_decode(lows: WordArray, unary: WordArray, r: int, indices: IndexArray) -> None:
    """indices.size rising indices out of streams that rice_last_index has proved."""
    mask = (np.uint64(1) << np.uint64(r)) - np.uint64(1)
    shift = np.uint64(r)
    low_bit = np.uint64(0)
    low_sum = np.uint64(0)
    found = np.uint64(0)
    for i in range(unary.size):
        rest = unary[i]
        base = np.uint64(i) * np.uint64(64)
        while rest:
            # The one of code number `found` stands at base + t after base + t - found zeros: all zeros so far.
            zeros = base + trailing_zeros(rest) - found
            rest &= rest - np.uint64(1)
            word, offset = low_bit >> np.uint64(6), low_bit & np.uint64(63)
            low_sum += (
                (lows[word] >> offset) | ((lows[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - offset))
            ) & mask
            low_bit += shift
            indices[found] = (zeros << shift) + low_sum + found
            found += np.uint64(1)
