"""Each dtype of a parameter or a buffer is carried, or named: complex numbers as two keys, what is rounded, what is refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.groups import groups
from kit.on_disk import OnDisk
from kit.scripts import Array, alone, batch, distance, flat, run, seeded
from safetensors.torch import load_file
from torch import nn

from narrows.protocols.config.model_spec import DTYPES, ModelSpec, TensorSpec, pack_arrays, unpack_arrays
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.ps.checkpoints import checkpoint_files, whole_model
from narrows.worker import DistributedOptimizer, Embedding, saved_state
from narrows.worker.model.flat import fingerprint
from narrows.worker.model.module_buffers import load_buffers, pack_buffers

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8
ROOT = Path(__file__).parents[2]


class Spectral(nn.Module):
    """A complex matrix that is not contiguous, a complex scalar and a real bias."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(5, 9, dtype=dtype).t())
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = (x.to(self.mix) @ self.mix) * self.phase
        return (z.real + 0.5 * z.imag + self.bias).float()


def spectral(dtype: torch.dtype = torch.complex64) -> nn.Module:
    return seeded(lambda: Spectral(dtype))


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def steps(net: nn.Module, optimizer: Any, worker: int = 0, of: int = 1, count: int = STEPS) -> None:
    for number in range(count):
        optimizer.zero_grad()
        x, y = batch(number)
        nn.functional.cross_entropy(net(x[worker::of]), y[worker::of]).backward()
        optimizer.step()


def in_one_process(dtype: torch.dtype = torch.complex64, clip: float = 0.0) -> Array:
    net = spectral(dtype)
    with alone():
        steps(net, DistributedOptimizer(adam(net), net, max_grad_norm=clip or None))
    return flat(net)


ONE: dict[str, dict[str, Any]] = {
    "ssp": {"sync": "ssp", "shards": 2},
    "async": {"sync": "async"},
    "local": {"sync": "local", "local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0},
    "fragments": {"sync": "local", "local_steps": 2, "fragments": 2, "merge_delay": 0, "outer_lr": 1.0,
                  "outer_momentum": 0.0},
    "gossip": {"sync": "gossip"},
    "bsp": {"sync": "bsp", "shards": 3},
    "bsp, two workers": {"sync": "bsp", "shards": 2, "workers": 2},
    "bsp, overlap": {"sync": "bsp", "workers": 2},
    "bsp, clipped": {"sync": "bsp"},
}  # fmt: skip


@pytest.mark.parametrize("mode", ONE)
def test_a_complex_parameter_trains_as_in_one_process(mode: str) -> None:
    clip = 0.5 if "clipped" in mode else 0.0
    settings = Settings(**ONE[mode])

    def script(worker: int) -> Array:
        net = spectral()
        optimizer = DistributedOptimizer(adam(net), net, overlap="overlap" in mode, max_grad_norm=clip or None)
        steps(net, optimizer, worker, settings.workers)
        optimizer.finish()
        return flat(net)

    with run(settings) as started:
        first, *others = started.together(script)
    assert all(np.array_equal(first, other) for other in others)
    assert distance(first, in_one_process(clip=clip)) < 1e-5
    assert distance(flat(spectral()), first) > 0.1, "both parts train"


def test_a_sparse_lossy_run_at_a_rate_of_zero_leaves_both_parts_as_they_are() -> None:
    def script(worker: int) -> Array:
        net = spectral()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net)
        steps(net, optimizer, worker, 2)
        optimizer.finish()
        return flat(net)

    with run(Settings(sync="ssp", workers=2, compress="topk:0.2+int8")) as started:
        for ended in started.together(script):
            assert np.array_equal(ended, flat(spectral()))


