"""The computing and the bytes of a pipeline's step, by stage, by edge and by coding. No I/O.

Rules
- A stage follows eager 1F1B, as worker/pipelining/schedule.py does. `order` has its forward and backward passes.
- An edge has a coding for each direction. Bytes at a cut are those of float32 values, before they are coded.
- After the step of a stage its replicas exchange their updates, in a Narrows run of that stage's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from narrows.compression.value_codings import EDGE_CODINGS, ValueCoding
from narrows.protocols.config.deployment import StageEdge, even
from narrows.protocols.errors import UsageError
from narrows.protocols.pipeline_channels import IN_FLIGHT_MAX
from narrows.ps.planner.codec_costs import CodecCost
from narrows.ps.planner.host_memory import ALONE_MODELS, VALUE_BYTES, stage_models
from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Array, Network
from narrows.ps.planner.pipelines.cost import Job, Layout

FORWARD, BACKWARD = 0, 1
SHARES = (
    1 / 3,
    2 / 3,
)  # of a micro-batch's seconds, forward and backward: a backward pass computes gradients of inputs and of parameters
AUTO, EXACT, CODED = "auto", "dense", "int8"  # auto: each direction of an edge is dense or int8


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """The costs of a coding for one byte of float32."""

    bytes: float  # that travel
    encode_s: float  # seconds of the sender
    decode_s: float  # seconds of the receiver


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A model to train in stages."""

    parameters: float
    layers: int  # equal layers
    step_s: float  # seconds of one replica's share of a step, all layers on one host of speed 1
    micro_batches: int  # of a step
    cut_bytes: float  # float32 values of one micro-batch at a cut
    layer_memory_bytes: float | None  # of a layer in training and at the stage's server, as the user says; None: unsaid
    carried: Mapping[str, tuple[EdgeCost, EdgeCost]]  # by coding of an edge: activations, gradients
    coded: Mapping[str, CodecCost]  # by SPEC of an exchange
    money_s: float = 0.0  # seconds that a unit of money is worth

    def job(self, stages: int, replicas: int, coding: str) -> Job:
        """Return the model as the search prices it.

        The search gives all edges one coding, int8 for `auto`, and has each edge send one message a step.

        Raises:
            UsageError: there are fewer micro-batches than stages, or a size is no finite number of 0 or more.
        """
        if stages > self.micro_batches:
            raise UsageError(
                f"{stages} stages need as many micro-batches, and there are {self.micro_batches}; ask for more"
            )
        share = self.carried[CODED if coding == AUTO else coding][FORWARD].bytes
        sent = self.micro_batches * self.cut_bytes * share
        memory = self.memory_bytes(stage_models(replicas))
        layer = 4 * self.parameters / self.layers, sent, self.step_s / self.layers, memory
        return Job(stages, replicas, self.layers, *layer, self.micro_batches, self.money_s)

    def memory_bytes(self, models: float) -> float:
        """Return the bytes of a layer where it takes so many models of float32, unless the user has said them."""
        given = self.layer_memory_bytes
        return VALUE_BYTES * models * self.parameters / self.layers if given is None else given

    def micro_s(self, network: Network, layout: Layout) -> Array:
        """Return (stages, replicas) seconds of a micro-batch on each host, forward and backward."""
        speed = network.compute[layout.grid]
        return np.asarray(layout.depths[:, None] * self.step_s / self.layers / self.micro_batches / speed)

    def stage_parameters(self, layout: Layout, stage: int) -> float:
        return self.parameters * int(layout.depths[stage]) / self.layers

    def sent_bytes(self, edge: StageEdge, direction: int) -> float:
        """Return the bytes of one micro-batch's tensor on this edge in this direction, coded."""
        return self.cut_bytes * self.carried[(edge.forward, edge.backward)[direction]][direction].bytes


def order(stage: int, micro_batches: int, in_flight: Sequence[int]) -> list[int]:
    """Return the passes of a stage in a step: FORWARD or BACKWARD, each of the next micro-batch.

    Args:
        stage: the number of the stage.
        micro_batches: of a step.
        in_flight: for each edge, the micro-batches in flight.
    """
    warm_up = min(micro_batches, len(in_flight) + 1 - stage + sum(in_flight[stage:]))
    steady = [BACKWARD, FORWARD] * (micro_batches - warm_up)
    return [FORWARD] * warm_up + steady + [BACKWARD] * warm_up


