"""A step whose gradient is not finite is skipped, in every mode: before the optimizer steps, with an update of weight 0.

Reference: the same script in one process, without Narrows, that leaves out the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from kit import embedding_model
from kit.groups import groups
from kit.scripts import Array, batch, build, distance, flat, loss_of, run, seeded
from kit.specs import LIKE_ONE_PROCESS, MODES, like_one_process

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError
from narrows.worker import DistributedOptimizer, clock

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, SPOILED, EQUAL = 12, (3, 7), 1e-5
Make = Callable[[Any], torch.optim.Optimizer]
Spoils = Callable[[int, int], float | None]  # what one value of the gradient becomes, by step and worker
ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)  # noqa: E731
SGD: Make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
LBFGS: Make = lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=4)  # noqa: E731
SPARSE: dict[str, dict[str, Any]] = {
    "bsp, int8": {"sync": "bsp", "compress": "int8"},
    "ssp, topk": {"sync": "ssp", "compress": "topk:0.1+int8", "compress_down": "dense"},
    "gossip, topk": {"sync": "gossip", "compress": "topk:0.1+sign"},
}
FLAGS = {**MODES, **LIKE_ONE_PROCESS, **SPARSE}


def spoil(net: torch.nn.Module, value: float = math.nan) -> None:
    """One value of the last tensor, which one shard alone has."""
    gradient = net.get_parameter("3.bias").grad
    assert gradient is not None
    gradient[1] = value


def script(started_with: Make, spoils: Spoils, of: int, **wrapper: Any) -> Any:
    """A worker's loop."""

    def work(worker: int) -> tuple[Array, Array, int]:
        net = build()
        inner = started_with(net.parameters())
        optimizer = DistributedOptimizer(inner, net, **wrapper)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(net, step, worker, of)
            value = spoils(step, worker)
            if wrapper.get("overlap") and value is not None:
                (loss * value).backward()
            else:
                loss.backward()
                spoil(net, value) if value is not None else None
            optimizer.step()
        steps, own = clock(), flat(net)
        optimizer.finish()
        values = [each for state in inner.state.values() for each in state.values()]
        assert all(bool(torch.isfinite(torch.as_tensor(each)).all()) for each in values), "the optimizer saw none"
        return flat(net), own, steps

    return work


def reference(make: Make, spoils: Spoils, of: int = 1) -> Array:
    net = build()
    optimizer = make(net.parameters())
    for step in range(STEPS):
        whole = [worker for worker in range(of) if spoils(step, worker) is None]
        if whole:
            optimizer.zero_grad()
            sum(loss_of(net, step, worker, of) / len(whole) for worker in whole).backward()  # type: ignore[union-attr]
            optimizer.step()
    return flat(net)


@pytest.mark.parametrize(("mode", "value"), [*zip(FLAGS, cycle([math.nan, -math.inf]), strict=False)])
def test_one_worker_takes_all_its_other_steps(mode: str, value: float) -> None:
    spoils: Spoils = lambda step, worker: value if step in SPOILED else None  # noqa: E731
    settings = Settings(**FLAGS[mode], shards=1 if mode.startswith("gossip") else 2).validated()
    with run(settings) as started:
        ((model, own, steps),) = started.together(script(ADAMW, spoils, 1))
        assert steps == STEPS // settings.mode().local_steps, "each clock is closed"
    expected = reference(ADAMW, spoils)
    far = EQUAL if like_one_process(settings) and mode != "bsp, int8" else 0.05
    assert distance(model, expected) < far and distance(own, expected) < far
    assert distance(expected, reference(ADAMW, lambda *_: None)) > 0.01


