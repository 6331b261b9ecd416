"""The value codings of one and two bits, in bit planes, and the coding of eight bits between a minimum and a maximum.

Means of |x| are taken in fixed point, relative to the largest exponent of their block. Integer sums are the same in any
order, and so on each device, and 24 bits of a value are more than the levels keep. Bit i of a plane belongs to value i.
"""

import numpy as np

from narrows.compression.buffers import ByteArray, FloatArray
from narrows.compression.kernels.jit import at_least, bits_of, float_of, kernel
from narrows.compression.kernels.values import INFINITY_KEY, Halves

SIGN_BLOCK = 256  # values that share a scale: 1/16 bit a value
TWO_BIT_BLOCK = 512  # values that share two levels of 12 bits: 3/64 bit a value
LEVEL_MAX = 0xFEF  # the largest finite level: 8 bits of exponent, 4 of mantissa, as a float32 begins after its sign
MINMAX_BLOCK = 2048  # values that share a minimum and a step, both float32: 1/32 bit a value


@kernel
def _fixed(value: np.float32, exponent: np.uint32, spare: np.uint32) -> np.uint32:
    """Return |value| in units of 2**(exponent - 150 + spare), rounded down.

    exponent: the largest biased exponent of the block, >= 1.
    """
    key = bits_of(value) & np.uint32(0x7FFFFFFF)
    own = key >> np.uint32(23)
    mantissa = (key & np.uint32(0x7FFFFF)) | (np.uint32(0x800000) if own > np.uint32(0) else np.uint32(0))
    shift = exponent - max(own, np.uint32(1)) + spare
    return np.uint32(mantissa >> min(np.uint32(shift), np.uint32(31)))


@kernel
def _float_of_fixed(fixed: int, exponent: np.uint32, spare: np.uint32) -> np.float32:
    """Return the inverse of _fixed, for fixed < 2**24: exact, or rounded once if the result is denormal."""
    power = int(exponent) - 150 + int(spare)
    unit = float_of(np.uint32((power + 127) << 23)) if power >= -126 else float_of(np.uint32(1 << (power + 149)))
    return np.float32(fixed) * unit


@kernel
def _top_key(values: FloatArray) -> np.uint32:
    top = np.uint32(0)
    for i in range(values.size):
        top = max(top, bits_of(values[i]) & np.uint32(0x7FFFFFFF))
    return np.uint32(top)


@kernel
def pack_above(values: FloatArray, key: int, signs: bool, plane: ByteArray) -> None:
    """Set bit i of plane if value i is negative, -0.0 included (signs), or has a key above `key` (not signs).

    Spare bits are 0.
    """
    bits = values.view(np.uint32)
    mask = np.uint32(0x80000000) if signs else np.uint32(0x7FFFFFFF)
    threshold = np.uint32(0x80000000) if signs else np.uint32(key + 1)
    whole = bits.size // 64
    for group in range(whole):
        word = at_least(bits, group * 64, mask, threshold)
        for j in range(8):
            plane[group * 8 + j] = np.uint8((word >> np.uint64(8 * j)) & np.uint64(255))
    for j in range(whole * 8, plane.size):
        byte = np.uint32(0)
        for i in range(8 * j, min(8 * j + 8, bits.size)):
            byte |= np.uint32((bits[i] & mask) >= threshold) << np.uint32(i & 7)
        plane[j] = np.uint8(byte)


