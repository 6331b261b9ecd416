"""The parts of a simulated cluster that stand where our runners stand: a disk, a server process, a scripted worker.

- `Process` stands where ps/runner.py stands: it carries out effects and has no rule of its own.
- `Worker` stands where worker/engine.py stands and keeps its rules: it computes with clock c only on states that are
  settled to c - s, keeps at most a window in flight, asks one clock ahead where this one is served, and begins anew when told.
- `Host` is the cluster that they belong to, one alone (simulation.py) or one of a tree (simulation_tree.py); `Watch` is
  told of all that they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pytest

from narrows.compression import accumulate
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.cluster import coordinator
from narrows.protocols.cluster.coordinator import Coordinator
from narrows.protocols.cluster.run import Decision
from narrows.protocols.effects import NS, MemberEffect, ServerEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.keys import Plan, TensorSpec, fragment, parts
from narrows.protocols.member.member import Member, Session, Timing
from narrows.protocols.member.meter import LinkMeter
from narrows.protocols.modes import Rule, Settings
from narrows.protocols.wire import pack, unpack
from narrows.ps.process.checkpoints import KEPT
from narrows.ps.server import Server
from narrows.ps.shard import COORDINATOR, Shard
from narrows.ps.uplink import Place
from simulation.mirrors import RATE, FloatArray, Violation
from simulation.network import Simulator

CLOCKS = 20
KEYS = 7  # of the model: shards of three and four, parts of two
PART_KEYS = 2
TIMING = Timing(join_retry_ns=NS // 4, request_retry_ns=NS // 2, bytes_per_second=1 << 30)
FIRST = np.arange(KEYS, dtype=np.float32)
HYPER = pack([pack([{"lr": RATE}]), []])
_PLAN = Plan((TensorSpec("w", (KEYS,), "float32"),), "SGD", ((0,),))
PLANS = {norm: replace(_PLAN, max_grad_norm=norm).packed() for norm in (0.0, 1.5)}


def update_of(index: int, life: int, step: int) -> FloatArray:
    """Small whole numbers, other ones for each worker and step: sums of them are exact in float32."""
    return ((np.arange(KEYS) * 5 + index * 11 + life * 7 + step * 3) % 17 - 8).astype(np.float32)


class PlainSGD:
    """The least server optimizer: x -= rate * gradient."""

    def step(
        self, weights: FloatArray, gradient: FloatArray, hyper: bytes, absent: Sequence[int], scale: float
    ) -> None:
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


@dataclass(frozen=True, slots=True)
class Kit:
    """The machines of a run; a test plants a bug by giving a subclass."""

    shard: type[Shard] = Shard
    coordinator: type[Coordinator] = Coordinator
    member: type[Member] = Member


def planted(bug: Kit | type[Decision], monkeypatch: pytest.MonkeyPatch) -> Kit:
    """The machines of a run with this bug: a kit, or a decision that every coordinator takes in the place of its base."""
    if isinstance(bug, Kit):
        return bug
    assert bug.__base__ is not None
    monkeypatch.setattr(coordinator, bug.__base__.__name__, bug)
    return Kit()


class Watch(Protocol):
    """Told of all that the actors of one cluster do; raises Violation."""

    def worker_started(self, worker: Worker) -> None: ...
    def computes(self, worker: Worker, clock: int, min_clocks: Sequence[int]) -> None: ...
    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None: ...
    def pulled(self, shard: int, pull: m.Pull) -> None: ...
    def settled(self, worker: Worker, event: e.PushSettled) -> None: ...
    def state_arrived(self, worker: Worker, shard: int, publication: int, pulled: FloatArray) -> None: ...
    def leaves(self, worker: Worker) -> None: ...
    def model_arrived(self, worker: Worker, shard: int, model: bytes) -> None: ...
    def server_started(self, process: Process) -> None: ...
    def follow(self, process: Process) -> None: ...
    def saved(self, process: Process, clock: int) -> None: ...
    def loaded(self, process: Process, clock: int) -> None: ...
    def server_event(self, process: Process, effects: Sequence[ServerEffect], why: str) -> None: ...


class Host(Protocol):
    """The cluster that actors belong to."""

    prefix: str  # of all addresses in it
    settings: Settings
    max_grad_norm: float
    clocks: int  # of each worker
    part_keys: int  # of one message of a push
    kit: Kit
    sim: Simulator[m.Message]
    disk: Disk
    over: bool

    @property
    def parent(self) -> Host | None:
        """The cluster whose servers its own servers are workers of."""

    @property
    def checker(self) -> Watch: ...
    def send(self, source: str, target: str, message: m.Message) -> None: ...
    def compute_ns(self, index: int) -> int: ...
    def worker_pushed(self, worker: Worker) -> None: ...
    def worker_failed(self, worker: Worker, failed: e.Failed) -> None: ...
    def server_event(self, process: Process) -> None: ...


class Process:
    """One server process: port `s<index>`, and its own end `s<index>.<life>` of the link to the coordinator."""

    def __init__(self, run: Host, index: int, life: int) -> None:
        self.run, self.index = run, index
        self.port, self.up = f"{run.prefix}s{index}", f"{run.prefix}s{index}.{life}"
        self.first_port = f"{run.prefix}s0"
        self.above = f"{run.parent.prefix}s{index}" if run.parent is not None else ""  # the shard above
        settings, disk = run.settings, run.disk
        self.shard = run.kit.shard(
            index,
            settings,
            incarnation=life + 1,
            port=1 + index,
            optimizer=lambda plan, begin, end: PlainSGD(),
            checkpoints=disk.clocks(index),
            child=bool(self.above),
        )
        self.shard.session = self._session
        self.coordinator: Coordinator | None = None
        member: Member | None = None
        if index == 0:
            clock = disk.shared(settings.shards)
            self.coordinator = run.kit.coordinator(settings, (life + 1) << 20, clock, child=bool(self.above))
            member = run.kit.member(self.up, "here", timing=TIMING) if self.above else None
            if clock >= 0:
                self.coordinator.adopt_plan(disk.files[0, clock][2])
        self.server = Server(self.shard, self.coordinator, member, self.above)
        run.checker.server_started(self)
        run.sim.start(self, self.port, self.up)
        self._apply(self.server.start(run.sim.now_ns), "start")

    def _session(self, place: Place) -> Session:
        """Of a shard without a member beside it: as the shard's own, with our limits."""
        return Session(self.index, place.worker, place.epoch, place.settings.mode(), TIMING, LinkMeter())

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        try:
            if source == self.above:
                effects = self.server.handle_above(message, now_ns)
            else:
                peer = COORDINATOR if source == self.first_port else source.encode()
                effects = self.server.handle(peer, message, now_ns)
            self._apply(effects, f"{type(message).__name__} of {source}")
        except NarrowsError as error:
            raise Violation(f"{self.port} blames {source}, which keeps the rules: {error}") from error

    def tick(self, now_ns: int) -> None:
        self._apply(self.server.tick(now_ns), "tick")

    def _apply(self, effects: Sequence[ServerEffect], why: str) -> None:
        """Carry out what the machine asks for, and what follows from that inside it; then all is looked at."""
        run, checker = self.run, self.run.checker
        done = [*effects]
        self._carry_out(effects)
        while self.server.inner:
            more = self.server.advance(run.sim.now_ns)
            self._carry_out(more)
            done += more
        checker.server_event(self, done, why)
        run.server_event(self)

    def _carry_out(self, effects: Sequence[ServerEffect]) -> None:
        run = self.run
        for effect in effects:
            if isinstance(effect, e.Send):
                if isinstance(effect.peer, int):
                    run.send(self.port, self.above, effect.message)
                elif effect.peer == COORDINATOR:
                    run.send(self.up, self.first_port, effect.message)
                else:
                    run.send(self.port, effect.peer.decode(), effect.message)
            elif isinstance(effect, e.Log):
                told = " ".join(f"{k}={v}" for k, v in effect.values.items() if k not in ("host", "text"))
                run.sim.note(f"{self.port} log {effect.event} {told}")
            elif isinstance(effect, e.Checkpoint):
                self._checkpoint(effect.clock)
            elif isinstance(effect, e.Load):
                self._load(effect.clock)
            else:
                run.over = True

    def _checkpoint(self, clock: int) -> None:
        shard, disk = self.shard, self.run.disk
        if shard.store is None or shard.plan is None or shard.store.publication < 0:
            return
        self.run.checker.follow(self)
        disk.write(self.index, clock, shard.store.arrays(), shard.store.publication, shard.plan.packed())
        self.run.checker.saved(self, clock)
        self.run.sim.note(f"{self.port} checkpoint {clock}")
        shard.wrote_checkpoint(clock, disk.clocks(self.index))

    def _load(self, clock: int) -> None:
        self.run.disk.drop_after(self.index, clock)
        if clock < 0:
            return
        assert self.shard.store is not None
        self.run.checker.follow(self)
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
    settled: int = -1
    pulls: int = 0
    in_flight: set[int] = field(default_factory=set)
    master: bool = False


