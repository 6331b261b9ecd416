"""The coordinator of a cluster: who is a member, in which epoch, and which clocks are closed over which members.

How it works

    workers ── Hello, Declare, Heartbeat, Leave ──> Coordinator <── Report ── shards 0..n-1
                                                        │
               one file a decision, made in this order  │  CheckpointSchedule, SampleLeases, Clocks, GossipDirectory,
                                                        │  ParentPlace, Members, Resharding, RemoteShards, Replans,
                                                        │  Agreements
                                                        └── Ledger ──> each shard

1. A message or a tick changes what one decision knows: `Members` admits a worker, `Clocks` sees in a Report which
   updates are on all shards.
2. `_decide` asks the decisions in their order until none has anything more to decide. A decision reads `Run` and
   those made before it, never those after it.
3. Each decision adds its fields to the ledger. The coordinator sends the ledger to each shard, and again every
   `LEDGER_RETRY` until a Report shows that the shard has seen it.
4. A shard obeys the newest ledger and reports what it has seen and done. A Report replaces the one before, so a lost
   one costs time only.

Rules
- The coordinator lives in process 0, beside shard 0. It is the one owner of membership.
- Each change of the member set begins an epoch. A message of a member names the epoch in which it joined, so a late
  message of an earlier membership is known as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import KEYS_MAX
from narrows.protocols.config.modes import Rule
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import LEDGER_RETRY, MODEL_HAND_OVER_NS
from narrows.protocols.effects import NS, Log, Send, ServerEffect, Stop
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.heartbeat_summary import SummaryRow, unpacked
from narrows.ps.coordinator.agreements import Agreements
from narrows.ps.coordinator.attendance import Attendance
from narrows.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from narrows.ps.coordinator.clock_quorum import Clocks
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.members import Members
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.remote_shards import RemoteHost, RemoteShards
from narrows.ps.coordinator.replans import Replans
from narrows.ps.coordinator.resharding import Resharding
from narrows.ps.coordinator.run import NO_KEY, Decision, Key, Run, Seat, skips
from narrows.ps.coordinator.sample_leases import SampleLeases
from narrows.ps.coordinator.shared_buffers import SharedBuffers
from narrows.ps.planner.step_prices import CodecCost

TREE_CHARACTERS_MAX = m.TEXT_MAX - 64  # one string of a message, with the line that ends it


@dataclass(slots=True)
class ShardLine:
    """The way to a shard."""

    peer: bytes
    sent_ns: int = 0
    seen: int = -1  # version of its report that it was shown to be here


class Coordinator:
    """Messages from workers and Reports in, effects out. `first_epoch` is greater than any epoch of an earlier life.

    `child`: this cluster is a member of a run above, and admits workers once it has its place there (`joined_above`,
    `placed`). `keys_max`: parameters of a model that the servers have memory for. `coded`: what each SPEC costs.
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
    ) -> None:
        self.stop_ns = -1  # when the server was stopped, while workers hand over their models (gossip)
        self.version, self.lines = 1, {0: ShardLine(b"")}  # shard 0 is in our process
        self.tree_above: Callable[[], str] = str  # all levels, as the server above tells them
        self.run = run = Run(settings, first_epoch, restart_clock)
        self.seats, self.reports = run.seats, run.reports
        self.rounds = rounds = Clocks(run)
        self.buffers, self.meeting = SharedBuffers(run, rounds), GossipDirectory(run)
        self.above = above = ParentPlace(run, rounds, child)
        self.generations = CheckpointSchedule(run, rounds, above)
        self.ranges = SampleLeases(run, rounds, self.generations, above)
        self.roster = Members(run, rounds, above, self.meeting, keys_max)
        self.moves = moves = Resharding(run, rounds, above, self.generations, self.roster, away or {})
        self.agreements = Agreements(run, rounds, above, self.meeting)
        self.guests, self.replans = RemoteShards(run, moves), Replans(run, rounds, self.roster, moves, coded or {})
        self.attendance = Attendance(run, rounds, above, self.generations, self.meeting)
        first = (self.generations, self.ranges, rounds, self.meeting, above, self.roster)
        self.decisions: tuple[Decision, ...] = (*first, moves, self.guests, self.replans, self.agreements)

    # For a runner, or a machine beside it.

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
        return self.rounds.min_clock

    def tree(self) -> str:
        """This server, its children, and what clusters among them say of theirs: a line each; of a large run the first."""
        run = self.run
        lines = [f"{run.settings.summary()}, {run.shards} shards, clock {self.min_clock}"]
        for seat in sorted(run.declared, key=lambda seat: seat.rank):
            first, *rest = seat.below.splitlines() or [""]
            what = f"cluster: {first}" if first else f"worker, clock {self.rounds.clock(seat)}"
            lease_s = self.roster.lease_ns(seat) / NS
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
        """Return the effects of a message from `peer`; `key`: of a Hello or a Leave. Raises RemoteProtocolError for one that no
        worker sends."""
        if isinstance(message, m.Report):
            return self._report(peer, message, now_ns)
        if isinstance(message, m.Hello):
            return self.roster.hello(peer, message, now_ns, key)
        if isinstance(message, m.RemoteShardsOffer):
            self.guests.hear(peer, message, now_ns)
            return [*self._settle(now_ns), Send(peer, self.guests.room(message.token, self.version))]
        if isinstance(message, m.Leave):
            return [Send(peer, m.LeaveAck(message.token)), *self._leave(message, key, now_ns)]
        if not isinstance(message, (m.Declare, m.Heartbeat, m.Buffers, m.BuffersAsk, m.RangeAsk, m.AgreeAsk)):
            raise RemoteProtocolError(f"a coordinator takes no {type(message).__name__}")
        rows = unpacked(message.summary) if isinstance(message, m.Heartbeat) else ()
        seat = self.roster.seated(peer, message, now_ns)
        if seat is None:
            return [Send(peer, self.roster.unknown(message.worker, message.epoch))]
        if isinstance(message, m.Declare):
            return self._declare(seat, message, now_ns)
        if isinstance(message, m.Heartbeat):
            return [*self._heartbeat(seat, message, now_ns), *self._seen(seat, rows)]
        if isinstance(message, m.RangeAsk):
            return self.ranges.hear(seat, message)
        if isinstance(message, m.AgreeAsk):
            return [*self.agreements.hear(seat, message), *self._settle(now_ns)]
        return self.buffers.hear(seat, message, now_ns)

    def _declare(self, seat: Seat, declare: m.Declare, now_ns: int) -> list[ServerEffect]:
        if seat.epoch:
            return self.roster.readies(self.buffers.packed, only=seat)
        refuse = self.roster.refusal(seat, declare)
        if refuse is not None:
            return [Send(seat.peer, refuse), *self._remove(seat, "refused", now_ns)]
        if self.moves.holds:
            return []  # it asks again
        if self.above.holds(seat, declare):
            return []
        self.roster.admit(seat, declare.address, now_ns)
        seat.models = declare.models[: m.MODELS_MAX]
        self._decide(now_ns)
        return self._broadcast(now_ns)

    def _heartbeat(self, seat: Seat, beat: m.Heartbeat, now_ns: int) -> list[ServerEffect]:
        shown = self.tree_above() or self.tree() if beat.below else ""
        known = (shown, self.min_clock, self.attendance.clause(now_ns)[: m.TEXT_MAX])
        ack = m.HeartbeatAck(seat.worker, seat.epoch, beat.sent_ns, now_ns, now_ns, *known)
        settled = self._settle(now_ns) if beat.ended and self.meeting.end(seat) else []
        settled += self._settle(now_ns) if self.moves.knows(seat, beat.move) else []
        news = self.meeting.rosters([seat]) if beat.roster != self.meeting.epoch else []
        return [Send(seat.peer, ack), *settled, *news, *self.moves.word(seat)]

    def _seen(self, seat: Seat, rows: tuple[SummaryRow, ...]) -> list[ServerEffect]:
        """Hand on what a member says of itself and of those below it, for whoever watches."""
        if not rows or not seat.epoch:
            return []
        skipped = seat.skipped
        self.replans.heard(seat, tuple(row.below(seat.rank, seat.host) for row in rows))
        size, mixes = self.roster.plan.size if self.roster.plan is not None else 0, self.run.mode.rule is Rule.MIX
        clock = 0 if mixes else self.min_clock  # under gossip none closes here
        told = {"worker": seat.worker, "clock": clock, "parameters": size, "rows": [row.told() for row in seat.rows]}
        news = [skips(seat, self.min_clock)] if seat.skipped and not skipped else []
        return [Log("summary", told), *news]

    def _leave(self, leave: m.Leave, key: Key, now_ns: int) -> list[ServerEffect]:
        seat = self.run.named(leave.token)
        if seat is None:
            if not self.roster.forget(leave.token):
                return []
            text = self.generations.absent(leave.clock >= 0, key)
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
        news += self._ended() if self.generations.deserted else []
        return [*news, self.roster.event(how, seat), *self._broadcast(now_ns)]

    def _ended(self) -> list[Log]:
        """End the run, which its workers have done; they have made so many steps, -1: nobody here counts them (gossip)."""
        self.generations.end(self.version + 1)
        steps = -1 if self.run.mode.rule is Rule.MIX else self.min_clock * self.run.mode.local_steps
        return [Log("ended", {"clock": self.min_clock, "steps": steps})]

    def _report(self, peer: bytes, report: m.Report, now_ns: int) -> list[ServerEffect]:
        index = report.shard
        if self.moves.offer(peer, report):
            return self._settle(now_ns)
        if not 0 <= index < self.run.shards or (index == 0) != (peer == b""):
            raise RemoteProtocolError(f"there is no shard {index} at that peer")
        if not self.moves.known(report):
            return []
        before = self.reports.get(index)
        if before is not None and (report.incarnation, report.version) <= (before.incarnation, before.version):
            if (report.incarnation, report.version) == (before.incarnation, before.version):
                self.lines[index].peer = peer  # it may have connected anew, and have no more to say
            return []  # overtaken by a newer one, be it of the process that came after
        self.lines.setdefault(index, ShardLine(peer)).peer = peer
        self.reports[index] = report
        effects: list[ServerEffect] = []
        if before is not None and report.incarnation != before.incarnation:
            effects.append(self.generations.go_back(index, now_ns))
            for decision in self.decisions:
                decision.anew()
            effects += self._broadcast(now_ns)
        elif report.generation == self.run.generation:
            self.rounds.heard(report, now_ns)
            effects += self.ranges.heard(report)
        if self.run.complete:
            effects += self.roster.greet(now_ns)
        return [*effects, *self._settle(now_ns), *self.roster.readies(self.buffers.packed)]

    def ended(self, shards: Iterable[int]) -> None:
        """The processes of these have done all that a run that is over asks of them, and say no more."""
        seen, clock = self.generations.over_version, self.rounds.min_clock
        for shard in self.reports.keys() & set(shards) if self.over else ():
            self.reports[shard] = replace(self.reports[shard], ledger_seen=seen, min_clock=clock, at_rest=True)

    def reshard(self, shards: int, now_ns: int) -> list[ServerEffect]:
        """Cut the keys over so many shards from now on; 0: leave them where they are."""
        number, log = self.moves.number, self.moves.ask(shards)
        return [log, *(self._broadcast(now_ns) if self.moves.number != number else self._settle(now_ns))]

    def _lose(self, guest: RemoteHost, now_ns: int) -> list[ServerEffect]:
        """This machine is gone with its shards, if it has any, and with those after them."""
        run, first, who = self.run, guest.first, f"the machine at {guest.host} is lost"
        self.guests.lose(guest)
        if not 0 <= first < run.shards:
            coming = first >= 0 and self.moves.may_stay
            return [self.moves.call_off(who), *self._broadcast(now_ns)] if coming else []
        if run.over and all(self.generations.rests(self.reports[shard]) for shard in self.reports if guest.has(shard)):
            return []  # they have ended
        reached, back, before = self.min_clock, self.generations.shared(), run.shards
        if run.over or back < 0:
            goes_on = f"--resume goes on from clock {back}" if back >= 0 else "no checkpoint is on all shards"
            text = f"{who}, and shard {first} with it: {goes_on}"
            return [*self.roster.refuse_all(m.RefuseCode.SERVER_LOST, text), Stop(m.RefuseCode.SERVER_LOST, text)]
        if self.moves.may_stay:
            self.moves.call_off(who)  # which is said below
        self.generations.go_back(first, now_ns, first)
        for decision in self.decisions:
            decision.anew()
        text = (
            f"{who}: the keys of {before} shards are with {first}, and the run goes back from clock {reached} to {back}"
        )
        return [self.moves.where(text), *self._broadcast(now_ns)]

    # The run above.

    def joined_above(self, rank: int, clusters: int, now_ns: int) -> list[ServerEffect]:
        """The run above knows this cluster; workers may come."""
        self.above.joined(rank, clusters)
        return self.roster.greet(now_ns)

    def placed(self, place: bytes, epoch: int, now_ns: int) -> list[ServerEffect]:
        """This cluster's place in the run above; b"" when it gives it up."""
        if self.run.over:
            return []
        self.above.take(place, epoch)
        self.above.anew()
        effects = self._broadcast(now_ns)
        for worker, declare in self.above.released().items():
            if worker in self.seats:
                effects += self._declare(self.seats[worker], declare, now_ns)
        return effects

    def turned_above(self, place: bytes, epoch: int, now_ns: int) -> list[ServerEffect]:
        """The same place: another server has taken over from the one above, or the run there changes its plan."""
        self.above.take(place, epoch)
        return self._broadcast(now_ns)

    def introduced_above(self, roster: bytes, alone: bool, now_ns: int) -> list[ServerEffect]:
        """Who this cluster may gossip with. `alone`: the server above is gone."""
        self.above.introduced(roster, alone)
        return self._broadcast(now_ns)

    def cut_off(self, now_ns: int) -> list[ServerEffect]:
        """There is no run above any more: checkpoint at the clock reached, and end."""
        self.above.take(b"", 0)
        self.generations.end(self.version + 1)
        return self._broadcast(now_ns)

    # Time.

    def stop(self, now_ns: int) -> list[ServerEffect]:
        """Ctrl-C: checkpoint at the clock reached, and end. Under gossip the workers have the model: they are asked for it."""
        if self.stop_ns < 0 and (asked := self._handing_over()):
            self.stop_ns = now_ns
            acks = [(seat, m.HeartbeatAck(seat.worker, seat.epoch, 0, now_ns, now_ns, stops=True)) for seat in asked]
            return [Send(seat.peer, ack) for seat, ack in acks]
        self.stop_ns = -1
        self.above.take(b"", 0)
        refuse = self.roster.refuse_all(m.RefuseCode.SERVER_LOST, f"the server was stopped at clock {self.min_clock}")
        self.generations.end(self.version + 1)
        return [*refuse, *self._broadcast(now_ns)]

    def _handing_over(self) -> list[Seat]:
        """Workers of a run of gossip that have not handed over their model."""
        if self.run.mode.rule is not Rule.MIX or not self.run.started or self.run.over:
            return []
        return [s for s in self.declared if not s.leaving and not s.below and not self.rounds.clock(s)]

    def tick(self, now_ns: int) -> list[ServerEffect]:
        """Expire leases, ask for checkpoints, send unseen ledgers again."""
        if self.stop_ns >= 0 and not (self._handing_over() and now_ns - self.stop_ns < MODEL_HAND_OVER_NS):
            return self.stop(now_ns)
        self.generations.wake(now_ns)
        effects = [effect for seat in self.roster.expired(now_ns) for effect in self._remove(seat, "expired", now_ns)]
        if self.generations.lapsed(now_ns):
            effects += [*self._ended(), *self._broadcast(now_ns)]
        elif self.generations.tick(now_ns):
            effects += self._broadcast(now_ns)
        if (guest := self.guests.lost(now_ns)) is not None:
            effects += self._lose(guest, now_ns)
        effects += [*self._settle(now_ns), *self.roster.probes(now_ns)]
        effects += [*self.rounds.stalls(now_ns), *self.attendance.tick(now_ns)]
        for shard, report in sorted(self.reports.items()):
            line = self.lines[shard]
            unseen = report.ledger_seen < self.version or report.generation != self.run.generation
            if shard and LEDGER_RETRY.due(line.sent_ns, now_ns) and (unseen or line.seen < report.version):
                effects.append(self._ledger(shard, now_ns))
        return effects

    # Decisions, and ledgers that tell of them.

    def _decide(self, now_ns: int) -> None:
        """Take all that can be taken."""
        while any(decision.decide(now_ns) for decision in self.decisions):
            self.version += 1

    def _settle(self, now_ns: int) -> list[ServerEffect]:
        """Decide all that can be decided, and tell the shards if anything was."""
        version = self.version
        self._decide(now_ns)
        effects = [effect for seat in self.roster.done() for effect in self._remove(seat, "left", now_ns)]
        if self.version != version:
            effects += self._broadcast(now_ns)
        effects += self.agreements.answers()
        return [*effects, Stop()] if self.generations.at_rest else effects

    def _broadcast(self, now_ns: int) -> list[ServerEffect]:
        self.version += 1
        for shard in self.reports.keys() - self.lines.keys():
            self.lines[shard] = ShardLine(self.moves.offered[shard][0])
        ledgers = [self._ledger(shard, now_ns) for shard in self.lines]
        self.lines = {shard: line for shard, line in self.lines.items() if shard < self.run.shards}
        told = [log for decision in self.decisions for log in decision.tell()]
        return [*told, *ledgers, *self.meeting.introductions(), *self.moves.words(), *self.guests.words(self.version)]

    def _ledger(self, shard: int, now_ns: int) -> Send:
        """All that is decided, for one shard."""
        line, report = self.lines[shard], self.reports.get(shard)
        line.sent_ns, line.seen = now_ns, report.version if report is not None else -1
        fields: dict[str, Any] = {k: v for decision in self.decisions for k, v in decision.fields(shard).items()}
        return Send(line.peer, m.Ledger(version=self.version, report_seen=line.seen, **fields))