@pytest.mark.parametrize("push", ["update", "gradient"])
def test_in_a_group_each_process_steps_its_slice_of_both_parts(push: str) -> None:
    """Reference: one process. Adam of torch steps a complex parameter as its parts. The state that a rank saves is of whole
    complex tensors, and a script alone goes on with it."""
    settings = Settings(sync="bsp", push=push, shards=2)

    def script(member: int, own: int) -> tuple[Array, Any]:
        net = spectral()
        optimizer = DistributedOptimizer(adam(net), net)
        steps(net, optimizer, own, 2, STEPS - 1)
        state = optimizer.state_dict(servers=push == "gradient")
        optimizer.load_state_dict(state)
        before = flat(net)
        optimizer.finish()
        return before, state

    with groups(settings, [2]) as started:
        found = started.together(script)
    (weights, state), (others, _) = found[0, 0], found[0, 1]
    assert np.array_equal(weights, others)
    net = spectral()
    optimizer = adam(net)
    steps(net, optimizer, count=STEPS - 1)
    assert distance(weights, flat(net)) < 1e-5
    for mine, theirs in zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert mine["exp_avg"].shape == theirs["exp_avg"].shape
        assert torch.allclose(mine["exp_avg"], theirs["exp_avg"], atol=1e-5)
        assert torch.allclose(mine["exp_avg_sq"], theirs["exp_avg_sq"], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_complex_model_is_saved_and_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    """The file, and the servers' state of Adam out of the checkpoints: a plain script goes on as the run does."""
    cluster = OnDisk(settings := Settings(sync="bsp", shards=2).validated(), tmp_path)
    with run(settings, cluster):
        net = spectral(dtype)
        optimizer = DistributedOptimizer(adam(net), net)
        steps(net, optimizer)
        optimizer.finish()
        cluster.interrupt()
    clock = checkpoint_files.newest(tmp_path, 2)
    loaded = spectral(dtype)
    loaded.load_state_dict(load_file(whole_model.merge(tmp_path, clock, {})))
    assert np.array_equal(flat(loaded), flat(net)) and clock == STEPS
    plain = spectral(dtype)
    other = adam(plain)
    steps(plain, other)
    found = saved_state(tmp_path, adam(loaded), loaded)["state"]
    for mine, theirs in zip(found.values(), other.state_dict()["state"].values(), strict=True):
        assert torch.allclose(mine["exp_avg"], theirs["exp_avg"].to(mine["exp_avg"].dtype), atol=1e-5)


# What is rounded is told, what no optimizer steps is refused.


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_values_of_64_bits_are_rounded_and_that_is_told_once(
    dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    with run(Settings(sync="ssp")) as started:

        def script(worker: int) -> torch.Tensor:
            net = nn.Module()
            net.w = nn.Parameter(torch.full((3,), 1 + 2.0**-40, dtype=dtype))
            net.bias = nn.Parameter(torch.zeros(2))
            optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net)
            for _ in range(2):
                optimizer.zero_grad()
                (net.w.abs().sum() + net.bias.sum()).backward()
                optimizer.step()
            return net.w.detach().clone()

        (ended,) = started.together(script)
    assert ended.dtype is dtype and torch.equal(ended, torch.ones(3, dtype=dtype))
    assert capsys.readouterr().err.count("'w' has 64-bit values, which a run carries as float32") == 1


def _of(values: torch.Tensor) -> nn.Module:
    net = nn.Module()
    net.w = nn.Parameter(values)
    return net


def test_what_no_optimizer_steps_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, of complex halves
        half = torch.zeros(2, dtype=torch.complex32)
    for values, why in (
        (torch.zeros(2).to(torch.float8_e4m3fn), "'w' is float8_e4m3fn, and no optimizer of torch steps it"),
        (half, "'w' is complex32, and no optimizer of torch steps it"),
        (torch.eye(2).to_sparse(), "'w' is sparse_coo and not a dense tensor"),
        (torch.tensor([1 + 2j]).conj(), "'w' is a conjugate view and not a dense tensor"),
    ):
        with run(Settings(sync="ssp")):
            net = _of(values)
            with pytest.raises(UsageError, match=re.escape(why)):
                DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)


def test_a_table_of_rows_that_are_no_real_numbers_is_refused() -> None:
    net = nn.Module()
    net.table, net.head = Embedding(3, 2, dtype=torch.complex64), nn.Linear(2, 2)
    with (
        run(Settings(sync="ssp")),
        pytest.raises(UsageError, match="'table' is complex64, and the servers hold float32"),
    ):
        DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)


