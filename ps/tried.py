"""Plans are compared by trials: which is printed, and which are not worth one. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrows.protocols.planning.choose import NEAR, SMALL, Choice
from narrows.protocols.planning.levels import Prices
from narrows.ps.trial import EVENTS_MAX, Trial

WRONG = 2.0  # who costs so many times as much by the closed forms as another does in its trial is not simulated

Tried = tuple[Choice, float | None]


def tried(prices: Prices, plans: Sequence[Choice]) -> list[Tried]:
    """Each plan with its simulated seconds of a step, the cheapest first. A first one that takes too many events stays the
    first. Who would be dearer if nothing but computing took time is not simulated. Of more than SMALL hosts all trials have
    EVENTS_MAX events together, and NEAR is in the place of WRONG."""
    found, left = list[Tried](), EVENTS_MAX
    large = len(prices.hosts) > SMALL
    for plan in plans:
        trial, least = Trial(prices, plan), min(map(cost, found), default=np.inf)
        may_win = left > 1 and max(cost((plan, trial.least_s)), plan.cost / (NEAR if large else WRONG)) < least
        found.append((plan, trial.step_s(left) if may_win else None))
        if found[0][1] is None:
            break
        left -= trial.events if large else 0
    return sorted(found, key=cost)


def cost(one: Tried) -> float:
    """Simulated seconds of a step x steps."""
    plan, seconds = one
    return (seconds or np.inf) * plan.cost / plan.step_s
