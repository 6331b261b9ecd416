"""NaN of one member costs a run its own share, in every mode and without a flag, and so does what is absurdly long; its worker
is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from kit.lying_worker import LIAR, NOISY, ended
from kit.specs import VALUE_STAGES, WITH_SERVER

from narrows.compression import PayloadError, codecs, parse
from narrows.compression.codecs import VOID, Piece, raw_pieces
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Log
from narrows.ps.filters.norm_clip import FAR, UnboundedNorms
from narrows.ps.filters.update_filters import UpdateCheck, UpdateFilters
from narrows.ps.filters.update_sample import UpdateSample, UpdateSampler
from narrows.ps.store.changes import PushedUpdate

WORKERS, STEPS = 4, 8
KNOWN_AFTER = 4  # steps: updates that are folded as they come are held against some before them


@pytest.mark.parametrize("mode", WITH_SERVER)
@pytest.mark.parametrize(("times", "since"), [(float("nan"), 0), (1e30, KNOWN_AFTER)])
def test_it_costs_its_own_share(mode: str, times: float, since: int) -> None:
    late = {"quorum": 3, "grace": 5.0} if "quorum" in WITH_SERVER[mode] else {}
    settings = Settings(workers=WORKERS, shards=2, **WITH_SERVER[mode] | late)
    x, struck = ended(settings, NOISY, times, STEPS, since=since)
    assert np.isfinite(x).all() and NOISY.loss(x) < NOISY.begun
    assert set(struck) == {LIAR}


@pytest.mark.parametrize("times", [1.0, 1e30])
@pytest.mark.parametrize("spec", [*VALUE_STAGES, "topk:0.5+lz4", "topk:0.5+int8"])
def test_a_length_is_known_of_whatever_carries_it(spec: str, times: float) -> None:
    """Or a bound on it. fp16 carries nothing beyond 65504."""
    values = np.random.default_rng(0).standard_normal(3000).astype(np.float32) * np.float32(times)
    piece, out = codecs.coded_piece(bytes(parse(spec).encode(values)), 0, 3000), np.zeros(3000, np.float32)
    codecs.put(piece, 1.0, out, 0)
    true, told = float(np.linalg.norm(out.astype(np.float64))), codecs.check(piece, finite=True) ** 0.5
    assert true <= told * 1.000001 < 100 * true


def test_a_length_that_float32_cannot_square_is_known() -> None:
    (piece,) = raw_pieces(np.full(100, 1e30, np.float32), 0, [(0, 100)])
    assert codecs.check(piece, finite=True) == pytest.approx(1e62, rel=1e-5)


def test_honest_runs_are_let_alone() -> None:
    """Whatever the first lengths are, however many are zero, and where all grow at once."""

    def left_out(lengths: Iterable[float], weights: float, gradients: bool, workers: int = 2) -> list[int]:
        far = UnboundedNorms(lambda: weights, gradients)
        far.members(range(workers))
        return [turn for turn, length in enumerate(lengths) if far.leaves_out([(turn % workers, length)])[0]]

    times = 4 * FAR
    for gradients in (False, True):
        assert not left_out([0.0] * 70 + [1.0, 9.0], 0.0, gradients), "the weights begin as zero"
        assert not left_out([0.0, 0.0, 0.0, 1e-9, 1e-3, 1.0] * 20, 1.0, gradients), "keys that are seldom touched"
        assert not left_out([1e-30] * 70 + [1.0] * 70, 1.0, gradients), "and decay meanwhile"
        assert not left_out([1.0] * 9 + [times] * 9, 1.0, gradients, workers=1), "nobody else is there"
        assert left_out([1.0] * 10 + [times] * 9, 1.0, gradients) == [10], "one of them loses one"
        assert left_out([1.0] * 10 + [times, 1.0] * 99, 1.0, gradients) == [*range(10, 208, 2)], "a liar stays out"
        assert not left_out([1.0] * 10 + [FAR, 1.0] * 9, 1.0, gradients)
        assert not left_out([1.0] * 10 + [times, 1.0], 5.0, gradients), "it is not so long beside the weights"
    assert left_out([times, 1.0], 1.0, False) == [0], "an update, and the weights"
    assert not left_out([times, 1.0, times], 1.0, True), "a gradient has another unit, and nothing is known"
    assert not left_out([0.0] * 9 + [times], 1.0, True)


def test_weights_that_cancel_out_say_nothing_beside_updates_that_counted() -> None:
    """As those of a shard of few keys may, right after keys have moved."""
    weights = [1.0]
    far = UnboundedNorms(lambda: weights[0], gradients=False)
    far.members(range(3))
    assert far.leaves_out([(0, 4.0)]) == far.leaves_out([(1, 3.0)]) == [False]
    weights[0] = 6e-8
    assert far.leaves_out([(2, 7.0)]) == [False]
    assert far.leaves_out([(2, 7.0 * 4 * FAR)]) == [True]


def test_a_set_is_looked_at_together() -> None:
    far = UnboundedNorms(lambda: 1.0, True)
    far.members(range(3))
    assert far.leaves_out([(0, 1.0), (1, 1e30), (2, 3.0)]) == [False, True, False]
    assert not any(far.leaves_out([(0, 1e29), (1, 1e30), (2, 1e29)])), "all of them"
    far.members({1, 2})
    assert far.leaves_out([(1, 1e38)]) == [True]
    far.members({1})
    assert far.leaves_out([(1, 1e38)]) == [False]


def test_it_is_named_once_and_counts_for_nothing() -> None:
    good, long = np.ones(10, np.float32), np.full(10, 1e30, np.float32)
    pieces = [raw_pieces(good, 0, [(0, 5), (5, 10)]), [Piece(VOID, 0, 5, b""), *raw_pieces(good[5:], 5, [(5, 10)])]]
    parts = [PushedUpdate(cast(Any, each)) for each in pieces]
    cases: list[tuple[bool, list[UpdateCheck]]] = [(False, []), (True, [Everything()])]
    for look, checks in cases:
        screen = UpdateFilters(0, UpdateSampler(0, 10), UnboundedNorms(lambda: 1.0, False), checks)
        found = [screen.factors([(w, clock, parts[w]) for w in range(2)]) for clock in range(3)]
        assert found == [[1.0, 0.0]] * 3 and screen.out == {1} and screen.void == {1: 3}
        (told,) = screen.take()
        assert "update 0 of worker 1 is not finite" in str(told.values["text"]) and not screen.take()
        assert screen.factors([(1, 3, parts[0])]) == [1.0] and not screen.out
        assert screen.factors([(1, 4, PushedUpdate(cast(Any, raw_pieces(long, 0, [(0, 10)]))))]) == [
            0.0 if look else 1.0
        ]


class Everything:
    """A check that lets pass what it sees."""

    def __init__(self) -> None:
        self.struck: Counter[int] = Counter()

    def take(self) -> list[Log]:
        return []

    def factors(self, looks: Sequence[UpdateSample]) -> list[float]:
        return [1.0] * len(looks)

    def members(self, live: Container[int]) -> None:
        """It knows nobody."""


def test_what_counts_for_nothing_has_no_values() -> None:
    out = np.ones(4, np.float32)
    codecs.add(Piece(VOID, 0, 4, b""), 2.0, out, 0)
    assert (out == 1).all()
    codecs.put(Piece(VOID, 0, 4, b""), 2.0, out, 0)
    assert not out.any()
    with pytest.raises(PayloadError, match="VOID is internal"):
        codecs.check(Piece(VOID, 0, 4, b""))
