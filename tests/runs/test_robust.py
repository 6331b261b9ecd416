"""--robust: a worker whose updates lead elsewhere is kept out of the model, by the cosine or key by key."""

from __future__ import annotations

import io
import itertools
import math
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from kit.lying_worker import LIAR, TAUGHT, ended

from narrows.compression.codecs import Piece, raw_pieces
from narrows.protocols.config.settings import Robust, Settings
from narrows.protocols.errors import UsageError
from narrows.ps.command.serve import checked
from narrows.ps.filters.cosine_filter import AGREE, LEAST, RECENT, SHARE, SURE, CosineFilter
from narrows.ps.filters.norm_clip import UnboundedNorms
from narrows.ps.filters.update_filters import UpdateFilters
from narrows.ps.filters.update_sample import UpdateSample, UpdateSampler
from narrows.ps.journal import machine_pickling
from narrows.ps.journal.machine_pickling import _Pickler, _Unpickler
from narrows.ps.store.changes import PushedUpdate
from narrows.ps.store.reduction import TrimmedMean
from narrows.ps.store.store import HEAP, assume_lent
from narrows.ps.store.update_gain import WINDOW, Gain

STEPS = 48
WORKERS = 4
KEYS = 50

Floats = npt.NDArray[np.float32]


def trimmed(values: Floats, cut: float) -> Floats:
    """The rule at its slowest: each key of float32[n, keys] on its own."""
    n = len(values)
    gone = min(math.ceil(cut * n), (n - 1) // 2)
    kept = [np.sort(values[:, key])[gone : n - gone] for key in range(values.shape[1])]
    return np.array([each.mean() for each in kept], np.float32)


def cosines(sent: list[tuple[int, Floats]]) -> dict[int, tuple[float, float]]:
    """The cosines of each worker, once all of this was sent: with the others, and among them; by the definition."""
    means: dict[int, npt.NDArray[np.float64]] = {}
    for who in sorted({worker for worker, _ in sent}):
        means[who] = np.zeros(KEYS)
        for count, update in enumerate([update for worker, update in sent if worker == who], 1):
            kept = 1 - 1 / min(count, RECENT)
            means[who] = kept * means[who] + (1 - kept) * update / np.linalg.norm(update)

    def cosine(one: int, other: int) -> float:
        a, b = means[one], means[other]
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    found = {}
    for who in means:
        others = [each for each in means if each != who]
        among = [cosine(a, b) for a, b in itertools.combinations(others, 2)]
        found[who] = float(np.mean([cosine(who, each) for each in others])), float(np.mean(among))
    return found


def unit() -> float:
    """The length of the weights."""
    return 1.0


def raw(values: Floats) -> PushedUpdate:
    return PushedUpdate(cast(Any, raw_pieces(values, 0, [(0, values.size)])))


def look(worker: int, clock: int, update: Floats) -> UpdateSample:
    return UpdateSample(worker, clock, 1.0, update)


def updates(values: Floats, begin: int, cuts: list[int]) -> list[tuple[float, list[Piece]]]:
    """Each row in parts, at the weight that all alike have."""
    edges = [begin, *cuts, begin + values.shape[1]]
    keys = list(itertools.pairwise(edges))
    return [(1 / len(values), raw_pieces(row.copy(), begin, keys)) for row in values]


@pytest.mark.parametrize("cut", [0.1, 0.25, 0.4, 0.5])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
def test_the_trimmed_mean_is_that_of_the_definition(workers: int, cut: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, at_once = np.random.default_rng(workers), 1 << 10
    monkeypatch.setattr("narrows.ps.store.reduction.AT_ONCE", at_once)
    begin, size = 7, 2 * at_once + 100
    values = rng.standard_normal((workers, size)).astype(np.float32)
    mean = TrimmedMean(begin, size, cut)
    terms = updates(values, begin, [begin + 1000, begin + at_once])
    mixed = [terms[0], *updates(values, begin, [begin + 5])[1:]]
    for each in (terms, mixed):
        part = mean.of(tuple(each))
        for edges in ([0, size], [0, 3, at_once + 5, size]):
            found = np.concatenate([part(*at).copy() for at in itertools.pairwise(edges)])
            np.testing.assert_allclose(found, trimmed(values, cut), rtol=1e-5, atol=1e-6)


def test_one_of_four_moves_no_key_beyond_the_others() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, KEYS)).astype(np.float32)
    low, high = values[:3].min(0), values[:3].max(0)
    for lie in (1e30, -1e30, np.inf, -np.inf, np.nan):
        values[3] = lie
        found = TrimmedMean(0, KEYS, 0.1).of(tuple(updates(values, 0, [])))(0, KEYS)
        assert (found >= low - 1e-5).all() and (found <= high + 1e-5).all(), lie


