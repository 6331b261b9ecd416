"""The value codings that are casts or multiples of a scale: fp16, bf16, int8, int4, int12; and adding to an accumulator.

fp16 and bf16 are uint16 patterns: Numba has no half on the CPU, and NumPy's cast is 8x slower. Each product and each
sum is rounded to float32 once. levels.py has the codings of one and two bits.
"""

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import ByteArray, FloatArray, IndexArray
from narrows.compression.kernels.jit import bits_of, float_of, kernel
from narrows.compression.kernels.random import random_words

INT8_BLOCK = 256  # values that share a scale: 16 bits of scale cost 1/16 bit a value
INT8_SCALE_MAX = 0x7BFF  # bf16 pattern of 1.992 * 2**120, the largest scale whose every code decodes to a finite value
INT4_BLOCK = 64  # a quarter bit a value for the scale: with 15 codes the error depends on the range of a block
INT4_SCALE_MAX = 0x7DFF  # the largest scale whose every code, -8..7, decodes to a finite value
INT12_BLOCK = 256
INT12_SCALE_MAX = 0x79FF  # the largest scale whose every code, -2048..2047, decodes to a finite value
INFINITY_KEY = 0x7F800000  # the key of infinity: keys from here on are not finite

Halves = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.int8]


@kernel
def largest_key(values: FloatArray) -> int:
    """Return the largest bit pattern without its sign, 0 for no values; >= INFINITY_KEY if a value is not finite."""
    largest = np.uint32(0)
    for i in range(values.size):
        largest = max(largest, bits_of(values[i]) & np.uint32(0x7FFFFFFF))
    return int(largest)


@kernel
def encode_fp16(values: FloatArray, halves: Halves) -> int:
    """Write IEEE half patterns to nearest even, saturated at 65504. Return the largest key, as largest_key does."""
    largest = np.uint32(0)
    for i in range(values.size):
        bits = bits_of(values[i])
        key = bits & np.uint32(0x7FFFFFFF)
        largest = max(largest, key)
        # Normal halves: rebias the exponent by -112 and round the 13 bits that fall off, half to even.
        # (Below 2**-14 this is meaningless, and not used: Numba computes it in 64 bits, so it does not even wrap.)
        odd = (key >> np.uint32(13)) & np.uint32(1)
        normal = (key - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
        # Below 2**-14 one ulp of a half is 2**-24, one ulp of 0.5 in float32: the addition itself rounds.
        tiny = bits_of(float_of(key) + np.float32(0.5)) - np.uint32(0x3F000000)
        half = min(normal, np.uint32(0x7BFF)) if key >= np.uint32(0x38800000) else tiny
        halves[i] = np.uint16(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))
    return int(largest)


@kernel
def decode_fp16(halves: Halves, out: FloatArray) -> None:
    """Set out[i] = the half as float32, exactly; infinities and NaN stay."""
    for i in range(halves.size):
        pattern = np.uint32(halves[i])
        key = pattern & np.uint32(0x7FFF)
        # The half's exponent read as a float32's is 112 too low; the product is exact and makes denormals normal.
        value = float_of(key << np.uint32(13)) * np.float32(2.0**112)
        special = np.uint32(0x7F800000) if key >= np.uint32(0x7C00) else np.uint32(0)
        sign = (pattern & np.uint32(0x8000)) << np.uint32(16)
        out[i] = float_of(bits_of(value) | special | sign)


@kernel
def encode_bf16(values: FloatArray, halves: Halves) -> int:
    """Write the upper 16 bits to nearest even, saturated at 3.39e38. Return as encode_fp16 does."""
    largest = np.uint32(0)
    for i in range(values.size):
        bits = bits_of(values[i])
        key = bits & np.uint32(0x7FFFFFFF)
        largest = max(largest, key)
        odd = (key >> np.uint32(16)) & np.uint32(1)
        half = min((key + np.uint32(0x7FFF) + odd) >> np.uint32(16), np.uint32(0x7F7F))
        halves[i] = np.uint16(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))
    return int(largest)


@kernel
def decode_bf16(halves: Halves, out: FloatArray) -> None:
    """Set out[i] = the pattern as float32, exactly; infinities and NaN stay."""
    for i in range(halves.size):
        out[i] = float_of(np.uint32(halves[i]) << np.uint32(16))


@kernel
def _scale_pattern(top: np.uint32, code_max: np.float32, pattern_max: np.uint32) -> np.uint32:
    """Return the bf16 pattern of (value with key `top`) / code_max, rounded to float32 and then up; <= pattern_max."""
    exact = bits_of(float_of(top) / np.float32(code_max))
    return np.uint32(min((exact + np.uint32(0xFFFF)) >> np.uint32(16), pattern_max))


