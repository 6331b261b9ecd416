"""What an update must stand before a shard folds it. No I/O.

Rules
- Each check gives a factor: 1, less, or 0 for an update that is left out. The product counts.
- `Limit` (limit.py) looks at the length of an update, `Directions` at where it leads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import numpy as np

from narrows.protocols.effects import Log
from narrows.protocols.robust import LEAST as WORKERS
from narrows.ps.changes import FloatArray

Pushed = Sequence[tuple[int, int, Any]]  # worker, clock, update

RECENT = (
    128  # updates of a worker that its direction is the mean of: what one shows, of gradients most of all, is noise
)
LEAST = 8  # of them before it is known
AGREE = 0.05  # the mean cosine among others from which on they say something
SHARE = 0.25  # of it, which a worker's own with them has at least
SURE = 0.04  # a cosine at 4,096 keys is right to 0.02
TINY = 1e-30


class Check(Protocol):
    """`logs`: what is to be told. `opposing`: workers that are left out for now."""

    logs: list[Log]
    opposing: set[int]

    def factors(self, updates: Pushed) -> list[float]:
        """By what each update is scaled. At a barrier they are those of one set."""

    def members(self, live: Container[int]) -> None:
        """Forget who left."""


class Directions:
    """Whether the updates of a worker lead where those of the others lead (--robust cosine).

    m_i is the mean of the last 128 updates of worker i, each scaled to length 1; older ones fade. All are taken at a sample of
    the keys. own is the mean cosine of m_i with each m_j, others is the one between those. Worker i is left out while

        own < others / 4 - 0.04    and    others > 0.05

    So each worker is one voice, whatever it sends. Near a minimum the updates of honest workers cancel out, and every one
    opposes the rest; but then the rest do not agree, and nobody is left out.

    look: an update's values at the sample, float32[n].
    """

    def __init__(self, index: int, look: Callable[[Any], FloatArray]) -> None:
        self.index, self.look = index, look
        self.means: dict[int, FloatArray] = {}  # by worker
        self.seen: Counter[int] = Counter()
        self.newest: dict[int, float] = {}  # cosine, by worker
        self.opposing: set[int] = set()  # workers whose newest update was left out
        self.struck: Counter[int] = Counter()  # updates of each worker that were left out
        self.logs: list[Log] = []

    def factors(self, updates: Pushed) -> list[float]:
        for worker, _, update in updates:
            self._saw(worker, self.look(update))
        cosines = self.cosines()
        return [self._factor(worker, clock, cosines) for worker, clock, _ in updates]

    def _saw(self, worker: int, values: FloatArray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            length = float(np.linalg.norm(values))
        if not 0 < length < math.inf:
            return  # leads nowhere
        self.seen[worker] += 1
        mean = self.means.setdefault(worker, np.zeros_like(values))
        mean += (values / np.float32(length) - mean) / np.float32(min(self.seen[worker], RECENT))

    def cosines(self) -> dict[int, tuple[float, float]]:
        """Of each worker that is known: the mean cosine with the others, and that among those. Of none while too few are."""
        known = [worker for worker in sorted(self.means) if self.seen[worker] >= LEAST]
        count = len(known)
        if count < WORKERS:
            return {}
        means = np.stack([self.means[worker] for worker in known]).astype(np.float64)
        units = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), TINY)
        pairs = units @ units.T
        np.fill_diagonal(pairs, 0.0)
        own = pairs.sum(1)
        others = (own.sum() - 2 * own) / ((count - 1) * (count - 2))
        return dict(zip(known, zip((own / (count - 1)).tolist(), others.tolist(), strict=True), strict=True))

    def _factor(self, worker: int, clock: int, cosines: dict[int, tuple[float, float]]) -> float:
        self.opposing.discard(worker)
        if worker not in cosines:
            return 1.0
        own, others = cosines[worker]
        self.newest[worker] = own
        if others <= AGREE or own >= SHARE * others - SURE:
            return 1.0
        self.opposing.add(worker)
        self.struck[worker] += 1
        if self.struck[worker] == 1:
            text = (
                f"shard {self.index}: the updates of worker {worker} do not lead where the others lead (at clock {clock} their "
                f"cosine is {own:.2f}, among the others {others:.2f}); they are left out meanwhile"
            )
            told = {"worker": worker, "clock": clock, "shard": self.index, "cosine": round(own, 4), "text": text}
            self.logs.append(Log("against", told))
        return 0.0

    def members(self, live: Container[int]) -> None:
        for worker in [worker for worker in self.means if worker not in live]:
            del self.means[worker], self.seen[worker]
            self.opposing.discard(worker)
            if (cosine := self.newest.pop(worker, None)) is None:
                continue
            out, where = self.struck[worker], {"worker": worker, "shard": self.index}
            text = f"shard {self.index}: worker {worker} left; its updates had a cosine of {cosine:.2f} with those of the rest"
            text += f", and {out} were left out" if out else ""
            self.logs.append(Log("direction", where | {"cosine": round(cosine, 4), "left_out": out, "text": text}))


class Screen:
    """All checks of one shard. `alike`: workers that are not left out have one share each, whatever samples they name."""

    def __init__(self, checks: Sequence[Check], alike: bool = False) -> None:
        self.checks, self.alike = checks, alike

    def shares(self, samples: Sequence[tuple[int, int]]) -> list[float]:
        """Of each (worker, its samples) in a mean."""
        if not self.alike:
            total = sum(count for _, count in samples)
            return [count / total for _, count in samples]
        opposing = set().union(*(check.opposing for check in self.checks))
        counting = sum(worker not in opposing for worker, _ in samples)
        return [1 / max(1, counting)] * len(samples)

    def factors(self, updates: Pushed) -> list[float]:
        found = [1.0] * len(updates)
        for check in self.checks:
            found = [a * b for a, b in zip(found, check.factors(updates), strict=True)]
        return found

    def members(self, live: Container[int]) -> None:
        for check in self.checks:
            check.members(live)

    def take(self) -> list[Log]:
        """What is to be told."""
        found = []
        for check in self.checks:
            found += check.logs
            check.logs = []
        return found
