"""A run whose first steps are bsp with pushed gradients, and whose others are in another mode (--start-steps)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.groups import groups
from kit.in_process import THREAD, store_of
from kit.on_disk import OnDisk
from kit.one_process import until
from kit.scripts import build, flat, loss_of, run

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.worker import DistributedOptimizer, clock, rank, step_count, world_size

pytestmark = pytest.mark.usefixtures("one_thread")

START, STEPS = 5, 11
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "plain": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
}
MODES: dict[str, dict[str, Any]] = {
    "ssp": {"sync": "ssp", "staleness": 2, "compress": "topk:0.2+int8"},
    "async": {"sync": "async"},
    "local": {"sync": "local", "local_steps": 2},
    "fragments": {"sync": "local", "local_steps": 4, "fragments": 2, "merge_delay": 1},
    "stale": {"sync": "local", "local_steps": 3, "staleness": 1},
    "quorum": {"sync": "local", "local_steps": 2, "quorum": 1},
    "updates": {"sync": "bsp", "push": "update"},
}


@contextmanager
def ticking(cluster: OnDisk, started: Any) -> Iterator[None]:
    """Let the time of servers and members go on, so that they repeat what was not answered."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.05):
            for session in [*started.sessions]:
                session.link.call(lambda member, now_ns: member.tick(now_ns))
            with cluster.changed:
                for index, server in enumerate([*cluster.servers]):
                    cluster._apply(index, server.tick(cluster.now()))

    thread = threading.Thread(target=tick, daemon=True, name=THREAD)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def kept(optimizer: Any) -> list[dict[str, Any]]:
    """Copies of the optimizer's own state, in the order of its parameters."""
    inner = optimizer.inner
    return [
        {name: value.clone() if torch.is_tensor(value) else value for name, value in inner.state[p].items()}
        for group in inner.param_groups
        for p in group["params"]
        if p in inner.state
    ]


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b)) if a is not None and b is not None else a is b

    return len(ours) == len(theirs) and all(
        one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
        for one, other in zip(ours, theirs, strict=True)
    )


class Traced:
    """What each worker saw: its weights by step, and its optimizer's own state before the first step after the start."""

    def __init__(self, make: Any, steps: int = STEPS, **more: Any) -> None:
        self.make, self.steps, self.more = make, steps, more
        self.weights: dict[tuple[int, int], Any] = {}  # of the first steps, by rank and step
        self.taken: dict[int, list[dict[str, Any]]] = {}

    def __call__(self, worker: int, ends: bool = True, at: Callable[[int], object] = bool) -> Any:
        net = build()
        optimizer = DistributedOptimizer(self.make(net), net, **self.more)
        mine = rank()
        while step_count() < self.steps:
            number = step_count()
            self.weights[mine, number] = flat(net)
            optimizer.zero_grad()
            loss_of(net, number, mine, world_size()).backward()
            if number == START:
                optimizer.state_dict()  # waits for the plan after the start
                self.taken[mine] = kept(optimizer)
            optimizer.step()
            at(number + 1)
        if not ends:
            return flat(net)
        optimizer.finish()
        with optimizer.shared():
            return flat(net)


def of_bsp(make: Any, shards: int, compress: str, workers: int = 2, **more: Any) -> tuple[dict[Any, Any], Any]:
    """The weights of a plain run of bsp, and the state that the servers' optimizer has after START steps."""
    found: dict[Any, Any] = {}

    def script(worker: int) -> Any:
        net = build()
        optimizer = DistributedOptimizer(make(net), net, **more)
        for number in range(START):
            found[worker, number] = flat(net)
            optimizer.zero_grad()
            loss_of(net, number, worker, workers).backward()
            optimizer.step()
        found[worker, START] = flat(net)
        return optimizer.state_dict(servers=True)

    with run(Settings(sync="bsp", workers=workers, shards=shards, compress=compress)) as started:
        states = started.together(script)
    return found, [state for _, state in sorted(states[0]["state"].items())]


