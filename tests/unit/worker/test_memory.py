"""The account of a worker's arrays (protocols/config/memory.py), beside the arrays that a worker has made."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from kit.scripts import build, loss_of, run

from narrows.compression import Memory
from narrows.compression.device.home import DeviceHome
from narrows.compression.device.host import HostKernels
from narrows.compression.home import HOST
from narrows.compression.ladder import Codecs
from narrows.protocols import messages as m
from narrows.protocols.config.memory import (
    FREED_HERE,
    ArrayFacts,
    ShardFacts,
    crossing,
    device_arrays,
    shared_arrays,
    worker_arrays,
)
from narrows.protocols.config.settings import Settings
from narrows.protocols.gossip.mixing import Mixing
from narrows.protocols.gossip.outer_momentum import outer
from narrows.protocols.wire import FRAME_VALUES
from narrows.worker import DistributedOptimizer
from narrows.worker.sync.gossip import GossipStep
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
        facts = ArrayFacts.of(started.cluster.settings, codecs, 2.0)
        account = {array.name: array.models * size for array in worker_arrays(mode, facts)}
        assert account.pop("received state", 0.0) == size * (codecs.down.lossless and not arrays.direct)  # of payloads
        assert all(each.in_place == arrays.direct for each in started.sessions[0].link.member.sessions)
        for row in ("coded updates", "scratch", "freed messages"):  # no arrays that stay
            account.pop(row, None)
        optimizer.finish()
    if arrays.lends:  # of gradients only parts that cross a tensor's border are copied
        account.pop("raw updates", 0.0)
        assert found.pop("raw updates") == 0
        assert all(end - begin == array.size for (_, begin, end), array in arrays.unlent.items())
    assert {name: models for name, models in found.items() if models} == account


def test_only_parts_that_cross_a_border_of_tensors_are_copied() -> None:
    """The gradients of all other parts are lent to the link."""
    frame = FRAME_VALUES
    assert crossing([2 * frame] * 8, 1) == crossing([2 * frame] * 8, 4) == 0
    assert crossing([2 * frame] * 3, 4) == pytest.approx(1 / 6), "the second shard begins in the midst of a tensor"
    assert crossing([7, 9, 0, 5], 1) == 1 and crossing([frame, 7, 9], 1) == pytest.approx(16 / (frame + 16))
    mode, facts = Settings(sync="bsp").validated().mode(), ArrayFacts(True, True, copied=0.25)
    taken = {array.name: array.models for array in worker_arrays(mode, facts)}
    assert taken == {"parameters": 1, "gradients": 1, "raw updates": 0.25, "freed messages": FREED_HERE}
    private = {array.name: array.models for array in worker_arrays(mode, facts._replace(private=True))}
    assert private["raw updates"] == 1, "noise changes what is sent"


@pytest.mark.parametrize(("flags", "mib", "wanted"), [
    ({"sync": "bsp", "workers": 2}, 40, [1, 2 * 4 * 3 / 2]),  # AdamW: three arrays of the model
    ({"sync": "bsp", "workers": 4}, 8, [1, 2 * 128 / 8 / 4]),
    ({"sync": "bsp", "workers": 2}, 1000, [1, 0.512]),  # as many as one worker may have there
    ({"sync": "bsp", "workers": 2, "push": "update"}, 100, [1]),
    ({"sync": "ssp", "compress": "topk:0.05+int8"}, 100, [0.0223]),
    ({"sync": "gossip"}, 100, []),
    ({"sync": "bsp", "workers": 2}, 1 / 32, []),  # a smaller frame goes through the socket
])  # fmt: skip
def test_a_worker_beside_its_server_has_pushes_in_shared_memory(
    flags: dict[str, Any], mib: float, wanted: list[float]
) -> None:
    settings = Settings(**flags).validated()
    facts = ShardFacts.of(settings, Codecs.of(settings.compress, settings.compress_down), 2.0)
    found = [row.models for row in shared_arrays(settings.mode(), facts, 1, int(mib * (1 << 20)))]
    assert found == pytest.approx(wanted, rel=1e-2)
    bare = shared_arrays(settings.mode(), facts._replace(journal=False), 1, int(mib * (1 << 20)))
    assert [row.models for row in bare] == pytest.approx(wanted[:1], rel=1e-2)


def test_bf16_and_clipping_take_arrays_of_their_own() -> None:
    mode = Settings(sync="ssp", staleness=1).validated().mode()
    plain = worker_arrays(mode, ArrayFacts(False, False))
    more = worker_arrays(mode, ArrayFacts(False, False, private=True, rounded=True))
    names = {array.name for array in more} - {array.name for array in plain}
    assert names == {"rounded replica", "raw updates"}


@pytest.mark.parametrize("compress", ["dense", "int8", "topk:0.5+int8"])
@pytest.mark.parametrize(
    "flags",
    [
        {"workers": 2},
        {"workers": 3, "topology": "ring", "staleness": 0},
        {"workers": 2, "local_steps": 16},
    ],
    ids=lambda flags: " ".join(map(str, flags.values())),
)
def test_the_account_names_the_arrays_of_gossip(flags: dict[str, Any], compress: str) -> None:
    settings = Settings(sync="gossip", compress=compress, **flags).validated()

    def script(worker: int) -> tuple[dict[str, float], dict[str, float]]:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1), net)
        for step in range(settings.local_steps * STEPS):
            optimizer.zero_grad()
            loss_of(net, step, worker, settings.workers).backward()
            optimizer.step()
        engine = optimizer._engine
        assert engine is not None and isinstance(engine.sync, GossipStep)
        arrays, mixing, size = engine.sync.arrays, engine.sync.driver.mixing, engine.flat.size
        own = {id(pieces): pieces for whole, pieces in mixing.sent.values() if whole}
        offers = [*own.values(), *([mixing.raw] if mixing.raw is not None and id(mixing.raw) not in own else [])]
        assert not any(
            x.residuals and any(touched(kept) for *_, kept in x.residuals) for x in engine.sync.shards.replicas
        )
        assert mixing.first is arrays.pulled and (mixing.compressor is not None or mixing.model is arrays.pulled)
        found = {
            "model": float(mixing.model.size),
            "replica": float(arrays.base.size) if arrays.base is not arrays.pulled and touched(arrays.base) else 0.0,
            "references": float(sum(each.size for each in mixing.references.values()))
            + (mixing.first.size if mixing.first is not mixing.model else 0.0),
            "outer momentum": float(mixing.outer.velocity.size) if mixing.outer is not None else 0.0,
        }
        assert sum(len(piece.payload) for pieces in offers for piece in pieces) <= 4 * size, "one copy for all peers"
        codecs = engine.tuning.codecs
        facts = ArrayFacts.of(settings, codecs, 2.0)
        account = {array.name: array.models * size for array in worker_arrays(settings.mode(), facts)}
        assert account.pop("parameters") == account.pop("gradients") == account.pop("optimizer's state") / 2 == size
        assert account.pop("offers") == pytest.approx(facts.up * size * 3)
        assert account.pop("scratch") == size * (1 + max(mixing.outer is not None, facts.coding))
        del account["freed messages"]
        optimizer.finish()
        return {name: models for name, models in found.items() if models}, account

    with run(settings) as started:
        for found, account in started.together(script):
            assert found == account


@pytest.mark.parametrize("compress", ["dense", "topk:0.5+int8"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_a_round_of_gossip_takes_the_scratch_of_the_account(compress: str, momentum: float) -> None:
    size, settings = 1 << 20, Settings(sync="gossip", workers=2, outer_lr=1.0, outer_momentum=momentum).validated()
    compressor = Codecs.of(compress, "dense").up.mixer()
    pair = [Mixing(0, size, compressor, HOST, lambda: Memory(seed=1), None, outer(settings)) for _ in range(2)]
    weights = np.random.default_rng(1).normal(size=size).astype(np.float32)

    def exchange(number: int) -> None:
        sides = []
        for each in pair:
            whole, pieces = each.offer(1 - pair.index(each), number, False, False)
            count = len(pieces)
            sides.append(
                tuple(
                    m.Offer(
                        pair.index(each), 0, 1, 1, number, i, count, p.begin, p.end, 0.5, whole, p.codec, p.payload, b""
                    )
                    for i, p in enumerate(pieces)
                )
            )
        for mine, each in enumerate(pair):
            each.mix(mine, 1 - mine, 0.5, sides[1 - mine])

    for each in pair:
        each.start(weights.copy())
        each.absorb(weights * 0.1, 2)
    exchange(0)
    gc.collect()
    tracemalloc.start()
    try:
        for each in pair:
            each.absorb(np.full(size, 0.1, np.float32), 2)
        exchange(1)
        peak = tracemalloc.get_traced_memory()[1] / 4 / size
    finally:
        tracemalloc.stop()
    raw = 2 if compressor is None else 0.6  # each side's offer, of which an int8 of half the values is 1 / 8
    coding = 0.0 if compressor is None else compressor.contraction().scratch_bytes_max(size) / 4 / size
    assert peak <= raw + 1 + (momentum > 0) + coding + 0.1, "scratch of one, or of two with an outer step"


@pytest.mark.parametrize("compress", ["dense", "int8", "topk:0.5+int8"])
@pytest.mark.parametrize(
    "flags",
    [
        {"sync": "bsp", "push": "update"},
        {"sync": "ssp"},
        {"sync": "ssp", "push": "gradient"},
        {"sync": "local", "local_steps": 1},
        {"sync": "local", "local_steps": 2, "fragments": 2},
        {"sync": "gossip", "workers": 1},
    ],
    ids=lambda flags: " ".join(map(str, flags.values())),
)
def test_the_account_names_the_arrays_of_a_device(
    flags: dict[str, Any], compress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the arrays that a home makes; codes and scratch memory are others, by the kernels."""
    monkeypatch.setenv("NARROWS_ARRAYS", "device")
    made: dict[int, int] = {}  # id -> values of an array that is there
    zeros, allocated = DeviceHome.__init__, HostKernels.zeros

    def counted(array: Any) -> Any:
        owner = array.numpy() if isinstance(array, torch.Tensor) else array
        made[id(owner)] = owner.size
        weakref.finalize(owner, made.pop, id(owner), None)
        return array

    def begun(home: Any, kernels: Any, _make: Any, name: str) -> None:
        zeros(home, kernels, lambda count: torch.from_numpy(counted(np.zeros(count, np.float32))), name)

    def given(kernels: Any, count: int, dtype: Any) -> Any:
        array = allocated(kernels, count, dtype)
        return counted(array) if np.dtype(dtype) == np.float32 else array

    monkeypatch.setattr(DeviceHome, "__init__", begun)
    monkeypatch.setattr(HostKernels, "zeros", given)
    with run(Settings(compress=compress, **flags)) as started:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1), net)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, 0, 1).backward()
            optimizer.step()
        engine = optimizer._engine
        assert engine is not None and engine.home.name == "cpu as a device"
        gc.collect()
        there, size = sum(made.values()), engine.flat.size
        facts = ArrayFacts.of(started.cluster.settings, engine.tuning.codecs, 2.0)
        account = {array.name: array.models for array in device_arrays(started.cluster.settings.mode(), facts)}
        optimizer.finish()
    for name in ("codes", "scratch", "mixing", "sum", "references"):
        account.pop(name, None)
    extra = (
        "gossip" in flags.values() and compress != "dense"
    )  # the first weights, which the first partner's reference begins with
    assert there == size * (sum(account.values()) + extra)
