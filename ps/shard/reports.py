"""The reports of a shard to the coordinator, numbered: each replaces the one before. No I/O.

Rules
- A report that the coordinator has not shown to have is made anew and sent again; losing one costs time only.
- Now and then the newest is sent all the same: a coordinator that was restarted knows no shard until it hears from it.
"""

from __future__ import annotations

from collections.abc import Callable

from narrows.protocols import messages as m
from narrows.protocols.config.timing import REPORT_REFRESH_NS, REPORT_RETRY
from narrows.protocols.effects import Send

COORDINATOR = b""  # the peer that a shard's report goes to


class Reports:
    """The reports of one shard. `make`: its report under a version."""

    def __init__(self, make: Callable[[int], m.Report]) -> None:
        self.make = make
        self.version = 0  # of the newest
        self.seen = -1  # the newest that the coordinator has
        self.newest: m.Report | None = None
        self.sent_ns = 0

    def send(self, now_ns: int) -> Send:
        """A new one."""
        self.version += 1
        self.newest, self.sent_ns = self.make(self.version), now_ns
        return Send(COORDINATOR, self.newest)

    def owe(self) -> None:
        """Something has changed that the next tick tells."""
        self.version += 1

    def has_seen(self, version: int) -> None:
        """The coordinator has the report of this version."""
        self.seen = max(self.seen, version)

    def tick(self, now_ns: int) -> list[Send]:
        if self.seen < self.version and REPORT_RETRY.due(self.sent_ns, now_ns):
            return [self.send(now_ns)]
        if self.newest is None or now_ns - self.sent_ns < REPORT_REFRESH_NS:
            return []
        self.sent_ns = now_ns
        return [Send(COORDINATOR, self.newest)]
