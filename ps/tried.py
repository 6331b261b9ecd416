"""Plans are compared by trials: which is printed, and which are not worth one. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrows.protocols.planning.choose import NEAR, SMALL, Choice
from narrows.protocols.planning.levels import Prices
from narrows.ps.trial import EVENTS_MAX, Trial

WRONG = 2.0  # who costs so many times as much by the closed forms as another does in its trial is not simulated

TIE = 1.02  # plans whose trials cost so many times as much as the cheapest are as good: the simplest of them is taken

Tried = tuple[Choice, float | None]


def tried(prices: Prices, plans: Sequence[Choice]) -> list[Tried]:
    """Each plan with its simulated seconds of a step: the simplest of those within TIE of the cheapest, then the others, the
    cheapest first. A first one that takes too many events stays the first. Not simulated is who would be dearer if nothing but
    computing took time, and who is WRONG times as dear by the closed forms. Of more than SMALL hosts all trials have EVENTS_MAX
    events together, and NEAR is in the place of WRONG."""
    found, left = list[Tried](), EVENTS_MAX
    large = len(prices.hosts) > SMALL
    for plan in plans:
        trial, least = Trial(prices, plan), min(map(cost, found), default=np.inf)
        may_win = left > 1 and max(cost((plan, trial.least_s)), plan.cost / (NEAR if large else WRONG)) < TIE * least
        found.append((plan, trial.step_s(left) if may_win else None))
        if found[0][1] is None:
            break
        left -= trial.events if large else 0
    found.sort(key=cost)
    first = min((each for each in found if cost(each) <= TIE * cost(found[0])), key=simplicity, default=found[0])
    return [first, *(each for each in found if each is not first)]


def cost(one: Tried) -> float:
    """Simulated seconds of a step x steps."""
    plan, seconds = one
    return (seconds or np.inf) * plan.cost / plan.step_s


def simplicity(one: Tried) -> tuple[int, int]:
    """Levels, and servers on other hosts than the root: fewer are simpler."""
    plan, _ = one
    return 1 + bool(plan.clusters), len(plan.clusters) + len(plan.spread)
