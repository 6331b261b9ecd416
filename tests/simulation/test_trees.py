"""A tree of clusters in virtual time: every mode on both levels under faults, rounds against closed forms, bugs planted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.modes import Mode
from narrows.protocols.effects import NS
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.members import WAITING
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Seat as ClusterSeat
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.model_shard import STAGES, ClockStage, ModelShard
from narrows.ps.shard.publications import PublicationChild, Publications
from narrows.ps.shard.push_assembler import PushSequence
from narrows.ps.shard.shard_requests import ShardRequests
from narrows.ps.store.changes import Change, Rebase
from simulation import trees as simulation_tree
from simulation.actors import Bug, planted
from simulation.bug_hunt import hunt
from simulation.closed_forms import Forms, cluster_periods_s, explained, measured_s, worker_periods_s
from simulation.mirror import Violation
from simulation.simulator import MS, Faults, Simulator, Wire
from simulation.trees import ABOVE, BELOW, CLOCKS, SYNCS, WHOLE_EVERY, Road, Tree, TreeCase, fault_case, tree_of

PLANTED_SEEDS = 40  # within so many a planted bug is found
ROUNDS = 15


def case_of(above: str, below: str, seed: int, *, faulty: bool = True) -> TreeCase:
    return tree_of(seed, ABOVE[above], BELOW[below], 3, 3, CLOCKS, shards=1 + seed % 2, faulty=faulty)


def test_every_mode_is_on_both_levels() -> None:
    assert {row["sync"] for row in ABOVE.values()} == {row["sync"] for row in BELOW.values()} == set(SYNCS)


def test_trees_have_a_gain_on_both_levels() -> None:
    trees = [Tree(case_of("ssp", "ssp", seed)).run() for seed in range(0, 6, 2)]
    for nodes in ([tree.root for tree in trees], [node for tree in trees for node in tree.clusters]):
        assert max(mirror.gain.factor for node in nodes for mirror in node.checker.mirrors.values()) > 1.05


def test_a_seed_replays_exactly() -> None:
    first, second, third = (Tree(case_of("ssp", "local", seed)).run() for seed in (3, 3, 4))
    assert (first.sim.digest, first.sim.now_ns, first.events) == (second.sim.digest, second.sim.now_ns, second.events)
    assert third.sim.digest != first.sim.digest


# Links with a rate.


def test_bytes_pass_a_wire_one_after_the_other_and_links_share_it() -> None:
    heard: list[tuple[str, int]] = []

    class Ear:
        def handle(self, source: str, message: str, now_ns: int) -> None:
            heard.append((message, now_ns))

        def tick(self, now_ns: int) -> None:
            pass

    sim: Simulator[str] = Simulator(1, Faults(delay_ns=(0, 0)), 100 * NS)
    sim.start(Ear(), "a")
    sim.start(Ear(), "b")
    up, down = Wire(10 * MS, 1000), Wire(0, 10)
    for source in ("x", "y"):
        sim.lay(source, "a", up)
    sim.lay("a", "x", down)
    sim.send("x", "a", "first", 100)
    sim.send("y", "a", "second", 50)
    sim.send("x", "b", "elsewhere", 1 << 20)
    sim.at(NS, sim.send, "x", "a", "later", 100)
    for _ in range(5):
        sim.step()
    assert heard == [("elsewhere", 0), ("first", 110 * MS), ("second", 160 * MS), ("later", 1110 * MS)]
    assert up.free_ns == 1100 * MS and down.free_ns == 0


# Rounds, on links that are fixed, against tests/simulation/closed_forms.py.


LEVELS = [
    (above, below)
    for row, above in enumerate(above for above in ABOVE if "compress" not in ABOVE[above])
    for column, below in enumerate(BELOW)
    if (row + column) % 2 == 0
]  # every second pair: each mode above with two or three below


@pytest.mark.parametrize(("above", "below"), LEVELS)
def test_a_round_takes_what_the_closed_form_says(above: str, below: str) -> None:
    """Neighbours have other links and step times: of two seeds in turn."""
    seed = [*BELOW].index(below) % 2
    clocks = ROUNDS * ABOVE[above].get("local_steps", 1)
    case = tree_of(seed, ABOVE[above], BELOW[below], 3, 3, clocks)
    tree, forms = Tree(case).run(), Forms(case)
    form, seconds = forms.round_s(), measured_s(tree)
    if case.above.mode().barrier and case.below.mode().barrier:
        assert seconds == pytest.approx(form.low, rel=1e-3)
    else:
        assert explained(form, seconds, ROUNDS), (form, seconds)
    if below == "async":
        own = [forms.own_s(worker) for worker in range(len(case.step_ns))]
        assert worker_periods_s(tree) == pytest.approx(own, rel=0.1)
    if above == "async" and forms.round_s().low == forms.round_s().high:
        own = [forms.cluster_s(cluster, below != "async") for cluster in range(case.clusters)]
        assert cluster_periods_s(tree) == pytest.approx(own, rel=0.1)


@pytest.mark.parametrize("sync", ["bsp", "ssp", "async", "local"])
def test_a_round_of_workers_of_one_server(sync: str) -> None:
    case = tree_of(5, BELOW[sync], {}, 0, 12, ROUNDS)
    tree, forms = Tree(case).run(), Forms(case)
    assert explained(forms.round_s(), measured_s(tree), ROUNDS)
    if sync == "async":
        assert worker_periods_s(tree) == pytest.approx([forms.own_s(i) for i in range(12)], rel=0.1)


def test_the_form_of_a_case_by_hand() -> None:
    """Two clusters of one worker: 1 MB over 10 MB/s and 10 ms below, over 1 MB/s and 100 ms above."""
    case = replace(
        tree_of(1, {"sync": "local", "local_steps": 2}, {"sync": "bsp"}, 2, 1, 4),
        step_ns=(NS, 2 * NS),
        roads=(Road(10 * MS, 10_000_000),) * 2,
        roads_up=(Road(100 * MS, 1_000_000),) * 2,
        model_bytes=1_000_000,
    )
    assert Forms(case).round_s().high == pytest.approx(2 * (2 + 2 * 0.11) + 2 * 1.1, rel=1e-3)


def test_a_medium_tree() -> None:
    rounds = 8
    case = tree_of(2, ABOVE["ssp"], BELOW["ssp"], 10, 20, rounds)
    tree = Tree(case).run()
    assert tree.events > 10 * WHOLE_EVERY
    assert explained(Forms(case).round_s(), measured_s(tree), rounds)


# Planted bugs: what each machine guards, taken out.


def folds_twice(service: ShardRequests, seat: PushSequence, push: m.Push, ledger: m.Ledger, now_ns: int) -> Any:
    """A cluster's server takes a repeated push for a new one."""
    if service.resources.child and push.clock == seat.clock - 1 and push.clock % 5 == 4:
        seat.clock = push.clock
    return push_of(service, seat, push, ledger, now_ns)


