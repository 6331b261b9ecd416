"""The value codings on the device: the kernels of kernels/values.py, bit for bit except for the payload bits of NaN.

A coding is three device functions: `value` and `value4` decode values, `encode_tile` codes a tile of values. `coding` makes
six kernels of them: decode, add, scatter_add, and encode of values, of a sum and of a stride of a sum. The kernels are
fused. Decoded values never go to memory. A sum is made, coded, and reduced by the coded values before it leaves a cache.
A block codes one tile of values at a time, from shared memory.
"""

import math
from typing import Any, NamedTuple

from narrows.compression.cuda.jit import (
    BOOL,
    F32,
    FLOAT,
    FLOATS_REF,
    I8,
    I64,
    INT,
    SUM,
    THREADS,
    U8,
    U16,
    U32,
    DeviceArray,
    Four,
    LastWritten,
    Written,
    add,
    address_in,
    arrays_in,
    bits_of,
    cuda,
    device,
    float_of,
    floats_at,
    kernel,
    load4,
    mul,
    np,
    raise_to,
    size_in,
    store4,
    vector_load,
    vector_store,
    wide,
)
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.random import unit_of
from narrows.compression.cuda.sums import largest_of, sum4_at, sum4_of, take, wide_sum
from narrows.compression.kernels.record import KEY_HIGH, KEY_LOW, LARGEST, MISSING, PHASE, Sum
from narrows.compression.kernels.values import INFINITY_KEY, INT4_BLOCK, INT4_SCALE_MAX, INT8_BLOCK, INT8_SCALE_MAX

EXTRA = (INT, I64)  # of `extra`
TURN = (INT, INT, INT)  # of `turn`
NO_TURN = (0, 0, 0)
TILE = 2048  # values that a block of threads codes at a time: whole blocks of each coding
# The same of a turn: what all blocks of threads have just read and written lies in the second-level cache then (23 to 45 MB
# of 50 on an H100, for a stride of 7), where they change it again.
STRIDED_TILE = 1024


class Coding(NamedTuple):
    """The kernels of a value coding.

    `coded` is a tuple with the array of each section. `extra` is a pair: 1 if codes are rounded at random, and the
    inputs of the encode, which hold the key.

    Attributes:
        decode: (coded, out, wide).
        add: (coded, weight, out, wide).
        scatter_add: (coded, indices, turn, weight, record, out): `turn` is (phase, stride, number of values) of a
            turn of Cycle, whose indices follow from it; a stride of 0: `indices` counts.
        encode: (values, extra, coded, record, wide).
        encode_sum: (addends, extra, coded, record, wide): encodes a sum, and subtracts the coded values from it.
        encode_strided: (addends, stride, kept, extra, coded, record, wide): does so for `kept` values, every stride-th.
        strided_tile: the values that a block of threads codes at a time in encode_strided.
    """

    decode: Any
    add: Any
    scatter_add: Any
    encode: Any
    encode_sum: Any
    encode_strided: Any
    strided_tile: int


@device
def rounding_in(extra: Any) -> Any:
    """Return (1 if codes are rounded at random, the two halves of the key)."""
    return extra[0], extra[1][KEY_LOW], extra[1][KEY_HIGH]


@device
def weighted(old: Four, weight: float, four: Four) -> Four:
    """Return old + weight * value, product and sum each rounded to float32."""
    return (
        add(old[0], mul(weight, four[0])),
        add(old[1], mul(weight, four[1])),
        add(old[2], mul(weight, four[2])),
        add(old[3], mul(weight, four[3])),
    )


@device
def staged(tile: DeviceArray, i: int, four: Four, count: int) -> Four:
    """Set tile[i : i + 4] = four, i < count, and return that. Those from `count` on are 0.0, up to a multiple of eight."""
    zero, left = np.float32(0.0), count - i
    a, b, c, d = four
    if left < 4:
        b, c, d = b if left > 1 else zero, c if left > 2 else zero, zero
    vector_store(tile, i, (a, b, c, d))
    if left <= 4 and i & 4 == 0:
        vector_store(tile, i + 4, (zero, zero, zero, zero))
    return a, b, c, d


