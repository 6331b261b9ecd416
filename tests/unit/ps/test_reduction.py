"""The mean of a clock, part by part, beside one that is summed whole; and what a shard does with it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from narrows.compression import codecs, ladder
from narrows.compression.codecs import Piece
from narrows.ps.store import reduction
from narrows.ps.store.changes import FloatArray, LoadArrays, OuterStep, PushedUpdate, SetFirstWeights, Terms
from narrows.ps.store.reduction import WeightedMean
from narrows.ps.store.spectrum import equal_spectrum
from narrows.ps.store.store import Store

BEGIN, SIZE = 7, 1000
EDGES = ([0, SIZE], [0, 1, 333, 334, 900, SIZE])


def updates(kind: str, rows: int = 3) -> tuple[Terms, list[FloatArray]]:
    """Terms, and the values of each. Each worker cuts its update elsewhere, and one sends its last part first."""
    rng, terms, values = np.random.default_rng(0), [], list[FloatArray]()
    for row in range(rows):
        own = rng.standard_normal(SIZE).astype(np.float32)
        cuts = list(itertools.pairwise([BEGIN, BEGIN, BEGIN + 100 * row + 50, BEGIN + 700 + row, BEGIN + SIZE]))
        if kind == "coded" and row:
            payload = bytes(ladder("int8").compressor().contraction().encode(own.copy()))
            pieces = [codecs.coded_piece(payload, BEGIN, BEGIN + SIZE)]
            codecs.put(pieces[0], 1.0, own, BEGIN)
        else:
            pieces = codecs.raw_pieces(own, BEGIN, cuts)[:: -1 if row == 2 else 1]
        if kind == "void" and row == 1:
            own[pieces[2].begin - BEGIN : pieces[2].end - BEGIN] = 0
            pieces[2] = pieces[2]._replace(codec=codecs.VOID, payload=b"")
        values.append(own)
        terms.append((0.3 + row, [*pieces, Piece(codecs.ROWS, 0, 0, b"")]))
    return tuple(terms), values


@pytest.mark.parametrize("edges", EDGES, ids=len)
@pytest.mark.parametrize("kind", ["raw", "void", "coded"])
def test_the_mean_of_parts_is_that_of_all_keys_to_the_bit(kind: str, edges: list[int]) -> None:
    terms, values = updates(kind)
    wanted = np.zeros(SIZE, np.float32)
    for (weight, _), own in zip(terms, values, strict=True):
        wanted += np.float32(weight) * own
    mean = WeightedMean(BEGIN, SIZE)
    for _ in range(2):
        part = mean.of(terms)
        found = np.concatenate([part(*at).copy() for at in itertools.pairwise(edges)])
        assert found.tobytes() == wanted.tobytes()
    assert (mean.total is None) == (kind != "coded"), "raw updates need no array of all keys"


def pushed(values: FloatArray) -> PushedUpdate:
    """The update of these values in two parts, as an assembler hands it over: measured."""
    middle = BEGIN + SIZE // 2
    update = PushedUpdate(codecs.raw_pieces(values, BEGIN, [(BEGIN, middle), (middle, BEGIN + SIZE)]))  # type: ignore[arg-type]
    update.length = float(np.linalg.norm(values))
    return update


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e3])
def test_what_a_sender_changes_spoils_its_own_share_alone(value: float) -> None:
    """A value that is not finite, or makes an update longer than it was measured, takes its piece out of the part."""
    rows = [np.linspace(1, 2, SIZE, dtype=np.float32) * scale for scale in (1, -2, 3)]
    terms = tuple((0.25, pushed(row)) for row in rows)
    rows[1][SIZE // 2 + 5] = value  # after it was measured
    part, half = WeightedMean(BEGIN, SIZE).of(terms), SIZE // 2
    found = np.concatenate([part(0, half).copy(), part(half, SIZE).copy()])
    both, others = (np.float32(0.25) * np.sum(each, axis=0) for each in (rows, rows[::2]))
    assert np.allclose(found[:half], both[:half], rtol=1e-6, atol=0)
    assert np.allclose(found[half:], others[half:], rtol=1e-6, atol=0)


def test_what_a_sender_changes_within_its_length_is_folded() -> None:
    rows = [np.linspace(1, 2, SIZE, dtype=np.float32) * scale for scale in (1, -2)]
    terms = tuple((0.5, pushed(row)) for row in rows)
    rows[1][3] = 0
    assert WeightedMean(BEGIN, SIZE).of(terms)(0, SIZE)[3] == np.float32(0.5) * rows[0][3]


def test_finite_updates_whose_sum_overflows_are_folded() -> None:
    row = np.full(SIZE, 3e38, np.float32)
    with np.errstate(over="ignore"):
        found = WeightedMean(BEGIN, SIZE).of(((1.0, pushed(row)), (1.0, pushed(row))))(0, SIZE)
    assert np.isposinf(found).all()


@pytest.mark.parametrize("kind", ["raw", "coded"])
def test_the_norm_of_parts_is_that_of_the_mean(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terms, values = updates(kind)
    wide = sum(np.float64(weight) * own for (weight, _), own in zip(terms, values, strict=True))
    store = Store(BEGIN, BEGIN + SIZE, barrier=True)
    for part in (64, SIZE):
        monkeypatch.setattr(reduction, "PART_VALUES", part)
        found = store.norm(terms)
        assert found == store.norm(terms) == pytest.approx(float(np.square(wide).sum()), rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("kind", ["raw", "coded"])
def test_an_outer_step_in_parts_is_that_of_the_definition(
    kind: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "PART_VALUES", 64)
    terms, values = updates(kind)
    mean = np.zeros(SIZE, np.float32)
    for (weight, _), own in zip(terms, values, strict=True):
        mean += np.float32(weight) * own
    x: FloatArray = np.linspace(-1, 1, SIZE, dtype=np.float32)
    velocity: FloatArray = np.zeros(SIZE, np.float32)
    store = Store(BEGIN, BEGIN + SIZE, barrier=True, outer=(0.7, momentum), lent=lambda: False)
    store.apply(SetFirstWeights(codecs.raw_pieces(x.copy(), BEGIN, [(BEGIN, BEGIN + SIZE)])))
    for _ in range(3):
        store.apply(OuterStep(terms, store.whole))
        velocity[:] = np.float32(momentum) * velocity + mean
        x += np.float32(0.7) * (mean + np.float32(momentum) * velocity)
    assert store.x.tobytes() == x.tobytes()
    assert ("outer.momentum" in store.arrays()) == (momentum > 0), "without momentum there is no array of it"


@pytest.mark.parametrize("kind", ["raw", "coded"])
def test_an_outer_step_gives_each_matrix_of_its_keys_an_equal_spectrum(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the keys of a fragment: one matrix at their begin, one in their midst, and one that lies beyond."""
    monkeypatch.setattr(reduction, "PART_VALUES", 64)
    terms, values = updates(kind)
    mean = np.zeros(SIZE, np.float32)
    for (weight, _), own in zip(terms, values, strict=True):
        mean += np.float32(weight) * own
    keys = (BEGIN, BEGIN + 270)
    matrices = [(BEGIN, BEGIN + 12, (3, 4)), (BEGIN + 100, BEGIN + 260, (20, 8)), (BEGIN + 264, BEGIN + 300, (6, 6))]
    store = Store(BEGIN, BEGIN + SIZE, barrier=True, outer=(0.7, 0.5), matrices=matrices, lent=lambda: False)
    store.apply(SetFirstWeights(codecs.raw_pieces(np.zeros(SIZE, np.float32), BEGIN, [(BEGIN, BEGIN + SIZE)])))
    for low, high, shape in matrices[:2]:
        equal_spectrum(mean[low - BEGIN : high - BEGIN].reshape(shape))
    if kind == "coded":  # a piece has all keys of its shard
        keys, matrices = store.whole, matrices[:2]
        store.matrices = matrices
    store.apply(OuterStep(terms, keys))
    expected: FloatArray = np.float32(0.7) * (mean + np.float32(0.5) * mean)
    expected[keys[1] - BEGIN :] = 0
    assert store.x.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.6), (0.6, 0.0)])
def test_a_run_goes_on_with_another_outer_momentum(before: float, after: float) -> None:
    """From 0 the velocity begins at 0, as in a new run. To 0 it is dropped."""
    terms, _ = updates("raw")

    def made(momentum: float, arrays: Any = None) -> Store:
        store = Store(BEGIN, BEGIN + SIZE, barrier=True, outer=(0.7, momentum))
        store.apply(LoadArrays(arrays or {"x": np.zeros(SIZE, np.float32)}, 0))
        store.apply(OuterStep(terms, store.whole))
        return store

    first = made(before)
    resumed = made(after, first.arrays())
    fresh = made(after, {"x": first.x})
    assert resumed.x.tobytes() == fresh.x.tobytes()
    assert (resumed.momentum is None) == (after == 0)
