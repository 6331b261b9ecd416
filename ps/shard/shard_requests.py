"""Answers the messages of members to a shard that has a model. No I/O.

Rules
- Without a barrier an accepted push is folded and acknowledged as FOLDED. With a barrier it is acknowledged as HELD,
  and folded when the ledger closes a clock over a set that names it. An update that no set will name, because its
  worker has left, is dropped, logged and counted.
- A request for rows waits until the shard has the state that may answer it. A request for optimizer state is answered
  at once.
- A message is checked before anything changes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from narrows.compression import codecs
from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import ASKS_MAX
from narrows.protocols.effects import Send, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import FRAME_VALUES, pack
from narrows.ps.shard.folding import unpack_hyper
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.shard.push_assembler import PushSequence, check_part
from narrows.ps.store.changes import FloatArray, RoundLast

OfWorkers = m.Push | m.Follow | m.Pull | m.FirstWeights | m.RowsRequest | m.MomentsRequest


class ShardRequests:
    """Answers the members of one shard in one generation."""

    def __init__(self, model_shard: ModelShard) -> None:
        self.model_shard, self.resources = model_shard, model_shard.resources
        self.assembler, self.store, self.publications = (
            model_shard.assembler,
            model_shard.store,
            model_shard.publications,
        )

    def handle(
        self, seat: PushSequence, message: OfWorkers, ledger: m.Ledger, now_ns: int
    ) -> tuple[list[ServerEffect], bool]:
        """Handle one message of a member.

        Returns:
            The effects, and whether the coordinator must get a report.

        Raises:
            RemoteProtocolError: The message breaks the protocol. Nothing has changed.
        """
        if isinstance(message, m.Push):
            return self._push(seat, message, ledger, now_ns)
        if isinstance(message, m.FirstWeights):
            whole = self._first_weights(seat, message, ledger)
            others = self.assembler.seats.values() if whole and ledger.sources else ()
            return [effect for each in others for effect in self.serve(each, ledger, now_ns)], whole
        if isinstance(message, m.Follow):
            self.publications.check(seat, message)
            self.publications.follow(seat, message, now_ns)
            return self.serve(seat, ledger, now_ns), False
        if isinstance(message, m.RowsRequest):
            self._ask(seat, message)
            return self.serve(seat, ledger, now_ns), False
        if isinstance(message, m.MomentsRequest):
            return self._moments(seat, message, ledger, now_ns), False
        self.publications.pull(seat, message)
        # The coordinator must know of a worker that waits for the last model: no clock waits for that worker any more.
        return self.serve(seat, ledger, now_ns), self.finishing(seat)

    def finishing(self, seat: PushSequence) -> bool:
        """True if this worker has taken its last step, its updates are accepted, and it waits for the last model."""
        pull = self.publications.child(seat).pull
        return pull is not None and pull.last and pull.clock == seat.clock

    def all_finishing(self) -> tuple[int, ...]:
        """Return the workers for which `finishing` is true."""
        seats = self.assembler.seats
        waiting = [seats[worker] for worker in sorted(self.publications.lasts) if worker in seats]
        return tuple(seat.worker for seat in waiting if self.finishing(seat))

    def _last(self) -> FloatArray | None:
        """Return the model that all workers end with, or None while it is not known."""
        if self.resources.child:
            seat = self.model_shard.parent_slot.seat
            return seat.master if seat is not None else None
        return self.store.x if self.model_shard.parent_slot.finishes else None

    @property
    def _wanted_above(self) -> bool:
        """True if the first weights of a worker count: the parent wants them, or there is none."""
        seat = self.model_shard.parent_slot.seat
        return not self.resources.child or (seat is not None and seat.wants_weights)

    def _first_weights(self, seat: PushSequence, message: m.FirstWeights, ledger: m.Ledger) -> bool:
        """Take one part of first weights, if they are wanted from this worker. True if they are complete."""
        if ledger.started or self.model_shard.next_source(ledger) != seat.worker:
            return False
        if not self._wanted_above:
            return False  # another cluster has already given the parent its first weights
        whole = self.model_shard.first_weights(message, ledger)
        if whole and not ledger.sources:
            self.publications.founded(seat)
        return whole

    def _push(self, seat: PushSequence, push: m.Push, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Take one part of a push, and accept each update that is complete with it."""
        began, asks = seat.clock, push.asks()
        if asks is not None:
            self.publications.check(seat, asks)
        filed = push.clock >= began and ledger.started
        if filed:
            self._file(seat, push)
        effects: list[ServerEffect] = [] if push.clock >= began else [self._ack(seat, push.clock, now_ns)]
        if asks is not None:
            self.publications.follow(seat, asks, now_ns)
        while filed and (update := self.assembler.next(seat)):
            clock, made = seat.clock, self.store.publication
            logs = self.model_shard.accept(seat, update)
            effects += [self._ack(seat, clock, now_ns), *logs]
            for each in self.assembler.seats.values() if self.store.publication != made else ():
                effects += self.serve(each, ledger, now_ns)
        if asks is not None:
            effects += self.serve(seat, ledger, now_ns)
        elif filed:
            effects += self._rows(seat, now_ns)
        return effects, seat.clock != began

    def _file(self, seat: PushSequence, push: m.Push) -> None:
        """Check one part of a push that is not accepted yet, and file it. Raises RemoteProtocolError."""
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
        self.assembler.add(seat, push, self.model_shard.turn(push.clock), squared)

    def _ask(self, seat: PushSequence, ask: m.RowsRequest) -> None:
        """Keep a request for rows until it may be answered; beyond ASKS_MAX drop it, for the worker repeats it."""
        self.store.tables.opened(ask.payload, asks=True)
        asks = self.publications.child(seat).asks
        if ask.request in asks or len(asks) < ASKS_MAX:
            asks[ask.request] = ask

    def _rows(self, seat: PushSequence, now_ns: int) -> list[Send]:
        """Answer this member's requests for rows that it may compute on now.

        A request of clock c is answered once the shard has the member's own updates below c, and the other members'
        updates as far as the staleness bound requires.
        """
        model_shard, asks = self.model_shard, self.publications.child(seat).asks
        may = [
            a
            for a in asks.values()
            if a.clock <= seat.clock and model_shard.mode.allows(a.clock, model_shard.min_clock)
        ]
        effects = []
        for ask in may:
            del asks[ask.request]
            values = self.store.tables.read(ask.payload)
            effects.append(Send(seat.peer, m.RowsAnswer(seat.worker, seat.epoch, ask.request, now_ns, values)))
        return effects

    def _moments(self, seat: PushSequence, ask: m.MomentsRequest, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Answer with the present state of the optimizer."""
        (low, high), optimizer = self.store.whole, self.store.optimizer or self.store.handover
        if optimizer is None and self.model_shard.start_clock >= 0:
            return []  # a repeated request: the worker has gone on
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
        clock = self.model_shard.min_clock if self.store.optimizer is not None else self.model_shard.start_clock
        return [Send(seat.peer, m.MomentsAnswer(seat.worker, seat.epoch, ask.request, clock, now_ns, payload))]

    def _ack(self, seat: PushSequence, clock: int, now_ns: int) -> Send:
        """Acknowledge an accepted update, with its weight if it is folded."""
        weight = self.model_shard.folding.weight(seat, clock)
        status = m.PushStatus.HELD if weight is None else m.PushStatus.FOLDED
        coordinator = self.resources.coordinator
        wants = coordinator is not None and coordinator.buffers.wanted(seat.worker, now_ns)
        return Send(seat.peer, m.PushAck(seat.worker, seat.epoch, clock, status, weight or 0.0, wants, now_ns, now_ns))

    def serve(self, seat: PushSequence, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Return what this member has asked for and may get now: publications, rows, the master copy."""
        model_shard, store, child = self.model_shard, self.store, self.publications.child(seat)
        if not ledger.started or store.publication < 0:
            asks = (child.follow.credit or child.pull) and model_shard.next_source(ledger) == seat.worker
            if not (asks and self._wanted_above) or child.asked:
                return []
            child.ask_weights()  # once: each answer to NeedWeights is a whole model on the worker's link
            which = (ledger.source_round, dict(ledger.sources).get(seat.worker, -1))
            return [Send(seat.peer, m.NeedWeights(seat.worker, seat.epoch, *which))]
        effects: list[ServerEffect] = [*self.publications.serve(seat, now_ns), *self._rows(seat, now_ns)]
        if child.pull is None or (child.pull.last and not self.finishing(seat)):
            return effects
        array, beyond = self._last() if child.pull.last else store.x, None
        if array is store.x:
            if child.pull.last and self.publications.catches_up(seat):
                return effects
            if child.pull.last and store.rounded is None:
                model_shard.apply([RoundLast()])
            if self.publications.follows(seat):
                beyond = store.rounded if child.pull.last else store.beyond()
            # The next fold writes into an array of values that is on its way.
            array = array.copy() if beyond is None and not store.shared else array
        if array is not None:
            effects += self.publications.master(seat, array, beyond, model_shard.min_clock, now_ns)
        return effects