def test_the_cosine_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(1)
    true = rng.standard_normal(KEYS)
    check = CosineFilter(0)
    sent: list[tuple[int, Floats]] = []
    for clock in range(40):
        for worker in range(WORKERS):
            sign = -1 if worker == LIAR else 1
            update = (sign * true + rng.standard_normal(KEYS)).astype(np.float32) * np.float32(rng.lognormal(0, 2))
            sent.append((worker, update))
            (factor,) = check.factors([look(worker, clock, update)])
            settled = clock >= LEAST and min(sum(who == each for who, _ in sent) for each in range(WORKERS)) >= LEAST
            if settled:
                expected = cosines(sent)
                for who, known in check.cosines().items():
                    assert known == pytest.approx(expected[who], abs=1e-4)
                own, among = expected[worker]
                assert factor == (0.0 if own < SHARE * among - SURE and among > AGREE else 1.0)
            elif clock < LEAST - 1:
                assert factor == 1.0, "nothing is known yet"
    assert set(check.struck) == {LIAR} and len(check.logs) == 1, "it is named once"
    check.members({0, 1, 3})
    assert LIAR not in check.cosines()


def test_who_was_left_out_counts_once_too_many_have_left_to_judge_it() -> None:
    """Its weight and those of the others come to 1."""
    true = np.random.default_rng(3).standard_normal(KEYS).astype(np.float32)
    screen = UpdateFilters(0, UpdateSampler(0, KEYS), UnboundedNorms(unit, False), [CosineFilter(0)], alike=True)

    def pushed(worker: int, clock: int) -> tuple[int, int, Any]:
        return worker, clock, raw(-true if worker == LIAR else true)

    for clock in range(2 * LEAST):
        factors = screen.factors([pushed(worker, clock) for worker in range(WORKERS)])
    assert factors[LIAR] == 0.0
    rest = [LIAR, (LIAR + 1) % WORKERS]
    screen.members(set(rest))
    factors = screen.factors([pushed(worker, 99) for worker in rest])
    shares = screen.shares([(worker, 1) for worker in rest])
    assert factors == [1.0, 1.0] and sum(shares) == 1.0


@pytest.mark.parametrize("lie", ["long", "nothing", "constant"])
def test_one_voice_is_one_voice_whatever_it_sends(lie: str) -> None:
    """No liar makes honest workers look like liars."""
    rng = np.random.default_rng(2)
    true = rng.standard_normal(4096)
    kinds = {"long": -1e30 * true, "nothing": 0 * true, "constant": -true}
    check = CosineFilter(0)
    for clock in range(100):
        for worker in range(WORKERS):
            honest = true + 5 * rng.standard_normal(4096)
            check.factors([look(worker, clock, (kinds[lie] if worker == LIAR else honest).astype(np.float32))])
    assert set(check.struck) == (set() if lie == "nothing" else {LIAR})


def test_noise_is_found_where_the_others_agree() -> None:
    """It opposes nobody, and leads nowhere."""
    rng = np.random.default_rng(4)
    true = rng.standard_normal(4096)
    check = CosineFilter(0)
    for clock in range(60):
        for worker in range(WORKERS):
            update = (worker != LIAR) * true + 2 * rng.standard_normal(4096)
            check.factors([look(worker, clock, update.astype(np.float32))])
    assert set(check.struck) == {LIAR} and check.struck[LIAR] == 60 - LEAST + 1


def test_where_honest_updates_cancel_out_nobody_is_left_out() -> None:
    """At a minimum of what all workers have together each opposes the rest."""
    rng = np.random.default_rng(3)
    for workers in (3, 4, 8):
        pulls = rng.standard_normal((workers, 4096))
        pulls -= pulls.mean(0)
        check = CosineFilter(0)
        for clock in range(60):
            for worker in range(workers):
                update = (pulls[worker] + 0.3 * rng.standard_normal(4096)).astype(np.float32)
                assert check.factors([look(worker, clock, update)]) == [1.0]
        assert all(own < -AGREE for own, _ in check.cosines().values())


DEFENCES: list[dict[str, Any]] = [
    {"sync": "bsp", "robust": "trim:0.1"},
    {"sync": "bsp", "robust": "median", "shards": 2},
    {"sync": "bsp", "push": "update", "update_gain": 1.0, "robust": "cosine"},
    {"sync": "ssp", "staleness": 1, "robust": "cosine", "look_ahead": 0.0},
    {"sync": "ssp", "push": "gradient", "robust": "cosine"},
    {"sync": "local", "local_steps": 2, "robust": "cosine"},
]


@cache
def _losses(plain: Settings) -> dict[str, float]:
    """Without a defence."""
    runs = (("honest", 1.0), ("taken in", -1.0))
    return {name: TAUGHT.loss(ended(plain, TAUGHT, times, STEPS)[0]) for name, times in runs}


@pytest.mark.parametrize("flags", DEFENCES, ids=str)
def test_who_sends_the_negative_is_kept_out(flags: dict[str, Any]) -> None:
    """By its cosine soon and wholly. Key by key only where workers agree on the sign: there noise is as large as the rest."""
    plain = Settings(workers=WORKERS, **{name: value for name, value in flags.items() if name != "robust"})
    losses = dict(_losses(plain))
    x, struck = ended(Settings(workers=WORKERS, **flags), TAUGHT, -1.0, STEPS)
    losses["robust"] = TAUGHT.loss(x)
    if flags["robust"] == "cosine":
        assert set(struck) == {LIAR}, struck
    assert losses["honest"] < losses["taken in"] < TAUGHT.begun
    left = 0.25 if flags["robust"] == "cosine" else 0.65
    assert losses["robust"] - losses["honest"] < left * (losses["taken in"] - losses["honest"]), losses


