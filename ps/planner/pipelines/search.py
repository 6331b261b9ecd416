"""The search for a cheap layout: the two-level search of 2206.01288, sec. 3.4, with more local moves.

The upper level has a population of balanced partitions of the hosts into groups. Partitions are crossed with each other
and mutated. The lower level, `Costs.arrange`, finds the order of groups and the matchings between them. Between the two
levels `gains.descend` moves hosts by gains, and only its result is priced. Each layout that is priced is one
evaluation, good or not. The same arguments give the same plan.

How it works

1. `plan` counts the partitions. If they are few, it prices each one, and is done.
2. `LayoutSearch.run` fills a population with partitions. Each is random, or on many hosts a walk to near hosts, and is
   `settled`: moved by gains until no move gains.
3. Then two partitions are crossed, the child is mutated and settled, and replaces the worse parent if it is no worse.

       two of the population -> crossed -> mutated -> settled -> the worse of the two

4. The search ends when its evaluations are spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import numpy as np
from scipy.optimize import linear_sum_assignment

from narrows.protocols.errors import UsageError
from narrows.ps.planner.network import Network
from narrows.ps.planner.pipelines.cost import Costs, Indices, Job, Layout, Prediction
from narrows.ps.planner.pipelines.cycles import cycled
from narrows.ps.planner.pipelines.gains import descend

EVALUATIONS = 100  # a search on 64 hosts then takes under a second
EVERY_MAX = 500  # up to so many partitions each is priced: up to 8 hosts have no more, whatever the job
HOSTS_MANY = 128  # with more hosts fewer layouts are priced, and the first ones are not random
POPULATION = 6  # partitions
ROUNDS_MAX = 8  # of one descent: moves by gains, then order and matchings anew
SHARPNESS = (1, 2, 3)  # of the smooth cost, from a mean over links towards the slowest link
ROTATED = (6, 12, 24)  # numbers of hosts that a random mutation moves


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """The best layout that a search has found."""

    layout: Layout
    prediction: Prediction
    spare: tuple[int, ...]  # hosts without a stage
    evaluations: int  # layouts that were priced
    found_at: int  # the number of the evaluation that found this layout


def plan(network: Network, job: Job, seed: int = 0, evaluations: int | None = None) -> FoundLayout:
    """Return the cheapest layout that a search finds.

    If there are at most `evaluations` partitions, each is priced once, and the layout is the cheapest that exists.

    Args:
        network: the hosts.
        job: the model.
        seed: the seed of the search.
        evaluations: the most layouts to price. None: all of up to EVERY_MAX partitions, else EVALUATIONS, and in
            proportion fewer for more than HOSTS_MANY hosts.

    Raises:
        UsageError: no layout was found in which each host has memory for its layers.
    """
    costs, hosts = Costs(network, job), len(network.hosts)
    every = partitions_count(hosts, job)
    if evaluations is None:
        evaluations = every if every <= EVERY_MAX else EVALUATIONS * HOSTS_MANY // max(HOSTS_MANY, hosts) or 1
    search = LayoutSearch(costs, seed, evaluations)
    if every <= evaluations:
        for partition in partitions(range(hosts), job.stages, job.replicas):
            search.evaluated(np.array([host for group in partition for host in group]))
    else:
        search.run()
    return search.plan()


def partitions_count(hosts: int, job: Job) -> int:
    """Return the number of partitions of `hosts` into the job's groups, with the rest in no group."""
    left = hosts - job.stages * job.replicas
    found: int = factorial(hosts) // (factorial(job.replicas) ** job.stages * factorial(job.stages) * factorial(left))
    return found


