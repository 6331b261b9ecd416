"""Gradients as scripts make them: accumulated, of uneven shares, absent, of odd shapes, sparse, not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import store_of
from kit.one_process import (
    BSP,
    BSP1,
    EQUAL,
    SGD,
    SSP1,
    STEPS,
    TOPK1,
    Make,
    each_step,
    frozen,
    plain,
    trained,
)
from kit.scripts import BATCH, batch, build, distance, loss_of, run, seeded
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker import DistributedOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")


# Gradients as scripts make them.


@pytest.mark.parametrize("settings", [BSP, SSP1], ids=["gradients", "updates"])
@pytest.mark.parametrize("keep", [True, False], ids=["none", "zeros"])
def test_gradient_accumulation(settings: Settings, keep: bool) -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            for part in range(3):
                (loss_of(net, 3 * step + part, worker, of) / 3).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=keep)

    assert distance(trained(settings, SGD, loop), plain(SGD, loop)) < EQUAL


@pytest.mark.parametrize("calls", [1, 3], ids=["one call", "added up over calls"])
def test_step_samples_weighs_uneven_shares_of_a_batch(calls: int) -> None:
    shares = [slice(0, 12), slice(12, 15), slice(15, 16)]

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            x, y = batch(step)
            share = shares[worker] if of > 1 else slice(0, BATCH)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[share]), y[share]).backward()
            if of > 1:
                for _ in range(calls):
                    optimizer.step_samples(share.stop - share.start)
            optimizer.step()

    settings = Settings(sync="bsp", workers=3, shards=2)
    assert distance(trained(settings, SGD, loop), plain(SGD, loop)) < EQUAL


def test_step_samples_wants_a_positive_number() -> None:
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        for wrong in (0, -1):
            with pytest.raises(UsageError, match=rf"step_samples\({wrong}\)"):
                optimizer.step_samples(wrong)


class Branches(nn.Module):
    """Three layers, of which a step uses the first and any of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(9, 9), nn.Linear(9, 5), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor, uses: str) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        out = hidden.sum() * 0 + torch.zeros(len(x), 5)
        for name in uses:
            out = out + {"l": self.left, "r": self.right}[name](hidden)
        return out


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tensor_without_a_gradient_is_skipped_only_where_nobody_has_one(overlap: bool) -> None:
    """Weight decay and momentum move a tensor whose gradient is zero, and not one that has none."""
    uses = [("l", "l"), ("l", "r"), ("r", "r"), ("", "l"), ("lr", "r"), ("l", "l")]

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            x, y = batch(step)
            pair = uses[step % len(uses)]
            optimizer.zero_grad()
            shares = [worker] if of > 1 else [0, 1]
            for share in shares:
                loss = nn.functional.cross_entropy(net(x[share::2], pair[share]), y[share::2])
                (loss / len(shares)).backward()
            optimizer.step()

    model = lambda: seeded(Branches)  # noqa: E731
    assert distance(trained(BSP, SGD, loop, model, overlap=overlap), plain(SGD, loop, model)) < EQUAL


def tied() -> nn.Module:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 5))
        net.get_submodule("2").weight = net.get_parameter("0.weight")
        return net

    return seeded(make)


