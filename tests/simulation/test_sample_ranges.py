"""Ranges of samples under every fault, and bugs planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count, islice

import pytest

from narrows.protocols.config.settings import Settings
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.resharding import Resharding
from narrows.ps.coordinator.run import Seat
from narrows.ps.coordinator.sample_leases import SampleLeases
from simulation.actors import Bug, Kit, planted
from simulation.bug_hunt import hunt
from simulation.campaigns import RANGES_EVERY, Case, Run, case_of, of_epochs
from simulation.mirror import Violation
from simulation.replans import Replanned, drops_of
from simulation.run_kinds import KINDS

PLANTED_SEEDS = 61  # within so many a planted bug is found
RUNS = {"plain": 4, "restarts": 3, "kills": 3}


def case(seed: int) -> Case:
    return of_epochs(case_of(seed))


def restarted(seed: int) -> Case:
    return of_epochs(case_of(seed, restart=True))


def killed(seed: int) -> Case:
    return of_epochs(case_of(seed, kills=True))


@pytest.mark.parametrize("sync", ["ssp", "bsp"])
def test_a_range_of_who_is_gone_before_the_plan_changes_is_done_once(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's lease ends while all hold. It had a range for an update that it never pushed."""
    change = Resharding.change
    if sync == "bsp":
        monkeypatch.setattr(Resharding, "change", lambda moves, settings: change(moves, to_bsp(moves.run.settings)))
    run = KINDS["moves"].make(600019, Kit(), None)
    run.run()
    assert run.sim.struck["plan changed"]


def test_who_gets_no_other_range_right_after_a_plan_changed_waits_for_its_state() -> None:
    """The simulated worker computed with what it had before."""
    assert Replanned(drops_of(910332)).run().sim.struck["plan changed"]


def to_bsp(settings: Settings) -> Settings:
    return settings.changed(sync="bsp", push="update")


@pytest.mark.parametrize(("kind", "make"), [("plain", case), ("restarts", restarted), ("kills", killed)])
def test_no_range_is_lost_and_each_that_is_done_twice_is_counted(kind: str, make: Callable[[int], Case]) -> None:
    cases = islice((made for made in map(make, count()) if made.epochs), RUNS[kind])
    runs = [Run(each).run() for each in cases]
    struck = sum((run.sim.struck for run in runs), Counter[str]())
    assert all(run.sim.struck["all ranges done"] >= run.settings.workers - 1 for run in runs)
    assert struck["worker crashed"] > 0.6 * len(runs)
    assert struck[{"plain": "lost", "restarts": "shard restarted", "kills": "shard killed"}[kind]] >= 0.8 * len(runs)


def test_a_campaign_has_runs_with_ranges() -> None:
    found = [case_of(seed).epochs > 0 for seed in range(40 * RANGES_EVERY)]
    assert 30 <= sum(found) <= 40


def held_is_done(rounds: Clocks, worker: int) -> int:
    """A range is done once all shards hold its update, and not once they have folded it."""
    progress = rounds.progress.get(worker)
    return min(progress.arrived) if progress is not None else folded_of(rounds, worker)


class Keeps(SampleLeases):
    """The ranges that a dead worker has not done are not handed out again."""

    def left(self, seat: Seat, how: str) -> None:
        self.held.pop(seat.worker, None)
        super().left(seat, how)


class AtOnce(SampleLeases):
    """It is handed out again at once, whether its update is in the model or not."""

    def left(self, seat: Seat, how: str) -> None:
        self.work.give_back(index for _, index in self.held.pop(seat.worker, ()))
        super().left(seat, how)


class Forgets(SampleLeases):
    """The run goes back to a checkpoint, and what was done since counts as done."""

    def load(self, packed: bytes, clock: int, saved: object) -> None:
        pass


folded_of = Clocks.folded
PLANTED: dict[str, tuple[Bug, Callable[[int], Case], str]] = {
    "a range done when its update is held": ([(Clocks, "folded", held_is_done)], case, "shard . lacks"),
    "a dead worker's range kept": (Keeps, case, "shard . lacks"),
    "a dead worker's range handed out at once": (AtOnce, case, "ranges done twice"),
    "ranges that a restart forgets": (Forgets, restarted, "shard . lacks"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, make, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Run(make(seed), kit).run(), PLANTED_SEEDS)
