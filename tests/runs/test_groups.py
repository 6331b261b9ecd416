"""A group is one worker, to its servers byte for byte. Its ranks are threads here (kit/groups.py), and processes in
tests/system/test_groups.py."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.groups import Groups, groups
from kit.in_process import Cluster
from kit.on_disk import OnDisk
from kit.scripts import BATCH, batch, build, distance, flat, loss_of, seeded
from kit.specs import MODES, MODES_WITH_SPECS
from safetensors.torch import load_file, save_file
from torch import nn

from narrows.compression.auto import Auto, Switch
from narrows.compression.home import HOST
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker import DistributedOptimizer, clock, rank, world_size
from narrows.worker.model.device_placement import device_home
from narrows.worker.model.model_slices import _cut
from narrows.worker.sync import engine

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12


def _two_groups(net: nn.Module) -> list[dict[str, Any]]:
    first, *others = net.parameters()
    return [{"params": [first], "lr": 0.003}, {"params": others}]


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.02, initial_accumulator_value=0.1),
    "rprop": lambda net: torch.optim.Rprop(net.parameters(), lr=0.001),
    "two groups": lambda net: torch.optim.RMSprop(_two_groups(net), lr=0.001),
}  # fmt: skip


class Trained(NamedTuple):
    weights: dict[tuple[int, int], Any]  # of each rank, at its end
    pushes: list[tuple[Any, ...]]  # what the shards were sent, in the order of shards and clocks
    told: dict[tuple[int, int], Any]  # what `at` has returned after the last step


def trained(
    settings: Settings,
    sizes: Sequence[int],
    parts: int = 2,
    make: Make = OPTIMIZERS["adamw"],
    at: Callable[[int, tuple[int, int], Any, nn.Module], Any] = lambda *_: None,
    net: Callable[[], nn.Module] = build,
    cluster: Cluster | None = None,
    steps: int = STEPS,
    **more: Any,
) -> Trained:
    """Members of `sizes`. Each step of one has `parts` parts of a batch: a group gives each rank one, any other member does one
    after the other. `at`: called after each step."""
    settings, pushes = settings.validated(), list[tuple[Any, ...]]()

    def script(member: int, own: int) -> Any:
        model = net()
        optimizer = DistributedOptimizer(make(model), model, **more)
        alone = sizes[member] == 1
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(parts) if alone else [own]:
                loss = loss_of(model, step, member * parts + part, len(sizes) * parts)
                (loss / parts if alone else loss).backward()
            optimizer.step()
            told[member, own] = at(step, (member, own), optimizer, model)
        optimizer.finish()
        with optimizer.shared():
            return flat(model)

    told: dict[tuple[int, int], Any] = {}
    with groups(settings, sizes, cluster) as started, pytest.MonkeyPatch.context() as patch:
        _listen(started, patch, pushes)
        return Trained(started.together(script), sorted(pushes), told)


def _listen(started: Groups, patch: pytest.MonkeyPatch, pushes: list[tuple[Any, ...]]) -> None:
    arrive = started.cluster.arrive

    def heard(shard: int, peer: bytes, message: Any) -> Any:
        if isinstance(message, m.Push):
            where = (message.worker, message.clock, message.part, message.parts, message.begin, message.end)
            pushes.append((shard, *where, message.hyper, message.codec, bytes(message.payload)))
        return arrive(shard, peer, message)

    patch.setattr(started.cluster, "arrive", heard)


def check_same(group: Trained, single: Trained) -> None:
    """They have sent the same and have the same, bit for bit."""
    assert group.pushes == single.pushes and len(group.pushes) >= STEPS // 4
    assert len({weights.tobytes() for weights in group.weights.values()}) == 1, "all ranks end with one model"
    assert group.weights[0, 0].tobytes() == single.weights[0, 0].tobytes()


@pytest.mark.parametrize(("mode", "spec"), MODES_WITH_SPECS)
def test_a_group_of_two_is_one_worker_that_has_both_halves_of_each_batch(mode: str, spec: str) -> None:
    settings = Settings(workers=1, shards=3, compress=spec, **MODES[mode])
    check_same(trained(settings, [2]), trained(settings, [1]))


@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_may_have_no_shard_and_shards_may_be_one_each(shards: int) -> None:
    settings = Settings(workers=1, shards=shards, sync="ssp", compress="topk:0.05+int8")
    check_same(trained(settings, [2]), trained(settings, [1]))
    check_same(trained(settings, [4], parts=4), trained(settings, [1], parts=4))


def test_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(workers=1, shards=2, sync="ssp", compress="topk:0.05+int8")
    single = trained(settings, [1])
    monkeypatch.setenv("NARROWS_ARRAYS", "device")
    check_same(trained(settings, [2]), single)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_steps_slices_as_it_steps_all(name: str) -> None:
    settings = Settings(workers=1, shards=2, sync="bsp", push="update")
    check_same(trained(settings, [2], make=OPTIMIZERS[name]), trained(settings, [1], make=OPTIMIZERS[name]))


def test_a_recurrent_net_in_half_precision_is_stepped_in_float32() -> None:
    """Its parameters cannot lie in one tensor, and are rounded copies of the slices."""
    settings = Settings(workers=1, shards=2, sync="ssp", compress="topk:0.2+int8")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.gru(x.view(-1, 3, 3).to(torch.bfloat16))[0][:, -1]).float()
            return out

    make: Make = lambda net: torch.optim.SGD(net.parameters(), lr=1e-3)  # noqa: E731
    found = trained(settings, [2], make=make, net=lambda: seeded(Net).to(torch.bfloat16))
    assert len({weights.tobytes() for weights in found.weights.values()}) == 1
    begin = flat(seeded(Net).to(torch.bfloat16))
    assert distance(found.weights[0, 0], begin) > 0, "steps of less than a rounding add up"


def whole_batches(steps: int = STEPS, make: Make = OPTIMIZERS["adamw"], norm: float = 0.0) -> Any:
    """One process, without Narrows."""
    model = build()
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if norm:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("push", ["gradient", "update"])
def test_under_bsp_a_group_of_four_is_one_process(push: str) -> None:
    found = trained(Settings(workers=1, shards=4, sync="bsp", push=push), [4], parts=4)
    assert distance(found.weights[0, 0], whole_batches()) < 1e-5


def test_gradients_are_clipped_to_the_norm_of_all_slices() -> None:
    make: Make = lambda net: torch.optim.SGD(net.parameters(), lr=0.5)  # noqa: E731
    settings = Settings(workers=1, shards=2, sync="bsp", push="update")
    found = trained(settings, [2], make=make, max_grad_norm=0.05)
    assert distance(found.weights[0, 0], whole_batches(make=make, norm=0.05)) < 1e-5
    assert distance(found.weights[0, 0], whole_batches(make=make)) > 1e-2


def test_two_groups_are_two_workers() -> None:
    settings = Settings(workers=2, shards=2, sync="bsp", push="update", compress="topk:0.05+int8")
    group, single = trained(settings, [2, 2]), trained(settings, [1, 1])
    assert group.pushes == single.pushes
    assert distance(group.weights[1, 1], single.weights[0, 0]) < 1e-6, (
        "a mean at the barrier adds in the order of arrival"
    )


def test_groups_single_workers_and_devices_end_with_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of two, a worker on a device, one on the host: rank() cuts the batch into shares, and no row is in two."""
    settings = Settings(workers=3, shards=2, sync="ssp", staleness=2, compress="topk:0.05+int8").validated()
    rows: dict[tuple[int, int], list[int]] = {}

    def script(member: int, own: int) -> Any:
        rows[member, own] = list(range(BATCH))[rank() :: world_size()]
        model = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model), model)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            nn.functional.cross_entropy(model(x[rows[member, own]]), y[rows[member, own]]).backward()
            optimizer.step()
        optimizer.finish()
        with optimizer.shared():
            return flat(model)

    with groups(settings, [2, 1, 1]) as started:

        def home_of_rank(flat: Any, why_host: str = "") -> Any:
            return device_home(torch.device("cpu")) if started.here == (1, 0) else HOST, ""

        monkeypatch.setattr(engine, "home_of", home_of_rank)
        found = started.together(script)
    assert sorted(row for each in rows.values() for row in each) == list(range(BATCH))
    assert len({weights.tobytes() for weights in found.values()}) == 1


