"""Several optimizers in one wrapper: what a script does to them, and what they do to the model, is what stepping each does.

Reference: the same optimizers stepped by hand in one process.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kit.scripts import BATCH, Array, Each, alone, batch, build, distance, flat, loss_of, mean_loss, run, seeded
from kit.specs import like_one_process, modes, steps_on_worker
from torch import nn
from torch.optim import lr_scheduler as lrs

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer, clock

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12
EQUAL = 1e-5
CLOSE = 1e-4  # Muon computes in bfloat16: float32's last bit may move one of its values by 1/256
Optimizer = torch.optim.Optimizer
Make = Callable[[nn.Module], list[Optimizer]]

SSP1 = Settings(sync="ssp", staleness=2)
TOPK = Settings(sync="ssp", compress="topk:0.05+int8", workers=2, shards=2)
BSP = Settings(sync="bsp", workers=2, shards=2)


def split(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    return [p for p in net.parameters() if p.ndim == 2], [p for p in net.parameters() if p.ndim != 2]


def muon_adamw(net: nn.Module) -> list[Optimizer]:
    matrices, rest = split(net)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1)]


def sgd_adamw(net: nn.Module) -> list[Optimizer]:
    matrices, rest = split(net)
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def two_sgd(net: nn.Module) -> list[Optimizer]:
    matrices, rest = split(net)
    return [torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(matrices, lr=0.05, momentum=0.9, weight_decay=0.1)]


def two_adagrad(net: nn.Module) -> list[Optimizer]:
    matrices, rest = split(net)
    return [
        torch.optim.Adagrad(matrices, lr=0.1, initial_accumulator_value=0.1),
        torch.optim.Adagrad(rest, lr=0.02, initial_accumulator_value=0.1),
    ]


def each_step(net: nn.Module, optimizer: Any, worker: int = 0, of: int = 1, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        loss_of(net, step, worker, of).backward()
        optimizer.step()


Loop = Callable[..., None]


def by_hand(make: Make, loop: Loop = each_step, model: Callable[[], nn.Module] = build) -> Array:
    net = model()
    loop(net, Each(make(net)))
    return flat(net)


def trained(
    settings: Settings,
    make: Make,
    loop: Loop = each_step,
    model: Callable[[], nn.Module] = build,
    whole: bool = False,
    **wrapper: Any,
) -> Array:
    """The model that every worker ends with. `whole`: each worker computes on all of the batch."""

    def script(worker: int) -> Array:
        net = model()
        optimizer = DistributedOptimizer(make(net), net, **wrapper)
        loop(net, optimizer, *((0, 1) if whole else (worker, settings.workers)))
        optimizer.finish()
        with optimizer.shared():
            return flat(net)

    with run(settings) as started:
        results: list[Array] = started.together(script)
    for other in results[1:]:
        assert np.array_equal(results[0], other), "after finish() all workers see one model"
    return results[0]


# It is an optimizer.


def test_groups_and_state_are_those_of_all_optimizers() -> None:
    with run(SSP1):
        net = build()
        muon, adamw = muon_adamw(net)
        optimizer = DistributedOptimizer([muon, adamw], net)
        each_step(net, optimizer)
        for group, own in zip(optimizer.param_groups, muon.param_groups + adamw.param_groups, strict=True):
            assert group is own
        assert set(muon.param_groups[0]) == set(torch.optim.Muon(split(net)[0]).param_groups[0]), "nothing was added"
        matrix, bias = net.get_parameter("0.weight"), net.get_parameter("0.bias")
        assert optimizer.state[matrix] is muon.state[matrix] and "momentum_buffer" in optimizer.state[matrix]
        assert optimizer.state[bias]["step"] == STEPS
        assert set(optimizer.state) == set(net.parameters()) and len(optimizer.state) == 6
        del optimizer.state[bias]
        assert bias not in adamw.state and bias not in optimizer.state and matrix in optimizer.state
        optimizer.state[bias] = {"kept": 1}
        assert adamw.state[bias] == {"kept": 1} and bias not in muon.state
        with pytest.raises(KeyError):
            optimizer.state[torch.ones(1)]
        assert repr(optimizer).count("Parameter Group") == 2
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())


def test_groups_that_an_optimizer_gets_later_are_seen() -> None:
    """load_state_dict of torch makes new groups: a rate that is set on the old ones would steer nothing."""
    with alone():
        net = build()
        muon, adamw = muon_adamw(net)
        optimizer = DistributedOptimizer([muon, adamw], net)
        old = optimizer.param_groups
        muon.load_state_dict(muon.state_dict())
        assert optimizer.param_groups[0] is not old[0]
        optimizer.param_groups[0]["lr"] = 0.0
        assert muon.param_groups[0]["lr"] == 0.0
        before = net.get_parameter("0.weight").detach().clone()
        each_step(net, optimizer)
        assert torch.equal(net.get_parameter("0.weight"), before)


def test_a_list_of_one_is_that_one() -> None:
    for inner in (lambda net: [torch.optim.LBFGS(net.parameters())], lambda net: (torch.optim.SGD(net.parameters()),)):
        with run(SSP1):
            net = build()
            (only,) = optimizers = inner(net)
            optimizer = DistributedOptimizer(optimizers, net)
            assert optimizer.inner is only and optimizer.param_groups is only.param_groups


class Container(torch.optim.Optimizer):
    """As torchtitan's: its one group has all parameters and no rate, and it iterates over its optimizers."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)


