"""The state of workers' optimizers outlives them: a resumed run, and a worker that comes later, go on with it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.groups import groups
from kit.on_disk import OnDisk
from kit.scripts import build, loss_of, run
from torch import nn
from torch.utils._pytree import tree_leaves

from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import CHECKPOINT_LEAST_NS
from narrows.worker import DistributedOptimizer, saved_state, step_count
from narrows.worker.checkpoint import optimizer_state
from narrows.worker.checkpoint.optimizer_state import AHEAD, OptimizerStateFile

pytestmark = pytest.mark.usefixtures("one_thread")

Optimizers = Sequence[torch.optim.Optimizer]
SSP = Settings(sync="ssp", workers=2, shards=2, checkpoint_every=1.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWS_CHECKPOINT_DIR", str(tmp_path / "states"))
    return tmp_path / "states"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(optimizer_state, "say", texts.append)
    return texts


def adamw(net: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(net.parameters(), lr=0.01)]


def muon_adamw(net: nn.Module) -> Optimizers:
    matrices, rest = ([p for p in net.parameters() if (p.ndim == 2) is whole] for whole in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def states(optimizer: DistributedOptimizer) -> list[dict[str, Any]]:
    """Return the state of each tensor, whole, as values that can be compared."""
    found = optimizer.state_dict()
    each = found.get("optimizers", [found])
    return [{k: v.tolist() for k, v in state.items()} for one in each for state in one["state"].values()]


def wrapped(make: Callable[[nn.Module], Optimizers], model: Callable[[], nn.Module] = build) -> Any:
    net = model()
    return net, DistributedOptimizer(make(net), net)


def stepped(net: nn.Module, optimizer: DistributedOptimizer, steps: int, worker: int = 0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net, step_count(), worker, 2).backward()
        optimizer.step()


@pytest.mark.parametrize("make", [adamw, muon_adamw])
def test_a_run_that_is_resumed_goes_on_with_the_moments(
    make: Callable[[nn.Module], Optimizers], folder: Path, tmp_path: Path, said: list[str]
) -> None:
    """The script's own rate of today holds, not that of the file."""
    cluster = OnDisk(SSP.validated(), tmp_path / "run")
    with run(SSP, cluster) as started:

        def first(worker: int) -> Any:
            net, optimizer = wrapped(make)
            stepped(net, optimizer, 7, worker)
            started.sessions[worker].keep()
            return states(optimizer)

        before = started.together(first)
        cluster.interrupt()
    assert before[0] != before[1] and not said
    assert {path.name for path in folder.iterdir()} == {"narrows-optimizer-0.pt", "narrows-optimizer-1.pt"}

    def second(worker: int) -> Any:
        _, optimizer = wrapped(make)
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        found, clock = states(optimizer), optimizer.clock
        return found, clock, {group["lr"] for group in optimizer.param_groups}

    with run(SSP, OnDisk(SSP.validated(), tmp_path / "run", resume=True)) as started:
        after = started.together(second)
    assert [found for found, _, _ in after] == before
    assert all(clock > 0 and rates == {0.5} for _, clock, rates in after)
    assert set(said) == {f"optimizers go on with their states in {folder}"}


def late(started: Any, make: Callable[[nn.Module], Optimizers] = adamw, model: Callable[[], nn.Module] = build) -> Any:
    """Return the states of a worker that begins in the place of the only one, which is gone."""
    started.expire(-1)
    started.join()
    return states(wrapped(make, model)[1])


def test_who_joins_later_takes_its_own_file_else_the_newest_one_else_begins_anew(folder: Path, said: list[str]) -> None:
    with run(Settings(sync="async")) as started:
        net, optimizer = wrapped(adamw)
        stepped(net, optimizer, 9)
        started.sessions[0].keep()
        before = states(optimizer)
        assert late(started) == before
        (folder / "narrows-optimizer-0.pt").rename(folder / "narrows-optimizer-5.pt")
        older = torch.load(folder / "narrows-optimizer-5.pt", weights_only=True) | {"clock": 4, "state": {}}
        torch.save(older, folder / "narrows-optimizer-6.pt")
        assert late(started) == before
        torch.save(older, folder / "narrows-optimizer-0.pt")
        assert late(started) == before, "ours is of long ago"
        torch.save(older | {"clock": 5}, folder / "narrows-optimizer-0.pt")
        assert late(started) == []
        (folder / "narrows-optimizer-0.pt").unlink()
        (folder / "narrows-optimizer-5.pt").unlink()
        assert late(started) == []
        (folder / "narrows-optimizer-6.pt").unlink()
        assert late(started) == []
    assert said[-1] == f"the optimizer of rank 0 begins anew: {folder} has no state of it"


