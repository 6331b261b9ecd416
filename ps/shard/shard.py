"""The shard machine: one key range of a cluster's model. No I/O.

How it works

    ledger of the coordinator ──> handle_ledger ─┐
    Push, Follow, Pull of a member ───> handle ──┤      ┌─> State, PushAck to members
    message of the parent ────────> from_above ──┼─> ModelShard.run
    message of another cluster ─────────> hear ──┤      └─> Report to the coordinator
    tick ────────────────────────────────────────┘

1. A shard begins with a list of members and without a model. Its first ledgers name the members.
2. The first ledger with a model spec makes a `ModelShard` (weights, folding, publications, link to the parent) and its
   `ShardRequests` (answers to members).
3. A member's message passes the epoch check in `handle`. ShardRequests answers it: a Push may fold, a Follow asks for
   publications, a Pull for the master copy.
4. After each event that may unblock the clock, `_go_on` runs the stages of the clock (`ModelShard.run`) and sends each
   member what it may have now.
5. Whatever the coordinator must know goes into a `Report`. A tick repeats a report that is not acknowledged.
6. A ledger of a new generation drops the members and the model. The shard returns to the checkpoint that the ledger
   names, or keeps its arrays where only the settings have changed (replanning).

Rules
- The shard obeys the ledger and never second-guesses it.
- `ModelShard` and `ShardRequests` live for one generation; `Shard` lives as long as its process.
"""

from __future__ import annotations

from collections.abc import Iterable

from narrows.compression import codecs
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import LoadCheckpoint, Log, MemberEffect, Send, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.parent.parent_slot import ParentSlot
from narrows.ps.shard.model_shard import ModelShard, ShardResources, pairs
from narrows.ps.shard.push_assembler import PushAssembler
from narrows.ps.shard.reports import Reports
from narrows.ps.shard.shard_requests import OfWorkers, ShardRequests
from narrows.ps.store.changes import FloatArray

UNDECIDED = m.Ledger(0, 0, -1, 0, False, -1, (), 0, (), (), (), -1, False, -1, b"")


