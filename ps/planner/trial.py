"""A plan is tried before it is printed: how long a step takes by the machines of a run in virtual time. No I/O.

Rules
- Servers, clusters, members and exchanges are those that ship. A few keys stand for the model. Its bytes, what workers compute
  and encode, and what servers handle take as long as `StepPrices` says, each one after the other.
- Hosts have a card each way, places a wire to each other one, and pairs of hosts a link. Small messages take the delay alone.
- Nobody fails. Nobody ends. Which of the root's clocks count ps/planner/counted.py says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from narrows.compression import ErrorFeedback, ladder, parse
from narrows.compression.codecs import raw_pieces
from narrows.compression.replica import HostReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import fragment
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import REQUEST_RETRY, Retry, Timing
from narrows.protocols.effects import NS, MemberEffect, ServerEffect
from narrows.protocols.errors import LocalProtocolError
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.planner.choose import SMALL, DeploymentChoice
from narrows.ps.planner.counted import Counted
from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network_wires import FAST, NetworkWires, Wires
from narrows.ps.planner.step_prices import Groups, StepPrices
from narrows.ps.planner.timeline import CHUNKS, Stream, Timeline, Wire
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import MeanFactory
from narrows.ps.shard.reports import COORDINATOR
from narrows.ps.shard.shard import Shard
from narrows.ps.store.changes import FloatArray

KEYS = 16  # of the model: some for each shard of a server
PLAN = ModelSpec((TensorSpec("w", (KEYS,), "float32"),), "", ((0,),)).packed()  # updates are pushed: no optimizer
AGES_S = 80_000.0  # nobody is lost
TIMING = Timing(Retry(NS // 4), replace(REQUEST_RETRY, first_ns=int(AGES_S * NS)), lost_ns=int(AGES_S * NS))
TICK_NS = NS // 5
EVENTS_MAX = 100_000  # 1 to 3 s of a core
CHUNKS_FEW = 2  # of a message, where hosts are many
BULK = (m.Push, m.State)


class TrialLevel:
    """One server and its children. `hosts`: of its shards; `children`: those below each of these."""

    def __init__(
        self,
        trial: Trial,
        name: str,
        way: ModeAndSpec,
        hosts: Sequence[int],
        children: Groups,
        above: TrialLevel | None,
    ) -> None:
        self.trial, self.name, self.hosts, self.above = trial, name, hosts, above
        work, coded = trial.prices.work, trial.prices.work.coded[way.compress]
        self.whole, count = way.compress == "dense", len(hosts)
        codes = {} if self.whole else {"compress": "fp16", "compress_down": "fp16"}  # any that makes differences
        flags = way.flags(updates=True) | codes
        self.settings = Settings(**flags, workers=len(children), shards=count, lease=AGES_S).validated()
        self.samples = sum(float(trial.prices.samples[[*hosts]].sum()) for hosts in children)
        self.size = int(coded.bytes * work.parameters / count)
        self.encode_ns = int(coded.encode_s * work.parameters * NS)
        serve_s = coded.serve_s * work.parameters / (count * work.shards)
        self.serving = [Wire(0, max(1, int(self.size / serve_s)) if serve_s else FAST) for _ in hosts]
        self.ways = NetworkWires(trial.prices, trial.wires, max(1.0, float(self.size)))
        self.peers: dict[bytes, TrialServer | TrialWorker] = {}
        self.streams: dict[tuple[int, int, bytes, bool], Stream] = {}
        self.shards = [TrialServer(self, index) for index in range(count)]

    def up(self, child: TrialServer | TrialWorker, shard: int, message: m.Message, late_ns: int = 0) -> None:
        server = self.shards[shard]
        self.peers[child.peer] = child
        more = [self.serving[shard]] if isinstance(message, m.Push) else []
        stream = self._stream(child.host, server.host, child.peer, more)
        self._send(stream, message, late_ns, partial(server.below, child.peer, message))

    def down(self, shard: int, peer: bytes, message: m.Message) -> None:
        child = self.peers[peer]
        stream = self._stream(self.hosts[shard], child.host, peer, [])
        self._send(stream, message, 0, partial(child.told, shard, message))

    def _stream(self, source: int, target: int, peer: bytes, more: list[Wire]) -> Stream:
        key = (source, target, peer, bool(more))
        if key not in self.streams:
            path = [*self.ways.path(source, target), *more]
            self.streams[key] = Stream(self.trial.time, path, self.size, self.trial.chunks(self.size))
        return self.streams[key]

    def _send(self, stream: Stream, message: m.Message, late_ns: int, action: Callable[[], None]) -> None:
        time = self.trial.time
        # Whole states of what is coded come to children that join, before the time that counts.
        if isinstance(message, BULK) and (self.whole or not isinstance(message, m.State) or not message.whole):
            if late_ns:
                time.at(time.now_ns + late_ns, stream.send, action)
            else:
                stream.send(action)
        else:
            time.at(time.now_ns + stream.delay_ns, action)


class TrialServer:
    """One shard of a level's server, as ps/process/runner.py has it."""

    def __init__(self, level: TrialLevel, index: int) -> None:
        self.level, self.index, self.host = level, index, level.hosts[index]
        self.peer = level.name.encode().ljust(m.NAME_BYTES) + b"/%d" % index  # above
        self.samples, self.pushed_ns, self.pushes = level.samples, 0, 0
        self.own = b"shard".ljust(m.NAME_BYTES) + b"/%d" % index  # for shard 0
        above, first = level.above, index == 0
        coordinator = Coordinator(level.settings, 1 << 20, -1, child=above is not None) if first else None
        member = Member(level.name, "here", timing=TIMING, below=coordinator.tree) if coordinator and above else None
        means = MeanFactory(child=above is not None, member=member, coordinator=coordinator, timing=TIMING)
        self.server = Server(
            Shard(index, level.settings, 1, 1 + index, (), means), coordinator, member, "above" if above else ""
        )
        level.trial.time.at(0, self.happen, EventKind.START)
        level.trial.ticks(self.happen, EventKind.TICK)

    def below(self, peer: bytes, message: m.Message) -> None:
        trial = self.level.trial
        if isinstance(message, m.Push) and self.level is trial.root and not self.index:
            trial.pushed(self.level.peers[peer])
        self.happen(EventKind.BELOW, peer, message)

    def told(self, shard: int, message: m.Message) -> None:
        """By the server above."""
        self.happen(EventKind.ABOVE, b"", message)

    def happen(
        self, kind: EventKind, peer: bytes = b"", message: m.Message | None = None, values: tuple[object, ...] = ()
    ) -> None:
        now_ns = self.level.trial.time.now_ns
        self._carry_out(self.server.happen(MachineEvent(kind, now_ns, peer, message, values)))
        while self.server.inner:
            self._carry_out(self.server.advance(now_ns))

    def _carry_out(self, effects: Sequence[ServerEffect]) -> None:
        level, time = self.level, self.level.trial.time
        for effect in effects:
            if isinstance(effect, e.Checkpoint):
                time.at(time.now_ns, self.happen, EventKind.WROTE, b"", None, (effect.clock, [effect.clock], 0))
            elif not isinstance(effect, e.Send):
                continue
            elif isinstance(effect.peer, int):
                assert level.above is not None
                level.above.up(self, effect.peer, effect.message, level.above.encode_ns)
            elif effect.peer == COORDINATOR:
                self._beside(level.shards[0], EventKind.BELOW, self.own, effect.message)
            elif effect.peer.startswith(b"shard".ljust(m.NAME_BYTES)):
                shard = level.shards[int(effect.peer.rpartition(b"/")[2])]
                self._beside(shard, EventKind.COORDINATOR, b"", effect.message)
            else:
                level.down(self.index, effect.peer, effect.message)

    def _beside(self, other: TrialServer, kind: EventKind, peer: bytes, message: m.Message) -> None:
        time = self.level.trial.time
        time.at(time.now_ns + self.level.ways.delay_ns(self.host, other.host), other.happen, kind, peer, message)


