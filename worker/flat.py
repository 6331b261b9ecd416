"""The parameters of a model as one flat float32 array, in registration order, and back.

Takes parameters of any floating dtype and device; shared parameters are there once, frozen ones and those that the
optimizer does not have are not.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from narrows.protocols.errors import UsageError
from narrows.protocols.keys import Plan, TensorSpec

FloatArray = npt.NDArray[np.float32]


class FlatModel:
    """Parameters of `model` that `optimizer` steps."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        position = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = [(name, p) for name, p in model.named_parameters() if id(p) in position and p.requires_grad]
        missing = sum(1 for g in optimizer.param_groups for p in g["params"] if p.requires_grad) - len(named)
        if missing:
            raise UsageError(
                f"the optimizer has {missing} parameters that are not in the model given to DistributedOptimizer"
            )
        if not named:
            raise UsageError("the optimizer has no trainable parameter of the model given to DistributedOptimizer")
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.group_of = [position[id(p)] for p in self.parameters]
        self.groups = len(optimizer.param_groups)
        self.specs = tuple(TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named)
        self.offsets = Plan(self.specs, "", ()).offsets()
        self.size = self.offsets[-1]

    def plan(self, optimizer: str, max_grad_norm: float) -> Plan:
        groups = tuple(tuple(i for i, g in enumerate(self.group_of) if g == group) for group in range(self.groups))
        return Plan(self.specs, optimizer, groups, max_grad_norm)

    def _pieces(self, flat: FloatArray) -> Iterable[tuple[torch.Tensor, torch.nn.Parameter]]:
        whole = torch.from_numpy(flat)
        for i, parameter in enumerate(self.parameters):
            yield whole[self.offsets[i] : self.offsets[i + 1]].view(parameter.shape), parameter

    @torch.no_grad()
    def read(self, out: FloatArray) -> None:
        """Copy the parameters into `out`, float32[size]."""
        for piece, parameter in self._pieces(out):
            piece.copy_(parameter)

    @torch.no_grad()
    def write(self, flat: FloatArray) -> None:
        """Set the parameters from float32[size]."""
        for piece, parameter in self._pieces(flat):
            parameter.copy_(piece)

    @torch.no_grad()
    def read_gradients(self, out: FloatArray) -> list[int]:
        """Copy the gradients into `out`; return the indices of the tensors that have none (zeros there)."""
        absent = []
        for i, (piece, parameter) in enumerate(self._pieces(out)):
            if parameter.grad is None:
                absent.append(i)
                piece.zero_()
            elif parameter.grad.is_sparse:
                raise UsageError(
                    f"the gradient of {self.names[i]!r} is sparse, which cannot be pushed as a gradient: "
                    "use --push update, or Embedding(sparse=False)"
                )
            else:
                piece.copy_(parameter.grad)
        return absent
