"""Grouped Rice coding on the device: the kernels of rice.py that have a parameter for every 64 gaps.

A group is one thread's: the low bits of 64 gaps fill whole words, so no two threads write to one.
"""

from narrows.compression.cuda.jit import (
    THREADS,
    DeviceArray,
    Written,
    cuda,
    kernel,
    np,
)
from narrows.compression.cuda.queue import Fact, Last, Queue
from narrows.compression.cuda.rice import gap_of, low_at, place_codes
from narrows.compression.cuda.scans import scan, tile_totals
from narrows.compression.kernels.rice import RICE_GROUP, RICE_GROUP_PARAMETER_MAX


@kernel
def choose_parameters(indices: DeviceArray, parameters: Written, bits: Written) -> None:
    """Also bits += bits of the lows, of the unary stream."""
    low_bits, unary_bits = 0, 0
    for group in range(cuda.grid(1), parameters.size, cuda.gridsize(1)):
        begin, end = group * RICE_GROUP, min((group + 1) * RICE_GROUP, indices.size)
        size = end - begin
        previous = np.int64(-1)
        if begin > 0:
            previous = np.int64(indices[begin - 1])
        mean = (np.int64(indices[end - 1]) - previous - size) // size
        first = 0
        while mean >> (first + 1):
            first += 1
        first = min(max(first - 1, 0), RICE_GROUP_PARAMETER_MAX - 2)
        a, b, c = 0, 0, 0
        for i in range(begin, end):
            high = gap_of(indices, i) >> first
            a += high
            b += high >> 1
            c += high >> 2
        r, best = first, a
        if b + size < best:
            r, best = first + 1, b + size
        if c + 2 * size < best:
            r, best = first + 2, c + 2 * size
        parameters[group] = r
        low_bits += r * size
        unary_bits += best - (r - first) * size + size
    cuda.atomic.add(bits, 0, low_bits)
    cuda.atomic.add(bits, 1, unary_bits)


@kernel
def count_low_words(parameters: DeviceArray, low_words: Written) -> None:
    """32-bit words of each group's lows: 64 codes of r bits."""
    for group in range(cuda.grid(1), parameters.size, cuda.gridsize(1)):
        low_words[group] = 2 * np.int64(parameters[group])


@kernel
def total_groups(indices: DeviceArray, parameters: DeviceArray, highs: Written) -> None:
    for group in range(cuda.grid(1), parameters.size, cuda.gridsize(1)):
        r = np.int64(parameters[group])
        own = np.uint64(0)
        for i in range(group * RICE_GROUP, min((group + 1) * RICE_GROUP, indices.size)):
            own += np.uint64(gap_of(indices, i) >> r)
        highs[group] = own


@kernel
def pack_groups(
    indices: DeviceArray,
    parameters: DeviceArray,
    low_words: DeviceArray,
    highs: DeviceArray,
    lows: Written,
    unary: Written,
) -> None:
    for group in range(cuda.grid(1), parameters.size, cuda.gridsize(1)):
        r = np.int64(parameters[group])
        bit = np.int64(low_words[group]) * 32
        zeros = np.int64(highs[group])
        for i in range(group * RICE_GROUP, min((group + 1) * RICE_GROUP, indices.size)):
            gap = gap_of(indices, i)
            low = (gap & ((1 << r) - 1)) << (bit & 31)
            if low:  # no other thread writes to this group's words of lows
                lows[bit >> 5] |= np.uint32(low & 0xFFFFFFFF)
                if low >> 32:
                    lows[(bit >> 5) + 1] |= np.uint32(low >> 32)
            bit += r
            zeros += gap >> r
            place = zeros + i
            cuda.atomic.or_(unary, place >> 5, np.uint32(1 << (place & 31)))


@kernel
def total_gaps(
    parameters: DeviceArray, low_words: DeviceArray, lows: DeviceArray, places: DeviceArray, totals: Written
) -> None:
    """places: zeros of the unary stream before the one of each code; totals: of groups, gap + 1 of each code."""
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


@kernel
def emit_groups(
    parameters: DeviceArray,
    low_words: DeviceArray,
    lows: DeviceArray,
    places: DeviceArray,
    totals: DeviceArray,
    indices: Written,
) -> None:
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


def group_parameters(queue: Queue, indices: DeviceArray, parameters: DeviceArray) -> list[Fact]:
    """Bits of the lows, bits of the unary stream."""
    bits, facts = queue.facts(2)
    queue.launch(choose_parameters, parameters.size, THREADS, indices, parameters, bits)
    return facts


def grouped_encode(
    queue: Queue, indices: DeviceArray, parameters: DeviceArray, lows: DeviceArray, unary: DeviceArray
) -> None:
    low_words, highs = tile_totals(queue, parameters.size, "low words"), tile_totals(queue, parameters.size)
    queue.launch(count_low_words, parameters.size, THREADS, parameters, low_words)
    queue.launch(total_groups, parameters.size, THREADS, indices, parameters, highs)
    scan(queue, low_words)
    scan(queue, highs)
    lows, unary = lows.view(np.uint32), unary.view(np.uint32)
    queue.launch(pack_groups, parameters.size, THREADS, indices, parameters, low_words, highs, lows, unary)


def grouped_decode(
    queue: Queue, parameters: DeviceArray, lows: DeviceArray, unary: DeviceArray, count: int, indices: DeviceArray
) -> Last:
    """The place after the last one."""
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
    return queue.last(totals)
