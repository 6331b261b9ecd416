"""The memory of the search over groupings: the seconds of each group, and the costs of plans priced together. No I/O.

`partitions` and `changed` make new groupings; `undominated` drops ways that are nowhere better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Array
from narrows.ps.planner.step_prices import Groups, Indices, StepPrices

PRICED_MAX = 1 << 17  # figures that are computed at a time, so that they fit in a CPU cache


class ClusterPrices:
    """Seconds of a step of groups, for each host as the server's. Each group is priced once with each way."""

    def __init__(self, prices: StepPrices) -> None:
        self.prices = prices
        self.number: dict[tuple[int, ...], int] = {}  # by group, its index in `groups`
        self.groups: list[tuple[int, ...]] = []
        self.ends = np.zeros(1, np.intp)  # (groups + 1,) group g has the values [ends[g], ends[g + 1])
        self.own_s: dict[ModeAndSpec, Array] = {}  # by way, seconds by group and host of the server; NaN: not priced

    def numbers(self, groups: Sequence[tuple[int, ...]]) -> Indices:
        """Return the number of each group; a new group gets the next number."""
        known = len(self.groups)
        for group in groups:
            if group not in self.number:
                self.number[group] = len(self.groups)
                self.groups.append(group)
        sizes = [len(group) for group in self.groups[known:]]
        self.ends = np.concatenate([self.ends, self.ends[-1] + np.cumsum(sizes, dtype=np.intp)])
        return np.fromiter((self.number[group] for group in groups), np.intp, len(groups))

    def of(self, below: ModeAndSpec, numbers: Indices) -> Array:
        """Return (hosts,) seconds of a step of these groups, group after group, for each host as the server's."""
        own_s = self.own_s.get(below, np.zeros(0))
        own_s = self.own_s[below] = np.concatenate([own_s, np.full(self.ends[-1] - len(own_s), np.nan)])
        sizes, begins = np.diff(self.ends), self.ends[:-1]
        new = numbers[np.isnan(own_s[begins[numbers]])]
        new = np.unique(new) if len(new) else new
        for size in np.unique(sizes[new]) if len(new) else ():
            alike = new[sizes[new] == size]
            for some in np.array_split(alike, min(len(alike), -(-len(alike) * int(size) ** 2 // PRICED_MAX))):
                hosts = np.array([self.groups[number] for number in some])
                took_s = self.prices.inside_s(below, hosts) if size > 1 else self.prices.compute_s[hosts]
                own_s[begins[some][:, None] + np.arange(size)] = took_s
        ends = np.cumsum(sizes[numbers])
        found: Array = own_s[np.arange(ends[-1]) + np.repeat(begins[numbers] - ends + sizes[numbers], sizes[numbers])]
        return found


@dataclass(frozen=True, slots=True)
class PricedCandidates:
    """Plans that were priced together.

    costs[a, i] is the cost of the way aboves[a] at the root, the grouping groupings[at[i]] and the way belows[below[i]]
    inside clusters.
    """

    groupings: Sequence[Groups]
    aboves: Sequence[ModeAndSpec]
    belows: Sequence[ModeAndSpec]
    at: Indices
    below: Indices
    costs: Array

    def plan(self, above: int, item: int) -> Plan:
        groups = self.groupings[self.at[item]]
        return float(self.costs[above, item]), groups, self.aboves[above], self.belows[self.below[item]]

    def plans(self) -> list[Plan]:
        """Return the cheapest plan of each grouping, the cheapest first. Plans of infinite cost are left out."""
        found: dict[Groups, Plan] = {}
        costs = self.costs.min(0)
        for item in costs.argsort(kind="stable")[: np.isfinite(costs).sum()]:
            plan = self.plan(int(self.costs[:, item].argmin()), item)
            found.setdefault(plan[1], plan)
        return [*found.values()]


Plan = tuple[float, Groups, ModeAndSpec, ModeAndSpec]  # cost, groups, way at the root, way inside clusters


def partitions(hosts: list[int]) -> Iterator[Groups]:
    """Yield every partition of the hosts; the group of the first host is the first group of each."""
    if not hosts:
        yield ()
        return
    for rest in partitions(hosts[1:]):
        yield ((hosts[0],), *rest)
        for at, group in enumerate(rest):
            yield ((hosts[0], *group), *rest[:at], *rest[at + 1 :])


def changed(
    groups: Sequence[tuple[int, ...]], old: Sequence[tuple[int, ...]], new: Sequence[tuple[int, ...]]
) -> Groups:
    """Return the groups with `new` ones in the place of the `old` ones."""
    kept = [group for group in groups if all(group is not each for each in old)]
    return tuple(sorted([*kept, *(tuple(sorted(group)) for group in new)]))


def undominated(own_s: Array, steps: Array, inside: Indices) -> npt.NDArray[np.bool_]:
    """Return (ways, b) true where no other way is at least as good.

    Args:
        own_s: (ways, b, n) seconds of a step inside each host's group.
        steps: (ways above, ways, b) steps to a loss.
        inside: (ways,) updates in flight inside a cluster; more are better.
    """
    kept = np.ones(steps.shape[1:], bool)
    for one in range(len(own_s)):
        for other in range(len(own_s)):
            if one != other and inside[other] >= inside[one]:
                worse = kept[other] & (own_s[other] <= own_s[one]).all(1) & (steps[:, other] <= steps[:, one]).all(0)
                kept[one] &= ~worse
    return kept
