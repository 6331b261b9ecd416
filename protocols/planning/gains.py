"""Moves hosts of a layout by gains: what a smooth relative of the cost changes when two hosts change places.

The cost has maxima, so most moves change nothing. The relative has p-norms in their place, with p = 2^`sharpness`: 2 minds all
links of a boundary, 8 nearly the slowest one alone. A gain is no evaluation: it sums a host's own links.

Hosts move in passes, as in Kernighan and Lin 1970: a host that has moved stays for the pass, moves that lose are made too, and
the best state of the pass is kept.
"""

from __future__ import annotations

import numpy as np

from narrows.protocols.planning.cost import Costs, Indices
from narrows.protocols.planning.network import Array

GROUP_SHARPNESS = 3  # of the maximum over groups
PATIENCE = 4  # moves that lose, one after the other
LOOKED_AT = 128  # places at a time: n hosts have n^2 gains
LEAST = 1e-12  # of a power sum: roots of 0 have no slope
GAINS = 1e-9


class Places:
    """Hosts on their places: stage after stage, then those without a part. `total` is the smooth cost."""

    def __init__(self, costs: Costs, order: Indices, sharpness: int) -> None:
        self.job, self.order, self.sharpness = costs.job, order, sharpness
        self.powers = _power(costs.links, sharpness)
        self.tolls = costs.job.money_s * costs.tolls
        self.exchange = (
            costs.exchange(costs.depth) / costs.job.replicas
        )  # the mean over a group's hosts, not the slowest
        self.group_tolls = costs.job.money_s * costs.depth * costs.layer_tolls / 2
        # A host without memory for its share is as slow as if it had to fetch it.
        share = costs.job.layers / costs.job.stages
        self.slowness = _power(np.maximum(1 / costs.speed, share / np.maximum(costs.room, 0.5)), GROUP_SHARPNESS)
        self.layers_s = costs.job.layers * costs.job.layer_s * (1 + (costs.job.stages - 1) / costs.job.micro_batches)
        if not costs.job.layer_s and (costs.room < share).any():
            self.layers_s = float(costs.job.layers)
        places = np.arange(len(order))
        self.stage = np.minimum(places // costs.job.replicas, costs.job.stages)
        self.used = costs.job.stages * costs.job.replicas

    def _sums(self) -> tuple[Array, Array, Array]:
        """Power sums of each boundary, means of each group's exchange, power sums of each group's slowness."""
        grid = self.order[: self.used].reshape(self.job.stages, self.job.replicas)
        groups = (grid[:, :, None], grid[:, None, :])
        boundaries = self.powers[grid[:-1], grid[1:]].sum(1)
        return boundaries, self.exchange[groups].sum((1, 2)), self.slowness[grid].mean(1)

    def total(self) -> float:
        grid = self.order[: self.used].reshape(self.job.stages, self.job.replicas)
        boundaries, exchanges, slowness = self._sums()
        tolls = self.tolls[grid[:-1], grid[1:]].sum() + self.group_tolls[grid[:, :, None], grid[:, None, :]].sum()
        return float(
            _root(boundaries, self.sharpness).sum()
            + _root(_power(exchanges, GROUP_SHARPNESS).sum(), GROUP_SHARPNESS)
            + self.layers_s / (1 / _root(slowness, GROUP_SHARPNESS)).sum()
            + tolls
        )

    def gains(self, free: Indices) -> Array:
        """(k, k): what `total` changes when the hosts of two of the places `free` swap, as if each moved alone.

        Places of one group have inf, and so have neighbours in one pipeline: matchings are not found here.
        """
        replicas, stage, hosts = self.job.replicas, self.stage[free], self.order[free]
        boundaries, exchanges, slowness = self._sums()
        moved = np.zeros((len(free), len(free)))  # [a, b]: the place of a has the host of b
        for side, first in ((-replicas, 0), (replicas, 1)):
            at = np.flatnonzero((free + side >= 0) & (free + side < self.used) & (free < self.used))
            other = self.order[free[at] + side]
            old = boundaries[stage[at] - 1 + first][:, None]
            new = old - self.powers[other, hosts[at]][:, None] + self.powers[np.ix_(other, hosts)]
            moved[at] += _root(new, self.sharpness) - _root(old, self.sharpness)
            moved[at] += self.tolls[np.ix_(other, hosts)] - self.tolls[other, hosts[at]][:, None]
        at = np.flatnonzero(free < self.used)
        grid = self.order[: self.used].reshape(self.job.stages, replicas)
        here = (stage[at][:, None], np.arange(len(free))[None, :])
        own = (stage[at], at)
        for matrix, smooth in ((self.exchange, True), (self.group_tolls, False)):
            if not smooth and not self.job.money_s:
                continue
            to = matrix[grid][:, :, hosts].sum(1)  # (stages, k): a host's sum over a group
            change = 2 * (to[here] - matrix[np.ix_(hosts[at], hosts)] - to[own][:, None])
            if smooth:
                old = exchanges[stage[at]][:, None]
                every = _power(exchanges, GROUP_SHARPNESS).sum()
                new = every - _power(old, GROUP_SHARPNESS) + _power(old + change, GROUP_SHARPNESS)
                change = _root(new, GROUP_SHARPNESS) - _root(every, GROUP_SHARPNESS)
            moved[at] += change
        if self.layers_s:
            speed = 1 / _root(slowness, GROUP_SHARPNESS)
            change = (self.slowness[hosts][None, :] - self.slowness[hosts[at]][:, None]) / replicas
            faster = 1 / _root(slowness[stage[at]][:, None] + change, GROUP_SHARPNESS) - speed[stage[at]][:, None]
            moved[at] += self.layers_s / np.maximum(speed.sum() + faster, LEAST) - self.layers_s / speed.sum()
        swapped: Array = moved + moved.T
        swapped[stage[:, None] == stage[None, :]] = np.inf
        swapped[(np.abs(free[:, None] - free[None, :]) == replicas) & (np.maximum.outer(free, free) < self.used)] = (
            np.inf
        )
        return swapped


def _power(values: Array, sharpness: int) -> Array:
    """values^(2^sharpness): squares are many times faster than powers."""
    for _ in range(sharpness):
        values = np.square(values)
    return values


def _root(sums: Array, sharpness: int) -> Array:
    found = np.maximum(sums, LEAST)
    for _ in range(sharpness):
        found = np.sqrt(found)
    return found


def descend(costs: Costs, order: Indices, sharpness: int, random: np.random.Generator) -> Indices | None:
    """One pass over `order`: the hosts of the grid, then those without a part. None where no state of it gains."""
    places = Places(costs, order.copy(), sharpness)
    start = best = places.total()
    found, lost, moved = None, 0, np.zeros(len(order), bool)
    while lost < PATIENCE:
        free = np.flatnonzero(~moved)
        if len(free) < 2:
            break
        looked_at = free if len(free) <= LOOKED_AT else np.sort(random.choice(free, LOOKED_AT, replace=False))
        gains = places.gains(looked_at)
        a, b = divmod(int(gains.argmin()), len(looked_at))
        if gains[a, b] == np.inf:  # none is left that may
            break
        swapped = looked_at[[a, b]]
        places.order[swapped] = places.order[swapped[::-1]]
        moved[swapped] = True
        total = places.total()
        lost += 1
        if total < best - GAINS * start:
            best, found, lost = total, places.order.copy(), 0
    return found
