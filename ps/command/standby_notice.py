"""Whether a standby stands by, and whether the user of --replicas knows where none does."""

from __future__ import annotations

import math
import time

ALONE_S = 5.0  # a standby that was started together with its server is there by then
NOBODY = "no standby yet: start ps-serve --standby {} on another machine"


class StandbyNotice:
    """The standby of one server, as its ps-serve knows of it."""

    def __init__(self) -> None:
        self.by = False  # it has all that is here
        self.due = math.inf  # when the user is told that nobody stands by

    def expect(self) -> None:
        """From now on one may come."""
        self.due = time.monotonic() + ALONE_S

    def missing(self, address: str) -> str:
        """Return what the user is told now: a line once, where nobody has come."""
        if time.monotonic() < self.due:
            return ""
        self.due = math.inf
        return "" if self.by else NOBODY.format(address)
