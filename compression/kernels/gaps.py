"""Rising indices as gaps of one fixed width, which is shorter than Rice coding at regular distances; and strides.

A check reads the bytes of a section where they are, at any address: `word_at`, `word_or_rest`.
"""

import numba
import numpy as np

from narrows.compression.buffers import ByteArray, IndexArray, WordArray
from narrows.compression.kernels.jit import kernel, one_bits, unaligned_word

BOUNDS_CHECKED = bool(numba.config.BOUNDSCHECK)  # type: ignore[attr-defined]
BLOCK_WORDS = 64  # at least, in a block of `sum_of_codes`


@kernel
def word_at(data: ByteArray, begin: int) -> np.uint64:
    """Return eight bytes as a word. They must be in the array."""
    if BOUNDS_CHECKED:
        data[begin + 7]  # raises IndexError
    return unaligned_word(data, begin)


@kernel
def word_or_rest(data: ByteArray, begin: int) -> np.uint64:
    """Return eight bytes as a word; zeros take the place of those that are not in the array."""
    if begin + 8 <= data.size:
        return word_at(data, begin)
    word = np.uint64(0)
    for i in range(begin, data.size):
        word |= np.uint64(data[i]) << np.uint64(8 * (i - begin))
    return word


@kernel
def sum_of_codes(data: ByteArray, kept: int, width: int) -> int:
    """Return the sum of `kept` codes of `width` <= 32 bits each, least significant first; bits after them are zero.

    The kernel counts the ones of each bit plane. The bits of a plane lie `width` apart, so a block of a multiple of
    `width` words has the same places in each: the counts of a block are loops without a branch, which LLVM vectorises.
    0.04 ns a code of 4 bits on a CPU that counts ones in vectors, 0.09 on others; code after code 0.7.
    """
    if width == 0:
        return 0
    size = width * ((BLOCK_WORDS + width - 1) // width)
    apart = np.uint64(0)
    for place in range(0, 64, width):
        apart |= np.uint64(1) << np.uint64(place)
    planes = np.empty((width + 1, size), np.uint64)  # the last row takes the words after the last whole block
    for plane in range(width):
        for i in range(size):
            planes[plane, i] = apart << np.uint64((plane + 64 * (width - i % width)) % width)
    whole = kept * width // (64 * size)
    total = np.uint64(0)
    for block in range(whole):
        for plane in range(width):
            ones = np.uint64(0)
            for i in range(size):
                ones += one_bits(word_at(data, 8 * (block * size + i)) & planes[plane, i])
            total += ones << np.uint64(plane)
    rest = planes[width]
    for i in range(size):
        rest[i] = word_or_rest(data, 8 * (whole * size + i))
    for plane in range(width):
        ones = np.uint64(0)
        for i in range(size):
            ones += one_bits(rest[i] & planes[plane, i])
        total += ones << np.uint64(plane)
    return int(total)


@kernel
def largest_gap(indices: IndexArray) -> int:
    """Return the largest index_i - index_{i-1} - 1, with index_{-1} = -1; 0 for no indices."""
    largest = 0
    previous = -1
    for i in range(indices.size):
        largest = max(largest, int(indices[i]) - previous - 1)
        previous = int(indices[i])
    return largest


@kernel
def fixed_encode(indices: IndexArray, width: int, words: WordArray) -> None:
    """Write each gap as `width` <= 32 bits, least significant first, into zeroed words with SPARE_WORDS to spare."""
    previous = -1
    bit = np.uint64(0)
    for i in range(indices.size):
        gap = np.uint64(int(indices[i]) - previous - 1)
        previous = int(indices[i])
        word, offset = bit >> np.uint64(6), bit & np.uint64(63)
        words[word] |= gap << offset
        words[word + np.uint64(1)] |= (gap >> np.uint64(1)) >> (np.uint64(63) - offset)
        bit += np.uint64(width)


@kernel
def fixed_last_index(data: ByteArray, width: int, kept: int) -> int:
    """Return the index after `kept` >= 1 gaps. The sum cannot overflow: it has at most 2**32 gaps of 32 bits."""
    return sum_of_codes(data, kept, width) + kept - 1


@kernel
def fixed_decode(words: WordArray, width: int, cursor: WordArray, indices: IndexArray) -> None:
    """Write the next indices.size indices. cursor: uint64[2], zeros at first: gaps read, index after the last one."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    read, next_index = cursor[0], cursor[1]
    for i in range(indices.size):
        bit = (read + np.uint64(i)) * np.uint64(width)
        word, offset = bit >> np.uint64(6), bit & np.uint64(63)
        gap = (
            (words[word] >> offset) | ((words[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - offset))
        ) & mask
        indices[i] = next_index + gap
        next_index += gap + np.uint64(1)
    cursor[0], cursor[1] = read + np.uint64(indices.size), next_index


@kernel
def strided(phase: int, stride: int, begin: int, indices: IndexArray) -> None:
    """Set indices[j] = phase + (begin + j) * stride."""
    for j in range(indices.size):
        indices[j] = phase + (begin + j) * stride


@kernel
def stretch(phase: int, stride: int, indices: IndexArray) -> None:
    """Set indices[j] = phase + indices[j] * stride."""
    for j in range(indices.size):
        indices[j] = phase + np.int64(indices[j]) * stride
