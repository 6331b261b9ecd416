"""The gain of a mean of updates: what a shard measures against the plain reference, and what it says of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kit.gain_reference import TrueGain

from narrows.compression.codecs import raw_pieces
from narrows.compression.sampling import SAMPLE, sample_of
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.modes import GAIN_MAX
from narrows.protocols.config.settings import Settings
from narrows.ps.store.changes import FloatArray, Fold, LoadArrays, SetFirstWeights
from narrows.ps.store.store import Store
from narrows.ps.store.update_gain import GONE, PLAIN, WINDOW, Gain, MergeFactors

KEYS = 40
CLOSE = 1e-5  # sums of a window, in float32
STRIDES = range(2, 65)
SIZES = (
    *(SAMPLE + 1, 5000, 2 * SAMPLE, 100_000, 768 * 768, 1 << 20, 25_000_000, 25_165_824, 39_164_392),
    *(50_364_730, 63_697_656, 89_894_912, (1 << 32) - 1, (1 << 32) + 7, 1 << 40),
)


class Both:
    """A gain and its reference, told of the same folds."""

    def __init__(self, keys: int = KEYS, degree: float = 0.0, fixed: float = 0.0) -> None:
        self.gain, self.true = Gain(keys, degree, fixed), TrueGain(degree)
        self.whole = TrueGain(degree)  # that of all keys
        self.live: set[int] = set()

    def fold(self, worker: int, share: float, update: FloatArray) -> None:
        self.live.add(worker)
        self.gain.members(self.live)
        weight, moved = share * self.gain.factor, update[self.gain.at]
        self.gain.saw(worker, share, weight, np.zeros_like(moved), np.float32(weight) * moved)
        with np.errstate(over="ignore", invalid="ignore"):
            self.true.saw(worker, self.live, share, moved)
            self.whole.saw(worker, self.live, share, update)

    def compare(self) -> None:
        assert self.gain.agreement == pytest.approx(self.true.agreement, rel=CLOSE)
        if not self.gain.fixed:
            assert self.gain.factor == pytest.approx(self.true.factor, rel=CLOSE)


def together(both: Both, updates: Callable[[int, int], FloatArray], shares: list[float], clocks: int = WINDOW) -> Both:
    """All workers fold in turn."""
    for clock in range(clocks):
        for worker, share in enumerate(shares):
            both.fold(worker, share, updates(worker, clock))
    return both


def noise(seed: int, keys: int = KEYS) -> Callable[[int, int], FloatArray]:
    """Updates of one length and of no common direction."""
    rng = np.random.default_rng(seed)
    return lambda worker, clock: rng.standard_normal(keys).astype(np.float32)


# Against the reference.


@pytest.mark.parametrize("seed", range(16))
def test_a_gain_is_what_the_reference_says(seed: int) -> None:
    """Workers have their own speeds, leave and join; shares are unequal, some updates are zero and some not finite."""
    rng = np.random.default_rng(seed)
    both = Both(degree=float(rng.choice([0.0, 0.0, 0.25, 1.0])))
    speeds = {worker: rng.uniform(0.4, 1.0) for worker in range(rng.integers(2, 5))}
    common = rng.standard_normal(KEYS) * rng.choice([0.0, 1.0, 3.0])
    measured = 0
    for _ in range(600):
        if rng.random() < 0.01 and len(speeds) > 2:
            gone = int(rng.choice([*speeds]))
            del speeds[gone]
            both.live.discard(gone)
        if rng.random() < 0.01:
            speeds[max(speeds) + 1] = rng.uniform(0.4, 1.0)
        rates = np.array([*speeds.values()])
        worker = int(rng.choice([*speeds], p=rates / rates.sum()))
        update = (common + 2 * rng.standard_normal(KEYS)).astype(np.float32)
        update *= rng.choice([1.0, 1.0, 1.0, 0.0])
        if rng.random() < 0.005:
            update[rng.integers(KEYS)] = rng.choice([np.nan, np.inf, -np.inf])
        before = both.gain.agreement
        both.fold(worker, float(rng.integers(1, 5)) / 8, update)
        measured += both.gain.agreement != before
        both.compare()
    assert measured > 2, measured


@pytest.mark.parametrize("keys", [SAMPLE, 3 * SAMPLE + 1, 100_000])
def test_a_sample_of_the_keys_stands_for_all_of_them(keys: int) -> None:
    """It does even where updates carry each 4th key in turn."""
    draws = noise(1, keys)

    def updates(worker: int, clock: int) -> FloatArray:
        update = np.zeros(keys, np.float32)
        update[(clock + worker) % 4 :: 4] = draws(worker, clock)[(clock + worker) % 4 :: 4] + np.float32(0.5)
        return update

    both = together(Both(keys), updates, [0.5, 0.25, 0.25], 5 * WINDOW)
    both.compare()
    assert both.gain.at.size == SAMPLE and both.gain.factor > 1.05
    assert both.gain.factor == pytest.approx(both.whole.factor, rel=0.02)


def test_a_fold_into_a_store_is_measured_as_it_is_folded() -> None:
    """The store tells of each update what it did to x, also where several are in one fold; who has left is not measured."""
    gain, true, updates = Gain(KEYS, 0.0), TrueGain(0.0), noise(2)
    store = Store(100, 100 + KEYS, barrier=False, gain=gain)
    store.apply(SetFirstWeights(raw_pieces(np.ones(KEYS, np.float32), 100, [(100, 100 + KEYS)])))
    for clock in range(3 * WINDOW):
        given = [updates(worker, clock) for worker in range(3)]
        pieces = [raw_pieces(update, 100, [(100, 110), (110, 100 + KEYS)]) for update in given]
        shares = (0.5, 0.25, 0.25)
        of = ((0, 0.5), (1, 0.25), (GONE, 0.25))
        store.apply(Fold(tuple((s * gain.factor, p) for s, p in zip(shares, pieces, strict=True)), of))
        for worker in range(2):
            true.saw(worker, {0, 1}, shares[worker], given[worker])
        assert gain.factor == pytest.approx(true.factor, rel=1e-4)
    assert set(gain.windows) == {0, 1} and gain.factor > 1.05


# The sample.


@pytest.mark.parametrize("size", [0, 1, 7, SAMPLE - 1, SAMPLE])
def test_all_keys_are_sampled_where_there_are_few(size: int) -> None:
    assert np.array_equal(sample_of(size), np.arange(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_sample_is_spread_over_all_keys_and_over_those_of_every_stride(size: int) -> None:
    sample = sample_of(size)
    assert sample.dtype == np.int64 and len(sample) == SAMPLE
    assert (np.diff(sample) > 0).all() and sample[0] >= 0 and sample[-1] < size
    for slices in (16, 64):
        counts = np.bincount(sample * slices // size, minlength=slices)
        assert counts.min() * slices > SAMPLE / 2 and counts.max() * slices < SAMPLE * 2
    for stride in STRIDES:
        counts = np.bincount(sample % stride, minlength=stride)
        assert counts.min() * stride > SAMPLE / 2, stride
        assert counts.max() * stride < SAMPLE * 2, stride


# The measurement.


@pytest.mark.parametrize("workers", [2, 3, 5, 16])
@pytest.mark.parametrize("keys", [1, 3, KEYS])
def test_updates_that_are_one_have_a_gain_of_1_and_orthogonal_ones_the_root_of_how_many(
    workers: int, keys: int
) -> None:
    shares = [1 / workers] * workers
    for seed in range(20):
        alike, weights = noise(seed, keys), np.random.default_rng(seed).integers(1, 9, workers)
        drawn = [alike(0, clock) for clock in range(WINDOW)]
        unequal = [float(weight) / sum(weights) for weight in weights]
        same = together(Both(keys), lambda worker, clock: drawn[clock], unequal).gain  # noqa: B023
        assert same.agreement == pytest.approx(1.0, abs=1e-12) and same.agreement <= 1
        assert same.factor == pytest.approx(1.0, abs=1e-12) and same.factor >= 1

    def alone(worker: int, clock: int) -> FloatArray:
        ours: FloatArray = (np.arange(keys * workers) % workers == worker).astype(np.float32)
        return ours

    apart = together(Both(keys * workers), alone, shares, 3 * WINDOW).gain
    assert apart.factor == pytest.approx(workers**0.5, rel=1e-6)


def test_updates_that_oppose_each_other_have_no_more_than_orthogonal_ones() -> None:
    both = Both()
    updates = noise(3)
    one, few = updates(0, 0), updates(1, 0) * np.float32(0.1)
    together(both, lambda worker, clock: (1 - 2 * worker) * one + few, [0.5, 0.5], 3 * WINDOW)
    assert both.gain.factor == pytest.approx(2**0.5, rel=1e-6)
    unequal = together(Both(), lambda worker, clock: (1 - 2 * worker) * one, [0.75, 0.25], WINDOW)
    assert unequal.gain.factor <= (0.75**2 + 0.25**2) ** -0.5 * (1 + 1e-6)


def test_one_worker_alone_has_no_gain_and_those_who_left_are_not_waited_for() -> None:
    both = together(Both(), noise(4), [1.0], 5 * WINDOW)
    assert (both.gain.factor, both.gain.agreement) == (1.0, 0.0)
    three = together(Both(), noise(4), [0.3, 0.3, 0.4], WINDOW - 1)
    three.live.discard(2)
    updates = noise(5)
    three.fold(0, 0.5, updates(0, 0))
    assert three.gain.agreement == 0.0
    three.fold(1, 0.5, updates(1, 0))
    assert three.gain.agreement > 0.0 and set(three.gain.windows) == {0, 1}
    three.compare()


def test_who_joined_has_a_window_of_its_own_before_it_is_measured() -> None:
    both = together(Both(), noise(6), [0.5, 0.5], WINDOW)
    before, updates = both.gain.agreement, noise(7)
    both.fold(2, 0.2, updates(2, 0))
    for clock in range(2 * WINDOW):
        for worker in range(2):
            both.fold(worker, 0.4, updates(worker, clock))
    assert both.gain.agreement == before
    for clock in range(WINDOW - 1):
        both.fold(2, 0.2, updates(2, clock))
    assert both.gain.agreement != before
    both.compare()


def test_a_window_changes_what_is_folded_after_it_and_not_its_own_last_update() -> None:
    gain, updates, seen = Gain(KEYS, 0.0), noise(8), list[float]()
    store = Store(0, KEYS, barrier=False, gain=gain)
    store.apply(SetFirstWeights(raw_pieces(np.zeros(KEYS, np.float32), 0, [(0, KEYS)])))
    for clock in range(WINDOW + 1):
        for worker in range(2):
            update, before = updates(worker, clock), store.x.copy()
            store.apply(
                Fold(((0.5 * gain.factor, raw_pieces(update, 0, [(0, KEYS)])),), ((worker, 0.5),))
            )  # as AtOnce weighs it
            seen.append(float(np.median((store.x - before) / update)) / 0.5)
    assert seen[: 2 * WINDOW] == pytest.approx([1.0] * 2 * WINDOW, rel=1e-4)
    assert seen[2 * WINDOW :] == pytest.approx([gain.factor] * 2, rel=1e-4) and gain.factor > 1.05


@pytest.mark.parametrize("degree", [1.0, 0.5, 0.0])
def test_the_degree_says_how_much_of_the_lost_length_is_given_back(degree: float) -> None:
    both = together(Both(degree=degree), noise(9), [0.5, 0.5], 4 * WINDOW)
    assert 0.5 < both.gain.agreement < 0.95
    assert both.gain.factor == pytest.approx(both.gain.agreement ** (degree - 1))
    assert degree < 1 or both.gain.factor == 1.0  # exactly


def test_a_fixed_gain_stays_and_the_agreement_is_measured_all_the_same() -> None:
    fixed, free = (together(Both(fixed=value), noise(10), [0.5, 0.5], 4 * WINDOW).gain for value in (1.25, 0.0))
    assert fixed.factor == 1.25 and fixed.agreement == pytest.approx(free.agreement, rel=CLOSE)
    assert free.factor != 1.25


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_measures_nothing_and_is_forgotten_with_its_window(bad: float) -> None:
    both = together(Both(), noise(11), [0.5, 0.5], WINDOW)
    before, updates = (both.gain.factor, both.gain.agreement), noise(12)
    spoilt = np.zeros(KEYS, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for clock in range(WINDOW):
            for worker in range(2):
                spoilt[3] = bad * (1 - 2 * (clock & worker & 1))
                both.gain.saw(worker, 0.5, 1.0, np.zeros_like(spoilt), spoilt)
    assert (both.gain.factor, both.gain.agreement) == before or bad == 3e38
    together(both, updates, [0.5, 0.5], WINDOW)
    assert 0 < both.gain.agreement < 1 and np.isfinite(both.gain.factor)
    assert (both.gain.factor, both.gain.agreement) != before


def test_updates_of_nothing_measure_nothing() -> None:
    both = together(Both(), lambda worker, clock: np.zeros(KEYS, np.float32), [0.5, 0.5], 2 * WINDOW)
    assert (both.gain.factor, both.gain.agreement) == (1.0, 0.0)


# The gain in a checkpoint.


def test_a_gain_goes_on_where_it_was() -> None:
    first = together(Both(), noise(13), [0.5, 0.5], 3 * WINDOW).gain
    second, fixed, linear = Gain(KEYS, 0.0), Gain(KEYS, 0.0, 1.5), Gain(KEYS, 1.0)
    for other in (second, fixed, linear):
        other.load(first.state())
        assert other.agreement == pytest.approx(first.agreement, rel=1e-6)
    assert second.factor == pytest.approx(first.factor, rel=1e-6) and second.factor > 1.05
    assert (fixed.factor, linear.factor) == (1.5, 1.0)


def test_a_run_that_goes_on_without_its_fixed_gain_has_the_measured_one() -> None:
    first = together(Both(fixed=3.0), noise(14), [0.5, 0.5], 3 * WINDOW).gain
    second = Gain(KEYS, 0.0)
    second.load(first.state())
    assert 1.05 < second.factor < 1.5 and second.factor == pytest.approx(1 / first.agreement, rel=1e-6)


def test_a_store_keeps_its_gain_in_a_checkpoint() -> None:
    def store(gain: Gain) -> Store:
        made = Store(0, KEYS, barrier=False, gain=gain)
        made.apply(SetFirstWeights(raw_pieces(np.zeros(KEYS, np.float32), 0, [(0, KEYS)])))
        return made

    unmeasured = store(Gain(KEYS, 0.0))
    assert "gain" not in unmeasured.arrays()
    gain = together(Both(), noise(15), [0.5, 0.5], WINDOW).gain
    again = store(Gain(KEYS, 0.0))
    again.apply(LoadArrays(store(gain).arrays(), 7))
    assert again.publication == 7 and gain.factor > 1.05
    assert again.gain.factor == pytest.approx(gain.factor, rel=1e-6)
    again.apply(
        LoadArrays(unmeasured.arrays(), 8)
    )  # from above, or of a run that had measured nothing: no news of the gain
    assert again.gain.factor == pytest.approx(gain.factor, rel=1e-6)


# The gain in a state.

AHEAD: list[tuple[dict[str, Any], float, float]] = [
    # flags, degree, what an own update in flight stands for beside the gain
    ({"sync": "ssp"}, 0.0, 1.5),
    ({"sync": "ssp", "staleness": 2}, 0.0, 1.25),
    ({"sync": "ssp", "staleness": 2}, 0.5, 1.125),
    ({"sync": "ssp"}, 1.0, 1.0),
    ({"sync": "ssp", "staleness": 0}, 0.0, 1.0),
    ({"sync": "ssp", "push": "gradient"}, 0.0, 1.0),
    ({"sync": "async"}, 0.0, 1.0),
    ({"sync": "bsp", "push": "update"}, 0.0, 1.0),
    ({"sync": "bsp"}, 0.0, 1.0),
    ({"sync": "local"}, 0.0, 1.0),
    ({"sync": "local", "staleness": 2}, 0.0, 1.0),
    ({"sync": "ssp", "look_ahead": 2.0}, 0.0, 3.0),
    ({"sync": "ssp", "look_ahead": 2.0, "staleness": 4}, 0.0, 1.5),
    ({"sync": "ssp", "look_ahead": 0.5}, 1.0, 1.5),
    ({"sync": "ssp", "look_ahead": 0.0}, 0.0, 1.0),
]


def gain_of(degree: float, **flags: Any) -> Gain:
    settings = Settings(**flags).validated()
    plan = ModelSpec((TensorSpec("w", (KEYS,), "float32"),), "", ((0,),), degree=degree)
    return Gain.of(settings, settings.mode(), plan, KEYS)


@pytest.mark.parametrize(("flags", "degree", "ahead"), AHEAD, ids=str)
def test_how_far_each_mode_looks_ahead(flags: dict[str, Any], degree: float, ahead: float) -> None:
    gain = gain_of(degree, **flags)
    assert (gain.size, gain.degree, gain.fixed, gain.factor) == (KEYS, degree, 0.0, 1.0)
    for gain.factor in (1.0, 1.3):
        assert gain.merging(2) == gain.merging(7) == pytest.approx((gain.factor, gain.factor * ahead, 0.0))
        assert gain.merging(1) == MergeFactors(gain.factor, gain.factor, 0.0), "it has all its updates itself"
    assert gain_of(degree, sync="ssp").merging(1) == PLAIN


def test_what_is_said_is_the_gain_that_is_and_no_more_than_a_worker_takes() -> None:
    gain = gain_of(0.0, sync="ssp", update_gain=1.25)
    gain.agreement = 0.7
    assert gain.fixed == 1.25 and gain.merging(2) == MergeFactors(1.25, 1.875, 0.7)
    for most in (gain_of(0.0, sync="ssp", update_gain=GAIN_MAX), gain_of(0.0, sync="ssp", look_ahead=1e3)):
        assert most.merging(2).ahead == GAIN_MAX