@device
def block_tops(tile: DeviceArray, count: int, block: int, tops: DeviceArray) -> None:
    """Set tops[i] to the largest key of the block i of a tile. The threads meet before that and after it."""
    for at in range(cuda.threadIdx.x, tops.size, THREADS):
        tops[at] = 0
    cuda.syncthreads()
    place = 8 * cuda.threadIdx.x
    while place < count:  # here and below: NVVM unrolls loops with a constant step, and keeps an address for each pass
        top = largest_of(vector_load(tile, place + 4), largest_of(vector_load(tile, place), np.uint32(0)))
        cuda.atomic.max(tops, place // block, top)
        place += 8 * cuda.blockDim.x
    cuda.syncthreads()


def coding(name: str, sections: tuple[Any, ...], value: Any, value4: Any, encode_tile: Any, block: int = 1) -> Coding:
    """Make the kernels of a value coding.

    Args:
        name: of the coding.
        sections: the type of the array of each section.
        value: (coded, i): returns value i.
        value4: (coded, i, wide): returns values i to i + 3, i a multiple of 4.
        encode_tile: (tile, count, first, extra, coded, wide): a block of threads codes tile[:count] as values `first`
            and following. The tile is in shared memory, at most TILE values, with zeros up to a multiple of eight. The
            threads have met before, and meet afterwards.
        block: `first` is a multiple of it, for so many values share a scale.
    """
    strided_tile = max(STRIDED_TILE, block)

    @kernel(sections, F32, BOOL, name=f"{name}.decode")
    def decode(coded: Any, out: Written, wide: bool) -> None:
        for i in range(4 * cuda.grid(1), out.size, 4 * cuda.gridsize(1)):
            store4(out, i, value4(coded, i, wide), wide)

    @kernel(sections, FLOAT, F32, BOOL, name=f"{name}.add")
    def add_to(coded: Any, weight: float, out: Written, wide: bool) -> None:
        for i in range(4 * cuda.grid(1), out.size, 4 * cuda.gridsize(1)):
            store4(out, i, weighted(load4(out, i, wide), weight, value4(coded, i, wide)), wide)

    @kernel(sections, U32, TURN, FLOAT, I64, FLOATS_REF, name=f"{name}.scatter_add")
    def scatter_add_to(
        coded: Any, indices: DeviceArray, turn: Any, weight: float, record: DeviceArray, target: Written
    ) -> None:
        out = floats_at(address_in(target), size_in(target))
        phase, stride, kept = turn
        size = kept if stride > 0 else indices.size - record[MISSING]
        last = size - 1
        for i in range(4 * THREADS * cuda.blockIdx.x + cuda.threadIdx.x, size, 4 * THREADS * cuda.gridDim.x):
            # Neighbouring threads take neighbouring values. A thread reads four before it writes one: places rise, so they
            # are distinct, except those that the last value repeats beyond the end, which are not written.
            j, k, m = min(i + THREADS, last), min(i + 2 * THREADS, last), min(i + 3 * THREADS, last)
            if stride > 0:
                a, b, c, d = phase + i * stride, phase + j * stride, phase + k * stride, phase + m * stride
            else:
                a, b, c, d = indices[i], indices[j], indices[k], indices[m]
            values = value(coded, i), value(coded, j), value(coded, k), value(coded, m)
            four = weighted((out[a], out[b], out[c], out[d]), weight, values)
            out[a] = four[0]
            if i + THREADS < size:
                out[b] = four[1]
            if i + 2 * THREADS < size:
                out[c] = four[2]
            if i + 3 * THREADS < size:
                out[d] = four[3]

    @kernel(F32, EXTRA, sections, I64, BOOL, name=f"{name}.encode")
    def encode(values: DeviceArray, extra: Any, coded: Written, record: Written, wide: bool) -> None:
        tile = cuda.shared.array(TILE, np.float32, alignment=16)
        rounding = rounding_in(extra)
        own, size = np.uint32(0), values.size - record[MISSING]
        for first in range(cuda.blockIdx.x * TILE, size, cuda.gridDim.x * TILE):
            count = min(TILE, size - first)
            i = 4 * cuda.threadIdx.x
            while i < count:
                own = largest_of(staged(tile, i, load4(values, first + i, wide), count), own)
                i += 4 * cuda.blockDim.x
            cuda.syncthreads()
            encode_tile(tile, count, first, rounding, coded, wide)
            cuda.syncthreads()
        raise_to(record, LARGEST, own)

    @kernel(SUM, EXTRA, sections, I64, BOOL, name=f"{name}.encode_sum")
    def encode_sum(addends: LastWritten, extra: Any, coded: Written, record: Written, wide: bool) -> None:
        tile = cuda.shared.array(TILE, np.float32, alignment=16)
        arrays, rounding = arrays_in(addends), rounding_in(extra)
        own, sums, t = np.uint32(0), arrays[3], cuda.threadIdx.x
        for first in range(cuda.blockIdx.x * TILE, sums.size, cuda.gridDim.x * TILE):
            count = min(TILE, sums.size - first)
            i = 4 * t
            while i < count:
                own = largest_of(staged(tile, i, sum4_of(arrays, first + i, wide), count), own)
                i += 4 * cuda.blockDim.x
            cuda.syncthreads()
            encode_tile(tile, count, first, rounding, coded, wide)
            cuda.syncthreads()
            i = 4 * t
            while i < count:
                four = weighted(vector_load(tile, i), np.float32(-1.0), value4(coded, first + i, wide))
                store4(sums, first + i, four, wide)
                i += 4 * cuda.blockDim.x
            cuda.syncthreads()  # before the next values are summed
        raise_to(record, LARGEST, own)

    @kernel(SUM, INT, INT, EXTRA, sections, I64, BOOL, name=f"{name}.encode_strided")
    def encode_strided(
        addends: LastWritten, stride: int, kept: int, extra: Any, coded: Written, record: Written, wide: bool
    ) -> None:
        tile = cuda.shared.array(strided_tile, np.float32, alignment=16)
        arrays, rounding, phase = arrays_in(addends), rounding_in(extra), addends[0][PHASE]
        own, sums, t = np.uint32(0), arrays[3], cuda.threadIdx.x
        span = strided_tile * stride
        for number in range(cuda.blockIdx.x, (sums.size + span - 1) // span, cuda.gridDim.x):
            first = number * strided_tile
            count = max(min(strided_tile, kept - first), 0)
            for i in range(number * span + 4 * t, min((number + 1) * span, sums.size), 4 * THREADS):
                four = sum4_at(arrays, i, wide)
                take(four, i, phase, stride, first, count, tile)
                own = largest_of(four, own)
            for i in range(count + t, (count + 7) & ~7, THREADS):
                tile[i] = np.float32(0.0)
            cuda.syncthreads()
            if count > 0:  # the same in all threads of the block
                encode_tile(tile, count, first, rounding, coded, wide)
                cuda.syncthreads()
            for i in range(t, count, THREADS):
                sums[phase + (first + i) * stride] = add(tile[i], mul(np.float32(-1.0), value(coded, first + i)))
            cuda.syncthreads()  # before the next values are taken
        raise_to(record, LARGEST, own)

    return Coding(decode, add_to, scatter_add_to, encode, encode_sum, encode_strided, strided_tile)


@device
def fp32_value(coded: Any, i: int) -> Any:
    return coded[0][i]


@device
def fp32_value4(coded: Any, i: int, wide: bool) -> Four:
    return load4(coded[0], i, wide)


@device
def float_of_fp16(half: Any) -> Any:
    pattern = np.uint32(half)
    key = pattern & np.uint32(0x7FFF)
    # As in kernels/values.py: the exponent is 112 too low, and the product is exact.
    value = mul(float_of(np.uint32(key << np.uint32(13))), np.float32(2.0**112))
    special = np.uint32(0x7F800000) if key >= np.uint32(0x7C00) else np.uint32(0)
    sign = (pattern & np.uint32(0x8000)) << np.uint32(16)
    return float_of(np.uint32(bits_of(value) | special | sign))


@device
def float_of_bf16(pattern: Any) -> Any:
    return float_of(np.uint32(np.uint32(pattern) << np.uint32(16)))


@device
def fp16_value(coded: Any, i: int) -> Any:
    return float_of_fp16(coded[0][i])


@device
def bf16_value(coded: Any, i: int) -> Any:
    return float_of_bf16(coded[0][i])


@device
def fp16_value4(coded: Any, i: int, wide: bool) -> Four:
    halves = load4(coded[0], i, wide)
    return float_of_fp16(halves[0]), float_of_fp16(halves[1]), float_of_fp16(halves[2]), float_of_fp16(halves[3])


@device
def bf16_value4(coded: Any, i: int, wide: bool) -> Four:
    halves = load4(coded[0], i, wide)
    return float_of_bf16(halves[0]), float_of_bf16(halves[1]), float_of_bf16(halves[2]), float_of_bf16(halves[3])


@device
def multiples(codes: Four, scale: float) -> Four:
    return (
        mul(np.float32(codes[0]), scale),
        mul(np.float32(codes[1]), scale),
        mul(np.float32(codes[2]), scale),
        mul(np.float32(codes[3]), scale),
    )


@device
def int8_value(coded: Any, i: int) -> Any:
    return mul(np.float32(coded[1][i]), float_of_bf16(coded[0][i // INT8_BLOCK]))


@device
def int8_value4(coded: Any, i: int, wide: bool) -> Four:
    return multiples(load4(coded[1], i, wide), float_of_bf16(coded[0][i // INT8_BLOCK]))


@device
def int4_value(coded: Any, i: int) -> Any:
    nibble = (np.int64(coded[1][i >> 1]) >> (4 * (i & 1))) & 15
    return mul(np.float32((nibble ^ 8) - 8), float_of_bf16(coded[0][i // INT4_BLOCK]))


@device
def int4_value4(coded: Any, i: int, wide: bool) -> Four:
    byte = i >> 1
    both = np.int64(coded[1][byte]) | (np.int64(coded[1][min(byte + 1, coded[1].size - 1)]) << 8)
    codes = (
        ((both & 15) ^ 8) - 8,
        (((both >> 4) & 15) ^ 8) - 8,
        (((both >> 8) & 15) ^ 8) - 8,
        ((both >> 12) ^ 8) - 8,
    )
    return multiples(codes, float_of_bf16(coded[0][i // INT4_BLOCK]))


@device
def fp16_code(value: float) -> Any:
    bits = bits_of(value)
    key = np.int64(bits & np.uint32(0x7FFFFFFF))
    if key >= 0x38800000:
        half = min((key - 0x38000000 + 0xFFF + ((key >> 13) & 1)) >> 13, 0x7BFF)
    else:
        half = np.int64(bits_of(add(float_of(np.uint32(key)), np.float32(0.5)))) - 0x3F000000
    return np.uint16(half | (np.int64(bits >> np.uint32(16)) & 0x8000))


@device
def bf16_code(value: float) -> Any:
    bits = bits_of(value)
    key = np.int64(bits & np.uint32(0x7FFFFFFF))
    half = min((key + 0x7FFF + ((key >> 16) & 1)) >> 16, 0x7F7F)
    return np.uint16(half | (np.int64(bits >> np.uint32(16)) & 0x8000))


@device
def fp32_code(value: float) -> Any:
    return value


def _copier(code: Any) -> Any:
    @device
    def encode_tile(tile: DeviceArray, count: int, first: int, extra: Any, coded: Any, wide: bool) -> None:
        i = 4 * cuda.threadIdx.x
        while i < count:
            four = vector_load(tile, i)
            store4(coded[0], first + i, (code(four[0]), code(four[1]), code(four[2]), code(four[3])), wide)
            i += 4 * cuda.blockDim.x

    return encode_tile


@device
def code_of(value: float, scale: float, limit: float, extra: Any, i: int) -> Any:
    """Return value / scale to nearest even, or floor(value / scale + u of word i), clamped to -limit..limit."""
    code = value / scale
    if extra[0]:
        code = np.float32(math.floor(add(np.float32(code), unit_of(extra[1], extra[2], i))))
    code = min(max(code, -limit), limit)
    # 1.5 * 2**23 has an ulp of 1: the sum is rounded to nearest even, and its low byte is the code.
    byte = np.int64(bits_of(add(np.float32(code), np.float32(12582912.0)))) & 0xFF
    return byte - ((byte & 0x80) << 1)


@device
def store_int8(codes: DeviceArray, i: int, four: Four, wide: bool) -> None:
    store4(codes, i, (np.int8(four[0]), np.int8(four[1]), np.int8(four[2]), np.int8(four[3])), wide)


@device
def store_int4(nibbles: DeviceArray, i: int, four: Four, wide: bool) -> None:
    """Store four codes in two bytes. Bytes beyond the end are dropped; a spare nibble is zero."""
    byte = i >> 1
    nibbles[byte] = np.uint8((four[0] & 15) | ((four[1] & 15) << 4))
    if byte + 1 < nibbles.size:
        nibbles[byte + 1] = np.uint8((four[2] & 15) | ((four[3] & 15) << 4))


def _scaler(block: int, code_max: float, scale_max: int, store: Any) -> tuple[Any, int]:
    """Return `encode_tile` of codes with a bf16 scale per `block` values, and `block`."""
    limit, blocks = np.float32(code_max), TILE // block

    @device
    def encode_tile(tile: DeviceArray, count: int, first: int, extra: Any, coded: Any, wide: bool) -> None:
        tops = cuda.shared.array(blocks, np.uint32)
        block_tops(tile, count, block, tops)
        i = 4 * cuda.threadIdx.x
        while i < count:
            top, word = tops[i // block], first + i
            exact = np.int64(bits_of(np.float32(float_of(top) / limit)))
            pattern = min((exact + 0xFFFF) >> 16, scale_max)
            if i % block == 0:
                coded[0][word // block] = pattern
            a, b, c, d = 0, 0, 0, 0
            if pattern != 0 and top < np.uint32(INFINITY_KEY):
                four, scale = vector_load(tile, i), float_of_bf16(pattern)
                a = code_of(four[0], scale, limit, extra, word)
                if i + 1 < count:
                    b = code_of(four[1], scale, limit, extra, word + 1)
                if i + 2 < count:
                    c = code_of(four[2], scale, limit, extra, word + 2)
                if i + 3 < count:
                    d = code_of(four[3], scale, limit, extra, word + 3)
            store(coded[1], word, (a, b, c, d), wide)
            i += 4 * cuda.blockDim.x

    return encode_tile, block


FP32 = coding("fp32", (F32,), fp32_value, fp32_value4, _copier(fp32_code))
FP16 = coding("fp16", (U16,), fp16_value, fp16_value4, _copier(fp16_code))
BF16 = coding("bf16", (U16,), bf16_value, bf16_value4, _copier(bf16_code))
INT8 = coding("int8", (U16, I8), int8_value, int8_value4, *_scaler(INT8_BLOCK, 127.0, INT8_SCALE_MAX, store_int8))
INT4 = coding("int4", (U16, U8), int4_value, int4_value4, *_scaler(INT4_BLOCK, 7.0, INT4_SCALE_MAX, store_int4))


@kernel(F32, I64, BOOL)
def find_largest(values: DeviceArray, largest: Written, wide: bool) -> None:
    own = np.uint32(0)
    for i in range(4 * cuda.grid(1), values.size, 4 * cuda.gridsize(1)):
        own = largest_of(load4(values, i, wide), own)
    raise_to(largest, 0, own)


def largest_key(queue: Queue, values: DeviceArray) -> int:
    """Return the largest key of values, float32. Waits for the device."""
    largest = queue.zeroed("largest", 1)
    queue.launch(find_largest, values.size, 4 * THREADS, values, largest, wide(values))
    return int(queue.read(largest)[0])


def encode_with(
    queue: Queue, coding: Coding, values: DeviceArray, extra: Any, coded: tuple[DeviceArray, ...], record: DeviceArray
) -> None:
    """Encode values. The last record[MISSING] of them are unused."""
    queue.launch(coding.encode, values.size, TILE, values, queue.rounding(extra), coded, record, wide(values, *coded))


def encode_sum_with(
    queue: Queue, coding: Coding, addends: Sum, extra: Any, coded: tuple[DeviceArray, ...], record: DeviceArray
) -> None:
    is_wide = wide_sum(addends) and wide(*coded)
    ref, rounding = queue.sum_ref(addends), queue.rounding(extra)
    queue.launch(coding.encode_sum, addends.sums.size, TILE, ref, rounding, coded, record, is_wide)


def encode_strided_with(
    queue: Queue, coding: Coding, addends: Sum, phase: int, stride: int, kept: int, extra: Any,
    coded: tuple[DeviceArray, ...], record: DeviceArray,
) -> None:  # fmt: skip
    is_wide = wide_sum(addends) and wide(*coded)
    queue.launch(
        coding.encode_strided, addends.sums.size, coding.strided_tile * stride,
        queue.sum_ref(addends, phase), stride, kept, queue.rounding(extra), coded, record, is_wide,
    )  # fmt: skip


def decode_with(queue: Queue, coding: Coding, coded: tuple[DeviceArray, ...], out: DeviceArray) -> None:
    queue.launch(coding.decode, out.size, 4 * THREADS, coded, out, wide(*coded, out))


def add_with(queue: Queue, coding: Coding, coded: tuple[DeviceArray, ...], weight: Any, out: DeviceArray) -> None:
    queue.launch(coding.add, out.size, 4 * THREADS, coded, np.float32(weight), out, wide(*coded, out))


def scatter_add_with(
    queue: Queue, coding: Coding, coded: tuple[DeviceArray, ...], indices: DeviceArray, weight: Any, out: DeviceArray,
    record: DeviceArray,
) -> None:  # fmt: skip
    """Set out[indices] += weight * decoded values. The last record[MISSING] indices are unused."""
    queue.launch(
        coding.scatter_add, indices.size, 4 * THREADS,
        coded, indices, NO_TURN, np.float32(weight), record, queue.ref(out),
    )  # fmt: skip


def add_strided_with(
    queue: Queue, coding: Coding, coded: tuple[DeviceArray, ...], phase: int, stride: int, kept: int, weight: Any,
    out: DeviceArray,
) -> None:  # fmt: skip
    """Set out[phase + i * stride] += weight * decoded value i, for i < kept."""
    nothing = queue.scratch("nothing", 0, np.uint32)
    queue.launch(
        coding.scatter_add, kept, 4 * THREADS,
        coded, nothing, (phase, stride, kept), np.float32(weight), queue.complete, queue.ref(out),
    )  # fmt: skip
