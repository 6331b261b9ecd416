"""Keeps the writes of all stages in a fixed subspace of dimension D.

An edge then carries D numbers and an id for each token, instead of as many numbers as the model is wide.

This is the central idea of "Protocol Models" (Ramasinghe et al. 2025, 2506.01260). The residual stream of a transformer
is the token's embedding plus the layers' writes. Let each layer write into one subspace S, and let an embedding be a
fixed vector of the token plus a trained part in S. Then x - fixed[id] lies in S at every cut. Its D coefficients
determine it, and their gradient is the whole gradient. Layers of the last stage may write anywhere, because no edge
carries their writes.

A writing layer has D outputs, followed by the basis, so any optimizer stays in S. The authors' reference code does the
same (PluralisResearch/ProtocolNanoGPT at 0551bc3, train_gpt_ssn.py), with fixed vectors of deviation 1 and a constant
basis.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrows.protocols.errors import UsageError


class Subspace(nn.Module):
    """The subspace of a model. Processes that make it with the same arguments get the same subspace.

    Args:
        tokens: tokens of the vocabulary.
        width: the width of the residual stream.
        dimensions: D, the dimensions of the subspace.
        std: the standard deviation of the fixed vectors.
        seed: the seed of basis and fixed vectors.

    Attributes:
        basis: float32 (width, D), with orthonormal columns.
        fixed: float32 (tokens, width), normal: the fixed part of the embeddings.

    Raises:
        UsageError: D is not from 1 to the width.
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
        """Return the coefficients (..., D) of the residual stream `x` (..., width) of the tokens `ids` (...)."""
        return (x - self.fixed[ids.long()]) @ self.basis

    def enter(self, coefficients: Tensor, ids: Tensor) -> Tensor:
        """Return the residual stream (..., width) of these coefficients (..., D): the inverse of `leave`."""
        return F.linear(coefficients, self.basis) + self.fixed[ids.long()]


class Writer(nn.Module):
    """Replaces an nn.Linear(inputs, width, bias=False) that adds to the residual stream: writes into the subspace.

    Args:
        inputs: input features.
        subspace: the subspace of the model.
        std: the standard deviation of the weights of the replaced layer. The outputs get the same size as that layer's.
    """

    basis: Tensor

    def __init__(self, inputs: int, subspace: Subspace, std: float) -> None:
        super().__init__()
        width, dimensions = subspace.basis.shape
        self.coefficients = nn.Linear(inputs, dimensions, bias=False)
        nn.init.normal_(self.coefficients.weight, std=std * math.sqrt(width / dimensions))
        self.register_buffer("basis", subspace.basis, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.coefficients(x), self.basis)
