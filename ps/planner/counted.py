"""The clocks of a trial that count, and when those that have passed tell what the others take. No I/O.

Rules
- The first part of the clocks is skipped, and as many as may be in flight: windows of both levels fill.
- Clocks that take alike long, as many in a row as updates may be in flight, are followed by such ones: the rest is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from narrows.ps.planner.choose import SMALL, DeploymentChoice

CLOCKS = 10  # half as many, where hosts are more than SMALL
SKIPPED = 3  # one part of them in so many
BUNCHES = 3  # times as many clocks count where nobody waits: a cluster's samples come in bunches
ALIKE = 1.005  # the longest of a few clocks takes at most so many times as long as the shortest
FEWEST = 2  # of these


@dataclass(frozen=True)
class Counted:
    skipped: int
    clocks: int  # with those
    enough: int  # in a row, where they take alike long

    @classmethod
    def of(cls, plan: DeploymentChoice, hosts: int) -> Counted:
        """`hosts`: of the network."""
        small = hosts <= SMALL
        clocks, window = CLOCKS if small else CLOCKS // 2, plan.above.mode.window
        ahead = window + (plan.below.mode.window - 1 if plan.clusters else 0)
        skipped = max(clocks // SKIPPED, ahead)
        counted = max(clocks - clocks // SKIPPED, window) * (BUNCHES if plan.above.mode.bound is None else 1)
        # One more for good measure; a clock of many hosts is a mean over them.
        return cls(skipped, skipped + counted, max(FEWEST, ahead) + small)

    def took_ns(self, ends_ns: Sequence[float]) -> float | None:
        """What a clock takes, by the ends of those that have passed, or None: they do not tell yet."""
        if len(ends_ns) >= self.clocks:
            return float(np.diff(ends_ns[self.skipped - 1 :]).mean())
        newest = np.diff(ends_ns[-1 - self.enough :])
        return float(newest.mean()) if len(newest) == self.enough and newest.max() <= ALIKE * newest.min() else None
