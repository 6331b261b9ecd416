"""The value codings: float32 to fp16 or int8 with a scale per block, back, and straight into an accumulator.

`add_*` does out[i] = out[i] + weight * value and `scatter_add_*` the same at out[indices[i]], each product and each sum
rounded to float32 once. fp16 travels as uint16 patterns: Numba has no half on the CPU, and NumPy's cast is 8x slower.
"""

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import FloatArray, IndexArray
from narrows.compression.kernels.jit import bits_of, float_of, kernel

INT8_BLOCK = 256  # values that share a scale: 16 bits of scale cost 1/16 bit a value
INT8_SCALE_MAX = 0x7BFF  # bf16 pattern of 1.992 * 2**120, the largest scale whose every code decodes to a finite value
INFINITY_KEY = 0x7F800000

Halves = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.int8]


@kernel
def largest_key(values: FloatArray) -> int:
    """The largest bit pattern without its sign, 0 for no values; >= INFINITY_KEY where any value is not finite."""
    largest = np.uint32(0)
    for i in range(values.size):
        largest = max(largest, bits_of(values[i]) & np.uint32(0x7FFFFFFF))
    return int(largest)


@kernel
def encode_fp16(values: FloatArray, halves: Halves) -> int:
    """IEEE half patterns to nearest even, saturated at 65504; the largest key seen (>= INFINITY_KEY: not finite)."""
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
def _fp32_of(half: np.uint16) -> np.float32:
    pattern = np.uint32(half)
    key = pattern & np.uint32(0x7FFF)
    # The half's exponent read as a float32's is 112 too low; the product is exact and makes denormals normal.
    value = float_of(key << np.uint32(13)) * np.float32(2.0**112)
    special = np.uint32(0x7F800000) if key >= np.uint32(0x7C00) else np.uint32(0)
    sign = (pattern & np.uint32(0x8000)) << np.uint32(16)
    return float_of(bits_of(value) | special | sign)


@kernel
def decode_fp16(halves: Halves, out: FloatArray) -> None:
    """out[i] = the half as float32, exact; infinities and NaN stay what they are."""
    for i in range(halves.size):
        out[i] = _fp32_of(halves[i])


@kernel
def add_fp16(halves: Halves, weight: np.float32, out: FloatArray) -> None:
    for i in range(halves.size):
        out[i] += np.float32(weight) * _fp32_of(halves[i])


@kernel
def scatter_add_fp16(halves: Halves, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
    for i in range(halves.size):
        out[indices[i]] += np.float32(weight) * _fp32_of(halves[i])


@kernel
def encode_int8(values: FloatArray, scales: Halves, codes: Codes) -> int:
    """Codes in -127..127 to nearest even and a bf16 scale per block of 256; the largest key seen (see encode_fp16).

    scale = max |x| / 127 rounded to float32 and then up to bf16, at most INT8_SCALE_MAX. A bf16 scale times a code has
    at most 15 significant bits: decoded values are exact, and x - decoded is exact too (Sterbenz), so error feedback
    loses nothing. A scale of 0 (all values below 2**-149 * 127 / 2) gives codes 0.
    """
    largest = np.uint32(0)
    for block in range(scales.size):
        # Slices, here and below: an index that starts at block * INT8_BLOCK might be negative for all that LLVM knows,
        # and Numba's handling of negative indices keeps the loop from being vectorised.
        part = values[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        coded = codes[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        top = np.uint32(0)
        for i in range(part.size):
            top = max(top, bits_of(part[i]) & np.uint32(0x7FFFFFFF))
        largest = max(largest, top)
        exact = bits_of(float_of(top) / np.float32(127.0))
        pattern = min((exact + np.uint32(0xFFFF)) >> np.uint32(16), np.uint32(INT8_SCALE_MAX))
        scales[block] = np.uint16(pattern)
        scale = float_of(pattern << np.uint32(16))
        if pattern == np.uint32(0) or top >= np.uint32(INFINITY_KEY):
            coded[:] = 0
            continue
        for i in range(part.size):
            code = min(max(part[i] / scale, np.float32(-127.0)), np.float32(127.0))
            # 1.5 * 2**23 has an ulp of 1: the sum is rounded to nearest even, and its low byte is the code.
            coded[i] = np.int8(bits_of(code + np.float32(12582912.0)) & np.uint32(0xFF))
    return int(largest)


@kernel
def decode_int8(scales: Halves, codes: Codes, out: FloatArray) -> None:
    """out[i] = code * scale of its block, exact."""
    for block in range(scales.size):
        scale = float_of(np.uint32(scales[block]) << np.uint32(16))
        coded = codes[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        target = out[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        for i in range(coded.size):
            target[i] = np.float32(coded[i]) * scale


@kernel
def add_int8(scales: Halves, codes: Codes, weight: np.float32, out: FloatArray) -> None:
    for block in range(scales.size):
        scale = float_of(np.uint32(scales[block]) << np.uint32(16))
        coded = codes[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        target = out[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        for i in range(coded.size):
            target[i] += np.float32(weight) * (np.float32(coded[i]) * scale)


@kernel
def scatter_add_int8(scales: Halves, codes: Codes, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
    for block in range(scales.size):
        scale = float_of(np.uint32(scales[block]) << np.uint32(16))
        coded = codes[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        places = indices[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]
        for i in range(coded.size):
            out[places[i]] += np.float32(weight) * (np.float32(coded[i]) * scale)


@kernel
def add_fp32(values: FloatArray, weight: np.float32, out: FloatArray) -> None:
    for i in range(values.size):
        out[i] += np.float32(weight) * values[i]


@kernel
def scatter_add_fp32(values: FloatArray, indices: IndexArray, weight: np.float32, out: FloatArray) -> None:
    for i in range(values.size):
        out[indices[i]] += np.float32(weight) * values[i]
