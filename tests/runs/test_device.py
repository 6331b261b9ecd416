"""A worker whose arrays live on a device computes and sends what one on the host does, bit for bit. Torch's tensors on the CPU
stand for a device's, and the CPU's kernels for its own; all else is what runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, store_of
from kit.scripts import Run, build, flat, loss_of, run, seeded, tree
from kit.specs import MODES, MODES_WITH_SPECS, OF_README, WITH_SERVER_NO_QUORUM
from torch import nn

from narrows.compression import parse
from narrows.compression.device.home import DeviceHome
from narrows.compression.home import HOST
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError
from narrows.worker import DistributedOptimizer
from narrows.worker.model import device_placement
from narrows.worker.model.device_placement import home_of
from narrows.worker.model.flat import FlatModel
from narrows.worker.sync import engine, overlap
from narrows.worker.sync.engine import Engine
from narrows.worker.sync.updates import UpdateStep

STEPS = 12
At = Callable[[int, "Script"], None]


class Script:
    """One worker, stepped from outside. Its state after each step is compared."""

    def __init__(self, started: Run, worker: int, make: Callable[[], nn.Module] = build) -> None:
        self.started, self.worker = started, worker
        started.become(worker)
        self.model = make()
        self.optimizer = DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.05), self.model)
        assert self.optimizer._engine is not None
        self.engine: Engine = self.optimizer._engine

    def step(self, number: int) -> None:
        self.started.become(self.worker)
        self.optimizer.zero_grad()
        loss_of(self.model, number, self.worker, len(self.started.sessions)).backward()
        self.optimizer.step()

    def state(self) -> bytes:
        sync: Any = self.engine.sync
        left = sync.residual()
        return flat(self.model).tobytes() + (b"" if left is None else left.tobytes()) + repr(sync.merging).encode()


def trace(started: Run, barrier: bool, at: At, make: Callable[[], nn.Module]) -> list[bytes]:
    """The states of all workers after each step, and of the servers at the end. Workers take turns in one thread, so
    that nothing depends on who is faster; at a barrier, where each waits for all, they have threads, and nothing does."""
    scripts = started.together(lambda worker: Script(started, worker, make))  # where each waits for all

    def work(worker: int) -> list[bytes]:
        held = []
        for number in range(STEPS):
            scripts[worker].step(number)
            at(number, scripts[worker])
            held.append(scripts[worker].state())
        return held

    if barrier:
        seen = [each for held in started.together(work) for each in held]
    else:
        seen = []
        for number in range(STEPS):
            for script in scripts:
                script.step(number)
                at(number, script)
            seen += [script.state() for script in scripts]
    servers = [server for cluster in started.clusters for server in cluster.servers]
    return seen + [store_of(server).x.tobytes() for server in servers]


def nothing(number: int, script: Script) -> None:
    """Happens."""


def same_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
    settings: Settings,
    levels: int = 1,
    at: At = nothing,
    make: Callable[[], nn.Module] = build,
) -> None:
    traces = []
    for where in ("host", "device"):
        monkeypatch.setenv("NARROWS_ARRAYS", where)
        mode = settings.validated().mode()
        barrier = mode.barrier or mode.rule is FoldRule.MIX
        if levels == 1:
            with run(settings) as started:
                traces.append(trace(started, barrier, at, make))
                on_device = [isinstance(cast(Any, each.engine).home, DeviceHome) for each in started.sessions]
                assert set(on_device) == {where == "device"}
            continue
        root = Cluster(Settings(sync="ssp", staleness=1, compress=settings.compress, workers=1, shards=1))
        with tree(root, Cluster(settings, root, "cluster0")) as started:
            traces.append(trace(started, barrier, at, make))
    host, device = traces
    assert len(host) == len(device)
    assert [i for i, (mine, yours) in enumerate(zip(device, host, strict=True)) if mine != yours] == []


@pytest.mark.parametrize(("mode", "spec"), MODES_WITH_SPECS)
def test_every_mode_is_the_same_on_a_device(mode: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same_on_a_device(monkeypatch, Settings(**MODES[mode], compress=spec, workers=2, shards=2))


ROUNDS: tuple[dict[str, Any], ...] = ({}, {"local_steps": 4, "outer_momentum": 0.6, "outer_lr": 0.7})


@pytest.mark.parametrize(("steps", "spec"), [*zip(cycle(ROUNDS), (*OF_README, OF_README[0]), strict=False)])
def test_gossip_is_the_same_on_a_device(steps: dict[str, Any], spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same_on_a_device(monkeypatch, Settings(sync="gossip", staleness=0, compress=spec, workers=3, **steps))


@pytest.mark.parametrize("mode", WITH_SERVER_NO_QUORUM)
def test_below_another_server_too(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same_on_a_device(monkeypatch, Settings(**MODES[mode], compress="topk:0.05+int8", workers=2, shards=1), levels=2)


def rejoins(number: int, script: Script) -> None:
    """The first worker's lease runs out in the middle, and it joins again with its residual."""
    if number == STEPS // 2 and script.worker == 0:
        script.started.expire(0)