def test_a_container_of_optimizers_is_its_optimizers() -> None:
    contained: Any = lambda net: Container(list(muon_adamw(net)))  # noqa: E731
    with run(SSP1):
        net = build()
        inner = muon_adamw(net)
        optimizer = DistributedOptimizer(Container(list(inner)), net)
        assert all(a is b for a, b in zip(optimizer.param_groups, optimizer.inner.param_groups, strict=True))
        assert [group["lr"] for group in optimizer.param_groups] == [g["lr"] for o in inner for g in o.param_groups]
    assert distance(trained(SSP1, contained), by_hand(muon_adamw)) < CLOSE


@pytest.mark.parametrize("make", [muon_adamw, sgd_adamw, two_sgd])
def test_alone_it_is_each_of_them(make: Make) -> None:
    def loop(net: nn.Module, optimizer: Any) -> None:
        each_step(net, optimizer)
        for step in range(STEPS):  # accumulation
            for part in range(3):
                (loss_of(net, 3 * step + part) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    with alone() as only:
        net = build()
        loop(net, DistributedOptimizer(make(net), net))
        assert np.array_equal(flat(net), by_hand(make, loop))
        assert clock() == only.clock == 2 * STEPS


def scaled(net: nn.Module, optimizer: Any, worker: int = 0, of: int = 1) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, step) * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        each = optimizer.optimizers if isinstance(optimizer, Each) else [optimizer]
        for one in each:
            scaler.unscale_(one)
        if step == 5:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for one in each:
            scaler.step(one)
        scaler.update()


def test_a_grad_scaler_unscales_and_skips_for_all() -> None:
    reference = by_hand(muon_adamw, scaled)
    with alone():
        net = build()
        scaled(net, DistributedOptimizer(muon_adamw(net), net))
        assert np.array_equal(flat(net), reference)
    assert distance(trained(SSP1, muon_adamw, scaled), reference) < CLOSE


def test_a_closure_is_evaluated_once_and_all_step() -> None:
    calls = []

    def loop(net: nn.Module, optimizer: Any, worker: int = 0, of: int = 1) -> None:
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            with torch.no_grad():
                loss = optimizer.step(closure)
            assert loss.requires_grad

    reference = by_hand(muon_adamw)
    with alone():
        net = build()
        loop(net, DistributedOptimizer(muon_adamw(net), net))
    assert np.array_equal(flat(net), reference) and calls == [*range(STEPS)]
    assert distance(trained(SSP1, muon_adamw, loop), reference) < CLOSE
    assert calls == 2 * [*range(STEPS)]