# Scripts use their optimizer.


@pytest.mark.parametrize("first", [[2], [1]])
def test_a_state_is_of_whole_tensors_and_fits_any_group(first: list[int]) -> None:
    """A single worker or another group goes on with what a group has saved, and the other way round."""
    settings = Settings(workers=1, shards=3, sync="ssp", compress="topk:0.05+int8")
    saved = trained(
        settings, first, at=lambda step, who, optimizer, net: _copy(optimizer, net) if step == 7 else None, steps=8
    )
    state, weights = saved.told[0, 0]
    if first == [2]:
        assert _same(state, saved.told[0, 1][0]), "each rank has all of it"

    def load(step: int, who: Any, optimizer: Any, net: nn.Module) -> None:
        if step == 0:
            optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps the tensors that it is given

    def start() -> nn.Module:
        net = build()
        nn.utils.vector_to_parameters(torch.from_numpy(weights), net.parameters())
        return net

    group, single = (trained(settings, sizes, net=start, at=load) for sizes in ([2], [1]))
    check_same(group, single)
    assert group.weights[0, 0].tobytes() != trained(settings, [2], net=start).weights[0, 0].tobytes(), (
        "the state counts"
    )


def _copy(optimizer: Any, net: nn.Module) -> Any:
    return copy.deepcopy(optimizer.state_dict(residual=True)), flat(net)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else bool(a == b)


