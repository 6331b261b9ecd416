"""The gain of a mean of updates in whole runs: what a worker declares of its optimizer, the record, a run that goes on."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.in_process import store_of
from kit.scripts import build, flat, loss_of, run, train
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.worker import session
from narrows.worker.command.record import WorkerRecord
from narrows.worker.model.optimizer_scaling import degree_of
from narrows.worker.model.optimizers import as_one

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 40  # four windows and what comes late


# The degree of an optimizer. Two that no plain step is possible of count as 1: LBFGS wants a closure, SparseAdam a sparse
# gradient.

DEGREES = {
    "SGD": 1.0,
    "ASGD": 1.0,
    "LBFGS": 1.0,
    "SparseAdam": 1.0,
    "Adadelta": 0.0,
    "Adafactor": 0.0,
    "Adagrad": 0.0,
    "Adam": 0.0,
    "Adamax": 0.0,
    "AdamW": 0.0,
    "Muon": 0.0,
    "NAdam": 0.0,
    "RAdam": 0.0,
    "RMSprop": 0.0,
    "Rprop": 0.0,
}


def matrix(size: int = 3) -> nn.Parameter:
    return nn.Parameter(torch.ones(size, size))


def test_every_optimizer_of_torch_has_a_degree() -> None:
    classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in classes if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert names <= set(DEGREES), "one of a newer torch"
    assert names >= set(DEGREES) - {"Muon"}  # torch 2.9 and later


@pytest.mark.parametrize("name", DEGREES)
def test_the_degree_of(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    kind = getattr(torch.optim, name)
    assert degree_of(kind([matrix()], lr=0.1)) == DEGREES[name]


class Noisy(torch.optim.SGD):
    """SGD that draws numbers, as Langevin dynamics do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data += 1e-7 * torch.randn_like(p)
        return loss


class WantsMore(torch.optim.SGD):
    def __init__(self, params: Any, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)


