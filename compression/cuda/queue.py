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
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.cuda.arrays import DeviceArray, device_array_of
from narrows.compression.cuda.jit import SIMULATED, THREADS, Kernel
from narrows.compression.kernels.record import RECORD, TOLD

Allocate = Callable[[int], Any]
EVENTS_MAX = 64  # events that wait for their next use


def driver_of(number: int) -> Any:
    """Return the driver of a device. Raises what `CudaDriver` raises."""
    if SIMULATED:
        from narrows.compression.cuda.simulator import SimulatedDriver

        return SimulatedDriver()
    from narrows.compression.cuda.driver import CudaDriver

    return CudaDriver(number)


class QueueLanding:
    """Copies to page-locked host memory that are under way."""

    def __init__(self, queue: "Queue", event: Any) -> None:
        self.queue, self.event = queue, event

    def done(self) -> bool:
        """Return whether the copies are complete, without waiting."""
        return bool(self.queue.driver.has_happened(self.event))

    def wait(self) -> None:
        """Wait until the copies are complete. Other threads of this process run meanwhile."""
        self.queue.driver.wait(self.event)

    def __del__(self) -> None:
        if len(self.queue.events) < EVENTS_MAX:
            self.queue.events.append(self.event)  # what it waited for is older than what it will wait for next


class Queue:
    """The queue of one device. One thread at a time may use it.

    Args:
        driver: the driver of the device, from `driver_of`.
        allocate: makes an array of so many bytes with a __cuda_array_interface__, from torch's memory pool for example;
            None: the driver allocates.
        current: returns the stream of the caller, a CUstream; 0: the legacy default stream.

    Attributes:
        counts: launches, memsets, reads (which wait for the device), copies and bytes down and up, so far.
    """

    def __init__(self, driver: Any, allocate: Allocate | None = None, current: Callable[[], int] = lambda: 0) -> None:
        self.driver, self.current = driver, current
        self.allocate: Allocate = allocate or self.driver.allocate
        self.counts: Counter[str] = Counter()
        self.events: list[Any] = []
        self._current = 0
        self.stream = self.driver.stream_of(0)
        self._streams: dict[int, Any] = {0: self.stream}
        self._landing: Any = None
        self._done: DeviceArray | None = None
        self._complete: DeviceArray | None = None
        self._scratch: dict[tuple[str, np.dtype[Any]], DeviceArray] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside this context the thread launches on this device, on the caller's present stream.

        Work on another stream than before waits for the earlier work, because all streams share the scratch memory.
        """
        self.driver.enter()
        try:
            stream = self.current()
            if stream != self._current:
                if stream not in self._streams:
                    self._streams[stream] = self.driver.stream_of(stream)
                before, self.stream = self.stream, self._streams[stream]
                self._current = stream
                event = self._event()
                self.driver.record(event, before)
                self.driver.wait_for(event, self.stream)
                self.events.append(event)
            yield
        finally:
            self.driver.leave()

    def _event(self) -> Any:
        return self.events.pop() if self.events else self.driver.event()

    # Launches.

    def prepare(self, say: Callable[[str], None]) -> None:
        """Compile all kernels, or load them from disk.

        Args:
            say: called with a line while they are compiled.

        Raises:
            RuntimeError: a kernel cannot be compiled here.
        """
        self.driver.prepare(say)

    def launch(self, kernel: Kernel, count: int, per_block: int, *arguments: Any) -> None:
        """Launch a kernel on a grid for `count` items.

        Args:
            kernel: the kernel.
            count: the number of items.
            per_block: the items that a block takes at a time. The grid has no more blocks than are resident.
            arguments: the arguments of the kernel.
        """
        self.counts["launches"] += 1
        self.driver.launch(kernel, max(1, -(-count // per_block)), self.stream, arguments)

    # Memory.

    def view(self, array: Any) -> DeviceArray:
        """Return a view of an array with a __cuda_array_interface__, without a copy and without a wait."""
        return device_array_of(array)

    def empty(self, count: int, dtype: Any) -> DeviceArray:
        return self.view(self.allocate(max(count, 1) * np.dtype(dtype).itemsize)).view(dtype)[:count]

    def zeros(self, count: int, dtype: Any) -> DeviceArray:
        array = self.empty(count, dtype)
        self.zero(array)
        return array

    def scratch(self, name: str, count: int, dtype: Any) -> DeviceArray:
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
            self.driver.zero(array, self.stream)

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        if source.size:
            self.counts["device copies"] += 1
            self.driver.copy(source, target, self.stream)

    # Copies to the host and back.

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        """Return page-locked host memory, uint8[count], to which the device writes directly.

        Page-locking takes milliseconds, so the caller keeps the memory.
        """
        memory: npt.NDArray[np.uint8] = self.driver.pinned(count)
        return memory

    def read(self, array: DeviceArray) -> npt.NDArray[Any]:
        """Return a copy on the host. Waits for all work of this stream."""
        self.counts["reads"] += 1
        self.counts["bytes down"] += array.nbytes
        host = np.empty(array.size, array.dtype)
        if host.size:
            self.driver.copy_down(array, host, self.stream)
            self.driver.synchronize(self.stream)
        return host

    def upload(self, name: str, host: npt.NDArray[Any]) -> DeviceArray:
        """Return a copy of `host`, which is pageable, in scratch memory. The caller may change `host` then."""
        there = self.scratch(f"received {name}", host.size, host.dtype.type)
        self._copy_up(host, there)
        return there

    def load(self, host: npt.NDArray[Any], target: DeviceArray) -> None:
        """Set target = host. Waits for the copy, so the caller may change `host` then."""
        if self._copy_up(host, target):
            self.driver.synchronize(self.stream)

    def _copy_up(self, host: npt.NDArray[Any], target: DeviceArray) -> int:
        if host.size:
            self.counts["copies up"] += 1
            self.counts["bytes up"] += host.nbytes
            self.driver.copy_up(host, target, self.stream)
        return host.size

    def fetch(self, sources: Sequence[DeviceArray], targets: Sequence[npt.NDArray[np.uint8]]) -> QueueLanding:
        """Begin copies to page-locked host memory: after the stream's work so far, in parallel to its later work."""

        def copies() -> None:
            for source, target in zip(sources, targets, strict=True):
                self.counts["copies down"] += 1
                self.counts["bytes down"] += source.nbytes
                self.driver.copy_down(source, target, self.stream)

        return self._beside(copies)

    def launch_beside(self, kernel: Kernel, count: int, *arguments: Any) -> QueueLanding:
        """Launch a kernel that writes to page-locked host memory (`mapped`), in the order of `fetch`."""
        return self._beside(lambda: self.launch(kernel, count, THREADS, *arguments))

    def _beside(self, begin: Callable[[], None]) -> QueueLanding:
        if self._landing is None:
            self._landing = self.driver.own_stream()
        ready, landed = self._event(), self._event()
        self.driver.record(ready, self.stream)
        caller, self.stream = self.stream, self._landing
        try:
            self.driver.wait_for(ready, self.stream)
            begin()
            self.driver.record(landed, self.stream)
        finally:
            self.stream = caller
            self.events.append(ready)
        return QueueLanding(self, landed)

    def mapped(self, pinned: npt.NDArray[Any]) -> DeviceArray:
        """Return page-locked host memory as an argument of kernels: with unified addressing all of it is mapped."""
        return DeviceArray(pinned.ctypes.data, pinned.size, pinned.dtype, pinned)
