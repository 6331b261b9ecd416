"""Decoders of indices on the device: the kernels of kernels/rice.py and kernels/gaps.py.

A scan of the one bits of each word numbers the codes, each word emits its codes, and a scan of the low bits completes
them. A tile is TILE codes or words. A 64-bit word is a pair of 32-bit words. The CPU has checked the section, and the
decoders read it whole, without a cursor.
"""

from typing import Any

from narrows.compression.cuda.jit import (
    BOOL,
    I64,
    INT,
    THREADS,
    U32,
    U64,
    DeviceArray,
    Written,
    block_scan,
    cuda,
    device,
    kernel,
    last_block,
    np,
)
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.scans import scan_all

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
    """Return the r bits of lows from `bit` on; r <= 32."""
    pair = np.uint64(lows[bit >> 5]) | (np.uint64(lows[(bit >> 5) + 1]) << np.uint64(32))
    return np.int64((pair >> np.uint64(bit & 31)) & np.uint64((1 << r) - 1))


@device
def low_of(lows: DeviceArray, i: int, r: int) -> Any:
    return low_at(lows, i * r, r)


@kernel(U32, U64, I64)
def total_ones(unary: DeviceArray, totals: Written, done: Written) -> None:
    """Write the number of ones before each tile of words."""
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        own = np.uint64(0)
        for i in range(begin, min(begin + ITEMS, unary.size)):
            own += np.uint64(cuda.popc(unary[i]))
        _, total = block_scan(own)
        if cuda.threadIdx.x == 0:
            totals[tile] = total
    if last_block(done):
        scan_all(totals)


@kernel(U32, INT, U64, U32)
def emit_codes(unary: DeviceArray, r: int, totals: DeviceArray, indices: Written) -> None:
    """Set indices[j] = ((zeros before the one bit of code j) << r) + j, which lacks the low bits; r < 0: the zeros."""
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


@kernel(U32, INT, INT, U64, I64)
def total_lows(lows: DeviceArray, r: int, kept: int, totals: Written, done: Written) -> None:
    """Write the sum of the low bits before each tile of codes."""
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = tile * TILE + cuda.threadIdx.x * ITEMS
        own = np.uint64(0)
        for i in range(begin, min(begin + ITEMS, kept)):
            own += np.uint64(low_of(lows, i, r))
        _, total = block_scan(own)
        if cuda.threadIdx.x == 0:
            totals[tile] = total
    if last_block(done):
        scan_all(totals)


@kernel(U32, INT, BOOL, U64, U32)
def add_lows(lows: DeviceArray, r: int, fresh: bool, totals: DeviceArray, indices: Written) -> None:
    """Add the sum of the low bits up to code i to indices[i]; fresh: to i instead."""
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


def rice_decode(queue: Queue, lows: DeviceArray, unary: DeviceArray, r: int, indices: DeviceArray) -> None:
    """Decode a checked section of Rice to indices, uint32[kept]."""
    place_codes(queue, unary, r, indices)
    if r:
        _add_lows(queue, lows, r, False, indices)


def place_codes(queue: Queue, unary: DeviceArray, r: int, out: DeviceArray) -> None:
    """Do `emit_codes` for a whole unary stream."""
    unary = unary.view(np.uint32)
    tiles = -(-unary.size // TILE)
    totals = queue.scratch("totals", tiles + 1, np.uint64)
    queue.launch(total_ones, tiles, 1, unary, totals, queue.done)
    queue.launch(emit_codes, tiles, 1, unary, r, totals, out)


def _add_lows(queue: Queue, lows: DeviceArray, r: int, fresh: bool, indices: DeviceArray) -> None:
    lows = lows.view(np.uint32)
    tiles = -(-indices.size // TILE)
    totals = queue.scratch("totals", tiles + 1, np.uint64)
    queue.launch(total_lows, tiles, 1, lows, r, indices.size, totals, queue.done)
    queue.launch(add_lows, tiles, 1, lows, r, fresh, totals, indices)


def fixed_decode(queue: Queue, words: DeviceArray, width: int, indices: DeviceArray) -> None:
    """Decode a checked section of Fixed to indices, uint32[kept]."""
    _add_lows(queue, words, width, True, indices)
