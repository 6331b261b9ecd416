"""Runs with a start: bsp with pushed gradients first, then another mode, while every fault strikes. No other run can break
these:

    the start     its clocks are pushed as gradients, all others as updates (one plan, at a clock: replans.py)
    the moments   a worker that begins at the clock where the start ended gets the state that the optimizer of each shard
                  had there, before it pushes; all others get none
    its length    the start ends at the clock that was asked for, also where a move of keys or a crash comes in between
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from narrows.protocols.config.modes import FoldRule
from narrows.ps.coordinator.coordinator import Coordinator
from simulation.actors import Kit, Process, SummingSGD, Worker
from simulation.campaigns import Case, Run, Trace, case_of
from simulation.mirror import FloatArray, Violation
from simulation.replans import PlanChecker
from simulation.resharding import Moved, Moves
from simulation.simulator import Random


@dataclass(frozen=True, slots=True)
class Start:
    """A run with a start, and to how many shards its keys move, from which clock on."""

    case: Case
    moves: tuple[tuple[int, int], ...]


def start_of(seed: int, restart: bool = False, kills: bool = False) -> Start:
    """The start of a run in any mode that pushes updates. In half of them the keys move at about its end."""
    random = Random(seed * 2 + restart)
    found = (case_of(other, restart, kills) for other in count(seed * 31))
    case = next(case for case in found if may_start(case))
    steps = random.between(1, 9)
    settings = replace(case.settings, start_steps=steps, replan="off").validated()
    moves = ((max(0, steps - random.between(1, 2)), 2 if settings.shards == 3 else 3),) if random.chance(0.5) else ()
    return Start(replace(case, settings=settings, torn=0 if moves else case.torn), moves)


def may_start(case: Case) -> bool:
    """Not with trim: of a gradient the mirror adds what is left in another order, which shows in the last bit."""
    return case.settings.mode().rule is not FoldRule.OPTIMIZER and not case.settings.robust.startswith("trim")


class StartChecker(PlanChecker):
    """The checker of a `Started`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.handed: dict[tuple[int, int], FloatArray] = {}  # by generation and shard: the state of its optimizer
        self.taken: set[tuple[int, int, int]] = set()  # worker, epoch and shard

    def _on_generation(self, coordinator: Coordinator, effects: Any) -> None:
        settings = coordinator.run.settings
        if settings.start_clock >= 0 and settings.start_clock != settings.start_steps:
            raise Violation(f"a start of {settings.start_steps} steps ends at clock {settings.start_clock}")
        super()._on_generation(coordinator, effects)

    def _on_quorum(self, coordinator: Coordinator) -> None:
        """A start has none."""
        if not coordinator.run.settings.starting:
            super()._on_quorum(coordinator)

    def saved(self, process: Process, clock: int) -> None:
        super().saved(process, clock)
        shard = process.shard
        if shard.settings.hands_over(clock):
            where = process.index, clock, shard.settings.shards
            self.disk[where] = replace(
                self.disk[where], momentum=self.handed[shard.ledger.generation, process.index].copy()
            )

    def loaded(self, process: Process, clock: int) -> None:
        super().loaded(process, clock)
        shard, held = process.shard, self.mirrors[process.index].held
        if shard.settings.hands_over(clock):
            self.handed[shard.ledger.generation, process.index] = held.momentum
            held.momentum = np.zeros_like(held.momentum)

    def moments_arrived(self, worker: Worker, shard: int, clock: int, payload: bytes) -> None:
        generation = self.given.generation_of[worker.worker, worker.epoch]
        right = self.handed[generation, shard].tobytes()
        if clock != worker.settings.start_clock or payload != right:
            raise Violation(f"{worker.name} takes {payload!r} of clock {clock} over from shard {shard}, not {right!r}")
        self.taken.add((worker.worker, worker.epoch, shard))

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        super().pushed(worker, clock, values, samples)
        who, settings = (worker.worker, worker.epoch), worker.settings
        if settings.starting == (clock >= settings.start_steps):
            raise Violation(f"{worker.name} pushes clock {clock} of a start of {settings.start_steps} steps")
        begun = self.given.starts[who]
        shards = {shard for shard in range(settings.shards) if (*who, shard) in self.taken}
        if shards != ({*range(settings.shards)} if begun == settings.start_clock else set()):
            raise Violation(f"{worker.name}, which began at clock {begun}, has the state of the optimizers of {shards}")


class Started(Moved):
    """One run, to the end of everyone."""

    def __init__(self, start: Start, kit: Kit | None = None, trace: Trace | None = None) -> None:
        kit = kit or Kit()
        super().__init__(Moves(start.case, start.moves), replace(kit, optimizer=SummingSGD), trace)
        self.drawn, self.settings = start, start.case.settings.begun()
        self.checker: StartChecker = StartChecker(self)

    def _serve(self, index: int, life: int) -> None:
        """A shard that begins anew, where no keys move, has lost what it wrote since the start was over."""
        loses = self.restarts and index in self.servers and not self.drawn.moves
        if loses and self.settings.start_clock >= 0:
            self.disk.drop_after(index, self.settings.start_clock - 1)
        super()._serve(index, life)

    def server_event(self, process: Process) -> None:
        super().server_event(process)
        coordinator = process.coordinator
        if coordinator is None or self.servers.get(0) is not process:
            return
        settings = coordinator.run.settings
        if settings.plan_number != self.settings.plan_number:
            self.settings = replace(
                settings, shards=self.settings.shards
            )  # as ps/command/shard_supervisor.py learns it
            self.sim.struck["start over" if settings.start_clock >= 0 else "start again"] += 1

    def run(self) -> Started:
        super().run()
        return self
