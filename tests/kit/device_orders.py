"""Finds races on a device: two accesses to the same bytes, one of them a write, that nothing orders.

The trace has each launch, memset and copy of a queue with its stream, also those of a CUDA graph that is replayed, each
event, and the reads and writes of the host. `steps` is a worker with two fragments, `turns` one with two shards, whose
script computes between two steps: what a queue does aside runs beside that.

Streams, events and waits order accesses. The order comes from vector clocks (Fidge 1988; Mattern 1989): streams and the
host are the processes, events and waits the messages. The legacy default stream counts as a stream like others, because
no torch stream may rely on its further ordering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from kit.specs import EACH_STAGE, VALUE_STAGES
from narrows.compression import parse
from narrows.compression.codecs import coded_piece, raw_pieces
from narrows.compression.cuda import jit
from narrows.compression.cuda.arrays import DeviceArray
from narrows.compression.cuda.kernels import CudaKernels
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.simulator import SimulatedDriver, on_host
from narrows.compression.cuda.staging import Uploads
from narrows.compression.cuda.streams import Streams
from narrows.compression.device.home import DeviceHome
from narrows.compression.device.stages import Staging
from narrows.compression.home import HOST as ON_HOST
from narrows.compression.kernels.record import RESIDUAL, START, SUMS, UPDATE
from narrows.compression.replica import ArrayReplica
from narrows.protocols.config.key_ranges import parts

HOST, LANDING, ASIDE = "host", "landing", "aside"
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
    begin = array.address if isinstance(array, DeviceArray) else array.ctypes.data
    return begin, begin + array.nbytes


def arrays_in(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, jit.ArrayRef | jit.SumRef):
            yield from resolved(argument)
            yield argument.inputs
        elif isinstance(argument, tuple):
            yield from arrays_in(argument)
        elif isinstance(argument, DeviceArray):
            yield argument


def resolved(ref: jit.ArrayRef | jit.SumRef) -> list[DeviceArray]:
    """Return the arrays that a kernel finds: of a sum, residual, update, start and sums."""
    if isinstance(ref, jit.ArrayRef) and ref.slot < 0:
        return [ref.array]
    slots = (ref.slot,) if isinstance(ref, jit.ArrayRef) else (RESIDUAL, UPDATE, START, SUMS)
    inputs = on_host(ref.inputs)
    return [DeviceArray(int(inputs[slot]), ref.size, np.dtype(np.float32), None) for slot in slots if inputs[slot]]


def written(kernel: jit.Kernel, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments that a kernel writes to, by its annotations."""
    found: list[Any] = []
    for hint, argument in zip(kernel.function.__annotations__.values(), arguments, strict=False):
        if hint is jit.Written:
            found += resolved(argument) if isinstance(argument, jit.ArrayRef) else arrays_in((argument,))
        elif hint is jit.LastWritten and isinstance(argument, jit.SumRef):
            found.append(resolved(argument)[-1])
    return found


