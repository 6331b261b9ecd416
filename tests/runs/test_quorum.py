"""Rounds that close with a quorum: the rule beside its reference, the engine, clusters below, and real processes."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, Link, store_of
from kit.processes import SCRIPT, finished, serving, started, until
from kit.scripts import Array, build, flat, loss_of, run, tree
from kit.virtual_time import Faults as LinkFaults
from kit.virtual_time import Script, pump, steps
from simulation.actors import PLANS, update_of
from simulation.campaigns import DRAWN_MODES, Run, case_of
from simulation.simulator import MS, Faults, Random

import narrows.worker as narrows
from narrows.compression.codecs import RAW
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import parts
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, ServerEffect
from narrows.ps.coordinator import run as cluster_run
from narrows.ps.coordinator.clocks import GRACE_MAX_NS, GRACE_MIN_NS, Clocks
from narrows.ps.server.server import Server
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.worker import DistributedOptimizer
from narrows.worker.sync.updates import UpdateStep

# The rule, in NumPy and milliseconds, as docs/design/quorum.md has it: updates that are there and in no round yet are open.
# A round closes when every worker has one; or when `quorum` have, and the grace since the last of those is over, which is
# looked at each millisecond. It takes them all, weighted by samples, and an outer step with Nesterov momentum follows.
# Each worker trains from there, for `works` ms, and pushes again.

KEYS = 7
RATE, MOMENTUM = 0.5, 0.5


@dataclass
class Round:
    closed: int
    updates: list[tuple[int, int, int]]  # worker, its update, rounds that it is late
    weights: Array


def samples_of(worker: int, update: int) -> int:
    return 1 + (worker + update) % 3


def reference(works: list[list[int]], quorum: int, grace: float, rounds: int) -> list[Round]:
    """`grace` in ms; -1: a quarter of a round, smoothed by a quarter, 50 ms at least."""
    count = [0 for _ in works]
    due = [0 for _ in works]
    pushes = [float(times[0]) + 0.5 for times in works]  # when the next update of each is there; between two looks
    opened, there, took = 0.0, -1.0, 0.0
    open_: list[int] = []
    done: list[Round] = []
    x, velocity = np.arange(KEYS, dtype=np.float64), np.zeros(KEYS)
    for half in range(200_000):
        now = half / 2
        # Pushes of one moment come in the order of the workers; the last look is that of the tick.
        for comes in [worker for worker in range(len(works)) if pushes[worker] == now] or [-1] * (half % 2 == 0):
            open_ += [comes] if comes >= 0 else []
            if len(open_) >= quorum and there < 0:
                there = now
                took = took + 0.25 * (now - opened - took) if took else now - opened
            window = grace if grace >= 0 else max(50.0, 0.25 * took)
            if not (len(open_) == len(works) or (there >= 0 and now - there >= window)):
                continue
            total = sum(samples_of(worker, count[worker]) for worker in open_)
            mean = np.zeros(KEYS)
            updates = []
            for worker in sorted(open_):
                update = count[worker]
                mean += samples_of(worker, update) / total * update_of(worker, 0, update)
                updates.append((worker, update, len(done) - due[worker]))
                count[worker] += 1
                due[worker] = len(done) + 1
                pushes[worker] = np.floor(now) + works[worker][count[worker]] + 0.5
            velocity = MOMENTUM * velocity + mean
            x = x + RATE * (mean + MOMENTUM * velocity)
            done.append(Round(half, updates, x.astype(np.float32)))
            open_, opened, there = [], now, -1.0
            if len(done) == rounds:
                return done
    raise AssertionError("too few moments")


class Timed(Cluster):
    """Virtual time, and the late updates that were told."""

    now_ns = 0

    def __init__(self, settings: Settings) -> None:
        self.late: list[tuple[int, int, int]] = []
        super().__init__(settings)

    def now(self) -> int:
        return self.now_ns

    def _carry_out(self, index: int, made: Sequence[ServerEffect]) -> None:
        for effect in made:
            if isinstance(effect, e.Log) and effect.event == "late":
                self.late.append(tuple(effect.values[name] for name in ("clock", "worker", "age")))  # type: ignore[arg-type]
        super()._carry_out(index, made)

    def tick(self) -> None:
        with self.changed:
            for index, server in enumerate(self.servers):
                self._apply(index, server.tick(self.now_ns))

    @property
    def clock(self) -> int:
        return min(server.shard.min_clock for server in self.servers)

    def weights(self) -> Array:
        stores = [store_of(server) for server in self.servers]
        return np.concatenate([store.x for store in stores if store is not None])


def held_by(server: Server) -> dict[int, Any]:
    """Updates that wait for a set."""
    assert server.shard.model_shard is not None and isinstance(server.shard.model_shard.folding, FoldAtBarrier)
    return server.shard.model_shard.folding.held


@dataclass
class Pusher:
    """A worker by its messages: pushes updates, and asks after each for the state that its next one needs."""

    cluster: Timed
    index: int
    ranges: tuple[tuple[int, int], ...] = ()
    clock: int = 0
    states: dict[int, list[m.State]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.link = Link(self.cluster, f"w{self.index}")
        self.link.call(lambda member, now: member.declare(PLANS[0.0], now))

    def hear(self) -> bool:
        """Whether the states for the next update are there."""
        while self.link.events:
            event = self.link.events.popleft()
            if isinstance(event, e.MemberStarted):
                self.ranges, self.clock = event.ranges, event.clock
                self._pull()
            elif isinstance(event, e.GiveWeights):
                self._give_weights(event.shard)
            elif isinstance(event, e.StateArrived):
                self.states[event.shard] = list(event.parts)
        return len(self.states) == len(self.ranges) > 0

    def _give_weights(self, shard: int) -> None:
        (begin, end), member = self.ranges[shard], self.link.member
        raw = np.arange(KEYS, dtype=np.float32)[begin:end].tobytes()
        first = m.FirstWeights(member.worker, member.epoch, 0, 1, begin, end, RAW, raw)
        self._send(shard, [first])

    def _ask(self, shard: int) -> None:
        member = self.link.member
        self._send(shard, [m.Follow(member.worker, member.epoch, self.clock, -1, 1)])

    def _pull(self) -> None:
        self.states = {}
        for shard in range(len(self.ranges)):
            self._ask(shard)

    def _send(self, shard: int, messages: Sequence[m.Message]) -> None:
        self.link.call(lambda member, now: member.send(shard, messages, now))

    def push(self) -> None:
        values = update_of(self.index, 0, self.clock)
        for shard, (begin, end) in enumerate(self.ranges):
            cuts = list(enumerate(parts(begin, end, 2)))
            pushes = [
                m.Push(self.link.member.worker, self.link.member.epoch, self.clock, i, len(cuts), b, stop,
                       samples_of(self.index, self.clock), b"", RAW, values[b:stop].tobytes())
                for i, (b, stop) in cuts
            ]  # fmt: skip
            self._send(shard, pushes)
        self.clock += 1
        self._pull()


def begin(cluster: Timed, pushers: list[Pusher]) -> None:
    """Until every one has the states for its first update."""
    while sum(pusher.hear() for pusher in pushers) < len(pushers):
        cluster.tick()


def machines(works: list[list[int]], quorum: int, grace: float, rounds: int) -> tuple[list[Round], Timed]:
    """The same rounds from the real coordinator, shards, members: two shards, and a tick each millisecond."""
    cluster = Timed(
        Settings(sync="local", workers=len(works), shards=2, quorum=quorum, outer_lr=RATE, outer_momentum=MOMENTUM,
                 grace=grace if grace < 0 else grace / 1000, lease=1000.0)
    )  # fmt: skip
    pushers = [Pusher(cluster, index) for index in range(len(works))]
    begin(cluster, pushers)
    pushes: list[float | None] = [float(times[0]) + 0.5 for times in works]
    done: list[Round] = []

    def look(half: int) -> None:
        """Take down a round that has closed; who was in it begins the next."""
        if cluster.clock == len(done):
            return
        assert cluster.clock == len(done) + 1
        late = {worker: age for clock, worker, age in cluster.late if clock == len(done)}
        updates = []
        for worker, pusher in enumerate(pushers):
            if pushes[worker] is None and pusher.hear():
                updates.append((worker, pusher.clock - 1, late.get(worker, 0)))
                pushes[worker] = half // 2 + works[worker][pusher.clock] + 0.5
                states = [state for _, parts in sorted(pusher.states.items()) for state in parts]
                seen = np.concatenate([np.frombuffer(state.payload, np.float32) for state in states])
                np.testing.assert_array_equal(seen, cluster.weights())
                assert (states[-1].min_clock, states[-1].settled) == (len(done) + 1, pusher.clock)
        done.append(Round(half, updates, cluster.weights().copy()))

    for half in range(200_000):
        cluster.now_ns = half * MS // 2
        for worker, pusher in enumerate(pushers):
            if pushes[worker] == half / 2:
                pushes[worker] = None
                pusher.push()
                look(half)
        if half % 2 == 0:
            cluster.tick()
            look(half)
        if len(done) >= rounds:
            return done[:rounds], cluster
    raise AssertionError("too few rounds")


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_those_of_the_reference(seed: int) -> None:
    generator = Random(seed)
    workers = generator.between(2, 5)
    quorum, grace = generator.between(1, workers), (-1.0, 0.0, 17.25, 90.25)[seed % 4]
    slow = [generator.between(1, 4) if generator.chance(0.5) else 1 for _ in range(workers)]
    works = [[slow[worker] * generator.between(60, 160) for _ in range(40)] for worker in range(workers)]
    expected = reference(works, quorum, grace, 25)
    rounds, _ = machines(works, quorum, grace, 25)
    assert [(r.closed, r.updates) for r in rounds] == [(r.closed, r.updates) for r in expected]
    for mine, right in zip(rounds, expected, strict=True):
        np.testing.assert_allclose(mine.weights, right.weights, rtol=2e-5, atol=2e-5)


def test_one_ten_times_slower_costs_the_others_a_grace_and_is_in_the_model() -> None:
    works = [[400] * 60, [420] * 60, [4100] * 60]
    rounds, cluster = machines(works, 2, -1.0, 40)
    lengths = [(after.closed - before.closed) / 2 for before, after in pairwise(rounds)]
    assert max(lengths) <= 420 * 1.25 + 2 < 4100
    slow = [(clock, age) for clock, worker, age in cluster.late if worker == 2]
    assert len(slow) >= 3 and all(6 <= age <= 10 for _, age in slow)
    assert not [who for _, who, _ in cluster.late if who != 2], "a grace is long enough for those who are alike"


def test_a_quorum_of_all_waits_for_all_and_so_does_none() -> None:
    works = [[100] * 9, [300] * 9, [200] * 9]
    all_three, cluster = machines(works, 3, 0.0, 6)
    assert not cluster.late
    assert [r.updates for r in all_three] == [[(w, i, 0) for w in range(3)] for i in range(6)]
    assert [r.closed for r in all_three] == [601 + 600 * i + 0 for i in range(6)]


def test_the_adaptive_grace_is_a_quarter_of_a_round_within_limits() -> None:
    def rounds(**flags: Any) -> Clocks:
        return Clocks(cluster_run.Run(Settings(sync="local", workers=4, quorum=2, **flags).validated(), 1, -1))

    machine = rounds(lease=20.0)
    machine.open(0)
    assert machine.grace_ns == GRACE_MIN_NS
    assert not machine._grace_over(1, 8 * NS) and machine.round_ns == 0, "there is no quorum"
    assert not machine._grace_over(2, 8 * NS)
    assert (machine.round_ns, machine.grace_ns) == (8 * NS, 2 * NS)
    assert not machine._grace_over(3, 10 * NS - 1) and machine._grace_over(2, 10 * NS)
    machine.quorum_ns = -1
    machine._grace_over(2, 12 * NS)
    assert machine.round_ns == 9 * NS, "smoothed by a quarter"
    machine.round_ns = 1000 * NS
    assert machine.grace_ns == 20 * NS, "a lease"
    machine = rounds(lease=1000.0)
    machine.round_ns = 1000 * NS
    assert machine.grace_ns == GRACE_MAX_NS
    assert rounds(grace=0.0).grace_ns == 0
    assert rounds(grace=2.5).grace_ns == 2.5 * NS


def test_a_worker_that_dies_with_its_update_on_all_shards_is_in_the_next_round_and_else_in_none() -> None:
    cluster = Timed(Settings(sync="local", workers=3, shards=2, quorum=2, grace=0.0, lease=1000.0))
    pushers = [Pusher(cluster, index) for index in range(3)]
    begin(cluster, pushers)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None
    pushers[2].push()
    pushers[2].link.call(lambda member, now: member.leave(-1, now))
    assert cluster.clock == 0 and coordinator.clocks.departed == {2: 0}
    pushers[0].push()
    assert cluster.clock == 1 and not coordinator.clocks.departed, "the update of a worker that has left counts"
    assert not any(map(held_by, cluster.servers))
    # A second one, whose push reaches shard 0 alone.
    cluster.heard[1] = lambda *arguments: []
    pushers[1].push()
    del cluster.heard[1]
    assert held_by(cluster.servers[0])
    pushers[1].link.call(lambda member, now: member.leave(-1, now))
    assert not coordinator.clocks.departed and not held_by(cluster.servers[0])
    assert [server.shard.assembler.discarded for server in cluster.servers] == [1, 0]


# The simulated cluster, without faults: what a slow worker costs.


def test_in_the_simulator_a_slow_worker_costs_no_more_than_the_grace() -> None:
    case = next(c for c in map(case_of, range(len(DRAWN_MODES) - 1, 200, len(DRAWN_MODES))) if c.settings.workers == 4)
    settings = replace(case.settings, quorum=3, grace=0.01, checkpoint_every=0.0)
    step_ns = (40 * MS, 40 * MS, 40 * MS, 400 * MS)
    case = replace(case, settings=settings, faults=Faults(delay_ns=(MS, MS)), step_ns=step_ns, crash=None, cut=None)
    checker = Run(case).run().checker
    slow = [(clock, age) for worker, clock, age in checker.late if age > 1]
    assert slow and len({worker for worker, _, age in checker.late if age > 1}) == 1
    waits = Run(replace(case, settings=replace(settings, quorum=-1, grace=-1.0))).run()
    hurries = Run(case).run()
    assert hurries.sim.now_ns < waits.sim.now_ns / 2


# The engine.

GATE_S = 30.0


def test_a_late_worker_goes_on_from_the_run() -> None:
    """Two go on for five rounds while the third computes; its update joins the sixth, and it is where they are."""
    settings = Settings(sync="local", local_steps=2, workers=3, shards=2, quorum=2, grace=0.0, compress="topk:0.3+int8")
    joined, ahead, pushed = threading.Barrier(3), threading.Barrier(3), threading.Event()
    told: list[tuple[int, int]] = []

    with run(settings) as started_:
        coordinator = started_.cluster.servers[0].coordinator
        assert coordinator is not None

        def script(worker: int) -> tuple[int, int, Array]:
            net = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net)
            session = started_.sessions[worker]

            def rounds(count: int) -> None:
                for _ in range(2 * count):
                    optimizer.zero_grad()
                    loss_of(net, narrows.step_count(), worker, 3).backward()
                    optimizer.step()

            joined.wait(GATE_S)  # two are a quorum, and would not wait for the third
            if worker < 2:
                rounds(5)
                assert (narrows.clock(), narrows.step_count()) == (5, 10)
            ahead.wait(GATE_S)
            if worker == 2:
                assert narrows.clock() == 0
                rounds(1)  # waits for the set that takes its update
                assert session.engine is not None and isinstance(session.engine.sync, UpdateStep)
                told.append((session.engine.sync.shards.missed, narrows.clock()))
                pushed.set()
            elif worker == 0:
                held = held_by(started_.cluster.servers[1])
                until(lambda: any(2 in by for by in list(held.values())), "the late update")
                rounds(1)  # its own update and the late one are a quorum
            assert pushed.wait(GATE_S)
            ahead.wait(GATE_S)
            optimizer.finish()
            with optimizer.shared():
                return narrows.clock(), narrows.step_count(), flat(net)

        results = started_.together(script)
        assert told == [(5, 6)]
        assert coordinator.min_clock >= 7
        for session in started_.sessions:
            session.close(failed=False)
    assert all(np.isfinite(weights).all() for *_, weights in results)


def test_all_of_them_train_and_end_whoever_is_late() -> None:
    settings = Settings(sync="local", local_steps=1, workers=3, shards=2, quorum=1, grace=0.0, outer_lr=0.5,
                        outer_momentum=0.0, compress="topk:0.2+int8", compress_down="int8")  # fmt: skip
    with run(settings) as started_:

        def script(worker: int) -> float:
            net = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2), net)
            while narrows.clock() < 60:
                optimizer.zero_grad()
                loss_of(net, 0).backward()
                optimizer.step()
            optimizer.finish()
            with optimizer.shared(), torch.no_grad():
                return float(loss_of(net, 0))

        before = float(loss_of(build(), 0).detach())
        losses = started_.together(script)
        for session in started_.sessions:
            session.close(failed=False)
    assert max(losses) < 0.7 * before


def test_a_cluster_may_be_late_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards push one update under one number, and every update of both clusters is in the root once."""
    root = Cluster(Settings(sync="local", local_steps=1, workers=2, shards=2, quorum=1, grace=0.0, compress="topk:0.3"))
    clusters = [Cluster(Settings(sync="bsp", shards=2, workers=1), root, f"cluster{index}") for index in range(2)]
    coordinator = root.servers[0].coordinator
    assert coordinator is not None
    taken: dict[int, list[int]] = {0: [], 1: []}
    close = Clocks._close

    def closes(rounds: Clocks, now_ns: int) -> None:
        clock = rounds.min_clock
        close(rounds, now_ns)
        for worker, update in rounds.sets[clock] if rounds is root_rounds else ():
            taken[worker].append(update)

    root_rounds = coordinator.clocks
    monkeypatch.setattr(Clocks, "_close", closes)
    first_done = threading.Event()

    with tree(root, *clusters) as started_:

        def script(worker: int) -> Array:
            net = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net)
            for step in range(12):
                if worker == 1 and step == 3:
                    assert first_done.wait(GATE_S)
                optimizer.zero_grad()
                loss_of(net, step, worker, 2).backward()
                optimizer.step()
                if worker == 0 and step == 9:
                    first_done.set()
            optimizer.finish()
            with optimizer.shared():
                return flat(net)

        models = started_.together(script)
        for session in started_.sessions:
            session.close(failed=False)
    assert all(np.isfinite(model).all() for model in models)
    for own in taken.values():
        assert own == list(range(own[0], own[0] + len(own))) and len(own) >= 12
    assert coordinator.min_clock >= 12


