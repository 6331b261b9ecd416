"""Arrays that are cut anew are those that the shards would have had from the beginning."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from narrows.protocols.config.key_ranges import overlaps, split
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.wire import pack
from narrows.ps.store.changes import OWED, FloatArray
from narrows.ps.store.reshard_arrays import recut
from narrows.ps.store.torch_optimizer import TorchOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (5, 1, 0, 7, 3)
PLAN = ModelSpec(tuple(TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(SIZES)), "", ((3, 0), (1, 2, 4)))
OPTIMIZERS: dict[str, Any] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.1, "amsgrad": True},
    "NAdam": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},
    "Rprop": {"lr": 0.1},
}


def at(gradient: FloatArray, low: int, high: int) -> FloatArray:
    return gradient[low:high]


def stepped(name: str, shards: int) -> list[tuple[tuple[int, int], dict[str, Any]]]:
    """Ranges and arrays of so many shards that made three steps along the same gradients; tensor 0 has none in the second."""
    plan = ModelSpec(PLAN.tensors, name, PLAN.groups)
    made = []
    for begin, end in split(plan.size, shards):
        optimizer, x = (
            TorchOptimizer(plan, begin, end),
            np.linspace(1, 2, plan.size, dtype=np.float32)[begin:end].copy(),
        )
        for step in range(3):
            gradient = np.sin(np.arange(plan.size) * (step + 1.0)).astype(np.float32)[begin:end]
            hyper, absent = pack([OPTIMIZERS[name]] * 2), [0] if step == 1 else []
            optimizer.step(x, partial(at, gradient), hyper, absent, 1.0)
        arrays = {"x": x, "p": x + 1, "outer.momentum": x * 2, OWED: x * 3} | {
            f"optimizer.{n}": v for n, v in optimizer.state().items()
        }
        made.append(((begin, end), arrays))
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_are_those_of_shards_that_were_there_from_the_beginning(name: str) -> None:
    by_count = {shards: stepped(name, shards) for shards in (1, 2, 3, 5, 16)}
    for before, after in ((1, 3), (2, 3), (3, 2), (5, 2), (3, 16), (16, 5)):
        for keys, wanted in by_count[after]:
            got = recut(PLAN, by_count[before], keys)
            assert got.keys() == wanted.keys()
            for each, values in wanted.items():
                assert got[each].shape == values.shape and np.array_equal(got[each], values), (before, after, each)


def test_every_key_comes_from_where_it_was() -> None:
    for size in (0, 1, 2, 7, 64):
        for before in range(1, 9):
            ranges = split(size, before)
            for begin, end in split(size, 3):
                common = overlaps(ranges, begin, end)
                assert [key for _, low, high in common for key in range(low, high)] == [*range(begin, end)]
                assert all(ranges[index][0] <= low < high <= ranges[index][1] for index, low, high in common)


def test_a_measured_gain_is_the_mean_of_those_it_comes_from() -> None:
    def of(agreement: float, size: int) -> dict[str, Any]:
        x = np.zeros(size, np.float32)
        return {"x": x, "p": x} | ({"gain": np.array([agreement], np.float32)} if agreement else {})

    size = PLAN.size  # 16
    had = [((0, 4), of(0.5, 4)), ((4, 12), of(0.0, 8)), ((12, size), of(0.25, 4))]
    assert recut(PLAN, had, (2, size))["gain"] == np.float32((2 * 0.5 + 4 * 0.25) / 6)
    assert "gain" not in recut(PLAN, had, (4, 12))
