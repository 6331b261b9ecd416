"""The cost of an iteration in a layout, by "Decentralized training of foundation models" (2206.01288, eqs. 1 to 4).

A layout has a group of hosts for each stage. Its seconds are the sum of three parts: the slowest group's data parallel
exchange, each boundary between neighbouring stages, forth and back, and computing. `Costs.arrange` finds the order of
the groups and the pairs of hosts that send to each other, `Costs.price` the cost of a layout. docs/planning.md has the
equations and where we differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from narrows.protocols.errors import UsageError
from narrows.ps.planner.network import Array, Network
from narrows.ps.planner.pipelines.matching import matched, shortest_path

Indices = npt.NDArray[np.intp]

MISSING_S = 1e6  # seconds for each layer that no stage has memory for: more than any layout costs


@dataclass(frozen=True, slots=True)
class Job:
    """A model to train, cut into `stages`, each on `replicas` hosts. Sizes and seconds are those of one iteration."""

    stages: int
    replicas: int
    layers: int  # equal layers; a stage has at least one
    layer_bytes: float  # of a layer's gradient
    activation_bytes: float  # that one replica sends across one boundary, one way
    layer_s: float = (
        0.0  # one replica's share of a layer, forward and backward, on a host of speed 1; 0: computing costs nothing
    )
    layer_memory_bytes: float = 0.0
    micro_batches: int = 1
    money_s: float = 0.0  # seconds that a unit of money is worth

    def __post_init__(self) -> None:
        if min(self.stages, self.replicas, self.micro_batches) < 1:
            raise UsageError("stages, replicas and micro-batches are 1 or more")
        if self.layers < self.stages:
            raise UsageError(f"{self.layers} layers are fewer than {self.stages} stages; ask for fewer stages")
        sizes = (self.layer_bytes, self.activation_bytes, self.layer_s, self.layer_memory_bytes, self.money_s)
        if not all(math.isfinite(size) and size >= 0 for size in sizes):
            raise UsageError("sizes, seconds and prices of a job are finite and 0 or more")


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The hosts and the layers of each stage."""

    grid: Indices  # (stages, replicas) the host of each; a column is one pipeline
    depths: Indices  # (stages,) number of layers

    @property
    def key(self) -> bytes:
        """Bytes that are equal for equal layouts."""
        return self.grid.tobytes() + self.depths.tobytes()

    def names(self, network: Network) -> list[list[str]]:
        """Return the name of the host of each [stage][replica]."""
        return [[network.hosts[host] for host in group] for group in self.grid]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost of an iteration."""

    total: float  # seconds + Job.money_s * money + MISSING_S * missing; the search minimizes it
    seconds: float  # the sum of the next three
    data_parallel_s: float  # the slowest group's exchange
    pipeline_s: float  # all boundaries, forth and back
    compute_s: float
    money: float
    missing: int = 0  # layers that no stage has memory for


class Costs:
    """Prices layouts of `job` on `network`.

    Raises:
        UsageError: the network has too few hosts.
    """

    def __init__(self, network: Network, job: Job) -> None:
        if len(network.hosts) < job.stages * job.replicas:
            raise UsageError(
                f"{job.stages} stages of {job.replicas} replicas need {job.stages * job.replicas} hosts; "
                f"the network has {len(network.hosts)}"
            )
        self.network, self.job = network, job
        across = network.transfer_s(job.activation_bytes)
        self.links: Array = across + across.T  # (n, n) seconds of a pair in one pipeline, forth and back
        both: Array = network.price + network.price.T
        self.tolls = both * job.activation_bytes  # (n, n) money of a pair in one pipeline, forth and back
        self.layer_tolls: Array = both * (2 * job.layer_bytes / job.replicas)  # (n, n) of a pair in one group, a layer
        # Where computing costs nothing, all hosts are equally fast.
        self.speed = network.compute if job.layer_s else np.ones(len(network.hosts))
        room = np.floor(network.memory_bytes / job.layer_memory_bytes) if job.layer_memory_bytes else np.inf
        self.room: Array = np.minimum(room, job.layers) * np.ones(len(network.hosts))  # layers that a host can hold
        self._exchanges: dict[int, Array] = {}

    def exchange(self, depth: int) -> Array:
        """Return (n, n) seconds of a pair in one group with `depth` layers: 2 (delay + bytes / rate / replicas)."""
        if depth not in self._exchanges:
            way = self.network.transfer_s(depth * self.job.layer_bytes / self.job.replicas)
            self._exchanges[depth] = way + way.T
        return self._exchanges[depth]

    @cached_property
    def depth(self) -> int:
        """The number of layers of a stage where all stages have the same."""
        return max(1, round(self.job.layers / self.job.stages))

    def depths(self, groups: Indices) -> Indices:
        """Return the layers of each group's stage.

        Each stage gets one layer. Each further layer goes to the stage that would finish it first, as far as memory
        reaches. A stage is as slow as its slowest host. Among equal stages the one with the cheaper exchange gets the
        layer.
        """
        speed, room = self.speed[groups].min(1), self.room[groups].min(1)
        exchange = self._group_s(groups, np.full(len(groups), self.depth))
        depths = np.ones(len(groups), np.intp)
        for _ in range(self.job.layers - len(groups)):
            ends = np.where(depths < room, (depths + 1) / speed, np.inf)
            soonest = np.flatnonzero(ends == ends.min())
            depths[soonest[exchange[soonest].argmin()]] += 1
        return depths

    def arrange(self, groups: Indices) -> Layout:
        """Return the cheapest order of `groups`, (stages, replicas), with the cheapest matchings between neighbours.

        Matchings are exact, and so is the order of up to matching.EXACT_MAX groups.
        """
        count, replicas = groups.shape
        flat = groups.ravel()
        links = self.links[np.ix_(flat, flat)].reshape(count, replicas, count, replicas).transpose(0, 2, 1, 3)
        tolls = self.job.money_s * self.tolls[np.ix_(flat, flat)].reshape(count, replicas, count, replicas)
        tolls = tolls.transpose(0, 2, 1, 3)
        # A lower bound of each matching: every host with its best link. Only neighbours on the best path are matched,
        # until each pair on it is exact.
        between = np.maximum(links.min(3).max(2), links.min(2).max(2))
        between += np.maximum(tolls.min(3).sum(2), tolls.min(2).sum(2))
        found: dict[tuple[int, int], Indices] = {}
        while True:
            order = shortest_path(between)
            new = [(a, b) for a, b in pairwise(order) if (a, b) not in found]
            if not new:
                break
            for a, b in new:
                between[a, b], found[a, b] = matched(links[a, b], tolls[a, b])
                between[b, a], found[b, a] = between[a, b], np.argsort(found[a, b])
        column = np.arange(replicas)
        rows = [groups[order[0]]]
        for a, b in pairwise(order):
            column = found[a, b][column]
            rows.append(groups[b][column])
        grid = np.array(rows)
        return Layout(grid, self.depths(grid))

    def price(self, layout: Layout) -> Prediction:
        """Predict the cost of `layout`, without changing it."""
        job, grid, depths = self.job, layout.grid, layout.depths
        exchange_s = float(self._group_s(grid, depths).max())
        pipeline_s = float(self.links[grid[:-1], grid[1:]].max(1).sum())
        stage_s = depths * job.layer_s / self.speed[grid].min(1)
        compute_s = float(stage_s.max() + (stage_s.sum() - stage_s.max()) / job.micro_batches)
        money = float(self.tolls[grid[:-1], grid[1:]].sum())
        money += sum(
            float(self.layer_tolls[np.ix_(group, group)].sum()) / 2 * depth
            for group, depth in zip(grid, depths, strict=True)
        )
        missing = int(np.maximum(depths - self.room[grid].min(1), 0).sum())
        seconds = exchange_s + pipeline_s + compute_s
        total = seconds + job.money_s * money + MISSING_S * missing
        return Prediction(float(total), seconds, exchange_s, pipeline_s, compute_s, float(money), missing)

    def _group_s(self, groups: Indices, depths: Indices) -> Array:
        """Return (stages,) seconds of each group's exchange: the largest sum of one host's links in the group."""
        slowest = np.empty(len(groups))
        for depth in np.unique(depths):
            alike = groups[depths == depth]
            slowest[depths == depth] = self.exchange(int(depth))[alike[:, :, None], alike[:, None, :]].sum(2).max(1)
        return slowest
