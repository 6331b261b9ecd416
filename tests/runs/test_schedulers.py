"""Schedulers and param groups: rates and other hyper-parameters that a script changes steer the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from kit.one_process import (
    BSP,
    EQUAL,
    SGD,
    SSP1,
    STEPS,
    Loop,
    each_step,
    plain,
    trained,
)
from kit.scripts import alone, build, distance, loss_of, run
from torch import nn
from torch.optim import lr_scheduler as lrs

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer, step_count

pytestmark = pytest.mark.usefixtures("one_thread")


def schedule(make: Callable[[Any], Any], with_loss: bool = False) -> tuple[Loop, list[list[float]]]:
    trace: list[list[float]] = []

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        scheduler = make(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(net, step, worker, of)
            loss.backward()
            optimizer.step()
            scheduler.step(*([1.0] if with_loss else []))
            trace.append([group["lr"] for group in optimizer.param_groups])
        scheduler.load_state_dict(scheduler.state_dict())

    return loop, trace


def sequential(optimizer: Any) -> Any:
    warm, decay = lrs.LinearLR(optimizer, 0.1, total_iters=4), lrs.CosineAnnealingLR(optimizer, 8)
    return lrs.SequentialLR(optimizer, [warm, decay], milestones=[4])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.2, total_iters=6),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.StepLR(o, 4)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.2, anneal_epochs=5),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("StepLR", SSP1), ("ReduceLROnPlateau", BSP), *zip(SCHEDULERS, cycle([BSP, SSP1]), strict=False)],
    ids=lambda each: each if isinstance(each, str) else each.sync,
)
def test_schedulers_steer_the_run(name: str, settings: Settings) -> None:
    plateau = name == "ReduceLROnPlateau"
    loop, expected = schedule(SCHEDULERS[name], plateau)
    reference = plain(SGD, loop)
    assert len({rate for (rate,) in expected}) > 1, "it changes the rate"
    loop, trace = schedule(SCHEDULERS[name], plateau)
    assert distance(trained(settings, SGD, loop), reference) < EQUAL
    assert sorted(trace) == sorted(expected * settings.workers)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "ReduceLROnPlateau"])
def test_who_joins_in_the_middle_brings_its_schedule_there(name: str) -> None:
    """The rates of two lives, the second of which has `schedule=`, are those of one."""
    loop, expected = schedule(SCHEDULERS[name])
    plain(SGD, loop)
    trace = []
    with run(Settings(sync="async", workers=1)) as started, warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule that steps before its optimizer
        for life, until in enumerate((5, STEPS)):
            net = build()
            inner = SGD(net.parameters())
            scheduler = SCHEDULERS[name](inner)
            optimizer = DistributedOptimizer(inner, net, schedule=scheduler)
            assert step_count() == 5 * life
            while step_count() < until:
                optimizer.zero_grad()
                loss_of(net, step_count()).backward()
                optimizer.step()
                scheduler.step()
                trace.append([group["lr"] for group in optimizer.param_groups])
            if life == 0:
                started.expire(0)
                started.join()
    assert trace == expected


def test_a_schedule_that_follows_a_metric_cannot_be_caught_up_with() -> None:
    net = build()
    plateau = lrs.ReduceLROnPlateau(inner := SGD(net.parameters()))
    with alone(), pytest.raises(UsageError, match=r"ReduceLROnPlateau.* follows a metric"):
        DistributedOptimizer(inner, net, schedule=plateau)  # type: ignore[arg-type]


def test_param_groups_have_rates_of_their_own() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        groups = [{"params": rest, "lr": 0.2, "weight_decay": 0.1}, {"params": [first], "momentum": 0.5}]
        return torch.optim.SGD(groups, lr=0.01)

    assert distance(trained(BSP, make), plain(make)) < EQUAL


def test_hyper_parameters_changed_by_hand_travel_with_the_next_push() -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        each_step(net, optimizer, worker, of)
        optimizer.param_groups[0].update(lr=0.2, momentum=0.5, weight_decay=0.0)
        each_step(net, optimizer, worker, of)

    assert distance(trained(BSP, SGD, loop), plain(SGD, loop)) < EQUAL