def resumes(number: int, script: Script) -> None:
    """From its own file."""
    if number == STEPS // 2:
        script.optimizer.load_state_dict(script.optimizer.state_dict(residual=True))


def changes(number: int, script: Script) -> None:
    """As `auto` does, from lossy to lossless and back."""
    specs = {3: "int8", 6: "dense", 9: "topk:0.2"}
    sync = script.engine.sync
    if number in specs and isinstance(sync, UpdateStep):
        for replica in sync.shards.replicas:
            for _, feedback in replica.feedbacks:
                feedback.change(parse(specs[number]))


def evaluates(number: int, script: Script) -> None:
    """Shows the shared model and the own one again."""
    if number % 10 == 3:
        before = flat(script.model)
        with script.optimizer.shared():
            pass
        assert flat(script.model).tobytes() == before.tobytes()


def moves(number: int, script: Script) -> None:
    """The script gives a parameter other memory than we had it in."""
    if number == STEPS // 2:
        parameter = next(script.model.parameters())
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    ("mode", "at"),
    [("ssp", rejoins), ("async", rejoins), ("ssp", resumes), ("async", changes), ("ssp", evaluates), ("async", moves)],
)
def test_whatever_happens_meanwhile(mode: str, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    same_on_a_device(monkeypatch, Settings(**MODES[mode], compress="topk:0.05+int8", workers=2, shards=2), at=at)


class Mixed(nn.Module):
    """Parameters that cannot be views of one tensor: of another dtype, with other strides, of a recurrent layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(9, 12)
        self.middle: nn.Module = nn.GRU(12, 12) if kind == "recurrent" else nn.Linear(12, 12)
        self.last = nn.Linear(12, 5)
        if kind == "strided":
            self.first.weight.data = self.first.weight.data.T.contiguous().T
        elif kind != "recurrent":
            self.middle.to(getattr(torch, kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)).to(next(self.middle.parameters()).dtype)
        hidden = self.middle(hidden)[0] if self.kind == "recurrent" else self.middle(hidden)
        out: torch.Tensor = self.last(hidden.float())
        return out


@pytest.mark.parametrize("kind", ["bfloat16", "float64", "strided", "recurrent"])
def test_parameters_of_any_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(sync="ssp", compress="topk:0.05+int8", workers=2, shards=2)
    same_on_a_device(monkeypatch, settings, make=lambda: seeded(lambda: Mixed(kind)))


def test_one_worker_on_a_device_and_one_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    for wanted in (["host", "host"], ["host", "device"]):
        here = list(wanted)

        def chosen(flat: FlatModel, why_host: str, here: list[str] = here) -> tuple[Any, str]:
            return home_of(flat, why_host) if here.pop() == "device" else (HOST, "")

        monkeypatch.setenv("NARROWS_ARRAYS", "device")
        monkeypatch.setattr(engine, "home_of", chosen)
        with run(Settings(sync="bsp", push="update", compress="topk:0.1+int8", workers=2)) as started:
            traces.append(trace(started, True, nothing, build))
            homes = [cast(Any, each.engine).home for each in started.sessions]
            assert sum(isinstance(device_placement, DeviceHome) for device_placement in homes) == wanted.count("device")
    assert traces[0] == traces[1]


def test_parameters_become_views_of_one_tensor() -> None:
    model = build()
    before, held = flat(model), FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held.hold()
    assert held.held is not None and flat(model).tobytes() == before.tobytes() == held.copy().tobytes()
    held.write_keys(3, np.full(200, 7.0, np.float32))
    assert (flat(model)[3:203] == 7.0).all() and (flat(model)[203:] == before[203:]).all()
    assert all(p.data_ptr() >= held.held.data_ptr() for p in model.parameters())


def test_parameters_on_two_devices_stay_where_they_are() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    flat = FlatModel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    flat.hold()
    assert flat.held is None and [str(p.device) for p in net.parameters()] == ["cpu"] * 2 + ["meta"] * 2


def test_what_stays_on_the_host_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NARROWS_ARRAYS", "device")
    with run(Settings(sync="ssp", dp_clip=1.0)) as started:
        script = Script(started, 0)
        assert not isinstance(script.engine.home, DeviceHome)
        told = "parameters on cpu are copied through the CPU: --dp-clip looks at updates there"
        assert told in capsys.readouterr().err
    with run(Settings(sync="ssp", compress="topk:0.1")) as started:
        Script(started, 0)
        assert "device cpu as a device: --compress topk:0.1 is computed there" in capsys.readouterr().err
    model = build()
    model.to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert home_of(FlatModel(model, optimizer)) == (HOST, "")


def test_what_is_not_finite_is_named_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWS_ARRAYS", "device")
    with run(Settings(sync="ssp", compress="topk:0.1+int8")) as started:
        script = Script(started, 0)
        script.step(0)
        with torch.no_grad():
            script.model[2].weight[3] = float("nan")  # type: ignore[index]
        with pytest.raises(
            NarrowsError, match=r"the update of clock 1 is not finite, first in '2.weight' \(1 of 294 values"
        ):
            script.step(1)


def test_parts_leave_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """overlap=True: gradients land on the host one by one."""
    models = []
    for where in ("host", "device"):
        monkeypatch.setenv("NARROWS_ARRAYS", where)
        with run(Settings(sync="bsp", workers=2, shards=2)) as started:

            def work(worker: int, started: Run = started) -> bytes:
                model = build()
                inner = torch.optim.SGD(model.parameters(), lr=0.05)
                optimizer = DistributedOptimizer(inner, model, overlap=True)
                for number in range(20):
                    optimizer.zero_grad()
                    loss_of(model, number, worker, 2).backward()
                    optimizer.step()
                return flat(model).tobytes()

            models.append(started.together(work))
    assert models[0] == models[1]


class Late:
    """A copy that is done, with those `before`, once it was asked for five times, or waited for: until then its bytes are
    others."""

    def __init__(self, copy: Callable[[], None], before: Late | None) -> None:
        self.copy, self.before, self.asked, self.over = copy, before, 0, False

    def done(self) -> bool:
        self.asked += 1
        if self.asked == 5:
            self.wait()
        return self.over

    def wait(self) -> None:
        if not self.over:
            if self.before is not None:
                self.before.wait()
            self.copy()
        self.over = True


def test_a_part_leaves_once_its_copy_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's copies take a while; each is of values that stay as they are meanwhile."""
    land, landed, early = DeviceHome.land, list[Late](), list[int]()

    def late(self: Any, values: torch.Tensor, out: Any) -> Late:
        out[:] = float("nan")
        landed.append(Late(lambda: land(self, values, out).wait(), landed[-1] if landed else None))
        return landed[-1]

    models = []
    for where in ("host", "device"):
        monkeypatch.setenv("NARROWS_ARRAYS", where)
        monkeypatch.setattr(DeviceHome, "land", late)
        monkeypatch.setattr(overlap, "PART_VALUES_MIN", 16)
        with run(Settings(sync="bsp")) as started:
            model, script = build(), started
            inner = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = DistributedOptimizer(inner, model, overlap=True, accumulate=2)
            engine = cast(Any, script.sessions[0].engine)
            for number in range(6):
                optimizer.zero_grad()
                for half in (0, 1):
                    loss_of(model, number, half, 2).backward()
                optimizer.step()
                early.append(engine.sync.overlap.sent_early)
            models.append(flat(model).tobytes())
    assert models[0] == models[1]
    assert len(landed) == 6 * len(list(build().parameters())) and all(each.over for each in landed)
    assert all(0 < some < whole for whole, some in zip(early[:6], early[6:], strict=True))


def test_kernels_of_a_gpu_are_compiled_before_a_worker_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling holds the interpreter, and a lease would run out."""
    cluster, order = Cluster(Settings(sync="ssp")), list[str]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(device_placement, "device_home", lambda device, say: order.append(str(device)))
    hear = cluster.servers[0].handle
    cluster.heard[0] = lambda *args: order.append("heard") or hear(*args)  # type: ignore[func-returns-value]
    with run(cluster.settings, cluster):
        assert order[:2] == ["cuda:1", "heard"]
