"""The arrays of a worker, without a run."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from narrows.compression import Memory, PayloadError, ladder
from narrows.compression.codecs import CODED, RAW, Piece
from narrows.worker.model.arrays import InPlaceArrays, WorkerArrays
from narrows.worker.model.device_placement import device_home
from narrows.worker.model.flat import FlatModel


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
    arrays = WorkerArrays(flat, shared, False, 1, home=home)
    replica = arrays.replica(0, 9, [((0, 9), home.feedback(ladder("int8").compressor(), 9, 0))])
    with mock.patch.object(home, "aside", side_effect=home.aside) as aside:
        replica.absorb([Piece(RAW, 0, 9, np.ones(9, np.float32).tobytes())], add=False)
    assert aside.called is not shared and arrays.pulled.tolist() == [1.0] * 9
