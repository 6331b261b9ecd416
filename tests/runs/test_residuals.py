"""A worker reads its own writes; no update is lost or doubled; what a state_dict and finish() hand on."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.one_process import (
    ADAMW,
    BSP1,
    EQUAL,
    SGD,
    SSP1,
    STEPS,
    TOPK1,
    each_step,
    master,
    through_a_file,
)
from kit.scripts import Array, build, distance, flat, loss_of, run
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.ps.shard.publications import Publications
from narrows.worker import DistributedOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")


# Own writes, residuals and what is shared.


def test_shared_shows_the_servers_state_and_puts_the_replica_back() -> None:
    with run(TOPK1) as started:
        net = build()
        optimizer = DistributedOptimizer(ADAMW(net.parameters()), net)
        each_step(net, optimizer, 0, 1)
        replica = flat(net)
        with optimizer.shared():
            assert np.array_equal(flat(net), master(started))
            with optimizer.shared():
                assert np.array_equal(flat(net), master(started))
            assert np.array_equal(flat(net), master(started))
        assert np.array_equal(flat(net), replica) and distance(replica, master(started)) > 1e-4
        with pytest.raises(ZeroDivisionError), optimizer.shared():
            raise ZeroDivisionError
        assert np.array_equal(flat(net), replica)


@pytest.mark.parametrize("settings", [BSP1, SSP1, TOPK1])
def test_who_gives_the_first_weights_does_not_get_them_back(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker gets them, and the first one a header."""
    sent: list[int] = []
    publication = Publications._publication

    def counted(*arguments: Any) -> Any:
        states = publication(*arguments)
        sent.append(sum(len(state.payload) for state in states))
        return states

    monkeypatch.setattr(Publications, "_publication", counted)
    with run(replace(settings, workers=2)) as started:

        def script(worker: int) -> Array:
            net = build()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(worker)
            optimizer = DistributedOptimizer(SGD(net.parameters()), net)
            begun = flat(net)
            optimizer.finish()
            return begun

        one, other = started.together(script)
        assert np.array_equal(one, other) and np.array_equal(one, master(started))
    assert sent.count(16) == settings.shards and sum(sent) == 16 * settings.shards + 4 * one.size


MANY = {
    "bsp": Settings(sync="bsp", workers=3, shards=2),
    "bsp topk": Settings(sync="bsp", workers=3, compress="topk:0.1"),
    "ssp": Settings(sync="ssp", workers=3, shards=2),
    "ssp topk": Settings(sync="ssp", staleness=3, workers=3, shards=2, compress="topk:0.05+int8"),
    "async": Settings(sync="async", workers=3),
    "async topk": Settings(sync="async", workers=3, shards=3, compress="topk:0.05"),
    "local": Settings(sync="local", local_steps=5, workers=3, compress="topk:0.1"),
    "local ssp": Settings(sync="local", local_steps=5, staleness=1, workers=3),
}


@pytest.mark.parametrize("name", MANY)
def test_after_finish_every_worker_sees_the_same_model_with_everything_in_it(name: str) -> None:
    """`trained` compares them; here, what they see is the master copy after all have left."""
    settings = MANY[name]

    def script(worker: int) -> Array:
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        each_step(net, optimizer, worker, settings.workers)
        optimizer.finish()
        with optimizer.shared():
            return flat(net)

    with run(settings) as started:
        results = started.together(script)
        for seen in results:
            assert np.array_equal(seen, master(started))


def residual_of(optimizer: Any) -> Array:
    residual = optimizer._engine.sync.residual()
    return np.zeros_like(flat(build())) if residual is None else residual


@pytest.mark.parametrize("spec", ["dense", "topk:0.05", "topk:0.2+int8", "fp16"])
@pytest.mark.parametrize("expire_at", [None, 4, 5])
def test_nothing_of_the_updates_is_lost_or_doubled(spec: str, expire_at: int | None) -> None:
    """Conservation: the server ends with the first weights and every update given, to the rounding of the last one.

    The update that meets the end of a lease is given up on every shard, as it may have been folded; its residual is kept.
    Gradients of the replica before do not count: the step that finds out is left out.
    """
    settings = Settings(sync="ssp", staleness=2, shards=2, compress=spec, compress_down="dense")
    lost = np.zeros_like(flat(build()))
    with run(settings) as started:
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.05)
        optimizer = DistributedOptimizer(inner, net)
        start = flat(net)
        given = given_updates(inner, net)
        for turn in range(STEPS):
            if turn == expire_at:
                started.expire(0)
                lost = residual_of(optimizer)
            optimizer.zero_grad()
            loss_of(net, turn).backward()
            optimizer.step()
            if turn == expire_at:
                lost += given[-1] - residual_of(optimizer)
                assert np.abs(lost).max() > 1e-4 and optimizer._engine is not None
        rounding = np.abs(residual_of(optimizer)).max() / 4062  # of the last update
        optimizer.finish()
        total = -lost + start + np.sum(np.stack(given).astype(np.float64), axis=0)
        assert len(given) == STEPS - (expire_at is not None)
        assert np.abs(master(started) - total).max() < 2e-6 + rounding


