"""Embedding tables on the servers: rows travel as rows, and are stepped as torch.optim steps sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit import in_process
from kit.embedding_model import DIM, OPTIMIZERS, ROWS, Bags, alone, batch, loss_of, slower
from kit.scripts import Run, run, tree
from torch import nn

from narrows.compression import codecs, rows
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import MemberEffect, Send
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.wire import pack
from narrows.ps.journal.machine_pickling import freeze, thaw
from narrows.worker import DistributedOptimizer
from narrows.worker.model import embedding

STEPS = 12
Ends = list[tuple[torch.Tensor, torch.Tensor]]


def whole_of(model: Bags, optimizer: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
    """The table and the head of the shared model."""
    with optimizer.shared(), torch.no_grad():
        return model.table(torch.arange(ROWS)), model.head.weight.clone()


def trained(kind: str, settings: Settings, between: Callable[[Run, int, int], None] = lambda *_: None) -> Ends:
    """Train, and return what each worker ends with. between(run, worker, step): called before each step."""

    def script(worker: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = Bags()
        assert not model.table.weight.numel(), "no worker holds the table"
        each = OPTIMIZERS[kind](model)
        optimizer = DistributedOptimizer(each if len(each) > 1 else each[0], model)
        for step in range(STEPS):
            between(started, worker, step)
            optimizer.zero_grad()
            slower(optimizer)
            torch.autograd.backward(loss_of(model, step, worker, settings.workers))
            if step % 2:
                model.table.prefetch(batch(step + 1)[0][worker :: settings.workers])
            optimizer.step()
        ends = whole_of(model, optimizer)
        optimizer.finish()
        with pytest.raises(UsageError, match=r"model\.safetensors"):
            model(batch(0)[0])
        return ends

    with pytest.MonkeyPatch.context() as patch, run(settings) as started:
        patch.setattr(embedding, "of_run", lambda: True)
        return cast(Ends, started.together(script))


def check_ends(ends: Ends, kind: str, lost: int = -1) -> None:
    """They are those of one process on the whole batch."""
    model = alone(kind, STEPS, lost=lost)
    for table, head in ends:
        assert torch.allclose(table, model.table.weight, atol=2e-6)
        assert torch.allclose(head, model.head.weight, atol=2e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("push", ["gradient", "update"])
def test_bsp_is_one_process_on_the_whole_batch(kind: str, push: str) -> None:
    check_ends(trained(kind, Settings(sync="bsp", push=push, workers=2, shards=3)), kind)


def test_what_is_repeated_or_overtaken_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message of a worker comes twice, the parts of a push in the wrong order."""
    deliver, twice = in_process.Link.deliver, [0]

    def shaken(link: in_process.Link, effects: Sequence[MemberEffect]) -> None:
        again = [
            effect
            for effect in effects
            if isinstance(effect, Send) and isinstance(effect.message, m.Push | m.RowsRequest)
        ]
        twice[0] += len(again)
        deliver(link, [*again[::-1], *effects])

    monkeypatch.setattr(in_process.Link, "deliver", shaken)
    check_ends(trained("SparseAdam", Settings(sync="bsp", workers=2, shards=2)), "SparseAdam")
    assert twice[0] > 4 * STEPS


