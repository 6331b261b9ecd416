"""Reducers that keep some values as they are: top-k, the k largest of each block, random ones, those above a threshold.

Top-k by magnitude: Aji & Heafield 2017 (1704.05021), Stich et al. 2018 (1809.07599); with error feedback it converges as
SGD does. Among equal magnitudes the lowest indices are kept; zeros never are, so there may be fewer than k.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from narrows.compression.buffers import FloatArray, IndexArray, read_only, scratch
from narrows.compression.errors import NonFiniteError
from narrows.compression.index_codings import (
    STRATA,
    STRIDE,
    STRIDE_UNIT,
    STRIDED_RICE,
    CodedIndices,
    encode_indices,
    indices_max_bytes,
    stride_count,
)
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.reducers import Memory, ReducedValues
from narrows.compression.selection import pairs, select_top
from narrows.compression.value_codings import non_finite


def kept_of(density: float, count: int) -> int:
    """k of a density: at least 1 value, where there is one."""
    return min(count, max(1, round(density * count)))


def _selected(values: FloatArray, indices: IndexArray, kept: FloatArray) -> ReducedValues:
    # NaN and infinity have the largest keys: if there are any, some were selected.
    if cpu.largest_key(kept) >= INFINITY_KEY:
        raise non_finite(values)
    coded = encode_indices(indices, values.size) if indices.size else NOTHING
    return ReducedValues(kept, coded)


NOTHING = CodedIndices(1, 0, np.empty(0, np.uint8))  # Rice, of no index


class _Selecting(ABC):
    """The base class of all reducers that keep values as they are."""

    unbiased = False

    def index_bytes_max(self, count: int) -> int:
        return indices_max_bytes(self.kept_max(count), count)

    @abstractmethod
    def kept_max(self, count: int) -> int: ...


@dataclass(frozen=True)
class TopK(_Selecting):
    """The k = max(1, round(density * count)) largest of all.

    dropped_bits: mantissa bits that are not looked at. With 13 of 23 this is MSTopK (Shi et al., 2010.10458, alg. 1): a
    histogram of what is left of the keys gives the two thresholds that its samplings bisect for, 2**-10 apart; all above
    the upper one are kept, and the band between them fills up to k by index. Denormals below 2**-136 then count as zeros.
    """

    density: float
    dropped_bits: int = 0

    @property
    def spec(self) -> str:
        return f"{'mstopk' if self.dropped_bits else 'topk'}:{self.density!r}"

    def contraction(self) -> "TopK":
        return self

    def kept_max(self, count: int) -> int:
        return kept_of(self.density, count)

    def reduce(self, values: FloatArray, memory: Memory) -> ReducedValues:
        return _selected(values, *select_top(values, self.kept_max(values.size), self.dropped_bits))


MSTOPK_DROPPED_BITS = 13


@dataclass(frozen=True)
class BlockTopK(_Selecting):
    """The k largest of every `block` values; of a shorter last block, ceil(k * its size / block)."""

    k: int
    block: int

    @property
    def spec(self) -> str:
        return f"topk:{self.k}/{self.block}"

    def contraction(self) -> "BlockTopK":
        return self

    def kept_max(self, count: int) -> int:
        whole, rest = divmod(count, self.block)
        return whole * self.k + -(-self.k * rest // self.block)

    def reduce(self, values: FloatArray, memory: Memory) -> ReducedValues:
        bits = values.view(np.uint32)
        places, keys = scratch("places", self.block), scratch("keys", self.block)
        indices, kept = pairs(self.kept_max(values.size))
        found = cpu.compact_blocks(bits, self.k, self.block, places, keys, indices, kept)
        return _selected(values, read_only(indices[:found]), read_only(kept[:found].view(np.float32)))


@dataclass(frozen=True)
class RandomK(_Selecting):
    """One random value of each of k equal parts of the array; the seed is sent instead of indices.

    scaled: each value times the size of its part, which makes it unbiased (Wangni et al. 2018, 1710.09854); error feedback
    needs the values as they are, for scaled ones are no contraction (Stich et al. 2018).
    """

    density: float
    scaled: bool = True

    @property
    def spec(self) -> str:
        return f"randk:{self.density!r}"

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.scaled

    def contraction(self) -> "RandomK":
        return replace(self, scaled=False)

    def kept_max(self, count: int) -> int:
        return kept_of(self.density, count)

    def index_bytes_max(self, count: int) -> int:
        return 0

    def reduce(self, values: FloatArray, memory: Memory) -> ReducedValues:
        if cpu.largest_key(values) >= INFINITY_KEY:
            raise non_finite(values)
        count, kept = values.size, self.kept_max(values.size)
        words: IndexArray = np.empty(RANDOM_BLOCK, np.uint32)
        cpu.random_words(*memory.key, 0, words)
        seed = int(words[0])
        indices: IndexArray = np.empty(kept, np.uint32)
        cpu.strata(seed, 0, kept, count, words, indices)
        chosen = values[indices]
        if self.scaled:
            borders = np.arange(kept + 1, dtype=np.uint64) * np.uint64(count) // np.uint64(kept)
            with np.errstate(over="ignore"):
                chosen *= np.diff(borders).astype(np.float32)
            if cpu.largest_key(read_only(chosen)) >= INFINITY_KEY:
                raise NonFiniteError(
                    "a value times the share of values that it stands for is above the largest float32"
                )
        return ReducedValues(read_only(chosen), CodedIndices(STRATA.wire_id, seed, np.empty(0, np.uint8)))


@dataclass(frozen=True)
class Cycle(_Selecting):
    """Every S-th value, S = round(1 / density), from another one on each step: all of them once in S steps.

    No indices are sent, and senders at the same step send the same ones: their sum has no more values than each of them,
    so that what goes back to them needs no more bytes than what came.
    """

    density: float

    @property
    def stride(self) -> int:
        return round(1 / self.density)

    @property
    def spec(self) -> str:
        return f"cycle:{self.density!r}"

    def contraction(self) -> "Cycle":
        return self

    def kept_max(self, count: int) -> int:
        return stride_count(0, self.stride, count)

    def index_bytes_max(self, count: int) -> int:
        return 0

    def reduce(self, values: FloatArray, memory: Memory) -> ReducedValues:
        if cpu.largest_key(values) >= INFINITY_KEY:
            raise non_finite(values)
        indices = self.indices(values.size, memory)
        return ReducedValues(read_only(np.ascontiguousarray(values[memory.step % self.stride :: self.stride])), indices)

    def indices(self, count: int, memory: Memory) -> CodedIndices:
        """The indices that this step takes; where arrays are shorter than a cycle, maybe none."""
        phase = memory.step % self.stride
        parameter = phase * STRIDE_UNIT + self.stride if phase < count else 0
        return CodedIndices(STRIDE.wire_id, parameter, np.empty(0, np.uint8))


@dataclass(frozen=True)
class CycleTop(Cycle):
    """The k = max(1, round(share * n)) largest, as TopK takes them, of the n values that Cycle takes on this step.

    A value that a step leaves out waits for the next turn of its place: a turn sends those that have gathered most.
    """

    share: float

    @property
    def spec(self) -> str:
        return f"{super().spec}/{self.share!r}"

    def contraction(self) -> "CycleTop":
        return self

    def kept_max(self, count: int) -> int:
        return kept_of(self.share, super().kept_max(count))

    def index_bytes_max(self, count: int) -> int:
        return STRIDED_RICE.bytes_max(self.kept_max(count), super().kept_max(count))

    def reduce(self, values: FloatArray, memory: Memory) -> ReducedValues:
        if cpu.largest_key(values) >= INFINITY_KEY:
            raise non_finite(values)
        phase = memory.step % self.stride
        places = stride_count(phase, self.stride, values.size)
        strided = scratch("strided", places).view(np.float32)
        np.copyto(strided, values[phase :: self.stride])
        if not places:
            return ReducedValues(strided, NOTHING)
        positions, kept = select_top(read_only(strided), kept_of(self.share, places))
        if not positions.size:
            return ReducedValues(kept, NOTHING)
        return ReducedValues(kept, STRIDED_RICE.encode(positions, phase, self.stride, values.size))


@dataclass(frozen=True)
class Threshold(_Selecting):
    """All values with |x| >= threshold: as many as there are (Strom 2015; Dutta et al. 2020, 1911.08250)."""

    threshold: float

    @property
    def spec(self) -> str:
        return f"threshold:{self.threshold!r}"

    def contraction(self) -> "Threshold":
        return self

    def kept_max(self, count: int) -> int:
        return count

    def reduce(self, values: FloatArray, memory: Memory) -> ReducedValues:
        bits = values.view(np.uint32)
        below = int(np.float32(self.threshold).view(np.uint32)) - 1
        indices, kept = pairs(cpu.count_above(bits, below))
        cpu.compact(bits, below, 0, indices, kept)
        return _selected(values, read_only(indices), read_only(kept.view(np.float32)))
