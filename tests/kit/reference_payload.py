"""Whole payloads in plain NumPy, written and read from the byte layout in docs/compression.md alone.

Shares no code with the package; the kernels are those of reference.py.
"""

import struct
from typing import Any

import lz4.block
import numpy as np

from kit import reference
from kit.reference import Array, gaps_of, keys_of

DENSE_COUNT_MAX = 64
CODINGS = ("fp32", "fp16", "int8", "bf16", "int4", "2bit", "sign", "uint8minmax", "int12")  # by wire id
RICE, FIXED, GROUPED, STRATA, STRIDE, STRIDED = 1, 2, 3, 4, 5, 7
# Sections of each value coding: (dtype, items, for every so many values).
SECTIONS: dict[str, tuple[tuple[Any, int, int], ...]] = {
    "fp32": ((np.float32, 1, 1),),
    "fp16": ((np.uint16, 1, 1),),
    "bf16": ((np.uint16, 1, 1),),
    "int8": ((np.uint16, 1, 256), (np.int8, 1, 1)),
    "int4": ((np.uint16, 1, 64), (np.uint8, 1, 2)),
    "int12": ((np.uint16, 1, 256), (np.uint8, 3, 2)),
    "2bit": ((np.uint8, 3, 512), (np.uint8, 1, 8), (np.uint8, 1, 8)),
    "sign": ((np.uint16, 1, 256), (np.uint8, 1, 8)),
    "uint8minmax": ((np.float32, 2, 2048), (np.uint8, 1, 1)),
}


# --- values ---