@pytest.mark.parametrize("wrapper", [{}, {"overlap": True}], ids=["at step()", "overlap"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_step_of_a_barrier_is_the_mean_of_those_that_are_finite(value: float, wrapper: dict[str, Any]) -> None:
    """All of a gradient, or one value of it, on one shard of three; in one step of nobody."""
    spoils: Spoils = lambda step, worker: value if (step, worker) in ((3, 1), (5, 0), (5, 1)) else None  # noqa: E731
    with run(Settings(sync="bsp", workers=2, shards=3)) as started:
        results = started.together(script(SGD, spoils, 2, **wrapper))
        assert not [log for log in started.cluster.logs if log.event == "void"], "no server had to find it"
    assert [steps for *_, steps in results] == [STEPS, STEPS]
    for model, own, _ in results:
        assert distance(model, reference(SGD, spoils, 2)) < EQUAL > distance(own, reference(SGD, spoils, 2))


def test_of_several_local_steps_the_others_count() -> None:
    """An outer step is of the mean of those who have one; a worker without any has no weight in it, and its samples neither."""
    settings = Settings(sync="local", local_steps=2, workers=2, outer_lr=0.7, outer_momentum=0.5)
    spoils: Spoils = lambda step, worker: math.nan if (step, worker) in ((0, 1), (2, 1), (3, 1)) else None  # noqa: E731
    steps = 4

    def work(worker: int) -> Array:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(net, step, worker, 2).backward()
            spoil(net) if spoils(step, worker) else None
            optimizer.step_samples(3)
            optimizer.step()
        return flat(net)

    def rounds() -> Array:
        """By hand."""
        shared = flat(build()).astype(np.float64)
        velocity = np.zeros_like(shared)
        for begin in range(0, steps, 2):
            moved, samples = [], []
            for worker in range(2):
                net = build()
                torch.nn.utils.vector_to_parameters(torch.from_numpy(shared.astype(np.float32)), net.parameters())
                taken = [step for step in (begin, begin + 1) if not spoils(step, worker)]
                for step in taken:
                    net.zero_grad()
                    loss_of(net, step, worker, 2).backward()
                    with torch.no_grad():
                        for p in net.parameters():
                            assert p.grad is not None
                            p.sub_(0.1 * p.grad)
                moved.append(flat(net) - shared)
                samples.append(3 * len(taken))
            mean = np.average(moved, axis=0, weights=samples)
            velocity = 0.5 * velocity + mean
            shared = shared + 0.7 * (mean + 0.5 * velocity)
        return shared.astype(np.float32)

    with run(settings) as started:
        for own in started.together(work):
            assert distance(own, rounds()) < EQUAL


@pytest.mark.parametrize("push", ["gradient", "update"])
def test_all_ranks_of_a_group_skip_the_same_steps(push: str) -> None:
    """One value of one rank's gradient, in the other rank's slice."""

    def work(member: int, own: int) -> Any:
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, own, 2).backward()
            spoil(net) if (step in SPOILED) and not own else None
            optimizer.step()
        return flat(net), clock()

    with groups(Settings(workers=1, shards=2, sync="bsp", push=push).validated(), [2]) as started:
        found = started.together(work)
    for model, steps in found.values():
        assert steps == STEPS
        assert distance(model, reference(SGD, lambda step, _: math.nan if step in SPOILED else None)) < EQUAL


@pytest.mark.parametrize(
    ("mode", "make"), [("ssp", ADAMW), ("bsp", ADAMW), ("local", ADAMW), ("ssp", LBFGS), ("local", LBFGS)]
)
def test_a_closure_that_makes_one_changes_nothing(mode: str, make: Make) -> None:
    """LBFGS calls its closure again after it has moved the weights."""
    calls = [0]

    def work(net: Any, optimizer: Any, skips: bool) -> None:
        for step in range(6):
            calls[0] = 0

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                calls[0] += 1
                spoil(net) if step == 2 and calls[0] == (2 if make is LBFGS else 1) else None
                return loss

            before = flat(net)
            if skips or step != 2:
                optimizer.step(closure)
            assert step != 2 or np.allclose(flat(net), before, atol=1e-6)

    with run(Settings(**FLAGS[mode])) as started:
        net = build()
        optimizer = DistributedOptimizer(make(net.parameters()), net)
        work(net, optimizer, True)
        assert started.sessions[0].step_count == 6
    if make is LBFGS:
        return  # it had begun that step: its memory of it stays
    expected = build()
    work(expected, make(expected.parameters()), False)
    assert distance(flat(net), flat(expected)) < EQUAL


def test_a_row_of_a_table_is_looked_at_too() -> None:
    """The step is skipped for the table and for the rest."""
    with run(Settings(sync="bsp", shards=2)) as started:
        model = embedding_model.Bags()
        optimizer = DistributedOptimizer(embedding_model.OPTIMIZERS["Adagrad"](model), model)
        losses = []
        for step in range(8):
            optimizer.zero_grad()
            loss = embedding_model.loss_of(model, step)
            (loss * (math.inf if step == 2 else 1.0)).backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert np.isfinite(losses).all() and clock() == 8
        assert not [log for log in started.cluster.logs if log.event == "void"]


def test_where_noise_hides_what_is_pushed_it_hides_a_skipped_step() -> None:
    pytest.importorskip("opacus")
    for push in ("gradient", "update"):
        settings = Settings(sync="bsp", push=push, dp_clip=0.5, dp_noise=0.1)
        spoils: Spoils = lambda step, worker: math.nan if step in SPOILED else None  # noqa: E731
        with run(settings) as started:
            ((model, *_),) = started.together(script(SGD, spoils, 1))
            engine = started.sessions[0].engine
            assert engine is not None and engine.privacy is not None and engine.privacy.pushes >= STEPS
        assert np.isfinite(model).all()


@pytest.mark.parametrize("mode", ["bsp", "ssp", "local", "gossip"])
def test_running_statistics_stay_finite(mode: str) -> None:
    """Of a batch with a NaN the mean is NaN, and so is every moving average of it from then on."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(9, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 5))

    def trained(net: torch.nn.Module, optimizer: Any) -> torch.Tensor:
        for step in range(6):
            x, y = batch(step)
            if step in (0, 3):
                x[0, 0] = math.nan
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        return net.get_buffer("1.running_mean").clone()

    with run(Settings(**FLAGS[mode])):
        net = seeded(make)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net)
        found = trained(net, optimizer)
        optimizer.finish()
        assert torch.isfinite(net.get_buffer("1.running_mean")).all()
    plain = seeded(make)
    for step in (1, 2, 4, 5):
        plain(batch(step)[0])
    torch.testing.assert_close(found, plain.get_buffer("1.running_mean"))


def test_weights_that_a_script_has_set_are_pushed_though_the_step_is_skipped() -> None:
    with run(Settings(sync="ssp")):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        loss_of(net, 0).backward()
        spoil(net)
        with torch.no_grad():
            net.get_parameter("0.bias").fill_(0.25)
        optimizer.step()
        optimizer.finish()
        assert torch.allclose(net.get_parameter("0.bias"), torch.tensor(0.25))


# What is said.


def test_it_is_counted_and_said_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    spoils: Spoils = lambda step, worker: math.nan if step in SPOILED and worker else None  # noqa: E731
    with run(Settings(sync="async", workers=2)) as started:
        started.together(script(SGD, spoils, 2))
        ours = [log.values for log in started.cluster.logs if log.event == "skipped"]
        rows = [log.values["rows"] for log in started.cluster.logs if log.event == "summary"]
    assert {(told["rank"], told["steps"]) for told in ours} | {(1, 2)} <= {(1, 1), (1, 2)} and ours
    assert {(row["path"][0], row["skipped"]) for each in rows for row in each} >= {(0, 0), (1, 2)}  # type: ignore[attr-defined]
    said = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert said == [
        "ps-worker: rank 1: the gradient of step 4 is not finite, first in '3.bias': the step is skipped; more of them are "
        "only counted"
    ]


@pytest.mark.parametrize("mode", ["bsp", "ssp, topk", "local", "gossip"])
def test_too_many_in_a_row_end_the_worker_with_its_rank(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("NARROWS_SKIP_LIMIT", "4")
    spoils: Spoils = lambda step, worker: math.nan if step in (0, 1, 2) or step > 5 else None  # noqa: E731
    text = r"^rank 0: the gradients of 4 steps in a row were not finite, the newest first in '3.bias': .*--skip-limit"
    with run(Settings(**FLAGS[mode])) as started:
        with pytest.raises(NarrowsError, match=text) as error:
            started.together(script(ADAMW, spoils, 1))
        assert "\n" not in str(error.value) and started.sessions[0].step_count == 10


def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWS_SKIP_LIMIT", "0")
    with pytest.raises(NarrowsError, match="NARROWS_SKIP_LIMIT=0: give the number of steps"), run(Settings(sync="ssp")):
        pytest.fail("no session is opened")
