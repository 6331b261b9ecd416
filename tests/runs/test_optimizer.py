"""DistributedOptimizer is an optimizer like any other: whatever a script does to one, it does the same as in one process.

Reference: the same script on the inner optimizer alone, on the union batch. bsp promises 1e-5 in L2 norm; one worker
that pushes dense updates gets the very steps of its own optimizer, rounded once more (start + (now - start)).
"""

from __future__ import annotations

import copy
import io
import math
import threading
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import store_of
from kit.scripts import BATCH, Array, Run, alone, batch, build, distance, flat, loss_of, run, seeded
from kit.specs import LIKE_ONE_PROCESS
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader

from narrows.protocols.config.modes import ELEMENTWISE
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker import DistributedOptimizer, clock, ranges, rank, sampler, session, step_count, world_size
from narrows.worker.optimizer import begin_anew

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12
EQUAL = 1e-5
Make = Callable[[Any], torch.optim.Optimizer]
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


def plain(make: Make, loop: Loop = each_step, model: Callable[[], nn.Module] = build) -> Array:
    """In one process, without Narrows."""
    net = model()
    loop(net, make(net.parameters()), 0, 1)
    return flat(net)


def trained(
    settings: Settings, make: Make, loop: Loop = each_step, model: Callable[[], nn.Module] = build, **wrapper: Any
) -> Array:
    """The model that every worker sees in the end: the shared one, which is the same for all."""

    def script(worker: int) -> Array:
        net = model()
        optimizer = DistributedOptimizer(make(net.parameters()), net, **wrapper)
        loop(net, optimizer, worker, settings.workers)
        optimizer.finish()
        with optimizer.shared():
            return flat(net)

    with run(settings) as started:
        results = started.together(script)
    for other in results[1:]:
        assert np.array_equal(results[0], other), "after finish() all workers see one model"
    shared: Array = results[0]
    return shared


# It is an optimizer.


def test_groups_state_and_defaults_are_those_of_the_inner_optimizer() -> None:
    with run(SSP1):
        net = build()
        inner = ADAMW(net.parameters())
        optimizer = DistributedOptimizer(inner, net)
        assert isinstance(optimizer, torch.optim.Optimizer)
        for name in ("param_groups", "state", "defaults"):
            assert getattr(optimizer, name) is getattr(inner, name)
        each_step(net, optimizer, 0, 1)
        assert optimizer.state[next(net.parameters())]["step"] == STEPS
        optimizer.load_state_dict(optimizer.state_dict())
        for name in ("param_groups", "state", "defaults"):
            assert getattr(optimizer, name) is getattr(inner, name)
        assert "DistributedOptimizer" in repr(optimizer)


def test_what_an_optimizer_says_of_its_run() -> None:
    def script(worker: int) -> tuple[int, int, int, int]:
        model = build()
        optimizer = DistributedOptimizer(SGD(model.parameters()), model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, worker, 2).backward()
            optimizer.step()
            assert optimizer.clock == clock() == step + 1 and 0 <= optimizer.staleness <= 1
        optimizer.finish()
        return flat(model).size, optimizer.bytes_up, optimizer.bytes_down, optimizer.clock

    with run(Settings(sync="ssp", workers=2)) as started:
        told = started.together(script)
        links = [each.link for each in started.sessions]
    for (size, up, down, steps), link in zip(told, links, strict=True):
        assert up == link.bytes_up > 3 * 4 * size and down == link.bytes_down and steps >= 3  # this link counts one way
    with alone():
        model = build()
        optimizer = DistributedOptimizer(SGD(model.parameters()), model)
        optimizer.step()
        assert (optimizer.clock, optimizer.staleness, optimizer.bytes_up, optimizer.bytes_down) == (1, 0, 0, 0)


@pytest.mark.parametrize("mode", LIKE_ONE_PROCESS)
def test_one_worker_takes_the_steps_of_its_own_optimizer_in_every_mode(mode: str) -> None:
    """Ho et al. 2013, sec. 3: a replica that reads its own writes is never behind itself, whatever the staleness."""

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
            seen.append(flat(net))

    seen: list[Array] = []
    plain(ADAMW, loop)
    expected, seen = seen, []
    final = trained(Settings(**LIKE_ONE_PROCESS[mode]), ADAMW, loop)
    assert max(distance(a, b) for a, b in zip(seen, expected, strict=True)) < 1e-6
    assert distance(final, expected[-1]) < 1e-6


