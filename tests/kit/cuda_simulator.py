"""Runs kernels in numba-cuda's simulator faster than its own blocks do, and with shared memory that is one array.

The simulator starts a thread for each thread of each block, polls the threads, and replaces its module at each call of
a device function. These took two thirds of the time of the checks.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

BARRIER_S = 60.0  # in which the threads of a block meet, on a busy machine too
CALM_S = sys.getswitchinterval()  # Python's, 5 ms
SWITCH_S = 1e-5  # more interleavings are seen, for half as much time again
FOLDER = "narrows.compression.cuda."

_shared = threading.Lock()
_lanes: dict[tuple[int, ...], list[Any]] = {}  # by the shape of a block
_modules: list[dict[str, Any]] = []  # of kernels: their names
_order = random.Random(0)


def shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
    """Return the shared array of this line, which begins with garbage.

    It replaces the simulator's function, with which two threads that come first at once get two arrays.
    """
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    with _shared:
        if place not in self._allocations:
            self._allocations[place] = (
                np.frombuffer(np.random.bytes(np.empty(shape, dtype).nbytes), dtype).reshape(shape).copy()
            )
        return self._allocations[place]


class Block:
    """Runs the threads of one block, in place of the simulator's manager.

    Threads wait for each other at a barrier. A thread that has ended is not waited for.
    """

    def __init__(self, f: Callable[..., None], grid: Any, block: tuple[int, ...], debug: bool) -> None:
        self.f, self._block_dim = f, block
        self.block_state = np.zeros(block, np.bool_)
        self.args: tuple[Any, ...] = ()
        self.lock, self.over = threading.Lock(), threading.Lock()
        self.waiting: list[Any] = []
        self.left = 0
        self.over.acquire()

    def run(self, where: Any, *args: Any) -> None:
        if self._block_dim not in _lanes:
            _lanes[self._block_dim] = [lane_at(point, self) for point in np.ndindex(*self._block_dim)]
        lanes = _lanes[self._block_dim]
        self.args, self.left = args, len(lanes)
        for lane in lanes:
            lane.enters(self, where)
        for lane in in_any_order(lanes):
            lane.go.release()
        self.over.acquire()
        for kind, trace in [lane.exception for lane in lanes if lane.exception]:
            raise kind.with_traceback(trace)

    def meet(self, lane: Any) -> None:
        with self.lock:
            self.waiting.append(lane)
            self._pass()
        if not lane.go.acquire(timeout=BARRIER_S):
            raise RuntimeError(f"threads of a block did not meet within {BARRIER_S} s")

    def end(self) -> None:
        with self.lock:
            self.left -= 1
            self._pass()
            if not self.left:
                self.over.release()

    def _pass(self) -> None:
        if len(self.waiting) == self.left:
            passing, self.waiting = self.waiting, []
            for lane in in_any_order(passing):
                lane.go.release()


def in_any_order(lanes: list[Any]) -> list[Any]:
    return sorted(lanes, key=lambda lane: _order.random())


def lane_at(point: tuple[int, ...], first: Block) -> Any:
    """Make the thread that runs this point of all blocks, one after the other."""
    simulator: Any = import_module("numba.cuda.simulator.kernel")

    class Lane(simulator.BlockThread):  # type: ignore[misc]
        def enters(self, block: Block, where: Any) -> None:
            self._manager, self.blockIdx = block, simulator.Dim3(*where)
            self.exception: Any = None

        def run(self) -> None:
            while True:
                self.go.acquire()
                block = self._manager
                try:
                    block.f(*block.args)
                except Exception as error:
                    text = f"thread {self.threadIdx} of block {self.blockIdx}: {error}"
                    self.exception = type(error)(text), error.__traceback__
                finally:
                    block.end()

        def syncthreads(self) -> None:
            self._manager.meet(self)

    lane = Lane(None, first, (0, 0, 0), point, False)
    lane.go = threading.Lock()
    lane.go.acquire()
    lane.start()
    return lane


@contextmanager
def swapped(kernel: Any, inside: Any) -> Iterator[None]:
    """While a kernel runs, set `cuda` in each module with device functions to the simulator's module for kernels."""
    outside = import_module("numba.cuda")
    if not _modules:
        _modules.extend(vars(module) for name, module in sys.modules.items() if name.startswith(FOLDER))
    places = [names for names in _modules if names.get("cuda") is outside]
    for names in places:
        names["cuda"] = inside
    try:
        yield
    finally:
        for names in places:
            names["cuda"] = outside


def install() -> None:
    """Make all later kernels of this process run in these blocks."""
    simulator: Any = import_module("numba.cuda.simulator.kernel")
    kernel, launch = simulator.FakeCUDAKernel, simulator.FakeCUDAKernel.__call__
    import_module("numba.cuda.simulator.kernelapi").FakeCUDAShared.array = shared_array
    simulator.BlockManager, simulator.swapped_cuda_module = Block, swapped
    kernel.__call__ = lambda self, *args: self.fn(*args) if self._device else launch(self, *args)
