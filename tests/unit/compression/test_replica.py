"""Checks an `ArrayReplica` (protocols/member/replica.py) against the obvious arrays, wherever its arrays live."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from kit.reference import Array
from kit.specs import SMALL_MODEL_SPECS

from narrows.compression import NonFiniteError, PayloadError, decode, parse
from narrows.compression.codecs import CODED, RAW, Piece, raw_pieces
from narrows.compression.device import kernels_for
from narrows.compression.device.home import DeviceHome
from narrows.compression.home import HOST, Home
from narrows.compression.replica import ArrayReplica, HostReplica
from narrows.protocols.config.key_ranges import parts

BEGIN, MIDDLE, END = 7, 307, 1007  # two fragments of one shard's keys
FRAGMENTS = ((BEGIN, MIDDLE), (MIDDLE, END))
CLOCKS = 12
MEMBERS: dict[str, Callable[[], Home[Array]]] = {
    "host": lambda: HOST,
    "device": lambda: DeviceHome(kernels_for("host"), lambda count: np.zeros(count, np.float32), "host"),
}


def made(member: str, spec: str) -> HostReplica:
    home = MEMBERS[member]()
    feedbacks = [(keys, home.feedback(parse(spec), keys[1] - keys[0], 0)) for keys in FRAGMENTS]
    return ArrayReplica(BEGIN, END, feedbacks, parts, home=home)


def values_of(pieces: Sequence[Piece], begin: int, end: int) -> Array:
    """The values of keys [begin, end), read from pieces that cover them."""
    out = np.zeros(end - begin, np.float32)
    for piece in pieces:
        at = out[piece.begin - begin : piece.end - begin]
        if piece.codec == RAW:
            at[:] = np.frombuffer(piece.payload, np.float32)
        else:
            decode(piece.payload, at)
    return out


def drawn(rng: np.random.Generator, keys: tuple[int, int]) -> Array:
    return rng.standard_normal(keys[1] - keys[0]).astype(np.float32)


GAINS = (1.0, 0.5, 1.4)


@pytest.mark.parametrize("spec", SMALL_MODEL_SPECS)
@pytest.mark.parametrize("member", MEMBERS)
def test_what_was_sent_and_the_residual_are_what_was_given(member: str, spec: str) -> None:
    """Conservation, of each fragment by itself; and a child computes on pulled + gain * residual + stand-ins."""
    replica, rng = made(member, spec), np.random.default_rng(3)
    pulled = drawn(rng, (BEGIN, END))
    replica.absorb(raw_pieces(pulled, BEGIN, parts(BEGIN, END)), add=False)
    given, sent = np.zeros(END - BEGIN), np.zeros(END - BEGIN)
    stand_ins: list[tuple[float, Piece]] = []
    for clock in range(CLOCKS):
        begin, end = FRAGMENTS[clock % 2]
        at = slice(begin - BEGIN, end - BEGIN)
        update = drawn(rng, (begin, end))
        pieces = list(replica.encode(update.copy(), clock))
        given[at] += update
        sent[at] += values_of(pieces, begin, end)
        stand_ins = [(0.25, piece) for piece in pieces]
        held, base = values_of(pieces, begin, end), np.empty(end - begin, np.float32)
        replica.base(stand_ins, begin, end, base)
        np.testing.assert_allclose(base, (pulled + (given - sent))[at] + 0.25 * held, atol=2e-5)
        for gain in GAINS:
            replica.base(stand_ins, begin, end, base, gain)
            np.testing.assert_allclose(base, (pulled + gain * (given - sent))[at] + 0.25 * held, atol=2e-5)
    last = list(replica.encode(np.zeros(MIDDLE - BEGIN, np.float32), CLOCKS, last=True))
    sent[: MIDDLE - BEGIN] += values_of(last, BEGIN, MIDDLE)
    rounding = 0 if parse(spec).lossless else np.abs(given).max() / 4062
    np.testing.assert_allclose(sent[: MIDDLE - BEGIN], given[: MIDDLE - BEGIN], atol=2e-5 + rounding)


@pytest.mark.parametrize("member", MEMBERS)
def test_the_last_update_has_the_residual_and_keeps_it_until_it_is_sent(member: str) -> None:
    replica, rng = made(member, "topk:0.1+int8"), np.random.default_rng(3)
    update = drawn(rng, FRAGMENTS[0])
    replica.encode(update, 0)
    left = np.array(replica.residuals[0][2])
    bad = update.copy()
    bad[5] = np.inf
    with pytest.raises(NonFiniteError, match="1 of 300 values are NaN or infinite"):
        replica.encode(bad, 2, last=True)
    assert np.array_equal(replica.residuals[0][2], left)
    pieces = replica.encode(update, 2, last=True)
    assert np.array_equal(replica.residuals[0][2], left + update), (
        "it is lost if another shard's update cannot be coded"
    )
    assert [piece.codec for piece in pieces] == [CODED]
    np.testing.assert_allclose(values_of(pieces, *FRAGMENTS[0]), left + update, atol=np.abs(left + update).max() / 4062)
    replica.sent_last(2)
    assert not np.any(replica.residuals[0][2])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
@pytest.mark.parametrize("member", MEMBERS)
def test_what_is_held_back_is_the_residual_in_norms_of_an_update(member: str, size: float) -> None:
    """It holds for float32 values whose squares are no float32, too."""
    home = MEMBERS[member]()
    feedback = home.feedback(parse("topk:0.1"), 300, 0)
    update = np.full(300, size, np.float32)
    replica = ArrayReplica(0, 300, [((0, 300), feedback)], parts, home=home)

    def left() -> float:
        assert feedback.residual is not None
        return float(np.linalg.norm(feedback.residual.astype(np.float64)) / np.linalg.norm(update.astype(np.float64)))

    for clock in range(3):
        assert replica.held_back == (pytest.approx(left(), rel=1e-6) if clock else 0.0)
        replica.encode(update, clock)
    first = left()
    replica.encode(update, 3)
    assert replica.held_back == pytest.approx(first, rel=1e-6) and first > 1, (
        "the sample of the first since it was read"
    )
    replica.encode(update, 4)
    assert replica.held_back == pytest.approx(left(), rel=1e-6)


@pytest.mark.parametrize("member", MEMBERS)
def test_what_was_not_sent_is_in_the_residual_again(member: str) -> None:
    replica, rng = made(member, "topk:0.1+int8"), np.random.default_rng(4)
    update = drawn(rng, FRAGMENTS[0])
    replica.give_back(list(replica.encode(update.copy(), 0)), 0)
    base = np.empty(MIDDLE - BEGIN, np.float32)
    replica.base([], BEGIN, MIDDLE, base)
    np.testing.assert_allclose(base, update, atol=1e-6)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_difference_is_added_and_a_state_replaces(member: str) -> None:
    replica, rng = made(member, "dense"), np.random.default_rng(5)
    state, coded = drawn(rng, (BEGIN, END)), drawn(rng, FRAGMENTS[1])
    payload = parse("topk:0.2").encode(coded)
    replica.absorb(raw_pieces(state, BEGIN, parts(BEGIN, END)), add=False)
    replica.absorb([Piece(CODED, MIDDLE, END, payload)], add=True)
    want = state.copy()
    want[MIDDLE - BEGIN :] += values_of([Piece(CODED, MIDDLE, END, payload)], MIDDLE, END)
    base = np.empty(END - BEGIN, np.float32)
    replica.base([], BEGIN, END, base)
    assert np.array_equal(base, want)
    master = replica.master(raw_pieces(state, BEGIN, parts(BEGIN, END)))
    assert np.array_equal(master, state) and not np.shares_memory(master, state)


@pytest.mark.parametrize("member", MEMBERS)
def test_what_cannot_be_taken_or_coded_changes_nothing(member: str) -> None:
    replica, rng = made(member, "topk:0.1"), np.random.default_rng(6)
    state, update = drawn(rng, (BEGIN, END)), drawn(rng, FRAGMENTS[0])
    replica.absorb(raw_pieces(state, BEGIN, parts(BEGIN, END)), add=False)
    before, after = np.empty((2, END - BEGIN), np.float32)
    replica.encode(update.copy(), 0)
    replica.base([], BEGIN, END, before)
    good = Piece(RAW, BEGIN, MIDDLE, state[: MIDDLE - BEGIN].tobytes())
    with pytest.raises(PayloadError):
        replica.absorb([good, Piece(CODED, MIDDLE, END, b"\1" * 40)], add=True)
    with pytest.raises(PayloadError):
        replica.check([good, Piece(RAW, MIDDLE, END, b"")])
    update[3] = np.nan
    with pytest.raises(NonFiniteError):
        replica.encode(update, 0)
    replica.base([], BEGIN, END, after)
    assert np.array_equal(before, after)
