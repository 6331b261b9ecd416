"""Turns buffers of callers into arrays that kernels accept. No other file does this.

Each input becomes a read-only view: Numba gives read-only and writable arrays different types, and so compiles each
kernel once, whatever the buffer was. Sections at misaligned addresses are copied.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from narrows.compression.sampling import sample_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

FloatArray: TypeAlias = npt.NDArray[np.float32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
IndexArray: TypeAlias = npt.NDArray[np.uint32]
WordArray: TypeAlias = npt.NDArray[np.uint64]
Counts: TypeAlias = npt.NDArray[np.int64]
Payload: TypeAlias = (
    "Buffer | ByteArray"  # received bytes; ndarray is named because it is no Buffer to mypy before 3.12
)
Parts: TypeAlias = list[bytes | memoryview]  # bytes to be sent, one part after the other
Scalar = TypeVar("Scalar", bound=np.generic)

CHUNK = 1 << 18  # values of a chunk of a `ChunkedUpdate`: 1 MiB, which a core's cache holds
READ_ONCE = 1 << 20  # values; an update of more is computed each time that it is read, to save its array
SPARE_WORDS = 2  # zero words after the last one, which bit readers and writers may touch


class CodedCopy(Protocol):
    """The values of a payload in memory of a device (`DeviceCodes`, device/stages.py)."""

    def add(self, weight: float, out: Any) -> None:
        """Add weight * values to an array of the device."""


class DeviceDifference(NamedTuple):
    """An update on a device, values - start, float32[count] each. Kernels subtract as they read: no array holds it."""

    values: Any
    start: Any


# The wire is little endian and the kernels reinterpret bytes in place; no big-endian machine runs PyTorch today.
assert sys.byteorder == "little", "narrows.compression needs a little-endian machine"


class ChunkedUpdate:
    """An update that is computed in chunks, each time that it is read. No array holds all of a large one.

    Args:
        keys: the keys [begin, end) of the values.
        source: copies the values of keys [begin, begin + len(out)) into `out`, float32[n]; or float32[end - begin].
        start: what is subtracted, float32[end - begin]; None: nothing.
        sampled: take a sample; False leaves it empty.

    Attributes:
        size: the number of values.
        sample: the values at `sample_of(size)` (sampling.py), once all chunks were read.
    """

    def __init__(
        self,
        keys: tuple[int, int],
        source: "Callable[[int, Any], None] | FloatArray",
        start: FloatArray | None,
        sampled: bool = True,
    ) -> None:
        self.begin, self.size, self.source, self.start = keys[0], keys[1] - keys[0], source, start
        self.places = sample_of(self.size if sampled else 0)
        self.sample = np.zeros(self.places.size, np.float32)
        self.whole: FloatArray | None = None  # a small update is read once

    @property
    def small(self) -> bool:
        """True if the update is one chunk, which is kept."""
        return self.size <= READ_ONCE

    def chunks(self, multiple: int = 1) -> Iterator[tuple[int, FloatArray]]:
        """Yield (begin, values) for each chunk in order, or once for all of a small update.

        Args:
            multiple: each chunk but the last has a multiple of so many values; at most CHUNK, or one such multiple.

        Returns:
            The index of the first value, and float32[n], valid until the next chunk.
        """
        if self.small:
            if self.whole is None:
                self.whole = np.empty(self.size, np.float32)
                self._fill(0, self.whole)
            yield 0, self.whole
            return
        most = max(CHUNK // multiple, 1) * multiple
        scratch = np.empty(most, np.float32)
        for low in range(0, self.size, most):
            values = scratch[: self.size - low]
            self._fill(low, values)
            yield low, values

    def _fill(self, low: int, values: FloatArray) -> None:
        """Compute the values from index `low` on, and take their part of the sample."""
        self._read(low, values)
        if not self.places.size:
            return
        first, last = np.searchsorted(self.places, (low, low + values.size))
        self.sample[first:last] = values[self.places[first:last] - low]

    def _read(self, low: int, values: FloatArray) -> None:
        """Compute the values from index `low` on."""
        start = self.start[low : low + values.size] if self.start is not None else np.float32(0)
        if isinstance(self.source, np.ndarray):
            np.subtract(self.source[low : low + values.size], start, out=values)
            return
        self.source(self.begin + low, values)
        if self.start is not None:
            values -= start

    def lines(self, numbers: Counts, length: int) -> FloatArray:
        """Return lines of values. Line i has the values from index i * length on.

        Args:
            numbers: the lines, int64[n].
            length: of a line.

        Returns:
            float32[n, length].
        """
        if isinstance(self.source, np.ndarray) and self.start is not None:
            end = self.size // length * length
            source, start = (each[:end].reshape(-1, length) for each in (self.source, self.start))
            return source[numbers] - start[numbers]
        made = np.empty((numbers.size, length), np.float32)
        for number, line in zip(numbers.tolist(), made, strict=True):
            self._read(number * length, line)
        return made


Values: TypeAlias = FloatArray | ChunkedUpdate


def chunks_of(values: Values, multiple: int = 1) -> Iterator[tuple[int, FloatArray]]:
    """Yield (begin, values) for each chunk of values, read-only; an array is one chunk. See `ChunkedUpdate.chunks`."""
    chunks = iter([(0, values)]) if isinstance(values, np.ndarray) else values.chunks(multiple)
    return ((begin, read_only(part)) for begin, part in chunks)


def read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return a read-only view of `array`. The array itself stays writable."""
    view = array.view()
    view.flags.writeable = False
    return view


