"""A shard that has a model: its weights, the folding of updates, the publications, and the clock. No I/O.

How it works

A clock of the shard goes through these stages, in this order (`ClockStage`, `STAGES`). Each event resumes the clock at
the stage where it stands, and each stage says whether the next one may begin:

    FOLD        fold the set of updates that the ledger names (barrier); other modes have folded them on arrival
    SEND_UP     push to the parent what this cluster owes it
    REBASE      move the weights onto the parent's newest state
    PUBLISH     advance min_clock and publish the state
    CHECKPOINT  write the state if the ledger asks for it, before an update of the next clock is folded

1. The first weights come in parts from the worker that the ledger names (under gossip from several workers, one after
   another, whose models are averaged), or from a checkpoint (`begin`), or from the parent.
2. `accept` takes each whole update. Without a barrier it is folded at once; with a barrier it is held.
3. `run` advances the clock while the ledger's min_clock is ahead. In async mode no clock publishes: the shard publishes
   after as many folds as it has members.
4. Between two clocks a cluster takes its seat in the parent's run (`seat`), and finishes there when all workers are
   done.

Rules
- The shard obeys the ledger and never second-guesses it.
- All changes of the weights go through `apply`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from narrows.compression import ladder
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, covers, fragments
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import ISO, FoldRule
from narrows.protocols.config.settings import Robust, Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import Log, ServerEffect, WriteCheckpoint
from narrows.protocols.errors import LocalProtocolError, NarrowsError, RemoteProtocolError
from narrows.protocols.member.member import Member
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.filters.cosine_filter import CosineFilter
from narrows.ps.filters.norm_clip import NormClip, UnboundedNorms
from narrows.ps.filters.update_filters import UpdateCheck, UpdateFilters
from narrows.ps.filters.update_sample import UpdateSampler
from narrows.ps.parent.parent_slot import ParentSlot
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.folding import FoldAtOnce, Folding
from narrows.ps.shard.publications import Publications
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence, check_part
from narrows.ps.store.changes import (
    OWED,
    Change,
    DropHandover,
    FloatArray,
    LoadArrays,
    MergeStoppedModels,
    PushedUpdate,
    SetFirstWeights,
    Terms,
)
from narrows.ps.store.embedding_rows import EmbeddingRows
from narrows.ps.store.store import HEAP, ArrayAllocator, ServerOptimizer, Store, assume_lent
from narrows.ps.store.update_gain import Gain


class ClockStage(Enum):
    """What a shard does next with its present clock."""

    FOLD = "fold"
    SEND_UP = "send up"
    REBASE = "rebase"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"


DIFFER = "learning rates or other hyper-parameters differ between workers; those on which most of them agree hold"
NEXT = dict(zip(ClockStage, [*list(ClockStage)[1:], ClockStage.FOLD], strict=True))


@dataclass(frozen=True)
class ShardResources:
    """What only the runner of a shard can give it.

    Attributes:
        optimizer: Makes the server's optimizer from a model spec and the range [begin, end); None unless gradients are
            pushed.
        lent: True while a message that is still on its way may read the store's arrays.
        arrays: The allocator of the store's arrays.
        child: True if the cluster has a parent.
        member: In process 0 of a cluster: its member of the parent's run. The member's first session is this shard's.
        coordinator: In process 0: the coordinator of the cluster.
        timing: The limits of every wait.
        host: The `host` of this shard's reports.
    """

    optimizer: Callable[[ModelSpec, int, int], ServerOptimizer] | None = None
    lent: Callable[[], bool] = assume_lent
    arrays: ArrayAllocator = HEAP
    child: bool = False
    member: Member | None = None
    coordinator: Coordinator | None = None
    timing: Timing = field(default_factory=Timing)
    host: str = ""


class ModelShard:
    """Shard `index` in one generation."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        plan: ModelSpec,
        assembler: PushAssembler,
        clock: int,
        resources: ShardResources,
    ) -> None:
        """A shard at `clock` without weights.

        Args:
            index: The number of this shard, from 0.
            settings: The settings of the run in this generation.
            plan: The model spec of the whole model.
            assembler: The assembler of the members' pushes.
            clock: The clock at which this generation begins.
            resources: What only the runner can give.

        Raises:
            LocalProtocolError: Workers push gradients and the runner gives no optimizer.
        """
        self.plan, self.assembler, self.resources = plan, assembler, resources
        self.mode = mode = settings.mode()
        self.start_clock = settings.start_clock
        begin, end = plan.ranges(settings.shards, settings.cut)[index]
        self.fragments = fragments(begin, end, mode.fragments, settings.cut, plan.offsets())
        down = ladder(settings.compress_down, sparse=mode.rule is not FoldRule.OPTIMIZER)
        steps, hands_over = mode.rule is FoldRule.OPTIMIZER, settings.hands_over(clock)
        if (steps or hands_over) and resources.optimizer is None:
            raise LocalProtocolError("this server has no optimizer for pushed gradients")
        optimizer = resources.optimizer(plan, begin, end) if resources.optimizer and (steps or hands_over) else None
        self.finite = not down.lossless  # a lossy downlink can only code first weights that are finite
        gain, robust = Gain.of(settings, mode, plan, end - begin), Robust.parse(settings.robust)
        self.store = store = Store(
            begin,
            end,
            barrier=mode.barrier or mode.rule is FoldRule.MIX,
            codings=down,
            outer=(settings.outer_lr, settings.outer_momentum) if mode.rule is FoldRule.OUTER else None,
            matrices=plan.matrices(begin, end) if settings.outer == ISO else (),
            optimizer=optimizer if steps else None,
            handover=None if steps else optimizer,
            lent=resources.lent,
            arrays=resources.arrays,
            gain=gain,
            cut=robust.cut,
            tables=EmbeddingRows(plan.tables, index, settings.shards),
        )
        checks: list[UpdateCheck] = []
        if settings.max_update_norm > 0:
            checks.append(NormClip(index, settings.max_update_norm, store.weights_length))
        if robust.cosine:
            checks.append(CosineFilter(index))
        far = UnboundedNorms(store.weights_length, steps)
        self.filters = filters = UpdateFilters(
            index, UpdateSampler(begin, end - begin), far, checks, bool(robust), equal=settings.weigh == "equal"
        )
        self.folding: Folding = (
            FoldAtBarrier(mode, assembler, self.turn, gain, filters)
            if mode.barrier
            else FoldAtOnce(mode, assembler, store.whole, gain, filters)
        )
        self.publications = Publications(index, mode, store, assembler, self.folding, down.specs, resources.timing)
        self.publications.begin(clock)
        self.parent_slot = ParentSlot(
            index, store.whole, resources.child, resources.member, resources.timing, plan.degree
        )
        self.first: dict[int, m.FirstWeights] = {}  # parts of the first weights, by number
        self.weights_from = -1  # the ledger's initialiser once all first weights are here, -1 before
        # gossip: worker -> how many models the mean of the first weights had once its own was in
        self.given: dict[int, int] = {}
        self.given_round = -1  # the `source_round` of the ledger that `given` belongs to
        self.stage = ClockStage.FOLD
        self.min_clock = clock
        # The run's steps before min_clock, as in `State`; pushes of a start do not say theirs.
        self.steps = clock if hands_over and mode.seconds else 0
        # by clock: the squared norm of this shard's part of a mean, until the norm over all shards is known
        self.norms: dict[int, float] = {}
        self.folds = 0  # async: updates folded since the newest publication
        self.written = -1  # clock of the newest checkpoint, begun or loaded; -1 if the present clock is not written
        self.asked = -1  # clock of the newest checkpoint that the runner was asked for
        # without a barrier: (worker, clock) of each member; the checkpoint `asked` has its updates below that clock
        self.saved: m.Pairs = ()
        self.writes = False  # True while a checkpoint holds back the fold of the next clock; the next tick clears it

    def turn(self, clock: int) -> Keys:
        """Return the keys [begin, end) of the fragment that is exchanged at this clock."""
        return self.fragments[self.mode.fragment(clock)]

    def apply(self, changes: list[Change]) -> None:
        """Apply changes to the store. A change that replaces all weights also begins the publications anew."""
        for change in changes:
            self.store.apply(change)
            if isinstance(change, (SetFirstWeights, MergeStoppedModels, LoadArrays)):
                self.publications.begin(self.min_clock, self.steps)

    def begin(self, load: LoadArrays, recut: bool = False, steps: int = 0) -> None:
        """Continue from a checkpoint.

        Args:
            load: The arrays of the checkpoint.
            recut: True if the checkpoint was cut for another number of shards. Its files then serve as this shard's
                checkpoint of that clock, and the shard does not write it again.
            steps: The run's steps before that clock, as in `State`.

        Raises:
            NarrowsError: The checkpoint holds another number of keys.
        """
        keys, held = self.store.size, load.arrays["x"].size
        if held != keys:
            raise NarrowsError(f"the checkpoint of clock {self.min_clock} has {held} keys here, not {keys}")
        self.steps = max(self.steps, steps)
        self.apply([load])
        self.parent_slot.owe(load.arrays.get(OWED))
        self.written = self.min_clock if recut else -1
        if self.mode.bound is None and self.min_clock != self.start_clock:  # a start is bsp, and has published all
            self.publish()  # the newest publication may lack folds, which no child could stand in for any more

    def go_on(self, before: ModelShard) -> None:
        """Continue with the arrays of `before`, which has reached the same clock under other settings (replanning).

        The arrays come from memory and not from the checkpoint: a standby has them too, but not the disk of its
        primary. `parent_slot` comes along, since no checkpoint holds it.
        """
        self.parent_slot = before.parent_slot
        arrays = before.store.arrays() | before.store.tables.arrays()
        self.begin(LoadArrays(arrays, before.store.publication), steps=before.steps)

    def arrays(self, ledger: m.Ledger) -> dict[str, FloatArray]:
        """Return what a checkpoint holds: views of the keys' arrays, and copies of embedding rows.

        A cluster's last checkpoint also holds what the cluster owes its parent, since nothing is pushed after it. An
        earlier checkpoint does not: updates that are pushed after it would count twice when a run resumes from it.
        """
        arrays = self.store.arrays() | self.store.tables.arrays()
        if self.parent_slot.child and ledger.over and not ledger.above:
            arrays[OWED] = self.parent_slot.kept.owes(self.store.x)
        return arrays

    # The stages. Each returns its effects, and True if the next stage may begin.

    def run(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Run the stages from the present one, as far as the ledger and the parent allow."""
        effects: list[ServerEffect] = []
        if ledger.sources and self.given and not ledger.started and self.next_source(ledger) < 0:
            self.weights_from = ledger.initialiser  # a worker that still owed its model has left
        if self.parent_slot.link is not None:
            self.apply(self.parent_slot.link.first(self.store.x, self.store.publication + 1))
        if self.store.handover is not None and self.min_clock > self.start_clock:
            seats = self.assembler.seats.values()
            if seats and all(seat.clock > self.start_clock for seat in seats):
                self.apply([DropHandover()])  # a worker takes the state over before it pushes for that clock
        while self.stage is not ClockStage.FOLD or self.min_clock < ledger.min_clock:
            more, done = STAGES[self.stage](self, ledger, now_ns)
            effects += more
            if not done:
                break
            self.stage = NEXT[self.stage]
        if self.stage is ClockStage.FOLD:
            effects += self._between(ledger, now_ns)[0]
            self.apply(self.parent_slot.link.seat.last() if self.parent_slot.link is not None else [])
        asked = ledger.checkpoint == self.min_clock == ledger.min_clock and self.written != self.min_clock
        if asked and self.stage is ClockStage.FOLD and self.store.publication >= 0:
            effects.append(self._checkpoint())
        return effects

    def _between(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Between two clocks: take a seat in the parent's run, finish there if all workers are done. False: wait."""
        seated = self.seat(ledger, now_ns)
        finished, done = self.parent_slot.finish(ledger, self.min_clock, self.store.x, now_ns)
        return [*seated, *finished], done

    def _fold(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Stage FOLD: fold the set of the clock, if there is a barrier; without one, updates were folded on arrival."""
        effects, done = self._between(ledger, now_ns)
        if not done:
            return effects, False
        samples = sum(count for _, count in self.assembler.samples(0))
        if isinstance(self.folding, FoldAtBarrier):
            rows = {row[0]: row for row in ledger.sets}
            if self.min_clock not in rows:
                return effects, False
            clip, differed = self._clip(dict(ledger.norms)), self.folding.hyper_differs
            changes = self.folding.close(self.min_clock, pairs(rows[self.min_clock]), clip)
            effects += self.filters.take()
            if changes is None:
                return effects, False
            self.apply(changes)
            samples = self.folding.samples
            if self.folding.hyper_differs and not differed:
                effects.append(Log("hyper", {"clock": self.min_clock, "text": DIFFER}))
        if self.parent_slot.link is not None:
            self.parent_slot.link.seat.stepped(samples)
        return effects, True

    def _clip(self, norms: dict[int, float]) -> Callable[[Terms, int], float | None]:
        """Return a function that gives the factor by which `max_grad_norm` shrinks the mean of a clock.

        The function returns None while the norm over all shards is not known.
        """

        def clip(terms: Terms, clock: int) -> float | None:
            if self.plan.max_grad_norm <= 0:
                return 1.0
            if clock not in self.norms:
                self.norms[clock] = self.store.norm(terms)
            if clock not in norms:
                return None
            del self.norms[clock]
            return self.plan.max_grad_norm / (norms[clock] + 1e-6)  # torch.nn.utils.clip_grad_norm_

        return clip

    def _send_up(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Stage SEND_UP: push to the parent what is owed."""
        above = self.parent_slot.link
        if above is None or not self.parent_slot.placed(ledger):
            return [], True
        asks, done = above.send_up(self.store.x, now_ns)
        return [*asks], done

    def _rebase(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Stage REBASE: move the weights onto the parent's newest state, once the staleness bound there allows it."""
        above = self.parent_slot.link
        if above is None or not self.parent_slot.placed(ledger):
            return [], True  # this cluster has no seat in the parent's run at present
        if not above.may_publish():
            return [], False
        self.apply(above.rebase())
        return [], True

    def _publish(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Stage PUBLISH: advance min_clock, and publish the state if the mode has a staleness bound."""
        self.steps += self.folding.steps.pop(self.min_clock, 0)
        self.min_clock += 1
        self.assembler.settle(self.min_clock)
        return [*(self.publish() if self.mode.bound is not None else [])], True

    def publish(self) -> list[Log]:
        """Publish the state, and count the folds anew."""
        self.folds = 0
        keys = self.turn(self.min_clock - 1) if self.mode.fragments > 1 else None
        return self.publications.make(keys, self.min_clock, self.steps)

    def _write(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Stage CHECKPOINT: write one if the ledger asks for it. At a barrier the next clock waits for a tick after
        it.
        """
        if self.writes:
            return [], False
        if ledger.checkpoint != self.min_clock or self.written == self.min_clock:
            return [], True
        self.writes = self.mode.barrier and self.min_clock < ledger.min_clock
        return [self._checkpoint()], not self.writes

    def has_written(self) -> None:
        """Let the clocks after the checkpoint be folded."""
        self.writes = False

    def _checkpoint(self) -> WriteCheckpoint:
        """Ask the runner for a checkpoint of the present clock."""
        self.written = self.asked = self.min_clock
        seats = self.assembler.seats.values() if not self.mode.barrier else ()
        self.saved = tuple((seat.worker, seat.clock) for seat in seats)
        return WriteCheckpoint(self.min_clock)

    # The parent.

    def seat(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Take the seat in the parent's run that the ledger names, once the clocks before it are done."""
        place = self.parent_slot.wanted(ledger)
        if place is None:
            return []
        if (said := self.parent_slot.keep(place, ledger, now_ns)) is not None:
            return said
        if not self.assembler.seats.keys() & {worker for worker, *_ in ledger.members}:
            # all workers are new: go to where the parent's run is
            self.min_clock, self.stage = place.at, ClockStage.FOLD
            self.publications.begin(place.at, self.steps)
            self.parent_slot.renew()
        if self.stage is not ClockStage.FOLD or self.min_clock < place.at:
            return []
        return self.parent_slot.take_place(place, ledger, now_ns)

    def give_weights(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Give the parent its first weights, once all shards have those of one worker, or a checkpoint."""
        decided = self.weights_from < 0 or ledger.weights == self.weights_from
        above = self.parent_slot.link
        if above is None or not above.seat.wants_weights or self.store.publication < 0 or not decided:
            return []
        return above.give_weights(self.store.x, now_ns)

    # Weights and updates.

    def next_source(self, ledger: m.Ledger) -> int:
        """Return the worker whose first weights the shard waits for, -1 if all are here.

        The workers give their models one after another, so that a shard never holds all of them.
        """
        if not ledger.sources:
            return ledger.initialiser if self.weights_from != ledger.initialiser else -1
        if self.given_round != ledger.source_round:
            self.given_round, self.given = ledger.source_round, {}
        return min(dict(ledger.sources).keys() - self.given.keys(), default=-1)

    def first_weights(self, message: m.FirstWeights, ledger: m.Ledger) -> bool:
        """Take one part of a worker's first weights.

        Returns:
            True if the first weights of that worker are complete now.

        Raises:
            RemoteProtocolError: The part does not fit this shard. Nothing has changed.
        """
        if check_part(message, self.store.whole) == math.inf and self.finite:
            raise RemoteProtocolError("the first weights hold NaN or infinity, which --compress-down cannot code")
        ours = {part: piece for part, piece in self.first.items() if piece.worker == message.worker}
        ours[message.part] = message
        whole = len(ours) >= message.parts
        if whole and not covers([(piece.begin, piece.end) for piece in ours.values()], *self.store.whole):
            raise RemoteProtocolError("the first weights do not cover this shard's keys exactly once")
        self.first = ours
        if whole:
            self.given[message.worker] = len(self.given) + 1 if ledger.sources else 1
            pieces, count = list(ours.values()), self.given[message.worker]
            self.apply([SetFirstWeights(pieces) if count == 1 else MergeStoppedModels(pieces, count)])
            self.first = {}
            self.weights_from = ledger.initialiser if self.next_source(ledger) < 0 or not ledger.sources else -1
        return whole

    def accept(self, seat: PushSequence, update: PushedUpdate) -> list[ServerEffect]:
        """Take the next whole update of a member: fold it or hold it, and raise the member's clock."""
        changes = self.folding.accept(seat, update, self.store.publication + 1)
        self.apply(changes)
        if changes and self.parent_slot.link is not None:
            self.parent_slot.link.seat.moved()
        if self.mode.rule is FoldRule.MIX:
            # gossip closes no clock: a checkpoint of this min_clock would hold the model before this update
            self.written = -1
        seat.accept()
        told = self.filters.take()
        if self.mode.bound is not None:
            return [*told]
        self.folds += 1
        return [*told, *self.publish()] if self.folds >= len(self.assembler.seats) else [*told]


def pairs(row: m.Ints) -> list[m.Pair]:
    """Return the (worker, update) pairs of one row of a ledger's `sets`, whose first number is the clock."""
    return list(zip(row[1::2], row[2::2], strict=True))


STAGES: dict[ClockStage, Callable[[ModelShard, m.Ledger, int], tuple[list[ServerEffect], bool]]] = {
    ClockStage.FOLD: ModelShard._fold,
    ClockStage.SEND_UP: ModelShard._send_up,
    ClockStage.REBASE: ModelShard._rebase,
    ClockStage.PUBLISH: ModelShard._publish,
    ClockStage.CHECKPOINT: ModelShard._write,
}
