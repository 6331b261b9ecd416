"""The interface of a reducer, the first stage of a chain: it keeps some of the values, and their indices."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from narrows.compression.buffers import Values
from narrows.compression.index_codings import CodedIndices
from narrows.compression.value_codings import Key

DENSE_COUNT_MAX = 64  # of so few values all are sent: indices would take more bytes than a reducer saves


class ReducedValues(NamedTuple):
    """The values that a reducer keeps."""

    values: Values  # float32[kept], read-only; valid until this thread reduces again
    indices: CodedIndices  # the indices of the values, coded for the payload


@dataclass(slots=True)
class Memory:
    """The state of one stream from one encode to the next, without the residual. One thread at a time may use it.

    Attributes:
        seed: 32 bits that differ between streams.
        step: encodes so far. Seed and step are the key of all random numbers.
    """

    seed: int = 0
    step: int = 0

    def advance(self) -> None:
        """Count one encode."""
        self.step += 1

    def go_to(self, step: int) -> None:
        """Continue at this step: both ends of a stream, or all workers, then draw the same random numbers."""
        self.step = step

    @property
    def key(self) -> Key:
        """The key of this step's random numbers."""
        return Key(self.seed & 0xFFFFFFFF, self.step & 0xFFFFFFFF)


class Reducer(Protocol):
    """Keeps some values of an array. A reducer has no state: it changes neither its input nor itself."""

    @property
    def spec(self) -> str:
        """The stage in a SPEC, as parse() reads it."""

    @property
    def unbiased(self) -> bool:
        """True if the mean of the decoded values, over keys, is the encoded value."""

    def contraction(self) -> "Reducer":
        """Return the reducer that error feedback needs: |x - decoded(x)| <= |x| for each input x."""

    def kept_max(self, count: int) -> int:
        """Return the largest number of values that `reduce` keeps of `count`."""

    def index_bytes_max(self, count: int) -> int:
        """Return the largest size of the index section in bytes, for `count` values."""

    def scratch_bytes_max(self, count: int) -> int:
        """Return the most memory that `reduce` takes beside the values, in bytes."""

    def reduce(self, values: Values, memory: Memory) -> ReducedValues:
        """Keep some values.

        Args:
            values: float32[count], read-only, or in chunks; count > DENSE_COUNT_MAX.
            memory: the memory of the stream; only read.

        Raises:
            NonFiniteError: a value is NaN or infinite.
        """
