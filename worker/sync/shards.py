"""One worker's exchanges with all shards of its server: what it waits for, and what it says to them. The main thread owns it.

Rules
- One clock is one push to every shard; their exchanges go along together.
- Messages of the exchanges go to the I/O thread, in the order in which they were said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from narrows.compression import NonFiniteError
from narrows.compression.home import Feedback
from narrows.compression.replica import ArrayReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import CodedPiece, fragment
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.member.exchange import Exchange
from narrows.worker.group.group import Group, GroupEndedError
from narrows.worker.model.arrays import SPARE, WorkerArrays
from narrows.worker.model.flat import Array
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.sync.tuning import CodecTuning


class ShardWait(Protocol):
    """Waiting.until."""

    def __call__(self, done: Callable[[], bool], limit_s: float, what: str, others: bool = False) -> None: ...


def _place(event: e.Started | e.Moved) -> tuple[int, int, int]:
    return event.worker, event.epoch, event.clock


class ShardExchanges:
    """`wait`: handles events until something is done; raises NarrowsError where that takes too long. `group`: of which this
    process is one rank, and exchanges the shards of its slice alone."""

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
        self.replicas: list[ArrayReplica[Array]] = []
        self.ours = range(0)  # the shards that these exchanges are with: all of them, but for a rank of a group
        self.count = 0  # of all shards
        self.clock = 0
        self.worker, self.epoch = -1, 0
        self.plan = tuning.plan  # that the exchanges are of
        self.place = 0  # our epoch at the server: as long as this life goes on, another one after each move of keys
        self.samples = 1 if group is None else group.size  # of a push
        self.samples_pending = 0  # and of the next one alone
        self.wait_s = 0.0  # in the newest step
        self.pulls: bool | None = None  # the master copy is awaited, and whether it is the last one

    @property
    def whole(self) -> bool:
        """States come whole, not as differences."""
        return self.tuning.down_lossless and self.mode.fragments == 1

    @property
    def _each(self) -> list[tuple[int, Exchange[Array]]]:
        """The exchanges, with the number of each one's shard."""
        return list(zip(self.ours, self.exchanges, strict=True))

    @property
    def missed(self) -> int:
        """Rounds that closed without an update of ours, at this place (--quorum)."""
        return min((x.min_clock - x.settled for x in self.exchanges), default=0 if self.group is None else m.CLOCK_MAX)

    @property
    def staleness(self) -> int:
        return self.clock - min((x.settled for x in self.exchanges), default=0)

    @property
    def merging(self) -> dict[str, float]:
        """The means over the shards of what the states here say, and of what is held back."""
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

    def begin(self, event: e.Started, follow: bool = True) -> None:
        """A place in the run, or another one: what was in flight is given up, the residuals are not. `follow`: what the server
        publishes is wanted."""
        if not event.again or len(event.ranges) != self.count or self.plan != self.tuning.plan:
            self._cut(event)
        self.worker, self.epoch, self.samples_pending, self.clock = event.worker, event.epoch, 0, event.clock
        self.place = event.epoch
        for shard, exchange in self._each:
            begun = exchange.begin(*_place(event))
            self.say(shard, begun if follow else [])

    def _cut(self, event: e.Started | e.Moved) -> None:
        """An exchange with each of these shards. The residuals go along with their keys."""
        before, first = self.replicas, not self.count
        if self.plan != self.tuning.plan:
            self.plan, self.mode = self.tuning.plan, self.tuning.mode
            self.arrays.fit_rounds(self.mode.window + SPARE)
        kept = None if self.group is None or first else self.arrays.residual(before)
        self.ours, self.count = self.arrays.fit(event.ranges), len(event.ranges)
        self.replicas = [
            self.arrays.replica(begin, end, self._feedbacks(begin, end, event.worker << 16 | shard))
            for shard, (begin, end) in list(enumerate(event.ranges))[slice(self.ours.start, self.ours.stop)]
        ]
        if kept is not None:  # other processes may have had our keys; what was pulled of them comes again
            self.arrays.load_residual(self.replicas, kept)
        else:
            for replica in self.replicas:
                replica.inherit(before)
        self.exchanges = [Exchange(self.mode, each, self.whole) for each in self.replicas]

    def _moved(self, event: e.Moved) -> None:
        """The keys are cut anew, or coded otherwise. All that was pushed is in: nothing is given up, and this life goes on."""
        before, self.clock, self.place = self.exchanges, event.clock, event.epoch
        self._cut(event)
        for shard, exchange in self._each:
            going = exchange.go_on(*_place(event), before) if self.group is None else exchange.begin(*_place(event))
            self.say(shard, going)
        if self.pulls is not None:
            self._pull(self.pulls)

    def _pull(self, last: bool) -> None:
        for shard, exchange in self._each:
            self.say(shard, exchange.ask_shared(last))

    @property
    def master_clock(self) -> int:
        """The run's clock of the master copy that is here."""
        return max((x.shared_clock for x in self.exchanges), default=0)

    def _feedbacks(self, begin: int, end: int, seed: int) -> list[tuple[tuple[int, int], Feedback[Array]]]:
        """One for each fragment. They may share a seed: the clocks that they encode at differ."""
        count = self.mode.fragments
        cuts = [fragment(begin, end, count, index) for index in range(count)]
        home, compressor = self.arrays.home, self.tuning.compressor
        return [(keys, home.feedback(compressor, keys[1] - keys[0], seed)) for keys in cuts]

    def handle(self, event: MemberEffect) -> None:
        match event:
            case e.GiveWeights(shard):
                exchange = self._with(shard)
                keys = exchange.replica.begin, exchange.replica.end
                self.say(shard, exchange.give(self.arrays.first(*keys)))
            case e.StatePart(shard) | e.StateArrived(shard) | e.MasterArrived(shard) | e.PushSettled(shard):
                self.say(shard, self._with(shard).take(event))
            case e.Held(at):
                for exchange in self.exchanges:
                    exchange.held_at = at
            case e.Moved():
                self._moved(event)
            case e.LinkSeen():
                self.tuning.seen.append(event)

    def _with(self, shard: int) -> Exchange[Array]:
        return self.exchanges[shard - self.ours.start]

    def say(self, shard: int, messages: Sequence[m.Message]) -> None:
        if messages:
            self.link.say(shard, messages)

    # Waiting.

    def wait_ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Until every shard's state may be computed on with the present clock."""
        before = time.monotonic()
        ready = lambda: self.count > 0 and all(x.may_compute for x in self.exchanges)  # noqa: E731
        self.wait(ready, limit_s, f"a state for clock {self.clock}")
        self.wait_s = time.monotonic() - before

    def wait_window(self) -> None:
        """Until one more update may be in flight to every shard."""
        self.wait(lambda: all(x.may_push for x in self.exchanges), WAIT_LIMIT_S, "updates in flight")

    def need(self, settled: int) -> None:
        """Ask every shard whose state lacks updates before this clock for its next one, as soon as there is one."""
        for shard, exchange in self._each:
            self.say(shard, exchange.need(settled))

    def wait_settled(self, settled: int) -> None:
        """Until every shard's state has all updates before this clock, or this worker had to join again."""
        before, epoch = time.monotonic(), self.epoch

        def done() -> bool:
            self.need(settled)
            return self.epoch != epoch or all(x.settled >= settled for x in self.exchanges)

        self.wait(done, WAIT_LIMIT_S, f"the updates before clock {settled}")
        self.wait_s += time.monotonic() - before

    # Pushing.

    def push(
        self,
        updates: Sequence[Array],
        dense: bool = False,
        hyper: bytes = b"",
        rows: Sequence[Sequence[CodedPiece]] = (),
    ) -> None:
        """Send the update of the present clock: of each shard, the keys whose turn it is, and after them `rows` of tables.
        Raises NonFiniteError, with nothing sent and nothing changed, for values that are not finite; GroupEndedError where they
        are another rank's."""
        began = time.monotonic()
        encoded: list[Sequence[CodedPiece]] = []
        error: Exception = GroupEndedError("another process of this group has values that are not finite")
        try:
            for exchange, update in zip(self.exchanges, updates, strict=True):
                if self.tuning.up_lossless and not self.arrays.home.finite(update):  # else the coder looks
                    raise NonFiniteError("it has values that are NaN or infinite")
                encoded.append(exchange.replica.encode(update, self.clock, dense))  # all before the first leaves
            finite = True
        except NonFiniteError as own:
            error, finite = own, False
        if self.group is not None:
            finite = bool(self.group.least(finite)[0])
        if not finite:
            # A lossless coder has kept nothing back.
            for exchange, pieces in zip(self.exchanges, [] if self.tuning.up_lossless else encoded, strict=False):
                exchange.replica.give_back(pieces, self.clock)
            raise error
        self.tuning.encoded(time.monotonic() - began)
        samples, coding = self.samples_pending or self.samples, self._next_coding()
        for (shard, exchange), pieces, more in zip(self._each, encoded, rows or [()] * len(encoded), strict=True):
            self.say(shard, exchange.push(pieces, samples, coding, hyper, more))
        self._said()

    def send_part(
        self, shard: int, index: int, count: int, piece: CodedPiece, hyper: bytes = b"", counts: bool = True
    ) -> None:
        """One part of the update of the present clock; under overlap from autograd's threads. The first part says whether the
        update `counts`: one of no samples does not, whatever its other parts hold."""
        samples = (self.samples_pending or self.samples) if counts else 0
        self.say(shard, [self._with(shard).part(index, count, piece, samples, hyper)])

    def pushed(self) -> None:
        coding = self._next_coding()
        for shard, exchange in self._each:
            self.say(shard, exchange.pushed(coding))
        self._said()

    def handed_over(self) -> None:
        """The model of this worker is on its way in the place of an update, and nothing of the server is asked for (gossip)."""
        for exchange in self.exchanges:
            exchange.clock += 1
        self.clock, self.samples_pending = self.clock + 1, 0

    def skip(self) -> None:
        """An update without values: this worker takes part in the present clock, and has computed nothing, or nothing that
        may count."""
        self.samples_pending = 0
        coding = self._next_coding()
        for shard, exchange in self._each:
            self.say(shard, exchange.skip(coding))
        self.clock += 1

    def _next_coding(self) -> str:
        """Return the coding of published states after this clock; updates may change their compressor here too."""
        if self.tuning.pushed(self.clock + 1, self.group):
            for replica in self.replicas:
                for _, feedback in replica.feedbacks:
                    feedback.change(self.tuning.compressor)
        return self.tuning.coding

    def _said(self) -> None:
        self.tuning.sampled += self.samples_pending
        self.samples_pending = 0
        self.clock += 1
        if self.tuning.chooses:
            self.link.ask_link()

    # The shared model.

    def master(self, last: bool, resume: Callable[[], object]) -> Array:
        """The server's own state, whole; `last`: once all workers have done their last step. `resume` is called where this
        worker had to join again meanwhile."""
        while True:
            epoch = self.epoch

            def here(done: Callable[[Exchange[Array]], bool], epoch: int = epoch) -> Callable[[], bool]:
                return lambda: self.epoch != epoch or all(map(done, self.exchanges))

            if not self.mode.barrier:
                self.wait(here(lambda x: not x.in_flight), WAIT_LIMIT_S, "own updates")
            else:
                self.wait_settled(self.clock)
            if self.epoch == epoch:
                self.pulls = last
                self._pull(last)
                what = "the other workers to do their last step" if last else "the shared model"
                self.wait(here(lambda x: x.shared is not None), WAIT_LIMIT_S, what, others=last)
                self.pulls = None
            if self.epoch == epoch:
                return self.arrays.joined([x.shared for x in self.exchanges if x.shared is not None])
            resume()
