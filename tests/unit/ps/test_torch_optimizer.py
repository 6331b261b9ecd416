"""The script's optimizer on a shard: what a worker may ask of it, step after step."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.modes import ELEMENTWISE, WHOLE_TENSORS
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import pack
from narrows.ps.store.changes import FloatArray
from narrows.ps.store.reduction import Mean
from narrows.ps.store.torch_optimizer import TorchOptimizer


def given(gradient: FloatArray) -> Mean:
    """The gradient, part by part; the optimizer may write to what it gets."""
    return lambda low, high: gradient[low:high].copy()


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
    optimizer.step(weights, given(gradient), pack([first]), (), 1.0)
    if not fits:
        with pytest.raises(RemoteProtocolError, match=f"{kind} refuses its hyper-parameters"):
            optimizer.check(pack([later]))
        return
    optimizer.check(pack([later]))
    optimizer.step(weights, given(gradient), pack([later]), (), 1.0)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(("kind", "values"), [
    ("Muon", {"lr": float("nan")}), ("Muon", {"ns_steps": 10**9}), ("Muon", {"ns_coefficients": [1e38, 1e38, 1e38]}),
    ("Muon", {"adjust_lr_fn": "mine"}), ("LAMB", {"betas": [0.9, 1.0]}), ("LAMB", {"eps": 0.0}), ("LARS", {"trust": -1.0}),
    ("LARS", {"lr": "fast"}),
])  # fmt: skip
def test_what_would_spoil_whole_tensors_is_refused(kind: str, values: dict[str, Any]) -> None:
    optimizer = server_side(kind)
    optimizer.check(pack([{"lr": 0.1}]))
    with pytest.raises(RemoteProtocolError, match=f"{kind} refuses its hyper-parameters"):
        optimizer.check(pack([values]))
    with pytest.raises(RemoteProtocolError, match=f"hyper-parameters that {kind} does not know"):
        optimizer.check(pack([{"dampening": 0.1}]))


def test_a_part_of_a_tensor_is_not_stepped_as_a_whole() -> None:
    plan = ModelSpec(
        (TensorSpec("weight", (2, 4), "float32"), TensorSpec("bias", (4,), "float32")), "Muon+SGD", ((0,), (1,))
    )
    for begin, end in ((0, 8), (0, 12), (8, 12), (8, 10)):
        TorchOptimizer(plan, begin, end)
    for begin, end in ((0, 6), (4, 8), (4, 12)):
        with pytest.raises(RemoteProtocolError, match="Muon steps whole tensors, and a shard has a part of 'weight'"):
            TorchOptimizer(plan, begin, end)


@pytest.mark.parametrize("kind", sorted((*ELEMENTWISE, *WHOLE_TENSORS)))
@pytest.mark.parametrize("steps", [0, 3])
def test_one_that_was_pickled_goes_on_to_the_bit(kind: str, steps: int) -> None:
    """The journal of a shard holds it, between any two steps."""
    hyper = pack([{"lr": 0.01}])
    gradients = np.random.default_rng(0).standard_normal((steps + 3, 8)).astype(np.float32)
    optimizer, weights = server_side(kind), np.ones(8, np.float32)
    optimizer.check(hyper)
    for gradient in gradients[:steps]:
        optimizer.step(weights, given(gradient), hyper, (), 1.0)
    other, others = pickle.loads(pickle.dumps((optimizer, weights)))
    for gradient in gradients[steps:]:
        for each, at in ((optimizer, weights), (other, others)):
            each.check(hyper)
            each.step(at, given(gradient), hyper, (), 1.0)
    assert weights.tobytes() == others.tobytes()


CHUNK = 64  # keys of a chunk below; a vector of the CPU does not cross its end
SIZES = (3, 2 * CHUNK + 17, 1, 0, CHUNK, 5, 3 * CHUNK)
PLAN = ModelSpec(
    tuple(TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(SIZES)), "", ((4, 1, 0), (2, 3, 6), (5,))
)
RATES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.5},
}


class ManyArrays:
    """An allocator that notes what it made."""

    def __init__(self) -> None:
        self.made: list[FloatArray] = []

    def empty(self, count: int) -> FloatArray:
        self.made.append(np.full(count, np.nan, np.float32))
        return self.made[-1]


def steps_of(kind: str, count: int) -> list[tuple[FloatArray, tuple[int, ...], float, bytes]]:
    """Gradients, absent tensors, scales and hyper-parameters of some steps; tensor 2 has no gradient in the first two."""
    rng, given = np.random.default_rng(0), list[tuple[FloatArray, tuple[int, ...], float, bytes]]()
    for step in range(count):
        groups = [{"lr": 0.01 * (group + 1), **RATES.get(kind, {})} for group in range(3)]
        absent: tuple[int, ...] = ((2, 4), (2, 5), (), (1,))[step % 4]
        given.append((rng.standard_normal(PLAN.size).astype(np.float32), absent, 0.5 + step, pack(groups)))
    return given


def by_torch(kind: str, x: FloatArray, count: int) -> FloatArray:
    """As many steps in one process, each tensor whole."""
    weights, offsets = torch.from_numpy(x.copy()), PLAN.offsets()
    tensors = [torch.nn.Parameter(weights[low:high]) for low, high in itertools.pairwise(offsets)]
    groups = [{"params": [tensors[i] for i in group], **RATES.get(kind, {})} for group in PLAN.groups]
    optimizer = getattr(torch.optim, kind)(groups, **RATES.get(kind, {}))
    for gradient, absent, scale, _ in steps_of(kind, count):
        for group, target in enumerate(optimizer.param_groups):
            target["lr"] = 0.01 * (group + 1) * scale
        for i, tensor in enumerate(tensors):
            tensor.grad = None if i in absent else torch.from_numpy(gradient[offsets[i] : offsets[i + 1]].copy())
        optimizer.step()
    return weights.numpy()


def equals(kind: str, ours: FloatArray, theirs: FloatArray) -> None:
    """To the bit, but for the square root of Adam and AdamW, which torch does not round correctly."""
    if kind in ("Adam", "AdamW"):
        assert np.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    else:
        assert ours.tobytes() == theirs.tobytes()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr("narrows.ps.store.torch_optimizer.PART_VALUES", CHUNK)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("many", [1, 64], ids=["all in one call", "one by one"])
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_chunks_step_as_whole_tensors_do_to_the_bit(kind: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the weights lie elsewhere from one step to the next, and after a load in the middle."""
    monkeypatch.setattr("narrows.ps.store.torch_optimizer.MANY", many)
    count, plan, arrays = 7, ModelSpec(PLAN.tensors, kind, PLAN.groups), ManyArrays()
    begun = np.linspace(-1, 1, PLAN.size, dtype=np.float32)
    for loads in (False, True):
        optimizer, x = TorchOptimizer(plan, 0, plan.size, arrays=arrays), begun.copy()
        for number, (gradient, absent, scale, hyper) in enumerate(steps_of(kind, count)):
            optimizer.step(x, given(gradient), hyper, absent, scale)
            x = x.copy()
            if loads and number == 3:
                saved = {name: value.copy() for name, value in optimizer.state().items()}
                optimizer = TorchOptimizer(plan, 0, plan.size, arrays=arrays)
                optimizer.load(saved)
                assert {n: v.tobytes() for n, v in optimizer.state().items()} == {
                    n: v.tobytes() for n, v in saved.items()
                }
        equals(kind, x, by_torch(kind, begun, count))
    made = {array.__array_interface__["data"][0]: array.size for array in arrays.made}
    for name, value in optimizer.state().items():
        group, index, _ = name.split(".")
        piece = optimizer.pieces[int(group)][int(index)]
        if value.ndim:
            assert made[value.__array_interface__["data"][0]] == value.size == piece.high - piece.low
            assert np.isfinite(value).all(), "no chunk of it is left out"


