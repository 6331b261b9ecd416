"""Shards that begin at tensors (--cut tensors): what servers can step then, and that runs go on as before.

Reference: one process that steps the same optimizers along the mean of the workers' gradients, summed as a shard sums it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import one_process as alone
from kit.in_process import THREAD, Cluster, store_of
from kit.on_disk import OnDisk
from kit.one_process import ADAMW, Loop, Make, script_of, until
from kit.scripts import Array, Each, build, distance, flat, loss_of, run, seeded, tree
from kit.specs import MODES
from kit.two_levels import family
from torch import nn

from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import IncompatibleError, UsageError
from narrows.worker import LAMB, LARS, DistributedOptimizer, saved_state

pytestmark = pytest.mark.usefixtures("one_thread")

WORKERS, STEPS, EQUAL = 2, 12, 1e-5


def split(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    own = list(parameters)
    return [p for p in own if p.ndim == 2], [p for p in own if p.ndim != 2]


def muon(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, rest = split(parameters)
    groups: list[dict[str, Any]] = [{"params": rest[:1], "lr": 0.02}, {"params": rest[1:]}]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)]


def lamb(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [LAMB(parameters, lr=0.01, weight_decay=0.1)]


def lars(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [LARS(parameters, lr=0.5, trust=0.05)]


def adamw(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [ADAMW(parameters)]


TO_THE_END = until(STEPS)
WHOLE: dict[str, Make] = {"Muon and AdamW": muon, "LAMB": lamb, "LARS": lars}


def mean_gradient(net: nn.Module, optimizer: Each, step: int, of: int) -> None:
    """Set the gradients to the mean of those of all workers."""
    summed: list[torch.Tensor] = []
    for worker in range(of):
        optimizer.zero_grad()
        loss_of(net, step, worker, of).backward()
        gradients = [p.grad / of for p in net.parameters() if p.grad is not None]
        summed = [a + b for a, b in zip(summed, gradients, strict=True)] if summed else gradients
    for p, gradient in zip(net.parameters(), summed, strict=True):
        p.grad = gradient


def one_process(make: Make, norm: float = 0.0) -> Array:
    net = build()
    optimizer = Each(make(net.parameters()))
    for step in range(STEPS):
        mean_gradient(net, optimizer, step, WORKERS)
        if norm:
            nn.utils.clip_grad_norm_(net.parameters(), norm)
        optimizer.step()
    return flat(net)


def bsp(shards: int, **flags: Any) -> Settings:
    known: dict[str, Any] = {"sync": "bsp", "workers": WORKERS, "shards": shards, "cut": "tensors"}
    return Settings(**known | flags)


def trained(
    settings: Settings, make: Make, cluster: Cluster | None = None, loop: Loop = TO_THE_END, **wrapper: Any
) -> Array:
    """The model that all workers end with."""
    cluster = cluster or Cluster(settings)
    model = alone.trained(settings, make, loop, cluster=cluster, **wrapper)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None and coordinator.members.plan is not None
    begins = {store_of(server).begin for server in cluster.servers[: coordinator.run.shards]}
    if settings.cut == "tensors":
        assert begins <= set(coordinator.members.plan.offsets()), "each shard begins at a tensor"
    return model


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_servers_step_whole_tensors_as_one_process_does(name: str, shards: int) -> None:
    expected = one_process(WHOLE[name])
    assert distance(trained(bsp(shards), WHOLE[name]), expected) < EQUAL
    assert distance(expected, flat(build())) > 100 * EQUAL, "it does train"


@pytest.mark.parametrize("name", WHOLE)
def test_it_is_one_process_on_the_whole_batch(name: str) -> None:
    """There the gradient is summed in another order. Muon rounds it to bfloat16, which hides that but for ties."""
    whole = alone.plain(lambda parameters: Each(WHOLE[name](parameters)))
    assert distance(trained(bsp(2), WHOLE[name]), whole) < (EQUAL if name != "Muon and AdamW" else 1e-4)


@pytest.mark.parametrize("name", WHOLE)
def test_a_norm_over_all_shards_clips_before_they_step(name: str) -> None:
    expected = one_process(WHOLE[name], norm=0.2)
    assert distance(trained(bsp(2), WHOLE[name], max_grad_norm=0.2), expected) < EQUAL


def test_classes_that_step_each_value_are_mixed_under_any_cut() -> None:
    def make(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices, rest = split(parameters)
        return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]

    for cut in ("values", "tensors"):
        assert distance(trained(bsp(3, cut=cut), make), one_process(make)) < EQUAL


@pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
def test_the_cut_changes_no_step_of_any_mode(flags: dict[str, Any]) -> None:
    """One worker with dense updates: what it trains does not depend on the shards. Fragments do: see below."""
    if Settings(**flags).validated().fragments > 1:
        flags = {**flags, "fragments": 1}
    make = lambda p: torch.optim.AdamW(p, lr=3e-3)  # noqa: E731
    ours, theirs = (alone.trained(Settings(**flags, shards=3, cut=cut), make) for cut in ("tensors", "values"))
    assert distance(ours, theirs) < 1e-6 and distance(ours, flat(build())) > 1e-3


def test_a_worker_that_joins_late_trains_with_the_others() -> None:
    """The first 4 steps are of one worker, the others of two."""
    both = threading.Barrier(2)

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        if not worker:
            until(4)(net, optimizer, 0, 1)
            joined.start()
        both.wait(30)
        until(STEPS)(net, optimizer, worker, of)

    script = script_of(muon, loop, WORKERS)
    models: list[Array] = []
    with run(bsp(3, workers=1)) as started:
        started.join()

        def late() -> None:
            started.become(1)
            torch.set_num_threads(1)
            models.append(script(1))

        joined = threading.Thread(target=late, daemon=True, name=THREAD)
        started.become(0)
        models.append(script(0))
        joined.join(30)
    net = build()
    optimizer = Each(muon(net.parameters()))
    for step in range(STEPS):
        mean_gradient(net, optimizer, step, 1 if step < 4 else WORKERS)
        optimizer.step()
    assert len(models) == 2 and np.array_equal(models[0], models[1])
    assert distance(models[0], flat(net)) < EQUAL


@pytest.mark.parametrize("shards", [1, 3])
def test_a_cluster_steps_whole_tensors_below_a_parent_that_adds(shards: int) -> None:
    above = Settings(sync="bsp", push="update", shards=shards, cut="tensors")
    root, below = family(above, bsp(shards), 1)
    with tree(root, *below) as started:
        models = started.together(script_of(muon, until(STEPS), WORKERS))
    assert np.array_equal(models[0], models[1]) and distance(models[0], one_process(muon)) < EQUAL


@pytest.mark.parametrize("name", WHOLE)
def test_keys_that_move_keep_their_borders_and_states(name: str, tmp_path: Path) -> None:
    cluster = OnDisk(bsp(2), tmp_path)
    moved = trained(bsp(2), WHOLE[name], cluster, until(STEPS, cluster.changing({3: 3, 7: 2, 9: 4})))
    assert distance(moved, one_process(WHOLE[name])) < EQUAL


def test_more_shards_than_tensors_are_no_move(tmp_path: Path) -> None:
    settings = bsp(2)
    cluster = OnDisk(settings, tmp_path)
    with run(settings, cluster) as started:

        def script(worker: int) -> None:
            net = build()
            DistributedOptimizer(lamb(net.parameters()), net)

        started.together(script)
        coordinator = cluster.servers[0].coordinator
        assert coordinator is not None
        assert "has 6 tensors, too few for 7 shards" in coordinator.resharding.unfit(7)
        assert not coordinator.resharding.unfit(6)


@pytest.mark.parametrize(("name", "before", "after"), [
    *((name, (2, "tensors"), (shards, "tensors")) for name in ("AdamW", *WHOLE) for shards in (2, 4)),
    ("AdamW", (2, "values"), (2, "tensors")), ("AdamW", (3, "tensors"), (3, "values")),
    ("AdamW", (3, "values"), (1, "tensors")),
])  # fmt: skip
def test_a_run_is_resumed_under_any_cut(
    name: str, before: tuple[int, str], after: tuple[int, str], tmp_path: Path
) -> None:
    make = WHOLE.get(name, adamw)
    first, second = (bsp(shards, cut=cut) for shards, cut in (before, after))
    trained(first, make, OnDisk(first, tmp_path), until(5))
    resumed = trained(second, make, OnDisk(second, tmp_path, resume=True))
    assert distance(resumed, one_process(make)) < EQUAL
    net = build()
    states = saved_state(tmp_path, make(net.parameters()), net)
    for optimizer, state in zip(make(build().parameters()), states.get("optimizers", [states]), strict=True):
        optimizer.load_state_dict(state)
        assert optimizer.state, "a script alone goes on with the state"


def test_what_servers_cannot_step_is_refused_on_resume_and_by_name(tmp_path: Path) -> None:
    settings = bsp(2)
    trained(settings, lamb, OnDisk(settings, tmp_path), until(3))
    with pytest.raises(
        IncompatibleError, match="LAMB steps whole tensors, and shards cut tensors: use --push update, or"
    ):
        OnDisk(bsp(2, cut="values"), tmp_path, resume=True)
    with pytest.raises(IncompatibleError, match="has 6 tensors, too few for 7 shards"):
        OnDisk(bsp(7), tmp_path, resume=True)


@pytest.mark.parametrize("name", ["Muon", "LAMB", "LARS"])
def test_without_the_cut_the_sentence_names_the_way_out(name: str) -> None:
    make = {"Muon": muon, "LAMB": lamb, "LARS": lars}[name]
    words = (
        f"{name} is not elementwise, and shards cut tensors: use --push update, or start the server with --cut tensors"
    )
    with run(Settings(sync="bsp")):
        net = build()
        with pytest.raises(UsageError, match=words) as caught:
            DistributedOptimizer(make(net.parameters()), net)
        assert "\n" not in str(caught.value)
    with (
        run(Settings(sync="bsp", cut="tensors")),
        pytest.raises(UsageError, match=r"Adafactor is not .*: use --push update$"),
    ):
        DistributedOptimizer(torch.optim.Adafactor(net.parameters()), net)


def test_a_model_of_fewer_tensors_than_shards_is_refused() -> None:
    def script(worker: int) -> None:
        net = nn.Linear(4, 3)
        with pytest.raises(
            RuntimeError, match="has 2 tensors, too few for 3 shards; give --shards 2 at most, or --cut values"
        ):
            DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)

    with run(bsp(3, workers=1)) as started:
        started.together(script)


def test_uneven_shards_are_told_once() -> None:
    def wide() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(9, 100, bias=False), nn.Tanh(), nn.Linear(100, 1)))

    def script(worker: int) -> None:
        net = wide()
        DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)

    with run(bsp(2)) as started:
        started.together(script)
        told = [event for event in started.cluster.logs if event.event == "uneven"]
    assert len(told) == 1 and "shard 0 of 2 has 90% of the model, of which the tensor '0.weight'" in str(
        told[0].values["text"]
    )


EVEN: dict[str, Any] = {
    "sync": "local",
    "local_steps": 4,
    "workers": 2,
    "shards": 2,
    "fragments": 2,
    "merge_delay": 1,
    "merge_alpha": 0.5,
}


@pytest.mark.parametrize(("compress", "even"), [("dense", True), ("topk:0.2+int8", True), ("2bit", False)])
def test_fragments_begin_at_tensors_too(compress: str, even: bool) -> None:
    """Where all tensors have one size, both cuts are the same, and so is each bit of the run."""

    def net() -> nn.Module:
        widths = (8, 8, 8, 8, 8) if even else (8, 3, 9, 2, 8)
        pairs = [*pairwise(widths)]
        return seeded(lambda: nn.Sequential(*(f for a, b in pairs for f in (nn.Linear(a, b, bias=False), nn.Tanh()))))

    def script(worker: int) -> tuple[Array, list[Sequence[int]]]:
        model = net()
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        for step in range(16):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(step + 100 * worker)
            model(torch.randn(4, 8, generator=draw)).square().sum().backward()
            optimizer.step()
        exchanges = optimizer._engine.sync.shards.exchanges  # type: ignore[union-attr]
        edges = [exchange.turn(turn) for exchange in exchanges for turn in range(2)]
        optimizer.finish()
        with optimizer.shared():
            return flat(model), edges

    def of(cut: str) -> list[tuple[Array, list[Sequence[int]]]]:
        with run(Settings(**EVEN, compress=compress, cut=cut)) as started:
            results = started.together(script)
        assert all(np.array_equal(results[0][0], other) for other, _ in results)
        return results

    (ours, edges), *_ = of("tensors")
    specs = [p.numel() for p in net().parameters()]
    offsets = np.cumsum([0, *specs]).tolist()
    assert {edge for cut in edges for edge in cut} <= set(offsets) and len(edges) == 4
    assert np.isfinite(ours).all()
    if even:
        assert np.array_equal(ours, of("values")[0][0])


def test_the_plan_names_a_class_for_each_group() -> None:
    settings = bsp(2)
    with run(settings) as started:

        def script(worker: int) -> None:
            net = build()
            DistributedOptimizer(muon(net.parameters()), net)

        started.together(script)
        coordinator = started.cluster.servers[0].coordinator
        assert coordinator is not None
        plan = ModelSpec.unpacked(coordinator.members.plan_packed)
    assert plan.kinds == ("Muon", "AdamW", "AdamW")