@pytest.mark.parametrize(
    ("spec", "up", "down"), [("int8", 2, 0), ("bf16+lz4", 3, 0), ("fp16", 1, 2), ("topk:0.5+int8", 0, 2)]
)
def test_rows_are_coded_as_the_run_is_where_that_keeps_every_value(
    spec: str, up: int, down: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, seen = in_process.Link.deliver, {"up": set[int](), "down": set[int]()}

    def looked(link: in_process.Link, effects: Sequence[MemberEffect]) -> None:
        said = [effect.message for effect in effects if isinstance(effect, Send)]
        seen["up"] |= {rows.decode(p.payload).coding for p in said if isinstance(p, m.Push) and p.codec == codecs.ROWS}
        seen["down"] |= {rows.decode(ask.payload).coding for ask in said if isinstance(ask, m.RowsRequest)}
        deliver(link, effects)

    monkeypatch.setattr(in_process.Link, "deliver", looked)
    settings = Settings(sync="bsp", push="update", workers=2, shards=2, compress=spec)
    ends = trained("SGD", replace(settings, compress_down="int8") if down else settings)
    model = alone("SGD", STEPS)
    assert seen == {"up": {up}, "down": {down}}
    assert torch.equal(ends[0][0], ends[1][0])
    far = (ends[0][0] - model.table.weight).abs().max()
    assert 0 < far < (0.2 if "topk" in spec else 0.05)


def test_a_shard_that_is_thawed_goes_on_with_its_rows(tmp_path: Path) -> None:
    """Its machine is written and read between two events, as a journal does it."""
    thawed = []

    def between(started: Run, worker: int, step: int) -> None:
        with started.cluster.changed:
            index = (step + worker) % 2
            server = started.cluster.servers[index]
            assert server.shard.model_shard is not None
            with open(tmp_path / "machine", "w+b") as file:
                lent = server.shard.model_shard.store.lent
                freeze(server, file, lent)
                file.seek(0)
                started.cluster.servers[index] = thaw(file, lent)
        thawed.append(index)

    check_ends(trained("Adagrad", Settings(sync="bsp", workers=2, shards=2), between), "Adagrad")
    assert len(thawed) == 2 * STEPS


def test_who_joins_again_asks_again_and_drops_what_it_computed() -> None:
    """Its lease runs out while rows are on their way that it has asked for in advance."""
    ends = trained(
        "SGD", Settings(sync="bsp", shards=2), lambda started, _, step: started.expire(0) if step == 6 else None
    )
    check_ends(ends, "SGD", lost=6)


def test_a_cluster_below_another_has_no_tables() -> None:
    root = in_process.Cluster(Settings(sync="ssp"))
    below = in_process.Cluster(Settings(sync="bsp"), root, "below")
    with pytest.MonkeyPatch.context() as patch, tree(root, below) as started:
        patch.setattr(embedding, "of_run", lambda: True)
        model = Bags()
        with pytest.raises(RuntimeError, match="leave out --parent"):
            started.together(lambda _: DistributedOptimizer(OPTIMIZERS["SGD"](model), model))


def loss_after(settings: Settings, steps: int = 150) -> float:
    """At the end of a run, on batches that it was not trained on, of bags that a planted table explains."""
    planted = torch.Generator().manual_seed(8)
    truth = torch.randn(ROWS, generator=planted)

    def wanted(indices: torch.Tensor) -> torch.Tensor:
        return torch.tanh(truth[indices].sum(1))

    def script(worker: int) -> float:
        model = Bags()
        optimizer = DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model)
        for step in range(steps):
            indices = batch(step)[0][worker :: settings.workers]
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(indices), wanted(indices)))
            optimizer.step()
        with optimizer.shared(), torch.no_grad():
            indices = torch.cat([batch(step)[0] for step in range(200, 220)])
            loss = nn.functional.mse_loss(model(indices), wanted(indices)).item()
        optimizer.finish()
        return loss

    with pytest.MonkeyPatch.context() as patch, run(settings) as started:
        patch.setattr(embedding, "of_run", lambda: True)
        return max(cast(list[float], started.together(script)))


def test_late_and_sparse_updates_beside_rows_train_as_well() -> None:
    untrained, one = loss_after(Settings(sync="bsp"), steps=0), loss_after(Settings(sync="bsp"))
    two = loss_after(Settings(sync="ssp", compress="topk:0.2+int8", workers=2, shards=2))
    assert untrained - two >= 0.98 * (untrained - one) > 0.3


HERE = 31  # rows of the table on shard 0 of 2


def payload(table: int = 0, count: int = HERE, last: int = 3, dim: int = DIM, value: float = 1.0) -> bytes:
    indices = np.array([0, last], np.uint32)
    return rows.encode(table, count, indices, np.full((2, dim), value, np.float32) if dim else None)


