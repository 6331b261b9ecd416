"""A pipeline is tried before it is printed: its passes, its tensors and the exchanges of its stages in virtual time. No I/O.

Rules
- Each process makes the passes of `stages.order`. A tensor leaves when its pass is over, and the next pass waits for its own.
- Tensors and updates pass the wires of ps/planner/trial.py. The exchange of a stage's replicas is a `Trial`, whose
  workers compute what the pipeline has to: so both share wires and time.
- A tensor is sent whole, and an update in chunks as large: TCP shares a link evenly.
- `alone` is one step without exchanges. Its critical path says what the step waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from narrows.protocols.config.deployment import StageEdge
from narrows.protocols.effects import NS
from narrows.ps.planner.choose import DeploymentChoice
from narrows.ps.planner.modes_and_specs import BELOW, ModeAndSpec
from narrows.ps.planner.network_wires import NetworkWires, Wires
from narrows.ps.planner.pipelines.cost import Layout
from narrows.ps.planner.pipelines.stages import BACKWARD, FORWARD, SHARES, PipelineModel, order
from narrows.ps.planner.step_prices import StepPrices, TrainingWork
from narrows.ps.planner.timeline import CHUNKS, Stream, Timeline
from narrows.ps.planner.trial import EVENTS_MAX, Trial, TrialLevel, TrialWorker

CHUNKS_MAX = 64  # of an update
EVENTS, LEAST_CLOCKS = 3, 5  # of a pass, with its tensor; of a trial


@dataclass(frozen=True, slots=True)
class StagePart:
    """Of a step: what `stage` computes on a host, or, with -1 for the stage, what passes between two hosts."""

    stage: int
    host: int
    other: int = -1


@dataclass(slots=True)
class StagePass:
    """One that is over. waited: for a tensor, beyond the end of the pass before it."""

    begin_ns: int
    end_ns: int
    waited: bool


class StageProcess:
    """One stage of one replica."""

    def __init__(self, run: SimulatedPipeline, stage: int, replica: int) -> None:
        self.run, self.stage, self.replica = run, stage, replica
        self.host = int(run.layout.grid[stage, replica])
        self.order = order(stage, run.model.micro_batches, [edge.in_flight for edge in run.edges])
        self.pass_ns = run.pass_ns(stage, replica)
        self.came, self.used = [0, 0], [0, 0]  # tensors forward and backward, of all steps
        self.passes: list[StagePass] = []  # of this step
        self.computing, self.free_ns = False, 0
        self.over: Callable[[], None] = lambda: None
        self.idle = True

    def begin(self, over: Callable[[], None]) -> None:
        """A step; `over` is called at its end."""
        self.passes, self.over, self.idle = [], over, False
        self.free_ns = self.run.time.now_ns
        self._go()

    def come(self, direction: int) -> None:
        """A tensor of a neighbour."""
        self.came[direction] += 1
        self._go()

    def _go(self) -> None:
        if self.idle or self.computing:
            return
        direction, now_ns = self.order[len(self.passes)], self.run.time.now_ns
        if self.run.neighbour(self.stage, -1 if direction == FORWARD else 1) is not None:
            if self.came[direction] == self.used[direction]:
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
        if len(self.passes) == len(self.order):
            self.idle = True
            self.over()
        self._go()


class SimulatedPipeline:
    """All replicas of a layout. `edges`: how they are coded, and what is in flight."""

    def __init__(self, prices: StepPrices, layout: Layout, model: PipelineModel, edges: Sequence[StageEdge]) -> None:
        self.prices, self.layout, self.model, self.edges = prices, layout, model, edges
        self.time, self.wires = Timeline(), Wires()
        self.stages, self.replicas = layout.grid.shape
        self.micro_s = model.micro_s(prices.network, layout)
        self.streams: dict[tuple[int, int, int], Stream] = {}  # by stage and replica of the sender, and direction
        self.processes = [[StageProcess(self, s, r) for r in range(self.replicas)] for s in range(self.stages)]

    @property
    def tensor_bytes(self) -> float:
        """Of the largest one."""
        sizes = (self.model.sent_bytes(edge, direction) for edge in self.edges for direction in (FORWARD, BACKWARD))
        return max(sizes, default=0.0)

    def neighbour(self, stage: int, step: int) -> int | None:
        return stage + step if 0 <= stage + step < self.stages else None

    def pass_ns(self, stage: int, replica: int) -> tuple[int, int]:
        """Of a forward and of a backward pass, with the coding of what comes and goes."""
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
            path = NetworkWires(self.prices, self.wires, max(1.0, size)).path(process.host, other.host)
            self.streams[key] = Stream(self.time, path, int(size), 1)
        self.streams[key].send(partial(other.come, direction))

    def alone(self) -> float:
        """Seconds of one step without exchanges."""
        for row in self.processes:
            for process in row:
                process.begin(lambda: None)
        while self.time.step():
            pass
        return self.time.now_ns / NS

    def critical(self) -> Mapping[StagePart, float]:
        """Seconds that each part has of the step that `alone` has made, along its critical path."""
        found: defaultdict[StagePart, float] = defaultdict(float)
        process = max((p for row in self.processes for p in row), key=lambda p: p.passes[-1].end_ns)
        for here, sender, seconds in self._path(process):
            link = (-1, *sorted((here.host, sender.host))) if sender else None
            found[StagePart(*link) if link else StagePart(here.stage, here.host)] += seconds
        return found

    def _path(self, process: StageProcess) -> Iterator[tuple[StageProcess, StageProcess | None, float]]:
        """Backwards from the last pass of this process: (who computes, None, seconds), (receiver, sender, seconds)."""
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


class PipelineSimulation(TrialWorker):
    """A worker of a stage: a step is what its pipeline has to do."""

    def __init__(self, level: TrialLevel, process: StageProcess, alone_s: float) -> None:
        super().__init__(level, process.host)
        self.process = process
        # Of several steps a clock, the first is simulated, and the others are as long as one without an exchange.
        self.rest_ns = int((self.mode.local_steps - 1) * alone_s * NS) + level.encode_ns

    def compute(self) -> None:
        self.process.begin(self._stepped)

    def _stepped(self) -> None:
        time = self.process.run.time
        time.at(time.now_ns + self.rest_ns, self.done)


class StageExchange(Trial):
    """The run of one stage's replicas, on the wires and in the time of their pipelines."""

    def __init__(
        self, run: SimulatedPipeline, stage: int, server: int, way: ModeAndSpec, step_s: float, alone_s: float
    ) -> None:
        self.processes = {process.host: process for process in run.processes[stage]}
        self.alone_s, self.chunk = alone_s, run.tensor_bytes
        work = TrainingWork(run.model.stage_parameters(run.layout, stage), alone_s, run.model.coded)
        alone = tuple((host,) for host in self.processes)
        plan = DeploymentChoice(alone, tuple(self.processes), server, way, BELOW[0], step_s, step_s)
        super().__init__(StepPrices(run.prices.network, work), plan, run.time, run.wires)

    def worker(self, level: TrialLevel, host: int) -> TrialWorker:
        return PipelineSimulation(level, self.processes[host], self.alone_s)

    def chunks(self, size: int) -> int:
        return min(CHUNKS_MAX, ceil(size / self.chunk)) or 1 if self.chunk else CHUNKS


def step_s(
    run: SimulatedPipeline,
    servers: Sequence[int],
    ways: Sequence[ModeAndSpec],
    steps_s: Sequence[float],
    alone_s: float,
) -> float | None:
    """Seconds of a step with the exchanges of all stages; None where that takes too many events. `run`: a fresh one.

    servers, ways, steps_s: of each stage, its server's host, its mode, and the step as predicted. alone_s: as `alone` says.
    """
    passes = 2 * run.layout.grid.size * run.model.micro_batches
    if LEAST_CLOCKS * EVENTS * passes > EVENTS_MAX:
        return None
    told = zip(servers, ways, steps_s, strict=True)
    first, *_ = [StageExchange(run, stage, *each, alone_s) for stage, each in enumerate(told)]
    return first.step_s()
