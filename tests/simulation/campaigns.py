"""A whole cluster in virtual time: real servers and members, scripted workers, a disk, and every fault by a seed.

    Run(case_of(seed)).run()        raises Violation where an invariant does not hold (tests/simulation/invariants.py)

`Case` says all of a run; it follows from the seed alone, so a seed replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import why_not
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.errors import NarrowsError
from narrows.protocols.wire import decode, encode
from simulation.actors import CLOCKS, PART_KEYS, PLANS, SCALED, STRANGER, TABLE, Disk, Kit, Process, Worker
from simulation.invariants import Checker
from simulation.mirror import BOTH, DOWN, UP, FloatArray, Violation
from simulation.sample_ranges import EPOCHS, Work
from simulation.shard_kills import Kill, killed
from simulation.simulator import MS, Faults, Random, Simulator

Trace = Callable[[int, str, m.Message | None], None]

LEASE_S = 2.0
TICK_NS = 200 * MS
END_NS = 240 * NS  # virtual time in which every run has ended
LEANING = 4.0  # what the updates of all have in common, where the server looks where they lead
LEAP_NS = (4 * NS, 60 * NS, 7200 * NS)  # how far a clock jumps at most
WIRE_EVERY = 16  # one run in so many sends bytes, not objects

# Every other run of `local` streams, with one of these: one clock in flight, two, four.
STREAMS: tuple[dict[str, Any], ...] = (
    {"local_steps": 4, "fragments": 2, "merge_delay": 0},
    {"local_steps": 6, "fragments": 2, "merge_delay": 2},
    {"local_steps": 3, "fragments": 3, "merge_delay": 2},
    {"local_steps": 4, "fragments": 4, "merge_delay": 3},
)
# The modes, in turn. `staleness` -1 stands for 0 to 3 in turn, `quorum` -1 for some of the workers.
DRAWN_MODES: tuple[dict[str, Any], ...] = (
    {"sync": "bsp"},
    {"sync": "ssp", "staleness": -1},
    {"sync": "async"},
    {"sync": "local"},
    {"sync": "local", "staleness": -1},
    {"sync": "bsp", "push": "update"},
    {"sync": "ssp", "staleness": -1, "push": "gradient"},
    {"sync": "async", "push": "gradient"},
    {"sync": "local", "quorum": -1},
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes machine `who` so long after it has come to a clock."""

    who: int
    clock: int
    later_ns: int
    lasts_ns: int
    told: bool = False  # the coordinator, by a launcher
    way: str = BOTH  # of a cut: from the worker UP, or DOWN to it


@dataclass(frozen=True, slots=True)
class Leap:
    """At this time the clock of shard or worker `who` jumps, back where `by_ns` is below 0."""

    at_ns: int
    who: int
    worker: bool
    by_ns: int


@dataclass(frozen=True, slots=True)
class Case:
    """All of one run."""

    seed: int
    settings: Settings
    faults: Faults
    max_grad_norm: float
    step_ns: tuple[int, ...]  # of each worker: how long it computes
    crash: Fault | None  # of a worker, by its clock
    cut: Fault | None  # of a worker from all shards, by its clock
    restart: Fault | None  # of a shard, by min_clock
    wire: bool
    scaled: bool = False  # the mean of updates has a gain
    stop: Fault | None = None  # of a shard that does nothing for a while, by min_clock
    kills: tuple[Kill, ...] = ()
    slow_ns: int = NS // 5  # what a checkpoint takes, at most
    torn: int = 0  # one of so many checkpoints is, 0: none
    stranger: bool = False  # somebody says again what workers say, with other values, under their numbers
    liar: int = -1  # the worker whose updates lead against those of the others
    leaps: tuple[Leap, ...] = ()
    rows: bool = False  # the model has an embedding table
    epochs: int = 0  # of samples that the coordinator hands out, 0: each worker makes CLOCKS updates


RANGES_EVERY = 8  # one run in so many is of epochs


def case_of(seed: int, restart: bool = False, kills: bool = False) -> Case:
    """`restart`: a shard fails, and begins anew from a checkpoint. `kills`: some are killed, and go on from their journals."""
    return _more(_case_of(seed, restart), Random(~seed), kills)


def with_rows(case: Case) -> Case:
    """The same of a model with an embedding table, where such a run may have one."""
    allowed = not why_not(case.settings, case.settings.mode(), levels=False) and not case.max_grad_norm
    return replace(case, rows=allowed)


