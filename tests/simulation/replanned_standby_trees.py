"""Trees with standbys in which the root changes its plan, and its machine is lost at a moment of it; and trees without.

    Losing(losing_case(seed), aim).run()        raises Violation where an invariant does not hold
    Orphaned(losing_case(seed), aim).run()      nobody stands by: all end with 6, and the run goes on with its checkpoint

The invariants are those of standby_trees.py, and each member has one place for each plan. What clusters measure of
their links is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, ServerEffect
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow, packed
from narrows.protocols.messages import RefuseCode
from narrows.ps.coordinator.resharding import ReshardPhase
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.process.machine_factory import resumed
from narrows.ps.replication.events import MachineEvent
from simulation.actors import Kit, Process, Worker
from simulation.mirror import Violation
from simulation.replanned_trees import BEGINS, PLAN
from simulation.replans import NARROW, OWN_S, Pricing
from simulation.simulator import MS
from simulation.standby_trees import LEASE_S, House, PairCase, Pairs, Story
from simulation.tree_invariants import CLOSE
from simulation.trees import BELOW, Node, Road, Trace, Tree, tree_of

CLOCKS = 70  # of each worker
AFTER_S = 3.0  # until the plan changes: somebody stands by then
ENDED_NS = 45 * NS  # 30 s of silence until a server is lost, a lease, and what all say to each other then
AIMS = (
    ReshardPhase.TOLD,
    ReshardPhase.HELD,
    ReshardPhase.WRITING,
    ReshardPhase.PASSED,
    ReshardPhase.STILL,
)  # the last: in force


def losing_case(seed: int) -> PairCase:
    changes, below = [*BEGINS.values()][seed % 2], [*BELOW.values()][seed // 2 % len(BELOW)]
    plan = {**PLAN, "replan_after": AFTER_S}
    tree = tree_of(seed, {**changes, **plan}, {**below, "replan": "off"}, 2, 1, CLOCKS, shards=2)
    above_s, below_s = replace(tree.above, lease=LEASE_S), replace(tree.below, lease=LEASE_S)
    return PairCase(replace(tree, above=above_s, below=below_s), ("root",), ())


class PlanStory(Story):
    plans = 1  # of this node so far

    def started_at(self, who: str, place: tuple[int, int]) -> None:
        story = self if who != self.node.name or self.house.parent is None else self.house.parent.checker
        assert isinstance(story, PlanStory)
        places = self.starts.setdefault(who, set())
        places.add(place)
        if len({worker for worker, _ in places}) > 1 or len(places) > story.plans:
            raise Violation(f"{who} has joined again: {sorted(places)}")

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        if process.coordinator is not None:
            self.plans = max(self.plans, process.coordinator.run.settings.plan_number)
        super().server_event(process, effects, event, source)


class Loser(House):
    """A node whose machine is lost once its change of the plan has come to `aim`."""

    def __init__(self, tree: Tree, name: str, settings: Settings, parent: Node | None, road: Road | None) -> None:
        self.struck = False
        super().__init__(tree, name, settings, parent, road)
        self.checker = self.story = PlanStory(self)

    def send(self, source: str, target: str, message: m.Message) -> None:
        if isinstance(message, m.Heartbeat):
            steps = self.sim.now_ns // MS
            figures = Summary(steps=steps, compute_seconds=OWN_S * steps, rate_up=NARROW, rate_down=NARROW)
            message = replace(message, summary=packed([SummaryRow((), "", "", figures)]))
        super().send(source, target, message)

    def server_event(self, process: Process) -> None:
        super().server_event(process)
        coordinator = process.coordinator
        assert isinstance(self.pairs, Losing)
        if coordinator is None or self.parent is not None or self.struck or self.serving.which:
            return
        changed = coordinator.run.settings.plan_number > 1
        if coordinator.resharding.phase is self.pairs.aim and (changed or self.pairs.aim is not ReshardPhase.STILL):
            self.sim.at(self.sim.now_ns, self._lose)

    def _lose(self) -> None:
        after = [site for site in self.sites if site.follows is self.serving and not site.lost]
        if not self.struck and after and self.may_be_struck and self._safe(after[0]):
            self.struck = True
            coordinator = self.serving.shards[0].server.coordinator
            assert coordinator is not None
            self.sim.struck[f"lost: {coordinator.resharding.phase.value}"] += 1
            self.serving.end()
            self.settles(int(LEASE_S * NS))


class Losing(Pairs):
    """One run, to the end of everyone."""

    node = Loser

    def __init__(self, case: PairCase, aim: ReshardPhase, kit: Kit | None = None, trace: Trace | None = None) -> None:
        self.aim = aim
        super().__init__(case, replace(kit or Kit(), coordinator=Pricing), trace)

    def run(self) -> Losing:
        super().run()
        return self


class OrphanStory(PlanStory):
    """And of each checkpoint, by shard and clock: what is in it, as it was given, and the settings that hold from there on."""

    def __init__(self, node: House) -> None:
        super().__init__(node)
        self.rows: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self.settings: dict[int, Settings] = {}
        self.read: set[tuple[int, int]] = set()
        self.above: dict[int, ParentPush] = {}  # of each shard: none is there once the session above is over

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        super().server_event(process, effects, event, source)
        if isinstance(process.shard.parent_slot.link, ParentPush):
            self.above[process.index] = process.shard.parent_slot.link

    def pushing(self, index: int) -> ParentPush | None:
        return self.above.get(index)

    def saved(self, process: Process, clock: int) -> None:
        assert process.shard.model_shard is not None
        self.rows[process.index, clock] = [*process.shard.model_shard.store.__dict__.get("folded", [])]
        if process.coordinator is not None:
            self.settings[clock] = process.coordinator.resharding.next  # as ps/process/checkpoint_disk.py writes it

    def loaded(self, process: Process, clock: int) -> None:
        self.read.add((process.index, clock))


class Orphan(Loser):
    """A node for which nobody stands by. `codes`: how each worker and each server process here has ended."""

    def __init__(self, tree: Tree, name: str, settings: Settings, parent: Node | None, road: Road | None) -> None:
        assert isinstance(tree, Orphaned)
        self.codes: dict[str, int] = {}
        if parent is None and tree.before is not None:
            self.life = 1
        super().__init__(tree, name, settings, parent, road)
        self.checker = self.story = self.saw = OrphanStory(self)
        if parent is None and tree.before is not None:
            self.disk = tree.before.root.disk

    def worker_failed(self, worker: Worker, failed: e.MemberFailed) -> None:
        self.codes[worker.name] = failed.code

    def stopped(self, process: Process, stop: e.StopProcess) -> None:
        super().stopped(process, stop)
        self.codes[process.port] = stop.code

    @property
    def all_ended(self) -> bool:
        ended = {worker.name for worker in self.workers.values()} | {self.servers[0].port} <= {*self.codes}
        return ended and all(at.server.ended for index, at in self.servers.items() if index)

    def _lose(self) -> None:
        assert isinstance(self.pairs, Orphaned)
        if self.pairs.before is None and not self.struck:
            self.struck, self.pairs.lost_ns = True, self.sim.now_ns
            coordinator = self.serving.shards[0].server.coordinator
            assert coordinator is not None
            self.sim.struck[f"lost for good: {coordinator.resharding.phase.value}"] += 1
            self.serving.end()


class Orphaned(Losing):
    """One run, whose root is lost for good while it changes its plan, to the end of everyone; then it goes on, as with
    --resume. `before`: the run that this one is the rest of."""

    node = Orphan
    nodes: list[Orphan]  # type: ignore[assignment]

    def __init__(
        self,
        case: PairCase,
        aim: ReshardPhase,
        kit: Kit | None = None,
        trace: Trace | None = None,
        before: Orphaned | None = None,
    ) -> None:
        self.before, self.lost_ns = before, 0
        self.given = kit, trace
        self.rest: Orphaned | None = None
        super().__init__(replace(case, paired=()), aim, kit, trace)

    @property
    def over(self) -> bool:
        return super().over if not self.lost_ns else all(node.all_ended for node in self.nodes[1:])

    def run(self) -> Orphaned:
        super().run()
        if self.lost_ns:
            self._all_is_told()
            self._goes_on()
        return self

    def _all_is_told(self) -> None:
        """What the root has left has ended with 6, in time."""
        codes = {name: code for node in self.nodes[1:] for name, code in node.codes.items()}
        if {*codes.values()} != {RefuseCode.SERVER_LOST}:
            raise Violation(f"seed {self.case.seed}: the root is lost, and they end with {codes}")
        if self.sim.now_ns - self.lost_ns > ENDED_NS:
            raise Violation(
                f"seed {self.case.seed}: they end {(self.sim.now_ns - self.lost_ns) / NS:.1f} s after their root"
            )

    def _goes_on(self) -> None:
        """From a checkpoint that has all updates of each child up to its clock, and of none more than a bound allows."""
        root, seed = self.nodes[0], self.case.seed
        shards, lost = root.settings.shards, root.servers[0].coordinator
        assert lost is not None
        clock, at = root.disk.shared(shards), lost.resharding.at
        for index in range(shards) if clock >= 0 else ():
            rows = root.saw.rows[index, clock]
            ahead = 0 if clock == at else root.settings.staleness + 1
            for child in {row[0] for row in rows}:
                given = [row[2] for row in rows if row[0] == child]
                if given != [*range(len(given))] or not clock <= len(given) <= clock + ahead:
                    raise Violation(f"seed {seed}: the checkpoint of clock {clock} has of child {child} {given}")
        settings = resumed(self.case.above, root.saw.settings[clock].packed(), clock) if clock >= 0 else self.case.above
        if clock == at and settings.plan_number == 1:
            raise Violation(f"seed {seed}: the checkpoint of the move lacks its plan")
        begins = {index: root.disk.read(index, shards, clock)[0]["x"] for index in range(shards) if clock >= 0}
        case = replace(self.pair, tree=replace(self.case, above=settings))
        self.rest = Orphaned(case, self.aim, *self.given, self).run()
        self.sim.struck.update(self.rest.sim.struck)
        self.sim.struck["resumed"] += 1
        again = self.rest.nodes[0]
        if again.saw.read != {(index, clock) for index in begins}:
            raise Violation(f"seed {seed}: a checkpoint of clock {clock} is there, and {again.saw.read} are read")
        for index, begin in begins.items():
            planned = again.servers[index].shard.model_shard
            assert planned is not None
            found = planned.store.x - planned.store.__dict__["gathered"]
            if not np.allclose(found, begin, CLOSE, CLOSE):
                raise Violation(f"seed {seed}: shard {index} goes on from {found}, and its checkpoint has {begin}")
