"""The mean of the updates of a clock, at the keys of one shard. No I/O.

How it works

    pushes (raw)    | worker 0 ....... | worker 1 ....... |      mean(low, high) adds their values at these keys alone
    pushes (coded)  one payload a shard: `of` adds all values to `total`, and mean(low, high) is a view of it

`of` returns a function that gives the mean at keys [low, high). Its caller asks for one part of PART_VALUES after the
other: a part of the mean, of x and of the optimizer's state stay together in the CPU's cache, and no array of the
shard's size holds the mean of raw pushes.

Rules
- The sum is in the order of the terms, in float32, weight times value then added: bit for bit repeatable, whatever the
  parts are.
- Each update has all keys that are asked for.
- The values of a raw update may lie in its sender's memory, and change after they were measured (`PushedUpdate.length`).
  So the mean compares the length of each sum with the measured lengths. If the sum is longer, it sums copies of the
  pieces, and leaves out each piece that is not finite or longer than its update was. Other changes spoil the sender's
  own share alone.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from narrows.compression import codecs
from narrows.compression.codecs import Piece, PieceLike
from narrows.ps.store.changes import FloatArray, Terms

# Values of a part that is summed, then used: 2 MiB, so that an optimizer's arrays of it stay in the CPU's cache.
PART_VALUES = 1 << 19
AT_ONCE = 1 << 14  # keys whose values are ranked together, so that these stay in the cache too

# Gives the mean at keys [low, high), counted from the shard's first key: float32[high - low]. The caller may change the
# array, which is valid until the next call. Each key is asked for once.
Mean = Callable[[int, int], FloatArray]
# Weight, pieces in the order of keys, first key of each, and the length of the update as it was measured.
Row = tuple[float, Sequence[PieceLike], Sequence[int], float]
TOLERANCE = 1.01  # of a length, which is measured in float32


def parts_of(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into parts of at most PART_VALUES keys."""
    for low in range(begin, end, PART_VALUES):
        yield low, min(end, low + PART_VALUES)


def _at(row: Row, low: int, high: int) -> Iterator[PieceLike]:
    """Yield what the pieces of a row have of keys [low, high)."""
    _, pieces, begins, _ = row
    for piece in pieces[max(0, bisect_right(begins, low) - 1) :]:
        if piece.begin >= high:
            return
        inside = low <= piece.begin and piece.end <= high
        yield piece if inside else codecs.cut(piece, max(low, piece.begin), min(high, piece.end))


def _square(length: float) -> float:
    """Return the square of a length, and not infinity: nothing that is not finite is shorter."""
    return min(length * length, sys.float_info.max)


class WeightedMean:
    """The sum of weight * update. Its arrays are kept: to allocate them costs more than the sum."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size = begin, size
        self.total: FloatArray | None = None  # float32[size], of coded updates
        self.part: FloatArray | None = None  # float32, a part of the mean of raw updates

    def of(self, terms: Terms) -> Mean:
        """Return the function that gives the sum of `terms`, part by part.

        Args:
            terms: The updates. The function reads their payloads.
        """
        rows: list[Row] = []
        for weight, update in terms:
            keyed = [piece for piece in update if piece.codec != codecs.ROWS and piece.begin < piece.end]
            keyed.sort(key=lambda piece: piece.begin)
            rows.append((weight, keyed, [piece.begin for piece in keyed], getattr(update, "length", 0.0) or math.inf))
        if all(piece.codec in codecs.CUT for _, pieces, *_ in rows for piece in pieces):
            return lambda low, high: self._summed(rows, low, high)
        if self.total is None:
            self.total = np.empty(self.size, np.float32)
        _, pieces, begins, _ = rows[0]
        total, low, high = self.total, begins[0] - self.begin, pieces[-1].end - self.begin
        self._sum(rows, low, total[low:high])
        return lambda low, high: total[low:high]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the sums out: no change needs those of another."""
        return {**vars(self), "total": None, "part": None}

    def _summed(self, rows: Sequence[Row], low: int, high: int) -> FloatArray:
        if self.part is None or self.part.size < high - low:
            self.part = np.empty(high - low, np.float32)
        out = self.part[: high - low]
        self._sum(rows, low, out)
        longest = TOLERANCE * sum(abs(weight) * length for weight, *_, length in rows)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.dot(out, out) <= _square(longest):
                self._sum([self._measured(row, low, high) for row in rows], low, out)
        return out

    def _measured(self, row: Row, low: int, high: int) -> Row:
        """Return copies of the pieces of a row at keys [low, high), without the values of those that have changed."""
        weight, _, _, length = row
        pieces = list[PieceLike]()
        for piece in _at(row, self.begin + low, self.begin + high):
            values = np.frombuffer(bytes(piece.payload), np.float32)
            squared = np.square(values, dtype=np.float64).sum()
            sound = piece.codec == codecs.RAW and squared <= _square(TOLERANCE * length)
            pieces.append(
                Piece(codecs.RAW if sound else codecs.VOID, piece.begin, piece.end, values.view(np.uint8).data)
            )
        return weight, pieces, [piece.begin for piece in pieces], length

    def _sum(self, rows: Sequence[Row], low: int, out: FloatArray) -> None:
        """Set `out` to the sum at keys [low, low + out.size)."""
        low += self.begin
        for turn, row in enumerate(rows):
            for piece in _at(row, low, low + out.size):
                (codecs.add if turn else codecs.put)(piece, row[0], out, low)


class TrimmedMean(WeightedMean):
    """The coordinate-wise trimmed mean of weight * update, times the number of updates (1803.01498, def. 2).

    At each key the lowest ceil(cut * n) and the highest ceil(cut * n) of n values are left out, but at least one value
    stays, two if n is even. A cut of 0.5 gives the median. A NaN counts as the highest value.
    """

    def __init__(self, begin: int, size: int, cut: float) -> None:
        super().__init__(begin, size)
        self.cut = cut

    def _sum(self, rows: Sequence[Row], low: int, out: FloatArray) -> None:
        n = len(rows)
        values = np.empty((n, out.size), np.float32)
        for row, own in zip(rows, values, strict=True):
            for piece in _at(row, self.begin + low, self.begin + low + out.size):
                codecs.put(piece, row[0], own, self.begin + low)
        gone = min(math.ceil(self.cut * n), (n - 1) // 2)
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, out.size, AT_ONCE):
                at = slice(first, first + AT_ONCE)
                kept = _trimmed([own[at] for own in values], gone)
                total = kept[0]
                for each in kept[1:]:
                    total += each
                total /= np.float32(len(kept))
                np.multiply(total, np.float32(n), out=out[at])


def _trimmed(rows: list[FloatArray], gone: int) -> list[FloatArray]:
    """Rank the values of each key as far as it is needed, in place, and return the rows between the ends.

    Each pass exchanges neighbours: upward it takes the highest value that is left to the end, downward the lowest.

    Args:
        rows: float32, one for each update.
        gone: the number of rows that are left out at either end.
    """
    spare, n = np.empty_like(rows[0]), len(rows)
    for done in range(gone):
        for i in (*range(done, n - 1 - done), *range(n - 3 - done, done - 1, -1)):
            a, b = rows[i], rows[i + 1]
            np.fmin(a, b, out=spare)  # of a number and a NaN the number
            np.maximum(a, b, out=b)  # of a number and a NaN the NaN
            rows[i], spare = spare, a
    return rows[gone : n - gone]
