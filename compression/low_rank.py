"""PowerSGD (Vogels et al. 2019, 1905.13727): the update as a matrix, and that as the product of two thin ones.

The flat array is read as a matrix of `rows` rows, near square, the last row short. One step of power iteration per encode,
begun at the stream's last right factor ("warm start"), so that the factors improve from step to step.

Value section: the left factor, rank x rows, then the right one, rank x columns; columns = ceil(count / rows). Which rows
are in the payload's header as the parameter, the rank follows from `kept`. Decoding is exact arithmetic in a fixed order
(add_low_rank); encoding uses BLAS, whose last bits differ between machines, which error feedback makes up for.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrows.compression.buffers import FloatArray, read_only
from narrows.compression.index_codings import CodedIndices
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.reducers import Memory, Reduced
from narrows.compression.value_codings import non_finite

LOW_RANK = 6  # wire id, in the table of index codings: "not by index at all"


class _Header(Protocol):
    @property
    def count(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def parameter(self) -> int: ...


def columns_of(rows: int, count: int) -> int:
    return -(-count // rows)


def rank_of(header: _Header) -> int:
    """Of a low-rank payload; 0 if it cannot be one."""
    rows = header.parameter
    if not 1 <= rows <= header.count:
        return 0
    rank, rest = divmod(header.kept, rows + columns_of(rows, header.count))
    return 0 if rest else rank


@dataclass(frozen=True)
class PowerSgd:
    """Rank `rank`, at most what keeps fewer values than there are."""

    rank: int
    sparse = False
    unbiased = False

    @property
    def spec(self) -> str:
        return f"powersgd:{self.rank}"

    def contraction(self) -> "PowerSgd":
        return self

    def at_density(self, density: float) -> "PowerSgd":
        return self

    def _shape(self, count: int) -> tuple[int, int, int]:
        """(rank, rows, columns)."""
        rows = math.isqrt(count)
        columns = columns_of(rows, count)
        return max(1, min(self.rank, count // (rows + columns))), rows, columns

    def kept_max(self, count: int) -> int:
        rank, rows, columns = self._shape(count)
        return rank * (rows + columns)

    def index_bytes_max(self, count: int) -> int:
        return 0

    def reduce(self, values: FloatArray, memory: Memory) -> Reduced:
        if cpu.largest_key(values) >= INFINITY_KEY:
            raise non_finite(values)
        rank, rows, columns = self._shape(values.size)
        right = memory.factor
        if right is None or right.shape != (rank, columns) or not np.all(np.any(right, axis=1)):
            right = _first_factor(memory, rank, columns)
        with np.errstate(over="ignore", invalid="ignore"):
            left, right = _power_iteration(values, right, rows)
        memory.factor = right
        factors = np.concatenate((left.ravel(), right.ravel()))
        if cpu.largest_key(read_only(factors)) >= INFINITY_KEY:
            raise non_finite(factors)
        return Reduced(read_only(factors), CodedIndices(LOW_RANK, rows, np.empty(0, np.uint8)))


def _power_iteration(values: FloatArray, right: FloatArray, rows: int) -> tuple[FloatArray, FloatArray]:
    """(left: rank x rows, orthonormal, right: rank x columns), one step on from `right`."""
    rank, columns = right.shape
    rest = values.size % columns
    whole = values[: values.size - rest].reshape(-1, columns)
    last = values[values.size - rest :]
    left = np.zeros((rank, rows), np.float32)
    left[:, : len(whole)] = right @ whole.T
    if rest:
        left[:, len(whole)] = right[:, :rest] @ last
    # The paper orthogonalises by Gram-Schmidt; QR is that, stable, and of zeros it is still orthonormal.
    left = np.ascontiguousarray(np.linalg.qr(left.T.astype(np.float64))[0].T, np.float32)
    right = left[:, : len(whole)] @ whole
    if rest:
        right[:, :rest] += left[:, len(whole), None] * last
    return left, right


def _first_factor(memory: Memory, rank: int, columns: int) -> FloatArray:
    """Uniform in [-1, 1), from the stream's key: the same on every device."""
    blocks = -(-rank * columns // RANDOM_BLOCK)
    words = np.empty((blocks, RANDOM_BLOCK), np.uint32)
    for block in range(blocks):
        cpu.random_words(*memory.key, block, words[block])
    uniform = words.ravel()[: rank * columns].astype(np.float64) * 2.0**-31 - 1.0
    return uniform.astype(np.float32).reshape(rank, columns)