def given_updates(inner: torch.optim.Optimizer, net: nn.Module) -> list[Array]:
    """A list that gets what each step of `inner` adds to the parameters, from now on."""
    updates: list[Array] = []
    plain_step = inner.step

    def step(*arguments: Any) -> Any:
        before = flat(net)
        result = plain_step(*arguments)
        updates.append(flat(net) - before)
        return result

    inner.step = step  # type: ignore[assignment, method-assign]
    return updates


def test_a_replica_is_the_pulled_state_the_residual_and_what_is_in_flight() -> None:
    """Two workers, s = 2. 1. Worker 0 makes clocks 0 and 1 while worker 1 stands still: nothing of it is in the published
    state, and it is where it would be alone. 2. Worker 1 makes clock 0: min_clock is 1, and the state has clock 0 of both,
    and clock 1 of worker 0 at its weight 1/2. 3. Worker 0 makes clock 2: of its clock 1 the other half stands in, of its
    clock 2 all of it."""
    settings = Settings(sync="ssp", staleness=2, workers=2)
    ready: dict[int, tuple[nn.Module, Any, list[Array]]] = {}

    def script(worker: int) -> None:
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net)
        ready[worker] = (net, optimizer, given_updates(inner, net))

    def step(worker: int, number: int) -> None:
        net, optimizer, _ = ready[worker]
        started.become(worker)
        optimizer.zero_grad()
        loss_of(net, number).backward()
        optimizer.step()

    with run(settings) as started:
        started.together(script)
        (net, _, own), (_, _, others) = ready[0], ready[1]
        start, half = flat(net), np.float32(0.5)
        step(0, 0)
        step(0, 1)
        assert distance(flat(net), start + own[0] + own[1]) < 1e-6
        step(1, 5)
        step(0, 2)
        assert distance(flat(net), start + half * (own[0] + others[0]) + own[1] + own[2]) < 1e-6
        assert distance(master(started), start + half * (own[0] + own[1] + own[2] + others[0])) < 1e-6
        assert distance(flat(net), master(started)) > 1e-3, "the halves that stand in are not nothing"


# state_dict.


@pytest.mark.parametrize("settings", [SSP1, TOPK1, BSP1], ids=["dense", "topk", "gradients"])
def test_a_state_dict_comes_back_through_a_file(settings: Settings) -> None:
    with run(settings):
        net = build()
        optimizer = DistributedOptimizer(ADAMW(net.parameters()), net)
        each_step(net, optimizer, 0, 1)
        state = optimizer.state_dict(residual=True)
        again = through_a_file(state)
        assert again["narrows"]["clock"] == STEPS
        inner = {name: value for name, value in again.items() if name != "narrows"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ADAMW(build().parameters()).load_state_dict(inner)  # the inner part is the inner optimizer's own
        if settings is TOPK1:
            assert again["narrows"]["residual"].abs().sum() > 0
        else:
            assert again["narrows"]["residual"] is None
        optimizer.load_state_dict(again)
        assert repr(optimizer.state_dict(residual=True)) == repr(state)
        assert repr(optimizer.state_dict()) == repr(inner)  # what is as large as the model is asked for


@pytest.mark.parametrize(("settings", "shards"), [(SSP1, 1), (SSP1, 3), (TOPK1, 1), (TOPK1, 2), (TOPK1, 3)])
def test_a_run_goes_on_from_a_state_dict_and_the_shared_model(settings: Settings, shards: int) -> None:
    """Moments and residual both count: without either the second half would go elsewhere. Shards may be others."""

    def half(net: nn.Module, optimizer: Any, first: int) -> None:
        for step in range(first, first + STEPS):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()

    net = build()
    inner = ADAMW(net.parameters())
    half(net, inner, 0)
    half(net, inner, STEPS)
    reference = flat(net)
    with run(settings):
        net = build()
        optimizer = DistributedOptimizer(ADAMW(net.parameters()), net)
        half(net, optimizer, 0)
        with optimizer.shared():
            saved = through_a_file({"model": net.state_dict(), "optimizer": optimizer.state_dict(residual=True)})
    ends = {}
    for without in ("", "residual", "state"):
        with run(Settings(sync="ssp", compress=settings.compress, shards=shards)):
            net = build(seed=1)
            net.load_state_dict(saved["model"])
            optimizer = DistributedOptimizer(ADAMW(net.parameters()), net)
            state = copy.deepcopy(saved["optimizer"])
            if without == "residual":
                state["narrows"]["residual"] = None
            if without == "state":
                state["state"] = {}
            optimizer.load_state_dict(state)
            half(net, optimizer, STEPS)
            optimizer.finish()
            with optimizer.shared():
                ends[without] = distance(flat(net), reference)
    assert ends[""] < EQUAL < ends["state"]
    assert (ends["residual"] > EQUAL) == (settings is TOPK1)


def test_a_residual_of_another_model_is_refused() -> None:
    with run(TOPK1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        state = optimizer.state_dict(residual=True)
        state["narrows"]["residual"] = torch.zeros(3)
        with pytest.raises(UsageError, match=r"the residual in this state_dict is float32\[3\]"):
            optimizer.load_state_dict(state)
