"""A whole cluster in virtual time: the real servers and members, a scripted worker, a disk, and every fault by a seed.

    Run(case_of(seed)).run()        raises Violation where an invariant does not hold (tests/invariants.py)

Rules
- `Case` says all of a run; it follows from the seed alone, so a seed replays exactly.
- The scripted worker stands where worker/engine.py stands and keeps its rules: it computes with clock c only on states
  with min_clock >= c - s, keeps at most a window in flight, asks one clock ahead where s > 0, and begins anew when told.
- `Process` stands where ps/runner.py stands: it carries out effects and has no rule of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from invariants import Checker, FloatArray, Violation

from narrows.compression import accumulate
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.coordinator import Coordinator
from narrows.protocols.effects import NS, MemberEffect, ServerEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.keys import Plan, TensorSpec, parts
from narrows.protocols.member import Member, Timing
from narrows.protocols.modes import Rule, Settings
from narrows.protocols.simulator import MS, Faults, Random, Simulator
from narrows.protocols.wire import decode, encode, pack, unpack
from narrows.ps.checkpoints import KEPT
from narrows.ps.server import Server
from narrows.ps.shard import COORDINATOR, Shard

CLOCKS = 20
KEYS = 7  # of the model: shards of three and four, parts of two
PART_KEYS = 2
RATE = 0.5
LEASE_S = 2.0
TICK_NS = 200 * MS
END_NS = 240 * NS  # virtual time in which every run has ended
WIRE_EVERY = 16  # one run in so many sends bytes, not objects
TIMING = Timing(join_retry_ns=NS // 4, request_retry_ns=NS // 2, bytes_per_second=1 << 30)

# The modes, in turn. `staleness` -1 stands for 0 to 3 in turn.
MODES: tuple[dict[str, Any], ...] = (
    {"sync": "bsp"},
    {"sync": "ssp", "staleness": -1},
    {"sync": "async"},
    {"sync": "local"},
    {"sync": "local", "staleness": -1},
    {"sync": "bsp", "push": "update"},
    {"sync": "ssp", "staleness": -1, "push": "gradient"},
    {"sync": "async", "push": "gradient"},
)


@dataclass(frozen=True, slots=True)
class Case:
    """All of one run."""

    seed: int
    settings: Settings
    faults: Faults
    max_grad_norm: float
    step_ns: tuple[int, ...]  # of each worker: how long it computes
    crash: tuple[int, int, int, int, bool]  # worker, its clock then, ns later, ns down, whether its launcher tells
    cut: tuple[int, int, int, int] | None  # worker, its clock then, ns later, ns long
    restart: tuple[int, int, int, int] | None  # shard, min_clock then, ns later, ns down
    wire: bool


def case_of(seed: int, restart: bool = False) -> Case:
    random = Random(seed * 2 + restart)
    between, chance = random.between, random.chance
    row = dict(MODES[seed % len(MODES)])
    if "staleness" in row:
        row["staleness"] = seed // len(MODES) % 4
    workers, shards = between(4, 6), between(2, 3)
    dense_down = chance(0.7) or row["sync"] == "bsp"
    settings = Settings(
        **row,
        workers=workers,
        shards=shards,
        lease=LEASE_S,
        checkpoint_every=between(100, 600) / 1000 if restart or chance(0.5) else 0.0,
        compress_down="dense" if dense_down else "topk:0.5",
        outer_lr=0.5,
        outer_momentum=0.5,
    ).validated()
    gradients = settings.mode().rule is Rule.OPTIMIZER
    return Case(
        seed,
        settings,
        Faults(
            loss=between(0, 60) / 1000,
            duplication=between(0, 80) / 1000,
            reordering=between(0, 150) / 1000,
            delay_ns=(MS, between(2, 30) * MS),
            late_ns=between(50, 1000) * MS,
        ),
        1.5 if gradients and settings.sync == "bsp" and chance(0.5) else 0.0,
        tuple(between(5, 60) * MS * (3 if chance(0.2) else 1) for _ in range(workers)),
        (
            between(0, workers - 1),
            between(0, CLOCKS - 3),
            between(0, 60 * MS),
            between(20 * MS, 600 * MS) if chance(0.7) else between(NS, 3 * NS),
            chance(0.5),
        ),
        (between(0, workers - 1), between(1, CLOCKS - 4), 0, between(NS, 5 * NS)) if chance(0.3) else None,
        (between(0, shards - 1), between(3, CLOCKS - 5), between(0, 60 * MS), between(10 * MS, 2 * NS))
        if restart
        else None,
        seed % WIRE_EVERY == WIRE_EVERY - 1,
    )


@dataclass(frozen=True, slots=True)
class Kit:
    """The machines of a run; a test plants a bug by giving a subclass."""

    shard: type[Shard] = Shard
    coordinator: type[Coordinator] = Coordinator
    member: type[Member] = Member


class PlainSGD:
    """The least server optimizer: x -= rate * gradient."""

    def step(self, weights: FloatArray, gradient: FloatArray, hyper: bytes, absent: Sequence[int], scale: float) -> None:
        weights -= np.float32(RATE * scale) * gradient

    def check(self, hyper: bytes) -> None:
        assert unpack(hyper) == [{"lr": RATE}]

    def state(self) -> dict[str, FloatArray]:
        return {}

    def load(self, state: dict[str, FloatArray]) -> None:
        assert not state


@dataclass(slots=True)
class Disk:
    """What ps/checkpoints.py is: (shard, clock) -> arrays, publication, plan."""

    files: dict[tuple[int, int], tuple[dict[str, FloatArray], int, bytes]] = field(default_factory=dict)

    def clocks(self, shard: int) -> tuple[int, ...]:
        return tuple(sorted(clock for owner, clock in self.files if owner == shard))

    def shared(self, shards: int) -> int:
        return max(set.intersection(*(set(self.clocks(shard)) for shard in range(shards))), default=-1)

    def write(self, shard: int, clock: int, arrays: dict[str, FloatArray], publication: int, plan: bytes) -> None:
        self.files[shard, clock] = ({name: array.copy() for name, array in arrays.items()}, publication, plan)
        self.drop_after(shard, clock)
        for old in self.clocks(shard)[:-KEPT]:
            del self.files[shard, old]

    def drop_after(self, shard: int, clock: int) -> None:
        for late in [c for c in self.clocks(shard) if c > clock]:
            del self.files[shard, late]


class Process:
    """One server process: port `s<index>`, and its own end `s<index>.<life>` of the link to the coordinator."""

    def __init__(self, run: Run, index: int, life: int) -> None:
        self.run, self.index = run, index
        self.port, self.up = f"s{index}", f"s{index}.{life}"
        settings, disk = run.case.settings, run.disk
        self.shard = run.kit.shard(
            index,
            settings,
            incarnation=life + 1,
            port=1 + index,
            optimizer=lambda plan, begin, end: PlainSGD(),
            checkpoints=disk.clocks(index),
        )
        self.coordinator: Coordinator | None = None
        if index == 0:
            clock = disk.shared(settings.shards)
            self.coordinator = run.kit.coordinator(settings, (life + 1) << 20, clock)
            if clock >= 0:
                self.coordinator.adopt_plan(disk.files[0, clock][2])
        self.server = Server(self.shard, self.coordinator)
        run.checker.server_started(self)
        run.sim.start(self, self.port, self.up)
        self._apply(self.server.start(run.sim.now_ns), "start")

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        peer = COORDINATOR if source == "s0" else source.encode()
        try:
            self._apply(self.server.handle(peer, message, now_ns), f"{type(message).__name__} of {source}")
        except NarrowsError as error:
            raise Violation(f"s{self.index} blames {source}, which keeps the rules: {error}") from error

    def tick(self, now_ns: int) -> None:
        self._apply(self.server.tick(now_ns), "tick")

    def _apply(self, effects: Iterable[ServerEffect], why: str) -> None:
        """Carry out effects as they are made; what comes after one of them may fold or close on top of it."""
        run, checker = self.run, self.run.checker
        done: list[ServerEffect] = []
        for effect in effects:
            done.append(effect)
            if isinstance(effect, e.Send):
                assert isinstance(effect.peer, bytes)
                if effect.peer == COORDINATOR:
                    run.send(self.up, "s0", effect.message)
                else:
                    run.send(self.port, effect.peer.decode(), effect.message)
            elif isinstance(effect, e.Log):
                run.sim.note(f"{self.port} log {effect.event} {effect.values}")
            elif isinstance(effect, e.Checkpoint):
                self._checkpoint(effect.clock)
            elif isinstance(effect, e.Load):
                self._load(effect.clock)
            else:
                run.over = True
        checker.server_event(self, done, why)
        run.server_event(self)

    def _checkpoint(self, clock: int) -> None:
        shard, disk = self.shard, self.run.disk
        if shard.store is None or shard.plan is None or shard.store.publication < 0:
            return
        self.run.checker.folds(self)
        disk.write(self.index, clock, shard.store.arrays(), shard.store.publication, shard.plan.packed())
        self.run.checker.saved(self, clock)
        self.run.sim.note(f"{self.port} checkpoint {clock}")
        shard.wrote_checkpoint(clock, disk.clocks(self.index))

    def _load(self, clock: int) -> None:
        self.run.disk.drop_after(self.index, clock)
        if clock < 0:
            return
        assert self.shard.store is not None
        self.run.checker.folds(self)
        arrays, publication, _ = self.run.disk.files[self.index, clock]
        self.shard.store.load(arrays, publication)
        self.run.checker.loaded(self, clock)
        self.run.sim.note(f"{self.port} load {clock}")


@dataclass(slots=True)
class View:
    """What a worker holds of one shard."""

    begin: int
    end: int
    pulled: FloatArray
    publication: int = -1
    min_clock: int = -1
    pulling: bool = False
    in_flight: set[int] = field(default_factory=set)
    master: bool = False


class Worker:
    """A scripted worker. It sees events only between two steps, as a training script does."""

    def __init__(self, run: Run, index: int, life: int) -> None:
        self.run, self.index, self.life = run, index, life
        self.name = f"w{index}.{life}"
        self.settings = run.case.settings
        self.mode = self.settings.mode()
        self.member = run.kit.member(self.name, "here", timing=TIMING)
        self.events: deque[MemberEffect] = deque()
        self.views: list[View] = []
        self.worker, self.epoch, self.clock = -1, 0, 0
        self.computing = False  # with `clock`
        self.computed = False  # the update of `clock` is there and not yet pushed
        self.steps = 0
        self.finishing = self.ended = False
        run.sim.start(self, self.name)
        self._apply(self.member.join(run.sim.now_ns))
        self._apply(self.member.declare(PLANS[run.case.max_grad_norm], run.sim.now_ns))

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self._apply(self.member.receive(int(source[1:]), message, now_ns))
        self._go()

    def tick(self, now_ns: int) -> None:
        self._apply(self.member.tick(now_ns))
        self._go()

    def _apply(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, e.Send):
                self.run.send(self.name, f"s{effect.peer}", effect.message)
            else:
                self.events.append(effect)

    # The script.

    def _go(self) -> None:
        """Handle what has come, then do all that need not wait."""
        while not self.computing and not self.ended:
            if self.events:
                self._event(self.events.popleft())
            elif not self.views:
                return
            elif self.finishing:
                return self._finish()
            elif self.computed:
                if any(len(view.in_flight) >= self.mode.window for view in self.views):
                    return
                self._push()
            elif not self._ready():
                return
            elif self.clock >= CLOCKS:
                self.finishing = True
                self._finish_when_settled()
            else:
                self._compute()

    def _event(self, event: MemberEffect) -> None:
        checker = self.run.checker
        if isinstance(event, e.Started):
            self.views = [View(begin, end, np.zeros(end - begin, np.float32)) for begin, end in event.ranges]
            self.worker, self.epoch, self.clock = event.worker, event.epoch, event.clock
            self.computed = self.finishing = False  # what was under way belongs to the life before
            checker.worker_started(self)
            self._pull_all(self.clock)
        elif isinstance(event, e.GiveWeights):
            view = self.views[event.shard]
            cuts = list(parts(view.begin, view.end, PART_KEYS))
            self._apply(
                self.member.first_weights(
                    event.shard,
                    [
                        m.FirstWeights(self.worker, self.epoch, i, len(cuts), b, end, m.RAW_FLOAT32, _raw(FIRST[b:end]))
                        for i, (b, end) in enumerate(cuts)
                    ],
                )
            )
            self._pull(event.shard, self.clock)
        elif isinstance(event, e.StateArrived):
            self._state(event)
        elif isinstance(event, e.PushSettled):
            checker.settled(self, event)
            if event.folded:
                self.views[event.shard].in_flight.discard(event.clock)
        elif isinstance(event, e.BuffersWanted):
            self._apply(self.member.buffers(b"buffers"))
        elif isinstance(event, e.Failed):
            self.ended = True
            self.run.worker_failed(self, event)
        elif isinstance(event, e.Left):
            self.ended = True
            self.run.sim.note(f"{self.name} left")

    def _pull(self, shard: int, clock: int, master: bool = False) -> None:
        view = self.views[shard]
        view.pulling = True
        self._apply(self.member.pull(shard, clock, view.publication, master, self.run.sim.now_ns))
        self.run.checker.pulled(self, shard, self.member.sessions[shard].pull)

    def _pull_all(self, clock: int, master: bool = False) -> None:
        for shard, view in enumerate(self.views):
            if not view.pulling or master:
                self._pull(shard, clock, master)

    def _state(self, event: e.StateArrived) -> None:
        view, last = self.views[event.shard], event.parts[-1]
        view.pulling = False
        if event.master:
            view.master = True
            return
        for state in event.parts:
            target = view.pulled[state.begin - view.begin : state.end - view.begin]
            if not state.delta:
                target[:] = np.frombuffer(state.payload, np.float32)
            elif len(state.payload):
                accumulate(state.payload, 1.0, target)
        view.publication, view.min_clock = last.publication, last.min_clock
        self.run.checker.state_arrived(self, event.shard, view.publication, view.pulled)

    def _ready(self) -> bool:
        ready = True
        for shard, view in enumerate(self.views):
            if view.min_clock < 0 or (self.mode.bound is not None and self.clock > view.min_clock + self.mode.bound):
                ready = False
                if not view.pulling:
                    self._pull(shard, self.clock)
        return ready

    def _compute(self) -> None:
        run = self.run
        run.checker.computes(self, self.clock, [view.min_clock for view in self.views])
        self.computing = True
        base = run.case.step_ns[self.index]
        run.sim.at(run.sim.now_ns + run.sim.random.between(base // 2, base), self._done)

    def _done(self) -> None:
        if self.run.sim.alive(self.name):
            self.computing, self.computed = False, True
            self._go()

    def _push(self) -> None:
        """Send update `clock` to every shard, and ask for the next state."""
        run, clock = self.run, self.clock
        self.computed = False
        self.steps += 1
        values, samples = update_of(self.index, self.life, self.steps), 1 + (self.index + clock // 7) % 4
        run.checker.pushed(self, clock, values, samples)
        hyper = HYPER if self.mode.rule is Rule.OPTIMIZER else b""
        for shard, view in enumerate(self.views):
            cuts = list(parts(view.begin, view.end, PART_KEYS))
            messages = [
                m.Push(self.worker, self.epoch, clock, i, len(cuts), b, end, samples, hyper, m.RAW_FLOAT32, _raw(values[b:end]))
                for i, (b, end) in enumerate(cuts)
            ]  # fmt: skip
            view.in_flight.add(clock)
            self._apply(self.member.push(shard, messages, run.sim.now_ns))
        self.clock += 1
        self._pull_all(self.clock + (0 if self.mode.bound == 0 else 1))
        run.worker_pushed(self)

    def _finish_when_settled(self) -> None:
        for view in self.views:
            view.master = False

    def _finish(self) -> None:
        """All is pushed: wait until it is in, take the shared model, leave."""
        if self.member.phase != "running":
            return
        if any(view.in_flight for view in self.views) and not self.mode.barrier:
            return
        if all(view.master for view in self.views):
            self.views = []
            self._apply(self.member.leave(self.clock, self.run.sim.now_ns))
            return
        for shard, view in enumerate(self.views):
            pull = self.member.sessions[shard].pull
            if not view.master and (pull is None or not pull.master):
                self._pull(shard, self.clock, master=True)


class Run:
    """One case, from the first start to the end of everyone."""

    def __init__(self, case: Case, kit: Kit | None = None, trace: Any = None) -> None:
        self.case, self.kit = case, kit or Kit()
        self.sim: Simulator[m.Message] = Simulator(case.seed, case.faults, TICK_NS, trace)
        self.disk = Disk()
        self.checker = Checker(self)
        self.over = False
        self.workers: dict[int, Worker] = {}
        self.servers: dict[int, Process] = {}
        self.planned = {"crash": True, "cut": case.cut is not None, "restart": case.restart is not None}
        for index in range(case.settings.shards):
            self.sim.at(self.sim.random.between(0, 100 * MS), self._serve, index, 0)
        for index in range(case.settings.workers):
            self.sim.at(self.sim.random.between(0, 200 * MS), self._work, index, 0)
        if case.crash[1] == 0:
            self._crash_worker(300 * MS)

    def send(self, source: str, target: str, message: m.Message) -> None:
        if self.case.wire:
            message = decode([bytes(frame) for frame in encode(message)])
        self.sim.send(source, target, message)

    def _serve(self, index: int, life: int) -> None:
        self.servers[index] = Process(self, index, life)

    def _work(self, index: int, life: int) -> None:
        self.workers[index] = Worker(self, index, life)

    def run(self) -> Run:
        """To the end. Raises Violation with the seed in it."""
        try:
            while not self._ended():
                if not self.sim.step() or self.sim.now_ns > END_NS:
                    raise Violation(f"the run has not ended; {self.checker.whereabouts()}")
            self.checker.ended()
        except (AssertionError, NarrowsError, KeyError) as error:
            option = " --restart" if self.case.restart else ""
            text = f"seed {self.case.seed}{option} at {self.sim.now_ns / NS:.4f} s: {type(error).__name__}: {error}"
            raise Violation(text) from error
        return self

    def _ended(self) -> bool:
        if self.over:
            for process in self.servers.values():
                if self.sim.alive(process.port):
                    self.sim.crash(process.port, process.up)
        return self.over or self._deserted()

    def _deserted(self) -> bool:
        """All had finished when shard 0, and the coordinator in it, was restarted: it waits for workers, as at any start."""
        coordinator = self.servers[0].coordinator if 0 in self.servers else None
        restarted = coordinator is not None and coordinator.first_epoch > 1 << 20
        return restarted and all(worker.ended for worker in self.workers.values())

    # Faults that machines suffer.

    def worker_pushed(self, worker: Worker) -> None:
        crash, cut = self.case.crash, self.case.cut
        if self.planned["crash"] and worker.index == crash[0] and worker.clock >= crash[1]:
            self._crash_worker(crash[2])
        if self.planned["cut"] and cut is not None and worker.index == cut[0] and worker.clock >= cut[1]:
            self.planned["cut"] = False
            self.sim.struck["cuts"] += 1
            for shard in range(self.case.settings.shards):
                self.sim.cut(worker.name, f"s{shard}", self.sim.now_ns + cut[3])

    def _crash_worker(self, later_ns: int) -> None:
        self.planned["crash"] = False
        self.sim.at(self.sim.now_ns + later_ns, self._worker_crashes)

    def _worker_crashes(self) -> None:
        index, _, _, down_ns, told = self.case.crash
        worker = self.workers.get(index)
        if worker is None or worker.ended:
            return
        self.sim.crash(worker.name)
        self.checker.worker_crashed(worker)
        self.sim.struck["worker crashed"] += 1
        if told:  # by a launcher beside it, ps-worker
            self.send(f"l{index}", "s0", m.Leave(worker.member.base_token, -1))
        self.sim.at(self.sim.now_ns + down_ns, self._worker_restarts, index)

    def _worker_restarts(self, index: int) -> None:
        self.sim.struck["worker restarted"] += 1
        self._work(index, 1)

    def worker_failed(self, worker: Worker, failed: e.Failed) -> None:
        self.sim.note(f"{worker.name} failed: {failed.text}")
        if failed.code != m.RefuseCode.OVER:
            raise Violation(f"{worker.name} fails, though servers and links come back: {failed.text}")

    def server_event(self, process: Process) -> None:
        restart = self.case.restart
        if restart is None or not self.planned["restart"] or process.coordinator is None:
            return
        if process.coordinator.min_clock >= restart[1] and self.disk.shared(self.case.settings.shards) >= 0:
            self.planned["restart"] = False
            self.sim.at(self.sim.now_ns + restart[2], self._shard_crashes)

    def _shard_crashes(self) -> None:
        assert self.case.restart is not None
        index, _, _, down_ns = self.case.restart
        process = self.servers[index]
        self.sim.crash(process.port, process.up)
        self.sim.struck["shard restarted"] += 1
        self.checker.server_crashed(process)
        self.sim.at(self.sim.now_ns + down_ns, self._serve, index, 1)


def update_of(index: int, life: int, step: int) -> FloatArray:
    """Small whole numbers, other ones for each worker and step: sums of them are exact in float32."""
    return ((np.arange(KEYS) * 5 + index * 11 + life * 7 + step * 3) % 17 - 8).astype(np.float32)


def _raw(values: FloatArray) -> bytes:
    return values.tobytes()


FIRST = np.arange(KEYS, dtype=np.float32)
HYPER = pack([pack([{"lr": RATE}]), []])
_PLAN = Plan((TensorSpec("w", (KEYS,), "float32"),), "SGD", ((0,),))
PLANS = {norm: replace(_PLAN, max_grad_norm=norm).packed() for norm in (0.0, 1.5)}
