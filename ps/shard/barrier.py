"""The barrier of a shard: it holds the updates of a clock until the clock is closed, then folds them together. No I/O.

folding.py has the picture of both ways to fold.

Rules
- A shard holds an update until the ledger closes a clock over a set that names it (ps/coordinator/clocks.py).
- It folds the updates of a set in the order of worker ids, each with its samples over those of the set.
- An update that no set will name, since its worker left, is dropped and logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.modes import FoldRule, Mode
from narrows.ps.filters.update_filters import UpdateFilters
from narrows.ps.shard.folding import rates_of, unpack_hyper
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence
from narrows.ps.store.changes import Change, Fold, OuterStep, PushedUpdate, Step, Terms
from narrows.ps.store.hyperparameter_vote import most_agreed
from narrows.ps.store.update_gain import GONE, Gain

Shares = tuple[float, ...]
# of the mean of a clock: the factor that clips it, None until the norm over all shards is known
Clip = Callable[[Terms, int], float | None]


class FoldAtBarrier:
    """Folds the sets that the ledger names."""

    def __init__(
        self,
        mode: Mode,
        assembler: PushAssembler,
        turn: Callable[[int], Keys],
        gain: Gain,
        filters: UpdateFilters,
    ) -> None:
        """A barrier that holds no update.

        Args:
            mode: The mode of the run.
            assembler: The assembler, which knows the members.
            turn: Gives the keys [begin, end) that are exchanged at a clock.
            gain: The gain of the shard.
            filters: The filters that each update of a set passes.
        """
        self.mode, self.assembler, self.turn, self.gain, self.filters = mode, assembler, turn, gain, filters
        self.held: dict[int, dict[int, PushedUpdate]] = {}  # update's clock -> worker -> update; no entry is empty
        # clock -> its set, while the norm over all shards is awaited
        self.closing: dict[int, tuple[Terms, Shares]] = {}
        self.hyper_differs = False  # True once workers of one set have named different hyper-parameters; logged once
        self.samples = 0  # samples of the newest set
        self.steps: dict[int, int] = {}  # as in `Folding`

    def accept(self, seat: PushSequence, update: PushedUpdate, publication: int) -> list[Change]:
        self.held.setdefault(seat.clock, {})[seat.worker] = update
        return []

    def weight(self, seat: PushSequence, clock: int) -> float | None:
        return 0.0 if clock < seat.settled else None

    def contains(self, seat: PushSequence, clock: int, publication: int) -> m.Weights:
        return ()

    def _take(self, worker: int, update: int) -> PushedUpdate:
        """Remove a held update and return it."""
        by_worker = self.held[update]
        taken = by_worker.pop(worker)
        if not by_worker:
            del self.held[update]
        return taken

    def close(self, clock: int, pairs: Iterable[m.Pair], clip: Clip) -> list[Change] | None:
        """Close a clock over the set that the ledger names.

        Args:
            clock: The clock.
            pairs: The (worker, update) of the set, in the order of worker ids.
            clip: Gives the factor that clips the mean.

        Returns:
            The changes of the store, or None while the norm over all shards is awaited.
        """
        if clock not in self.closing:
            self.closing[clock] = self._terms(clock, list(pairs))
        terms, shares = self.closing[clock]
        changes: list[Change] = []
        if self.mode.rule is FoldRule.OPTIMIZER:
            shrink = clip(terms, clock)  # called without terms too: the other shards wait for our norm
            if shrink is None:
                return None
            changes = [Step(terms, *self._hyper(terms), shrink=shrink, rates=self._rates(terms))] if terms else []
        elif terms:
            changes = [
                self._fold(terms, shares) if self.mode.rule is FoldRule.ADD else OuterStep(terms, self.turn(clock))
            ]
        del self.closing[clock]
        return changes

    def _fold(self, terms: Terms, shares: Shares) -> Fold:
        workers = [update[0].worker for _, update in terms]  # type: ignore[attr-defined]
        seated = [worker if worker in self.assembler.seats else GONE for worker in workers]
        scaled = tuple((share * self.gain.factor, update) for share, update in terms)
        return Fold(scaled, tuple(zip(seated, shares, strict=True)), self._rates(terms))

    def _terms(self, clock: int, pairs: list[m.Pair]) -> tuple[Terms, Shares]:
        """Take a set out of the barrier.

        Returns:
            (share * filter factor, update) of each update that counts, and the shares alone, as they were before a
            filter shortened an update.
        """
        missing = [(worker, update) for worker, update in pairs if worker not in self.held.get(update, {})]
        assert not missing, f"updates {missing} of the set of clock {clock} are not here"
        updates = [self._take(worker, update) for worker, update in pairs]
        self.assembler.folded(pairs)
        self.samples = sum(update[0].samples for update in updates)
        if steps := max((update[0].steps for update in updates), default=0):
            self.steps[clock] = steps
        factors = self.filters.factors([(*pair, update) for pair, update in zip(pairs, updates, strict=True)])
        shares = self.filters.shares(
            [(worker, update[0].samples) for (worker, _), update in zip(pairs, updates, strict=True)]
        )
        for worker in [worker for (worker, _), factor in zip(pairs, factors, strict=True) if not factor]:
            self.gain.forget(worker)
        found = [each for each in zip(shares, factors, updates, strict=True) if each[1]]
        return tuple((share * factor, update) for share, factor, update in found), tuple(each[0] for each in found)

    def _hyper(self, terms: Terms) -> tuple[bytes, tuple[int, ...]]:
        """Return the hyper-parameters that most of the set agree with, and the tensors without any gradient."""
        values = [unpack_hyper(update[0].hyper) for _, update in terms]  # type: ignore[attr-defined]
        absent = tuple(sorted(set.intersection(*(set(absent) for _, absent, _ in values))))
        return self._agreed([hyper for hyper, *_ in values]), absent

    def _rates(self, terms: Terms) -> bytes:
        """Return the rows' hyper-parameters that most of the set agree with; b"" if no update names any."""
        said = [rates for _, update in terms if (rates := rates_of(update))]  # type: ignore[arg-type]
        return self._agreed(said) if said else b""

    def _agreed(self, said: list[bytes]) -> bytes:
        """Return the packed hyper-parameters that most agree with; note if any differ."""
        self.hyper_differs |= any(hyper != said[0] for hyper in said)
        return said[most_agreed(said)]

    def drop(self, keep: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        for update, by_worker in list(self.held.items()):
            for worker in [worker for worker in by_worker if not keep(worker, update)]:
                self._take(worker, update)
                yield worker, update
