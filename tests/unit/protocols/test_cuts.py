"""Borders of shards at tensors (--cut tensors): the most even cut that there is, and what cannot be cut so."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from narrows.protocols.config.key_ranges import Keys, covers, fragments, split, split_at
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError, UsageError
from narrows.protocols.member.member import readied
from narrows.protocols.messages import Ready


def model(*sizes: int, kind: str = "", groups: tuple[tuple[int, ...], ...] = ()) -> ModelSpec:
    specs = tuple(TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(sizes))
    return ModelSpec(specs, kind, groups or (tuple(range(len(sizes))),))


def every_cut(borders: list[int], count: int) -> list[list[Keys]]:
    """All cuts into `count` ranges that are not empty: the obvious reference."""
    inner = combinations(borders[1:-1], count - 1)
    return [[*pairwise([borders[0], *chosen, borders[-1]])] for chosen in inner]


def largest(cut: list[Keys]) -> int:
    return max(end - begin for begin, end in cut)


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_at_tensors_has_a_smaller_largest_shard(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = [int(size) for size in np.exp(draw.uniform(0, 6, draw.integers(1, 10)))]
    start = int(draw.integers(0, 3))
    borders = [start, *(start + each for each in accumulate(sizes))]
    for count in range(1, len(sizes) + 1):
        found, every = split_at(borders, count), every_cut(borders, count)
        assert found in every, "so none is empty"
        assert largest(found) == min(map(largest, every))
        first = found[0][1]  # of the cuts that are as good: the first border is the nearest to an even cut
        good = {cut[0][1] for cut in every if largest(cut) == largest(found)}
        even = start + sum(sizes) / count
        assert abs(first - even) == min(abs(border - even) for border in good)


def test_equal_tensors_are_cut_as_values_are() -> None:
    borders = [*range(0, 12 * 7 + 1, 7)]
    for count in (1, 2, 3, 4, 6, 12):
        assert split_at(borders, count) == split(12 * 7, count)


def test_one_large_tensor_leaves_the_others_even() -> None:
    borders = [0, *range(100, 190, 1), 190]
    first, *others = split_at(borders, 4)
    assert first == (0, 100) and [end - begin for begin, end in others] == [30, 30, 30]


def test_shards_and_fragments_begin_at_tensors() -> None:
    plan = model(3, 0, 9, 1, 0, 0, 20, 2, 5)
    offsets = plan.offsets()
    for shards in range(1, 7):
        ranges = plan.ranges(shards, "tensors")
        assert covers(ranges, 0, plan.size) and all(begin < end for begin, end in ranges)
        for begin, end in ranges:
            for count in (1, 2, 5):
                cuts = fragments(begin, end, count, "tensors", offsets)
                assert len(cuts) == count and covers([cut for cut in cuts if cut[0] < cut[1]], begin, end)
                assert all(edge in offsets for cut in cuts for edge in cut)
    assert plan.ranges(3, "values") == split(plan.size, 3)
    assert fragments(3, 12, 2, "values", offsets) == [(3, 7), (7, 12)]


def test_fewer_tensors_than_shards_are_one_sentence() -> None:
    plan = model(5, 0, 4, 6)
    with pytest.raises(
        IncompatibleError, match="has 3 tensors, too few for 4 shards; give --shards 3 at most, or --cut values"
    ):
        plan.ranges(4, "tensors")
    assert not plan.why_not_cut(4, "values") and not plan.why_not_cut(3, "tensors")


def test_a_tensor_that_makes_shards_uneven_is_named() -> None:
    even, uneven = model(30, 40, 30), model(10, 80, 5, 5)
    assert not even.imbalance(2, "tensors") and not uneven.imbalance(3, "values")
    told = uneven.imbalance(3, "tensors")
    assert "shard 1 of 3 has 80% of the model" in told and "'t1' alone is 80%" in told and "--cut values" in told


@pytest.mark.parametrize("cut", ["values", "tensors"])
def test_a_member_refuses_a_cut_that_is_not_the_runs(cut: str) -> None:
    plan = model(5, 90, 5)
    right = plan.ranges(2, cut)
    other = plan.ranges(2, "tensors" if cut == "values" else "values")
    assert readied(Ready(0, 1, 0, tuple(right), b""), plan.packed(), 2, cut) == tuple(right)
    with pytest.raises(RemoteProtocolError, match="cuts the model elsewhere"):
        readied(Ready(0, 1, 0, tuple(other), b""), plan.packed(), 2, cut)
    with pytest.raises(RemoteProtocolError, match="cuts the model elsewhere"):
        readied(Ready(0, 1, 0, tuple(split(100, 4)), b""), plan.packed(), 4, "tensors")


def test_the_flag() -> None:
    with pytest.raises(UsageError, match="--cut rows: give one of values, tensors"):
        Settings(cut="rows").validated()
    settings = Settings(cut="tensors").validated()
    assert "--cut tensors" in settings.summary() and "--cut" not in Settings().validated().summary()
    assert Settings.unpacked(settings.packed()) == settings and not settings.follows(replace(settings, cut="values"))


MATRIX, VECTOR, COMPLEX = (
    TensorSpec("w", (4, 3), "float32"),
    TensorSpec("b", (3,), "bfloat16"),
    TensorSpec("c", (2, 2), "complex64"),
)


@pytest.mark.parametrize(("kinds", "cut", "words"), [
    ("AdamW", "values", ""),
    ("Muon+AdamW+LAMB", "tensors", ""),
    ("SGD+AdamW+Adam", "values", ""),
    ("Muon+AdamW+AdamW", "values", "Muon steps whole tensors, and shards cut tensors: use --push update, or start"),
    ("AdamW+Muon+AdamW", "tensors", r"Muon steps matrices, and 'b' has the shape \\[3\\]"),
    ("AdamW+AdamW+LARS", "tensors", ""),
    ("AdamW+Shampoo+AdamW", "tensors", "cannot rebuild optimizer 'Shampoo'"),
    ("", "tensors", "cannot rebuild optimizer ''"),
])  # fmt: skip
def test_which_optimizers_servers_step(kinds: str, cut: str, words: str) -> None:
    plan = ModelSpec((MATRIX, VECTOR, replace(VECTOR, name="d")), kinds, ((0,), (1,), (2,)))
    why = ModelSpec.unpacked(plan.packed()).why_not_stepped(cut)
    assert bool(why) == bool(words)
    assert words.replace("\\", "") in why
    complex_one = ModelSpec((MATRIX, COMPLEX), "LAMB", ((0, 1),)).why_not_stepped("tensors")
    assert "no complex tensor by LAMB, and 'c' is one" in complex_one


def test_each_group_has_one_class() -> None:
    plan = ModelSpec((MATRIX, VECTOR), "Muon+AdamW+AdamW", ((0,), (1,)))
    with pytest.raises(RemoteProtocolError, match="2 parameter groups have 3 classes"):
        ModelSpec.unpacked(plan.packed())
    many = ModelSpec((MATRIX, VECTOR), "+".join(["AdamW"] * 300), ((0, 1), *[()] * 299))
    assert ModelSpec.unpacked(many.packed()) == many


def test_a_cut_of_many_tensors_takes_no_time() -> None:
    """A sentence of Ready or of a heartbeat makes one: 256 shards of 20,000 tensors."""
    sizes = np.random.default_rng(0).integers(1, 1 << 24, 20_000)
    borders = [0, *accumulate(int(size) for size in sizes)]
    found = split_at(borders, 256)
    assert len(found) == 256 and all(borders[bisect_left(borders, begin)] == begin for begin, _ in found)