RATES = pack([b"", [], pack([{"lr": 0.1, "eps": 1e-10, "initial_accumulator_value": 0.01}])])
BAD: dict[str, dict[str, Any]] = {
    "the model has 1 tables": {"payload": payload(table=1)},
    "this shard has 31 of 5": {"payload": payload(count=ROWS, last=ROWS - 1)},
    "20 values": {"payload": payload(dim=20)},
    "truncated": {"payload": payload()[:10]},
    "corrupt": {"payload": payload()[:40]},
    "have no keys": {"begin": 0},
    "lr=nan": {"part": 0, "hyper": RATES.replace(pack(0.1), pack(float("nan")))},
    "one map for each of 1 tables": {"part": 0, "hyper": pack([b"", [], pack([])])},
}
BAD_ASKS = {
    "an invalid payload": payload(dim=0)[:-1],
    "the model has 1 tables": payload(table=1, dim=0),
    "2 of 31 rows of 5 values": payload(),
}


def test_what_names_no_row_is_refused_and_changes_nothing() -> None:
    """Said by a member, in the middle of a run that goes on."""
    found = []

    def between(started: Run, worker: int, step: int) -> None:
        if worker or step != 3:
            return
        with started.cluster.changed:
            server = started.cluster.servers[0]
            seat, planned = server.shard.assembler.seats[0], server.shard.model_shard
            assert planned is not None
            end = planned.store.whole[1]
            plain = {"part": 1, "parts": 2, "begin": end, "end": end, "samples": 1, "hyper": b"", "codec": codecs.ROWS}
            said: list[tuple[str, m.Message]] = [
                (
                    why,
                    m.Push(
                        **{
                            "worker": 0,
                            "epoch": seat.epoch,
                            "clock": seat.clock,
                            "payload": payload(),
                            **plain,
                            **change,
                        }
                    ),
                )
                for why, change in BAD.items()
            ]
            said += [(why, m.RowsRequest(0, seat.epoch, 999, 0, asked)) for why, asked in BAD_ASKS.items()]
            for why, message in said:
                with pytest.raises(RemoteProtocolError, match=why):
                    server.handle(seat.peer, message, 0)
                found.append(why)
            assert not seat.partial

    check_ends(trained("Adagrad", Settings(sync="bsp", push="update", workers=2, shards=2), between), "Adagrad")
    assert found == [*BAD, *BAD_ASKS]


@pytest.mark.parametrize(("flags", "why"), [
    ({"sync": "gossip"}, "--sync gossip pushes no gradient"),
    ({"sync": "local"}, "--sync local pushes no gradient"),
    ({"sync": "ssp", "max_update_norm": 3.0}, "--max-update-norm looks at keys alone"),
    ({"sync": "ssp", "robust": "cosine", "workers": 3}, "--robust compares"),
    ({"sync": "ssp", "dp_clip": 1.0}, "--dp-clip"),
])  # fmt: skip
def test_a_run_that_cannot_have_tables_says_so_at_the_start(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        trained("SGD", Settings(**flags))


@pytest.mark.parametrize(("make", "why"), [
    (lambda model: (torch.optim.AdamW(model.parameters()), {}), "AdamW cannot step the rows"),
    (lambda model: (torch.optim.SGD(model.parameters(), momentum=0.9), {}), "momentum=0.9 does not allow"),
    (lambda model: (torch.optim.SGD(model.head.parameters()), {}), "no optimizer steps embedding table 'table'"),
    (lambda model: (torch.optim.SGD(model.table.parameters()), {}), "beside its embedding tables"),
    (lambda model: (torch.optim.SGD(model.parameters()), {"max_grad_norm": 1.0}), "max_grad_norm is of dense gradients"),
    (lambda model: (torch.optim.SGD(model.parameters()), {"overlap": True}), "leave before it is known which rows"),
])  # fmt: skip
def test_a_script_that_rows_cannot_follow_is_told(make: Callable[[Bags], tuple[Any, dict[str, Any]]], why: str) -> None:
    def script(worker: int) -> None:
        model = Bags()
        with pytest.raises(UsageError, match="before the first forward"):
            model(batch(0)[0])
        inner, more = make(model)
        with pytest.raises(UsageError, match=why):
            DistributedOptimizer(inner, model, **more)

    with pytest.MonkeyPatch.context() as patch, run(Settings(sync="bsp")) as started:
        patch.setattr(embedding, "of_run", lambda: True)
        started.together(script)
