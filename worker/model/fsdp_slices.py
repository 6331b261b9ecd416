"""Slices of a model that FSDP2 (torch.distributed.fsdp.fully_shard) has sharded over a group.

Each rank exchanges the parts that it has; nothing is gathered for an exchange.

    keys    weight[0] bias[0] padding[0] │ weight[1] bias[1] padding[1] │ ...
            rank 0, `length` keys        │ rank 1, `length` keys        │

Rules
- To the servers each rank's part of a tensor is a tensor of its own: `weight[0]`, `weight[1]`, one rank after the
  other. Padding gives all ranks as many keys as the rank that has most, so that all keys of a shard are of one rank.
- FSDP sums gradients and gathers parameters. When parameters change here, FSDP drops what it has gathered
  (`reshard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import HEADER_BYTES_MAX, pack, unpack
from narrows.worker.group.group import Group, shares
from narrows.worker.model.flat import Array, FlatModel, local_part, real, reshard
from narrows.worker.model.model_slices import GradientCheck, ModelSlice

PADDING = "padding"


class FsdpSlices(ModelSlice):
    """See `ModelSlice`. Raises UsageError unless every tensor of the model is sharded over this group only."""

    def __init__(self, flat: FlatModel, inner: torch.optim.Optimizer, group: Group, check: GradientCheck) -> None:
        super().__init__(flat, inner, group, check)
        for name, parameter in zip(flat.names, flat.parameters, strict=True):
            _check(name, parameter, group.size)
        locals_ = [local_part(parameter).detach() for parameter in flat.parameters]
        shapes: list[Any] = [
            unpack(each, HEADER_BYTES_MAX) for each in group.told(pack([list(each.shape) for each in locals_]))
        ]
        self.shapes = [[tuple(shape) for shape in rows] for rows in shapes]  # shape of each tensor's part, by rank
        sizes = [sum(spec.key_count for spec in self._specs(rank)) for rank in range(group.size)]
        self.length = max(sizes)  # keys of each rank, padding included
        begin = group.rank * self.length
        filled = torch.zeros(self.length - sizes[group.rank], device=locals_[0].device)
        self.parameters = [torch.nn.Parameter(real(each)) for each in (*locals_, filled)]
        self.names = [f"{name}[{group.rank}]" for name in (*flat.names, PADDING)]
        self.offsets = [begin]
        for parameter in self.parameters:
            self.offsets.append(self.offsets[-1] + parameter.numel())
        self.slices = [(rank * self.length, (rank + 1) * self.length) for rank in range(group.size)]
        self.take_buffers()

    def _specs(self, rank: int) -> list[TensorSpec]:
        """The spec of each tensor's part that rank `rank` has."""
        each = zip(self.flat.specs, self.shapes[rank], strict=True)
        return [TensorSpec(f"{spec.name}[{rank}]", shape, spec.dtype) for spec, shape in each]

    @property
    def total(self) -> int:
        return self.length * self.group.size

    def plan(self, optimizer: str, max_grad_norm: float, degree: float) -> ModelSpec:
        specs, groups = list[TensorSpec](), [list[int]() for _ in range(self.flat.groups)]
        self.numbers: list[list[int]] = [[] for _ in self.flat.names]  # by tensor, the indices of its parts
        for rank in range(self.group.size):
            parts = self._specs(rank)
            for tensor, spec in enumerate(parts):
                if spec.size:
                    groups[self.flat.group_of[tensor]].append(len(specs))
                    self.numbers[tensor].append(len(specs))
                    specs.append(spec)
            filled = self.length - sum(spec.key_count for spec in parts)
            if filled:
                groups[0].append(len(specs))
                specs.append(TensorSpec(f"{PADDING}[{rank}]", (filled,), "float32"))
        return ModelSpec(
            tuple(specs), optimizer, tuple(map(tuple, groups)), max_grad_norm, (), degree, frozen=self.flat.frozen
        )

    def moves(self, ranges: Sequence[Keys]) -> bool:
        return False

    def own(self, ranges: Sequence[Keys]) -> range:
        if len(ranges) % self.group.size:
            raise UsageError(
                f"this run has {len(ranges)} shards, and FSDP shards the model over {self.group.size} processes: their parts "
                f"need as many shards, or a multiple; ps-serve --shards {self.group.size}"
            )
        return range(*shares(len(ranges), self.group.size)[self.group.rank])

    def reduce(self) -> bool:
        """Take over FSDP's gradients, which are means over the ranks already, not weighted by samples."""
        usable, self.samples = self.tallied(), 0
        for parameter, ours in zip(self.flat.parameters, self.parameters, strict=False):
            gradient: Any = parameter.grad
            ours.grad = None if gradient is None else real(gradient).detach()
            if ours.grad is not None and self.scale != 1.0:
                ours.grad /= self.scale
        return usable

    def absent(self) -> list[int]:
        return [number for tensor in self.lacking for number in self.numbers[tensor]]

    @torch.no_grad()
    def spread(self, values: Array | None = None) -> None:
        if values is not None:
            self.write(values)
        reshard(self.flat)


def check_alone(flat: FlatModel, overlap: int) -> None:
    """Raise UsageError unless a process without a group can train these DTensors.

    On a mesh of one process each is whole, and the worker sees plain tensors (`local_part`).

    Args:
        flat: the parameters, at least one of them a DTensor.
        overlap: backward passes of a step whose gradients leave early; 0: none.
    """
    if overlap:
        raise UsageError(
            "overlap=True: FSDP hands over gradients when the backward pass ends, so none can leave early; leave it out"
        )
    for name, parameter in zip(flat.names, flat.parameters, strict=True):
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            raise UsageError(
                f"parameter {name!r} is sharded over {parameter.device_mesh.size()} processes, and each of them is a worker "
                "here: start the script with ps-worker --group, so that together they are one, or shard over one process"
            )


def _check(name: str, parameter: torch.Tensor, ranks: int) -> None:
    if not isinstance(parameter, DTensor):
        raise UsageError(f"parameter {name!r} is not sharded, and others are: call fully_shard on the whole model too")
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or mesh.size() != ranks or not isinstance(placements[0], Shard):
        raise UsageError(
            f"parameter {name!r} is placed as {placements} on a mesh of {list(mesh.shape)}: a group needs fully_shard over "
            f"its {ranks} processes, and no other kind of parallelism"
        )
    if not parameter.to_local().is_contiguous():
        raise UsageError(f"the part of parameter {name!r} that this process has is not contiguous in memory")
