"""overlap=True: gradients leave during the backward pass, and the run is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.one_process import (
    BSP,
    BSP1,
    EQUAL,
    SGD,
    STEPS,
    plain,
    trained,
)
from kit.scripts import alone, build, distance, loss_of, run, seeded
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")


def wide() -> nn.Module:
    """Three parts of 1 MiB on one shard, so that two of them can leave while backward still runs."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(9, 300), nn.Tanh(), nn.Linear(300, 1500), nn.Tanh(), nn.Linear(1500, 200))
    )


def overlapped(net: nn.Module, optimizer: Any, worker: int, of: int, passes: int = 1) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for part in range(passes):
            (loss_of(net, passes * step + part, worker, of) / passes).backward()
        optimizer.step()
        engine = getattr(optimizer, "_engine", None)
        if engine is not None:
            assert engine.sync.overlap.sent_early > 0, "something left before step()"


@pytest.mark.parametrize("passes", [1, 2])
def test_overlap_is_the_same_run(passes: int) -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        overlapped(net, optimizer, worker, of, passes)

    ours = trained(BSP, SGD, loop, wide, overlap=True, accumulate=passes)
    assert distance(ours, plain(SGD, loop, wide)) < EQUAL


def test_overlap_clips_the_folded_mean_where_the_script_cannot() -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, worker, of).backward()
            if of == 1:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

    ours = trained(BSP, SGD, loop, overlap=True, max_grad_norm=0.1)
    assert distance(ours, plain(SGD, loop)) < EQUAL


def stepped(misuse: Callable[[nn.Module, Any], None], net: nn.Module, optimizer: Any) -> None:
    misuse(net, optimizer)
    optimizer.step()


def scale_gradients(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def replace_gradient(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    p = next(net.parameters())
    assert p.grad is not None
    p.grad = p.grad * 2


def drop_gradient(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    next(net.parameters()).grad = None


def change_data(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    for p in net.parameters():
        assert p.grad is not None
        p.grad.data.clamp_(-1e-3, 1e-3)


def unscale(net: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(net, 0)).backward()
    scaler.step(optimizer)


def backward_twice(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    loss_of(net, 1).backward()


def skip_a_step(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    optimizer.zero_grad()
    loss_of(net, 1).backward()


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (scale_gradients, "changed between backward.*overlap=True"),
        (replace_gradient, "changed between backward.*overlap=True"),
        (drop_gradient, "changed between backward.*overlap=True"),
        (change_data, "changed between backward.*overlap=True"),
        (unscale, "GradScaler.*overlap=True"),
        (backward_twice, "2 gradients this step, not 1.*accumulate="),
        (skip_a_step, "2 gradients this step, not 1.*accumulate="),
    ],
)
def test_what_overlap_cannot_do_is_an_error_that_names_it(misuse: Any, words: str) -> None:
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        with pytest.raises(UsageError, match=words):
            stepped(misuse, net, optimizer)
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        stepped(misuse, net, optimizer)  # without it, all of these are the script's own business


def test_overlap_wants_all_backward_passes_and_a_lossless_compressor() -> None:
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True, accumulate=2)
        loss_of(net, 0).backward()
        with pytest.raises(UsageError, match="1 gradients this step, not 2"):
            optimizer.step()
    with run(Settings(sync="bsp", compress="topk:0.1")):
        net = build()
        with pytest.raises(UsageError, match=r"overlap=True.*--compress topk:0\.1"):
            DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
    with alone(), pytest.raises(UsageError, match="accumulate=0"):
        DistributedOptimizer(SGD(build().parameters()), build(), accumulate=0)
