"""Folds whole updates into the model of a shard: each as it comes, or all of a clock at a barrier (barrier.py). No I/O.

How it works

    FoldAtOnce (modes without a barrier)             FoldAtBarrier (`Mode.barrier`: bsp, and local with staleness 0)
    accept(update)                                   accept(update): held, acknowledged HELD
      share  = samples / samples of all members      ... until the ledger closes clock c over a set of (worker, update)
      weight = share * gain (ADD) * filter factor    close(c, set), in the order of worker ids
      -> Fold | OuterStep | Step                       -> Fold | OuterStep | Step, over the samples of the set

Both return changes (ps/store/changes.py) and touch no array: `Store.apply` carries a change out. The rule of the mode
picks the change: ADD adds updates, OUTER takes an outer step along their mean, OPTIMIZER steps the server's optimizer
with gradients, MIX (gossip) takes over the models that workers hand over at the end.

1. The update filters give each update a factor: 1, less where it is shortened, 0 where it is left out.
2. The samples of an update give its share. Under --robust all workers weigh alike.
3. Where updates are added, the gain scales their mean (ps/store/update_gain.py).
4. At a barrier with `max_grad_norm` the shard first reports the norm of its part of the mean to the coordinator. It folds
   the clock once the ledger has the norm over all shards (`clip`).

Rules
- `weight` says what an update was folded with: an acknowledgement carries it, and the worker's replica needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.modes import FoldRule, Mode
from narrows.protocols.effects import Log
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import unpack
from narrows.ps.filters.update_filters import UpdateFilters
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence
from narrows.ps.store.changes import (
    Change,
    Fold,
    MergeStoppedModels,
    OuterStep,
    PushedUpdate,
    SetFirstWeights,
    Step,
)
from narrows.ps.store.hyperparameter_vote import HyperparameterVote
from narrows.ps.store.update_gain import Gain

FAR_OFF = (
    "shard {}: the hyper-parameters of worker {} are far from those of the others: "
    "the server steps its updates with the hyper-parameters of the others"
)


def unpack_hyper(packed: bytes) -> tuple[bytes, tuple[int, ...], bytes]:
    """Unpack the `hyper` of a push.

    Returns:
        (packed parameter groups, tensors without a gradient, packed hyper-parameters of embedding rows or b"").
    """
    match unpack(packed):
        case [bytes(groups), list(absent), *more] if all(type(tensor) is int for tensor in absent):
            match more:
                case []:
                    return groups, tuple(absent), b""
                case [bytes(rates)]:
                    return groups, tuple(absent), rates
    raise RemoteProtocolError(
        "hyper-parameters are packed groups, a list of tensors without a gradient and, of rows, packed hyper-parameters"
    )


def rates_of(update: PushedUpdate) -> bytes:
    """Return the hyper-parameters of embedding rows that came with an update, b"" for none."""
    return unpack_hyper(update[0].hyper)[2] if update[0].hyper else b""


class Folding(Protocol):
    """How a shard folds whole updates: at once or at a barrier. A Folding returns changes and touches no array.

    Attributes:
        steps: Under --local-seconds, by clock that is not published yet: the most local steps of an update of it.
    """

    steps: dict[int, int]

    def accept(self, seat: PushSequence, update: PushedUpdate, publication: int) -> list[Change]:
        """Take the next whole update of a member.

        Args:
            seat: The member. Its update is number `seat.clock`; the caller raises that clock afterwards.
            update: The update.
            publication: The number of the next publication, the first that may contain the update.

        Returns:
            The changes to apply to the store now.
        """

    def weight(self, seat: PushSequence, clock: int) -> float | None:
        """Return the weight that accepted update `clock` was folded with.

        None while the barrier holds the update. 0 if the worker needs no weight: the update was folded at a barrier, a
        filter left it out, or it is so old that this list no longer has it.
        """

    def contains(self, seat: PushSequence, clock: int, publication: int) -> m.Weights:
        """Return (clock, weight) of each of this member's updates from `clock` on in the given publication."""

    def drop(self, keep: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """Drop what belongs to members that have left. The caller iterates to the end: a Folding may drop as it yields.

        Args:
            keep: Called with (worker, update); True if that held update must stay.

        Yields:
            (worker, update) of each update that is dropped.
        """


class FoldAtOnce:
    """Folds each update when it arrives. `keys`: the range [begin, end) of the shard."""

    def __init__(self, mode: Mode, assembler: PushAssembler, keys: Keys, gain: Gain, filters: UpdateFilters) -> None:
        self.mode, self.assembler, self.keys, self.gain, self.filters = mode, assembler, keys, gain, filters
        # worker -> its newest updates as (clock, weight, first publication that contains it)
        self.folded: dict[int, deque[tuple[int, float, int]]] = {}
        self.hypers, self.rates = HyperparameterVote(), HyperparameterVote()  # of the keys, and of embedding rows
        self.stopped = 0  # gossip: stopped workers that have handed over their model
        self.steps: dict[int, int] = {}

    def accept(self, seat: PushSequence, update: PushedUpdate, publication: int) -> list[Change]:
        (factor,) = self.filters.factors([(seat.worker, seat.clock, update)])
        if steps := update[0].steps:
            self.steps[seat.clock] = max(steps, self.steps.get(seat.clock, 0))
        samples = self.assembler.samples(seat.samples)
        share = self.filters.shares(samples)[samples.index((seat.worker, seat.samples))]
        weight = share * self.gain.factor * factor if self.mode.rule is FoldRule.ADD else share * factor
        # A few more than may be in flight: updates that some child's state lacks.
        kept = self.folded.setdefault(seat.worker, deque(maxlen=4 * self.mode.window))
        kept.append((seat.clock, weight, publication))
        if not factor:
            self.gain.forget(seat.worker)
            return []
        return [self._change(seat, update, weight, share, factor)]

    def _change(self, seat: PushSequence, update: PushedUpdate, weight: float, share: float, factor: float) -> Change:
        """Return the change that folds this update, by the rule of the mode."""
        rule = self.mode.rule
        said = rates_of(update)
        rates = self._hold(self.rates, seat, said) if said else b""
        if rule is FoldRule.ADD:
            return Fold(((weight, update),), ((seat.worker, share),), rates)
        if rule is FoldRule.OUTER:
            return OuterStep(((weight, update),), self.keys)
        if rule is FoldRule.MIX:
            return self._handed_over(seat, update)
        said, absent, _ = unpack_hyper(update[0].hyper)
        hyper = self._hold(self.hypers, seat, said)
        # The factor scales the gradient, so the optimizer's state sees it; the share scales the learning rate.
        return Step(((factor, update),), hyper, absent, scale=share, rates=rates)

    def _handed_over(self, seat: PushSequence, update: PushedUpdate) -> SetFirstWeights | MergeStoppedModels:
        """Take a model at the end of a gossip run.

        It is the last model, which one worker gives for all, or that of a stopped worker; these are averaged.
        """
        last = update[0].samples >= m.HandOver.LAST
        self.stopped += not last
        values: dict[str, object] = {"worker": seat.worker, "shard": self.filters.index}
        self.filters.logs.append(Log("handed over", values | {"last": last, "stopped": self.stopped}))
        return SetFirstWeights(update) if last or self.stopped == 1 else MergeStoppedModels(update, self.stopped)

    def _hold(self, hypers: HyperparameterVote, seat: PushSequence, said: bytes) -> bytes:
        """Return the hyper-parameters to step this update with; log it once for each worker if they are not its own."""
        hyper = hypers.hold(seat.worker, said)
        if hyper != said and seat.worker not in hypers.struck:
            hypers.struck.add(seat.worker)
            values = {"worker": seat.worker, "clock": seat.clock, "shard": self.filters.index}
            self.filters.logs.append(Log("hyper", values | {"text": FAR_OFF.format(self.filters.index, seat.worker)}))
        return hyper

    def weight(self, seat: PushSequence, clock: int) -> float | None:
        return next((weight for at, weight, _ in self.folded.get(seat.worker, ()) if at == clock), 0.0)

    def contains(self, seat: PushSequence, clock: int, publication: int) -> m.Weights:
        kept = self.folded.get(seat.worker, ())
        return tuple((at, weight) for at, weight, number in kept if at >= clock and number <= publication)

    def drop(self, keep: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        for worker in self.folded.keys() - self.assembler.seats.keys():
            del self.folded[worker]
        self.hypers.members(self.assembler.seats)
        self.rates.members(self.assembler.seats)
        return iter(())
