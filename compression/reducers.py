"""The interface of a reducer: the first stage of a chain, which keeps some of many values as they are."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from narrows.compression.buffers import FloatArray
from narrows.compression.index_codings import CodedIndices
from narrows.compression.value_codings import Key

DENSE_COUNT_MAX = 64  # up to here all values are sent: indices and headers would outweigh what is left out


class ReducedValues(NamedTuple):
    """values: float32[kept], read-only, good until this thread reduces again. indices: which, as the payload says it."""

    values: FloatArray
    indices: CodedIndices


@dataclass(slots=True)
class Memory:
    """State that one stream of updates keeps from one encode to the next, beside its residual. Not for two threads at once.

    seed: tells streams apart. step: encodes so far; with the seed it is the key of all random numbers.
    """

    seed: int = 0
    step: int = 0

    @property
    def key(self) -> Key:
        return Key(self.seed & 0xFFFFFFFF, self.step & 0xFFFFFFFF)


class Reducer(Protocol):
    """A member of the axis. It changes neither its input nor itself; `memory` is the stream's."""

    @property
    def spec(self) -> str:
        """As parse() reads it."""

    @property
    def unbiased(self) -> bool:
        """The mean of what is decoded, over keys, is what was encoded."""

    def contraction(self) -> "Reducer":
        """This reducer as error feedback needs it: what is sent is never further from the input than nothing is."""

    def kept_max(self, count: int) -> int:
        """The most values that reduce() returns of `count`."""

    def index_bytes_max(self, count: int) -> int:
        """A bound on the index section."""

    def reduce(self, values: FloatArray, memory: Memory) -> ReducedValues:
        """From float32[count], read-only, count > DENSE_COUNT_MAX; NonFiniteError if any of them is NaN or infinite."""
