"""What a step of a pipeline computes and sends: by stage, by edge, by coding. Pure.

Rules
- A stage goes by eager 1F1B, as worker/pipelining/schedule.py does: `order` has its forward and backward passes.
- An edge has a coding each way. Bytes at a cut are those of float32 values, before they are coded.
- A step of a stage is followed by the exchange of its replicas, which is a Narrows run of that stage's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from narrows.protocols.config.deployment import StageEdge, even
from narrows.protocols.errors import UsageError
from narrows.protocols.pipeline_channels import IN_FLIGHT_MAX
from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Array, Network
from narrows.ps.planner.pipelines.cost import Job, Layout
from narrows.ps.planner.step_prices import CodecCost

FORWARD, BACKWARD = 0, 1
SHARES = (
    1 / 3,
    2 / 3,
)  # of a micro-batch's seconds: a backward pass has the gradients of inputs and of parameters to compute
# Peak memory of a worker with 25 M parameters under AdamW over that of one with 100, for each: 16 bytes are PyTorch's.
PARAMETER_MEMORY_BYTES = 52.0
AUTO, EXACT, CODED = "auto", "dense", "int8"  # auto: an edge's way is one of the others


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """The costs of a coding for a byte of float32: bytes that travel, seconds of the sender, seconds of the
    receiver."""

    bytes: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A model to train in stages. step_s: seconds that all its layers take for one replica's share of a step on speed
    1.
    cut_bytes: float32 values of one micro-batch at a cut. money_s: seconds that a unit of money is worth.

    Raises UsageError for a size or a number of seconds that is none.
    """

    parameters: float
    layers: int  # alike
    step_s: float
    micro_batches: int
    cut_bytes: float
    layer_memory_bytes: float
    carried: Mapping[str, tuple[EdgeCost, EdgeCost]]
    coded: Mapping[str, CodecCost]
    money_s: float = 0.0

    def job(self, stages: int, replicas: int, coding: str) -> Job:
        """As the search prices it: all edges are coded alike, by `auto` as slow ones are, and a step sends one
        message."""
        if stages > self.micro_batches:
            raise UsageError(
                f"{stages} stages need as many micro-batches, and there are {self.micro_batches}; ask for more"
            )
        share = self.carried[CODED if coding == AUTO else coding][FORWARD].bytes
        sent = self.micro_batches * self.cut_bytes * share
        layer = 4 * self.parameters / self.layers, sent, self.step_s / self.layers, self.layer_memory_bytes
        return Job(stages, replicas, self.layers, *layer, self.micro_batches, self.money_s)

    def micro_s(self, network: Network, layout: Layout) -> Array:
        """(stages, replicas) seconds of a micro-batch there, forth and back."""
        speed = network.compute[layout.grid]
        return np.asarray(layout.depths[:, None] * self.step_s / self.layers / self.micro_batches / speed)

    def stage_parameters(self, layout: Layout, stage: int) -> float:
        return self.parameters * int(layout.depths[stage]) / self.layers

    def sent_bytes(self, edge: StageEdge, direction: int) -> float:
        """Of one micro-batch."""
        return self.cut_bytes * self.carried[(edge.forward, edge.backward)[direction]][direction].bytes


def order(stage: int, micro_batches: int, in_flight: Sequence[int]) -> list[int]:
    """The passes of a stage in a step: FORWARD or BACKWARD, each of the next micro-batch. in_flight: of each edge."""
    warm_up = min(micro_batches, len(in_flight) + 1 - stage + sum(in_flight[stage:]))
    steady = [BACKWARD, FORWARD] * (micro_batches - warm_up)
    return [FORWARD] * warm_up + steady + [BACKWARD] * warm_up


def covered(network: Network, layout: Layout, model: PipelineModel, edges: Sequence[StageEdge]) -> list[StageEdge]:
    """The edges, coded as they are, with as many micro-batches in flight as their slowest pair's round trip covers, and
    no more than there are."""
    most = min(IN_FLIGHT_MAX, model.micro_batches)
    micro_s = float(model.micro_s(network, layout).max())
    found = []
    for edge, (here, there) in zip(edges, pairwise(layout.grid), strict=True):
        forth, back = (network.transfer_s(model.sent_bytes(edge, direction)) for direction in (FORWARD, BACKWARD))
        trip_s = float((forth[here, there] + back[there, here]).max())
        found.append(replace(edge, in_flight=min(most, math.ceil(trip_s / micro_s))))
    return found


def contiguous(network: Network, job: Job) -> Layout:
    """Hosts in the order of the network, depths as even as they go: how a pipeline is laid out by hand."""
    grid = np.arange(job.stages * job.replicas).reshape(job.stages, job.replicas)
    return Layout(grid, np.array([len(layers) for layers in even(job.layers, job.stages)]))


def fits(network: Network, model: PipelineModel, layout: Layout) -> bool:
    """Each host has memory for the layers of its stage."""
    return bool((layout.depths * model.layer_memory_bytes <= network.memory_bytes[layout.grid].min(1)).all())


def soonest_alone(network: Network, model: PipelineModel, replicas: int) -> tuple[int, float] | None:
    """(host, seconds) of the fastest host with memory for all layers, where it makes all of a step; None: there is
    none."""
    able = np.flatnonzero(network.memory_bytes >= model.layers * model.layer_memory_bytes)
    if not able.size:
        return None
    host = int(able[network.compute[able].argmax()])
    return host, replicas * model.step_s / float(network.compute[host])


def edges_money(network: Network, layout: Layout, model: PipelineModel, edges: Sequence[StageEdge]) -> list[float]:
    """By edge, of a step: what its pairs send each other."""
    found = []
    for edge, (here, there) in zip(edges, pairwise(layout.grid), strict=True):
        prices = float(network.price[here, there].sum()), float(network.price[there, here].sum())
        found.append(model.micro_batches * sum(model.sent_bytes(edge, way) * price for way, price in enumerate(prices)))
    return found


def exchanges_money(
    network: Network, layout: Layout, model: PipelineModel, servers: Sequence[int], ways: Sequence[ModeAndSpec]
) -> list[float]:
    """By stage, of a step: what its replicas exchange with its server."""
    found = []
    for stage, (group, server, way) in enumerate(zip(layout.grid, servers, ways, strict=True)):
        each = model.coded[way.compress].bytes * model.stage_parameters(layout, stage) / way.mode.local_steps
        found.append(each * float((network.price[group, server] + network.price[server, group]).sum()))
    return found
