"""Top-k selection on the device: the kernels of kernels/select.py, alone and fused with the sum of error feedback.

How it works
1. A compaction reads the array once. It writes one bit a value (the *masks*) and one total a tile, and the last block
   scans the totals. The totals count keys above the threshold in their low half and keys equal to it in their high
   half, so one scan serves ties too.
2. A second kernel walks the set bits only, and writes the values to their places, in rising order, whichever block
   runs first.
3. A search for the key of rank k goes digit by digit: the last block of each kernel that counts a digit picks it.
4. All findings are in the record (kernels/record.py), where the next kernel reads them. The host reads none of them.

A key is bits & key_mask.
"""

from typing import Any

from narrows.compression.cuda.jit import (
    BITS_REF,
    BOOL,
    I64,
    INT,
    SUM,
    THREADS,
    U32,
    U64,
    DeviceArray,
    Four,
    LastWritten,
    Written,
    address_in,
    arrays_in,
    bits_at,
    bits_of,
    block_scan,
    cuda,
    device,
    kernel,
    last_block,
    load4,
    np,
    size_in,
    vector_load,
    wide,
)
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.scans import scan_all
from narrows.compression.cuda.sums import four_bits, sum4_at, sum4_inside, sum4_of, sum_at, wide_sum
from narrows.compression.kernels.record import BINS, COUNTS, DIGITS, LAST, MISLED, MISSING, SAMPLE, SHORT, Sum
from narrows.compression.kernels.select import SAMPLE_LINE

TILE = THREADS * 32  # a mask word of 32 values for each thread


@device
def clear_bins(bins: DeviceArray) -> None:
    for j in range(cuda.threadIdx.x, BINS, THREADS):
        bins[j] = 0
    cuda.syncthreads()


@device
def pick_digit(bins: DeviceArray, search: int, digit: int, k: int, record: DeviceArray, done: DeviceArray) -> None:
    """Add a block's bins to those of all blocks, and let the last block pick the digit.

    The last block appends the digit of the key of rank k to record[search], and sets record[search + 1] to the number
    of keys above. If there are fewer than k keys, nothing changes.
    """
    bin_mask = 2047 if digit == 0 else 1023
    base = COUNTS + (digit if search == SAMPLE else DIGITS + digit) * BINS
    cuda.syncthreads()
    for j in range(cuda.threadIdx.x, bin_mask + 1, THREADS):
        if bins[j]:
            cuda.atomic.add(record, base + j, np.int64(bins[j]))
    if last_block(done):
        each = (bin_mask + 1) // THREADS
        first = bin_mask - cuda.threadIdx.x * each  # bins are taken from the largest down
        own = np.uint64(0)
        for j in range(each):
            own += np.uint64(record[base + first - j])
        before, _ = block_scan(own)
        above = np.int64(before) + record[search + 1]
        prefix = record[search]
        cuda.syncthreads()  # one thread writes to them
        for j in range(each):
            here = record[base + first - j]
            if above < k and k <= above + here:
                record[search] = (prefix << (11 if digit == 0 else 10)) | (first - j)
                record[search + 1] = above
            above += here


@device
def _as_given(source: Any) -> Any:
    return source


@device
def _bits4_at(arrays: Any, i: int, wide: bool) -> Four:
    return load4(arrays[0], i, wide)


@device
def _bits4_inside(arrays: Any, i: int) -> Four:
    return vector_load(arrays[0], i)


@device
def _bit_at(arrays: Any, i: int) -> Any:
    return arrays[0][i]


@device
def _sum_bits4_at(arrays: Any, i: int, wide: bool) -> Four:
    return four_bits(sum4_of(arrays, i, wide))


@device
def _sum_bits4_inside(arrays: Any, i: int) -> Four:
    return four_bits(sum4_inside(arrays, i))


@device
def _sum_bit_at(arrays: Any, i: int) -> Any:
    return bits_of(sum_at(arrays, i))


