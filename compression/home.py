"""`Home`: the place of a child's arrays and the code that computes on them there. `HostHome` is the host.

The home of a GPU is in device/home.py. The array type A of a home stands for float32[count], and slices are views.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import ChunkedUpdate, CodedCopy, FloatArray, Payload, read_only
from narrows.compression.codecs import Piece, PieceLike, add, check, coded_piece, put, raw_pieces
from narrows.compression.compressor import Compressor
from narrows.compression.feedback import ErrorFeedback, State
from narrows.compression.kernels import cpu
from narrows.compression.reducers import Memory

A = TypeVar("A")
Cuts = Iterable[tuple[int, int]]


class Feedback(Protocol[A]):
    """Error feedback on arrays of a home. `ErrorFeedback` is that of the host, and documents the methods."""

    compressor: Compressor
    memory: Memory
    residual: A | None
    coded: CodedCopy | None  # the newest payload's values on the device; None on the host

    def start_encode(self, update: A | ChunkedUpdate) -> None: ...
    def drop_encode(self) -> None: ...
    def encode(self, update: A | ChunkedUpdate) -> memoryview: ...
    def encode_last(self, update: A | ChunkedUpdate, cuts: Cuts) -> list[memoryview]: ...
    def take(self, update: A | ChunkedUpdate) -> A: ...
    def forget(self) -> None: ...
    def change(self, compressor: Compressor) -> None: ...
    def restore(self, payload: Payload, weight: float = 1.0) -> None: ...
    def load_state_dict(self, state: State) -> None: ...


class Sample(Protocol):
    """Sampled values on their way to the host."""

    def here(self) -> bool:
        """Return whether the values have arrived, without waiting."""

    def read(self) -> npt.NDArray[np.float64]:
        """Wait for the values, and return them, float64[positions]."""


class HostSample(NamedTuple):
    """A Sample whose values have arrived. A cluster's machine holds it, so its journal and its standby save it."""

    values: npt.NDArray[np.float64]

    def here(self) -> bool:
        return True

    def read(self) -> npt.NDArray[np.float64]:
        return self.values


class Landing(Protocol):
    """A copy of values to the host that is under way."""

    def done(self) -> bool:
        """Return whether the copy is complete, without waiting."""

    def wait(self) -> None:
        """Wait until the copy is complete."""


class DeviceFigures(NamedTuple):
    """What a home has done on its device. All are 0 on the host.

    Attributes:
        launches: kernels, those of replayed graphs too.
        replays: of CUDA graphs.
        graphs: CUDA graphs that are kept now.
        scratch_bytes: bytes of the scratch memory of kernels.
    """

    launches: int = 0
    replays: int = 0
    graphs: int = 0
    scratch_bytes: int = 0