class Worker:
    """A scripted worker. It sees events only between two steps, as a training script does."""

    def __init__(self, run: Host, index: int, life: int) -> None:
        self.run, self.index, self.life = run, index, life
        self.name = f"{run.prefix}w{index}.{life}"
        self.settings = run.settings
        self.mode, self.pulls = self.settings.mode(), self.settings.pulls
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
        self._apply(self.member.declare(PLANS[run.max_grad_norm], run.sim.now_ns))

    @property
    def run_clock(self) -> int:
        return self.clock + min((view.min_clock - view.settled for view in self.views), default=0)

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self._apply(self.member.receive(int(source.rpartition("s")[2]), message, now_ns))
        self._go()

    def tick(self, now_ns: int) -> None:
        self._apply(self.member.tick(now_ns))
        self._go()

    def _apply(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, e.Send):
                assert isinstance(effect.peer, int)
                if isinstance(effect.message, m.Pull):
                    self.run.checker.pulled(effect.peer, effect.message)
                self.run.send(self.name, f"{self.run.prefix}s{effect.peer}", effect.message)
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
            elif self.run_clock >= self.run.clocks:
                self.finishing = True
                for view in self.views:
                    view.master = False
            else:
                self._compute()

    def _event(self, event: MemberEffect) -> None:
        checker = self.run.checker
        if isinstance(event, e.Started):
            self.views = [View(begin, end, np.zeros(end - begin, np.float32)) for begin, end in event.ranges]
            self.worker, self.epoch, self.clock = event.worker, event.epoch, event.clock
            self.computed = self.finishing = False  # what was under way belongs to the life before
            checker.worker_started(self)
            for shard in range(len(self.views)):
                self._pull(shard, self.clock)
        elif isinstance(event, e.GiveWeights):
            self._give_weights(event.shard)
        elif isinstance(event, e.StateArrived):
            self._state(event)
        elif isinstance(event, e.PushSettled):
            checker.settled(self, event)
            self.views[event.shard].in_flight.discard(event.clock)
        elif isinstance(event, e.BuffersWanted):
            self._apply(self.member.buffers(b"buffers"))
        elif isinstance(event, e.Failed):
            self.ended = True
            self.run.worker_failed(self, event)
        elif isinstance(event, e.Left):
            self.ended = True
            self.run.sim.note(f"{self.name} left")

    def _give_weights(self, shard: int) -> None:
        view, head = self.views[shard], (self.worker, self.epoch)
        cuts = list(enumerate(parts(view.begin, view.end, self.run.part_keys)))
        messages = [
            m.FirstWeights(*head, i, len(cuts), b, end, m.RAW_FLOAT32, FIRST[b:end].tobytes()) for i, (b, end) in cuts
        ]
        self._apply(self.member.first_weights(shard, messages))
        self._pull(shard, self.clock)

    def _pull(self, shard: int, clock: int, master: bool = False, follow: bool = False) -> None:
        view = self.views[shard]
        view.pulls = view.pulls + 1 if follow else 1
        self._apply(self.member.pull(shard, clock, master, self.run.sim.now_ns, follow=follow))

    def _state(self, event: e.StateArrived) -> None:
        view, last = self.views[event.shard], event.parts[-1]
        view.pulls = max(0, view.pulls - 1)
        if event.master:
            view.master = True
            whole = b"".join(bytes(part.payload) for part in sorted(event.parts, key=lambda part: part.begin))
            self.run.checker.model_arrived(self, event.shard, whole)
            return
        for state in event.parts:
            target = view.pulled[state.begin - view.begin : state.end - view.begin]
            if state.codec == m.RAW_FLOAT32:
                target[:] = np.frombuffer(state.payload, np.float32)
            elif len(state.payload):
                accumulate(state.payload, 1.0, target)
        view.publication, view.min_clock, view.settled = last.publication, last.min_clock, last.settled
        self.run.checker.state_arrived(self, event.shard, view.publication, view.pulled)

    def _ready(self) -> bool:
        ready = True
        for shard, view in enumerate(self.views):
            if view.settled < 0 or not self.mode.allows(self.clock, view.settled):
                ready = False
                if not view.pulls:
                    self._pull(shard, self.clock)
        return ready

    def _compute(self) -> None:
        run = self.run
        run.checker.computes(self, self.clock, [view.settled for view in self.views])
        self.computing = True
        run.sim.at(run.sim.now_ns + run.compute_ns(self.index), self._done)

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
            keys = fragment(view.begin, view.end, self.mode.fragments, clock % self.mode.fragments)
            cuts = list(enumerate(parts(*keys, self.run.part_keys)))
            head = (self.worker, self.epoch, clock)
            messages = [
                m.Push(*head, i, len(cuts), b, end, samples, hyper, m.RAW_FLOAT32, values[b:end].tobytes())
                for i, (b, end) in cuts
            ]
            view.in_flight.add(clock)
            self._apply(self.member.push(shard, messages, run.sim.now_ns))
        self.clock += 1
        for shard, view in enumerate(self.views):
            if view.pulls < self.pulls:
                self._pull(shard, self.clock + self.mode.ahead(self.clock, view.settled, self.pulls), follow=True)
        run.worker_pushed(self)

    def _finish(self) -> None:
        """All is pushed: wait until it is in, take the shared model, leave."""
        if self.member.phase != "running":
            return
        if any(view.in_flight for view in self.views):
            for shard, view in enumerate(self.views):  # a barrier is known to be folded by the state that has it
                if self.mode.barrier and not view.pulls and view.settled < self.clock:
                    self._pull(shard, view.settled + 1 + (self.mode.bound or 0))
            return
        if all(view.master for view in self.views):
            self.run.checker.leaves(self)
            self.views = []
            self._apply(self.member.leave(self.clock, self.run.sim.now_ns))
            return
        for shard, view in enumerate(self.views):
            pulls = self.member.sessions[shard].pulls.values()
            if not view.master and not any(record.pull.master for record in pulls):
                self._pull(shard, self.clock, master=True)
