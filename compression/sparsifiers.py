"""Sparsifiers, the reducers of a SPEC: top-k, blockwise top-k, random, cyclic and threshold.

    topk:0.01      the k largest of all                   TopK
    topk:64/4096   the 64 largest of every 4096           BlockTopK
    randk:0.01     a random value of each of k parts      RandomK
    cycle:0.1      every 10th, another one each step      Cycle; with a share of them, CycleTop
    threshold:0.9  all values of at least 0.9             Threshold

Top-k by magnitude is that of Aji & Heafield 2017 (1704.05021) and Stich et al. 2018 (1809.07599). With error feedback
it converges as SGD does. Of equal magnitudes the lowest indices are kept. Zeros are never kept, so there may be fewer
values than k.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from narrows.compression.buffers import FloatArray, IndexArray, Values, chunks_of, read_only, scratch
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
from narrows.compression.selection import bits_of, compact, pairs, select_top
from narrows.compression.value_codings import non_finite


def kept_of(density: float, count: int) -> int:
    """Return k for a density: round(density * count), at least 1 and at most `count`."""
    return min(count, max(1, round(density * count)))


def _selected(values: Values, indices: IndexArray, kept: FloatArray) -> ReducedValues:
    # NaN and infinity have the largest keys: if the array has some, the selection has one too.
    if cpu.largest_key(kept) >= INFINITY_KEY:
        raise non_finite(values)
    coded = encode_indices(indices, values.size) if indices.size else NOTHING
    return ReducedValues(kept, coded)


def _finite(values: Values) -> Iterator[tuple[int, FloatArray]]:
    """Yield (begin, part) for each chunk of values. Raises NonFiniteError, of all values, where a chunk is not finite."""
    for begin, part in chunks_of(values):
        if cpu.largest_key(part) >= INFINITY_KEY:
            raise non_finite(values)
        yield begin, part


NOTHING = CodedIndices(1, 0, np.empty(0, np.uint8))  # the coding of no indices, as Rice


class _Selecting(ABC):
    """The base class of all reducers here."""

    unbiased = False

    def index_bytes_max(self, count: int) -> int:
        return indices_max_bytes(self.kept_max(count), count)

    @abstractmethod
    def kept_max(self, count: int) -> int: ...

    def scratch_bytes_max(self, count: int) -> int:
        """Indices and values that are kept, and their coded indices as two streams and as one section."""
        return 8 * self.kept_max(count) + 2 * self.index_bytes_max(count)


@dataclass(frozen=True)
class TopK(_Selecting):
    """The k = max(1, round(density * count)) largest values of all.

    With 13 of the 23 mantissa bits dropped this is MSTopK (Shi et al., 2010.10458, alg. 1). MSTopK finds two
    thresholds by a bisection that reads the values many times; here one histogram of the shortened keys gives them, 2**-10
    apart. All values above the
    upper one are kept, and values between the two fill up to k in the order of their indices. Denormals below 2**-136
    then count as zeros.

    Attributes:
        density: the share of values that is kept, 0 < density <= 1.
        dropped_bits: the lowest mantissa bits that the selection ignores.
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

    def reduce(self, values: Values, memory: Memory) -> ReducedValues:
        return _selected(values, *select_top(values, self.kept_max(values.size), self.dropped_bits))


MSTOPK_DROPPED_BITS = 13


@dataclass(frozen=True)
class BlockTopK(_Selecting):
    """The k largest of every `block` values. Of a shorter last block, ceil(k * its size / block)."""

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

    def reduce(self, values: Values, memory: Memory) -> ReducedValues:
        places, keys = scratch("places", self.block), scratch("keys", self.block)
        indices, kept = pairs(self.kept_max(values.size))
        found = 0
        for begin, part in chunks_of(values, self.block):
            chosen = indices[found:]
            more = cpu.compact_blocks(part.view(np.uint32), self.k, self.block, places, keys, chosen, kept[found:])
            if begin:
                chosen[:more] += np.uint32(begin)
            found += more
        return _selected(values, read_only(indices[:found]), read_only(kept[:found].view(np.float32)))


