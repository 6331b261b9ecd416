"""The CUDA driver, as a queue uses it: memory, copies, streams, events, kernels, graphs.

A call of the driver takes 2 to 6 us of the host, numba's launch of the same kernel 46 (docs/design/gpu-log.md). Streams
and events are the driver's own objects. `SimulatedDriver` (simulator.py) has the same methods.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.cuda.arrays import DeviceArray
from narrows.compression.cuda.cubins import CubinStore, load_kernels
from narrows.compression.cuda.jit import KERNELS, THREADS, Argument, Kernel, Type

BLOCKS_MAX = 65535  # of a grid


class Allocation:
    """Memory of a device or page-locked memory of the host, freed with the object."""

    def __init__(self, address: int, size: int, free: Any) -> None:
        self.address, self.size = address, size
        weakref.finalize(self, free, address).atexit = False  # the end of the process frees it too


class PackedArguments:
    """The arguments of a kernel, as cuLaunchKernel takes them.

    numba passes an array as seven values: two null pointers, size, item size, address, shape and stride. A tuple is its
    members one after the other.
    """

    def __init__(self, types: Iterable[Type]) -> None:
        self.types = tuple(types)
        self.layout = struct.Struct("<" + "".join(map(_format, self.types)))
        self.values = ctypes.create_string_buffer(self.layout.size)
        first = ctypes.addressof(self.values)
        places = range(first, first + self.layout.size, 8)
        self.pointers = (ctypes.c_void_p * len(places))(*places)
        self.address = ctypes.addressof(self.pointers)

    def pack(self, arguments: tuple[Any, ...]) -> None:
        """Write the arguments. The driver copies them at a launch, so they may be written again then.

        Raises:
            TypeError: an array has another dtype than the kernel takes.
            ValueError: there are more or fewer arguments than the kernel takes.
        """
        values: list[Any] = []
        _flatten(self.types, arguments, values)
        self.layout.pack_into(self.values, 0, *values)


def _format(of: Type) -> str:
    if not isinstance(of, Argument):
        return "".join(map(_format, of))
    return "QQqqQqq" if of.array else {"q": "q", "f": "f4x", "?": "?7x"}[of.dtype.char.replace("l", "q")]


def _flatten(types: tuple[Type, ...], arguments: tuple[Any, ...], values: list[Any]) -> None:
    if len(types) != len(arguments):
        raise ValueError(f"a kernel takes {len(types)} arguments, not {len(arguments)}")
    for of, argument in zip(types, arguments):  # noqa: B905 - a launch is a hot path
        if type(of) is tuple:
            _flatten(of, argument, values)
        elif of.array:
            if argument.dtype is not of.dtype and argument.dtype != of.dtype:
                raise TypeError(f"a kernel takes an array of {of.dtype}, not of {argument.dtype}")
            size, itemsize = argument.size, argument.itemsize
            values += (0, 0, size, itemsize, argument.address, size, itemsize)
        else:
            values.append(argument)


class _Loaded:
    """A kernel that is loaded on a device."""

    def __init__(self, function: Any, blocks_max: int, types: tuple[Type, ...]) -> None:
        self.function, self.blocks_max, self.arguments = function, blocks_max, PackedArguments(types)


class CudaDriver:
    """The driver's calls for one device. Threads enter its context for each sequence of calls.

    Args:
        number: the number of the device.

    Attributes:
        arch: its compute capability.

    Raises:
        RuntimeError: there is no such device, or a call fails. Later calls raise it, too.
        ImportError: cuda.bindings is not installed.
    """

    captures = True

    def __init__(self, number: int) -> None:
        self.api: Any = import_module("cuda.bindings.driver")
        api = self.api
        self._call(api.cuInit, 0)
        if number >= self._call(api.cuDeviceGetCount):
            raise RuntimeError(f"this machine has no GPU with the number {number}")
        device = self._call(api.cuDeviceGet, number)
        self.context = self._call(api.cuDevicePrimaryCtxRetain, device)
        told = api.CUdevice_attribute
        self.arch, self.processors = (
            (
                self._call(api.cuDeviceGetAttribute, told.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
                self._call(api.cuDeviceGetAttribute, told.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
            ),
            self._call(api.cuDeviceGetAttribute, told.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device),
        )
        self._not_ready = int(api.CUresult.CUDA_ERROR_NOT_READY)
        self._timeless = int(api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._launch = api.cuLaunchKernel
        self.cubins = CubinStore(self.arch)
        self._loaded: dict[Kernel, _Loaded] = {}

    def _call(self, function: Any, *arguments: Any) -> Any:
        found = function(*arguments)
        if found[0]:
            raise RuntimeError(f"{function.__name__} of the CUDA driver: {getattr(found[0], 'name', found[0])}")
        return found[1] if len(found) > 1 else None

    def enter(self) -> None:
        """Make this device the one of the calls of this thread, until `leave`."""
        self._call(self.api.cuCtxPushCurrent, self.context)

    def leave(self) -> None:
        self._call(self.api.cuCtxPopCurrent)

    # Memory.

    def allocate(self, count: int) -> DeviceArray:
        """Return memory of the device, uint8[count]."""
        address = int(self._call(self.api.cuMemAlloc, max(count, 1)))
        return DeviceArray(address, count, np.dtype(np.uint8), Allocation(address, count, self._free))

    def _free(self, address: int) -> None:
        self.api.cuCtxPushCurrent(self.context)
        self.api.cuMemFree(address)
        self.api.cuCtxPopCurrent()

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        """Return page-locked memory of the host, uint8[count], which kernels can write to."""
        flags = self.api.CU_MEMHOSTALLOC_PORTABLE | self.api.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(self._call(self.api.cuMemHostAlloc, max(count, 1), flags))
        memory: Any = (ctypes.c_uint8 * max(count, 1)).from_address(address)
        weakref.finalize(memory, self._free_pinned, address).atexit = False
        whole: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        return whole[:count]

    def _free_pinned(self, address: int) -> None:
        self.api.cuCtxPushCurrent(self.context)
        self.api.cuMemFreeHost(address)
        self.api.cuCtxPopCurrent()

    def zero(self, array: DeviceArray, stream: Any) -> None:
        self._call(self.api.cuMemsetD8Async, array.address, 0, array.nbytes, stream)

    def copy(self, source: DeviceArray, target: DeviceArray, stream: Any) -> None:
        self._call(self.api.cuMemcpyDtoDAsync, target.address, source.address, source.nbytes, stream)

    def copy_up(self, host: npt.NDArray[Any], target: DeviceArray, stream: Any) -> None:
        """Copy to the device. Of pageable memory the driver has its own copy when it returns; page-locked memory it
        reads later.
        """
        self._call(self.api.cuMemcpyHtoDAsync, target.address, host.ctypes.data, host.nbytes, stream)

    def copy_down(self, source: DeviceArray, host: npt.NDArray[Any], stream: Any) -> None:
        self._call(self.api.cuMemcpyDtoHAsync, host.ctypes.data, source.address, source.nbytes, stream)

    # Streams and events.

    def stream_of(self, handle: int) -> Any:
        """Return a stream that somebody else has made; 0: the legacy default stream."""
        return self.api.CUstream(handle)

    def own_stream(self) -> Any:
        """Return a new stream. It and the legacy default stream do not wait for each other."""
        return self._call(self.api.cuStreamCreate, int(self.api.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def synchronize(self, stream: Any) -> None:
        self._call(self.api.cuStreamSynchronize, stream)

    def event(self) -> Any:
        return self._call(self.api.cuEventCreate, self._timeless)

    def record(self, event: Any, stream: Any) -> None:
        self._call(self.api.cuEventRecord, event, stream)

    def wait_for(self, event: Any, stream: Any) -> None:
        """Let the later work of a stream wait for an event."""
        self._call(self.api.cuStreamWaitEvent, stream, event, 0)

    def has_happened(self, event: Any) -> bool:
        (error,) = self.api.cuEventQuery(event)
        if error and int(error) != self._not_ready:
            raise RuntimeError(f"cuEventQuery of the CUDA driver: {error.name}")
        return not error

    def wait(self, event: Any) -> None:
        """Wait until an event has happened. Other threads of this process run meanwhile."""
        self._call(self.api.cuEventSynchronize, event)

    # Graphs.

    def is_captured(self, stream: Any) -> bool:
        """Return whether the work of a stream goes to a graph that somebody captures."""
        return int(self._call(self.api.cuStreamIsCapturing, stream)) != 0

    def begin_capture(self, stream: Any) -> None:
        """Let the later work of a stream go to a graph, and not to the device.

        Other threads are not concerned. This one may free memory meanwhile, as the garbage collector does.
        """
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call(self.api.cuStreamBeginCapture, stream, mode)

    def end_capture(self, stream: Any) -> Any:
        """End a capture, and return the graph, which `replay` launches."""
        graph = self._call(self.api.cuStreamEndCapture, stream)
        try:
            return self._call(self.api.cuGraphInstantiate, graph, 0)
        finally:
            self._call(self.api.cuGraphDestroy, graph)

    def replay(self, graph: Any, stream: Any) -> None:
        self._call(self.api.cuGraphLaunch, graph, stream)

    def drop(self, graph: Any) -> None:
        """Free a graph. One that runs ends first."""
        self._call(self.api.cuGraphExecDestroy, graph)

    # Kernels.

    def prepare(self, say: Callable[[str], None]) -> None:
        """Compile all kernels, or load them from disk. Arguments and errors as in `CubinStore.fill`."""
        load_kernels()
        self.cubins.fill(sorted(KERNELS), say)

    def load(self, kernel: Kernel) -> _Loaded:
        """Load a kernel on the device, if it is not there."""
        loaded = self._loaded.get(kernel)
        if loaded is None:
            cubin = self.cubins.get(kernel.name)
            module = self._call(self.api.cuModuleLoadData, cubin.code)
            function = self._call(self.api.cuModuleGetFunction, module, cubin.entry.encode())
            resident = self._call(self.api.cuOccupancyMaxActiveBlocksPerMultiprocessor, function, THREADS, 0)
            blocks = min(max(resident, 1) * self.processors, BLOCKS_MAX)
            loaded = self._loaded[kernel] = _Loaded(function, blocks, kernel.types)
        return loaded

    def launch(self, kernel: Kernel, blocks: int, stream: Any, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel on at most so many blocks, and no more than can be resident at once."""
        loaded = self._loaded.get(kernel) or self.load(kernel)
        packed, limit = loaded.arguments, loaded.blocks_max
        packed.pack(arguments)
        grid = blocks if blocks < limit else limit
        self._call(self._launch, loaded.function, grid, 1, 1, THREADS, 1, 1, 0, stream, packed.address, 0)
