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
from dataclasses import replace

import numpy as np

from narrows.compression import ErrorFeedback, parse
from narrows.compression.codecs import coded_piece
from narrows.compression.replica import HostReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import MemberEffect
from narrows.protocols.member.member import Member
from narrows.ps.parent.parent_link import Asks, ParentSeat, ParentState, SeatedParentLink, asks
from narrows.ps.store.changes import Change, FloatArray

NOTHING = parse("threshold:1")  # codes zeros in 16 bytes


class ParentPush(SeatedParentLink):
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
        super().__init__(index, place, kept, member, timing, replica, whole)
        self.samples = 0  # samples of the clocks since the last push
        if kept.owed is not None:
            self.owe(kept.owed)

    def owe(self, owed: FloatArray) -> None:
        self.feedback.load_state_dict({"residual": owed})
        self.kept = replace(self.kept, feedback=self.feedback, owed=None)

    def go_on(self, place: ParentSeat, now_ns: int) -> Asks:
        self.feedback.change(place.codecs.up.compressor())
        before = self.exchange
        self._sit(place, place.codecs.down.lossless)
        said = self.exchange.go_on(place.worker, place.epoch, place.clock, [before])
        self.exchange.held_at = place.hold
        again = self.exchange.ask_shared(last=True) if self.finishing else []
        return self._say([*said, *again], now_ns)

    def take(self, events: Iterable[MemberEffect], now_ns: int) -> Asks:
        effects: Asks = []
        for event in events:
            effects += [*asks([event]), *self._say(self.exchange.take(event), now_ns)]
            self.asked |= isinstance(event, e.GiveWeights)
            self.due |= isinstance(event, e.StateArrived)
            if isinstance(event, e.MasterArrived) and self.finishing and event.clock == self.exchange.clock:
                self.master, self.finishing = self.exchange.shared, False
        return effects

    def stepped(self, samples: int) -> None:
        self.inner += 1
        self.samples += samples
        self.moved()

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        if self.inner < self.mode.local_steps:
            return [], True
        if not self.ready or not self.exchange.may_push:
            return [], False
        return self._push(x, now_ns), True

    def _push(self, x: FloatArray, now_ns: int, dense: bool = False) -> Asks:
        """Push x - start with the residual, and make x the new start. `dense`: leave nothing to the residual."""
        update, feedback, clock = x - self.start, self.feedback, self.exchange.clock
        if not update.any() and (feedback.residual is None or not feedback.residual.any()):
            pieces = [coded_piece(NOTHING.encode(update), self.replica.begin, self.replica.end)]
        else:
            try:
                pieces = self.replica.encode(update, clock, dense)
            except ValueError:
                # An update that is not finite is sent as it is: the parent logs it, or the workers there see it.
                pieces = self.replica.encode(update, clock, dense=True)
        self.kept = replace(self.kept, start=x.copy(), feedback=feedback)
        samples = min(max(1, self.samples), m.CLOCK_MAX)
        self.inner = self.samples = 0
        self.due = True
        return self._say(self.exchange.push(pieces, samples), now_ns)

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        self.feedback.load_state_dict({})  # x contains all that the residual owes
        if self.kept.start is not None:
            self.kept = replace(self.kept, start=x.copy())
        return super().give_weights(x, now_ns)

    def may_publish(self) -> bool:
        return self.ready and self.exchange.may_compute

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        return self._begin_with(self._base, x, publication) if self.exchange.settled >= 0 and not self.ready else []

    def _base(self) -> FloatArray:
        """Return the replica: the parent's newest state with this cluster's own pushes, float32[size]."""
        base = np.empty(self.replica.end - self.replica.begin, np.float32)
        self.exchange.base(self.replica.begin, self.replica.end, base)
        self.due = False
        return base

    def rebase(self) -> list[Change]:
        return self._on(self._base()) if self.due and self.exchange.may_compute else []

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push all that is left, dense, and ask for the model that the run ends with.

        The parent answers once all clusters have come as far. An update of zeros is pushed too: the last clock of every
        cluster is then one after its steps, and no cluster waits for another.
        """
        if not self.may_publish() or not self.exchange.may_push:
            return [], False
        self.finishing, self.master = True, None
        pushed = self._push(x, now_ns, dense=True)
        return [*pushed, *self._say(self.exchange.ask_shared(last=True), now_ns)], True
