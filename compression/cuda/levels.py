"""The codings of kernels/levels.py on the device. The threads of a block code all blocks of values of a tile at once.

Means are sums of integers, so threads may add in any order. A thread takes eight neighbours: a byte of a bit plane.
"""

from typing import Any

from narrows.compression.cuda.jit import (
    F32,
    THREADS,
    U8,
    U16,
    DeviceArray,
    Four,
    add,
    bits_of,
    cuda,
    device,
    float_of,
    load4,
    mul,
    np,
    vector_load,
)
from narrows.compression.cuda.sums import key_of
from narrows.compression.cuda.values import TILE, block_tops, coding
from narrows.compression.kernels.levels import LEVEL_MAX, MINMAX_BLOCK, SIGN_BLOCK, TWO_BIT_BLOCK
from narrows.compression.kernels.values import INFINITY_KEY

SIGNS, TWO_BITS = TILE // SIGN_BLOCK, TILE // TWO_BIT_BLOCK  # blocks of values in a tile
ROUNDS = 3  # sums of a block of two bits: of all, and of those above each of two thresholds
TWO_BIT_SUMS = (2 * ROUNDS - 1) * TWO_BITS
SIGN_BIT, KEY_BITS = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)


@device
def exponent_of(top: Any) -> Any:
    """Return the biased exponent of the fixed point of a block, uint32, from its largest key."""
    return np.uint32(max(top >> np.uint32(23), np.uint32(1)))


@device
def fixed_of(value: float, exponent: Any, spare: Any) -> Any:
    """Return _fixed of kernels/levels.py."""
    key = key_of(value)
    own = np.uint32(key >> np.uint32(23))
    mantissa = np.uint32(key & np.uint32(0x7FFFFF) | (np.uint32(0x800000) if own > np.uint32(0) else np.uint32(0)))
    shift = np.uint32(exponent - np.uint32(max(own, np.uint32(1))) + spare)
    return np.uint32(mantissa >> np.uint32(min(shift, np.uint32(31))))


@device
def float_of_fixed(fixed: int, exponent: int, spare: int) -> Any:
    """Return _float_of_fixed of kernels/levels.py."""
    power = exponent - 150 + spare
    pattern = (power + 127) << 23 if power >= -126 else 1 << max(power + 149, 0)
    return mul(np.float32(fixed), float_of(np.uint32(pattern)))


@device
def sums4(four: Four, exponent: Any, spare: Any, least: Any) -> tuple[Any, Any]:
    count, total = np.uint32(0), np.uint32(0)
    for j in range(4):
        fixed = fixed_of(four[j], exponent, spare)
        if fixed >= least:
            count, total = np.uint32(count + np.uint32(1)), np.uint32(total + fixed)
    return count, total


@device
def sums8(tile: DeviceArray, i: int, exponent: Any, spare: Any, least: Any) -> tuple[Any, Any]:
    """Return number and sum of those of eight values that are at least `least`, in fixed point."""
    count, total = sums4(vector_load(tile, i), exponent, spare, least)
    more, rest = sums4(vector_load(tile, i + 4), exponent, spare, least)
    return np.uint32(count + more), np.uint32(total + rest)


@device
def bits4(four: Four, mask: Any, least: Any) -> Any:
    a, b = np.uint32((bits_of(four[0]) & mask) >= least), np.uint32((bits_of(four[1]) & mask) >= least)
    c, d = np.uint32((bits_of(four[2]) & mask) >= least), np.uint32((bits_of(four[3]) & mask) >= least)
    return np.uint32(a | b << np.uint32(1) | c << np.uint32(2) | d << np.uint32(3))


@device
def bits8(tile: DeviceArray, i: int, mask: Any, least: Any) -> Any:
    """Return a byte of a bit plane: bit j is set if the bits in `mask` of value i + j are at least `least`, not zero."""
    low, high = bits4(vector_load(tile, i), mask, least), bits4(vector_load(tile, i + 4), mask, least)
    return np.uint32(low | high << np.uint32(4))


