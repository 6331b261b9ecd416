"""The notice for a user of --replicas whose standby has not started."""

from __future__ import annotations

import math
import time

ALONE_S = 5.0  # a standby that is started together with its server copies it within this time
NOBODY = "no standby yet: start ps-serve --standby {} on another machine"


class StandbyNotice:
    """The supervisor's knowledge of its server's standby."""

    def __init__(self) -> None:
        self.by = False  # the standby has a whole copy of this server
        self.due = math.inf  # when to print the notice, seconds of time.monotonic

    def expect(self) -> None:
        """Start the time within which a standby must have come."""
        self.due = time.monotonic() + ALONE_S

    def copied(self, whole: bool) -> None:
        """Note whether the standby has a whole copy of this server."""
        self.by = whole

    def missing(self, address: str) -> str:
        """Return the notice, once, if no standby has come in time; else ""."""
        if time.monotonic() < self.due:
            return ""
        self.due = math.inf
        return "" if self.by else NOBODY.format(address)