class WatchedDriver(SimulatedDriver):
    """The simulated driver, which writes each call to a trace. Streams of torch are numbers, a queue's own have names.

    A graph is a list of calls, which a replay makes on its stream.
    """

    def __init__(self, trace: Trace, captures: bool) -> None:
        self.trace, self.captures = trace, captures
        self.page_locked = False
        self.locked: list[Range] = []
        self.graph: list[Callable[[Any], None]] | None = None  # the one that is captured
        self.replays = 0

    def begin_capture(self, stream: Any) -> None:
        self.graph = []

    def end_capture(self, stream: Any) -> Any:
        graph, self.graph = self.graph, None
        return graph

    def replay(self, graph: Any, stream: Any) -> None:
        self.replays += 1
        for call in graph:
            call(stream)

    def drop(self, graph: Any) -> None: ...

    def allocate(self, count: int) -> DeviceArray:
        memory = super().allocate(count)
        self.trace.alive.append(memory)
        return memory

    def pinned(self, count: int) -> Any:
        memory = super().pinned(count)
        self.trace.alive.append(memory)
        self.locked.append(range_of(memory))
        return memory

    def zero(self, array: DeviceArray, stream: Any) -> None:
        if self.graph is not None:
            self.graph.append(partial(self.zero, array))
            return
        self.trace.done(stream, "a memset", [], [range_of(array)])
        super().zero(array, stream)

    def copy(self, source: DeviceArray, target: DeviceArray, stream: Any) -> None:
        self.trace.done(stream, "a copy on the device", [range_of(source)], [range_of(target)])
        super().copy(source, target, stream)

    def copy_up(self, host: Any, target: DeviceArray, stream: Any) -> None:
        """Of pageable memory the driver has its own copy when it returns; page-locked memory is read later."""
        locked = self.page_locked or any(overlap(range_of(host), own) for own in self.locked)
        self.trace.done(stream if locked else HOST, "a look at what is copied", [range_of(host)], [])
        self.trace.done(stream, "a copy to the device", [], [range_of(target)])
        super().copy_up(host, target, stream)

    def copy_down(self, source: DeviceArray, host: Any, stream: Any) -> None:
        assert self.graph is None
        self.trace.alive.append(host)
        self.trace.done(stream, "a copy to the host", [range_of(source)], [range_of(host)])
        super().copy_down(source, host, stream)

    def synchronize(self, stream: Any) -> None:
        if self.trace.broken != "a copy of what may change is not waited for":
            self.trace.join(HOST, self.trace.clock(stream))

    def event(self) -> Any:
        return {}

    def record(self, event: Any, stream: Any) -> None:
        event["clock"], event["on"] = self.trace.clock(stream) | self.trace.clock(HOST), stream

    def wait_for(self, event: Any, stream: Any) -> None:
        if self.trace.broken != unwaited(event["on"], stream):
            self.trace.join(stream, event["clock"])

    def wait(self, event: Any) -> None:
        if self.trace.broken != "a payload is sent before it is there":
            self.trace.join(HOST, event["clock"])

    def launch(self, kernel: jit.Kernel, blocks: int, stream: Any, arguments: tuple[Any, ...]) -> None:
        if self.graph is not None:
            self.graph.append(lambda stream: self.launch(kernel, blocks, stream, arguments))
            return
        ranges = [range_of(array) for array in written(kernel, arguments)]
        others = [each for each in arrays_in(arguments) if not any(overlap(range_of(each), own) for own in ranges)]
        before = [on_host(each).copy() for each in others]
        self.trace.done(stream, kernel.name, [range_of(a) for a in arrays_in(arguments)], ranges)
        super().launch(kernel, blocks, stream, arguments)
        for each, old in zip(others, before, strict=True):
            assert on_host(each).tobytes() == old.tobytes(), f"{kernel.name} writes more"


def unwaited(before: Any, then: Any) -> str:
    """Return the planted fault that leaves out the wait of one stream for another."""
    if before == LANDING:
        return "an encode does not wait for the payload before it"
    if ASIDE in (before, then):
        return "a fold does not wait for the replica" if then == ASIDE else "the replica does not wait for a fold"
    return "a payload does not wait for its codes" if then == LANDING else "another stream waits for nothing"


class WatchedUploads(Uploads):
    def fill(self, memory: Any, parts: Any, places: Any) -> Iterator[tuple[int, int]]:
        for begin, end in super().fill(memory, parts, places):
            self.driver.trace.done(HOST, "a payload on its way up", [], [range_of(memory[begin:end])])
            yield begin, end


class WatchedQueue(Queue):
    driver: WatchedDriver

    def __init__(self, driver: WatchedDriver, current: Callable[[], int]) -> None:
        super().__init__(driver, self._allocate, current)
        self.streams._own |= {"landing": LANDING, "aside": ASIDE, "capture": "capture"}
        self.uploads = WatchedUploads(self.driver, self.streams, self.memory, self.counts)

    def _allocate(self, count: int) -> Any:
        """Return memory that the script has used until now, on its stream."""
        memory, caller = self.driver.allocate(count), self.streams._caller
        if caller is not None:
            self.driver.trace.done(caller, "the script's use of memory that it has freed", [], [range_of(memory)])
        return memory

    def read(self, array: Any) -> Any:
        found = super().read(array)
        self.driver.trace.done(HOST, "a look at what was read", [range_of(found)], [])
        return found

    def load(self, host: Any, target: Any) -> None:
        self.driver.page_locked = True
        super().load(host, target)
        self.driver.page_locked = False
        self.driver.trace.done(HOST, "a change of what was loaded", [], [range_of(host)])


def overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


class WatchedStaging(Staging):
    def lend(self, size: int) -> memoryview:
        lent = super().lend(size)
        self.kernels.queue.driver.trace.done(HOST, "a new payload", [], [range_of(np.frombuffer(lent, np.uint8))])
        return lent


@contextmanager
def watched(current: Callable[[], int], captures: bool = False) -> Iterator[tuple[Trace, CudaKernels]]:
    trace = Trace()
    yield trace, CudaKernels(WatchedQueue(WatchedDriver(trace, captures), current))


COUNT = 140
# A value coding alone is launched as any other: `coding` of cuda/values.py makes the kernels of all.
TRACED = tuple(spec for spec in EACH_STAGE if spec == "int8" or spec not in VALUE_STAGES)
STREAMS = (7, 7, 9, 9)  # of torch, at each clock, until the push
FOLDS = 7  # of torch, from the push on: only the queue orders it after the push


def steps(spec: str, broken: str = "") -> Trace:
    """Run steps of a worker with two fragments, and return their trace.

    Differences and whole states arrive, one update is not sent, and the last push has the residual.
    """
    now = [STREAMS[0]]
    with watched(lambda: 0 if broken == "launches go to the legacy stream" else now[0]) as (trace, kernels):
        trace.broken = broken
        home: DeviceHome[Any] = DeviceHome(kernels, lambda count: kernels.zeros(count, np.float32), "watched")
        with kernels.active():
            home.staging = WatchedStaging(kernels)
            fragments = [(0, 70), (70, COUNT)]
            feedbacks = [(keys, home.feedback(parse(spec), keys[1] - keys[0], 0)) for keys in fragments]
            replica = ArrayReplica(0, COUNT, feedbacks, parts, home=home, aside=True)
            base, update = home.zeros(COUNT), home.zeros(COUNT)
        stand_ins: list[Any] = []
        for clock, stream in enumerate(STREAMS):
            if now[0] != stream:  # the script sees to it that its own streams wait for each other
                trace.join(stream, trace.clock(now[0]))
            now[0] = stream
            values = np.random.default_rng(clock).standard_normal(COUNT).astype(np.float32)
            begin, end = fragments[clock % 2]
            trace.done(stream, "the optimizer's step", [range_of(base)], [range_of(update)])
            on_host(update)[:] = values
            pieces = replica.encode(update[begin:end], clock, last=clock == 3)
            for piece in pieces:
                trace.done(HOST, "the sending of a payload", [range_of(np.frombuffer(piece.payload, np.uint8))], [])
            if clock == 1 and spec != "dense":
                replica.give_back(pieces, clock)
            stand_ins += [(0.5, piece) for piece in pieces]
            now[0] = FOLDS
            state = [coded_piece(bytes(parse("topk:0.2").encode(values)), 0, COUNT)] if clock else []
            if clock != 2:  # a fold would order the streams too
                replica.absorb(state or raw_pieces(values, 0, parts(0, COUNT)), add=bool(state))
            replica.base(stand_ins, 0, COUNT, base)
            trace.done(FOLDS, "the next forward pass", [range_of(base)], [])
            trace.alive += [values, pieces]
        replica.master(raw_pieces(values, 0, parts(0, COUNT)))
    return trace


SHARD = 70  # values of each shard of `turns`
CLOCKS = 4  # of `turns`: an encode is launched, then captured, then replayed


