"""The decoder of grouped Rice on the device: rice.py with a parameter for every 64 gaps. One thread has one group."""

from narrows.compression.cuda.jit import THREADS, U8, U32, U64, DeviceArray, Written, cuda, kernel, np
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.rice import low_at, place_codes
from narrows.compression.cuda.scans import scan, tile_totals
from narrows.compression.kernels.rice import RICE_GROUP


@kernel(U8, U64)
def count_low_words(parameters: DeviceArray, low_words: Written) -> None:
    """Write the number of 32-bit words of each group's lows: 64 codes of r bits."""
    for group in range(cuda.grid(1), parameters.size, cuda.gridsize(1)):
        low_words[group] = 2 * np.int64(parameters[group])


@kernel(U8, U64, U32, U32, U64)
def total_gaps(
    parameters: DeviceArray, low_words: DeviceArray, lows: DeviceArray, places: DeviceArray, totals: Written
) -> None:
    """Write totals: for each group, the sum of gap + 1 over its codes.

    places: for each code, the zeros of the unary stream before its one bit.
    """
    for group in range(cuda.grid(1), parameters.size, cuda.gridsize(1)):
        r = np.int64(parameters[group])
        bit = np.int64(low_words[group]) * 32
        begin = group * RICE_GROUP
        end = min(begin + RICE_GROUP, places.size)
        before = np.int64(0)
        if begin > 0:
            before = np.int64(places[begin - 1])
        own = ((np.int64(places[end - 1]) - before) << r) + end - begin
        for _ in range(begin, end):
            own += low_at(lows, bit, r)
            bit += r
        totals[group] = own


@kernel(U8, U64, U32, U32, U64, U32)
def emit_groups(
    parameters: DeviceArray,
    low_words: DeviceArray,
    lows: DeviceArray,
    places: DeviceArray,
    totals: DeviceArray,
    indices: Written,
) -> None:
    """Write the indices of each group, from the scanned totals on."""
    for group in range(cuda.grid(1), parameters.size, cuda.gridsize(1)):
        r = np.int64(parameters[group])
        bit = np.int64(low_words[group]) * 32
        begin = group * RICE_GROUP
        before = np.int64(0)
        if begin > 0:
            before = np.int64(places[begin - 1])
        index = np.int64(totals[group]) - 1
        for i in range(begin, min(begin + RICE_GROUP, places.size)):
            here = np.int64(places[i])
            index += ((here - before) << r) + low_at(lows, bit, r) + 1
            indices[i] = index
            before = here
            bit += r


def grouped_decode(
    queue: Queue, parameters: DeviceArray, lows: DeviceArray, unary: DeviceArray, count: int, indices: DeviceArray
) -> None:
    """Decode a checked section of GroupedRice to indices, uint32[kept]."""
    low_words = tile_totals(queue, parameters.size, "low words")
    places = queue.scratch("places", indices.size, np.uint32)
    place_codes(queue, unary, -1, places)
    totals = tile_totals(queue, parameters.size)
    queue.launch(count_low_words, parameters.size, THREADS, parameters, low_words)
    scan(queue, low_words)
    queue.launch(total_gaps, parameters.size, THREADS, parameters, low_words, lows.view(np.uint32), places, totals)
    scan(queue, totals)
    queue.launch(
        emit_groups, parameters.size, THREADS, parameters, low_words, lows.view(np.uint32), places, totals, indices
    )
