"""Plans are compared by trials: which is printed, and which are not worth one. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrows.ps.planner.choose import NEAR, SMALL, DeploymentChoice
from narrows.ps.planner.counted import Counted
from narrows.ps.planner.step_prices import StepPrices
from narrows.ps.planner.trial import EVENTS_MAX, Trial

WRONG = 2.0  # who costs so many times as much by the closed forms as another does in its trial is not simulated
OTHERS = 100  # events a host, of the trials of all plans but the first, where hosts are more than SMALL
TIE = 1.02  # plans whose trials cost so many times as much as the cheapest are as good: the simplest of them is taken

Tried = tuple[DeploymentChoice, float | None]


def tried(prices: StepPrices, plans: Sequence[DeploymentChoice]) -> list[Tried]:
    """Each plan with its simulated seconds of a step: the simplest of those within TIE of the cheapest, then the others, the
    cheapest first. A first one that takes too many events stays the first. Not simulated is who would be dearer if nothing but
    computing took time, and who is WRONG times as dear by the closed forms. Where hosts are more than SMALL, NEAR is in the
    place of WRONG, and trials have what is left of OTHERS: who would take more, with as many events for each child and shard as
    the first, is not simulated."""
    found, left, each = list[Tried](), EVENTS_MAX, 0.0
    large = len(prices.hosts) > SMALL
    for plan in plans:
        trial, least = Trial(prices, plan), min(map(cost, found), default=np.inf)
        may_win = max(cost((plan, trial.least_s)), plan.cost / (NEAR if large else WRONG)) < TIE * least
        may_end = each * trial.pairs * (1 + Counted.of(plan, len(prices.hosts)).enough) < left
        found.append((plan, trial.step_s(left) if may_win and may_end else None))
        if found[0][1] is None:
            break
        if large:
            left = left - trial.events if len(found) > 1 else OTHERS * len(prices.hosts)
            each = each or trial.events / (trial.pairs * len(trial.ends_ns))
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
