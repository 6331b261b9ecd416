"""Trees with standbys in which the root changes its plan, and its machine is lost at a moment of that change.

    Losing(losing_case(seed, aim)).run()        raises Violation where an invariant does not hold

The invariants are those of pairs.py, and each member has one place for each plan. What clusters measure of their links is
made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from narrows.protocols import messages as m
from narrows.protocols.cluster.moves import MovePhase
from narrows.protocols.effects import NS, ServerEffect
from narrows.protocols.settings import Settings
from narrows.protocols.summary import Row, Summary, packed
from narrows.ps.events import Event
from simulation.actors import Kit, Process
from simulation.mirrors import Violation
from simulation.network import MS
from simulation.pairs import LEASE_S, House, PairCase, Pairs, Story
from simulation.plans import BEGINS, PLAN
from simulation.replans import NARROW, OWN_S, Pricing
from simulation.trees import BELOW, Node, Road, Trace, Tree, tree_of

CLOCKS = 70  # of each worker
AIMS = (MovePhase.TOLD, MovePhase.HELD, MovePhase.WRITING, MovePhase.PASSED, MovePhase.STILL)  # the last: in force


def losing_case(seed: int) -> PairCase:
    changes, below = [*BEGINS.values()][seed % 2], [*BELOW.values()][seed // 2 % len(BELOW)]
    tree = tree_of(seed, {**changes, **PLAN}, {**below, "replan": "off"}, 2, 1, CLOCKS, shards=2)
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

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: Event, source: str) -> None:
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
            message = replace(message, summary=packed([Row((), "", "", figures)]))
        super().send(source, target, message)

    def server_event(self, process: Process) -> None:
        super().server_event(process)
        coordinator = process.coordinator
        assert isinstance(self.pairs, Losing)
        if coordinator is None or self.parent is not None or self.struck or self.serving.which:
            return
        changed = coordinator.run.settings.plan_number > 1
        if coordinator.moves.phase is self.pairs.aim and (changed or self.pairs.aim is not MovePhase.STILL):
            self.sim.at(self.sim.now_ns, self._lose)

    def _lose(self) -> None:
        after = [site for site in self.sites if site.follows is self.serving and not site.lost]
        if not self.struck and after and self.may_be_struck and self._safe(after[0]):
            self.struck = True
            coordinator = self.serving.shards[0].server.coordinator
            assert coordinator is not None
            self.sim.struck[f"lost: {coordinator.moves.phase.value}"] += 1
            self.serving.end()
            self.settles(int(LEASE_S * NS))


class Losing(Pairs):
    """One run, to the end of everyone."""

    node = Loser

    def __init__(self, case: PairCase, aim: MovePhase, kit: Kit | None = None, trace: Trace | None = None) -> None:
        self.aim = aim
        super().__init__(case, replace(kit or Kit(), coordinator=Pricing), trace)

    def run(self) -> Losing:
        super().run()
        return self
