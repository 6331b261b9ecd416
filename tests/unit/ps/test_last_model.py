"""The difference of the master copy to the published one, and the model that a run ends with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from kit.reference import rounded_last

from narrows.compression import codecs, ladder
from narrows.protocols.config.key_ranges import parts
from narrows.protocols.wire import FRAME_VALUES
from narrows.ps.store.changes import Fold, Publish, RoundLast, SetFirstWeights
from narrows.ps.store.store import Store

FloatArray = npt.NDArray[np.float32]
BEGIN, SIZE = 100, FRAME_VALUES + 1000  # two parts


def stepped(spec: str, update: FloatArray, barrier: bool = False) -> Store:
    """Return a store whose master copy has one update more than its publication 1."""
    store = Store(BEGIN, BEGIN + SIZE, barrier=barrier, codings=ladder(spec))
    keys = [(BEGIN, BEGIN + SIZE)]
    values = np.random.default_rng(0).normal(size=(2, SIZE)).astype(np.float32)
    store.apply(SetFirstWeights(codecs.raw_pieces(values[0], BEGIN, keys)))
    for each in (values[1], update):
        store.apply(Fold(((1.0, codecs.raw_pieces(each, BEGIN, keys)),), ((0, 1.0),)))
        if store.publication == 0:
            store.apply(Publish())
    return store


def made_of(store: Store, payloads: list[bytes]) -> FloatArray:
    """What a child with the newest publication makes of an answer."""
    model = store.p.copy()
    for payload, keys in zip(payloads, parts(*store.whole), strict=True):
        codecs.add(codecs.coded_piece(payload, *keys), 1.0, model, BEGIN)
    return model


def update_of(seed: int = 1) -> FloatArray:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def test_the_last_model_is_what_the_children_make_of_it() -> None:
    store = stepped("topk:0.05+int8", update_of())
    before, shown = store.x.copy(), store.p.copy()
    payloads = store.beyond()
    assert payloads is not None and np.array_equal(store.x, before), "a model that is shown in mid-run changes nothing"
    store.apply(RoundLast())
    assert store.rounded == payloads and np.array_equal(store.p, shown)
    assert np.array_equal(store.x, made_of(store, payloads))
    left = before - shown
    wanted = [shown[at] + rounded_last(left[at]) for at in (slice(FRAME_VALUES), slice(FRAME_VALUES, SIZE))]
    assert np.array_equal(store.x, np.concatenate(wanted))
    blocks = np.abs(np.pad(left, (0, -SIZE % 256))).reshape(-1, 256).max(1).repeat(256)[:SIZE]
    assert (np.abs(store.x - before) <= blocks / 4062 + np.spacing(np.abs(before))).all()
    assert sum(map(len, payloads)) < 0.38 * 4 * SIZE
    store.apply(Publish())
    assert store.rounded is None, "it was a difference to the publication before"


@pytest.mark.parametrize("barrier", [False, True])
def test_nothing_is_rounded_where_states_are_whole(barrier: bool) -> None:
    store = stepped("dense", update_of(), barrier)
    before = store.x.copy()
    assert store.beyond() is None, "the children lack an update: they get all values"
    store.apply(RoundLast())
    assert np.array_equal(store.x, before)
    store.apply(Publish())
    payloads = store.beyond()
    assert payloads is not None and sum(map(len, payloads)) == 16 * 2, "the children have it"
    assert np.array_equal(made_of(store, payloads), before)


def test_a_model_that_is_not_finite_is_sent_as_it_is() -> None:
    update = update_of()
    update[-1] = np.inf
    store = stepped("int8", update)
    before = store.x.copy()
    store.apply(RoundLast())
    assert store.beyond() is None and store.rounded is None and np.array_equal(store.x, before)
