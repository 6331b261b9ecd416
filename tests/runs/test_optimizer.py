"""DistributedOptimizer is an optimizer like any other: whatever a script does to one, it does the same as in one process.

Reference: the same script on the inner optimizer alone, on the union batch. bsp promises 1e-5 in L2 norm; one worker
that pushes dense updates gets the very steps of its own optimizer, rounded once more (start + (now - start)).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from kit.one_process import (
    ADAMW,
    BSP,
    BSP1,
    EQUAL,
    SGD,
    SSP1,
    STEPS,
    Make,
    by_closure,
    each_step,
    plain,
    trained,
)
from kit.scripts import Array, alone, build, distance, flat, loss_of, run, seeded
from kit.specs import LIKE_ONE_PROCESS
from torch import nn

from narrows.protocols.config.modes import ELEMENTWISE
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker import DistributedOptimizer, clock, rank, step_count, world_size

pytestmark = pytest.mark.usefixtures("one_thread")


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


# Closures.


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
