"""The mean of the updates of a clock, at the keys of one shard. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from narrows.compression import codecs
from narrows.compression.codecs import PieceLike
from narrows.protocols.config.key_ranges import Keys
from narrows.ps.store.changes import FloatArray, Terms, Update

AT_ONCE = 1 << 14  # keys that are sorted in one call, so that their values stay in the CPU's cache

Pieces = list[tuple[float, PieceLike]]  # (weight, piece) of the same keys, in the order in which they are added


class WeightedMean:
    """The sum of weight * update, float32[size]. The memory is kept: to allocate it costs more than the sum.

    A part may be summed as soon as all members have sent it, while other parts are still on their way (`early`). `of`
    checks that these were the right terms, and sums again if not.
    """

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size = begin, size
        self.total: FloatArray | None = None
        self.taken: dict[Keys, Pieces] = {}  # keys [begin, end) -> the pieces that `total` is the sum of there

    def early(self, pieces: Pieces) -> None:
        """Sum one part of each update."""
        keys = {(piece.begin, piece.end) for _, piece in pieces}
        if len(keys) == 1:
            self._sum(tuple((weight, [piece]) for weight, piece in pieces))
            self.taken[keys.pop()] = pieces

    def of(self, terms: Terms) -> FloatArray:
        """Return the sum of `terms` at the keys that they have. The array is valid until the next call."""
        wanted: dict[Keys, Pieces] = {}
        for weight, update in terms:
            for piece in update:
                if piece.codec != codecs.ROWS:  # which have no keys
                    wanted.setdefault((piece.begin, piece.end), []).append((weight, piece))
        if not all(_same(self.taken.get(keys, []), pieces) for keys, pieces in wanted.items()):
            self._sum(terms)
            self.taken = wanted
        assert self.total is not None
        return self.total

    def __getstate__(self) -> dict[str, Any]:
        """Leave the sums out: `of` makes them again of the same terms, in the same order."""
        return {**vars(self), "total": None, "taken": {}}

    def clear(self) -> None:
        """Drop the references to the terms: they are folded."""
        self.taken.clear()

    def _sum(self, terms: Terms) -> None:
        """Sum the terms into `total`, in their order."""
        if self.total is None:
            self.total = np.empty(self.size, np.float32)
        for turn, (weight, update) in enumerate(terms):
            for piece in update:
                (codecs.add if turn else codecs.put)(piece, weight, self.total, self.begin)


class TrimmedMean(WeightedMean):
    """The coordinate-wise trimmed mean of weight * update, times the number of updates (1803.01498, def. 2).

    At each key the lowest ceil(cut * n) and the highest ceil(cut * n) of n values are left out, but at least one value
    stays, two if n is even. A cut of 0.5 gives the median. A NaN counts as the highest value.
    """

    def __init__(self, begin: int, size: int, cut: float) -> None:
        super().__init__(begin, size)
        self.cut = cut

    def _sum(self, terms: Terms) -> None:
        if self.total is None:
            self.total = np.empty(self.size, np.float32)
        parts = {tuple((piece.begin, piece.end) for piece in update) for _, update in terms}
        if len(parts) == 1:  # usual; updates that are cut into different parts need all their values in memory at once
            for number, (begin, end) in enumerate(parts.pop()):
                self._trim(begin, end, [(weight, [update[number]]) for weight, update in terms])
        else:
            self._trim(self.begin, self.begin + self.size, terms)

    def _trim(self, begin: int, end: int, terms: Sequence[tuple[float, Update]]) -> None:
        assert self.total is not None
        n = len(terms)
        values = np.zeros((n, end - begin), np.float32)
        for own, (weight, update) in zip(values, terms, strict=True):
            for piece in update:
                codecs.put(piece, weight, own, begin)
        gone = min(math.ceil(self.cut * n), (n - 1) // 2)
        out = self.total[begin - self.begin : end - self.begin]
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, end - begin, AT_ONCE):
                at = slice(first, first + AT_ONCE)
                ranked = np.sort(np.ascontiguousarray(values[:, at].T), axis=1)
                np.multiply(ranked[:, gone : n - gone].mean(axis=1), np.float32(n), out=out[at])


def _same(some: Pieces, others: Pieces) -> bool:
    return len(some) == len(others) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(some, others, strict=True))