def clipped(net: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def clipped_apart(net: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        for one in optimizer.optimizers:
            nn.utils.clip_grad_norm_([p for group in one.param_groups for p in group["params"]], 0.1)
        optimizer.step()


@pytest.mark.parametrize("closure", [False, True])
def test_clipping_is_over_the_parameters_of_all(closure: bool) -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int = 0, of: int = 1) -> None:
        for step in range(STEPS):

            def backward(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()

    reference = by_hand(two_sgd, clipped)
    with alone():
        net = build()
        loop(net, DistributedOptimizer(two_sgd(net), net, max_grad_norm=0.1))
    assert distance(flat(net), reference) < EQUAL
    assert distance(trained(SSP1, two_sgd, loop, max_grad_norm=0.1), reference) < EQUAL
    assert distance(by_hand(two_sgd, clipped_apart), reference) > 100 * EQUAL, "each for itself is something else"


# Schedulers.


def on_wrapper(optimizer: Any) -> list[Any]:
    return [lrs.LambdaLR(optimizer, [lambda t: 0.9**t, lambda t: 1 / (1 + t)])]


def on_each(optimizer: Any) -> list[Any]:
    muon, adamw = optimizer.optimizers if isinstance(optimizer, Each) else optimizer.inner.optimizers
    return [lrs.LambdaLR(muon, lambda t: 0.9**t), lrs.LambdaLR(adamw, lambda t: 1 / (1 + t))]


@pytest.mark.parametrize("schedule", [on_wrapper, on_each])
@pytest.mark.parametrize("settings", [None, SSP1], ids=["alone", "updates"])
def test_a_scheduler_may_be_on_the_wrapper_or_on_one_of_them(
    schedule: Callable[[Any], list[Any]], settings: Settings | None
) -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int = 0, of: int = 1) -> None:
        schedulers = on_each(optimizer) if isinstance(optimizer, Each) else schedule(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])

    rates: list[list[float]] = []
    reference = by_hand(muon_adamw, loop)
    if settings is None:
        with alone():
            net = build()
            loop(net, DistributedOptimizer(muon_adamw(net), net))
            assert np.array_equal(flat(net), reference)
    else:
        assert distance(trained(settings, muon_adamw, loop), reference) < CLOSE
    assert rates[0] == rates[1] == pytest.approx([0.02 * 0.9**STEPS, 0.01 / (1 + STEPS)])
    assert distance(by_hand(muon_adamw), reference) > 10 * CLOSE, "it changes the rates"


def test_a_scheduler_of_momentum_wants_it_in_all_optimizers() -> None:
    with alone():
        net = build()
        optimizer = DistributedOptimizer(two_sgd(net), net)
        lrs.OneCycleLR(optimizer, 0.2, total_steps=STEPS)
        assert [group["momentum"] for group in optimizer.param_groups] == [0.95, 0.95]
        net = build()
        with pytest.raises(ValueError, match="momentum or beta1"):
            lrs.OneCycleLR(DistributedOptimizer(muon_adamw(net), net), 0.2, total_steps=STEPS)


# State.


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


UP = Settings(sync="ssp", compress="topk:0.1", compress_down="dense", shards=2)


def test_a_run_goes_on_from_a_state_dict() -> None:
    """The state of each optimizer and the residual all count: without any the second half would go elsewhere."""
    reference = build()
    inner = Each(sgd_adamw(reference))
    each_step(reference, inner)
    each_step(reference, inner, first=STEPS)
    with run(UP):
        net = build()
        optimizer = DistributedOptimizer(sgd_adamw(net), net)
        each_step(net, optimizer)
        with optimizer.shared():
            saved = through_a_file({"model": net.state_dict(), "optimizer": optimizer.state_dict(residual=True)})
    assert saved["optimizer"]["narrows"]["clock"] == STEPS
    for own, state in zip(sgd_adamw(net), saved["optimizer"]["optimizers"], strict=True):
        own.load_state_dict(state)  # each part is the optimizer's own
    ends = {}
    for without in ("", "residual", 0, 1):
        state = copy.deepcopy(saved["optimizer"])
        if without == "residual":
            state["narrows"]["residual"] = None
        elif without != "":
            state["optimizers"][without]["state"] = {}
        with run(UP):
            net = build(seed=1)
            net.load_state_dict(saved["model"])
            optimizer = DistributedOptimizer(sgd_adamw(net), net)
            optimizer.load_state_dict(state)
            if without == "":
                assert repr(optimizer.state_dict()["optimizers"]) == repr(saved["optimizer"]["optimizers"])
            each_step(net, optimizer, first=STEPS)
            optimizer.finish()
            with optimizer.shared():
                ends[without] = distance(flat(net), flat(reference))
    rounded = 1e-4  # of the last update, to 1/4062 of the largest value of a block
    assert ends.pop("") < rounded < min(ends.values()) / 10


def test_muon_and_adamw_go_on_alone_as_if_never_saved() -> None:
    with alone():
        net = build()
        optimizer = DistributedOptimizer(muon_adamw(net), net)
        each_step(net, optimizer)
        saved = through_a_file([net.state_dict(), optimizer.state_dict()])
        each_step(net, optimizer, first=STEPS)
        again = build(seed=1)
        again.load_state_dict(saved[0])
        resumed = DistributedOptimizer(muon_adamw(again), again)
        resumed.load_state_dict(saved[1])
        each_step(again, resumed, first=STEPS)
        assert np.array_equal(flat(again), flat(net))


def test_a_state_of_another_number_of_optimizers_is_refused() -> None:
    with alone():
        net = build()
        optimizer = DistributedOptimizer(muon_adamw(net), net)
        with pytest.raises(UsageError, match="of 1 of the 2 optimizers"):
            optimizer.load_state_dict(torch.optim.SGD(net.parameters()).state_dict())
        with pytest.raises(UsageError, match="of 3 of the 2 optimizers"):
            optimizer.load_state_dict({"optimizers": [{}] * 3})