def partitions(hosts: Sequence[int], stages: int, replicas: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield every partition once: hosts rise within a group, and groups are ordered by their first hosts."""
    if not stages:
        yield []
        return
    for group in combinations(hosts, replicas):
        rest = [host for host in hosts if host > group[0] and host not in group]
        yield from ([group, *others] for others in partitions(rest, stages - 1, replicas))


class LayoutSearch:
    """One search: its population, the evaluations spent, and the best layout so far."""

    def __init__(self, costs: Costs, seed: int, evaluations: int) -> None:
        if evaluations < 1:
            raise UsageError("a search needs one evaluation or more")
        self.costs = costs
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.evaluations_max = evaluations
        self.evaluations = 0
        self.best: tuple[Prediction, Layout, int] | None = None

    def run(self) -> None:
        hosts = len(self.costs.network.hosts)
        starts = self.near() if hosts > HOSTS_MANY else []
        population: list[tuple[float, Indices]] = []
        while self.evaluations < self.evaluations_max:
            if len(population) < POPULATION:
                population.append(self.settled(starts.pop() if starts else self.random.permutation(hosts)))
                continue
            one, other = self.random.choice(POPULATION, 2, replace=False)
            child = self.settled(self.mutated(self.crossed(population[one][1], population[other][1])))
            worse = int(one if population[one][0] >= population[other][0] else other)
            if child[0] <= population[worse][0]:
                population[worse] = child

    def plan(self) -> FoundLayout:
        """Return the best layout that was evaluated. Raise UsageError where it has a layer without memory."""
        assert self.best
        prediction, layout, found_at = self.best
        if prediction.missing:
            raise UsageError(
                f"{prediction.missing} of {self.costs.job.layers} layers have no host with memory for them in the best "
                "layout found; add hosts, or ask for more stages"
            )
        spare = np.setdiff1d(np.arange(len(self.costs.network.hosts)), layout.grid)
        return FoundLayout(layout, prediction, tuple(int(host) for host in spare), self.evaluations, found_at)

    def near(self) -> list[Indices]:
        """Return two orders from a walk to nearest unvisited hosts: neighbours in a group, neighbours in a pipeline."""
        job, links = self.costs.job, self.costs.links.copy()
        order = [int(self.random.integers(len(links)))]
        for _ in links[1:]:
            links[:, order[-1]] = np.inf
            order.append(int(links[order[-1]].argmin()))
        path = np.array(order)
        used = job.stages * job.replicas
        return [path, np.concatenate([path[:used].reshape(job.replicas, job.stages).T.ravel(), path[used:]])]

    def settled(self, order: Indices) -> tuple[float, Indices]:
        """Move hosts until no move gains or the evaluations are spent.

        Args:
            order: (n,) the hosts of the grid, then those without a stage.

        Returns:
            The total of the best layout, and its order.
        """
        best = self.evaluated(order)
        order = best[1]
        for sharpness in SHARPNESS:
            for _ in range(ROUNDS_MAX):
                if self.evaluations >= self.evaluations_max:
                    return best
                moved = descend(self.costs, order, sharpness, self.random)
                if moved is None:
                    break
                total, order = self.evaluated(moved)
                if total < best[0]:
                    best = total, order
        return best

    def evaluated(self, order: Indices) -> tuple[float, Indices]:
        """Arrange and price the first stages * replicas hosts of `order`: one evaluation."""
        stages, replicas = self.costs.job.stages, self.costs.job.replicas
        layout = self.costs.arrange(order[: stages * replicas].reshape(stages, replicas))
        prediction = self.costs.price(layout)
        self.evaluations += 1
        if self.best is None or prediction.total < self.best[0].total:
            self.best = prediction, layout, self.evaluations
        return prediction.total, np.concatenate([layout.grid.ravel(), order[stages * replicas :]])

    def crossed(self, one: Indices, other: Indices) -> Indices:
        """Cross two partitions: a host that both have in the same group stays, any other gets its group of either."""
        stages, replicas = self.costs.job.stages, self.costs.job.replicas
        mine, theirs = (self._groups_of(order) for order in (one, other))
        overlap = np.zeros((stages + 1, stages + 1))
        np.add.at(overlap, (theirs, mine), 1)
        named = np.append(linear_sum_assignment(-overlap[:stages, :stages])[1], stages)  # `other`'s groups by `one`'s
        theirs = named[theirs]
        wanted = np.where(self.random.random(len(mine)) < 0.5, mine, theirs)
        # Hosts that stay are placed first. A host that finds its group full gets what is left.
        left = [replicas] * stages + [len(mine) - stages * replicas]
        groups: list[list[int]] = [[] for _ in left]
        late: list[int] = []
        for host in np.lexsort((self.random.random(len(mine)), mine != theirs)):
            group = int(wanted[host])
            (groups[group] if len(groups[group]) < left[group] else late).append(int(host))
        for members, size in zip(groups, left, strict=True):
            free = size - len(members)
            members += late[:free]
            del late[:free]
        return np.array([host for members in groups for host in members])

    def mutated(self, order: Indices) -> Indices:
        """Mutate a partition: by the paper's cyclic moves, or, as often, by rotating the places of random hosts."""
        if self.random.random() < 0.5:
            labels = cycled(self._groups_of(order), self.costs.links, self.costs.job.stages)
            return np.argsort(labels, kind="stable")
        moved = order.copy()
        count = min(len(order), int(self.random.choice(ROTATED)))
        places = self.random.choice(len(order), count, replace=False)
        moved[places] = moved[np.roll(places, 1)]
        return moved

    def _groups_of(self, order: Indices) -> Indices:
        """Return (n,) the group of each host. Hosts without a stage are in the group `stages`."""
        found = np.empty(len(order), np.intp)
        found[order] = np.minimum(np.arange(len(order)) // self.costs.job.replicas, self.costs.job.stages)
        return found
