"""Half precision, float64, clipping and GradScaler: the run is that of the same script in one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kit.one_process import (
    BSP,
    BSP1,
    EQUAL,
    SGD,
    SSP1,
    STEPS,
    Loop,
    Make,
    each_step,
    master,
    plain,
    scaled,
    trained,
)
from kit.scripts import alone, batch, build, distance, flat, loss_of, run
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.worker import DistributedOptimizer, clock

pytestmark = pytest.mark.usefixtures("one_thread")


def steps_of(dtype: torch.dtype) -> Loop:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            out = net(x[worker::of].to(dtype)).float()
            nn.functional.cross_entropy(out, y[worker::of]).backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_workers_keep_their_dtype_and_one_of_them_takes_its_own_steps(dtype: torch.dtype) -> None:
    model = lambda: build().to(dtype)  # noqa: E731
    make: Make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    for settings in (SSP1, Settings(sync="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0)):
        ours = trained(settings, make, steps_of(dtype), model)
        assert distance(ours, plain(make, steps_of(dtype), model)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_servers_step_a_float32_master_of_half_parameters(dtype: torch.dtype) -> None:
    """Reference: float32 masters by hand. In plain bfloat16 most of these steps would round to nothing."""
    rate = 1e-3
    net = build().to(dtype)
    masters = [p.detach().float() for p in net.parameters()]
    for step in range(STEPS):
        x, y = batch(step)
        net.zero_grad()
        nn.functional.cross_entropy(net(x.to(dtype)).float(), y).backward()
        with torch.no_grad():
            for p, master in zip(net.parameters(), masters, strict=True):
                assert p.grad is not None
                master -= rate * p.grad.float()
                p.copy_(master)
    make: Make = lambda p: torch.optim.SGD(p, lr=rate)  # noqa: E731
    assert np.array_equal(trained(BSP1, make, steps_of(dtype), lambda: build().to(dtype)), flat(net))


def test_the_update_of_a_half_precision_worker_is_measured_from_its_rounded_parameters() -> None:
    """Else the rounding itself would be pushed into the master. Reference: an outer step of rate 0.7 by hand."""
    settings = Settings(sync="local", local_steps=3, outer_lr=0.7, outer_momentum=0.0)
    make: Make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    net = build().bfloat16()
    optimizer = make(net.parameters())
    masters = [p.detach().float() for p in net.parameters()]
    before: list[torch.Tensor] = []
    for step in range(STEPS):
        before = before if step % 3 else [p.detach().float() for p in net.parameters()]
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.bfloat16()).float(), y).backward()
        optimizer.step()
        if step % 3 == 2:
            with torch.no_grad():
                for p, was, kept in zip(net.parameters(), before, masters, strict=True):
                    kept += 0.7 * (p.float() - was)
                    p.copy_(kept)

    def script(worker: int) -> None:
        ours = build().bfloat16()
        wrapped = DistributedOptimizer(make(ours.parameters()), ours)
        steps_of(torch.bfloat16)(ours, wrapped, 0, 1)
        wrapped.finish()

    with run(settings) as started:
        started.together(script)
        expected = np.concatenate([kept.reshape(-1).numpy() for kept in masters])
        assert distance(master(started), expected) < 1e-6


@pytest.mark.parametrize("settings", [BSP1, SSP1], ids=["gradients", "updates"])
def test_clipping_by_the_script_between_backward_and_step(settings: Settings) -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, worker, of).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

    assert distance(trained(settings, SGD, loop), plain(SGD, loop)) < EQUAL
    assert distance(plain(SGD, loop), plain(SGD)) > 1e-2, "it does clip"
    wrapped = trained(settings, SGD, max_grad_norm=0.1)
    assert distance(wrapped, plain(SGD, loop)) < EQUAL, "max_grad_norm= is the same, for one worker"
    with alone():
        net = build()
        each_step(net, DistributedOptimizer(SGD(net.parameters()), net, max_grad_norm=0.1), 0, 1)
    assert distance(flat(net), plain(SGD, loop)) < EQUAL


@pytest.mark.parametrize("settings", [BSP1, SSP1], ids=["gradients", "updates"])
def test_a_grad_scaler_unscales_before_anything_is_sent(settings: Settings) -> None:
    assert distance(trained(settings, SGD, scaled), plain(SGD, scaled)) < EQUAL


def test_a_grad_scaler_that_skips_a_step_skips_it_for_its_worker_alone() -> None:
    """It closes its clock without values: nobody waits for it, and it is no batch behind."""

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(net, step, worker, of)
            scaler.scale(loss * math.inf if (step, worker) == (3, 1) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        clocks.append(clock())

    def script(worker: int) -> None:
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        loop(net, optimizer, worker, 2)
        optimizer.finish()

    clocks: list[int] = []
    with run(BSP) as started:
        started.together(script)
        assert np.isfinite(master(started)).all()
    assert clocks == [STEPS, STEPS]