@pytest.mark.parametrize(("number", "deep"), [(0, True), (1, False), (2, True)])
def test_a_bad_link_between_levels_with_quorums_loses_nothing(number: int, deep: bool) -> None:
    """All end; each cluster's shards have pushed alike, and each set above had the next of its member's updates."""
    rng = random.Random(number)
    quorum = Settings(
        sync="local", local_steps=2, workers=2, shards=2, quorum=1, grace=0.3 * number, compress="topk:0.3"
    )
    root = Cluster(replace(quorum, workers=1, quorum=1) if deep else quorum)
    middle = [Cluster(replace(quorum, local_steps=1), root, "middle")] if deep else []
    leaves = [Cluster(quorum, (middle or [root])[0], f"leaf{index}") for index in range(2)]
    everyone, faults = [root, *middle, *leaves], LinkFaults(rng, 0.05)
    for child in (*middle, *leaves):
        faults.between(child)

    def done() -> bool:
        with root.changed:
            faults.some()
        return all(script.ended for script in scripts)

    with tree(root, *leaves) as started_:
        scripts = [Script(started_, session, lambda: steps(12)) for session in range(len(started_.sessions))]
        assert pump(started_, everyone, done), [server.shard.ledger for c in everyone for server in c.servers]
    assert [script.error for script in scripts] == [None] * len(scripts)
    assert all(np.isfinite(script.result).all() for script in scripts)
    for child in (*middle, *leaves):
        assert len({seat.clock if (seat := server.shard.parent_slot.seat) else -1 for server in child.servers}) == 1
    assert not any(server.shard.assembler.discarded for c in everyone for server in c.servers)


