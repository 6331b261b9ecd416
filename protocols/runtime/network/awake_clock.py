"""The time that a runner gives to its machines: that in which this process ran.

A machine that was suspended, or a process that was stopped, has heard nobody meanwhile. By the clock on the wall all others
would be lost. So what a loop misses of its turns is left out, and everybody has a whole lease again to say a word. A clock that
jumps forward counts as one turn, one that jumps back as none: time goes on for the machines, and never back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from narrows.protocols.effects import NS

TURN_NS = NS // 4  # a turn of the loop takes some tens of ms; of a longer one no more counts


class AwakeClock:
    """`clock`: ns. One thread turns; any may ask. `begins_ns`: what time it is now; by default that of `clock`."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, begins_ns: int = 0) -> None:
        self.clock, now = clock, clock()
        self.at = (
            now,
            now - begins_ns if begins_ns else 0,
        )  # when the loop was here last, and what was left out until then
        self.told = now - self.at[1]  # the newest time that anybody was told

    def now(self) -> int:
        """Nanoseconds. A turn counts no longer than TURN_NS, while it lasts and after it."""
        turned, missed = self.at
        return self._tell(turned + _passed(self.clock() - turned) - missed)

    def turn(self) -> int:
        """The loop is here again; the time now."""
        now, (turned, missed) = self.clock(), self.at
        missed += now - turned - _passed(now - turned)
        self.at = (now, missed)
        return self._tell(now - missed)

    def _tell(self, now_ns: int) -> int:
        self.told = max(self.told, now_ns)
        return self.told


def _passed(turn_ns: int) -> int:
    """Return the nanoseconds that a turn counts which took so long by the clock."""
    return min(max(turn_ns, 0), TURN_NS)
