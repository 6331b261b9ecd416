"""Turns buffers of callers into arrays that kernels accept. No other file does this.

Each input becomes a read-only view: Numba gives read-only and writable arrays different types, and so compiles each
kernel once, whatever the buffer was. Sections at misaligned addresses are copied.
"""

import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

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
SPARE_WORDS = 2  # zero words after the last one, which bit readers and writers may touch


class CodedCopy(Protocol):
    """The values of a payload in memory of a device (`DeviceCodes`, device/stages.py)."""

    def add(self, weight: float, out: Any) -> None:
        """Add weight * values to an array of the device."""


# The wire is little endian and the kernels reinterpret bytes in place; no big-endian machine runs PyTorch today.
assert sys.byteorder == "little", "narrows.compression needs a little-endian machine"


class ChunkedUpdate(Protocol):
    """An update that is computed in chunks of CHUNK values, each time that it is read. No array holds all of it.

    Attributes:
        size: the number of values.
        sample: the values at `sample_of(size)` (sampling.py), once all chunks were read.
    """

    size: int
    sample: FloatArray

    def chunks(self) -> Iterator[tuple[int, FloatArray]]:
        """Yield (begin, values) for each chunk in order: float32[CHUNK], or all of a small update; valid until the next."""


def chunks_of(update: "FloatArray | ChunkedUpdate") -> Iterator[tuple[int, FloatArray]]:
    """Yield (begin, values) for each chunk of an update; an array is one chunk."""
    return iter([(0, update)]) if isinstance(update, np.ndarray) else update.chunks()


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