@kernel
def encode_sign(values: FloatArray, scales: Halves, plane: ByteArray) -> int:
    """Write signs, and the mean |x| of each block of 256 as bf16, to nearest even. Return as encode_fp16 does.

    With error feedback: Karimireddy et al. 2019 (1901.09847), sec. 3.
    """
    largest = np.uint32(0)
    for block in range(scales.size):
        part = values[block * SIGN_BLOCK : (block + 1) * SIGN_BLOCK]
        top = _top_key(part)
        largest = max(largest, top)
        scales[block] = np.uint16(0)
        if top >= np.uint32(INFINITY_KEY):
            continue
        exponent = max(top >> np.uint32(23), np.uint32(1))
        total = np.uint32(0)
        for i in range(part.size):
            total += _fixed(part[i], exponent, np.uint32(0))
        bits = bits_of(_float_of_fixed(int(total) // part.size, exponent, np.uint32(0)))
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        scales[block] = np.uint16(min((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16), np.uint32(0x7F7F)))
        pack_above(part, 0, True, plane[block * (SIGN_BLOCK // 8) : (block + 1) * (SIGN_BLOCK // 8)])
    return int(largest)


@kernel
def decode_sign(scales: Halves, plane: ByteArray, out: FloatArray) -> None:
    """Set out[i] = the scale of its block with the sign of bit i, exactly."""
    for block in range(scales.size):
        level = np.uint32(scales[block]) << np.uint32(16)
        bits = plane[block * (SIGN_BLOCK // 8) : (block + 1) * (SIGN_BLOCK // 8)]
        target = out[block * SIGN_BLOCK : (block + 1) * SIGN_BLOCK]
        for i in range(target.size):
            sign = (np.uint32(bits[i >> 3]) >> np.uint32(i & 7)) << np.uint32(31)
            target[i] = float_of(level | np.uint32(sign))


@kernel
def _level_pattern(fixed: int, exponent: np.uint32) -> np.uint32:
    """Return a level as 12 bits, to nearest even, at most LEVEL_MAX."""
    bits = bits_of(_float_of_fixed(fixed, exponent, np.uint32(1)))
    odd = (bits >> np.uint32(19)) & np.uint32(1)
    return np.uint32(min((bits + np.uint32(0x3FFFF) + odd) >> np.uint32(19), np.uint32(LEVEL_MAX)))


@kernel
def encode_2bit(values: FloatArray, levels: ByteArray, signs: ByteArray, highs: ByteArray) -> int:
    """Write sign, and the nearer of two levels of |x|, per block of 512. Return as encode_fp16 does.

    The levels are the means of |x| on either side of a threshold. The first threshold is the mean of all, the second is
    the middle between the first two levels (two rounds of Lloyd 1957). A block's levels take 3 bytes, the low level in
    the lower 12 bits.
    """
    largest = np.uint32(0)
    fixed = np.empty(TWO_BIT_BLOCK, np.uint32)
    for block in range(levels.size // 3):
        part = values[block * TWO_BIT_BLOCK : (block + 1) * TWO_BIT_BLOCK]
        top = _top_key(part)
        largest = max(largest, top)
        low_pattern = high_pattern = np.uint32(0)
        if top < np.uint32(INFINITY_KEY):
            exponent = max(top >> np.uint32(23), np.uint32(1))
            total = np.uint32(0)
            for i in range(part.size):
                fixed[i] = _fixed(part[i], exponent, np.uint32(1))
                total += fixed[i]
            low = high = threshold = int(total) // part.size
            for _ in range(2):
                above, above_total = np.uint32(0), np.uint32(0)
                for i in range(part.size):
                    is_above = np.uint32(fixed[i] > np.uint32(threshold))
                    above += is_above
                    above_total += is_above * fixed[i]
                if above == np.uint32(0):
                    break  # all |x| are equal
                low = (int(total) - int(above_total)) // (part.size - int(above))
                high = int(above_total) // int(above)
                threshold = (low + high) // 2
            low_pattern, high_pattern = _level_pattern(low, exponent), _level_pattern(high, exponent)
        both = low_pattern | (high_pattern << np.uint32(12))
        levels[3 * block] = np.uint8(both & np.uint32(255))
        levels[3 * block + 1] = np.uint8((both >> np.uint32(8)) & np.uint32(255))
        levels[3 * block + 2] = np.uint8(both >> np.uint32(16))
        middle = float_of(low_pattern << np.uint32(19)) * np.float32(0.5) + float_of(
            high_pattern << np.uint32(19)
        ) * np.float32(0.5)
        begin, end = block * (TWO_BIT_BLOCK // 8), (block + 1) * (TWO_BIT_BLOCK // 8)
        pack_above(part, 0, True, signs[begin:end])
        pack_above(part, int(bits_of(middle)), False, highs[begin:end])
    return int(largest)


@kernel
def decode_2bit(levels: ByteArray, signs: ByteArray, highs: ByteArray, out: FloatArray) -> None:
    """Set out[i] = the level that bit i of highs names, with the sign of bit i of signs, exactly."""
    for block in range(levels.size // 3):
        both = (
            np.uint32(levels[3 * block])
            | (np.uint32(levels[3 * block + 1]) << np.uint32(8))
            | (np.uint32(levels[3 * block + 2]) << np.uint32(16))
        )
        low = (both & np.uint32(0xFFF)) << np.uint32(19)
        high = (both >> np.uint32(12)) << np.uint32(19)
        begin, end = block * (TWO_BIT_BLOCK // 8), (block + 1) * (TWO_BIT_BLOCK // 8)
        sign_bits, high_bits = signs[begin:end], highs[begin:end]
        target = out[block * TWO_BIT_BLOCK : (block + 1) * TWO_BIT_BLOCK]
        for i in range(target.size):
            sign = (np.uint32(sign_bits[i >> 3]) >> np.uint32(i & 7)) << np.uint32(31)
            is_high = (np.uint32(high_bits[i >> 3]) >> np.uint32(i & 7)) & np.uint32(1)
            target[i] = float_of((high if is_high else low) | np.uint32(sign))


@kernel
def _ordered(value: np.float32) -> np.int32:
    """Return an integer of the same order as the value, with 0.0 above -0.0."""
    bits = np.int32(bits_of(value))
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@kernel
def _of_ordered(ordered: np.int32) -> np.float32:
    """Return the inverse of _ordered."""
    return float_of(np.uint32(ordered ^ ((ordered >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@kernel
def encode_uint8minmax(values: FloatArray, ranges: FloatArray, codes: ByteArray) -> int:
    """Write codes of MinMaxUInt8 (BAGUA, 2107.01499, sec. 3): 256 even steps from minimum to maximum, to nearest even.

    ranges: gets the minimum and the step of each block of 2048. Return as encode_fp16 does.
    """
    largest = np.uint32(0)
    for block in range(ranges.size // 2):
        part = values[block * MINMAX_BLOCK : (block + 1) * MINMAX_BLOCK]
        coded = codes[block * MINMAX_BLOCK : (block + 1) * MINMAX_BLOCK]
        top = _top_key(part)
        largest = max(largest, top)
        coded[:] = 0
        ranges[2 * block] = ranges[2 * block + 1] = np.float32(0.0)
        if top >= np.uint32(INFINITY_KEY):
            continue
        # As integers of the same order: their minimum vectorises, because it need not consider NaN.
        least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for i in range(part.size):
            ordered = _ordered(part[i])
            least, most = min(least, ordered), max(most, ordered)
        low, high = _of_ordered(least), _of_ordered(most)
        # Halves, because high - low may overflow.
        half_low = low * np.float32(0.5)
        step = (high * np.float32(0.5) - half_low) / np.float32(127.5)
        while not np.isfinite(low + np.float32(255.0) * step):
            step = float_of(bits_of(step) - np.uint32(1))
        ranges[2 * block] = low + np.float32(0.0)  # never -0.0
        ranges[2 * block + 1] = step + np.float32(0.0)
        half_step = step * np.float32(0.5)
        if half_step == np.float32(0.0):
            continue
        for i in range(part.size):
            code = min(max((part[i] * np.float32(0.5) - half_low) / half_step, np.float32(0.0)), np.float32(255.0))
            coded[i] = np.uint8(bits_of(code + np.float32(12582912.0)) & np.uint32(0xFF))
    return int(largest)


@kernel
def decode_uint8minmax(ranges: FloatArray, codes: ByteArray, out: FloatArray) -> None:
    """Set out[i] = minimum + code * step of its block, product and sum each rounded once."""
    for block in range(ranges.size // 2):
        low, step = ranges[2 * block], ranges[2 * block + 1]
        coded = codes[block * MINMAX_BLOCK : (block + 1) * MINMAX_BLOCK]
        target = out[block * MINMAX_BLOCK : (block + 1) * MINMAX_BLOCK]
        for i in range(coded.size):
            target[i] = low + np.float32(coded[i]) * step
