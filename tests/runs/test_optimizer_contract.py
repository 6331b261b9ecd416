"""What a script may expect of any torch optimizer holds of DistributedOptimizer too: hooks, version counters, state, groups.

Reference: the same script on the inner optimizer alone.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from kit.groups import groups
from kit.scripts import Array, alone, build, distance, flat, loss_of, run
from kit.specs import LIKE_ONE_PROCESS, MODES, modes, steps_on_worker
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, EQUAL = 6, 1e-5
ON_SERVERS = modes(lambda settings: not steps_on_worker(settings))


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)


def train(net: torch.nn.Module, optimizer: Any, steps: int = STEPS, worker: int = 0, of: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step, worker, of).backward()
        optimizer.step()


class Hooks:
    """Hooks of an optimizer's step: the one before halves the gradients' first tensor, the one after sees the new weights."""

    def __init__(self, net: torch.nn.Module, *optimizers: Any) -> None:
        self.net, self.told = net, list[tuple[str, str]]()
        self.weights = flat(net)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.before)
            optimizer.register_step_post_hook(self.after)

    def before(self, optimizer: Any, args: Any, values: Any) -> None:
        self.told.append((type(optimizer).__name__, "before"))
        if type(optimizer).__name__ == "AdamW":
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(0.5) if parameter.grad is not None and parameter.grad.dim() == 1 else None

    def after(self, optimizer: Any, args: Any, values: Any) -> None:
        self.told.append((type(optimizer).__name__, "after"))
        now = flat(self.net)
        assert distance(self.weights, now) > 0
        self.weights = now if type(optimizer).__name__ != "AdamW" else self.weights


def hooked() -> Array:
    net = build()
    optimizer = adamw(net)
    Hooks(net, optimizer)
    train(net, optimizer)
    return flat(net)


OURS, THEIRS = "DistributedOptimizer", "AdamW"
A_STEP = [(OURS, "before"), (THEIRS, "before"), (THEIRS, "after"), (OURS, "after")]


@pytest.mark.parametrize("mode", LIKE_ONE_PROCESS)
def test_hooks_of_a_step_are_called_around_it_and_may_change_gradients(mode: str) -> None:
    with run(Settings(**LIKE_ONE_PROCESS[mode])):
        net = build()
        inner = adamw(net)
        optimizer = DistributedOptimizer(inner, net)
        hooks = Hooks(net, inner, optimizer)
        train(net, optimizer)
        assert hooks.told == A_STEP * STEPS
        assert distance(flat(net), hooked()) < EQUAL


@pytest.mark.parametrize("push", ["gradient", "update"])
def test_in_a_group_they_see_the_slice(push: str) -> None:
    seen: list[int] = []

    def work(member: int, own: int) -> Array:
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net)

        def halve(optimizer: Any, args: Any, values: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)

        inner.register_step_pre_hook(halve)
        inner.register_step_post_hook(lambda *_: seen.append(own))
        train(net, optimizer, worker=own, of=2)
        return flat(net)

    with groups(Settings(workers=1, shards=2, sync="bsp", push=push).validated(), [2]) as started:
        found = started.together(work)
    assert sorted(seen) == [0] * STEPS + [1] * STEPS
    net = build()
    train(net, torch.optim.SGD(net.parameters(), lr=0.05))
    assert all(distance(each, flat(net)) < EQUAL for each in found.values())


def test_hooks_of_all_optimizers_are_called_too() -> None:
    called: list[tuple[Any, str]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: called.append((optimizer, "before"))),
        register_optimizer_step_post_hook(lambda optimizer, *_: called.append((optimizer, "after"))),
    ]
    try:
        with run(Settings(sync="bsp")):
            net = build()
            inner = adamw(net)
            optimizer = DistributedOptimizer(inner, net)
            train(net, optimizer, steps=1)
    finally:
        for handle in handles:
            handle.remove()
    ours = [
        (type(each).__name__, when) for each, when in called if each in (optimizer, inner)
    ]  # and of this process's server
    assert ours == A_STEP


# Version counters.


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("mode", MODES)
def test_a_backward_pass_through_weights_that_a_step_has_changed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, mode: str, where: str
) -> None:
    monkeypatch.setenv("NARROWS_ARRAYS", where)
    with run(Settings(**MODES[mode])):
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        train(net, optimizer, steps=2)
        before = [parameter._version for parameter in net.parameters()]
        loss = loss_of(net, 0)
        loss_of(net, 1).backward()
        optimizer.step()
        assert all(now._version > then for now, then in zip(net.parameters(), before, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        train(net, optimizer, steps=2)  # and nothing takes that for a change of the script's


@pytest.mark.parametrize("push", ["gradient", "update"])
def test_the_same_in_a_group(push: str) -> None:
    def work(member: int, own: int) -> None:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        loss = loss_of(net, 0)
        loss_of(net, 1).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    with groups(Settings(workers=1, shards=2, sync="bsp", push=push).validated(), [2]) as started:
        started.together(work)


def test_what_we_write_is_no_change_of_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where this worker had to join again, and states come between two steps."""
    with run(Settings(sync="bsp", shards=2)) as started:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        train(net, optimizer, steps=2)
        started.expire(0)
        train(net, optimizer, steps=3)
    assert "was changed between two steps" not in capsys.readouterr().err


