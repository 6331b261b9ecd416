"""Conformance: one test on every SPEC and on chains of them; then the parser."""

from functools import cache

import numpy as np
import pytest
from kit import reference, reference_payload
from kit.reference import KINDS, Array, values_of
from kit.specs import SATURATION, SPECS, VALUE_STAGES, coding_of, held, same_bits
from numba.core.dispatcher import Dispatcher

from narrows import compression
from narrows.compression import (
    ErrorFeedback,
    NonFiniteError,
    PayloadError,
    SpecError,
    accumulate,
    check,
    decode,
    indices,
    parse,
    warm_up,
)
from narrows.compression.kernels import cpu
from narrows.compression.reducers import DENSE_COUNT_MAX
from narrows.compression.selection import SAMPLE_COUNT_MIN

# The reference draws its random numbers one by one: only these are run at sizes where the selection samples.
LARGE = (
    "dense",
    "int8",
    "topk:0.01",
    "topk:0.4+lz4",
    "topk:0.05+int8+lz4",
    "topk:0.01+2bit",
    "mstopk:0.01",
    "mstopk:0.3",
    "cycle:0.15/0.24+sign",
    "cycle:1.0/0.01+int8+lz4",
)

SIZES = (
    0, 1, 3, DENSE_COUNT_MAX, DENSE_COUNT_MAX + 1, 255, 256, 257, 511, 512, 513, 2047, 2049, 5003,
    SAMPLE_COUNT_MIN - 1, SAMPLE_COUNT_MIN, SAMPLE_COUNT_MIN + 1,
)  # fmt: skip
OTHER_KINDS_SIZES = (1, DENSE_COUNT_MAX + 1, 513, 3001, SAMPLE_COUNT_MIN + 1)  # block edges depend on no value


def stated_rounding(coding: str, kept: Array) -> Array:
    """Bound on |x - decoded| of each kept value, from the docstring of its coding."""
    size = np.abs(kept.astype(np.float64))

    def largest(block: int) -> Array:
        tops = [size[i : i + block].max() for i in range(0, size.size, block)]
        return np.repeat(np.array(tops, np.float64), block)[: size.size]

    match coding.partition(":"):
        case ["", *_]:
            return np.zeros(size.size)
        case ["fp16", *_]:
            return np.maximum(size * 2.0**-11, 2.0**-25)
        case ["bf16", *_]:
            return np.maximum(size * 2.0**-8, 2.0**-134)
        case ["int8" | "int4" as name, _, rounding]:
            block, top = (256, 127) if name == "int8" else (64, 7)
            scale = np.maximum(largest(block) * (1 + 2.0**-7) / top, 2.0**-133)
            return scale * (1.0001 if rounding else 0.5)
        case ["uint8minmax", *_]:
            # Half a step, and the rounding of the sum minimum + code * step.
            return np.maximum(largest(2048) * 2 / 255 * 0.51, 2.0**-140)
        case _:
            # One level for many values: never further than the largest of the block (sign: than twice that).
            return largest(512 if coding == "2bit" else 256) * (1 + 2.0**-5) + 2.0**-149
    raise AssertionError


