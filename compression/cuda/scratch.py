"""Memory of the device that the kernels of a queue share: scratch memory by name, and arrays of zeros.

Rules
- All streams share it. So work on another stream waits for the earlier work (streams.py).
- It never shrinks. Allocation may stop the device, and none happens once the sizes have settled.
- Memory that grows moves, so all graphs are dropped then (graphs.py).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from narrows.compression.cuda.arrays import DeviceArray, device_array_of
from narrows.compression.cuda.graphs import GraphCache, ScratchGrowsError
from narrows.compression.cuda.streams import Streams

Allocate = Callable[[int], Any]


class DeviceMemory:
    """The memory of a queue.

    Args:
        allocate: makes an array of so many bytes with a __cuda_array_interface__.
        streams: of the queue.
        graphs: of the queue.
    """

    def __init__(self, allocate: Allocate, streams: Streams, graphs: GraphCache) -> None:
        self.allocate, self.streams, self.graphs = allocate, streams, graphs
        self._scratch: dict[tuple[str, Any], tuple[DeviceArray, DeviceArray]] = {}  # whole, and what was asked for last
        self._zeros: dict[str, DeviceArray] = {}

    def empty(self, count: int, dtype: Any) -> DeviceArray:
        memory = device_array_of(self.allocate(max(count, 1) * np.dtype(dtype).itemsize))
        self.streams.meet()  # it may be the script's until now; what is freed for it, from now on
        return memory.view(dtype)[:count]

    def zeros(self, name: str, count: int) -> DeviceArray:
        """Return int64[count] that is zero whenever no kernel runs, always the same array for a name."""
        found = self._zeros.get(name)
        if found is None:
            found = self._zeros[name] = self.empty(count, np.int64)
            self.streams.driver.zero(found, self.streams.present)
        return found

    def scratch(self, name: str, count: int, dtype: Any) -> DeviceArray:
        """Return scratch memory, dtype[count] with any content, valid until the next call with this name and dtype."""
        found = self._scratch.get((name, dtype))
        if found is None or found[0].size < count:
            if self.graphs.capturing:
                raise ScratchGrowsError
            if found is not None:
                self.graphs.drop()
            whole = self.empty(max(count + count // 8, 64), dtype)
            found = self._scratch[name, dtype] = (whole, whole[:count])
        elif found[1].size != count:
            found = self._scratch[name, dtype] = (found[0], found[0][:count])
        return found[1]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory."""
        return sum(whole.nbytes for whole, _ in self._scratch.values())
