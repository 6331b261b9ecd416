"""Chooses how a data parallel run stands on a network: clusters, servers, the mode and SPEC of each level. `choose` is pure.

It tries every cut of single linkage (levels.cuts), each way inside clusters with each above them, and every root; servers of
clusters follow exactly. Without clusters it also tries a server on several hosts. Then it moves single hosts between clusters.
The least of seconds a step x steps to a loss is the plan. The same arguments give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from narrows.protocols.planning.levels import Coded, Groups, Indices, Prices, Work, cuts
from narrows.protocols.planning.network import Array, Network
from narrows.protocols.planning.ways import BELOW, WAYS, Way

CUTS_MAX = 24
ROOTS_MAX = 24  # hosts that are tried as the root with every cut; the best plan tries all
SPREADS = (2, 4, 8)  # hosts that a server's shards are spread over
MOVES_MAX = 400  # plans that local moves may price
NEAR, NEAR_MAX = 1.1, 2  # which others are worth a trial, and how many
PATIENT = 0.999  # a plan is left only for one that costs less than this of it: equals differ by rounding


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan. Groups of one host are workers of the root, the others clusters. `cost`: step_s x steps."""

    groups: Groups
    servers: tuple[int, ...]  # of each group
    root: int
    above: Way
    below: Way
    step_s: float
    cost: float
    spread: tuple[
        int, ...
    ] = ()  # hosts that have a shard of the root each, the root among them; none: the root has all

    @property
    def kind(self) -> tuple[Groups, Way, Way, tuple[int, ...]]:
        """All but where servers stand."""
        return self.groups, self.above, self.below, self.spread

    @property
    def clusters(self) -> list[tuple[int, tuple[int, ...]]]:
        """(host of the server, hosts) of each."""
        return [(s, group) for s, group in zip(self.servers, self.groups, strict=True) if len(group) > 1]


class Chooser:
    def __init__(self, network: Network, work: Work) -> None:
        self.prices = Prices(network, work)
        self.hosts = range(len(network.hosts))
        self.alone: Groups = tuple((host,) for host in self.hosts)
        self._below_s: dict[tuple[Way, tuple[int, ...]], Array] = {}

    def own_s(self, below: Way, groups: Groups) -> Array:
        """(n,) seconds of a step of the group of each host, if it had the group's server."""
        found = self.prices.compute_s.copy()
        for group in groups:
            if len(group) > 1:
                if (below, group) not in self._below_s:
                    self._below_s[below, group] = self.prices.below_s(below, group)
                found[[*group]] = self._below_s[below, group]
        return found

    def priced(self, groups: Groups, above: Way, below: Way, roots: Indices) -> Choice:
        """The cheapest plan of these groups and ways, with one of these roots."""
        step_s, root, servers = self.prices.above_s(above, self.own_s(below, groups), groups, roots)
        steps = above.steps(len(groups)) * max(below.steps(len(group)) for group in groups)
        return Choice(groups, servers, root, above, below, step_s, step_s * steps)

    def candidates(self, roots: Indices) -> Iterator[Choice]:
        """Simple ones first: among equals the first is taken."""
        for above in WAYS:
            yield self.priced(self.alone, above, BELOW[0], roots)
        for groups in cuts(self.prices.network, CUTS_MAX):
            for below in BELOW:
                for above in WAYS:
                    yield self.priced(groups, above, below, roots)

    def spreads(self, way: Way) -> Iterator[Choice]:
        """One server for all workers, on the hosts that would be the best root each."""
        if way.mode.bound is None:  # keys of such a run do not move to other hosts
            return
        prices, everybody = self.prices, self.prices.hosts
        roads = prices.roads(way, self.alone, everybody, everybody)
        best = prices.step_s(way, prices.clocks(way, prices.compute_s, *roads)).argsort(kind="stable")
        for count in SPREADS:
            if count < len(best):
                servers = tuple(int(host) for host in best[:count])
                step_s = prices.spread_s(way, servers)
                cost = step_s * way.steps(len(best))
                yield Choice(self.alone, tuple(self.hosts), servers[0], way, BELOW[0], step_s, cost, servers)

    def moves(self, groups: Groups) -> Iterator[Groups]:
        """Each host in each other group, or alone."""
        for host in self.hosts:
            home = next(group for group in groups if host in group)
            rest = [tuple(h for h in group if h != host) for group in groups]
            for to in [*groups, ()] if len(home) > 1 else groups:
                if to != home:
                    at = groups.index(to) if to else None
                    changed = [
                        (*sorted((*group, host)),) if k == at else group
                        for k, group in enumerate(rest)
                        if group or k == at
                    ]
                    yield tuple(sorted([*changed, *([(host,)] if at is None else [])]))

    def descended(self, plan: Choice, roots: Indices) -> Choice:
        """The plan after the best of the moves, again and again, until none gains or MOVES_MAX are priced."""
        left = MOVES_MAX
        while left > 0:
            tried = []
            for groups in self.moves(plan.groups):
                if left > 0 and len(groups) > 1:
                    left -= 1
                    tried.append(self.priced(groups, plan.above, plan.below, roots))
            best = cheapest(plan, tried)
            if best is plan:
                break
            plan = best
        return plan