# Things that are refused.


class Stubborn(torch.optim.SGD):
    """It evaluates as it likes."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


REFUSED: dict[str, tuple[Make, str]] = {
    "none": (lambda net: [], "empty list"),
    "twice": (
        lambda net: [torch.optim.SGD(net.parameters()), torch.optim.AdamW(split(net)[1])],
        r"parameter '0\.bias' is in two of the optimizers",
    ),
    "frozen twice": (
        lambda net: [torch.optim.SGD([p.requires_grad_(False)]) for p in [next(net.parameters())] * 2],
        r"parameter '0\.weight' is in two of the optimizers",
    ),
    "not of the model": (
        lambda net: [torch.optim.SGD([p]) for p in [nn.Parameter(torch.ones(3, 2))] * 2],
        r"parameter of shape \[3, 2\] is in two of the optimizers",
    ),
    "lbfgs": (
        lambda net: [torch.optim.SGD(split(net)[0]), torch.optim.LBFGS(split(net)[1])],
        "LBFGS calls its closure itself.*wrap LBFGS alone",
    ),
    "stubborn": (
        lambda net: [Stubborn(split(net)[0]), torch.optim.SGD(split(net)[1])],
        "Stubborn calls its closure itself.*wrap Stubborn alone",
    ),
}


SWAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "the optimizer is a Sequential, a module; give the optimizer first": lambda net: (
        net,
        torch.optim.AdamW(net.parameters()),
    ),
    "the model is a generator; give the torch.nn.Module": lambda net: (
        torch.optim.AdamW(net.parameters()),
        net.parameters(),
    ),
    "a Linear is no torch optimizer": lambda net: ([nn.Linear(1, 1)], net),
    "the model is a list; give the torch.nn.Module": lambda net: (torch.optim.AdamW(net.parameters()), [net]),
}


@pytest.mark.parametrize("words", SWAPPED)
def test_arguments_that_are_no_optimizer_and_no_module_are_named(words: str) -> None:
    net = build()
    with alone(), pytest.raises(UsageError, match=words):
        DistributedOptimizer(*SWAPPED[words](net))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_step_together_is_refused_in_one_sentence(name: str) -> None:
    make, words = REFUSED[name]
    net = build()
    with alone(), pytest.raises(UsageError, match=words) as caught:
        DistributedOptimizer(make(net), net)
    assert "\n" not in str(caught.value)


def adagrads(first: float, second: float) -> Make:
    def make(net: nn.Module) -> list[Optimizer]:
        matrices, rest = split(net)
        return [
            torch.optim.Adagrad(matrices, initial_accumulator_value=first),
            torch.optim.Adagrad(rest, initial_accumulator_value=second),
        ]

    return make


WHOLE: dict[str, tuple[Make, str]] = {
    "Muon": (muon_adamw, "Muon is not elementwise"),
    "Muon second": (lambda net: muon_adamw(net)[::-1], "Muon is not elementwise"),
    "two sums": (adagrads(0.1, 0.2), "the initial_accumulator_value of the first"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_mix_that_no_server_can_rebuild_is_refused_in_one_sentence(name: str) -> None:
    make, words = WHOLE[name]
    with run(Settings(sync="bsp")):
        net = build()
        with pytest.raises(UsageError, match=rf"--push gradient.*{words}.*use --push update") as caught:
            DistributedOptimizer(make(net), net)
        assert "\n" not in str(caught.value)


def test_a_group_is_added_to_one_of_them() -> None:
    extra = nn.Parameter(torch.ones(3))
    with alone():
        net = build()
        _, adamw = inner = muon_adamw(net)
        optimizer = DistributedOptimizer(inner, net)
        with pytest.raises(UsageError, match="add_param_group: 2 optimizers are wrapped"):
            optimizer.add_param_group({"params": [extra]})
        adamw.add_param_group({"params": [extra]})
        assert len(optimizer.param_groups) == 3
    with run(SSP1):
        net = build()
        _, adamw = inner = muon_adamw(net)
        optimizer = DistributedOptimizer(inner, net)
        with pytest.raises(UsageError, match="add_param_group after the run has begun"):
            optimizer.add_param_group({"params": [extra]})
        adamw.add_param_group({"params": [extra]})  # no other worker has it
        loss_of(net, 0).backward()
        with pytest.raises(UsageError, match="no other worker has it"):
            optimizer.step()


# Runs.

ON_WORKERS = modes(lambda settings: steps_on_worker(settings) and like_one_process(settings))


@pytest.mark.parametrize("flags", ON_WORKERS.values(), ids=ON_WORKERS)
def test_one_worker_takes_the_steps_of_its_own_optimizers_where_updates_are_pushed(flags: dict[str, Any]) -> None:
    assert distance(trained(Settings(**flags), muon_adamw), by_hand(muon_adamw)) < CLOSE
    assert distance(trained(Settings(**flags), sgd_adamw), by_hand(sgd_adamw)) < EQUAL
    assert distance(flat(build()), by_hand(muon_adamw)) > 100 * CLOSE, "it does train"


def test_two_workers_that_push_a_twentieth_of_each_update_train_all_of_the_model() -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for turn in range(4):
            each_step(net, optimizer, worker, of, first=STEPS * turn)

    ours, start = trained(TOPK, muon_adamw, loop), flat(build())
    reference = by_hand(muon_adamw, lambda net, optimizer: loop(net, optimizer, 0, 1))
    before, after = mean_loss(start, 4 * STEPS), mean_loss(reference, 4 * STEPS)
    assert mean_loss(ours, 4 * STEPS) < before - 0.7 * (before - after)
    moved, offset = np.abs(ours - start), 0
    for name, p in build().named_parameters():
        assert moved[offset : offset + p.numel()].max() > 1e-3, name
        offset += p.numel()


@pytest.mark.parametrize("make", [muon_adamw, sgd_adamw])
def test_bsp_of_updates_is_one_process_where_all_compute_on_the_same_batch(make: Make) -> None:
    """The mean of equal updates is each of them; the gradients of both optimizers are clipped together."""
    settings = Settings(sync="bsp", push="update", workers=2, shards=2)
    reference = by_hand(make, clipped)
    assert distance(trained(settings, make, whole=True, max_grad_norm=0.1), reference) < CLOSE
    assert distance(by_hand(make, clipped_apart), reference) > 10 * CLOSE, "each for itself is something else"


@pytest.mark.parametrize("make", [two_sgd, two_adagrad])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_server_rebuilds_several_of_one_class_with_the_groups_of_all(make: Make, overlap: bool) -> None:
    assert distance(trained(BSP, make, overlap=overlap), by_hand(make)) < EQUAL
    assert distance(trained(BSP, make, overlap=overlap, max_grad_norm=0.1), by_hand(make, clipped)) < EQUAL


def frozen() -> nn.Module:
    net = build()
    net.get_parameter("0.weight").requires_grad_(False)
    net.get_parameter("2.bias").requires_grad_(False)
    return net


def test_a_frozen_parameter_of_any_of_them_stays_and_is_not_pushed() -> None:
    assert distance(trained(SSP1, muon_adamw, model=frozen), by_hand(muon_adamw, model=frozen)) < CLOSE
    assert distance(trained(BSP, two_sgd, model=frozen), by_hand(two_sgd, model=frozen)) < EQUAL
    start, end = frozen(), flat(frozen())
    nn.utils.vector_to_parameters(torch.from_numpy(trained(SSP1, muon_adamw, model=frozen)), start.parameters())
    assert torch.equal(start.get_parameter("0.weight"), frozen().get_parameter("0.weight"))
    assert not np.array_equal(flat(start), end)


@pytest.mark.parametrize("turned", [False, True])
def test_tensors_are_in_the_order_of_the_model_whoever_steps_them(turned: bool) -> None:
    with run(SSP1):
        net = frozen()
        inner = muon_adamw(net)
        optimizer = DistributedOptimizer(inner[::-1] if turned else inner, net)
        assert optimizer._engine is not None
        names = [name for name, p in net.named_parameters() if p.requires_grad]
        assert optimizer._engine.flat.names == names == ["0.bias", "2.weight", "3.weight", "3.bias"]
        groups = optimizer._engine.flat.plan("", 0.0).groups
        assert groups == (((0, 1, 3), (2,)) if turned else ((2,), (0, 1, 3)))


def words() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Flatten(), nn.Linear(18, 5)))


def test_sparse_adam_for_the_embedding_and_adamw_for_the_rest() -> None:
    def make(net: nn.Module) -> list[Optimizer]:
        embedding, *rest = net.parameters()
        return [torch.optim.SparseAdam([embedding], lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    def loop(net: nn.Module, optimizer: Any, worker: int = 0, of: int = 1) -> None:
        for step in range(STEPS):
            x = torch.randint(0, 11, (BATCH, 3), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), batch(step)[1]).backward()
            optimizer.step()

    assert distance(trained(SSP1, make, loop, words), by_hand(make, loop, words)) < EQUAL
