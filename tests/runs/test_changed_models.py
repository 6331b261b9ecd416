"""What a script does to its model after the optimizer was wrapped: modules that it replaces, buffers that come, grow or are
made anew, a teacher that it moves. Each is right, or the script is told."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.groups import groups
from kit.on_disk import OnDisk
from kit.scripts import batch, loss_of, run, seeded
from torch import nn
from torch.nn.utils import parametrizations, prune

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer, step_count
from narrows.worker.model import weight_edit_check
from narrows.worker.model.module_buffers import pack_buffers

pytestmark = pytest.mark.usefixtures("one_thread")

SSP, BSP = Settings(sync="ssp", workers=2), Settings(sync="bsp", workers=2)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05)


def net_of() -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5)))


# Modules.


def replaced(net: Any) -> None:
    net[2] = nn.Linear(7, 5)


def deleted_first(net: Any) -> None:
    del net[2]
    net.append(nn.Linear(7, 5))


REPLACED = "'{}' was replaced after DistributedOptimizer was made, and no worker trains the '{}' in its place"
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "replaced": (replaced, REPLACED.format("2.weight", "2.weight")),
    "deleted": (deleted_first, REPLACED.format("2.weight", "2.weight")),
    "assigned": (
        lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
        REPLACED.format("0.weight", "0.weight"),
    ),
    "parametrized": (
        lambda net: parametrizations.weight_norm(net[0]),
        REPLACED.format("0.weight", "0.parametrizations.weight.original0"),
    ),
    "converted": (lambda net: net.to(torch.bfloat16), "'0.weight' was float32[7, 9] when DistributedOptimizer was made, "
                  "and is bfloat16[7, 9] now"),
    "resized": (
        lambda net: setattr(net[2].bias, "data", torch.zeros(6)),
        "'2.bias' was float32[5] when DistributedOptimizer was made, and is float32[6] now",
    ),
}  # fmt: skip


@pytest.mark.parametrize("settings", [Settings(sync="ssp"), Settings(sync="bsp")], ids=["ssp", "bsp"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_that_another_one_has_replaced_ends_the_worker_with_a_sentence(
    name: str, settings: Settings
) -> None:
    change, why = CHANGES[name]
    with run(settings):
        net = net_of()
        optimizer = DistributedOptimizer(sgd(net), net)
        loss_of(net, 0).backward()
        optimizer.step()
        change(net)
        with pytest.raises(UsageError, match=re.escape(why)), optimizer.shared():
            pass
        with pytest.raises(UsageError, match=re.escape(why)):
            optimizer.step()


def test_what_changes_no_parameter_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A module under another name, pruning, which keeps the parameter and adds a buffer, and one less."""
    with run(Settings(sync="ssp")):
        net = net_of()
        net.aux = nn.Linear(2, 2)
        optimizer = DistributedOptimizer(sgd(net), net)
        for change in (
            lambda: setattr(net, "again", net[0]),
            lambda: prune.l1_unstructured(net[2], "weight", 0.5),
            lambda: delattr(net, "aux"),
            lambda: net.requires_grad_(True),
        ):
            before = net[0].weight.detach().clone()
            optimizer.zero_grad()
            loss_of(nn.Sequential(*net[:3]), 0).backward()
            change()
            optimizer.step()
            assert not torch.equal(net[0].weight, before)
        optimizer.finish()
    assert "came into the model" not in capsys.readouterr().err


def test_a_module_that_is_added_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with run(Settings(sync="ssp")):
        net = net_of()
        optimizer = DistributedOptimizer(sgd(net), net)
        for step in range(4):
            if step == 1:
                net.probe = nn.Linear(2, 2)
            if step == 3:
                del net.probe
                net.probe = nn.Linear(3, 3)
            optimizer.zero_grad()
            loss_of(nn.Sequential(*net[:3]), step).backward()
            optimizer.step()
    assert capsys.readouterr().err.count("'probe.weight' came into the model after DistributedOptimizer was made") == 2


def test_a_lazy_module_is_called_first() -> None:
    for lazy in (nn.LazyLinear(3), nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))):
        with run(Settings(sync="ssp")), pytest.raises(UsageError, match="has no shape yet: call the model on a batch"):
            DistributedOptimizer(sgd(lazy), lazy)


# Buffers.


