"""The numbered reports of a shard to the coordinator: each replaces the one before. No I/O.

Rules
- A report that the coordinator has not acknowledged is made anew and sent again; a lost report costs time only.
- Every REPORT_REFRESH_NS the shard sends its newest report even if it is acknowledged: a restarted coordinator knows
  no shard until that shard reports.
"""

from __future__ import annotations

from collections.abc import Callable

from narrows.protocols import messages as m
from narrows.protocols.config.timing import REPORT_REFRESH_NS, REPORT_RETRY
from narrows.protocols.effects import Send

COORDINATOR = b""  # the peer id of the coordinator, which reports go to


class Reports:
    """The reports of one shard. `make`: builds the shard's report with the given version."""

    def __init__(self, make: Callable[[int], m.Report]) -> None:
        self.make = make
        self.version = 0  # version of the newest report, or of the one that the next tick makes
        self.seen = -1  # the newest version that the coordinator has acknowledged
        self.newest: m.Report | None = None
        self.sent_ns = 0

    def send(self, now_ns: int) -> Send:
        """Make a new report and send it."""
        self.version += 1
        self.newest, self.sent_ns = self.make(self.version), now_ns
        return Send(COORDINATOR, self.newest)

    def owe(self) -> None:
        """Mark a change that the next tick must report."""
        self.version += 1

    def has_seen(self, version: int) -> None:
        """Record that the coordinator has the report of this version."""
        self.seen = max(self.seen, version)

    def tick(self, now_ns: int) -> list[Send]:
        """Send a new report if a change is not acknowledged, or the newest one again if the last was long ago."""
        if self.seen < self.version and REPORT_RETRY.due(self.sent_ns, now_ns):
            return [self.send(now_ns)]
        if self.newest is None or now_ns - self.sent_ns < REPORT_REFRESH_NS:
            return []
        self.sent_ns = now_ns
        return [Send(COORDINATOR, self.newest)]
