"""A shard that knows its model: the store, what folds into it, what is shown of it, and the clock of the shard. No I/O.

The clock of a shard goes through stages, and whatever comes goes on from the stage where it stands:

    FOLD        what the ledger closed is folded, where there is a barrier; else it was when it came
    SEND_UP     what the run above is owed leaves
    REBASE      the weights stand on what has come from above
    PUBLISH     min_clock advances, and the state of it is published
    CHECKPOINT  it is written, where the ledger asks for it, before anything of the next clock is folded

Rules
- The ledger is obeyed, never second-guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from narrows.compression import ladder
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, covers, fragment, split
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import Rule
from narrows.protocols.config.robust import Robust
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import Checkpoint, Log, ServerEffect
from narrows.protocols.errors import LocalProtocolError, NarrowsError, RemoteProtocolError
from narrows.protocols.member.member import Member
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.filters.cosine_filter import CosineFilter
from narrows.ps.filters.norm_clip import NormClip, UnboundedNorms
from narrows.ps.filters.update_filters import UpdateCheck, UpdateFilters
from narrows.ps.filters.update_sample import UpdateSampler
from narrows.ps.parent.parent_link import ParentLink
from narrows.ps.parent.parent_slot import ParentSlot
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.folding import FoldAtOnce, Folding
from narrows.ps.shard.publications import Publications
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence, check_part
from narrows.ps.store.changes import (
    OWED,
    Change,
    FloatArray,
    LoadArrays,
    MergeStoppedModels,
    PushedUpdate,
    SetFirstWeights,
    Terms,
)
from narrows.ps.store.embedding_rows import EmbeddingRows
from narrows.ps.store.store import ServerOptimizer, Store, assume_lent
from narrows.ps.store.update_gain import Gain


class ClockStage(Enum):
    """The next thing to be done for the present clock."""

    FOLD = "fold"
    SEND_UP = "send up"
    REBASE = "rebase"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"


DIFFER = "learning rates or other hyper-parameters differ between workers; those that most of them agree with hold"
NEXT = dict(zip(ClockStage, [*list(ClockStage)[1:], ClockStage.FOLD], strict=True))


@dataclass(frozen=True)
class MeanFactory:
    """The means that a shard's runner gives it. `optimizer`: makes the server's, of a plan and its keys. `lent`:
    whether views of the store may still be read. `child`: the cluster is a member of a run above. In process 0 `member`
    is that one, whose first session is this shard's, and `coordinator` is the one beside this shard. `host`: as in
    Report."""

    optimizer: Callable[[ModelSpec, int, int], ServerOptimizer] | None = None
    lent: Callable[[], bool] = assume_lent
    child: bool = False
    member: Member | None = None
    coordinator: Coordinator | None = None
    timing: Timing = field(default_factory=Timing)
    host: str = ""


class ModelShard:
    """Shard `index` in one generation, which begins at `clock`. Raises LocalProtocolError where it cannot be had."""

    def __init__(
        self, index: int, settings: Settings, plan: ModelSpec, inbox: PushAssembler, clock: int, means: MeanFactory
    ) -> None:
        self.plan, self.inbox, self.means = plan, inbox, means
        self.mode = mode = settings.mode()
        begin, end = split(plan.size, settings.shards)[index]
        down = ladder(settings.compress_down, sparse=mode.rule is not Rule.OPTIMIZER)
        if mode.rule is Rule.OPTIMIZER and means.optimizer is None:
            raise LocalProtocolError("this server has no optimizer for pushed gradients")
        self.finite = not down.lossless  # the first weights must be, or they could not be published
        gain, robust = Gain.of(settings, mode, plan, end - begin), Robust.parse(settings.robust)
        self.store = store = Store(
            begin,
            end,
            barrier=mode.barrier,
            codings=down.specs,
            outer=(settings.outer_lr, settings.outer_momentum) if mode.rule is Rule.OUTER else None,
            optimizer=means.optimizer(plan, begin, end) if means.optimizer and mode.rule is Rule.OPTIMIZER else None,
            lent=means.lent,
            gain=gain,
            cut=robust.cut,
            tables=EmbeddingRows(plan.tables, index, settings.shards),
        )
        checks: list[UpdateCheck] = []
        if settings.max_update_norm > 0:
            checks.append(NormClip(index, settings.max_update_norm, store.weights_length))
        if robust.cosine:
            checks.append(CosineFilter(index))
        far = UnboundedNorms(store.weights_length, mode.rule is Rule.OPTIMIZER)
        self.screen = screen = UpdateFilters(index, UpdateSampler(begin, end - begin), far, checks, alike=bool(robust))
        self.folding: Folding = (
            FoldAtBarrier(mode, inbox, self.turn, store.mean, gain, screen)
            if mode.barrier
            else FoldAtOnce(mode, inbox, store.whole, gain, screen)
        )
        self.publications = Publications(index, mode, store, inbox, self.folding, down.specs, means.timing)
        self.publications.begin(clock)
        self.upward = ParentSlot(index, store.whole, means.child, means.member, means.timing, plan.degree)
        self.first: dict[int, m.FirstWeights] = {}  # parts of the first weights, by number
        self.weights_from = -1  # whose are here whole
        self.given: dict[int, int] = {}  # under gossip, workers whose models are in the mean of the first weights
        self.given_round = -1  # and of which round
        self.stage = ClockStage.FOLD
        self.min_clock = clock
        self.norms: dict[int, float] = {}  # squared, of the means that await the norm over all shards
        self.folds = 0  # since the last publication, where clocks publish nothing (async)
        self.written = -1  # the clock of the newest checkpoint
        self.asked = -1  # and of the newest that the runner was asked for
        self.saved: m.Pairs = ()  # worker, clock: what of it is in that one, where updates are folded at once
        self.writes = False  # a checkpoint, before the clocks after it may be folded: the next tick goes on

    @property
    def above(self) -> ParentLink:
        return self.upward.above

    def turn(self, clock: int) -> Keys:
        """The keys whose turn this clock is."""
        return fragment(*self.store.whole, self.mode.fragments, self.mode.fragment(clock))

    def apply(self, changes: list[Change]) -> None:
        """Change the store; where that begins anew, publications do too."""
        for change in changes:
            self.store.apply(change)
            if isinstance(change, (SetFirstWeights, MergeStoppedModels, LoadArrays)):
                self.publications.begin(self.min_clock)

    def begin(self, load: LoadArrays, recut: bool = False) -> None:
        """Go on from a checkpoint; `recut`: its files are of other shards, and are not written anew. Raises NarrowsError."""
        keys, held = self.store.size, load.arrays["x"].size
        if held != keys:
            raise NarrowsError(f"the checkpoint of clock {self.min_clock} has {held} keys here, not {keys}")
        self.apply([load])
        self.upward.owe(load.arrays.get(OWED))
        self.written = self.min_clock if recut else -1

    def go_on(self, before: ModelShard) -> None:
        """From what this one has, which came to the same clock under another plan. A standby has that too, but not the
        disk of the server. `upward` stays: a checkpoint does not have it."""
        self.upward = before.upward
        self.begin(LoadArrays(before.store.arrays() | before.store.tables.arrays(), before.store.publication))

    def arrays(self, ledger: m.Ledger) -> dict[str, FloatArray]:
        """Return what a checkpoint holds: views, and copies of rows. The last one of a cluster has what is owed above,
        for nothing is pushed any more. An earlier one has not: what was pushed after it would count twice."""
        arrays = self.store.arrays() | self.store.tables.arrays()
        if self.upward.child and ledger.over and not ledger.above:
            arrays[OWED] = self.above.kept.owes(self.store.x)
        return arrays

    # The stages. Each returns its effects, and whether the next one may follow.

    def run(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Go on from the present stage, as far as the ledger and the run above let it."""
        effects: list[ServerEffect] = []
        if ledger.sources and self.given and not ledger.started and self.next_source(ledger) < 0:
            self.weights_from = ledger.initialiser  # a source that had not given its own is gone
        self.apply(self.above.first(self.store.x, self.store.publication + 1))
        while self.stage is not ClockStage.FOLD or self.min_clock < ledger.min_clock:
            more, done = STAGES[self.stage](self, ledger, now_ns)
            effects += more
            if not done:
                break
            self.stage = NEXT[self.stage]
        if self.stage is ClockStage.FOLD:
            effects += self._between(ledger, now_ns)[0]
            self.apply(self.above.last())
        asked = ledger.checkpoint == self.min_clock == ledger.min_clock and self.written != self.min_clock
        if asked and self.stage is ClockStage.FOLD and self.store.publication >= 0:
            effects.append(self._checkpoint())
        return effects

    def _between(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Between two clocks: take a place, and finish where all workers are done. False where that must wait."""
        seated = self.seat(ledger, now_ns)
        finished, done = self.upward.finish(ledger, self.min_clock, self.store.x, now_ns)
        return [*seated, *finished], done

    def _fold(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        effects, done = self._between(ledger, now_ns)
        if not done:
            return effects, False
        samples = sum(count for _, count in self.inbox.samples(0))
        if isinstance(self.folding, FoldAtBarrier):
            rows = {row[0]: row for row in ledger.sets}
            if self.min_clock not in rows:
                return effects, False
            clip, differed = self._clip(dict(ledger.norms)), self.folding.hyper_differs
            changes = self.folding.close(self.min_clock, pairs(rows[self.min_clock]), clip)
            effects += self.screen.take()
            if changes is None:
                return effects, False
            self.apply(changes)
            samples = self.folding.samples
            if self.folding.hyper_differs and not differed:
                effects.append(Log("hyper", {"clock": self.min_clock, "text": DIFFER}))
        self.above.stepped(samples)
        return effects, True

    def _clip(self, norms: dict[int, float]) -> Callable[[Terms, int], float | None]:
        """By how much the mean of a clock is shrunk to the plan's norm; None while the norm over all shards is not known."""

        def clip(terms: Terms, clock: int) -> float | None:
            if self.plan.max_grad_norm <= 0:
                return 1.0
            self.norms[clock] = self.store.norm(terms)
            if clock not in norms:
                return None
            del self.norms[clock]
            return self.plan.max_grad_norm / (norms[clock] + 1e-6)  # torch.nn.utils.clip_grad_norm_

        return clip

    def _send_up(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        asks, done = self.above.send_up(self.store.x, now_ns) if self.upward.placed(ledger) else ([], True)
        return [*asks], done

    def _rebase(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        if not self.upward.placed(ledger):
            return [], True  # the run above has lost us, or we it
        if not self.above.may_publish():
            return [], False
        self.apply(self.above.rebase())
        return [], True

    def _publish(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        self.min_clock += 1
        self.inbox.settle(self.min_clock)
        return [*(self.publish() if self.mode.bound is not None else [])], True

    def publish(self) -> list[Log]:
        self.folds = 0
        keys = self.turn(self.min_clock - 1) if self.mode.fragments > 1 else None
        return self.publications.make(keys, self.min_clock)

    def _write(self, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        if self.writes:
            return [], False
        if ledger.checkpoint != self.min_clock or self.written == self.min_clock:
            return [], True
        self.writes = self.mode.barrier and self.min_clock < ledger.min_clock
        return [self._checkpoint()], not self.writes

    def has_written(self) -> None:
        """The checkpoint is out of the way: the clocks after it may be folded."""
        self.writes = False

    def _checkpoint(self) -> Checkpoint:
        self.written = self.asked = self.min_clock
        seats = self.inbox.seats.values() if not self.mode.barrier else ()
        self.saved = tuple((seat.worker, seat.clock) for seat in seats)
        return Checkpoint(self.min_clock)

    # The run above.

    def seat(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Begin at the place that the ledger names, where the clocks before it are done."""
        place = self.upward.wanted(ledger)
        if place is None:
            return []
        if (said := self.upward.keep(place, ledger, now_ns)) is not None:
            return said
        if not self.inbox.seats.keys() & {worker for worker, *_ in ledger.members}:
            self.min_clock, self.stage = place.at, ClockStage.FOLD  # the run above has gone on without us
            self.publications.begin(place.at)
            self.upward.renew()
        if self.stage is not ClockStage.FOLD or self.min_clock < place.at:
            return []
        return self.upward.take_place(place, ledger, now_ns)

    def give_weights(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Hand up the first weights, once all shards have those of one worker, or a checkpoint."""
        decided = self.weights_from < 0 or ledger.weights == self.weights_from
        if not self.above.wants_weights or self.store.publication < 0 or not decided:
            return []
        return self.above.give_weights(self.store.x, now_ns)

    # Weights and updates.

    def next_source(self, ledger: m.Ledger) -> int:
        """The worker whose first weights are awaited, -1: all are here. One after the other: nobody holds the models of all."""
        if not ledger.sources:
            return ledger.initialiser if self.weights_from != ledger.initialiser else -1
        if self.given_round != ledger.source_round:
            self.given_round, self.given = ledger.source_round, {}
        return min(dict(ledger.sources).keys() - self.given.keys(), default=-1)

    def first_weights(self, message: m.FirstWeights, ledger: m.Ledger) -> bool:
        """One part of the first weights; whether they are whole now. Raises RemoteProtocolError; then nothing has changed."""
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
        """The next update of this member is here whole."""
        changes = self.folding.accept(seat, update, self.store.publication + 1)
        self.apply(changes)
        if changes:
            self.above.moved()
        if self.mode.rule is Rule.MIX:
            self.written = -1  # no clock closes, and the checkpoint of this one has the model before
        seat.clock += 1
        told = self.screen.take()
        if self.mode.bound is not None:
            return [*told]
        self.folds += 1
        return [*told, *self.publish()] if self.folds >= len(self.inbox.seats) else [*told]


def pairs(row: m.Ints) -> list[m.Pair]:
    """The (worker, update) of one row of a ledger's sets."""
    return list(zip(row[1::2], row[2::2], strict=True))


STAGES: dict[ClockStage, Callable[[ModelShard, m.Ledger, int], tuple[list[ServerEffect], bool]]] = {
    ClockStage.FOLD: ModelShard._fold,
    ClockStage.SEND_UP: ModelShard._send_up,
    ClockStage.REBASE: ModelShard._rebase,
    ClockStage.PUBLISH: ModelShard._publish,
    ClockStage.CHECKPOINT: ModelShard._write,
}