def test_what_another_run_has_left_is_not_taken(folder: Path, said: list[str]) -> None:
    path = folder / "narrows-optimizer-0.pt"
    with run(Settings(sync="async")) as started:
        net, optimizer = wrapped(adamw)
        stepped(net, optimizer, 9)
        started.sessions[0].keep()
        ours = torch.load(path, weights_only=True)
        sgd = lambda net: [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)]  # noqa: E731
        assert late(started, sgd) == []
        assert said[-1].endswith(
            f"begins anew: {path} is of another model, another optimizer or another part of the model"
        )
        other = ours["of"] | {"tensors": [["0.weight", [17, 8], "torch.float32"], *ours["of"]["tensors"][1:]]}
        torch.save(ours | {"of": other}, path)
        assert late(started) == []
        assert said[-1].endswith(f"{path} is of another model, another optimizer or another part of the model")
        torch.save(ours | {"clock": 9 * 2 + AHEAD + 1}, path)
        assert late(started) == []
        assert said[-1].endswith(f"{path} is of clock {19 + AHEAD} of another run: this one is at 9")
        torch.save(ours | {"clock": 9 * 2 + AHEAD}, path)
        assert late(started) != []
        path.write_bytes(path.read_bytes()[:-200])
        assert late(started) == []
        assert f"{path} is no state of an optimizer" in said[-1]
    with run(Settings(sync="async")):
        wrapped(adamw)
    assert not path.exists(), "a run that begins has no use for it"


def test_one_is_written_when_it_is_time_and_training_goes_on_where_that_fails(folder: Path, said: list[str]) -> None:
    with run(Settings(sync="async")) as started:
        net, optimizer = wrapped(adamw)
        kept = started.sessions[0].moments
        assert kept is not None
        stepped(net, optimizer, 2)
        assert kept.kept is False and not folder.exists(), "the first 5 s are not over"
        kept.at_ns -= CHECKPOINT_LEAST_NS
        stepped(net, optimizer, 1)
        assert kept.kept and kept.idle.wait(10.0) and torch.load(kept.path)["clock"] == 2 + 1
        kept.took_ns, kept.at_ns = CHECKPOINT_LEAST_NS, time.monotonic_ns() - 2 * CHECKPOINT_LEAST_NS
        stepped(net, optimizer, 1)
        assert not kept.kept, "writing takes 2 % of the time"
        with torch.no_grad():
            next(iter(optimizer.state.values()))["exp_avg"][0] = float("nan")
        kept.end()
        assert torch.load(kept.path)["clock"] == 3, "nobody wants moments that are no numbers"
        kept.path = Path("/dev/full/narrows-optimizer-0.pt")
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        for _ in range(2):
            kept.kept = False
            kept.end()
    assert [text.partition(": ")[0] for text in said] == ["/dev/full/narrows-optimizer-0.pt was not written"]
    assert said[0].endswith("; training goes on")


def test_checkpoints_at_told_clocks_have_moments_of_the_same(folder: Path) -> None:
    with run(Settings(sync="ssp", checkpoint_clocks=4)) as started:
        net, optimizer = wrapped(adamw)
        kept = started.sessions[0].moments
        assert kept is not None
        clocks = []
        for _ in range(9):
            stepped(net, optimizer, 1)
            assert kept.idle.wait(10.0)
            clocks.append(torch.load(kept.path)["clock"] if kept.path.exists() else 0)
    assert clocks == [0, 0, 0, 4, 4, 4, 4, 8, 8]