@device
def _hits(four: Four, key_mask: Any, least: Any) -> Any:
    a, b = np.uint32((four[0] & key_mask) >= least), np.uint32((four[1] & key_mask) >= least)
    c, d = np.uint32((four[2] & key_mask) >= least), np.uint32((four[3] & key_mask) >= least)
    return np.uint32(a | (b << np.uint32(1)) | (c << np.uint32(2)) | (d << np.uint32(3)))


def _readers(name: str, source_type: Any, arrays_of: Any, read4: Any, read4_inside: Any, read: Any) -> tuple[Any, Any]:
    """Make the two kernels that read a whole array.

    Args:
        name: the end of their names.
        source_type: the type of `source`.
        arrays_of: returns the arrays of `source`, from which the others read.
        read4: reads four values at any place, and writes none.
        read4_inside: reads four values that can be loaded at once; of a sum it writes them.
        read: reads one value; of a sum it writes it.
    """

    @kernel(source_type, INT, INT, INT, U32, I64, I64, BOOL, name=f"sample_{name}")
    def sample(
        source: Any, group_lines: int, rank: int, key_mask: int,
        keys: Written, record: Written, done: Written, wide: bool,
    ) -> None:  # fmt: skip
        arrays = arrays_of(source)
        bins = cuda.shared.array(BINS, np.uint32)
        clear_bins(bins)
        for i in range(4 * cuda.grid(1), keys.size, 4 * cuda.gridsize(1)):
            group = i // SAMPLE_LINE
            turn = ((group * 2654435769) & 0xFFFFFFFF) >> 25
            line = group * group_lines + (turn & (group_lines - 1))
            four = read4(arrays, line * SAMPLE_LINE + i % SAMPLE_LINE, wide)
            for j in range(4):
                key = four[j] & np.uint32(key_mask)
                keys[i + j] = key
                cuda.atomic.add(bins, key >> np.uint32(20), np.uint32(1))
        pick_digit(bins, SAMPLE, 0, rank, record, done)

    @kernel(source_type, INT, INT, INT, INT, U32, U64, I64, I64, BOOL, name=f"mark_{name}")
    def mark_candidates(
        source: LastWritten, size: int, key_mask: int, k: int, room: int,
        masks: Written, totals: Written, record: Written, done: Written, wide: bool,
    ) -> None:  # fmt: skip
        """Mark the keys from the sample's threshold on.

        If they are more than `room`, or fewer than k though smaller keys are left, the sample misled.
        """
        arrays = arrays_of(source)
        words = cuda.shared.array(THREADS, np.uint32)
        t = cuda.threadIdx.x
        smallest = key_mask & -key_mask
        least = np.uint32(max((record[SAMPLE] << 10) & key_mask, smallest))
        mask = np.uint32(key_mask)
        for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
            words[t] = 0
            cuda.syncthreads()
            begin = np.int64(tile) * TILE
            if wide and begin + TILE <= size:
                for place in range(4 * t, TILE, 8 * cuda.blockDim.x):
                    next_place = place + 4 * THREADS
                    four, next_four = read4_inside(arrays, begin + place), read4_inside(arrays, begin + next_place)
                    hits, next_hits = _hits(four, mask, least), _hits(next_four, mask, least)
                    if hits:
                        cuda.atomic.or_(words, place >> 5, np.uint32(hits << np.uint32(place & 31)))
                    if next_hits:
                        cuda.atomic.or_(words, next_place >> 5, np.uint32(next_hits << np.uint32(next_place & 31)))
            else:
                for place in range(t, min(TILE, size - begin), THREADS):
                    if (read(arrays, begin + place) & mask) >= least:
                        cuda.atomic.or_(words, place >> 5, np.uint32(1 << (place & 31)))
            cuda.syncthreads()
            word = words[t]
            masks[tile * THREADS + t] = word
            _, total = block_scan(np.uint64(cuda.popc(word)))
            if t == 0:
                totals[tile] = total
        if last_block(done):
            found = np.int64(scan_all(totals))
            if t == 0:
                misled = found > room or (found < k and np.int64(least) > smallest)
                record[MISLED] = misled
                record[SHORT] = room if misled else room - found

    return sample, mark_candidates


