"""The account of the shards' arrays (protocols/config/memory.py), beside the arrays that shards have made."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, store_of
from kit.scripts import loss_of, run, seeded, tree
from kit.specs import MODES, NO_QUORUM
from torch import nn

from narrows.compression import codecs, ladder
from narrows.compression.buffers import CHUNK
from narrows.compression.ladder import Codecs
from narrows.protocols.config.memory import ArrayFacts, ModelArray, ShardFacts, machine_arrays, shard_arrays
from narrows.protocols.config.settings import Settings
from narrows.ps.journal import machine_pickling
from narrows.ps.server.server import Server
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.store import reduction
from narrows.ps.store.changes import Change, Fold, OuterStep, Publish, SetFirstWeights
from narrows.ps.store.store import Store, assume_lent
from narrows.worker import DistributedOptimizer

STEPS, WORKERS, SHARDS, HIDDEN = 8, 2, 2, 6000
LEAST = 5000  # values; the samples of a gain have fewer
SPECS = ("dense", "int8", "topk:0.5+int8")


class ArraySizes(machine_pickling._Pickler):
    """Counts the float32 values of a machine that lie in arrays of at least LEAST."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), assume_lent, None)
        self.found = dict[int, int]()

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, np.ndarray) and found.dtype == np.float32 and found.size >= LEAST:
            self.found[found.__array_interface__["data"][0]] = found.size
        return super().reducer_override(found)


def values_of(server: Server) -> int:
    counter = ArraySizes()
    counter.dump(server)
    return sum(counter.found.values())


def trained(worker: int) -> tuple[DistributedOptimizer, int]:
    net = seeded(lambda: nn.Sequential(nn.Linear(9, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 5)))
    optimizer = DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, worker, WORKERS).backward()
        optimizer.step()
    return optimizer, sum(p.numel() for p in net.parameters())


def facts_of(settings: Settings, **more: Any) -> ShardFacts:
    both = Codecs.of(settings.compress, settings.compress_down, settings.mode().push != "gradient")
    return ShardFacts.of(settings, both, 2.0)._replace(**more)


def models(rows: list[ModelArray], *names: str) -> dict[str, float]:
    return {row.name: row.models for row in rows if row.name in names or not names}


@pytest.mark.parametrize("compress", SPECS)
@pytest.mark.parametrize("mode", NO_QUORUM)  # nothing ticks here, so a quorum may wait for ever
def test_the_account_names_the_arrays_that_shards_have(
    mode: str, compress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(**MODES[mode], compress=compress, workers=WORKERS, shards=SHARDS).validated()
    close, held = FoldAtBarrier.close, [0]

    def counted(self: FoldAtBarrier, *arguments: Any) -> Any:
        pushes = [push for by_worker in self.held.values() for update in by_worker.values() for push in update]
        held.append(sum(len(push.payload) for push in pushes))
        return close(self, *arguments)

    monkeypatch.setattr(FoldAtBarrier, "close", counted)
    with run(settings) as started:
        ended = started.together(trained)
        size, stores = ended[0][1], [store_of(server) for server in started.cluster.servers]
        values = sum(map(values_of, started.cluster.servers))
        found = {
            "weights": sum(store.x.size for store in stores),
            "published weights": sum(store.p.size for store in stores if store.p is not store.x),
            "optimizer's state": sum(
                v.size for s in stores if s.optimizer is not None for v in s.optimizer.state().values()
            ),
            "outer momentum": sum(store.momentum.size for store in stores if store.momentum is not None),
            "mean": sum(store.mean.total.size for store in stores if store.mean.total is not None),
            "kept differences": sum(len(raw or b"") for s in stores for _, raw in s.deltas.values()) / 4,
            "pushes": SHARDS * max(held) / 4,
        }
        started.together(lambda worker: ended[worker][0].finish())
    account = models(machine_arrays(settings.mode(), facts_of(settings)))
    late = account.pop("kept differences", 0.0), account.pop("pushes", 0.0)
    assert {name: n for name, n in found.items() if n and name in account} == {
        name: pytest.approx(n * size, rel=0.01) for name, n in account.items()
    }
    kept = sum(models for name, models in account.items() if name != "mean")  # which is made again of what was pushed
    assert values == pytest.approx(kept * size, rel=0.01), "no other array"
    assert (late[0] > 0) == (found["kept differences"] > 0) and found["kept differences"] <= late[0] * size * 1.01
    if settings.mode().barrier:
        assert found["pushes"] == pytest.approx(late[1] * size, rel=0.05)


@pytest.mark.parametrize("compress", SPECS)
@pytest.mark.parametrize("mode", ["ssp", "local"])
def test_a_fold_and_a_publication_take_the_scratch_of_the_account(
    mode: str, compress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "PART_VALUES", 1 << 14)
    size, settings = 1 << 22, Settings(**MODES[mode], compress=compress).validated()
    barrier, codings = settings.mode().barrier, ladder(settings.compress_down)
    store = Store(0, size, barrier=barrier, codings=codings, outer=(0.7, 0.6) if barrier else None, lent=lambda: False)
    whole = codecs.raw_pieces(np.random.default_rng(0).normal(size=size).astype(np.float32), 0, [(0, size)])
    store.apply(SetFirstWeights(whole))
    terms = ((1.0, whole),)
    change: Change = OuterStep(terms, (0, size)) if barrier else Fold(terms, ((0, 1.0),), b"")
    for each in (change, Publish(None, "")):
        store.apply(each)
    taken = 0
    tracemalloc.start()
    try:
        for each in (change, Publish(None, "")):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            store.apply(each)
            peak = tracemalloc.get_traced_memory()[1] - before
            coded = store.deltas.get(store.publication, (None, None))[1]
            if isinstance(each, Publish) and coded is not None and codings.sparse:
                # the memory of places and values that are kept is not freed
                peak += 8 * int(np.frombuffer(coded[8:12], np.uint32)[0])
            taken = max(taken, peak)
    finally:
        tracemalloc.stop()
    account = models(shard_arrays(settings.mode(), facts_of(settings))).get("scratch", 0.0)
    assert taken / 4 / size == pytest.approx(account, rel=0.05, abs=0.05 + 2 * CHUNK / size)


@pytest.mark.parametrize("compress", SPECS)
@pytest.mark.parametrize(
    "above", [{"sync": "ssp"}, {"sync": "local", "local_steps": 2}, {"sync": "gossip"}], ids=lambda flags: flags["sync"]
)
def test_the_account_names_what_a_cluster_keeps_of_its_parent(above: dict[str, Any], compress: str) -> None:
    ours = Settings(**above, compress=compress, workers=2).validated()
    root = Cluster(ours)
    below = [Cluster(Settings(sync="bsp", workers=1), root, f"cluster-{index + 1}") for index in range(2)]
    with tree(root, *below) as started:
        ended = started.together(trained)
        size = ended[0][1]
        found = [values_of(cluster.servers[0]) for cluster in below]
        started.together(lambda worker: ended[worker][0].finish())
    both, settings = Codecs.of(ours.compress, ours.compress_down), below[0].settings
    child = ArrayFacts.of(ours, both, 0.0)
    account = models(machine_arrays(settings.mode(), facts_of(settings, parent=(ours.mode(), child))))
    # Payloads come and go, and a mean is made again of them.
    for row in ("mean", "pushes", "parent's raw updates", "parent's offers"):
        account.pop(row, None)
    for values in found:
        assert values == pytest.approx(sum(account.values()) * size, rel=0.01)