class Signs(torch.optim.Optimizer):
    """The script's own optimizer: it steps along the signs of the gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad.sign()


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OTHERS: dict[str, tuple[Make, float]] = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), 1.0),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 1.0),
    "weight decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), 1.0),
    "AdamW, large weight decay": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), 0.0),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), 0.0),
    "maximize": (lambda p: torch.optim.AdamW(p, maximize=True), 0.0),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), 0.0),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), 0.0),
    "capturable": (lambda p: torch.optim.AdamW(p, capturable=True), 0.0),
    "differentiable": (lambda p: torch.optim.AdamW(p, differentiable=True), 0.0),
    "a rate in a tensor": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), 0.0),
    "its constructor wants more": (lambda p: WantsMore(p, build()), 1.0),
    "signs": (Signs, 0.0),
    "noisy": (lambda p: Noisy(p, lr=0.1), 1.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_degree_follows_from_what_an_optimizer_does(name: str) -> None:
    make, degree = OTHERS[name]
    assert degree_of(make([matrix()])) == degree


def test_a_mix_counts_by_parameters() -> None:
    sgd, adam = torch.optim.SGD([matrix(4)], lr=0.1), torch.optim.AdamW([matrix(2), matrix(2)])
    model = nn.Module()
    assert degree_of(as_one([sgd, adam], model)) == pytest.approx(16 / 24, abs=0.005)
    frozen = matrix(4)
    frozen.requires_grad_(False)
    sgd.add_param_group({"params": [frozen], "momentum": 0.5})
    assert degree_of(as_one([sgd, adam], model)) == pytest.approx(16 / 24, abs=0.005)
    assert degree_of(torch.optim.AdamW([frozen])) == 1.0  # of no parameters


def test_what_a_scheduler_adds_to_the_groups_is_no_argument() -> None:
    optimizer = torch.optim.AdamW([matrix()], lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    assert {"initial_lr", "max_lr"} <= set(optimizer.param_groups[0])
    assert degree_of(optimizer) == 0.0


@pytest.mark.parametrize("name", ["noisy", "amsgrad", "momentum", "a rate in a tensor"])
def test_trying_an_optimizer_leaves_it_and_the_random_state_as_they_were(name: str) -> None:
    parameter = matrix()
    optimizer = OTHERS[name][0]([parameter])
    parameter.grad = torch.full((3, 3), 0.5)
    optimizer.step()
    torch.manual_seed(3)
    before, state, drawn = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    degree_of(optimizer)
    assert torch.equal(torch.get_rng_state(), drawn) and torch.equal(parameter, before)
    assert parameter.grad is not None and (parameter.grad == 0.5).all()
    after = optimizer.state_dict()
    assert str(after) == str(state) and after["state"].keys() == state["state"].keys()


# The record of a run.


def recorded(
    settings: Settings, make: Callable[[nn.Module], torch.optim.Optimizer], path: Path
) -> list[dict[str, Any]]:
    """The lines of --record, of workers that compute on parts of one batch."""
    told: list[tuple[int, dict[str, Any]]] = []
    with pytest.MonkeyPatch.context() as patch, run(settings) as started:

        def tell(event: str, **values: Any) -> None:
            told.append((session.current().rank, {"event": event} | values))

        patch.setattr(session, "_tell", tell)
        told.append((0, {"event": "hello", "settings": {f: getattr(settings, f) for f in settings.__slots__}}))
        started.together(lambda worker: train(STEPS, make))
    recording = WorkerRecord(str(path), print)
    for worker, event in told:
        recording.take(worker, event)
    recording.done([0] * settings.workers)
    recording.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert not {"gain", "agreement"} & lines[-1]["last"].keys(), "they are not the script's figures"
    return [line for line in lines if line["event"] == "step"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize(
    "flags", [{"sync": "ssp", "shards": 2}, {"sync": "async"}, {"sync": "bsp", "push": "update"},
              {"sync": "ssp", "compress": "topk:0.1+int8"}], ids=str,
)  # fmt: skip
def test_the_record_of_a_run_has_the_gain_once_it_is_measured(flags: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(**flags, workers=2).validated()
    steps = recorded(settings, adamw, tmp_path / "run.jsonl")
    assert not any("gain" in step or "agreement" in step for step in steps if step["clock"] < 8)
    late = [step for step in steps if step["clock"] > STEPS - 4]
    if settings.sync == "async":  # a worker that ends after the other has nothing to agree with
        late = [step for step in late if "gain" in step] or [step for step in steps if "gain" in step][-4:]
    assert late and all(1.02 < step["gain"] <= 1.4143 and 0.7 < step["agreement"] < 0.98 for step in late)
    assert all(step["gain"] == pytest.approx(1 / step["agreement"], rel=0.01) for step in late)


def test_the_gain_of_updates_that_grow_with_the_gradient_is_1(tmp_path: Path) -> None:
    steps = recorded(Settings(workers=2).validated(), sgd, tmp_path / "run.jsonl")
    late = [step for step in steps if step["clock"] > STEPS - 4]
    assert late and all(step["gain"] == 1.0 and 0.5 < step["agreement"] < 1 for step in late)


@pytest.mark.parametrize(
    "flags", [{"sync": "bsp"}, {"sync": "ssp", "push": "gradient"}, {"sync": "local", "local_steps": 2}], ids=str
)
def test_where_no_updates_are_added_the_record_has_neither(flags: dict[str, Any], tmp_path: Path) -> None:
    steps = recorded(Settings(**flags, workers=2).validated(), adamw, tmp_path / "run.jsonl")
    assert steps and not any("gain" in step or "agreement" in step for step in steps)


def test_a_gain_that_was_given_is_the_gain(tmp_path: Path) -> None:
    steps = recorded(Settings(workers=2, update_gain=1.125).validated(), adamw, tmp_path / "run.jsonl")
    late = [step for step in steps if step["clock"] > STEPS - 4]
    assert late and all(step["gain"] == 1.125 and step["agreement"] < 0.98 for step in late)


# The model on each side.


def test_a_worker_computes_on_what_the_shard_says() -> None:
    """All that is in flight is settled in the end: the model that all end with is the shard's."""
    with run(Settings(sync="ssp", workers=2)) as started:
        models = started.together(lambda worker: train(STEPS, adamw))
        store = store_of(started.cluster.servers[0])
        assert 1.02 < store.gain.factor < 2 and store.gain.look == 0.5
        for model in models:
            assert np.array_equal(model, store.x)
        for joined in started.sessions:
            engine = joined.engine
            assert engine is not None
            (exchange,) = cast(Any, engine.sync).shards.exchanges
            assert 1 < exchange.gain < exchange.ahead <= 1.5 * exchange.gain + 1e-9


def test_one_worker_has_its_own_optimizers_steps() -> None:
    with run(Settings(sync="ssp", workers=1)) as started:
        (model,) = started.together(lambda worker: train(STEPS, adamw))
        assert store_of(started.cluster.servers[0]).gain.merging(1) == (1.0, 1.0, 0.0)
    net = build()
    optimizer = adamw(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
    np.testing.assert_allclose(model, flat(net), atol=2e-6)


@pytest.mark.parametrize("sync", ["ssp", "bsp"])
@pytest.mark.parametrize(("optimizer", "degree"), [(adamw, 0.0), (sgd, 1.0)])
def test_the_plan_says_the_degree_of_the_optimizer(optimizer: Any, degree: float, sync: str) -> None:
    """Where workers push gradients too: what their cluster sends up are updates of that optimizer."""
    with run(Settings(sync=sync, workers=1)) as started:
        started.together(lambda worker: train(2, optimizer))
        planned = started.cluster.servers[0].shard.model_shard
        assert planned is not None and planned.plan.degree == degree