@kernel
def encode_int8(
    values: FloatArray,
    stochastic: bool,
    key_low: int,
    key_high: int,
    first: int,
    words: IndexArray,
    scales: Halves,
    codes: Codes,
) -> int:
    """Write codes in -127..127 and a bf16 scale per block of 256. Return as encode_fp16 does.

    scale = max |x| / 127 rounded to float32 and then up to bf16, at most INT8_SCALE_MAX. A bf16 scale times a code has
    at most 15 significant bits: decoded values are exact, and x - decoded is exact too (Sterbenz), so error feedback
    loses nothing. A scale of 0 (all values below 2**-149 * 127 / 2) gives codes 0.
    code = x / scale to nearest even, or stochastic: floor(x / scale + u), u in [0, 1) from 24 bits of random word i under
    the 64-bit key, which is unbiased. first: the number of blocks before the values. words: scratch, uint32[256].
    """
    largest = np.uint32(0)
    for block in range(scales.size):
        # Slices, here and below: LLVM cannot know that an index that starts at block * INT8_BLOCK is not negative, and
        # Numba's handling of negative indices would keep the loop from being vectorised.
        part = values[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        coded = codes[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        top = np.uint32(0)
        for i in range(part.size):
            top = max(top, bits_of(part[i]) & np.uint32(0x7FFFFFFF))
        largest = max(largest, top)
        pattern = _scale_pattern(top, np.float32(127.0), np.uint32(INT8_SCALE_MAX))
        scales[block] = np.uint16(pattern)
        scale = float_of(pattern << np.uint32(16))
        if pattern == np.uint32(0) or top >= np.uint32(INFINITY_KEY):
            coded[:] = 0
        elif stochastic:
            random_words(key_low, key_high, first + block, words)
            for i in range(part.size):
                u = np.float32(words[i] >> np.uint32(8)) * np.float32(2.0**-24)
                code = np.floor(part[i] / scale + u)
                coded[i] = np.int8(min(max(code, np.float32(-127.0)), np.float32(127.0)))
        else:
            for i in range(part.size):
                code = min(max(part[i] / scale, np.float32(-127.0)), np.float32(127.0))
                # 1.5 * 2**23 has an ulp of 1: the sum is rounded to nearest even, and its low byte is the code.
                coded[i] = np.int8(bits_of(code + np.float32(12582912.0)) & np.uint32(0xFF))
    return int(largest)


@kernel
def decode_int8(scales: Halves, codes: Codes, out: FloatArray) -> None:
    """Set out[i] = code * scale of its block, exactly."""
    for block in range(scales.size):
        scale = float_of(np.uint32(scales[block]) << np.uint32(16))
        coded = codes[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        target = out[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        for i in range(coded.size):
            target[i] = np.float32(coded[i]) * scale


@kernel
def encode_int4(
    values: FloatArray,
    stochastic: bool,
    key_low: int,
    key_high: int,
    first: int,
    words: IndexArray,
    scales: Halves,
    nibbles: ByteArray,
) -> int:
    """Do encode_int8 with codes in -7..7, blocks of 64, two's complement, and value 2j in the low nibble of byte j.

    first: a multiple of 4.
    """
    largest = np.uint32(0)
    drawn = -1
    codes = np.empty(INT4_BLOCK, np.uint8)
    for block in range(scales.size):
        part = values[block * INT4_BLOCK : (block + 1) * INT4_BLOCK]
        packed = nibbles[block * (INT4_BLOCK // 2) : (block + 1) * (INT4_BLOCK // 2)]
        top = np.uint32(0)
        for i in range(part.size):
            top = max(top, bits_of(part[i]) & np.uint32(0x7FFFFFFF))
        largest = max(largest, top)
        pattern = _scale_pattern(top, np.float32(7.0), np.uint32(INT4_SCALE_MAX))
        scales[block] = np.uint16(pattern)
        scale = float_of(pattern << np.uint32(16))
        packed[:] = 0
        if pattern == np.uint32(0) or top >= np.uint32(INFINITY_KEY):
            continue
        if stochastic and (first + block) >> 2 != drawn:
            drawn = (first + block) >> 2
            random_words(key_low, key_high, drawn, words)
        for i in range(part.size):
            code = part[i] / scale
            if stochastic:
                word = words[(block & 3) * INT4_BLOCK + i]
                code = np.floor(code + np.float32(word >> np.uint32(8)) * np.float32(2.0**-24))
            code = min(max(code, np.float32(-7.0)), np.float32(7.0))
            codes[i] = np.uint8(bits_of(code + np.float32(12582912.0)) & np.uint32(15))
        codes[part.size :] = 0
        for j in range(packed.size):
            packed[j] = codes[2 * j] | (codes[2 * j + 1] << np.uint8(4))
    return int(largest)


@kernel
def decode_int4(scales: Halves, nibbles: ByteArray, out: FloatArray) -> None:
    """Set out[i] = code * scale of its block, exactly."""
    for block in range(scales.size):
        scale = float_of(np.uint32(scales[block]) << np.uint32(16))
        packed = nibbles[block * (INT4_BLOCK // 2) : (block + 1) * (INT4_BLOCK // 2)]
        target = out[block * INT4_BLOCK : (block + 1) * INT4_BLOCK]
        for j in range(target.size // 2):
            byte = np.int32(packed[j])
            target[2 * j] = np.float32(((byte & np.int32(15)) ^ np.int32(8)) - np.int32(8)) * scale
            target[2 * j + 1] = np.float32(((byte >> np.int32(4)) ^ np.int32(8)) - np.int32(8)) * scale
        if target.size & 1:
            last = np.int32(packed[target.size // 2]) & np.int32(15)
            target[target.size - 1] = np.float32((last ^ np.int32(8)) - np.int32(8)) * scale


@kernel
def encode_int12(values: FloatArray, scales: Halves, triples: ByteArray) -> int:
    """Do encode_int8, not stochastic, with codes in -2047..2047, two of them in three bytes.

    The 24 bits of a triple, little endian, are value 2j in two's complement and, above it, value 2j + 1.
    """
    largest = np.uint32(0)
    codes = np.empty(INT12_BLOCK, np.uint32)
    for block in range(scales.size):
        part = values[block * INT12_BLOCK : (block + 1) * INT12_BLOCK]
        packed = triples[block * (INT12_BLOCK // 2 * 3) : (block + 1) * (INT12_BLOCK // 2 * 3)]
        top = np.uint32(0)
        for i in range(part.size):
            top = max(top, bits_of(part[i]) & np.uint32(0x7FFFFFFF))
        largest = max(largest, top)
        pattern = _scale_pattern(top, np.float32(2047.0), np.uint32(INT12_SCALE_MAX))
        scales[block] = np.uint16(pattern)
        scale = float_of(pattern << np.uint32(16))
        packed[:] = 0
        if pattern == np.uint32(0) or top >= np.uint32(INFINITY_KEY):
            continue
        for i in range(part.size):
            code = min(max(part[i] / scale, np.float32(-2047.0)), np.float32(2047.0))
            codes[i] = bits_of(code + np.float32(12582912.0)) & np.uint32(0xFFF)
        codes[part.size :] = 0
        for j in range(packed.size // 3):
            pair = codes[2 * j] | (codes[2 * j + 1] << np.uint32(12))
            packed[3 * j] = np.uint8(pair & np.uint32(0xFF))
            packed[3 * j + 1] = np.uint8((pair >> np.uint32(8)) & np.uint32(0xFF))
            packed[3 * j + 2] = np.uint8(pair >> np.uint32(16))
    return int(largest)


@kernel
def decode_int12(scales: Halves, triples: ByteArray, out: FloatArray) -> None:
    """Set out[i] = code * scale of its block, exactly."""
    for block in range(scales.size):
        scale = float_of(np.uint32(scales[block]) << np.uint32(16))
        packed = triples[block * (INT12_BLOCK // 2 * 3) : (block + 1) * (INT12_BLOCK // 2 * 3)]
        target = out[block * INT12_BLOCK : (block + 1) * INT12_BLOCK]
        for i in range(target.size):
            byte = (i >> 1) * 3 + (i & 1)
            two = np.int32(packed[byte]) | (np.int32(packed[byte + 1]) << np.int32(8))
            code = (two >> np.int32(4)) if i & 1 else (two & np.int32(0xFFF))
            target[i] = np.float32((code ^ np.int32(0x800)) - np.int32(0x800)) * scale


@kernel
def add_fp32(values: FloatArray, weight: np.float32, out: FloatArray) -> None:
    """Set out[i] = out[i] + weight * values[i]."""
    for i in range(values.size):
        out[i] += np.float32(weight) * values[i]


@kernel
def scatter_add_fp32(values: FloatArray, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
    """Set out[indices[i]] = out[indices[i]] + weight * values[i]."""
    for i in range(values.size):
        out[indices[i]] += np.float32(weight) * values[i]