def conform(spec: str, values: Array) -> None:
    """Payload and its uses equal the reference bit for bit; bounds hold; conservation holds."""
    compressor = parse(spec)
    given = values.copy()
    scaled = not values.size or np.abs(values).max() < 1e35
    if not scaled:
        compressor = compressor.contraction()  # randk would take them beyond the largest float32
    payload = compressor.encode(values)
    assert same_bits(values, given)
    assert bytes(payload) == b"".join(compressor.encode_parts(values))
    assert reference_payload.unpacked(bytes(payload)) == reference_payload.encode(spec, values, scaled)
    assert len(payload) <= compressor.payload_bytes_max(values.size)
    check(payload, values.size)
    places, sent = reference_payload.decode(bytes(payload))
    sparse = compressor.sparse and values.size > DENSE_COUNT_MAX
    if sparse:
        assert np.array_equal(held(payload, values.size), places)
    else:
        assert indices(payload, values.size) is None

    decoded = np.full(values.size, 7.0, np.float32)
    decode(payload, decoded)
    want = np.zeros(values.size, np.float32)
    if sparse:
        want[places] += sent  # an underflow to -0.0 becomes 0.0
    else:
        want[:] = sent
    assert same_bits(decoded, want)
    for weight in (1.0, -1.0, 0.3):
        out = np.random.default_rng(3).standard_normal(values.size, dtype=np.float32)
        want = out.copy()
        want[places] = want[places] + np.float32(weight) * sent
        accumulate(payload, weight, out)
        assert same_bits(out, want)
    if compressor.lossless:
        assert same_bits(decoded, values)

    # Error feedback keeps the input without what was sent, exactly or to the stated rounding.
    contraction = compressor.contraction()
    if contraction is not compressor:
        payload = contraction.encode(values)
        assert reference_payload.unpacked(bytes(payload)) == reference_payload.encode(spec, values, scaled=False)
        places, sent = reference_payload.decode(bytes(payload))
    decoded[:] = 0.0
    decode(payload, decoded)
    residual = values - decoded
    coding = coding_of(spec)
    saturated = np.abs(values) > SATURATION.get(coding, np.inf)
    difference = values.astype(np.float64) - decoded
    assert np.array_equal(np.where(saturated, 0.0, difference), np.where(saturated, np.float32(0), residual))
    assert np.all(np.abs(difference - residual) <= np.abs(difference) * 2.0**-24 + 2.0**-150)
    bound = stated_rounding(coding, values[places])
    beyond = np.abs(values[places]) > SATURATION.get(coding.partition(":")[0], np.inf)
    assert np.all((np.abs(difference[places]) <= bound) | (beyond & (SATURATION.get(coding.partition(":")[0]) != 0.0)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_conformance(spec: str, kind: str) -> None:
    for size in SIZES if kind == "normal" else OTHER_KINDS_SIZES:
        if size < SAMPLE_COUNT_MIN - 1 or spec in LARGE:
            conform(spec, values_of(kind, size))


LARGE_COUNT = 2**24 + 3  # indices that float32 does not hold


@cache
def large_values() -> Array:
    values = np.random.default_rng(0).standard_normal(LARGE_COUNT, dtype=np.float32)
    values[-3:] = 9.0, -9.0, 9.0
    values.flags.writeable = False
    return values


@pytest.mark.parametrize("spec", ["topk:0.001+int8", "randk:0.0001+sign", "cycle:0.01/0.01+sign"])
def test_indices_above_float_precision(spec: str) -> None:
    payload = parse(spec).encode(large_values())
    assert reference_payload.unpacked(bytes(payload)) == reference_payload.encode(spec, large_values())
    check(payload, LARGE_COUNT)
    places, sent = reference_payload.decode(bytes(payload))
    assert places[-1] > 2**24 - 2**15
    assert np.array_equal(held(payload, LARGE_COUNT), places)
    out, want = np.full(LARGE_COUNT, 7.0, np.float32), np.zeros(LARGE_COUNT, np.float32)
    want[places] = sent
    decode(payload, out)
    assert np.array_equal(out, want)
    accumulate(payload, -1.0, out)
    assert not out.any()


def test_of_equal_values_above_float_precision_the_first_are_sent() -> None:
    out = np.zeros(LARGE_COUNT, np.float32)
    decode(parse("topk:1e-07").encode(large_values()), out)  # k = 2 of three
    assert np.flatnonzero(out).tolist() == [LARGE_COUNT - 3, LARGE_COUNT - 2]


@pytest.mark.parametrize(
    "spec", ["dense", *(spec for spec in VALUE_STAGES if "stochastic" not in spec), "cycle:1.0+int8"]
)
def test_large_arrays_are_coded_as_their_parts(spec: str) -> None:
    """Blocks know nothing of each other: what the whole decodes to is what pieces of whole blocks decode to."""
    values = large_values()
    whole, part = np.empty(LARGE_COUNT, np.float32), np.empty(LARGE_COUNT, np.float32)
    payload = parse(spec).encode(values)
    assert len(payload) <= parse(spec).payload_bytes_max(LARGE_COUNT)
    decode(payload, whole)
    for begin in range(0, LARGE_COUNT, 1 << 22):
        end = min(begin + (1 << 22), LARGE_COUNT)
        decode(parse(spec).encode(values[begin:end]), part[begin:end])
    assert same_bits(whole, part)
    total = np.zeros(LARGE_COUNT, np.float32)
    accumulate(payload, 1.0, total)
    assert np.array_equal(total, whole)


@pytest.mark.parametrize("period", [256, 1024])
def test_selection_is_exact_where_the_sample_misleads(period: int) -> None:
    """All large values in few columns of a matrix, or in one place: rank and ties must come out exact all the same."""
    values = np.random.default_rng(1).standard_normal(300_000, dtype=np.float32) * np.float32(1e-3)
    values[np.arange(values.size) % period < 3] += 1.0
    conform("topk:0.01", values)
    values[:20_000] = 5.0
    conform("topk:0.01", values)
    values[20_000:] = 0.0
    conform("topk:0.1", values)


@pytest.mark.parametrize("large_lines", ["sampled", "others"])
def test_selection_is_exact_on_an_adversarial_array(large_lines: str) -> None:
    """Large values exactly where the sample looks (threshold too high), or exactly where it does not (too low)."""
    count = 4 * SAMPLE_COUNT_MIN
    places = np.empty(count // 16, np.uint32)
    reference.sample_keys(np.arange(count, dtype=np.uint32), 16, places)
    values = np.random.default_rng(2).standard_normal(count, dtype=np.float32)
    seen = np.isin(np.arange(count), places)
    values[seen if large_lines == "sampled" else ~seen] *= np.float32(100.0)
    for density in (0.0001, 0.01, 0.1):  # with k above the number of large values in the first case, at 0.1
        conform(f"topk:{density}", values)


@pytest.mark.parametrize("spec", SPECS)
def test_non_finite(spec: str) -> None:
    for bad, size in ((np.nan, 1), (np.inf, 300), (-np.inf, 300), (np.nan, SAMPLE_COUNT_MIN + 5)):
        values = values_of("normal", size)
        values[size // 2 :: 7] = bad
        compressor, feedback = parse(spec), ErrorFeedback(parse(spec), size)
        if compressor.lossless:
            out = np.empty(size, np.float32)
            decode(compressor.encode(values), out)
            assert same_bits(out, values)
            continue
        with pytest.raises(NonFiniteError, match=f"of {size} values|of .* values are NaN or infinite"):
            compressor.encode(values)
        feedback.encode(values_of("ties", size))
        assert feedback.residual is not None
        before = feedback.residual.copy()
        with pytest.raises(NonFiniteError, match=f"{values[size // 2 :: 7].size} of {size} values"):
            feedback.encode(values)
        assert same_bits(feedback.residual, before)


def test_payloads_at_any_alignment_and_from_any_buffer() -> None:
    values = values_of("normal", 1003)
    for spec in SPECS:
        payload = parse(spec).encode(values)
        want = np.empty(1003, np.float32)
        decode(payload, want)
        for shift in range(1, 5):
            shifted = bytearray(shift) + bytes(payload)
            for buffer in (
                memoryview(shifted)[shift:],
                memoryview(bytes(shifted))[shift:],
                np.frombuffer(shifted, np.uint8)[shift:],
            ):
                out = np.empty(1003, np.float32)
                decode(buffer, out)
                assert same_bits(out, want)
                accumulate(buffer, -1.0, out)
                assert not out.any()


def test_dense_sends_the_values_themselves() -> None:
    values = values_of("normal", 1000)
    header, body = parse("dense").encode_parts(values)
    assert len(header) == 16
    assert np.shares_memory(np.frombuffer(body, np.float32), values)


def test_index_bits() -> None:
    """Rice within 0.06 bits of log2 C(n, k) / k for random indices (Golomb 1966)."""
    values = values_of("normal", 1_000_000)
    for density, entropy in ((0.01, 8.079), (0.05, 5.728)):
        spec = f"topk:{density}+int8"
        kept = round(density * values.size)
        bits = 8 * (len(parse(spec).encode(values)) - 16 - kept - 2 * -(-kept // 256)) / kept
        assert entropy < bits < entropy + 0.07


def test_wrong_arguments() -> None:
    compressor, payload = parse("int8"), parse("int8").encode(np.ones(4, np.float32))
    wrong: tuple[Array, ...] = (np.ones(4), np.ones((2, 2), np.float32), np.ones(8, np.float32)[::2])
    for values in wrong:
        with pytest.raises(TypeError, match="values must be a contiguous 1-D float32 array"):
            compressor.encode(values)
        with pytest.raises(TypeError, match="out must be"):
            decode(payload, values)
    fixed = np.ones(4, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        accumulate(payload, 1.0, fixed)
    with pytest.raises(PayloadError, match="is for 4 values where 5 are expected"):
        decode(payload, np.ones(5, np.float32))


@pytest.mark.parametrize(
    ("spec", "canonical", "lossless", "sparse"),
    [
        ("dense", "dense", True, False),
        ("lz4", "lz4", True, False),
        ("dense+lz4", "lz4", True, False),
        ("dense+int8", "int8", False, False),
        ("topk:.010", "topk:0.01", False, True),
        ("topk:1", "topk:1.0", False, True),
        ("topk:1e-3+int8+lz4", "topk:0.001+int8+lz4", False, True),
        ("cycle:.150/24e-2+sign", "cycle:0.15/0.24+sign", False, True),
        ("cycle:1/1", "cycle:1.0/1.0", False, True),
    ],
)
def test_parse(spec: str, canonical: str, lossless: bool, sparse: bool) -> None:
    compressor = parse(spec)
    assert (compressor.spec, compressor.lossless, compressor.sparse) == (canonical, lossless, sparse)
    assert parse(canonical).spec == canonical
    assert parse(canonical) == compressor


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("", "SPEC '': stage 1, '', is not known; known are dense, topk:DENSITY|K/BLOCK, mstopk"),
        ("topk:0.01+bogus", "stage 2, 'bogus', is not known; known are dense, topk:DENSITY|K/BLOCK, "),
        ("TOPK:0.01", "stage 1, 'TOPK:0.01', is not known"),
        ("int8+", "stage 2, '', is not known"),
        ("topk", "stage 1, 'topk', lacks its argument; write topk:DENSITY|K/BLOCK"),
        ("int8:4", "stage 1, 'int8:4', is wrong: the only other rounding is 'stochastic'; write int8[:stochastic]"),
        ("int4:", "stage 1, 'int4:', is wrong: nothing follows its colon; write int4[:stochastic]"),
        ("sign:1", "stage 1, 'sign:1', takes no argument; write sign"),
        ("topk:5/4", "K/BLOCK must be whole numbers, 1 <= K <= BLOCK <= 1048576; write topk:DENSITY|K/BLOCK"),
        ("topk:0/4", "K/BLOCK must be"),
        ("topk:64/4097000", "K/BLOCK must be"),
        ("threshold:0", "T must be a number from 1.5e-45 to 3.4e38"),
        ("threshold:inf", "T must be"),
        ("powersgd:2", "stage 1, 'powersgd:2', is not known"),
        ("randk:2", "DENSITY must be a number above 0 and at most 1; write randk:DENSITY"),
        ("topk:", "stage 1, 'topk:', is wrong: nothing follows its colon; write topk:DENSITY|K/BLOCK"),
        ("topk:0", "DENSITY must be a number above 0 and at most 1"),
        ("topk:1.01", "DENSITY must be"),
        ("topk:nan", "DENSITY must be"),
        ("topk:-0.1", "DENSITY must be"),
        ("topk: 0.1", "DENSITY must be"),
        ("cycle:1e-5", "DENSITY must be at least 1/65535; write cycle:DENSITY[/SHARE]"),
        ("cycle:1e-5/0.5", "DENSITY must be at least 1/65535"),
        ("cycle:0/0.5", "DENSITY must be a number above 0"),
        ("cycle:0.1/0", "SHARE must be a number above 0 and at most 1; write cycle:DENSITY[/SHARE]"),
        ("cycle:0.1/2", "SHARE must be"),
        ("cycle:0.1/", "SHARE must be"),
        ("cycle:0.1/0.5/0.5", "SHARE must be"),
        ("cycle", "lacks its argument; write cycle:DENSITY[/SHARE]"),
        ("int8+topk:0.1", "stage 2, 'topk:0.1', comes too late: it selects values, after 'int8'; the order is [dense"),
        (
            "fp16+int8",
            "stage 2, 'int8', also codes values, after 'fp16'; the order is [dense | topk:DENSITY|K/BLOCK | mstopk",
        ),
        ("lz4+lz4", "stage 2, 'lz4', also packs bytes, after 'lz4'"),
    ],
)
def test_parse_errors(spec: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(spec)
    assert isinstance(caught.value, ValueError)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_process_loads_every_kernel_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker after worker of one process begins here, and each that is forked."""
    warm_up()
    kernels = {name: kernel for name, kernel in vars(cpu).items() if isinstance(kernel, Dispatcher)}
    assert len(kernels) > 20 and not [name for name, kernel in kernels.items() if not kernel.signatures]
    monkeypatch.setattr(compression, "ErrorFeedback", None)
    warm_up()
