"""The coordinator of a cluster decides who is a member, in which epoch, and which clocks are closed over which members.

How it works

    workers ── Hello, Declare, Heartbeat, Leave ──> Coordinator <── Report ── shards 0..n-1
                                                        │
               one file a decision, made in this order  │  CheckpointSchedule, SampleLeases, Clocks, GossipDirectory,
                                                        │  ParentPlace, Members, Resharding, RemoteShards, Replans,
                                                        │  Agreements
                                                        └── Ledger ──> each shard

1. A message or a tick changes the state of one decision: `Members` admits a worker, `Clocks` sees in a Report which
   updates are on all shards.
2. `_decide` asks the decisions in their order until none has anything more to decide. A decision reads `Run` and other
   decisions. It changes another decision only by a method of that decision.
3. Each decision adds its fields to the ledger. The coordinator sends the ledger to each shard, and repeats it every
   `LEDGER_RETRY` until a Report shows that the shard has seen it.
4. A shard obeys the newest ledger and reports what it has seen and done. Each Report replaces the one before, so a
   lost Report costs time only.

Rules
- The coordinator lives in process 0, beside shard 0. No other code changes the membership.
- Each change of the member set begins an epoch. A member's message names the epoch in which the member joined, so the
  coordinator recognizes a late message of an earlier membership.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import KEYS_MAX
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import LEDGER_RETRY, MODEL_HAND_OVER_NS
from narrows.protocols.effects import NS, Log, Send, ServerEffect, StopProcess
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.heartbeat_summary import SummaryRow, unpacked
from narrows.ps.coordinator.agreements import Agreements
from narrows.ps.coordinator.attendance import StartNotice
from narrows.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.members import Members
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.remote_shards import RemoteHost, RemoteShards
from narrows.ps.coordinator.replans import Replans
from narrows.ps.coordinator.resharding import Resharding
from narrows.ps.coordinator.run import NO_KEY, Decision, Key, Run, Seat, skips
from narrows.ps.coordinator.sample_leases import SampleLeases
from narrows.ps.coordinator.shared_buffers import SharedBuffers
from narrows.ps.planner.codec_costs import CodecCost
from narrows.ps.planner.host_memory import UNKNOWN, HostMemory

TREE_CHARACTERS_MAX = m.TEXT_MAX - 64  # one string of a message, with the line that ends it


@dataclass(slots=True)
class ShardLine:
    """The coordinator's connection to one shard, and what the two have acknowledged."""

    peer: bytes  # routing id of the shard; b"" for shard 0, which is in this process
    sent_ns: int = 0  # when the newest ledger was sent
    seen: int = -1  # version of the shard's report that the newest ledger acknowledged; -1: no report


