"""Conformance: one test on every SPEC and on chains of them; then the parser and error feedback."""

import numpy as np
import pytest
import reference
from reference import KINDS, Array, values_of

from narrows.compression import (
    ErrorFeedback,
    NonFiniteError,
    PayloadError,
    SpecError,
    accumulate,
    check,
    decode,
    parse,
    warm_up,
)
from narrows.compression.sparsifiers import SAMPLE_COUNT_MIN

SPECS = (
    "dense", "fp16", "int8", "lz4", "fp16+lz4", "int8+lz4",
    "topk:0.01", "topk:0.05", "topk:0.4", "topk:1.0", "topk:1e-05",
    "topk:0.01+fp16", "topk:0.01+int8", "topk:0.05+int8", "topk:0.05+int8+lz4", "topk:0.05+lz4",
)  # fmt: skip
SIZES = (0, 1, 3, 255, 256, 257, 5003, SAMPLE_COUNT_MIN - 1, SAMPLE_COUNT_MIN, SAMPLE_COUNT_MIN + 1)


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def conform(spec: str, values: Array) -> None:
    """Payload and its three uses equal the reference bit for bit; bounds hold; conservation holds."""
    compressor = parse(spec)
    given = values.copy()
    payload = compressor.encode(values)
    assert same_bits(values, given)
    assert bytes(payload) == b"".join(compressor.encode_parts(values))
    assert reference.unpacked(bytes(payload)) == reference.encode(spec, values)
    assert len(payload) <= compressor.payload_bytes_max(values.size)
    check(payload, values.size)
    indices, sent = reference.decode(bytes(payload))
    assert compressor.sparse or indices.size == values.size

    decoded = np.full(values.size, 7.0, np.float32)
    decode(payload, decoded)
    want = np.zeros(values.size, np.float32)
    if compressor.sparse:
        want[indices] += sent  # an underflow to -0.0 becomes 0.0
    else:
        want[:] = sent
    assert same_bits(decoded, want)
    for weight in (1.0, -1.0, 0.3):
        out = np.random.default_rng(3).standard_normal(values.size, dtype=np.float32)
        want = out.copy()
        want[indices] = want[indices] + np.float32(weight) * sent
        accumulate(payload, weight, out)
        assert same_bits(out, want)

    residual = values - decoded
    if compressor.lossless:
        assert same_bits(decoded, values)
    saturated = np.abs(values) > (65504 if "fp16" in spec else 3.36e38)
    exact = np.where(saturated, 0.0, values.astype(np.float64) - decoded)
    assert np.array_equal(exact, np.where(saturated, np.float32(0), residual))
    if "fp16" in spec:
        bound = np.maximum(np.abs(values[indices]) * 2.0**-11, 2.0**-25)
    elif "int8" in spec:
        top = [np.abs(values[indices][i : i + 256]).max() for i in range(0, indices.size, 256)]
        bound = (
            np.repeat(np.maximum(np.array(top, np.float64) * (1 + 2.0**-7) / 127, 2.0**-133), 256)[: indices.size] / 2
        )
    else:
        bound = np.zeros(indices.size)
    assert np.all((np.abs(exact[indices]) <= bound) | saturated[indices])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_conformance(spec: str, kind: str) -> None:
    for size in SIZES:
        conform(spec, values_of(kind, size))


def test_indices_above_float_precision() -> None:
    count = 2**24 + 3
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    values[-3:] = 9.0, -9.0, 9.0
    conform("topk:0.01+int8", values)
    out = np.zeros(count, np.float32)
    decode(parse("topk:1e-07").encode(values), out)  # k = 2: of three equal values, the first two
    assert np.flatnonzero(out).tolist() == [count - 3, count - 2]


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
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite(spec: str, bad: float) -> None:
    for size in (1, 300, SAMPLE_COUNT_MIN + 5):
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
        ("", "SPEC '': stage 1, '', is not known; known are dense, topk:DENSITY, fp16, int8, lz4, chained with '+'"),
        ("topk:0.01+bogus", "stage 2, 'bogus', is not known; known are dense, topk:DENSITY"),
        ("TOPK:0.01", "stage 1, 'TOPK:0.01', is not known"),
        ("int8+", "stage 2, '', is not known"),
        ("topk", "stage 1, 'topk', lacks its argument; write topk:DENSITY"),
        ("int8:4", "stage 1, 'int8:4', takes no argument; write int8"),
        ("topk:", "stage 1, 'topk:', is wrong: DENSITY must be a number above 0 and at most 1; write topk:DENSITY"),
        ("topk:0", "DENSITY must be a number above 0 and at most 1"),
        ("topk:1.01", "DENSITY must be"),
        ("topk:nan", "DENSITY must be"),
        ("topk:-0.1", "DENSITY must be"),
        ("topk: 0.1", "DENSITY must be"),
        ("int8+topk:0.1", "stage 2, 'topk:0.1', comes too late: it selects values, after 'int8'; the order is [dense"),
        ("fp16+int8", "stage 2, 'int8', also codes values, after 'fp16'; the order is [dense | topk:DENSITY] + [fp16"),
        ("lz4+lz4", "stage 2, 'lz4', also packs bytes, after 'lz4'"),
    ],
)
def test_parse_errors(spec: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(spec)
    assert isinstance(caught.value, ValueError)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", SPECS)
def test_error_feedback_conserves(spec: str) -> None:
    """Seide et al. 2014: what was sent plus the residual is what was given, at every step."""
    count = 70_001
    feedback = ErrorFeedback(parse(spec), count)
    rng = np.random.default_rng(5)
    for _ in range(4):
        update = rng.standard_normal(count, dtype=np.float32)
        given = update if feedback.residual is None else feedback.residual + update
        payload = feedback.encode(update)
        decoded = np.empty(count, np.float32)
        decode(payload, decoded)
        if feedback.residual is None:
            assert parse(spec).lossless
            assert same_bits(decoded, given)
            continue
        assert np.array_equal(decoded + feedback.residual, given)
        if parse(spec).sparse and not {"fp16", "int8"} & set(spec.split("+")):
            assert not np.any((decoded != 0) & (feedback.residual != 0))
        feedback.restore(payload)
        np.testing.assert_array_equal(feedback.residual, given)
        accumulate(payload, -1.0, feedback.residual)


def test_error_feedback_state() -> None:
    update = values_of("normal", 500)
    feedback = ErrorFeedback(parse("topk:0.1"), 500)
    feedback.encode(update)
    state = feedback.state_dict()
    twin = ErrorFeedback(parse("topk:0.1"), 500)
    twin.load_state_dict(state)
    assert bytes(twin.encode(update)) == bytes(feedback.encode(update))
    with pytest.raises(ValueError, match=r"residual is float32\[500\]; this stream needs float32\[499\]"):
        ErrorFeedback(parse("int8"), 499).load_state_dict(state)
    with pytest.raises(ValueError, match="update has 500 values; this stream has 499"):
        ErrorFeedback(parse("int8"), 499).encode(update)
    # A lossless compressor holds a residual only until its next update: after a change of SPEC, and after a refusal.
    dense = ErrorFeedback(parse("dense"), 500)
    assert dense.state_dict() == {}
    dense.load_state_dict(state)
    out = np.empty(500, np.float32)
    payload = dense.encode(update)
    decode(payload, out)
    assert same_bits(out, state["residual"] + update)
    assert dense.residual is None
    dense.restore(payload)
    decode(dense.encode(np.zeros(500, np.float32)), out)
    assert same_bits(out, state["residual"] + update)
    dense.load_state_dict({})
    assert dense.residual is None


def test_warm_up() -> None:
    warm_up()