def test_a_gradient_weighs_as_its_samples_where_they_are_told() -> None:
    """Ranks with 10 and 6 of 16 rows make the gradient of all 16, and the push says 16."""
    settings = Settings(workers=1, shards=2, sync="bsp", push="update").validated()
    samples: list[int] = []

    def script(member: int, own: int) -> Any:
        model = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["adamw"](model), model)
        mine = slice(0, 10) if own == 0 else slice(10, 16)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step_samples(mine.stop - mine.start)
            optimizer.step()
        with optimizer.shared():
            return flat(model)

    with groups(settings, [2]) as started, pytest.MonkeyPatch.context() as patch:
        arrive = started.cluster.arrive

        def heard(shard: int, peer: bytes, message: Any) -> Any:
            samples.append(message.samples) if isinstance(message, m.Push) else None
            return arrive(shard, peer, message)

        patch.setattr(started.cluster, "arrive", heard)
        found = started.together(script)
    assert distance(found[0, 0], whole_batches()) < 1e-5
    assert set(samples) == {16}


def test_a_tensor_without_a_gradient_on_one_rank_has_that_of_the_others_and_without_any_it_stays() -> None:
    settings = Settings(workers=1, shards=2, sync="bsp", push="update").validated()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.one, self.none = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def script(member: int, own: int) -> Any:
        model = seeded(Net)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1), model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        used: list[Any] = [model.both] if own else [model.both, model.one]
        sum(each(torch.ones(1, 4)).sum() for each in used).backward()
        optimizer.step()
        return {name: (before[name] - p.detach()) / 0.5 for name, p in model.named_parameters()}, before

    with groups(settings, [2]) as started:
        found = started.together(script)
    moved, before = found[0, 1]
    assert torch.allclose(moved["both.weight"], 1 + 0.1 * before["both.weight"])
    assert torch.allclose(moved["one.weight"], 0.5 + 0.1 * before["one.weight"]), "the mean, for the other has none"
    assert not moved["none.weight"].any(), "not even decayed"
    assert _same(moved, found[0, 0][0])


def spoil(model: nn.Module, value: float) -> None:
    """One value of the gradients, of the first rank's slice."""
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient[0, 0] = value


