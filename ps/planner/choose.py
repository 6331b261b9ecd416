"""The choice of a data parallel deployment on a network: clusters, servers, the mode and SPEC of each level. No I/O.

A way is the mode and SPEC of one level (`ModeAndSpec`). A grouping cuts the hosts into groups: a group of one host is a
worker of the root, a larger group is a cluster. The cost of a plan is its seconds a step times its steps to a loss.

How it works

1. `every`, up to EXACT_MAX hosts, prices each partition of the hosts with each two ways and each root.
2. `nearby`, for more hosts, begins with simple shapes: no cluster, each cut of single linkage, the places, and
   groupings that get round missing links (`shapes`).
3. `nearby` then takes the cheapest grouping that it has not yet moved from, and moves hosts and whole groups, those of
   the slowest child first (`moves`). Ways are chosen anew after each move. The rounds are limited, so the search ends.

       shapes -> plans by cost -> moved(cheapest) -> new plans by cost -> moved(cheapest) -> ...

4. `look` does the pricing. For a root the choice of each cluster's server is exact (`StepPrices.steps_s`). `look`
   leaves out ways that are nowhere better, and groupings whose lower bound already costs NEAR times the best.
5. `choices` prices the best plans again (`priced`), now with the busiest wire of both levels, and adds plans without
   clusters whose server has shards on several hosts (`spreads`).
6. `simplest_first` takes the simplest of the plans that cost at most TIE times as much as the cheapest.

The same arguments give the same plan.
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
from narrows.ps.planner.codec_costs import CodecCost
from narrows.ps.planner.host_memory import VALUE_BYTES, server_models, worker_models
from narrows.ps.planner.modes_and_specs import BELOW, DENSE_UPDATES, WAYS, ModeAndSpec
from narrows.ps.planner.network import Array, Network, named
from narrows.ps.planner.step_prices import (
    BusyWire,
    Groups,
    HostGroupings,
    Indices,
    StepPrices,
    TrainingWork,
    cuts,
    joined,
    merges,
)

EXACT_MAX = 8  # most hosts of an exhaustive search: eight hosts have 4,140 partitions
CUTS_MAX = 24  # cuts of single linkage that are priced
ROOTS_MAX = 24  # hosts that each cut is priced with as the root; the best plan is priced with all
ROOTS_NEAR = 4  # hosts that each move is priced with as the root
SPREADS = (2, 4, 8)  # numbers of hosts that a server's shards are spread over
ROUNDS_MIN, ROUNDS_MAX, PAIRS_MOVED = 8, 128, 8192  # rounds of moves: PAIRS_MOVED / hosts^2, within the two bounds
MOVES_MIN, MOVES_MAX, HOSTS_PRICED = 48, 400, 8192  # moves of a round: HOSTS_PRICED / hosts, within the two bounds
MOVED_MAX = 8  # hosts of a group that are tried in another group: those with the fastest links to the other group
WIDE_MAX = 16  # up to this many hosts each move is priced with all ways; beyond, only the BEST moves are
BEST, KEPT = 4, 10  # moves that are priced with all ways; plans that a round of moves keeps for later rounds
NEAR, NEAR_MAX = 1.1, 2  # lower bound, beside the best cost, that is still priced; plans named beside the cheapest
SMALL, SHAPES = 32, 8  # up to SMALL hosts the SHAPES cheapest plans of each shape are candidates; beyond, one plan
TIE = 1.02  # a plan within this factor of the cheapest is as good: the simplest of them is taken
PATIENT = 0.999  # a plan must cost less than this share of a simpler one: equal costs differ by rounding


@dataclass(frozen=True, slots=True)
class DeploymentChoice:
    """One priced plan. Groups of one host are workers of the root, larger groups are clusters."""

    groups: Groups
    servers: tuple[int, ...]  # the host of each group's server
    root: int  # the host of the root
    above: ModeAndSpec  # between the root and its children
    below: ModeAndSpec  # inside clusters
    step_s: float  # predicted seconds of a step
    cost: float  # step_s times the steps to a loss, beside those of bsp
    spread: tuple[
        int, ...
    ] = ()  # hosts with a shard of the root each, the root's host among them; empty: the root's host has all shards

    @property
    def kind(self) -> tuple[object, ...]:
        """The plan without the hosts of its servers: two plans of one kind differ in these alone."""
        return self.groups, self.above, self.below if self.clusters else None, self.spread

    @property
    def clusters(self) -> list[tuple[int, tuple[int, ...]]]:
        """(host of the server, hosts) of each cluster."""
        return [(s, group) for s, group in zip(self.servers, self.groups, strict=True) if len(group) > 1]


class Chooser:
    """The search for the cheapest plan of `work` on `network`."""

    def __init__(self, network: Network, work: TrainingWork) -> None:
        self.prices = StepPrices(network, work)
        self.hosts = range(len(network.hosts))
        self.alone: Groups = tuple((host,) for host in self.hosts)  # the grouping without clusters
        self.clusters = ClusterPrices(self.prices)
        self.looks: list[PricedCandidates] = []  # all that was priced so far
        self.simple: list[Plan] = []  # the cheapest plans of each simple shape
        self.least = np.inf  # the least cost so far, of the shape that is being priced
        sizes = range(max(2, len(self.hosts)) + 1)
        self.steps = {way: np.array([way.steps(size) for size in sizes]) for way in (DENSE_UPDATES, *WAYS)}
        self._steps: dict[tuple[tuple[ModeAndSpec, ...], tuple[ModeAndSpec, ...]], Array] = {}

    def own_s(self, below: ModeAndSpec, groups: Groups) -> Array:
        """Return (n,) seconds of a step of each host's group, if the group's server stood on that host."""
        found = np.empty(len(self.hosts))
        found[[host for group in groups for host in group]] = self.clusters.of(below, self.clusters.numbers(groups))
        return found

    def priced(self, groups: Groups, above: ModeAndSpec, below: ModeAndSpec, roots: Indices) -> DeploymentChoice:
        """Return the cheapest plan of these groups and ways with one of these roots, its busiest wire included."""
        step_s, root, servers = self.prices.above_s(above, self.own_s(below, groups), groups, roots, below.inside)
        if math.isfinite(step_s):  # no link is missing
            step_s = max(step_s, self.busiest(groups, servers, root, above, below).seconds)
        steps = float(self.times(above, below, np.array([len(groups)]))[0])
        return DeploymentChoice(groups, servers, root, above, below, step_s, step_s * steps)

    def busiest(
        self, groups: Groups, servers: Sequence[int], root: int, above: ModeAndSpec, below: ModeAndSpec
    ) -> BusyWire:
        """Return the wire that the messages of both levels keep busy for the longest time.

        Its seconds are 0 where the root's mode has no bound: a slow child then sends less than once a step.
        """
        if above.mode.bound is None:
            return BusyWire(0.0, root, root)
        flows = partial(self.prices.exchange_flows, parameters=self.prices.work.parameters)
        clusters = (
            flows(below, children=group, servers=(server,)) for server, group in zip(servers, groups, strict=True)
        )
        return self.prices.busiest(chain(flows(above, children=servers, servers=(root,)), *clusters))

    def times(self, above: ModeAndSpec, below: ModeAndSpec, children: Indices) -> Array:
        """Return (b,) steps to a loss, as a multiple of bsp's, of groupings whose root has `children`, (b,), children.

        A mean over the updates of several optimizers costs steps. A cluster under bsp has one optimizer, unless its
        workers push updates; under another mode each of its workers has an optimizer of its own. Clusters push updates
        under bsp too.
        """
        n, two = len(self.hosts), self.steps[below]
        one = self.steps[above if above.own_optimizers else DENSE_UPDATES]
        clustered = max(one[n] * two[2], one[2] * two[n]) if below.own_optimizers else one[children]
        found: Array = np.where(children == n, self.steps[above][n], clustered)
        return found

    def steps_of(self, aboves: Sequence[ModeAndSpec], belows: Sequence[ModeAndSpec], children: Indices) -> Array:
        """Return (aboves, belows, b) `times` of each pair of ways."""
        key = (*aboves,), (*belows,)
        if key not in self._steps:
            counts = np.arange(len(self.hosts) + 1)
            self._steps[key] = np.stack([[self.times(above, below, counts) for below in belows] for above in aboves])
        return self._steps[key][:, :, children]

    def look(
        self, groupings: Sequence[Groups], aboves: Sequence[ModeAndSpec], belows: Sequence[ModeAndSpec], roots: Indices
    ) -> PricedCandidates:
        """Price each grouping with each pair of ways and the best of `roots`.

        A way inside clusters is left out if another way is at least as fast in each group and takes no more steps. A
        candidate costs inf if its lower bound, with messages to the root that take no time, exceeds NEAR times the
        least cost so far.

        Args:
            groupings: the groupings to price.
            aboves: ways between the root and its children.
            belows: ways inside clusters.
            roots: hosts that may have the root.
        """
        table = HostGroupings.of(groupings, self.prices.place)
        numbers = self.clusters.numbers([group for groups in groupings for group in groups])
        own_s = np.stack([self.clusters.of(below, numbers) for below in belows]).reshape(
            len(belows), *table.order.shape
        )
        steps = self.steps_of(aboves, belows, table.children)
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
        """Return the cheapest plan of each pair of ways that was priced, the cheapest first.

        Among plans of equal cost the plan with fewer clusters is taken. A plan that needs a missing link is left out.
        """
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
        """Price every partition of the hosts."""
        groupings = [groups for groups in partitions([*self.hosts]) if len(groups) > 1 or groups == self.alone]
        self.look(groupings, WAYS, BELOW, self.prices.hosts)
        self.shapes(self.prices.hosts)

    def nearby(self) -> None:
        """Price simple shapes. Then move, round after round, from the cheapest grouping that was not moved from yet."""
        plans = sorted(self.shapes(self.central()[:ROOTS_MAX]), key=lambda plan: plan[:2])
        seen = {groups for _, groups, *_ in plans}
        for _ in range(int(np.clip(PAIRS_MOVED // len(self.hosts) ** 2, ROUNDS_MIN, ROUNDS_MAX))):
            if plans:
                plans = sorted([*self.moved(plans[0], seen), *plans[1:]], key=lambda plan: plan[:2])

    def shapes(self, roots: Indices) -> list[Plan]:
        """Price the simple shapes: no cluster, the places and cuts, and groupings that get round missing links.

        Each shape is priced however dear it is beside the others. The first plans of each shape go into `simple`.

        Returns:
            The cheapest plan of each grouping.
        """
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
        """Return the places of each level as groupings, without those of one group or of lone hosts."""
        found = []
        for row in self.prices.place:
            groups = tuple(tuple(int(host) for host in np.flatnonzero(row == number)) for number in np.unique(row))
            if 1 < len(groups) < len(self.hosts):
                found.append(tuple(sorted(groups)))
        return [*dict.fromkeys(found)]

    def central(self) -> Indices:
        """Return all hosts, the best connected first: by the number of links, then by the mean time of a message."""
        far_s = self.prices.network.delay_s + self.prices.sent_s(self.prices.work.parameters)
        near = np.isfinite(far_s).sum(0)
        mean_s = np.where(np.isfinite(far_s), far_s, 0.0).sum(0) / near
        return np.lexsort((mean_s, -near))

    def reaching(self) -> list[Groups]:
        """Return a grouping for each possible root of a network with missing links.

        A root has a plan only if it reaches each other host over at most two links. In its grouping, each host without
        a link to the root joins the cluster of the host with a link that is nearest.
        """
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
        """Return the best plans that are one move from this plan, with ways chosen anew.

        Groupings in `seen` are left out; the ones that are priced are added to it.
        """
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
        """Return a sentence that names the missing links that every plan would need."""
        network = self.prices.network
        near = np.isfinite(self.prices.round_trip_s)
        np.fill_diagonal(near, True)
        two = near.astype(int) @ near > 0  # pairs that reach each other over at most one host between
        root = int(two.sum(1).argmax())
        if two[root].all():
            return "no plan takes a finite time: look at --parameters, --step and the rates of the network"
        pairs = named([f"{network.hosts[root]} to {network.hosts[host]}" for host in np.flatnonzero(~two[root])])
        return (
            f"no host reaches all others, itself or over one host between; {network.hosts[root]} reaches most: "
            f"measure both ways of {pairs}, or leave these hosts out"
        )

    def moves(self, groups: Sequence[tuple[int, ...]]) -> Iterator[Groups]:
        """Yield groupings that are one move away, moves of the first groups first.

        A move joins two groups, cuts a group in two, or takes a host to another group or out of its group.
        """
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
        """Yield cuts of the group in two: at its slowest link, and each host apart from the rest."""
        if len(group) > 2:
            found = merges(self.prices.network.of(group))[:-1]
            yield [tuple(group[at] for at in part) for part in joined(len(group), found)]
        if len(group) > 1:
            for host in group:
                yield [(host,), tuple(h for h in group if h != host)]

    def spreads(self, way: ModeAndSpec) -> Iterator[DeploymentChoice]:
        """Yield plans without clusters whose server has shards on several hosts: the hosts that are the best roots."""
        if way.mode.bound is None:  # a run without a bound does not reshard to other hosts
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
    """Return the plan with the least predicted time to a loss.

    Raises:
        UsageError: there are fewer samples than hosts, or links are missing that every plan needs.
    """
    return choices(network, work)[0]


def choices(network: Network, work: TrainingWork) -> list[DeploymentChoice]:
    """Return the cheapest plan, and after it other plans by their cost.

    The others are the cheapest plans of a few other ways, and the cheapest plan of each simple shape: no cluster, one
    server on several hosts, a cut, clusters of any kind.

    Raises:
        UsageError: as `choose`.
    """
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
    """Return the plans, first the simplest of those that cost at most TIE times as much as the cheapest.

    A simpler plan has fewer levels, then fewer servers on hosts other than the root's. A level whose gain is below the
    error of the closed forms is not worth its processes.
    """
    least = min(map(cost, plans))
    first = min((plan for plan in plans if plan.cost <= TIE * least), key=simplicity)
    return [first, *(plan for plan in plans if plan is not first)]


def cost(plan: DeploymentChoice) -> float:
    return plan.cost


def simplicity(plan: DeploymentChoice) -> tuple[int, int]:
    return 1 + bool(plan.clusters), len(plan.clusters) + len(plan.spread)


def for_stage(
    network: Network,
    hosts: list[int],
    parameters: float,
    own_s: float,
    coded: Mapping[str, CodecCost],
    fitting: bool = False,
) -> tuple[int, ModeAndSpec, float]:
    """Choose the server and the way of one stage of a pipeline.

    Args:
        network: the network of the whole pipeline.
        hosts: the hosts that have a copy of the stage.
        parameters: the number of the stage's parameters.
        own_s: seconds of a step of the stage before its replicas exchange updates.
        coded: the cost of each SPEC.
        fitting: take a way and a host for which the memory is enough, if there is one.

    Returns:
        The host of the server, the mode and SPEC, and the seconds of a step.
    """
    if len(hosts) == 1:
        return hosts[0], WAYS[0], own_s
    stage = network.of(hosts).alike()
    chooser = Chooser(stage, TrainingWork(parameters, own_s * float(stage.compute[0]), coded))
    roots = dict.fromkeys(WAYS, chooser.prices.hosts)
    if fitting:
        roots = _roomy(stage, parameters) or roots
    first, *others = (chooser.priced(chooser.alone, way, BELOW[0], hosts) for way, hosts in roots.items())
    plan = cheapest(first, others)
    return hosts[plan.root], plan.above, plan.step_s


def _roomy(stage: Network, parameters: float) -> dict[ModeAndSpec, Indices]:
    """Return the hosts that have room for a stage's server, for each way whose workers have room on all hosts."""
    found = {}
    for way in WAYS:
        left = stage.memory_bytes - VALUE_BYTES * parameters * worker_models(way)
        roots = np.flatnonzero(left >= VALUE_BYTES * parameters * server_models(way, len(stage.hosts)))
        if (left >= 0).all() and len(roots):
            found[way] = roots
    return found
