"""Runs that change their plan by themselves: links get narrow and wide again, while every fault strikes. No other run
can break these:

    one plan      whoever has a place in a generation, shard or worker, has the plan of that generation
    at a clock    no clock is pushed under two plans
    the bound     a worker computes on states that are as new as its plan wants them (invariants.py, by its settings)
    nothing lost  as where keys move (resharding.py): a change of the plan is a move over the same shards

A worker's measurements are made up: its true link has no rate. The coordinator's decisions on them are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import ServerEffect
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow, packed
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.metrics import MemberMetrics
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.planner.codec_costs import coded
from narrows.ps.replication.events import MachineEvent
from simulation.actors import KEYS, Kit, Process, Worker
from simulation.campaigns import Case, Run, Trace, case_of
from simulation.mirror import FloatArray, Violation
from simulation.resharding import MoveChecker, Moved, Moves
from simulation.simulator import Random

CLOCKS = 60  # of each worker: three times what other runs have, for a plan takes its time
OWN_S = 0.05
WIDE, NARROW = 1e6, 4 * KEYS / 20  # bytes a second: a whole update takes nothing, or 20 s
CODED = coded("dense")


@dataclass(frozen=True, slots=True)
class Drops:
    """A run, the clock from which its links are narrow, and the one from which they are wide again."""

    case: Case
    narrow: int
    wide: int


def drops_of(seed: int, restart: bool = False, kills: bool = False) -> Drops:
    """The drops of a run whose updates are added and whose plan can change."""
    random = Random(seed * 2 + restart)
    found = (case_of(other, restart, kills) for other in count(seed * 31))
    modes = ((case, case.settings.mode()) for case in found)
    case = next(case for case, mode in modes if mode.bound is not None and mode.rule is FoldRule.ADD)
    begins: dict[str, Any] = {"sync": "bsp", "staleness": -1} if random.chance(0.5) else {"sync": "ssp", "staleness": 1}
    begins |= {"compress": "dense", "compress_down": "dense", "replan": "change", "replan_after": 1.0}
    settings = replace(case.settings, **begins).validated()
    return Drops(replace(case, settings=settings, torn=0), random.between(1, 9), random.between(25, 35))


class Pricing(Coordinator):
    """As ps-serve makes it: it knows what SPECs cost."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more | {"coded": CODED})


class Told(MemberMetrics):
    """A worker's figures of itself."""

    def __init__(self, worker: Worker, run: Replanned) -> None:
        super().__init__()
        self.worker, self.run = worker, run

    def packed(self, meter: LinkMeter, streams: int, now_ns: int) -> bytes:
        steps, rate = self.worker.steps, self.run.rate
        figures = Summary(steps=steps, compute_seconds=OWN_S * steps, rate_up=rate, rate_down=rate)
        return packed([SummaryRow((), "", "", figures)])


class PlanChecker(MoveChecker):
    """The checker of a `Replanned`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.plans: dict[int, Settings] = {}  # of generations
        self.plan_at: dict[int, int] = {}  # clock -> the plan that it was pushed under

    def _on_generation(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        run = coordinator.run
        before, self.plans[run.generation] = self.plans.get(self.generation), run.settings
        if before is not None and run.settings.plan_number < before.plan_number:
            raise Violation(f"plan {before.plan_number} is followed by plan {run.settings.plan_number}")
        self.plan_at = {clock: plan for clock, plan in self.plan_at.items() if clock < run.restart_clock}
        super()._on_generation(coordinator, effects)

    def follow(self, process: Process) -> None:
        """A shard that goes on under another plan has what the checkpoint of that clock has."""
        before = self.mirrors.get(process.index)
        super().follow(process)
        after = self.mirrors.get(process.index)
        if before is not None and after is not None and after is not before and after.store.publication >= 0:
            self.loaded(process, process.shard.ledger.restart_clock)

    def worker_started(self, worker: Worker) -> None:
        super().worker_started(worker)
        self._has_plan(self.given.generation_of.get((worker.worker, worker.epoch), -1), worker.settings, worker.name)

    def _has_plan(self, generation: int, settings: Settings, who: str) -> None:
        plan = self.plans.get(generation)
        if plan is not None and plan != settings:
            raise Violation(
                f"{who} has plan {settings.plan_number} in a generation of plan {plan.plan_number}: {settings.summary()}"
            )

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        super().pushed(worker, clock, values, samples)
        if self.given.generation_of.get((worker.worker, worker.epoch)) != self.generation:
            return  # it does not know yet that its place is none
        plan = self.plan_at.setdefault(clock, worker.settings.plan_number)
        if plan != worker.settings.plan_number:
            raise Violation(
                f"clock {clock} is pushed under plan {plan} and, by {worker.name}, {worker.settings.plan_number}"
            )

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        super().server_event(process, effects, event, source)
        shard = process.shard
        if shard.model_shard is not None:
            self._has_plan(shard.ledger.generation, shard.settings, f"shard {shard.index}")


class Replanned(Moved):
    """One run, to the end of everyone. `plans`: the versions that it came to."""

    clocks = CLOCKS

    def __init__(self, drops: Drops, kit: Kit | None = None, trace: Trace | None = None) -> None:
        kit = kit or Kit()
        kit = replace(kit, coordinator=Pricing if kit.coordinator is Coordinator else kit.coordinator)
        super().__init__(Moves(drops.case, ()), kit, trace)
        self.checker: PlanChecker = PlanChecker(self)
        self.drops, self.rate = drops, WIDE
        self.plans: list[int] = []

    def _work(self, index: int, life: int) -> None:
        super()._work(index, life)
        self.workers[index].member.figures = Told(self.workers[index], self)

    def server_event(self, process: Process) -> None:
        super().server_event(process)
        coordinator = process.coordinator
        if coordinator is None or self.servers.get(0) is not process:
            return
        narrow = self.drops.narrow <= coordinator.min_clock < self.drops.wide
        self.rate = NARROW if narrow else WIDE
        settings = coordinator.run.settings
        if settings.plan_number != self.settings.plan_number:
            self.settings = settings  # as ps/command/shard_supervisor.py learns it
            self.plans.append(settings.plan_number)
            self.sim.struck["plan changed"] += 1

    def run(self) -> Replanned:
        super().run()
        return self
