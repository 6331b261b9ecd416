"""The queue of one device: launches and copies that run in order on one stream, and the scratch memory that they share.

Rules
- Each launch, memset and copy names its stream: the caller's (torch's current stream). So it runs after the caller's
  earlier work on that stream, and before the later work.
- Payloads cross to the host on a stream of their own, from an event of the caller's stream on.
- A grid has no more blocks than can be resident at once. The queue asks CUDA for this number once a kernel is compiled.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import numpy
import numpy.typing as npt

from narrows.compression.cuda.jit import SIMULATED, THREADS, DeviceArray, cuda, devicearray, driver, np
from narrows.compression.kernels.record import RECORD, TOLD

BLOCKS_PER_PROCESSOR = 8  # for a kernel that is not compiled yet: 2048 threads, which fill a multiprocessor
Allocate = Callable[[int], Any]


class _OnHost:
    """Host memory with the interface of device memory."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False), "version": 2
        }  # fmt: skip


class QueueLanding:
    """Copies to page-locked host memory that are under way."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        """Return whether the copies are complete, without waiting."""
        return SIMULATED or bool(self.event.query())

    def wait(self) -> None:
        """Wait until the copies are complete. Other threads of this process run meanwhile."""
        self.event.synchronize()


class Queue:
    """The queue of one device. One thread at a time may use it.

    Args:
        number: the number of the device.
        allocate: makes an array of so many bytes with a __cuda_array_interface__, from torch's memory pool for example;
            None: numba allocates.
        current: returns the stream of the caller, a CUstream; 0: the legacy default stream.

    Attributes:
        counts: launches, memsets, reads (which wait for the device), copies and bytes down and up, so far.
    """

    def __init__(
        self, number: int = 0, allocate: Allocate | None = None, current: Callable[[], int] = lambda: 0
    ) -> None:
        self.number, self.current = number, current
        self.allocate: Allocate = allocate or (lambda count: cuda.device_array(count, np.uint8))
        self.counts: Counter[str] = Counter()
        self.stream: Any = 0  # the legacy default stream
        self._streams: dict[int, Any] = {0: 0}
        self._current = 0
        self._landing: Any = None
        self._done: Any = None
        self._complete: Any = None
        self._scratch: dict[tuple[str, numpy.dtype[Any]], DeviceArray] = {}
        self._blocks_max: dict[Any, int] = {}
        self._resident = 2 if SIMULATED else 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside this context the thread launches on this device, on the caller's present stream.

        Work on another stream than before waits for the earlier work, because all streams share the scratch memory.
        """
        with cuda.gpus[self.number]:
            stream = self.current()
            if stream != self._current:
                if stream not in self._streams:
                    self._streams[stream] = cuda.external_stream(stream)
                before, self.stream = self.stream, self._streams[stream]
                self._current = stream
                event = cuda.event()
                event.record(before)
                event.wait(self.stream)
            yield

    # Launches.

    def launch(self, kernel: Any, count: int, per_block: int, *arguments: Any) -> None:
        """Launch a kernel on a grid for `count` items.

        Args:
            kernel: the kernel.
            count: the number of items.
            per_block: the items that a block takes at a time. The grid has no more blocks than are resident.
            arguments: the arguments of the kernel.
        """
        self.counts["launches"] += 1
        blocks = max(1, min(-(-count // per_block), self._resident or self._blocks(kernel)))
        kernel[blocks, THREADS, self.stream](*arguments)

    def _blocks(self, kernel: Any) -> int:
        known = self._blocks_max.get(kernel)
        if known is not None:
            return known
        compiled = list(kernel.overloads.values())
        if not compiled:  # its first launch compiles it
            return BLOCKS_PER_PROCESSOR * int(cuda.get_current_device().MULTIPROCESSOR_COUNT)
        self._blocks_max[kernel] = max(1, min(int(each.max_cooperative_grid_blocks(THREADS)) for each in compiled))
        return self._blocks_max[kernel]

    # Memory.

    def view(self, array: Any) -> DeviceArray:
        """Return numba's view of an array with a __cuda_array_interface__, without a copy and without a wait."""
        return array if devicearray.is_cuda_ndarray(array) else cuda.as_cuda_array(array, sync=False)

    def empty(self, count: int, dtype: type[numpy.generic]) -> DeviceArray:
        room = self.view(self.allocate(max(count, 1) * np.dtype(dtype).itemsize))
        return room.view(dtype)[:count]

    def zeros(self, count: int, dtype: type[numpy.generic]) -> DeviceArray:
        array = self.empty(count, dtype)
        self.zero(array)
        return array

    def scratch(self, name: str, count: int, dtype: type[numpy.generic]) -> DeviceArray:
        """Return scratch memory, dtype[count] with any content, valid until the next call with this name and dtype.

        Scratch memory never shrinks. Allocation may stop the device, and none happens once the sizes have settled.
        """
        key = name, np.dtype(dtype)
        array = self._scratch.get(key)
        if array is None or array.size < count:
            array = self._scratch[key] = self.empty(max(count + count // 8, 64), dtype)
        return array[:count]

    def zeroed(self, name: str, count: int) -> DeviceArray:
        """Return zeros, int64[count], in scratch memory."""
        array = self.scratch(name, count, np.int64)
        self.zero(array)
        return array

    def record(self) -> DeviceArray:
        """Return a record of zeros for one encode (kernels/record.py)."""
        return self.zeroed("record", RECORD)

    @property
    def done(self) -> DeviceArray:
        """The counter of `last_block`, int64[1]. Kernels leave it zero."""
        if self._done is None:
            self._done = self.zeros(1, np.int64)
        return self._done

    @property
    def complete(self) -> DeviceArray:
        """The record of an encode that misses no value: zeros."""
        if self._complete is None:
            self._complete = self.zeros(TOLD, np.int64)
        return self._complete

    def zero(self, array: DeviceArray) -> None:
        if array.size:
            self.counts["memsets"] += 1
            driver.device_memset(array, 0, array.nbytes, stream=self.stream)

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        if source.size:
            self.counts["device copies"] += 1
            target.copy_to_device(source, stream=self.stream)

    # Copies to the host and back.

    def pinned(self, count: int) -> npt.NDArray[numpy.uint8]:
        """Return page-locked host memory, uint8[count], to which the device writes directly.

        Page-locking takes milliseconds, so the caller keeps the memory.
        """
        return cast(npt.NDArray[numpy.uint8], cuda.pinned_array(count, np.uint8))

    def read(self, array: DeviceArray) -> npt.NDArray[Any]:
        """Return a copy on the host. Waits for all work of this stream."""
        self.counts["reads"] += 1
        self.counts["bytes down"] += array.nbytes
        host = array.copy_to_host(stream=self.stream)
        if self.stream:
            self.stream.synchronize()
        return cast(npt.NDArray[Any], host)

    def upload(self, name: str, host: npt.NDArray[Any]) -> DeviceArray:
        """Return a copy of `host` in scratch memory. The caller may change `host` as soon as the call returns."""
        there = self.scratch(f"received {name}", host.size, host.dtype.type)
        if host.size:
            self.counts["copies up"] += 1
            self.counts["bytes up"] += host.nbytes
            there.copy_to_device(host, stream=self.stream)
            if self.stream:
                self.stream.synchronize()  # numba does not keep pageable memory alive for the copy
        return there

    def load(self, host: npt.NDArray[Any], target: DeviceArray) -> None:
        """Set target = host. The caller may change `host` as soon as the call returns."""
        if host.size:
            self.counts["copies up"] += 1
            self.counts["bytes up"] += host.nbytes
            target.copy_to_device(host, stream=self.stream)
            if self.stream:
                self.stream.synchronize()

    def fetch(self, sources: Sequence[DeviceArray], targets: Sequence[npt.NDArray[numpy.uint8]]) -> QueueLanding:
        """Begin copies to page-locked host memory: after the stream's work so far, in parallel to its later work."""

        def copies() -> None:
            for source, target in zip(sources, targets, strict=True):
                self.counts["copies down"] += 1
                self.counts["bytes down"] += source.nbytes
                source.copy_to_host(target, stream=self.stream)

        return self._beside(copies)

    def launch_beside(self, kernel: Any, count: int, *arguments: Any) -> QueueLanding:
        """Launch a kernel that writes to page-locked host memory (`mapped`), in the order of `fetch`."""
        return self._beside(lambda: self.launch(kernel, count, THREADS, *arguments))

    def _beside(self, begin: Callable[[], None]) -> QueueLanding:
        ready, landed = cuda.event(), cuda.event()
        ready.record(self.stream)
        caller, self.stream = self.stream, self._landing_stream()
        try:
            ready.wait(self.stream)
            begin()
            landed.record(self.stream)
        finally:
            self.stream = caller
        return QueueLanding(landed)

    def mapped(self, pinned: npt.NDArray[Any]) -> DeviceArray:
        """Return page-locked host memory as an argument of kernels: with unified addressing all of it is mapped."""
        return devicearray.FakeCUDAArray(pinned) if SIMULATED else self.view(_OnHost(pinned))

    def _landing_stream(self) -> Any:
        """Return the stream of copies to the host. It and the legacy default stream do not wait for each other."""
        if self._landing is None:
            if SIMULATED:
                self._landing = cuda.stream()
            else:
                bindings = import_module("cuda.bindings.driver")
                error, handle = bindings.cuStreamCreate(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
                if error != bindings.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"the GPU gave no stream: {error.name}")
                self._landing = cuda.external_stream(int(handle))
        return self._landing