def test_a_plan_of_a_dtype_that_is_not_trained_is_refused() -> None:
    for dtype in ("int64", "float8_e5m2", "nothing"):
        plan = ModelSpec((TensorSpec("w", (2,), dtype),), "", ((0,),))
        with pytest.raises(RemoteProtocolError, match=f"tensor 'w' is {dtype}: a parameter is float16"):
            ModelSpec.unpacked(plan.packed())


# Buffers and frozen parameters.


def _kinds() -> dict[str, torch.Tensor]:
    """Two values of each dtype that travels as a buffer."""
    sizes = {name: (size, file) for name, (size, file, *_) in DTYPES.items() if file}
    assert {"bool", "int64", "float8_e4m3fn", "float64", "complex64"} <= sizes.keys()
    codes = {name: torch.arange(2 * size, dtype=torch.uint8) for name, (size, _) in sizes.items()}
    return {name: raw.view(getattr(torch, name)) for name, raw in codes.items()}


def test_each_buffer_arrives_bit_for_bit() -> None:
    sent, got = nn.Module(), nn.Module()
    for name, values in _kinds().items():
        sent.register_buffer(f"of_{name}", values)
        got.register_buffer(f"of_{name}", torch.zeros_like(values))
    sent.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
    got.register_buffer("conjugate", torch.zeros(1, dtype=torch.complex64).conj())
    load_buffers(got, pack_buffers(sent))
    for name, values in _kinds().items():
        assert torch.equal(got.get_buffer(f"of_{name}").view(torch.uint8), values.view(torch.uint8)), name
    assert got.get_buffer("conjugate").tolist() == [1 - 2j]


@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_does_not_travel_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("codes", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    net.register_buffer("graph", torch.eye(2).to_sparse())
    net.register_buffer("wide", torch.zeros(1, dtype=torch.complex128))
    net.register_buffer("own", torch.zeros(1, dtype=torch.complex128), persistent=False)
    with run(Settings(sync="ssp")):
        DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    err = capsys.readouterr().err
    for name, kind in (("codes", "qint8"), ("graph", "sparse_coo"), ("wide", "complex128")):
        assert err.count(f"the module buffer '{name}' is {kind}, which is not sent") == 1
    assert "'own'" not in err
    with pytest.raises(RemoteProtocolError):
        unpack_arrays(pack_arrays({"wide": ("complex128", (1,), bytes(16))}))


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_parameter_of_any_kind_has_a_digest_of_its_values() -> None:
    def quantized(value: float, scale: float) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.full((2,), value), scale, 0, torch.qint8)

    def sparse(value: float) -> torch.Tensor:
        return (torch.eye(2) * value).to_sparse()

    one = torch.tensor([1 + 2j])
    kinds = [
        [quantized(1.0, 0.1), quantized(2.0, 0.2)],  # whose codes are the same
        [sparse(1.0), sparse(2.0), (torch.eye(2) + 1).to_sparse()],
        [sparse(1.0).to_sparse_csr(), sparse(2.0).to_sparse_csr()],
        [sparse(1.0).to_sparse_csc(), sparse(2.0).to_sparse_csc()],
        [one, one.conj()],
        [one.imag, one.conj().imag],
        [torch.tensor([True]), torch.tensor([False])],
        [torch.tensor([1]), torch.tensor([2])],
        [torch.ones(1).to(torch.float8_e5m2), torch.zeros(1).to(torch.float8_e5m2)],
    ]
    for kind in kinds:
        digests = [fingerprint([values]) for values in kind]
        assert all(digests) and len(set(digests)) == len(kind), kind
        assert digests == [fingerprint([values]) for values in kind]


def test_the_docs_have_the_table_of_dtypes() -> None:
    text = (ROOT / "docs" / "script.md").read_text().partition("## Dtypes\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    documented = {name: cells[1:] for cells in rows for name in re.findall(r"`(\w+)`", cells[0])}
    assert documented.keys() == DTYPES.keys()
    for name, (parameter, buffer) in documented.items():
        dtype = DTYPES[name]
        assert parameter.startswith("refused" if not dtype.keys else "rounded" if dtype.rounded else "exact"), name
        assert ("two keys" in parameter) == (dtype.keys == 2), name
        assert buffer.startswith("exact" if dtype.file else "stays"), name
