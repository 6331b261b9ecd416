"""Finds races on a device: two accesses to the same bytes, one of them a write, that nothing orders.

The trace has each launch, memset and copy of a queue with its stream, each event, and the reads and writes of the host.
Streams, events and waits order accesses. The order comes from vector clocks (Fidge 1988; Mattern 1989): streams and the
host are the processes, events and waits the messages. The legacy default stream counts as a stream like others, because
no torch stream may rely on its further ordering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from kit.specs import EACH_STAGE, VALUE_STAGES
from narrows.compression import parse
from narrows.compression.codecs import coded_piece, raw_pieces
from narrows.compression.cuda import jit
from narrows.compression.cuda import queue as queues
from narrows.compression.cuda.kernels import CudaKernels
from narrows.compression.device.home import DeviceHome
from narrows.compression.device.stages import Staging
from narrows.compression.replica import ArrayReplica
from narrows.protocols.config.key_ranges import parts

HOST, LANDING = "host", "landing"
Range = tuple[int, int]


class Access(NamedTuple):
    what: str
    who: Any
    tick: int
    begin: int
    end: int
    writes: bool


class Trace:
    """The accesses so far, and the races among them."""

    def __init__(self) -> None:
        self.clocks: dict[Any, Counter[Any]] = {}
        self.accesses: list[Access] = []
        self.races: list[str] = []
        self.alive: list[Any] = []  # an address is one array's for the whole trace
        self.broken = ""  # which planted fault there is
        self.count = 0

    def clock(self, who: Any) -> Counter[Any]:
        return self.clocks.setdefault(who, Counter())

    def join(self, who: Any, other: Counter[Any]) -> None:
        self.clocks[who] = self.clock(who) | other

    def done(self, who: Any, what: str, reads: list[Range], writes: list[Range]) -> None:
        """Record the accesses of a stream, which begins after the host's call, or of the host itself."""
        self.join(who, self.clock(HOST))
        clock = self.clock(who)
        clock[who] += 1
        self.count += 1
        for ranges, is_write in ((reads, False), (writes, True)):
            for begin, end in ranges:
                if begin < end:
                    self._access(Access(what, who, clock[who], begin, end, is_write), clock)

    def _access(self, new: Access, clock: Counter[Any]) -> None:
        kept = []
        for old in self.accesses:
            overlaps = old.begin < new.end and new.begin < old.end
            ordered = clock[old.who] >= old.tick
            if overlaps and not ordered and (old.writes or new.writes):
                self.races.append(f"{old.what} on {old.who}, and {new.what} on {new.who}")
            if not (new.writes and ordered and new.begin <= old.begin and old.end <= new.end):
                kept.append(old)
        self.accesses = [*kept, new]


def range_of(array: Any) -> Range:
    begin = array.ctypes.data
    return begin, begin + array.nbytes