class Coordinator:
    """The machine of the coordinator: it takes workers' messages, shards' Reports and ticks, and returns effects.

    Args:
        settings: of the run.
        first_epoch: the first epoch of this life of the coordinator, greater than any epoch of an earlier life.
        restart_clock: clock of the checkpoint that the run resumes from; -1: none.
        child: this cluster is a member of its parent's run. It admits workers once it has its place there:
            after `joined_above`, then `placed`.
        keys_max: the largest number of model parameters that the shards have memory for.
        away: host of each shard that is on another machine, by shard.
        coded: cost of each SPEC, for replanning.
        here: memory of the host of this process, for replanning.
        connected: as in `Members`.
    """

    def __init__(
        self,
        settings: Settings,
        first_epoch: int,
        restart_clock: int = -1,
        child: bool = False,
        keys_max: int = KEYS_MAX,
        away: Mapping[int, str] | None = None,
        coded: Mapping[str, CodecCost] | None = None,
        here: HostMemory = UNKNOWN,
        connected: bool = True,
    ) -> None:
        self.stop_ns = -1  # gossip: when the user stopped the server; -1 unless workers are handing over their models
        self.version, self.lines = 1, {0: ShardLine(b"")}  # of the newest ledger; by shard, 0 is in this process
        self.run = run = Run(settings, first_epoch, restart_clock)
        self.seats, self.reports = run.seats, run.reports
        self.clocks = clocks = Clocks(run)
        self.buffers, self.gossip_directory = SharedBuffers(run, clocks), GossipDirectory(run)
        self.parent_place = above = ParentPlace(run, clocks, child)
        self.checkpoint_schedule = CheckpointSchedule(run, clocks, above)
        self.ranges = SampleLeases(run, clocks, self.checkpoint_schedule, above)
        self.members = Members(run, clocks, above, self.gossip_directory, keys_max, connected)
        self.resharding = resharding = Resharding(
            run, clocks, above, self.checkpoint_schedule, self.members, away or {}
        )
        self.agreements = Agreements(run, clocks, above, self.gossip_directory)
        self.remote_shards, self.replans = (
            RemoteShards(run, resharding),
            Replans(run, clocks, self.members, resharding, coded or {}, here),
        )
        self.start_notice = StartNotice(run, clocks, above, self.checkpoint_schedule, self.gossip_directory)
        first = (self.checkpoint_schedule, self.ranges, clocks, self.gossip_directory, above, self.members)
        self.decisions: tuple[Decision, ...] = (*first, resharding, self.remote_shards, self.replans, self.agreements)

    # State that the runner, and the other machines of this process, read.

    @property
    def declared(self) -> list[Seat]:
        return self.run.declared

    @property
    def started(self) -> bool:
        return self.run.started

    @property
    def over(self) -> bool:
        return self.run.over

    @property
    def min_clock(self) -> int:
        return self.clocks.min_clock

    def tree(self) -> str:
        """Return the tree of this server: a line for the server and for each child, then the lines that a cluster sent.

        At most TREE_CHARACTERS_MAX characters: of a large run the first lines, and the number of lines left out.
        """
        run = self.run
        lines = [f"{run.settings.summary()}, {run.shards} shards, clock {self.min_clock}"]
        for seat in sorted(run.declared, key=lambda seat: seat.rank):
            first, *rest = seat.below.splitlines() or [""]
            what = f"cluster: {first}" if first else f"worker, clock {self.clocks.clock(seat)}"
            lease_s = self.members.lease_ns(seat) / NS
            what += f", lease {lease_s:.0f} s" if lease_s >= run.settings.lease + 1 else ""
            lines += [f"    rank {seat.rank} ({seat.host}) {what}", *(f"    {line}" for line in rest)]
        kept, size = 0, 0
        while kept < len(lines) and size + len(lines[kept]) < TREE_CHARACTERS_MAX:
            size += len(lines[kept]) + 1
            kept += 1
        more = [f"    and {len(lines) - kept} lines more"] if kept < len(lines) else []
        return "\n".join(lines[:kept] + more)

    # Messages.

    def handle(self, peer: bytes, message: m.Message, now_ns: int, key: Key = NO_KEY) -> list[ServerEffect]:
        """Handle a message from `peer`.

        Args:
            peer: routing id of the sender; b"" for shard 0.
            message: the message.
            now_ns: the time.
            key: for a Hello or a Leave, the key that the sender connected with.

        Returns:
            The effects of the message.

        Raises:
            RemoteProtocolError: no worker or shard sends such a message.
        """
        if isinstance(message, m.Report):
            return self._report(peer, message, now_ns)
        if isinstance(message, m.Hello):
            return self.members.hello(peer, message, now_ns, key)
        if isinstance(message, m.RemoteShardsOffer):
            self.remote_shards.hear(peer, message, now_ns)
            return [*self._settle(now_ns), Send(peer, self.remote_shards.room(message.token, self.version))]
        if isinstance(message, m.Leave):
            return [Send(peer, m.LeaveAck(message.token)), *self._leave(message, key, now_ns)]
        if not isinstance(
            message, (m.Declare, m.Heartbeat, m.Buffers, m.BuffersRequest, m.RangeRequest, m.AgreeRequest)
        ):
            raise RemoteProtocolError(f"a coordinator takes no {type(message).__name__}")
        rows = unpacked(message.summary) if isinstance(message, m.Heartbeat) else ()
        seat = self.members.renew_lease(peer, message, now_ns)
        if seat is None:
            return [Send(peer, self.members.unknown(message.worker, message.epoch))]
        if isinstance(message, m.Declare):
            return self._declare(seat, message, now_ns)
        if isinstance(message, m.Heartbeat):
            return [*self._heartbeat(seat, message, now_ns), *self._seen(seat, rows)]
        if isinstance(message, m.RangeRequest):
            return self.ranges.hear(seat, message)
        if isinstance(message, m.AgreeRequest):
            return [*self.agreements.hear(seat, message), *self._settle(now_ns)]
        return self.buffers.hear(seat, message, now_ns)

    def _declare(self, seat: Seat, declare: m.Declare, now_ns: int) -> list[ServerEffect]:
        if seat.epoch:
            return self.members.readies(self.buffers.packed, only=seat)
        new = self.members.plan is None
        refuse = self.members.refusal(seat, declare)
        if refuse is not None:
            return [Send(seat.peer, refuse), *self._remove(seat, "refused", now_ns)]
        said = self._uneven() if new else []
        if self.resharding.holds:
            return []  # the worker repeats its Declare
        if self.parent_place.holds(seat, declare):
            return said
        self.members.admit(seat, declare.address, now_ns, declare.models[: m.MODELS_MAX])
        self._decide(now_ns)
        return [*said, *self._broadcast(now_ns)]

    def _uneven(self) -> list[ServerEffect]:
        """Log that the shards have very unequal parts of the model, if they have."""
        shards, plan = self.run.shards, self.members.plan
        text = plan.imbalance(shards, self.run.settings.cut) if plan is not None else ""
        return [Log("uneven", {"shards": shards, "text": text})] if text else []

    def _heartbeat(self, seat: Seat, beat: m.Heartbeat, now_ns: int) -> list[ServerEffect]:
        shown = self.parent_place.parent.tree or self.tree() if beat.below else ""
        known = (shown, self.min_clock, self.start_notice.clause(now_ns)[: m.TEXT_MAX])
        ack = m.HeartbeatAck(seat.worker, seat.epoch, beat.sent_ns, now_ns, now_ns, *known)
        settled = self._settle(now_ns) if beat.ended and self.gossip_directory.end(seat) else []
        settled += self._settle(now_ns) if self.resharding.knows(seat, beat.move, beat.hold) else []
        news = self.gossip_directory.rosters([seat]) if beat.roster != self.gossip_directory.epoch else []
        return [Send(seat.peer, ack), *settled, *news, *self.resharding.word(seat)]

    def _seen(self, seat: Seat, rows: tuple[SummaryRow, ...]) -> list[ServerEffect]:
        """Store the summaries of a member and of the members below it, and log them for consoles and dashboards."""
        if not rows or not seat.epoch:
            return []
        skipped = seat.skipped
        self.replans.heard(seat, tuple(row.below(seat.rank, seat.host) for row in rows))
        size, mixes = self.members.plan.size if self.members.plan is not None else 0, self.run.mode.rule is FoldRule.MIX
        clock = 0 if mixes else self.min_clock  # under gossip the coordinator closes no clock
        values = {"worker": seat.worker, "clock": clock, "parameters": size, "rows": [row.told() for row in seat.rows]}
        news = [skips(seat, self.min_clock)] if seat.skipped and not skipped else []
        return [Log("summary", values), *news]

    def _leave(self, leave: m.Leave, key: Key, now_ns: int) -> list[ServerEffect]:
        seat = self.run.named(leave.token)
        if seat is None:
            if not self.members.forget(leave.token):
                return []
            text = self.checkpoint_schedule.absent(leave.clock >= 0, key)
            if not self.run.started:
                self._decide(now_ns)
            return [*([Log("absent", {"text": text})] if text else []), *self._broadcast(now_ns)]
        if leave.clock >= 0 and seat.epoch:
            seat.finish(leave.clock, now_ns)
            return self._settle(now_ns)
        return self._remove(seat, "stopped" if seat.epoch else "left", now_ns)

    def _remove(self, seat: Seat, how: str, now_ns: int) -> list[ServerEffect]:
        for decision in self.decisions:
            decision.left(seat, how)
        self._decide(now_ns)
        news = [skips(seat, self.min_clock)] if seat.skipped else []
        news += self._ended() if self.checkpoint_schedule.deserted else []
        return [*news, self.members.event(how, seat), *self._broadcast(now_ns)]

    def _ended(self) -> list[Log]:
        """End a finished run, and log its number of steps: -1 under gossip, where the server counts no steps."""
        self.checkpoint_schedule.end(self.version + 1)
        mode = self.run.mode
        steps = -1 if mode.rule is FoldRule.MIX else self.run.settings.steps_at(self.min_clock)
        if mode.seconds:
            steps = max((report.steps for report in self.reports.values()), default=0)
        return [Log("ended", {"clock": self.min_clock, "steps": steps})]

    def _report(self, peer: bytes, report: m.Report, now_ns: int) -> list[ServerEffect]:
        index = report.shard
        if self.resharding.offer(peer, report):
            return self._settle(now_ns)
        if not 0 <= index < self.run.shards or (index == 0) != (peer == b""):
            raise RemoteProtocolError(f"there is no shard {index} at that peer")
        if not self.resharding.known(report):
            return []
        before = self.reports.get(index)
        if before is not None and (report.incarnation, report.version) <= (before.incarnation, before.version):
            if (report.incarnation, report.version) == (before.incarnation, before.version):
                self.lines[index].peer = peer  # the shard may have connected again without any news
            return []  # a newer report overtook this one; the newer one may be of the shard's next process
        self.lines.setdefault(index, ShardLine(peer)).peer = peer
        self.reports[index] = report
        effects: list[ServerEffect] = []
        if before is not None and report.incarnation != before.incarnation:
            effects.append(self.checkpoint_schedule.go_back(index, now_ns))
            for decision in self.decisions:
                decision.anew()
            effects += self._broadcast(now_ns)
        elif report.generation == self.run.generation:
            self.clocks.heard(report, now_ns)
            effects += self.ranges.heard(report)
        if self.run.complete:
            effects += self.members.greet(now_ns)
        return [*effects, *self._settle(now_ns), *self.members.readies(self.buffers.packed)]

    def ended(self, shards: Iterable[int]) -> None:
        """Note that the processes of `shards` have ended after the run was over: they send no more Reports."""
        seen, clock = self.checkpoint_schedule.over_version, self.clocks.min_clock
        for shard in self.reports.keys() & set(shards) if self.over else ():
            self.reports[shard] = replace(self.reports[shard], ledger_seen=seen, min_clock=clock, at_rest=True)

    def reshard(self, shards: int, now_ns: int) -> list[ServerEffect]:
        """Begin to reshard the keys over this number of shards; 0 calls off the resharding that is under way."""
        number, log = self.resharding.number, self.resharding.ask(shards)
        return [log, *(self._broadcast(now_ns) if self.resharding.number != number else self._settle(now_ns))]

    def _lose(self, guest: RemoteHost, now_ns: int) -> list[ServerEffect]:
        """Handle the loss of a machine. Its shards, if it has any, and all shards after them are lost with it."""
        run, first, who = self.run, guest.first, f"the machine at {guest.host} is lost"
        self.remote_shards.lose(guest)
        if not 0 <= first < run.shards:
            coming = first >= 0 and self.resharding.may_stay
            return [self.resharding.call_off(who), *self._broadcast(now_ns)] if coming else []
        if run.over and all(
            self.checkpoint_schedule.rests(self.reports[shard]) for shard in self.reports if guest.has(shard)
        ):
            return []  # these shards have done all that the run asks of them
        reached, back, before = self.min_clock, self.checkpoint_schedule.shared(), run.shards
        if run.over or back < 0:
            goes_on = f"--resume goes on from clock {back}" if back >= 0 else "no checkpoint is on all shards"
            text = f"{who}, and shard {first} with it: {goes_on}"
            return [
                *self.members.refuse_all(m.RefuseCode.SERVER_LOST, text),
                StopProcess(m.RefuseCode.SERVER_LOST, text),
            ]
        if self.resharding.may_stay:
            self.resharding.call_off(who)  # the log line below names the reason
        self.checkpoint_schedule.go_back(first, now_ns, first)
        for decision in self.decisions:
            decision.anew()
        text = (
            f"{who}: the keys of {before} shards are with {first}, and the run goes back from clock {reached} to {back}"
        )
        return [self.resharding.where(text), *self._broadcast(now_ns)]

    # The parent's run.

    def joined_above(self, rank: int, clusters: int, now_ns: int) -> list[ServerEffect]:
        """The parent has welcomed this cluster as `rank` of `clusters`: welcome the workers that wait."""
        self.parent_place.joined(rank, clusters)
        return self.members.greet(now_ns)

    def placed(self, place: bytes, epoch: int, now_ns: int) -> list[ServerEffect]:
        """Take this cluster's place in the parent's run, and handle the Declares that waited for it.

        Args:
            place: the packed place; b"" when this cluster gives its place up.
            epoch: the parent's epoch in which this cluster has the place.
            now_ns: the time.
        """
        if self.run.over:
            return []
        self.parent_place.take(place, epoch)
        self.parent_place.anew()
        effects = self._broadcast(now_ns)
        for worker, declare in self.parent_place.released().items():
            if worker in self.seats:
                effects += self._declare(self.seats[worker], declare, now_ns)
        return effects

    def turned_above(self, place: bytes, epoch: int, now_ns: int) -> list[ServerEffect]:
        """Keep the same place in the parent's run under new values: a standby took over, or the parent replans."""
        self.parent_place.take(place, epoch)
        return self._broadcast(now_ns)

    def introduced_above(self, members: bytes, alone: bool, now_ns: int) -> list[ServerEffect]:
        """Take the encoded roster of the clusters that this cluster may gossip with. `alone`: the parent is gone."""
        self.parent_place.introduced(members, alone)
        return self._broadcast(now_ns)

    def cut_off(self, now_ns: int) -> list[ServerEffect]:
        """The parent's run is over: checkpoint at the present clock, and end this run."""
        self.parent_place.take(b"", 0)
        self.checkpoint_schedule.end(self.version + 1)
        return self._broadcast(now_ns)

    # Time.

    def stop(self, now_ns: int) -> list[ServerEffect]:
        """Handle Ctrl-C: checkpoint at the present clock, and end the run.

        Under gossip the workers have the model. So the first call asks the workers for their models, and a later one
        ends the run.
        """
        if self.stop_ns < 0 and (asked := self._handing_over()):
            self.stop_ns = now_ns
            acks = [(seat, m.HeartbeatAck(seat.worker, seat.epoch, 0, now_ns, now_ns, stops=True)) for seat in asked]
            return [Send(seat.peer, ack) for seat, ack in acks]
        self.stop_ns = -1
        self.parent_place.take(b"", 0)
        refuse = self.members.refuse_all(m.RefuseCode.SERVER_LOST, f"the server was stopped at clock {self.min_clock}")
        self.checkpoint_schedule.end(self.version + 1)
        return [*refuse, *self._broadcast(now_ns)]

    def _handing_over(self) -> list[Seat]:
        """Workers of a gossip run that have not handed over their model yet."""
        if self.run.mode.rule is not FoldRule.MIX or not self.run.started or self.run.over:
            return []
        return [s for s in self.declared if not s.leaving and not s.below and not self.clocks.clock(s)]

    def tick(self, now_ns: int) -> list[ServerEffect]:
        """Expire leases, ask for checkpoints, decide, and repeat each ledger that its shard has not seen."""
        if self.stop_ns >= 0 and not (self._handing_over() and now_ns - self.stop_ns < MODEL_HAND_OVER_NS):
            return self.stop(now_ns)
        self.checkpoint_schedule.wake(now_ns)
        effects = [effect for seat in self.members.expired(now_ns) for effect in self._remove(seat, "expired", now_ns)]
        if self.checkpoint_schedule.lapsed(now_ns):
            effects += [*self._ended(), *self._broadcast(now_ns)]
        elif self.checkpoint_schedule.tick(now_ns):
            effects += self._broadcast(now_ns)
        if (guest := self.remote_shards.lost(now_ns)) is not None:
            effects += self._lose(guest, now_ns)
        effects += [*self._settle(now_ns), *self.members.probes(now_ns)]
        effects += [*self.clocks.stalls(now_ns), *self.start_notice.tick(now_ns)]
        for shard, report in sorted(self.reports.items()):
            line = self.lines[shard]
            unseen = report.ledger_seen < self.version or report.generation != self.run.generation
            if shard and LEDGER_RETRY.due(line.sent_ns, now_ns) and (unseen or line.seen < report.version):
                effects.append(self._ledger(shard, now_ns))
        return effects

    # Decisions, and the ledgers that carry them.

    def _decide(self, now_ns: int) -> None:
        """Let each `Decision` decide, in order. After one that did, begin with the first again, until none decides."""
        while any(decision.decide(now_ns) for decision in self.decisions):
            self.version += 1

    def _settle(self, now_ns: int) -> list[ServerEffect]:
        """Take all decisions that can be taken, and send the shards a ledger if there were any."""
        version = self.version
        self._decide(now_ns)
        effects = [effect for seat in self.members.done() for effect in self._remove(seat, "left", now_ns)]
        if self.version != version:
            effects += self._broadcast(now_ns)
        effects += self.agreements.answers()
        return [*effects, StopProcess()] if self.checkpoint_schedule.at_rest else effects

    def _broadcast(self, now_ns: int) -> list[ServerEffect]:
        self.version += 1
        for shard in self.reports.keys() - self.lines.keys():
            self.lines[shard] = ShardLine(self.resharding.offered[shard][0])
        ledgers = [self._ledger(shard, now_ns) for shard in self.lines]
        self.lines = {shard: line for shard, line in self.lines.items() if shard < self.run.shards}
        logs = [log for decision in self.decisions for log in decision.tell()]
        return [
            *logs,
            *ledgers,
            *self.gossip_directory.introductions(),
            *self.resharding.words(),
            *self.remote_shards.words(self.version),
        ]

    def _ledger(self, shard: int, now_ns: int) -> Send:
        """The ledger for one shard: all that is decided."""
        line, report = self.lines[shard], self.reports.get(shard)
        line.sent_ns, line.seen = now_ns, report.version if report is not None else -1
        fields: dict[str, Any] = {k: v for decision in self.decisions for k, v in decision.fields(shard).items()}
        return Send(line.peer, m.Ledger(version=self.version, report_seen=line.seen, **fields))
