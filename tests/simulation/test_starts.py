"""Runs with a start, under every fault; and bugs planted."""

from __future__ import annotations

import pytest

from narrows.protocols.config.settings import Settings
from narrows.ps.coordinator.clocks import Clocks
from simulation.actors import Bug, planted
from simulation.bug_hunt import hunt
from simulation.mirror import Violation
from simulation.starts import Started, start_of

RUNS = 24
PLANTED_SEEDS = 12  # within so many a planted bug is found


def test_every_invariant_holds_in_runs_with_a_start() -> None:
    runs = [Started(start_of(seed, seed % 3 == 2, kills=seed % 3 == 1)).run() for seed in range(RUNS)]
    assert all(run.settings.start_clock == run.settings.start_steps for run in runs)
    for fault in ("lost", "duplicated", "reordered", "worker crashed", "worker restarted"):
        assert sum(run.sim.struck[fault] > 0 for run in runs) > 0.7 * RUNS, fault
    for fault in ("shard killed", "shard restarted", "keys moved", "start again"):
        assert any(run.sim.struck[fault] for run in runs), fault


def goes_on(settings: Settings, clock: int) -> Settings:
    """A run that goes back into its start has the mode of after it there."""
    return settings


PLANTED: dict[str, tuple[Bug, str]] = {
    "the last clock of a start closes before all know": (
        [(Clocks, "ends_start", property(lambda clocks: False))],
        "has not ended|pushes clock|a start of",
    ),
    "workers are not told to take over": (
        [(Settings, "hands_over", lambda settings, clock: False)],
        "has the state of",
    ),
    "a start that is not begun again": ([(Settings, "back_at", goes_on)], "pushes clock|a start of"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    restart = bug == "a start that is not begun again"
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Started(start_of(seed, restart), kit).run(), PLANTED_SEEDS, complaint)
