"""Random words from a counter: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Word number i under a 64-bit key is lane (i // 64) % 4 of the counter (64 * (i // 256) + i % 64, 0, 0, 0). So each word
can be computed alone, on any device, in any order, and 64 neighbours fill the lanes of a vector unit.
"""

import numpy as np

from narrows.compression.buffers import IndexArray
from narrows.compression.kernels.jit import kernel

RANDOM_BLOCK = 256  # words that random_words computes at a time


@kernel
def random_words(key_low: int, key_high: int, block: int, words: IndexArray) -> None:
    """Set words[i] = word number 256 * block + i, uint32[256], for a block below 2**26."""
    for j in range(64):
        c0, c1, c2, c3 = np.uint32(block * 64 + j), np.uint32(0), np.uint32(0), np.uint32(0)
        k0, k1 = np.uint32(key_low), np.uint32(key_high)
        for _ in range(10):
            even, odd = np.uint64(0xD2511F53) * np.uint64(c0), np.uint64(0xCD9E8D57) * np.uint64(c2)
            c0 = np.uint32(odd >> np.uint64(32)) ^ c1 ^ k0
            c1 = np.uint32(odd & np.uint64(0xFFFFFFFF))
            c2 = np.uint32(even >> np.uint64(32)) ^ c3 ^ k1
            c3 = np.uint32(even & np.uint64(0xFFFFFFFF))
            k0 = np.uint32(np.uint64(k0) + np.uint64(0x9E3779B9))
            k1 = np.uint32(np.uint64(k1) + np.uint64(0xBB67AE85))
        words[j] = c0
        words[64 + j] = c1
        words[128 + j] = c2
        words[192 + j] = c3


@kernel
def strata(key: int, begin: int, kept: int, count: int, words: IndexArray, indices: IndexArray) -> None:
    """Set indices[j] = a random index of stratum begin + j. Stratum i is [i * count // kept, (i + 1) * count // kept).

    begin is a multiple of 256; words is scratch, uint32[256]. An index is drawn as (word * size) >> 32: each index of a
    stratum of size s has probability 1 / s, to a relative s / 2**32.
    """
    for j in range(indices.size):
        i = begin + j
        if j & 255 == 0:
            random_words(key, 0, i >> 8, words)
        first = np.uint64(i) * np.uint64(count) // np.uint64(kept)
        size = np.uint64(i + 1) * np.uint64(count) // np.uint64(kept) - first
        indices[j] = first + ((np.uint64(words[j & 255]) * size) >> np.uint64(32))
