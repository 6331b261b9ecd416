"""What a search over groups of hosts keeps: seconds of each group, costs of plans that were priced together; and which groups
follow from others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Array
from narrows.ps.planner.step_prices import Groups, Indices, StepPrices

PRICED_MAX = 1 << 17  # figures at a time: they fit in a cache


class ClusterPrices:
    """Seconds of a step of groups, by the host of the server. Each group is priced once with each way."""

    def __init__(self, prices: StepPrices) -> None:
        self.prices = prices
        self.number: dict[tuple[int, ...], int] = {}
        self.groups: list[tuple[int, ...]] = []
        self.ends = np.zeros(1, np.intp)
        self.own_s: dict[ModeAndSpec, Array] = {}

    def numbers(self, groups: Sequence[tuple[int, ...]]) -> Indices:
        known = len(self.groups)
        for group in groups:
            if group not in self.number:
                self.number[group] = len(self.groups)
                self.groups.append(group)
        sizes = [len(group) for group in self.groups[known:]]
        self.ends = np.concatenate([self.ends, self.ends[-1] + np.cumsum(sizes, dtype=np.intp)])
        return np.fromiter((self.number[group] for group in groups), np.intp, len(groups))

    def of(self, below: ModeAndSpec, numbers: Indices) -> Array:
        """(hosts,) of these groups, one after the other."""
        own_s = self.own_s.get(below, np.zeros(0))
        own_s = self.own_s[below] = np.concatenate([own_s, np.full(self.ends[-1] - len(own_s), np.nan)])
        sizes, begins = np.diff(self.ends), self.ends[:-1]
        new = np.unique(numbers[np.isnan(own_s[begins[numbers]])])
        for size in np.unique(sizes[new]):
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
    """Plans that were priced together: costs[a, i] is that of aboves[a] over groupings[at[i]] with belows[below[i]] inside."""

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
        """The cheapest plan of each grouping, the cheapest first, but for those that nobody may have."""
        found: dict[Groups, Plan] = {}
        costs = self.costs.min(0)
        for item in costs.argsort(kind="stable")[: np.isfinite(costs).sum()]:
            plan = self.plan(int(self.costs[:, item].argmin()), item)
            found.setdefault(plan[1], plan)
        return [*found.values()]


Plan = tuple[float, Groups, ModeAndSpec, ModeAndSpec]  # cost


def partitions(hosts: list[int]) -> Iterator[Groups]:
    """Every one, the first host's group first."""
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
    """These groups with new ones in the place of some."""
    kept = [group for group in groups if all(group is not each for each in old)]
    return tuple(sorted([*kept, *(tuple(sorted(group)) for group in new)]))


def undominated(own_s: Array, steps: Array, inside: Indices) -> npt.NDArray[np.bool_]:
    """(ways, b) those that no other is as good as, of the seconds (ways, b, n), steps (ways above, ways, b) and updates
    in flight inside (ways,)."""
    kept = np.ones(steps.shape[1:], bool)
    for one in range(len(own_s)):
        for other in range(len(own_s)):
            if one != other and inside[other] >= inside[one]:
                worse = kept[other] & (own_s[other] <= own_s[one]).all(1) & (steps[:, other] <= steps[:, one]).all(0)
                kept[one] &= ~worse
    return kept
