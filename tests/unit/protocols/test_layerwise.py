"""LAMB and LARS are their algorithms, written out in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from narrows.worker import LAMB, LARS

Wide = npt.NDArray[np.float64]
STEPS = 7
SHAPES = ((4, 3), (5,), (), (2, 3, 2))


def lamb(
    x: Wide, gradients: list[Wide], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Wide:
    """1904.00962, algorithm 2, with phi(z) = z."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        r = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * x
        lengths = np.linalg.norm(x), np.linalg.norm(r)
        x = x - lr * (lengths[0] / lengths[1] if all(lengths) else 1.0) * r
    return x


def lars(x: Wide, gradients: list[Wide], lr: float, momentum: float, weight_decay: float, trust: float) -> Wide:
    """1708.03888, algorithm 1."""
    u = np.zeros_like(x)
    for g in gradients:
        lengths = np.linalg.norm(x), np.linalg.norm(g)
        local = trust * lengths[0] / (lengths[1] + weight_decay * lengths[0]) if all(lengths) else 1.0
        u = momentum * u + lr * local * (g + weight_decay * x)
        x = x - u
    return x


CASES: list[tuple[Any, Any, dict[str, Any]]] = [
    (LAMB, lamb, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1}),
    (LAMB, lamb, {"lr": 0.3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}),
    (LARS, lars, {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.02}),
    (LARS, lars, {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "trust": 0.001}),
]


@pytest.mark.parametrize(("kind", "reference", "values"), CASES)
@pytest.mark.parametrize("zero", [False, True])
def test_each_step_is_that_of_the_paper(kind: Any, reference: Any, values: dict[str, Any], zero: bool) -> None:
    draw = np.random.default_rng(3)
    starts = [np.asarray(draw.standard_normal(shape)) * (not zero) for shape in SHAPES]
    gradients = [[np.asarray(draw.standard_normal(shape)) for shape in SHAPES] for _ in range(STEPS)]
    parameters = [torch.nn.Parameter(torch.tensor(start, dtype=torch.float64)) for start in starts]
    optimizer = kind(parameters, **values)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    for index, parameter in enumerate(parameters):
        expected = reference(starts[index], [step[index] for step in gradients], **values)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-6, atol=1e-9)
        assert not np.allclose(expected, starts[index], rtol=1e-5)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_they_are_optimizers_of_torch(kind: Any) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = kind(net.parameters(), lr=0.1)
    loss = optimizer.step(lambda: net(torch.ones(1, 3)).square().sum().mul(1.0))
    assert loss.requires_grad and not optimizer.state, "there was no gradient"
    net(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    again = kind(net.parameters())
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 0.1 and again.state[net.weight].keys() == optimizer.state[net.weight].keys()


@pytest.mark.parametrize(("kind", "values"), [
    (LAMB, {"lr": -1.0}), (LAMB, {"lr": float("nan")}), (LAMB, {"betas": (0.9, 1.0)}), (LAMB, {"eps": 0.0}),
    (LARS, {"momentum": 1.0}), (LARS, {"trust": 0.0}), (LARS, {"weight_decay": float("inf")}),
])  # fmt: skip
def test_values_out_of_range_are_refused(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give a number|takes"):
        kind([torch.zeros(2)], **values)
