"""Plans that change in the midst of a run, under every fault; and bugs planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrows.protocols import messages as m
from narrows.protocols.effects import Send, ServerEffect
from narrows.protocols.member.exchange import Exchange
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.resharding import Resharding
from narrows.ps.coordinator.run import Seat
from narrows.ps.shard.shard import Shard
from simulation.actors import Bug, Kit, planted
from simulation.bug_hunt import hunt
from simulation.mirror import Violation
from simulation.replans import Replanned, drops_of

RUNS = 3
PLANTED_SEEDS = 30  # within so many a planted bug is found


def test_every_invariant_holds_while_plans_change() -> None:
    runs = [Replanned(drops_of(seed, seed % 3 == 2, kills=seed % 3 == 1)).run() for seed in range(RUNS)]
    assert all(run.plans[:1] == [2] for run in runs), "links got narrow"
    assert [run.settings.sync for run in runs if run.plans == [2, 3]].count("bsp") > RUNS / 2, "and wide again"
    for fault in ("lost", "duplicated", "reordered", "worker crashed", "worker restarted"):
        assert sum(run.sim.struck[fault] > 0 for run in runs) > 0.7 * RUNS, fault
    assert all(any(run.sim.struck[fault] for run in runs) for fault in ("shard killed", "shard restarted"))


# Planted bugs: what a change of the plan guards, taken out.


class KeepsItsPlan(Shard):
    """Shard 0 goes on as it did."""

    def _restart(self, ledger: m.Ledger) -> list[ServerEffect]:
        return super()._restart(replace(ledger, settings=b"") if self.index == 0 else ledger)


def of_the_first(moves: Resharding, seat: Seat) -> list[Send]:
    """Rank 0 is told of the plan that the run began with."""
    said = word(moves, seat)
    first = replace(moves.run.settings, plan_number=1, sync="bsp", staleness=0, compress="dense", compress_down="dense")
    told = [replace(each.message, settings=first.packed()) for each in said if isinstance(each.message, m.Reshard)]
    return [Send(seat.peer, each) for each in told if each.place] if not seat.rank and told and told[0].place else said


def as_before(rounds: Clocks) -> None:
    """The coordinator closes clocks by the rule that it had."""
    mode = rounds.mode
    shift(rounds)
    rounds.mode = mode


def at_once(exchange: Exchange[Any]) -> bool:
    """Who is told to hold pushes all the same."""
    return len(exchange.in_flight) < exchange.mode.window


word, shift = Resharding.word, Clocks.shift
PLANTED: dict[str, tuple[Bug, str]] = {
    "a shard that keeps its plan": (Kit(shard=KeepsItsPlan), "shard 0 has plan 1 in a generation of plan 2"),
    "a worker that is told of an old plan": (
        [(Resharding, "word", of_the_first)],
        r"w\d\.\d has plan 1 in a generation",
    ),
    "a coordinator that keeps its rule": (
        [(Clocks, "shift", as_before)],
        "the run has not ended|is closed over|progress",
    ),
    "a worker that does not hold": ([(Exchange, "may_push", property(at_once))], "the keys are cut at|not all shards"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Replanned(drops_of(seed), kit).run(), PLANTED_SEEDS, complaint)
