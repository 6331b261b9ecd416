"""Top-k selection on the device: the kernels of select.py, and the same fused with the sum of error feedback.

A compaction reads the array once and writes one bit a value (the *masks*) and one total a tile; after a scan of the
totals, a second kernel walks the set bits only and writes them where they belong: rising, whatever ran first. The
totals count keys above in their low half and keys equal in their high half, so one scan does for ties too.
"""

from typing import Any

from narrows.compression.cuda.jit import (
    THREADS,
    DeviceArray,
    Four,
    LastWritten,
    Written,
    add,
    bits_of,
    block_scan,
    cuda,
    device,
    kernel,
    load4,
    mul,
    np,
    store4,
    wide,
)
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.scans import scan, tile_totals
from narrows.compression.kernels.select import SAMPLE_LINE
from narrows.compression.kernels.sums import Sum

TILE = THREADS * 32  # a mask word of 32 values for each thread
DIGITS = ((20, 31, 2047), (10, 20, 1023), (0, 10, 1023))  # of a key: shift, shift of the digits above it, mask
BINS = 2048


def _wide_sum(addends: Sum) -> bool:
    return wide(addends.residual, addends.update, addends.sums)


@device
def _read_bits(arrays: Any, i: int, wide: bool) -> Four:
    return load4(arrays[0], i, wide)


@device
def _read_sum(arrays: Any, i: int, wide: bool) -> Four:
    """Patterns of decay * residual + update, for arrays (residual, decay, update, sums), once they are in sums."""
    a = load4(arrays[0], i, wide)
    b = load4(arrays[2], i, wide)
    four = (
        add(mul(a[0], arrays[1]), b[0]),
        add(mul(a[1], arrays[1]), b[1]),
        add(mul(a[2], arrays[1]), b[2]),
        add(mul(a[3], arrays[1]), b[3]),
    )
    store4(arrays[3], i, four, wide)
    return bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])


def _readers(read4: Any) -> tuple[Any, Any]:
    """The two kernels that read a whole array, for one way to read it."""

    @kernel
    def sample(arrays: LastWritten, group_lines: int, keys: Written, wide: bool) -> None:
        for i in range(4 * cuda.grid(1), keys.size, 4 * cuda.gridsize(1)):
            group = i // SAMPLE_LINE
            turn = ((group * 2654435769) & 0xFFFFFFFF) >> 25
            line = group * group_lines + (turn & (group_lines - 1))
            four = read4(arrays, line * SAMPLE_LINE + i % SAMPLE_LINE, wide)
            for j in range(4):
                keys[i + j] = four[j] & np.uint32(0x7FFFFFFF)

    @kernel
    def mark(
        arrays: LastWritten, size: int, above: int, ties: int, masks: Written, totals: Written, wide: bool
    ) -> None:
        words = cuda.shared.array(THREADS, np.uint32)
        tally = cuda.shared.array(2, np.uint32)
        t = cuda.threadIdx.x
        for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
            words[t] = 0
            if t == 0:  # which read the last tile's tally: another thread might zero it before that
                tally[0] = 0
                tally[1] = 0
            cuda.syncthreads()
            equal = 0
            for j in range(8):
                place = 4 * (j * THREADS + t)
                i = tile * TILE + place
                if i < size:
                    four = read4(arrays, i, wide)
                    hits = 0
                    for b in range(4):
                        key = np.int64(four[b] & np.uint32(0x7FFFFFFF))
                        tie = ties > 0 and key == above
                        if (key > above or tie) and i + b < size:
                            hits |= 1 << b
                            equal += tie
                    if hits:
                        cuda.atomic.or_(words, place >> 5, np.uint32(hits << (place & 31)))
            cuda.syncthreads()
            word = words[t]
            masks[tile * THREADS + t] = word
            if word:
                cuda.atomic.add(tally, 0, np.uint32(cuda.popc(word)))
            if equal:
                cuda.atomic.add(tally, 1, np.uint32(equal))
            cuda.syncthreads()
            if t == 0:
                totals[tile] = np.uint64(tally[0] - tally[1]) | (np.uint64(tally[1]) << np.uint64(32))

    return sample, mark


sample_bits, mark_bits = _readers(_read_bits)
sample_sum, mark_sum = _readers(_read_sum)