class Shard:
    """One shard: messages of members, ledgers and ticks in, effects out."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        incarnation: int,
        port: int,
        checkpoints: tuple[int, ...],
        resources: ShardResources,
    ) -> None:
        """A shard without members and without a model.

        Args:
            index: The number of this shard, from 0.
            settings: The settings of the run, until a ledger brings newer ones.
            incarnation: The number of this life of the shard's machine.
            port: The TCP port that members reach this shard at.
            checkpoints: Clocks of the checkpoints on this shard's disk.
            resources: What only the runner can give, such as the server's optimizer.
        """
        self.index, self.settings, self.mode, self.resources = index, settings, settings.mode(), resources
        self.incarnation, self.port = incarnation, port
        self.checkpoints = list(checkpoints)
        # clock of the newest checkpoint that the runner finished, written or failed; and how long the write took, in ns
        self.checkpoint_tried, self.wrote_ns = -1, 0
        self.ledger = UNDECIDED
        self.assembler = PushAssembler(index, self.mode)
        self.model_shard: ModelShard | None = None
        self.empty = ParentSlot(index, (0, 0), False, None, resources.timing, 1.0)  # `parent_slot` without a model
        self.service: ShardRequests | None = None  # answers members; None without `model_shard`
        self.trouble = ""
        self.moved = (0, 0)  # bytes sent to and received from the parent, as the runner counts them
        self.reports = Reports(self._report_of)
        self.last_reported: tuple[object, ...] = ()  # `_standing` at the time of the newest report
        self.parent_residual: FloatArray | None = None  # what the previous generation owed to the parent, float32[size]
        # clock of the newest checkpoint that was begun, and the first report that says what it contains
        self.saved = (-1, 0)

    @property
    def parent_slot(self) -> ParentSlot:
        """The slot of the link to the parent; an empty one while there is no model."""
        return self.model_shard.parent_slot if self.model_shard is not None else self.empty

    @property
    def min_clock(self) -> int:
        """The clock below which the folded and the published state contain all updates."""
        return self.model_shard.min_clock if self.model_shard is not None else max(self.ledger.restart_clock, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the shard's arrays, which are nearly all of its memory."""
        if self.model_shard is None:
            return 0
        store = self.model_shard.store
        return sum(each.nbytes for each in store.arrays().values()) + store.tables.nbytes

    @property
    def retired(self) -> bool:
        """True if a reshard gave this shard's keys to other shards."""
        return self.index >= self.settings.shards

    @property
    def writing(self) -> int:
        """Clock of the checkpoint that the runner is still writing, -1 for none."""
        asked = self.model_shard.asked if self.model_shard is not None else -1
        return asked if asked != self.checkpoint_tried else -1

    # The ledger.

    def handle_ledger(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Obey the newest decisions of the coordinator."""
        if ledger.generation < self.ledger.generation:
            return []  # a ledger of an earlier coordinator: its versions cannot be compared with ours
        self.reports.has_seen(ledger.report_seen)
        if (ledger.generation, ledger.version) <= (self.ledger.generation, self.ledger.version):
            return []
        effects: list[ServerEffect] = []
        if ledger.generation != self.ledger.generation:
            if ledger.restart_clock >= 0 and not ledger.plan:
                return effects  # the model spec comes with the next ledger
            effects += self._restart(ledger)
        before, self.ledger = self.ledger, ledger
        if ledger.decides_as(before):
            return [self.report(now_ns)]
        if ledger.plan and self.model_shard is None and not self.retired:
            self._plan(ModelSpec.unpacked(ledger.plan), max(ledger.restart_clock, 0)).parent_slot.owe(
                self.parent_residual
            )
        if self.model_shard is not None:
            effects += self.model_shard.seat(ledger, now_ns)
            effects += self.model_shard.parent_slot.introduce(ledger, now_ns)
        effects += self._members()
        if self.model_shard is not None:
            effects += self.model_shard.give_weights(ledger, now_ns)
        return [*effects, *self._go_on(now_ns), self.report(now_ns)]

    def _restart(self, ledger: m.Ledger) -> list[ServerEffect]:
        """Begin a new generation: drop all members and the store, and return to the checkpoint of the ledger."""
        effects: list[ServerEffect] = []
        reached, clock = self.min_clock, max(ledger.restart_clock, 0)
        self.parent_residual = self.parent_slot.kept.residual if self.model_shard is not None else self.parent_residual
        model_shard, number, shards = self.model_shard, self.settings.plan_number, self.settings.shards
        self.settings = Settings.unpacked(ledger.settings) if ledger.settings else self.settings
        self.mode = self.settings.mode()
        self.assembler, self.model_shard, self.service = PushAssembler(self.index, self.mode), None, None
        self.checkpoint_tried = -1
        if self.retired:
            return effects
        if reached > clock:  # each shard logs this: a restarted coordinator does not know how far the shards were
            where = {"shard": self.index, "from_clock": clock, "to_clock": reached}
            text = f"shard {self.index} goes back from clock {reached} to {clock}: updates folded since are lost"
            effects.append(Log("lost", where | {"text": text}))
        # All shards have the checkpoint of restart_clock: a shard without a part of its own reads the others' parts.
        kept = {clock for clock in self.checkpoints if clock < ledger.restart_clock}
        self.checkpoints = sorted(kept | {ledger.restart_clock} - {-1})
        now = (reached, self.settings.plan_number, self.settings.shards)
        if model_shard is not None and now == (clock, number + 1, shards):
            self._plan(model_shard.plan, clock).go_on(model_shard)
            return effects
        return [*effects, LoadCheckpoint(ledger.restart_clock)]

    def _plan(self, plan: ModelSpec, clock: int) -> ModelShard:
        """Make the ModelShard of this model spec, and its ShardRequests."""
        self.model_shard = ModelShard(self.index, self.settings, plan, self.assembler, clock, self.resources)
        self.service = ShardRequests(self.model_shard)
        return self.model_shard

    def _members(self) -> list[Log]:
        """Take over the members of the ledger; drop what members that left had sent and no shard will fold."""
        model_shard, seen, version = self.model_shard, self.reports.seen, self.reports.version + 1
        logs = self.assembler.members(self.ledger, self.min_clock, seen, version)
        if model_shard is None:
            return logs
        model_shard.publications.members()
        model_shard.store.gain.members(self.assembler.seats)
        model_shard.filters.members(self.assembler.seats)
        wanted = {*self.ledger.departed, *(pair for row in self.ledger.sets for pair in pairs(row))}
        seats = self.assembler.seats
        for worker, update in list(model_shard.folding.drop(lambda w, update: w in seats or (w, update) in wanted)):
            logs.append(self.assembler.discard(worker, update, "it left before all shards had it"))
        return [*logs, *model_shard.filters.take()]

    def _go_on(self, now_ns: int) -> list[ServerEffect]:
        """Run the clock's stages as far as ledger and parent allow, then send each member what it may have now."""
        if self.model_shard is None or self.service is None:
            return []
        effects = self.model_shard.run(self.ledger, now_ns)
        for seat in self.assembler.seats.values():
            effects += self.service.serve(seat, self.ledger, now_ns)
        return effects

    def wrote_checkpoint(self, clock: int, kept: tuple[int, ...], took_ns: int = 0) -> None:
        """Record that the runner wrote a checkpoint or failed to; the next tick reports it.

        Args:
            clock: The clock of that checkpoint.
            kept: Clocks of the checkpoints that are on disk now.
            took_ns: How long the write took.
        """
        # The restart checkpoint may be in other shards' files: it stays listed until all shards have a newer one.
        begun = self.ledger.restart_clock
        more = {begun} if begun in self.checkpoints and begun >= self.ledger.shared else set[int]()
        self.checkpoints, self.checkpoint_tried, self.wrote_ns = sorted({*kept} | more), clock, took_ns
        self.reports.owe()

    def listens(self, port: int) -> None:
        """Note that members reach this shard at this port from now on."""
        self.port = port

    # The parent, and other clusters.

    def fail_above(self, text: str, now_ns: int) -> list[ServerEffect]:
        """Report that the session with the parent's shard has ended for this reason."""
        self.trouble = text[: m.TEXT_MAX]
        return [self.report(now_ns)]

    def from_above(self, seen: Iterable[MemberEffect], now_ns: int) -> list[ServerEffect]:
        """Take the events that the session with the parent's shard has produced. Raises RemoteProtocolError."""
        if self.model_shard is None:
            return []
        above = self.model_shard.parent_slot.link
        effects = above.take(seen, now_ns) if above is not None else []
        return self._went_on([*effects, *self.model_shard.give_weights(self.ledger, now_ns)], now_ns)

    def hear(self, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Take a message of another cluster (gossip). Raises RemoteProtocolError for one that no cluster may send."""
        effects = self.parent_slot.hear(message, self.ledger, now_ns)  # raises if this cluster has no parent
        return self._went_on(effects, now_ns)

    def _went_on(self, effects: list[ServerEffect], now_ns: int) -> list[ServerEffect]:
        if self.model_shard is not None:
            effects = [*effects, *self.model_shard.parent_slot.introduce(self.ledger, now_ns), *self._go_on(now_ns)]
        self.trouble = self.trouble or self.parent_slot.trouble[: m.TEXT_MAX]
        if self.last_reported != self._standing:  # against the newest report: the session has changed before this call
            effects.append(self.report(now_ns))
        return effects

    @property
    def at_rest(self) -> bool:
        """True if the parent has all that this shard will ever send it."""
        if not self.ledger.above:
            return True
        return self.ledger.over and self.min_clock >= self.ledger.min_clock and self.parent_slot.at_rest

    @property
    def _standing(self) -> tuple[object, ...]:
        """The fields of a report that an event from the parent may change."""
        upward = self.parent_slot
        return (self.min_clock, upward.ready, self.at_rest, upward.finishes, upward.ended, self.trouble)

    # Messages of members.

    def reads_in_place(self, message: m.Message | None) -> bool:
        """Return whether the payload of a message may lie in its sender's memory, and change while this shard has it.

        Raw values of a mean may: any bytes are values, and the fold leaves out those that are not finite (reduction.py).
        """
        if not isinstance(message, m.Push) or message.codec != codecs.RAW:
            return False
        compares = self.settings.robust or self.settings.max_update_norm != -1
        return self.mode.rule in (FoldRule.OPTIMIZER, FoldRule.OUTER) and not compares

    def handle(self, peer: bytes, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a member's message.

        A message of a process that is no member is answered with Refuse. A message of an epoch that this shard does not
        know yet gets no answer: the member repeats it.

        Raises:
            RemoteProtocolError: The message breaks the protocol. The shard's state is unchanged.
        """
        if not isinstance(message, OfWorkers):
            raise RemoteProtocolError(f"a shard takes no {type(message).__name__}")
        seat = self.assembler.seats.get(message.worker)
        if seat is None or message.epoch != seat.epoch:
            if message.epoch > self.assembler.epoch:
                return []  # the ledger with this member has not arrived; the member repeats its message
            if seat is not None and message.epoch < seat.epoch and m.name_of(peer) == seat.name:
                return []  # sent before a reshard, under the member's earlier epoch
            text = f"worker {message.worker} is no member (its lease expired, or the server was restarted)"
            return [Send(peer, m.Refuse(m.RefuseCode.NOT_A_MEMBER, message.worker, message.epoch, text))]
        m.check_name(peer, seat.name, seat.worker)
        if self.service is None:
            return []  # the model spec has not arrived yet
        peer_before, clock = seat.peer, seat.clock
        seat.heard(peer)
        try:
            effects, news = self.service.handle(seat, message, self.ledger, now_ns)
        except RemoteProtocolError:
            seat.heard(peer_before)
            raise
        if seat.clock != clock:
            seat.tell(self.reports.version + 1)
        return [*effects, self.report(now_ns)] if news else effects

    # Reports.

    def report(self, now_ns: int) -> Send:
        """Report to the coordinator what this shard has seen and done."""
        return self.reports.send(now_ns)

    def _report_of(self, version: int) -> m.Report:
        self.last_reported, model_shard, upward = self._standing, self.model_shard, self.parent_slot
        seats = (*self.assembler.seats.values(), *self.assembler.gone.values())
        begun = model_shard.asked if model_shard is not None else -1
        self.saved = self.saved if self.saved[0] == begun else (begun, version)
        news = self.saved[1] > self.reports.seen
        return m.Report(
            shard=self.index,
            port=self.port,
            version=version,
            incarnation=self.incarnation,
            generation=self.ledger.generation,
            ledger_seen=self.ledger.version,
            epoch=self.assembler.epoch,
            planned=model_shard is not None,
            weights_from=model_shard.weights_from if model_shard is not None else -1,
            min_clock=self.min_clock,
            # Only clocks that the coordinator lacks: with a thousand members, a list of all would cost a scan a push.
            arrived=tuple((seat.worker, seat.clock) for seat in seats if seat.news > self.reports.seen),
            norms=tuple(model_shard.norms.items()) if model_shard is not None else (),
            checkpoints=tuple(self.checkpoints),
            tried=self.checkpoint_tried,
            wrote_ns=self.wrote_ns,
            bytes_up=self.moved[0],
            bytes_down=self.moved[1],
            host=self.resources.host,
            saved=model_shard.saved if model_shard is not None and news else (),
            saved_at=begun if news else -1,
            from_above=upward.seat.place.epoch if upward.ready and upward.seat is not None else 0,
            finishing=self.service.all_finishing() if self.service is not None else (),
            finishes=upward.finishes,
            at_rest=self.at_rest,
            ended=upward.ended,
            trouble=self.trouble,
            steps=model_shard.steps if model_shard is not None else 0,
        )

    def tick(self, now_ns: int, moved: tuple[int, int] = (0, 0)) -> list[ServerEffect]:
        """Repeat what is not yet acknowledged, and resume the clock after a checkpoint.

        Args:
            now_ns: The time.
            moved: Bytes sent to and received from the parent, as the runner counts them.
        """
        self.moved = moved
        if self.model_shard is not None and self.ledger.above:
            again = self.parent_slot.tick(now_ns)
            if again or self.last_reported != self._standing:  # a wait for a peer may end without any effect
                return self._went_on(again, now_ns)
        if self.model_shard is not None and self.model_shard.writes:
            self.model_shard.has_written()
            return [*self._go_on(now_ns), self.report(now_ns)]
        return [*self.reports.tick(now_ns)]
