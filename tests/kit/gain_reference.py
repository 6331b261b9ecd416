"""The gain of a mean of updates as docs/design/gain.md defines it, in plain NumPy, over whole updates."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def squared_agreement(shares: list[float], sums: list[Array]) -> float:
    """Return |mean|^2 over the weighted mean of |u|^2, at least that of unrelated updates; 0: it is not defined."""
    weights = [share / sum(shares) for share in shares]
    mean = sum(w * u for w, u in zip(weights, sums, strict=True))
    squares = sum(w * float(np.sum(u * u)) for w, u in zip(weights, sums, strict=True))
    square = float(np.sum(mean * mean))
    if not 0 < square <= squares * (1 + 1e-12) < np.inf:
        return 0.0
    return max(square / squares, sum(w * w for w in weights))


class TrueGain:
    """The gain by definition; `saw` takes each folded update and its worker."""

    def __init__(self, degree: float) -> None:
        self.degree, self.factor, self.agreement = degree, 1.0, 0.0
        self.going: dict[Hashable, list[Array]] = {}
        self.over: dict[Hashable, Array] = {}
        self.shares: dict[Hashable, float] = {}

    def forget(self, who: Hashable) -> None:
        """Drop the window of a worker whose update was left out. It begins a new window when it counts again."""
        self.going.pop(who, None)
        self.over.pop(who, None)

    def saw(self, who: Hashable, live: Collection[Hashable], share: float, update: npt.NDArray[np.float32]) -> None:
        """Take a folded update.

        Args:
            who: the worker.
            live: all workers whose updates count at this time.
            share: the weight of the update.
            update: the whole update.
        """
        for gone in [each for each in self.going if each not in live]:
            del self.going[gone]
            self.over.pop(gone, None)
        self.shares[who] = share
        window = self.going.setdefault(who, [])
        window.append(update.astype(np.float64))
        if len(window) < 8:
            return
        self.over[who], self.going[who] = np.sum(window, axis=0), []
        if len(self.going) > 1 and self.over.keys() == self.going.keys():
            order = list(self.over)
            square = squared_agreement([self.shares[each] for each in order], [self.over[each] for each in order])
            self.over.clear()
            if square:
                measured = square**0.5
                self.agreement = (self.agreement * measured) ** 0.5 if self.agreement else measured
                self.factor = self.agreement ** (self.degree - 1)
