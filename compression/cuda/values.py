"""The value codings on the device: the kernels of values.py, bit for bit (but for the payload bits of NaN results).

A coding is one device function, value4: four decoded values out of its arrays. `decoders` makes of each the three ways
to use it, fused: what is decoded never visits memory. Every thread takes four neighbours at a time.
"""

import math
from typing import Any, NamedTuple

from narrows.compression.cuda.jit import (
    THREADS,
    DeviceArray,
    Four,
    Written,
    add,
    bits_of,
    cuda,
    device,
    float_of,
    kernel,
    load4,
    mul,
    np,
    raise_largest,
    store4,
    wide,
)
from narrows.compression.cuda.queue import Fact, Queue
from narrows.compression.cuda.random import unit_of
from narrows.compression.kernels.values import INFINITY_KEY, INT4_BLOCK, INT4_SCALE_MAX, INT8_BLOCK, INT8_SCALE_MAX

LANES = 8  # threads that share a block of values and its scale: neighbours in memory are neighbours in time


class Decoders(NamedTuple):
    """Kernels: decode(coded, out, wide), add(coded, weight, out, wide), scatter_add(coded, indices, weight, out, wide)."""

    decode: Any
    add: Any
    scatter_add: Any


@device
def key_of(value: float) -> Any:
    return bits_of(value) & np.uint32(0x7FFFFFFF)


@device
def largest_of(four: Four, largest: Any) -> Any:
    top = max(max(key_of(four[0]), key_of(four[1])), max(key_of(four[2]), key_of(four[3])))
    return np.uint32(max(largest, top))


@device
def weighted(old: Four, weight: float, four: Four) -> Four:
    """old + weight * value, product and sum each rounded."""
    return (
        add(old[0], mul(weight, four[0])),
        add(old[1], mul(weight, four[1])),
        add(old[2], mul(weight, four[2])),
        add(old[3], mul(weight, four[3])),
    )


def decoders(value4: Any) -> Decoders:
    """The kernels of one coding; `coded` are its arrays, as the CPU's kernels take them."""

    @kernel
    def decode(coded: Any, out: Written, wide: bool) -> None:
        for i in range(4 * cuda.grid(1), out.size, 4 * cuda.gridsize(1)):
            store4(out, i, value4(coded, i, wide), wide)

    @kernel
    def add_to(coded: Any, weight: float, out: Written, wide: bool) -> None:
        for i in range(4 * cuda.grid(1), out.size, 4 * cuda.gridsize(1)):
            store4(out, i, weighted(load4(out, i, wide), weight, value4(coded, i, wide)), wide)

    @kernel
    def scatter_add_to(coded: Any, indices: DeviceArray, weight: float, out: Written, wide: bool) -> None:
        for i in range(4 * cuda.grid(1), indices.size, 4 * cuda.gridsize(1)):
            # Indices rise, so no two are equal but those that load4 repeats beyond the end, which are not written.
            p = load4(indices, i, wide)
            four = weighted((out[p[0]], out[p[1]], out[p[2]], out[p[3]]), weight, value4(coded, i, wide))
            for j in range(min(4, indices.size - i)):
                out[p[j]] = four[j]

    return Decoders(decode, add_to, scatter_add_to)


@device
def fp32_value4(coded: Any, i: int, wide: bool) -> Four:
    return load4(coded[0], i, wide)


@device
def fp16_value(half: Any) -> Any:
    pattern = np.uint32(half)
    key = pattern & np.uint32(0x7FFF)
    # See values.py: the exponent is 112 too low, and the product is exact.
    value = mul(float_of(np.uint32(key << np.uint32(13))), np.float32(2.0**112))
    special = np.uint32(0x7F800000) if key >= np.uint32(0x7C00) else np.uint32(0)
    sign = (pattern & np.uint32(0x8000)) << np.uint32(16)
    return float_of(np.uint32(bits_of(value) | special | sign))


@device
def bf16_value(pattern: Any) -> Any:
    return float_of(np.uint32(np.uint32(pattern) << np.uint32(16)))


@device
def fp16_value4(coded: Any, i: int, wide: bool) -> Four:
    halves = load4(coded[0], i, wide)
    return fp16_value(halves[0]), fp16_value(halves[1]), fp16_value(halves[2]), fp16_value(halves[3])


@device
def bf16_value4(coded: Any, i: int, wide: bool) -> Four:
    halves = load4(coded[0], i, wide)
    return bf16_value(halves[0]), bf16_value(halves[1]), bf16_value(halves[2]), bf16_value(halves[3])


