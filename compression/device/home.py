"""`DeviceHome`: the home of a child's arrays on a device (compression/home.py has the interface).

Rules
- Arrays are those that `zeros` makes, such as torch's tensors, and slices of them. Their values cross PCIe as payloads;
  only `host`, `load`, `land`, `sampled`, `sampling`, `any` and `finite` copy anything else.
- One thread uses a home. Bytes that another thread receives stay on the host until this thread reads them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from narrows.compression import ErrorFeedback, codecs, parse, warm_up_updates
from narrows.compression.buffers import ChunkedUpdate, DeviceDifference, FloatArray
from narrows.compression.codecs import CODED, RAW, Piece, PieceLike, coded_piece
from narrows.compression.compressor import Compressor
from narrows.compression.device.feedback import DeviceErrorFeedback, accumulate, add_raw, decode
from narrows.compression.device.stages import DevicePool, Staging
from narrows.compression.home import Cuts, DeviceFigures, Feedback, Landing, Sample
from narrows.compression.kernels.record import Sum
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import raw_values
from narrows.compression.reducers import Memory

A = TypeVar("A")


class LandingSample(NamedTuple):
    """A Sample that a copy brings to `bits`, page-locked memory of the host.

    Attributes:
        landing: the copy.
        bits: float32 values; of a difference those of the first array, then those of the second.
        difference: the sample is of a difference.
    """

    landing: Any
    bits: npt.NDArray[np.uint8]
    difference: bool

    def here(self) -> bool:
        return bool(self.landing.done())

    def read(self) -> npt.NDArray[np.float64]:
        self.landing.wait()
        values: FloatArray = self.bits.view(np.float32)
        if self.difference:
            values = values[: values.size // 2] - values[values.size // 2 :]
        return values.astype(np.float64)


class DeviceHome(Generic[A]):
    """The home of arrays on a device. `Home` documents the methods."""

    def __init__(self, kernels: Any, zeros: Callable[[int], A], name: str) -> None:
        """Make a home on the device of these kernels.

        Args:
            kernels: from `kernels_for`.
            zeros: makes an array of zeros on the device, float32[count].
            name: the name of the device.
        """
        self.kernels, self.zeros, self.name = kernels, zeros, name
        self.staging, self.pool = Staging(kernels), DevicePool(kernels)
        self._coding: DeviceErrorFeedback | None = None  # encodes for `code`, with decay 0: its residual never counts

    def figures(self) -> DeviceFigures:
        counts = self.kernels.counts
        return DeviceFigures(counts["launches"], counts["graphs"], self.kernels.graphs_kept, self.kernels.scratch_bytes)

    def empty(self, count: int) -> A:
        return self.zeros(count)

    def feedback(self, compressor: Compressor, count: int, seed: int) -> Feedback[A]:
        made: Any = DeviceErrorFeedback(
            self.kernels, compressor, count, seed=seed, staging=self.staging, pool=self.pool
        )
        return cast(Feedback[A], made)

    def copy(self, source: A, out: A) -> None:
        with self.kernels.active():
            self.kernels.copy(self._view(source), self._view(out))

    def sum_scaled(self, a: A, b: A, weight: float, out: A) -> None:
        with self.kernels.active():
            target = self._view(out)
            if target.size:
                self.kernels.sum_of(Sum(self._view(b), np.float32(weight), self._view(a), target))

    def add(self, piece: PieceLike, weight: float, out: A, origin: int) -> None:
        adds = {RAW: add_raw, CODED: accumulate}.get(piece.codec)
        coded, target = getattr(piece, "on_device", None), self._view(out)[piece.begin - origin : piece.end - origin]
        if coded is not None:  # an own update: no payload is checked, copied and decoded
            with self.kernels.active():
                coded.add(weight, target)
        elif adds is not None:
            adds(self.kernels, piece.payload, weight, target)

    def put(self, piece: PieceLike, out: A, origin: int) -> None:
        target = self._view(out)[piece.begin - origin : piece.end - origin]
        with self.kernels.active():
            if piece.codec == RAW:
                self.kernels.load(raw_values(piece.payload, piece.end - piece.begin), target)
                return
            self.kernels.zero(target)
        self.add(piece, 1.0, out, origin)

    def raw_pieces(self, values: A, origin: int, cuts: Cuts) -> list[Piece]:
        """Return copies in page-locked memory, which does not change while a piece of it exists."""
        with self.kernels.active():
            bits = self._view(values).view(np.uint8)
            raw = self.staging.lend(bits.size)
            if bits.size:
                self.kernels.fetch([bits], [np.frombuffer(raw, np.uint8)]).wait()
        return [Piece(RAW, begin, end, raw[4 * (begin - origin) : 4 * (end - origin)]) for begin, end in cuts]

    def places(self, positions: npt.NDArray[np.int64]) -> Any:
        with self.kernels.active():
            there = self.kernels.empty(positions.size, np.uint32)
            self.kernels.load(positions.astype(np.uint32), there)
            landings = [self.kernels.pinned(max(2 * there.nbytes, 1)) for _ in range(2)]
            return there, [self.kernels.empty(2 * there.size, np.uint32) for _ in landings], landings

    def _sample(self, values: A, places: Any, turn: int) -> Any:
        """Take the values to memory of this turn, whose last sample has been read; of a difference both arrays' values."""
        there, taken, _ = places
        arrays, end = values if isinstance(values, DeviceDifference) else (values,), 0
        for array in arrays if there.size else ():
            begin, end = end, end + there.size
            self.kernels.take(self._view(array).view(np.uint32), there, taken[turn][begin:end])
        return taken[turn][:end]

    def sampled(self, values: A, places: Any) -> npt.NDArray[np.float64]:
        with self.kernels.active():
            found: FloatArray = self.kernels.read(self._sample(values, places, 0)).view(np.float32)
        return found.astype(np.float64)

    def sampling(self, values: A | ChunkedUpdate, places: Any, turn: int) -> Sample:
        landing = places[-1][turn]
        with self.kernels.active():
            sample = self._sample(cast(A, values), places, turn).view(np.uint8)
            landing = landing[: sample.size]
            return LandingSample(self.kernels.fetch([sample], [landing]), landing, isinstance(values, DeviceDifference))

    def any(self, values: A) -> bool:
        with self.kernels.active():
            view = self._view(values)
            return bool(view.size and int(self.kernels.largest_key(view)))

    def finite(self, values: A) -> bool:
        with self.kernels.active():
            view = self._view(values)
            return not view.size or int(self.kernels.largest_key(view)) < INFINITY_KEY

    def active(self) -> AbstractContextManager[None]:
        there: AbstractContextManager[None] = self.kernels.active()
        return there

    def aside(self) -> AbstractContextManager[None]:
        there: AbstractContextManager[None] = self.kernels.aside()
        return there

    def code(self, compressor: Compressor, values: A, memory: Memory, begin: int) -> Piece:
        count = self._view(values).size
        kept = self._coding
        if kept is None or (kept.compressor.spec, kept.count) != (compressor.contraction().spec, count):
            kept = self._coding = DeviceErrorFeedback(
                self.kernels, compressor, count, decay=0.0, staging=self.staging, pool=self.pool
            )
        kept.memory = memory
        return coded_piece(kept.encode(values), begin, begin + count, kept.coded)

    check: Callable[..., Any] = staticmethod(codecs.check)

    def host(self, values: A) -> FloatArray:
        with self.kernels.active():
            found: FloatArray = self.kernels.read(self._view(values))
        return found

    def landing(self, count: int) -> FloatArray:
        """Return zeros in page-locked memory, float32[count]."""
        with self.kernels.active():
            memory: FloatArray = self.kernels.pinned(max(4 * count, 1))[: 4 * count].view(np.float32)
        memory[:] = 0
        return memory

    def land(self, values: A, out: FloatArray) -> Landing:
        """Begin to copy values on a stream of its own, after the work that the caller's stream has so far."""
        with self.kernels.active():
            landing: Landing = self.kernels.fetch([self._view(values).view(np.uint8)], [out.view(np.uint8)])
        return landing

    def load(self, values: FloatArray, out: A) -> None:
        with self.kernels.active():
            self.kernels.load(values, self._view(out))

    def warm_up(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Compile all kernels of the device, or load them from disk. Call this before a run waits for this worker.

        Args:
            say: called with a line while kernels are compiled.

        Raises:
            RuntimeError: a kernel cannot be compiled, or does not compute the result of the CPU's kernel.
        """
        self.kernels.prepare(say)
        count = 1 << 16
        update, out, wanted = self.zeros(count), self.zeros(count), np.zeros(count, np.float32)
        for spec, values in warm_up_updates(count):
            self.load(values, update)
            payload = self.feedback(parse(spec), count, 0).encode(update)
            decode(self.kernels, payload, out)
            accumulate(self.kernels, payload, 0.5, out)
            if payload != ErrorFeedback(parse(spec), count).encode(values):
                raise RuntimeError(f"this device codes {spec} otherwise than the CPU")
        for piece in self.raw_pieces(update, 0, [(0, count)]):
            self.add(piece, 0.5, out, 0)
            codecs.put(coded_piece(payload, 0, count), 1.0, wanted, 0)
            codecs.add(coded_piece(payload, 0, count), 0.5, wanted, 0)
            codecs.add(piece, 0.5, wanted, 0)
        places = np.arange(0, count, 7)
        if (
            self.host(out).tobytes() != wanted.tobytes()
            or (self.sampled(out, self.places(places)) != wanted[places]).any()
        ):
            raise RuntimeError("this device adds otherwise than the CPU")

    def _view(self, array: Any) -> Any:
        return self.kernels.view(array)