sample_bits, mark_bits = _readers("bits", (U32,), _as_given, _bits4_at, _bits4_inside, _bit_at)
sample_sum, mark_sum = _readers("sum", SUM, arrays_in, _sum_bits4_at, _sum_bits4_inside, _sum_bit_at)


@kernel(BITS_REF, INT, INT, U32, U64, U32, U32, I64, I64)
def emit_candidates(
    source: Any, key_mask: int, k: int, masks: DeviceArray, totals: DeviceArray,
    indices: Written, kept: Written, record: Written, done: Written,
) -> None:  # fmt: skip
    """Write all marked values, unless the sample misled, and find the first digit of the key of rank k among them."""
    bits = bits_at(address_in(source), size_in(source))
    bins = cuda.shared.array(BINS, np.uint32)
    clear_bins(bins)
    tiles = 0 if record[MISLED] else totals.size - 1
    for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
        word = masks[tile * THREADS + cuda.threadIdx.x]
        begin = tile * TILE + 32 * cuda.threadIdx.x
        before, _ = block_scan(np.uint64(cuda.popc(word)))
        place = np.int64(before + totals[tile])
        while word:
            i = begin + np.int64(cuda.ffs(word)) - 1
            word &= np.uint32(word - np.uint32(1))
            pattern = bits[i]
            indices[place] = i
            kept[place] = pattern
            place += 1
            cuda.atomic.add(bins, (pattern & np.uint32(key_mask)) >> np.uint32(20), np.uint32(1))
    pick_digit(bins, LAST, 0, k, record, done)


@kernel(BITS_REF, INT, INT, INT, INT, I64, I64, BOOL)
def histogram(
    source: Any, search: int, digit: int, key_mask: int, k: int, record: Written, done: Written, wide: bool
) -> None:
    """Count `digit`, 0 to 2, of the keys that begin with the digits found so far.

    The last record[SHORT] entries of bits are unused.
    """
    bits = bits_at(address_in(source), size_in(source))
    bins = cuda.shared.array(BINS, np.uint32)
    clear_bins(bins)
    shift = np.uint32(20 - 10 * digit)
    parent = np.uint32(31 if digit == 0 else 30 - 10 * digit)
    bin_mask = np.uint32(2047 if digit == 0 else 1023)
    prefix, size = np.uint32(record[search]), bits.size - record[SHORT]
    for i in range(4 * cuda.grid(1), size, 4 * cuda.gridsize(1)):
        four = load4(bits, i, wide)
        for b in range(4):
            key = np.uint32(four[b] & np.uint32(key_mask))
            if np.uint32(key >> parent) == prefix and i + b < size:
                cuda.atomic.add(bins, (key >> shift) & bin_mask, np.uint32(1))
    pick_digit(bins, search, digit, k, record, done)


@device
def last_of(record: DeviceArray, k: int) -> tuple[Any, Any]:
    """Return (key of rank k, the number of equal keys that are kept: none if the key is zero)."""
    return record[LAST], k - record[LAST + 1] if record[LAST] > 0 else 0


