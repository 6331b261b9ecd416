"""Error feedback conserves what is given to it, through restarts and new SPECs."""

import numpy as np
import pytest
from kit.reference import KINDS, rounded_last, values_of
from kit.specs import SATURATION, SPECS, coding_of, same_bits

from narrows.compression import (
    ErrorFeedback,
    accumulate,
    check,
    decode,
    parse,
)


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
        coding = coding_of(spec)
        inexact = coding in SATURATION and SATURATION[coding] == 0.0
        assert np.allclose(decoded + feedback.residual, given, rtol=0, atol=2.0**-22 if inexact else 0.0)
        if parse(spec).sparse and not coding:
            assert not np.any((decoded != 0) & (feedback.residual != 0))
        feedback.restore(payload)
        assert np.allclose(feedback.residual, given, rtol=0, atol=2.0**-22 if inexact else 0.0)
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
    assert dense.state_dict() == {"step": 0}
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


@pytest.mark.parametrize(
    "spec",
    ["topk:0.02+2bit", "sign", "randk:0.1", "cycle:0.2/0.3+sign", "threshold:1"],
)
def test_error_feedback_sends_all_in_the_end(spec: str) -> None:
    """Updates that stop: what was sent then comes to their sum."""
    count = 3000
    feedback = ErrorFeedback(parse(spec), count)
    update, sent = values_of("normal", count), np.zeros(count, np.float32)
    for step in range(600):
        accumulate(feedback.encode(update if step < 3 else np.zeros(count, np.float32)), 1.0, sent)
    assert np.linalg.norm(sent - 3 * update) < (0.6 if spec.startswith("threshold") else 0.06) * np.linalg.norm(
        3 * update
    )


def test_decay() -> None:
    update = values_of("normal", 1000)
    feedback = ErrorFeedback(parse("topk:0.1"), 1000, decay=0.5)
    feedback.encode(update)
    assert feedback.residual is not None
    before = feedback.residual.copy()
    out = np.zeros(1000, np.float32)
    decode(feedback.encode(update), out)
    np.testing.assert_array_equal(out + feedback.residual, np.float32(0.5) * before + update)
    with pytest.raises(ValueError, match="decay must be from 0 to 1, not 2"):
        ErrorFeedback(parse("topk:0.1"), 1000, decay=2)


@pytest.mark.parametrize(
    "chain",
    [("topk:0.05+int8", "dense", "topk:64/4096+2bit", "cycle:0.15/0.24+sign", "sign", "int4", "dense")],
)
def test_the_spec_changes_in_mid_run(chain: tuple[str, ...]) -> None:
    """Nothing is lost: through all changes, restarts between them included, sent + residual is what was given."""
    count = 5000
    feedback = ErrorFeedback(parse(chain[0]), count, seed=5)
    given, sent = np.zeros(count), np.zeros(count, np.float32)
    rng = np.random.default_rng(2)
    for number, spec in enumerate(chain):
        if number % 2:
            feedback.change(parse(spec))
        else:
            state = feedback.state_dict()
            feedback = ErrorFeedback(parse(spec), count, seed=5)
            feedback.load_state_dict(state)
        for _ in range(3):
            update = rng.standard_normal(count, dtype=np.float32)
            given += update
            accumulate(feedback.encode(update), 1.0, sent)
        residual = np.zeros(count) if feedback.residual is None else feedback.residual
        np.testing.assert_allclose(sent + residual, given, atol=3e-5)
    assert feedback.residual is None
    np.testing.assert_allclose(sent, given, atol=3e-5)


def test_every_encode_is_a_step() -> None:
    """It holds for any SPEC, so that a change of it finds the stream where it is."""
    for spec in ("dense", "int8", "topk:0.1", "lz4"):
        feedback = ErrorFeedback(parse(spec), 100)
        for _ in range(3):
            feedback.encode(np.ones(100, np.float32))
        assert feedback.memory.step == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huge"])  # those saturate
def test_what_the_last_update_loses_is_at_most_a_4062nd_of_its_block(kind: str) -> None:
    for count in (0, 1, 255, 257, 5003):
        feedback, update = ErrorFeedback(parse("topk:0.05+int8"), count), values_of(kind, count)
        feedback.encode(update)
        assert feedback.residual is not None
        given = feedback.residual.copy()
        cuts = [(0, count // 2), (count // 2, count)]
        payloads = feedback.encode_last(np.zeros(count, np.float32), cuts)
        assert same_bits(feedback.residual, given)
        for (begin, end), payload in zip(cuts, payloads, strict=True):
            values, out = given[begin:end], np.empty(end - begin, np.float32)
            decode(payload, out)
            assert same_bits(out, rounded_last(values))
            bound = np.repeat([np.abs(values[at : at + 256]).max() / 4062 for at in range(0, out.size, 256)], 256)
            assert np.all(np.abs(out.astype(np.float64) - values) <= np.maximum(bound[: out.size], 2.0**-134))
            assert len(payload) <= 16 + 2 * -(-out.size // 256) + 3 * -(-out.size // 2)
            assert check(payload, out.size, finite=True) == pytest.approx(np.square(out, dtype=np.float64).sum())
        feedback.forget()
        assert not feedback.residual.any()


def test_a_last_update_of_zeros_is_nearly_nothing() -> None:
    payload = ErrorFeedback(parse("sign"), 1 << 16).encode_last(np.zeros(1 << 16, np.float32), [(0, 1 << 16)])[0]
    assert len(payload) < 1000
