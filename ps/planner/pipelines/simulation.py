"""The clock of a pipeline in virtual time: the passes and tensors of one step, without exchanges of stages. No I/O.

How it works
1. A `StageProcess` is one stage of one replica. It makes the forward and backward passes of `stages.order` in that
   order.
2. A pass that needs a tensor of a neighbour waits for it. At the end of a pass the process sends its own tensor, and
   goes on.
3. A `Stream` carries the tensors from one process to another, each whole. All streams share the wires of
   `StepPrices.path`.
4. The step is over with the last pass. `critical` then goes backwards from that pass: it follows the tensor where a
   pass waited for one, and the process itself where not. So each second of the step belongs to one host or to one link.

ps/planner/pipelines/staged_planner.py adds the exchanges by closed forms.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from narrows.protocols.config.deployment import StageEdge
from narrows.protocols.effects import NS
from narrows.ps.planner.pipelines.cost import Layout
from narrows.ps.planner.pipelines.stages import BACKWARD, FORWARD, SHARES, PipelineModel, order
from narrows.ps.planner.step_prices import StepPrices, WireKey
from narrows.ps.planner.timeline import Timeline, Wire, delay_ns, passed_ns

FAST = 1 << 50  # bytes a second of a wire on which bytes take no time


@dataclass(frozen=True, slots=True)
class StagePart:
    """A part of a step: the computing of a stage on a host, or the messages between two hosts."""

    stage: int  # -1 for messages
    host: int
    other: int = -1  # the other host of messages, -1 for computing


@dataclass(slots=True)
class StagePass:
    """A finished pass."""

    begin_ns: int
    end_ns: int
    waited: bool  # the pass waited for a tensor after the pass before it had ended


class Stream:
    """The connection between two processes: its messages of `size` bytes pass the wires one after the other."""

    def __init__(self, time: Timeline, wires: Sequence[Wire], size: int) -> None:
        self.time, self.wires, self.size, self.delay_ns = time, wires, size, delay_ns(wires)
        self.waiting: deque[Callable[[], None]] = deque()  # the actions on arrival; the first message is on the wires

    def send(self, on_arrival: Callable[[], None]) -> None:
        self.waiting.append(on_arrival)
        if len(self.waiting) == 1:
            self._pass()

    def _pass(self) -> None:
        end_ns = passed_ns(self.wires, self.time.now_ns, self.size)
        self.time.at(end_ns + self.delay_ns, self.waiting[0])
        self.time.at(end_ns, self._passed)

    def _passed(self) -> None:
        self.waiting.popleft()
        if self.waiting:
            self._pass()


class StageProcess:
    """One stage of one replica."""

    def __init__(self, run: SimulatedPipeline, stage: int, replica: int) -> None:
        self.run, self.stage, self.replica = run, stage, replica
        self.host = int(run.layout.grid[stage, replica])
        self.order = order(stage, run.model.micro_batches, [edge.in_flight for edge in run.edges])
        self.pass_ns = run.pass_ns(stage, replica)
        self.received, self.used = [0, 0], [0, 0]  # numbers of tensors, forward and backward
        self.passes: list[StagePass] = []
        self.computing, self.free_ns = False, 0

    def receive(self, direction: int) -> None:
        """Take the next tensor of a neighbour."""
        self.received[direction] += 1
        self.go_on()

    def go_on(self) -> None:
        """Begin the next pass, unless one is under way, none is left, or its tensor is missing."""
        if self.computing or len(self.passes) == len(self.order):
            return
        direction, now_ns = self.order[len(self.passes)], self.run.time.now_ns
        if self.run.neighbour(self.stage, -1 if direction == FORWARD else 1) is not None:
            if self.received[direction] == self.used[direction]:
                return
            self.used[direction] += 1
        self.computing = True
        self.run.time.at(now_ns + self.pass_ns[direction], self._passed, direction, now_ns)

    def _passed(self, direction: int, begin_ns: int) -> None:
        now_ns = self.run.time.now_ns
        self.computing = False
        self.passes.append(StagePass(begin_ns, now_ns, begin_ns > self.free_ns))
        self.free_ns = now_ns
        self.run.send(self, direction)
        self.go_on()


class SimulatedPipeline:
    """The simulation of one step of a layout, with all its replicas.

    Args:
        prices: the prices of the network.
        layout: the hosts and the layers of each stage.
        model: the model of the pipeline.
        edges: the coding and the micro-batches in flight of each edge.
    """

    def __init__(self, prices: StepPrices, layout: Layout, model: PipelineModel, edges: Sequence[StageEdge]) -> None:
        self.prices, self.layout, self.model, self.edges = prices, layout, model, edges
        self.time, self.wires = Timeline(), dict[WireKey, Wire]()
        self.stages, self.replicas = layout.grid.shape
        self.micro_s = model.micro_s(prices.network, layout)
        self.streams: dict[tuple[int, int, int], Stream] = {}  # by stage and replica of the sender, and direction
        self.processes = [[StageProcess(self, s, r) for r in range(self.replicas)] for s in range(self.stages)]

    def neighbour(self, stage: int, step: int) -> int | None:
        return stage + step if 0 <= stage + step < self.stages else None

    def pass_ns(self, stage: int, replica: int) -> tuple[int, int]:
        """Return the time of a forward and of a backward pass, decoding and encoding of its tensors included."""
        found = []
        for direction, back in ((FORWARD, -1), (BACKWARD, 1)):
            seconds = float(self.micro_s[stage, replica]) * SHARES[direction]
            for step, sends in ((back, False), (-back, True)):
                if (other := self.neighbour(stage, step)) is not None:
                    edge = self.edges[min(stage, other)]
                    how = self.model.carried[(edge.forward, edge.backward)[direction]][direction]
                    seconds += self.model.cut_bytes * (how.encode_s if sends else how.decode_s)
            found.append(int(seconds * NS))
        return found[FORWARD], found[BACKWARD]

    def send(self, process: StageProcess, direction: int) -> None:
        to = self.neighbour(process.stage, 1 if direction == FORWARD else -1)
        if to is None:
            return
        key = (process.stage, process.replica, direction)
        other = self.processes[to][process.replica]
        if key not in self.streams:
            size = self.model.sent_bytes(self.edges[min(process.stage, to)], direction)
            self.streams[key] = Stream(self.time, self.path(process.host, other.host, max(1.0, size)), int(size))
        self.streams[key].send(partial(other.receive, direction))

    def path(self, sender: int, receiver: int, message_bytes: float) -> list[Wire]:
        """Return the wires between two hosts, which all streams share. The delay is that of the link."""
        found = []
        for key, rate in self.prices.path(sender, receiver, message_bytes):
            delay_s = float(self.prices.network.delay_s[sender, receiver]) if key[0] == "link" else 0.0
            found.append(self.wires.setdefault(key, Wire(int(delay_s * NS), max(1, int(min(rate, FAST))))))
        return found

    def alone(self) -> float:
        """Simulate one step without exchanges; return its seconds."""
        for row in self.processes:
            for process in row:
                process.go_on()
        while self.time.step():
            pass
        return self.time.now_ns / NS

    def critical(self) -> Mapping[StagePart, float]:
        """Return the seconds of each part on the critical path of the step that `alone` has simulated."""
        found: defaultdict[StagePart, float] = defaultdict(float)
        process = max((p for row in self.processes for p in row), key=lambda p: p.passes[-1].end_ns)
        for here, sender, seconds in self._path(process):
            link = (-1, *sorted((here.host, sender.host))) if sender else None
            found[StagePart(*link) if link else StagePart(here.stage, here.host)] += seconds
        return found

    def _path(self, process: StageProcess) -> Iterator[tuple[StageProcess, StageProcess | None, float]]:
        """Yield the critical path, backwards from the last pass of this process.

        An item is (process, None, seconds) for computing, and (receiver, sender, seconds) for a tensor.
        """
        at = len(process.order) - 1
        while at >= 0:
            each = process.passes[at]
            yield process, None, (each.end_ns - each.begin_ns) / NS
            if not each.waited:
                at -= 1
                continue
            direction = process.order[at]
            number = process.order[:at].count(direction)  # of the micro-batch
            sender = self.processes[process.stage + (-1 if direction == FORWARD else 1)][process.replica]
            at = [i for i, each in enumerate(sender.order) if each == direction][number]
            yield process, sender, (each.begin_ns - sender.passes[at].end_ns) / NS
            process = sender