def turns(spec: str, broken: str = "") -> Trace:
    """Run turns of a worker with two shards, and return their trace. Payloads and replicas equal the CPU's.

    States arrive while the device is still busy with the script's backward pass.
    """
    stream = STREAMS[0]
    with watched(lambda: stream, captures=True) as (trace, kernels):
        trace.broken = broken
        home: DeviceHome[Any] = DeviceHome(kernels, lambda count: kernels.zeros(count, np.float32), "watched")
        with kernels.active():
            shards = [_replica(spec, shard, home) for shard in range(2)]
            bases, update = [home.zeros(SHARD) for _ in shards], home.zeros(2 * SHARD)
            gradient = home.zeros(2 * SHARD)
        hosts = [_replica(spec, shard, ON_HOST) for shard in range(2)]
        base, own = np.zeros(SHARD, np.float32), [[], []]  # type: tuple[Any, Any]
        for clock in range(CLOCKS):
            values = np.random.default_rng(clock).standard_normal(2 * SHARD).astype(np.float32)
            trace.done(stream, "the backward pass", [], [range_of(gradient)])
            backward = trace.clock(stream)[stream]
            for replica, host in zip(shards, hosts, strict=True):
                state = [coded_piece(bytes(parse("topk:0.2").encode(values[:SHARD])), replica.begin, replica.end)]
                for each in (replica, host):
                    each.absorb(
                        state if clock else raw_pieces(values[:SHARD], replica.begin, [(replica.begin, replica.end)]),
                        add=clock > 0,
                    )
                trace.alive.append(state)
            if clock > 1:  # the first folds allocate
                assert broken or trace.clock(ASIDE)[stream] < backward, "a fold waits for the script"
            trace.done(stream, "the optimizer's step", [range_of(gradient), *map(range_of, bases)], [range_of(update)])
            on_host(update)[:] = values
            for replica in shards:
                replica.start_encode(update[replica.begin : replica.end], clock)
            for shard, (replica, host) in enumerate(zip(shards, hosts, strict=True)):
                mine = values[replica.begin : replica.end]
                own[shard] = [
                    *zip(
                        replica.encode(update[replica.begin : replica.end], clock),
                        host.encode(mine, clock),
                        strict=True,
                    )
                ]
                for ours, theirs in own[shard]:
                    trace.done(HOST, "the sending of a payload", [range_of(np.frombuffer(ours.payload, np.uint8))], [])
                    assert broken or ours.payload == theirs.payload, spec
                trace.alive += own[shard]
            for shard, (replica, host) in enumerate(zip(shards, hosts, strict=True)):
                replica.base([(0.75, ours) for ours, _ in own[shard]], replica.begin, replica.end, bases[shard])
                host.base([(0.75, theirs) for _, theirs in own[shard]], replica.begin, replica.end, base)
                assert broken or on_host(bases[shard]).tobytes() == base.tobytes(), spec
            trace.done(stream, "the next forward pass", [range_of(each) for each in bases], [])
        for replica in shards:
            for _, feedback in replica.feedbacks:
                feedback.state_dict()  # type: ignore[attr-defined]
            home.host(replica.pulled)
        replays = kernels.queue.driver.replays
    assert replays or not spec.startswith(("topk", "mstopk", "cycle", "randk", "int")), (
        f"no graph of {spec} was replayed"
    )
    return trace


def _replica(spec: str, shard: int, home: Any) -> ArrayReplica[Any]:
    begin, end = shard * SHARD, (shard + 1) * SHARD
    return ArrayReplica(
        begin, end, [((begin, end), home.feedback(parse(spec), SHARD, shard))], parts, home=home, aside=True
    )


BROKEN = (
    "a payload does not wait for its codes",
    "a payload is sent before it is there",
    "another stream waits for nothing",
    "a copy of what may change is not waited for",
    "launches go to the legacy stream",
)
BROKEN_TURNS = (
    "an encode does not wait for the payload before it",
    "a fold does not wait for the replica",
    "the replica does not wait for a fold",
)


def orders() -> None:
    for spec in TRACED:
        trace = steps(spec)
        assert trace.count > 30 and not trace.races, (spec, trace.races[:3])
        trace = turns(spec)
        assert trace.count > 30 and not trace.races, (spec, trace.races[:3])
    for broken in BROKEN:
        assert steps("topk:0.05+int8", broken).races, broken
    for broken in BROKEN_TURNS:
        assert turns("topk:0.05+int8", broken).races, broken
    with mock.patch.object(Streams, "meet"):
        assert turns("topk:0.05+int8").races, "a fold writes to memory that the script still uses"
