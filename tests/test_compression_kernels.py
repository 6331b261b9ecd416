"""Every CPU kernel against the function of the same name in reference.py, bit for bit."""

import numpy as np
import pytest
import reference
from reference import KINDS, values_of

from narrows.compression.buffers import read_only
from narrows.compression.kernels import cpu

SIZES = (0, 1, 3, 15, 16, 63, 64, 65, 255, 256, 257, 1000, 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_selection(kind: str) -> None:
    for size in SIZES:
        bits = read_only(values_of(kind, size).view(np.uint32))
        counts = np.empty(2048, np.int64)
        for k in sorted({1, size // 100, size // 2, size} - {0}):
            if k > size:
                continue
            threshold, above = cpu.kth_largest_key(bits, k, counts)
            assert (threshold, above) == reference.kth_largest_key(bits, k, counts)
            for ties in {0, k - above, 1}:
                for room in (size, k, k // 2):
                    got = np.zeros((2, room), np.uint32)
                    want = got.copy()
                    found = cpu.compact(bits, threshold, ties, got[0], got[1])
                    assert found == reference.compact(bits, threshold, ties, want[0], want[1])
                    assert found > room or np.array_equal(got, want)


def test_sampling() -> None:
    bits = read_only(values_of("normal", 10_000).view(np.uint32))
    for group_lines in (16, 32, 64, 128):
        got = np.empty(bits.size // (16 * group_lines) * 16, np.uint32)
        want = got.copy()
        cpu.sample_keys(bits, group_lines, got)
        reference.sample_keys(bits, group_lines, want)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("density", [0.0001, 0.01, 0.3, 1.0])
def test_rice(density: float) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 3, 257, 30_000):
        kept = max(1, round(density * count))
        indices = read_only(np.sort(rng.choice(count, kept, replace=False)).astype(np.uint32))
        for r in (0, 1, 7, 31):
            unary_bits = kept + int((reference.gaps_of(indices) >> r).sum())
            got_lows, got_unary = (
                np.zeros((kept * r + 63) // 64 + 2, np.uint64),
                np.zeros((unary_bits + 63) // 64, np.uint64),
            )
            want_lows, want_unary = got_lows.copy(), got_unary.copy()
            assert cpu.rice_encode(indices, r, got_lows, got_unary) == unary_bits
            assert reference.rice_encode(indices, r, want_lows, want_unary) == unary_bits
            assert np.array_equal(got_lows, want_lows)
            assert np.array_equal(got_unary, want_unary)
            lows, unary = read_only(got_lows), read_only(got_unary)
            for limit in (count, int(indices[-1]) + 1, int(indices[-1])):
                last = cpu.rice_last_index(lows, unary, kept, r, limit)
                assert last == reference.rice_last_index(lows, unary, kept, r, limit)
                assert last == (indices[-1] if limit > indices[-1] else -1)
            assert cpu.rice_last_index(lows, unary, kept + 1, r, count) == -1
            back = np.empty(kept, np.uint32)
            cpu.rice_decode(lows, unary, r, back)
            assert np.array_equal(back, indices)
            reference.rice_decode(lows, unary, r, back)
            assert np.array_equal(back, indices)
        for first in (0, 5, 28):
            got, want = np.empty(4, np.int64), np.empty(4, np.int64)
            cpu.rice_costs(indices, first, got)
            reference.rice_costs(indices, first, want)
            assert np.array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_value_codings(kind: str) -> None:
    weight = np.float32(0.3)
    for size in SIZES:
        values = read_only(values_of(kind, size))
        rng = np.random.default_rng(size)
        indices = read_only(np.sort(rng.permutation(2 * size)[:size]).astype(np.uint32))
        base = rng.standard_normal(2 * size, dtype=np.float32)
        halves, scales, codes = np.empty(size, np.uint16), np.empty(-(-size // 256), np.uint16), np.empty(size, np.int8)
        want_halves, want_scales, want_codes = halves.copy(), scales.copy(), codes.copy()
        assert cpu.encode_fp16(values, halves) == reference.encode_fp16(values, want_halves)
        assert cpu.encode_int8(values, scales, codes) == reference.encode_int8(values, want_scales, want_codes)
        assert cpu.largest_key(values) == reference.largest_key(values)
        assert np.array_equal(halves, want_halves)
        assert np.array_equal(scales, want_scales)
        assert np.array_equal(codes, want_codes)
        for name, coded in (("fp32", (values,)), ("fp16", (halves,)), ("int8", (scales, codes))):
            parts = tuple(read_only(part) for part in coded)
            for verb, arguments in (("decode", ()), ("add", (weight,)), ("scatter_add", (indices, weight))):
                if (verb, name) == ("decode", "fp32"):
                    continue
                got = base.copy() if verb == "scatter_add" else base[:size].copy()
                want = got.copy()
                getattr(cpu, f"{verb}_{name}")(*parts, *arguments, got)
                getattr(reference, f"{verb}_{name}")(*parts, *arguments, want)
                assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), (verb, name, size)


def test_every_half() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    got, want = np.empty(halves.size, np.float32), np.empty(halves.size, np.float32)
    cpu.decode_fp16(read_only(halves), got)
    reference.decode_fp16(halves, want)
    np.testing.assert_array_equal(got, want)
    # Ties and their neighbours: halfway between each two halves, and one float32 to either side.
    finite = np.sort(want[np.isfinite(want)])
    middle = (finite[1:] + finite[:-1]) / np.float32(2)
    values = read_only(
        np.concatenate((np.nextafter(middle, np.float32(-1e9)), middle, np.nextafter(middle, np.float32(1e9))))
    )
    got_halves, want_halves = np.empty(values.size, np.uint16), np.empty(values.size, np.uint16)
    cpu.encode_fp16(values, got_halves)
    reference.encode_fp16(values, want_halves)
    np.testing.assert_array_equal(got_halves, want_halves)
