"""Keeps what stages write in a fixed subspace, so D numbers a token and the token's id travel instead of the width.

This is the central idea of "Protocol Models" (Ramasinghe et al. 2025, 2506.01260). The residual stream of a transformer is the
token's embedding plus what layers have written. Let each layer write into one subspace S. Let an embedding be a fixed vector of
the token plus a trained part in S. Then x - fixed[id] lies in S at every cut. Its D coefficients say all of it, and their
gradient is the whole gradient. Layers of the last stage may write anywhere: nobody sends on what they wrote.

A layer that writes has D rows, and the basis after them, so any optimizer stays in S. The authors' reference code does so too
(PluralisResearch/ProtocolNanoGPT at 0551bc3, train_gpt_ssn.py), and draws fixed vectors of deviation 1 and a basis that stays.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrows.protocols.errors import UsageError


class Subspace(nn.Module):
    """The subspace of a model of this width, alike wherever it is made with the same arguments. basis: (width, D) float32,
    orthonormal columns. fixed: (tokens, width) float32, normal with deviation `std`: the part of embeddings that stays.

    Raises UsageError where D is not from 1 to the width.
    """

    basis: Tensor
    fixed: Tensor

    def __init__(self, tokens: int, width: int, dimensions: int, std: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= dimensions <= width:
            raise UsageError(
                f"subspace:{dimensions}: a model of width {width} has subspaces of 1 to {width} dimensions"
            )
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(width, dimensions, generator=generator, dtype=torch.float64)
        self.register_buffer("basis", torch.linalg.qr(drawn)[0].float(), persistent=False)
        self.register_buffer("fixed", std * torch.randn(tokens, width, generator=generator), persistent=False)

    def leave(self, x: Tensor, ids: Tensor) -> Tensor:
        """(..., D): the coefficients of a residual stream (..., width) of these tokens."""
        return (x - self.fixed[ids.long()]) @ self.basis

    def enter(self, coefficients: Tensor, ids: Tensor) -> Tensor:
        """The inverse of `leave`, for what was written within the subspace."""
        return F.linear(coefficients, self.basis) + self.fixed[ids.long()]


class Writer(nn.Module):
    """In the place of nn.Linear(inputs, width, bias=False) where it adds to the residual stream: it writes into the subspace.
    `std`: of the weights of the layer in whose place it is; what it writes has the same size."""

    basis: Tensor

    def __init__(self, inputs: int, subspace: Subspace, std: float) -> None:
        super().__init__()
        width, dimensions = subspace.basis.shape
        self.coefficients = nn.Linear(inputs, dimensions, bias=False)
        nn.init.normal_(self.coefficients.weight, std=std * math.sqrt(width / dimensions))
        self.register_buffer("basis", subspace.basis, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.coefficients(x), self.basis)
