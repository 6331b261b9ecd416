"""Index codings on the device: the kernels of rice.py and gaps.py. 64-bit words are handled as pairs of 32-bit ones.

Encoding: each thread makes whole words of low bits out of the codes that reach into them; the ones of the unary stream
find their places by a scan of gap >> r. Decoding: a scan of one_bits numbers the codes, each word emits its own, and a
scan of the low bits completes them. Tiles are TILE codes, or as many words. Decoders read a section whole, which the
CPU has proved: they take no cursor.
"""

from typing import Any

from narrows.compression.cuda.jit import (
    THREADS,
    DeviceArray,
    Written,
    block_scan,
    cuda,
    device,
    kernel,
    np,
    raise_largest,
)
from narrows.compression.cuda.queue import Fact, Queue
from narrows.compression.cuda.scans import scan, tile_totals

ITEMS = 8
TILE = THREADS * ITEMS


@device
def gap_of(indices: DeviceArray, i: int) -> Any:
    previous = np.int64(-1)
    if i > 0:
        previous = np.int64(indices[i - 1])
    return np.int64(indices[i]) - previous - 1


@device
def low_at(lows: DeviceArray, bit: int, r: int) -> Any:
    """The r bits of lows from `bit` on; r <= 32."""
    pair = np.uint64(lows[bit >> 5]) | (np.uint64(lows[(bit >> 5) + 1]) << np.uint64(32))
    return np.int64((pair >> np.uint64(bit & 31)) & np.uint64((1 << r) - 1))


@device
def low_of(lows: DeviceArray, i: int, r: int) -> Any:
    return low_at(lows, i * r, r)


