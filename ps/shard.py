"""The shard machine: one key range of a cluster's model. It obeys the ledger, takes what members push, shows them its
publications, and reports what it has seen and done. No I/O.

Rules
- At once: an accepted push is folded and acked FOLDED. With a barrier it is acked HELD, and folded when the ledger closes
  a clock over a set that names it; what no set ever will, since its worker left, is discarded, named and counted.
- What a message says is checked before anything changes. The ledger is obeyed, never second-guessed.
- Until a model is declared there is nothing but members; all else is `Planned`, made anew in each generation.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable

from narrows.protocols import messages as m
from narrows.protocols.effects import NS, Load, Log, MemberEffect, Send, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.peers import EARLY_MAX
from narrows.protocols.keys import covers
from narrows.protocols.modes import Rule
from narrows.protocols.plan import Plan
from narrows.protocols.settings import Settings
from narrows.ps.above import Above, Root
from narrows.ps.folding import Barrier, unpack_hyper
from narrows.ps.inbox import Inbox, Seat, check_part
from narrows.ps.planned import Means, Planned, pairs
from narrows.ps.store import FirstWeights

REPORT_RETRY_NS = NS // 5
REPORT_AGAIN_NS = NS  # a restarted coordinator knows no shard until it hears from it
COORDINATOR = b""  # the peer that a shard's report goes to
UNDECIDED = m.Ledger(0, 0, -1, 0, False, -1, (), 0, (), (), (), -1, False, -1, b"")


class Shard:
    """Messages of workers and ledgers in, effects out. `checkpoints`: clocks that are on its disk. `wants_buffers`: whether a
    worker is to send them now; the coordinator beside shard 0 knows."""

    def __init__(
        self, index: int, settings: Settings, incarnation: int, port: int, checkpoints: tuple[int, ...], means: Means
    ) -> None:
        self.index, self.settings, self.mode, self.means = index, settings, settings.mode(), means
        self.incarnation, self.port = incarnation, port
        self.checkpoints = list(checkpoints)
        self.wants_buffers: Callable[[int, int], bool] = lambda worker, now_ns: False
        self.ledger = UNDECIDED
        self.inbox = Inbox(index, self.mode)
        self.planned: Planned | None = None
        self.first: dict[int, m.FirstWeights] = {}
        self.weights_from = -1  # whose first weights are here whole
        self.early: deque[m.Message] = deque(maxlen=EARLY_MAX)  # of other clusters, before this one has its place
        self.trouble = ""
        self.version = 0  # of the newest report
        self.report_seen = -1
        self.newest: m.Report | None = None
        self.reported_ns = 0
        self.told: tuple[object, ...] = ()  # `_standing` as of the newest report

    @property
    def above(self) -> Above:
        return self.planned.above if self.planned is not None else Root()

    @property
    def min_clock(self) -> int:
        """What is folded has all updates below it, and what is published."""
        return self.planned.min_clock if self.planned is not None else max(self.ledger.restart_clock, 0)

    # The ledger.

    def handle_ledger(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Obey the newest decisions of the coordinator."""
        if ledger.generation < self.ledger.generation:
            return []  # of a coordinator before this one: its versions count for nothing
        self.seen(ledger.report_seen)
        if (ledger.generation, ledger.version) <= (self.ledger.generation, self.ledger.version):
            return []
        effects: list[ServerEffect] = []
        if ledger.generation != self.ledger.generation:
            if ledger.restart_clock >= 0 and not ledger.plan:
                return effects  # it comes with the next ledger
            effects += self._restart(ledger)
        self.ledger = ledger
        if ledger.plan and self.planned is None:
            plan, clock = Plan.unpacked(ledger.plan), max(ledger.restart_clock, 0)
            self.planned = Planned(self.index, self.settings, plan, self.inbox, clock, self.means)
        if self.planned is not None:
            effects += self.planned.seat(ledger, now_ns)
        effects += self._introduce(now_ns)
        effects += self._members()
        effects += self._give_weights(now_ns)
        return [*effects, *self._go_on(now_ns), self._report(now_ns)]

    def _restart(self, ledger: m.Ledger) -> list[ServerEffect]:
        """A new generation: forget every member and all of the store, and go back to its checkpoint."""
        effects: list[ServerEffect] = []
        lost = sum(len(seat.partial) for seat in self.inbox.seats.values())
        if self.planned is not None and isinstance(self.planned.folding, Barrier):
            lost += sum(map(len, self.planned.folding.held.values()))
        reached, clock = self.min_clock, max(ledger.restart_clock, 0)
        discarded, self.inbox = self.inbox.discarded + lost, Inbox(self.index, self.mode)
        self.inbox.discarded = discarded
        self.planned, self.weights_from = None, -1
        self.first.clear()
        if reached > clock:  # said by each shard: where shard 0 was restarted, its coordinator does not know
            where = {"shard": self.index, "from_clock": clock, "to_clock": reached}
            text = f"shard {self.index} goes back from clock {reached} to {clock}: what was folded since is lost"
            effects.append(Log("lost", where | {"text": text}))
        load = ledger.restart_clock >= 0 or self.checkpoints
        self.checkpoints = [clock for clock in self.checkpoints if clock <= ledger.restart_clock]
        return [*effects, Load(ledger.restart_clock)] if load else effects

    def _members(self) -> list[Log]:
        logs, planned = self.inbox.members(self.ledger, self.min_clock), self.planned
        if planned is None:
            return logs
        planned.publications.members()
        wanted = {*self.ledger.departed, *(pair for row in self.ledger.sets for pair in pairs(row))}
        seats = self.inbox.seats
        for worker, update in list(planned.folding.drop(lambda w, update: w in seats or (w, update) in wanted)):
            logs.append(self.inbox.discard(worker, update, "it left before all shards had it"))
        return logs

    def _go_on(self, now_ns: int) -> list[ServerEffect]:
        """All that can be done now that something has come: of the ledger, from above, from another cluster."""
        if self.planned is None:
            return []
        effects = self.planned.run(self.ledger, now_ns)
        for seat in self.inbox.seats.values():
            effects += self._serve(seat, now_ns)
        return effects

    def wrote_checkpoint(self, clock: int, kept: tuple[int, ...]) -> None:
        """The runner wrote it; `kept` are the clocks now on disk. The next tick reports it."""
        self.checkpoints = list(kept)
        self.version += 1

    # The run above, and other clusters.

    def from_above(self, seen: Iterable[MemberEffect], now_ns: int) -> list[ServerEffect]:
        """Return the effects of what a session toward the shard above has seen. Raises RemoteProtocolError."""
        if self.planned is None:
            return []
        effects: list[ServerEffect] = [*self.above.take(seen, self.planned.store.x, now_ns)]
        return self._went_on([*effects, *self._give_weights(now_ns)], now_ns)

    def hear(self, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of another cluster's message. Raises RemoteProtocolError for one that none sends us."""
        if not self.means.child:
            return [*self.above.hear(message, now_ns)]  # raises
        if self.planned is None or not self.ledger.above or self.planned.above_is != self.ledger.above:
            self.early.append(message)
            return []
        return self._went_on([*self.above.hear(message, now_ns)], now_ns)

    def _introduce(self, now_ns: int) -> list[ServerEffect]:
        """Tell what is above who the other clusters are, and what they have said too early."""
        if self.planned is None or not self.ledger.above or self.planned.above_is != self.ledger.above:
            return []
        effects: list[ServerEffect] = [*self.above.introduce(self.ledger.roster, self.ledger.alone, now_ns)]
        while self.early:
            with contextlib.suppress(RemoteProtocolError):
                effects += self.above.hear(self.early.popleft(), now_ns)
        return effects

    def _give_weights(self, now_ns: int) -> list[ServerEffect]:
        """Hand up the first weights, once all shards have those of one worker, or a checkpoint."""
        decided = self.weights_from < 0 or self.ledger.weights == self.weights_from
        if self.planned is None or not self.above.wants_weights or self.planned.store.publication < 0 or not decided:
            return []
        return [*self.above.give_weights(self.planned.store.x, now_ns)]

    def _went_on(self, effects: list[ServerEffect], now_ns: int) -> list[ServerEffect]:
        effects = [*effects, *self._introduce(now_ns), *self._go_on(now_ns)]
        self.trouble = self.trouble or self.above.trouble[: m.TEXT_MAX]
        if self.told != self._standing:  # not: what has changed here, for the session has changed before we hear of it
            effects.append(self._report(now_ns))
        return effects

    @property
    def at_rest(self) -> bool:
        """The run above has all that is to come from this shard."""
        if not self.ledger.above:
            return True
        return self.ledger.over and self.min_clock >= self.ledger.min_clock and self.above.at_rest

    @property
    def _standing(self) -> tuple[object, ...]:
        """What the run above may change of a report."""
        finishes = self.planned.finishes if self.planned is not None else 0
        return (self.min_clock, self.above.ready, self.at_rest, finishes, self.above.ended, self.trouble)

    # Messages of workers.

    def handle(self, peer: bytes, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a worker's message. Raises RemoteProtocolError for one that is none, with nothing changed."""
        if not isinstance(message, (m.Push, m.Follow, m.Pull, m.FirstWeights)):
            raise RemoteProtocolError(f"a shard takes no {type(message).__name__}")
        seat = self.inbox.seats.get(message.worker)
        if seat is None or message.epoch != seat.epoch:
            if message.epoch > self.inbox.epoch:
                return []  # who is a member has not reached this shard yet; it will ask again
            text = f"worker {message.worker} is no member (its lease expired, or the server was restarted)"
            return [Send(peer, m.Refuse(m.RefuseCode.NOT_A_MEMBER, message.worker, message.epoch, text))]
        if self.planned is None:
            return []  # nor the model
        before, seat.peer = seat.peer, peer
        try:
            return self._handle(self.planned, seat, message, now_ns)
        except RemoteProtocolError:
            seat.peer = before
            raise

    def _handle(
        self, planned: Planned, seat: Seat, message: m.Push | m.Follow | m.Pull | m.FirstWeights, now_ns: int
    ) -> list[ServerEffect]:
        if isinstance(message, m.Push):
            return self._push(planned, seat, message, now_ns)
        if isinstance(message, m.FirstWeights):
            return self._first_weights(planned, seat, message, now_ns)
        if isinstance(message, m.Follow):
            planned.publications.follow(seat, message, now_ns)
            return self._serve(seat, now_ns)
        planned.publications.pull(seat, message)
        effects = self._serve(seat, now_ns)
        # Who waits for the last model needs not be waited for: the coordinator must know.
        return [*effects, self._report(now_ns)] if self._finishing(seat) else effects

    def _finishing(self, seat: Seat) -> bool:
        """It is done, and waits for the model that all clusters end with."""
        pull = self.planned.publications.child(seat).pull if self.means.child and self.planned is not None else None
        return pull is not None and 0 < pull.clock <= seat.clock

    def _first_weights(self, planned: Planned, seat: Seat, message: m.FirstWeights, now_ns: int) -> list[ServerEffect]:
        ledger, store = self.ledger, planned.store
        if ledger.started or ledger.initialiser != seat.worker or self.weights_from == seat.worker:
            return []
        if self.means.child and not self.above.wants_weights:
            return []  # the run above has some by now
        check_part(message, store.whole, planned.finite)
        mine = {part: piece for part, piece in self.first.items() if piece.worker == seat.worker} | {
            message.part: message
        }
        if len(mine) >= message.parts and not covers([(p.begin, p.end) for p in mine.values()], *store.whole):
            raise RemoteProtocolError("the first weights do not cover this shard's keys exactly once")
        self.first = mine
        if len(mine) < message.parts:
            return []
        planned.apply([FirstWeights(list(mine.values()))])
        self.first, self.weights_from = {}, seat.worker
        return [self._report(now_ns)]

    def _push(self, planned: Planned, seat: Seat, push: m.Push, now_ns: int) -> list[ServerEffect]:
        if push.clock < seat.clock:
            return [self._ack(planned, seat, push.clock, now_ns)]
        if not self.ledger.started:
            return []
        check_part(push, planned.store.whole, planned.finite)
        if push.part == 0 and planned.store.optimizer is not None:
            planned.store.optimizer.check(unpack_hyper(push.hyper)[0])
        self.inbox.add(seat, push, planned.turn(push.clock))
        if isinstance(planned.folding, Barrier) and push.clock == seat.taken and self.mode.rule is not Rule.ADD:
            planned.folding.early(push.part)
        effects: list[ServerEffect] = []
        while update := self.inbox.next(seat):
            clock, made = seat.clock, planned.store.publication
            logs = planned.accept(seat, update)
            seat.news = self.version + 1
            effects += [self._ack(planned, seat, clock, now_ns), *logs]
            for each in self.inbox.seats.values() if planned.store.publication != made else ():
                effects += self._serve(each, now_ns)
            effects.append(self._report(now_ns))
        return effects

    def _ack(self, planned: Planned, seat: Seat, clock: int, now_ns: int) -> Send:
        weight = planned.folding.weight(seat, clock)
        status = m.PushStatus.HELD if weight is None else m.PushStatus.FOLDED
        wants = self.wants_buffers(seat.worker, now_ns)
        return Send(seat.peer, m.PushAck(seat.worker, seat.epoch, clock, status, weight or 0.0, wants, now_ns, now_ns))

    def _serve(self, seat: Seat, now_ns: int) -> list[ServerEffect]:
        """What this child has asked for and may be sent."""
        planned, ledger = self.planned, self.ledger
        if planned is None:
            return []
        child, store = planned.publications.child(seat), planned.store
        if not ledger.started or store.publication < 0:
            wanted = not self.means.child or self.above.wants_weights
            asks = (child.follow.credit or child.pull) and ledger.initialiser == seat.worker != self.weights_from
            return [Send(seat.peer, m.NeedWeights(seat.worker, seat.epoch))] if wanted and asks else []
        effects: list[ServerEffect] = [*planned.publications.serve(seat, now_ns)]
        settled = seat.settled if self.mode.barrier else planned.min_clock
        if child.pull is None or child.pull.clock > settled:
            return effects
        array = self.above.master if self._finishing(seat) else store.x if store.shared else store.x.copy()
        if array is not None:
            effects += planned.publications.master(seat, array, planned.min_clock, now_ns)
        return effects

    # Reports.

    def report(self) -> m.Report:
        """What this shard has seen and done, under a new version."""
        self.version += 1
        self.told, planned, above = self._standing, self.planned, self.above
        self.newest = m.Report(
            shard=self.index,
            port=self.port,
            version=self.version,
            incarnation=self.incarnation,
            generation=self.ledger.generation,
            ledger_seen=self.ledger.version,
            epoch=self.inbox.epoch,
            planned=planned is not None,
            weights_from=self.weights_from,
            min_clock=self.min_clock,
            # All would cost each of a thousand members a look for each push of one of them.
            arrived=tuple((s.worker, s.clock) for s in self.inbox.seats.values() if s.news > self.report_seen),
            norms=tuple(planned.norms.items()) if planned is not None else (),
            checkpoints=tuple(self.checkpoints),
            from_above=above.place.epoch if above.ready and above.place is not None else 0,
            finishing=tuple(s.worker for s in self.inbox.seats.values() if self.means.child and self._finishing(s)),
            finishes=planned.finishes if planned is not None else 0,
            at_rest=self.at_rest,
            ended=above.ended,
            trouble=self.trouble,
        )
        return self.newest

    def seen(self, version: int) -> None:
        """The coordinator has the report of this version."""
        self.report_seen = max(self.report_seen, version)

    def _report(self, now_ns: int) -> Send:
        self.reported_ns = now_ns
        return Send(COORDINATOR, self.report())

    def tick(self, now_ns: int) -> list[ServerEffect]:
        """Report again what the coordinator has not seen; and now and then all, to one that was restarted."""
        if self.planned is not None and self.ledger.above:
            again: list[ServerEffect] = [*self.above.tick(now_ns)]
            if again or self.told != self._standing:  # that nobody is waited for any more shows in no effect
                return self._went_on(again, now_ns)
        if self.planned is not None and self.planned.writes:
            self.planned.has_written()
            return [*self._go_on(now_ns), self._report(now_ns)]
        if self.report_seen < self.version and now_ns - self.reported_ns >= REPORT_RETRY_NS:
            return [self._report(now_ns)]
        if self.newest is not None and now_ns - self.reported_ns >= REPORT_AGAIN_NS:
            self.reported_ns = now_ns
            return [Send(COORDINATOR, self.newest)]
        return []