push_of = ShardRequests._push


def scales_again(service: ShardRequests, seat: PushSequence, push: m.Push, ledger: m.Ledger, now_ns: int) -> Any:
    """The gain applied twice: a push that comes again makes it grow once more."""
    if push.clock < seat.clock:
        service.store.gain.factor **= 2
    return push_of(service, seat, push, ledger, now_ns)


def answers_early(shown: Publications, seat: PushSequence, child: PublicationChild) -> list[Any]:
    """A state for the next clock is what there is."""
    number = shown.store.publication
    return [] if child.sent or number <= child.follow.have else [(number, None, None)]


def shows_early(planned: ModelShard, ledger: m.Ledger, now_ns: int) -> Any:
    """A cluster that shows its workers a clock before the server above has answered for it."""
    effects, done = rebase(planned, ledger, now_ns)
    return effects, done or planned.parent_slot.ready


def keeps_updates(planned: ModelShard, changes: list[Change]) -> None:
    """Folded updates are lost on the way up: the base is set over them."""
    apply(planned, changes)
    for change in changes:
        if isinstance(change, Rebase):
            np.copyto(planned.store._own_x(), change.base)


def other_set(folding: FoldAtBarrier, clock: int, pairs: Iterable[m.Pair], clip: Any) -> Any:
    """The second shard folds a clock without the last of its set."""
    pairs = list(pairs)
    fewer = folding.assembler.index == 1 and len(pairs) > 1 and clock % 4 == 3
    return close(folding, clock, pairs[:-1] if fewer else pairs, clip)