@kernel(BITS_REF, INT, INT, U32, U64, I64, I64, BOOL)
def mark_kept(
    source: Any, key_mask: int, k: int,
    masks: Written, totals: Written, record: Written, done: Written, wide: bool,
) -> None:  # fmt: skip
    bits = bits_at(address_in(source), size_in(source))
    words = cuda.shared.array(THREADS, np.uint32)
    t = cuda.threadIdx.x
    threshold, ties = last_of(record, k)
    above, tied, mask = np.uint32(threshold), ties > 0, np.uint32(key_mask)
    size = bits.size - record[SHORT]
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        words[t] = 0
        cuda.syncthreads()
        equal = np.uint64(0)
        for j in range(8):
            place = 4 * (j * THREADS + t)
            i = np.int64(tile) * TILE + place
            if i < size:
                four = load4(bits, i, wide)
                hits = np.uint32(0)
                for b in range(4):
                    key = np.uint32(four[b] & mask)
                    tie = tied and key == above
                    if (key > above or tie) and i + b < size:
                        hits = np.uint32(hits | np.uint32(1 << b))
                        equal += np.uint64(tie)
                if hits:
                    cuda.atomic.or_(words, place >> 5, np.uint32(hits << np.uint32(place & 31)))
        cuda.syncthreads()
        word = words[t]
        masks[tile * THREADS + t] = word
        # The ties that a thread counts need not be in its word, but the sums over the block agree.
        _, total = block_scan(np.uint64(cuda.popc(word)) + equal * np.uint64(0xFFFFFFFF))
        if t == 0:
            totals[tile] = total
    if last_block(done):
        total = scan_all(totals)
        if t == 0:
            record[MISSING] = k - np.int64(total & np.uint64(0xFFFFFFFF)) - min(np.int64(total >> np.uint64(32)), ties)


@kernel(BITS_REF, U32, INT, INT, U32, U64, I64, U32, U32)
def emit_kept(
    source: Any, places: DeviceArray, key_mask: int, k: int, masks: DeviceArray, totals: DeviceArray, record: DeviceArray,
    indices: Written, kept: Written,
) -> None:  # fmt: skip
    """Write the kept values and their indices, in rising order.

    Most of the entries are kept, so neighbouring threads take neighbouring entries: what they read and write lies
    together. Ties are numbered by a mask of their own.

    places: the index of each entry of bits; empty: its own place.
    """
    bits = bits_at(address_in(source), size_in(source))
    words = cuda.shared.array(THREADS, np.uint32)
    tie_words = cuda.shared.array(THREADS, np.uint32)
    greater_before = cuda.shared.array(THREADS, np.uint32)
    equal_before = cuda.shared.array(THREADS, np.uint32)
    t = cuda.threadIdx.x
    threshold, ties = last_of(record, k)
    above, tied, mask = np.uint32(threshold), ties > 0, np.uint32(key_mask)
    for tile in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = np.int64(tile) * TILE
        words[t] = masks[tile * THREADS + t]
        tie_words[t] = 0
        cuda.syncthreads()
        if tied:  # the same in all threads
            for item in range(t, TILE, cuda.blockDim.x):  # a constant would be unrolled, and take 92 registers
                bit = np.uint32(1) << np.uint32(item & 31)
                if words[item >> 5] & bit and np.uint32(bits[begin + item] & mask) == above:
                    cuda.atomic.or_(tie_words, item >> 5, np.uint32(bit))
            cuda.syncthreads()
        # A tie counts one less in the low half, and one more in the high half.
        own = np.uint64(cuda.popc(words[t])) + np.uint64(cuda.popc(tie_words[t])) * np.uint64(0xFFFFFFFF)
        before, _ = block_scan(own)
        before += totals[tile]
        greater_before[t] = np.uint32(before & np.uint64(0xFFFFFFFF))
        equal_before[t] = np.uint32(before >> np.uint64(32))
        cuda.syncthreads()
        for item in range(t, TILE, cuda.blockDim.x):
            at, bit = item >> 5, np.uint32(1) << np.uint32(item & 31)
            word = words[at]
            if word & bit:
                tie, lower = tie_words[at], np.uint32(bit - np.uint32(1))
                equal = np.int64(equal_before[at]) + np.int64(cuda.popc(np.uint32(tie & lower)))
                if not tie & bit or equal < ties:
                    greater = np.int64(greater_before[at]) + np.int64(cuda.popc(np.uint32(word & lower & ~tie)))
                    place, i = greater + min(equal, ties), begin + item
                    indices[place] = places[i] if places.size > 0 else i
                    kept[place] = bits[i]
        cuda.syncthreads()  # before the words of the next tile


