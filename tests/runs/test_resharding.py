"""The keys of a run are cut anew while it trains: no update is lost, and none is folded twice."""

from __future__ import annotations

import errno
import os
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from kit import one_process as alone
from kit.on_disk import OnDisk
from kit.one_process import ADAMW, until
from kit.scripts import Array, build, distance

from narrows.compression.buffers import chunks_of
from narrows.compression.codecs import add
from narrows.compression.replica import ArrayReplica
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Log, MemberResharded, Send
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member
from narrows.ps.checkpoints import checkpoint_writer
from narrows.ps.checkpoints.checkpoint_files import ComingCheckpoint
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.shard.model_shard import ModelShard

pytestmark = pytest.mark.usefixtures("one_thread")

CLOCKS = 12
MOVES = {4: 3, 8: 2}  # by the clock of the first worker
PLANS: dict[int, Any] = {3: {"sync": "bsp"}, 7: {"sync": "ssp", "staleness": 3, "compress": "topk:0.1+sign"}}


def trained(settings: Settings, folder: Path, moves: dict[int, Any], shards: int = 2, **more: Any) -> Array:
    """The model that all workers end with; the keys are with so many shards by then. `moves`: as in `OnDisk.changing`."""
    cluster, steps = OnDisk(settings, folder), CLOCKS * settings.validated().mode().local_steps
    model = alone.trained(settings, ADAMW, until(steps, cluster.changing(moves)), cluster=cluster, **more)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None and coordinator.run.shards == shards
    return model


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ({}, {}),
        ({}, {"overlap": True}),
        ({"push": "update", "update_gain": 1.0}, {"max_grad_norm": 1.0}),  # a gain is measured by each shard
        ({"sync": "local", "local_steps": 2, "outer_momentum": 0.5}, {}),
    ],
)
def test_with_a_barrier_it_is_the_undisturbed_run(flags: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    known: dict[str, Any] = {"sync": "bsp", "workers": 2, "shards": 2}
    settings = Settings(**known | flags)
    moved = trained(settings, tmp_path / "a", MOVES, **more)
    assert distance(moved, trained(settings, tmp_path / "b", {}, **more)) < 1e-6


def test_a_disk_that_refuses_leaves_the_keys_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(ComingCheckpoint):
        def __init__(self, folder: Path, shard: int, *rest: Any) -> None:
            if shard == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().__init__(folder, shard, *rest)

    settings = Settings(sync="bsp", workers=2, shards=2)
    undisturbed = trained(settings, tmp_path / "a", {})
    monkeypatch.setattr(checkpoint_writer, "ComingCheckpoint", Refusing)
    assert distance(trained(settings, tmp_path / "b", {4: 3}), undisturbed) < 1e-6


@pytest.mark.parametrize(("replan", "plan"), [("change", 2), ("say", 1)])
def test_a_run_that_is_resumed_goes_on_with_its_newest_plan(replan: str, plan: int, tmp_path: Path) -> None:
    settings = Settings(sync="bsp", push="update", workers=2, shards=2, replan=replan)
    trained(settings, tmp_path, {4: {"sync": "ssp", "staleness": 3, "compress": "int4"}})
    coordinator = OnDisk(settings, tmp_path, resume=True).servers[0].coordinator
    assert coordinator is not None and coordinator.run.restart_clock > CLOCKS
    run = coordinator.run.settings
    told = (run.plan_number, run.sync, run.staleness, run.compress)
    assert told == ((2, "ssp", 3, "int4") if plan == 2 else (1, "bsp", 0, "dense")), "else the flags hold"


@pytest.mark.parametrize("moves", [MOVES, PLANS], ids=["keys", "plans"])
def test_no_update_is_lost_where_most_of_each_waits_for_the_next(
    moves: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part that was pushed is folded once; and all that workers have moved by is in what was folded, once they have sent
    what was left: so the residuals went along with their keys."""
    size = sum(parameter.numel() for parameter in build().parameters())
    pushed, folded, codecs = Counter[tuple[int, ...]](), Counter[tuple[int, ...]](), dict[int, int]()
    moved, summed, roundings = np.zeros(size), np.zeros(size, np.float32), list[float]()
    encode, push, accept = ArrayReplica.encode, Exchange.push, ModelShard.accept

    def part(worker: int, at: int, piece: Any) -> tuple[int, ...]:
        return (worker, at, piece.begin, piece.end, crc32(piece.payload))

    def encoding(replica: Any, update: Any, at: int, last: bool = False) -> Any:
        (begin, _), _ = replica.turn(at)
        for low, values in chunks_of(update):
            moved[begin + low : begin + low + values.size] += values
        pieces = encode(replica, update, at, last)
        roundings.extend(np.abs(residual).max() / 4062 for *_, residual in replica.residuals if last)
        return pieces

    def pushing(exchange: Any, pieces: Any, *rest: Any, **more: Any) -> Any:
        pushed.update(part(exchange.worker, exchange.clock, piece) for piece in pieces)
        return push(exchange, pieces, *rest, **more)

    def accepting(planned: Any, seat: Any, update: Any) -> Any:
        folded.update(part(seat.worker, seat.clock, piece) for piece in update)
        codecs[seat.clock] = update[0].codec
        for piece in update:
            add(piece, 1.0, summed, 0)
        return accept(planned, seat, update)

    monkeypatch.setattr(ArrayReplica, "encode", encoding)
    monkeypatch.setattr(Exchange, "push", pushing)
    monkeypatch.setattr(ModelShard, "accept", accepting)
    settings = Settings(sync="ssp", staleness=2, workers=2, shards=2, compress="topk:0.05+int8")
    trained(settings, tmp_path, moves)
    assert pushed == folded and set(folded.values()) == {1}
    cut = {begin for _, _, begin, *_ in folded}
    assert moves is PLANS or cut == {0, size // 3, size // 2, 2 * size // 3}, "of two shards and of three"
    if moves is PLANS:
        coded = [coded for coded, _ in groupby(codecs[clock] > 0 for clock in range(CLOCKS))]
        assert coded == [True, False, True], "bsp is dense"
    assert len(roundings) >= 4 and sum(roundings) < 1e-4, "of the last update of each worker to each shard"
    np.testing.assert_allclose(summed, moved, atol=1e-5 + sum(roundings))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"sync": "async"}, "has no bound"),
        ({"sync": "gossip"}, "gossip"),
        ({"sync": "local", "quorum": 1}, "updates of several clocks"),
        ({"sync": "local", "fragments": 2}, "updates of several clocks"),
    ],
)
def test_a_run_that_cannot_move_says_why(flags: dict[str, Any], why: str) -> None:
    coordinator = Coordinator(Settings(**{"workers": 2, "shards": 2} | flags).validated(), 1)
    (log,) = coordinator.reshard(3, 0)
    assert isinstance(log, Log) and why in str(log.values["text"])
    assert (log.values["shards"], log.values["target"]) == (2, 2)


OVER_TWO = Settings(shards=2).validated().packed()


def test_a_place_that_is_none_is_refused() -> None:
    member = Member("w", "here")
    member.join(0)
    member.declare(ModelSpec((TensorSpec("w", (4,), "float32"),), "", ((0,),)).packed(), 0)
    member.receive(0, m.Welcome("w", 3, 0, 1, 7, Settings().validated().packed(), (1,)), 0)
    member.receive(0, m.Ready(3, 8, 0, ((0, 4),), b""), 0)
    assert member.receive(0, m.Reshard(3, 7, 1, 5), 0) == member.receive(0, m.Reshard(4, 8, 1, 5), 0) == []
    for ports, ranges in (((1, 2), ((0, 3), (3, 4))), ((1, 0), ((0, 2), (2, 4))), ((), ())):
        with pytest.raises(RemoteProtocolError, match="an invalid place"):
            member.receive(0, m.Reshard(3, 8, 2, 5, 9, ports, ranges, (), OVER_TWO), 0)
    moved, beat = member.receive(0, m.Reshard(3, 8, 2, 5, 9, (1, 2), ((0, 2), (2, 4)), (), OVER_TWO), 0)
    assert isinstance(moved, MemberResharded) and (moved.epoch, moved.clock) == (9, 5)
    assert isinstance(beat, Send) and beat.message == m.Heartbeat(3, 9, 0, move=2)
    assert member.receive(0, m.Reshard(3, 8, 2, 5, 9, (1, 2), ((0, 2), (2, 4)), (), OVER_TWO), 0) == [], (
        "it comes twice"
    )


def test_a_shard_on_another_machine_is_dialled_there_and_its_link_timed_by_itself() -> None:
    member = Member("w", "here")
    member.join(0)
    member.declare(ModelSpec((TensorSpec("w", (4,), "float32"),), "", ((0,),)).packed(), 0)
    member.receive(0, m.Welcome("w", 3, 0, 1, 7, Settings().validated().packed(), (1,)), 0)
    member.receive(0, m.Ready(3, 8, 0, ((0, 4),), b""), 0)
    ranges = ((0, 2), (2, 4))
    for hosts in (("",), ("", "a b"), ("", "*"), ("", "a:1/b")):
        with pytest.raises(RemoteProtocolError, match="an invalid place"):
            member.receive(0, m.Reshard(3, 8, 1, 5, 9, (1, 2), ranges, hosts, OVER_TWO), 0)
    moved, _ = member.receive(0, m.Reshard(3, 8, 1, 5, 9, (1, 2), ranges, ("", "10.0.0.2"), OVER_TWO), 0)
    assert isinstance(moved, MemberResharded) and moved.hosts == ("", "10.0.0.2")
    here, there = member.sessions
    assert here.meter is member.meter is not there.meter
