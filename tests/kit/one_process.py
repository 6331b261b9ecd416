"""A script on an optimizer alone, in one process, and the same script in a run: the reference of many tests."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kit.in_process import Cluster, store_of
from kit.scripts import Array, Run, build, flat, loss_of, run
from narrows.protocols.config.settings import Settings
from narrows.worker import DistributedOptimizer, step_count

STEPS = 12
EQUAL = 1e-5
Make = Callable[[Any], Any]  # of parameters: an optimizer, or several
Loop = Callable[[nn.Module, Any, int, int], None]  # model, optimizer, worker, of

SGD: Make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2)  # noqa: E731
ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)  # noqa: E731
BSP = Settings(sync="bsp", workers=2, shards=2)
BSP1 = Settings(sync="bsp")
SSP1 = Settings(sync="ssp", staleness=2)
TOPK1 = Settings(sync="ssp", compress="topk:0.1", shards=2)


def each_step(model: nn.Module, optimizer: Any, worker: int, of: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, worker, of).backward()
        optimizer.step()


def until(steps: int, at: Callable[[int, int], object] = lambda worker, step: None) -> Loop:
    """Return a loop until the run has made so many steps. It calls at(worker, step) before each optimizer step."""

    def loop(model: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        while (step := step_count()) < steps:
            optimizer.zero_grad()
            loss_of(model, step, worker, of).backward()
            at(worker, step)
            optimizer.step()

    return loop


def plain(make: Make, loop: Loop = each_step, model: Callable[[], nn.Module] = build) -> Array:
    """In one process, without Narrows."""
    net = model()
    loop(net, make(net.parameters()), 0, 1)
    return flat(net)


def script_of(
    make: Make, loop: Loop, workers: int, model: Callable[[], nn.Module] = build, **wrapper: Any
) -> Callable[[int], Array]:
    """Return a script of each worker, which ends with the shared model."""

    def script(worker: int) -> Array:
        net = model()
        optimizer = DistributedOptimizer(make(net.parameters()), net, **wrapper)
        loop(net, optimizer, worker, workers)
        optimizer.finish()
        with optimizer.shared():
            return flat(net)

    return script


def trained(
    settings: Settings,
    make: Make,
    loop: Loop = each_step,
    model: Callable[[], nn.Module] = build,
    cluster: Cluster | None = None,
    **wrapper: Any,
) -> Array:
    """The model that every worker sees in the end: the shared one, which is the same for all."""
    with run(settings, cluster) as started:
        results = started.together(script_of(make, loop, settings.workers, model, **wrapper))
    for other in results[1:]:
        assert np.array_equal(results[0], other), "after finish() all workers see one model"
    shared: Array = results[0]
    return shared


def master(started: Run) -> Array:
    stores = [store_of(server) for server in started.cluster.servers]
    return np.concatenate([store.x for store in stores])


def frozen() -> nn.Module:
    net = build()
    net.get_parameter("0.weight").requires_grad_(False)
    return net


def scaled(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step, worker, of)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def by_closure(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, step, worker, of)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.item() == pytest.approx(loss.item()) and loss.requires_grad


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