def values_view(values: npt.NDArray[Any], name: str) -> FloatArray:
    """Return a read-only view of an array that kernels can read.

    Args:
        values: float32, 1-D, C-contiguous, aligned.
        name: the name of the array in the error.

    Raises:
        TypeError: the array is anything else.
    """
    if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous or not values.flags.aligned:
        raise TypeError(f"{name} must be a contiguous 1-D float32 array, not {values.ndim}-D {values.dtype}")
    return read_only(values)


def check_out(out: npt.NDArray[Any]) -> None:
    """Raise TypeError unless a kernel can write to `out`: float32, 1-D, C-contiguous, aligned, writable."""
    values_view(out, "out")
    if not out.flags.writeable:
        raise TypeError("out is read-only")


def bytes_view(payload: Payload) -> ByteArray:
    """Return the bytes of any C-contiguous buffer as a read-only uint8 array, without a copy."""
    view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
    # memoryview.cast refuses an empty view.
    return read_only(np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.zeros(0, np.uint8))


def section(body: ByteArray, begin: int, count: int, dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """Return `count` scalars of `body` from byte `begin` on: a view if the address is aligned, else a copy."""
    part = body[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)
    return part if part.flags.aligned else read_only(part.copy())


def words_of(part: ByteArray) -> WordArray:
    """Return the bytes as 64-bit words, with SPARE_WORDS zeros after them: bit readers read one word ahead."""
    words = np.zeros((part.size + 7) // 8 + SPARE_WORDS, np.uint64)
    words.view(np.uint8)[: part.size] = part
    return read_only(words)


def written(size: int, write: "Callable[[ByteArray], None]") -> bytes:
    """Return the bytes that `write` has written to uint8[size], size >= 1, which is aligned for float32. No copy is made."""
    made = BytesIO()
    made.seek(size - 1)
    made.write(b"\0")
    with made.getbuffer() as memory:
        write(np.frombuffer(memory, np.uint8))
    return made.getvalue()


SCRATCH_BYTES_MAX = 64 << 20  # a larger scratch array is not kept for the next call


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, IndexArray] = {}


_scratch = _Scratch()


def scratch(name: str, count: int) -> IndexArray:
    """Return a scratch array, uint32[count], with any content.

    The next call with this name in this thread returns the same memory. Fresh memory costs time: the operating system
    maps it page by page and, in a process of several threads, interrupts the other core to unmap it. For this reason
    alone a selection of 1 % by two threads was slower than by one.
    """
    array = _scratch.arrays.get(name)
    if array is None or array.size < count:
        array = np.empty(count, np.uint32)
        if array.nbytes <= SCRATCH_BYTES_MAX:
            _scratch.arrays[name] = array
    return array[:count]
