"""Optimizers that scale the step of each tensor by the tensor's norm, for large batches: LAMB and LARS.

torch has neither. A script makes them; servers that cut at tensors (`--cut tensors`) step the same classes. Norms are
those of one tensor, so no shard needs a norm of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class Layerwise(torch.optim.Optimizer):
    """The base of both: a step of each parameter that has a gradient. No sparse gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step. `closure` evaluates the model with gradients; its value is returned, without it None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def step_one(self, x: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step the parameter `x` along its gradient, of the same shape and dtype."""
        raise NotImplementedError


class LAMB(Layerwise):
    """LAMB (1904.00962, algorithm 2), with phi the identity.

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
        r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay x
        x <- x - lr |x| / |r| r         |.|: the L2 norm of the tensor; the ratio is 1 where either norm is 0

    Args:
        params: parameters, or groups of them, as in torch.optim.
        lr: the rate.
        betas: b1 and b2, each from 0 up to, not including, 1.
        eps: above 0.
        weight_decay: decoupled, within the norm of r.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas) or len(betas) != 2 or not 0 < eps < math.inf:
            raise ValueError(f"LAMB takes two betas from 0 to 1 and an eps above 0, and got {betas} and {eps}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step_one(self, x: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """See `Layerwise`. The state: "step", a float32 scalar on the host, "exp_avg" m and "exp_avg_sq" v."""
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(x), torch.zeros_like(x)
        first, second = group["betas"]
        state["step"] += 1
        count = float(state["step"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient.conj(), value=1 - second)
        update = mean / (1 - first**count)
        update /= (square / (1 - second**count)).sqrt_().add_(group["eps"])
        update.add_(x, alpha=group["weight_decay"])
        x.add_(update.mul_(_ratio(x.norm(), update.norm())), alpha=-group["lr"])


class LARS(Layerwise):
    """LARS (1708.03888, algorithm 1).

        rate = lr trust |x| / (|g| + weight_decay |x|)      |.|: the L2 norm of the tensor; lr where either norm is 0
        u <- momentum u + rate (g + weight_decay x)
        x <- x - u

    Args:
        params: parameters, or groups of them, as in torch.optim.
        lr: the global rate.
        momentum: from 0 up to, not including, 1.
        weight_decay: at least 0.
        trust: the trust coefficient (eta), above 0.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self, params: Params, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 1e-4, trust: float = 1e-3
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay)
        if not 0 <= momentum < 1 or not 0 < trust < math.inf:
            raise ValueError(f"LARS takes a momentum from 0 to 1 and a trust above 0, and got {momentum} and {trust}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def step_one(self, x: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """See `Layerwise`. The state: "momentum_buffer" u."""
        if not state:
            state["momentum_buffer"] = torch.zeros_like(x)
        decay, length = group["weight_decay"], x.norm()
        scale = group["trust"] * _ratio(length, gradient.norm() + decay * length, 1 / group["trust"])
        buffer = state["momentum_buffer"]
        buffer.mul_(group["momentum"]).add_(gradient.add(x, alpha=decay).mul_(scale), alpha=group["lr"])
        x.sub_(buffer)


def _ratio(length: torch.Tensor, of: torch.Tensor, neither: float = 1.0) -> torch.Tensor:
    """Return length / of, a scalar on the parameter's device; `neither` where one of them is 0."""
    return torch.where((length > 0) & (of > 0), length / of, torch.full_like(length, neither))


def _check(**values: float) -> None:
    """Raise ValueError for a value that is no number of at least 0."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}: give a number of at least 0")
