"""The script's optimizer on a shard: what a worker may ask of it, step after step."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.modes import ELEMENTWISE
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import pack
from narrows.ps.store.torch_optimizer import TorchOptimizer


def server_side(kind: str) -> TorchOptimizer:
    return TorchOptimizer(ModelSpec((TensorSpec("weight", (2, 4), "float32"),), kind, ((0,),)), 0, 8)


@pytest.mark.parametrize(("kind", "first", "later", "fits"), [
    ("AdamW", {"amsgrad": False}, {"amsgrad": True}, False),
    ("AdamW", {"amsgrad": True}, {"amsgrad": False}, False),
    ("RMSprop", {"centered": False}, {"centered": True}, False),
    ("AdamW", {"weight_decay": 0.0}, {"weight_decay": 0.1}, True),
    ("AdamW", {"lr": 0.1}, {"lr": 0.0}, True),
    ("SGD", {"momentum": 0.0}, {"momentum": 0.9}, True),
])  # fmt: skip
def test_what_needs_state_that_is_not_there_is_refused_before_a_step(
    kind: str, first: dict[str, Any], later: dict[str, Any], fits: bool
) -> None:
    optimizer = server_side(kind)
    weights, gradient = np.zeros(8, np.float32), np.ones(8, np.float32)
    optimizer.check(pack([first]))
    optimizer.step(weights, gradient, pack([first]), (), 1.0)
    if not fits:
        with pytest.raises(RemoteProtocolError, match=f"{kind} refuses its hyper-parameters"):
            optimizer.check(pack([later]))
        return
    optimizer.check(pack([later]))
    optimizer.step(weights, gradient, pack([later]), (), 1.0)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
@pytest.mark.parametrize("steps", [0, 3])
def test_one_that_was_pickled_goes_on_to_the_bit(kind: str, steps: int) -> None:
    """The journal of a shard holds it, between any two steps."""
    hyper = pack([{"lr": 0.01}])
    gradients = np.random.default_rng(0).standard_normal((steps + 3, 8)).astype(np.float32)
    optimizer, weights = server_side(kind), np.ones(8, np.float32)
    optimizer.check(hyper)
    for gradient in gradients[:steps]:
        optimizer.step(weights, gradient, hyper, (), 1.0)
    other, others = pickle.loads(pickle.dumps((optimizer, weights)))
    for gradient in gradients[steps:]:
        for each, at in ((optimizer, weights), (other, others)):
            each.check(hyper)
            each.step(at, gradient.copy(), hyper, (), 1.0)
    assert weights.tobytes() == others.tobytes()


@pytest.mark.parametrize(("kind", "values"), [
    ("SGD", {"lr": float("nan")}),
    ("SGD", {"lr": float("inf")}),
    ("SGD", {"lr": 0.1, "weight_decay": float("inf")}),
    ("AdamW", {"lr": float("inf")}),
    ("RMSprop", {"lr": float("nan")}),
])  # fmt: skip
def test_a_rate_that_leads_to_no_number_is_refused(kind: str, values: dict[str, Any]) -> None:
    """torch takes most of them, and one member would be enough."""
    with pytest.raises(RemoteProtocolError, match=f"{kind} refuses its hyper-parameters"):
        server_side(kind).check(pack([values]))
    server_side(kind).check(pack([{"lr": 1e-3}]))
