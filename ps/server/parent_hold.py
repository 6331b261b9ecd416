"""Whether all shards of a cluster know that they are to hold, before the run above changes its plan. No I/O.

Rules
- The server above takes our word that no update from a clock on will come. So it is given once every shard has the ledger that
  says so, and not when process 0 has heard of it.
"""

from __future__ import annotations

from narrows.protocols import effects as e
from narrows.protocols.effects import ServerEffect
from narrows.protocols.member.member import Member
from narrows.ps.coordinator.coordinator import Coordinator


class ParentHold:
    """`word`: what the run above has said last. `version`: of the ledger that says it to the shards."""

    def __init__(self, coordinator: Coordinator, member: Member) -> None:
        self.coordinator, self.member = coordinator, member
        self.word: e.Held | None = None
        self.version = 0

    def said(self, word: e.Held) -> None:
        """The newest ledger says it to the shards."""
        self.word, self.version = word, self.coordinator.version

    @property
    def all_know(self) -> bool:
        run = self.coordinator.run
        return run.complete and all(report.ledger_seen >= self.version for report in run.reports.values())

    def known(self, now_ns: int) -> list[ServerEffect]:
        """Say above that all here know, once they do."""
        if self.word is None or self.member.move >= self.word.number or not self.all_know:
            return []
        return [self.member.knows(self.word.number, now_ns)]
