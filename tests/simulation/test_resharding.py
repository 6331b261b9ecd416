"""Keys that are cut anew under every fault, a crash in the midst of it too; and bugs planted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from narrows.compression.replica import ArrayReplica, HostReplica
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import ServerEffect
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.remote_shards import RemoteHost, RemoteShards
from narrows.ps.coordinator.resharding import Resharding
from narrows.ps.coordinator.run import Run, Seat
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.shard.publications import Publications
from narrows.ps.shard.shard import Shard
from narrows.ps.store import reshard_arrays as recutting
from narrows.ps.store.changes import LoadArrays
from simulation import actors
from simulation.actors import Bug, Kit, Process, Worker, planted
from simulation.bug_hunt import hunt
from simulation.mirror import Violation
from simulation.remote_shards import Visited, visit_of
from simulation.replay_twins import Twin
from simulation.resharding import Moved, kind_of, moves_of

RUNS, RESTARTS, KILLS, TWINS, VISITS, APARTS = 7, 4, 5, 1, 6, 4
APART = ("async", "quorum")  # kinds of runs in which members hold at clocks of their own
PLANTED_SEEDS = 30  # within so many a planted bug is found


def test_every_invariant_holds_while_keys_move() -> None:
    runs = [Moved(moves_of(seed)).run() for seed in range(RUNS)]
    assert sum(len(run.done) for run in runs) > 1.7 * RUNS
    assert {kind_of(run.case) for run in runs} >= {"bsp", "ssp", "local"}
    for fault in ("lost", "duplicated", "reordered", "worker crashed"):
        assert sum(run.sim.struck[fault] > 0 for run in runs) > 0.8 * len(runs), fault


@pytest.mark.parametrize("kind", [*APART, "streams"])
def test_every_invariant_holds_while_keys_move_in_each_kind_of_run(kind: str) -> None:
    """Where no clock is one that all workers come to, and where fragments take turns."""
    runs = [Moved(moves_of(seed, only=kind)).run() for seed in range(APARTS)]
    runs += [Moved(moves_of(seed, restart=True, only=kind)).run() for seed in range(APARTS)]
    runs += [Moved(moves_of(seed, kills=True, only=kind)).run() for seed in range(APARTS)]
    assert sum(len(run.done) for run in runs) > 1.2 * len(runs)
    visits = [Visited(visit_of(seed, lost, only=kind)).run() for seed in range(2) for lost in (False, True)]
    assert sum(visit.sim.struck["machine went"] for visit in visits) > 0
    for fault in ("worker crashed", "shard restarted", "shard killed"):
        assert sum(run.sim.struck[fault] for run in runs) > 0.5 * APARTS, fault


def test_a_shard_that_fails_in_the_midst_of_a_move_ends_no_run() -> None:
    runs = [Moved(moves_of(seed, restart=True)).run() for seed in range(RESTARTS)]
    assert sum(run.sim.struck["shard restarted"] for run in runs) > 0.8 * RESTARTS
    moves = [len(run.done) for run in runs]
    assert 0 < sum(moves) < 2 * RESTARTS, "some are called off"


def test_every_invariant_holds_where_a_machine_joins_and_goes() -> None:
    runs = [Visited(visit_of(seed)).run() for seed in range(VISITS)]
    assert sum(run.sim.struck["machine went"] for run in runs) > 0.5 * VISITS


def test_every_invariant_holds_where_a_machine_that_joined_is_lost() -> None:
    runs = [Visited(visit_of(seed, lost=True)).run() for seed in range(VISITS)]
    assert sum(run.sim.struck["machine lost"] for run in runs) > 0.5 * VISITS
    assert sum(run.sim.struck["with keys"] for run in runs) > 0.2 * VISITS


def test_a_shard_that_is_killed_while_keys_move_goes_on() -> None:
    runs = [Moved(moves_of(seed, kills=True)).run() for seed in range(KILLS)]
    assert sum(run.sim.struck["shard killed"] for run in runs) > 2 * KILLS
    assert sum(len(run.done) for run in runs) > 1.5 * KILLS


def test_a_checkpoint_that_a_move_began_from_is_not_written_over() -> None:
    """A shard is killed soon after a move, and shard 0 begins anew. It had written the checkpoint of the move once more, with
    the keys that it has now, though the others needed those of before (seed 151)."""
    run = Moved(moves_of(151, restart=True, kills=True)).run()
    assert run.done and run.sim.struck["shard killed"] and run.sim.struck["shard restarted"]


def test_shards_that_leave_out_other_updates_clip_by_one_norm() -> None:
    """A shard of one key lets a worker in that the others leave out (seed 9000)."""
    assert Moved(moves_of(9000)).run().sim.struck["left out"]


def test_a_process_that_is_killed_while_keys_move_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "shadow_of", Twin)
    assert all(Moved(moves_of(seed)).run().done for seed in range(TWINS))


# Planted bugs: what a move guards, taken out.


class KeepsItsKeys(Shard):
    """The keys of shard 0 are those that it had."""

    def _restart(self, ledger: m.Ledger) -> list[ServerEffect]:
        before, effects = self.settings, super()._restart(ledger)
        self.settings = before if self.index == 0 else self.settings
        return effects


def one_early(run: Run, settings: Settings, clock: int, starts: dict[int, int]) -> None:
    """Members go on one clock before that of the checkpoint: what was under way is folded on both sides."""
    shift(run, settings, clock, starts)
    for seat in run.seats.values():
        seat.start -= 1


def without_momentum(*words: Any) -> Any:
    return {name: values for name, values in recut(*words).items() if name != "outer.momentum"}


def leaves_behind(replica: HostReplica, before: Iterable[HostReplica]) -> None:
    """The state that a worker has is not that of its keys."""


shift, recut = Run.shift, recutting.recut
PLANTED: dict[str, tuple[Bug, str]] = {
    "keys with two shards": (Kit(shard=KeepsItsKeys), "are with two shards"),
    "an update folded on both sides": ([(Run, "shift", one_early)], "folded twice, before a move"),
    "members that were not told": (
        [(Resharding, "_known", property(lambda moves: True))],
        "the keys are cut at|not all shards",
    ),
    "a momentum that stays behind": ([(actors, "recut", without_momentum)], "the log gives"),
    "a state that stays behind": ([(ArrayReplica, "inherit", leaves_behind)], "is another one in"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Moved(moves_of(seed), kit).run(), PLANTED_SEEDS, complaint)


# The same, where members hold at clocks of their own.


def unfolded(resharding: Resharding, seat: Seat) -> bool:
    """Who has said where it holds counts, though a shard lacks its updates."""
    return seat.move == resharding.number


def at_one_clock(clocks: Clocks, at: int) -> dict[int, int]:
    return dict.fromkeys(clocks.progress, at)


def unshown(shard: ModelShard, load: LoadArrays, recut: bool = False, steps: int = 0) -> None:
    """The newest publication lacks folds, and nobody has them as updates of its own any more."""
    shard.publish = list  # type: ignore[method-assign]
    begin(shard, load, recut, steps)
    del shard.publish


def goes_on(worker: Worker, at: int, number: int) -> None:
    """It says where it holds, and pushes on."""
    if at >= 0:
        worker._apply(worker.member.holds_at(number, max(at, worker.clock), worker.awake.now()))


def all_on_time(publications: Publications, min_clock: int, steps: int = 0) -> None:
    """A worker that is behind the run is told that the state has updates that it has yet to make."""
    publications._late = lambda min_clock: {}  # type: ignore[method-assign]
    publish(publications, min_clock, steps)
    del publications._late


begin, publish = ModelShard.begin, Publications.begin
PLANTED_APART: dict[str, tuple[Bug, str]] = {
    "updates that are not folded": ([(Resharding, "_stands", unfolded)], "not all shards have folded|is at .* goes on"),
    "one clock for all": ([(Clocks, "starts", at_one_clock)], "the keys are cut at .* goes on at"),
    "folds that no state shows": ([(ModelShard, "begin", unshown)], "a state without its updates"),
    "a worker that goes on": ([(Worker, "_hold", goes_on)], "not all shards have folded|is at .* goes on"),
    "a quorum's updates in no set": ([(Clocks, "_drained", property(lambda clocks: True))], "after a move|is not$"),
    "a quorum's late worker on time": ([(Publications, "begin", all_on_time)], "own writes: .* is settled to"),
}


@pytest.mark.parametrize("bug", PLANTED_APART)
def test_a_planted_bug_is_found_where_members_hold_apart(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, complaint = PLANTED_APART[bug]
    kit, kind = planted(which, monkeypatch), "quorum" if "quorum" in bug else "async"
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Moved(moves_of(seed, only=kind), kit).run(), PLANTED_SEEDS, complaint)


def with_its_keys(guests: RemoteShards, guest: RemoteHost) -> bool:
    """Who goes is told that it may, before its keys have moved."""
    guests._let_go(guest)
    return True


@pytest.mark.parametrize(("name", "bug", "lost"), [("lost", lambda *words: None, True), ("_go", with_its_keys, False)])
def test_a_machine_that_is_counted_on_and_not_there_is_found(
    name: str, bug: Any, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteShards, name, bug)
    with pytest.raises(Violation, match="the run has not ended"):
        Visited(visit_of(0, lost)).run()
