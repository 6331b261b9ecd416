"""The specification of narrows.compression in plain NumPy: every kernel under its name, its arguments in its order.

Nothing here is fast or shares code with the package. At the end: payloads written and read from the layout alone,
and the values that the tests use.
"""

import struct
from typing import Any

import lz4.block
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BLOCK = 256
SCALE_MAX = 0x7BFF


def keys_of(bits: Array) -> Array:
    return bits & np.uint32(0x7FFFFFFF)


# --- selection ---


def sample_keys(bits: Array, group_lines: int, keys: Array) -> None:
    for group in range(keys.size // 16):
        line = group * group_lines + ((group * 2654435769 % 2**32) >> 25) % group_lines
        keys[group * 16 : group * 16 + 16] = keys_of(bits[line * 16 : line * 16 + 16])


def kth_largest_key(bits: Array, k: int, counts: Array) -> tuple[int, int]:
    keys = np.sort(keys_of(bits))[::-1]
    key = int(keys[k - 1])
    return key, int((keys > key).sum())


def compact(bits: Array, above: int, ties: int, indices: Array, kept: Array) -> int:
    keys = keys_of(bits)
    places = np.sort(np.concatenate((np.flatnonzero(keys > above), np.flatnonzero(keys == above)[:ties])))
    if places.size > indices.size:
        return indices.size + 1
    indices[: places.size] = places
    kept[: places.size] = bits[places]
    return places.size


# --- Rice coding; bits run from the least significant of each byte ---


def gaps_of(indices: Array) -> Array:
    return np.diff(indices.astype(np.int64), prepend=-1) - 1


def rice_costs(indices: Array, first: int, costs: Array) -> None:
    for j in range(4):
        costs[j] = ((gaps_of(indices) >> (first + j)) + 1 + first + j).sum()


def rice_encode(indices: Array, r: int, lows: Array, unary: Array) -> int:
    gaps = gaps_of(indices)
    low_bits = (gaps[:, None] >> np.arange(r)) & 1
    ends = np.cumsum((gaps >> r) + 1)
    unary_bits = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    unary_bits[ends - 1] = 1
    for words, stream in ((lows, low_bits.ravel().astype(np.uint8)), (unary, unary_bits)):
        packed = np.packbits(stream, bitorder="little")
        words.view(np.uint8)[: packed.size] = packed
    return unary_bits.size


def rice_last_index(lows: Array, unary: Array, kept: int, r: int, count: int) -> int:
    ones = np.flatnonzero(np.unpackbits(unary.view(np.uint8), bitorder="little"))
    if ones.size != kept:
        return -1
    low_bits = np.unpackbits(lows.view(np.uint8), count=kept * r, bitorder="little").reshape(kept, r)
    low_sum = sum(int(bits.sum()) << j for j, bits in enumerate(low_bits.T.astype(np.int64)))
    index = ((int(ones[-1]) + 1 - kept) << r) + low_sum + kept - 1
    return index if index < count else -1


def rice_decode(lows: Array, unary: Array, r: int, indices: Array) -> None:
    kept = indices.size
    ones = np.flatnonzero(np.unpackbits(unary.view(np.uint8), bitorder="little"))
    low_bits = np.unpackbits(lows.view(np.uint8), count=kept * r, bitorder="little").reshape(kept, r)
    low = (low_bits.astype(np.int64) << np.arange(r)).sum(axis=1)
    gaps = ((np.diff(ones, prepend=-1) - 1) << r) + low
    indices[:] = np.cumsum(gaps + 1) - 1


# --- value codings ---


def largest_key(values: Array) -> int:
    return int(keys_of(values.view(np.uint32)).max(initial=0))


def encode_fp16(values: Array, halves: Array) -> int:
    halves[:] = np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    return largest_key(values)


def decode_fp16(halves: Array, out: Array) -> None:
    out[:] = halves.view(np.float16)


def add_fp16(halves: Array, weight: np.float32, out: Array) -> None:
    out[:] = out + weight * halves.view(np.float16).astype(np.float32)


def scatter_add_fp16(halves: Array, indices: Array, weight: np.float32, out: Array) -> None:
    out[indices] = out[indices] + weight * halves.view(np.float16).astype(np.float32)


def float_of_bf16(patterns: Array) -> Array:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def encode_int8(values: Array, scales: Array, codes: Array) -> int:
    for block in range(scales.size):
        part = values[block * BLOCK : (block + 1) * BLOCK]
        exact = np.abs(part).max(keepdims=True) / np.float32(127)
        scales[block] = min((int(exact.view(np.uint32)[0]) + 0xFFFF) >> 16, SCALE_MAX)
        scale = float_of_bf16(scales[block : block + 1])
        codes[block * BLOCK : (block + 1) * BLOCK] = np.clip(np.rint(part / scale), -127, 127) if scale > 0 else 0
    return largest_key(values)


def decode_int8(scales: Array, codes: Array, out: Array) -> None:
    out[:] = codes.astype(np.float32) * np.repeat(float_of_bf16(scales), BLOCK)[: codes.size]


def add_int8(scales: Array, codes: Array, weight: np.float32, out: Array) -> None:
    values = np.empty(codes.size, np.float32)
    decode_int8(scales, codes, values)
    out[:] = out + weight * values


def scatter_add_int8(scales: Array, codes: Array, indices: Array, weight: np.float32, out: Array) -> None:
    values = np.empty(codes.size, np.float32)
    decode_int8(scales, codes, values)
    out[indices] = out[indices] + weight * values


def add_fp32(values: Array, weight: np.float32, out: Array) -> None:
    out[:] = out + weight * values


def scatter_add_fp32(values: Array, indices: Array, weight: np.float32, out: Array) -> None:
    out[indices] = out[indices] + weight * values


# --- whole payloads, from the byte layout in payload.py ---


def top_k(values: Array, density: float) -> Array:
    """Rising indices of the k largest magnitudes, the lowest indices of equal ones, zeros never."""
    keys = keys_of(values.view(np.uint32))
    k = max(1, round(density * values.size))
    order = np.argsort(~keys, kind="stable")[:k]
    return np.sort(order[keys[order] > 0])


def _index_section(indices: Array, count: int) -> tuple[int, bytes]:
    gaps, kept = gaps_of(indices), indices.size

    def size(r: int, high_sum: int) -> int:
        return -(-kept * r // 8) + -(-(kept + high_sum) // 8)

    middle = min(range(32), key=lambda r: size(r, (count - kept) >> r))
    first = min(max(middle - 2, 0), 28)
    r = min(range(first, first + 4), key=lambda r: size(r, int((gaps >> r).sum())))
    lows, unary = np.zeros(-(-kept * r // 8), np.uint8), np.zeros(-(-(kept + int((gaps >> r).sum())) // 8), np.uint8)
    rice_encode(indices, r, lows, unary)
    return r, lows.tobytes() + unary.tobytes()


def encode(spec: str, values: Array) -> bytes:
    """The payload that parse(spec).encode(values) must equal byte for byte (lz4 aside: see unpacked)."""
    stages = spec.split("+")
    count, kept, parameter, index_part = values.size, values, 0, b""
    sparse = stages[0].startswith("topk:")
    if sparse:
        indices = top_k(values, float(stages[0][5:])) if count else np.empty(0, np.int64)
        kept = values[indices]
        if indices.size:
            parameter, index_part = _index_section(indices, count)
    if "fp16" in stages:
        halves = np.empty(kept.size, np.uint16)
        encode_fp16(kept, halves)
        coding, value_part = 1, halves.tobytes()
    elif "int8" in stages:
        scales, codes = np.empty(-(-kept.size // BLOCK), np.uint16), np.empty(kept.size, np.int8)
        encode_int8(kept, scales, codes)
        coding, value_part = 2, scales.tobytes() + codes.tobytes()
    else:
        coding, value_part = 0, kept.tobytes()
    return struct.pack("<BBBBIII", 1, sparse, coding, 0, count, kept.size, parameter) + value_part + index_part


def unpacked(payload: bytes) -> bytes:
    """The same payload without its lz4 stage."""
    if payload[3] == 0:
        return payload
    assert payload[3] == 1
    return payload[:3] + b"\0" + payload[4:16] + bytes(lz4.block.decompress(payload[16:]))


def decode(payload: bytes) -> tuple[Array, Array]:
    """(indices, values) of a valid payload."""
    payload = unpacked(payload)
    _, sparse, coding, _, count, kept, r = struct.unpack("<BBBBIII", payload[:16])
    body = np.frombuffer(payload, np.uint8, offset=16)
    blocks = -(-kept // BLOCK)
    values = np.empty(kept, np.float32)
    value_bytes = (4 * kept, 2 * kept, 2 * blocks + kept)[coding]
    if coding == 0:
        values[:] = body[:value_bytes].view(np.float32)
    elif coding == 1:
        decode_fp16(body[:value_bytes].view(np.uint16), values)
    else:
        decode_int8(body[: 2 * blocks].view(np.uint16), body[2 * blocks : value_bytes].view(np.int8), values)
    indices = np.arange(count)[:kept]
    if sparse and kept:
        low_bytes = -(-kept * r // 8)
        rice_decode(body[value_bytes : value_bytes + low_bytes], body[value_bytes + low_bytes :], r, indices)
    return indices, values


# --- test values ---

KINDS = ("normal", "zeros", "equal", "ties", "denormal", "wide", "huge", "rows")


def values_of(kind: str, count: int) -> Array:
    """float32[count]: every kind is what some real update looks like, or what breaks a kernel."""
    rng = np.random.default_rng(count)
    normal = rng.standard_normal(count, dtype=np.float32)
    values = {
        "normal": normal,
        "zeros": np.where(normal > 0, 0.0, -0.0),
        "equal": np.where(normal > 0, 1.5, -1.5),
        "ties": np.round(normal * 2) / 8,
        "denormal": normal * 1e-41,
        "wide": normal * 2.0 ** rng.integers(-120, 120, count),
        "huge": np.where(normal > 0, 3.4028235e38, normal),
        "rows": np.where(np.arange(count) // 64 % 37 == 5, normal, 0.0),
    }
    return values[kind].astype(np.float32)
