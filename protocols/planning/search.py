"""Finds a cheap layout: the two-level search of 2206.01288, sec. 3, with other local moves.

Above: a population of balanced partitions into groups, crossed with each other and mutated. Below: `Costs.arrange`, which finds
order and matchings. Between both, `Descent` moves hosts by gains, and only its result is priced. A layout that is priced is
one evaluation, whether it was good or not. The same arguments give the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from narrows.protocols.errors import UsageError
from narrows.protocols.planning.cost import Costs, Indices, Job, Layout, Prediction
from narrows.protocols.planning.gains import descend
from narrows.protocols.planning.network import Network

EVALUATIONS = 100  # 64 hosts then take under a second
POPULATION = 6
ROUNDS_MAX = 8  # of one descent: moves by gains, then order and matchings anew
SHARPNESS = (1, 2, 3)  # from a mean of links towards the slowest one
ROTATED = (6, 12, 24)  # hosts of a mutation


@dataclass(frozen=True, slots=True)
class Plan:
    """The best layout that was found, its price, who has no part, and how many layouts were priced for it."""

    layout: Layout
    prediction: Prediction
    spare: tuple[int, ...]  # hosts
    evaluations: int


def plan(network: Network, job: Job, seed: int = 0, evaluations: int = EVALUATIONS) -> Plan:
    """The cheapest layout of `job` on `network` after at most so many evaluations; UsageError where none has enough memory."""
    return Search(Costs(network, job), seed, evaluations).run()


class Search:
    def __init__(self, costs: Costs, seed: int, evaluations: int) -> None:
        if evaluations < 1:
            raise UsageError("a search needs one evaluation or more")
        self.costs = costs
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.evaluations_max = evaluations
        self.evaluations = 0
        self.best: tuple[Prediction, Layout] | None = None

    def run(self) -> Plan:
        hosts = len(self.costs.network.hosts)
        population: list[tuple[float, Indices]] = []
        while self.evaluations < self.evaluations_max:
            if len(population) < POPULATION:
                found = self.settled(self.random.permutation(hosts))
                population.append(found)
                continue
            one, other = self.random.choice(POPULATION, 2, replace=False)
            child = self.settled(self.mutated(self.crossed(population[one][1], population[other][1])))
            worse = int(one if population[one][0] >= population[other][0] else other)
            if child[0] <= population[worse][0]:
                population[worse] = child
        assert self.best
        prediction, layout = self.best
        if prediction.missing:
            raise UsageError(
                f"{prediction.missing} of {self.costs.job.layers} layers have no host with memory for them in the best "
                "layout found; add hosts, or ask for more stages"
            )
        spare = np.setdiff1d(np.arange(hosts), layout.grid)
        return Plan(layout, prediction, tuple(int(host) for host in spare), self.evaluations)

    def settled(self, order: Indices) -> tuple[float, Indices]:
        """Moves hosts of `order` until no move gains: (total, hosts of the grid, then the others)."""
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
        """One evaluation: order and matchings of the first stages * replicas hosts of `order`."""
        stages, replicas = self.costs.job.stages, self.costs.job.replicas
        layout = self.costs.arrange(order[: stages * replicas].reshape(stages, replicas))
        prediction = self.costs.price(layout)
        self.evaluations += 1
        if self.best is None or prediction.total < self.best[0].total:
            self.best = prediction, layout
        return prediction.total, np.concatenate([layout.grid.ravel(), order[stages * replicas :]])

    def crossed(self, one: Indices, other: Indices) -> Indices:
        """A partition in which hosts of the same group in both parents stay, and others have a group of either."""
        stages, replicas = self.costs.job.stages, self.costs.job.replicas
        mine, theirs = (self._groups_of(order) for order in (one, other))
        overlap = np.zeros((stages + 1, stages + 1))
        np.add.at(overlap, (theirs, mine), 1)
        named = np.append(linear_sum_assignment(-overlap[:stages, :stages])[1], stages)  # their groups, by my numbers
        theirs = named[theirs]
        wanted = np.where(self.random.random(len(mine)) < 0.5, mine, theirs)
        # Who stays has its place first; who finds a group full has what is left.
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
        """Some hosts, drawn at random, each move to the next one's place: a cyclic move."""
        moved = order.copy()
        count = min(len(order), int(self.random.choice(ROTATED)))
        places = self.random.choice(len(order), count, replace=False)
        moved[places] = moved[np.roll(places, 1)]
        return moved

    def _groups_of(self, order: Indices) -> Indices:
        """(n,) the group of each host; those without a part have one of their own."""
        found = np.empty(len(order), np.intp)
        found[order] = np.minimum(np.arange(len(order)) // self.costs.job.replicas, self.costs.job.stages)
        return found
