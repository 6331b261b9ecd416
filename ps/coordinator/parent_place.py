"""A cluster's part in the run of the server above, and when all its workers are done. A root is the only cluster of its run.

Rules
- Workers are welcomed once the run above knows this cluster, and are members once it has a place there.
- When all members wait for the last model, that is a finish. Each shard of a root then gives them its model. Each shard of a
  cluster pushes what is left and asks for the model above.
- A server finishes once, a cluster once at each place above. From then on no worker joins: the run above may end before it has
  the next update of this cluster. A worker whose lease has ended while it waits comes back, since it pushes no more.
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
        self.finished: set[bytes] = set()  # names of the workers that were done at the finish

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

    @property
    def closed(self) -> bool:
        """All workers here have done their last step: none joins any more."""
        return self.finishes > 0

    def waited(self, name: bytes) -> bool:
        """Whether the worker that speaks under this name was done at the finish of a cluster, and comes for the last model."""
        return self.child and name in self.finished

    def decide(self, now_ns: int) -> bool:
        """Finish, where all workers are done and all shards have the place above."""
        members, reports = self.rounds.progress, self.run.reports.values()
        if self.run.over or self.closed or any((r.from_above, r.finishes) != (self.epoch, 0) for r in reports):
            return False
        if not members or len(self.rounds.resting) < len(members):
            return False
        # A cluster below may have new workers when it comes back, and so have more to push.
        self.finished = {seat.name for seat in self.run.declared if not seat.below}
        self.finishes, self.finish_at = 1, self.rounds.min_clock
        return True

    def left(self, seat: Seat, how: str) -> None:
        self.undeclared.pop(seat.worker, None)

    def anew(self) -> None:
        """Also at another place: of the last finish some shards may have pushed theirs at the one before, and others not."""
        self.finishes, self.finished = 0, set()

    def fields(self, shard: int) -> dict[str, object]:
        finish = {"finishes": self.finishes, "finish_at": self.finish_at}
        return finish | {"above": self.place, "roster": self.roster, "alone": self.alone}
