"""The plan of a pipeline: its layout, codings, micro-batches in flight, servers and modes. No I/O.

Rules
- With `auto`, as many directions of edges as possible are dense, those with the fastest links first, as long as a step
  costs at most LOSS_COST times a step with all edges in int8. int8 costs that factor in steps to a loss.
- A stage's server and mode are those of a data parallel run of its replicas, whose step takes as long as the
  pipeline's.
- The seconds of a step are its clock in virtual time, and the longest exchange of a stage by the forms of a data
  parallel run.
- Plans are compared by seconds of a step x steps to a loss, and by money. Then swaps of two hosts are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from narrows.compression.losses import STEPS_POWER
from narrows.protocols.config.deployment import StageEdge
from narrows.ps.planner.choose import for_stage
from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Network
from narrows.ps.planner.pipelines.cost import Costs, Job, Layout
from narrows.ps.planner.pipelines.simulation import SimulatedPipeline, StagePart
from narrows.ps.planner.pipelines.stages import (
    AUTO,
    BACKWARD,
    CODED,
    EXACT,
    FORWARD,
    PipelineModel,
    covered,
    edges_money,
    exchanges_money,
    fits,
)
from narrows.ps.planner.step_prices import BusyWire, MessageFlow, StepPrices, TrainingWork

# Across a link int8 lost up to 0.4 % over the unsplit model (bench/speed/pipeline.py). This is that loss in steps.
LOSS_COST = 1.004**STEPS_POWER
TRIED = 1 << 14  # micro-batches x hosts x layouts that swaps may try: 32 layouts of 64 hosts with 8 micro-batches
GAIN = 0.999  # a swap must bring the cost below this share


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """A layout with all that was chosen for it. Seconds and money are those of a step."""

    layout: Layout
    edges: tuple[StageEdge, ...]  # between each stage and the next
    servers: tuple[int, ...]  # by stage, the host of its server
    ways: tuple[ModeAndSpec, ...]  # by stage, its mode and SPEC
    alone_s: float  # without exchanges, in virtual time
    critical: Mapping[StagePart, float]  # seconds of each part of `alone_s` on the critical path
    stages_s: tuple[float, ...]  # by stage, with its exchange, by the forms of a data parallel run
    busiest: BusyWire  # for all messages of the step
    money: tuple[float, ...]  # by stage: its exchange, and the tensors between it and the next stage

    @property
    def step_s(self) -> float:
        return max(*self.stages_s, self.busiest.seconds)

    @property
    def steps(self) -> float:
        """Steps to a loss as a multiple of bsp's: the largest of all stages."""
        return max(way.steps(self.layout.grid.shape[1]) for way in self.ways)