@kernel(BITS_REF, U32, U32)
def gather(source: Any, places: DeviceArray, out: Written) -> None:
    values = bits_at(address_in(source), size_in(source))
    for i in range(cuda.grid(1), places.size, cuda.gridsize(1)):
        out[i] = values[places[i]]


@kernel(INT, INT, I64)
def search_for(threshold: int, k: int, record: Written) -> None:
    """Record a known threshold as the key of rank k with k keys above it: then all keys above it are kept."""
    record[LAST] = threshold
    record[LAST + 1] = k


@kernel(SUM, INT, INT, U32, U32, U64, INT, I64, I64, BOOL)
def top_of_each(
    addends: LastWritten, k: int, block: int, slots: Written, patterns: Written, totals: Written,
    room: int, record: Written, done: Written, wide: bool,
) -> None:  # fmt: skip
    """Make the sum, and write the k largest of each block of values, in rising order, from slots[k * its number] on.

    totals: gets the number of values of each block. One block of threads has one block of values, so its sums are still
    in a cache when it reads them again.
    """
    arrays = arrays_in(addends)
    bins = cuda.shared.array(BINS, np.uint32)
    state = cuda.shared.array(2, np.int32)
    t, sums = cuda.threadIdx.x, arrays[3]
    for number in range(cuda.blockIdx.x, totals.size - 1, cuda.gridDim.x):
        begin = np.int64(number) * block
        end = min(begin + block, sums.size)
        wanted = np.int32((k * (end - begin) + block - 1) // block)
        if wide:  # blocks begin at multiples of four, and only the last one may end elsewhere
            for i in range(begin + 4 * t, end, 4 * THREADS):
                sum4_at(arrays, i, wide)
        else:
            for i in range(begin + t, end, THREADS):
                sum_at(arrays, i)
        prefix, above = np.uint32(0), np.int32(0)
        for digit in range(3):
            bin_mask = 2047 if digit == 0 else 1023
            shift = np.uint32(20 - 10 * digit)
            parent = np.uint32(31 if digit == 0 else 30 - 10 * digit)
            clear_bins(bins)
            for i in range(begin + t, end, THREADS):
                key = np.uint32(bits_of(sums[i]) & np.uint32(0x7FFFFFFF))
                if np.uint32(key >> parent) == prefix:
                    cuda.atomic.add(bins, (key >> shift) & np.uint32(bin_mask), np.uint32(1))
            cuda.syncthreads()
            each = (bin_mask + 1) // THREADS
            first = bin_mask - t * each
            own = np.uint64(0)
            for j in range(each):
                own += np.uint64(bins[first - j])
            before, _ = block_scan(own)
            over = np.int32(np.int64(before) + above)
            for j in range(each):
                here = np.int32(bins[first - j])
                if over < wanted and wanted <= over + here:
                    state[0] = first - j
                    state[1] = over
                over = np.int32(over + here)
            cuda.syncthreads()
            prefix = np.uint32((prefix << np.uint32(11 if digit == 0 else 10)) | np.uint32(state[0]))
            above = state[1]
        ties = np.int32(wanted - above) if prefix > 0 else np.int32(0)
        greater, equal = np.int32(0), np.int32(0)
        for start in range(begin, end, 8 * THREADS):
            first = start + 8 * t
            own = np.uint64(0)
            for i in range(first, min(first + 8, end)):
                key = np.uint32(bits_of(sums[i]) & np.uint32(0x7FFFFFFF))
                if key >= prefix:
                    own += np.uint64(1) if key > prefix else np.uint64(1 << 32)
            before, total = block_scan(own)
            my_greater = np.int32(greater + np.int32(before & np.uint64(0xFFFFFFFF)))
            my_equal = np.int32(equal + np.int32(before >> np.uint64(32)))
            if own:
                for i in range(first, min(first + 8, end)):
                    pattern = bits_of(sums[i])
                    key = np.uint32(pattern & np.uint32(0x7FFFFFFF))
                    if key > prefix or (key == prefix and my_equal < ties):
                        place = np.int64(number) * k + my_greater + min(my_equal, ties)
                        slots[place] = i
                        patterns[place] = pattern
                    my_greater = np.int32(my_greater + np.int32(key > prefix))
                    my_equal = np.int32(my_equal + np.int32(key == prefix))
            greater = np.int32(greater + np.int32(total & np.uint64(0xFFFFFFFF)))
            equal = np.int32(equal + np.int32(total >> np.uint64(32)))
        if t == 0:
            totals[number] = greater + min(equal, ties)
        cuda.syncthreads()  # before bins are cleared for the next block
    if last_block(done):
        found = np.int64(scan_all(totals))
        if t == 0:
            record[MISSING] = room - found


@kernel(U32, U32, INT, U64, U32, U32)
def close_up(
    slots: DeviceArray, patterns: DeviceArray, k: int, totals: DeviceArray, indices: Written, kept: Written
) -> None:
    """Move the pairs of all blocks together: a block with many zeros has fewer than k."""
    for i in range(cuda.grid(1), slots.size, cuda.gridsize(1)):
        number = i // k
        place = np.int64(totals[number]) + i - number * k
        if place < np.int64(totals[number + 1]):
            indices[place] = slots[i]
            kept[place] = patterns[i]


def top_sampled(
    queue: Queue,
    source: Any,
    plan: Any,
    k: int,
    key_mask: int,
    indices: DeviceArray,
    kept: DeviceArray,
    record: DeviceArray,
) -> None:
    """Select the k largest keys in two reads, with a sample that may mislead.

    Args:
        queue: the queue of the device.
        source: a Sum, which is made, or an array of bit patterns, uint32.
        plan: the `SamplePlan`.
        k: the number of values.
        key_mask: the bits that a key has.
        indices: uint32[k], gets the rising indices.
        kept: uint32[k], gets the patterns of the values.
        record: gets MISLED, and MISSING, the number of values fewer than k.
    """
    arrays: Any
    if isinstance(source, Sum):
        sample, mark, arrays, bits = sample_sum, mark_sum, queue.sum_ref(source), source.sums.view(np.uint32)
        is_wide = wide_sum(source)
    else:
        sample, mark, arrays, bits = sample_bits, mark_bits, (source,), source
        is_wide = wide(source)
    keys = queue.scratch("sample", plan.keys, np.uint32)
    places, patterns = (queue.scratch(f"{name} of candidates", plan.room, np.uint32) for name in ("places", "bits"))
    masks, totals = _marks(queue, bits.size)
    tiles, done = totals.size - 1, queue.done
    queue.launch(
        sample, keys.size, 4 * THREADS, arrays, plan.group_lines, plan.rank, key_mask, keys, record, done, is_wide
    )
    # The last digit of the threshold stays zero: it only has to lie a little below rank k.
    queue.launch(
        histogram, keys.size, 16 * THREADS, queue.ref(keys), SAMPLE, 1, key_mask, plan.rank, record, done, wide(keys)
    )
    queue.launch(mark, tiles, 1, arrays, bits.size, key_mask, k, plan.room, masks, totals, record, done, is_wide)
    queue.launch(emit_candidates, tiles, 1, queue.ref(bits), key_mask, k, masks, totals, places, patterns, record, done)
    for digit in (1, 2):
        queue.launch(
            histogram,
            plan.room,
            16 * THREADS,
            queue.ref(patterns),
            LAST,
            digit,
            key_mask,
            k,
            record,
            done,
            wide(patterns),
        )
    _keep(queue, patterns, places, key_mask, k, indices, kept, record)


def top(
    queue: Queue, bits: DeviceArray, k: int, key_mask: int, indices: DeviceArray, kept: DeviceArray, record: DeviceArray
) -> None:
    """Select the k largest keys in five reads, whatever the data. Arguments as in `top_sampled`."""
    ref = queue.ref(bits)
    for digit in (0, 1, 2):
        queue.launch(histogram, bits.size, 16 * THREADS, ref, LAST, digit, key_mask, k, record, queue.done, wide(bits))
    _keep(queue, bits, queue.scratch("nothing", 0, np.uint32), key_mask, k, indices, kept, record)


def _keep(
    queue: Queue, bits: DeviceArray, places: DeviceArray, key_mask: int, k: int,
    indices: DeviceArray, kept: DeviceArray, record: DeviceArray,
) -> None:  # fmt: skip
    masks, totals = _marks(queue, bits.size)
    tiles = totals.size - 1
    queue.launch(mark_kept, tiles, 1, queue.ref(bits), key_mask, k, masks, totals, record, queue.done, wide(bits))
    queue.launch(emit_kept, tiles, 1, queue.ref(bits), places, key_mask, k, masks, totals, record, indices, kept)


def top_of_blocks(
    queue: Queue, addends: Sum, k: int, block: int, indices: DeviceArray, kept: DeviceArray, record: DeviceArray
) -> None:
    """Make the sum, and do compact_blocks on its bits.

    indices, kept: uint32, with room for all values that the blocks may keep.
    """
    blocks = -(-addends.sums.size // block)
    slots, patterns = (queue.scratch(f"{name} of blocks", blocks * k, np.uint32) for name in ("places", "bits"))
    totals = queue.scratch("totals", blocks + 1, np.uint64)
    is_wide = block % 4 == 0 and wide_sum(addends)
    queue.launch(
        top_of_each, blocks, 1,
        queue.sum_ref(addends), k, block, slots, patterns, totals, indices.size, record, queue.done, is_wide,
    )  # fmt: skip
    queue.launch(close_up, slots.size, THREADS, slots, patterns, k, totals, indices, kept)


ALL_KEYS = 0x7FFFFFFF


def count_above(queue: Queue, bits: DeviceArray, above: int) -> int:
    """Return the number of keys > `above`. Waits for the device."""
    record = queue.record()
    masks, totals = _marks(queue, bits.size)
    queue.launch(search_for, 1, THREADS, above, bits.size, record)
    queue.launch(
        mark_kept,
        totals.size - 1,
        1,
        queue.ref(bits),
        ALL_KEYS,
        bits.size,
        masks,
        totals,
        record,
        queue.done,
        wide(bits),
    )
    return int(bits.size - queue.read(record[MISSING : MISSING + 1])[0])


def compact_above(
    queue: Queue, bits: DeviceArray, above: int, indices: DeviceArray, kept: DeviceArray, record: DeviceArray
) -> None:
    """Write all keys > `above`. indices, kept: uint32, with room for all of them."""
    queue.launch(search_for, 1, THREADS, above, indices.size, record)
    _keep(queue, bits, queue.scratch("nothing", 0, np.uint32), ALL_KEYS, indices.size, indices, kept, record)


def take(queue: Queue, source: DeviceArray, places: DeviceArray, out: DeviceArray) -> None:
    """Set out[i] = source[places[i]]."""
    queue.launch(gather, places.size, THREADS, queue.ref(source), places, out)


def _marks(queue: Queue, size: int) -> tuple[DeviceArray, DeviceArray]:
    tiles = -(-size // TILE)
    return queue.scratch("masks", tiles * THREADS, np.uint32), queue.scratch("totals", tiles + 1, np.uint64)