@device
def multiples(codes: Four, scale: float) -> Four:
    return (
        mul(np.float32(codes[0]), scale),
        mul(np.float32(codes[1]), scale),
        mul(np.float32(codes[2]), scale),
        mul(np.float32(codes[3]), scale),
    )


@device
def int8_value4(coded: Any, i: int, wide: bool) -> Four:
    return multiples(load4(coded[1], i, wide), bf16_value(coded[0][i // INT8_BLOCK]))


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
    return multiples(codes, bf16_value(coded[0][i // INT4_BLOCK]))


FP32, FP16, BF16, INT8, INT4 = (
    decoders(value4) for value4 in (fp32_value4, fp16_value4, bf16_value4, int8_value4, int4_value4)
)


@kernel
def find_largest(values: DeviceArray, largest: Written, wide: bool) -> None:
    own = np.uint32(0)
    for i in range(4 * cuda.grid(1), values.size, 4 * cuda.gridsize(1)):
        own = largest_of(load4(values, i, wide), own)
    raise_largest(largest, own)


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


def _half_encoder(code: Any) -> Any:
    @kernel
    def encode(values: DeviceArray, halves: Written, largest: Written, wide: bool) -> None:
        own = np.uint32(0)
        for i in range(4 * cuda.grid(1), values.size, 4 * cuda.gridsize(1)):
            four = load4(values, i, wide)
            own = largest_of(four, own)
            store4(halves, i, (code(four[0]), code(four[1]), code(four[2]), code(four[3])), wide)
        raise_largest(largest, own)

    return encode


fp16_codes, bf16_codes = _half_encoder(fp16_code), _half_encoder(bf16_code)


@device
def code_of(value: float, scale: float, limit: float, stochastic: bool, seed: int, step: int, i: int) -> Any:
    """value / scale to nearest even, or floor(value / scale + u of word i); within -limit..limit."""
    code = value / scale
    if stochastic:
        code = np.float32(math.floor(add(np.float32(code), unit_of(seed, step, i))))
    code = min(max(code, -limit), limit)
    # 1.5 * 2**23 has an ulp of 1: the sum is rounded to nearest even, and its low byte is the code.
    byte = np.int64(bits_of(add(np.float32(code), np.float32(12582912.0)))) & 0xFF
    return byte - ((byte & 0x80) << 1)


@device
def store_int8(codes: DeviceArray, i: int, four: Four, wide: bool) -> None:
    store4(codes, i, (np.int8(four[0]), np.int8(four[1]), np.int8(four[2]), np.int8(four[3])), wide)


@device
def store_int4(nibbles: DeviceArray, i: int, four: Four, wide: bool) -> None:
    """Codes of values beyond the end are dropped; a nibble that is none is zero."""
    byte = i >> 1
    nibbles[byte] = np.uint8((four[0] & 15) | ((four[1] & 15) << 4))
    if byte + 1 < nibbles.size:
        nibbles[byte + 1] = np.uint8((four[2] & 15) | ((four[3] & 15) << 4))


def _scaled_encoder(block: int, code_max: float, scale_max: int, store: Any) -> Any:
    """The encoder of codes with a bf16 scale per `block` values: LANES threads have one in hand."""
    limit = np.float32(code_max)
    in_hand = THREADS // LANES

    @kernel
    def encode(
        values: DeviceArray,
        stochastic: bool,
        seed: int,
        step: int,
        scales: Written,
        codes: Written,
        largest: Written,
        wide: bool,
    ) -> None:
        tops = cuda.shared.array(in_hand, np.uint32)
        local, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        own = np.uint32(0)
        for tile in range(cuda.blockIdx.x, (scales.size + in_hand - 1) // in_hand, cuda.gridDim.x):
            number = tile * in_hand + local
            begin = number * block + 4 * lane
            end = min((number + 1) * block, values.size)
            if lane == 0:
                tops[local] = 0
            cuda.syncthreads()
            top = np.uint32(0)
            for i in range(begin, end, 4 * LANES):
                top = largest_of(load4(values, i, wide), top)
            cuda.atomic.max(tops, local, top)
            cuda.syncthreads()
            top = tops[local]
            own = np.uint32(max(own, top))
            cuda.syncthreads()  # before tops is zeroed for the next tile
            exact = np.int64(bits_of(np.float32(float_of(top) / limit)))
            pattern = min((exact + 0xFFFF) >> 16, scale_max)
            if lane == 0 and number < scales.size:
                scales[number] = pattern
            scale = bf16_value(pattern)
            zeros = pattern == 0 or top >= np.uint32(INFINITY_KEY)
            for i in range(begin, end, 4 * LANES):
                a, b, c, d = 0, 0, 0, 0
                if not zeros:
                    four = load4(values, i, wide)
                    a = code_of(four[0], scale, limit, stochastic, seed, step, i)
                    if i + 1 < end:
                        b = code_of(four[1], scale, limit, stochastic, seed, step, i + 1)
                    if i + 2 < end:
                        c = code_of(four[2], scale, limit, stochastic, seed, step, i + 2)
                    if i + 3 < end:
                        d = code_of(four[3], scale, limit, stochastic, seed, step, i + 3)
                store(codes, i, (a, b, c, d), wide)
        raise_largest(largest, own)

    return encode


int8_codes = _scaled_encoder(INT8_BLOCK, 127.0, INT8_SCALE_MAX, store_int8)
int4_codes = _scaled_encoder(INT4_BLOCK, 7.0, INT4_SCALE_MAX, store_int4)


def encode_with(queue: Queue, launch: Any, values: DeviceArray, *rest: Any) -> Fact:
    """Launches an encoder, whose last output takes four codes at a time; the largest key it saw."""
    largest, (fact,) = queue.facts(1, np.uint32)
    arrays = values, *rest[-1:]
    queue.launch(launch, values.size, 4 * THREADS, values, *rest, largest, wide(*arrays))
    return fact


def decode_with(queue: Queue, launch: Any, coded: tuple[DeviceArray, ...], out: DeviceArray) -> None:
    queue.launch(launch, out.size, 4 * THREADS, coded, out, wide(*coded, out))


def add_with(queue: Queue, launch: Any, coded: tuple[DeviceArray, ...], weight: Any, out: DeviceArray) -> None:
    queue.launch(launch, out.size, 4 * THREADS, coded, np.float32(weight), out, wide(*coded, out))


def scatter_add_with(
    queue: Queue, launch: Any, coded: tuple[DeviceArray, ...], indices: DeviceArray, weight: Any, out: DeviceArray
) -> None:
    queue.launch(launch, indices.size, 4 * THREADS, coded, indices, np.float32(weight), out, wide(*coded, indices))


def largest_key(queue: Queue, values: DeviceArray) -> Fact:
    return encode_with(queue, find_largest, values)


def encode_fp16(queue: Queue, values: DeviceArray, halves: DeviceArray) -> Fact:
    return encode_with(queue, fp16_codes, values, halves)


def decode_fp16(queue: Queue, halves: DeviceArray, out: DeviceArray) -> None:
    decode_with(queue, FP16.decode, (halves,), out)


def encode_bf16(queue: Queue, values: DeviceArray, halves: DeviceArray) -> Fact:
    return encode_with(queue, bf16_codes, values, halves)


def decode_bf16(queue: Queue, halves: DeviceArray, out: DeviceArray) -> None:
    decode_with(queue, BF16.decode, (halves,), out)


def encode_int8(
    queue: Queue,
    values: DeviceArray,
    stochastic: bool,
    key_low: int,
    key_high: int,
    words: DeviceArray,
    scales: DeviceArray,
    codes: DeviceArray,
) -> Fact:
    """words: not used here; each thread draws its own."""
    return encode_with(queue, int8_codes, values, stochastic, key_low, key_high, scales, codes)


def decode_int8(queue: Queue, scales: DeviceArray, codes: DeviceArray, out: DeviceArray) -> None:
    decode_with(queue, INT8.decode, (scales, codes), out)


def encode_int4(
    queue: Queue,
    values: DeviceArray,
    stochastic: bool,
    key_low: int,
    key_high: int,
    words: DeviceArray,
    scales: DeviceArray,
    nibbles: DeviceArray,
) -> Fact:
    """words: not used here; each thread draws its own."""
    return encode_with(queue, int4_codes, values, stochastic, key_low, key_high, scales, nibbles)


def decode_int4(queue: Queue, scales: DeviceArray, nibbles: DeviceArray, out: DeviceArray) -> None:
    decode_with(queue, INT4.decode, (scales, nibbles), out)


def add_fp32(queue: Queue, values: DeviceArray, weight: Any, out: DeviceArray) -> None:
    add_with(queue, FP32.add, (values,), weight, out)


def scatter_add_fp32(queue: Queue, values: DeviceArray, indices: DeviceArray, weight: Any, out: DeviceArray) -> None:
    scatter_add_with(queue, FP32.scatter_add, (values,), indices, weight, out)