@device
def sign_codes(tile: DeviceArray, count: int, first: int, extra: Any, coded: Any, wide: bool) -> None:
    tops = cuda.shared.array(SIGNS, np.uint32)
    totals = cuda.shared.array(SIGNS, np.uint32)
    for at in range(cuda.threadIdx.x, SIGNS, THREADS):
        totals[at] = 0
    block_tops(tile, count, SIGN_BLOCK, tops)
    place = 8 * cuda.threadIdx.x
    while place < count:
        at = place // SIGN_BLOCK
        _, total = sums8(tile, place, exponent_of(tops[at]), np.uint32(0), np.uint32(0))
        cuda.atomic.add(totals, at, total)  # 256 numbers of 24 bits fit
        coded[1][(first + place) >> 3] = bits8(tile, place, SIGN_BIT, SIGN_BIT)
        place += 8 * cuda.blockDim.x
    cuda.syncthreads()
    for at in range(cuda.threadIdx.x, (count + SIGN_BLOCK - 1) // SIGN_BLOCK, THREADS):
        size, exponent = min(SIGN_BLOCK, count - at * SIGN_BLOCK), np.int64(exponent_of(tops[at]))
        bits = np.int64(bits_of(float_of_fixed(np.int64(totals[at] // np.uint32(size)), exponent, 0)))
        pattern = min((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7F7F) if tops[at] < INFINITY_KEY else 0
        coded[0][first // SIGN_BLOCK + at] = pattern


@device
def level_pattern(fixed: int, exponent: int) -> Any:
    bits = np.int64(bits_of(float_of_fixed(fixed, exponent, 1)))
    return min((bits + 0x3FFFF + ((bits >> 19) & 1)) >> 19, LEVEL_MAX)


@device
def divided(sums: DeviceArray, at: int, count: int, rounds: int) -> tuple[Any, Any, Any]:
    """Return (low level, high level, next threshold), uint32, of block `at` of a tile of `count` values, after `rounds`."""
    total, size = sums[at], np.uint32(min(TWO_BIT_BLOCK, count - at * TWO_BIT_BLOCK))
    low = np.uint32(total // size)
    high, threshold = low, low
    for turn in range(1, rounds):
        both = (2 * turn - 1) * TWO_BITS + at
        above, above_total = sums[both], sums[both + TWO_BITS]
        if above > np.uint32(0):  # else all |x| are equal, and a second round finds the same
            low = np.uint32(np.uint32(total - above_total) // np.uint32(size - above))
            high = np.uint32(above_total // above)
            threshold = np.uint32((low + high) >> np.uint32(1))
    return low, high, threshold


@device
def two_bit_codes(tile: DeviceArray, count: int, first: int, extra: Any, coded: Any, wide: bool) -> None:
    tops = cuda.shared.array(TWO_BITS, np.uint32)
    # For each block: the sum of all, then count and sum of those above each threshold. 512 numbers of 23 bits fit.
    sums = cuda.shared.array(TWO_BIT_SUMS, np.uint32)
    for at in range(cuda.threadIdx.x, TWO_BIT_SUMS, THREADS):
        sums[at] = 0
    block_tops(tile, count, TWO_BIT_BLOCK, tops)
    for turn in range(ROUNDS):
        place = 8 * cuda.threadIdx.x
        while place < count:
            at = place // TWO_BIT_BLOCK
            least = np.uint32(0)
            if turn > 0:
                least = np.uint32(divided(sums, at, count, turn)[2] + np.uint32(1))
            above, total = sums8(tile, place, exponent_of(tops[at]), np.uint32(1), least)
            both = (2 * turn - 1) * TWO_BITS + at
            if turn > 0:
                cuda.atomic.add(sums, both, above)
            cuda.atomic.add(sums, both + TWO_BITS, total)
            place += 8 * cuda.blockDim.x
        cuda.syncthreads()
    place = 8 * cuda.threadIdx.x
    while place < count:
        at = place // TWO_BIT_BLOCK
        low, high, _ = divided(sums, at, count, ROUNDS)
        exponent = np.int64(exponent_of(tops[at]))
        both = level_pattern(np.int64(low), exponent) | (level_pattern(np.int64(high), exponent) << 12)
        if tops[at] >= INFINITY_KEY:
            both = 0
        if place == at * TWO_BIT_BLOCK:
            level = 3 * ((first + place) // TWO_BIT_BLOCK)
            coded[0][level] = both & 255
            coded[0][level + 1] = (both >> 8) & 255
            coded[0][level + 2] = both >> 16
        half_low = mul(float_of(np.uint32((both & 0xFFF) << 19)), np.float32(0.5))
        half_high = mul(float_of(np.uint32((both >> 12) << 19)), np.float32(0.5))
        above = np.uint32(bits_of(add(half_low, half_high)) + np.uint32(1))
        coded[1][(first + place) >> 3] = bits8(tile, place, SIGN_BIT, SIGN_BIT)
        coded[2][(first + place) >> 3] = bits8(tile, place, KEY_BITS, above)
        place += 8 * cuda.blockDim.x


@device
def minmax_codes(tile: DeviceArray, count: int, first: int, extra: Any, coded: Any, wide: bool) -> None:
    # Floats as integers of the same order. -0.0 and 0.0 are both 0, and the CPU's kernel writes 0.0 for both too.
    extremes = cuda.shared.array(2, np.int32)
    half = np.float32(0.5)
    if cuda.threadIdx.x == 0:
        extremes[0] = 0x7FFFFFFF
        extremes[1] = -0x7FFFFFFF
    cuda.syncthreads()
    least, most = 0x7FFFFFFF, -0x7FFFFFFF
    for i in range(cuda.threadIdx.x, count, THREADS):
        key = np.int64(key_of(tile[i]))
        order = -key if bits_of(tile[i]) >> np.uint32(31) else key
        least, most = min(least, order), max(most, order)
    cuda.atomic.min(extremes, 0, np.int32(least))
    cuda.atomic.max(extremes, 1, np.int32(most))
    cuda.syncthreads()
    lowest, highest = np.int64(extremes[0]), np.int64(extremes[1])
    low, high, step = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    if max(-lowest, highest) < INFINITY_KEY:
        low = float_of(np.uint32(-lowest | 0x80000000 if lowest < 0 else lowest))
        high = float_of(np.uint32(-highest | 0x80000000 if highest < 0 else highest))
        step = np.float32(add(mul(high, half), -mul(low, half)) / np.float32(127.5))
        while key_of(add(low, mul(np.float32(255.0), step))) >= np.uint32(INFINITY_KEY):
            step = float_of(np.uint32(bits_of(step) - np.uint32(1)))
    if cuda.threadIdx.x == 0:
        coded[0][2 * (first // MINMAX_BLOCK)] = low
        coded[0][2 * (first // MINMAX_BLOCK) + 1] = step
    half_low, half_step = mul(low, half), mul(step, half)
    for i in range(cuda.threadIdx.x, count, THREADS):
        byte = 0
        if half_step != np.float32(0.0):
            code = np.float32(add(mul(tile[i], half), -half_low) / half_step)
            code = min(max(code, np.float32(0.0)), np.float32(255.0))
            byte = np.int64(bits_of(add(np.float32(code), np.float32(12582912.0)))) & 0xFF
        coded[1][first + i] = byte


@device
def plane_bits(plane: DeviceArray, i: int) -> Any:
    """Return bits i to i + 3 of a plane, i a multiple of 4, as the lowest four bits."""
    return np.int64(plane[i >> 3]) >> (i & 4)


@device
def level_of(pattern: int, bits: int, place: int) -> Any:
    """Return the float32 with this pattern, and bit `place` of `bits` as its sign."""
    return float_of(np.uint32(pattern | (((bits >> place) & 1) << 31)))


@device
def sign_value(coded: Any, i: int) -> Any:
    return level_of(np.int64(coded[0][i // SIGN_BLOCK]) << 16, np.int64(coded[1][i >> 3]), i & 7)


@device
def sign_value4(coded: Any, i: int, wide: bool) -> Four:
    level = np.int64(coded[0][i // SIGN_BLOCK]) << 16
    signs = plane_bits(coded[1], i)
    return level_of(level, signs, 0), level_of(level, signs, 1), level_of(level, signs, 2), level_of(level, signs, 3)


@device
def two_levels(levels: DeviceArray, i: int) -> tuple[Any, Any]:
    """Return the low and the high level of value i, as patterns of float32."""
    place = 3 * (i // TWO_BIT_BLOCK)
    both = np.int64(levels[place]) | (np.int64(levels[place + 1]) << 8) | (np.int64(levels[place + 2]) << 16)
    return (both & 0xFFF) << 19, (both >> 12) << 19


@device
def two_bit_value(coded: Any, i: int) -> Any:
    low, high = two_levels(coded[0], i)
    return level_of(high if (coded[2][i >> 3] >> (i & 7)) & 1 else low, np.int64(coded[1][i >> 3]), i & 7)


@device
def two_bit_value4(coded: Any, i: int, wide: bool) -> Four:
    low, high = two_levels(coded[0], i)
    signs, highs = plane_bits(coded[1], i), plane_bits(coded[2], i)
    return (
        level_of(high if highs & 1 else low, signs, 0),
        level_of(high if highs & 2 else low, signs, 1),
        level_of(high if highs & 4 else low, signs, 2),
        level_of(high if highs & 8 else low, signs, 3),
    )


@device
def minmax_value(coded: Any, i: int) -> Any:
    place = 2 * (i // MINMAX_BLOCK)
    return add(coded[0][place], mul(np.float32(coded[1][i]), coded[0][place + 1]))


@device
def minmax_value4(coded: Any, i: int, wide: bool) -> Four:
    low, step = coded[0][2 * (i // MINMAX_BLOCK)], coded[0][2 * (i // MINMAX_BLOCK) + 1]
    codes = load4(coded[1], i, wide)
    return (
        add(low, mul(np.float32(codes[0]), step)),
        add(low, mul(np.float32(codes[1]), step)),
        add(low, mul(np.float32(codes[2]), step)),
        add(low, mul(np.float32(codes[3]), step)),
    )


SIGN = coding("sign", (U16, U8), sign_value, sign_value4, sign_codes, SIGN_BLOCK)
TWO_BIT = coding("2bit", (U8, U8, U8), two_bit_value, two_bit_value4, two_bit_codes, TWO_BIT_BLOCK)
UINT8_MINMAX = coding("uint8minmax", (F32, U8), minmax_value, minmax_value4, minmax_codes, MINMAX_BLOCK)