def test_each_process_of_a_group_has_its_slice(folder: Path, tmp_path: Path, said: list[str]) -> None:
    """Where the model is cut otherwise, no process takes what it finds."""
    settings = Settings(sync="ssp", shards=2, checkpoint_every=1.0)
    cluster = OnDisk(settings.validated(), tmp_path / "run")

    def first(member: int, rank: int) -> Any:
        net, optimizer = wrapped(adamw)
        stepped(net, optimizer, 5)
        found = states(optimizer)
        here.sessions[member, rank].keep()
        return found

    with groups(settings, [2], cluster) as here:
        before = here.together(first)
        cluster.interrupt()
    files = [torch.load(folder / f"narrows-optimizer-{rank}.pt", weights_only=True) for rank in range(2)]
    assert files[0]["of"]["keys"][1] == files[1]["of"]["keys"][0] > 0
    for size, expected in ((2, before[0, 0]), (3, [])):
        resumed = Settings(sync="ssp", shards=3 if size == 3 else 2, checkpoint_every=1.0)
        with groups(resumed, [size], OnDisk(resumed.validated(), tmp_path / "run", resume=True)) as here:
            after = here.together(lambda member, rank: states(wrapped(adamw)[1]))
        assert all(found == expected for found in after.values())
    assert any("another part of the model" in text for text in said)


def test_whose_state_holds_weights_and_whose_is_on_the_servers_keep_none(folder: Path) -> None:
    class Averaged(torch.optim.SGD):
        def eval(self) -> None: ...

    for settings, make in (
        (Settings(sync="async"), lambda net: [Averaged(net.parameters(), lr=0.1)]),
        (Settings(sync="bsp"), adamw),
    ):
        with run(settings) as started:
            wrapped(make)
            assert started.sessions[0].moments is None


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    with run(Settings(sync="async")) as started:
        net, optimizer = wrapped(adamw)
        stepped(net, optimizer, 2)
        owned = optimizer._engine.changes.owned
        assert started.sessions[0].moments is None
        assert OptimizerStateFile.of(optimizer._engine, owned, lambda: 0, 0, "") is None


def test_what_the_user_has_in_the_folder_and_what_an_earlier_run_left_are_kept(folder: Path, said: list[str]) -> None:
    """Names that a script gives its own checkpoints, and states of ours."""
    folder.mkdir()
    theirs = {name: name.encode() for name in ("optimizer-0.pt", "optimizer-1.pt", "optimizer-best.pt")}
    for name, content in theirs.items():
        (folder / name).write_bytes(content)

    def trained(steps: int) -> Path:
        before = {*folder.iterdir()}
        with run(Settings(sync="async")) as started:
            net, optimizer = wrapped(adamw)
            stepped(net, optimizer, steps)
            started.sessions[0].keep()
        (ours,) = {*folder.iterdir()} - before
        return ours

    path = trained(3)
    assert {name: (folder / name).read_bytes() for name in theirs} == theirs
    kept = trained(5)
    assert [torch.load(each)["clock"] for each in (kept, path)] == [3, 5]
    assert said == [f"an earlier state of an optimizer is kept as {kept}"]
    path.write_bytes(b"another program's")
    with run(Settings(sync="async")) as started:
        net, optimizer = wrapped(adamw)
        stepped(net, optimizer, 4)
        path.write_bytes(b"another program's")
        assert late(started) == []
        started.sessions[1].keep()
    assert b"another program's" in [each.read_bytes() for each in folder.glob(f"{path.name}.*")]
    assert {name: (folder / name).read_bytes() for name in theirs} == theirs


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event, list[int]]]:
    """Hold torch.save until the second event; the first one says that it was called, the list where tensors were."""
    called, go, places, save = threading.Event(), threading.Event(), list[int](), torch.save

    def late(content: Any, path: Path) -> None:
        places.extend(each.data_ptr() for each in tree_leaves(content["state"]) if isinstance(each, torch.Tensor))
        called.set()
        assert go.wait(10.0)
        save(content, path)

    monkeypatch.setattr(torch, "save", late)
    try:
        yield called, go, places
    finally:
        go.set()


def places_of(optimizer: DistributedOptimizer) -> set[int]:
    return {each.data_ptr() for state in optimizer.state.values() for each in state.values()}


