"""The specification of narrows.compression in plain NumPy: every kernel under its name, its arguments in its order.

Nothing here is fast or shares code with the package. reference_payload.py has the layouts and whole payloads; at the end
of this file are the values that the tests use.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def keys_of(bits: Array) -> Array:
    return bits & np.uint32(0x7FFFFFFF)


def float_of_bf16(patterns: Array) -> Array:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Array, dropped: int, largest: int) -> Array:
    """Round the keys of float32 values to 32 - `dropped` bits: to the nearer neighbour, or at a tie to the even one."""
    low = keys_of(values.view(np.uint32)).astype(np.int64) >> dropped
    exact = np.abs(values.astype(np.float64))
    below, above = (
        (np.minimum(low + up, 0x7F800000 >> dropped) << dropped).astype(np.uint32).view(np.float32).astype(np.float64)
        for up in (0, 1)
    )
    to_above = np.where(np.isinf(above), 2.0**128, above) - exact
    up = (to_above < exact - below) | ((to_above == exact - below) & (low % 2 == 1))
    result: Array = np.minimum(low + up, largest)
    return result


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


def count_above(bits: Array, above: int) -> int:
    return int((keys_of(bits) > above).sum())


def keep_top(mask: int, above: int, ties: int, indices: Array, kept: Array) -> int:
    keys = kept & np.uint32(mask)
    places = np.sort(np.concatenate((np.flatnonzero(keys > above), np.flatnonzero(keys == above)[:ties])))
    indices[: places.size], kept[: places.size] = indices[places], kept[places]
    return places.size


def compact_blocks(bits: Array, k: int, block: int, places: Array, keys: Array, indices: Array, kept: Array) -> int:
    found: list[int] = []
    for begin in range(0, bits.size, block):
        part = keys_of(bits[begin : begin + block])
        wanted = -(-k * part.size // block)
        order = np.argsort(~part, kind="stable")[:wanted]
        found += sorted(int(begin + i) for i in order if part[i])
    indices[: len(found)], kept[: len(found)] = found, bits[found]
    return len(found)


# --- random numbers ---


@cache  # tests ask for the same few blocks again and again
def philox(counter: int, key_low: int, key_high: int) -> list[int]:
    """Return the four words of Philox4x32-10 for the counter (counter, 0, 0, 0)."""
    c, k = [counter, 0, 0, 0], [key_low, key_high]
    for _ in range(10):
        even, odd = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [odd >> 32 ^ c[1] ^ k[0], odd % 2**32, even >> 32 ^ c[3] ^ k[1], even % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def random_words(key_low: int, key_high: int, block: int, words: Array) -> None:
    for j in range(64):
        words[j::64] = philox(64 * block + j, key_low, key_high)


def strided(phase: int, stride: int, begin: int, indices: Array) -> None:
    indices[:] = phase + np.arange(begin, begin + indices.size) * stride


def stretch(phase: int, stride: int, indices: Array) -> None:
    indices[:] = phase + indices.astype(np.int64) * stride


def strata(key: int, begin: int, kept: int, count: int, words: Array, indices: Array) -> None:
    for j in range(begin, begin + indices.size):
        if j % 256 == 0 or j == begin:
            random_words(key, 0, j // 256, words)
        first, end = j * count // kept, (j + 1) * count // kept
        indices[j - begin] = first + (int(words[j % 256]) * (end - first) >> 32)


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
    ones = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    if ones.size != kept:
        return -1
    low_bits = np.unpackbits(lows, count=kept * r, bitorder="little").reshape(kept, r)
    low_sum = sum(int(bits.sum()) << j for j, bits in enumerate(low_bits.T.astype(np.int64)))
    index = ((int(ones[-1]) + 1 - kept) << r) + low_sum + kept - 1
    return index if index < count else -1


def rice_decode(lows: Array, unary: Array, r: int, cursor: Array, indices: Array) -> None:
    """The cursor's last field, the indices found, is the only one used and kept."""
    begin, end = int(cursor[3]), int(cursor[3]) + indices.size
    ones = np.flatnonzero(np.unpackbits(unary.view(np.uint8), bitorder="little"))
    low_bits = np.unpackbits(lows.view(np.uint8), count=ones.size * r, bitorder="little").reshape(ones.size, r)
    low = (low_bits.astype(np.int64) << np.arange(r)).sum(axis=1)
    gaps = ((np.diff(ones, prepend=-1) - 1) << r) + low
    indices[:] = (np.cumsum(gaps + 1) - 1)[begin:end]
    cursor[3] = end


