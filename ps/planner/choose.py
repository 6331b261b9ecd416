"""Chooses how a data parallel run stands on a network: clusters, servers, the mode and SPEC of each level. `choose` is pure.

Up to EXACT_MAX hosts it prices every partition with every two ways and every root. Above it begins with every cut of single
linkage, and moves hosts and whole groups from the best of those: ways are chosen anew after each move. Servers of clusters
follow exactly. Without clusters it also tries a server on several hosts. The best of these are priced again with the busiest
wire of both levels. The least of seconds a step x steps to a loss is the plan. The same arguments give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np

from narrows.protocols.errors import UsageError
from narrows.ps.planner.candidate_prices import (
    PRICED_MAX,
    ClusterPrices,
    Plan,
    PricedCandidates,
    changed,
    partitions,
    undominated,
)
from narrows.ps.planner.modes_and_specs import BELOW, WAYS, ModeAndSpec
from narrows.ps.planner.network import Array, Network, named
from narrows.ps.planner.step_prices import (
    BusyWire,
    CodecCost,
    Groups,
    HostGroupings,
    Indices,
    StepPrices,
    TrainingWork,
    cuts,
    joined,
    merges,
)

EXACT_MAX = 8  # hosts: they have 4,140 partitions
CUTS_MAX = 24
ROOTS_MAX = 24  # hosts that are tried as the root with every cut; the best plan tries all
ROOTS_NEAR = 4  # and with every move
SPREADS = (2, 4, 8)  # hosts that a server's shards are spread over
ROUNDS_MIN, ROUNDS_MAX, PAIRS_MOVED = 8, 128, 8192  # rounds of moves: so many pairs of hosts, within these bounds
MOVES_MIN, MOVES_MAX, HOSTS_PRICED = 48, 400, 8192  # moves of a round: likewise
MOVED_MAX = 8  # hosts of one group that are tried in another: those with the fastest links to it
WIDE_MAX = 16  # hosts of a network on which each move is priced with all ways, and not only the best few of them
BEST, KEPT = 4, 10  # plans of a round of moves that are moved from later
NEAR, NEAR_MAX = 1.1, 2  # which groupings are priced exactly; plans that are named beside the cheapest
SMALL, SHAPES = 32, 8  # of a network of so many hosts at most, so many cuts are candidates; of a larger one, one
TIE = 1.02  # plans that cost so many times as much as the cheapest are as good: the simplest of them is taken
PATIENT = 0.999  # a simpler plan may cost so much more: equals differ by rounding


@dataclass(frozen=True, slots=True)
class DeploymentChoice:
    """A plan. Groups of one host are workers of the root, the others clusters. `cost`: step_s x steps."""

    groups: Groups
    servers: tuple[int, ...]  # of each group
    root: int
    above: ModeAndSpec
    below: ModeAndSpec
    step_s: float
    cost: float
    spread: tuple[
        int, ...
    ] = ()  # hosts that have a shard of the root each, the root among them; none: the root has all

    @property
    def kind(self) -> tuple[object, ...]:
        """All but where servers stand."""
        return self.groups, self.above, self.below if self.clusters else None, self.spread

    @property
    def clusters(self) -> list[tuple[int, tuple[int, ...]]]:
        """(host of the server, hosts) of each."""
        return [(s, group) for s, group in zip(self.servers, self.groups, strict=True) if len(group) > 1]


class Chooser:
    def __init__(self, network: Network, work: TrainingWork) -> None:
        self.prices = StepPrices(network, work)
        self.hosts = range(len(network.hosts))
        self.alone: Groups = tuple((host,) for host in self.hosts)
        self.clusters = ClusterPrices(self.prices)
        self.looks: list[PricedCandidates] = []
        self.simple: list[Plan] = []  # the cheapest ones of each simple shape
        self.least = np.inf  # cost of a plan
        sizes = range(max(2, len(self.hosts)) + 1)
        self.steps = {way: np.array([way.steps(size) for size in sizes]) for way in WAYS}

    def own_s(self, below: ModeAndSpec, groups: Groups) -> Array:
        """(n,) seconds of a step of the group of each host, if it had the group's server."""
        found = np.empty(len(self.hosts))
        found[[host for group in groups for host in group]] = self.clusters.of(below, self.clusters.numbers(groups))
        return found

    def priced(self, groups: Groups, above: ModeAndSpec, below: ModeAndSpec, roots: Indices) -> DeploymentChoice:
        """The cheapest plan of these groups and ways, with one of these roots."""
        step_s, root, servers = self.prices.above_s(above, self.own_s(below, groups), groups, roots, below.inside)
        if math.isfinite(step_s):  # no link is missing
            step_s = max(step_s, self.busiest(groups, servers, root, above, below).seconds)
        steps = float(self.times(above, below, np.array([len(groups)]))[0])
        return DeploymentChoice(groups, servers, root, above, below, step_s, step_s * steps)

    def busiest(
        self, groups: Groups, servers: Sequence[int], root: int, above: ModeAndSpec, below: ModeAndSpec
    ) -> BusyWire:
        """Return the wire that takes the longest for both levels together. Its seconds are 0 where no child waits for another:
        a slow child then sends less than once a step."""
        if above.mode.bound is None:
            return BusyWire(0.0, root, root)
        flows = partial(self.prices.exchange_flows, parameters=self.prices.work.parameters)
        clusters = (
            flows(below, children=group, servers=(server,)) for server, group in zip(servers, groups, strict=True)
        )
        return self.prices.busiest(chain(flows(above, children=servers, servers=(root,)), *clusters))

    def times(self, above: ModeAndSpec, below: ModeAndSpec, children: Indices) -> Array:
        """(b,) steps to a loss beside those of bsp, of groupings with so many children of the root. What loses is the mean of
        several optimizers' updates: a cluster of bsp has one, of other ways each of its workers has its own."""
        n, one, two = len(self.hosts), self.steps[above], self.steps[below]
        if below.sync == "bsp":
            return np.asarray(one[children])
        found: Array = np.where(children == n, one[n], max(one[n] * two[2], one[2] * two[n]))
        return found

    def look(
        self, groupings: Sequence[Groups], aboves: Sequence[ModeAndSpec], belows: Sequence[ModeAndSpec], roots: Indices
    ) -> PricedCandidates:
        """Prices each of these groupings with each two of these ways and the best of these roots. Ways inside are left out
        that are slower than others in each group and take no fewer steps. Those cost inf that would be dearer than NEAR
        times the best if nothing took time above."""
        table = HostGroupings.of(groupings, self.prices.place)
        numbers = self.clusters.numbers([group for groups in groupings for group in groups])
        own_s = np.stack([self.clusters.of(below, numbers) for below in belows]).reshape(
            len(belows), *table.order.shape
        )
        steps = np.stack([[self.times(above, below, table.children) for below in belows] for above in aboves])
        inside = np.array([way.inside for way in belows])
        below, at = np.nonzero(undominated(own_s, steps, inside))
        own_s, steps, rows = own_s[below, at], steps[:, below, at], table.rows(at).below(inside[below])
        least = steps * np.stack([self.prices.least_s(above, own_s, rows) for above in aboves])
        costs = np.full(steps.shape, np.inf)
        order = least.min(0).argsort(kind="stable")
        many = max(1, PRICED_MAX // (len(self.hosts) * len(roots)))
        for begin in range(0, len(at), many):
            for each, above in enumerate(aboves):
                some = order[begin : begin + many]
                some = some[least[each, some] <= NEAR * self.least]
                if len(some):
                    step_s = self.prices.steps_s(above, own_s[some], rows.rows(some), roots).min(1)
                    costs[each, some] = step_s * steps[each, some]
                    self.least = min(self.least, float(costs[each, some].min()))
        self.looks.append(PricedCandidates(groupings, aboves, belows, at, below, costs))
        return self.looks[-1]

    def best(self) -> list[Plan]:
        """Return the cheapest plan of each two ways that were priced, the cheapest first. Among equals the plan with fewer
        clusters is taken. A plan that needs a missing link costs inf, and is none."""
        least = self.least
        found: dict[tuple[ModeAndSpec, ModeAndSpec], tuple[tuple[float, int], Plan]] = {}
        for look in self.looks:
            clusters = np.array([sum(len(group) > 1 for group in groups) for groups in look.groupings])
            for each, above in enumerate(look.aboves):
                for number, below in enumerate(look.belows):
                    items = np.flatnonzero((look.below == number) & np.isfinite(look.costs[each]))
                    if len(items):
                        costs = look.costs[each, items]
                        near = items[costs <= max(costs.min(), least / PATIENT)]
                        item = int(near[np.lexsort((look.costs[each, near], clusters[look.at[near]]))[0]])
                        plan, key = (
                            look.plan(each, item),
                            (max(costs.min(), least / PATIENT), int(clusters[look.at[item]])),
                        )
                        if (above, below) not in found or key < found[above, below][0]:
                            found[above, below] = key, plan
        return [plan for _, plan in sorted(found.values(), key=lambda each: each[0])]

    def search(self) -> None:
        (self.every if len(self.hosts) <= EXACT_MAX else self.nearby)()

    def every(self) -> None:
        """Prices every partition."""
        groupings = [groups for groups in partitions([*self.hosts]) if len(groups) > 1 or groups == self.alone]
        self.look(groupings, WAYS, BELOW, self.prices.hosts)
        self.shapes(self.prices.hosts)

    def nearby(self) -> None:
        """Prices simple shapes, and then moves from the cheapest groups that were not moved from yet, again and again."""
        plans = sorted(self.shapes(self.central()[:ROOTS_MAX]), key=lambda plan: plan[:2])
        seen = {groups for _, groups, *_ in plans}
        for _ in range(int(np.clip(PAIRS_MOVED // len(self.hosts) ** 2, ROUNDS_MIN, ROUNDS_MAX))):
            if plans:
                plans = sorted([*self.moved(plans[0], seen), *plans[1:]], key=lambda plan: plan[:2])

    def shapes(self, roots: Indices) -> list[Plan]:
        """Prices simple shapes, however much dearer than others: no cluster, the cuts, what reaches where links are missing.
        Returns the cheapest plan of each grouping, and keeps the first ones of each shape."""
        found, least = list[Plan](), self.least
        placed = self.placed()
        cut = [groups for groups in cuts(self.prices.network, CUTS_MAX) if groups not in placed]
        for groupings in ([self.alone], placed + cut, self.reaching()):
            self.least = np.inf
            plans = self.look(groupings, WAYS, BELOW, roots).plans() if groupings else []
            self.simple += plans[: SHAPES if len(self.hosts) <= SMALL else 1]
            found, least = [*found, *plans], min(least, self.least)
        self.least = least
        return found

    def placed(self) -> list[Groups]:
        """The places of each level as groups, where these are neither one group nor all alone."""
        found = []
        for row in self.prices.place:
            groups = tuple(tuple(int(host) for host in np.flatnonzero(row == number)) for number in np.unique(row))
            if 1 < len(groups) < len(self.hosts):
                found.append(tuple(sorted(groups)))
        return [*dict.fromkeys(found)]

    def central(self) -> Indices:
        """All hosts: who reaches most first, and of those who is nearest to all."""
        far_s = self.prices.network.delay_s + self.prices.sent_s(self.prices.work.parameters)
        near = np.isfinite(far_s).sum(0)
        mean_s = np.where(np.isfinite(far_s), far_s, 0.0).sum(0) / near
        return np.lexsort((mean_s, -near))

    def reaching(self) -> list[Groups]:
        """Where links are missing: for each root that reaches all others by two links at most, those of one link alone, and
        each other host in the cluster of one of them. No other root has a plan."""
        if not self.prices.network.missing:
            return []
        n, sent_s = len(self.hosts), self.prices.sent_s(self.prices.work.parameters)
        far_s = np.where(np.isinf(self.prices.round_trip_s), np.inf, sent_s + sent_s.T)
        np.fill_diagonal(far_s, 0.0)
        found = []
        for root in self.hosts:
            near = np.isfinite(far_s[root])
            over = np.where(near, far_s, np.inf)  # to a host next to the root
            if np.isfinite(over.min(1)).all():
                home = np.where(near, self.hosts, over.argmin(1))
                found.append(joined(n, [(0.0, int(home[host]), host) for host in self.hosts if home[host] != host]))
        return [groups for groups in dict.fromkeys(found) if len(groups) > 1]

    def moved(self, plan: Plan, seen: set[Groups]) -> list[Plan]:
        """The best of the moves from this plan to groups that are not in `seen`, ways chosen anew."""
        _, groups, above, below = plan
        table = HostGroupings.of([groups], self.prices.place).below(np.array([below.inside]))
        own = self.own_s(below, groups)
        step_s = self.prices.steps_s(above, own[table.order], table, self.prices.hosts)[0]
        roots = np.sort(step_s.argsort(kind="stable")[:ROOTS_NEAR])
        root = np.array([step_s.argmin()])
        clocks = self.prices.children_s(above, own[table.order], table, root).ravel()
        slowest = np.minimum.reduceat(clocks, np.flatnonzero(table.first)).argsort(kind="stable")[::-1]
        new = (to for to in self.moves([groups[group] for group in slowest]) if to not in seen)
        most = int(np.clip(HOSTS_PRICED // len(self.hosts), MOVES_MIN, MOVES_MAX))
        if not (tried := [*dict.fromkeys(islice(new, most))]):
            return []
        seen.update(tried)
        if len(self.hosts) > WIDE_MAX:
            tried = [groups for _, groups, *_ in self.look(tried, [above], [below], roots).plans()[:BEST]]
        return self.look(tried, WAYS, BELOW, roots).plans()[:KEPT] if tried else []

    def lacking(self) -> str:
        """Which links keep every plan away, in a sentence."""
        network = self.prices.network
        near = np.isfinite(self.prices.round_trip_s)
        np.fill_diagonal(near, True)
        two = near.astype(int) @ near > 0  # by another host
        root = int(two.sum(1).argmax())
        if two[root].all():
            return "no plan takes a finite time: look at --parameters, --step and the rates of the network"
        pairs = named([f"{network.hosts[root]} to {network.hosts[host]}" for host in np.flatnonzero(~two[root])])
        return (
            f"no host reaches all others, itself or over one host between; {network.hosts[root]} reaches most: "
            f"measure both ways of {pairs}, or leave these hosts out"
        )

    def moves(self, groups: Sequence[tuple[int, ...]]) -> Iterator[Groups]:
        """Other groups: two as one, one as two, one host elsewhere or alone; those of the first groups first."""
        rate = np.minimum(self.prices.network.rates[-1], self.prices.network.rates[-1].T)
        for number, group in enumerate(groups):
            for cut in self.halves(group):
                yield changed(groups, [group], cut)
            for other in groups[number + 1 :]:
                if len(groups) > 2:
                    yield changed(groups, [group, other], [group + other])
                for one, to in ((group, other), (other, group)):
                    if len(one) > 1:
                        near = rate[np.ix_(one, to)].mean(1).argsort(kind="stable")[::-1][:MOVED_MAX]
                        for host in (one[at] for at in near):
                            rest = tuple(h for h in one if h != host)
                            yield changed(groups, [group, other], [rest, (*to, host)])

    def halves(self, group: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
        """The group without one of its hosts, and in two where its slowest link is."""
        if len(group) > 2:
            found = merges(self.prices.network.of(group))[:-1]
            yield [tuple(group[at] for at in part) for part in joined(len(group), found)]
        if len(group) > 1:
            for host in group:
                yield [(host,), tuple(h for h in group if h != host)]

    def spreads(self, way: ModeAndSpec) -> Iterator[DeploymentChoice]:
        """One server for all workers, on the hosts that would be the best root each."""
        if way.mode.bound is None:  # keys of such a run do not move to other hosts
            return
        prices, table = self.prices, HostGroupings.of([self.alone], self.prices.place)
        best = prices.steps_s(way, prices.compute_s[None], table, prices.hosts)[0].argsort(kind="stable")
        for count in SPREADS:
            if count < len(best):
                servers = tuple(int(host) for host in best[:count])
                step_s = prices.spread_s(way, servers)
                cost = step_s * way.steps(len(best))
                if math.isfinite(cost):
                    yield DeploymentChoice(
                        self.alone, tuple(self.hosts), servers[0], way, BELOW[0], step_s, cost, servers
                    )


def cheapest(plan: DeploymentChoice, others: Sequence[DeploymentChoice]) -> DeploymentChoice:
    for other in others:
        if other.cost < PATIENT * plan.cost:
            plan = other
    return plan


def choose(network: Network, work: TrainingWork) -> DeploymentChoice:
    """The plan that comes to a loss soonest. UsageError where samples are fewer than hosts, or links are missing that every
    plan needs."""
    return choices(network, work)[0]


def choices(network: Network, work: TrainingWork) -> list[DeploymentChoice]:
    """Return the cheapest plan, and after it the others by their cost: the cheapest ones of a few other ways, and the cheapest
    one of each simple shape (no cluster, one server on several hosts, a cut, clusters of any kind). Raises UsageError."""
    chooser = Chooser(network, work)
    chooser.search()
    everybody = chooser.prices.hosts
    if not np.isfinite(chooser.least):
        raise UsageError(f"no plan: {chooser.lacking()}")
    best = chooser.best()
    level = [each for each in best if len(each[1]) < len(chooser.alone)][:1]
    plans = [chooser.priced(*each[1:], everybody) for each in [*best[: 1 + NEAR_MAX], *chooser.simple, *level]]
    plans += sorted((spread for way in WAYS for spread in chooser.spreads(way)), key=cost)[: 1 + NEAR_MAX]
    plan = cheapest(plans[0], plans)
    found: dict[tuple[object, ...], DeploymentChoice] = {}
    for each in [plan, *sorted(plans, key=cost)]:
        found.setdefault(each.kind, each)
    return [*found.values()]


def simplest_first(plans: Sequence[DeploymentChoice]) -> list[DeploymentChoice]:
    """Return the plans with the simplest one at the front of those that cost at most TIE times as much as the cheapest: fewer
    levels, then fewer servers on other hosts than the root. A level that gains less than the forms err is not worth its
    processes."""
    least = min(map(cost, plans))
    first = min((plan for plan in plans if plan.cost <= TIE * least), key=simplicity)
    return [first, *(plan for plan in plans if plan is not first)]


def cost(plan: DeploymentChoice) -> float:
    return plan.cost


def simplicity(plan: DeploymentChoice) -> tuple[int, int]:
    return 1 + bool(plan.clusters), len(plan.clusters) + len(plan.spread)


def for_stage(
    network: Network, hosts: list[int], parameters: float, own_s: float, coded: Mapping[str, CodecCost]
) -> tuple[int, ModeAndSpec, float]:
    """(host of the server, way, seconds of a step) for the hosts of one stage of a pipeline that takes own_s for a step."""
    if len(hosts) == 1:
        return hosts[0], WAYS[0], own_s
    stage = network.of(hosts).alike()
    chooser = Chooser(stage, TrainingWork(parameters, own_s * float(stage.compute[0]), coded))
    first, *others = (chooser.priced(chooser.alone, way, BELOW[0], chooser.prices.hosts) for way in WAYS)
    plan = cheapest(first, others)
    return hosts[plan.root], plan.above, plan.step_s
