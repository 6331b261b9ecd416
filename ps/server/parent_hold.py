"""Tells the parent that all shards of this cluster hold, before the parent's run changes its plan. No I/O.

Rules
- The parent relies on the answer: after it no update from the named clock on will come. So the cluster answers once
  every shard has acknowledged the ledger that says so, and not when process 0 has heard of it.
"""

from __future__ import annotations

from narrows.protocols import effects as e
from narrows.protocols.effects import ServerEffect
from narrows.protocols.member.member import Member
from narrows.ps.coordinator.coordinator import Coordinator


class ParentHold:
    """The parent's newest request to hold, and whether all shards know of it."""

    def __init__(self, coordinator: Coordinator, member: Member) -> None:
        self.coordinator, self.member = coordinator, member
        self.word: e.PushesPaused | None = None  # the newest request
        self.version = 0  # version of the ledger that tells the shards

    def said(self, word: e.PushesPaused) -> None:
        """Note that the newest ledger tells this request to the shards."""
        self.word, self.version = word, self.coordinator.version

    def anew(self) -> None:
        """Forget the request: it was for an earlier seat."""
        self.word = None

    @property
    def all_know(self) -> bool:
        """True if all shards have acknowledged that ledger."""
        run = self.coordinator.run
        return run.complete and all(report.ledger_seen >= self.version for report in run.reports.values())

    def known(self, now_ns: int) -> list[ServerEffect]:
        """Answer the parent once all shards know."""
        if self.word is None or self.member.move >= self.word.number or not self.all_know:
            return []
        return [self.member.knows(self.word.number, now_ns)]