@pytest.mark.parametrize("push", ["gradient", "update"])
def test_a_gradient_that_overflows_on_one_rank_is_a_step_for_none(push: str) -> None:
    """torch.amp.GradScaler: each rank has a scale of its own."""
    settings = Settings(workers=1, shards=2, sync="bsp", push=push).validated()

    def script(member: int, own: int) -> Any:
        model = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["adamw"](model), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + own), growth_interval=1000)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, own, 2)).backward()
            if step == 3 and own == 1:
                spoil(model, float("inf"))
            if step == 4:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append(flat(model))
        return seen, scaler.get_scale()

    with groups(settings, [2]) as started:
        found = started.together(script)
    (first, first_scale), (second, second_scale) = found[0, 0], found[0, 1]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert np.array_equal(first[2], first[3]) and not np.array_equal(first[3], first[4])
    assert (first_scale, second_scale) == (16.0, 16.0), "that of the rank that overflowed is halved"
    model, steps = build(), [0, 1, 2, 4, 5]
    optimizer = OPTIMIZERS["adamw"](model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert distance(first[-1], flat(model)) < 1e-5


def test_a_closure_is_called_once_on_each_rank() -> None:
    settings = Settings(workers=1, shards=2, sync="bsp", push="update").validated()

    def script(member: int, own: int) -> Any:
        model, calls = build(), list[int]()
        optimizer = DistributedOptimizer(OPTIMIZERS["adamw"](model), model)
        for step in range(STEPS):

            def closure(step: int = step) -> Any:
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, step, own, 2)
                loss.backward()
                return loss.detach()

            assert float(optimizer.step(closure)) > 0
        assert calls == list(range(STEPS))
        return flat(model)

    with groups(settings, [2]) as started:
        found = started.together(script)
    assert distance(found[0, 0], whole_batches()) < 1e-5


def test_all_ranks_begin_with_the_parameters_and_buffers_of_the_first() -> None:
    settings = Settings(workers=1, shards=2, sync="ssp").validated()

    def script(member: int, own: int) -> Any:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), seed=own)
        next(model.buffers()).add_(own)  # the running mean
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    with groups(settings, [2]) as started:
        found = started.together(script)
    assert _same(found[0, 0], found[0, 1]) and not found[0, 1]["1.running_mean"].any()


def test_each_rank_has_its_replica_again_after_the_shared_model() -> None:
    settings = Settings(workers=1, shards=2, sync="ssp", compress="topk:0.05+int8").validated()

    def script(member: int, own: int) -> Any:
        model = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["adamw"](model), model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, own, 2).backward()
            optimizer.step()
        before = flat(model)
        with optimizer.shared():
            shown = flat(model)
        assert not np.array_equal(shown, before), "the residual is in the replica alone"
        np.testing.assert_array_equal(flat(model), before)
        optimizer.finish()

    with groups(settings, [2]) as started:
        started.together(script)


def test_ranks_with_different_models_are_refused() -> None:
    def script(member: int, own: int) -> None:
        model = nn.Linear(4, 4 + own)
        with pytest.raises(UsageError, match="the model of process 1 of this group is not that of process 0"):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    with groups(Settings(workers=1, shards=2).validated(), [2]) as started:
        started.together(script)