class Odd(nn.Module):
    """A scalar, an empty tensor, one of a single value, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(5, 9).t())
        self.nothing = nn.Parameter(torch.empty(4, 0))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * (x @ self.weight) + self.one + self.empty.sum() + self.nothing.sum()
        return out


SHAPES: dict[str, Callable[[], nn.Module]] = {"tied": tied, "frozen": frozen, "odd": lambda: seeded(Odd)}


@pytest.mark.parametrize(
    ("name", "shards", "overlap"), [(name, shards, shards == 7) for name in SHAPES for shards in (1, 7)]
)
def test_shared_frozen_scalar_and_empty_parameters(name: str, shards: int, overlap: bool) -> None:
    model = SHAPES[name]
    for settings in (Settings(sync="bsp", workers=2, shards=shards), Settings(sync="ssp", shards=shards)):
        assert distance(trained(settings, SGD, model=model, overlap=overlap), plain(SGD, model=model)) < EQUAL


def test_more_shards_than_parameters() -> None:
    model = lambda: seeded(lambda: nn.Linear(9, 1, bias=False))  # noqa: E731

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            net(batch(step)[0][worker::of]).square().mean().backward()
            optimizer.step()

    for settings in (
        Settings(sync="bsp", workers=2, shards=12),
        Settings(sync="ssp", shards=12),
        Settings(sync="ssp", shards=12, compress="topk:0.5+int8", compress_down="dense"),
    ):
        assert distance(trained(settings, SGD, loop, model), plain(SGD, loop, model)) < EQUAL


def test_a_parameter_unfrozen_in_mid_run_is_an_error_and_not_a_local_secret() -> None:
    for settings in (BSP1, SSP1):
        with run(settings):
            net = frozen()
            optimizer = DistributedOptimizer(SGD(net.parameters()), net)
            each_step(net, optimizer, 0, 1)
            net.requires_grad_(True)
            loss_of(net, 0).backward()
            with pytest.raises(UsageError, match="frozen when the run began"):
                optimizer.step()


def test_parameters_of_another_model_and_none_at_all_are_refused() -> None:
    with run(BSP1):
        net = build()
        with pytest.raises(UsageError, match="has 6 parameters that are not in the model"):
            DistributedOptimizer(SGD(build().parameters()), net)
        with pytest.raises(UsageError, match="no trainable parameter"):
            DistributedOptimizer(SGD([p.requires_grad_(False) for p in net.parameters()]), net)


# Sparse gradients and values that are none.


def words() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Flatten(), nn.Linear(18, 5)))


def reading(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 11, (BATCH, 3), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), batch(step)[1]).backward()
        optimizer.step()


def test_sparse_gradients_are_refused_as_gradients_and_work_as_updates() -> None:
    rate: Make = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
    for overlap in (False, True):
        with pytest.raises(UsageError, match=r"'0\.weight' is sparse.*--push update") as caught:
            trained(BSP1, rate, reading, words, overlap=overlap)
        assert "\n" not in str(caught.value)
    lossy = Settings(sync="ssp", compress="topk:0.1", compress_down="dense")
    for settings, close in ((SSP1, EQUAL), (lossy, 1e-4)):  # a last update of a lossy SPEC is rounded to 1/4062
        assert distance(trained(settings, rate, reading, words), plain(rate, reading, words)) < close


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [TOPK1, Settings(sync="ssp", shards=2)], ids=["lossy", "dense"])
def test_an_update_that_is_not_finite_is_named_and_not_sent(settings: Settings, poison: float) -> None:
    """Its gradients were, so the weights are lost."""
    with run(settings) as started:
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        each_step(net, optimizer, 0, 1)
        optimizer.zero_grad()
        loss_of(net, 0).backward()
        with torch.no_grad():
            net.get_parameter("3.bias")[1] = poison
        assert optimizer._engine is not None
        sync: Any = optimizer._engine.sync
        before = sync.residual()
        text = f"rank 0: the update of clock {STEPS} is not finite, first in '3.bias'"
        with pytest.raises(NarrowsError, match=text) as caught:
            optimizer.step()
        assert "\n" not in str(caught.value)
        if before is not None:
            end, after = sync.shards.replicas[0].end, sync.residual()
            # The shard before the last had coded its share, which was not sent: it is still to be.
            np.testing.assert_allclose(after[:end] - before[:end], sync.arrays.moved((0, end), 0), rtol=1e-5, atol=1e-6)
            assert np.isfinite(after).all() and np.array_equal(after[end:], before[end:])
        for server in started.cluster.servers:
            assert np.isfinite(store_of(server).x).all()
