"""One worker's exchanges with all shards of its server: its waits and its pushes. The main thread owns it.

How it works

    SyncStep            ShardExchanges                             shards
    wait_window    ──>  room in every Exchange's window?
    push           ──>  encode for every shard, then send     ──>  fold, publish
    wait_ready     <──  every Exchange may compute            <──  states

1. `begin` takes a place in the run, and makes one `Exchange` and one replica for each shard.
2. `push` first encodes the update for all shards, and sends only if all its values are finite. So one update is sent to
   every shard or to none.
3. `handle` gives each event of a shard to the shard's exchange, and sends the messages that the exchange returns.
4. If the run moves keys or changes its plan, `_moved` makes new exchanges. Residuals move with their keys.
5. `master` pulls the shared model, once the shards have folded this worker's updates.

Rules
- One clock is one push to every shard; the exchanges advance together.
- The I/O thread sends the messages of all exchanges in the order in which they were given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

from narrows.compression import NonFiniteError, parse
from narrows.compression.buffers import ChunkedUpdate
from narrows.compression.home import Feedback
from narrows.compression.replica import ArrayReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import CodedPiece, Keys, fragments
from narrows.protocols.config.memory import update_buffers
from narrows.protocols.config.modes import FoldRule, Mode, holds_apart
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.member.exchange import Exchange
from narrows.worker.group.group import Group, GroupEndedError
from narrows.worker.model.arrays import WorkerArrays
from narrows.worker.model.flat import Array
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.sync.tuning import CodecTuning


class ShardWait(Protocol):
    """`EventWait.until`: handle events until `done()`. Raises NarrowsError after `limit_s` seconds."""

    def __call__(self, done: Callable[[], bool], limit_s: float, what: str, others: bool = False) -> None: ...


def _place(event: e.MemberStarted | e.MemberResharded) -> tuple[int, int, int]:
    return event.worker, event.epoch, event.clock


class ShardExchanges:
    """The exchanges of one process. In a group it exchanges only with the shards of its slice.

    Args:
        link: sends messages to the shards, on its I/O thread.
        mode: the mode of the run.
        arrays: the worker's arrays, of which the replicas are made.
        tuning: has the compressors of the present plan, and measures what clocks cost.
        wait: waits for an event; see `ShardWait`.
        group: the group in which this process is one rank, if any.
    """

    def __init__(
        self,
        link: MemberLink,
        mode: Mode,
        arrays: WorkerArrays,
        tuning: CodecTuning,
        wait: ShardWait,
        group: Group | None = None,
    ) -> None:
        self.link, self.mode, self.arrays, self.tuning, self.wait, self.group = link, mode, arrays, tuning, wait, group
        self.exchanges: list[Exchange[Array]] = []
        self._each: list[tuple[int, Exchange[Array]]] = []  # pairs of a shard's number and its exchange
        self.replicas: list[ArrayReplica[Array]] = []
        self._turns: list[list[Keys]] = []  # by shard, the keys of each fragment
        self.ours = range(0)  # the shards of these exchanges: all shards, or those of this rank's slice
        self.count = 0  # number of all shards; 0: no place in the run yet
        self.clock = 0
        self.worker, self.epoch = -1, 0
        self.plan = tuning.plan  # the plan number of the exchanges
        self.place = 0  # this worker's epoch at the server; it changes with each rejoin and each move of keys
        self.samples = 1 if group is None else group.size  # the weight of a push by default
        self.samples_pending = 0  # the weight of the next push; 0: the default
        self._last: dict[int, list[m.Push]] = {}  # by shard, the part of the present update that waits for `pushed`
        self.steps: dict[int, int] = {}  # by clock, local steps of own updates (`note_steps`)
        self._missed = 0  # `missed` when this place began: a move of keys keeps it
        self._early = False  # parts of the present clock's update may leave during backward (overlap)

    @property
    def held(self) -> bool:
        """True if the update of the present clock must wait for another plan, or for other keys."""
        return any(0 <= x.held_at <= self.clock for x in self.exchanges)

    def drop(self) -> None:
        """Drop replicas and exchanges, at a change from gradients to updates or back: the next place pulls its state.

        A residual of gradients is no part of an update, so it is dropped too.
        """
        self.exchanges, self._each, self.replicas = [], [], []

    @property
    def whole(self) -> bool:
        """True if the shards publish whole states, not differences."""
        return self.tuning.down_lossless and self.mode.fragments == 1

    @property
    def missed(self) -> int:
        """Rounds that closed without an update of this worker since it took its place (--quorum)."""
        if any(x.settled < 0 for x in self.exchanges):
            return self._missed  # the first state at this place has not come
        return min((x.min_clock - x.settled for x in self.exchanges), default=0 if self.group is None else m.CLOCK_MAX)

    @property
    def run_steps(self) -> int:
        """The run's steps before the present round, as far as this worker knows (--local-seconds).

        Those in the pulled state, and the own steps that the state lacks. m.CLOCK_MAX for a rank without a shard.
        """
        settled = min((x.settled for x in self.exchanges), default=0)
        known = min((x.steps for x in self.exchanges), default=0 if self.group is None else m.CLOCK_MAX)
        return known + sum(steps for clock, steps in self.steps.items() if clock >= settled)

    @property
    def standing(self) -> tuple[int, int]:
        return self.missed, self.run_steps

    @property
    def staleness(self) -> int:
        return self.clock - min((x.settled for x in self.exchanges), default=0)

    @property
    def merging(self) -> dict[str, float]:
        """Means over the shards: gain and agreement of the newest states, and updates that replicas hold back."""
        held = [each.held_back for each in self.replicas if each.held_back]
        figures = {"held_back": round(sum(held) / len(held), 3)} if held else {}
        known = [x for x in self.exchanges if x.agreement]
        if not known:
            return figures
        gain, agreement = (
            sum(values) / len(known) for values in zip(*((x.gain, x.agreement) for x in known), strict=True)
        )
        return figures | {"gain": round(gain, 4), "agreement": round(agreement, 4)}

    # Events.

    def begin(self, event: e.MemberStarted, follow: bool = True) -> None:
        """Take a place in the run, the first one or another after a rejoin.

        Updates in flight are given up; the residuals are kept.

        Args:
            event: the place: worker id, epoch, clock and key ranges of the shards.
            follow: ask the shards to publish their states to this worker.
        """
        if not event.again or len(event.ranges) != self.count or self.plan != self.tuning.plan:
            self._cut(event)
        self.worker, self.epoch, self.samples_pending, self.clock = event.worker, event.epoch, 0, event.clock
        self.place = event.epoch
        self.steps, self._missed = {}, 0
        for shard, exchange in self._each:
            begun = exchange.begin(*_place(event))
            self.link.send(shard, begun if follow else [])

    def _cut(self, event: e.MemberStarted | e.MemberResharded) -> None:
        """Make an exchange and a replica for each shard of this event. Residuals move with their keys."""
        before, first = self.replicas, not self.count
        steps = min((x.steps for x in self.exchanges), default=0)
        if self.plan != self.tuning.plan:
            self.plan, self.mode = self.tuning.plan, self.tuning.mode
            self.arrays.fit_rounds(update_buffers(self.mode, self.tuning.quorum))
        kept = None if self.group is None or first else self.arrays.residual(before)
        self.ours, self.count = self.arrays.fit(event.ranges), len(event.ranges)
        self.replicas = [
            self.arrays.replica(begin, end, self._feedbacks(begin, end, event.worker << 16 | shard))
            for shard, (begin, end) in list(enumerate(event.ranges))[slice(self.ours.start, self.ours.stop)]
        ]
        if kept is not None:  # another rank may have had these keys; their state is pulled again
            self.arrays.load_residual(self.replicas, kept)
        else:
            for replica in self.replicas:
                replica.inherit(before)
        self._turns = [self._fragments(begin, end) for begin, end in event.ranges]
        self.exchanges = [Exchange(self.mode, each, self.whole, steps) for each in self.replicas]
        self._each = list(zip(self.ours, self.exchanges, strict=True))

    def _moved(self, event: e.MemberResharded) -> None:
        """Go on with new key ranges or a new plan.

        The server moves keys only between two clocks, with all pushes folded. So no update is given up.
        """
        self._missed = self.missed
        before, self.clock, self.place = self.exchanges, event.clock, event.epoch
        self._cut(event)
        for shard, exchange in self._each:
            goes_on = self.group is None and before
            going = exchange.go_on(*_place(event), before) if goes_on else exchange.begin(*_place(event))
            self.link.send(shard, going)

    @property
    def master_clock(self) -> int:
        """The run's clock of the master copy that was pulled last."""
        return max((x.shared_clock for x in self.exchanges), default=0)

    def _feedbacks(self, begin: int, end: int, seed: int) -> list[tuple[tuple[int, int], Feedback[Array]]]:
        """Make the error feedback of each fragment. They may share a seed, since they encode at different clocks."""
        cuts, home = self._fragments(begin, end), self.arrays.home
        # Under gossip no update goes to a shard: a coder that leaves nothing out has no residual.
        compressor = parse("dense") if self.mode.rule is FoldRule.MIX else self.tuning.compressor
        return [(keys, home.feedback(compressor, keys[1] - keys[0], seed)) for keys in cuts]

    def _fragments(self, begin: int, end: int) -> list[Keys]:
        return fragments(begin, end, self.mode.fragments, self.tuning.cut, self.arrays.flat.offsets)

    def turn(self, clock: int) -> list[Keys]:
        """The keys that update `clock` carries, on each shard; in a group also on those of other ranks."""
        return [cuts[self.mode.fragment(clock)] for cuts in self._turns]

    def handle(self, event: MemberEffect) -> None:
        match event:
            case e.GiveWeights(shard):
                exchange = self._with(shard)
                keys = exchange.replica.begin, exchange.replica.end
                self.link.send(shard, exchange.give(self.arrays.first(*keys)))
            case e.StatePart(shard) | e.StateArrived(shard):
                with self.tuning.trace.fold:
                    says = self._with(shard).take(event)
                self.link.send(shard, says)
            case e.MasterArrived(shard) | e.PushSettled(shard):
                self.link.send(shard, self._with(shard).take(event))
            case e.PushesPaused(at, number):
                self._hold(at, number)
            case e.MemberResharded():
                self._moved(event)
            case e.LinkMeasured():
                self.tuning.measured(event)

    def _hold(self, at: int, number: int) -> None:
        """Push no update from clock `at` on. Where workers hold at clocks of their own: from this worker's clock on."""
        chosen = at >= 0 and holds_apart(self.mode, self.tuning.quorum)
        at = max(at, self.clock + self._early) if chosen else at
        for exchange in self.exchanges:
            exchange.hold(at)
        if chosen:
            self.link.holds_at(number, at)

    @property
    def promised(self) -> bool:
        """True if this worker has named a clock of its own to hold at, and has yet to push an update before it."""
        return holds_apart(self.mode, self.tuning.quorum) and any(x.held_at > self.clock for x in self.exchanges)

    def _with(self, shard: int) -> Exchange[Array]:
        return self.exchanges[shard - self.ours.start]

    # Waiting.

    def wait_ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait until the present clock may compute on every shard's state."""
        ready = lambda: self.count > 0 and all(x.may_compute for x in self.exchanges)  # noqa: E731
        self.wait(ready, limit_s, f"a state for clock {self.clock}")

    def wait_window(self) -> None:
        """Wait until the window of every shard has room for one more update in flight."""
        self.wait(lambda: all(x.may_push for x in self.exchanges), WAIT_LIMIT_S, "updates in flight")

    def need(self, settled: int) -> None:
        """Ask each shard whose state lacks updates before clock `settled` to publish its next state at once."""
        for shard, exchange in self._each:
            self.link.send(shard, exchange.need(settled))

    def wait_settled(self, settled: int) -> None:
        """Wait until every shard's state has all updates before clock `settled`, or until this worker has rejoined."""
        epoch = self.epoch

        def done() -> bool:
            self.need(settled)
            return self.epoch != epoch or all(x.settled >= settled for x in self.exchanges)

        self.wait(done, WAIT_LIMIT_S, f"the updates before clock {settled}")

    # Pushing.

    def let_leave(self, early: bool) -> None:
        """Note whether parts of the present clock's update may leave during backward. Such an update is pushed whole."""
        self._early = early

    def weigh(self, samples: int) -> None:
        """Set the weight of the next push; 0: the default."""
        self.samples_pending = samples

    def note_steps(self, steps: int) -> None:
        """Note the local steps of the next push, which a round by the clock tells the shards."""
        settled = min((x.settled for x in self.exchanges), default=self.clock)
        self.steps = {clock: known for clock, known in self.steps.items() if clock >= settled} | {self.clock: steps}

    def push(
        self,
        updates: Sequence[Array | ChunkedUpdate],
        last: bool = False,
        hyper: bytes = b"",
        rows: Sequence[Sequence[CodedPiece]] = (),
    ) -> None:
        """Encode the update of the present clock, and send it to every shard.

        Args:
            updates: for each exchange, float32[keys of this clock's fragment], where the worker's arrays live; lazy
                ones are on the host.
            last: send the residual too: no update of these keys follows. A lossy SPEC then codes with `LAST`.
            hyper: packed hyper-parameters; b"": none.
            rows: for each shard, coded pieces of embedding rows, sent after the update's own.

        Raises:
            NonFiniteError: a value is not finite. No part was sent, and the residuals are as before.
            GroupEndedError: a value of another rank of the group is not finite.
        """
        with self.tuning.trace.encode:
            encoded = self._encoded(updates, last)
        samples, coding = self.samples_pending or self.samples, self._next_coding()
        steps = self.steps.get(self.clock, 0)
        says = dict[int, Sequence[m.Message]]()
        for (shard, exchange), pieces, more in zip(self._each, encoded, rows or [()] * len(encoded), strict=True):
            if last:
                exchange.replica.sent_last(self.clock)
            says[shard] = exchange.push(pieces, samples, coding, hyper, more, steps)
        self.link.send_each(says)
        self._said()

    def _encoded(self, updates: Sequence[Array | ChunkedUpdate], last: bool) -> list[Sequence[CodedPiece]]:
        """Encode the update of the present clock for every shard; see `push`."""
        encoded: list[Sequence[CodedPiece]] = []
        error: Exception = GroupEndedError("another process of this group has values that are not finite")
        try:
            with self.arrays.home.active():
                if not last and not self.tuning.up_lossless:
                    for exchange, update in zip(self.exchanges, updates, strict=True):
                        exchange.replica.start_encode(
                            update, self.clock
                        )  # a device works on all before the host waits for one
                for exchange, update in zip(self.exchanges, updates, strict=True):
                    if self.tuning.up_lossless and not self.arrays.home.finite(
                        update
                    ):  # a lossy coder checks by itself
                        raise NonFiniteError("it has values that are NaN or infinite")
                    encoded.append(exchange.replica.encode(update, self.clock, last))  # all before any is sent
            finite = True
        except NonFiniteError as own:
            error, finite = own, False
            for exchange in self.exchanges[len(encoded) :]:
                exchange.replica.drop_encode(self.clock)
        if self.group is not None:
            finite = bool(self.group.least(finite)[0])
        if not finite:
            # A lossless coder has changed no residual, and what is sent last is in the residual still.
            kept = self.tuning.up_lossless or last
            for exchange, pieces in zip(self.exchanges, [] if kept else encoded, strict=False):
                exchange.replica.give_back(pieces, self.clock)
            raise error
        return encoded

    def send_part(
        self,
        shard: int,
        index: int,
        count: int,
        piece: CodedPiece,
        hyper: bytes = b"",
        counts: bool = True,
        last: bool = False,
    ) -> None:
        """Send one part of the update of the present clock. Under overlap autograd's threads call it.

        Args:
            shard: the shard of the part.
            index: the number of the part, below `count`.
            count: parts of the update to this shard.
            piece: the coded values.
            hyper: packed hyper-parameters; b"": none.
            counts: False gives the update weight 0, so that the shard ignores its values. The shard reads it from the
                first part only.
            last: all other parts for the shard were sent. It waits for `pushed`, so that it carries the Follow.
        """
        samples = (self.samples_pending or self.samples) if counts else 0
        parts = [self._with(shard).part(index, count, piece, samples, hyper)]
        if last:
            self._last[shard] = parts
        else:
            self.link.send(shard, parts)

    def pushed(self) -> None:
        """End the present clock, once `send_part` has got all parts."""
        coding, last, self._last = self._next_coding(), self._last, {}
        self.link.send_each({shard: [*last.get(shard, ()), *exchange.pushed(coding)] for shard, exchange in self._each})
        self._said()

    def handed_over(self) -> None:
        """End the present clock under gossip: the model was sent in place of an update, and no state is awaited."""
        for exchange in self.exchanges:
            exchange.hand_over()
        self.clock, self.samples_pending = self.clock + 1, 0

    def skip(self) -> None:
        """Send an update without values, of weight 0: this worker takes part in the present clock, but adds no step."""
        self.samples_pending = 0
        coding = self._next_coding()
        for shard, exchange in self._each:
            self.link.send(shard, exchange.skip(coding, self.steps.get(self.clock, 0)))
        self.clock += 1

    def _next_coding(self) -> str:
        """Return the SPEC for published states after this clock. A switch of `auto` changes the compressor too."""
        if self.tuning.pushed(self.clock + 1, self.group, self.samples_pending):
            for replica in self.replicas:
                for _, feedback in replica.feedbacks:
                    feedback.change(self.tuning.compressor)
        return self.tuning.coding

    def _said(self) -> None:
        self.samples_pending = 0
        self.clock += 1
        if self.tuning.chooses or self.mode.seconds:
            self.link.ask_link()

    # The shared model.

    def master(self, last: bool, resume: Callable[[], object]) -> Iterator[CodedPiece]:
        """Pull the master copy of the whole model, shard after shard: then no more than one shard's pieces are here at a time.

        All shards at once answer the last pull, and the pulls of a group, whose processes wait together.

        Args:
            last: wait until all workers have done their last step.
            resume: called if this worker had to rejoin meanwhile; then the pull begins again.

        Yields:
            Checked pieces, which cover the keys of these shards. After a rejoin, or if keys have moved, they come again.
        """
        complete = False
        while not complete:
            epoch = self.epoch
            if self.mode.barrier:
                self.wait_settled(self.clock)
            else:
                folded = lambda: self.epoch != epoch or not any(x.in_flight for x in self.exchanges)  # noqa: B023, E731
                self.wait(folded, WAIT_LIMIT_S, "own updates")
            if self.epoch == epoch:
                complete = yield from self._masters(last)
            if self.epoch != epoch:
                complete = False
                resume()

    def _masters(self, last: bool) -> Generator[CodedPiece, None, bool]:
        """Pull the master copies; see `master`. Returns False if this worker had to rejoin, or keys have moved."""
        epoch, exchanges = self.epoch, self.exchanges
        what = "the other workers to do their last step" if last else "the shared model"
        if last:  # no update follows
            self.arrays.fit_rounds(0)
            for exchange in exchanges:
                exchange.forget_own()
        # A pulled state may move on while another rank of a group waits; parameters that a script changed are not pulled ones.
        whole = (self.group is not None and not last) or (self.arrays.direct and bool(self.arrays.flat.overwritten()))
        # A shard answers the last pull once each shard has it from all workers.
        for turn in [self._each] if last or self.group is not None else [[each] for each in self._each]:
            for shard, exchange in turn:
                self.link.send(shard, exchange.ask_shared(last, whole))

            def here(turn: list[tuple[int, Exchange[Array]]] = turn) -> bool:
                return self._gone(epoch, exchanges) or all(x.shared for _, x in turn)

            self.wait(here, WAIT_LIMIT_S, what, others=last)
            if self._gone(epoch, exchanges):
                return False
            for _, exchange in turn:
                yield from exchange.take_shared()
        return True

    def _gone(self, epoch: int, exchanges: list[Exchange[Array]]) -> bool:
        return self.epoch != epoch or self.exchanges is not exchanges
