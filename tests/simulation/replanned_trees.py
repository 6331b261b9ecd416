"""Trees of clusters in which a level changes its plan by itself, while every fault strikes: the root, whose clusters go on, or
each cluster, whose place above stays. No other run can break these rules:

    one plan      a cluster's shard pushes under the plan of the generation above that its place is of
    at a clock    no clock is pushed under two plans, and no child pushes more at a place that a plan has ended
    exactly once  all that was given before the change is folded by then, and none of it again
    no gap        a cluster's shard goes up at every clock of it that it went up at before
    nothing lost  a shard goes on with the weights that it had; what a cluster owes above is what it owed (tree_invariants.py)

The figures that a child measures of its link are made up; what the coordinator makes of them is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, ServerEffect
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow, packed
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.resharding import ReshardPhase
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.replication.events import MachineEvent
from simulation.actors import Kit, Process, Worker
from simulation.mirror import FloatArray, Violation
from simulation.replans import NARROW, OWN_S, WIDE, Pricing
from simulation.shard_kills import Kill
from simulation.simulator import Random
from simulation.tree_invariants import Child, Level
from simulation.trees import ABOVE, BELOW, Node, Road, Trace, Tree, TreeCase, tree_of

CLOCKS = 45  # of each worker
LEASES = 4  # in which a change is given up, or is done
FAR = Kill(0, 1 << 60, 0, NS)  # never comes: a process that may be killed keeps a journal
BEGINS: dict[str, dict[str, Any]] = {
    "bsp": {"sync": "bsp", "push": "update"},
    "ssp": {"sync": "ssp", "staleness": 1},
}
PLAN = {"compress": "dense", "compress_down": "dense", "replan": "change", "replan_after": 1.0}


@dataclass(frozen=True, slots=True)
class Fall:
    """A tree, the root's clock from which the links of one level are narrow, and that from which they are wide again."""

    case: TreeCase
    narrow: int
    wide: int
    kills: int  # of a server process, in each change


