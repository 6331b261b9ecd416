"""The codings of kernels/levels.py on the device. A block of threads codes one block of values at a time.

Means are sums of integers, so threads may add in any order. Each thread writes whole bytes of a bit plane.
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
    block_scan,
    cuda,
    device,
    float_of,
    load4,
    mul,
    np,
)
from narrows.compression.cuda.sums import key_of
from narrows.compression.cuda.values import coding
from narrows.compression.kernels.levels import LEVEL_MAX, MINMAX_BLOCK, SIGN_BLOCK, TWO_BIT_BLOCK
from narrows.compression.kernels.values import INFINITY_KEY

TILE = 2048  # values that a block of threads codes: whole blocks of each coding
COUNT_SHIFT = 40  # one uint64 holds a count of up to 512 values and, below this bit, the sum of as many 24-bit numbers


@device
def block_top(values: DeviceArray, begin: int, end: int) -> Any:
    """Return the largest key of values[begin:end]. Each thread of the block calls it."""
    top = cuda.shared.array(1, np.uint32)
    if cuda.threadIdx.x == 0:
        top[0] = 0
    cuda.syncthreads()
    own = np.uint32(0)
    for i in range(begin + cuda.threadIdx.x, end, THREADS):
        own = np.uint32(max(own, key_of(values[i])))
    cuda.atomic.max(top, 0, own)
    cuda.syncthreads()
    found = top[0]
    cuda.syncthreads()  # before the next call zeroes it
    return np.int64(found)


@device
def fixed_of(value: float, exponent: int, spare: int) -> Any:
    """Return _fixed of kernels/levels.py."""
    key = np.int64(key_of(value))
    own = key >> 23
    mantissa = (key & 0x7FFFFF) | (0x800000 if own > 0 else 0)
    return mantissa >> min(exponent - max(own, 1) + spare, 31)


@device
def float_of_fixed(fixed: int, exponent: int, spare: int) -> Any:
    """Return _float_of_fixed of kernels/levels.py."""
    power = exponent - 150 + spare
    pattern = (power + 127) << 23 if power >= -126 else 1 << max(power + 149, 0)
    return mul(np.float32(fixed), float_of(np.uint32(pattern)))


@device
def pack(values: DeviceArray, begin: int, end: int, key: int, signs: bool, plane: DeviceArray) -> None:
    """Do pack_above on values[begin:end], begin a multiple of 8, into their bits of plane."""
    for byte in range(begin // 8 + cuda.threadIdx.x, (end + 7) // 8, THREADS):
        bits = 0
        for i in range(8 * byte, min(8 * byte + 8, end)):
            pattern = bits_of(values[i])
            hit = pattern >> np.uint32(31) if signs else np.uint32(np.int64(pattern & np.uint32(0x7FFFFFFF)) > key)
            bits |= np.int64(hit) << (i & 7)
        plane[byte] = bits


@device
def sign_codes(values: DeviceArray, size: int, number: int, extra: Any, coded: Any, wide: bool) -> Any:
    own_top = np.uint32(0)
    for begin in range(number * TILE, min((number + 1) * TILE, size), SIGN_BLOCK):
        end = min(begin + SIGN_BLOCK, size)
        top = block_top(values, begin, end)
        own_top = np.uint32(max(own_top, np.uint32(top)))
        exponent = max(top >> 23, 1)
        own = 0
        for i in range(begin + cuda.threadIdx.x, end, THREADS):
            own += fixed_of(values[i], exponent, 0)
        _, total = block_scan(np.uint64(own))
        bits = np.int64(bits_of(float_of_fixed(np.int64(total) // (end - begin), exponent, 0)))
        if cuda.threadIdx.x == 0:
            pattern = min((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7F7F) if top < INFINITY_KEY else 0
            coded[0][begin // SIGN_BLOCK] = pattern
        pack(values, begin, end, 0, True, coded[1])
    return own_top


@device
def level_pattern(fixed: int, exponent: int) -> Any:
    bits = np.int64(bits_of(float_of_fixed(fixed, exponent, 1)))
    return min((bits + 0x3FFFF + ((bits >> 19) & 1)) >> 19, LEVEL_MAX)


@device
def two_bit_codes(values: DeviceArray, size: int, number: int, extra: Any, coded: Any, wide: bool) -> Any:
    own_top = np.uint32(0)
    for begin in range(number * TILE, min((number + 1) * TILE, size), TWO_BIT_BLOCK):
        end = min(begin + TWO_BIT_BLOCK, size)
        count = end - begin
        top = block_top(values, begin, end)
        own_top = np.uint32(max(own_top, np.uint32(top)))
        exponent = max(top >> 23, 1)
        own = 0
        for i in range(begin + cuda.threadIdx.x, end, THREADS):
            own += fixed_of(values[i], exponent, 1)
        _, scanned = block_scan(np.uint64(own))
        total = np.int64(scanned)
        low = total // count
        high = low
        threshold = low
        for _ in range(2):
            own = 0
            for i in range(begin + cuda.threadIdx.x, end, THREADS):
                fixed = fixed_of(values[i], exponent, 1)
                if fixed > threshold:
                    own += fixed + (1 << COUNT_SHIFT)
            _, scanned = block_scan(np.uint64(own))
            above = np.int64(scanned >> np.uint64(COUNT_SHIFT))
            above_total = np.int64(scanned) - (above << COUNT_SHIFT)
            if above > 0:  # else all |x| are equal, and a second round finds the same
                low = (total - above_total) // (count - above)
                high = above_total // above
                threshold = (low + high) // 2
        both = level_pattern(low, exponent) | (level_pattern(high, exponent) << 12)
        if top >= INFINITY_KEY:
            both = 0
        if cuda.threadIdx.x == 0:
            place = 3 * (begin // TWO_BIT_BLOCK)
            coded[0][place] = both & 255
            coded[0][place + 1] = (both >> 8) & 255
            coded[0][place + 2] = both >> 16
        half_low = mul(float_of(np.uint32((both & 0xFFF) << 19)), np.float32(0.5))
        half_high = mul(float_of(np.uint32((both >> 12) << 19)), np.float32(0.5))
        pack(values, begin, end, 0, True, coded[1])
        pack(values, begin, end, np.int64(bits_of(add(half_low, half_high))), False, coded[2])
    return own_top


@device
def minmax_codes(values: DeviceArray, size: int, number: int, extra: Any, coded: Any, wide: bool) -> Any:
    own_top = np.uint32(0)
    # Floats as integers of the same order. -0.0 and 0.0 are both 0, and the CPU's kernel writes 0.0 for both too.
    extremes = cuda.shared.array(2, np.int64)
    half = np.float32(0.5)
    for begin in range(number * TILE, min((number + 1) * TILE, size), MINMAX_BLOCK):
        end = min(begin + MINMAX_BLOCK, size)
        top = block_top(values, begin, end)
        own_top = np.uint32(max(own_top, np.uint32(top)))
        if cuda.threadIdx.x == 0:
            extremes[0] = 1 << 32
            extremes[1] = -(1 << 32)
        cuda.syncthreads()
        lowest, highest = 1 << 32, -(1 << 32)
        for i in range(begin + cuda.threadIdx.x, end, THREADS):
            key = np.int64(key_of(values[i]))
            order = -key if bits_of(values[i]) >> np.uint32(31) else key
            lowest, highest = min(lowest, order), max(highest, order)
        cuda.atomic.min(extremes, 0, lowest)
        cuda.atomic.max(extremes, 1, highest)
        cuda.syncthreads()
        lowest, highest = extremes[0], extremes[1]
        cuda.syncthreads()  # before they are reset for the next block
        low, high, step = np.float32(0.0), np.float32(0.0), np.float32(0.0)
        if top < INFINITY_KEY:
            low = float_of(np.uint32(-lowest | 0x80000000 if lowest < 0 else lowest))
            high = float_of(np.uint32(-highest | 0x80000000 if highest < 0 else highest))
            step = np.float32(add(mul(high, half), -mul(low, half)) / np.float32(127.5))
            while key_of(add(low, mul(np.float32(255.0), step))) >= np.uint32(INFINITY_KEY):
                step = float_of(np.uint32(bits_of(step) - np.uint32(1)))
        if cuda.threadIdx.x == 0:
            coded[0][2 * (begin // MINMAX_BLOCK)] = low
            coded[0][2 * (begin // MINMAX_BLOCK) + 1] = step
        half_low, half_step = mul(low, half), mul(step, half)
        for i in range(begin + cuda.threadIdx.x, end, THREADS):
            byte = 0
            if half_step != np.float32(0.0):
                code = np.float32(add(mul(values[i], half), -half_low) / half_step)
                code = min(max(code, np.float32(0.0)), np.float32(255.0))
                byte = np.int64(bits_of(add(np.float32(code), np.float32(12582912.0)))) & 0xFF
            coded[1][i] = byte
    return own_top


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


SIGN = coding("sign", (U16, U8), sign_value, sign_value4, sign_codes, TILE)
TWO_BIT = coding("2bit", (U8, U8, U8), two_bit_value, two_bit_value4, two_bit_codes, TILE)
UINT8_MINMAX = coding("uint8minmax", (F32, U8), minmax_value, minmax_value4, minmax_codes, TILE)
