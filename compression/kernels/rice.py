"""Rice coding of rising indices (Rice 1971, Golomb 1966), in two streams instead of one.

With gap_i = index_i - index_{i-1} - 1 (index_{-1} = -1) and parameter r, the first stream has the low r bits of each
gap, packed at fixed width. The second has gap >> r in unary, as that many zero bits and a one. Bits run from the least
significant of each byte. The size is that of interleaved Rice codes, but the last index follows from counts alone:
(zeros << r) + sum of lows + kept - 1, and indices rise by construction. So a stream is checked before anything is
written, at a fraction of the cost of decoding, and decoding does not depend on its own output.

The grouped coding has an r for every 64 gaps. It suits clustered indices, such as those of a gradient by row and
tensor.
"""

import numpy as np

from narrows.compression.buffers import ByteArray, Counts, IndexArray, WordArray
from narrows.compression.kernels.jit import kernel, one_bits, trailing_zeros

RICE_GROUP = 64  # gaps that share a parameter of 4 bits in the grouped coding
RICE_GROUP_PARAMETER_MAX = 15


@kernel
def rice_costs(indices: IndexArray, first: int, costs: Counts) -> None:
    """Set costs[j] = the bits of both streams with r = first + j, int64[4]; 0 <= first <= 28."""
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
    """Write both streams into zeroed words, lows with SPARE_WORDS to spare. Return the number of unary bits."""
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


PLANES_MAX = 6  # low bits of a code up to which their sum is computed plane by plane