def test_a_file_is_written_from_the_optimizers_memory_and_is_of_one_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(Settings(sync="async", checkpoint_clocks=2)) as started, held(monkeypatch) as (called, go, places):
        net, optimizer = wrapped(adamw)
        kept = started.sessions[0].moments
        assert kept is not None
        waits, wait = threading.Event(), kept.settled.wait

        def noted(limit_s: float) -> bool:
            waits.set()
            return wait(limit_s)

        stepped(net, optimizer, 2)
        assert called.wait(10.0) and {*places} == places_of(optimizer), "no tensor is copied"
        before = states(optimizer)
        monkeypatch.setattr(kept.settled, "wait", noted)
        thread = started.aside(lambda: stepped(net, optimizer, 1))
        assert waits.wait(10.0) and states(optimizer) == before
        go.set()
        thread.join(10.0)
        assert kept.idle.wait(10.0) and states(optimizer) != before
        found = torch.load(kept.path, weights_only=True)["state"].values()
        assert [{k: v.tolist() for k, v in state.items()} for state in found] == before


def test_a_step_does_not_wait_for_a_disk_that_takes_no_file(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_state, "SETTLE_S", 0.0)
    with run(Settings(sync="async", checkpoint_clocks=2)) as started, held(monkeypatch) as (called, go, _):
        net, optimizer = wrapped(adamw)
        kept = started.sessions[0].moments
        assert kept is not None
        stepped(net, optimizer, 2)
        assert called.wait(10.0)
        stepped(net, optimizer, 1)
        go.set()
        assert kept.idle.wait(10.0) and not list(folder.iterdir()), "it would have parts of two steps"
        assert [text.partition(": ")[2].partition(";")[0] for text in said] == [
            "the disk took more than 0 s for it, and the next step did not wait"
        ]
        monkeypatch.setattr(optimizer_state, "SETTLE_S", 10.0)
        stepped(net, optimizer, 1)
        assert kept.idle.wait(10.0) and torch.load(kept.path)["clock"] == 4


def test_what_changes_between_two_steps_and_views_are_copied() -> None:
    whole = torch.zeros(8)
    changing = {whole.untyped_storage().data_ptr()}
    of_step = optimizer_state._on_host
    assert of_step(whole, set()).data_ptr() == whole.data_ptr()
    assert of_step(whole, changing).data_ptr() != whole.data_ptr()
    assert of_step(whole[:4], set()).untyped_storage().nbytes() == 16, "else a file has all of a view's memory"
    assert of_step(torch.zeros(1).expand(8), set()).untyped_storage().nbytes() == 32
    assert of_step(3, set()) == 3


def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, set[int]]]:
    """Return a list that has of each call of torch.load whether the file is mapped, and where its tensors are."""
    calls, load = list[tuple[bool, set[int]]](), torch.load

    def noted(*arguments: Any, mmap: bool = False, **named: Any) -> Any:
        content = load(*arguments, mmap=mmap, **named)
        tensors = (each for each in tree_leaves(content["state"]) if isinstance(each, torch.Tensor))
        calls.append((mmap, {each.data_ptr() for each in tensors}))
        return content

    monkeypatch.setattr(torch, "load", noted)
    return calls


def test_a_state_is_read_once_into_the_optimizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of other ranks are mapped, to choose one. The tensors of the one that is read become the optimizer's."""
    with run(Settings(sync="async")) as started:
        net, optimizer = wrapped(adamw)
        stepped(net, optimizer, 9)
        started.sessions[0].keep()
        for rank in (1, 2):
            shutil.copy(folder / "narrows-optimizer-0.pt", folder / f"narrows-optimizer-{rank}.pt")
        calls = loads(monkeypatch)
        started.expire(-1)
        started.join()
        net, optimizer = wrapped(adamw)
        assert [mapped for mapped, _ in calls] == [True, True, True, False]
        assert calls[-1][1] == places_of(optimizer)
        calls.clear()
        found = saved_state(folder, adamw(net), net)["state"]
        assert [mapped for mapped, _ in calls] == [True, True, True, False] and len(found) == len(optimizer.state)