def value_part(coding: str, values: Array, stochastic: bool = False, key: tuple[int, int] = (0, 0)) -> bytes:
    if coding == "fp32":
        return values.tobytes()
    arrays = [np.empty(items * -(-values.size // per), dtype) for dtype, items, per in SECTIONS[coding]]
    extra = (stochastic, *key, 0, np.empty(256, np.uint32)) if coding in ("int8", "int4") else ()
    getattr(reference, f"encode_{coding}")(values, *extra, *arrays)
    return b"".join(array.tobytes() for array in arrays)


def values_in(coding: str, body: bytes, kept: int) -> tuple[Array, bytes]:
    """Return (values, the rest of the body)."""
    arrays = []
    for dtype, items, per in SECTIONS[coding]:
        count = items * -(-kept // per)
        arrays.append(np.frombuffer(body, dtype, count))
        body = body[arrays[-1].nbytes :]
    out = np.empty(kept, np.float32)
    if coding == "fp32":
        out[:] = arrays[0]
    else:
        getattr(reference, f"decode_{coding}")(*arrays, out)
    return out, body


# --- indices ---


def rice_part(indices: Array, count: int) -> tuple[int, bytes]:
    """Return (r, both streams)."""
    gaps, kept = gaps_of(indices), indices.size

    def size(r: int, high_sum: int) -> int:
        return -(-kept * r // 8) + -(-(kept + high_sum) // 8)

    middle = min(range(32), key=lambda r: size(r, (count - kept) >> r))
    first = min(max(middle - 2, 0), 28)
    r = min(range(first, first + 4), key=lambda r: size(r, int((gaps >> r).sum())))
    lows, unary = np.zeros(-(-kept * r // 8), np.uint8), np.zeros(-(-(kept + int((gaps >> r).sum())) // 8), np.uint8)
    reference.rice_encode(indices, r, lows, unary)
    return r, lows.tobytes() + unary.tobytes()


def index_part(indices: Array, count: int) -> tuple[int, int, bytes]:
    """Return (wire id, parameter, section) of the shortest coding, of equal ones that with the lowest id."""
    gaps, kept = gaps_of(indices), indices.size
    ways = [(RICE, *rice_part(indices, count))]
    width = int(gaps.max()).bit_length()
    fixed = np.zeros(-(-kept * width // 8), np.uint8)
    reference.fixed_encode(indices, width, fixed)
    ways.append((FIXED, width, fixed.tobytes()))
    parameters = np.zeros(-(-kept // 64) + 1, np.uint8)[: -(-kept // 64)]
    low_bits, unary_bits = reference.group_parameters(indices, parameters)
    lows, unary = np.zeros(-(-low_bits // 8), np.uint8), np.zeros(-(-unary_bits // 8), np.uint8)
    reference.grouped_encode(indices, parameters, lows, unary)
    even = np.append(parameters, np.zeros(parameters.size % 2, np.uint8)).reshape(-1, 2)
    nibbles = (even[:, 0] + 16 * even[:, 1]).astype(np.uint8)
    ways.append((GROUPED, low_bits, nibbles.tobytes() + lows.tobytes() + unary.tobytes()))
    return min(ways, key=lambda way: (len(way[2]), way[0]))


def indices_in(wire_id: int, parameter: int, part: bytes, kept: int, count: int) -> Array:
    body, indices, cursor = np.frombuffer(part, np.uint8), np.empty(kept, np.int64), np.zeros(6, np.uint64)
    if wire_id == STRATA:
        reference.strata(parameter, 0, kept, count, np.empty(256, np.uint32), indices)
    elif not kept:
        pass
    elif wire_id == STRIDE:
        indices[:] = np.arange(count)[parameter >> 16 :: parameter % 2**16]
    elif wire_id == STRIDED:
        places = np.arange(count)[parameter >> 16 :: parameter % 2**16]
        indices[:] = places[indices_in(RICE, part[0], part[1:], kept, places.size)]
    elif wire_id == RICE:
        low_bytes = -(-kept * parameter // 8)
        reference.rice_decode(body[:low_bytes], body[low_bytes:], parameter, cursor, indices)
    elif wire_id == FIXED:
        reference.fixed_decode(body, parameter, cursor, indices)
    else:
        groups = -(-kept // 64)
        head, low_bytes = -(-groups // 2), -(-parameter // 8)
        parameters = np.column_stack((body[:head] % 16, body[:head] // 16)).ravel()[:groups]
        lows, unary = body[head : head + low_bytes], body[head + low_bytes :]
        assert reference.grouped_decode(parameters, lows, unary, count, cursor, indices) >= 0
    return indices


# --- what is kept ---


def kept_of(density: float, count: int) -> int:
    return min(count, max(1, round(density * count)))


def selected(stage: str, values: Array) -> Array:
    """Return the rising indices that a sparsifier keeps: of equal magnitudes the lowest indices, and never zeros."""
    name, _, argument = stage.partition(":")
    keys = keys_of(values.view(np.uint32))
    if name == "threshold":
        return np.flatnonzero(np.abs(values) >= np.float32(float(argument)))
    if "/" in argument:
        k, block = map(int, argument.split("/"))
        indices, kept = np.empty(values.size, np.int64), np.empty(values.size, np.uint32)
        found = reference.compact_blocks(values.view(np.uint32), k, block, kept, kept, indices, kept.copy())
        return indices[:found]
    if name == "mstopk":
        keys = keys >> np.uint32(13)
    wanted = kept_of(float(argument), values.size)
    near = np.flatnonzero(
        keys >= np.partition(keys, values.size - wanted)[values.size - wanted]
    )  # sorting all takes seconds
    order = near[np.argsort(-keys[near].astype(np.int64), kind="stable")[:wanted]]
    return np.sort(order[keys[order] > 0])


# --- payloads ---


def encode(spec: str, values: Array, scaled: bool = True, step: int = 0) -> bytes:
    """Return the payload that parse(spec).encode(values) must equal byte for byte, except for lz4 (`unpacked`).

    scaled: randk multiplies values, as it does without error feedback.
    """
    count, kept, index = values.size, values, (0, 0, b"")
    coding, stochastic = "fp32", False
    for stage in spec.split("+"):
        name, _, argument = stage.partition(":")
        if name in CODINGS:
            coding, stochastic = name, argument == "stochastic"
        elif name in ("dense", "lz4") or count <= DENSE_COUNT_MAX:
            continue
        elif name == "randk":
            k, words = kept_of(float(argument), count), np.empty(256, np.uint32)
            reference.random_words(0, 0, 0, words)
            seed, indices = int(words[0]), np.empty(k, np.int64)
            reference.strata(seed, 0, k, count, words, indices)
            sizes = [(j + 1) * count // k - j * count // k for j in range(k)]
            kept = values[indices] * np.array(sizes if scaled else 1, np.float32)
            index = (STRATA, seed, b"")
        elif name == "cycle":
            density, _, share = argument.partition("/")
            stride = round(1 / float(density))
            phase = step % stride
            kept, parameter = values[phase::stride], (phase << 16 | stride) if phase < count else 0
            if share:
                chosen = selected(f"topk:{share}", kept) if kept.size else np.empty(0, np.int64)
                r, codes = rice_part(chosen, kept.size) if chosen.size else (0, b"")
                index = (STRIDED, parameter, bytes([r]) + codes) if chosen.size else (RICE, 0, b"")
                kept = kept[chosen]
            else:
                index = (STRIDE, parameter, b"")
        else:
            indices = selected(stage, values)
            kept = values[indices]
            index = index_part(indices, count) if indices.size else (RICE, 0, b"")
    head = struct.pack("<BBBBIII", 1, index[0], CODINGS.index(coding), 0, count, kept.size, index[1])
    return head + value_part(coding, kept, stochastic) + index[2]


def unpacked(payload: bytes) -> bytes:
    """Return the same payload without its lz4 stage."""
    if payload[3] == 0:
        return payload
    assert payload[3] == 1
    return payload[:3] + b"\0" + payload[4:16] + bytes(lz4.block.decompress(payload[16:]))


def decode(payload: bytes) -> tuple[Array, Array]:
    """Return (indices, values) of a valid payload."""
    payload = unpacked(payload)
    _, wire_id, coding, _, count, kept, parameter = struct.unpack("<BBBBIII", payload[:16])
    values, part = values_in(CODINGS[coding], payload[16:], kept)
    indices = indices_in(wire_id, parameter, part, kept, count) if wire_id else np.arange(count)
    return indices, values
