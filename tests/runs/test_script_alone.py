"""A script without a server: the wrapper is the inner optimizer, and each training begins anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit.one_process import (
    ADAMW,
    SGD,
    STEPS,
    by_closure,
    each_step,
    plain,
    scaled,
    through_a_file,
)
from kit.scripts import alone, build, flat, loss_of
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader

from narrows.worker import DistributedOptimizer, clock, ranges, rank, sampler, session, step_count, world_size
from narrows.worker.optimizer import begin_anew

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_script_alone_is_the_inner_optimizer() -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        each_step(net, optimizer, worker, of)
        scaled(net, optimizer, worker, of)
        by_closure(net, optimizer, worker, of)
        optimizer.add_param_group({"params": [extra[net]], "lr": 0.5})
        loss = loss_of(net, 0) + extra[net].square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    extra: dict[nn.Module, nn.Parameter] = {}

    def model() -> nn.Module:
        net = build()
        extra[net] = nn.Parameter(torch.ones(3))
        return net

    for make in (SGD, ADAMW):
        reference = plain(make, loop, model)
        with alone() as only:
            net = model()
            inner = make(net.parameters())
            optimizer = DistributedOptimizer(inner, net, overlap=True, accumulate=3)
            assert (rank(), world_size(), clock()) == (0, 1, 0)
            optimizer.step_samples(7)
            loop(net, optimizer, 0, 1)
            assert np.array_equal(flat(net), reference)
            *_, (first, second) = list(extra.values())[-2:], list(extra.values())[-2:]
            assert torch.equal(first, second) and not torch.equal(first, torch.ones(3))
            assert clock() == step_count() == only.clock == 3 * STEPS + 1
            assert repr(optimizer.state_dict()) == repr(inner.state_dict())
            assert inner.param_groups is optimizer.param_groups and len(inner.param_groups) == 2
            optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
            session.record(loss=1.0)
            with optimizer.shared():
                assert np.array_equal(flat(net), reference)
            optimizer.finish()
        extra.clear()


def trained_once(steps: int, data: Any) -> tuple[list[float], list[int]]:
    """The rates and the steps of one training, as a sweep or a cell of a notebook has it."""
    net = build()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(inner, net, schedule=(schedule := lrs.ExponentialLR(inner, 0.5)))
    rates, seen = list[float](), list[int]()
    for indices in DataLoader(range(64), 4, sampler=data):  # type: ignore[arg-type]
        rates.append(inner.param_groups[0]["lr"])
        seen.append(step_count())
        loss_of(net, int(indices[0])).backward()
        optimizer.step()
        schedule.step()
    assert optimizer.clock == steps and optimizer._trains is False, "after its last step the model is shown"
    return rates, seen


def test_each_training_of_a_script_alone_begins_anew() -> None:
    """Its loader may be made before its optimizer, after that, or once for all trainings."""
    with alone():
        once = sampler(range(64), 4, steps=5)
        for steps, data in ((5, once), (3, None), (5, once), (7, None)):
            own = sampler(range(64), 4, steps=steps) if data is None else data
            assert trained_once(steps, own) == ([0.5**step for step in range(steps)], list(range(steps)))
        first, second = (DistributedOptimizer(SGD((net := build()).parameters()), net) for _ in range(2))
        for optimizer, clocks in ((first, 1), (second, 1), (first, 2), (first, 3), (second, 2)):
            optimizer.step()
            assert optimizer.clock == clock() == clocks, "the one that steps counts"
        assert [*ranges(8, 4)][1].numel() == 4 and second.clock == 2
        begin_anew(second)  # as a Trainer that trains a second time
        assert step_count() == second.clock == 0 and len([*ranges(8, 4)]) == 2


@pytest.mark.parametrize(("variables", "told"), [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun has started 2 processes"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, ""),  # the first one says it for all
    ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "Slurm has started 4 processes"),
    ({"RANK": "none"}, ""),
], ids=str)  # fmt: skip
def test_processes_of_a_manager_that_have_no_server_are_told_that_each_trains_alone(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with alone():
        for _ in range(2):
            DistributedOptimizer(SGD((net := build()).parameters()), net).step()
    said = capfd.readouterr().err
    assert (said.count("each of them trains alone"), said.count(told or "processes")) == (bool(told), bool(told)), said
