"""Workers that gossip are introduced, and the meeting closed, under every fault; and bugs planted."""

from __future__ import annotations

import pytest

from narrows.protocols import messages as m
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.members import Members
from narrows.ps.coordinator.run import Decision, Seat
from simulation.actors import planted
from simulation.bug_hunt import hunt
from simulation.gossip_directory import Hall
from simulation.mirror import Violation

RUNS = 150
PLANTED_SEEDS = 40  # within so many a planted bug is found


def test_every_invariant_holds_after_every_event() -> None:
    runs = [Hall(seed).run() for seed in range(RUNS)]
    for fault in ("lost", "duplicated", "reordered"):
        assert sum(run.sim.struck[fault] > 0 for run in runs) > 0.6 * RUNS, fault
    assert sum(run.sim.struck["worker crashed"] > 0 for run in runs) > 0.3 * RUNS
    assert sum(run.sim.struck["cut off"] > 0 for run in runs) > 0.1 * RUNS


class ClosesEarly(GossipDirectory):
    """The last worker is not waited for."""

    def decide(self, now_ns: int) -> bool:
        here = {seat.worker for seat in self.run.declared}
        if len(here - self.ended) == 1 < len(here):
            self.ended |= here
        return super().decide(now_ns)


class LetsIn(Members):
    """Who comes after the last step of all is a member."""

    def refusal(self, seat: Seat, declare: m.Declare) -> m.Refuse | None:
        self.gossip_directory.closed, closed = False, self.gossip_directory.closed
        refuse = super().refusal(seat, declare)
        self.gossip_directory.closed = closed
        return refuse


PLANTED: dict[str, tuple[type[Decision], str]] = {
    "a meeting closed while a worker computes": (ClosesEarly, "steps to do"),
    "a door left open": (LetsIn, "joined after"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decision, complaint = PLANTED[bug]
    planted(decision, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Hall(seed).run(), PLANTED_SEEDS)
