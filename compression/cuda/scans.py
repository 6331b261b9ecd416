"""Scans of tile totals: in the last block of the kernel that makes them or, for many totals, in their own kernels."""

from typing import Any

from narrows.compression.cuda.jit import THREADS, U64, DeviceArray, Written, block_scan, cuda, device, kernel, np
from narrows.compression.cuda.queue import Queue

SCAN_ITEMS = 8
SCAN_CHUNK = THREADS * SCAN_ITEMS


@device
def scan_all(totals: DeviceArray) -> Any:
    """Set totals[i] = the sum of totals[:i], and return the last entry, the sum of all others. One block calls it."""
    size = totals.size - 1
    each = (size + THREADS - 1) // THREADS
    begin = min(cuda.threadIdx.x * each, size)
    end = min(begin + each, size)
    own = np.uint64(0)
    for i in range(begin, end):
        own += totals[i]
    before, total = block_scan(own)
    for i in range(begin, end):
        value = totals[i]
        totals[i] = before
        before += value
    if cuda.threadIdx.x == 0:
        totals[size] = total
    return total


@kernel(U64, U64)
def scan_chunks(totals: Written, sums: Written) -> None:
    """Scan each chunk of totals exclusively, in place, and write the chunk's sum to sums."""
    for chunk in range(cuda.blockIdx.x, sums.size, cuda.gridDim.x):
        begin = chunk * SCAN_CHUNK + cuda.threadIdx.x * SCAN_ITEMS
        end = min(begin + SCAN_ITEMS, totals.size)
        own = np.uint64(0)
        for j in range(begin, end):
            own += totals[j]
        before, total = block_scan(own)
        for j in range(begin, end):
            value = totals[j]
            totals[j] = before
            before += value
        if cuda.threadIdx.x == 0:
            sums[chunk] = total


@kernel(U64, U64)
def shift_chunks(totals: Written, sums: DeviceArray) -> None:
    for i in range(cuda.grid(1), totals.size, cuda.gridsize(1)):
        totals[i] += sums[i // SCAN_CHUNK]


def scan(queue: Queue, totals: DeviceArray, level: int = 0) -> None:
    """Set totals[i] = the sum of totals[:i], uint64 of any size: scan chunks, then the sums of chunks, and so on."""
    chunks = -(-totals.size // SCAN_CHUNK)
    sums = queue.scratch(f"sums of level {level}", chunks, np.uint64)
    queue.launch(scan_chunks, chunks, 1, totals, sums)
    if chunks > 1:
        scan(queue, sums, level + 1)
        queue.launch(shift_chunks, totals.size, THREADS, totals, sums)


def tile_totals(queue: Queue, tiles: int, name: str = "totals") -> DeviceArray:
    """Return uint64[tiles + 1] for a kernel that writes one total a tile. After `scan` the last entry is their sum."""
    totals = queue.scratch(name, tiles + 1, np.uint64)
    queue.zero(totals[tiles:])
    return totals