@pytest.mark.parametrize("spec", ["topk:0.1", "int8", "topk:0.1+int8"])
@pytest.mark.parametrize("sync", ["ssp", "async"])
def test_one_worker_keeps_its_own_steps_under_a_lossy_compressor_of_both_links(spec: str, sync: str) -> None:
    """The residual stands in the replica, so what was not sent is not missed; a lossy downlink is."""
    up = Settings(sync=sync, compress=spec, compress_down="dense", shards=2)
    assert distance(trained(up, ADAMW), plain(ADAMW)) < 1e-5


VARIANTS: dict[str, Make] = {
    **{name: lambda p, name=name: getattr(torch.optim, name)(p, lr=5e-3) for name in ELEMENTWISE},  # type: ignore[misc]
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=1e-2),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3, maximize=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, betas=(0.8, 0.95), amsgrad=True, weight_decay=0.1),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=3e-3, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=3e-3, foreach=True),
    "Adam tensors": lambda p: torch.optim.Adam(p, lr=torch.tensor(3e-3), foreach=False),
    "Adam differentiable": lambda p: torch.optim.Adam(p, lr=3e-3, differentiable=False, capturable=False),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=2e-3, momentum=0.5, centered=True),
    "Adagrad accumulator": lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1, lr_decay=0.01),
    "NAdam decoupled": lambda p: torch.optim.NAdam(p, lr=2e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam decoupled": lambda p: torch.optim.RAdam(p, lr=2e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "Adadelta rate": lambda p: torch.optim.Adadelta(p, lr=1.0, rho=0.8, weight_decay=1e-2),
    "ASGD early": lambda p: torch.optim.ASGD(p, lr=0.05, t0=3, weight_decay=1e-2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_elementwise_optimizer_on_the_servers_is_the_one_of_the_script(name: str) -> None:
    expected = plain(VARIANTS[name])
    assert distance(trained(BSP, VARIANTS[name]), expected) < EQUAL
    assert distance(expected, flat(build())) > 10 * EQUAL, "it does train"


class Custom(torch.optim.Optimizer):
    """Somebody's own: signed steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


class Adam(torch.optim.Adam):
    """A subclass with the name of its base: what it overrides would be lost on a server."""


WHOLE: dict[str, tuple[Make, str]] = {
    "Custom": (lambda p: Custom(p, lr=1e-2), "Custom is not in torch.optim"),
    "Adam of its own": (Adam, "Adam is not in torch.optim"),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=1e-2), "Adafactor is not elementwise"),
    "LBFGS": (lambda p: torch.optim.LBFGS(p, lr=0.1), "LBFGS is not elementwise"),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p, lr=1e-2), "SparseAdam is not elementwise"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_no_server_can_rebuild_is_refused_in_one_sentence(name: str) -> None:
    make, words = WHOLE[name]
    with run(BSP1):
        net = build()
        with pytest.raises(UsageError, match=rf"{words}.*use --push update") as caught:
            DistributedOptimizer(make(net.parameters()), net)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Custom", "Adam of its own", "Adafactor"])
def test_any_optimizer_works_with_pushed_updates(name: str) -> None:
    make, _ = WHOLE[name]
    assert distance(trained(SSP1, make), plain(make)) < EQUAL


def test_hyper_parameters_that_are_no_plain_values_are_refused_by_name() -> None:
    with run(BSP1):
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net)
        inner.param_groups[0]["lr"] = lambda: 0.1
        loss_of(net, 0).backward()
        with pytest.raises(UsageError, match=r"'lr' is no plain value.*--push update"):
            optimizer.step()


# Schedulers.


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


def frozen() -> nn.Module:
    net = build()
    net.get_parameter("0.weight").requires_grad_(False)
    return net


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


# Precision.


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


# Overlap.


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


# Closures.


def by_closure(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, step, worker, of)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.item() == pytest.approx(loss.item()) and loss.requires_grad


@pytest.mark.parametrize("settings", [BSP, SSP1], ids=["gradients", "updates"])
def test_a_closure_does_the_backward(settings: Settings) -> None:
    assert distance(trained(settings, SGD, by_closure), plain(SGD)) < EQUAL


def test_an_optimizer_that_calls_its_closure_many_times_pushes_its_update() -> None:
    make: Make = lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=4)  # noqa: E731
    reference = plain(make, by_closure)
    assert distance(reference, flat(build())) > 0.1
    assert distance(trained(SSP1, make, by_closure), reference) < EQUAL
    with alone():
        net = build()
        by_closure(net, DistributedOptimizer(make(net.parameters()), net), 0, 1)
    assert np.array_equal(flat(net), reference)


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
    for settings in (SSP1, Settings(sync="ssp", compress="topk:0.1", compress_down="dense")):
        assert distance(trained(settings, rate, reading, words), plain(rate, reading, words)) < EQUAL


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


# Models and sessions.


def test_the_first_workers_weights_become_those_of_the_run() -> None:
    def script(worker: int) -> tuple[int, Array]:
        net = build(seed=worker)
        DistributedOptimizer(SGD(net.parameters()), net)
        return rank(), flat(net)

    with run(Settings(sync="bsp", workers=3, shards=2)) as started:
        results = started.together(script)
        first = started.cluster.servers[0].coordinator
        assert first is not None
    assert [place for place, _ in results] == [0, 1, 2]
    starts = [flat(build(seed=worker)) for worker in range(3)]
    assert any(np.array_equal(results[0][1], start) for start in starts)
    assert all(np.array_equal(weights, results[0][1]) for _, weights in results)


def test_a_worker_with_another_model_is_refused_and_the_run_goes_on() -> None:
    others = threading.Barrier(3)

    def script(worker: int) -> str:
        net: nn.Module = build() if worker < 2 else nn.Sequential(nn.Linear(9, 18))
        if worker == 2:
            others.wait(60.0)
        try:
            optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        except RuntimeError as error:
            return str(error)
        others.wait(60.0)
        each_step(net, optimizer, worker, 2)
        optimizer.finish()
        return "done"

    with run(Settings(sync="bsp", workers=2)) as started:
        started.join()
        results = started.together(script)
    assert results[:2] == ["done", "done"]
    assert results[2].startswith("the model differs from the run's: tensor '0.weight' is float32[18, 9]")


def test_a_run_has_one_optimizer_and_its_groups_are_set_before_it() -> None:
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        with pytest.raises(NarrowsError, match="a run has one: give it all optimizers"):
            DistributedOptimizer(SGD(net.parameters()), net)
        with pytest.raises(UsageError, match="add_param_group after the run has begun"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        optimizer.finish()
        optimizer.finish()
        with pytest.raises(UsageError, match=r"step\(\) after finish\(\)"):
            optimizer.step()


def test_the_clock_counts_updates_and_the_step_count_steps() -> None:
    with run(Settings(sync="local", local_steps=5, workers=1)):
        assert (rank(), world_size(), clock(), step_count()) == (0, 1, 0, 0)
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        each_step(net, optimizer, 0, 1)
        assert (clock(), step_count()) == (STEPS // 5, STEPS)


# Own writes, residuals and what is shared.


def master(started: Run) -> Array:
    stores = [store_of(server) for server in started.cluster.servers]
    return np.concatenate([store.x for store in stores])


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
    """Conservation: the server ends with the first weights and every update given.

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
        optimizer.finish()
        total = -lost + start + np.sum(np.stack(given).astype(np.float64), axis=0)
        assert len(given) == STEPS - (expire_at is not None)
        assert np.abs(master(started) - total).max() < 2e-6


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


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


# Module buffers.


def normed(seed: int = 7) -> nn.Module:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
        net.register_buffer("small", torch.arange(3, dtype=torch.bfloat16))
        net.register_buffer("cache", torch.ones(2), persistent=False)
        return net

    return seeded(make, seed)


def test_a_joiner_starts_from_the_buffers_of_the_lowest_rank() -> None:
    with run(Settings(sync="bsp", workers=2)) as started:
        nets: list[Any] = [None, None]

        def script(worker: int) -> None:
            net = nets[worker] = normed(seed=worker)
            net.get_buffer("small").mul_(worker + 2)
            optimizer: Any = DistributedOptimizer(SGD(net.parameters()), net)
            each_step(net, optimizer, worker, 2)
            if worker == 0:
                optimizer._engine.send_buffers()  # at the end of a lease's half, or of the run

        started.together(script)
        started.join()
        joiner = normed(seed=5)
        joiner.get_buffer("cache").zero_()
        DistributedOptimizer(SGD(joiner.parameters()), joiner)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "small"):
        assert torch.equal(joiner.get_buffer(name), nets[0].get_buffer(name)), name
    assert not torch.equal(nets[0].get_buffer("1.running_mean"), nets[1].get_buffer("1.running_mean"))
    assert torch.equal(joiner.get_buffer("cache"), torch.zeros(2)), "a buffer that is not saved is each worker's own"
    assert np.array_equal(flat(joiner), flat(nets[0]))


# A compiled model.


def test_a_model_is_compiled_before_or_after_it_is_wrapped() -> None:
    """Tensors have their names in the model itself, so a worker that compiles and one that does not are of one run."""

    def compiled(net: nn.Module) -> Any:
        return torch.compile(net, backend="eager", fullgraph=True)

    def steps(net: nn.Module, optimizer: Any) -> Array:
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss_of(net, step).backward()
            optimizer.step()
        return flat(net)

    net = normed()
    expected = steps(net, ADAMW(net.parameters()))
    for before in (True, False):
        with run(SSP1) as started:
            net = normed()
            inner: Any = compiled(net) if before else net
            optimizer: Any = DistributedOptimizer(ADAMW(net.parameters()), inner)
            assert distance(steps(inner if before else compiled(net), optimizer), expected) < EQUAL
            optimizer._engine.send_buffers()
            started.join()
            joiner = normed(seed=5)
            DistributedOptimizer(ADAMW(joiner.parameters()), joiner)
            assert np.array_equal(flat(joiner), flat(net))
            assert torch.equal(joiner.get_buffer("1.running_mean"), net.get_buffer("1.running_mean"))


# Alone.


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


@pytest.mark.parametrize("ends", [True, False])
def test_a_second_training_in_a_run_is_refused_with_the_way_out(ends: bool) -> None:
    with run(Settings(sync="ssp", workers=1)):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        optimizer.step()
        if ends:
            optimizer.finish()
        with pytest.raises(UsageError, match=r"start ps-worker (again|once) for (the next|each) training"):
            DistributedOptimizer(SGD(net.parameters()), net)


@pytest.mark.parametrize(("spec", "named"), [("topk:0.003", 1), ("topk:0.5", 0)])
def test_who_holds_back_too_much_is_told_once(spec: str, named: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One of 294 values goes at a time, along one gradient."""
    with run(Settings(sync="ssp", staleness=0, compress=spec)) as started:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        for _ in range(180):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.finish()
        assert started.sessions[0].clock >= 180
    said = capsys.readouterr().err
    assert said.count(f"--compress {spec} lets too little through") == named


class ScheduleFree(torch.optim.Optimizer):
    """SGD of "The road less scheduled" (Defazio et al. 2405.15682, alg. 1) as its authors' package has it: parameters are y in
    training and x in evaluation. calls: of eval() and train()."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.calls: list[str] = []

    def _shift(self, weight: float, name: str) -> None:
        self.calls.append(name)
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)

    def eval(self) -> None:
        self._shift(1 - 1 / self.defaults["beta"], "eval")

    def train(self) -> None:
        self._shift(1 - self.defaults["beta"], "train")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.calls and self.calls[-1] == "train"
        for group in self.param_groups:
            for p in group["params"]:
                state, beta = self.state[p], group["beta"]
                z = state.setdefault("z", p.clone())
                state["k"] = state.get("k", 0) + 1
                x = p.lerp(z, 1 - 1 / beta)
                z.sub_(p.grad, alpha=group["lr"])
                p.copy_(x.lerp_(z, 1 / state["k"]).lerp_(z, 1 - beta))


@pytest.mark.parametrize("settings", [None, SSP1, Settings(sync="bsp", push="update")], ids=["alone", "ssp", "bsp"])
def test_an_inner_optimizer_that_has_two_modes_is_told_of_each_once(settings: Settings | None) -> None:
    wanted = build()
    inner = ScheduleFree(wanted.parameters())
    inner.train()
    each_step(wanted, inner, 0, 1)
    y = flat(wanted)
    inner.eval()
    x = flat(wanted)
    assert distance(x, y) > 1e-3
    with alone() if settings is None else run(settings):
        net = build()
        inner = ScheduleFree(net.parameters())
        optimizer = DistributedOptimizer(inner, net)
        optimizer.train()
        each_step(net, optimizer, 0, 1)
        for _ in range(2):
            optimizer.eval()
            assert distance(flat(net), x) < EQUAL
        with optimizer.shared():
            assert distance(flat(net), x) < EQUAL
        assert inner.calls == ["train", "eval"]
        optimizer.train()
        optimizer.train()
        assert distance(flat(net), y) < EQUAL and inner.calls == ["train", "eval", "train"]
        optimizer.eval()
        optimizer.finish()
        assert distance(flat(net), y) < EQUAL
        with optimizer.shared():
            assert distance(flat(net), x) < EQUAL
