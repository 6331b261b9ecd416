"""How an optimizer's update grows with the gradient: with its size, as that of SGD, or not at all, as that of AdamW.

The server asks before it scales a mean of updates (ps/store/update_gain.py). No list of classes answers it: each optimizer is
tried on a parameter of its own.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import torch

from narrows.worker.model.optimizers import each_of

HOW = ("capturable", "differentiable", "foreach", "fused")  # a step is carried out: not all can be on a plain parameter
STEPS = 8  # the first ones of some are not like the others: RAdam begins to divide at the sixth


def degree_of(inner: torch.optim.Optimizer) -> float:
    """From 0, where twice the gradient makes the same update, to 1, where it makes twice the update; of several groups and
    optimizers the mean by parameters. One that cannot be tried counts as 1: nothing is scaled then."""
    degrees = [
        (sum(p.numel() for p in group["params"] if p.requires_grad), _tried(type(optimizer), group))
        for optimizer in each_of(inner)
        for group in optimizer.param_groups
    ]
    count = sum(size for size, _ in degrees)
    mean = sum(size * degree for size, degree in degrees) / count if count else 1.0
    return round(min(max(mean, 0.0), 1.0), 2)  # 2 digits: the same on every machine


def _tried(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> float:
    taken = inspect.signature(kind).parameters.keys() - {"params"}  # a group may have more, of a scheduler or of torch
    values = {name: value for name, value in group.items() if name in taken - {*HOW}}
    values |= {name: 0.0 for name in ("weight_decay",) if name in values}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            once, twice = (_moved(kind, values, size) for size in (1.0, 2.0))
    except Exception:  # whatever an optimizer of the script's own may raise
        return 1.0
    return math.log2(twice / once) if once > 0 and twice > 0 else 1.0


def _moved(kind: type[torch.optim.Optimizer], values: dict[str, Any], size: float) -> float:
    """How far a matrix of zeros is moved by the last of some steps along gradients of this size."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    draws = not kind.__module__.startswith(
        "torch."
    )  # one of the script's own may: alike for each size, and for the script
    with torch.random.fork_rng(devices=[], enabled=draws):
        optimizer = kind([weight], **(values | {"lr": 1e-3}))
        getattr(optimizer, "train", lambda: None)()  # schedule-free ones step after it alone
        for step in range(STEPS):
            before = weight.detach().clone()
            weight.grad = size * torch.tensor([[1.0, -0.5], [0.25, 2.0 + 0.1 * step]])
            optimizer.step()
    return float((weight.detach() - before).norm())
