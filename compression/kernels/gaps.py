"""Rising indices as gaps of one fixed width, which is shorter than Rice coding at regular distances; and strides."""

import numpy as np

from narrows.compression.buffers import IndexArray, WordArray
from narrows.compression.kernels.jit import kernel


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
def fixed_last_index(words: WordArray, width: int, kept: int) -> int:
    """Return the index after `kept` >= 1 gaps. The sum cannot overflow: it has at most 2**32 gaps of 32 bits."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    total = np.uint64(0)
    for i in range(kept):
        bit = np.uint64(i) * np.uint64(width)
        word, offset = bit >> np.uint64(6), bit & np.uint64(63)
        total += (
            (words[word] >> offset) | ((words[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - offset))
        ) & mask
    return int(total) + kept - 1


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
