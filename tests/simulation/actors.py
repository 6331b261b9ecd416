"""The parts of a simulated cluster that stand where our runners stand: a disk, a server process, a scripted worker.

- `Process` stands where ps/process/runner.py stands: it carries out effects and has no rule of its own.
- `Worker` stands where worker/sync/engine.py stands: it has the same `Exchange`, and numbers for a model.
- `MeasuredHost` is the cluster that they belong to, one alone (campaigns.py) or one of a tree (trees.py); `Watch` is
  told of all that they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import pytest

from narrows.compression import ErrorFeedback, ladder, parse, rows
from narrows.compression.codecs import ROWS, Piece, raw_pieces
from narrows.compression.replica import HostReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import TableSpec, rows_of
from narrows.protocols.config.key_ranges import fragment, parts, split
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec, pack_arrays
from narrows.protocols.config.modes import FoldRule, holds_apart
from narrows.protocols.config.retry import RETRY_FACTOR_MAX, Retry
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS, MemberEffect, ServerEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member, MemberPhase
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.wire import pack, unpack
from narrows.ps.checkpoints.checkpoint_files import KEPT
from narrows.ps.coordinator import coordinator
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.run import Decision
from narrows.ps.journal import machine_pickling
from narrows.ps.journal.journal import JournalReplay
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ClockStage, ShardResources
from narrows.ps.shard.reports import COORDINATOR
from narrows.ps.shard.shard import Shard
from narrows.ps.store.changes import LoadArrays
from narrows.ps.store.reduction import Mean
from narrows.ps.store.reshard_arrays import recut
from simulation.mirror import RATE, TABLE_ROWS, FloatArray, Violation, rows_given, steps_given
from simulation.sample_ranges import IDLE_NS, SIZE, Work
from simulation.shard_kills import Kept, Kill
from simulation.simulator import Simulator

CLOCKS = 20
CLOCKS_APART_NS = 3600 * NS  # of any two processes
STRANGER = "x"  # how the address of somebody begins who speaks as another
KEYS = 7  # of the model: shards of three and four, parts of two
PART_KEYS = 2
TIMING = Timing(Retry(NS // 4), Retry(NS // 2, 1 << 30, RETRY_FACTOR_MAX))
FIRST = np.arange(KEYS, dtype=np.float32)
RATES = pack([{"lr": RATE}])
HYPER = pack([RATES, []])
TABLE = TableSpec("table", TABLE_ROWS, 1, 0, 0.0, "SGD")
BUFFERS = pack_arrays({"mean": ("uint8", (1,), b"1")})
_PLAN = ModelSpec((TensorSpec("w", (KEYS,), "float32"),), "SGD", ((0,),))
PLANS = {norm: replace(_PLAN, max_grad_norm=norm).packed() for norm in (0.0, 1.5)}
SCALED = replace(_PLAN, degree=0.0).packed()  # of an optimizer whose mean updates have a gain


@cache
def update_of(index: int, life: int, step: int) -> FloatArray:
    """Small whole numbers, other ones for each worker and step: sums of them are exact in float32. Not to be written to."""
    values = ((np.arange(KEYS) * 5 + index * 11 + life * 7 + step * 3) % 17 - 8).astype(np.float32)
    values.flags.writeable = False
    return values


machine_pickling.OURS = (
    *machine_pickling.OURS,
    f"{__package__}.",
)  # a machine of a test has parts of its own, of any module here


TOTAL = "total"


class PlainSGD:
    """The least server optimizer: x -= rate * gradient."""

    def __init__(self, plan: ModelSpec, begin: int, end: int) -> None:
        pass

    def step(self, weights: FloatArray, gradient: Mean, hyper: bytes, absent: Sequence[int], scale: float) -> None:
        weights -= np.float32(RATE * scale) * gradient(0, weights.size)

    def check(self, hyper: bytes) -> None:
        assert unpack(hyper) == [{"lr": RATE}]

    def state(self) -> dict[str, FloatArray]:
        return {}

    def kept(self) -> list[list[Any]]:
        return []

    def read(self, name: str, begin: int, end: int) -> FloatArray:
        raise NotImplementedError

    def load(self, state: dict[str, FloatArray]) -> None:
        assert not state


class SummingSGD(PlainSGD):
    """The same, with a state that workers can take over: the sum of the gradients that it has stepped along."""

    def __init__(self, plan: ModelSpec, begin: int, end: int) -> None:
        self.total = np.zeros(end - begin, np.float32)

    def step(self, weights: FloatArray, gradient: Mean, hyper: bytes, absent: Sequence[int], scale: float) -> None:
        super().step(weights, gradient, hyper, absent, scale)
        self.total = self.total + gradient(0, weights.size)

    def state(self) -> dict[str, FloatArray]:
        return {f"0.0.{TOTAL}": self.total}

    def read(self, name: str, begin: int, end: int) -> FloatArray:
        assert name == TOTAL
        return self.total[begin:end]

    def load(self, state: dict[str, FloatArray]) -> None:
        self.total = state[f"0.0.{TOTAL}"].copy()


@cache
def peer_of(source: str) -> bytes:
    """The routing id of who is called `source`: all shards of a cluster have one name above."""
    member, _, shard = source.partition(".s")
    return member.encode().ljust(m.NAME_BYTES) + b"/" + shard.encode()


@cache
def source_of(peer: bytes) -> str:
    member, _, shard = peer.decode().partition("/")
    return f"{member.rstrip()}.s{shard}" if shard else member.rstrip()


class FailsError(Exception):
    """A process ends by itself in the midst of an event."""


@dataclass(slots=True)
class Disk:
    """Stands for ps/checkpoints/checkpoint_files.py: (shard, clock) -> arrays, publication, plan, shards. A write
    takes less than `slow_ns`. One that is torn is no checkpoint."""

    files: dict[tuple[int, int], tuple[dict[str, FloatArray], int, bytes, int]] = field(default_factory=dict)
    slow_ns: int = NS // 5
    tears: Callable[[int, int], bool] = lambda shard, clock: False  # whether a checkpoint is torn once it is written
    torn: set[tuple[int, int]] = field(default_factory=set)
    # They also have: of shard 0, the ranges; of each shard, which updates it has, and the run's steps.
    facts: dict[tuple[int, int], tuple[bytes, m.Pairs, int]] = field(default_factory=dict)

    def takes_ns(self, shard: int, clock: int) -> int:
        """Not drawn: the other faults of a seed stay what they were."""
        return (7 * clock + 3 * shard) % 8 * self.slow_ns // 8

    def clocks(self, shard: int) -> tuple[int, ...]:
        return tuple(sorted(clock for owner, clock in self.files if owner == shard))

    def sound(self, shard: int, shards: int) -> tuple[int, ...]:
        """Clocks that this one of so many can begin from: its own, and those that others have whole."""
        found = {*self.clocks(shard), *self.clocks(0)}
        return tuple(sorted(clock for clock in found if self._begins(shard, shards, clock)))

    def known(self, shard: int, shards: int) -> set[int]:
        """Clocks that this one may say it has: those, and its own that are torn, while nobody has read them."""
        return {*self.clocks(shard), *self.sound(shard, shards)}

    def _begins(self, shard: int, shards: int, clock: int) -> bool:
        count = self.files[(shard, clock) if (shard, clock) in self.files else (0, clock)][3]
        needed = {(index, clock) for index in ((shard,) if count == shards else range(count))}
        return needed <= self.files.keys() - self.torn

    def shared(self, shards: int) -> int:
        return max(set.intersection(*(set(self.sound(shard, shards)) for shard in range(shards))), default=-1)

    def shards(self, clock: int) -> int:
        """Which have written the checkpoint of this clock."""
        return self.files[0, clock][3]

    def read(self, shard: int, shards: int, clock: int) -> tuple[dict[str, FloatArray], int]:
        """Arrays and publication of one of so many shards. Raises FailsError for one that is torn or missing."""
        if not self._begins(shard, shards, clock):
            raise FailsError
        count, plan = self.shards(clock), ModelSpec.unpacked(self.files[0, clock][2])
        if count == shards:
            return self.files[shard, clock][:2]
        ranges = split(plan.size, count)
        before = [(keys, self.files[index, clock][0]) for index, keys in enumerate(ranges)]
        return recut(plan, before, split(plan.size, shards)[shard]), self.files[0, clock][1]

    def write(
        self,
        shard: int,
        clock: int,
        arrays: dict[str, FloatArray],
        publication: int,
        plan: bytes,
        shared: int,
        shards: int = 1,
    ) -> None:
        self.torn.discard((shard, clock))
        if self.tears(shard, clock):
            self.torn.add((shard, clock))
            arrays = {name: array + 1 for name, array in arrays.items()}
        self.files[shard, clock] = ({name: array.copy() for name, array in arrays.items()}, publication, plan, shards)
        self.drop_after(shard, clock)
        for old in self.clocks(shard)[:-KEPT]:
            if old != shared:
                del self.files[shard, old]
        kept = self.clocks(shard)
        for other, left in [*self.files] if not shard else ():
            if other >= shards and left not in kept:
                del self.files[other, left]

    def drop_after(self, shard: int, clock: int) -> None:
        for late in [c for c in self.clocks(shard) if c > clock]:
            del self.files[shard, late]


Writing = tuple[int, dict[str, FloatArray], int, bytes]  # clock, arrays, publication, plan


@dataclass(frozen=True, slots=True)
class Kit:
    """The machines of a run; a test plants a bug by giving a subclass."""

    shard: type[Shard] = Shard
    coordinator: type[Coordinator] = Coordinator
    member: type[Member] = Member
    optimizer: type[PlainSGD] = PlainSGD


# Machines; a decision that every coordinator takes in the place of its base; or what is put into the place of something else:
# class, module or table, name, and what comes there.
Bug = Kit | type[Decision] | list[tuple[Any, Any, Any]]


def planted(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """The machines of a run with this bug."""
    if isinstance(bug, Kit):
        return bug
    if isinstance(bug, list):
        for where, name, what in bug:
            monkeypatch.setitem(where, name, what) if isinstance(where, dict) else monkeypatch.setattr(
                where, name, what
            )
        return Kit()
    assert bug.__base__ is not None
    monkeypatch.setattr(coordinator, bug.__base__.__name__, bug)
    return Kit()


class Watch(Protocol):
    """Told of all that the actors of one cluster do; raises Violation."""

    def worker_started(self, worker: Worker) -> None: ...
    def computes(self, worker: Worker, clock: int, min_clocks: Sequence[int]) -> None: ...
    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None: ...
    def pulled(self, shard: int, pull: m.Pull) -> None: ...
    def heard(self, process: Process, message: m.Message) -> None: ...
    def settled(self, worker: Worker, event: e.PushSettled) -> None: ...
    def state_arrived(self, worker: Worker, shard: int, publication: int, pulled: FloatArray) -> None: ...
    def moments_arrived(self, worker: Worker, shard: int, clock: int, payload: bytes) -> None: ...
    def leaves(self, worker: Worker) -> None: ...
    def model_arrived(self, worker: Worker, shard: int, model: bytes) -> None: ...
    def server_started(self, process: Process) -> None: ...
    def replayed(self, process: Process) -> None: ...
    def follow(self, process: Process) -> None: ...
    def saved(self, process: Process, clock: int) -> None: ...
    def loaded(self, process: Process, clock: int) -> None: ...
    def server_event(
        self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str
    ) -> None: ...


class Host(Protocol):
    """The cluster that actors belong to."""

    prefix: str  # of all addresses in it
    settings: Settings
    plan: bytes  # packed
    clocks: int  # of each worker
    part_keys: int  # of one message of a push
    kit: Kit
    sim: Simulator[m.Message]
    disk: Disk
    servers: dict[int, Process]
    over: bool

    @property
    def ranges(self) -> Work | None:
        """The ranges of samples, where workers take some."""

    @property
    def parent(self) -> Host | None:
        """The cluster whose servers its own servers are workers of."""

    @property
    def checker(self) -> Watch: ...
    def send(self, source: str, target: str, message: m.Message) -> None: ...
    def compute_ns(self, index: int) -> int: ...
    def kills_of(self, index: int) -> list[Kill]:
        """The kills of a server process, the last first."""

    def gives(self, worker: Worker, values: FloatArray) -> FloatArray:
        """The update that this worker hands up in the place of the one that it computed."""

    def replayed(self, process: Process) -> None:
        """It was killed, and goes on."""

    def failed(self, process: Process) -> None:
        """It cannot read a checkpoint, and ends."""

    def worker_pushed(self, worker: Worker) -> None: ...
    def worker_failed(self, worker: Worker, failed: e.MemberFailed) -> None: ...
    def server_event(self, process: Process) -> None: ...


class Shadow(Protocol):
    """Goes along with a process."""

    def written(self, event: MachineEvent) -> MachineEvent:
        """It is about to happen. Return it as the machine should read it."""

    def happened(self, event: MachineEvent, effects: Sequence[ServerEffect]) -> None: ...
    def changed(self) -> None:
        """By something that is no event."""


class Process:
    """One server process: port `s<index>`, and its own end `s<index>.<life>` of the link to the coordinator."""

    shadow_of: Callable[[Process], Shadow] | None = None  # what each has, where a test wants that

    def __init__(self, run: Host, index: int, life: int) -> None:
        self.run, self.index, self.life = run, index, life
        self.port, self.up = f"{run.prefix}s{index}", f"{run.prefix}s{index}.{life}"
        self.first_port = f"{run.prefix}s0"
        self._serve(self._machine())
        self._begin()

    def _serve(self, server: Server) -> None:
        """This is the machine."""
        self.server, self.shard, self.coordinator = server, server.shard, server.coordinator

    def _machine(self) -> Server:
        """One of a run that begins, or goes on from a checkpoint."""
        run, index, life, above = self.run, self.index, self.life, self.parent
        # One that is to come knows more shards than there are.
        settings, disk = replace(run.settings, shards=max(run.settings.shards, index + 1)), run.disk
        coordinator: Coordinator | None = None
        member: Member | None = None
        if index == 0:
            clock = disk.shared(settings.shards)
            settings = settings.back_at(clock)
            if settings.starting and clock >= settings.start_steps:
                settings = settings.relaxed(clock)  # as ps/process/machine_factory.py reads it in the checkpoint
            coordinator = run.kit.coordinator(settings, (life + 1) << 20, clock, child=bool(above))
            if above:
                member = run.kit.member(self.up, "here", timing=TIMING, below=coordinator.tree)
            if clock >= 0:
                coordinator.members.adopt(disk.files[0, clock][2])
                saved = [dict(disk.facts[each, clock][1]) for each in range(disk.shards(clock))]
                coordinator.ranges.load(disk.facts[0, clock][0], clock, saved)
        means = ShardResources(
            optimizer=run.kit.optimizer,
            child=bool(above),
            member=member,
            coordinator=coordinator,
            timing=TIMING,
        )
        kept = disk.sound(index, settings.shards) if life else ()
        shard = run.kit.shard(index, settings, life + 1, 1 + index, kept, means)
        return Server(shard, coordinator, member, above)

    def _begin(self) -> None:
        run = self.run
        self.writing: Writing | None = None  # a checkpoint that the disk does not have yet
        self.events = 0
        self.kills = run.kills_of(self.index) if not self.life else []
        self.leave = -1  # how many effects are still carried out, -1: all
        self.era = 0  # grows where what was being written does not count any more
        self.leapt_ns = -self.late_ns()
        self.awake = AwakeClock(self._wall)
        run.checker.server_started(self)
        run.sim.start(self, self.port, self.up)
        shadow_of = type(self).shadow_of
        self.shadow: Shadow | None = None
        if shadow_of is not None or self.kills:
            self.shadow = shadow_of(self) if shadow_of is not None else Kept(self)
        self.first()

    def late_ns(self) -> int:
        """How far its clock is behind. No two processes have one."""
        return -(self.life + 1) * (self.index + 1) * CLOCKS_APART_NS

    def first(self) -> None:
        self._happen(MachineEvent(EventKind.START, self.now_ns))

    @property
    def parent(self) -> str:
        """Where process 0 of the server above finds it."""
        return f"{self.run.parent.prefix}s0" if self.run.parent is not None else ""

    @property
    def above(self) -> str:
        """The shard above."""
        return f"{self.run.parent.prefix}s{self.index}" if self.run.parent is not None else ""

    def kind(self, source: str) -> EventKind:
        """The kind of a message from there."""
        return {self.above: EventKind.ABOVE, self.first_port: EventKind.COORDINATOR}.get(source, EventKind.BELOW)

    @property
    def now_ns(self) -> int:
        """The time for the machine: the runner's own clock leaves out what this process has missed."""
        return self.awake.now()

    def _wall(self) -> int:
        """By the clock of its machine."""
        return self.run.sim.now_ns + self.leapt_ns

    def leap(self, by_ns: int) -> None:
        """That clock jumps."""
        self.leapt_ns += by_ns

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self.awake.turn()
        if source.startswith(STRANGER):
            return self._strange(source, message)
        self.run.checker.heard(self, message)
        try:
            kind = self.kind(source)
            peer = peer_of(source) if kind is EventKind.BELOW else b""
            self._happen(MachineEvent(kind, self.now_ns, peer, message), source)
        except NarrowsError as error:
            raise Violation(f"{self.port} blames {source}, which keeps the rules: {error}") from error

    def _strange(self, source: str, message: m.Message) -> None:
        """Handle a message of one who speaks as another: all that is checked shows whether the machine finds out."""
        try:
            self._happen(MachineEvent(EventKind.BELOW, self.now_ns, peer_of(source), message), source)
        except NarrowsError as error:
            self.run.sim.struck["stranger refused"] += 1
            self._carry_out(self.server.refused(peer_of(source), error))

    def tick(self, now_ns: int) -> None:
        self.awake.turn()
        self._happen(MachineEvent(EventKind.TICK, self.now_ns))

    def unreached(self, target: str, now_ns: int) -> None:
        self._happen(MachineEvent(EventKind.UNREACHED, self.now_ns, peer_of(target)), target)

    def linked(self) -> None:
        """The shard above is another process."""
        if self.run.sim.alive(self.up):
            self._happen(MachineEvent(EventKind.LINKED, self.now_ns, values=("",)))

    def stop(self, lasts_ns: int) -> None:
        """It does nothing for so long."""
        self.run.sim.stop(self.run.sim.now_ns + lasts_ns, self.port, self.up)

    def _happen(self, event: MachineEvent, source: str = "") -> None:
        """One event of the machine, and what it asks for, and what follows from that inside it; then all is looked at."""
        run, checker = self.run, self.run.checker
        self.events += 1
        if event.now_ns < self.server.now_ns:
            raise Violation(f"time goes back for {self.port}, by {(self.server.now_ns - event.now_ns) / NS} s")
        kill = self.kills.pop() if self.kills and self.kills[-1].event <= self.events else None
        self.leave = kill.effects if kill is not None else -1
        if self.shadow is not None:
            event = self.shadow.written(event)
        if event.kind is EventKind.ABOVE and event.message is not None:
            self.server.now_ns, self.server.happened = event.now_ns, self.server.happened + 1
            effects = self.server.handle_above(event.message, event.now_ns)  # `happen` would end the session quietly
        else:
            effects = self.server.happen(event)
        done = [*effects]
        try:
            self._carry_out(effects)
            while self.server.inner:
                more = self.server.advance(event.now_ns)
                self._carry_out(more)
                done += more
        except FailsError:
            return run.failed(self)
        if self.shadow is not None:
            self.shadow.happened(event, done)
        checker.server_event(self, done, event, source)
        run.server_event(self)
        if kill is not None and not run.over:
            self._die(kill)

    def _bytes_of(self, message: m.Message) -> m.Message:
        """Copy a state that a process sends which may be killed: the next one computes in the same memory."""
        if not isinstance(self.shadow, Kept) or not isinstance(message, m.State):
            return message
        return replace(message, payload=bytes(message.payload))

    def _carry_out(self, effects: Sequence[ServerEffect]) -> None:
        run = self.run
        for effect in effects:
            if not self.leave and not isinstance(effect, e.LoadCheckpoint):  # which is done again
                continue
            self.leave -= 1
            if isinstance(effect, e.Send):
                message = self._bytes_of(effect.message)
                if isinstance(effect.peer, int):
                    run.send(self.port, self.above, message)
                elif effect.peer == COORDINATOR:
                    run.send(self.up, self.first_port, message)
                else:
                    run.send(self.port, source_of(effect.peer), message)
            elif isinstance(effect, e.Log):
                if effect.values.get("text") == "":
                    continue  # it is for the process above
                told = " ".join(f"{k}={v}" for k, v in effect.values.items() if k not in ("host", "text", "settings"))
                run.sim.note(f"{self.port} log {effect.event} {told}")
            elif isinstance(effect, e.WriteCheckpoint):
                self._checkpoint(effect.clock)
            elif isinstance(effect, e.LoadCheckpoint):
                self._load(effect.clock)
            elif isinstance(effect, e.StopProcess):
                run.over = True

    # Killed, and made again.

    def _die(self, kill: Kill) -> None:
        sim = self.run.sim
        self.leave, self.writing, self.era = -1, None, self.era + 1
        sim.crash(self.port, self.up)
        sim.struck["shard killed"] += 1
        sim.at(sim.now_ns + kill.lasts_ns, self._revive)

    def _revive(self) -> None:
        """As ps/process/runner.py begins with a journal."""
        run, sim = self.run, self.run.sim
        if run.over or run.servers.get(self.index) is not self:  # its keys have moved
            return
        assert isinstance(self.shadow, Kept)
        done = self.shadow.again(self._serve, self._read_again, self._again)
        self.awake = AwakeClock(self._wall, self.server.now_ns)
        run.checker.replayed(self)
        sim.start(self, self.port, self.up)
        if self.kills or type(self).shadow_of is not None:
            self.shadow.begin()
        else:
            self.shadow = None  # nobody reads a journal any more
        self._go_on(done)
        run.replayed(self)

    def _again(self, event: MachineEvent) -> None:
        """It is about to be done again."""

    def _go_on(self, done: JournalReplay) -> None:
        """With a machine to which all has been done again."""
        sim = self.run.sim
        if done.stop is not None:
            self.run.over = True
            return
        planned, clock = self.shard.model_shard, self.shard.writing
        whole = planned is not None and planned.stage in (ClockStage.FOLD, ClockStage.CHECKPOINT)
        if clock == self.shard.min_clock and whole:
            sim.struck["checkpoint once more"] += 1
            self._checkpoint(clock)
        elif clock >= 0:
            sim.struck["checkpoint given up"] += 1
            self._wrote(clock, self.era)
        self._happen(MachineEvent(EventKind.START, self.now_ns))

    # Checkpoints.

    def _checkpoint(self, clock: int) -> None:
        planned = self.shard.model_shard
        if planned is None or planned.store.publication < 0:
            return
        self._on_disk(self.writing)  # the one before is waited for
        self.run.checker.follow(self)
        self.run.checker.saved(self, clock)
        arrays = {name: array.copy() for name, array in planned.arrays(self.shard.ledger).items()}
        self.writing = (clock, arrays, planned.store.publication, planned.plan.packed())
        packed = self.coordinator.ranges.packed(clock) if self.coordinator is not None else b""
        self.facts = (packed, planned.saved, planned.steps)  # of what is being written
        takes_ns = 0 if self.server.over else self.run.disk.takes_ns(self.index, clock)
        if takes_ns:
            self.run.sim.at(self.run.sim.now_ns + takes_ns, self._on_disk, self.writing)
        else:
            self._on_disk(self.writing)

    def _on_disk(self, writing: Writing | None) -> None:
        """The checkpoint is on disk (ps/checkpoints/checkpoint_writer.py), unless this life is over or the run went back."""
        if writing is None or writing is not self.writing or not self.run.sim.alive(self.up):
            return
        (clock, arrays, publication, plan), self.writing = writing, None
        shards, shared = self.shard.settings.shards, self.shard.ledger.shared
        self.run.disk.write(self.index, clock, arrays, publication, plan, shared, shards)
        self.run.disk.facts[self.index, clock] = self.facts
        self.run.sim.note(f"{self.port} checkpoint {clock}")
        self.run.sim.at(self.run.sim.now_ns, self._wrote, clock, self.era)

    def _wrote(self, clock: int, era: int) -> None:
        """The machine is told."""
        if self.run.sim.alive(self.up) and era == self.era:
            kept = self.run.disk.clocks(self.index)
            self._happen(MachineEvent(EventKind.WROTE, self.now_ns, values=(clock, [*kept], 0)))

    def _load(self, clock: int) -> None:
        self.writing, self.era = None, self.era + 1
        if self.shadow is not None:
            self.shadow.changed()
        if clock < 0:
            return self.run.disk.drop_after(self.index, clock)
        self.run.checker.follow(self)
        self._read_again(clock)
        self.run.checker.loaded(self, clock)
        self.run.sim.note(f"{self.port} load {clock}")

    def _read_again(self, clock: int) -> None:
        self.run.disk.drop_after(self.index, clock)
        if clock >= 0:
            assert self.shard.model_shard is not None
            shards = self.shard.settings.shards
            load = LoadArrays(*self.run.disk.read(self.index, shards, clock))
            recut, steps = self.run.disk.shards(clock) != shards, self.run.disk.facts[0, clock][2]
            self.shard.model_shard.begin(load, recut, steps)


