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
from narrows.compression.errors import NonFiniteError
from narrows.compression.index_codings import CodedIndices
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.reducers import Memory, Reduced
from narrows.compression.value_codings import non_finite

LOW_RANK = 6  # wire id, in the table of index codings: "not by index at all"
RANK_MAX = 64  # beyond, the factors of most models are larger than they are; and what a decoder multiplies is bounded


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
    return 0 if rest or rank > RANK_MAX else rank


def bounded(factors: FloatArray, left: int, rank: int) -> bool:
    """Whether no sum of products of the first `left` values with the others can be NaN or overflow float32."""
    with np.errstate(invalid="ignore"):
        tops = [float(np.abs(part).max()) for part in (factors[:left], factors[left:])]
    return bool(rank * tops[0] * tops[1] < float(np.finfo(np.float32).max))  # false where one is NaN


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
        if right is None or right.shape != (rank, columns) or not _is_factor(right):
            right = _first_factor(memory, rank, columns)
        with np.errstate(over="ignore", invalid="ignore"):
            left, right = _power_iteration(values, right, rows)
        factors = np.concatenate((left.ravel(), right.ravel()))
        if not bounded(factors, left.size, rank):
            raise NonFiniteError(f"{values.size} finite values are too large for {self.spec}: their products overflow")
        memory.factor = right
        return Reduced(read_only(factors), CodedIndices(LOW_RANK, rows, np.empty(0, np.uint8)))


def _is_factor(right: FloatArray) -> bool:
    """Finite (a state_dict may hold anything), and with a direction in each row."""
    return bool(np.isfinite(right).all() and np.all(np.any(right, axis=1)))


def _power_iteration(values: FloatArray, right: FloatArray, rows: int) -> tuple[FloatArray, FloatArray]:
    """(left: rank x rows, orthonormal, right: rank x columns), one step on from the directions of `right`."""
    rank, columns = right.shape
    right = np.ldexp(
        right, -np.frexp(np.abs(right).max(axis=1, keepdims=True))[1]
    )  # exact, and large values stay finite
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
