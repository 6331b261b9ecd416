"""Coded log-probabilities in plain NumPy, written and read from docs/logits.md alone, a token at a time.

Shares no code with the package. All sums are made in order, in float64, so they are equal to the package's bit for bit.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kit.reference import Array

CODINGS = {"int8": (1, 8, 16.0), "int4": (2, 4, 12.0), "fp16": (3, 16, 0.0)}  # wire id, bits of a code, deepest
FRACTIONS = {
    "int8": np.array([code / 255 for code in range(256)], np.float32),
    "int4": np.array([code * (code + 27) / 630 for code in range(16)], np.float32),
}
NO_OTHERS = 0x5400
Bits = npt.NDArray[np.uint8]


def exponential(x: Any) -> Any:
    """e**x by its series around 0, in float64."""
    x = np.maximum(np.asarray(x, np.float64), -80.0)
    n = np.floor(x * math.log2(math.e) + 0.5)
    r = x - n * math.log(2)
    power = np.full(x.shape, 1 / math.factorial(7))
    for order in range(6, -1, -1):
        power = 1 / math.factorial(order) + r * power
    return np.ldexp(power, n.astype(np.int64))


def logarithm(x: float) -> float:
    whole = 0.0
    while x > 1.5:
        x, whole = x / 2, whole + math.log(2)
    while x < 0.75:
        x, whole = x * 2, whole - math.log(2)
    y = 2.0 * (x - 1.0) / (x + 1.0)
    for _ in range(2):
        power = float(exponential(y))
        y += 2.0 * (x - power) / (x + power)
    return whole + y


def total_of(exponents: Array) -> float:
    return float(sum(exponential(exponents).tolist(), 0.0))


def halves(magnitudes: Array) -> Array:
    return np.minimum(magnitudes.astype(np.float32), np.float32(65504)).astype(np.float16).view(np.uint16)


def values_of_halves(patterns: Any) -> Array:
    return np.asarray(patterns, np.uint16).view(np.float16).astype(np.float32)


def low_bits_of(top: int, classes: int) -> int:
    """The low bits of an id for which an id section is smallest."""
    sizes = [top * low + top + ((classes - top) >> low) for low in range(33)]
    return sizes.index(min(sizes))


def bytes_of_record(coding: str, top: int, classes: int) -> int:
    low, bits = low_bits_of(top, classes), CODINGS[coding][1]
    ids = -(-(top * low + top + ((classes - top) >> low)) // 8) if top < classes else 0
    return -(-top * bits // 8) + (2 if coding == "fp16" else 4) + ids


def bits_of(numbers: Sequence[int], width: int) -> list[int]:
    return [number >> bit & 1 for number in numbers for bit in range(width)]


def packed(bits: Sequence[int]) -> bytes:
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def id_part(ids: Sequence[int], classes: int) -> bytes:
    """The id section of rising ids."""
    top = len(ids)
    if top == classes:
        return b""
    low, rest = low_bits_of(top, classes), [each - i for i, each in enumerate(ids)]
    unary = [0] * (top + ((classes - top) >> low))
    for i, each in enumerate(rest):
        unary[(each >> low) + i] = 1
    return packed(bits_of(rest, low) + unary)


def value_part(coding: str, values: Array) -> bytes:
    """The values of a record, float32[top] in the order of the ids."""
    others = 1.0 - total_of(values)
    share = min(max(int(halves(np.array([-logarithm(others)]))[0]), 1), NO_OTHERS) if others > 1e-27 else NO_OTHERS
    with np.errstate(over="ignore"):
        depths = values.max() - values
    if coding == "fp16":
        return struct.pack("<H", share) + halves(depths).tobytes()
    _, bits, deepest = CODINGS[coding]
    span_half = halves(np.minimum(depths.max(), np.float32(deepest)).reshape(1))
    span, fractions = values_of_halves(span_half)[0], FRACTIONS[coding]
    codes = np.zeros(values.size, np.int64)
    if span:
        middles = (fractions[:-1] + fractions[1:]) * np.float32(0.5)
        with np.errstate(over="ignore"):
            codes = np.searchsorted(middles, depths / span)
    return struct.pack("<HH", share, span_half[0]) + packed(bits_of(codes.tolist(), bits))


def encode(coding: str, log_probs: Array, ids: Array, classes: int) -> Array:
    """Records, uint8[tokens, bytes]."""
    top = log_probs.shape[1]
    records = np.zeros((len(ids), bytes_of_record(coding, top, classes)), np.uint8)
    for record, values, named in zip(records, log_probs, ids, strict=True):
        order = np.argsort(named)
        made = value_part(coding, values[order]) + id_part(named[order].tolist(), classes)
        record[:] = np.frombuffer(made, np.uint8)
    return records


def decode(coding: str, records: Array, top: int, classes: int) -> tuple[Array, Array]:
    """(float32[tokens, top], int64[tokens, top]) of valid records."""
    log_probs, ids = np.empty((len(records), top), np.float32), np.empty((len(records), top), np.int64)
    width, low = CODINGS[coding][1], low_bits_of(top, classes)
    head = 2 if coding == "fp16" else 4
    for record, values, named in zip(records, log_probs, ids, strict=True):
        bits = np.unpackbits(record, bitorder="little").astype(np.int64)
        codes = bits[8 * head : 8 * head + top * width].reshape(top, width) @ (1 << np.arange(width))
        share, *span = values_of_halves(np.frombuffer(record[:head].tobytes(), np.uint16))
        depths = span[0] * FRACTIONS[coding][codes] if span else values_of_halves(codes)
        moved = logarithm((1.0 - float(exponential(-share))) / total_of(-depths))
        values[:] = np.minimum(moved - depths.astype(np.float64), 0.0)
        if top == classes:
            named[:] = np.arange(top)
            continue
        bits = bits[8 * (head + -(-top * width // 8)) :]
        lows = bits[: top * low].reshape(top, low) @ (1 << np.arange(low))
        ones = np.flatnonzero(bits[top * low : top * low + top + ((classes - top) >> low)])
        named[:] = ((ones - np.arange(top)) << low | lows) + np.arange(top)
    return log_probs, ids


def payload(coding: str, records: Array, top: int, classes: int) -> bytes:
    header = struct.pack("<BBHII", 1, CODINGS[coding][0], top, classes, len(records))
    return header + records.astype(np.uint8).tobytes()
