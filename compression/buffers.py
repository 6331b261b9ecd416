"""Buffers in and out: the one place that turns what callers hand over into arrays that kernels accept.

Every input view is made read-only, so that each kernel is compiled once whatever the source was
(Numba gives read-only and writable arrays different types), and misaligned sections are copied.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

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

SPARE_WORDS = 2

# The wire is little endian and the kernels reinterpret bytes in place; no big-endian machine runs PyTorch today.
assert sys.byteorder == "little", "narrows.compression needs a little-endian machine"


def read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A read-only view of `array`; the array itself stays as it is."""
    view = array.view()
    view.flags.writeable = False
    return view


def values_view(values: npt.NDArray[Any], name: str) -> FloatArray:
    """`values` as a read-only view, once it is what kernels take: float32, 1-D, C-contiguous, aligned; TypeError."""
    if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous or not values.flags.aligned:
        raise TypeError(f"{name} must be a contiguous 1-D float32 array, not {values.ndim}-D {values.dtype}")
    return read_only(values)


def check_out(out: npt.NDArray[Any]) -> None:
    """Raises TypeError unless `out` can be written by a kernel: float32, 1-D, C-contiguous, aligned, writable."""
    values_view(out, "out")
    if not out.flags.writeable:
        raise TypeError("out is read-only")


def bytes_view(payload: Payload) -> ByteArray:
    """The bytes of any C-contiguous buffer as a read-only uint8 array, without a copy."""
    view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
    # An empty view cannot be cast, and no other view of nothing is needed.
    return read_only(np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.zeros(0, np.uint8))


def section(body: ByteArray, begin: int, count: int, dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """`count` scalars of `body` from byte `begin`: a view where the address is aligned for `dtype`, else a copy."""
    part = body[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)
    return part if part.flags.aligned else read_only(part.copy())


def words_of(part: ByteArray) -> WordArray:
    """The bytes as 64-bit words with two of zeros after them: bit readers look one word ahead, in an empty part too."""
    words = np.zeros((part.size + 7) // 8 + SPARE_WORDS, np.uint64)
    words.view(np.uint8)[: part.size] = part
    return read_only(words)


SCRATCH_BYTES_MAX = 64 << 20  # of one name: what is larger is not kept


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, IndexArray] = {}


_scratch = _Scratch()


def scratch(name: str, count: int) -> IndexArray:
    """uint32[count], which the next call with this name in this thread hands out again.

    Fresh memory is not free: the kernel maps it in page by page and, in a process of several threads, interrupts the other
    core to take it back. A selection of 1 % by two threads was slower than by one for that alone.
    """
    array = _scratch.arrays.get(name)
    if array is None or array.size < count:
        array = np.empty(count, np.uint32)
        if array.nbytes <= SCRATCH_BYTES_MAX:
            _scratch.arrays[name] = array
    return array[:count]