def arrays_in(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from arrays_in(argument)
        elif hasattr(argument, "ctypes"):
            yield argument


def written(kernel: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments that a kernel writes to, by its annotations."""
    found: list[Any] = []
    for hint, argument in zip(kernel.fn.__annotations__.values(), arguments, strict=False):
        if hint is jit.Written:
            found += arrays_in((argument,))
        elif hint is jit.LastWritten and len(argument) == 4:
            found.append(argument[3])
    return found


class Stream:
    def __init__(self, trace: Trace, name: Any) -> None:
        self.trace, self.name = trace, name

    def synchronize(self) -> None:
        if self.trace.broken != "a copy of what may change is not waited for":
            self.trace.join(HOST, self.trace.clock(self.name))


def name_of(stream: Any) -> Any:
    return stream.name if isinstance(stream, Stream) else 0


class Event:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def record(self, stream: Any = 0) -> None:
        self.clock = self.trace.clock(name_of(stream)) | self.trace.clock(HOST)

    def wait(self, stream: Any = 0) -> None:
        lands = name_of(stream) == LANDING
        ignored = "a payload does not wait for its codes" if lands else "another stream waits for nothing"
        if self.trace.broken != ignored:
            self.trace.join(name_of(stream), self.clock)

    def synchronize(self) -> None:
        if self.trace.broken != "a payload is sent before it is there":
            self.trace.join(HOST, self.clock)


class Cuda:
    """Stands in for numba.cuda, with the functions that a queue calls."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.gpus = trace, jit.cuda.gpus

    def event(self) -> Event:
        return Event(self.trace)

    def external_stream(self, handle: int) -> Stream:
        return Stream(self.trace, handle)

    def stream(self) -> Stream:
        return Stream(self.trace, LANDING)

    def device_array(self, count: int, dtype: Any) -> Any:
        self.trace.alive.append(jit.cuda.device_array(count, dtype))
        return self.trace.alive[-1]

    def pinned_array(self, count: int, dtype: Any) -> Any:
        self.trace.alive.append(np.empty(count, dtype))
        return self.trace.alive[-1]


class WatchedQueue(queues.Queue):
    trace: Trace

    def launch(self, kernel: Any, count: int, per_block: int, *arguments: Any) -> None:
        writes = written(kernel, arguments)
        ranges = [range_of(array) for array in writes]
        others = [each for each in arrays_in(arguments) if not any(overlap(range_of(each), own) for own in ranges)]
        before = [each.copy_to_host.__wrapped__(each) for each in others]
        self.trace.done(name_of(self.stream), kernel.fn.__name__, [range_of(a) for a in arrays_in(arguments)], ranges)
        super().launch(kernel, count, per_block, *arguments)
        for each, old in zip(others, before, strict=True):
            assert each.copy_to_host.__wrapped__(each).tobytes() == old.tobytes(), f"{kernel.fn.__name__} writes more"

    def read(self, array: Any) -> Any:
        found = super().read(array)
        self.trace.done(HOST, "a look at what was read", [range_of(found)], [])
        return found

    def upload(self, name: str, host: Any) -> Any:
        there = super().upload(name, host)
        self.trace.done(HOST, "a change of what was uploaded", [], [range_of(host)])
        return there

    def load(self, host: Any, target: Any) -> None:
        super().load(host, target)
        self.trace.done(HOST, "a change of what was loaded", [], [range_of(host)])


def overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


class WatchedStaging(Staging):
    def lend(self, size: int) -> memoryview:
        lent = super().lend(size)
        self.kernels.queue.trace.done(HOST, "a new payload", [], [range_of(np.frombuffer(lent, np.uint8))])
        return lent


@contextmanager
def watched(current: Callable[[], int]) -> Iterator[tuple[Trace, CudaKernels]]:
    trace = Trace()
    fake: Any = import_module("numba.cuda.simulator.cudadrv.devicearray").FakeCUDAArray
    to_host, to_device = fake.copy_to_host, fake.copy_to_device

    def copy_to_host(self: Any, ary: Any = None, stream: Any = 0) -> Any:
        found = to_host(self, ary)
        trace.alive.append(found)
        trace.done(name_of(stream), "a copy to the host", [range_of(self)], [range_of(found)])
        if not stream:
            trace.join(HOST, trace.clock(0))
        return found

    def copy_to_device(self: Any, ary: Any, stream: Any = 0) -> None:
        to_device(self, ary)
        trace.alive.append(ary)
        trace.done(name_of(stream), "a copy to the device", [range_of(ary)], [range_of(self)])
        if not stream:
            trace.join(HOST, trace.clock(0))

    def device_memset(array: Any, value: int, size: int, stream: Any = 0) -> None:
        trace.done(name_of(stream), "a memset", [], [range_of(array)])
        jit.driver.device_memset(array, value, size)

    copy_to_host.__wrapped__ = to_host  # type: ignore[attr-defined]
    driver = mock.Mock(device_memset=device_memset)
    with (
        mock.patch.object(queues, "cuda", Cuda(trace)),
        mock.patch.object(queues, "driver", driver),
        mock.patch.object(fake, "copy_to_host", copy_to_host),
        mock.patch.object(fake, "copy_to_device", copy_to_device),
    ):
        queue = WatchedQueue(current=current)
        queue.trace = trace
        yield trace, CudaKernels(queue)


COUNT = 140
# A value coding alone is launched as any other: `coding` of cuda/values.py makes the kernels of all.
TRACED = tuple(spec for spec in EACH_STAGE if spec == "int8" or spec not in VALUE_STAGES)
STREAMS = (7, 7, 9)  # of torch, at each clock


def steps(spec: str, broken: str = "") -> Trace:
    """Run steps of a worker with two fragments, and return their trace.

    Differences and whole states arrive, one update is not sent, and the last push is dense.
    """
    now = [STREAMS[0]]
    with watched(lambda: 0 if broken == "launches go to the legacy stream" else now[0]) as (trace, kernels):
        trace.broken = broken
        home: DeviceHome[Any] = DeviceHome(kernels, lambda count: kernels.zeros(count, np.float32), "watched")
        with kernels.active():
            home.staging = WatchedStaging(kernels)
            fragments = [(0, 70), (70, COUNT)]
            feedbacks = [(keys, home.feedback(parse(spec), keys[1] - keys[0], 0)) for keys in fragments]
            replica = ArrayReplica(0, COUNT, feedbacks, parts, home=home)
            base, update = home.zeros(COUNT), home.zeros(COUNT)
        stand_ins: list[Any] = []
        for clock, stream in enumerate(STREAMS):
            if now[0] != stream:  # the script sees to it that its own streams wait for each other
                trace.join(stream, trace.clock(now[0]))
            now[0] = stream
            values = np.random.default_rng(clock).standard_normal(COUNT).astype(np.float32)
            begin, end = fragments[clock % 2]
            trace.done(stream, "the optimizer's step", [range_of(base)], [range_of(update)])
            update._ary[:] = values
            pieces = replica.encode(update[begin:end], clock, dense=clock == 2)
            for piece in pieces:
                trace.done(HOST, "the sending of a payload", [range_of(np.frombuffer(piece.payload, np.uint8))], [])
            if clock == 1 and spec != "dense":
                replica.give_back(pieces, clock)
            stand_ins += [(0.5, piece) for piece in pieces]
            state = [coded_piece(bytes(parse("topk:0.2").encode(values)), 0, COUNT)] if clock else []
            replica.absorb(state or raw_pieces(values, 0, parts(0, COUNT)), add=bool(state))
            replica.base(stand_ins, 0, COUNT, base)
            trace.done(stream, "the next forward pass", [range_of(base)], [])
            trace.alive += [values, pieces]
        replica.master(raw_pieces(values, 0, parts(0, COUNT)))
    return trace


BROKEN = (
    "a payload does not wait for its codes",
    "a payload is sent before it is there",
    "another stream waits for nothing",
    "a copy of what may change is not waited for",
    "launches go to the legacy stream",
)


def orders() -> None:
    for spec in TRACED:
        trace = steps(spec)
        assert trace.count > 30 and not trace.races, (spec, trace.races[:3])
    for broken in BROKEN:
        assert steps("topk:0.05+int8", broken).races, broken