@kernel
def cost_sums(indices: DeviceArray, first: int, costs: Written) -> None:
    sums = cuda.shared.array(4, np.int64)
    if cuda.threadIdx.x < 4:
        sums[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    a, b, c, d = 0, 0, 0, 0
    for i in range(cuda.grid(1), indices.size, cuda.gridsize(1)):
        high = gap_of(indices, i) >> first
        a += high + 1 + first
        b += (high >> 1) + 2 + first
        c += (high >> 2) + 3 + first
        d += (high >> 3) + 4 + first
    cuda.atomic.add(sums, 0, a)
    cuda.atomic.add(sums, 1, b)
    cuda.atomic.add(sums, 2, c)
    cuda.atomic.add(sums, 3, d)
    cuda.syncthreads()
    if cuda.threadIdx.x < 4:
        cuda.atomic.add(costs, cuda.threadIdx.x, sums[cuda.threadIdx.x])


@kernel
def pack_lows(indices: DeviceArray, r: int, words: int, lows: Written) -> None:
    mask = (1 << r) - 1
    for word in range(cuda.grid(1), words, cuda.gridsize(1)):
        begin = word * 32
        packed = np.uint64(0)
        for i in range(begin // r, min((begin + 31) // r + 1, indices.size)):
            low = np.uint64(gap_of(indices, i) & mask)
            if i * r >= begin:
                packed |= low << np.uint64(i * r - begin)
            else:
                packed |= low >> np.uint64(begin - i * r)
        lows[word] = np.uint32(packed & np.uint64(0xFFFFFFFF))


@kernel
def total_highs(indices: DeviceArray, r: int, totals: Written) -> None:
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        own = np.uint64(0)
        for i in range(begin, min(begin + ITEMS, indices.size)):
            own += np.uint64(gap_of(indices, i) >> r)
        _, total = block_scan(own)
        if cuda.threadIdx.x == 0:
            totals[tile] = total


@kernel
def set_ones(indices: DeviceArray, r: int, totals: DeviceArray, unary: Written) -> None:
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        end = min(begin + ITEMS, indices.size)
        own = np.uint64(0)
        for i in range(begin, end):
            own += np.uint64(gap_of(indices, i) >> r)
        before, _ = block_scan(own)
        zeros = np.int64(before + totals[tile])
        # A thread's ones often share a word: they are gathered first, and most atomics saved.
        word, bits = np.int64(0), np.uint32(0)
        for i in range(begin, end):
            zeros += gap_of(indices, i) >> r
            bit = zeros + i
            if bit >> 5 != word:
                if bits:
                    cuda.atomic.or_(unary, word, bits)
                word, bits = bit >> 5, np.uint32(0)
            bits = np.uint32(bits | np.uint32(1 << (bit & 31)))
        if bits:
            cuda.atomic.or_(unary, word, bits)


@kernel
def sum_codes(lows: DeviceArray, unary: DeviceArray, kept: int, r: int, sums: Written) -> None:
    """sums += ones of unary, sum of the low bits; sums[2] = max of it and the place after the last one."""
    ones, low_sum, end = 0, 0, 0
    for i in range(cuda.grid(1), unary.size, cuda.gridsize(1)):
        word = unary[i]
        if word:
            ones += np.int64(cuda.popc(word))
            end = i * 32 + 32 - np.int64(cuda.clz(word))
    for i in range(cuda.grid(1), kept, cuda.gridsize(1)):
        low_sum += low_of(lows, i, r)
    _, all_ones = block_scan(np.uint64(ones))
    _, all_lows = block_scan(np.uint64(low_sum))
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(sums, 0, np.int64(all_ones))
        cuda.atomic.add(sums, 1, np.int64(all_lows))
    if end:
        cuda.atomic.max(sums, 2, end)


@kernel
def total_ones(unary: DeviceArray, totals: Written) -> None:
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        own = np.uint64(0)
        for i in range(begin, min(begin + ITEMS, unary.size)):
            own += np.uint64(cuda.popc(unary[i]))
        _, total = block_scan(own)
        if cuda.threadIdx.x == 0:
            totals[tile] = total


@kernel
def emit_codes(unary: DeviceArray, r: int, totals: DeviceArray, indices: Written) -> None:
    """indices[j] = (zeros before the one of code j) << r, + j: what they are but for the low bits; r < 0: the zeros."""
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        end = min(begin + ITEMS, unary.size)
        own = np.uint64(0)
        for i in range(begin, end):
            own += np.uint64(cuda.popc(unary[i]))
        before, _ = block_scan(own)
        code = np.int64(before + totals[tile])
        for i in range(begin, end):
            rest = unary[i]
            while rest:
                zeros = i * 32 + np.int64(cuda.ffs(rest)) - 1 - code
                rest &= np.uint32(rest - np.uint32(1))
                indices[code] = (zeros << r) + code if r >= 0 else zeros
                code += 1


@kernel
def total_lows(lows: DeviceArray, r: int, kept: int, totals: Written) -> None:
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        own = np.uint64(0)
        for i in range(begin, min(begin + ITEMS, kept)):
            own += np.uint64(low_of(lows, i, r))
        _, total = block_scan(own)
        if cuda.threadIdx.x == 0:
            totals[tile] = total


@kernel
def add_lows(lows: DeviceArray, r: int, fresh: bool, totals: DeviceArray, indices: Written) -> None:
    """indices[i] += sum of the low bits up to i; fresh: as if it had been i."""
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        end = min(begin + ITEMS, indices.size)
        own = np.uint64(0)
        for i in range(begin, end):
            own += np.uint64(low_of(lows, i, r))
        before, _ = block_scan(own)
        low_sum = np.int64(before + totals[tile])
        for i in range(begin, end):
            low_sum += low_of(lows, i, r)
            indices[i] = (i if fresh else np.int64(indices[i])) + low_sum


@kernel
def find_largest_gap(indices: DeviceArray, largest: Written) -> None:
    own = np.uint32(0)
    for i in range(cuda.grid(1), indices.size, cuda.gridsize(1)):
        own = np.uint32(max(own, np.uint32(gap_of(indices, i))))
    raise_largest(largest, own)


def rice_costs(queue: Queue, indices: DeviceArray, first: int) -> list[Fact]:
    """The costs of four parameters from `first` on."""
    costs, facts = queue.facts(4)
    queue.launch(cost_sums, indices.size, TILE, indices, first, costs)
    return facts


def _pack_lows(queue: Queue, indices: DeviceArray, r: int, lows: DeviceArray) -> None:
    words = (indices.size * r + 31) // 32
    if words:
        queue.launch(pack_lows, words, THREADS, indices, r, words, lows.view(np.uint32))


def rice_encode(queue: Queue, indices: DeviceArray, r: int, lows: DeviceArray, unary: DeviceArray) -> None:
    """lows, unary: zeros at first."""
    _pack_lows(queue, indices, r, lows)
    tiles = -(-indices.size // TILE)
    totals = tile_totals(queue, tiles)
    queue.launch(total_highs, tiles, 1, indices, r, totals)
    scan(queue, totals)
    queue.launch(set_ones, tiles, 1, indices, r, totals, unary.view(np.uint32))


def rice_last_index(queue: Queue, lows: DeviceArray, unary: DeviceArray, kept: int, r: int, count: int) -> int:
    ones, low_sum, end = _sum_codes(queue, lows, unary, kept, r)
    zeros = end - kept
    if ones != kept or zeros > count >> r:
        return -1
    index = (zeros << r) + low_sum + kept - 1
    return index if index < count else -1


def rice_decode(queue: Queue, lows: DeviceArray, unary: DeviceArray, r: int, indices: DeviceArray) -> None:
    place_codes(queue, unary, r, indices)
    if r:
        _add_lows(queue, lows, r, False, indices)


def place_codes(queue: Queue, unary: DeviceArray, r: int, out: DeviceArray) -> None:
    unary = unary.view(np.uint32)
    tiles = -(-unary.size // TILE)
    totals = tile_totals(queue, tiles)
    queue.launch(total_ones, tiles, 1, unary, totals)
    scan(queue, totals)
    queue.launch(emit_codes, tiles, 1, unary, r, totals, out)


def _add_lows(queue: Queue, lows: DeviceArray, r: int, fresh: bool, indices: DeviceArray) -> None:
    lows = lows.view(np.uint32)
    tiles = -(-indices.size // TILE)
    totals = tile_totals(queue, tiles)
    queue.launch(total_lows, tiles, 1, lows, r, indices.size, totals)
    scan(queue, totals)
    queue.launch(add_lows, tiles, 1, lows, r, fresh, totals, indices)


def _sum_codes(queue: Queue, lows: DeviceArray, unary: DeviceArray, kept: int, r: int) -> tuple[int, int, int]:
    """(ones, sum of lows, place after the last one)"""
    sums = queue.scratch("sums of codes", 3, np.int64)
    queue.zero(sums)
    unary = unary.view(np.uint32)
    queue.launch(sum_codes, max(unary.size, kept), TILE, lows.view(np.uint32), unary, kept, r, sums)
    ones, low_sum, end = queue.read(sums).tolist()
    return ones, low_sum, end


def largest_gap(queue: Queue, indices: DeviceArray) -> Fact:
    largest, (fact,) = queue.facts(1, np.uint32)
    queue.launch(find_largest_gap, indices.size, 4 * THREADS, indices, largest)
    return fact


def fixed_encode(queue: Queue, indices: DeviceArray, width: int, words: DeviceArray) -> None:
    _pack_lows(queue, indices, width, words)


def fixed_last_index(queue: Queue, words: DeviceArray, width: int, kept: int) -> int:
    return _sum_codes(queue, words, words[:0], kept, width)[1] + kept - 1


def fixed_decode(queue: Queue, words: DeviceArray, width: int, indices: DeviceArray) -> None:
    _add_lows(queue, words, width, True, indices)
