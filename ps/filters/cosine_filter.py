"""The cosine filter: leaves out a worker whose updates point away from the others' (--robust cosine). No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

import numpy as np

from narrows.protocols.config.settings import LEAST as WORKERS
from narrows.protocols.effects import Log
from narrows.ps.filters.update_sample import UpdateSample
from narrows.ps.store.changes import FloatArray

# updates of a worker whose directions are averaged: a single one, of gradients above all, is mostly noise
RECENT = 128
LEAST = 8  # updates of a worker before its mean direction counts as known
AGREE = 0.05  # the mean cosine among the others from which on their direction counts
SHARE = 0.25  # a worker's own cosine must reach this share of the others'
SURE = 0.04  # margin: a cosine at 4,096 keys is right to 0.02
TINY = 1e-30  # least length that a mean direction is divided by


class CosineFilter:
    """Leaves out the updates of a worker whose mean direction differs from the direction of the others.

    m_i is the mean of the last 128 updates of worker i, each scaled to length 1; older updates fade. All are taken at a
    sample of the keys. own is the mean cosine of m_i with each m_j, others is the mean cosine among those m_j. Worker i
    is left out while

        own < others / 4 - 0.04    and    others > 0.05

    So each worker has one vote, whatever the length of its updates. Near a minimum the updates of honest workers cancel
    out, and each opposes the sum of the rest; but then the rest do not agree either, and no worker is left out.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.means: dict[int, FloatArray] = {}  # mean direction of each worker at the sample
        self.seen: Counter[int] = Counter()  # updates of each worker so far
        self.struck: Counter[int] = Counter()  # updates of each worker that were left out
        self.logs: list[Log] = []

    def factors(self, sampled: Sequence[UpdateSample]) -> list[float]:
        """Return 1 for each update that counts, 0 for each that is left out."""
        for update in sampled:
            self._saw(update.worker, update.sample)
        cosines = self.cosines()
        return [self._factor(update.worker, update.clock, cosines) for update in sampled]

    def _saw(self, worker: int, values: FloatArray) -> None:
        """Take an update into the worker's mean direction."""
        length = float(np.linalg.norm(values.astype(np.float64)))
        if not length:
            return  # an update of zeros has no direction
        self.seen[worker] += 1
        mean = self.means.setdefault(worker, np.zeros_like(values))
        mean += (values / np.float32(length) - mean) / np.float32(min(self.seen[worker], RECENT))

    def cosines(self) -> dict[int, tuple[float, float]]:
        """Return worker -> (mean cosine with the others, mean cosine among those); {} while too few are known."""
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
        """Return 0 if the worker's updates are left out at present, else 1. Log the first one of each worker."""
        if worker not in cosines:
            return 1.0
        own, others = cosines[worker]
        if others <= AGREE or own >= SHARE * others - SURE:
            return 1.0
        self.struck[worker] += 1
        if self.struck[worker] == 1:
            text = (
                f"shard {self.index}: the updates of worker {worker} do not lead where the others lead (at clock {clock} their "
                f"cosine is {own:.2f}, among the others {others:.2f}); they are left out meanwhile"
            )
            values = {"worker": worker, "clock": clock, "shard": self.index, "cosine": round(own, 4), "text": text}
            self.logs.append(Log("against", values))
        return 0.0

    def take(self) -> list[Log]:
        """Return the log lines since the last call."""
        found, self.logs = self.logs, []
        return found

    def members(self, live: Container[int]) -> None:
        """Forget workers that have left."""
        for worker in [worker for worker in self.means if worker not in live]:
            del self.means[worker], self.seen[worker]
