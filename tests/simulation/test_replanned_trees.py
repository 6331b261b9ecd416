"""Trees in which a level changes its plan in the midst of a run, under every fault; and bugs planted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from narrows.compression import ErrorFeedback
from narrows.ps.coordinator.resharding import ReshardPhase
from narrows.ps.parent.parent_link import ParentSeat, ParentSession
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.server.parent_membership import ParentHold, ParentMembership
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.store.changes import LoadArrays
from simulation.actors import Bug, Kit, planted
from simulation.bug_hunt import hunt
from simulation.mirror import Violation
from simulation.replanned_standby_trees import AIMS, Losing, Orphaned, losing_case
from simulation.replanned_trees import Changing, fall_of
from simulation.run_kinds import KINDS

RUNS = (("above", 1), ("inside", 0), ("both", 1))  # level, seed: an odd one has kills
LOST = 1  # machines of a root, at each moment of a change
PLANTED_SEEDS = 110  # within so many a planted bug is found


def test_every_invariant_holds_while_a_level_changes_its_plan() -> None:
    runs = []
    for level, seed in RUNS:
        run = Changing(fall_of(seed, level, kills=seed % 2 == 1)).run()
        assert (run.root.settings.plan_number > 1) == (level != "inside"), "links got narrow"
        assert all((node.settings.plan_number > 1) == (level != "above") for node in run.clusters)
        runs.append(run)
    struck = sum((run.sim.struck for run in runs), Counter())
    for fault in ("lost", "duplicated", "reordered", "worker crashed", "cuts", "shard killed"):
        assert struck[fault] > 0, fault


@pytest.mark.parametrize("seed", [601123, 700159])
def test_a_cluster_asked_late_for_first_weights_still_owes_what_it_kept_back(seed: int) -> None:
    """Its own plan changed: it forgot whose weights it had, gave its own to a run that had some, and dropped its residual."""
    KINDS["trees"].make(seed, Kit(), None).run()


@pytest.mark.parametrize("aim", AIMS, ids=lambda aim: str(aim.value))
def test_the_standby_of_the_root_goes_on_with_a_plan_that_changes(aim: ReshardPhase) -> None:
    for seed in range(LOST):
        run = Losing(losing_case(seed), aim).run()
        machine = run.root.servers[0].server
        assert machine.coordinator is not None and machine.coordinator.run.settings.plan_number > 1, seed
        assert run.sim.struck[f"lost: {aim.value}"] == run.sim.struck["took over"] == 1, (seed, run.sim.struck)


@pytest.mark.parametrize(("seed", "aim"), [*enumerate(AIMS)], ids=lambda each: str(getattr(each, "value", each)))
def test_without_a_standby_all_end_with_6_and_the_run_goes_on_with_its_checkpoint(seed: int, aim: ReshardPhase) -> None:
    run = Orphaned(losing_case(seed), aim).run()
    assert run.sim.struck[f"lost for good: {aim.value}"] == run.sim.struck["resumed"] == 1, run.sim.struck
    assert run.rest is not None and run.rest.root.settings.plan_number == 1 + (aim in AIMS[3:])
    machine = run.rest.root.servers[0].server
    assert machine.coordinator is not None and machine.coordinator.run.settings.plan_number > 1


def stays(membership: ParentMembership, code: int, text: str, now_ns: int) -> list[Any]:
    """A cluster whose server above is lost tells its workers nothing, and does not end."""
    return []


def anew(planned: ModelShard, load: LoadArrays, *more: Any, **others: Any) -> None:
    """A shard that goes on begins with other weights than its checkpoint has."""
    begin(planned, replace(load, arrays=load.arrays | {"x": load.arrays["x"] + 1}), *more, **others)


begin = ModelShard.begin


@pytest.mark.parametrize(("where", "name", "bug", "complaint"), [
    (ParentMembership, "end", stays, "has not ended"),
    (ModelShard, "begin", anew, "goes on from"),
])  # fmt: skip
def test_a_bug_planted_where_nobody_stands_by_is_found(
    where: type, name: str, bug: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(Violation, match=complaint):
        Orphaned(losing_case(0), ReshardPhase.PASSED).run()


# Planted bugs: what a cluster guards while the run above changes its plan, taken out.


def forgets(above: ParentPush, place: ParentSeat, now_ns: int) -> Any:
    """Lose what a cluster owes with the plan that it was kept under."""
    said = go_on(above, place, now_ns)
    above.feedback.load_state_dict({})
    return said


def leaves_it(planned: ModelShard, before: ModelShard) -> None:
    """A cluster whose own plan changes goes on without its place above."""
    planned.begin(LoadArrays(before.store.arrays(), before.store.publication))


def turns(seat: ParentSession, place: ParentSeat) -> bool:
    """Take the hold of the run above, and push as before."""
    before, seat.place = seat.place, place
    return (before.server, before.ports) != (place.server, place.ports)


go_on = ParentPush.go_on
LOSES = "has given|gives update"
PLANTED: dict[str, tuple[Bug, str, str]] = {
    "a cluster whose shards do not hold": ([(ParentSession, "turn", turns)], "above", LOSES),
    "a cluster that says it holds before all shards do": ([(ParentHold, "all_know", True)], "above", LOSES),
    "a cluster that forgets what it owes": ([(ParentPush, "go_on", forgets)], "above", "come to"),
    "a cluster that codes as before": (
        [(ErrorFeedback, "change", lambda feedback, compressor: None)],
        "above",
        "codes with",
    ),
    "a cluster that begins anew at its place": (
        [(ParentSeat, "follows", lambda place, before: False)],
        "above",
        "pushes no update in between",
    ),
    "a cluster whose own plan leaves its place": ([(ModelShard, "go_on", leaves_it)], "inside", "leaves its place"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, level, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Changing(fall_of(seed, level, kills=seed % 2 == 1), kit).run(), PLANTED_SEEDS, complaint)
