"""Codes rising indices on the device: kernels choose and write the coding of index_codings.encode_indices.

Here all codings with a section are one: r low bits of each gap, and gap >> r in unary, with an r for each group of 64
gaps. Rice has the same r in all groups; fixed width has no unary stream. One thread has one group. The low bits of 64
gaps fill whole words, so no two threads write to the same word. A scan of gap >> r gives the places of the ones in the
unary stream.

1. `choose` computes the cost of each coding; its last block decides, and writes the decision to the record.
2. `write_lows` writes the low bits and zeroes the unary stream.
3. `write_ones` sets the ones of the unary stream.
"""

from typing import Any

from narrows.compression.cuda.jit import (
    BOOL,
    I64,
    INT,
    THREADS,
    U8,
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
    raise_to,
)
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.rice import gap_of
from narrows.compression.cuda.scans import scan_all
from narrows.compression.index_codings import FIXED, GROUPED_RICE, RICE, RICE_PARAMETER_MAX, STRIDED_RICE
from narrows.compression.kernels.record import (
    COSTS,
    GAP,
    GROUPED_LOWS,
    GROUPED_UNARY,
    HEAD_BYTES,
    INDEX_CODING,
    LOW_BITS,
    MISSING,
    PARAMETER,
    UNARY_BITS,
)
from narrows.compression.kernels.rice import RICE_GROUP, RICE_GROUP_PARAMETER_MAX

RICE_ID, FIXED_ID, GROUPED_ID, STRIDED_ID = RICE.wire_id, FIXED.wire_id, GROUPED_RICE.wire_id, STRIDED_RICE.wire_id


@device
def bytes_for(bits: int) -> Any:
    return (bits + 7) >> 3


@device
def first_parameter(kept: int, count: int) -> Any:
    """Return Rice.first(kept, count)."""
    best, best_bytes = np.int64(0), np.int64(1) << 62
    for r in range(RICE_PARAMETER_MAX + 1):
        size = bytes_for(kept * r) + bytes_for(kept + ((count - kept) >> r))
        if size < best_bytes:
            best, best_bytes = np.int64(r), size
    return min(max(best - 2, 0), RICE_PARAMETER_MAX - 3)


@device
def add_to(record: DeviceArray, slot: int, own: int) -> None:
    """Add the `own` of all threads of a block, not negative, to record[slot]."""
    _, total = block_scan(np.uint64(own))
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(record, slot, np.int64(total))