def adam(
    kind: str, values: dict[str, Any], x: npt.NDArray[np.float64], gradients: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Algorithm 1 of 1412.6980, and algorithm 2 of 1711.05101 for AdamW, as torch states both."""
    (beta1, beta2), rate, decay = values["betas"], values["lr"], values["weight_decay"]
    m, v, largest = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for step, g in enumerate(gradients, 1):
        g = -g if values["maximize"] else g
        if kind == "AdamW":
            x = x - rate * decay * x
        else:
            g = g + decay * x
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        largest = np.maximum(largest, v)
        root = np.sqrt((largest if values["amsgrad"] else v) / (1 - beta2**step)) + values["eps"]
        x = x - rate / (1 - beta1**step) * m / root
    return x


def sgd(
    values: dict[str, Any], x: npt.NDArray[np.float64], gradients: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """SGD as torch states it."""
    buffer = None
    for g in gradients:
        g = (-g if values["maximize"] else g) + values["weight_decay"] * x
        if values["momentum"]:
            buffer = g if buffer is None else values["momentum"] * buffer + (1 - values["dampening"]) * g
            g = g + values["momentum"] * buffer if values["nesterov"] else buffer
        x = x - values["lr"] * g
    return x


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("kind", "given_values"), [
    *(("SGD", values) for values in (
        {}, {"weight_decay": 0.1}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.3, "maximize": True}, {"maximize": True},
    )),
    *((kind, values) for kind in ("Adam", "AdamW") for values in (
        {}, {"weight_decay": 0.3}, {"amsgrad": True, "eps": 1e-3}, {"maximize": True}, {"betas": (0.3, 0.5)},
        {"betas": (0.0, 0.9)},
    )),
])  # fmt: skip
def test_one_pass_is_the_definition(kind: str, given_values: dict[str, Any]) -> None:
    """In float64, and beside torch; and cuts change no bit."""
    defaults: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0, "maximize": False}
    defaults |= (
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
        if kind == "SGD"
        else {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    )
    values, rng, size = defaults | given_values, np.random.default_rng(0), 3 * CHUNK + 5
    gradients, begun = rng.standard_normal((6, size)).astype(np.float32), rng.standard_normal(size).astype(np.float32)
    wide = begun.astype(np.float64), gradients.astype(np.float64)
    wanted = sgd(values, *wide) if kind == "SGD" else adam(kind, values, *wide)
    parameter = torch.nn.Parameter(torch.from_numpy(begun.copy()))
    theirs = getattr(torch.optim, kind)([parameter], **values)
    ends = []
    for begin, end in ((0, size), (CHUNK // 2, size - 1)):
        plan = ModelSpec((TensorSpec("t", (size,), "float32"),), kind, ((0,),))
        optimizer, x, hyper = TorchOptimizer(plan, begin, end), begun[begin:end].copy(), pack([{**values}])
        for gradient in gradients:
            optimizer.step(x, given(gradient[begin:end]), hyper, (), 1.0)
        ends.append(x)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        theirs.step()
    assert np.allclose(ends[0], wanted, rtol=2e-6, atol=2e-6)
    equals(kind, ends[0], parameter.detach().numpy())
    assert ends[0][CHUNK // 2 : size - 1].tobytes() == ends[1].tobytes()
    state = {name: value for name, value in theirs.state[parameter].items() if value is not None}
    assert {name.split(".")[-1]: value.shape for name, value in optimizer.state().items()}.keys() == state.keys()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_a_step_asks_for_each_part_of_the_mean_once_and_in_turn(kind: str) -> None:
    optimizer = TorchOptimizer(ModelSpec(PLAN.tensors, kind, PLAN.groups), 0, PLAN.size)
    gradient, _, scale, hyper = steps_of(kind, 1)[0]
    asked: list[tuple[int, int]] = []

    def noted(low: int, high: int) -> FloatArray:
        asked.append((low, high))
        return gradient[low:high].copy()

    optimizer.step(np.zeros(PLAN.size, np.float32), noted, hyper, (), scale)
    assert [key for low, high in asked for key in range(low, high)] == [*range(PLAN.size)]
    assert max(high - low for low, high in asked) <= CHUNK
    asked.clear()
    optimizer.step(np.zeros(PLAN.size, np.float32), noted, hyper, tuple(range(len(SIZES))), scale)
    assert not asked, "no tensor has a gradient"


@pytest.mark.usefixtures("small_chunks")
def test_momentum_that_begins_later_has_one_array_for_each_piece() -> None:
    plan = ModelSpec(PLAN.tensors, "SGD", PLAN.groups)
    optimizer, x = TorchOptimizer(plan, 0, plan.size), np.zeros(PLAN.size, np.float32)
    gradient = steps_of("SGD", 1)[0][0]
    for momentum in (0.0, 0.9):
        optimizer.step(x, given(gradient), pack([{"lr": 0.1, "momentum": momentum}] * 3), (), 1.0)
        assert len(optimizer.state()) == (6 if momentum else 0)
    buffers = np.concatenate([optimizer.read("momentum_buffer", low, low + 1) for low in range(PLAN.size)])
    assert buffers.tobytes() == gradient.tobytes()


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
