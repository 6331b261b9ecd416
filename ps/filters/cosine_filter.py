"""Where the updates of each worker lead beside those of the others (--robust cosine). No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

import numpy as np

from narrows.protocols.config.robust import LEAST as WORKERS
from narrows.protocols.effects import Log
from narrows.ps.filters.update_sample import UpdateSample
from narrows.ps.store.changes import FloatArray

RECENT = (
    128  # updates of a worker that its direction is the mean of: what one shows, of gradients most of all, is noise
)
LEAST = 8  # of them before it is known
AGREE = 0.05  # the mean cosine among others from which on they say something
SHARE = 0.25  # of it, which a worker's own with them has at least
SURE = 0.04  # a cosine at 4,096 keys is right to 0.02
TINY = 1e-30


class CosineFilter:
    """Whether the updates of a worker lead where those of the others lead.

    m_i is the mean of the last 128 updates of worker i, each scaled to length 1; older ones fade. All are taken at a sample of
    the keys. own is the mean cosine of m_i with each m_j, others is the one between those. Worker i is left out while

        own < others / 4 - 0.04    and    others > 0.05

    So each worker is one voice, whatever it sends. Near a minimum the updates of honest workers cancel out, and every one
    opposes the rest; but then the rest do not agree, and nobody is left out.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.means: dict[int, FloatArray] = {}  # by worker
        self.seen: Counter[int] = Counter()
        self.struck: Counter[int] = Counter()
        self.logs: list[Log] = []

    def factors(self, looks: Sequence[UpdateSample]) -> list[float]:
        for look in looks:
            self._saw(look.worker, look.sample)
        cosines = self.cosines()
        return [self._factor(look.worker, look.clock, cosines) for look in looks]

    def _saw(self, worker: int, values: FloatArray) -> None:
        length = float(np.linalg.norm(values.astype(np.float64)))
        if not length:
            return  # leads nowhere
        self.seen[worker] += 1
        mean = self.means.setdefault(worker, np.zeros_like(values))
        mean += (values / np.float32(length) - mean) / np.float32(min(self.seen[worker], RECENT))

    def cosines(self) -> dict[int, tuple[float, float]]:
        """Return each known worker's mean cosine with the others, and that among those; {} while too few are known."""
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
            told = {"worker": worker, "clock": clock, "shard": self.index, "cosine": round(own, 4), "text": text}
            self.logs.append(Log("against", told))
        return 0.0

    def members(self, live: Container[int]) -> None:
        for worker in [worker for worker in self.means if worker not in live]:
            del self.means[worker], self.seen[worker]
