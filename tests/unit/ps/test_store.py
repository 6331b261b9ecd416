"""The publications of a store under a lossy SPEC: coded from chunks of x - p, as from its array."""

import numpy as np
import pytest
from kit.specs import SPECS

from narrows.compression import Memory, accumulate, buffers, ladder
from narrows.ps.store.changes import Change, LoadArrays, Publish
from narrows.ps.store.store import Store

BEGIN, SIZE = 11, 150_001
LOSSY = [spec for spec in SPECS if not ladder(spec).lossless]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "CHUNK", 1 << 12)
    monkeypatch.setattr(buffers, "READ_ONCE", 0)


def store_of(spec: str, publication: int = 0) -> tuple[Store, np.random.Generator]:
    rng = np.random.default_rng(3)
    x, p = rng.standard_normal((2, SIZE), dtype=np.float32)
    store = Store(BEGIN, BEGIN + SIZE, barrier=False, codings=ladder(spec), lent=lambda: False)
    load: Change = LoadArrays({"x": x, "p": p}, publication)
    store.apply(load)
    return store, rng


@pytest.mark.parametrize("spec", LOSSY)
def test_a_publication_is_the_coded_difference(spec: str) -> None:
    """Also of one fragment's keys, and in a store that has been resumed."""
    fragments = ((BEGIN, BEGIN + 70_000), (BEGIN + 70_000, BEGIN + SIZE))
    store, rng = store_of(spec, publication=8)
    for number, keys in enumerate((None, *fragments, fragments[0], None), 9):
        store.x += rng.standard_normal(SIZE, dtype=np.float32) * np.float32(1e-3)
        at, memory = store._at(keys or store.whole), Memory(BEGIN)
        memory.go_to(number - 1)
        want = bytes(ladder(spec).compressor().contraction().encode(store.x[at] - store.p[at], memory))
        published = store.p.copy()
        accumulate(want, 1.0, published[at])
        store.apply(Publish(keys))
        assert store.deltas[number] == (keys or store.whole, want) and type(store.deltas[number][1]) is bytes
        assert store.p.tobytes() == published.tobytes()


@pytest.mark.parametrize("spec", LOSSY)
def test_a_state_that_is_not_finite_is_published_whole(spec: str) -> None:
    for x, p in ((np.nan, 0.0), (3e38, -3e38)):  # of the second the difference overflows
        store, _ = store_of(spec)
        store.apply(Publish())
        store.x[-3], store.p[-3] = x, p
        store.apply(Publish())
        assert not store.deltas and store.p.tobytes() == store.x.tobytes()
