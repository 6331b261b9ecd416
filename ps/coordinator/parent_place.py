"""A cluster's part in the run of the server above, and when all its workers are done. A root is the only cluster of its run.

Rules
- Workers are welcomed once the run above knows this cluster, and are members once it has a place there.
- When all members wait for the last model, that is a finish. Each shard of a cluster then pushes what is left and asks for the
  model above. Finishes follow one another: a shard that saw two at once would push once less than the others.
- A root finishes once. From then on its shards give each worker the last model, and no worker joins: it would change it.
"""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.ps.coordinator.clock_quorum import Clocks
from narrows.ps.coordinator.run import Decision, Run, Seat


class ParentPlace(Decision):
    """`child`: there is a server above."""

    def __init__(self, run: Run, rounds: Clocks, child: bool) -> None:
        self.run, self.rounds, self.child = run, rounds, child
        self.rank, self.clusters = (-1, 0) if child else (0, 1)  # this cluster's rank, of so many
        self.place, self.epoch = b"", 0  # our place there, packed, and its epoch
        self.roster = b""  # of clusters that gossip, encoded
        self.alone = False  # no server above will send another
        self.undeclared: dict[int, m.Declare] = {}  # of workers that wait for our place
        self.finishes, self.finish_at = 0, 0
        self.finished: set[tuple[int, int]] = set()  # workers and their clocks, of the last finish

    def joined(self, rank: int, clusters: int) -> None:
        self.rank, self.clusters = rank, clusters

    def take(self, place: bytes, epoch: int) -> None:
        self.place, self.epoch = place, epoch

    def introduced(self, roster: bytes, alone: bool) -> None:
        self.roster, self.alone = roster, alone

    def holds(self, seat: Seat, declare: m.Declare) -> bool:
        """Let this worker wait, where we have no place yet."""
        if not self.child or self.place:
            return False
        seat.wait()
        self.undeclared[seat.worker] = declare
        return True

    def released(self) -> dict[int, m.Declare]:
        """Those who waited, where we have one."""
        waiting, self.undeclared = (self.undeclared, {}) if self.place else ({}, self.undeclared)
        return waiting

    def shown(self, report: m.Report) -> bool:
        """This shard has the first state of our place."""
        return report.from_above == self.epoch > 0

    @property
    def ended(self) -> bool:
        """All shards have done their last round with other clusters, but for that of all (gossip)."""
        return self.run.complete and all(r.ended and r.from_above == self.epoch for r in self.run.reports.values())

    def _idle(self) -> bool:
        """All shards have done every finish so far."""
        return all((r.from_above, r.finishes) == (self.epoch, self.finishes) for r in self.run.reports.values())

    @property
    def closed(self) -> bool:
        """The run has its last model: no worker joins any more."""
        return not self.child and self.finishes > 0

    def decide(self, now_ns: int) -> bool:
        """Finish, where all workers are done, and not as they were at the last finish."""
        if self.run.over or self.closed or not self._idle():
            return False
        done = set(self.rounds.resting.items())
        if len(done) < len(self.rounds.progress) or done <= self.finished:
            return False
        self.finished, self.finishes, self.finish_at = done, self.finishes + 1, self.rounds.min_clock
        return True

    def left(self, seat: Seat, how: str) -> None:
        self.undeclared.pop(seat.worker, None)

    def anew(self) -> None:
        """Also at another place: of the last finish some shards may have pushed theirs at the one before, and others not."""
        self.finishes, self.finished = 0, set()

    def fields(self, shard: int) -> dict[str, object]:
        finish = {"finishes": self.finishes, "finish_at": self.finish_at}
        return finish | {"above": self.place, "roster": self.roster, "alone": self.alone}
