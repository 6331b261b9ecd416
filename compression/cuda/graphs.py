"""CUDA graphs of launches that are the same each time but for the inputs of an encode (inputs.py).

How it works
1. The first time launches are launched. So the scratch memory gets its size, since a capture may not allocate.
2. The second time they are captured, and the graph is replayed. So it is from then on.
3. Scratch memory that grows drops all graphs (scratch.py), since they write to the memory that goes. A capture that needs
   more of it ends without a graph, and its launches are launched.

Rules
- Launches are captured on a stream of the queue's own: the caller's may be the legacy default stream, which cannot be
  captured.
- A driver that captures nothing launches everything.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from narrows.compression.cuda.streams import Streams

GRAPHS_MAX = 64  # CUDA graphs of a queue; the one that was used least lately goes
Result = TypeVar("Result")


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


class GraphCache:
    """The CUDA graphs of a queue, by a key of all that decides their launches.

    Args:
        driver: the driver of the device.
        streams: of the queue.
        counts: of the queue. A replay counts what its launches count, and itself as "graphs".

    Attributes:
        capturing: launches go to a graph now, and not to the device.
    """

    def __init__(self, driver: Any, streams: Streams, counts: Counter[str]) -> None:
        self.driver, self.streams, self.counts = driver, streams, counts
        self.capturing = False
        self._capturable: bool = driver.captures
        self._graphs: OrderedDict[Hashable, CapturedGraph | None] = OrderedDict()  # None: its launches ran once

    def run(self, key: Hashable, launches: Callable[[], Result]) -> Result:
        """Launch what `launches` launches, and return what it returns; see `Queue.captured`."""
        if not self._capturable or key not in self._graphs:
            result = launches()
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
        self.driver.replay(graph.graph, self.streams.present)
        result = graph.result
        return result

    @property
    def kept(self) -> int:
        """The number of graphs that are kept, at most GRAPHS_MAX."""
        return sum(graph is not None for graph in self._graphs.values())

    def drop(self) -> None:
        """Forget all graphs. They are captured again when they are needed."""
        while self._graphs:
            self._drop(self._graphs.popitem()[1])

    def _drop(self, graph: CapturedGraph | None) -> None:
        if graph is not None:
            self.driver.drop(graph.graph)

    def _capture(self, launches: Callable[[], Any]) -> CapturedGraph | None:
        stream, before, graph = self.streams.own("capture"), self.counts.copy(), None
        self.capturing = True
        try:
            self.driver.begin_capture(stream)
            try:
                result = self.streams.on(stream, launches)
            finally:
                graph = self.driver.end_capture(stream)
            return CapturedGraph(graph, result, (*(self.counts - before).items(), ("graphs", 1)))
        except ScratchGrowsError:
            self.driver.drop(graph)
            return None
        except RuntimeError:  # a driver that captures nothing of this: then kernels are launched
            self._capturable = False
            return None
        finally:
            self.capturing = False
            self.counts.clear()
            self.counts.update(before)