def pushes_twice(above: ParentPush, *arguments: Any, **more: Any) -> Any:
    """A pushed update goes up once more with the next push."""
    start = above.seat.start
    effects = push_up(above, *arguments, **more)
    if above.seat.exchange.clock % 3 == 2:
        above.seat.keep(start=start)
    return effects


rebase, apply, close = ModelShard._rebase, ModelShard.apply, FoldAtBarrier.close
push_up = ParentPush._push


class ForgetsSlowest(Clocks):
    """min_clock goes on without the last of its members."""

    def _going(self) -> list[ClusterSeat]:
        members = super()._going()
        late = [member for member in members if self.clock(member) <= self.min_clock]
        return [member for member in members if member not in late] if len(late) == 1 < len(members) else members


class FinishesAgain(ParentPlace):
    """A finish of a cluster is counted again, though nobody has done more since."""

    def decide(self, now_ns: int) -> bool:
        reports = self.run.reports.values()
        if self.child and self.finishes > 0 and all(report.finishes == self.finishes for report in reports):
            self.finishes += 1
            return True
        return super().decide(now_ns)


PLANTED: dict[str, tuple[Bug, str, str, str]] = {
    "a cluster folds twice": ([(ShardRequests, "_push", folds_twice)], "bsp", "ssp", "folded twice"),
    "the gain applied twice after a retry": ([(ShardRequests, "_push", scales_again)], "ssp", "ssp", "weight of"),
    "a state is sent too early": ([(Publications, "_whole", answers_early)], "ssp", "ssp", "staleness: the state of"),
    "the root's bound is not kept": (
        *([(STAGES, ClockStage.REBASE, shows_early)], "bsp", "bsp", "staleness: c[0-9].s[01] shows"),
    ),
    "updates are lost on the way up": ([(ModelShard, "apply", keeps_updates)], "ssp", "ssp", "come to|the log gives"),
    "updates go up twice": ([(ParentPush, "_push", pushes_twice)], "ssp", "ssp", "come to|the log gives"),
    "a shard closes over another set": ([(FoldAtBarrier, "close", other_set)], "ssp", "bsp", "is closed over"),
    "the slowest is forgotten": (ForgetsSlowest, "ssp", "ssp", "min_clock goes from|lacks the update"),
    "a finish is counted twice": (FinishesAgain, "async", "bsp", "nobody has more to push"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, above, below, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(f"{bug}, in a tree", lambda seed: Tree(case_of(above, below, seed), kit).run(), PLANTED_SEEDS, complaint)


def test_no_worker_joins_a_cluster_that_has_finished() -> None:
    """A worker of seed 340 comes back while its cluster waits for the last model. The root closed without the update that the
    cluster pushed for it."""
    refused: list[str] = []

    def trace(now_ns: int, text: str, message: m.Message | None) -> None:
        if isinstance(message, m.Refuse):
            refused.append(message.text)

    tree = Tree(fault_case(340), trace=trace).run()
    assert tree.sim.struck["worker restarted"] and WAITING in refused
    assert len(tree.root.checker.last_models) == tree.root.settings.shards


def test_a_bound_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_far(mode: Mode, clock: int, min_clock: int) -> bool:
        return mode.bound is None or clock <= min_clock + mode.bound + 1

    monkeypatch.setattr(Mode, "allows", one_too_far)
    with pytest.raises(Violation, match="staleness"):
        hunt("a bound off by one", lambda seed: Tree(case_of("bsp", "ssp", seed)).run(), PLANTED_SEEDS, "staleness")


def test_the_full_count_finds_what_no_event_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that change beside every fold; what a cluster owes is other than the checker has it."""

    def spoilt(how: Callable[[Tree], None]) -> Tree:
        tree = Tree(case_of("ssp", "ssp", 0, faulty=False))
        tree.sim.at(NS, how, tree)
        return tree

    def weights(tree: Tree) -> None:
        planned = tree.clusters[1].servers[0].shard.model_shard
        assert planned is not None
        planned.store.x[0] += 1

    def owed(tree: Tree) -> None:
        above = tree.clusters[2].servers[0].shard.parent_slot.link
        assert above is not None
        above.seat.keep(start=above.seat.start + 1)

    monkeypatch.setattr(simulation_tree, "WHOLE_EVERY", 50)
    with pytest.raises(Violation, match=r"the log gives|come to"):
        spoilt(weights).run()
    with pytest.raises(Violation, match=r"has moved by|come to"):
        spoilt(owed).run()