@kernel
def emit(
    bits: DeviceArray,
    above: int,
    ties: int,
    masks: DeviceArray,
    totals: DeviceArray,
    indices: Written,
    kept: Written,
) -> None:
    t = cuda.threadIdx.x
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        word = masks[tile * THREADS + t]
        base = tile * TILE + 32 * t
        own = np.uint64(cuda.popc(word))
        if ties > 0:
            rest = word
            while rest:
                i = base + np.int64(cuda.ffs(rest)) - 1
                rest &= np.uint32(rest - np.uint32(1))
                if np.int64(bits[i] & np.uint32(0x7FFFFFFF)) == above:
                    own += np.uint64(0xFFFFFFFF)  # one less in the low half, one more in the high half
        before, _ = block_scan(own)
        before += totals[tile]
        greater = np.int64(before & np.uint64(0xFFFFFFFF))
        equal = np.int64(before >> np.uint64(32))
        while word:
            i = base + np.int64(cuda.ffs(word)) - 1
            word &= np.uint32(word - np.uint32(1))
            pattern = bits[i]
            tie = ties > 0 and np.int64(pattern & np.uint32(0x7FFFFFFF)) == above
            if not tie or equal < ties:
                place = greater + min(equal, ties)
                indices[place] = i
                kept[place] = pattern
            if tie:
                equal += 1
            else:
                greater += 1


@kernel
def histogram(
    bits: DeviceArray, shift: int, parent: int, mask: int, state: DeviceArray, counts: Written, wide: bool
) -> None:
    """counts[digit] += keys whose digits above are state[0]."""
    bins = cuda.shared.array(BINS, np.uint32)
    for j in range(cuda.threadIdx.x, mask + 1, THREADS):
        bins[j] = 0
    cuda.syncthreads()
    prefix = state[0]
    for i in range(4 * cuda.grid(1), bits.size, 4 * cuda.gridsize(1)):
        four = load4(bits, i, wide)
        for b in range(4):
            key = np.int64(four[b] & np.uint32(0x7FFFFFFF))
            if key >> parent == prefix and i + b < bits.size:
                cuda.atomic.add(bins, (key >> shift) & mask, np.uint32(1))
    cuda.syncthreads()
    for j in range(cuda.threadIdx.x, mask + 1, THREADS):
        if bins[j]:
            cuda.atomic.add(counts, j, np.int64(bins[j]))


@kernel
def pick(counts: Written, mask: int, k: int, state: Written) -> None:
    """One block: appends the digit of the key of rank k to state[0], adds the keys above it to state[1]; zeroes counts."""
    each = (mask + 1) // THREADS
    first = mask - cuda.threadIdx.x * each  # bins are taken from the largest down
    own = np.uint64(0)
    for j in range(each):
        own += np.uint64(counts[first - j])
    before, _ = block_scan(own)
    above = np.int64(before) + state[1]
    prefix = state[0]
    cuda.syncthreads()  # one thread writes to state
    for j in range(each):
        here = counts[first - j]
        if above < k and k <= above + here:
            state[0] = (prefix << (10 if mask == 1023 else 11)) | (first - j)
            state[1] = above
        above += here
        counts[first - j] = 0


@kernel
def gather(source: DeviceArray, places: DeviceArray, out: Written) -> None:
    for i in range(cuda.grid(1), places.size, cuda.gridsize(1)):
        out[i] = source[places[i]]


@kernel
def mask_keys(bits: DeviceArray, mask: int, keys: Written) -> None:
    for i in range(cuda.grid(1), keys.size, cuda.gridsize(1)):
        keys[i] = bits[i] & np.uint32(mask)