def _more(case: Case, random: Random, kills: bool) -> Case:
    """Faults that some of the runs have. Drawn by themselves: the rest of a seed is what it is without them."""
    between, chance, settings = random.between, random.chance, case.settings
    if case.cut is not None:
        case = replace(case, cut=replace(case.cut, way=(BOTH, BOTH, UP, DOWN)[between(0, 3)]))
    if chance(0.15):
        stop = Fault(between(0, settings.shards - 1), between(1, CLOCKS - 4), 0, between(NS // 10, 4 * NS))
        case = replace(case, stop=stop)
    case = replace(case, slow_ns=3 * NS if chance(0.2) else case.slow_ns, stranger=chance(0.15))
    if case.restart is not None and chance(0.4):
        case = replace(case, torn=between(2, 6))
    if settings.fragments == 1 and chance(0.2):
        of_clocks = settings.mode().barrier and settings.mode().rule in (FoldRule.OPTIMIZER, FoldRule.OUTER)
        robust = ("cosine", "trim:0.1", "median")[between(0, 2 if of_clocks else 0)]
        case = replace(case, settings=replace(settings, robust=robust).validated(), liar=between(0, settings.workers))
    if kills:
        struck = tuple(killed(random, between(0, settings.shards - 1)) for _ in range(between(1, 5)))
        case = replace(case, kills=struck)
    if chance(0.25):
        leaps = tuple(_leap(random, settings) for _ in range(between(1, 3)))
        case = replace(case, leaps=leaps)
    return of_epochs(case) if case.seed % RANGES_EVERY == RANGES_EVERY - 3 else case


def of_epochs(case: Case) -> Case:
    """The same, where workers take ranges of samples; fragments have none."""
    return replace(case, epochs=EPOCHS) if not case.settings.mode().streams else case


def _leap(random: Random, settings: Settings) -> Leap:
    """A machine was suspended, or moved to another host; seconds or hours."""
    between, chance = random.between, random.chance
    worker, longest_ns = chance(0.5), LEAP_NS[between(0, len(LEAP_NS) - 1)]
    who = between(0, (settings.workers if worker else settings.shards) - 1)
    return Leap(between(NS // 4, 4 * NS), who, worker, between(NS // 2, longest_ns) * (-1 if chance(0.5) else 1))


def _case_of(seed: int, restart: bool) -> Case:
    random = Random(seed * 2 + restart)
    between, chance = random.between, random.chance
    row = dict(DRAWN_MODES[seed % len(DRAWN_MODES)])
    if "staleness" in row:
        row["staleness"] = seed // len(DRAWN_MODES) % 4
    elif row["sync"] == "local" and "quorum" not in row and seed // len(DRAWN_MODES) % 2:
        row |= STREAMS[seed // len(DRAWN_MODES) // 2 % len(STREAMS)]
    workers, shards = between(4, 6), between(2, 3)
    if "quorum" in row:
        row["quorum"] = between(1, workers - 1)
        row["grace"] = between(0, 300) / 1000 if chance(0.5) else -1.0
    dense_down = chance(0.7) or row["sync"] == "bsp"
    settings = Settings(
        **row,
        workers=workers,
        shards=shards,
        lease=LEASE_S,
        checkpoint_every=between(100, 600) / 1000 if restart or chance(0.5) else 0.0,
        compress_down="dense" if dense_down else "topk:0.5",
        outer_lr=0.5 if row["sync"] == "local" else -1.0,
        outer_momentum=0.5 if row["sync"] == "local" else -1.0,
    ).validated()
    gradients, unbound = settings.mode().rule is FoldRule.OPTIMIZER, settings.mode().bound is None
    return Case(
        seed,
        settings,
        Faults(
            loss=between(10, 60) / 1000,
            duplication=between(10, 80) / 1000,
            reordering=between(20, 150) / 1000,
            delay_ns=(MS, between(2, 30) * MS),
            late_ns=between(50, 1000) * MS,
        ),
        1.5 if gradients and settings.sync == "bsp" and chance(0.5) else 0.0,
        tuple(between(5, 60) * MS * ((10 if "quorum" in row else 3) if chance(0.2) else 1) for _ in range(workers)),
        Fault(
            between(0, workers - 1),
            between(0, CLOCKS // 2 if unbound else CLOCKS - 3),
            between(0, 60 * MS),
            # With no bound the others do not wait, and would have ended before it is back.
            between(20 * MS, 300 * MS) if unbound or chance(0.7) else between(NS, 3 * NS),
            chance(0.5),
        ),
        Fault(between(0, workers - 1), between(1, CLOCKS - 4), 0, between(NS, 5 * NS)) if chance(0.3) else None,
        Fault(between(0, shards - 1), between(3, CLOCKS - 5), between(0, 60 * MS), between(10 * MS, 2 * NS))
        if restart
        else None,
        seed % WIRE_EVERY == WIRE_EVERY - 1,
        settings.mode().rule is FoldRule.ADD and seed // len(DRAWN_MODES) % 2 == 0,
    )


OF_WORKERS = (m.Push, m.Follow, m.Pull, m.Heartbeat, m.FirstWeights, m.RangeRequest, m.RowsRequest)


def forged(message: m.Message) -> m.Message:
    """Who says it is somebody else, and wants other things."""
    match message:
        case m.Push() | m.FirstWeights():
            return replace(message, payload=bytes(len(message.payload)))
        case m.Follow(clock=clock):
            return replace(message, clock=clock + 5)
        case m.Pull(request=request):
            return replace(message, request=request + 1, clock=0)
    return message


class Run:
    """One case, from the first start to the end of everyone."""

    prefix, parent = "", None
    clocks, part_keys = CLOCKS, PART_KEYS
    hurried = True  # whether no wait may be longer than the faults explain

    def __init__(self, case: Case, kit: Kit | None = None, trace: Trace | None = None) -> None:
        self.case, self.kit = case, kit or Kit()
        self.settings = case.settings
        self.plan = SCALED if case.scaled else PLANS[case.max_grad_norm]
        if case.rows:
            self.plan = replace(ModelSpec.unpacked(self.plan), tables=(TABLE,)).packed()
        self.sim: Simulator[m.Message] = Simulator(case.seed, case.faults, TICK_NS, trace)
        self.disk = Disk(slow_ns=case.slow_ns)
        self.ranges = Work(self, case.epochs, case.settings.workers) if case.epochs else None
        if case.torn:
            assert case.restart is not None
            # Torn: those of the shard that begins anew, which looks at them, or of another, which finds out on reading.
            whose = (case.restart.who + case.torn) % 2
            self.disk.tears = lambda shard, clock: shard % 2 == whose and clock % (2 + case.torn // 2) == 0
        self.checker = Checker(self)
        self.over = False
        self.restarts = case.restart is not None
        self.workers: dict[int, Worker] = {}
        self.servers: dict[int, Process] = {}
        self.planned = {
            "crash": case.crash is not None,
            "cut": case.cut is not None,
            "restart": case.restart is not None,
            "stop": case.stop is not None,
        }
        for index in range(case.settings.shards):
            self.sim.at(self.sim.random.between(0, 100 * MS), self._serve, index, 0)
        for index in range(case.settings.workers):
            self.sim.at(self.sim.random.between(0, 200 * MS), self._work, index, 0)
        if case.crash is not None and case.crash.clock == 0:
            self._crash_worker(300 * MS)
        for leap in case.leaps:
            self.sim.at(leap.at_ns, self._leaps, leap)

    def send(self, source: str, target: str, message: m.Message) -> None:
        if self.case.wire:
            message = decode([bytes(frame) for frame in encode(message)])
        self.sim.send(source, target, message)
        if self.case.stranger and source[0] == "w" and isinstance(message, OF_WORKERS) and self.sim.random.chance(0.1):
            self.sim.send(f"{STRANGER}{target}", target, forged(message))

    def compute_ns(self, index: int) -> int:
        base = self.case.step_ns[index]
        return self.sim.random.between(base // 2, base)

    def _serve(self, index: int, life: int) -> None:
        self.servers[index] = Process(self, index, life)

    def _work(self, index: int, life: int) -> None:
        self.workers[index] = Worker(self, index, life)

    def run(self) -> Run:
        """Run to the end. Raises Violation with the seed in it."""
        try:
            while not self._ended():
                if not self.sim.step() or self.sim.now_ns > END_NS:
                    raise Violation(f"the run has not ended; {self.checker.whereabouts()}")
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
        return self.over or (self.restarts and self._deserted())

    def _deserted(self) -> bool:
        """All had finished when shard 0, and the coordinator in it, was restarted: it waits for workers, as at any start."""
        coordinator = self.servers[0].coordinator if 0 in self.servers else None
        restarted = coordinator is not None and coordinator.run.first_epoch > 1 << 20
        return restarted and all(worker.ended for worker in self.workers.values())

    # Faults that machines suffer.

    def worker_pushed(self, worker: Worker) -> None:
        crash, cut = self.case.crash, self.case.cut
        if (
            self.planned["crash"]
            and crash is not None
            and worker.index == crash.who
            and worker.run_clock >= crash.clock
        ):
            self._crash_worker(crash.later_ns)
        if self.planned["cut"] and cut is not None and worker.index == cut.who and worker.run_clock >= cut.clock:
            self.planned["cut"] = False
            self.sim.struck["cuts"] += 1
            until_ns = self.sim.now_ns + cut.lasts_ns
            for shard in range(self.settings.shards):
                if cut.way != DOWN:
                    self.sim.cut_way(worker.name, f"s{shard}", until_ns)
                if cut.way != UP:
                    self.sim.cut_way(f"s{shard}", worker.name, until_ns)

    def _crash_worker(self, later_ns: int) -> None:
        self.planned["crash"] = False
        self.sim.at(self.sim.now_ns + later_ns, self._worker_crashes)

    def _worker_crashes(self) -> None:
        assert self.case.crash is not None
        index = self.case.crash.who
        worker = self.workers.get(index)
        if worker is None or worker.ended:
            return
        self.sim.crash(worker.name)
        self.sim.struck["worker crashed"] += 1
        if self.case.crash.told:  # by a launcher beside it, ps-worker
            self.send(f"l{index}", "s0", m.Leave(worker.member.hello.token, -1))
        self.sim.at(self.sim.now_ns + self.case.crash.lasts_ns, self._worker_restarts, index)

    def _worker_restarts(self, index: int) -> None:
        self.sim.struck["worker restarted"] += 1
        self._work(index, 1)

    def worker_failed(self, worker: Worker, failed: e.MemberFailed) -> None:
        self.sim.note(f"{worker.name} failed: {failed.text}")
        if failed.code != m.RefuseCode.OVER:
            raise Violation(f"{worker.name} fails, though servers and links come back: {failed.text}")

    def gives(self, worker: Worker, values: FloatArray) -> FloatArray:
        if not self.case.settings.robust:
            return values
        values = values + np.float32(LEANING)
        return -values if worker.index == self.case.liar else values

    def kills_of(self, index: int) -> list[Kill]:
        return sorted((kill for kill in self.case.kills if kill.who == index), key=lambda kill: -kill.event)

    def replayed(self, process: Process) -> None:
        """Members connect anew."""
        for worker in self.workers.values():
            self.sim.at(self.sim.now_ns + self.sim.random.between(1, NS // 2), worker.linked, process.index)

    def failed(self, process: Process) -> None:
        self._shard_ends(process, "shard failed")
        self.sim.at(self.sim.now_ns + NS // 2, self._serve, process.index, process.life + 1)

    def _shard_ends(self, process: Process, struck: str) -> None:
        self.sim.crash(process.port, process.up)
        self.sim.struck[struck] += 1
        self.checker.server_crashed(process)

    def server_event(self, process: Process) -> None:
        restart, stop = self.case.restart, self.case.stop
        if process.coordinator is None:
            return
        if self.planned["stop"] and stop is not None and process.coordinator.min_clock >= stop.clock:
            self.planned["stop"] = False
            self.sim.at(self.sim.now_ns + stop.later_ns, self._shard_stops, stop)
        if restart is None or not self.planned["restart"]:
            return
        if process.coordinator.min_clock >= restart.clock and self.disk.shared(self.settings.shards) >= 0:
            self.planned["restart"] = False
            self.sim.at(self.sim.now_ns + restart.later_ns, self._shard_crashes)

    def _leaps(self, leap: Leap) -> None:
        actor = self.workers.get(leap.who) if leap.worker else self.servers.get(leap.who)
        if actor is not None:
            self.sim.struck["clock leapt"] += 1
            actor.leap(leap.by_ns)

    def _shard_stops(self, stop: Fault) -> None:
        process = self.servers.get(stop.who)  # whose keys may have moved
        if process is not None and self.sim.alive(process.port):
            self.sim.struck["shard stopped"] += 1
            process.stop(stop.lasts_ns)

    def _shard_crashes(self) -> None:
        restart = self.case.restart
        assert restart is not None
        process = self.servers[restart.who]
        if not self.sim.alive(process.port):  # it was killed, or has failed: later
            self.sim.at(self.sim.now_ns + NS, self._shard_crashes)
            return
        self._shard_ends(process, "shard restarted")
        self.sim.at(self.sim.now_ns + restart.lasts_ns, self._serve, restart.who, process.life + 1)