def group_parameters(indices: Array, parameters: Array) -> tuple[int, int]:
    gaps, low_bits, unary_bits = gaps_of(indices), 0, 0
    for group in range(parameters.size):
        part = gaps[64 * group : 64 * group + 64]
        first = min(max(max(int(part.sum()) // part.size, 1).bit_length() - 2, 0), 13)
        r = min((first, first + 1, first + 2), key=lambda r: int((part >> r).sum()) + r * part.size)
        parameters[group] = r
        low_bits += r * part.size
        unary_bits += int((part >> r).sum()) + part.size
    return low_bits, unary_bits


def grouped_encode(indices: Array, parameters: Array, lows: Array, unary: Array) -> int:
    low_bits: list[int] = []
    unary_bits: list[int] = []
    for i, gap in enumerate(gaps_of(indices).tolist()):
        r = int(parameters[i // 64])
        low_bits += [gap >> j & 1 for j in range(r)]
        unary_bits += [0] * (gap >> r) + [1]
    for words, stream in ((lows, low_bits), (unary, unary_bits)):
        packed = np.packbits(np.array(stream, np.uint8), bitorder="little")
        words.view(np.uint8)[: packed.size] = packed
    return len(unary_bits)


def grouped_last_index(nibbles: Array, lows: Array, unary: Array, kept: int, count: int) -> int:
    ones = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    if ones.size != kept:
        return -1
    widths = np.repeat(np.column_stack((nibbles & 15, nibbles >> 4)).ravel().astype(np.int64), 64)[:kept]
    bits = np.unpackbits(lows, bitorder="little")
    bits = np.append(bits, np.zeros(max(0, int(widths.sum()) - bits.size), np.uint8))
    at, index = 0, -1
    for zeros, r in zip((np.diff(ones, prepend=-1) - 1).tolist(), widths.tolist(), strict=True):
        index += 1 + (zeros << r) + sum(int(bit) << j for j, bit in enumerate(bits[at : at + r]))
        at += r
    return index if index < count else -1


def grouped_decode(parameters: Array, lows: Array, unary: Array, count: int, cursor: Array, indices: Array) -> int:
    """As rice_decode; the indices found are the cursor's field 5."""
    low_bits = np.unpackbits(lows.view(np.uint8), bitorder="little")
    ones = np.flatnonzero(np.unpackbits(unary.view(np.uint8), bitorder="little"))
    found, bit, index = [], 0, -1
    for i in range(int(cursor[5]) + indices.size):
        if i == ones.size:
            return -1
        r = int(parameters[i // 64])
        low = sum(int(low_bits[bit + j]) << j for j in range(r))
        bit += r
        zeros = int(ones[i]) - (int(ones[i - 1]) if i else -1) - 1
        index += (zeros << r) + low + 1
        if index >= count:
            return -1
        found.append(index)
    indices[:] = found[int(cursor[5]) :]
    cursor[5] = len(found)
    return index


# --- gaps of fixed width ---


def largest_gap(indices: Array) -> int:
    return int(gaps_of(indices).max(initial=0))


def fixed_encode(indices: Array, width: int, words: Array) -> None:
    packed = np.packbits(
        ((gaps_of(indices)[:, None] >> np.arange(width)) & 1).astype(np.uint8).ravel(), bitorder="little"
    )
    words.view(np.uint8)[: packed.size] = packed


def fixed_last_index(data: Array, width: int, kept: int) -> int:
    bits = np.unpackbits(data, count=kept * width, bitorder="little").reshape(kept, width)
    return int((bits.astype(np.int64) << np.arange(width)).sum()) + kept - 1


def fixed_decode(words: Array, width: int, cursor: Array, indices: Array) -> None:
    """The cursor's first field, gaps read, is the only one used and kept."""
    begin, end = int(cursor[0]), int(cursor[0]) + indices.size
    bits = np.unpackbits(words.view(np.uint8), count=end * width, bitorder="little").reshape(end, width)
    indices[:] = (np.cumsum((bits.astype(np.int64) << np.arange(width)).sum(axis=1) + 1) - 1)[begin:]
    cursor[0] = end


# --- value codings ---


def largest_key(values: Array) -> int:
    return int(keys_of(values.view(np.uint32)).max(initial=0))


def finite(values: Array) -> bool:
    return bool(np.isfinite(values).all())


def encode_fp16(values: Array, halves: Array) -> int:
    halves[:] = np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    return largest_key(values)


def decode_fp16(halves: Array, out: Array) -> None:
    out[:] = halves.view(np.float16)


def encode_bf16(values: Array, halves: Array) -> int:
    halves[:] = rounded(values, 16, 0x7F7F) | np.signbit(values) * 0x8000
    return largest_key(values)


def decode_bf16(halves: Array, out: Array) -> None:
    out[:] = float_of_bf16(halves)


def _codes(
    values: Array,
    stochastic: bool,
    key_low: int,
    key_high: int,
    first: int,
    words: Array,
    scales: Array,
    block: int,
    top: int,
    cap: int,
) -> Array:
    """Write codes from -top to top of every `block` values, and their scales."""
    codes = np.zeros(values.size, np.int64)
    for i in range(scales.size):
        part = values[i * block : (i + 1) * block]
        exact = np.abs(part).max(keepdims=True) / np.float32(top)
        scales[i] = min((int(exact.view(np.uint32)[0]) + 0xFFFF) >> 16, cap)
        scale = float_of_bf16(scales[i : i + 1])
        if not scale or not finite(part):
            continue
        code = part / scale
        if stochastic:
            random_words(key_low, key_high, (first + i) * block // 256, words)
            own = words[(first + i) * block % 256 :][: part.size]
            code = np.floor(code + (own >> 8).astype(np.float32) * np.float32(2.0**-24))
        codes[i * block : (i + 1) * block] = np.clip(np.rint(code), -top, top)
    return codes


def encode_int8(
    values: Array, stochastic: bool, key_low: int, key_high: int, first: int, words: Array, scales: Array, codes: Array
) -> int:
    codes[:] = _codes(values, stochastic, key_low, key_high, first, words, scales, 256, 127, 0x7BFF)
    return largest_key(values)


def decode_int8(scales: Array, codes: Array, out: Array) -> None:
    out[:] = codes.astype(np.float32) * np.repeat(float_of_bf16(scales), 256)[: codes.size]


def encode_int4(
    values: Array,
    stochastic: bool,
    key_low: int,
    key_high: int,
    first: int,
    words: Array,
    scales: Array,
    nibbles: Array,
) -> int:
    codes = _codes(values, stochastic, key_low, key_high, first, words, scales, 64, 7, 0x7DFF) % 16
    pairs = np.append(codes, np.zeros(codes.size % 2, np.int64)).reshape(-1, 2)
    nibbles[:] = pairs[:, 0] + 16 * pairs[:, 1]
    return largest_key(values)


def decode_int4(scales: Array, nibbles: Array, out: Array) -> None:
    codes = np.column_stack((nibbles % 16, nibbles // 16)).ravel()[: out.size].astype(np.int64)
    out[:] = (
        np.where(codes < 8, codes, codes - 16).astype(np.float32) * np.repeat(float_of_bf16(scales), 64)[: out.size]
    )


def encode_int12(values: Array, scales: Array, triples: Array) -> int:
    codes = _codes(values, False, 0, 0, 0, triples, scales, 256, 2047, 0x79FF) % 4096
    pairs = np.append(codes, np.zeros(codes.size % 2, np.int64)).reshape(-1, 2)
    words = (pairs[:, 0] + 4096 * pairs[:, 1]).astype("<u4")
    triples[:] = words.view(np.uint8).reshape(-1, 4)[:, :3].ravel()
    return largest_key(values)


def decode_int12(scales: Array, triples: Array, out: Array) -> None:
    low, middle, high = triples.reshape(-1, 3).T.astype(np.int64)
    codes = np.column_stack((low + 256 * (middle % 16), middle // 16 + 16 * high)).ravel()[: out.size]
    out[:] = (
        np.where(codes < 2048, codes, codes - 4096).astype(np.float32)
        * np.repeat(float_of_bf16(scales), 256)[: out.size]
    )


def rounded_last(values: Array) -> Array:
    """The values as a last update has them: in int12."""
    scales, triples = np.empty(-(-values.size // 256), np.uint16), np.empty(3 * -(-values.size // 2), np.uint8)
    encode_int12(values, scales, triples)
    out = np.empty_like(values)
    decode_int12(scales, triples, out)
    return out


def unit_of(part: Array, spare: int) -> float:
    """Return the unit of the fixed-point mean of `part`: 2**-(23 - spare) of the largest power of two in it."""
    exponent = max(largest_key(part) >> 23, 1)
    return 2.0 ** (exponent - 150 + spare)


def fixed_of(part: Array, unit: float) -> list[int]:
    return [int(x) for x in np.abs(part.astype(np.float64)) / unit]


def pack_above(values: Array, key: int, signs: bool, plane: Array) -> None:
    bits = np.signbit(values) if signs else keys_of(values.view(np.uint32)) > key
    plane[:] = np.packbits(bits, bitorder="little")


def encode_sign(values: Array, scales: Array, plane: Array) -> int:
    for i in range(scales.size):
        part = values[256 * i : 256 * i + 256]
        scales[i] = 0
        if finite(part):
            fixed, unit = fixed_of(part, unit_of(part, 0)), unit_of(part, 0)
            scales[i] = rounded(np.array([sum(fixed) // len(fixed) * unit], np.float32), 16, 0x7F7F)[0]
    pack_above(values, 0, True, plane)
    return largest_key(values)


def decode_sign(scales: Array, plane: Array, out: Array) -> None:
    negative = np.unpackbits(plane, count=out.size, bitorder="little")
    out[:] = np.repeat(float_of_bf16(scales), 256)[: out.size] * np.where(negative, np.float32(-1), np.float32(1))


def two_levels(part: Array) -> tuple[int, int]:
    """Return the patterns of the low and the high level of one block."""
    unit = unit_of(part, 1)
    fixed = fixed_of(part, unit)
    low = high = threshold = sum(fixed) // len(fixed)
    for _ in range(2):
        above = [x for x in fixed if x > threshold]
        if above:
            low, high = (sum(fixed) - sum(above)) // (len(fixed) - len(above)), sum(above) // len(above)
            threshold = (low + high) // 2
    low_pattern, high_pattern = rounded(np.array([low * unit, high * unit], np.float32), 19, 0xFEF)
    return int(low_pattern), int(high_pattern)


def level_of(pattern: int) -> np.float32:
    return np.float32(np.array(pattern << 19, np.uint32).view(np.float32))


def encode_2bit(values: Array, levels: Array, signs: Array, highs: Array) -> int:
    is_high = np.zeros(values.size, bool)
    for i in range(levels.size // 3):
        part = values[512 * i : 512 * i + 512]
        low, high = two_levels(part) if finite(part) else (0, 0)
        levels[3 * i : 3 * i + 3] = list((low | high << 12).to_bytes(3, "little"))
        middle = np.float32(level_of(low) * np.float32(0.5)) + np.float32(level_of(high) * np.float32(0.5))
        is_high[512 * i : 512 * i + 512] = np.abs(part) > middle
    pack_above(values, 0, True, signs)
    highs[:] = np.packbits(is_high, bitorder="little")
    return largest_key(values)


def decode_2bit(levels: Array, signs: Array, highs: Array, out: Array) -> None:
    for i in range(levels.size // 3):
        both = int.from_bytes(bytes(levels[3 * i : 3 * i + 3]), "little")
        part = slice(512 * i, min(512 * i + 512, out.size))
        negative = np.unpackbits(signs, count=out.size, bitorder="little")[part]
        is_high = np.unpackbits(highs, count=out.size, bitorder="little")[part]
        size = np.where(is_high, level_of(both >> 12), level_of(both & 0xFFF))
        out[part] = np.where(negative, -size, size)


def encode_uint8minmax(values: Array, ranges: Array, codes: Array) -> int:
    codes[:] = 0
    ranges[:] = 0
    half = np.float32(0.5)
    for i in range(ranges.size // 2):
        part = values[2048 * i : 2048 * i + 2048]
        if not finite(part):
            continue
        low, high = part.min(), part.max()
        step = (high * half - low * half) / np.float32(127.5)
        with np.errstate(over="ignore"):
            while np.isinf(low + np.float32(255) * step):
                step = np.nextafter(step, np.float32(0))
        ranges[2 * i : 2 * i + 2] = low + np.float32(0), step + np.float32(0)
        if step * half:
            code = np.rint((part * half - low * half) / (step * half))
            codes[2048 * i : 2048 * i + 2048] = np.clip(code, 0, 255)
    return largest_key(values)


def decode_uint8minmax(ranges: Array, codes: Array, out: Array) -> None:
    low, step = (np.repeat(ranges[j::2], 2048)[: codes.size] for j in (0, 1))
    out[:] = low + codes.astype(np.float32) * step


def add_fp32(values: Array, weight: np.float32, out: Array) -> None:
    out[:] = out + weight * values


def scatter_add_fp32(values: Array, indices: Array, weight: np.float32, out: Array) -> None:
    out[indices] = out[indices] + weight * values


# --- test values ---

KINDS = ("normal", "zeros", "equal", "ties", "denormal", "wide", "huge", "rows")


def values_of(kind: str, count: int) -> Array:
    """Return float32[count] of a kind. Each kind resembles a real update, or breaks a careless kernel."""
    rng = np.random.default_rng(count)
    normal = rng.standard_normal(count, dtype=np.float32)
    values: Array
    match kind:
        case "normal":
            values = normal
        case "zeros":
            values = np.where(normal > 0, 0.0, -0.0)
        case "equal":
            values = np.where(normal > 0, 1.5, -1.5)
        case "ties":
            values = np.round(normal * 2) / 8
        case "denormal":
            values = normal * 1e-41
        case "wide":
            values = normal * 2.0 ** rng.integers(-120, 120, count)
        case "huge":
            values = np.where(normal > 0, 3.4028235e38, normal)
        case "rows":
            values = np.where(np.arange(count) // 64 % 37 == 5, normal, 0.0)
        case _:
            raise ValueError(kind)
    return values.astype(np.float32)
