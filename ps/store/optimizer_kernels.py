"""Steps of SGD, Adam and AdamW in one pass over weights, gradient and state. torch reads and writes them once an operation.

How it works

    hyper-parameters of a group ──RULES[class]──> StepRule: names of the state, and a function
    step(piece's state, keys of a chunk, gradient, weights)

Rules
- The formulas are those of torch.optim, operation by operation, in float32; `fma` is there where torch's vectors fuse a
  product and a sum. So SGD is equal to torch's bit for bit on a CPU with FMA. Of Adam and AdamW the moments are; the weights
  differ by at most a unit in the last place of a step, since torch's square root is not the correctly rounded one.
- A step of keys does not depend on how they are cut into chunks.
- The state has the names and shapes that torch gives it: a checkpoint of either goes on with the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrows.compression.kernels.jit import fma, kernel
from narrows.ps.store.changes import FloatArray

NONE: FloatArray = np.empty(0, np.float32)
State = Mapping[str, FloatArray]


@kernel
def step_sgd(
    gradient: FloatArray,
    rate: np.float32,
    decay: np.float32,
    momentum: np.float32,
    undamped: np.float32,
    flags: int,
    buffer: FloatArray,
    weights: FloatArray,
) -> None:
    """Step `weights` by SGD.

    Args:
        gradient: float32[size].
        rate: the learning rate, below zero.
        decay: the weight decay.
        momentum: of the buffer; 0: there is none.
        undamped: 1 - dampening.
        flags: 1: Nesterov; 2: the gradient is negated; 4: the buffer begins with this gradient.
        buffer: float32[size], changed; of no values without momentum.
        weights: float32[size], changed.
    """
    nesterov, negated, begins = flags & 1, flags & 2, flags & 4
    for i in range(weights.size):
        along = -gradient[i] if negated else gradient[i]
        if decay != np.float32(0):
            along = fma(weights[i], decay, along)
        if momentum != np.float32(0):
            moved = along if begins else fma(along, undamped, buffer[i] * momentum)
            buffer[i] = moved
            along = fma(moved, momentum, along) if nesterov else moved
        weights[i] = fma(along, rate, weights[i])


@kernel
def step_adam(
    gradient: FloatArray,
    step_size: np.float32,
    decay: np.float32,
    shrink: np.float32,
    first: np.float32,
    keep: np.float32,
    second: np.float32,
    corrected: np.float32,
    eps: np.float32,
    negated: bool,
    average: FloatArray,
    square: FloatArray,
    largest: FloatArray,
    weights: FloatArray,
) -> None:
    """Step `weights` by Adam (1412.6980) or AdamW (1711.05101).

    Args:
        gradient: float32[size].
        step_size: the learning rate over the first bias correction, below zero.
        decay: the weight decay that is added to the gradient.
        shrink: the factor of decoupled weight decay on the weights.
        first: 1 - beta1.
        keep: beta2.
        second: 1 - beta2.
        corrected: the square root of the second bias correction.
        eps: is added to the root.
        negated: the gradient is negated.
        average: exp_avg, float32[size], changed.
        square: exp_avg_sq, float32[size], changed.
        largest: max_exp_avg_sq, float32[size], changed; of no values without amsgrad.
        weights: float32[size], changed.
    """
    one, near = np.float32(1), first < np.float32(0.5)
    for i in range(weights.size):
        along = -gradient[i] if negated else gradient[i]
        weight = weights[i] * shrink
        if decay != np.float32(0):
            along = fma(weight, decay, along)
        between = along - average[i]
        average[i] = fma(first, between, average[i]) if near else fma(-between, one - first, along)
        square[i] = fma(second * along, along, square[i] * keep)
        over = square[i]
        if largest.size:
            over = largest[i] = max(largest[i], over)
        root = np.sqrt(over) / corrected + eps
        weights[i] = weight + (step_size * average[i]) / root


@dataclass(frozen=True, slots=True)
class StepRule:
    """How the pieces of one parameter group step.

    Attributes:
        names: of the state that has a value for each key.
        counts: the state has a number "step" too, of the steps that were taken.
        run: is called with (state of the piece, begun, slice of the chunk in its arrays, gradient, weights). The last two are
            those of the chunk. `begun` is False in the first step with this state, whose arrays are zeros.
    """

    names: tuple[str, ...]
    counts: bool
    run: Callable[[State, bool, slice, FloatArray, FloatArray], None]


def _sgd(values: Mapping[str, Any]) -> StepRule:
    momentum, f = values["momentum"], np.float32
    numbers = f(-values["lr"]), f(values["weight_decay"]), f(momentum), f(1 - values["dampening"])
    flags = bool(values["nesterov"]) | 2 * bool(values["maximize"])

    def run(state: State, begun: bool, at: slice, gradient: FloatArray, weights: FloatArray) -> None:
        buffer = state["momentum_buffer"][at] if momentum else NONE
        step_sgd(gradient, *numbers, flags | (0 if begun else 4), buffer, weights)

    return StepRule(("momentum_buffer",) if momentum else (), False, run)


def _adam(values: Mapping[str, Any], decoupled: bool) -> StepRule:
    (beta1, beta2), rate, decay, f = values["betas"], values["lr"], values["weight_decay"], np.float32
    decoupled = decoupled or bool(values.get("decoupled_weight_decay"))
    decays = f(0 if decoupled else decay), f(1 - rate * decay if decoupled else 1)
    betas = f(1 - beta1), f(beta2), f(1 - beta2)
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if values["amsgrad"] else ()))

    def run(state: State, begun: bool, at: slice, gradient: FloatArray, weights: FloatArray) -> None:
        step = float(state["step"]) + 1
        sizes = f(-(rate / (1 - beta1**step))), f((1 - beta2**step) ** 0.5)
        average, square, *largest = (state[name][at] for name in names)
        step_adam(
            gradient, sizes[0], *decays, *betas, sizes[1], f(values["eps"]), bool(values["maximize"]),
            average, square, largest[0] if largest else NONE, weights,
        )  # fmt: skip

    return StepRule(names, True, run)


# By the name of the class in torch.optim: makes the rule of a group's hyper-parameters, all of which have a value.
RULES: dict[str, Callable[[Mapping[str, Any]], StepRule]] = {
    "SGD": _sgd,
    "Adam": lambda values: _adam(values, decoupled=False),
    "AdamW": lambda values: _adam(values, decoupled=True),
}


def warm_up() -> None:
    """Compile the kernels, or load them from their cache."""
    values = {"lr": 0.0, "weight_decay": 0.0, "maximize": False}
    more = {"SGD": {"momentum": 0.9, "dampening": 0.0, "nesterov": False}}
    adam = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    for name, rule in RULES.items():
        made = rule(values | more.get(name, adam))
        state: dict[str, FloatArray] = {each: np.zeros(1, np.float32) for each in (*made.names, "step")}
        state["step"] = np.zeros((), np.float32)
        made.run(state, True, slice(0, 1), np.zeros(1, np.float32), np.zeros(1, np.float32))
