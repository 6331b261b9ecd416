"""The filters that an update must pass before a shard folds it. No I/O.

Rules
- In every run an update that is not finite is left out, and one that is absurdly long (`UnboundedNorms` in
  norm_clip.py). Its bytes were checked when they arrived (ps/shard/push_assembler.py). An update without samples has no
  values: it is left out without a log line.
- Each filter gives an update a factor: 1, less if it is shortened, or 0 if it is left out. The product counts.
- `NormClip` (norm_clip.py) judges the length of an update, `CosineFilter` (cosine_filter.py) its direction.
- A worker with an update that is left out or shortened is logged, once for each reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Sequence
from typing import Protocol

from narrows.compression import codecs
from narrows.protocols.effects import Log
from narrows.ps.filters.norm_clip import UnboundedNorms
from narrows.ps.filters.outlier_stats import OutlierStats
from narrows.ps.filters.update_sample import UpdateSample, UpdateSampler
from narrows.ps.store.changes import PushedUpdate

Pushed = Sequence[tuple[int, int, PushedUpdate]]  # (worker, clock, update)


class UpdateCheck(Protocol):
    """A filter that a flag turns on: `NormClip`, `CosineFilter`.

    Attributes:
        struck: By worker: its updates that were shortened or left out.
    """

    struck: Counter[int]

    def factors(self, sampled: Sequence[UpdateSample]) -> list[float]:
        """Return the factor of each update, from 0 to 1.

        Args:
            sampled: The samples of the updates; all lengths are finite. At a barrier the updates are one set.
        """

    def members(self, live: Container[int]) -> None:
        """Forget workers that have left."""

    def take(self) -> list[Log]:
        """Return the log lines since the last call."""


class UpdateFilters:
    """All filters of one shard."""

    def __init__(
        self,
        index: int,
        sampler: UpdateSampler,
        far: UnboundedNorms,
        checks: Sequence[UpdateCheck],
        alike: bool = False,
        equal: bool = False,
    ) -> None:
        """Filters that have seen no update.

        Args:
            index: The number of the shard.
            sampler: Takes the length and a sample of an update.
            far: Finds updates that are absurdly long.
            checks: The filters that flags turn on.
            alike: True if all workers that are not left out have equal shares, whatever samples they name (--robust).
                Without it and without `checks` no sample is taken.
            equal: True if shares are equal without a comparison of updates (--weigh equal).
        """
        self.index, self.sampler, self.far, self.checks, self.alike = index, sampler, far, checks, alike or equal
        self.outlier_stats = OutlierStats(index, sampler.at.size) if checks or alike else None
        last = [self.outlier_stats] if self.outlier_stats is not None else []
        self.watchers: list[UpdateCheck | OutlierStats] = [*checks, *last]
        self.void: Counter[int] = Counter()  # updates of each worker that were not finite, or far too long
        self.out: set[int] = set()  # workers whose newest update was left out
        self.logs: list[Log] = []

    def shares(self, samples: Sequence[tuple[int, int]]) -> list[float]:
        """Return the share in a mean of each (worker, its samples)."""
        if not self.alike:
            total = sum(count for _, count in samples)
            return [count / max(1, total) for _, count in samples]
        counting = sum(worker not in self.out for worker, _ in samples)
        return [1 / max(1, counting)] * len(samples)

    def factors(self, updates: Pushed) -> list[float]:
        """Return the factor of each (worker, clock, update): 0 if it is left out."""
        finite = [each for each in updates if not any(piece.codec == codecs.VOID for piece in each[2])]
        far = self.far.leaves_out([(worker, update.length) for worker, _, update in finite])
        sound = [each for each, too_long in zip(finite, far, strict=True) if not too_long]
        found = {(worker, clock): 1.0 for worker, clock, _ in sound}
        if self.outlier_stats is not None:
            sampled = [UpdateSample(worker, clock, *self.sampler(update)) for worker, clock, update in sound]
            sampled = [each for each in sampled if each.length < math.inf]  # inf: the square of the length overflowed
            factors = [1.0] * len(sampled)
            for check in self.checks:
                factors = [a * b for a, b in zip(factors, check.factors(sampled), strict=True)]
            self.outlier_stats.saw(sampled, factors)
            found = {each[:2]: factor for each, factor in zip(sampled, factors, strict=True)}
        for worker, clock, update in updates:
            if (worker, clock) not in found and not update.empty:
                self._leave_out(worker, clock)
            (self.out.add if not found.get((worker, clock)) else self.out.discard)(worker)
        return [found.get((worker, clock), 0.0) for worker, clock, _ in updates]

    def _leave_out(self, worker: int, clock: int) -> None:
        """Count an update that is left out, and log the first of each worker."""
        self.void[worker] += 1
        if self.void[worker] == 1:
            what = f"update {clock} of worker {worker} is not finite, or far too long, and is left out"
            text = f"shard {self.index}: {what}; more are only counted"
            self.logs.append(Log("void", {"worker": worker, "clock": clock, "shard": self.index, "text": text}))

    def members(self, live: Collection[int]) -> None:
        """Take over the members that are live now."""
        self.out &= set(live)
        self.far.members(live)
        for each in self.watchers:
            each.members(live)

    def take(self) -> list[Log]:
        """Return the log lines since the last call."""
        found, self.logs = self.logs, []
        for each in self.watchers:
            found += each.take()
        return found

    def lines(self) -> list[str]:
        """Return a line for each worker that compares its updates with the others'; [] if no flag has them compared."""
        return self.outlier_stats.lines() if self.outlier_stats is not None else []
