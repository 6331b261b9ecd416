"""Moves of hosts of a layout by gains. A gain is the change of a smooth cost when two hosts swap their places.

The real cost has maxima, so most moves do not change it. The smooth cost has p-norms in their place, with p =
2^`sharpness`: p = 2 counts all links of a boundary, p = 8 nearly the slowest link alone. A gain sums only a host's own
links, so it is no evaluation.

Hosts move in passes, as in Kernighan and Lin 1970: a host that has moved stays for the rest of the pass, moves that
lose are made too, and the best state of the pass is kept.
"""

from __future__ import annotations

import numpy as np

from narrows.ps.planner.network import Array
from narrows.ps.planner.pipelines.cost import Costs, Indices

GROUP_SHARPNESS = 3  # sharpness of the maximum over groups
PATIENCE = 4  # a pass ends after so many moves without a new best state
LOOKED_AT = 128  # places whose gains are computed for a move: k places have k^2 gains
LEAST = 1e-16  # a power sum, of terms of at most 1, below this is noise of a difference
GAINS = 1e-9  # least gain of a new best state, as a share of the total at the start


class HostPlacement:
    """Hosts on their places: stage after stage, then those without a stage. `total` is the smooth cost.

    Args:
        costs: the real costs.
        order: (n,) the hosts by place; the instance changes it.
        sharpness: of the maximum over the links of a boundary.
    """

    def __init__(self, costs: Costs, order: Indices, sharpness: int) -> None:
        job = costs.job
        self.job, self.order, self.sharpness = job, order, sharpness
        self.link_s, self.powers = _scaled(costs.links, sharpness)
        self.tolls = job.money_s * costs.tolls
        self.exchange_s = float(costs.exchange(costs.depth).max()) or 1.0
        # The mean over a group's hosts in the place of the slowest host, so that it is a sum over pairs.
        self.exchange = costs.exchange(costs.depth) / (self.exchange_s * job.replicas**2)
        self.group_tolls = job.money_s * costs.depth * costs.layer_tolls / 2
        # A host without memory for an even share counts as slower, by the ratio of that share to the layers it holds.
        slowness = np.maximum(1, job.layers / (job.stages * np.maximum(costs.room, 0.5))) / costs.speed
        slow_s, self.slowness = _scaled(slowness, GROUP_SHARPNESS)
        layer_s = job.layer_s or (self.link_s if (slowness > 1).any() else 0.0)
        self.layers_s = job.layers * layer_s * slow_s * (1 + (job.stages - 1) / job.micro_batches)
        self.used = job.stages * job.replicas
        self.stage = np.minimum(np.arange(len(order)) // job.replicas, job.stages)

    def _grid(self) -> Indices:
        return self.order[: self.used].reshape(self.job.stages, self.job.replicas)

    def _sums(self) -> tuple[Array, Array, Array]:
        """Return the power sum of each boundary, the mean of each group's exchange, the power mean of its slowness."""
        grid = self._grid()
        boundaries = self.powers[grid[:-1], grid[1:]].sum(1)
        return boundaries, self.exchange[grid[:, :, None], grid[:, None, :]].sum((1, 2)), self.slowness[grid].mean(1)

    def total(self) -> float:
        grid, (boundaries, exchanges, slowness) = self._grid(), self._sums()
        return float(
            self.link_s * _root(boundaries, self.sharpness).sum()
            + self.exchange_s * _root(_power(exchanges, GROUP_SHARPNESS).sum(), GROUP_SHARPNESS)
            + self.layers_s / _speed(slowness).sum()
            + self.tolls[grid[:-1], grid[1:]].sum()
            + self.group_tolls[grid[:, :, None], grid[:, None, :]].sum()
        )

    def gains(self, free: Indices) -> Array:
        """Return (k, k) changes of `total` when the hosts of two of the places `free`, (k,), swap, as if each moved
        alone.

        Swaps within a group are inf, and so are those of neighbours in one pipeline: matchings are not found here.
        """
        replicas, stage, hosts = self.job.replicas, self.stage[free], self.order[free]
        boundaries, exchanges, slowness = self._sums()
        moved = np.zeros((len(free), len(free)))  # [a, b]: the place of a has the host of b
        for side, first in ((-replicas, -1), (replicas, 0)):  # the boundary before a place, and the one after it
            at = np.flatnonzero((free < self.used) & (free + side >= 0) & (free + side < self.used))
            other = self.order[free[at] + side]
            old = boundaries[stage[at] + first][:, None]
            new = old - self.powers[other, hosts[at]][:, None] + self.powers[np.ix_(other, hosts)]
            moved[at] += self.link_s * (_root(new, self.sharpness) - _root(old, self.sharpness))
            moved[at] += self.tolls[np.ix_(other, hosts)] - self.tolls[other, hosts[at]][:, None]
        at = np.flatnonzero(free < self.used)
        group = stage[at]
        old = exchanges[group][:, None]
        new = np.maximum(old + self._joined(self.exchange, at, group, hosts), 0.0)
        every = _power(exchanges, GROUP_SHARPNESS).sum()
        power = _root(every - _power(old, GROUP_SHARPNESS) + _power(new, GROUP_SHARPNESS), GROUP_SHARPNESS)
        moved[at] += self.exchange_s * (power - _root(every, GROUP_SHARPNESS))
        if self.job.money_s:
            moved[at] += self._joined(self.group_tolls, at, group, hosts)
        if self.layers_s:
            speed = _speed(slowness)
            change = (self.slowness[hosts][None, :] - self.slowness[hosts[at]][:, None]) / replicas
            together = speed.sum() - speed[group][:, None] + _speed(slowness[group][:, None] + change)
            moved[at] += self.layers_s / together - self.layers_s / speed.sum()
        swapped: Array = moved + moved.T
        within = stage[:, None] == stage
        beside = (np.abs(free[:, None] - free) == replicas) & (np.maximum.outer(free, free) < self.used)
        swapped[within | beside] = np.inf
        return swapped

    def _joined(self, matrix: Array, at: Indices, group: Indices, hosts: Indices) -> Array:
        """Return the change of the sum over a group's pairs when each of `hosts` replaces the host at each of `at`."""
        to = matrix[self._grid()][:, :, hosts].sum(1)  # (stages, k) sum from all hosts of a group to a host
        change: Array = 2 * (to[group] - matrix[np.ix_(hosts[at], hosts)] - to[group, at][:, None])
        return change


def _scaled(values: Array, sharpness: int) -> tuple[float, Array]:
    """Return the largest of `values`, and the powers of their shares of it: powers of small numbers would vanish."""
    scale = float(values.max()) or 1.0
    return scale, _power(values / scale, sharpness)


def _speed(slowness: Array) -> Array:
    return 1 / _root(slowness, GROUP_SHARPNESS)


def _power(values: Array, sharpness: int) -> Array:
    """Return values^(2^sharpness). Repeated squares are many times faster than powers."""
    for _ in range(sharpness):
        values = np.square(values)
    return values


def _root(sums: Array, sharpness: int) -> Array:
    found = np.maximum(sums, LEAST)
    for _ in range(sharpness):
        found = np.sqrt(found)
    return found


def descend(costs: Costs, order: Indices, sharpness: int, random: np.random.Generator) -> Indices | None:
    """Make one pass of moves.

    Args:
        costs: the real costs.
        order: (n,) the hosts of the grid, then those without a stage.
        sharpness: of the smooth cost.
        random: draws the places to look at, if there are more than LOOKED_AT.

    Returns:
        The order of the best state, None if no state gains.
    """
    places = HostPlacement(costs, order.copy(), sharpness)
    start = best = places.total()
    found, lost, moved = None, 0, np.zeros(len(order), bool)
    while lost < PATIENCE:
        free = np.flatnonzero(~moved)
        if len(free) < 2:
            break
        looked_at = free if len(free) <= LOOKED_AT else np.sort(random.choice(free, LOOKED_AT, replace=False))
        gains = places.gains(looked_at)
        a, b = divmod(int(gains.argmin()), len(looked_at))
        if gains[a, b] == np.inf:  # no allowed swap is left
            break
        swapped = looked_at[[a, b]]
        places.order[swapped] = places.order[swapped[::-1]]
        moved[swapped] = True
        total = places.total()
        lost += 1
        if total < best - GAINS * start:
            best, found, lost = total, places.order.copy(), 0
    return found
