"""The state that each shard must hold: it follows, in the order of its folds, from what the workers gave.

A mirror hears what is done to its shard's store, and does it over again from the log of the run, `ForkedEnvironment`:
the weights from the member sets, the sums in float32 and in the order given. It believes neither the payloads nor the
weights of a shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from kit.gain_reference import TrueGain
from kit.reference import rounded_last

from narrows.compression.codecs import add
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import split
from narrows.ps.replication.events import MachineEvent
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.folding import FoldAtOnce
from narrows.ps.shard.push_assembler import PushSequence
from narrows.ps.store.changes import (
    Change,
    Fold,
    OuterStep,
    Publish,
    PushedUpdate,
    RoundLast,
    SetFirstWeights,
    Step,
    Terms,
    Update,
)
from narrows.ps.store.store import Store
from narrows.ps.store.update_gain import GONE
from simulation.filters import Screen

if TYPE_CHECKING:
    from simulation.actors import Process
    from simulation.campaigns import Case

FloatArray = npt.NDArray[np.float32]
PushId = tuple[int, int, int]  # worker, epoch, clock
CLOSE = 1e-4  # a gain is measured in float32, by differences of the weights
RATE = 0.5  # of the server's optimizer, plain SGD
TABLE_ROWS = 48  # of an embedding table, where a run has one: rows of one value
BOTH, UP, DOWN = "both", "up", "down"  # ways of a link that are cut


class Violation(AssertionError):
    """An invariant does not hold."""


def rows_given(push: PushId) -> tuple[npt.NDArray[np.uint32], FloatArray]:
    """The rows of each shard that an update touches, one of which all updates do, and float32[2, 1]: whole numbers."""
    worker, epoch, clock = push
    at = np.array([0, 1 + (5 * worker + 3 * epoch + clock) % (TABLE_ROWS // 3 - 1)], np.uint32)
    return at, np.array([[1], [1 + clock % 3]], np.float32)


def steps_given(worker: int, clock: int) -> int:
    """The local steps that an update of `local` is of."""
    return 1 + (5 * worker + 3 * clock) % 11


@dataclass(slots=True)
class Given:
    """The log of the run, from outside the machines."""

    pushes: dict[PushId, tuple[FloatArray, int]] = field(default_factory=dict)  # whole update, samples
    # shard, update -> samples, where a child has given each shard its own part (trees)
    parts: dict[tuple[int, PushId], int] = field(default_factory=dict)
    starts: dict[tuple[int, int], int] = field(default_factory=dict)  # worker, epoch -> its first update
    generation_of: dict[tuple[int, int], int] = field(default_factory=dict)  # worker, epoch -> generation
    # generation, clock -> (worker, its update)
    sets: dict[tuple[int, int], tuple[tuple[int, int], ...]] = field(default_factory=dict)
    publications: dict[tuple[int, int, int], int] = field(default_factory=dict)  # generation, shard, number -> checksum
    # generation, clock -> by shard: the squared length of its mean, and by what it was shrunk
    clipped: dict[tuple[int, int], dict[int, tuple[float, float]]] = field(default_factory=dict)


@dataclass(slots=True)
class Held:
    """The part of a mirror that a checkpoint keeps."""

    x: FloatArray
    momentum: FloatArray
    folded: dict[PushId, float] = field(default_factory=dict)  # with its weight
    torn: set[PushId] = field(default_factory=set)  # of these, what some of its keys lack: who is gone, before a move
    clocks: dict[tuple[int, int], list[int]] = field(
        default_factory=dict
    )  # of these, by worker and epoch, in their order
    shown: dict[PushId, int] = field(default_factory=dict)  # the publication that first has it
    table: FloatArray = field(default_factory=lambda: np.zeros((TABLE_ROWS, 1), np.float32))
    publication: int = -1
    closed: int = 0  # clocks (barrier)
    gain: float = 1.0  # of a mean of updates
    agreement: float = 0.0
    whole: set[tuple[int, int]] = field(default_factory=set)  # worker, clock of all that are folded
    # by clock, the run's steps before it: of each round the most of one worker (barrier)
    steps: dict[int, int] = field(default_factory=lambda: {0: 0})

    def fold(self, push: PushId, weight: float, publication: int) -> None:
        if push not in self.folded:
            self.clocks.setdefault(push[:2], []).append(push[2])
        self.folded[push], self.shown[push] = weight, publication
        self.whole.add((push[0], push[2]))

    def copy(self) -> Held:
        return replace(
            self,
            x=self.x.copy(),
            momentum=self.momentum.copy(),
            table=self.table.copy(),
            folded=self.folded.copy(),
            torn=self.torn.copy(),
            clocks={who: clocks.copy() for who, clocks in self.clocks.items()},
            shown=self.shown.copy(),
            whole=self.whole.copy(),
            steps=self.steps.copy(),
        )


class Accepted(NamedTuple):
    """An update is here whole, and its turn has come: it is folded at once, or left out."""

    push: PushId


def answered(state: m.State, store: Store) -> bytes:
    """Return the model that a child makes of an answer to its Pull: it has the newest publication of the store."""
    if state.whole:
        return bytes(state.payload)
    model = store.p.copy()
    add(state, 1.0, model, store.begin)
    return model.tobytes()


class Mirror:
    """One shard in one generation."""

    def __init__(self, process: Process, store: Store, case: Case, given: Given) -> None:
        self.process, self.store, self.case, self.given = process, store, case, given
        self.index, self.settings = process.index, process.shard.settings
        self.mode = self.settings.mode()
        self.held = Held(np.zeros(store.size, np.float32), np.zeros(store.size, np.float32))
        self.samples: dict[int, int] = {}
        self.batch: list[tuple[float, PushId]] = []  # folded since the last publication (barrier)
        self.gain, self.folded_at = TrueGain(0.0 if case.scaled else 1.0), 1.0
        self.log: list[tuple[Change | Accepted, int]] = []  # and the checksum of what is published after it
        self.screen = Screen(case.settings.robust)
        self.judged: dict[PushId, bool] = {}  # of the set of the present clock (barrier): which updates count
        self._watch()

    def _watch(self) -> None:
        self.plain, self.store.apply = self.store.apply, self._apply  # type: ignore[method-assign]
        planned = self.process.shard.model_shard
        if planned is not None and isinstance(planned.folding, FoldAtOnce) and self._leaves_out:
            accept = planned.folding.accept

            def accepted(seat: PushSequence, update: PushedUpdate, publication: int) -> list[Change]:
                self.log.append((Accepted((seat.worker, seat.epoch, seat.clock)), 0))
                return accept(seat, update, publication)

            planned.folding.accept = accepted  # type: ignore[method-assign]

    @property
    def _leaves_out(self) -> bool:
        """Not every update is folded."""
        return bool(self.case.settings.robust or self.case.epochs)

    def adopt(self, process: Process) -> None:
        """Another process goes on where this shard was."""
        assert process.shard.model_shard is not None, f"shard {self.index} has forgotten its model"
        self.store = process.shard.model_shard.store
        self._watch()

    def _apply(self, change: Change) -> None:
        self.plain(change)
        self.log.append((change, zlib.crc32(self.store.p.tobytes()) if isinstance(change, Publish) else 0))

    def follow(self) -> None:
        """Do over again what was done to the store since the last event."""
        for number, (change, checksum) in enumerate(self.log):
            if isinstance(change, Accepted):
                after = self.log[number + 1][0] if number + 1 < len(self.log) else None
                self._accepted(change.push, isinstance(after, (Fold, OuterStep, Step)))
            else:
                self._change(change, checksum)
        self.log.clear()
        folding = self.process.shard.model_shard.folding if self.process.shard.model_shard is not None else None
        if isinstance(folding, FoldAtBarrier) and self.held.closed in folding.closing:
            # A set that awaits the norm is judged already, beside who is a member now.
            self._judge([push_of(update) for _, update in folding.closing[self.held.closed][0]])

    def _change(self, change: Change, checksum: int) -> None:
        match change:
            case SetFirstWeights(pieces):
                self._first_weights(pieces)
            case Fold(terms, of):
                pushes = self._pushes(terms)
                self._fold(pushes, of)
                self._rows([(share, push) for (_, push), (_, share) in zip(pushes, of, strict=True)])
            case OuterStep(terms, keys):
                self._outer(self._pushes(terms), keys)
            case Step(terms, _, _, scale, shrink):
                at_once = None if self.mode.barrier else scale
                pushes = self._pushes(terms, at_once)
                mean = self._true_mean(pushes, shrink)
                self.held.x -= np.float32(RATE * scale) * mean
                self.held.momentum = (
                    self.held.momentum + mean
                )  # of the start of a run: what workers take over (starts.py)
                self._rows([(scale * weight, push) for weight, push in pushes])
            case Publish():
                self._publish(checksum)
            case RoundLast():
                self._round_last()

    def _rows(self, pushes: list[tuple[float, PushId]]) -> None:
        """One step of plain SGD along the weighted sum of their rows."""
        total = np.zeros_like(self.held.table)
        for weight, push in pushes if self.case.rows else ():
            at, values = rows_given(push)
            total[at] += np.float32(weight) * values
        self.held.table += np.float32(-RATE) * total

    def compare(self, event: MachineEvent, source: str) -> None:
        for table in self.store.tables.tables:
            if not np.array_equal(table.values, self.held.table[: table.count]):  # those that none touched are 0
                raise Violation(f"shard {self.index} has rows {table.values}, the log gives {self.held.table}")
        if self.store.publication >= 0 and self.store.x.tobytes() != self.held.x.tobytes():
            what = f"{event.kind.name} {type(event.message).__name__ if event.message is not None else ''} {source}"
            raise Violation(f"shard {self.index} holds {self.store.x} after {what}, the log gives {self.held.x}")

    def saved(self, clock: int) -> Held:
        self._is_of(clock)
        held = self.held.copy()
        held.closed = clock  # another plan may have a barrier, and goes on there
        return held

    def _is_of(self, clock: int) -> None:
        if self.mode.barrier and self.held.closed != clock:
            raise Violation(f"checkpoint {clock} is of clock {self.held.closed}")

    def loaded(self, saved: Held, clock: int) -> None:
        self.held = saved.copy()
        self.gain.factor, self.gain.agreement = saved.gain, saved.agreement
        self._is_of(clock)
        self.given.publications[self._publication()] = zlib.crc32(self.store.p.tobytes())

    def has(self, worker: int, clock: int) -> bool:
        """Whether update `clock` of the worker is whole on the shard: folded, held, or in a set that awaits the norm."""
        if (worker, clock) in self.held.whole or any((push[0], push[2]) == (worker, clock) for _, push in self.batch):
            return True
        folding = self.process.shard.model_shard.folding if self.process.shard.model_shard is not None else None
        if not isinstance(folding, FoldAtBarrier):
            return False
        if self._leaves_out:  # what is left out of a set that awaits the norm is in no term of it
            generation = self.process.shard.ledger.generation
            if any((worker, clock) in self.given.sets[generation, at] for at in folding.closing):
                return True
        waiting = [update[0] for terms, _ in folding.closing.values() for _, update in terms]
        return worker in folding.held.get(clock, {}) or any(
            (push.worker, push.clock) == (worker, clock) for push in waiting if isinstance(push, m.Push)
        )

    def _publication(self) -> tuple[int, int, int]:
        return (self.process.shard.ledger.generation, self.index, self.held.publication)

    # Changes of a store; one method for each method of the store.

    def _first_weights(self, pieces: Update) -> None:
        if self.held.folded:
            raise Violation(f"shard {self.index} takes first weights after the first fold")
        ordered = sorted(pieces, key=lambda piece: piece.begin)
        self.held.x = np.concatenate([np.frombuffer(piece.payload, np.float32) for piece in ordered])
        self.held.publication = -1
        self._publish(zlib.crc32(self.held.x.tobytes()))

    def _live(self) -> set[int]:
        return {row[0] for row in self.process.shard.ledger.members}

    def _accepted(self, push: PushId, folded: bool) -> None:
        """At once: one that leads against the others is left out, or has no values."""
        values, samples = self.given.pushes[push][0], self._samples(push)
        if not samples:
            self.samples[push[0]] = 0
        (counts,) = self.screen.counts([(push[0], self._mine(values))], self._live()) if samples else [False]
        self._as_it_counts(push, counts, folded)
        if not folded:
            self._once(push)
            self.held.fold(push, 0.0, self.held.publication + 1)
            self.gain.forget(push[:2])

    def _as_it_counts(self, push: PushId, counts: bool | None, folded: bool) -> None:
        if counts not in (None, folded):
            raise Violation(f"{push} on shard {self.index} is {'folded' if folded else 'left out'}, and is not to be")
        self.screen.settle(push[0], folded)
        self.process.run.sim.struck["left out"] += not folded

    def _judge(self, folded: Sequence[PushId]) -> None:
        """At a barrier: which updates of the set of this clock count; those that are folded should be all of them."""
        if self.judged or not self._leaves_out:
            return
        generation = self.process.shard.ledger.generation
        right = self.given.sets.get((generation, self.held.closed), ())
        epochs = {of[0]: of[1] for of, since in self.given.generation_of.items() if since == generation}
        pushes = [(worker, epochs[worker], update) for worker, update in right]
        made = [push for push in pushes if self._samples(push)]
        updates = [(push[0], self._mine(self.given.pushes[push][0])) for push in made]
        found = dict(zip(made, self.screen.counts(updates, self._live()), strict=True))
        for push in pushes:
            self._as_it_counts(push, found.get(push, False), push in folded)
            self.judged[push] = push in folded
            if push not in folded:
                self.gain.forget(push[:2])

    def _pushes(self, terms: Terms, at_once: float | None = None) -> list[tuple[float, PushId]]:
        """The pushes that are folded, with their weights; `at_once`: the weight to check, where the mean is of one."""
        pushes = [(weight, self._once(push_of(update))) for weight, update in terms]
        if self.mode.barrier:
            self._judge([push for _, push in pushes])
            self.batch += pushes
        else:
            self._at_once(pushes[0][1], pushes[0][0] if at_once is None else at_once)
        return pushes

    def _fold(self, pushes: list[tuple[float, PushId]], of: tuple[tuple[int, float], ...]) -> None:
        live = {row[:2] for row in self.process.shard.ledger.members}
        self.folded_at = self.gain.factor
        for (weight, push), (worker, share) in zip(pushes, of, strict=True):
            values = self._mine(self.given.pushes[push][0])
            self.held.x += np.float32(weight) * values
            right = share * self.folded_at
            if worker != (push[0] if push[:2] in live else GONE) or abs(weight - right) > CLOSE * weight:
                raise Violation(f"weight of {push} is {weight}, that of worker {worker} is {right}")
            if worker != GONE:
                self.gain.saw(push[:2], live, share, values)
        self.held.gain, self.held.agreement = self.gain.factor, self.gain.agreement

    def _outer(self, pushes: list[tuple[float, PushId]], keys: tuple[int, int]) -> None:
        held, settings = self.held, self.case.settings
        mean = self._true_mean(pushes)
        rate, momentum = np.float32(settings.outer_lr), np.float32(settings.outer_momentum)
        # Only the keys whose turn this clock is are folded.
        clock, begin, size = pushes[0][1][2], self.store.begin, self.store.size
        low, high = (begin + size * (clock % settings.fragments + i) // settings.fragments for i in (0, 1))
        if keys != (low, high):
            raise Violation(f"clock {clock} is folded at keys {keys} of shard {self.index}, not at {(low, high)}")
        at = slice(low - begin, high - begin)
        held.momentum[at] = momentum * held.momentum[at] + mean[at]
        held.x[at] += rate * (mean[at] + momentum * held.momentum[at])

    def _publish(self, checksum: int) -> None:
        held = self.held
        held.publication += 1
        number = self._publication()
        if self.given.publications.setdefault(number, checksum) != checksum:
            raise Violation(f"publication {number} is there twice, and not the same")
        if self.settings.compress_down == "dense" and zlib.crc32(held.x.tobytes()) != checksum:
            raise Violation(f"shard {self.index} publishes {self.store.p}, the log gives {held.x}")
        if self.mode.barrier and held.publication > 0:
            self._closed()

    def _round_last(self) -> None:
        """A run with a lossy downlink ends with what the difference to the newest publication is in int12."""
        shown = self.store.p
        if self.settings.compress_down != "dense":
            self.held.x = shown + rounded_last(self.held.x - shown)

    def model_of(self, state: m.State) -> bytes:
        """Return the model that a child makes of an answer to its Pull."""
        if not state.whole and state.publication != self.held.publication:
            raise Violation(
                f"a difference to publication {state.publication}, and {self.held.publication} is the newest"
            )
        return answered(state, self.store)

    # Rules.

    def _once(self, push: PushId) -> PushId:
        """Check a push that is folded: it was given, is folded once only, after the one before, and is of this generation."""
        where = f"{push} on shard {self.index}"
        if push not in self.given.pushes:
            raise Violation(f"{where} was never pushed")
        if push in self.held.folded:
            raise Violation(f"{where} is folded twice")
        if self.given.generation_of.get(push[:2]) != self.process.shard.ledger.generation:
            raise Violation(f"{where} is folded, and of another generation")
        before = self.held.clocks.get(push[:2])
        expected = before[-1] + 1 if before else self.given.starts.get(push[:2], push[2])
        if push[2] != expected:
            raise Violation(f"{where} is folded, and {expected} is next")
        return push

    def _at_once(self, push: PushId, weight: float) -> None:
        """Folded at once: over the last known samples of the live members; where unknown, as this one's."""
        ledger, held = self.process.shard.ledger, self.held
        live = dict(row[:2] for row in ledger.members)
        if live.get(push[0]) != push[1]:
            raise Violation(f"{push} is folded on shard {self.index}, and its worker is no member")
        samples = self.samples[push[0]] = self._samples(push)
        right = samples / sum(self.samples.get(worker, samples) for worker in live)
        if self.case.settings.robust:
            right = self.screen.share(live)
        right *= self.gain.factor
        if abs(weight - right) > CLOSE * right * self.case.scaled:
            raise Violation(f"weight of {push} on shard {self.index} is {weight}, not {right}")
        held.fold(push, weight, held.publication + 1)

    def _closed(self) -> None:
        """A barrier was folded: over the coordinator's set, in id order, with samples over their sum."""
        held, clock = self.held, self.held.closed
        where = f"clock {clock} on shard {self.index}"
        self._judge([])  # where nothing was folded
        for push in [push for push, counted in self.judged.items() if not counted]:
            held.fold(push, 0.0, held.publication)
        updates = tuple((worker, update) for _, (worker, _, update) in self.batch)
        right = self.given.sets.get((self.process.shard.ledger.generation, clock))
        if right is not None and self.judged:
            left_out = {(worker, update) for (worker, _, update), counted in self.judged.items() if not counted}
            right = tuple(pair for pair in right if pair not in left_out)
        if updates != right or (self.case.settings.quorum < 0 and any(update != clock for _, update in updates)):
            raise Violation(f"{where} is closed over {self.batch}, not the updates of {right}")
        total = sum(self._samples(push) for _, push in self.batch)
        for weight, push in self.batch:
            share = self.folded_at * self._samples(push) / total
            if self.case.settings.robust:
                share = self.folded_at * self.screen.share([push[0] for push in self.judged])
            if abs(weight - share) > CLOSE * share * self.case.scaled:
                raise Violation(f"weight of {push} in {where} is {weight}, not {share}")
            held.fold(push, weight, held.publication)
        if right is not None and clock in held.steps:
            pairs = self.given.sets[self.process.shard.ledger.generation, clock]
            counts = self.settings.sync == "local" and not self.given.parts  # a cluster's push has no steps
            held.steps[clock + 1] = held.steps[clock] + max((steps_given(*pair) for pair in pairs if counts), default=0)
        self.batch, self.judged, held.closed = [], {}, clock + 1

    def _true_mean(self, pushes: list[tuple[float, PushId]], shrink: float = 1.0) -> FloatArray:
        """The mean that the store must have folded, clipped where the plan says so: by the norm over all shards."""
        mean = self.screen.mean if self.screen.cut else sum_of
        whole = mean([(w, self.given.pushes[push][0]) for w, push in pushes])
        clip = self.case.max_grad_norm
        if clip:
            if self.case.settings.robust == "cosine":
                coefficient = self._shrunk(self._mine(whole), shrink)
            else:
                parts = [whole[begin:end] for begin, end in split(len(whole), self.process.shard.settings.shards)]
                coefficient = clipped(clip, [float(np.dot(part, part)) for part in parts])
            if coefficient < 1.0:
                whole *= np.float32(coefficient)
        return self._mine(whole)

    def _shrunk(self, mean: FloatArray, shrink: float) -> float:
        """Each shard leaves out by its own keys: how long the mean of a clock is shows when the last of them has folded it."""
        where, settings = (self.process.shard.ledger.generation, self.held.closed), self.process.shard.settings
        folded = self.given.clipped.setdefault(where, {})
        folded[self.index] = (float(np.dot(mean, mean)), shrink)
        squares = [folded[shard][0] for shard in range(settings.shards) if shard in folded]
        right = clipped(self.case.max_grad_norm, squares)
        if len(squares) == settings.shards and any(each != right for _, each in folded.values()):
            raise Violation(f"clock {where[1]} is shrunk by {folded} (squared length, factor), and not by {right}")
        return shrink

    def _samples(self, push: PushId) -> int:
        return self.given.parts.get((self.index, push), self.given.pushes[push][1])

    def _mine(self, whole: FloatArray) -> FloatArray:
        return whole[slice(*self.store.whole)]


def push_of(pieces: Update) -> PushId:
    first = pieces[0]
    assert isinstance(first, m.Push)
    return (first.worker, first.epoch, first.clock)


def clipped(clip: float, squares: Sequence[float]) -> float:
    """By how much a mean is shrunk whose parts have these squared lengths: torch.nn.utils.clip_grad_norm_."""
    norm: float = sum(squares) ** 0.5
    return clip / (norm + 1e-6)


def sum_of(terms: Sequence[tuple[float, FloatArray]]) -> FloatArray:
    """Sum of weight * values in the order given, in float32."""
    total = np.float32(terms[0][0]) * terms[0][1]
    for weight, values in terms[1:]:
        total = total + np.float32(weight) * values
    return np.asarray(total, np.float32)
