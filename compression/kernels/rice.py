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
from narrows.compression.kernels.gaps import sum_of_codes, word_at, word_or_rest
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


@kernel
def count_ones(data: ByteArray) -> int:
    """Return the number of bits that are set."""
    ones = np.uint64(0)
    for i in range(data.size // 8):
        ones += one_bits(word_at(data, 8 * i))
    return int(ones + one_bits(word_or_rest(data, data.size // 8 * 8)))


@kernel
def rice_last_index(lows: ByteArray, unary: ByteArray, kept: int, r: int, count: int) -> int:
    """Return the index of the last of `kept` >= 1 codes; negative if the streams are not `kept` codes below count.

    The kernel reads the bytes only. lows must be the bytes of kept * r bits, zeros after them; the last byte of unary
    has a one. Nothing overflows: zeros are compared with count >> r before they are shifted.
    """
    if count_ones(unary) != kept:
        return -1
    top = 7
    while not unary[unary.size - 1] >> top:
        top -= 1
    zeros = 8 * (unary.size - 1) + top + 1 - kept
    if zeros > count >> r:
        return -1
    index = (zeros << r) + sum_of_codes(lows, kept, r) + kept - 1
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
def place_of_one(word: np.uint64, number: np.uint64) -> np.uint64:
    """Return the place of the one with this number, counted from 1 and from the lowest; the word has as many."""
    place = np.uint64(0)
    half = np.uint64(32)
    while half:
        ones = one_bits(word & ((np.uint64(1) << half) - np.uint64(1)))
        above = ones < number  # LLVM selects and does not branch: which half it is cannot be predicted
        number -= ones if above else np.uint64(0)
        word >>= half if above else np.uint64(0)
        place += half if above else np.uint64(0)
        half >>= np.uint64(1)
    return place


@kernel
def grouped_last_index(nibbles: ByteArray, lows: ByteArray, unary: ByteArray, kept: int, count: int) -> int:
    """Do rice_last_index for grouped codes. nibbles has the r of each group, lows the bytes of so many bits.

    Nothing overflows: unary has less than 2**35 zeros, and r is at most 15. A whole group has 64 codes, so its lows are
    r words, in whose planes it counts the ones.
    """
    if count_ones(unary) != kept:
        return -1
    planes = np.zeros((RICE_GROUP_PARAMETER_MAX + 1, RICE_GROUP_PARAMETER_MAX), np.uint64)
    for r in range(1, RICE_GROUP_PARAMETER_MAX + 1):
        for first in range(r):
            for bit in range(first, 64, r):
                planes[r, first] |= np.uint64(1) << np.uint64(bit)
    total = np.uint64(0)
    low_at = 0  # in lows
    at, end = 0, 0  # in unary: of the word, and after the last group's last one
    rest = word_or_rest(unary, 0)  # what is left of the word
    for group in range((kept + RICE_GROUP - 1) // RICE_GROUP):
        r = int(nibbles[group >> 1] >> (4 * (group & 1))) & 15
        size = min(RICE_GROUP, kept - RICE_GROUP * group)
        wanted = np.uint64(size)
        ones = one_bits(rest)
        while ones < wanted:
            wanted -= ones
            at += 8
            if at >= unary.size:
                return -1
            rest = word_or_rest(unary, at)
            ones = one_bits(rest)
        place = place_of_one(rest, wanted)
        rest = rest >> place >> np.uint64(1) << np.uint64(1) << place
        zeros = 8 * at + int(place) + 1 - end - size
        end = 8 * at + int(place) + 1
        total += np.uint64(zeros) << np.uint64(r)
        phase = 0  # the plane of a word's lowest bit
        for _ in range(r):
            word = word_or_rest(lows, low_at)
            low_at += 8
            for first in range(r):
                plane = first + phase if first + phase < r else first + phase - r
                total += one_bits(word & planes[r, first]) << np.uint64(plane)
            phase = (phase + 64) % r
    index = int(total) + kept - 1
    return index if index < count else -1


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
