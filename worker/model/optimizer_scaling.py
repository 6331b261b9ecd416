"""Measures how an optimizer's update grows with the gradient: in proportion, as for SGD, or not at all, as for AdamW.

The server needs the degree to scale a mean of updates (ps/store/update_gain.py). There is no list of classes: an
optimizer of the same class and hyper-parameters steps a small matrix, once along gradients and once along twice these
gradients.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import torch

from narrows.worker.model.optimizers import each_of

HOW = ("capturable", "differentiable", "foreach", "fused")  # left out: not all work on the matrix
STEPS = 8  # of which the last is measured: first steps may differ, as RAdam begins to divide at the sixth


def degree_of(inner: torch.optim.Optimizer) -> float:
    """Return the degree of an optimizer: 0 if twice the gradient makes the same update, 1 if it makes twice the update.

    Several groups and optimizers have their mean, weighted by parameters. An optimizer that raises an error in the
    measurement counts as 1, with which no update is scaled.
    """
    degrees = [
        (sum(p.numel() for p in group["params"] if p.requires_grad), _tried(type(optimizer), group))
        for optimizer in each_of(inner)
        for group in optimizer.param_groups
    ]
    count = sum(size for size, _ in degrees)
    mean = sum(size * degree for size, degree in degrees) / count if count else 1.0
    return round(min(max(mean, 0.0), 1.0), 2)  # two digits are the same on every machine


def _tried(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> float:
    taken = inspect.signature(kind).parameters.keys() - {"params"}  # torch and schedulers add other entries to a group
    values = {name: value for name, value in group.items() if name in taken - {*HOW}}
    values |= {name: 0.0 for name in ("weight_decay",) if name in values}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            once, twice = (_moved(kind, values, size) for size in (1.0, 2.0))
    except Exception:  # a script's own optimizer may raise anything
        return 1.0
    return math.log2(twice / once) if once > 0 and twice > 0 else 1.0


def _moved(kind: type[torch.optim.Optimizer], values: dict[str, Any], size: float) -> float:
    """Return the L2 length of the last of STEPS updates of a matrix of zeros, along gradients of this size."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    draws = not kind.__module__.startswith(
        "torch."
    )  # a script's own optimizer may draw random numbers: the same for each size, and none of the script's
    with torch.random.fork_rng(devices=[], enabled=draws):
        optimizer = kind([weight], **(values | {"lr": 1e-3}))
        getattr(optimizer, "train", lambda: None)()  # schedule-free ones step only after train()
        for step in range(STEPS):
            before = weight.detach().clone()
            weight.grad = size * torch.tensor([[1.0, -0.5], [0.25, 2.0 + 0.1 * step]])
            optimizer.step()
    return float((weight.detach() - before).norm())
