"""The choice of the hosts of a data parallel run.

A straggler, or a city behind a long link, may cost more than it adds.

No I/O.

How it works

1. A step has the same samples, however many hosts compute them: with m of n hosts each host computes n / m of its even
   share. So the costs of subsets compare, and one machine alone is a subset too.
2. The search does not price a subset whose lower bound, the time of computing alone, exceeds the cost of the best plan
   so far.
3. Up to EXACT_MAX hosts the search prices every other subset with every partition, the least bound first.
4. For more hosts the search goes from all hosts to fewer: without a place, with one place alone, without the slowest
   hosts, without one host, with the hosts that one host reaches. Each subset is priced in simple shapes. The next round
   begins at the cheapest subset.
5. The plan leaves hosts out only where that gains GAIN, because the closed forms err by as much and an idle host serves
   nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

import numpy as np

from narrows.protocols.errors import UsageError
from narrows.ps.planner.candidate_prices import partitions
from narrows.ps.planner.choose import EXACT_MAX, NEAR, ROOTS_MAX, Chooser, DeploymentChoice, choices, choose
from narrows.ps.planner.modes_and_specs import BELOW, WAYS
from narrows.ps.planner.network import Network
from narrows.ps.planner.step_prices import Groups, TrainingWork, cuts, places

GAIN = 1.05  # the cost of all hosts must be this many times that of fewer hosts before hosts are left out
ROUNDS_MAX = 8
PRICED_MAX = 4096  # most hosts, summed over the priced subsets, of a network of more than EXACT_MAX hosts
ONES_MAX = 32  # up to this many hosts each is left out once; of more, those with the slowest links and the slowest ones
FINE = 4096  # samples a host: so many that shares by speed need hardly be rounded

Hosts = tuple[int, ...]


def restricted(network: Network, work: TrainingWork, hosts: Sequence[int]) -> tuple[Network, TrainingWork]:
    """Return the network of these hosts and the same step on them. With fewer hosts, each has a larger even share."""
    return network.of(hosts), replace(work, step_s=work.step_s * len(network.hosts) / len(hosts))


@cache
def _partitions(count: int) -> tuple[Groups, ...]:
    return tuple(groups for groups in partitions([*range(count)]) if len(groups) > 1 or count == 1)


@dataclass(slots=True)
class HostSubsets:
    """The costs of subsets of the hosts, each priced once."""

    network: Network
    work: TrainingWork
    costs: dict[Hosts, tuple[float, float]] = field(default_factory=dict)  # (cost, limit): exact if below the limit

    @property
    def everybody(self) -> Hosts:
        return tuple(range(len(self.network.hosts)))

    def least(self, hosts: Hosts) -> float:
        """Return a lower bound of the cost: only computing takes time; inf if there are fewer samples than hosts."""
        if self.work.batch and self.work.batch < len(hosts):
            return math.inf
        network, work = restricted(self.network, self.work, hosts)
        own_s = work.compute_s(network)
        samples = np.array(work.samples(network)) if work.batch else np.ones(len(hosts))
        freely_s = float(samples.sum() / (samples / own_s).sum())
        free = min(way.steps(len(hosts)) for way in WAYS if way.mode.bound is None)
        return min(float(own_s.max()), freely_s * free)

    def cost(self, hosts: Hosts, under: float = math.inf) -> float:
        """Return the cost of the cheapest plan on these hosts; inf if links are missing that every plan needs.

        Args:
            hosts: the subset. On a network of more than EXACT_MAX hosts only simple shapes are priced.
            under: a cost above this limit need not be exact.
        """
        if (found := self.costs.get(hosts, (0.0, 0.0))) and (found[0] < found[1] or under <= found[1]):
            return found[0]
        chooser = Chooser(*restricted(self.network, self.work, hosts))
        chooser.least = under / NEAR
        if len(self.network.hosts) <= EXACT_MAX:
            cost = float(chooser.look(_partitions(len(hosts)), WAYS, BELOW, chooser.prices.hosts).costs.min())
        else:
            plans, under = chooser.shapes(chooser.central()[:ROOTS_MAX]), math.inf
            cost = min((plan[0] for plan in plans), default=math.inf)
        self.costs[hosts] = cost, under
        return cost

    def search(self, best: Hosts, cost: float) -> Hosts:
        """Return the subset with the cheapest plan. `best` is the cheapest subset so far, and `cost` its cost."""
        if len(self.everybody) <= EXACT_MAX:
            fewer = (some for count in range(1, len(self.everybody)) for some in combinations(self.everybody, count))
            return self._cheapest([*fewer], best, cost)[0]
        start = self.everybody
        for _ in range(ROUNDS_MAX):
            found, cost = self._cheapest([*dict.fromkeys(self.fewer(start))], best, cost)
            if found == best:
                break
            best = start = found
        return best

    def _cheapest(self, tried: Sequence[Hosts], best: Hosts, cost: float) -> tuple[Hosts, float]:
        bounds = sorted((self.least(hosts), -len(hosts), hosts) for hosts in tried)
        for bound, _, hosts in bounds:
            spent = sum(map(len, self.costs)) if len(self.everybody) > EXACT_MAX else 0
            if bound >= cost or spent + len(hosts) > PRICED_MAX:
                continue
            if (found := self.cost(hosts, cost)) < cost:
                best, cost = hosts, found
        return best, cost

    def fewer(self, hosts: Hosts) -> Iterator[Hosts]:
        """Yield subsets of these hosts that may be cheaper."""
        network = self.network.of(hosts)
        n, at = len(hosts), np.array(hosts)
        kept = [row == number for row in places(network) for number in np.unique(row)]
        kept += [np.isin(range(n), group) for groups in cuts(network, 4) for group in groups if len(group) > 1]
        for part in kept:
            if 1 < part.sum() < n:
                yield tuple(at[part].tolist())
            yield tuple(at[~part].tolist())
        near = np.isfinite(network.delay_s + network.delay_s.T)
        np.fill_diagonal(near, True)
        if not near.all():
            two = near.astype(int) @ near > 0
            for row in (near[near.sum(1).argmax()], two[two.sum(1).argmax()]):
                yield tuple(at[row].tolist())
        slowest = np.argsort(network.compute, kind="stable")
        speeds = network.compute[slowest]
        for count in np.flatnonzero(np.diff(speeds) > 0) + 1:
            yield tuple(sorted(at[slowest[count:]].tolist()))
        yield (int(at[slowest[-1]]),)
        for host in self.ones(hosts):
            yield tuple(other for other in hosts if other != host)

    def ones(self, hosts: Hosts) -> Hosts:
        """Return the hosts to leave out one at a time."""
        network = self.network.of(hosts)
        rate = np.minimum(network.rates[-1], network.rates[-1].T)
        np.fill_diagonal(rate, 0.0)
        narrow, slow = rate.max(1).argsort(kind="stable"), network.compute.argsort(kind="stable")
        most = len(hosts) if len(hosts) <= ONES_MAX else ONES_MAX // 4
        return tuple(hosts[host] for host in dict.fromkeys([*narrow[:most].tolist(), *slow[:most].tolist()]))


@dataclass(frozen=True, slots=True)
class ChosenHosts:
    """The hosts that the plan uses, and the costs of other choices.

    A cost is the seconds of a step times steps to a loss.
    """

    hosts: Hosts
    plans: list[DeploymentChoice]  # on these hosts, as `choices` returns them
    whole: float  # cost with all hosts, inf where no plan has all
    lacking: str  # why no plan has all hosts, "" if one has
    missed: tuple[int, float] | None  # the host whose loss costs least, and the cost without it; None for a lone host
    by_speed: float | None  # cost with samples shared by speed; None where they are, or where all hosts are alike

    @property
    def cost(self) -> float:
        return self.plans[0].cost


def keep(network: Network, work: TrainingWork, all_hosts: bool = False) -> ChosenHosts:
    """Choose the hosts of a run.

    Args:
        network: all hosts.
        work: the model and its step on all hosts.
        all_hosts: leave no host out.

    Raises:
        UsageError: links are missing that every plan needs, or there are fewer samples than hosts.
    """
    subsets, everybody = HostSubsets(network, work), tuple(range(len(network.hosts)))
    hosts, plans, whole, lacking = everybody, list[DeploymentChoice](), math.inf, ""
    try:
        plans = choices(network, work)
        whole = plans[0].cost
    except UsageError as error:
        if all_hosts:
            raise
        lacking = str(error)
    if not all_hosts and (found := subsets.search(everybody, whole)) != everybody:
        fewer = choices(*restricted(network, work, found))
        if fewer[0].cost * GAIN < whole:
            hosts, plans = found, fewer
    if not plans:
        raise UsageError(lacking)
    ones = [(subsets.cost(_without(hosts, host)), host) for host in subsets.ones(hosts)] if len(hosts) > 1 else []
    missed = min(ones, default=None)
    by_speed = None
    if not work.batch and len({*network.compute.tolist()}) > 1:
        shared = replace(work, batch=FINE * len(network.hosts))
        best = choose(*restricted(network, shared, hosts)).cost
        if not all_hosts:
            best = min(
                best, choose(*restricted(network, shared, HostSubsets(network, shared).search(hosts, best))).cost
            )
        by_speed = best
    return ChosenHosts(hosts, plans, whole, lacking, missed and (missed[1], missed[0]), by_speed)


def _without(hosts: Hosts, host: int) -> Hosts:
    return tuple(other for other in hosts if other != host)