def check(settings: Settings, traced: Traced, before: dict[Any, Any], state: Any) -> None:
    """The first steps are those of bsp, and each worker has the state of its servers' optimizer, bit for bit.

    Without a barrier that waits for all, the weights after the start may have the first update of another worker, but not
    in the worker that is the first to have them.
    """
    equal = {at: np.array_equal(traced.weights[at], weights) for at, weights in before.items()}
    mode = settings.validated().mode()
    if not mode.barrier or settings.quorum > 0:
        relaxed = [equal.pop(at) for at in [*equal] if at[1] == START]
        assert any(relaxed)
    assert all(equal.values()), [
        f"rank {at[0]}, step {at[1]}" for at, same_weights in equal.items() if not same_weights
    ]
    assert len(traced.taken) == settings.workers
    for taken in traced.taken.values():
        assert same(taken, state)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_first_steps_are_bsp_and_workers_take_the_moments_over(mode: str, shards: int, tmp_path: Path) -> None:
    settings = Settings(workers=2, shards=shards, start_steps=START, start_compress="int4", **MODES[mode])
    before, state = of_bsp(OPTIMIZERS["adamw"], shards, "int4")
    traced, cluster = Traced(OPTIMIZERS["adamw"]), OnDisk(settings, tmp_path)
    with run(settings, cluster) as started:
        ends = started.together(traced)
    check(settings, traced, before, state)
    assert len(state) == 6 and all(one["step"] == START for one in state)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None
    now = coordinator.run.settings
    assert (now.plan_number, now.start_clock, now.sync) == (2, START, MODES[mode]["sync"])
    assert replace(now, plan_number=1, start_clock=-1) == settings.validated(), "the flags hold in the rest of the run"
    assert np.array_equal(ends[0], ends[1])
    assert not any(store_of(server).handover for server in cluster.servers), "dropped once all workers have it"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 0.5}, {"overlap": True}])
