"""A worker reads its own writes (Ho et al. 2013, sec. 3): how much of each own update stands in a replica.

    replica = pulled state + residual + sum over own clocks c of stand_in(c) * u_c,   u_c as sent

An own update stands in for the mean of its clock until that mean is complete: at full weight while it is not in the pulled
state, at 1 - w once it was folded with weight w, not at all once every live worker's update of that clock is in.
docs/architecture.md has the figures beside the naive rules.
"""

from __future__ import annotations

from narrows.protocols.modes import Mode, Rule

# With no bound (async) a slow peer would hold own updates at full weight for ever. Of windows 1, 2, 4, 8 and no limit,
# with one worker 4x slower, 1 ended lowest in every setting measured (docs/architecture.md).
STANDS_IN_UNBOUNDED = 1


def stand_in(mode: Mode, clock: int, own_clock: int, settled: int, weight: float | None) -> float:
    """Weight of own update `clock` in the replica of a worker whose clock is `own_clock`.

    settled: of the pulled state; own updates below it are in, and so are the others' that were folded with them.
    weight: what it was folded with in the pulled state, None where it is not in it.
    """
    if mode.rule is Rule.OPTIMIZER or clock < settled:
        return 0.0
    if mode.bound is None and clock < own_clock - STANDS_IN_UNBOUNDED:
        return 0.0
    if weight is None or mode.rule is Rule.OUTER:  # an outer step is no mean: full weight until its round is folded
        return 1.0
    return 1.0 - weight
