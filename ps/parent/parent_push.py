"""One shard as a child that pushes updates to the parent's shard with the same keys.

    start ──(clocks of the cluster fold)──> x          update = x - start
      push: replica.encode(update) ──> parent's shard, error feedback keeps what compression leaves out; start = x
      state of the parent arrives ──> base ──> Rebase(start, base): x = base + (x - start); start = base

Rules
- The cluster's server is a worker of its parent. Its inner step is one advance of its min_clock. Its update is how far
  the shard's weights moved since the last push. It reads its own writes: base = replica (protocols/member/exchange.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from narrows.compression import ErrorFeedback, parse
from narrows.compression.codecs import coded_piece, raw_pieces
from narrows.compression.replica import HostReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import MemberEffect
from narrows.protocols.member.member import Member
from narrows.ps.parent.parent_link import Asks, ParentSeat, ParentSession, ParentState
from narrows.ps.store.changes import Change, FloatArray

NOTHING = parse("threshold:1")  # codes zeros in 16 bytes


class ParentPush:
    """The keys [begin, end) toward a parent's shard that folds pushes."""

    def __init__(
        self, index: int, place: ParentSeat, keys: Keys, kept: ParentState, member: Member | None, timing: Timing
    ) -> None:
        """A link before its first message.

        Args:
            index: The number of this shard.
            place: The seat.
            keys: The key range [begin, end) of the shard.
            kept: What an earlier seat has left.
            member: In process 0: the cluster's member of the parent's run.
            timing: The limits of every wait.
        """
        up, whole = place.codecs.up.compressor(), place.codecs.down.lossless
        self.feedback = kept.feedback or ErrorFeedback(up, keys[1] - keys[0], seed=place.worker << 16 | index)
        self.feedback.change(up)  # an earlier feedback has the compressor of an earlier plan
        replica = HostReplica(*keys, [(keys, self.feedback)], parts)
        self.seat = ParentSession(index, place, kept, member, timing, replica, whole)
        if kept.owed is not None:
            self.owe(kept.owed)

    @property
    def kept(self) -> ParentState:
        return self.seat.kept

    def begin(self, now_ns: int) -> Asks:
        return self.seat.begin(now_ns)

    def owe(self, owed: FloatArray) -> None:
        """Keep what an earlier process owes the parent, float32[size]: the residual of the next push."""
        self.feedback.load_state_dict({"residual": owed})
        self.seat.keep(feedback=self.feedback, owed=None)

    def go_on(self, place: ParentSeat, now_ns: int) -> Asks:
        """Keep the seat under another plan of the parent's run: all pushes count, and the residual stays."""
        seat, before = self.seat, self.seat.exchange
        self.feedback.change(place.codecs.up.compressor())
        seat.sit(place, place.codecs.down.lossless)
        said = seat.exchange.go_on(place.worker, place.epoch, place.clock, [before])
        seat.exchange.hold(place.hold)
        again = seat.exchange.ask_shared(last=True) if seat.finishing else []
        return seat.send([*said, *again], now_ns)

    def take(self, events: Iterable[MemberEffect], now_ns: int) -> Asks:
        seat, effects = self.seat, Asks()
        for event in events:
            effects += seat.take(event, now_ns)
            if isinstance(event, e.StateArrived):
                seat.outdate_base()
            if isinstance(event, e.MasterArrived) and seat.finishing and event.clock == seat.exchange.clock:
                seat.take_last(seat.replica.master(seat.exchange.take_shared()))
        return effects

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        if self.seat.inner < self.seat.mode.local_steps:
            return [], True
        if not self.seat.ready or not self.seat.exchange.may_push:
            return [], False
        return self._push(x, now_ns), True

    def _push(self, x: FloatArray, now_ns: int, last: bool = False) -> Asks:
        """Push x - start with the residual, and make x the new start. `last`: leave nothing to the residual."""
        update, feedback, clock = x - self.seat.start, self.feedback, self.seat.exchange.clock
        replica = self.seat.replica
        if not update.any() and (feedback.residual is None or not feedback.residual.any()):
            pieces = [coded_piece(NOTHING.encode(update), replica.begin, replica.end)]
        else:
            try:
                pieces = replica.encode(update, clock, last)
                if last:
                    replica.sent_last(clock)
            except ValueError:
                # An update that is not finite is sent as it is: the parent logs it, or the workers there see it.
                pieces = raw_pieces(update, replica.begin, parts(replica.begin, replica.end))
        self.seat.keep(start=x.copy(), feedback=feedback)
        samples = min(max(1, self.seat.begin_round()), m.CLOCK_MAX)
        return self.seat.send(self.seat.exchange.push(pieces, samples), now_ns)

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        self.feedback.load_state_dict({})  # x contains all that the residual owes
        if self.seat.kept.start is not None:
            self.seat.keep(start=x.copy())
        return self.seat.give_weights(x, now_ns)

    def may_publish(self) -> bool:
        return self.seat.ready and self.seat.exchange.may_compute

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        begins = self.seat.exchange.settled >= 0 and not self.seat.ready
        return self.seat.begin_with(self._base, x, publication) if begins else []

    def _base(self) -> FloatArray:
        """Return the replica: the parent's newest state with this cluster's own pushes, float32[size]."""
        base = np.empty(self.seat.replica.end - self.seat.replica.begin, np.float32)
        self.seat.exchange.base(self.seat.replica.begin, self.seat.replica.end, base)
        self.seat.made_base()
        return base

    def rebase(self) -> list[Change]:
        return self.seat.move_onto(self._base()) if self.seat.due and self.seat.exchange.may_compute else []

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push all that is left, and ask for the model that the run ends with.

        The parent answers once all clusters have come as far. An update of zeros is pushed too: the last clock of every
        cluster is then one after its steps, and no cluster waits for another.
        """
        if not self.may_publish() or not self.seat.exchange.may_push:
            return [], False
        self.seat.await_last()
        pushed = self._push(x, now_ns, last=True)
        return [*pushed, *self.seat.send(self.seat.exchange.ask_shared(last=True), now_ns)], True
