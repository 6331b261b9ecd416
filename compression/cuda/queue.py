"""The queue of one device: launches and copies that run in order on one stream, and the memory that they share.

How it works

    Queue           launches, copies: what kernels and device/ call
      Streams       which stream takes them, and what runs beside it     streams.py
      GraphCache    launches that are replayed as a CUDA graph           graphs.py
      DeviceMemory  scratch memory                                       scratch.py
      EncodeInputs  what differs from one replay to the next             inputs.py
      Uploads       payloads to the device                               staging.py

Rules
- Each launch, memset and copy names its stream: the caller's (torch's current stream). So it runs after the caller's
  earlier work on that stream, and before the later work.
- Payloads cross to the host on a stream of their own, from an event of the caller's stream on.
- A grid has no more blocks than can be resident at once. The queue asks CUDA for this number once a kernel is compiled.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from narrows.compression.cuda.arrays import DeviceArray, InputArray, device_array_of
from narrows.compression.cuda.graphs import GraphCache
from narrows.compression.cuda.inputs import EncodeInputs
from narrows.compression.cuda.jit import SIMULATED, THREADS, ArrayRef, Kernel, SumRef
from narrows.compression.cuda.scratch import Allocate, DeviceMemory
from narrows.compression.cuda.staging import Uploads
from narrows.compression.cuda.streams import QueueLanding, Streams
from narrows.compression.device.stages import UploadPart
from narrows.compression.kernels.record import (
    INPUTS,
    KEY_HIGH,
    KEY_LOW,
    PHASE,
    RECORD,
    RESIDUAL,
    START,
    STARTED,
    SUMS,
    TOLD,
    UPDATE,
    Sum,
)

Result = TypeVar("Result")


def driver_of(number: int) -> Any:
    """Return the driver of a device. Raises what `CudaDriver` raises."""
    if SIMULATED:
        from narrows.compression.cuda.simulator import SimulatedDriver

        return SimulatedDriver()
    from narrows.compression.cuda.driver import CudaDriver

    return CudaDriver(number)


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
        self.driver = driver
        self.counts: Counter[str] = Counter()
        self.streams = Streams(driver, current)
        self.graphs = GraphCache(driver, self.streams, self.counts)
        self.memory = DeviceMemory(allocate or driver.allocate, self.streams, self.graphs)
        self.uploads = Uploads(driver, self.streams, self.memory, self.counts)

    def active(self) -> AbstractContextManager[None]:
        """Inside this context the thread launches on this device, on the caller's present stream.

        Work on another stream than before waits for the earlier work, because all streams share the scratch memory.
        """
        return self.streams

    def aside(self) -> AbstractContextManager[None]:
        """Inside this context work runs beside what the script has queued and will queue on its stream.

        It runs after all earlier work of this queue, and before all later work. It may read and write arrays that nothing
        but this queue uses.
        """
        return self.streams.aside()

    def after_landings(self) -> None:
        """Let later work wait for the copies of `fetch` and `launch_beside`: it may write to their sources."""
        self.streams.after_landings()

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
        self.driver.launch(kernel, max(1, -(-count // per_block)), self.streams.present, arguments)

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
        return self.graphs.run((key, self.inputs.aligned), launches)

    # Arguments of kernels.

    @cached_property
    def inputs(self) -> EncodeInputs:
        """What the host tells the kernels of an encode."""
        return EncodeInputs(self.empty(INPUTS, np.int64), self.streams, self.graphs, self.counts)

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
        return self.inputs.begin(addends, phase, seed, key)

    def forget_inputs(self) -> None:
        """Tell all inputs of the next encode, whatever they are: a kernel has changed those of this one."""
        self.inputs.forget()

    def sum_ref(self, addends: Sum, phase: int | None = None) -> SumRef:
        """Return a sum as an argument of a kernel; of one that has not begun, tell its addresses now."""
        inputs, numbers = self.inputs, {} if phase is None else {PHASE: phase}
        if not isinstance(addends.sums, InputArray):
            residual, _, update, sums, start = addends
            numbers |= {RESIDUAL: residual.address, UPDATE: update.address, SUMS: sums.address}
            numbers |= {START: (update if start is None else start).address, STARTED: int(start is not None)}
        return SumRef(inputs.tell(numbers), addends.sums.size, addends.decay)

    def ref(self, array: DeviceArray) -> ArrayRef:
        """Return an array as an argument of a kernel that takes an `ArrayRef`."""
        if isinstance(array, InputArray):
            return ArrayRef(self.scratch("nothing", 0, array.dtype.type), self.inputs.array, array.slot, array.size)
        return ArrayRef(array, self.inputs.array, -1, 0)

    def told(self, slot: int, number: int) -> DeviceArray:
        """Return the inputs, in which `number` is at `slot`."""
        return self.inputs.tell({slot: number})

    def rounding(self, extra: tuple[int, int, int]) -> tuple[int, DeviceArray]:
        """Return (1 if codes are rounded at random, the inputs) for (that, the two halves of the key)."""
        return extra[0], self.inputs.tell({KEY_LOW: extra[1], KEY_HIGH: extra[2]} if extra[0] else {})

    @property
    def done(self) -> DeviceArray:
        """The counter of `last_block`, int64[1]. Kernels leave it zero."""
        return self.memory.zeros("done", 1)

    @property
    def complete(self) -> DeviceArray:
        """The record of an encode that misses no value: zeros."""
        return self.memory.zeros("complete", TOLD)

    # Memory.

    def view(self, array: Any) -> DeviceArray:
        """Return a view of an array with a __cuda_array_interface__, without a copy and without a wait."""
        return device_array_of(array)

    def empty(self, count: int, dtype: Any) -> DeviceArray:
        return self.memory.empty(count, dtype)

    def zeros(self, count: int, dtype: Any) -> DeviceArray:
        array = self.empty(count, dtype)
        self.zero(array)
        return array

    @property
    def scratch_bytes(self) -> int:
        return self.memory.scratch_bytes

    @property
    def graphs_kept(self) -> int:
        return self.graphs.kept

    def scratch(self, name: str, count: int, dtype: Any) -> DeviceArray:
        """Return scratch memory, dtype[count] with any content, valid until the next call with this name and dtype."""
        return self.memory.scratch(name, count, dtype)

    def zeroed(self, name: str, count: int) -> DeviceArray:
        """Return zeros, int64[count], in scratch memory."""
        array = self.scratch(name, count, np.int64)
        self.zero(array)
        return array

    def record(self) -> DeviceArray:
        """Return a record of zeros for one encode (kernels/record.py)."""
        return self.zeroed("record", RECORD)

    def zero(self, array: DeviceArray) -> None:
        if array.size:
            self.counts["memsets"] += 1
            self.driver.zero(array, self.streams.present)

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        if source.size:
            self.counts["device copies"] += 1
            self.driver.copy(source, target, self.streams.present)

    # Copies to the host and back.

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        """Return page-locked host memory, uint8[count], to which the device writes directly.

        Page-locking takes milliseconds, so the caller keeps the memory.
        """
        memory: npt.NDArray[np.uint8] = self.driver.pinned(count)
        return memory

    def mapped(self, pinned: npt.NDArray[Any]) -> DeviceArray:
        """Return page-locked host memory as an argument of kernels: with unified addressing all of it is mapped."""
        return DeviceArray(pinned.ctypes.data, pinned.size, pinned.dtype, pinned)

    def read(self, array: DeviceArray) -> npt.NDArray[Any]:
        """Return a copy on the host. Waits for all work of this stream."""
        self.counts["reads"] += 1
        self.counts["bytes down"] += array.nbytes
        host = np.empty(array.size, array.dtype)
        if host.size:
            self.driver.copy_down(array, host, self.streams.present)
            self.driver.synchronize(self.streams.present)
        return host

    def upload(self, parts: Sequence[UploadPart]) -> list[DeviceArray]:
        """Return copies of the parts of a payload in scratch memory. The caller may change the parts then.

        Each begins where four values can be loaded at once. The copies are valid until the next call. The host does not
        wait for them, so it may check the next payload meanwhile.
        """
        return self.uploads.send(parts)

    def load(self, host: npt.NDArray[Any], target: DeviceArray) -> None:
        """Set target = host. Waits for the copy, so the caller may change `host` then."""
        if self.uploads.copy(host, target):
            self.driver.synchronize(self.streams.present)

    def fetch(self, sources: Sequence[DeviceArray], targets: Sequence[npt.NDArray[np.uint8]]) -> QueueLanding:
        """Begin copies to page-locked host memory: after the stream's work so far, in parallel to its later work."""

        def copies() -> None:
            for source, target in zip(sources, targets, strict=True):
                self.counts["copies down"] += 1
                self.counts["bytes down"] += source.nbytes
                self.driver.copy_down(source, target, self.streams.present)

        return self.streams.beside(copies)

    def launch_beside(self, kernel: Kernel, count: int, *arguments: Any) -> QueueLanding:
        """Launch a kernel that writes to page-locked host memory (`mapped`), in the order of `fetch`."""
        return self.streams.beside(lambda: self.launch(kernel, count, THREADS, *arguments))
