"""The CPU kernels of coded log-probabilities: records are written, checked and read. There are none for CUDA.

The answers of a teacher are small: 2048 tokens of 32 classes are 178 KB, and a core codes them in few milliseconds. So arrays
come to the host before they are coded.

Rules
- Additions, products and divisions alone, in the order that is written here: results are the same on every machine.
- `read_records` takes any bytes. It reads inside its array, and writes rows of its outputs alone.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import ByteArray, FloatArray
from narrows.compression.kernels.gaps import word_or_rest
from narrows.compression.kernels.jit import bits_of, float_of, kernel, trailing_zeros

Matrix = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Powers = npt.NDArray[np.float64]

HALF_BITS = 16  # of a code that is a half itself
HALF_MAX = 0x7BFF  # the pattern of 65504, the largest finite half
PLACE_BITS = 10  # of a sort key: the place of an id in its token. The id stands above it
GUESSES = 1024  # parts of a span, each with at most one middle of two codes
GIVEN_SUM_MAX = 1.05  # of the probabilities that a caller gives: those of a softmax in bf16 sum up to that much
NO_OTHERS = 0x5400  # the half of 64.0, for a share of the other classes of e**-64 or nothing
# What is wrong with a record: the numbers that `read_records` returns.
OF_HEAD, OF_VALUES, OF_SPARE_CODE, OF_IDS = range(1, 5)
FAULT_BITS = 3
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@kernel
def exponential(x: float) -> float:
    """Return e**x for x <= 64 to eight digits; e**-80 for x below -80."""
    x = max(x, -80.0)
    n = np.floor(x * LOG2_E + 0.5)
    r = x - n * LN_2
    power = 1.0 + r * (1.0 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))))))
    return float(power * np.float64(float_of(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))))


@kernel
def logarithm(x: float) -> float:
    """Return the natural logarithm of x > 0 to eight digits."""
    whole = 0.0
    while x > 1.5:
        x *= 0.5
        whole += LN_2
    while x < 0.75:
        x *= 2.0
        whole -= LN_2
    y = 2.0 * (x - 1.0) / (x + 1.0)
    for _ in range(2):  # Halley's method, which triples the right digits
        power = exponential(y)
        y += 2.0 * (x - power) / (x + power)
    return whole + y


@kernel
def half_of(value: np.float32) -> int:
    """Return the pattern of a value >= 0 as a half, to nearest even, at most HALF_MAX."""
    key = int(np.int64(bits_of(value))) & 0x7FFFFFFF  # -0.0 is a value >= 0 too
    if key < 0x38800000:  # below 2**-14 one ulp of a half is 2**-24, one ulp of 0.5 in float32: the addition rounds
        return int(np.int64(bits_of(np.float32(value + np.float32(0.5))))) - 0x3F000000
    return min((key - 0x38000000 + 0xFFF + ((key >> 13) & 1)) >> 13, HALF_MAX)


@kernel
def value_of(half: int) -> np.float32:
    """Return the value of a pattern of a half from 0 to HALF_MAX, exactly."""
    return np.float32(float_of(np.uint32(half << 13)) * np.float32(2.0**112))


@kernel
def sum_of_powers(exponents: FloatArray, powers: Powers) -> float:
    """Return the sum of e**x, in order; it is 0.0 for no exponents. `powers` is scratch of the same size."""
    for i in range(exponents.size):  # apart from the sum, which is in order, this is one loop of vectors
        powers[i] = exponential(np.float64(exponents[i]))
    total = 0.0
    for i in range(exponents.size):
        total += powers[i]
    return total


@kernel
def put_bits(out: ByteArray, bit: int, width: int, value: int) -> None:
    """Write the low `width` bits of `value` from bit `bit` of zeroed bytes on."""
    end = bit + width
    value <<= bit & 7
    for byte in range(bit >> 3, (end + 7) >> 3):
        out[byte] |= np.uint8(value & 0xFF)
        value >>= 8


@kernel
def nearest_code(ratio: np.float32, guesses: ByteArray, middles: FloatArray) -> int:
    """Return how many middles lie below a ratio >= 0: the guess, or one more. A search takes three times as long."""
    code = int(guesses[np.int64(min(ratio, np.float32(1.0)) * np.float32(GUESSES))])
    return code + int(np.int64(middles[code] < ratio))


@kernel
def _write_values(
    values: FloatArray,
    code_bits: int,
    deepest: np.float32,
    guesses: ByteArray,
    middles: FloatArray,
    powers: Powers,
    out: ByteArray,
) -> float:
    """Write the share of the others, the span and the codes of one token. Return the sum of the given probabilities."""
    total = sum_of_powers(values, powers)
    if total > GIVEN_SUM_MAX:
        return total
    # A share near 1 is near a sum of 0, and -log(share) is that sum: as a half it has the sum's first digits. A share near 0
    # keeps its own.
    others = 1.0 - total
    share = min(max(half_of(np.float32(-logarithm(others))), 1), NO_OTHERS) if others > 1e-27 else NO_OTHERS
    put_bits(out, 0, 16, share)
    largest = values[0]
    smallest = values[0]
    for i in range(values.size):
        largest = max(largest, values[i])
        smallest = min(smallest, values[i])
    if code_bits == HALF_BITS:
        for i in range(values.size):
            put_bits(out, 16 + i * HALF_BITS, HALF_BITS, half_of(largest - values[i]))
        return total
    span_half = half_of(min(largest - smallest, deepest))
    put_bits(out, 16, 16, span_half)
    if span_half:
        span = value_of(span_half)
        for i in range(values.size):
            code = nearest_code(np.float32((largest - values[i]) / span), guesses, middles)
            bit = 32 + i * code_bits
            out[bit >> 3] |= np.uint8(code << (bit & 7))  # a code of at most 8 bits lies in one byte
    return total


@kernel
def write_records(
    log_probs: Matrix,
    keys: Any,
    low_bits: int,
    code_bits: int,
    deepest: np.float32,
    guesses: ByteArray,
    middles: FloatArray,
    id_byte: int,
    gaps: int,
    out: Any,
) -> int:
    """Write a record for each token.

    Args:
        log_probs: float32[tokens, top], finite.
        keys: uint64[tokens, top], rising in each token: id << PLACE_BITS | place of the log-probability.
        low_bits: of an id.
        code_bits: of a value's code.
        deepest: the largest span.
        guesses, middles: of the value coding (layout.py); not used if codes are halves.
        id_byte: where the ids of a record begin.
        gaps: classes - top; 0: the record has no ids.
        out: zeroed uint8[tokens, bytes of a record].

    Returns:
        The first token whose probabilities sum above GIVEN_SUM_MAX, -1 if there is none.
    """
    top = log_probs.shape[1]
    values, powers = np.empty(top, np.float32), np.empty(top, np.float64)
    mask = (1 << low_bits) - 1
    for token in range(log_probs.shape[0]):
        record = out[token]
        for i in range(top):
            values[i] = log_probs[token, np.int64(keys[token, i] & np.uint64((1 << PLACE_BITS) - 1))]
        total = _write_values(values, code_bits, deepest, guesses, middles, powers, record)
        if total > GIVEN_SUM_MAX:
            return token
        if gaps == 0:
            continue
        unary = 8 * id_byte + top * low_bits
        for i in range(top):
            rest = int(np.int64(keys[token, i] >> np.uint64(PLACE_BITS))) - i
            put_bits(record, 8 * id_byte + i * low_bits, low_bits, rest & mask)
            put_bits(record, unary + (rest >> low_bits) + i, 1, 1)
    return -1


@kernel
def bits_at(data: ByteArray, bit: int, width: int) -> int:
    """Return `width` <= 32 bits from bit `bit` on."""
    word = word_or_rest(data, bit >> 3) >> np.uint64(bit & 7)
    return int(np.int64(word & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))))


@kernel
def _read_ids(data: ByteArray, begin: int, end: int, low_bits: int, gaps: int, ids: Ids) -> bool:
    """Read the ids of one record, in bytes [begin, end). Return whether they are rising ids below top + gaps."""
    top = ids.size
    if gaps == 0:
        for i in range(top):
            ids[i] = i
        return True
    unary = 8 * begin + top * low_bits
    stop = unary + top + (gaps >> low_bits)
    bit, found, previous = unary, 0, 0
    while bit < stop:
        offset = bit & 7
        word = word_or_rest(data, bit >> 3) >> np.uint64(offset)
        width = min(64 - offset, stop - bit)
        if width < 64:
            word &= (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        while word != np.uint64(0):
            if found == top:
                return False
            high = bit + int(np.int64(trailing_zeros(word))) - unary - found
            rest = (high << low_bits) | bits_at(data, 8 * begin + found * low_bits, low_bits)
            if rest < previous or rest > gaps:
                return False
            ids[found] = rest + found
            previous = rest
            found += 1
            word &= word - np.uint64(1)
        bit += width
    return found == top and bits_at(data, stop, 8 * end - stop) == 0


@kernel
def _read_values(
    data: ByteArray, begin: int, code_bits: int, fractions: FloatArray, powers: Powers, values: FloatArray
) -> int:
    """Read the log-probabilities of one record. Return the number of what is wrong with them, 0 if nothing is.

    Values are first the negated depths below the largest. Of the sum of their powers follows by how much all are to be
    moved, so that they sum to what the others leave of 1.
    """
    share = bits_at(data, 8 * begin, 16)
    if share < 1 or share > NO_OTHERS:
        return OF_HEAD
    bit = 8 * begin + 16
    span = np.float32(0.0)
    if code_bits != HALF_BITS:
        half = bits_at(data, bit, 16)
        if half > HALF_MAX:
            return OF_HEAD
        span = value_of(half)
        bit += 16
    mask = (1 << code_bits) - 1
    largest = np.float32(-np.inf)
    for i in range(values.size):
        if code_bits != HALF_BITS:
            values[i] = np.float32(0.0) - span * fractions[(int(data[bit >> 3]) >> (bit & 7)) & mask]
        else:
            half = bits_at(data, bit, HALF_BITS)
            if half > HALF_MAX:
                return OF_VALUES
            values[i] = np.float32(0.0) - value_of(half)
        bit += code_bits
        largest = max(largest, values[i])
    if largest != np.float32(0.0):
        return OF_VALUES
    if bits_at(data, bit, -bit & 7) != 0:
        return OF_SPARE_CODE
    kept = 1.0 - exponential(-np.float64(value_of(share)))
    moved = logarithm(kept / sum_of_powers(values, powers))
    for i in range(values.size):
        values[i] = np.float32(min(np.float64(values[i]) + moved, 0.0))
    return 0


@kernel
def read_records(
    data: ByteArray,
    size: int,
    low_bits: int,
    code_bits: int,
    fractions: FloatArray,
    id_byte: int,
    gaps: int,
    log_probs: Matrix,
    ids: Ids,
) -> int:
    """Check records, and read them.

    Args:
        data: uint8[tokens * size], not trusted.
        size: the bytes of a record.
        low_bits, code_bits, fractions, id_byte, gaps: as in `write_records`.
        log_probs, ids: float32[rows, top], int64[rows, top]. With one row each record is written over the one before.

    Returns:
        -1 if all records are valid; else, of the first that is not, its number << FAULT_BITS | what is wrong.
    """
    powers = np.empty(log_probs.shape[1], np.float64)
    for token in range(data.size // size):
        row = token if log_probs.shape[0] > 1 else 0
        begin = token * size
        fault = _read_values(data, begin, code_bits, fractions, powers, log_probs[row])
        if fault == 0 and not _read_ids(data, begin + id_byte, begin + size, low_bits, gaps, ids[row]):
            fault = OF_IDS
        if fault != 0:
            return (token << FAULT_BITS) | fault
    return -1
