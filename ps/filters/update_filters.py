"""The checks that an update must pass before a shard folds it. No I/O.

Rules
- One that is not finite is left out, in every run, and so is one that is absurdly long (`UnboundedNorms` in norm_clip.py):
  its bytes were looked at when they came (ps/shard/push_assembler.py). One without samples has no values: it is left
  out, and is not told of.
- Each check gives a factor: 1, less, or 0 for an update that is left out. The product counts.
- `NormClip` (norm_clip.py) looks at the length of an update, `CosineFilter` (cosine_filter.py) at where it leads.
- A worker with an update that is left out or shortened is named, once for each reason.
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

Pushed = Sequence[tuple[int, int, PushedUpdate]]  # worker, clock


class UpdateCheck(Protocol):
    """`logs`: what is to be told. `struck`: updates of each worker that were shortened or left out."""

    logs: list[Log]
    struck: Counter[int]

    def factors(self, looks: Sequence[UpdateSample]) -> list[float]:
        """By what each update is scaled; all are finite. At a barrier they are those of one set."""

    def members(self, live: Container[int]) -> None:
        """Forget who left."""


class UpdateFilters:
    """All checks of shard `index`. `alike`: workers that are not left out have one share each, whatever samples they name.
    Without it and `checks` no update is looked at."""

    def __init__(
        self, index: int, looks: UpdateSampler, far: UnboundedNorms, checks: Sequence[UpdateCheck], alike: bool = False
    ) -> None:
        self.index, self.looks, self.far, self.checks, self.alike = index, looks, far, checks, alike
        self.beside = OutlierStats(index, looks.at.size) if checks or alike else None
        self.void: Counter[int] = Counter()  # updates of each worker that were not finite, or far too long
        self.out: set[int] = set()  # workers whose newest update was left out
        self.logs: list[Log] = []

    def shares(self, samples: Sequence[tuple[int, int]]) -> list[float]:
        """Return the share of each (worker, its samples) in a mean."""
        if not self.alike:
            total = sum(count for _, count in samples)
            return [count / max(1, total) for _, count in samples]
        counting = sum(worker not in self.out for worker, _ in samples)
        return [1 / max(1, counting)] * len(samples)

    def factors(self, updates: Pushed) -> list[float]:
        """By what each update is scaled: 0 where it is left out."""
        finite = [each for each in updates if not any(piece.codec == codecs.VOID for piece in each[2])]
        far = self.far.leaves_out([(worker, update.length) for worker, _, update in finite])
        sound = [each for each, too_long in zip(finite, far, strict=True) if not too_long]
        found = {(worker, clock): 1.0 for worker, clock, _ in sound}
        if self.beside is not None:
            looks = [UpdateSample(worker, clock, *self.looks(update)) for worker, clock, update in sound]
            looks = [look for look in looks if look.length < math.inf]  # which it is where it cannot be squared
            factors = [1.0] * len(looks)
            for check in self.checks:
                factors = [a * b for a, b in zip(factors, check.factors(looks), strict=True)]
            self.beside.saw(looks, factors)
            found = {look[:2]: factor for look, factor in zip(looks, factors, strict=True)}
        for worker, clock, update in updates:
            if (worker, clock) not in found and not update.empty:
                self._leave_out(worker, clock)
            (self.out.add if not found.get((worker, clock)) else self.out.discard)(worker)
        return [found.get((worker, clock), 0.0) for worker, clock, _ in updates]

    def _leave_out(self, worker: int, clock: int) -> None:
        self.void[worker] += 1
        if self.void[worker] == 1:
            what = f"update {clock} of worker {worker} is not finite, or far too long, and is left out"
            text = f"shard {self.index}: {what}; more are only counted"
            self.logs.append(Log("void", {"worker": worker, "clock": clock, "shard": self.index, "text": text}))

    def members(self, live: Collection[int]) -> None:
        self.out &= set(live)
        self.far.members(live)
        for each in self._all:
            each.members(live)

    @property
    def _all(self) -> list[UpdateCheck | OutlierStats]:
        return [*self.checks, *([self.beside] if self.beside is not None else [])]

    def take(self) -> list[Log]:
        """Return the lines for the console and the record since the last call."""
        found, self.logs = self.logs, []
        for each in self._all:
            found += each.logs
            each.logs = []
        return found

    def lines(self) -> list[str]:
        """Say what each worker sends beside the others, where that is looked at."""
        return self.beside.lines() if self.beside is not None else []