# State and groups.


def adagrad(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(net.parameters(), lr=0.02, initial_accumulator_value=0.1)


@pytest.mark.parametrize("mode", ON_SERVERS)
def test_where_servers_step_the_state_is_empty_each_time(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = build()
    train(other, stepped := adagrad(other))
    with run(Settings(**MODES[mode])):
        net = build()
        inner = adagrad(net)
        optimizer = DistributedOptimizer(inner, net)

        def is_empty() -> None:
            first = next(net.parameters())
            assert not optimizer.state and first not in optimizer.state and not optimizer.state[first]
            assert optimizer.state_dict()["state"] == {}

        is_empty()
        train(net, optimizer)
        is_empty()
        inner.load_state_dict(stepped.state_dict())
        assert "what was loaded is not used" in capsys.readouterr().err
        is_empty()
        optimizer.load_state_dict(stepped.state_dict())
        is_empty()
        assert len(optimizer.state_dict(servers=True)["state"]) == len([*net.parameters()])
        with pytest.raises(UsageError, match="the servers have the optimizer's state"):
            optimizer.state[next(net.parameters())] = {"sum": torch.zeros(1)}
        with pytest.raises(UsageError, match=r"optimizer\.state = "):
            optimizer.state = {}


def test_the_state_is_that_of_the_inner_optimizer_at_the_moment() -> None:
    other = build()
    train(other, stepped := adamw(other))
    for settings in (Settings(sync="ssp"), None):
        with run(settings) if settings is not None else alone():
            net = build()
            inner = adamw(net)
            optimizer = DistributedOptimizer(inner, net)
            inner.load_state_dict(copy.deepcopy(stepped.state_dict()))
            first = next(net.parameters())
            assert optimizer.state is inner.state and optimizer.state[first]["step"] == STEPS
            optimizer.step()
            inner.state = type(inner.state)(dict)
            assert not optimizer.state


def test_a_state_that_is_loaded_into_the_inner_optimizer_reaches_all_ranks() -> None:
    def work(member: int, own: int) -> Array:
        net = build()
        inner = adamw(net)
        optimizer = DistributedOptimizer(inner, net)
        train(net, optimizer, worker=own, of=2)
        inner.load_state_dict(optimizer.state_dict())
        train(net, optimizer, worker=own, of=2)
        return flat(net)

    with groups(Settings(workers=1, shards=2, sync="bsp", push="update").validated(), [2]) as started:
        found = started.together(work)
    net = build()
    optimizer = adamw(net)
    train(net, optimizer)
    train(net, optimizer)
    assert all(distance(each, flat(net)) < EQUAL for each in found.values())


@pytest.mark.parametrize("mode", ["bsp", "ssp", "alone"])
def test_groups_that_are_set_are_those_that_step(mode: str) -> None:
    with alone() if mode == "alone" else run(Settings(**MODES[mode])):
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, net)
        optimizer.param_groups = [group | {"lr": 0.05} for group in optimizer.param_groups]
        assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05
        train(net, optimizer)
        if mode != "alone":
            with pytest.raises(UsageError, match=r"param_groups = .*the same parameters"):
                optimizer.param_groups = [{"params": [*net.parameters()][:1], "lr": 0.1}]
        found = flat(net)
    net = build()
    train(net, torch.optim.SGD(net.parameters(), lr=0.05))
    assert distance(found, flat(net)) < EQUAL


def test_groups_of_several_optimizers_go_to_each_of_them() -> None:
    with alone():
        net = build()
        first, *others = net.parameters()
        one, other = torch.optim.SGD([first], lr=0.5), torch.optim.AdamW(others, lr=0.5)
        optimizer = DistributedOptimizer([one, other], net)
        optimizer.param_groups = [group | {"lr": 0.25} for group in optimizer.param_groups]
        assert (one.param_groups[0]["lr"], other.param_groups[0]["lr"]) == (0.25, 0.25)
        with pytest.raises(UsageError, match="2 optimizers are wrapped, which have 2 groups, and these are 1"):
            optimizer.param_groups = optimizer.param_groups[:1]


def test_hooks_of_a_state_dict_are_called() -> None:
    told: list[str] = []
    with run(Settings(sync="ssp")):
        net = build()
        optimizer = DistributedOptimizer(adamw(net), net)
        optimizer.register_state_dict_pre_hook(lambda _: told.append("before"))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"mark": 7})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: told.append(str(state.pop("mark"))))
        optimizer.register_load_state_dict_post_hook(lambda _: told.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
    assert told == ["before", "7", "loaded"]


@pytest.mark.parametrize("mode", ["bsp", "ssp"])
def test_a_scheduler_of_the_inner_optimizer_is_told_that_it_steps(mode: str) -> None:
    with run(Settings(**MODES[mode])), warnings.catch_warnings():
        warnings.simplefilter("error")
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = StepLR(inner, 1)
        optimizer = DistributedOptimizer(inner, net)
        train(net, optimizer, steps=1)
        schedule.step()
