"""Every CPU kernel against the function of the same name in reference.py, bit for bit."""

from typing import Any

import numpy as np
import pytest
from kit import reference, reference_payload
from kit.reference import KINDS, Array, values_of

from narrows.compression.buffers import read_only
from narrows.compression.kernels import cpu
from narrows.compression.kernels.select import COUNTS

SIZES = (0, 1, 3, 15, 16, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000, 2047, 2048, 2049, 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_selection(kind: str) -> None:
    for size in SIZES:
        bits = read_only(values_of(kind, size).view(np.uint32))
        counts = np.empty(COUNTS, np.int64)
        for k in sorted({1, size // 100, size // 2, size} - {0}):
            if k > size:
                continue
            threshold, above = cpu.kth_largest_key(bits, k, counts)
            assert (threshold, above) == reference.kth_largest_key(bits, k, counts)
            assert cpu.count_above(bits, threshold) == reference.count_above(bits, threshold) == above
            for ties in {0, k - above, 1}:
                for room in (size, k, k // 2):
                    got = np.zeros((2, room), np.uint32)
                    want = got.copy()
                    found = cpu.compact(bits, threshold, ties, got[0], got[1])
                    assert found == reference.compact(bits, threshold, ties, want[0], want[1])
                    assert found > room or np.array_equal(got, want)
                for mask in (0x7FFFFFFF, 0x7FFFE000):
                    pairs = np.stack((np.arange(size, dtype=np.uint32), bits))
                    want = pairs.copy()
                    found = cpu.keep_top(mask, threshold & mask, ties, pairs[0], pairs[1])
                    assert found == reference.keep_top(mask, threshold & mask, ties, want[0], want[1])
                    assert np.array_equal(pairs[:, :found], want[:, :found])


@pytest.mark.parametrize("kind", KINDS)
def test_selection_in_blocks(kind: str) -> None:
    for size in SIZES:
        bits = read_only(values_of(kind, size).view(np.uint32))
        for k, block in ((1, 1), (1, 64), (3, 100), (64, 64), (8, 512), (30, 1000), (5, 10_000)):
            room = size // block * k + -(-k * (size % block) // block)
            got, want = np.zeros((2, room), np.uint32), np.zeros((2, room), np.uint32)
            places, keys = np.empty(block, np.uint32), np.empty(block, np.uint32)
            found = cpu.compact_blocks(bits, k, block, places, keys, got[0], got[1])
            assert found == reference.compact_blocks(bits, k, block, places, keys, want[0], want[1])
            assert np.array_equal(got, want)


def test_sampling() -> None:
    bits = read_only(values_of("normal", 10_000).view(np.uint32))
    for group_lines in (16, 32, 64, 128):
        got = np.empty(bits.size // (16 * group_lines) * 16, np.uint32)
        want = got.copy()
        cpu.sample_keys(bits, group_lines, got)
        reference.sample_keys(bits, group_lines, want)
        assert np.array_equal(got, want)


def test_philox() -> None:
    """Random123's known answers for philox4x32-10; then words, whole and alone."""
    assert reference.philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for key, block in (((0, 0), 0), ((7, 2**32 - 1), 5), ((2**32 - 1, 1), 2**26 - 1)):
        got, want = np.empty(256, np.uint32), np.empty(256, np.uint32)
        cpu.random_words(*key, block, got)
        reference.random_words(*key, block, want)
        assert np.array_equal(got, want)
    words = np.empty(256, np.uint32)
    for kept, count in ((1, 1), (3, 1000), (300, 300), (700, 2**32 - 1)):
        for begin in (0, 256):
            got, want = np.empty(max(kept - begin, 0), np.uint32), np.empty(max(kept - begin, 0), np.int64)
            cpu.strata(9, begin, kept, count, words, got)
            reference.strata(9, begin, kept, count, words, want)
            assert np.array_equal(got, want)
            cpu.strided(3, 20, begin, got)
            reference.strided(3, 20, begin, want)
            assert np.array_equal(got, want)
    got = np.arange(0, 65536, 7, dtype=np.uint32)
    want = got.copy()
    cpu.stretch(11, 65535, got)
    reference.stretch(11, 65535, want)
    assert np.array_equal(got, want) and got[1] == 11 + 7 * 65535


def chunks(decode: Any, fields: int, kept: int, sizes: tuple[int, ...]) -> Array:
    """All indices, read a few at a time, with one cursor."""
    cursor, out, begin = np.zeros(fields, np.uint64), np.empty(kept, np.uint32), 0
    for i in range(kept):
        size = min(sizes[i % len(sizes)], kept - begin)
        decode(cursor, out[begin : begin + size])
        begin += size
        if begin == kept:
            break
    return out


def packed(bits: int) -> Array:
    return np.zeros((bits + 63) // 64 + 2, np.uint64)


def byte_part(array: Array, bits: int) -> Array:
    """Return the bytes of so many bits as a payload has them: read-only, at an odd address, and nothing after them."""
    size = (bits + 7) // 8
    return read_only(np.append(np.zeros(3, np.uint8), array.view(np.uint8)[:size])[3:])


def test_checks_of_hostile_indices() -> None:
    """The sections of any bytes: as many ones as are said, and the last index, or a refusal."""
    rng, found = np.random.default_rng(3), np.zeros((3, 2), np.int64)
    for _ in range(400):
        kept, r = int(rng.integers(1, 700)), int(rng.integers(0, 14))
        unary = np.packbits(rng.permutation(np.arange(kept * int(rng.integers(1, 4))) < kept), bitorder="little")
        unary[-1] |= np.uint8(rng.choice((1, 128)))
        kept = int(np.unpackbits(unary).sum()) + int(rng.integers(0, 12) == 0)
        nibbles = rng.integers(0, int(rng.integers(1, 17)), -(-kept // 64)).astype(np.uint8)
        bits = kept * r, int(np.minimum(64, kept - 64 * np.arange(nibbles.size)) @ nibbles)
        lows = [rng.choice((0, 255, 7, 90, 201), -(-size // 8)).astype(np.uint8) for size in bits]
        for part, size in zip(lows, bits, strict=True):
            if size % 8:
                part[-1] &= (1 << size % 8) - 1
        pairs = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
        parts = [byte_part(each, 8 * each.size) for each in (*lows, pairs[0::2] | pairs[1::2] << 4, unary)]
        count = int(rng.choice((1, kept, kept << 4, kept << 16, 2**32 - 1)))
        width = int(rng.integers(0, 33))
        coded = byte_part(
            np.packbits(rng.integers(0, 2, kept * width).astype(np.uint8), bitorder="little"), kept * width
        )
        cases = (
            ("rice_last_index", (parts[0], parts[3], kept, r, count)),
            ("grouped_last_index", (parts[2], parts[1], parts[3], kept, count)),
            ("fixed_last_index", (coded, width, kept)),
        )
        for number, (name, arguments) in enumerate(cases):
            last = getattr(cpu, name)(*arguments)
            assert last == getattr(reference, name)(*arguments), (name, kept, r, width, count)
            found[number, int(last < 0)] += 1
    assert found[:2].min() > 50 and found[2, 0] == 400


@pytest.mark.parametrize("density", [0.0001, 0.01, 0.3, 1.0, "clustered", "regular"])
def test_index_codings(density: float | str) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 3, 257, 4_000 if density in (0.3, 1.0) else 30_000):  # the reference goes bit by bit
        if density == "clustered":
            places = np.flatnonzero(rng.random(count) < np.where(np.arange(count) // 500 % 8 == 0, 0.4, 0.002))
        elif density == "regular":
            places = np.arange(7, count, 16)
        else:
            assert isinstance(density, float)
            places = np.sort(rng.choice(count, max(1, round(density * count)), replace=False))
        indices = read_only((places if places.size else np.array([count // 2])).astype(np.uint32))
        kept, gaps = indices.size, reference.gaps_of(indices)
        for r in (0, 1, 3, 4, 5, 6, 7, 31):
            unary_bits = kept + int((gaps >> r).sum())
            got_lows, got_unary = packed(kept * r), packed(unary_bits)
            want_lows, want_unary = got_lows.copy(), got_unary.copy()
            assert cpu.rice_encode(indices, r, got_lows, got_unary) == unary_bits
            assert reference.rice_encode(indices, r, want_lows, want_unary) == unary_bits
            assert np.array_equal(got_lows, want_lows)
            assert np.array_equal(got_unary, want_unary)
            lows, unary = read_only(got_lows), read_only(got_unary)
            streams = byte_part(got_lows, kept * r), byte_part(got_unary, unary_bits)
            for limit in (count, int(indices[-1]) + 1, int(indices[-1])):
                last = cpu.rice_last_index(*streams, kept, r, limit)
                assert last == reference.rice_last_index(*streams, kept, r, limit)
                assert last == (indices[-1] if limit > indices[-1] else -1)
            assert cpu.rice_last_index(*streams, kept + 1, r, count) == -1
            for kernels in (cpu, reference):

                def rice(cursor: Array, out: Array, kernels: Any = kernels, r: int = r) -> None:
                    kernels.rice_decode(lows, unary, r, cursor, out)  # noqa: B023

                for sizes in ((kept,), (1, 5, 64, 1)):
                    assert np.array_equal(chunks(rice, 4, kept, sizes), indices)
        for first in (0, 5, 28):
            got, want = np.empty(4, np.int64), np.empty(4, np.int64)
            cpu.rice_costs(indices, first, got)
            reference.rice_costs(indices, first, want)
            assert np.array_equal(got, want)

        got_p, want_p = np.empty(-(-kept // 64), np.uint8), np.empty(-(-kept // 64), np.uint8)
        low_bits, unary_bits = cpu.group_parameters(indices, got_p)
        assert (low_bits, unary_bits) == reference.group_parameters(indices, want_p)
        assert np.array_equal(got_p, want_p)
        got_lows, got_unary = packed(low_bits), packed(unary_bits)
        want_lows, want_unary = got_lows.copy(), got_unary.copy()
        assert cpu.grouped_encode(indices, read_only(got_p), got_lows, got_unary) == unary_bits
        assert reference.grouped_encode(indices, want_p, want_lows, want_unary) == unary_bits
        assert np.array_equal(got_lows, want_lows)
        assert np.array_equal(got_unary, want_unary)
        parameters, lows, unary = read_only(got_p), read_only(got_lows), read_only(got_unary)
        nibbles = np.append(got_p, np.zeros(got_p.size % 2, np.uint8))
        nibbles = byte_part(nibbles[0::2] | nibbles[1::2] << 4, 8 * -(-got_p.size // 2))
        streams = byte_part(got_lows, low_bits), byte_part(got_unary, unary_bits)
        for limit in (count, int(indices[-1]) + 1, int(indices[-1])):
            last = cpu.grouped_last_index(nibbles, *streams, kept, limit)
            assert last == reference.grouped_last_index(nibbles, *streams, kept, limit)
            assert last == (indices[-1] if limit > indices[-1] else -1)
        assert cpu.grouped_last_index(nibbles, *streams, kept + 1, count) == -1
        for kernels in (cpu, reference):

            def grouped(cursor: Array, out: Array, kernels: Any = kernels) -> None:
                last = kernels.grouped_decode(parameters, lows, unary, count, cursor, out)  # noqa: B023
                assert last == out[-1]

            for sizes in ((kept,), (1, 5, 64, 1)):
                assert np.array_equal(chunks(grouped, 6, kept, sizes), indices)
            limited = kernels.grouped_decode(
                parameters, lows, unary, int(indices[-1]), np.zeros(6, np.uint64), np.empty(kept, np.uint32)
            )
            assert limited == -1

        assert cpu.largest_gap(indices) == reference.largest_gap(indices) == gaps.max()
        width = int(gaps.max()).bit_length()
        got_words, want_words = packed(kept * width), packed(kept * width)
        cpu.fixed_encode(indices, width, got_words)
        reference.fixed_encode(indices, width, want_words)
        assert np.array_equal(got_words, want_words)
        words = read_only(got_words)
        data = byte_part(got_words, kept * width)
        assert cpu.fixed_last_index(data, width, kept) == reference.fixed_last_index(data, width, kept) == indices[-1]
        for kernels in (cpu, reference):

            def fixed(cursor: Array, out: Array, kernels: Any = kernels) -> None:
                kernels.fixed_decode(words, width, cursor, out)  # noqa: B023

            for sizes in ((kept,), (1, 5, 64, 1)):
                assert np.array_equal(chunks(fixed, 2, kept, sizes), indices)


@pytest.mark.parametrize("kind", KINDS)
def test_value_codings(kind: str) -> None:
    for size in SIZES:
        values = read_only(values_of(kind, size))
        assert cpu.largest_key(values) == reference.largest_key(values)
        for coding, sections in reference_payload.SECTIONS.items():
            if coding == "fp32":
                continue
            random: tuple[Any, ...] = ((),)
            if coding in ("int8", "int4"):
                drawn = [(stochastic, 3, 2**32 - 1, first) for stochastic in (False, True) for first in (0, 8)]
                random = tuple((*each, np.empty(256, np.uint32)) for each in drawn)
            for extra in random:
                got = [np.full(items * -(-size // per), 77, dtype) for dtype, items, per in sections]
                want = [array.copy() for array in got]
                largest = getattr(cpu, f"encode_{coding}")(values, *extra, *got)
                assert largest == getattr(reference, f"encode_{coding}")(values, *extra, *want)
                for a, b in zip(got, want, strict=True):
                    assert np.array_equal(a.view(np.uint8), b.view(np.uint8)), (coding, size, extra[:1])
                out, expected = np.empty(size, np.float32), np.empty(size, np.float32)
                getattr(cpu, f"decode_{coding}")(*map(read_only, got), out)
                getattr(reference, f"decode_{coding}")(*want, expected)
                assert np.array_equal(out.view(np.uint32), expected.view(np.uint32)), (coding, size)


@pytest.mark.parametrize("kind", KINDS)
def test_adding(kind: str) -> None:
    weight = np.float32(0.3)
    for size in SIZES:
        values = read_only(values_of(kind, size))
        rng = np.random.default_rng(size)
        indices = read_only(np.sort(rng.permutation(2 * size)[:size]).astype(np.uint32))
        got = rng.standard_normal(2 * size, dtype=np.float32)
        want = got.copy()
        cpu.add_fp32(values, weight, got[:size])
        reference.add_fp32(values, weight, want[:size])
        cpu.scatter_add_fp32(values, indices, weight, got)
        reference.scatter_add_fp32(values, indices, weight, want)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_every_half() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for coding in ("fp16", "bf16"):
        got, want = np.empty(halves.size, np.float32), np.empty(halves.size, np.float32)
        getattr(cpu, f"decode_{coding}")(read_only(halves), got)
        getattr(reference, f"decode_{coding}")(halves, want)
        np.testing.assert_array_equal(got, want)
        # Ties and their neighbours: halfway between each two halves, and one float32 to either side.
        finite = np.sort(want[np.isfinite(want)])
        middle = finite[1:] / np.float32(2) + finite[:-1] / np.float32(2)
        values = read_only(
            np.concatenate((np.nextafter(middle, np.float32(-1e38)), middle, np.nextafter(middle, np.float32(1e38))))
        )
        got_halves, want_halves = np.empty(values.size, np.uint16), np.empty(values.size, np.uint16)
        getattr(cpu, f"encode_{coding}")(values, got_halves)
        getattr(reference, f"encode_{coding}")(values, want_halves)
        np.testing.assert_array_equal(got_halves, want_halves)
