"""The keys of a run are cut anew while it trains: no update is lost, and none is folded twice."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from kit import one_process as alone
from kit.on_disk import OnDisk
from kit.one_process import ADAMW, until
from kit.scripts import Array, build, distance, flat, loss_of, run
from kit.streaming_reference import DENSE, Flat, Reference, compare

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
from narrows.ps.coordinator import run as cluster_run
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.shard.model_shard import ModelShard
from narrows.worker import DistributedOptimizer, clock, step_count

pytestmark = pytest.mark.usefixtures("one_thread")

CLOCKS = 12
GATE_S = 30.0
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


@pytest.mark.parametrize(
    ("moves", "flags"),
    [
        (MOVES, {"sync": "ssp", "staleness": 2}),
        (PLANS, {"sync": "ssp", "staleness": 2}),
        (MOVES, {"sync": "async"}),
        (MOVES, {"sync": "local", "local_steps": 4, "fragments": 2, "merge_delay": 3}),
    ],
    ids=["keys", "plans", "keys, no bound", "keys, fragments"],
)
def test_no_update_is_lost_where_most_of_each_waits_for_the_next(
    moves: dict[int, Any], flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    trained(Settings(**flags, workers=2, shards=2, compress="topk:0.05+int8"), tmp_path, moves)
    assert pushed == folded and set(folded.values()) == {1}
    cut = {begin for _, _, begin, *_ in folded}
    assert moves is PLANS or cut >= {0, size // 3, size // 2, 2 * size // 3}, "of two shards and of three"
    if moves is PLANS:
        coded = [coded for coded, _ in groupby(codecs[clock] > 0 for clock in range(CLOCKS))]
        assert coded == [True, False, True], "bsp is dense"
    assert len(roundings) >= 4 and sum(roundings) < 1e-4, "of the last update of each worker to each shard"
    np.testing.assert_allclose(summed, moved, atol=1e-5 + sum(roundings))


@pytest.mark.parametrize("more", [{}, {"overlap": True}], ids=["at step()", "in backward"])
def test_each_gradient_counts_once_where_no_clock_is_one_that_all_come_to(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that leave in backward are of an update that is pushed whole, whatever a Reshard says meanwhile. A worker whose
    last step was made pushes one without values instead."""
    folded, accept = Counter[tuple[int, int]](), ModelShard.accept

    def accepting(planned: Any, seat: Any, update: Any) -> Any:
        if not update.empty:
            folded[seat.worker, seat.clock] += sum(piece.end - piece.begin for piece in update)
        return accept(planned, seat, update)

    monkeypatch.setattr(ModelShard, "accept", accepting)
    trained(Settings(sync="async", push="gradient", workers=2, shards=2), tmp_path, MOVES, **more)
    size = sum(parameter.numel() for parameter in build().parameters())
    assert folded == {(worker, clock): size for worker in range(2) for clock in range(CLOCKS)}


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha"), [(1, 3, 0.0), (2, 0, 0.0), (2, 3, 0.0), (4, 1, 0.5), (4, 7, 0.0)]
)
def test_fragments_take_turns_over_the_keys_as_they_are_cut(
    fragments: int, delay: int, alpha: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker after every step, and the end, beside a loop in NumPy; with long delays fragments are merged early once."""
    settings = replace(DENSE, fragments=fragments, merge_delay=delay, merge_alpha=alpha, shards=2)
    cluster, moves, ways = OnDisk(settings, tmp_path), dict[int, int](), {9: 3, 37: 4, 53: 2}  # by step of worker 0
    shift, loss = cluster_run.Run.shift, Flat.loss

    def shifting(of: cluster_run.Run, after: Settings, at: int, starts: Mapping[int, int]) -> None:
        moves[at] = after.shards
        shift(of, after, at, starts)

    def losing(model: Flat, worker: int, step: int) -> Any:
        if worker == 0 and step in ways:
            cluster.move(ways.pop(step))
        return loss(model, worker, step)

    monkeypatch.setattr(cluster_run.Run, "shift", shifting)
    monkeypatch.setattr(Flat, "loss", losing)
    with run(settings, cluster) as started:
        compare(started, Reference(settings, moves), range(1, 84), exact=not alpha)
    assert [*moves.values()] == [3, 4, 2]


def test_a_late_worker_goes_on_where_it_was_after_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is three rounds behind, and in the midst of one, as keys move. Its clock never goes back. Its updates count once."""
    folded, accept, late = Counter[tuple[int, int]](), ModelShard.accept, list[tuple[object, Any]]()

    def accepting(planned: Any, seat: Any, update: Any) -> Any:
        folded[seat.worker, seat.clock] += sum(piece.end - piece.begin for piece in update)
        return accept(planned, seat, update)

    def closes(clocks: Clocks, now_ns: int) -> None:
        close(clocks, now_ns)
        late.extend((log.values["worker"], log.values["age"]) for log in clocks.said)

    close = Clocks._close
    monkeypatch.setattr(ModelShard, "accept", accepting)
    monkeypatch.setattr(Clocks, "_close", closes)
    settings = Settings(sync="local", local_steps=2, workers=3, shards=2, quorum=2, grace=0.0, compress="topk:0.3+int8")
    cluster, meet = OnDisk(settings, tmp_path), threading.Barrier(3)

    def script(worker: int) -> tuple[list[int], Array]:
        net, clocks = build(), [0]
        optimizer = DistributedOptimizer(ADAMW(net.parameters()), net)

        def until_clock(limit: int, steps: int) -> None:
            while steps and clocks[-1] < limit:
                optimizer.zero_grad()
                loss_of(net, step_count(), worker, 3).backward()
                optimizer.step()
                clocks.append(clock())
                steps -= 1

        meet.wait(GATE_S)
        until_clock(3, 1 if worker == 2 else CLOCKS)
        meet.wait(GATE_S)
        if worker == 0:
            cluster.move(3)
        meet.wait(GATE_S)
        until_clock(CLOCKS, 4 * CLOCKS)
        optimizer.finish()
        with optimizer.shared():
            return clocks, flat(net)

    with run(settings, cluster) as started:
        results = started.together(script)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None and coordinator.run.shards == 3
    for clocks, model in results:
        assert clocks == sorted(clocks) and np.array_equal(model, results[0][1])
    size = sum(parameter.numel() for parameter in build().parameters())
    assert set(folded.values()) == {size}
    for worker in range(3):
        own = sorted(at for of, at in folded if of == worker)
        assert own == list(range(len(own))) and len(own) > 1
    assert any(age >= 3 for of, age in late if of == 2), "it is as late as it was"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"sync": "gossip"}, "gossip"),
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