@pytest.mark.parametrize("flags", [{"sync": "ssp"}, {"sync": "bsp", "push": "update"}], ids=str)
@pytest.mark.parametrize("times", [-1.0, float("nan")])
def test_the_gain_of_the_others_is_measured_on(
    times: float, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a window of updates that are left out."""
    measured: list[int] = []
    measure = Gain._measure

    def counted(gain: Gain) -> None:
        measured.append(len(gain.windows))
        measure(gain)

    monkeypatch.setattr(Gain, "_measure", counted)
    ended(Settings(workers=WORKERS, max_update_norm=5.0, robust="cosine", **flags), TAUGHT, times, STEPS)
    assert len(measured) >= STEPS // WINDOW - 2 and measured[-3:] == [WORKERS - 1] * 3


@pytest.mark.parametrize("flags", DEFENCES, ids=str)
def test_honest_workers_are_let_alone(flags: dict[str, Any]) -> None:
    x, struck = ended(Settings(workers=WORKERS, **flags), TAUGHT, 1.0, STEPS)
    assert not struck and np.isfinite(x).all()


@pytest.mark.parametrize("flags", [{"sync": "bsp", "robust": "median"}, {"sync": "ssp", "robust": "cosine"}], ids=str)
def test_nobody_counts_for_more_by_saying_so(flags: dict[str, Any]) -> None:
    """With the samples that it names, one worker would be the whole mean."""
    settings = Settings(workers=WORKERS, **flags)
    honest, _ = ended(settings, TAUGHT, 1.0)
    boasting, _ = ended(settings, TAUGHT, -1.0, samples=1 << 30)
    assert TAUGHT.loss(boasting) < TAUGHT.begun, "the others lead"
    assert TAUGHT.loss(boasting) - TAUGHT.loss(honest) < TAUGHT.begun - TAUGHT.loss(boasting)


def test_what_it_may_be() -> None:
    assert Robust.parse("") == Robust() and not Robust()
    assert Robust.parse("trim:0.1").cut == 0.1 and Robust.parse("trim:.25").cut == 0.25
    assert Robust.parse("median").cut == 0.5 and Robust.parse("cosine").cosine
    for wrong in ("trim", "trim:0", "trim:0.5", "trim:1", "trim:nan", "krum", "cosine:1", " median"):
        with pytest.raises(UsageError, match="give cosine, median or trim:SHARE"):
            Robust.parse(wrong)
    wrongly: list[tuple[dict[str, Any], str]] = [
        ({"robust": "median", "workers": 2, "sync": "bsp"}, "2 workers are too few to tell which one lies"),
        ({"robust": "median", "workers": 4, "sync": "ssp"}, "only a barrier has all updates of a clock"),
        ({"robust": "trim:0.1", "workers": 4, "sync": "bsp", "push": "update"}, "only a barrier has all updates"),
        ({"robust": "cosine", "workers": 4, "sync": "gossip"}, "--robust: under --sync gossip no update goes"),
        ({"robust": "cosine", "workers": 4, "sync": "local", "fragments": 2}, "--robust: fragments differ"),
    ]
    for flags, text in wrongly:
        with pytest.raises(UsageError, match=text):
            Settings(**flags).validated()
    settings = Settings(sync="local", workers=4, robust="median", compress="topk:0.1+int8").validated()
    with pytest.raises(UsageError, match="choose a SPEC that sends every value"):
        checked(settings, "tcp://127.0.0.1:0", "", False, False)


def test_what_is_known_of_a_worker_is_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that goes on where it was leaves out whom it left out."""

    def send(screen: UpdateFilters, clock: int) -> list[float]:
        rng, pushed = np.random.default_rng(clock), []
        for worker in range(WORKERS):
            values = (np.ones(KEYS) * (-1 if worker == LIAR else 1) + rng.standard_normal(KEYS)).astype(np.float32)
            pushed.append((worker, clock, raw(values)))
        return screen.factors(pushed)

    screen = UpdateFilters(0, UpdateSampler(0, KEYS), UnboundedNorms(unit, False), [check := CosineFilter(0)])
    for clock in range(LEAST + 2):
        send(screen, clock)
    monkeypatch.setattr(machine_pickling, "FUNCTIONS", machine_pickling.FUNCTIONS | {(__name__, "unit")})
    file = io.BytesIO()
    _Pickler(file, assume_lent, None).dump(screen)
    file.seek(0)
    again = _Unpickler(file, assume_lent, HEAP, None).load()
    for clock in range(LEAST + 2, LEAST + 9):
        assert send(screen, clock) == send(again, clock) == [1.0, 1.0, 0.0, 1.0]
    (other,) = again.checks
    assert other.cosines() == check.cosines() and other.struck == check.struck and again.out == screen.out == {LIAR}