@kernel
def block_thresholds(
    bits: DeviceArray, k: int, block: int, thresholds: Written, ties: Written, totals: Written
) -> None:
    """Of each block: the key of its last rank, how many keys equal to it are kept (none of zero), and what it keeps."""
    bins = cuda.shared.array(BINS, np.int32)
    state = cuda.shared.array(2, np.int64)
    for number in range(cuda.blockIdx.x, thresholds.size, cuda.gridDim.x):
        begin, end = number * block, min((number + 1) * block, bits.size)
        wanted = (k * (end - begin) + block - 1) // block
        prefix, above = 0, 0
        for digit in range(3):
            mask = 2047 if digit == 0 else 1023
            shift = 20 - 10 * digit
            parent = 31 if digit == 0 else shift + 10
            for j in range(cuda.threadIdx.x, BINS, THREADS):
                bins[j] = 0
            cuda.syncthreads()
            for i in range(begin + cuda.threadIdx.x, end, THREADS):
                key = np.int64(bits[i] & np.uint32(0x7FFFFFFF))
                if key >> parent == prefix:
                    cuda.atomic.add(bins, (key >> shift) & mask, np.int32(1))
            cuda.syncthreads()
            each = (mask + 1) // THREADS
            first = mask - cuda.threadIdx.x * each
            own = np.uint64(0)
            for j in range(each):
                own += np.uint64(bins[first - j])
            before, _ = block_scan(own)
            over = np.int64(before) + above
            for j in range(each):
                here = np.int64(bins[first - j])
                if over < wanted and wanted <= over + here:
                    state[0] = first - j
                    state[1] = over
                over += here
            cuda.syncthreads()
            prefix = (prefix << (11 if digit == 0 else 10)) | state[0]
            above = state[1]
            cuda.syncthreads()  # before state is written for the next digit
        if cuda.threadIdx.x == 0:
            equal = wanted - above if prefix > 0 else 0
            thresholds[number] = prefix
            ties[number] = equal
            totals[number] = above + equal


@kernel
def emit_blocks(
    bits: DeviceArray,
    block: int,
    thresholds: DeviceArray,
    ties: DeviceArray,
    totals: DeviceArray,
    indices: Written,
    kept: Written,
) -> None:
    for number in range(cuda.blockIdx.x, thresholds.size, cuda.gridDim.x):
        end = min((number + 1) * block, bits.size)
        threshold, wanted = np.int64(thresholds[number]), np.int64(ties[number])
        greater, equal = np.int64(totals[number]), np.int64(0)
        for begin in range(number * block, end, 8 * THREADS):
            first = begin + 8 * cuda.threadIdx.x
            own = np.uint64(0)
            for i in range(first, min(first + 8, end)):
                key = np.int64(bits[i] & np.uint32(0x7FFFFFFF))
                if key >= threshold:
                    own += np.uint64(1) if key > threshold else np.uint64(1 << 32)
            before, total = block_scan(own)
            my_greater = greater + np.int64(before & np.uint64(0xFFFFFFFF))
            my_equal = equal + np.int64(before >> np.uint64(32))
            for i in range(first, min(first + 8, end)):
                key = np.int64(bits[i] & np.uint32(0x7FFFFFFF))
                if key > threshold or (key == threshold and my_equal < wanted):
                    place = my_greater + min(my_equal, wanted)
                    indices[place] = i
                    kept[place] = bits[i]
                my_greater += key > threshold
                my_equal += key == threshold
            greater += np.int64(total & np.uint64(0xFFFFFFFF))
            equal += np.int64(total >> np.uint64(32))


@kernel
def sum_into(arrays: LastWritten, wide: bool) -> None:
    for i in range(4 * cuda.grid(1), arrays[3].size, 4 * cuda.gridsize(1)):
        _read_sum(arrays, i, wide)


def sample_keys(queue: Queue, bits: DeviceArray, group_lines: int, keys: DeviceArray) -> None:
    queue.launch(sample_bits, keys.size, 4 * THREADS, (bits,), group_lines, keys, wide(bits))


def sample_sum_keys(queue: Queue, addends: Sum, group_lines: int, keys: DeviceArray) -> None:
    """sample_keys of the bits of the sum, which is written where it was sampled."""
    queue.launch(sample_sum, keys.size, 4 * THREADS, tuple(addends), group_lines, keys, _wide_sum(addends))


def kth_largest_key(queue: Queue, bits: DeviceArray, k: int) -> tuple[int, int]:
    """Waits."""
    state, (key, above) = queue.facts(2)
    counts = queue.scratch("counts", BINS, np.int64)
    queue.zero(counts)  # which the last pick has left zero, unless a launch failed
    for shift, parent, mask in DIGITS:
        queue.launch(histogram, bits.size, 16 * THREADS, bits, shift, parent, mask, state, counts, wide(bits))
        queue.launch(pick, 1, 1, counts, mask, k, state)
    return int(key), int(above)


