"""The account of a worker's arrays (protocols/config/memory.py), beside the arrays that a worker has made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit.scripts import build, loss_of, run

from narrows.protocols.config.memory import ArrayFacts, worker_arrays
from narrows.protocols.config.settings import Settings
from narrows.worker import DistributedOptimizer
from narrows.worker.sync.updates import UpdateStep

STEPS = 6


def touched(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array of zeros has taken memory: the system gives pages as they are written."""
    return bool(array.any())


@pytest.mark.parametrize("compress", ["dense", "int8", "topk:0.5+int8"])
@pytest.mark.parametrize(
    "flags",
    [
        {"sync": "bsp"},
        {"sync": "bsp", "push": "update"},
        {"sync": "ssp"},
        {"sync": "ssp", "staleness": 3},
        {"sync": "ssp", "push": "gradient"},
        {"sync": "async"},
        {"sync": "local", "local_steps": 1},
        {"sync": "local", "local_steps": 1, "staleness": 2},
        {"sync": "local", "local_steps": 2, "fragments": 2},
    ],
    ids=lambda flags: " ".join(map(str, flags.values())),
)
def test_the_account_names_the_arrays_that_a_worker_has(flags: dict[str, Any], compress: str) -> None:
    settings = Settings(compress=compress, **flags)
    with run(settings) as started:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1), net)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, 0, 1).backward()
            optimizer.step()
        engine = optimizer._engine
        assert engine is not None and isinstance(engine.sync, UpdateStep)
        arrays, replicas, size = engine.sync.arrays, engine.sync.shards.replicas, engine.flat.size
        found = {
            "parameters": float(size),
            "gradients": float(sum(p.grad.numel() for p in net.parameters() if p.grad is not None)),
            "optimizer's state": float(
                sum(v.numel() for s in optimizer.inner.state.values() for v in s.values() if v.ndim)
            ),
            "pulled state": float(arrays.pulled.size) if touched(arrays.pulled) else 0.0,
            "replica": float(arrays.base.size) if arrays.base is not arrays.pulled and touched(arrays.base) else 0.0,
            "residual": float(sum(end - begin for each in replicas for begin, end, _ in each.residuals)),
            "raw updates": float(sum(buffer.size for buffer in arrays.ring if touched(buffer))),
        }
        codecs, mode = engine.tuning.codecs, started.cluster.settings.mode()
        facts = ArrayFacts(codecs.up.lossless, codecs.down.lossless, moments=2.0)
        account = {array.name: array.models * size for array in worker_arrays(mode, facts)}
        optimizer.finish()
    lent = {"raw updates"} if arrays.lends else set()  # of gradients only parts that cross a tensor's border are copied
    assert {name: models for name, models in found.items() if models and name not in lent} == {
        name: models for name, models in account.items() if name not in lent
    }


def test_bf16_and_clipping_take_arrays_of_their_own() -> None:
    mode = Settings(sync="ssp", staleness=1).validated().mode()
    plain = worker_arrays(mode, ArrayFacts(False, False))
    more = worker_arrays(mode, ArrayFacts(False, False, private=True, rounded=True))
    names = {array.name for array in more} - {array.name for array in plain}
    assert names == {"rounded replica", "raw updates"}
    assert worker_arrays(Settings(sync="gossip").validated().mode(), ArrayFacts(False, False)) == []