@device
def decide(record: DeviceArray, kept: int, first: int, head: DeviceArray, strided: bool) -> None:
    """Write the shortest coding to the record, of equal sizes the lowest wire id, as encode_indices. For one thread."""
    r, unary_bits, size = np.int64(0), np.int64(0), np.int64(1) << 62
    for j in range(4):
        unary = record[COSTS + j] + kept
        cost = bytes_for(kept * (first + j)) + bytes_for(unary)
        if cost < size:
            r, unary_bits, size = first + j, unary, cost
    coding, parameter, head_bytes, low_bits = RICE_ID, r, 0, kept * r
    if strided:
        coding, head_bytes = STRIDED_ID, 1
        head[0] = r
    else:
        width = 0
        while record[GAP] >> width:
            width += 1
        if bytes_for(kept * width) < size:
            size = bytes_for(kept * width)
            coding, parameter, low_bits, unary_bits = FIXED_ID, width, kept * width, 0
        nibbles = ((kept + RICE_GROUP - 1) // RICE_GROUP + 1) >> 1
        if nibbles + bytes_for(record[GROUPED_LOWS]) + bytes_for(record[GROUPED_UNARY]) < size:
            coding, parameter, head_bytes = GROUPED_ID, record[GROUPED_LOWS], nibbles
            low_bits, unary_bits = record[GROUPED_LOWS], record[GROUPED_UNARY]
    record[INDEX_CODING], record[PARAMETER], record[HEAD_BYTES] = coding, parameter, head_bytes
    record[LOW_BITS], record[UNARY_BITS] = low_bits, unary_bits


@kernel(U32, INT, BOOL, U8, U64, U8, I64, I64)
def choose(
    indices: DeviceArray, count: int, strided: bool,
    parameters: Written, low_words: Written, head: Written, record: Written, done: Written,
) -> None:  # fmt: skip
    """Compute the cost of each coding, the parameters of grouped Rice and its words of lows before each tile of groups.

    The last block decides.
    """
    t = cuda.threadIdx.x
    kept = indices.size - record[MISSING]
    first = first_parameter(kept, count)
    a0, a1, a2, a3, low_bits, unary_bits, largest = 0, 0, 0, 0, 0, 0, np.uint32(0)
    for tile in range(cuda.blockIdx.x, low_words.size - 1, cuda.gridDim.x):
        group, words = tile * THREADS + t, 0
        begin = group * RICE_GROUP
        end = min(begin + RICE_GROUP, kept)
        if begin < end:
            size = end - begin
            previous = np.int64(-1)
            if begin > 0:
                previous = np.int64(indices[begin - 1])
            mean = (np.int64(indices[end - 1]) - previous - size) // size
            least = 0
            while mean >> (least + 1):
                least += 1
            least = min(max(least - 1, 0), RICE_GROUP_PARAMETER_MAX - 2)
            b0, b1, b2 = 0, 0, 0
            for i in range(begin, end):
                here = np.int64(indices[i])
                gap = here - previous - 1
                previous = here
                largest = np.uint32(max(largest, np.uint32(gap)))
                high = gap >> first
                a0 += high
                a1 += high >> 1
                a2 += high >> 2
                a3 += high >> 3
                high = gap >> least
                b0 += high
                b1 += high >> 1
                b2 += high >> 2
            r, best = least, b0
            if b1 + size < best:
                r, best = least + 1, b1 + size
            if b2 + 2 * size < best:
                r, best = least + 2, b2 + 2 * size
            parameters[group] = r
            words = 2 * r
            low_bits += r * size
            unary_bits += best - (r - least) * size + size
        _, total = block_scan(np.uint64(words))
        if t == 0:
            low_words[tile] = total
    add_to(record, COSTS, a0)
    add_to(record, COSTS + 1, a1)
    add_to(record, COSTS + 2, a2)
    add_to(record, COSTS + 3, a3)
    add_to(record, GROUPED_LOWS, low_bits)
    add_to(record, GROUPED_UNARY, unary_bits)
    raise_to(record, GAP, largest)
    if last_block(done):
        scan_all(low_words)
        if t == 0:
            if kept > 0:
                decide(record, kept, first, head, strided)
            else:
                record[INDEX_CODING] = RICE_ID  # the coding of no indices


@kernel(U32, U8, U64, I64, U8, U32, U32, U64, I64)
def write_lows(
    indices: DeviceArray, parameters: DeviceArray, low_words: DeviceArray, record: DeviceArray,
    head: Written, lows: Written, unary: Written, highs: Written, done: Written,
) -> None:  # fmt: skip
    """Write everything except the ones of the unary stream, which is zeroed.

    highs: gets the sum of gap >> r before each tile of groups.
    """
    t = cuda.threadIdx.x
    kept = indices.size - record[MISSING]
    coding, one_r = record[INDEX_CODING], record[PARAMETER]
    for tile in range(cuda.blockIdx.x, highs.size - 1, cuda.gridDim.x):
        group = tile * THREADS + t
        begin = group * RICE_GROUP
        end = min(begin + RICE_GROUP, kept)
        r = one_r
        if coding == GROUPED_ID:
            r = np.int64(0)
            if begin < end:
                r = np.int64(parameters[group])
                if group & 1 == 0:
                    pair = r
                    if end < kept:
                        pair |= np.int64(parameters[group + 1]) << 4
                    head[group >> 1] = pair
            before, _ = block_scan(np.uint64(2 * r))
            word = np.int64(before + low_words[tile])
        else:
            word = 2 * r * group
        own = np.uint64(0)
        if begin < end:
            previous = np.int64(-1)
            if begin > 0:
                previous = np.int64(indices[begin - 1])
            pending, filled, mask = np.uint64(0), np.int64(0), (np.int64(1) << r) - 1
            for i in range(begin, end):
                here = np.int64(indices[i])
                gap = here - previous - 1
                previous = here
                own += np.uint64(gap >> r)
                pending |= np.uint64(gap & mask) << np.uint64(filled)
                filled += r
                if filled >= 32:
                    lows[word] = np.uint32(pending & np.uint64(0xFFFFFFFF))
                    word += 1
                    pending >>= np.uint64(32)
                    filled -= 32
            if filled > 0:
                lows[word] = np.uint32(pending & np.uint64(0xFFFFFFFF))
        _, total = block_scan(own)
        if t == 0:
            highs[tile] = total
    for i in range(cuda.grid(1), (record[UNARY_BITS] + 31) >> 5, cuda.gridsize(1)):
        unary[i] = 0
    if last_block(done):
        scan_all(highs)


@kernel(U32, U8, U64, I64, U32)
def write_ones(
    indices: DeviceArray, parameters: DeviceArray, highs: DeviceArray, record: DeviceArray, unary: Written
) -> None:
    """Set the ones of the unary stream."""
    kept = indices.size - record[MISSING]
    coding, one_r = record[INDEX_CODING], record[PARAMETER]
    tiles = highs.size - 1 if record[UNARY_BITS] > 0 else 0
    for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
        group = tile * THREADS + cuda.threadIdx.x
        begin = group * RICE_GROUP
        end = min(begin + RICE_GROUP, kept)
        r = one_r
        if coding == GROUPED_ID and begin < end:
            r = np.int64(parameters[group])
        own = np.uint64(0)
        for i in range(begin, end):
            own += np.uint64(gap_of(indices, i) >> r)
        before, _ = block_scan(own)
        zeros = np.int64(before + highs[tile])
        # The ones of a thread often share a word: gathering them first saves most atomics.
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


def code_indices(
    queue: Queue, indices: DeviceArray, count: int, strided: bool,
    head: DeviceArray, lows: DeviceArray, unary: DeviceArray, record: DeviceArray,
) -> None:  # fmt: skip
    """Code rising indices.

    Args:
        queue: the queue of the device.
        indices: uint32, each below `count`; the last record[MISSING] are unused.
        count: the number of values of the dense array.
        strided: the indices are positions of a turn of CycleTop: StridedRice is the coding.
        head, lows, unary: uint8, get the three parts of the section.
        record: gets the coding, its parameter, and the sizes of the parts.
    """
    groups = -(-indices.size // RICE_GROUP)
    tiles = -(-groups // THREADS)
    parameters = queue.scratch("parameters", groups, np.uint8)
    low_words, highs = (queue.scratch(name, tiles + 1, np.uint64) for name in ("low words", "highs"))
    lows, unary = lows.view(np.uint32), unary.view(np.uint32)
    queue.launch(choose, tiles, 1, indices, count, strided, parameters, low_words, head, record, queue.done)
    queue.launch(write_lows, tiles, 1, indices, parameters, low_words, record, head, lows, unary, highs, queue.done)
    queue.launch(write_ones, tiles, 1, indices, parameters, highs, record, unary)
