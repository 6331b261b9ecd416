"""The arrays of a worker, without a run."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from narrows.compression import ErrorFeedback, Memory, NonFiniteError, PayloadError, buffers, ladder, parse
from narrows.compression.buffers import ChunkedUpdate
from narrows.compression.codecs import CODED, RAW, Piece
from narrows.worker.model.arrays import InPlaceArrays, WorkerArrays
from narrows.worker.model.device_placement import device_home
from narrows.worker.model.flat import MANY, FlatModel, alike
from narrows.worker.model.not_finite import first_not_finite


@pytest.mark.parametrize(
    ("codec", "begin", "end"), [(RAW, 2, 6), (RAW, 4, 9), (CODED, 4, 8)], ids=["before", "after", "coded"]
)
def test_a_state_in_place_takes_plain_values_of_its_own_keys_alone(codec: int, begin: int, end: int) -> None:
    """A server that is not the one of these keys, or lies, must not write to the parameters of others."""
    net = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    shard = InPlaceArrays(4, 8, [], FlatModel(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    ones = np.ones(end - begin, np.float32)
    payload = (
        ones.tobytes() if codec == RAW else bytes(ladder("int8").compressor().contraction().encode(ones, Memory()))
    )
    with pytest.raises(PayloadError):
        shard.early(Piece(codec, begin, end, payload))
    assert not net.weight.any()
    shard.early(Piece(RAW, 4, 8, np.ones(4, np.float32).tobytes()))
    assert net.weight[0].tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize("shared", [False, True])
def test_a_state_is_folded_beside_the_script_unless_the_script_computes_on_it(shared: bool) -> None:
    """On a device a fold runs beside forward and backward passes (compression/cuda/streams.py)."""
    net = torch.nn.Linear(8, 1)
    flat = FlatModel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    home = device_home(torch.device("cpu"))
    held = WorkerArrays(flat, shared, False, 1, home=home)
    replica = held.replica(0, 9, [((0, 9), home.feedback(ladder("int8").compressor(), 9, 0))])
    with mock.patch.object(home, "aside", side_effect=home.aside) as aside:
        replica.absorb([Piece(RAW, 0, 9, np.ones(9, np.float32).tobytes())], add=False)
    assert aside.called is not shared and held.pulled.tolist() == [1.0] * 9


class Small(torch.nn.Module):
    """Many small tensors. `odd`: one of them is a bf16 one, and one has no gradient."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        sizes = [(1 + i % 5, 2) for i in range(3 * MANY)]
        self.each = torch.nn.ParameterList([torch.randn(*size, generator=generator) for size in sizes])
        for parameter in self.each:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if odd:
            self.each[20] = torch.nn.Parameter(torch.randn(3, generator=generator).bfloat16())
            self.each[30].grad = None


@pytest.mark.parametrize("odd", [False, True])
def test_many_small_tensors_are_copied_as_one_by_one(odd: bool) -> None:
    """Gradients, parameters and the check for NaN; also for keys that begin and end within a tensor."""
    model = Small(odd)
    flat = FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in flat.parameters]
    whole = torch.cat([each.float().flatten() for each in zeros]).numpy()
    assert alike([p.grad for p in flat.parameters]) is not odd
    rng = np.random.default_rng(0)
    for begin, end in ((0, flat.size), (3, flat.size - 1), (7, 12), (flat.offsets[5], flat.offsets[40])):
        out = np.full(end - begin, np.nan, np.float32)
        flat.read_gradients(begin, out)
        assert out.tobytes() == whole[begin:end].tobytes()
        before, versions = flat.copy(), [p._version for p in flat.parameters]
        flat.written()
        flat.write_keys(begin, values := rng.standard_normal(end - begin).astype(np.float32))
        before[begin:end] = values
        rounded = slice(flat.offsets[20], flat.offsets[21]) if odd else slice(0, 0)
        before[rounded] = torch.from_numpy(before[rounded]).bfloat16().float().numpy()
        assert flat.copy().tobytes() == before.tobytes() and not flat.overwritten()
        inside = [tensor for tensor, *_ in flat.within(begin, end)]
        assert all(
            (p._version > was) is (i in inside)
            for i, (p, was) in enumerate(zip(flat.parameters, versions, strict=True))
        )
    named = [(name, p.grad) for name, p in zip(flat.names, flat.parameters, strict=True) if p.grad is not None]
    assert not first_not_finite(named)
    assert named[40][1] is not None
    named[40][1][0, 1] = torch.inf
    assert first_not_finite(named) == named[40][0]
    named[40][1][0, 1] = 3e38  # its square is none of float32
    assert not first_not_finite(named)


class Mixed(torch.nn.Module):
    """Parameters of several dtypes and layouts: a bf16 one, a complex one, one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.plain = torch.nn.Parameter(torch.randn(50, 3, generator=generator))
        self.rounded = torch.nn.Parameter(torch.randn(70, generator=generator).bfloat16())
        self.turned = torch.nn.Parameter(torch.randn(6, 11, generator=generator).t())
        self.complex = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64, generator=generator))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 0])
@pytest.mark.parametrize("spec", ["topk:0.1+int8", "cycle:0.3+sign", "int4"])
def test_an_update_that_is_read_in_chunks_codes_as_its_array(
    spec: str, chunk: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk:  # else the update is small, and is read once
        monkeypatch.setattr(buffers, "CHUNK", chunk)
        monkeypatch.setattr(buffers, "READ_ONCE", 0)
    net = Mixed()
    flat = FlatModel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sent = []
    for lazy in (False, True):
        held = WorkerArrays(flat, shared=False, direct=False, rounds=1)
        feedback = ErrorFeedback(parse(spec), flat.size)
        replica = held.replica(*flat.keys, [(flat.keys, feedback)])
        flat.read_keys(0, held.start)
        held.start += np.random.default_rng(5).standard_normal(flat.size).astype(np.float32)
        pieces: list[tuple[int, bytes]] = []
        for clock in range(3):
            moved = held.moved(flat.keys, clock, lazy)
            coded = replica.encode(moved, clock, last=last and clock == 2)
            pieces += [(piece.codec, bytes(piece.payload)) for piece in coded]
            if last and clock == 2:
                replica.sent_last(clock)
            assert held.where_not_finite(0, moved) == "the residual"
        assert isinstance(moved, ChunkedUpdate) == lazy
        sent.append((pieces, replica.held_back, feedback.residual.tobytes() if feedback.residual is not None else b""))
        assert not last or not np.any(feedback.residual)
    assert sent[0] == sent[1]


def test_an_update_in_chunks_that_is_not_finite_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "CHUNK", 16)
    monkeypatch.setattr(buffers, "READ_ONCE", 0)
    net = Mixed()
    flat = FlatModel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    held = WorkerArrays(flat, shared=False, direct=False, rounds=1)
    feedback = ErrorFeedback(parse("int8"), flat.size)
    replica = held.replica(*flat.keys, [(flat.keys, feedback)])
    replica.encode(held.moved(flat.keys, 0, lazy=True), 0)
    assert feedback.residual is not None
    before = feedback.residual.copy()
    with torch.no_grad():
        net.turned[3, 2] = torch.inf
        net.complex[8] = torch.tensor(complex(0, torch.nan))
    for last in (False, True):
        with pytest.raises(NonFiniteError, match=f"2 of {flat.size} values are NaN or infinite, the first .* at index"):
            replica.encode(held.moved(flat.keys, 1, lazy=True), 1, last)
        np.testing.assert_array_equal(feedback.residual, before)
    assert held.where_not_finite(0, held.moved(flat.keys, 1, lazy=True)) == "'turned'"
