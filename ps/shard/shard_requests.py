"""Answers what members say to a shard that knows its model. No I/O.

Rules
- At once: an accepted push is folded and acked FOLDED. With a barrier it is acked HELD, and folded when the ledger closes
  a clock over a set that names it; what no set ever will, since its worker left, is discarded, named and counted.
- An ask for rows is kept until the state that it may be answered from is there. One for what the optimizer keeps is answered
  at once.
- A message is checked before anything changes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from narrows.compression import codecs
from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import ASKS_MAX
from narrows.protocols.config.modes import Rule
from narrows.protocols.effects import Send, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import FRAME_VALUES, pack
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.folding import unpack_hyper
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.shard.push_assembler import PushSequence, check_part
from narrows.ps.store.changes import FloatArray

OfWorkers = m.Push | m.Follow | m.Pull | m.FirstWeights | m.RowsAsk | m.MomentsAsk


class ShardRequests:
    """Answers the members of one shard in one generation."""

    def __init__(self, planned: ModelShard) -> None:
        self.planned, self.means = planned, planned.means
        self.inbox, self.store, self.publications = planned.inbox, planned.store, planned.publications

    def handle(
        self, seat: PushSequence, message: OfWorkers, ledger: m.Ledger, now_ns: int
    ) -> tuple[list[ServerEffect], bool]:
        """The effects, and whether the coordinator must know. Raises RemoteProtocolError; then nothing has changed."""
        if isinstance(message, m.Push):
            return self._push(seat, message, ledger, now_ns)
        if isinstance(message, m.FirstWeights):
            whole = self._first_weights(seat, message, ledger)
            others = self.inbox.seats.values() if whole and ledger.sources else ()
            return [effect for each in others for effect in self.serve(each, ledger, now_ns)], whole
        if isinstance(message, m.Follow):
            self.publications.follow(seat, message, now_ns)
            return self.serve(seat, ledger, now_ns), False
        if isinstance(message, m.RowsAsk):
            self._ask(seat, message)
            return self.serve(seat, ledger, now_ns), False
        if isinstance(message, m.MomentsAsk):
            return self._moments(seat, message, ledger, now_ns), False
        self.publications.pull(seat, message)
        # A worker that waits for the last model is not waited for.
        return self.serve(seat, ledger, now_ns), self.finishing(seat)

    def finishing(self, seat: PushSequence) -> bool:
        """This worker has done its last step, all its updates are here, and it waits for the model that all end with."""
        pull = self.publications.child(seat).pull
        return pull is not None and pull.last and pull.clock == seat.clock

    def all_finishing(self) -> tuple[int, ...]:
        """Return the workers that are done, and wait for that model."""
        seats = self.inbox.seats
        waiting = [seats[worker] for worker in sorted(self.publications.lasts) if worker in seats]
        return tuple(seat.worker for seat in waiting if self.finishing(seat))

    def _last(self) -> FloatArray | None:
        """The model that all workers end with, None: it is not known yet."""
        if self.means.child:
            return self.planned.above.master
        return self.store.x if self.planned.upward.finishes else None

    def _first_weights(self, seat: PushSequence, message: m.FirstWeights, ledger: m.Ledger) -> bool:
        if ledger.started or self.planned.next_source(ledger) != seat.worker:
            return False
        if self.means.child and not self.planned.above.wants_weights:
            return False  # the run above has some by now
        return self.planned.first_weights(message, ledger)

    def _push(self, seat: PushSequence, push: m.Push, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        planned, began = self.planned, seat.clock
        if push.clock < began:
            return [self._ack(seat, push.clock, now_ns)], False
        if not ledger.started:
            return [], False
        if (squared := check_part(push, self.store.whole)) == math.inf:
            push, squared = replace(push, codec=codecs.VOID, payload=b""), 0.0
        if push.codec == codecs.ROWS:
            self.store.tables.opened(push.payload)
        if push.part == 0 and push.samples and (push.hyper or self.store.optimizer is not None):
            hyper, _, rates = unpack_hyper(push.hyper)
            if self.store.optimizer is not None:
                self.store.optimizer.check(hyper)
            if rates:
                self.store.tables.check_rates(rates)
        self.inbox.add(seat, push, planned.turn(push.clock), squared)
        if (
            isinstance(planned.folding, FoldAtBarrier)
            and push.clock == seat.taken
            and planned.mode.rule is not Rule.ADD
        ):
            planned.folding.early(push.part)
        effects: list[ServerEffect] = []
        while update := self.inbox.next(seat):
            clock, made = seat.clock, self.store.publication
            logs = planned.accept(seat, update)
            effects += [self._ack(seat, clock, now_ns), *logs]
            for each in self.inbox.seats.values() if self.store.publication != made else ():
                effects += self.serve(each, ledger, now_ns)
        return [*effects, *self._rows(seat, now_ns)], seat.clock != began

    def _ask(self, seat: PushSequence, ask: m.RowsAsk) -> None:
        """Keep it until it may be answered. One too many is not kept: it is said again."""
        self.store.tables.opened(ask.payload, asks=True)
        asks = self.publications.child(seat).asks
        if ask.request in asks or len(asks) < ASKS_MAX:
            asks[ask.request] = ask

    def _rows(self, seat: PushSequence, now_ns: int) -> list[Send]:
        """All rows that this member has asked for and may compute on: its own updates before that clock are in, and those of
        others as far as the bound asks for."""
        planned, asks = self.planned, self.publications.child(seat).asks
        may = [a for a in asks.values() if a.clock <= seat.clock and planned.mode.allows(a.clock, planned.min_clock)]
        effects = []
        for ask in may:
            del asks[ask.request]
            values = self.store.tables.read(ask.payload)
            effects.append(Send(seat.peer, m.Rows(seat.worker, seat.epoch, ask.request, now_ns, values)))
        return effects

    def _moments(self, seat: PushSequence, ask: m.MomentsAsk, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Answer with what the optimizer keeps, as it is now."""
        (low, high), optimizer = self.store.whole, self.store.optimizer
        if optimizer is None:
            raise RemoteProtocolError("no optimizer steps keys here: workers push updates")
        if ask.name and not (low <= ask.begin < ask.end <= high and ask.end - ask.begin <= FRAME_VALUES):
            raise RemoteProtocolError(
                f"keys [{ask.begin}, {ask.end}) of an optimizer are not {FRAME_VALUES} of this shard"
            )
        if not ledger.started:
            return []
        if ask.name:
            payload: m.Buffer = optimizer.read(ask.name, ask.begin - low, ask.end - low).tobytes()
        else:
            payload = pack(optimizer.kept())
        clock = self.planned.min_clock
        return [Send(seat.peer, m.Moments(seat.worker, seat.epoch, ask.request, clock, now_ns, payload))]

    def _ack(self, seat: PushSequence, clock: int, now_ns: int) -> Send:
        weight = self.planned.folding.weight(seat, clock)
        status = m.PushStatus.HELD if weight is None else m.PushStatus.FOLDED
        coordinator = self.means.coordinator
        wants = coordinator is not None and coordinator.buffers.wanted(seat.worker, now_ns)
        return Send(seat.peer, m.PushAck(seat.worker, seat.epoch, clock, status, weight or 0.0, wants, now_ns, now_ns))

    def serve(self, seat: PushSequence, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Return what this member has asked for and may be sent."""
        planned, store, child = self.planned, self.store, self.publications.child(seat)
        if not ledger.started or store.publication < 0:
            wanted = not self.means.child or planned.above.wants_weights
            asks = (child.follow.credit or child.pull) and planned.next_source(ledger) == seat.worker
            if not (wanted and asks) or child.asked:
                return []
            child.asked = True  # each ask costs a whole model on its link
            which = (ledger.source_round, dict(ledger.sources).get(seat.worker, -1))
            return [Send(seat.peer, m.NeedWeights(seat.worker, seat.epoch, *which))]
        effects: list[ServerEffect] = [*self.publications.serve(seat, now_ns), *self._rows(seat, now_ns)]
        if child.pull is None or (child.pull.last and not self.finishing(seat)):
            return effects
        array = self._last() if child.pull.last else store.x
        if array is not None:
            lent = array is store.x and not store.shared  # the next fold writes there
            effects += self.publications.master(seat, array.copy() if lent else array, planned.min_clock, now_ns)
        return effects
