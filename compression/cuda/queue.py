"""The queue of one device: launches and copies that run in order on one stream, and the scratch memory that they share.

Rules
- Each launch, memset and copy names its stream: the caller's (torch's current stream). So it runs after the caller's
  earlier work on that stream, and before the later work.
- Payloads cross to the host on a stream of their own, from an event of the caller's stream on.
- A grid has no more blocks than can be resident at once. The queue asks CUDA for this number once a kernel is compiled.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import SPARE_WORDS, words_of
from narrows.compression.cuda.arrays import DeviceArray, InputArray, device_array_of
from narrows.compression.cuda.jit import SIMULATED, THREADS, ArrayRef, Kernel, SumRef
from narrows.compression.device.stages import BitStream, UploadPart
from narrows.compression.kernels.record import (
    INPUTS,
    KEY_HIGH,
    KEY_LOW,
    PHASE,
    RECORD,
    RESIDUAL,
    SUMS,
    TOLD,
    UPDATE,
    Sum,
)

Allocate = Callable[[int], Any]
WIDE_BYTES = 16  # of four values that are loaded at once
EVENTS_MAX = 64  # events that wait for their next use
STAGED_MAX = 64 << 20  # bytes of a payload that goes to the device by page-locked memory of ours
GRAPHS_MAX = 64  # CUDA graphs of a queue; the one that was used least lately goes
CAPTURED = (
    "the script captures its step as a CUDA graph, and a step of a worker waits for payloads: "
    "call optimizer.step() after the captured part"
)
Result = TypeVar("Result")


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


class _Active:
    """The context of `Queue.active`, which may be entered again inside itself."""

    def __init__(self, queue: "Queue") -> None:
        self.queue = queue

    def __enter__(self) -> None:
        self.queue.enter()

    def __exit__(self, *_: object) -> None:
        self.queue.driver.leave()


class _Staged:
    """Page-locked memory for payloads on their way to the device, and the event after the last copy from it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.memory, self.event = np.empty(0, np.uint8), None

    def room(self, size: int) -> npt.NDArray[np.uint8]:
        """Return uint8[size], once the last copy from it has ended."""
        if self.event is not None:
            self.driver.wait(self.event)
        if self.memory.size < size:
            self.memory = self.driver.pinned(size + size // 8)
        return self.memory[:size]

    def copied(self, stream: Any) -> None:
        """Note that the stream copies from it."""
        if self.event is None:
            self.event = self.driver.event()
        self.driver.record(self.event, stream)


class CapturedGraph(NamedTuple):
    """A CUDA graph of launches that are the same at each encode.

    Attributes:
        graph: of the driver.
        result: what the launches returned: arrays in scratch memory, which the graph's kernels write to.
        counts: what the launches count.
    """

    graph: Any
    result: Any
    counts: tuple[tuple[str, int], ...]


class ScratchGrowsError(Exception):
    """A launch that is captured needs more scratch memory than there is."""


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
        self._active = _Active(self)
        self._current = 0
        self.stream = self.driver.stream_of(0)
        self._streams: dict[int, Any] = {0: self.stream}
        self._landing: Any = None
        self._inputs: DeviceArray | None = None
        self._inputs_now, self._inputs_told = np.zeros(INPUTS, np.int64), [0] * INPUTS
        self._staged = _Staged(driver), _Staged(driver)
        self._done: DeviceArray | None = None
        self._complete: DeviceArray | None = None
        self._scratch: dict[tuple[str, Any], tuple[DeviceArray, DeviceArray]] = {}  # whole, and what was asked for last
        self._graphs: OrderedDict[Hashable, CapturedGraph | None] = OrderedDict()  # None: its launches ran once
        self._captured: Any = None  # the stream of captures
        self._capturable = self.driver.captures
        self._captures = False
        self._aligned = True  # four values of each array of the present encode can be loaded at once

    def active(self) -> AbstractContextManager[None]:
        """Inside this context the thread launches on this device, on the caller's present stream.

        Work on another stream than before waits for the earlier work, because all streams share the scratch memory.
        """
        return self._active

    def enter(self) -> None:
        """Begin `active`.

        Raises:
            RuntimeError: the script captures a graph of its own on its stream.
        """
        self.driver.enter()
        stream = self.current()
        if self.driver.is_captured(self._streams.get(stream) or self.driver.stream_of(stream)):
            self.driver.leave()
            raise RuntimeError(CAPTURED)
        if stream != self._current:
            if stream not in self._streams:
                self._streams[stream] = self.driver.stream_of(stream)
            before, self.stream = self.stream, self._streams[stream]
            self._current = stream
            event = self._event()
            self.driver.record(event, before)
            self.driver.wait_for(event, self.stream)
            self.events.append(event)

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

    # Graphs.

    def captured(self, key: Hashable, launches: Callable[[], Result]) -> Result:
        """Launch what `launches` launches: the first time as it does, then captured once, then as a CUDA graph.

        Args:
            key: of all that decides the arguments of these launches, but for the inputs (`begin`) and the scratch
                memory. If that grows, all graphs are captured again.
            launches: launches kernels and memsets on the stream, and neither waits nor copies. It returns the same each
                time.

        Returns:
            What `launches` returns.
        """
        key = key, self._aligned
        if not self._capturable or key not in self._graphs:
            result = launches()  # the first time it settles the scratch memory
            self._graphs[key] = None
            if len(self._graphs) > GRAPHS_MAX:
                self._drop(self._graphs.popitem(last=False)[1])
            return result
        graph = self._graphs[key] or self._capture(launches)
        if graph is None:
            return launches()
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        for name, count in graph.counts:
            self.counts[name] += count
        self.driver.replay(graph.graph, self.stream)
        result = graph.result
        return result

    def _capture(self, launches: Callable[[], Any]) -> CapturedGraph | None:
        """Capture launches on a stream of its own: the caller's may be the legacy default stream, which cannot be."""
        if self._captured is None:
            self._captured = self.driver.own_stream()
        caller, self.stream, self._captures = self.stream, self._captured, True
        counts, self.counts = self.counts, Counter()
        graph: Any = None
        try:
            self.driver.begin_capture(self.stream)
            try:
                result = launches()
            finally:
                graph = self.driver.end_capture(self.stream)
            return CapturedGraph(graph, result, (*self.counts.items(), ("graphs", 1)))
        except ScratchGrowsError:
            self.driver.drop(graph)
            return None
        except RuntimeError:  # a driver that captures nothing of this: then kernels are launched
            self._capturable = False
            return None
        finally:
            self.stream, self._captures, self.counts = caller, False, counts

    def drop_graphs(self) -> None:
        """Forget all graphs. They are captured again when they are needed."""
        while self._graphs:
            self._drop(self._graphs.popitem()[1])

    def _drop(self, graph: CapturedGraph | None) -> None:
        if graph is not None:
            self.driver.drop(graph.graph)

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
        found = self._scratch.get((name, dtype))
        if found is None or found[0].size < count:
            if self._captures:
                raise ScratchGrowsError
            if found is not None:
                self.drop_graphs()  # they write to the memory that goes
            whole = self.empty(max(count + count // 8, 64), dtype)
            found = self._scratch[name, dtype] = (whole, whole[:count])
        elif found[1].size != count:
            found = self._scratch[name, dtype] = (found[0], found[0][:count])
        return found[1]

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

    # The inputs of an encode.

    def begin(self, addends: Sum, phase: int = 0, seed: int = 0, key: tuple[int, int] = (0, 0)) -> Sum:
        """Tell the kernels of an encode what differs from the last one, in one small copy.

        Args:
            addends: the arrays.
            phase: of a turn of Cycle or CycleTop.
            seed: of RandomK.
            key: of random codes.

        Returns:
            The same arrays, of which kernels take the addresses from that copy.
        """
        residual, decay, update, sums = addends
        places = residual.address, update.address, sums.address
        self._aligned = not (places[0] | places[1] | places[2]) % WIDE_BYTES
        self._tell(dict(enumerate((*places, phase, seed, *key))))  # in the order of the slots
        return Sum(InputArray(residual, RESIDUAL), decay, InputArray(update, UPDATE), InputArray(sums, SUMS))

    def sum_ref(self, addends: Sum, phase: int | None = None) -> SumRef:
        """Return a sum as an argument of a kernel; of one that has not begun, tell its addresses now."""
        if not isinstance(addends.sums, InputArray):
            self._tell({RESIDUAL: addends.residual.address, UPDATE: addends.update.address, SUMS: addends.sums.address})
        inputs = self.inputs if phase is None else self.told(PHASE, phase)
        return SumRef(inputs, addends.sums.size, addends.decay)

    def ref(self, array: DeviceArray) -> ArrayRef:
        """Return an array as an argument of a kernel that takes an `ArrayRef`."""
        if isinstance(array, InputArray):
            return ArrayRef(self.scratch("nothing", 0, array.dtype.type), self.inputs, array.slot, array.size)
        return ArrayRef(array, self.inputs, -1, 0)

    def told(self, slot: int, number: int) -> DeviceArray:
        """Return the inputs, in which `number` is at `slot`."""
        self._tell({slot: number})
        return self.inputs

    def rounding(self, extra: tuple[int, int, int]) -> tuple[int, DeviceArray]:
        """Return (1 if codes are rounded at random, the inputs) for (that, the two halves of the key)."""
        if extra[0]:
            self._tell({KEY_LOW: extra[1], KEY_HIGH: extra[2]})
        return extra[0], self.inputs

    @property
    def inputs(self) -> DeviceArray:
        """What the host tells the kernels of an encode, int64[INPUTS]."""
        if self._inputs is None:
            self._inputs = self.empty(INPUTS, np.int64)
            self.driver.copy_up(self._inputs_now, self._inputs, self.stream)
        return self._inputs

    def _tell(self, numbers: dict[int, int]) -> None:
        inputs, told = self.inputs, self._inputs_told
        if any(told[slot] != number for slot, number in numbers.items()):
            for slot, number in numbers.items():
                told[slot] = number
            self._inputs_now[:] = told
            assert not self._captures, "the inputs of an encode are told before its launches are captured"
            self.counts["inputs"] += 1
            self.driver.copy_up(self._inputs_now, inputs, self.stream)

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

    def upload(self, parts: Sequence[UploadPart]) -> list[DeviceArray]:
        """Return copies of the parts of a payload in scratch memory, in one copy. The caller may change the parts then.

        Each begins where four values can be loaded at once. The copies are valid until the next call.
        """
        places, end = [], 0
        for part in parts:
            size = (part.part.size + 7) // 8 * 8 + 8 * SPARE_WORDS if isinstance(part, BitStream) else part.nbytes
            places.append((end, size))
            end += -(-size // WIDE_BYTES) * WIDE_BYTES
        there = self.scratch("received", end, np.uint8)
        if end > STAGED_MAX:
            for part, (begin, _) in zip(parts, places, strict=True):
                host = words_of(part.part) if isinstance(part, BitStream) else part
                self._copy_up(host.view(np.uint8), there[begin : begin + host.nbytes])
        elif end:
            self._copy_up_staged(parts, places, there)
        kinds = [np.dtype(np.uint64) if isinstance(part, BitStream) else part.dtype for part in parts]
        return [there[begin : begin + size].view(kind) for (begin, size), kind in zip(places, kinds, strict=True)]

    def _copy_up_staged(self, parts: Sequence[UploadPart], places: list[tuple[int, int]], there: DeviceArray) -> None:
        """Copy by page-locked memory: two arrays take turns, so that one fills while the other one is copied."""
        staged = self._staged[self.counts["copies up"] % 2]
        memory = staged.room(there.size)
        self._fill(memory, parts, places)
        self._copy_up(memory, there)
        staged.copied(self.stream)

    def _fill(self, memory: npt.NDArray[np.uint8], parts: Sequence[UploadPart], places: list[tuple[int, int]]) -> None:
        for part, (begin, size) in zip(parts, places, strict=True):
            host = part.part if isinstance(part, BitStream) else part.view(np.uint8)
            memory[begin : begin + host.size] = host
            memory[begin + host.size : begin + size] = 0

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