@kernel
def sum_of_lows(lows: WordArray, kept: int, r: int) -> int:
    """Return the sum of `kept` codes of r bits; lows has zeros after them, and SPARE_WORDS.

    Up to PLANES_MAX bits it counts the ones of each bit plane, 64 bits at a time: the bits of plane b lie r apart, so a
    word takes r counts, whatever the number of its codes: 0.38 ns a code of 4 bits, 0.71 code after code.
    """
    total = np.uint64(0)
    if r <= PLANES_MAX:
        apart = np.uint64(0)  # a bit each r places, from the lowest on
        for place in range(0, 64, max(r, 1)):
            apart |= np.uint64(1) << np.uint64(place)
        phase = 0  # the plane of a word's lowest bit
        for i in range((kept * r + 63) // 64):
            word = lows[i]
            for shift in range(r):
                plane = shift + phase
                if plane >= r:
                    plane -= r
                total += one_bits(word & (apart << np.uint64(shift))) << np.uint64(plane)
            phase = (phase + 64) % r
        return int(total)
    mask = (np.uint64(1) << np.uint64(r)) - np.uint64(1)
    for i in range(kept):
        low_bit = np.uint64(i) * np.uint64(r)
        at, offset = low_bit >> np.uint64(6), low_bit & np.uint64(63)
        total += ((lows[at] >> offset) | ((lows[at + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - offset))) & mask
    return int(total)


@kernel
def rice_last_index(lows: WordArray, unary: WordArray, kept: int, r: int, count: int) -> int:
    """Return the index of the last of `kept` >= 1 codes; negative if the streams are not `kept` codes below count.

    The kernel reads the words only; lows must hold kept * r bits, zeros after them and SPARE_WORDS. Nothing overflows:
    zeros are compared with count >> r before they are shifted.
    """
    ones = np.uint64(0)
    for i in range(unary.size):
        ones += one_bits(unary[i])
    if int(ones) != kept:
        return -1
    last = unary.size - 1
    while unary[last] == np.uint64(0):
        last -= 1
    word = unary[last]
    top = 0
    for step in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(top + step):
            top += step
    zeros = last * 64 + top + 1 - kept
    if zeros > count >> r:
        return -1
    index = (zeros << r) + sum_of_lows(lows, kept, r) + kept - 1
    return index if index < count else -1


@kernel
def rice_decode(lows: WordArray, unary: WordArray, r: int, cursor: WordArray, indices: IndexArray) -> None:
    """Write the next indices.size rising indices of streams that rice_last_index has checked.

    cursor: uint64[4], zeros at first: unary words begun, the rest of the last of these, sum of lows, indices found.
    """
    mask = (np.uint64(1) << np.uint64(r)) - np.uint64(1)
    shift = np.uint64(r)
    begun, rest, low_sum, before = cursor[0], cursor[1], cursor[2], cursor[3]
    found = np.uint64(0)
    wanted = np.uint64(indices.size)
    low_bit = before * shift
    while found < wanted:
        while rest == np.uint64(0):
            rest = unary[begun]
            begun += np.uint64(1)
        # The one bit of code number n at bit b has b - n zeros before it: all zeros so far.
        base = (begun - np.uint64(1)) * np.uint64(64) - before
        while rest and found < wanted:
            zeros = base + trailing_zeros(rest) - found
            rest &= rest - np.uint64(1)
            word, offset = low_bit >> np.uint64(6), low_bit & np.uint64(63)
            low_sum += (
                (lows[word] >> offset) | ((lows[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - offset))
            ) & mask
            low_bit += shift
            indices[found] = (zeros << shift) + low_sum + before + found
            found += np.uint64(1)
    cursor[0], cursor[1], cursor[2], cursor[3] = begun, rest, low_sum, before + found


@kernel
def group_parameters(indices: IndexArray, parameters: ByteArray) -> tuple[int, int]:
    """Write the best r <= 15 near log2 of the mean gap for each group of RICE_GROUP gaps.

    Return (bits of the lows, bits of the unary stream).
    """
    previous = -1
    low_bits = unary_bits = 0
    for group in range(parameters.size):
        part = indices[group * RICE_GROUP : (group + 1) * RICE_GROUP]
        mean = (int(part[part.size - 1]) - previous - part.size) // part.size
        first = 0
        while mean >> (first + 1):
            first += 1
        first = min(max(first - 1, 0), RICE_GROUP_PARAMETER_MAX - 2)
        a, b, c = 0, 0, 0
        for i in range(part.size):
            high = (int(part[i]) - previous - 1) >> first
            previous = int(part[i])
            a += high
            b += high >> 1
            c += high >> 2
        r, best = first, a
        if b + part.size < best:
            r, best = first + 1, b + part.size
        if c + 2 * part.size < best:
            r, best = first + 2, c + 2 * part.size
        parameters[group] = np.uint8(r)
        low_bits += r * part.size
        unary_bits += best - (r - first) * part.size + part.size
    return low_bits, unary_bits


@kernel
def grouped_encode(indices: IndexArray, parameters: ByteArray, lows: WordArray, unary: WordArray) -> int:
    """Do rice_encode with a parameter for each group. Return the number of unary bits."""
    previous = -1
    low_bit = np.uint64(0)
    bit = np.uint64(0)
    for i in range(indices.size):
        r = np.uint64(parameters[i // RICE_GROUP])
        gap = np.uint64(int(indices[i]) - previous - 1)
        previous = int(indices[i])
        low = gap & ((np.uint64(1) << r) - np.uint64(1))
        word, offset = low_bit >> np.uint64(6), low_bit & np.uint64(63)
        lows[word] |= low << offset
        lows[word + np.uint64(1)] |= (low >> np.uint64(1)) >> (np.uint64(63) - offset)
        low_bit += r
        bit += gap >> r
        unary[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))
        bit += np.uint64(1)
    return int(bit)


@kernel
def grouped_decode(
    parameters: ByteArray, lows: WordArray, unary: WordArray, count: int, cursor: WordArray, indices: IndexArray
) -> int:
    """Write the next indices.size indices. Return the last of them, or -1 if unary ends or an index is not below count.

    The kernel reads the words only, and writes nothing beyond indices; lows must hold the bits of all parameters and
    SPARE_WORDS. cursor: uint64[6], zeros at first: unary words begun, the rest of the last of these, bits of lows read,
    place after the last one bit, index after the last, indices found.
    """
    begun, rest, low_bit, place, next_index, before = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4], cursor[5]
    for i in range(indices.size):
        while rest == np.uint64(0):
            if begun == np.uint64(unary.size):
                return -1
            rest = unary[begun]
            begun += np.uint64(1)
        here = (begun - np.uint64(1)) * np.uint64(64) + trailing_zeros(rest)
        rest &= rest - np.uint64(1)
        r = np.uint64(parameters[(before + np.uint64(i)) // np.uint64(RICE_GROUP)])
        word, offset = low_bit >> np.uint64(6), low_bit & np.uint64(63)
        low = (lows[word] >> offset) | ((lows[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - offset))
        index = next_index + ((here - place) << r) + (low & ((np.uint64(1) << r) - np.uint64(1)))
        if index >= np.uint64(count):
            return -1
        low_bit += r
        place = here + np.uint64(1)
        next_index = index + np.uint64(1)
        indices[i] = index
    cursor[0], cursor[1], cursor[2], cursor[3], cursor[4] = begun, rest, low_bit, place, next_index
    cursor[5] = before + np.uint64(indices.size)
    return int(next_index) - 1