def test_each_optimizer_goes_on_where_its_servers_were(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(sync="ssp", workers=2, shards=2, start_steps=START)
    before, state = of_bsp(OPTIMIZERS[name], 2, "dense", **more)
    traced = Traced(OPTIMIZERS[name], **more)
    with run(settings, OnDisk(settings, tmp_path)) as started:
        started.together(traced)
    check(settings, traced, before, state)


class Halves:
    """A run that is stopped before step `stop`, and resumed."""

    def __init__(self, settings: Settings, folder: Path, stop: int, make: Any = OPTIMIZERS["adamw"]) -> None:
        first, cluster = Traced(make, stop), OnDisk(settings, folder)
        with run(settings, cluster) as started:
            started.together(lambda worker: first(worker, ends=False))
            cluster.interrupt()
        self.cluster, second = OnDisk(settings, folder, resume=True), Traced(make)
        coordinator = self.cluster.servers[0].coordinator
        assert coordinator is not None
        self.begun = coordinator.run.settings
        with run(settings, self.cluster) as started:
            self.ends = started.together(second)
        self.traced = Traced(make)
        self.traced.weights = second.weights | first.weights
        self.traced.taken = first.taken | second.taken


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stop", [2, START - 1, START])
def test_a_run_that_is_resumed_in_its_start_goes_on_with_it(stop: int, shards: int, tmp_path: Path) -> None:
    settings = Settings(sync="ssp", workers=2, shards=shards, start_steps=START)
    before, state = of_bsp(OPTIMIZERS["adamw"], shards, "dense")
    halves = Halves(settings, tmp_path, stop)
    assert halves.begun.starting == (stop < START)
    check(settings, halves.traced, before, state)
    assert halves.begun.starting or (halves.begun.start_clock, halves.begun.sync) == (START, "ssp")
    assert np.array_equal(*halves.ends)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_that_is_resumed_after_its_start_has_none(shards: int, tmp_path: Path) -> None:
    settings = Settings(sync="ssp", workers=2, shards=shards, start_steps=START)
    halves = Halves(settings, tmp_path, START + 3)
    assert (halves.begun.starting, halves.begun.start_clock, halves.begun.sync) == (False, START, "ssp")
    assert np.array_equal(*halves.ends)


def test_a_run_that_had_no_start_is_resumed_without_one(tmp_path: Path) -> None:
    plain = Settings(sync="ssp", workers=2, shards=2)
    cluster = OnDisk(plain, tmp_path)
    with run(plain, cluster) as started:
        started.together(lambda worker: Traced(OPTIMIZERS["adamw"], 3)(worker, ends=False))
        cluster.interrupt()
    for sync, starts in (("ssp", False), ("bsp", True)):
        from_bsp = tmp_path / sync
        if starts:
            cluster = OnDisk(Settings(sync="bsp", workers=2, shards=2), from_bsp)
            with run(cluster.settings, cluster) as started:
                started.together(lambda worker: Traced(OPTIMIZERS["adamw"], 3)(worker, ends=False))
                cluster.interrupt()
        again = OnDisk(replace(plain, start_steps=START), from_bsp if starts else tmp_path, resume=True)
        coordinator = again.servers[0].coordinator
        assert coordinator is not None and coordinator.run.settings.starting is starts
        assert coordinator.run.settings.sync == ("bsp" if starts else "ssp")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("late", [2, START, START + 3])
def test_a_late_joiner_has_the_plan_of_its_clock(late: int, shards: int, tmp_path: Path) -> None:
    """One that joins in the start takes part in it, and takes the moments over; a later one begins in the new mode."""
    settings = Settings(sync="ssp", workers=1, shards=shards, start_steps=START)
    traced, cluster, started_at = Traced(OPTIMIZERS["adamw"], STEPS + 4), OnDisk(settings, tmp_path), list[Any]()
    joined, gone_on = threading.Event(), threading.Event()

    def first(worker: int) -> Any:
        def at(number: int) -> None:
            if number == late:
                joined.set()
                gone_on.wait(20)

        return traced(worker, at=at)

    def second() -> None:
        net = build()
        optimizer = DistributedOptimizer(traced.make(net), net)
        begun, state = clock(), None
        gone_on.set()
        while step_count() < traced.steps:
            number = step_count()
            optimizer.zero_grad()
            loss_of(net, number, 1, 2).backward()
            if number == START:
                optimizer.state_dict()
                state = kept(optimizer)
            optimizer.step()
        engine = optimizer._engine
        assert engine is not None
        started_at.append((begun, state, engine.swaps))
        optimizer.finish()

    with run(settings, cluster) as started, ticking(cluster, started):

        def joiner() -> None:
            joined.wait(20)
            started.join()
            second()

        thread = threading.Thread(target=joiner, daemon=True, name=THREAD)
        thread.start()
        started.together(first)
        thread.join(60)
    ((begun, state, swaps),) = started_at
    assert begun >= late
    if begun < START:
        assert swaps == 1 and same(state, traced.taken[0]) and len(state) == 6
    elif begun > START:
        assert swaps == 0
    assert len(traced.taken[0]) == 6


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("at", [2, START - 1, START, START + 2])
def test_a_worker_whose_lease_ends_comes_back_in_the_plan_of_the_run(at: int, shards: int, tmp_path: Path) -> None:
    settings = Settings(sync="ssp", workers=2, shards=shards, start_steps=START)
    traced, cluster = Traced(OPTIMIZERS["adamw"]), OnDisk(settings, tmp_path)
    with run(settings, cluster) as started, ticking(cluster, started):

        def script(worker: int) -> Any:
            def expire(number: int) -> None:
                if worker == 1 and number == at and not expired:
                    expired.append(number)
                    started.expire(1)
                elif worker == 1 and expired:
                    back.set()
                if worker == 0 and number == START + 3:
                    back.wait(20)  # else the run may be over before the other one is back

            return traced(worker, at=expire)

        back = threading.Event()
        expired: list[int] = []
        ends = started.together(script)
    assert expired == [at] and np.array_equal(*ends)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None and coordinator.run.settings.start_clock == START
    assert len(traced.taken[0]) == 6, "rank 0 has stayed"
    if traced.taken.get(1):
        assert same(traced.taken[1], traced.taken[0])


@pytest.mark.parametrize("steps", [START - 1, START, START + 1])
def test_a_run_may_end_at_the_end_of_its_start(steps: int, tmp_path: Path) -> None:
    settings = Settings(sync="ssp", workers=2, shards=2, start_steps=START)
    before, _ = of_bsp(OPTIMIZERS["adamw"], 2, "dense")
    cluster = OnDisk(settings, tmp_path)
    with run(settings, cluster) as started:
        ends = started.together(Traced(OPTIMIZERS["adamw"], steps))
    assert np.array_equal(*ends)
    if steps <= START:
        assert np.array_equal(ends[0], before[0, steps])


def test_keys_may_move_as_the_start_ends(tmp_path: Path) -> None:
    settings = Settings(sync="ssp", workers=2, shards=3, start_steps=START)
    before, state = of_bsp(OPTIMIZERS["adamw"], 3, "dense")
    counts = list[int]()
    for when in range(START - 2, START + 1):
        traced, cluster = Traced(OPTIMIZERS["adamw"]), OnDisk(settings, tmp_path / str(when))
        with run(settings, cluster) as started:

            def script(worker: int, cluster: Any = cluster, traced: Any = traced, when: int = when) -> Any:
                return traced(worker, at=lambda number: cluster.move(2) if (worker, number) == (0, when) else None)

            ends = started.together(script)
        assert np.array_equal(*ends)
        check(settings, traced, before, state)
        coordinator = cluster.servers[0].coordinator
        assert coordinator is not None and coordinator.run.settings.start_clock == START
        counts.append(coordinator.run.shards)
    assert 2 in counts, "the others came while the plan was about to change"


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_processes_of_a_group_take_their_slices_over(name: str, tmp_path: Path) -> None:
    def states(settings: Settings, folder: str, servers: bool) -> list[Any]:
        """The state of each process of a group, or that of its servers' optimizer, after START steps."""

        def script(member: int, rank_: int) -> Any:
            net, found = build(), list[Any]()
            optimizer = DistributedOptimizer(OPTIMIZERS[name](net), net)

            def at(worker: int, step: int) -> None:
                if step == START:
                    found.append(list(optimizer.state_dict(servers=servers)["state"].values()))

            until(STEPS, at)(net, optimizer, rank_, 2)
            optimizer.finish()
            return found[0]

        with groups(settings, [2], OnDisk(settings, tmp_path / folder)) as here:
            return [*here.together(script).values()]

    taken = states(Settings(sync="ssp", shards=2, start_steps=START), "start", servers=False)
    state, _ = states(Settings(sync="bsp", shards=2), "bsp", servers=True)
    assert len(taken) == 2 and len(state) > 0
    for found in taken:
        assert same(found, state)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"start_steps": 0}, r"--start-steps 0: give a value from 1 to"),
        ({"start_steps": -5}, r"--start-steps -5: give a value from 1 to"),
        ({"sync": "bsp"}, "--start-steps 5: --sync bsp pushes gradients in all steps here; name the mode"),
        ({"push": "gradient"}, "--start-steps 5: --sync ssp pushes gradients in all steps here; name the mode"),
        ({"sync": "gossip"}, "--start-steps 5: under --sync gossip workers hold the model"),
        ({"dp_clip": 1.0}, "--start-steps 5: --dp-clip 1 is the length of an update"),
        ({"start_compress": "auto"}, "--start-compress auto: the start is too short for a choice; name a SPEC"),
        (
            {"start_steps": -1, "start_compress": "int8"},
            "--start-compress int8: it codes the gradients of --start-steps",
        ),
    ],
)
def test_a_start_that_cannot_be_is_refused_in_a_sentence(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Settings(**{"start_steps": START, **flags}).validated()


def test_a_server_must_know_the_optimizer() -> None:
    class Own(torch.optim.AdamW):
        pass

    def script(worker: int) -> None:
        net = build()
        with pytest.raises(
            UsageError, match=r"--start-steps needs an optimizer that the server can rebuild, but .*Own"
        ):
            DistributedOptimizer(Own(net.parameters(), lr=1e-3), net)

    with run(Settings(workers=1, start_steps=START)) as started:
        started.together(script)


def test_what_comes_after_a_start_is_checked() -> None:
    settings = Settings(start_steps=START, start_compress="int4").validated().begun()
    assert (settings.sync, settings.push, settings.compress, settings.compress_down) == (
        "bsp",
        "gradient",
        "int4",
        "dense",
    )
    assert Settings.unpacked(settings.packed()) == settings and "until step 5" in settings.summary()
    assert settings.begun() is settings and settings.flagged().begun() == settings
    after = settings.relaxed(START)
    assert after.follows(settings) and after.flagged() is after and not after.starting and after.plan_number == 2
    assert not replace(after, lease=3.0).follows(settings)
    assert [after.steps_at(at) for at in (0, START, START + 2)] == [0, START, START + 2]
    local = Settings(sync="local", local_steps=4, start_steps=START).validated().begun().relaxed(START)
    assert [local.steps_at(at) for at in (3, START, START + 2)] == [3, START, START + 8]
    assert local.back_at(START - 1).starting and local.back_at(START) is local
    for rest in ("{", "[]", '{"sync": "ssp"}', json.dumps(json.loads(settings.rest) | {"sync": "bsp", "push": ""})):
        with pytest.raises(RemoteProtocolError, match="settings are not valid"):
            Settings.unpacked(replace(settings, rest=rest).packed())


def test_a_run_that_is_resumed_after_its_start_goes_on_with_the_states_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any run with `ps-worker --checkpoint-dir`; in the start there is no state to keep."""
    folder = tmp_path / "states"
    monkeypatch.setenv("NARROWS_CHECKPOINT_DIR", str(folder))
    settings = Settings(sync="ssp", workers=2, shards=2, start_steps=START, checkpoint_every=1.0)

    def script(worker: int, steps: int, started: Any) -> Any:
        net = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["adamw"](net), net)
        begun = kept(optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(net, step_count(), worker, 2).backward()
            optimizer.step()
        started.sessions[worker].keep()
        return begun, kept(optimizer)

    cluster = OnDisk(settings, tmp_path / "run")
    with run(settings, cluster) as started:
        before = started.together(lambda worker: script(worker, START + 2, started))
        cluster.interrupt()
    assert all(not begun and len(state) == 6 for begun, state in before)
    assert {path.name for path in folder.iterdir()} == {"narrows-optimizer-0.pt", "narrows-optimizer-1.pt"}
    with run(settings, OnDisk(settings, tmp_path / "run", resume=True)) as started:
        after = started.together(lambda worker: script(worker, 0, started))
    assert all(same(begun, state) for (begun, _), (_, state) in zip(after, before, strict=True))


def test_after_the_end_nothing_is_taken_over(tmp_path: Path) -> None:
    settings = Settings(sync="ssp", workers=1, shards=2, start_steps=START)

    def script(worker: int) -> Any:
        net = build()
        optimizer = DistributedOptimizer(OPTIMIZERS["adamw"](net), net)
        for number in range(START):
            optimizer.zero_grad()
            loss_of(net, number).backward()
            optimizer.step()
        optimizer.finish()
        return optimizer.state_dict()["state"]

    with run(settings, OnDisk(settings, tmp_path)) as started:
        assert started.together(script) == [{}]