class Net(nn.Module):
    """Buffers that a forward pass of an evaluation changes as `how` says."""

    def __init__(self, how: str, persistent: bool) -> None:
        super().__init__()
        self.how, self.persistent = how, persistent
        self.linear = nn.Linear(9, 5)
        self.norm = nn.BatchNorm1d(5)
        for name, value in (("cos", 1.0), ("sin", -1.0)):
            self.register_buffer(name, torch.full((4,), value), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self._change()
        out: torch.Tensor = self.norm(self.linear(x))
        return out

    def _change(self) -> None:
        if self.how == "grow":
            self.register_buffer("cos", torch.full((len(self.get_buffer("cos")) + 1,), 1.0), persistent=self.persistent)
        elif self.how == "late" and not hasattr(self, "cache"):
            self.register_buffer("cache", torch.full((4,), 2.0), persistent=self.persistent)
        elif self.how == "again":
            del self.cos
            self.register_buffer("cos", torch.full((4,), 1.0), persistent=self.persistent)
        elif self.how == "gone" and hasattr(self, "sin"):
            del self.sin


@pytest.mark.parametrize("persistent", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize("how", ["grow", "late", "again", "gone"])
@pytest.mark.parametrize("sync", ["bsp", "ssp", "gossip"])
def test_each_buffer_keeps_its_values_whatever_an_evaluation_makes(how: str, sync: str, persistent: bool) -> None:
    def script(worker: int) -> tuple[dict[str, list[float]], list[torch.Tensor], list[torch.Tensor]]:
        net: Any = seeded(lambda: Net(how, persistent))
        optimizer = DistributedOptimizer(sgd(net), net)
        own: list[torch.Tensor] = []
        for step in range(5):
            optimizer.zero_grad()
            loss_of(net, step, worker, 2).backward()
            optimizer.step()
            own.append(net.norm.running_mean.clone())
            net.eval()
            with torch.no_grad(), optimizer.shared():
                net(batch(step)[0])
            net.train()
            assert torch.equal(net.norm.running_mean, own[-1]), "this worker's own are back"
        optimizer.finish()
        named = {name: each.unique().tolist() for name, each in net.named_buffers() if "norm" not in name}
        return named, own, [each.clone() for each in net.norm.buffers()]

    right = {"cos": [1.0], "sin": [-1.0], "cache": [2.0]}
    names = {"late": {"cos", "sin", "cache"}, "gone": {"cos"}}.get(how, {"cos", "sin"})
    with run(Settings(sync=sync, workers=2)) as started:
        (first, own, ended), (second, others, also) = started.together(script)
    assert first == second == {name: right[name] for name in names}
    assert all(torch.equal(a, b) for a, b in zip(ended, also, strict=True)), "all end with those of the lowest rank"
    assert not any(torch.equal(a, b) for a, b in zip(own, others, strict=True))


def test_a_buffer_of_another_worker_that_does_not_fit_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a joiner or a resumed worker would begin without it in silence."""

    def script(worker: int) -> None:
        net = seeded(lambda: nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5)))
        if worker == 0:
            net.register_buffer("late", torch.ones(2))
        net.register_buffer("long", torch.ones(3 + worker))
        net.register_buffer("kind", torch.ones(1, dtype=torch.int64 if worker else torch.float32))
        optimizer = DistributedOptimizer(sgd(net), net)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
            with optimizer.shared():
                pass
        optimizer.finish()

    with run(BSP) as started:
        started.together(script)
    err = capsys.readouterr().err
    for name, theirs, here in (
        ("late", "float32[2]", "not there"),
        ("long", "float32[3]", "float32[4]"),
        ("kind", "float32[1]", "int64[1]"),
    ):
        assert err.count(f"the module buffer '{name}' of another worker is {theirs}, and here it is {here}") == 1


def test_buffers_that_come_late_leave_this_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with run(Settings(sync="ssp")):
        net: Any = seeded(lambda: nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5)))
        optimizer: Any = DistributedOptimizer(sgd(net), net)
        other = copy.deepcopy(net)
        other[1].running_mean.fill_(7.0)
        shared = optimizer._engine.shared
        shared.heard(pack_buffers(other))
        assert net[1].running_mean.eq(0).all(), "nobody asked, or no longer"
        with optimizer.shared():
            shared.heard(pack_buffers(other))
            assert net[1].running_mean.eq(7).all()
        assert net[1].running_mean.eq(0).all()


# A teacher.


class Taught(nn.Module):
    """A student, and a teacher that no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(9, 5)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.student(x)
        return out

    @torch.no_grad()
    def move(self, by_data: bool = False) -> None:
        for theirs, own in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if by_data:  # as MoCo does: torch counts no change
                theirs.data = theirs.data * 0.5 + own.data * 0.5
            else:
                theirs.lerp_(own, 0.5)


def taught(worker: int, steps: int, by_data: bool = False) -> tuple[Taught, DistributedOptimizer, list[torch.Tensor]]:
    net: Any = seeded(Taught)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.student.parameters(), lr=0.05), net)
    begun = [each.clone() for each in net.teacher.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net, step_count(), worker, 2).backward()
        optimizer.step()
        net.move(by_data)
    return net, optimizer, begun


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("settings", [BSP, SSP], ids=["bsp", "ssp"])
def test_a_teacher_goes_on_after_a_resume(
    settings: Settings, by_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "states"
    monkeypatch.setenv("NARROWS_CHECKPOINT_DIR", str(folder))
    said: list[str] = []
    monkeypatch.setattr(weight_edit_check, "say", said.append)
    cluster = OnDisk(settings.validated(), tmp_path / "run")
    with run(settings, cluster) as started:

        def first(worker: int) -> list[torch.Tensor]:
            net, _, _ = taught(worker, 7, by_data)
            started.sessions[worker].keep()
            return [each.clone() for each in net.teacher.parameters()]

        ended = started.together(first)
        cluster.interrupt()
    told = (
        "the script changes 'teacher.weight' and 1 more, which no optimizer of the run steps: each worker has its own"
    )
    assert said == 2 * [f"{told}, and no server has it; its values are kept in {folder} for --resume"]
    with run(settings, OnDisk(settings.validated(), tmp_path / "run", resume=True)) as started:
        begun = started.together(lambda worker: taught(worker, 0)[2])
    for before, after in zip(ended, begun, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_teacher_that_is_kept_nowhere_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with run(SSP) as started:
        started.together(lambda worker: taught(worker, 3))
    assert (
        capsys.readouterr().err.count("give ps-worker --checkpoint-dir, or --resume begins with its first values") == 2
    )


def test_frozen_parameters_that_stay_are_neither_told_of_nor_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NARROWS_CHECKPOINT_DIR", str(tmp_path / "states"))
    monkeypatch.setattr(Taught, "move", lambda self, by_data: None)
    with run(BSP) as started:

        def script(worker: int) -> None:
            taught(worker, 3)
            started.sessions[worker].keep()

        started.together(script)
    assert "the script changes" not in capsys.readouterr().err and not list(tmp_path.glob("states/*"))


def test_in_a_group_each_process_keeps_its_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWS_CHECKPOINT_DIR", str(tmp_path / "states"))
    settings = Settings(sync="ssp", shards=2).validated()
    cluster = OnDisk(settings, tmp_path / "run")
    with groups(settings, [2], cluster) as started:

        def first(member: int, own: int) -> list[torch.Tensor]:
            net, _, _ = taught(own, 4)
            started.sessions[member, own].keep()
            return [each.clone() for each in net.teacher.parameters()]

        ended = started.together(first)
        cluster.interrupt()
    with groups(settings, [2], OnDisk(settings, tmp_path / "run", resume=True)) as started:
        begun = started.together(lambda member, own: taught(own, 0)[2])
    for key, before in ended.items():
        assert all(torch.equal(a, b) for a, b in zip(before, begun[key], strict=True))


def mixed() -> Any:
    net = nn.Linear(9, 5)
    net.wide = nn.Parameter(torch.zeros(64, 50).t(), requires_grad=False)
    net.one = nn.Parameter(torch.zeros(()), requires_grad=False)
    net.complex = nn.Parameter(torch.zeros(3, dtype=torch.complex64), requires_grad=False)
    return net


@pytest.mark.parametrize("name", ["wide", "one", "complex"])
def test_a_change_is_found_in_a_tensor_of_any_layout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with run(Settings(sync="ssp")):
        net = mixed()
        optimizer = DistributedOptimizer(torch.optim.SGD([net.weight, net.bias], lr=0.1), net)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
            if step == 2:
                with torch.no_grad():
                    net.get_parameter(name).add_(1)
    assert capsys.readouterr().err.count(f"the script changes '{name}', which no optimizer of the run steps") == 1