class Worker:
    """A scripted worker. It sees events only between two steps, as a training script does."""

    def __init__(self, run: Host, index: int, life: int) -> None:
        self.run, self.index, self.life = run, index, life
        self.name = f"{run.prefix}w{index}.{life}"
        self._adopt(run.settings)
        self.member = run.kit.member(self.name, "here", timing=TIMING)
        self.events: deque[MemberEffect] = deque()
        self.exchanges: list[Exchange[FloatArray]] = []
        self.replicas: list[HostReplica] = []
        self.worker, self.epoch = -1, 0
        self.computing = False  # with `clock`
        self.computed = False  # the update of `clock` is there and not yet pushed
        self.rows: list[int] = []  # ranges that are in it
        self.ask: m.RangeRequest | None = None  # for another one: the newest
        self.asking = False  # and it is not answered
        self.enough = False  # there is no other one now: the update is of those in `rows`
        self.steps = 0
        self.finishing = self.ended = False
        self.asked: set[int] = set()  # shards that were asked for the last model
        self.tables = ModelSpec.unpacked(run.plan).tables
        self.rows_at, self.rows_due = -1, set[int]()  # the clock that rows were asked for, and which shards owe them
        self.moments_asked, self.moments_due = 0, set[int]()  # requests for the optimizer's state; which shards owe it
        self.leapt_ns = 0
        self.awake = AwakeClock(self._wall)
        run.sim.start(self, self.name)
        self._apply(self.member.join(self.awake.now()))
        self._apply(self.member.declare(run.plan, self.awake.now()))

    def _adopt(self, settings: Settings) -> None:
        self.settings, self.mode = settings, settings.mode()
        self.whole = ladder(settings.compress_down).lossless and self.mode.fragments == 1

    def _wall(self) -> int:
        return self.run.sim.now_ns + self.leapt_ns

    def leap(self, by_ns: int) -> None:
        """The clock of its machine jumps."""
        self.leapt_ns += by_ns

    @property
    def clock(self) -> int:
        return self.exchanges[0].clock if self.exchanges else 0

    @property
    def run_clock(self) -> int:
        return self.clock + min((x.min_clock - x.settled for x in self.exchanges), default=0)

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self._apply(self.member.receive(int(source.rpartition("s")[2]), message, self.awake.turn()))
        self._go()

    def tick(self, now_ns: int) -> None:
        self._apply(self.member.tick(self.awake.turn()))
        self._go()

    def linked(self, shard: int) -> None:
        """The process of this shard is another one."""
        if self.run.sim.alive(self.name):
            self.member.repeat_soon(shard)

    def server_at(self, shard: int) -> str:
        return f"{self.run.prefix}s{shard}"

    def _apply(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, e.Send):
                assert isinstance(effect.peer, int)
                if isinstance(effect.message, m.Pull):
                    self.run.checker.pulled(effect.peer, effect.message)
                self.run.send(self.name, self.server_at(effect.peer), effect.message)
            else:
                self.events.append(effect)

    def _send(self, shard: int, messages: Sequence[m.Message]) -> None:
        self._apply(self.member.send(shard, messages, self.awake.now()) if messages else [])

    # The script.

    def _go(self) -> None:
        """Handle what has come, then do all that need not wait."""
        while not self.computing and not self.ended:
            if self.events:
                self._event(self.events.popleft())
            elif not self.exchanges:
                return
            elif self.finishing:
                return self._finish()
            elif self.moments_due:
                return
            elif self.computed:
                if not all(x.may_push for x in self.exchanges):
                    return
                self._push()
            elif not all(x.may_compute for x in self.exchanges):
                return
            elif self.run.ranges is not None:
                return self._take(self.run.ranges)
            elif self.run_clock >= self.run.clocks:
                self.finishing = True
            elif self._has_rows():
                self._compute()
            else:
                return

    def _has_rows(self) -> bool:
        """All rows of the table are here for this clock; else they are asked for."""
        if self.tables and self.rows_at != self.clock:
            self.rows_at, self.rows_due = self.clock, {*range(len(self.exchanges))}
            for shard in sorted(self.rows_due):
                count = self._rows_on(shard)
                asked = rows.encode(0, count, np.arange(count, dtype=np.uint32))
                self._send(shard, [m.RowsRequest(self.worker, self.epoch, self.clock, self.clock, asked)])
        return not self.rows_due

    def _rows_on(self, shard: int) -> int:
        return rows_of(TABLE_ROWS, shard, len(self.exchanges))

    def _event(self, event: MemberEffect) -> None:
        checker = self.run.checker
        if isinstance(event, e.MemberStarted):
            self._start(event)
        elif isinstance(event, e.RangeArrived):
            self._told(event)
        elif isinstance(event, e.PushesPaused):
            self._hold(event.at, event.number)
        elif isinstance(event, e.MemberResharded):
            self._move(event)
        elif isinstance(event, e.GiveWeights):
            keys = event.shard, self.replicas[event.shard].begin, self.replicas[event.shard].end
            cuts = parts(*keys[1:], self.run.part_keys)
            self._send(event.shard, self.exchanges[event.shard].give(raw_pieces(FIRST.copy(), 0, cuts)))
        elif isinstance(event, (e.StateArrived, e.MasterArrived, e.PushSettled)) and self.exchanges:
            exchange = self.exchanges[event.shard]
            if isinstance(event, e.PushSettled):
                checker.settled(self, event)
            self._send(event.shard, exchange.take(event))
            if isinstance(event, e.StateArrived):
                pulled = self.replicas[event.shard].pulled
                checker.state_arrived(self, event.shard, exchange.publication, pulled)
            elif isinstance(event, e.MasterArrived) and exchange.shared:
                model = exchange.replica.master([*exchange.shared_values()])
                checker.model_arrived(self, event.shard, model.tobytes())
        elif isinstance(event, e.RowsArrived) and event.request == self.rows_at:
            self.rows_due.discard(event.shard)
        elif isinstance(event, e.MomentsArrived) and event.request == self.moments_asked:
            self.moments_due.discard(event.shard)
            checker.moments_arrived(self, event.shard, event.clock, bytes(event.payload))
        elif isinstance(event, e.BuffersRequested):
            self._apply(self.member.buffers(BUFFERS, self.clock))
        elif isinstance(event, e.MemberFailed):
            self.ended = True
            self.run.worker_failed(self, event)
        elif isinstance(event, e.MemberLeft):
            self.ended = True
            self.run.sim.note(f"{self.name} left")

    def _start(self, event: e.MemberStarted) -> None:
        """A place, or another one: what was under way belongs to the life before."""
        self._adopt(Settings.unpacked(event.settings))
        self.replicas = [self._replica(begin, end) for begin, end in event.ranges]
        self.exchanges = [Exchange(self.mode, replica, self.whole) for replica in self.replicas]
        self.worker, self.epoch = event.worker, event.epoch
        self.computed = self.finishing = self.asking = self.enough = False
        self.rows_at, self.rows_due = -1, set()
        self.rows.clear()
        self.asked.clear()
        begun = [exchange.begin(event.worker, event.epoch, event.clock) for exchange in self.exchanges]
        self.run.checker.worker_started(self)
        for shard, messages in enumerate(begun):
            self._send(shard, messages)
        self._take_over(event.clock)

    def _take_over(self, clock: int) -> None:
        """Ask for the state of the servers' optimizer, where the run's start has ended at this clock."""
        self.moments_due = {*range(len(self.exchanges))} if self.settings.hands_over(clock) else set()
        self.moments_asked += 1
        for shard, replica in enumerate(self.replicas) if self.moments_due else ():
            keys = replica.begin, replica.end
            ask = m.MomentsRequest(self.worker, self.epoch, self.moments_asked, *keys, TOTAL)
            self._send(shard, [ask])

    def _hold(self, at: int, number: int) -> None:
        """Push nothing from this clock on, or from the present one, where each worker names its own."""
        chosen = at >= 0 and holds_apart(self.mode, self.settings.quorum)
        at = max(at, self.clock) if chosen else at
        for exchange in self.exchanges:
            exchange.hold(at)
        if chosen:
            self._apply(self.member.holds_at(number, at, self.awake.now()))

    def _move(self, event: e.MemberResharded) -> None:
        """The keys are cut anew, or the plan is another one, and this life goes on."""
        starting = self.settings.starting
        self._adopt(Settings.unpacked(event.settings))
        swapped = starting != self.settings.starting
        before, replicas = self.exchanges, self.replicas
        self.replicas = [self._replica(begin, end) for begin, end in event.ranges]
        for replica in self.replicas:
            replica.inherit([] if swapped else replicas)
        self.exchanges = [Exchange(self.mode, replica, self.whole) for replica in self.replicas]
        self.epoch = event.epoch
        self.asked.clear()
        place = event.worker, event.epoch, event.clock
        begun = [each.begin(*place) if swapped else each.go_on(*place, before) for each in self.exchanges]
        self.run.checker.worker_started(self)
        for shard, messages in enumerate(begun):
            self._send(shard, messages)
        if self.asking and self.ask is not None:
            self._send(0, [replace(self.ask, epoch=self.epoch)])
        self._take_over(event.clock)

    def _replica(self, begin: int, end: int) -> HostReplica:
        cuts = [fragment(begin, end, self.mode.fragments, index) for index in range(self.mode.fragments)]
        feedbacks = [(keys, ErrorFeedback(parse("dense"), keys[1] - keys[0])) for keys in cuts]
        return HostReplica(begin, end, feedbacks, lambda low, high: parts(low, high, self.run.part_keys))

    # Ranges of samples, as worker/sync/sample_client.py takes them.

    def _take(self, work: Work) -> None:
        if self.enough or len(self.rows) == work.a_step(self.index):
            return self._compute()
        if self.asking:
            return
        number, self.asking = 1 + (self.ask.number if self.ask is not None else 0), True
        what = (self.clock, len(self.rows), work.samples, SIZE, work.ranges)
        self.ask = m.RangeRequest(self.worker, self.epoch, number, *what)
        self._send(0, [self.ask])

    def _told(self, told: e.RangeArrived) -> None:
        if not self.asking or self.ask is None or told.number != self.ask.number:
            return
        self.asking = False
        if told.index >= 0:
            self.rows.append(told.index)
        elif self.rows:
            self.enough = True
        elif told.over:
            self.finishing = True
        elif self.mode.bound is None and not any(x.held_at >= 0 for x in self.exchanges):
            self.asking = True
            self.run.sim.at(self.run.sim.now_ns + IDLE_NS, self._ask_again, self.ask.number)
        else:
            self.computed = True  # of nothing

    def _ask_again(self, number: int) -> None:
        if self.run.sim.alive(self.name) and self.ask is not None and self.ask.number == number:
            self.asking = False
            self._go()

    def _compute(self) -> None:
        run, self.enough = self.run, False
        run.checker.computes(self, self.clock, [x.settled for x in self.exchanges])
        for x in self.exchanges:
            x.base(x.replica.begin, x.replica.end, np.empty(x.replica.end - x.replica.begin, np.float32))
        self.computing = True
        run.sim.at(run.sim.now_ns + run.compute_ns(self.index), self._done)

    def _done(self) -> None:
        if self.run.sim.alive(self.name):
            self.computing, self.computed = False, True
            self._go()

    def _push(self) -> None:
        """Send update `clock` to every shard."""
        run, clock = self.run, self.clock
        self.computed = False
        self.steps += 1
        if run.ranges is not None:
            run.ranges.pushed((self.worker, self.epoch, clock), tuple(self.rows))
            if not self.rows:
                run.checker.pushed(self, clock, np.zeros(KEYS, np.float32), 0)
                for shard, exchange in enumerate(self.exchanges):
                    self._send(shard, exchange.skip("", self._steps_of(clock)))
                return run.worker_pushed(self)
            self.rows.clear()
        values = run.gives(self, update_of(self.index, self.life, self.steps))
        samples = 1 + (self.index + clock // 7) % 4
        run.checker.pushed(self, clock, values, samples)
        for shard, exchange in enumerate(self.exchanges):
            begin, end = exchange.turn(clock)
            pieces = exchange.replica.encode(values[begin:end], clock)
            hyper, more = HYPER if self.mode.rule is FoldRule.OPTIMIZER else b"", list[Piece]()
            if self.tables:
                hyper, end = pack([RATES, [], RATES]), exchange.replica.end
                at, gradient = rows_given((self.worker, self.epoch, clock))
                more = [Piece(ROWS, end, end, rows.encode(0, self._rows_on(shard), at, gradient))]
            self._send(shard, exchange.push(pieces, samples, "", hyper, more, self._steps_of(clock)))
        run.worker_pushed(self)

    def _steps_of(self, clock: int) -> int:
        """The local steps that its update is of, as in rounds by the clock."""
        return steps_given(self.worker, clock) if self.settings.sync == "local" else 0

    def _finish(self) -> None:
        """All is pushed: wait until it is in, take the shared model, leave."""
        if self.member.phase is not MemberPhase.RUNNING:
            return
        if any(x.in_flight for x in self.exchanges):
            for shard, exchange in enumerate(
                self.exchanges
            ):  # a barrier is known to be folded by the state that has it
                self._send(shard, exchange.need(exchange.clock) if self.mode.barrier else [])
            return
        if all(x.shared for x in self.exchanges) and len(self.asked) == len(self.exchanges):
            self.run.checker.leaves(self)
            clock, self.exchanges = self.clock, []
            self._apply(self.member.leave(clock, self.awake.now()))
            return
        for shard, exchange in enumerate(self.exchanges):
            if shard not in self.asked:
                self.asked.add(shard)
                self._send(shard, exchange.ask_shared(last=True))
