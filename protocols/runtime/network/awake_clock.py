"""The time that a runner gives to its machines: the time in which this process ran.

A computer that was suspended, or a process that was stopped, has received nothing meanwhile. By the system clock all
other processes would be lost. So the time that a loop misses between its turns is left out, and every other process has
a whole lease again to send a heartbeat. A clock that jumps forward counts as one turn, a clock that jumps back as none:
for the machines time goes on, and never back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from narrows.protocols.effects import NS

TURN_NS = NS // 4  # a turn of the loop takes some tens of ms; no turn counts for more than this


class AwakeClock:
    """One thread calls `turn`; any thread may call `now`.

    Args:
        clock: the system clock, in ns.
        begins_ns: the time of this clock at the start; 0: that of `clock`.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, begins_ns: int = 0) -> None:
        self.clock, now = clock, clock()
        self.at = (
            now,
            now - begins_ns if begins_ns else 0,
        )  # time of the last `turn` by the system clock, and the time left out until then
        self.newest_ns = now - self.at[1]  # the newest time returned

    def now(self) -> int:
        """Return the time in ns. A turn counts for at most TURN_NS, while it lasts and after it."""
        turned, missed = self.at
        return self._tell(turned + _passed(self.clock() - turned) - missed)

    def turn(self) -> int:
        """Begin a turn of the loop. Returns the time in ns."""
        now, (turned, missed) = self.clock(), self.at
        missed += now - turned - _passed(now - turned)
        self.at = (now, missed)
        return self._tell(now - missed)

    def _tell(self, now_ns: int) -> int:
        self.newest_ns = max(self.newest_ns, now_ns)
        return self.newest_ns


def _passed(turn_ns: int) -> int:
    """Return for how many ns a turn counts that took `turn_ns` by the system clock."""
    return min(max(turn_ns, 0), TURN_NS)