def test_counts_of_a_fused_optimizer_are_where_its_parameters_are() -> None:
    """A device that has no memory stands in for a GPU."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4)}
    for fused in (True, False):
        ours = torch.empty(2, device="meta")
        cut = {
            name: _cut(name, value, torch.Size([4]), slice(0, 2), ours, {"fused": fused})
            for name, value in state.items()
        }
        assert cut["exp_avg"].device.type == "meta" and cut["exp_avg"].shape == (2,)
        assert cut["step"].device.type == ("meta" if fused else "cpu")


# Events that befall the run.


def test_a_group_whose_lease_ran_out_joins_again_on_all_ranks_at_once() -> None:
    settings = Settings(workers=2, shards=2, sync="ssp", staleness=1, compress="topk:0.2+int8").validated()

    def script(member: int, own: int) -> Any:
        model = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model), model)
        engine: Any = optimizer._engine
        epoch, at = engine.sync.shards.epoch, []
        for step in range(30):
            optimizer.zero_grad()
            loss_of(model, step, rank(), world_size()).backward()
            optimizer.step()
            if (member, own, step) == (1, 0, 9):
                expire(started, 0)
            if engine.sync.shards.epoch != epoch:
                epoch = engine.sync.shards.epoch
                at.append((step, clock()))
        optimizer.finish()
        with optimizer.shared():
            return flat(model), at

    with groups(settings, [2, 1]) as started:
        found = started.together(script)
    (first, first_at), (second, second_at) = found[0, 0], found[0, 1]
    assert np.array_equal(first, second)
    assert first_at == second_at and len(first_at) == 1, "at one step, with one clock"


def expire(started: Groups, member: int) -> None:
    """As kit/scripts.py does."""
    cluster, link = started.cluster, started.sessions[member, 0].link
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None
    with cluster.changed:
        later = cluster.now() + int(3 * cluster.settings.lease * NS)
        for other in coordinator.seats:
            if other != link.member.worker:
                coordinator.members.heard(other, later)
        cluster._apply(0, cluster.servers[0].tick(later))


@pytest.mark.parametrize(
    "flags",
    [
        {"sync": "bsp", "push": "update", "compress": "topk:0.2+int8"},
        {"sync": "bsp"},
        {"sync": "ssp"},
        {"sync": "async"},
        {"sync": "local", "local_steps": 2, "quorum": 1},
        {"sync": "local", "local_steps": 4, "fragments": 2, "merge_delay": 1, "merge_alpha": 0.0},
    ],
)
def test_keys_that_move_to_other_shards_take_residual_and_optimizer_along(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """From two shards to three and back: a rank has other keys then. With a barrier the run is the undisturbed one. Fragments
    have other keys afterwards, and under async a step may be on an older state."""
    settings = Settings(workers=1, shards=2, checkpoint_every=0, **flags)

    def moving(cluster: OnDisk) -> Callable[..., None]:
        def at(step: int, who: Any, optimizer: Any, net: nn.Module) -> None:
            if who == (0, 0) and step in (4, 9):
                cluster.move(3 if step == 4 else 2)

        return at

    cluster = OnDisk(settings.validated(), tmp_path / "moved")
    moved = trained(settings, [2], at=moving(cluster), cluster=cluster, steps=20)
    assert {shard for shard, *_ in moved.pushes} == {0, 1, 2}
    still = trained(settings, [2], cluster=OnDisk(settings.validated(), tmp_path / "still"), steps=20)
    assert len({weights.tobytes() for weights in moved.weights.values()}) == 1
    exact = settings.sync != "async" and settings.fragments == 1
    assert distance(moved.weights[0, 0], still.weights[0, 0]) < (1e-5 if exact else 0.05)


def test_the_first_rank_chooses_what_all_of_them_code_with(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(workers=1, shards=2, sync="ssp", compress="auto")
    wanted = {0: 3, 5: 6, 9: 1}

    def decided(self: Any, cost: Any) -> Any:
        self.clocks += 1
        if self.clocks not in wanted:
            return None
        before, self.at = self.up, wanted[self.clocks]
        return Switch(before, self.up, "the test says so")

    monkeypatch.setattr(Auto, "clock", decided)
    at = lambda step, who, optimizer, net: optimizer._engine.tuning.compressor.spec  # noqa: E731
    found = trained(settings, [2], at=at)
    assert found.told[0, 0] == found.told[0, 1] != "dense"
    assert len({weights.tobytes() for weights in found.weights.values()}) == 1


def test_values_that_are_not_finite_on_one_rank_are_sent_by_none() -> None:
    settings = Settings(workers=1, shards=2, sync="ssp", compress="topk:0.2+int8").validated()
    pushes: list[tuple[Any, ...]] = []

    def script(member: int, own: int) -> Any:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loss_of(model, 0, own, 3).backward()
        assert optimizer._engine is not None and optimizer._engine.slice is not None
        ours = optimizer._engine.slice
        with torch.no_grad():  # a slice that is lost, of the first of two ranks
            for name, parameter in zip(ours.names, ours.parameters, strict=True):
                parameter.fill_(float("nan")) if name == "0.weight" and not ours.begin else None
        with pytest.raises(NarrowsError, match=r"(is|are) not finite") as told:
            optimizer.step()
        return str(told.value)

    with groups(settings, [3]) as started, pytest.MonkeyPatch.context() as patch:
        _listen(started, patch, pushes)
        found = started.together(script)
    others = [text for text in found.values() if text.startswith("another process of this group has values")]
    (named,) = set(found.values()) - set(others)
    assert "'0.weight'" in named and len(others) == 2 and not pushes, "one of the others has no shard"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda optimizer: optimizer.finish(), "finish"),
        (lambda optimizer: optimizer.eval(), "eval"),
        (lambda optimizer: optimizer.state_dict(), "state_dict"),
        (lambda optimizer: optimizer.load_state_dict({}), "load_state_dict"),
    ],
)
def test_what_one_rank_calls_alone_is_refused_on_all(call: Callable[[Any], None], name: str) -> None:
    def script(member: int, own: int) -> None:
        model = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model), model)
        with pytest.raises(
            UsageError,
            match=rf"process 0 has called step\(\) and process 1 has called {name}\(\)( or shared\(\))?, but all of them",
        ):
            call(optimizer) if own else optimizer.step()

    with groups(Settings(workers=1, shards=2, sync="bsp").validated(), [2]) as started:
        started.together(script)


def test_after_the_end_the_model_needs_no_other_rank() -> None:
    def script(member: int, own: int) -> Any:
        model = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model), model)
        loss_of(model, 0, own, 2).backward()
        optimizer.step()
        optimizer.finish()
        if own:
            return None
        with optimizer.shared():
            return flat(model)

    with groups(Settings(workers=1, shards=2, sync="ssp", compress="topk:0.2+int8").validated(), [2]) as started:
        found = started.together(script)
    assert distance(found[0, 0], whole_batches(1, OPTIMIZERS["sgd"])) < 1e-5


@pytest.mark.parametrize(
    ("flags", "more", "make", "why"),
    [
        ({"sync": "gossip"}, {}, OPTIMIZERS["sgd"], "under --sync gossip whole models are mixed"),
        ({"sync": "ssp", "dp_clip": 1.0}, {}, OPTIMIZERS["sgd"], "--dp-clip needs the length of whole updates"),
        ({"sync": "bsp"}, {"overlap": True}, OPTIMIZERS["sgd"], "with overlap=True gradients leave"),
        ({"sync": "ssp"}, {}, lambda net: torch.optim.Adafactor(net.parameters()), "Adafactor is not elementwise"),
    ],
)
def test_what_a_group_cannot_do_is_refused(flags: dict[str, Any], more: dict[str, Any], make: Make, why: str) -> None:
    def script(member: int, own: int) -> None:
        model = build()
        with pytest.raises(UsageError, match=why):
            DistributedOptimizer(make(model), model, **more)

    with groups(Settings(workers=1, **flags).validated(), [2]) as started:
        started.together(script)


@pytest.mark.parametrize("device", [False, True], ids=["a group", "a device"])
def test_a_layer_is_saved_with_its_own_bytes_alone(
    device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters lie in one tensor there. What a script saves or copies of the model is not all of it."""
    if device:
        monkeypatch.setenv("NARROWS_ARRAYS", "device")

    def script(member: int, own: int) -> tuple[int, Any, Any]:
        net: Any = seeded(lambda: nn.Sequential(nn.Linear(9, 4000), nn.Linear(4000, 5)))
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, step, own, 2).backward()
            optimizer.step()
        assert optimizer._engine.flat.memory(0, 4) is not None, "they still lie in one tensor"
        with optimizer.shared():
            file = io.BytesIO()
            torch.save(net[1].bias, file)
            save_file(net.state_dict(), path := tmp_path / f"{own}.safetensors")
            copied = copy.deepcopy(net[1])
            found = (
                len(file.getvalue()),
                load_file(path),
                {name: each.clone() for name, each in net.state_dict().items()},
            )
            assert copied.bias.untyped_storage().nbytes() == 20
        optimizer.finish()
        return found

    with groups(Settings(sync="ssp", shards=2), [1 if device else 2]) as started:
        for size, loaded, state in started.together(script).values():
            assert size < 4000 and loaded.keys() == state.keys()
            assert all(torch.equal(loaded[name], each) for name, each in state.items())