def fall_of(seed: int, level: str = "above", kills: bool = False) -> Fall:
    """The root changes its plan, `inside` each cluster its own, or `both` do, each at its clock."""
    random = Random(seed)
    changes = {**[*BEGINS.values()][seed % 2], **PLAN}
    above, below = ({**[*rows.values()][seed // 2 % len(rows)], "replan": "off"} for rows in (ABOVE, BELOW))
    above, below = above if level == "inside" else changes, below if level == "above" else changes
    case = tree_of(seed, above, below, 2, random.between(1, 2), CLOCKS, shards=random.between(1, 2), faulty=True)
    return Fall(case, random.between(1, 5), random.between(18, 24), random.between(1, 3) if kills else 0)


class PlanLevel(Level):
    """The level of a `PlanNode`. `plan_of`: of each child's place, once it is a member; `ended`:
    places that another plan has ended."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.settings = node.settings
        self.plan_of: dict[Child, Settings] = {}
        self.plan_at: dict[int, int] = {}  # clock -> the plan that it was pushed under
        self.ended: set[Child] = set()

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        if process.coordinator is not None:
            self._planned(process.coordinator)
        super().server_event(process, effects, event, source)

    def _planned(self, coordinator: Coordinator) -> None:
        run = coordinator.run
        if run.generation != self.generation:
            if self.generation >= 0:
                self._changed(coordinator)
            self.settings = self.node.settings = run.settings
        for seat in run.declared:
            self.plan_of.setdefault((seat.worker, seat.epoch), run.settings)

    def _changed(self, coordinator: Coordinator) -> None:
        run, at = coordinator.run, coordinator.run.restart_clock
        if run.settings.plan_number != self.settings.plan_number + 1:
            raise Violation(f"{self.node.name}: plan {run.settings.plan_number} follows {self.settings.plan_number}")
        for seat in run.declared:
            child = (seat.worker, seat.before)
            if child in self.asked:  # it waits for the last model, and asks for it again at its new place
                self.asked[seat.worker, seat.epoch] = self.asked[child]
                continue
            given = self.made_by_shards(child, self.given.starts[child])
            if not at == self.min_clock == coordinator.min_clock or {*given} != {at}:
                raise Violation(f"{self.node.name} changes its plan at clock {at}, child {child} has given {given}")
            self.ended.add(child)
        self.node.tree.sim.struck["plan changed"] += 1

    def child_gave(self, shard: int, child: Child, clock: int, values: FloatArray, samples: int) -> None:
        super().child_gave(shard, child, clock, values, samples)
        self._gave(child, clock)

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        super().pushed(worker, clock, values, samples)
        self._gave((worker.worker, worker.epoch), clock)

    def _gave(self, child: Child, clock: int) -> None:
        if child in self.ended:
            raise Violation(f"{self.node.name}: child {child} gives update {clock} at a place that a plan has ended")
        if child in self.plan_of:
            plan = self.plan_of[child].plan_number
            if self.plan_at.setdefault(clock, plan) != plan:
                raise Violation(f"clock {clock} is pushed under plan {self.plan_at[clock]} and, by {child}, {plan}")

    def _above(self, process: Process, above: ParentPush) -> None:
        super()._above(process, above)
        parent, place = self.node.parent, above.seat.place
        assert parent is not None and isinstance(parent.checker, PlanLevel)
        plan = parent.checker.plan_of.get((place.worker, place.epoch), place.settings)
        coding = above.feedback.compressor.spec
        if plan != place.settings or above.seat.mode != plan.mode() or above.seat.exchange.mode != plan.mode():
            raise Violation(f"{process.port} has plan {place.settings.summary()} at a place of {plan.summary()}")
        if (coding == "dense") != (plan.compress == "dense"):
            raise Violation(f"{process.port} codes with {coding} at a place of {plan.summary()}")


class PlanNode(Node):
    level = PlanLevel

    def __init__(self, tree: Tree, name: str, settings: Settings, parent: Node | None, road: Road | None) -> None:
        self.striking = False
        self.pushed_at: dict[
            int, tuple[int, int]
        ] = {}  # by shard: member number above and the clock here, of the newest
        super().__init__(tree, name, settings, parent, road)

    def send(self, source: str, target: str, message: m.Message) -> None:
        if isinstance(message, m.Heartbeat):
            message = replace(message, summary=self._measured(source))
        super().send(source, target, message)

    def _measured(self, source: str) -> bytes:
        """Return what a worker here, or this cluster, says of itself."""
        assert isinstance(self.tree, Changing)
        worker = next((worker for worker in self.workers.values() if worker.name == source), None)
        steps, server = (len(self.pushes_ns), self.parent) if worker is None else (worker.steps, self)
        assert server is not None
        rate = self.tree.rate if server.settings.replan == "change" else WIDE
        figures = Summary(steps=steps, compute_seconds=OWN_S * steps, rate_up=rate, rate_down=rate)
        return packed([SummaryRow((), "", "", figures)])

    def kills_of(self, index: int) -> list[Kill]:
        assert isinstance(self.tree, Changing)
        return [FAR] * bool(self.tree.fall.kills) + super().kills_of(index)

    def pushed_up(self, shard: int) -> None:
        super().pushed_up(shard)
        machine = self.servers[shard].shard
        seat, clock = machine.parent_slot.seat, machine.min_clock
        assert seat is not None
        place = seat.place
        member, before = self.pushed_at.get(shard, (-1, -1))
        if member == place.worker and clock > before + place.settings.local_steps:
            raise Violation(f"{self.prefix}s{shard} has clocks {before} to {clock}, and pushes no update in between")
        self.pushed_at[shard] = (place.worker, clock)

    def server_event(self, process: Process) -> None:
        super().server_event(process)
        coordinator = process.coordinator
        if coordinator is None:
            return
        moves = coordinator.resharding
        if moves.holds and not self.striking:
            self.sim.struck["plan begun"] += 1
            assert isinstance(self.tree, Changing)
            self.tree.strike()
        self.striking = moves.holds
        if moves.phase is ReshardPhase.STILL and moves.why:
            self.sim.struck["plan given up"] += 1
            moves.why = ""


class Changing(Tree):
    """One run, to the end of everyone."""

    node = PlanNode

    def __init__(self, fall: Fall, kit: Kit | None = None, trace: Trace | None = None) -> None:
        self.fall, self.rate = fall, WIDE
        kit = kit or Kit()
        super().__init__(fall.case, replace(kit, coordinator=Pricing), trace)

    def moved(self, node: Node) -> None:
        if node is self.root:
            narrow = self.fall.narrow <= node.checker.min_clock < self.fall.wide
            self.rate = NARROW if narrow else WIDE
        super().moved(node)

    def allowed_ns(self, strikes: Counter[str]) -> int:
        lease_ns = int(max(self.case.above.lease, self.case.below.lease) * NS)
        return super().allowed_ns(strikes) + strikes["plan begun"] * LEASES * lease_ns

    def strike(self) -> None:
        """Kill server processes in the midst of a change, most of them of clusters."""
        random = self.sim.random
        for _ in range(self.fall.kills):
            node = self.nodes[random.between(0, len(self.nodes) - 1)]
            process = node.servers.get(random.between(0, node.settings.shards - 1))
            if process is not None and process.kills[-1:] == [FAR]:
                event = process.events + random.between(1, 30)
                process.kills.append(Kill(process.index, event, random.between(0, 3), random.between(1, NS)))

    def run(self) -> Changing:
        super().run()
        return self
