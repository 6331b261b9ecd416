"""Chooses all that the plan of a pipeline says: its layout, codings, micro-batches in flight, servers and modes. No
I/O.

Rules
- By `auto` an edge is dense each way, where a step of it costs at most LOSS_COST times what it costs with all edges in
  int8: so much int8 costs in steps to a loss. The ways with the fastest links are dense, as many as may be.
- A stage's server and mode are those of a data parallel run of its replicas, whose step is the pipeline's.
- A step takes its clock in virtual time, and the longest exchange of a stage by the forms of a data parallel run.
- Plans are compared by seconds of a step x steps to a loss, and by money. Swaps of two hosts follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from narrows.protocols.config.deployment import StageEdge
from narrows.ps.planner.choose import for_stage
from narrows.ps.planner.modes_and_specs import STEPS_POWER, ModeAndSpec
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

# Across a link int8 lost up to 0.4 % over the unsplit model (bench/speed/pipeline.py), which is so many more steps.
LOSS_COST = 1.004**STEPS_POWER
TRIED = 1 << 14  # micro-batches x hosts of the layouts that moves may try: 32 layouts of 64 hosts with 8
GAIN = 0.999  # a plan is left only for one that costs less than this of it


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """A layout that was tried. By stage: servers, ways and money; by edge: edges. Seconds are those of a step.

    money: of a stage's exchange, and of what passes between it and the next one.
    alone_s: without exchanges, in virtual time; `critical` has what each part takes of it on the critical path.
    stages_s: of each stage with its exchange, by the forms of a data parallel run. busiest: the wire that takes the
    longest for all of it.
    """

    layout: Layout
    edges: tuple[StageEdge, ...]
    servers: tuple[int, ...]
    ways: tuple[ModeAndSpec, ...]
    alone_s: float
    critical: Mapping[StagePart, float]
    stages_s: tuple[float, ...]
    busiest: BusyWire
    money: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return max(*self.stages_s, self.busiest.seconds)

    @property
    def steps(self) -> float:
        """Times the steps of bsp to a loss: those of the stage that is the latest."""
        return max(way.steps(self.layout.grid.shape[1]) for way in self.ways)


class StagedPlanner:
    """Tries layouts of a model on a network, their edges coded as `coding` says. `job`: the model's, as the search has
    it."""

    def __init__(self, network: Network, model: PipelineModel, job: Job, coding: str) -> None:
        self.network, self.model, self.coding = network, model, coding
        self.costs = Costs(network, job)
        self.prices = StepPrices(network, TrainingWork(model.parameters, model.step_s, model.coded))

    def stand(self, layout: Layout) -> StagedPlan:
        """Try `layout`."""
        network, model = self.network, self.model
        edges = self.edges(layout)
        run, alone_s = self.alone(layout, edges)
        found = [
            for_stage(
                network, [int(host) for host in group], model.stage_parameters(layout, stage), alone_s, model.coded
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
        """Yield all that a step sends: tensors between stages, updates and states inside each stage."""
        model = self.model
        for edge, pairs in zip(edges, pairwise(layout.grid.tolist()), strict=True):
            forth, back = (model.sent_bytes(edge, direction) for direction in (FORWARD, BACKWARD))
            for here, there in zip(*pairs, strict=True):
                yield MessageFlow(here, there, forth, model.micro_batches)
                yield MessageFlow(there, here, back, model.micro_batches)
        for stage, (hosts, server, way) in enumerate(zip(layout.grid.tolist(), servers, ways, strict=True)):
            yield from self.prices.exchange_flows(way, model.stage_parameters(layout, stage), hosts, (server,))

    def alone(self, layout: Layout, edges: Sequence[StageEdge]) -> tuple[SimulatedPipeline, float]:
        """A step without exchanges, and its seconds."""
        run = SimulatedPipeline(self.prices, layout, self.model, edges)
        return run, run.alone()

    def edges(self, layout: Layout) -> tuple[StageEdge, ...]:
        """Coded as `coding` says, and with so many micro-batches in flight as links then ask for."""
        count = len(layout.grid) - 1
        if self.coding != AUTO:
            return self.covered(layout, [StageEdge(self.coding, self.coding)] * count)
        fastest = self.fastest(layout)
        most = LOSS_COST * self.cost(layout, self.exact(layout, []))
        # The largest number of exact ways that cost no more: more of them cost more.
        least, above = 0, len(fastest) + 1
        at = len(fastest)
        while above - least > 1:
            least, above = (at, above) if self.cost(layout, self.exact(layout, fastest[:at])) <= most else (least, at)
            at = (least + above) // 2
        return self.exact(layout, fastest[:least])

    def covered(self, layout: Layout, edges: Sequence[StageEdge]) -> tuple[StageEdge, ...]:
        return tuple(covered(self.network, layout, self.model, edges))

    def exact(self, layout: Layout, ways: Sequence[tuple[int, int]]) -> tuple[StageEdge, ...]:
        """The edges where these (edge, direction) are dense, and the others coded."""

        def coding(edge: int, way: int) -> str:
            return EXACT if (edge, way) in ways else CODED

        every = range(len(layout.grid) - 1)
        return self.covered(layout, [StageEdge(coding(edge, FORWARD), coding(edge, BACKWARD)) for edge in every])

    def fastest(self, layout: Layout) -> list[tuple[int, int]]:
        """(edge, direction) by the seconds that the slowest pair takes for a dense tensor, the least first."""
        sent_s = self.network.transfer_s(self.model.cut_bytes)
        found = []
        for edge, (here, there) in enumerate(pairwise(layout.grid)):
            found += [
                (float(sent_s[here, there].max()), edge, FORWARD),
                (float(sent_s[there, here].max()), edge, BACKWARD),
            ]
        return [(edge, way) for _, edge, way in sorted(found)]

    def price(self, plan: StagedPlan) -> float:
        """Seconds of a step x steps to a loss, and its money."""
        return plan.step_s * plan.steps + self.model.money_s * sum(plan.money)

    def descended(self, plan: StagedPlan) -> StagedPlan:
        """The plan after swaps of two hosts, each of which makes it cheaper; those that do not shorten a step without
        exchanges are not tried with them. Layouts with TRIED micro-batches in all are looked at."""
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
        """The hosts of two places of the grid have each other's."""
        hosts = layout.grid.ravel().copy()
        hosts[[one, other]] = hosts[[other, one]]
        grid = hosts.reshape(layout.grid.shape)
        return Layout(grid, self.costs.depths(grid))

    def cost(self, layout: Layout, edges: Sequence[StageEdge]) -> float:
        """Seconds of a step without exchanges, and what the edges' money is worth."""
        spent = sum(edges_money(self.network, layout, self.model, edges))
        return self.alone(layout, edges)[1] + self.model.money_s * spent