class StagedPlanner:
    """Chooses servers, modes and codings for layouts of a model.

    Args:
        network: the hosts.
        model: the model of the pipeline.
        job: the same model as the search prices it.
        coding: the coding of all edges, or "auto".
    """

    def __init__(self, network: Network, model: PipelineModel, job: Job, coding: str) -> None:
        self.network, self.model, self.coding = network, model, coding
        self.costs = Costs(network, job)
        self.prices = StepPrices(network, TrainingWork(model.parameters, model.step_s, model.coded))

    def stand(self, layout: Layout) -> StagedPlan:
        """Choose the rest of a plan for `layout`."""
        network, model = self.network, self.model
        edges = self.edges(layout)
        run, alone_s = self.alone(layout, edges)
        found = [
            for_stage(
                network,
                [int(host) for host in group],
                model.stage_parameters(layout, stage),
                alone_s,
                model.coded,
                model.layer_memory_bytes is None,
            )
            for stage, group in enumerate(layout.grid)
        ]
        servers, ways, stages_s = zip(*found, strict=True)
        busiest = self.prices.busiest(self.flows(layout, edges, servers, ways))
        between = [*edges_money(network, layout, model, edges), 0.0]
        exchanged = exchanges_money(network, layout, model, servers, ways)
        costs = tuple(a + b for a, b in zip(between, exchanged, strict=True))
        return StagedPlan(layout, edges, servers, ways, alone_s, run.critical(), stages_s, busiest, costs)

    def flows(
        self, layout: Layout, edges: Sequence[StageEdge], servers: Sequence[int], ways: Sequence[ModeAndSpec]
    ) -> Iterator[MessageFlow]:
        """Yield the messages of a step: tensors between stages, updates and states inside each stage."""
        model = self.model
        for edge, pairs in zip(edges, pairwise(layout.grid.tolist()), strict=True):
            forth, back = (model.sent_bytes(edge, direction) for direction in (FORWARD, BACKWARD))
            for here, there in zip(*pairs, strict=True):
                yield MessageFlow(here, there, forth, model.micro_batches)
                yield MessageFlow(there, here, back, model.micro_batches)
        for stage, (hosts, server, way) in enumerate(zip(layout.grid.tolist(), servers, ways, strict=True)):
            yield from self.prices.exchange_flows(way, model.stage_parameters(layout, stage), hosts, (server,))

    def alone(self, layout: Layout, edges: Sequence[StageEdge]) -> tuple[SimulatedPipeline, float]:
        """Simulate a step without exchanges; return the simulation and the seconds of the step."""
        run = SimulatedPipeline(self.prices, layout, self.model, edges)
        return run, run.alone()

    def edges(self, layout: Layout) -> tuple[StageEdge, ...]:
        """Choose the coding of each edge, and the micro-batches in flight that its links then need."""
        count = len(layout.grid) - 1
        if self.coding != AUTO:
            return self.covered(layout, [StageEdge(self.coding, self.coding)] * count)
        fastest = self.fastest(layout)
        most = LOSS_COST * self.cost(layout, self.exact(layout, []))
        # Bisection for the largest number of dense directions within `most`: each further direction costs more.
        least, above = 0, len(fastest) + 1
        at = len(fastest)
        while above - least > 1:
            least, above = (at, above) if self.cost(layout, self.exact(layout, fastest[:at])) <= most else (least, at)
            at = (least + above) // 2
        return self.exact(layout, fastest[:least])

    def covered(self, layout: Layout, edges: Sequence[StageEdge]) -> tuple[StageEdge, ...]:
        return tuple(covered(self.network, layout, self.model, edges))

    def exact(self, layout: Layout, ways: Sequence[tuple[int, int]]) -> tuple[StageEdge, ...]:
        """Return the edges with these (edge, direction) dense and all others in int8."""

        def coding(edge: int, way: int) -> str:
            return EXACT if (edge, way) in ways else CODED

        every = range(len(layout.grid) - 1)
        return self.covered(layout, [StageEdge(coding(edge, FORWARD), coding(edge, BACKWARD)) for edge in every])

    def fastest(self, layout: Layout) -> list[tuple[int, int]]:
        """Return all (edge, direction), the fastest first, by the seconds of a dense tensor on their slowest link."""
        sent_s = self.network.transfer_s(self.model.cut_bytes)
        found = []
        for edge, (here, there) in enumerate(pairwise(layout.grid)):
            found += [
                (float(sent_s[here, there].max()), edge, FORWARD),
                (float(sent_s[there, here].max()), edge, BACKWARD),
            ]
        return [(edge, way) for _, edge, way in sorted(found)]

    def price(self, plan: StagedPlan) -> float:
        """Return the price of a plan: seconds of a step x steps to a loss, plus its money in seconds."""
        return plan.step_s * plan.steps + self.model.money_s * sum(plan.money)

    def descended(self, plan: StagedPlan) -> StagedPlan:
        """Swap pairs of hosts as long as that makes the plan cheaper.

        A swap is priced with exchanges only if it makes a step without exchanges cheaper. TRIED bounds the number of
        swaps.
        """
        left = TRIED // (plan.layout.grid.size * self.model.micro_batches)
        found = True
        while found and left > 0:
            found, cost = False, self.cost(plan.layout, plan.edges)
            for one, other in combinations(range(plan.layout.grid.size), 2):
                if (left := left - 1) < 0:
                    break
                layout = self.swapped(plan.layout, one, other)
                if not fits(self.network, self.model, layout):
                    continue
                if self.cost(layout, self.covered(layout, plan.edges)) < GAIN * cost:
                    moved = self.stand(layout)
                    if self.price(moved) < GAIN * self.price(plan):
                        plan, found = moved, True
                        break
        return plan

    def swapped(self, layout: Layout, one: int, other: int) -> Layout:
        """Return the layout with the hosts of two positions of the grid swapped, and depths chosen anew."""
        hosts = layout.grid.ravel().copy()
        hosts[[one, other]] = hosts[[other, one]]
        grid = hosts.reshape(layout.grid.shape)
        return Layout(grid, self.costs.depths(grid))

    def cost(self, layout: Layout, edges: Sequence[StageEdge]) -> float:
        """Return the seconds of a step without exchanges, plus the money of its edges in seconds."""
        spent = sum(edges_money(self.network, layout, self.model, edges))
        return self.alone(layout, edges)[1] + self.model.money_s * spent