def covered(network: Network, layout: Layout, model: PipelineModel, edges: Sequence[StageEdge]) -> list[StageEdge]:
    """Return the edges with the micro-batches in flight that cover the round trip of their slowest pair.

    The codings stay. No edge has more in flight than there are micro-batches, or than IN_FLIGHT_MAX.
    """
    most = min(IN_FLIGHT_MAX, model.micro_batches)
    micro_s = float(model.micro_s(network, layout).max())
    found = []
    for edge, (here, there) in zip(edges, pairwise(layout.grid), strict=True):
        forth, back = (network.transfer_s(model.sent_bytes(edge, direction)) for direction in (FORWARD, BACKWARD))
        trip_s = float((forth[here, there] + back[there, here]).max())
        found.append(replace(edge, in_flight=min(most, math.ceil(trip_s / micro_s))))
    return found


def contiguous(network: Network, job: Job) -> Layout:
    """Return the layout that a user would write by hand: hosts in the network's order, depths as even as possible."""
    grid = np.arange(job.stages * job.replicas).reshape(job.stages, job.replicas)
    return Layout(grid, np.array([len(layers) for layers in even(job.layers, job.stages)]))


def fits(network: Network, model: PipelineModel, layout: Layout) -> bool:
    """Return True if each host has memory for the layers of its stage."""
    layer = model.memory_bytes(stage_models(layout.grid.shape[1]))
    return bool((layout.depths * layer <= network.memory_bytes[layout.grid].min(1)).all())


def soonest_alone(network: Network, model: PipelineModel, replicas: int) -> tuple[int, float] | None:
    """Return the fastest host with memory for all layers, and its seconds for a whole step; None if there is none."""
    able = np.flatnonzero(network.memory_bytes >= model.layers * model.memory_bytes(ALONE_MODELS))
    if not able.size:
        return None
    host = int(able[network.compute[able].argmax()])
    return host, replicas * model.step_s / float(network.compute[host])


def edges_money(network: Network, layout: Layout, model: PipelineModel, edges: Sequence[StageEdge]) -> list[float]:
    """Return the money of each edge for the tensors of a step, in both directions."""
    found = []
    for edge, (here, there) in zip(edges, pairwise(layout.grid), strict=True):
        prices = float(network.price[here, there].sum()), float(network.price[there, here].sum())
        found.append(model.micro_batches * sum(model.sent_bytes(edge, way) * price for way, price in enumerate(prices)))
    return found


def exchanges_money(
    network: Network, layout: Layout, model: PipelineModel, servers: Sequence[int], ways: Sequence[ModeAndSpec]
) -> list[float]:
    """Return the money of each stage for a step's exchange of its replicas with its server."""
    found = []
    for stage, (group, server, way) in enumerate(zip(layout.grid, servers, ways, strict=True)):
        each = model.stage_parameters(layout, stage) / way.mode.local_steps
        up, down = (model.coded[spec].bytes * each for spec in (way.compress, way.down))
        found.append(float((up * network.price[group, server] + down * network.price[server, group]).sum()))
    return found


BLOCK = 1 << 16  # values; a multiple of every coding's block of values with one scale
# GB/s of float32 that one thread encodes and decodes (docs/archive/results-0.1.md, bench/speed/compressors.py).
# Others only copy.
GBPS = {"fp16": (12.4, 23.3), "int8": (17.7, 24.9), "int8:stochastic": (9.9, 25.3)}


def carried() -> dict[str, tuple[EdgeCost, EdgeCost]]:
    """Return the costs of each coding of an edge: (activations, their gradients)."""
    return {name: (_of(forth), _of(back)) for name, (forth, back) in EDGE_CODINGS.items()}


def _of(coding: ValueCoding) -> EdgeCost:
    encode_s, decode_s = (1e-9 / rate for rate in GBPS.get(coding.spec, (math.inf, math.inf)))
    return EdgeCost(coding.byte_count(BLOCK) / (4 * BLOCK), encode_s, decode_s)
