"""Leases ranges of samples to workers, for a script that takes its samples from the run (`ranges()`). No I/O.

How it works
1. Ranges have numbers from 0 on, through all epochs. A worker asks for one (`RangeRequest`) and names the clock of the
   update that will hold it. The coordinator leases it the lowest range that no worker has (`RangeLedger.pick`).
2. A range is done once that update is in the model of all shards (`_settle`). An epoch is over once all its ranges are
   done.
3. A worker leaves or dies (`left`). A range whose update it cannot have pushed goes back at once. The others wait in
   `gone` until the shards have reported which updates of the worker they have (`_settle_gone`):
   - with a barrier an update is on all shards or on none: the range is done, or goes back;
   - folded at once, an update may be on some shards only. Then the range is torn: it goes back, and counts as done
     twice once it is done.
4. A checkpoint has the ranges that are not done in it (`_keep`). A run that goes back to the checkpoint leases these
   again (`load`). Folded at once, each shard reports which updates its checkpoint has. Until all shards have, no range
   is leased: the ranges of a checkpoint are among those leased before it.

Rules
- A range is done even if its update did not count, because it was not finite or a filter dropped it: the next worker
  would fare no better with the same samples.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.effects import Log, Send, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import pack, unpack
from narrows.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Decision, Run, Seat

HELD_MAX = 1 << 12  # ranges of one worker whose updates are not in the model of all shards
AHEAD_MAX = 1 << 16  # folded at once: ranges of one worker whose updates are of clocks after min_clock
OLDER = 2  # checkpoints kept before the newest shared one: the run goes back to one of them if the newest is damaged

BELOW = (
    "ranges() hands out the samples of a run to the workers of one server, and this one is a cluster with a parent: use "
    "sampler()"
)
OTHER = (
    "the ranges of this run are of {} samples, {} each, and this script asks for {}, {} each: give all workers the same"
)
TOO_MANY = "worker {} has taken {} ranges and has made no update of them: call optimizer.step() after each range or two"

Bound = tuple[int, int]  # the clock of a worker's update, and the number of a range that is to be in this update


@dataclass(slots=True)
class RangeLedger:
    """Which ranges are done: all before `next`, except those in `back` and those that workers hold."""

    samples: int = 0  # samples of an epoch, 0: no worker has asked yet
    size: int = 1  # samples of a range
    next: int = 0  # the first range that was never leased
    back: list[int] = field(default_factory=list)  # a heap of ranges that have come back, to be leased again
    torn: set[int] = field(default_factory=set)  # ranges that are not done though a shard may have an update with them
    twice: Counter[int] = field(default_factory=Counter)  # by epoch, the number of ranges done twice
    over: int = 0  # number of epochs whose end was logged

    @property
    def each(self) -> int:
        """Number of ranges of an epoch."""
        return -(-self.samples // self.size)

    def pick(self, limit: int) -> int:
        """Take the next free range below `limit`, -1: workers hold all of them, or they are done."""
        if self.back and self.back[0] < limit:
            return heappop(self.back)
        if self.next >= limit:
            return -1
        self.next += 1
        return self.next - 1

    def give_back(self, indices: Iterable[int]) -> None:
        """Let these ranges be leased again."""
        for index in indices:
            heappush(self.back, index)

    def done(self, indices: Iterable[int]) -> None:
        """Note that these ranges are done; a torn one counts as done twice."""
        for index in indices:
            if index in self.torn:
                self.torn.discard(index)
                self.twice[index // self.each] += 1

    def sentence(self, epoch: int) -> str:
        """What the log says of an epoch that is over."""
        times = self.twice[epoch]
        again = f"{times:,} range{'s' * (times != 1)} done twice"
        return f"epoch {epoch}: {self.samples:,} samples in {self.each:,} ranges, {again}"


@dataclass(slots=True)
class LostRange:
    """The ranges of a worker that is gone, until the shards have reported its last updates."""

    held: list[Bound]  # ranges whose updates may be in the model
    epoch: int  # the first epoch without the worker
    arrived: list[int]  # by shard, the worker's clock there


class SampleLeases(Decision):
    """Decides which worker gets which range, and which ranges are done."""

    def __init__(self, run: Run, clocks: Clocks, checkpoint_schedule: CheckpointSchedule, above: ParentPlace) -> None:
        self.run, self.clocks, self.checkpoint_schedule, self.above = run, clocks, checkpoint_schedule, above
        self.work = RangeLedger()
        self.held: dict[int, list[Bound]] = {}  # by worker: ranges whose updates are not in the model yet
        self.unsaved: dict[int, list[Bound]] = {}  # by worker: done ranges that the next checkpoint may lack
        self.gone: dict[int, LostRange] = {}  # by worker
        self.answers: dict[int, m.RangeAnswer] = {}  # by worker: the newest
        self.kept: dict[int, bytes] = {}  # by the clock of a checkpoint: which ranges are done in it, packed
        self.saved: dict[int, dict[int, dict[int, int]]] = {}  # by clock, shard and worker: the updates in a checkpoint
        # Shards that have not reported `saved` of the newest checkpoint. No range is leased while there are any.
        self.due: set[int] = set()
        self.waiting: dict[int, m.RangeRequest] = {}  # by worker: asks that came in the meantime
        self.said: list[Log] = []

    # Leasing.

    def hear(self, seat: Seat, ask: m.RangeRequest) -> list[ServerEffect]:
        """Answer a worker's request for samples, and log each epoch whose samples are all done.

        Raises:
            RemoteProtocolError: the numbers of the ask make no ranges.
        """
        if min(ask.samples, ask.size, ask.number) < 1 or min(ask.clock, ask.holds, ask.limit) < 0:
            raise RemoteProtocolError(f"ranges of {ask.size} of {ask.samples} samples before {ask.limit} are none")
        last = self.answers.get(seat.worker)
        if not seat.epoch or (last is not None and ask.number < last.number):
            return []
        if last is None or ask.number > last.number:
            if self.due:
                self.waiting[seat.worker] = ask
                return []
            if why := self._unfit(seat, ask):
                return [Send(seat.peer, m.Refuse(m.RefuseCode.INCOMPATIBLE, seat.worker, seat.epoch, why))]
            last = self.answers[seat.worker] = self._answer(seat, ask)
        return [
            *self.tell(),
            Send(seat.peer, m.RangeAnswer(seat.worker, seat.epoch, last.number, last.index, last.over)),
        ]

    def tell(self) -> list[Log]:
        """Log events of the epochs that are over, each once."""
        said, self.said = self.said, []
        return said

    def _unfit(self, seat: Seat, ask: m.RangeRequest) -> str:
        """Return why this worker cannot have a range; "" if it can."""
        work = self.work
        if self.above.child:
            return BELOW
        if work.samples and (work.samples, work.size) != (ask.samples, ask.size):
            return OTHER.format(work.samples, work.size, ask.samples, ask.size)
        if len(held := self.held.get(seat.worker, [])) >= HELD_MAX:
            return TOO_MANY.format(seat.worker, len(held))
        return ""

    def _answer(self, seat: Seat, ask: m.RangeRequest) -> m.RangeAnswer:
        work, held = self.work, self.held.setdefault(seat.worker, [])
        work.samples, work.size = ask.samples, ask.size
        for bound in [bound for bound in held if bound[0] == ask.clock][ask.holds :]:
            held.remove(bound)
            work.give_back([bound[1]])
        self._settle_of(seat.worker)
        if work.next >= (work.over + 1) * work.each:  # workers hold all other ranges of this epoch, or they are done
            self._settle()
        index = work.pick(ask.limit) if len(self.unsaved.get(seat.worker, ())) < AHEAD_MAX else -1
        if index >= 0:
            held.append((ask.clock, index))
        return m.RangeAnswer(seat.worker, seat.epoch, ask.number, index, index < 0 and self._least() >= ask.limit)

    # Ranges that are done.

    def _least(self) -> int:
        """The lowest range that is not done."""
        work = self.work
        bounds = [*self.held.values(), *(gone.held for gone in self.gone.values())]
        return min((work.next, *work.back[:1], *(index for each in bounds for _, index in each)))

    def _settle(self) -> None:
        """Find the ranges that are done by now, and the epochs that are over."""
        for worker in [*self.held]:
            self._settle_of(worker)
        for worker in [*self.gone]:
            self._settle_gone(worker, self.gone[worker])
        work = self.work
        while work.samples and self._least() >= (work.over + 1) * work.each:
            values = {"epoch": work.over, "samples": work.samples, "ranges": work.each, "twice": work.twice[work.over]}
            self.said.append(Log("epoch", values | {"text": work.sentence(work.over)}))
            del work.twice[work.over]
            work.over += 1

    def _settle_of(self, worker: int) -> None:
        folded, held = self.clocks.folded(worker), self.held[worker]
        done = [bound for bound in held if bound[0] < folded]
        held[:] = [bound for bound in held if bound[0] >= folded]
        self.work.done(index for _, index in done)
        if not self.clocks.mode.barrier:
            ahead = [*self.unsaved.get(worker, ()), *done]
            self.unsaved[worker] = [bound for bound in ahead if bound[0] >= self.clocks.min_clock]

    def _settle_gone(self, worker: int, gone: LostRange) -> None:
        if self.clocks.mode.barrier and gone.epoch > self.run.generation:
            folded = self.clocks.folded(worker)
            self.work.done(index for clock, index in gone.held if clock < folded)
            gone.held = [bound for bound in gone.held if bound[0] >= folded]
        elif self.run.complete and all(report.epoch >= gone.epoch for report in self.run.reports.values()):
            # A resharding ends once all shards have folded its clock: by then they have reported the last updates of
            # workers that were gone before.
            low, high = min(gone.arrived), max(gone.arrived)
            self.work.torn.update(index for clock, index in gone.held if low <= clock < high)
            self.work.done(index for clock, index in gone.held if clock < low)
            self.work.give_back(index for clock, index in gone.held if clock >= low)
            gone.held = []
        if not gone.held:
            del self.gone[worker]

    def heard(self, report: m.Report) -> list[ServerEffect]:
        """Take the report of a shard of the present generation: which updates it has, also of workers that are gone."""
        for worker, clock in report.arrived if self.gone else ():
            gone = self.gone.get(worker)
            if gone is not None and gone.epoch > self.run.generation:
                gone.arrived[report.shard] = max(gone.arrived[report.shard], clock)
        if report.saved_at not in self.kept:
            return []
        self.saved.setdefault(report.saved_at, {})[report.shard] = dict(report.saved)
        if report.saved_at == max(self.kept):
            self.due.discard(report.shard)
        if self.due or not self.waiting:
            return []
        waiting, self.waiting = self.waiting, {}
        return [effect for worker, ask in waiting.items() for effect in self.hear(self.run.seats[worker], ask)]

    def left(self, seat: Seat, how: str) -> None:
        """Take back the ranges of a worker that is gone.

        The coordinator calls this before `Clocks` forgets the worker, and before the epoch without it begins.
        """
        worker = seat.worker
        if worker in self.held:
            self._settle_of(worker)
        for table in (self.answers, self.waiting, self.unsaved):
            table.pop(worker, None)
        held = self.held.pop(worker, [])
        last = seat.last if seat.leaving else m.CLOCK_MAX  # the worker has pushed no update from this clock on
        if held and self.clocks.mode.barrier:
            # Of its updates that are in no set, the next set takes the oldest, and the shards drop the others.
            last = min(last, self.clocks.final(seat))
        self.work.give_back(index for clock, index in held if clock >= last)
        if held := [bound for bound in held if bound[0] < last]:
            self.gone[worker] = LostRange(held, self.run.epoch + 1, [*self.clocks.progress[worker].arrived])
        self._settle()

    # Checkpoints.

    def decide(self, now_ns: int) -> bool:
        """Note which ranges are done at a checkpoint that was asked for, before the next clock closes."""
        clock = self.checkpoint_schedule.checkpoint
        if clock == self.clocks.min_clock and clock not in self.kept and self.run.complete:
            self._keep(clock)
        return False

    def fields(self, shard: int) -> dict[str, object]:
        """No fields. Note the ranges here too: the end of a run asks for a checkpoint, and no decision follows it."""
        self.decide(0)
        return {}

    def _keep(self, clock: int) -> None:
        self._settle()
        shared = self.checkpoint_schedule.shared()
        older = sorted(at for at in self.kept if at < shared)[:-OLDER]
        for at in older:
            del self.kept[at]
            self.saved.pop(at, None)
        work, barrier = self.work, self.clocks.mode.barrier
        rows = []
        for worker in self.held.keys() | self.gone.keys():
            gone = self.gone.get(worker)
            bounds = gone.held if gone is not None else [*self.held[worker], *self.unsaved.get(worker, ())]
            first = self.clocks.closed(worker) if barrier else clock if gone is None else 0
            rows += [(worker, *bound) for bound in bounds if bound[0] >= first]
        numbers = [work.samples, work.size, work.next, work.over]
        twice, bound = (chain(*sorted(each)) for each in (work.twice.items(), rows))
        lists: list[Iterable[int]] = [numbers, sorted(work.back), sorted(work.torn), twice, bound]
        self.due = {*range(self.run.shards)} if not barrier else set()
        self.kept[clock] = pack([array("q", each).tobytes() for each in lists])

    def packed(self, clock: int) -> bytes:
        """The ranges that are done at the checkpoint of this clock, packed; b"": they were not noted."""
        return self.kept.get(clock, b"")

    def load(self, packed: bytes, clock: int, saved: Sequence[dict[int, int]]) -> None:
        """Go on from a checkpoint.

        Args:
            packed: its ranges, as `packed` returned them.
            clock: its clock.
            saved: for each shard, the number of updates of each worker that its file has; () if that is not known.
        """
        for table in (self.kept, self.saved):
            for later in [at for at in table if at >= clock]:
                del table[later]
        self.work = work = RangeLedger()
        if not packed:
            return
        self.kept[clock] = packed
        packs: Any = unpack(packed)
        (work.samples, work.size, work.next, work.over), work.back, torn, twice, rows = (
            array("q", each).tolist() for each in packs
        )
        work.torn, work.twice = set(torn), Counter(dict(zip(twice[::2], twice[1::2], strict=True)))
        for worker, at, index in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            # A worker that no shard's file names may have left before the checkpoint: its updates may be in the model.
            clocks = [each.get(worker, -1) for each in saved]
            if not self.clocks.mode.barrier and (not clocks or min(clocks) < 0):
                clocks = [0, m.CLOCK_MAX]
            low, high = min(clocks, default=0), max(clocks, default=0)
            if at < low:
                work.done([index])
                continue
            work.torn.update([index] if at < high else [])
            work.back.append(index)
        heapify(work.back)

    def anew(self) -> None:
        for table in (self.held, self.unsaved, self.gone, self.answers, self.waiting, self.due):
            table.clear()
        clock = self.run.restart_clock
        saved = self.saved.get(clock, {})
        self.load(self.kept.get(clock, b""), clock, [*saved.values()] if len(saved) == self.run.shards else [])