def compact(
    queue: Queue,
    bits: DeviceArray,
    above: int,
    ties: int,
    indices: DeviceArray,
    kept: DeviceArray,
    found: int | None = None,
) -> int:
    """found: how many they are, where the caller knows; else this waits."""
    masks, totals = _marks(queue, bits.size)
    queue.launch(mark_bits, totals.size - 1, 1, (bits,), bits.size, above, ties, masks, totals, wide(bits))
    return _collect(queue, bits, above, ties, masks, totals, indices, kept, found)


def compact_sum(queue: Queue, addends: Sum, above: int, indices: DeviceArray, kept: DeviceArray) -> int:
    """The sum, always whole, and compact(its bits, above, 0, ...), in one read of both addends."""
    sums = addends.sums
    masks, totals = _marks(queue, sums.size)
    queue.launch(mark_sum, totals.size - 1, 1, tuple(addends), sums.size, above, 0, masks, totals, _wide_sum(addends))
    return _collect(queue, sums.view(np.uint32), above, 0, masks, totals, indices, kept)


def count_above(queue: Queue, bits: DeviceArray, above: int) -> int:
    masks, totals = _marks(queue, bits.size)
    queue.launch(mark_bits, totals.size - 1, 1, (bits,), bits.size, above, 0, masks, totals, wide(bits))
    scan(queue, totals)
    return int(queue.last(totals))


def keep_top(
    queue: Queue, mask: int, above: int, ties: int, found: int, indices: DeviceArray, kept: DeviceArray
) -> None:
    """Waits for nothing: the caller knows that `found` are kept."""
    keys, places, chosen = (
        queue.scratch(f"{name} to keep", kept.size, np.uint32) for name in ("keys", "places", "chosen")
    )
    masked(queue, kept, mask, keys)
    compact(queue, keys, above, ties, places, chosen, found)
    for array in (indices, kept):
        take(queue, array, places[:found], chosen)
        queue.copy(chosen[:found], array[:found])


def compact_blocks(
    queue: Queue,
    bits: DeviceArray,
    k: int,
    block: int,
    places: DeviceArray,
    keys: DeviceArray,
    indices: DeviceArray,
    kept: DeviceArray,
) -> int:
    """places, keys: not used here; a block is searched where it lies, which is a cache while it lasts."""
    blocks = -(-bits.size // block)
    thresholds, ties = (queue.scratch(f"{name} of blocks", blocks, np.uint32) for name in ("thresholds", "ties"))
    totals = tile_totals(queue, blocks)
    queue.launch(block_thresholds, blocks, 1, bits, k, block, thresholds, ties, totals)
    scan(queue, totals)
    queue.launch(emit_blocks, blocks, 1, bits, block, thresholds, ties, totals, indices, kept)
    return int(queue.last(totals))


def masked(queue: Queue, bits: DeviceArray, mask: int, keys: DeviceArray) -> None:
    """keys[i] = bits[i] & mask."""
    queue.launch(mask_keys, bits.size, 4 * THREADS, bits, mask, keys)


def take(queue: Queue, source: DeviceArray, places: DeviceArray, out: DeviceArray) -> None:
    """out[i] = source[places[i]]."""
    queue.launch(gather, places.size, THREADS, source, places, out)


def sum_of(queue: Queue, addends: Sum) -> None:
    """sums[i] = decay * residual[i] + update[i]."""
    queue.launch(sum_into, addends.sums.size, 4 * THREADS, tuple(addends), _wide_sum(addends))


def _marks(queue: Queue, size: int) -> tuple[DeviceArray, DeviceArray]:
    tiles = -(-size // TILE)
    return queue.scratch("masks", tiles * THREADS, np.uint32), tile_totals(queue, tiles)


def _collect(
    queue: Queue,
    bits: DeviceArray,
    above: int,
    ties: int,
    masks: DeviceArray,
    totals: DeviceArray,
    indices: DeviceArray,
    kept: DeviceArray,
    found: int | None = None,
) -> int:
    scan(queue, totals)
    if found is None:
        total = int(queue.last(totals))
        found = (total & 0xFFFFFFFF) + min(total >> 32, ties)
    if found > indices.size:
        return int(indices.size) + 1
    if found:
        queue.launch(emit, totals.size - 1, 1, bits, above, ties, masks, totals, indices, kept)
    return found