def cheapest(plan: Choice, others: list[Choice]) -> Choice:
    for other in others:
        if other.cost < PATIENT * plan.cost:
            plan = other
    return plan


def choose(network: Network, work: Work) -> Choice:
    """The plan that comes to a loss soonest. UsageError where samples are fewer than hosts."""
    return choices(network, work)[0]


def choices(network: Network, work: Work) -> list[Choice]:
    """That plan, and the next ones that cost NEAR times as much at most."""
    chooser = Chooser(network, work)
    everybody = chooser.prices.hosts
    central = np.argsort((network.delay_s + chooser.prices.sent_s(work.parameters)).mean(0), kind="stable")
    roots = np.sort(central[:ROOTS_MAX])
    candidates = [*chooser.candidates(roots)]
    plan = cheapest(candidates[0], candidates)
    plan = cheapest(plan, [chooser.priced(plan.groups, plan.above, plan.below, everybody)])
    plan = chooser.descended(plan, roots)
    spreads = [spread for way in WAYS for spread in chooser.spreads(way)]
    plan = cheapest(plan, spreads)
    others = (c for c in [*candidates, *spreads] if c.kind != plan.kind and c.cost <= NEAR * plan.cost)
    near = {choice.kind: choice for choice in sorted(others, key=lambda choice: -choice.cost)}
    return [plan, *[*near.values()][::-1][:NEAR_MAX]]


def decides(chooser: Chooser, plan: Choice) -> str:
    """Which link or host the step waits for, in a sentence."""
    prices, network = chooser.prices, chooser.prices.network
    own, to = chooser.own_s(plan.below, plan.groups), plan.spread or (plan.root,)
    child = np.array(plan.servers)
    found = _slowest(prices, plan.above, own[child], child, plan.groups, np.array(to))
    group = plan.groups[found[0]]
    inside = ""
    if found[1] < 0 and len(group) > 1:  # it waits for a cluster: what does that wait for?
        members, server = np.array(group), np.array([plan.servers[found[0]]])
        inside = f" in the cluster of {network.hosts[int(server[0])]}"
        found = _slowest(
            prices, plan.below, prices.compute_s[members], members, tuple((host,) for host in group), server
        )
        child, to = members, (int(server[0]),)
    host = network.hosts[int(child[found[0]])]
    if found[1] < 0:
        return f"computing on {host}{inside} decides"
    return f"the link {host}-{network.hosts[to[found[1]]]}{inside} decides: {found[2]}"


def _slowest(
    prices: Prices, way: Way, own_s: Array, rows: Indices, children: Groups, servers: Indices
) -> tuple[int, int, str]:
    """(row of the slowest child, column of the host that it waits for, or -1 for its own computing, why)."""
    up, down, round_trip = prices.roads(way, children, rows, servers, len(servers))
    clocks = prices.clocks(way, own_s, up, down, round_trip)
    row, column = (int(at) for at in np.unravel_index(clocks.argmax(), clocks.shape))
    road_s = float(up[row, column] + down[row, column])
    computing_s = float(own_s[row]) * way.mode.local_steps
    if computing_s >= max(float(clocks[row, column]) / 1.05, road_s + float(round_trip[row, column])):
        return row, -1, ""
    return row, column, f"{1e3 * float(round_trip[row, column]):.3g} ms of round trip, {1e3 * road_s:.3g} ms of bytes"


def for_stage(
    network: Network, hosts: list[int], parameters: float, own_s: float, coded: Mapping[str, Coded]
) -> tuple[int, Way, float]:
    """(host of the server, way, seconds of a step) for the hosts of one stage of a pipeline that takes own_s for a step."""
    if len(hosts) == 1:
        return hosts[0], WAYS[0], own_s
    stage = network.of(hosts).alike()
    chooser = Chooser(stage, Work(parameters, own_s * float(stage.compute[0]), coded))
    first, *others = (chooser.priced(chooser.alone, way, BELOW[0], chooser.prices.hosts) for way in WAYS)
    plan = cheapest(first, others)
    return hosts[plan.root], plan.above, plan.step_s
