"""Folds whole updates into the model of a shard: each as it comes, or all of a clock at a barrier. No I/O.

How it works

    FoldAtOnce (ssp, async)                          FoldAtBarrier (bsp, local)
    accept(update)                                   accept(update): held, acknowledged HELD
      share  = samples / samples of all members      ... until the ledger closes clock c over a set of (worker, update)
      weight = share * gain * filter factor          close(c, set), in the order of worker ids
      -> Fold | OuterStep | Step                       -> Fold | OuterStep | Step, over the samples of the set

Both return changes (ps/store/changes.py) and touch no array: `Store.apply` carries a change out. The rule of the mode
picks the change: ADD adds updates, OUTER takes an outer step along their mean, OPTIMIZER steps the server's optimizer
with gradients, MIX (gossip) takes over the models that workers hand over at the end.

1. The update filters give each update a factor: 1, less where it is shortened, 0 where it is left out.
2. The samples of an update give its share. Under --robust all workers weigh alike.
3. Where updates are added, the gain scales their mean (ps/store/gain.py).
4. At a barrier with `max_grad_norm` the shard first tells the coordinator the norm of its part of the mean. The clock
   closes once the coordinator knows the norm over all shards (`clip`).

Rules
- `weight` says what an update was folded with: an acknowledgement carries it, and the worker's replica needs it.
- An update that no set will name, since its worker left, is dropped and logged.
- `early` sums a part at a barrier once all live members have sent it. The store begins anew if the set is another one
  in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.modes import Mode, Rule
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
    Terms,
)
from narrows.ps.store.gain import GONE, Gain
from narrows.ps.store.hyperparameter_vote import HyperparameterVote, most_agreed
from narrows.ps.store.reduction import WeightedMean

FAR_OFF = (
    "shard {}: the hyper-parameters of worker {} are far from what others say: its updates are stepped with theirs"
)
Shares = tuple[float, ...]
Clip = Callable[[Terms, int], float | None]  # of the mean of a clock, once the norm over all shards is known


def unpack_hyper(packed: bytes) -> tuple[bytes, tuple[int, ...], bytes]:
    """(packed groups, tensors without a gradient, packed hyper-parameters of rows or b"")."""
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
    """The hyper-parameters of rows that came with an update, b"": none did."""
    return unpack_hyper(update[0].hyper)[2] if update[0].hyper else b""


class Folding(Protocol):
    """A way in which a shard folds updates."""

    def accept(self, seat: PushSequence, update: PushedUpdate, publication: int) -> list[Change]:
        """Update `seat.clock` is here whole; the next publication is `publication`."""

    def weight(self, seat: PushSequence, clock: int) -> float | None:
        """Return the weight of accepted update `clock`: None while it is held, 0 where it is not known any more."""

    def contains(self, seat: PushSequence, clock: int, publication: int) -> m.Weights:
        """Updates of this member from `clock` on that are in publication `publication`, each with its weight."""

    def drop(self, keep: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """Forget what is held and not to be kept; (worker, update) of each."""


class FoldAtOnce:
    """Folds each update as it comes. `keys`: of the shard."""

    def __init__(self, mode: Mode, inbox: PushAssembler, keys: Keys, gain: Gain, screen: UpdateFilters) -> None:
        self.mode, self.inbox, self.keys, self.gain, self.screen = mode, inbox, keys, gain, screen
        self.folded: dict[int, deque[tuple[int, float, int]]] = {}  # by worker: clock, weight, publication that has it
        self.hypers, self.rates = HyperparameterVote(), HyperparameterVote()  # of keys, and of rows
        self.stopped = 0  # workers that were stopped and have handed over their model (gossip)

    def accept(self, seat: PushSequence, update: PushedUpdate, publication: int) -> list[Change]:
        (factor,) = self.screen.factors([(seat.worker, seat.clock, update)])
        samples = self.inbox.samples(seat.samples)
        share = self.screen.shares(samples)[samples.index((seat.worker, seat.samples))]
        weight = share * self.gain.factor * factor if self.mode.rule is Rule.ADD else share * factor
        # A few more than may be in flight: those that some child's state lacks.
        kept = self.folded.setdefault(seat.worker, deque(maxlen=4 * self.mode.window))
        kept.append((seat.clock, weight, publication))
        if not factor:
            self.gain.forget(seat.worker)
            return []
        return [self._change(seat, update, weight, share, factor)]

    def _change(self, seat: PushSequence, update: PushedUpdate, weight: float, share: float, factor: float) -> Change:
        rule = self.mode.rule
        said = rates_of(update)
        rates = self._hold(self.rates, seat, said) if said else b""
        if rule is Rule.ADD:
            return Fold(((weight, update),), ((seat.worker, share),), rates)
        if rule is Rule.OUTER:
            return OuterStep(((weight, update),), self.keys)
        if rule is Rule.MIX:
            return self._handed_over(seat, update)
        said, absent, _ = unpack_hyper(update[0].hyper)
        hyper = self._hold(self.hypers, seat, said)
        # The optimizer's state sees what is shortened.
        return Step(((factor, update),), hyper, absent, scale=share, rates=rates)

    def _handed_over(self, seat: PushSequence, update: PushedUpdate) -> SetFirstWeights | MergeStoppedModels:
        """The last model, of one worker for all, or that of a worker that is stopped: of these, the mean."""
        last = update[0].samples >= m.HandOver.LAST
        self.stopped += not last
        told: dict[str, object] = {"worker": seat.worker, "shard": self.screen.index}
        self.screen.logs.append(Log("handed over", told | {"last": last, "stopped": self.stopped}))
        return SetFirstWeights(update) if last or self.stopped == 1 else MergeStoppedModels(update, self.stopped)

    def _hold(self, hypers: HyperparameterVote, seat: PushSequence, said: bytes) -> bytes:
        """Those that this update is stepped with; it is told where they are not its own."""
        hyper = hypers.hold(seat.worker, said)
        if hyper != said and seat.worker not in hypers.struck:
            hypers.struck.add(seat.worker)
            told = {"worker": seat.worker, "clock": seat.clock, "shard": self.screen.index}
            self.screen.logs.append(Log("hyper", told | {"text": FAR_OFF.format(self.screen.index, seat.worker)}))
        return hyper

    def weight(self, seat: PushSequence, clock: int) -> float | None:
        return next((weight for at, weight, _ in self.folded.get(seat.worker, ()) if at == clock), 0.0)

    def contains(self, seat: PushSequence, clock: int, publication: int) -> m.Weights:
        kept = self.folded.get(seat.worker, ())
        return tuple((at, weight) for at, weight, number in kept if at >= clock and number <= publication)

    def drop(self, keep: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        for worker in self.folded.keys() - self.inbox.seats.keys():
            del self.folded[worker]
        self.hypers.members(self.inbox.seats)
        self.rates.members(self.inbox.seats)
        return iter(())


class FoldAtBarrier:
    """Folds the sets that the ledger names. `turn`: the keys whose turn a clock is. `mean`: where sums may be taken early."""

    def __init__(
        self,
        mode: Mode,
        inbox: PushAssembler,
        turn: Callable[[int], Keys],
        mean: WeightedMean,
        gain: Gain,
        screen: UpdateFilters,
    ) -> None:
        self.mode, self.inbox, self.turn, self.mean, self.gain, self.screen = mode, inbox, turn, mean, gain, screen
        self.held: dict[int, dict[int, PushedUpdate]] = {}  # update -> worker
        self.closing: dict[int, tuple[Terms, Shares]] = {}  # clock -> its set, which waits for the norm
        self.hyper_differs = False  # between workers of one set; said once
        self.samples = 0  # of the newest set

    def accept(self, seat: PushSequence, update: PushedUpdate, publication: int) -> list[Change]:
        self.held.setdefault(seat.clock, {})[seat.worker] = update
        return []

    def weight(self, seat: PushSequence, clock: int) -> float | None:
        return 0.0 if clock < seat.settled else None

    def contains(self, seat: PushSequence, clock: int, publication: int) -> m.Weights:
        return ()

    def early(self, part: int) -> None:
        """Take the mean of one part as soon as all live members have sent it, while other parts are still on their way.

        Most likely they are the set that the clock is closed over; the store looks whether they were, and else begins anew.
        """
        pieces: dict[int, m.Push] = {}
        for _, seat in sorted(self.inbox.seats.items()):
            accepted = self.held.get(seat.taken, {}).get(seat.worker)
            found = dict(enumerate(accepted)) if accepted else seat.partial.get(seat.taken, {})
            if part not in found:
                return
            pieces[seat.worker] = found[part]
        shares = self.screen.shares([(worker, piece.samples) for worker, piece in pieces.items()])
        self.mean.early(list(zip(shares, pieces.values(), strict=True)))

    def _take(self, worker: int, update: int) -> PushedUpdate:
        by_worker = self.held[update]
        taken = by_worker.pop(worker)
        if not by_worker:
            del self.held[update]
        return taken

    def close(self, clock: int, pairs: Iterable[m.Pair], clip: Clip) -> list[Change] | None:
        """The ledger closes a clock over these (worker, update); None: a norm is awaited."""
        if clock not in self.closing:
            self.closing[clock] = self._terms(clock, list(pairs))
        terms, shares = self.closing[clock]
        changes: list[Change] = []
        if self.mode.rule is Rule.OPTIMIZER:
            shrink = clip(terms, clock)  # where nothing is left here too: the other shards wait for our norm
            if shrink is None:
                return None
            changes = [Step(terms, *self._hyper(terms), shrink=shrink, rates=self._rates(terms))] if terms else []
        elif terms:
            changes = [self._fold(terms, shares) if self.mode.rule is Rule.ADD else OuterStep(terms, self.turn(clock))]
        del self.closing[clock]
        return changes

    def _fold(self, terms: Terms, shares: Shares) -> Fold:
        workers = [update[0].worker for _, update in terms]  # type: ignore[attr-defined]
        seated = [worker if worker in self.inbox.seats else GONE for worker in workers]
        scaled = tuple((share * self.gain.factor, update) for share, update in terms)
        return Fold(scaled, tuple(zip(seated, shares, strict=True)), self._rates(terms))

    def _terms(self, clock: int, pairs: list[m.Pair]) -> tuple[Terms, Shares]:
        """Return the updates of a set that count, each with its weight; and their shares before any was shortened."""
        missing = [(worker, update) for worker, update in pairs if worker not in self.held.get(update, {})]
        assert not missing, f"updates {missing} of the set of clock {clock} are not here"
        updates = [self._take(worker, update) for worker, update in pairs]
        for worker, update in pairs:
            if worker in self.inbox.seats:
                self.inbox.seats[worker].taken = update + 1
        self.samples = sum(update[0].samples for update in updates)
        factors = self.screen.factors([(*pair, update) for pair, update in zip(pairs, updates, strict=True)])
        shares = self.screen.shares(
            [(worker, update[0].samples) for (worker, _), update in zip(pairs, updates, strict=True)]
        )
        for worker in [worker for (worker, _), factor in zip(pairs, factors, strict=True) if not factor]:
            self.gain.forget(worker)
        found = [each for each in zip(shares, factors, updates, strict=True) if each[1]]
        return tuple((share * factor, update) for share, factor, update in found), tuple(each[0] for each in found)

    def _hyper(self, terms: Terms) -> tuple[bytes, tuple[int, ...]]:
        """Hyper-parameters that most agree with, and the tensors that no one has a gradient of."""
        values = [unpack_hyper(update[0].hyper) for _, update in terms]  # type: ignore[attr-defined]
        absent = tuple(sorted(set.intersection(*(set(absent) for _, absent, _ in values))))
        return self._agreed([hyper for hyper, *_ in values]), absent

    def _rates(self, terms: Terms) -> bytes:
        """Hyper-parameters of rows that most agree with, b"": nobody has named any."""
        said = [rates for _, update in terms if (rates := rates_of(update))]  # type: ignore[arg-type]
        return self._agreed(said) if said else b""

    def _agreed(self, said: list[bytes]) -> bytes:
        self.hyper_differs |= any(hyper != said[0] for hyper in said)
        return said[most_agreed(said)]

    def drop(self, keep: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        for update, by_worker in list(self.held.items()):
            for worker in [worker for worker in by_worker if not keep(worker, update)]:
                self._take(worker, update)
                yield worker, update