# Processes.


def test_three_processes_one_of_them_slow(tmp_path: Path) -> None:
    """The fast two wait for a grace, not for the slow one, which is late, in the record and on the console."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % "time.sleep(0.2 if rank() == 2 else 0.02)")
    flags = ("--sync", "local", "--local-steps", "5", "--workers", "3", "--shards", "2", "--quorum", "2")
    record = tmp_path / "run.jsonl"
    with (
        serving(*flags, "--grace", "0.05") as server,
        started(
            "ps-worker", "--server", server.address, "-n", "3", "--record", str(record), str(script), "100"
        ) as work,
    ):
        assert work.wait() == 0, work
        assert "came late and is in clock" in server.command.err + server.command.out
    events = [json.loads(line) for line in record.read_text().splitlines()]
    ages: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events:
        if event["event"] == "late":
            ages[event["local_rank"]].append(event["age"])
    slow = max(ages, key=lambda worker: sum(ages[worker]))  # local ranks, not ranks
    assert max(ages[slow]) >= 2, ages
    fast = [event for event in events if event["event"] == "step" and event["local_rank"] == (slow + 1) % 3]
    waits = [event["wait_seconds"] for event in fast if event["clock"] <= 15]
    assert max(event["clock"] for event in fast) >= 20
    assert median(waits[4::5]) < 0.5, "a round of the slow one takes a second"


def test_help_and_refusals_of_the_commands() -> None:
    code, _, err = finished("ps-serve", "--sync", "bsp", "--quorum", "1")
    assert code == 2 and "--quorum 1: --sync bsp has no barrier of local rounds" in err
    code, out, _ = finished("ps-worker", "--help")
    assert code == 0 and "--quorum" in out and "--grace" in out
