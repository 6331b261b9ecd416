"""Where the arrays of a child of a server live, and what is done with them there: on the host. On a GPU: device/home.py."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import FloatArray, Payload, read_only
from narrows.compression.codecs import Piece, PieceLike, add, check, coded_piece, put, raw_pieces
from narrows.compression.compressor import Compressor
from narrows.compression.feedback import ErrorFeedback, State
from narrows.compression.kernels import cpu
from narrows.compression.reducers import Memory

A = TypeVar("A")
Cuts = Iterable[tuple[int, int]]


class Feedback(Protocol[A]):
    """See ErrorFeedback, which is that of the host."""

    compressor: Compressor
    memory: Memory
    residual: A | None

    def encode(self, update: A) -> memoryview: ...
    def change(self, compressor: Compressor) -> None: ...
    def restore(self, payload: Payload, weight: float = 1.0) -> None: ...
    def load_state_dict(self, state: State) -> None: ...


class Sample(Protocol):
    """Values that are on their way to the host."""

    def here(self) -> bool: ...

    def read(self) -> npt.NDArray[np.float64]:
        """Waits for them."""


class HostSample(NamedTuple):
    """A Sample whose values are there. A cluster keeps it in the machine that its journal and its standby have."""

    values: npt.NDArray[np.float64]

    def here(self) -> bool:
        return True

    def read(self) -> npt.NDArray[np.float64]:
        return self.values


class Landing(Protocol):
    """A copy to the host that is under way."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Home(Protocol[A]):
    """A is an array, float32[count], of which slices are views. name: of the device."""

    name: str

    def zeros(self, count: int) -> A: ...
    def empty(self, count: int) -> A: ...

    def feedback(self, compressor: Compressor, count: int, seed: int) -> Feedback[A]: ...

    def copy(self, source: A, out: A) -> None:
        """out = source."""

    def sum(self, a: A, b: A) -> A:
        """A new array."""

    def add_scaled(self, values: A, weight: float, out: A) -> None:
        """out += float32(weight) * values, product and sum each rounded."""

    def add(self, piece: PieceLike, weight: float, out: A, origin: int) -> None:
        """As codecs.add."""

    def put(self, piece: PieceLike, out: A, origin: int) -> None:
        """As codecs.put, with weight 1."""

    def raw_pieces(self, values: A, origin: int, cuts: Cuts) -> list[Piece]:
        """As codecs.raw_pieces: bytes of the host, which stay as they are as long as `values` does, or longer."""

    def places(self, positions: npt.NDArray[np.int64]) -> Any:
        """For `sampled` and `sampling`."""

    def sampled(self, values: A, places: Any) -> npt.NDArray[np.float64]:
        """The values at these positions; where they are on a device, this waits for it."""

    def sampling(self, values: A, places: Any, turn: int) -> Sample:
        """The same of the values as they are now, on its way. Each of two turns may have one under way; it is read
        before the next is begun."""

    def any(self, values: A) -> bool:
        """Whether any is not zero; waits likewise."""

    def host(self, values: A) -> FloatArray:
        """A copy on the host."""

    def landing(self, count: int) -> FloatArray:
        """Zeros on the host, for `land`."""

    def land(self, values: A, out: FloatArray) -> Landing:
        """Starts to copy values to a slice of what `landing` gave. They stay as they are until that is done. Copies are done in
        the order in which they were begun."""

    def load(self, values: FloatArray, out: A) -> None:
        """out = values of the host, which may be changed at once."""

    def finite(self, values: A) -> bool:
        """Whether none is NaN or infinite; waits likewise."""

    def code(self, compressor: Compressor, values: A, memory: Memory) -> memoryview:
        """Their payload, by itself: what it does not carry is nobody's. Raises NonFiniteError."""


class LandedPayload(NamedTuple):
    """A Landing that is done."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is under way."""


class HostHome:
    """NumPy's arrays."""

    name = "cpu"

    def zeros(self, count: int) -> FloatArray:
        return np.zeros(count, np.float32)

    def empty(self, count: int) -> FloatArray:
        return np.empty(count, np.float32)

    def feedback(self, compressor: Compressor, count: int, seed: int) -> Feedback[FloatArray]:
        return ErrorFeedback(compressor, count, seed=seed)

    def copy(self, source: FloatArray, out: FloatArray) -> None:
        np.copyto(out, source)

    def sum(self, a: FloatArray, b: FloatArray) -> FloatArray:
        return a + b

    def add_scaled(self, values: FloatArray, weight: float, out: FloatArray) -> None:
        cpu.add_fp32(read_only(values), np.float32(weight), out)

    add: Callable[..., None] = staticmethod(add)
    check: Callable[..., Any] = staticmethod(check)
    coded_piece: Callable[..., Piece] = staticmethod(coded_piece)
    raw_pieces: Callable[..., list[Piece]] = staticmethod(raw_pieces)

    def put(self, piece: PieceLike, out: FloatArray, origin: int) -> None:
        put(piece, 1.0, out, origin)

    def places(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return positions

    def sampled(self, values: FloatArray, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return values[places].astype(np.float64)

    def sampling(self, values: FloatArray, places: npt.NDArray[np.int64], turn: int) -> Sample:
        return HostSample(self.sampled(values, places))

    def any(self, values: FloatArray) -> bool:
        return bool(values.any())

    def finite(self, values: FloatArray) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            length = float(np.dot(values, values))  # one pass; it overflows of finite values too
        return math.isfinite(length) or bool(np.isfinite(values).all())

    def code(self, compressor: Compressor, values: FloatArray, memory: Memory) -> memoryview:
        return compressor.encode(values, memory)

    def host(self, values: FloatArray) -> FloatArray:
        return values.copy()

    def landing(self, count: int) -> FloatArray:
        return self.zeros(count)

    def land(self, values: FloatArray, out: FloatArray) -> Landing:
        np.copyto(out, values)
        return LandedPayload()

    def load(self, values: FloatArray, out: FloatArray) -> None:
        np.copyto(out, values)


HOST = HostHome()
