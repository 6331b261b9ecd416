"""A cluster's part in its parent's run, and the finish: the time when all workers are done. A root has no parent.

Rules
- A cluster welcomes workers once its parent knows it, and makes them members once it has a place in the parent's run.
- The finish begins when all members wait for the last model. Each shard of a root then gives them its model. Each shard
  of a cluster pushes what is left, and asks its parent for the last model.
- A root finishes once, a cluster once in each place. From then on no worker joins: the parent's run may end before it
  has the next update of this cluster. A worker whose lease expired while it waited may come back, since it pushes no
  more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from narrows.protocols import messages as m
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.run import Decision, Run, Seat


class ParentNews(Protocol):
    """What the parent's newest answer says of its run.

    Attributes:
        tree: All levels of the tree of clusters, from the root down; "" without an answer.
        waits: The members that the parent's run waits for, as a clause; "" for none.
    """

    @property
    def tree(self) -> str: ...
    @property
    def waits(self) -> str: ...


@dataclass(frozen=True)
class NoNews:
    """Of a root, and of a cluster before its membership begins."""

    tree: str = ""
    waits: str = ""


class ParentPlace(Decision):
    """Decides when a server finishes, and holds its place in the parent's run. `child`: the server has a parent."""

    def __init__(self, run: Run, clocks: Clocks, child: bool) -> None:
        self.run, self.clocks, self.child = run, clocks, child
        self.parent: ParentNews = NoNews()
        self.rank, self.clusters = (-1, 0) if child else (0, 1)  # rank of this cluster, and the number of clusters
        self.place, self.epoch = b"", 0  # this cluster's packed place in the parent's run, and the parent's epoch
        self.roster = b""  # gossip: the parent's encoded roster of clusters
        self.alone = False  # gossip: the parent is gone, so no newer roster will come
        self.undeclared: dict[int, m.Declare] = {}  # by worker, Declares that wait for the place
        self.finishes, self.finish_at = 0, 0  # 1 from the finish on, else 0; the clock of the finish
        self.finished: set[bytes] = set()  # names of the workers that were done at the finish

    def listen(self, parent: ParentNews) -> None:
        """Read the news of the parent's run from `parent`, this cluster's member there."""
        self.parent = parent

    def joined(self, rank: int, clusters: int) -> None:
        """The parent has welcomed this cluster as `rank` of `clusters`."""
        self.rank, self.clusters = rank, clusters

    def take(self, place: bytes, epoch: int) -> None:
        """Take the packed place in the parent's run, b"" for none, and the parent's epoch."""
        self.place, self.epoch = place, epoch

    def introduced(self, roster: bytes, alone: bool) -> None:
        """Take the encoded roster of the clusters that gossip. `alone`: the parent is gone."""
        self.roster, self.alone = roster, alone

    def holds(self, seat: Seat, declare: m.Declare) -> bool:
        """Let this worker's Declare wait if this cluster has no place yet. Return True if the Declare waits."""
        if not self.child or self.place:
            return False
        seat.wait()
        self.undeclared[seat.worker] = declare
        return True

    def released(self) -> dict[int, m.Declare]:
        """The Declares that waited, by worker, if this cluster now has a place."""
        waiting, self.undeclared = (self.undeclared, {}) if self.place else ({}, self.undeclared)
        return waiting

    def shown(self, report: m.Report) -> bool:
        """True if this shard has the first state of this cluster's place."""
        return report.from_above == self.epoch > 0

    @property
    def ended(self) -> bool:
        """Gossip: all shards have done their last round with other clusters, except the final mean of all."""
        return self.run.complete and all(r.ended and r.from_above == self.epoch for r in self.run.reports.values())

    @property
    def closed(self) -> bool:
        """True if all workers of this cluster have done their last step: no other joins any more."""
        return self.finishes > 0

    def waited(self, name: bytes) -> bool:
        """True if the worker of this name was done at the finish of this cluster, and so comes for the last model."""
        return self.child and name in self.finished

    def decide(self, now_ns: int) -> bool:
        """Begin the finish once all workers are done and all shards have the place in the parent's run."""
        members, reports = self.clocks.progress, self.run.reports.values()
        if self.run.over or self.closed or any((r.from_above, r.finishes) != (self.epoch, 0) for r in reports):
            return False
        if not members or len(self.clocks.resting) < len(members):
            return False
        # A child cluster may come back with new workers, and so with more to push.
        self.finished = {seat.name for seat in self.run.declared if not seat.below}
        self.finishes, self.finish_at = 1, self.clocks.min_clock
        return True

    def left(self, seat: Seat, how: str) -> None:
        self.undeclared.pop(seat.worker, None)

    def anew(self) -> None:
        """Forget the finish, at a new generation and at a new place in the parent's run.

        In the old place some shards may have pushed their last update and others not.
        """
        self.finishes, self.finished = 0, set()

    def fields(self, shard: int) -> dict[str, object]:
        finish = {"finishes": self.finishes, "finish_at": self.finish_at}
        return finish | {"above": self.place, "roster": self.roster, "alone": self.alone}
