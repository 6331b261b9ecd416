"""The arrays of a worker, without a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrows.compression import Memory, PayloadError, ladder
from narrows.compression.codecs import CODED, RAW, Piece
from narrows.worker.model.arrays import InPlaceArrays
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
