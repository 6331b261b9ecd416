"""`SimulatedDriver`: the driver of a device that numba-cuda's simulator runs. Memory of the device is memory of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.cuda.arrays import DeviceArray
from narrows.compression.cuda.jit import THREADS, Kernel, simulated_array

BLOCKS_MAX = 2  # of a grid: a simulated thread is a thread of Python


def on_host(array: DeviceArray) -> npt.NDArray[Any]:
    """Return the values of an array as an array of the host, without a copy."""
    if not array.nbytes:
        return np.empty(0, array.dtype)
    memory: Any = (ctypes.c_uint8 * array.nbytes).from_address(array.address)
    values: npt.NDArray[Any] = np.frombuffer(memory, array.dtype)
    return values


def _argument(value: Any) -> Any:
    if isinstance(value, DeviceArray):
        return simulated_array(on_host(value))
    return tuple(map(_argument, value)) if isinstance(value, tuple) else value


class SimulatedDriver:
    """The methods of `CudaDriver`, each of which is done when it returns."""

    captures = False

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def allocate(self, count: int) -> DeviceArray:
        memory = np.empty(max(count, 1), np.uint8)
        return DeviceArray(memory.ctypes.data, count, memory.dtype, memory)

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        return np.empty(count, np.uint8)

    def zero(self, array: DeviceArray, stream: Any) -> None:
        on_host(array).fill(0)

    def copy(self, source: DeviceArray, target: DeviceArray, stream: Any) -> None:
        np.copyto(on_host(target), on_host(source))

    def copy_up(self, host: npt.NDArray[Any], target: DeviceArray, stream: Any) -> None:
        np.copyto(on_host(target), host)

    def copy_down(self, source: DeviceArray, host: npt.NDArray[Any], stream: Any) -> None:
        np.copyto(host, on_host(source).view(host.dtype))

    def stream_of(self, handle: int) -> Any:
        return handle

    def own_stream(self) -> Any:
        return "landing"

    def synchronize(self, stream: Any) -> None: ...

    def event(self) -> Any:
        return None

    def record(self, event: Any, stream: Any) -> None: ...

    def wait_for(self, event: Any, stream: Any) -> None: ...

    def has_happened(self, event: Any) -> bool:
        return True

    def wait(self, event: Any) -> None: ...

    def is_captured(self, stream: Any) -> bool:
        return False

    def prepare(self, say: Callable[[str], None]) -> None: ...

    def launch(self, kernel: Kernel, blocks: int, stream: Any, arguments: tuple[Any, ...]) -> None:
        assert kernel.simulated is not None
        kernel.simulated[min(blocks, BLOCKS_MAX), THREADS](*map(_argument, arguments))