class Home(Protocol[A]):
    """Computes on arrays of type A where they live. An array is float32[count]; slices of it are views.

    Unless a method says otherwise it need not wait for the device: calls take effect in the order in which they are
    made.
    """

    name: str  # the name of the device

    def figures(self) -> DeviceFigures:
        """Return what this home has done on its device so far. No other thread may use the home meanwhile."""

    def zeros(self, count: int) -> A:
        """Return a new array of zeros."""

    def empty(self, count: int) -> A:
        """Return a new array with any content."""

    def feedback(self, compressor: Compressor, count: int, seed: int) -> Feedback[A]:
        """Return error feedback for a stream of `count` values. Arguments as in `ErrorFeedback`."""

    def copy(self, source: A, out: A) -> None:
        """Set out = source."""

    def sum_scaled(self, a: A, b: A, weight: float, out: A) -> None:
        """Set out = a + float32(weight) * b, product and sum each rounded to float32. `out` may be `a`."""

    def add(self, piece: PieceLike, weight: float, out: A, origin: int) -> None:
        """Add weight * values of a checked piece, as codecs.add does."""

    def put(self, piece: PieceLike, out: A, origin: int) -> None:
        """Write the values of a checked piece, as codecs.put does with weight 1."""

    def raw_pieces(self, values: A, origin: int, cuts: Cuts) -> list[Piece]:
        """Return a RAW piece for each cut, as codecs.raw_pieces does.

        The payloads are bytes of the host. They do not change before `values` changes.
        """

    def places(self, positions: npt.NDArray[np.int64]) -> Any:
        """Return positions, int64[n], in the form that `sampled` and `sampling` take."""

    def sampled(self, values: A, places: Any) -> npt.NDArray[np.float64]:
        """Return the values at these places, float64[n]. Waits for the device."""

    def sampling(self, values: A | ChunkedUpdate, places: Any, turn: int) -> Sample:
        """Begin to copy the present values at these places to the host.

        Args:
            values: the array, which may change afterwards; or on the host an update in chunks, which were read before, on
                a device a `DeviceDifference`.
            places: from `places`.
            turn: 0 or 1. Each turn has one copy under way at most: read a sample before the next of its turn.
        """

    def any(self, values: A) -> bool:
        """Return whether any value is not zero. Waits for the device."""

    def host(self, values: A) -> FloatArray:
        """Return a copy on the host. Waits for the device."""

    def landing(self, count: int) -> FloatArray:
        """Return zeros on the host, float32[count], as the target of `land`."""

    def land(self, values: A, out: FloatArray) -> Landing:
        """Begin to copy values to the host. Copies complete in the order in which they were begun.

        Args:
            values: the array. It must not change until the copy is complete.
            out: a slice of an array from `landing`, of the same size.
        """

    def load(self, values: FloatArray, out: A) -> None:
        """Set out = values of the host. The caller may change `values` as soon as the call returns."""

    def finite(self, values: A) -> bool:
        """Return whether no value is NaN or infinite. Waits for the device."""

    def active(self) -> AbstractContextManager[None]:
        """Inside this context calls of a device's home cost less. The script runs no code there."""

    def aside(self) -> AbstractContextManager[None]:
        """Inside this context the home's work on a device runs beside what the script has queued and will queue there.

        It runs after all earlier work of the home, and before all later work. No code but the home's may use its arrays.
        It is not entered within `active`.
        """

    def code(self, compressor: Compressor, values: A, memory: Memory, begin: int) -> Piece:
        """Encode values without error feedback: what the payload leaves out is lost.

        Args:
            compressor: the compressor.
            values: float32, of keys from `begin` on.
            memory: of this stream.
            begin: the first key.

        Raises:
            NonFiniteError: a value cannot be coded.
        """


class LandedPayload(NamedTuple):
    """A Landing that is complete."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class HostHome:
    """The home of NumPy's arrays. `Home` documents the methods."""

    name = "cpu"

    def figures(self) -> DeviceFigures:
        return DeviceFigures()

    def zeros(self, count: int) -> FloatArray:
        return np.zeros(count, np.float32)

    def empty(self, count: int) -> FloatArray:
        return np.empty(count, np.float32)

    def feedback(self, compressor: Compressor, count: int, seed: int) -> Feedback[FloatArray]:
        return ErrorFeedback(compressor, count, seed=seed)

    def copy(self, source: FloatArray, out: FloatArray) -> None:
        np.copyto(out, source)

    def sum_scaled(self, a: FloatArray, b: FloatArray, weight: float, out: FloatArray) -> None:
        np.copyto(out, a)
        cpu.add_fp32(read_only(b), np.float32(weight), out)

    add: Callable[..., None] = staticmethod(add)
    check: Callable[..., Any] = staticmethod(check)
    raw_pieces: Callable[..., list[Piece]] = staticmethod(raw_pieces)

    def put(self, piece: PieceLike, out: FloatArray, origin: int) -> None:
        put(piece, 1.0, out, origin)

    def places(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return positions

    def sampled(self, values: FloatArray, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return values[places].astype(np.float64)

    def sampling(self, values: FloatArray | ChunkedUpdate, places: npt.NDArray[np.int64], turn: int) -> Sample:
        found = values[places] if isinstance(values, np.ndarray) else values.sample
        return HostSample(found.astype(np.float64))

    def any(self, values: FloatArray) -> bool:
        return bool(values.any())

    def finite(self, values: FloatArray) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            length = float(np.dot(values, values))  # one pass; finite values may overflow too
        return math.isfinite(length) or bool(np.isfinite(values).all())

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def code(self, compressor: Compressor, values: FloatArray, memory: Memory, begin: int) -> Piece:
        return coded_piece(compressor.encode(values, memory), begin, begin + values.size)

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
