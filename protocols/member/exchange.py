"""The exchange of a child (a worker or a cluster) with one shard: when the child may compute, pushes and asks. Pure.

How it works

    clock c      may_compute: the pulled state is settled to c - s
      compute on base():  replica = pulled state + gain * residual + stand-ins of own updates that the state lacks
      push(c)             in flight: at most `window` updates
      Follow              asks for the next state, so that its transfer overlaps the next computation
    PushSettled c         the shard has folded update c: update c is no longer in flight
    StateArrived          absorb: the pulled state moves on; own updates that it contains stand in no longer

1. `begin` starts at a place in the run: worker number, epoch and clock. Updates in flight are given up; the residual
   stays.
2. A shard that publishes differences sends each as soon as it is made; one Follow asks for all. Whole states (`whole`)
   are asked for one by one: right after a push, and again if the state that came is too old (`need`).
3. `push` numbers the parts of an update. `part` makes one part early, while the others are still computed.
4. `take` handles the events of the session. It checks the parts of a state together before `Replica.absorb` gets them.
   A part of a whole state goes to `Replica.early` before that, as it arrives. A replica in place (bsp, whose pulled state
   is the parameters) writes it then, after a check of its keys, codec and bytes alone.

Rules
- One clock is one update. Without a quorum and with staleness s, the child computes clock c on a state that has the
  updates of all members below c - s. With --quorum a clock closes without late members, so only the child's own updates
  below c - s are sure to be in that state.
- The replica rule is read-my-writes (Ho et al. 2013, sec. 3), defined in protocols/member/replica.py. `base` alone
  applies it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import CodedPiece, Keys, covers
from narrows.protocols.config.modes import GAIN_MAX, FoldRule, Mode
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.replica import A, Replica, stand_in

Says = list[m.Message]  # messages to send through the session with the shard


class Exchange(Generic[A]):
    """The exchange with one shard. Each method returns the messages to send.

    Args:
        mode: of the run.
        replica: the arrays of the shard's keys.
        whole: the shard publishes whole states; False: differences.
        steps: the run's steps so far, until a state says them.
    """

    def __init__(self, mode: Mode, replica: Replica[A], whole: bool, steps: int = 0) -> None:
        self.mode, self.replica, self.whole = mode, replica, whole
        self.worker, self.epoch = -1, 0  # this child's number, and the epoch of its place in the run
        self.clock = 0  # of the next update
        self.publication = self.min_clock = self.settled = -1  # of the pulled state; -1: no state has come
        self.contains: dict[int, float] = {}  # own updates >= `settled` in the pulled state -> weight of each fold
        self.gain, self.ahead, self.agreement = 1.0, 1.0, 0.0  # of the pulled state
        self.steps = steps  # the run's steps in the pulled state (--local-seconds)
        self.in_flight: set[int] = set()  # clocks of updates that the shard has not folded; at most `mode.window`
        self.held_at = -1  # updates from this clock on must wait for a Reshard; -1: none must
        self.own: OrderedDict[int, Sequence[CodedPiece]] = OrderedDict()  # own updates, as sent, that may stand in
        self.asked = False  # a Follow for a whole state is not yet answered
        self.coding = ""  # the SPEC in which the shard is to code its states (`auto`); "": the shard's own
        self.shared: tuple[m.State, ...] = ()  # parts of the master copy, checked, once it has come
        self.shared_clock = -1  # the run's clock of the master copy

    def begin(self, worker: int, epoch: int, clock: int) -> Says:
        """Begin at a first or another place in the run. Updates in flight are given up; the residual stays."""
        self.worker, self.epoch, self.clock = worker, epoch, clock
        self.publication = self.min_clock = self.settled = -1
        self.contains, self.asked, self.shared = {}, False, ()
        self.held_at = -1
        self.in_flight.clear()
        self.own.clear()
        return self._follow(clock)

    def go_on(self, worker: int, epoch: int, clock: int, before: Sequence[Exchange[A]]) -> Says:
        """Begin at a place with a new shard, after a reshard.

        All that was pushed before is in the new shard's state. If each exchange in `before` had pulled the state of
        `clock`, the new shard shows just that, and no state has to come again.

        Args:
            worker, epoch: the new place.
            clock: at which the keys were cut anew.
            before: the exchanges with the earlier shards that had these keys.
        """
        asks, first = self.begin(worker, epoch, clock), before[0]
        if self.mode.bound is None:
            return asks  # the shards have folds of others that no publication has shown to this child
        if any((x.settled, x.publication, x.whole) != (clock, first.publication, self.whole) for x in before):
            return asks
        self.publication, self.min_clock, self.settled = first.publication, first.min_clock, first.settled
        self.gain, self.ahead, self.agreement = first.gain, first.ahead, first.agreement
        self.steps, self.asked = first.steps, False
        return [] if self.whole else self._follow(clock)

    def hold(self, at: int) -> None:
        """Let no update from clock `at` on be pushed until the next place; -1: none is held."""
        self.held_at = at

    @property
    def may_compute(self) -> bool:
        """True if the child may compute its present clock on the pulled state."""
        return self.settled >= 0 and self.mode.allows(self.clock, self.settled)

    @property
    def may_push(self) -> bool:
        return len(self.in_flight) < self.mode.window and not 0 <= self.held_at <= self.clock

    def turn(self, clock: int) -> Keys:
        """Return the keys that update `clock` carries: the fragment whose turn it is."""
        return self.replica.fragment(clock)

    # Asking.

    def _follow(self, clock: int) -> Says:
        self.asked = True
        credit = 1 if self.whole else m.CREDIT_MAX
        return [m.Follow(self.worker, self.epoch, clock, self.publication, credit, self.coding)]

    def need(self, settled: int) -> Says:
        """Ask for a whole state settled to `settled`, if the pulled one is older and no ask is unanswered."""
        if not self.whole or self.asked or not 0 <= self.settled < settled:
            return []
        return self._follow(settled + (self.mode.bound or 0))

    def ask_shared(self, last: bool, whole: bool = False) -> Says:
        """Ask for the master copy.

        Args:
            last: True: for the copy that all children end with, once all have done their last step.
            whole: True: for all values; False: a difference to the pulled state will do.
        """
        self.shared = ()
        return [m.Pull(self.worker, self.epoch, 0, self.clock if last else 0, last, whole)]

    def forget_own(self) -> None:
        """Forget all own updates: this child composes no replica any more, unless it takes another place."""
        self.own.clear()

    def shared_values(self) -> Iterable[CodedPiece]:
        """Return pieces of all values of the master copy, which has come.

        A difference is added to the pulled state as the pieces are read: the state must not change before.
        """
        return self.shared if all(part.whole for part in self.shared) else self.replica.plus(self.shared)

    def take_shared(self) -> Iterable[CodedPiece]:
        """Return `shared_values`, and forget the master copy."""
        values, self.shared = self.shared_values(), ()
        return values

    # Own updates.

    def give(self, pieces: Sequence[CodedPiece], only: bool = True) -> Says:
        """Send the first weights of the run. The first state comes once the shard has all weights that it needs.

        Args:
            pieces: the weights of all keys of the shard.
            only: no other child gives some. The first state is then a difference to these.
        """
        if only:
            self.replica.absorb(pieces, add=False)
        count = len(pieces)
        return [
            m.FirstWeights(self.worker, self.epoch, i, count, piece.begin, piece.end, piece.codec, piece.payload)
            for i, piece in enumerate(pieces)
        ]

    def part(
        self, index: int, count: int, piece: CodedPiece, samples: int, hyper: bytes = b"", steps: int = 0
    ) -> m.Push:
        """Make part `index` of `count` of the update of the present clock.

        Args:
            index, count: number of the part, from 0 on; number of parts.
            piece: keys and payload of the part.
            samples: that the update was computed on.
            hyper: the packed hyper-parameters of the step (`unpack_hyper`, ps/shard/folding.py); part 0 carries them.
            steps: local steps of the update (--local-seconds).
        """
        self.in_flight.add(self.clock)
        where = (index, count, piece.begin, piece.end, samples, b"" if index else hyper)
        return m.Push(self.worker, self.epoch, self.clock, *where, piece.codec, piece.payload, steps)

    def push(
        self,
        pieces: Sequence[CodedPiece],
        samples: int,
        coding: str = "",
        hyper: bytes = b"",
        rows: Sequence[CodedPiece] = (),
        steps: int = 0,
    ) -> Says:
        """Push the whole update of the present clock.

        Args:
            pieces: the update, as the replica encoded it.
            samples: that the update was computed on.
            coding: the SPEC that suits this child's link (`auto`); "": none measured.
            hyper: the packed hyper-parameters of the step.
            rows: of embedding tables. They travel as further parts, and are in no replica.
            steps: local steps of the update (--local-seconds).

        Returns:
            The parts, and a Follow if the next state must be asked for.
        """
        every = [*pieces, *rows]
        parts = [self.part(index, len(every), piece, samples, hyper, steps) for index, piece in enumerate(every)]
        if self.mode.rule is not FoldRule.OPTIMIZER:
            self.own[self.clock] = pieces
        return [*parts, *self.pushed(coding)]

    def pushed(self, coding: str = "") -> Says:
        """Go on to the next clock: all parts of this update were made. Returns a Follow if one is due."""
        self.clock += 1
        changed, self.coding = coding != self.coding, coding
        if changed or (self.whole and not self.asked):
            return self._follow(self.clock + self.mode.ahead(self.clock, self.settled))
        return []

    def skip(self, coding: str, steps: int = 0) -> Says:
        """Push an empty update for the present clock: no weight changes, and the replica keeps its residual.

        Args:
            coding: as in `push`.
            steps: local steps of the clock, all of them skipped (--local-seconds).
        """
        self.in_flight.add(self.clock)
        begin, end = self.turn(self.clock)
        push = m.Push(self.worker, self.epoch, self.clock, 0, 1, begin, end, 0, b"", 0, b"", steps)
        return [push, *self.pushed(coding)]

    def hand_over(self) -> None:
        """Go on to the next clock under gossip: the parts were those of a model, and no state is awaited."""
        self.clock += 1

    # Events that come.

    def take(self, event: MemberEffect) -> Says:
        """Handle an event of the session with the shard.

        Raises:
            RemoteProtocolError: a state or payload is not valid. Then nothing has changed, but what `Replica.early` has
                written: the session ends.
        """
        if isinstance(event, e.PushSettled):
            self.in_flight.discard(event.clock)
        elif isinstance(event, (e.StatePart, e.MasterArrived, e.StateArrived)):
            try:
                return self._take(event)
            except ValueError as error:
                raise RemoteProtocolError(f"the server sent an invalid payload: {error}") from None
        return []

    def _take(self, event: e.StatePart | e.MasterArrived | e.StateArrived) -> Says:
        if isinstance(event, e.StatePart):
            self.replica.early(event.state)
            return []
        self._check(event.parts)
        last = event.parts[-1]
        if isinstance(event, e.MasterArrived):
            self.replica.check(event.parts)
            if last.whole or last.publication == self.publication:  # else it is of another place
                self.shared, self.shared_clock = event.parts, last.min_clock
            return []
        self.replica.absorb(event.parts, last.add)
        self.publication, self.min_clock, self.settled = last.publication, last.min_clock, last.settled
        self.contains, self.asked = dict(last.contains), False
        self.gain, self.ahead, self.agreement, self.steps = last.gain, last.ahead, last.agreement, last.steps
        return [] if self.may_compute else self.need(self.clock - (self.mode.bound or 0))

    def _check(self, parts: tuple[m.State, ...]) -> None:
        """Raise RemoteProtocolError unless `parts` are all whole or all differences, and cover the right keys once.

        A whole state covers all keys of the shard; a difference covers all keys, or those of one fragment.
        """
        first, pieces = parts[0], [(part.begin, part.end) for part in parts]
        if any((part.whole, part.add) != (first.whole, first.add) for part in parts) or (first.whole and first.add):
            raise RemoteProtocolError("the server sent a state that is half a difference")
        gain, ahead, agreement = parts[-1].gain, parts[-1].ahead, parts[-1].agreement
        if not (0 < gain <= GAIN_MAX and 0 < ahead <= GAIN_MAX and 0 <= agreement <= 1):
            raise RemoteProtocolError(
                f"the server sent a state with gains of {gain} and {ahead}, agreement {agreement}"
            )
        ranges = [(self.replica.begin, self.replica.end)]
        if not first.whole:
            ranges += [self.turn(clock) for clock in range(self.mode.fragments)]
        if not any(covers(pieces, *keys) for keys in ranges):
            raise RemoteProtocolError(f"the server sent a state that does not cover {ranges[0]} exactly once")

    # The replica.

    def base(self, begin: int, end: int, out: A) -> None:
        """Write the replica of keys [begin, end) to `out`, and drop own updates that no longer stand in.

        Args:
            begin, end: borders of fragments, or of parts of them after a move of keys.
            out: float32[end - begin], overwritten.
        """
        self.replica.base(self._stand_ins(), begin, end, out, self.gain)
        unbound = self.mode.bound is None
        oldest = max(self.settled, self.clock - self.mode.window) if unbound else self.settled
        for clock in [c for c in self.own if c < oldest and c not in self.in_flight]:
            del self.own[clock]

    def _stand_ins(self) -> Iterator[tuple[float, CodedPiece]]:
        for clock, pieces in self.own.items():
            weight = stand_in(self.mode, clock, self.clock, self.settled, self.contains.get(clock), self.ahead)
            if weight:
                yield from ((weight, piece) for piece in pieces)
