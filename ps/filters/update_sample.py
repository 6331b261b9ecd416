"""Takes the length of an update, and its values at a sample of the keys. No I/O.

Rules
- An update is decoded once, however many filters use it; raw values are read where they lie. Sums that the store has
  taken early stay valid.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from narrows.compression import codecs
from narrows.compression.sampling import sample_of
from narrows.ps.store.changes import FloatArray, Update


class UpdateSample(NamedTuple):
    """A sample of one update.

    Attributes:
        worker: The worker.
        clock: The number of the update.
        length: The L2 norm; inf if its square overflows.
        sample: Values at the sampled keys, float32[n].
    """

    worker: int
    clock: int
    length: float
    sample: FloatArray


class UpdateSampler:
    """Takes samples of updates of keys [begin, begin + size).

    The memory for decoded values is kept: to allocate it costs more than to take a sample.
    """

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size = begin, size
        self.at = sample_of(size)
        self.scratch: FloatArray = np.empty(0, np.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the memory for decoded values: a journal need not hold it."""
        return self.__dict__ | {"scratch": np.empty(0, np.float32)}

    def __call__(self, update: Update) -> tuple[float, FloatArray]:
        """Return the L2 norm of an update (inf if its square overflows), and its values at the sample, float32[n]."""
        squared, sample = 0.0, np.zeros(self.at.size, np.float32)
        for piece in update:
            values = self._values(piece)
            first, last = np.searchsorted(self.at, (piece.begin - self.begin, piece.end - self.begin))
            sample[first:last] = values.take(self.at[first:last] - (piece.begin - self.begin))
            with np.errstate(over="ignore", invalid="ignore"):
                squared += float(np.dot(values, values))
        return math.sqrt(squared) if squared < math.inf else math.inf, sample

    def _values(self, piece: codecs.PieceLike) -> FloatArray:
        """Return the values of one part, decoded if need be."""
        if piece.codec == codecs.RAW:
            return np.frombuffer(piece.payload, np.float32)
        if not self.scratch.size:
            self.scratch = np.empty(self.size, np.float32)
        values = self.scratch[: piece.end - piece.begin]
        codecs.put(piece, 1.0, values, piece.begin)
        return values