class TrialWorker:
    """A worker that computes for ever, as worker/sync/engine.py has it."""

    def __init__(self, level: TrialLevel, host: int) -> None:
        self.level, self.host = level, host
        self.samples, self.pushed_ns, self.pushes = float(level.trial.prices.samples[host]), 0, 0
        name = f"worker-{host}"
        self.peer = name.encode().ljust(m.NAME_BYTES) + b"/"
        self.mode = level.settings.mode()
        prices = level.trial.prices
        self.own_ns = int(float(prices.compute_s[host]) * self.mode.local_steps * NS) + level.encode_ns
        self.whole = ladder(level.settings.compress_down).lossless
        self.member = Member(name, "here", timing=TIMING)
        self.events: deque[MemberEffect] = deque()
        self.exchanges: list[Exchange[FloatArray]] = []
        self.computing = self.computed = False
        self._apply(self.member.join(0))
        self._apply(self.member.declare(PLAN, 0))
        level.trial.ticks(self._tick)

    def told(self, shard: int, message: m.Message) -> None:
        self._apply(self.member.receive(shard, message, self.level.trial.time.now_ns))
        self._go()

    def _tick(self) -> None:
        self._apply(self.member.tick(self.level.trial.time.now_ns))
        self._go()

    def _apply(self, effects: Iterable[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, e.Send):
                assert isinstance(effect.peer, int)
                self.level.up(self, effect.peer, effect.message)
            else:
                self.events.append(effect)

    def _say(self, shard: int, messages: Sequence[m.Message]) -> None:
        self._apply(self.member.say(shard, messages, self.level.trial.time.now_ns) if messages else [])

    def _go(self) -> None:
        while self.events:
            self._event(self.events.popleft())
        if not self.exchanges or self.computing:
            return
        if self.computed and all(x.may_push for x in self.exchanges):
            self.computed = False
            for shard, exchange in enumerate(self.exchanges):
                replica = exchange.replica
                zeros = np.zeros(replica.end - replica.begin, np.float32)
                self._say(shard, exchange.push(replica.encode(zeros, exchange.clock), 1))
        if not self.computed and all(x.may_compute for x in self.exchanges):
            for x in self.exchanges:  # own updates that no longer stand in are forgotten
                x.base(x.replica.begin, x.replica.end, np.empty(x.replica.end - x.replica.begin, np.float32))
            self.computing = True
            self.compute()

    def compute(self) -> None:
        """All inner steps of a clock, and the encoding of its update."""
        time = self.level.trial.time
        time.at(time.now_ns + self.own_ns, self.done)

    def done(self) -> None:
        self.computing, self.computed = False, True
        self._go()

    def _event(self, event: MemberEffect) -> None:
        if isinstance(event, e.Started):
            self.exchanges = [Exchange(self.mode, self._replica(*keys), self.whole) for keys in event.ranges]
            for shard, exchange in enumerate(self.exchanges):
                self._say(shard, exchange.begin(event.worker, event.epoch, event.clock))
        elif isinstance(event, e.GiveWeights):
            replica = self.exchanges[event.shard].replica
            zeros = np.zeros(KEYS, np.float32)
            self._say(
                event.shard, self.exchanges[event.shard].give(raw_pieces(zeros, 0, [(replica.begin, replica.end)]))
            )
        elif isinstance(event, (e.StateArrived, e.PushSettled)) and self.exchanges:
            self._say(event.shard, self.exchanges[event.shard].take(event))
        elif isinstance(event, e.Held):
            for exchange in self.exchanges:
                exchange.held_at = event.at
        elif isinstance(event, e.Failed):
            raise LocalProtocolError(f"{self.member.token} fails in a trial: {event.text}")

    def _replica(self, begin: int, end: int) -> HostReplica:
        cuts = [fragment(begin, end, self.mode.fragments, index) for index in range(self.mode.fragments)]
        feedbacks = [(keys, ErrorFeedback(parse("dense"), keys[1] - keys[0])) for keys in cuts]
        return HostReplica(begin, end, feedbacks, lambda low, high: [(low, high)])


class Trial:
    """One plan."""

    def __init__(
        self, prices: StepPrices, plan: DeploymentChoice, time: Timeline | None = None, wires: Wires | None = None
    ) -> None:
        """time, wires: those of what goes on beside."""
        self.prices, self.plan, self.time = prices, plan, time or Timeline()
        self.tick_ns = max(TICK_NS, int(plan.step_s * plan.above.mode.local_steps * NS))
        self.wires: Wires = {} if wires is None else wires
        self.samples = 0.0  # that the root has updates of
        self.reached: Counter[int] = Counter()  # children that have pushed so many updates
        self.ends_ns: list[float] = []  # of each clock
        self.own_s: list[float] = []  # of a step, by child of the root: its slowest worker alone
        self.machines = self.events = 0
        self.root = TrialLevel(self, "root", plan.above, plan.spread or (plan.root,), plan.groups, None)
        for number, (server, group) in enumerate(zip(plan.servers, plan.groups, strict=True)):
            level = self.root
            if len(group) > 1:
                level = TrialLevel(
                    self, f"c{number}", plan.below, (server,), tuple((host,) for host in group), self.root
                )
            own_ns = max(self.worker(level, host).own_ns for host in group)
            self.own_s.append(own_ns / NS / level.settings.mode().local_steps)

    def worker(self, level: TrialLevel, host: int) -> TrialWorker:
        return TrialWorker(level, host)

    def chunks(self, size: int) -> int:
        """In which a message of this size is sent."""
        return CHUNKS if len(self.prices.hosts) <= SMALL else CHUNKS_FEW

    def ticks(self, action: Callable[..., None], *arguments: Any) -> None:
        """Out of step with the others."""
        self.machines += 1
        after_ns = self.machines * self.tick_ns // len(self.prices.hosts) % self.tick_ns
        self.time.at(after_ns, self._ticked, action, arguments)

    def _ticked(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        action(*arguments)
        self.time.at(self.time.now_ns + self.tick_ns, self._ticked, action, arguments)

    def pushed(self, child: TrialServer | TrialWorker) -> None:
        """The root has an update of this child. With a bound a clock is over when it has one of each: who is ahead waits later.
        Without one it is over when it has as many samples as all have in one. Where that was in the middle of an update, it was
        as long ago as a part of that child's clock."""
        child.pushes += 1
        self.reached[child.pushes] += 1
        if self.plan.above.mode.bound is not None:
            if self.reached[child.pushes] == len(self.plan.groups):
                self.ends_ns.append(self.time.now_ns)
            return
        now_ns, more = self.time.now_ns, self.samples + child.samples - self.root.samples * (len(self.ends_ns) + 1)
        self.samples += child.samples
        if more > -1e-9 * self.samples:
            self.ends_ns.append(now_ns - max(more, 0.0) / child.samples * (now_ns - child.pushed_ns))
        child.pushed_ns = now_ns

    @property
    def least_s(self) -> float:
        """Seconds of a step, where nothing but computing takes time."""
        if self.plan.above.mode.bound is not None:
            return max(self.own_s)
        samples = [float(self.prices.samples[[*group]].sum()) for group in self.plan.groups]
        return self.root.samples / sum(each / own_s for each, own_s in zip(samples, self.own_s, strict=True))

    @property
    def pairs(self) -> int:
        """Of a child and a shard, on both levels; the heartbeats of a child are one more."""
        clusters = sum(len(group) for group in self.plan.groups if len(group) > 1)
        return len(self.plan.groups) * (1 + len(self.root.hosts)) + 2 * clusters

    def step_s(self, events: int = EVENTS_MAX) -> float | None:
        """Seconds of a step, or None where so many events are too few."""
        counted, known = Counted.of(self.plan, len(self.prices.hosts)), 0
        for self.events in range(events):
            if len(self.ends_ns) > known:
                known = len(self.ends_ns)
                if (took_ns := counted.took_ns(self.ends_ns)) is not None:
                    # A child that came late may be catching up still: nobody is faster than it computes.
                    return max(took_ns / NS / self.plan.above.mode.local_steps, self.least_s)
            if not self.time.step():
                break
        return None