@dataclass(frozen=True)
class RandomK(_Selecting):
    """One random value of each of k equal parts of the array. The payload has the seed instead of indices.

    Attributes:
        density: the share of values that is kept, 0 < density <= 1.
        scaled: each value is multiplied by the size of its part, so the mean over seeds is unbiased (Wangni et al.
            2018, 1710.09854). Scaled values are no contraction, so error feedback needs unscaled ones (Stich et al.
            2018).
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

    def reduce(self, values: Values, memory: Memory) -> ReducedValues:
        count, kept = values.size, self.kept_max(values.size)
        words: IndexArray = np.empty(RANDOM_BLOCK, np.uint32)
        cpu.random_words(*memory.key, 0, words)
        seed = int(words[0])
        indices: IndexArray = np.empty(kept, np.uint32)
        cpu.strata(seed, 0, kept, count, words, indices)
        chosen = np.empty(kept, np.float32)
        first = 0
        for begin, part in _finite(values):
            places = indices[first : first + np.searchsorted(indices[first:], np.uint32(begin + part.size))]
            places -= np.uint32(begin)
            np.take(part, places, out=chosen[first : first + places.size], mode="clip")  # "raise" copies
            first += places.size
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
    """Every S-th value, S = round(1 / density), with another phase on each step: S steps send each value once.

    The payload has no indices. Senders at the same step send the same keys, so the sum of their updates has no more
    values than each update, and the answer to them takes no more bytes than an update.
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

    def reduce(self, values: Values, memory: Memory) -> ReducedValues:
        phase = memory.step % self.stride
        kept = np.empty(stride_count(phase, self.stride, values.size), np.float32)
        self._stride(values, phase, kept)
        return ReducedValues(read_only(kept), self.indices(values.size, memory))

    def _stride(self, values: Values, phase: int, out: FloatArray) -> None:
        """Write every S-th value, from place `phase` on. Raises NonFiniteError: of all values."""
        for begin, part in _finite(values):
            first = -(-max(begin - phase, 0) // self.stride)  # strided values before this chunk
            taken = part[phase + first * self.stride - begin :: self.stride]
            out[first : first + taken.size] = taken

    def indices(self, count: int, memory: Memory) -> CodedIndices:
        """Return the coded indices of this step. An array shorter than S may have none."""
        phase = memory.step % self.stride
        parameter = phase * STRIDE_UNIT + self.stride if phase < count else 0
        return CodedIndices(STRIDE.wire_id, parameter, np.empty(0, np.uint8))


@dataclass(frozen=True)
class CycleTop(Cycle):
    """The k = max(1, round(share * n)) largest of the n values that Cycle takes on this step, as TopK selects them.

    Error feedback keeps the values that a turn leaves out until the next turn of their keys, S steps later. So a turn
    sends the values that have accumulated most.
    """

    share: float

    @property
    def spec(self) -> str:
        return f"{super().spec}/{self.share!r}"

    def contraction(self) -> "CycleTop":
        return self

    def kept_max(self, count: int) -> int:
        return kept_of(self.share, super().kept_max(count))

    def scratch_bytes_max(self, count: int) -> int:
        return 4 * super().kept_max(count) + super().scratch_bytes_max(count)

    def index_bytes_max(self, count: int) -> int:
        return STRIDED_RICE.bytes_max(self.kept_max(count), super().kept_max(count))

    def reduce(self, values: Values, memory: Memory) -> ReducedValues:
        phase = memory.step % self.stride
        places = stride_count(phase, self.stride, values.size)
        strided = scratch("strided", places).view(np.float32)
        self._stride(values, phase, strided)
        if not places:
            return ReducedValues(strided, NOTHING)
        positions, kept = select_top(read_only(strided), kept_of(self.share, places))
        if not positions.size:
            return ReducedValues(kept, NOTHING)
        return ReducedValues(kept, STRIDED_RICE.encode(positions, phase, self.stride, values.size))


@dataclass(frozen=True)
class Threshold(_Selecting):
    """All values with |x| >= threshold, however many (Strom 2015; Dutta et al. 2020, 1911.08250)."""

    threshold: float

    @property
    def spec(self) -> str:
        return f"threshold:{self.threshold!r}".replace("e+", "e")  # a plus ends a stage

    def contraction(self) -> "Threshold":
        return self

    def kept_max(self, count: int) -> int:
        return count

    def reduce(self, values: Values, memory: Memory) -> ReducedValues:
        below = int(np.float32(self.threshold).view(np.uint32)) - 1
        indices, kept = pairs(sum(cpu.count_above(bits, below) for _, bits in bits_of(values)))
        compact(values, below, 0, indices, kept)
        return _selected(values, read_only(indices), read_only(kept.view(np.float32)))
