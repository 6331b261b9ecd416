"""Random numbers on the device, as in kernels/random.py, and indices that follow from a parameter: strata, turns.

Each thread computes the random words that it needs.
"""

from typing import Any

from narrows.compression.cuda.jit import I64, INT, THREADS, U32, DeviceArray, Written, cuda, device, kernel, mul, np
from narrows.compression.cuda.queue import Queue
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.record import PHASE, SEED


@device
def random_word(key_low: int, key_high: int, i: int) -> Any:
    """Return word number i, a uint64 below 2**32. Keys are below 2**32."""
    low32 = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.uint64(((i >> 8) * 64 + (i & 63)) & 0xFFFFFFFF), np.uint64(0), np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(key_low), np.uint64(key_high)
    for _ in range(10):
        even, odd = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (odd >> np.uint64(32)) ^ c1 ^ k0, odd & low32
        c2, c3 = (even >> np.uint64(32)) ^ c3 ^ k1, even & low32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low32, (k1 + np.uint64(0xBB67AE85)) & low32
    lane = (i >> 6) & 3
    if lane == 0:
        return c0
    if lane == 1:
        return c1
    return c2 if lane == 2 else c3


@device
def unit_of(key_low: int, key_high: int, i: int) -> Any:
    """Return u in [0, 1) of 24 bits, float32, from word number i."""
    return mul(np.float32(random_word(key_low, key_high, i) >> np.uint64(8)), np.float32(2.0**-24))


@kernel(INT, INT, INT, U32)
def draw_words(key_low: int, key_high: int, begin: int, words: Written) -> None:
    for i in range(cuda.grid(1), words.size, cuda.gridsize(1)):
        words[i] = random_word(key_low, key_high, begin + i)


@kernel(I64, INT, INT, INT, U32)
def draw_strata(inputs: DeviceArray, begin: int, kept: int, count: int, indices: Written) -> None:
    key = inputs[SEED]
    for j in range(cuda.grid(1), indices.size, cuda.gridsize(1)):
        i = begin + j
        first = np.uint64(i) * np.uint64(count) // np.uint64(kept)
        size = np.uint64(i + 1) * np.uint64(count) // np.uint64(kept) - first
        indices[j] = np.uint32(first + ((random_word(key, 0, i) * size) >> np.uint64(32)))


def random_words(queue: Queue, key_low: int, key_high: int, block: int, words: DeviceArray) -> None:
    queue.launch(draw_words, words.size, THREADS, int(key_low), int(key_high), block * RANDOM_BLOCK, words)


def strata(queue: Queue, key: int, begin: int, kept: int, count: int, words: DeviceArray, indices: DeviceArray) -> None:
    """Write the indices of `strata` of kernels/random.py. `words` is not used: each thread draws its own."""
    queue.launch(draw_strata, indices.size, THREADS, queue.told(SEED, int(key)), begin, kept, count, indices)


@kernel(I64, INT, U32)
def stretch_indices(inputs: DeviceArray, stride: int, indices: Written) -> None:
    phase = inputs[PHASE]
    for j in range(cuda.grid(1), indices.size, cuda.gridsize(1)):
        indices[j] = np.uint32(phase + np.int64(indices[j]) * stride)


def stretch(queue: Queue, phase: int, stride: int, indices: DeviceArray) -> None:
    queue.launch(stretch_indices, indices.size, THREADS, queue.told(PHASE, phase), stride, indices)
