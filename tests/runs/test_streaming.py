"""Streaming local steps (Streaming DiLoCo, 2501.18512): fragments exchanged in turn, merged some inner steps later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.in_process import store_of
from kit.scripts import Run, build, distance, flat, loss_of, run
from kit.specs import SMALL_MODEL_SPECS
from kit.streaming_reference import DENSE, OUTER, RATE, SIZE, Array, Flat, Reference, compare, first, target, train

from narrows.compression import ErrorFeedback, accumulate, parse
from narrows.compression.codecs import CODED, RAW, raw_pieces
from narrows.compression.ladder import Ladder, Rung
from narrows.compression.replica import HostReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import fragment, parts, split
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member
from narrows.ps.store.changes import LoadArrays, OuterStep, Publish, Rebase
from narrows.ps.store.store import Store
from narrows.worker import DistributedOptimizer, step_count
from narrows.worker.sync.engine import Engine


def engine_of(optimizer: DistributedOptimizer) -> Engine:
    assert optimizer._engine is not None
    return optimizer._engine


# Fragments.


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 40))
def test_fragments_cut_a_range_as_shards_cut_the_model(begin: int, size: int, fragments: int) -> None:
    cuts = [fragment(begin, begin + size, fragments, index) for index in range(fragments)]
    assert cuts == [(begin + low, begin + high) for low, high in split(size, fragments)]
    assert [key for low, high in cuts for key in range(low, high)] == list(range(begin, begin + size))
    assert max(high - low for low, high in cuts) - min(high - low for low, high in cuts) <= 1


# The algorithm.


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha", "steps"),
    [
        (fragments, delay, alpha, steps)
        for row, fragments in enumerate((1, 2, 4))
        for column, delay in enumerate((0, 1, 3))
        for alpha, steps in zip((0.0, 0.5), ((16, 27), (27, 16))[(row + column) % 2], strict=True)
    ],
)  # whole rounds, and a round begun
def test_a_run_is_streaming_diloco(fragments: int, delay: int, alpha: float, steps: int) -> None:
    """Sec. 2, alg. 2, every worker after every step; bit for bit where no values are mixed."""
    settings = replace(DENSE, fragments=fragments, merge_delay=delay, merge_alpha=alpha, shards=1 + fragments // 2)
    with run(settings) as started:
        compare(started, Reference(settings), range(1, steps + 1), exact=not alpha)


@pytest.mark.parametrize("delay", [0, 3, 7])
def test_a_look_at_the_shared_model_changes_nothing(delay: int) -> None:
    """`shared()` after every step: the servers' state with all that was pushed, and then the run goes on as without it."""
    settings = replace(DENSE, fragments=4, merge_delay=delay, merge_alpha=0.0, shards=2)
    with run(settings) as started:
        compare(started, Reference(settings), range(1, 24), exact=True, look=True)


def test_one_fragment_merged_at_once_is_local_as_ever() -> None:
    """DiLoCo (2311.08105, alg. 1), bit for bit: what is run where the flags are left out."""
    settings = DENSE.validated()
    assert (settings.fragments, settings.merge_delay, settings.merge_alpha) == (1, 0, 0.0)
    x, velocity = first(), np.zeros(SIZE, np.float32)
    with run(DENSE) as started:
        results = train(started, range(1, 25))
    for turn in range(3):
        updates = []
        for worker in range(2):
            local = x.copy()
            for step in range(8 * turn + 1, 8 * turn + 9):
                local -= np.float32(RATE) * (local - target(worker, step))
            updates.append(local - x)
        mean = np.float32(0.5) * updates[0] + np.float32(0.5) * updates[1]
        velocity = np.float32(OUTER[1]) * velocity + mean
        x += np.float32(OUTER[0]) * (mean + np.float32(OUTER[1]) * velocity)
        for seen, _ in results:
            np.testing.assert_array_equal(seen[8 * turn + 7], x)
    for _, shared in results:
        np.testing.assert_array_equal(shared[-1], x)


CUTS = ((1, 3), (2, 0), (2, 5), (4, 3))  # fragments, delay


@pytest.mark.parametrize(
    ("fragments", "delay", "spec", "down"),
    [
        (*CUTS[(index + 2 * (down == "dense")) % len(CUTS)], spec, down)
        for index, spec in enumerate(SMALL_MODEL_SPECS[1:])
        for down in ("", "dense")
    ],
)
def test_each_fragment_has_a_residual_of_its_own_both_ways(fragments: int, delay: int, spec: str, down: str) -> None:
    """Sparse and quantized pseudo-gradients with error feedback (2508.15706), against the same loop."""
    settings = replace(DENSE, fragments=fragments, merge_delay=delay, compress=spec, compress_down=down)
    with run(settings) as started:
        compare(started, Reference(settings), range(1, 28), exact=False)


@pytest.mark.parametrize("spec", ["dense", "int8", "topk:0.1"])
def test_an_exchange_has_a_fragment_of_the_bytes_both_ways(spec: str) -> None:
    """Payloads of one clock, the first (which has the whole state) and the flush aside."""

    def bytes_of(fragments: int) -> tuple[float, float]:
        settings = replace(DENSE, fragments=fragments, merge_delay=1, compress=spec, workers=1)
        ups: list[int] = []
        downs: list[int] = []
        with run(settings) as started:
            model = Flat()
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model)
            engine = engine_of(optimizer)
            shards, link = engine.sync.shards, engine.link
            say, take = link.send, shards.handle

            def says(shard: int, messages: Sequence[m.Message]) -> None:
                ups.extend(len(message.payload) for message in messages if isinstance(message, m.Push))
                say(shard, messages)

            def takes(event: e.MemberEffect) -> None:
                if isinstance(event, e.StateArrived) and event.parts[-1].publication:
                    downs.append(sum(len(part.payload) for part in event.parts))
                take(event)

            link.send, shards.handle = says, takes  # type: ignore[method-assign]
            for step in range(1, 26):
                optimizer.zero_grad()
                model.loss(0, step).backward()
                optimizer.step()
        assert len(ups) == len(downs) == 24 // 8 * fragments
        assert started.sessions
        return float(np.mean(ups)), float(np.mean(downs))

    whole, quarter = bytes_of(1), bytes_of(4)
    for one, part in zip(whole, quarter, strict=True):
        assert part == pytest.approx(one / 4, rel=0.0 if spec == "dense" else 0.15)


# Other events that a run meets.

STREAM = Settings(
    sync="local", local_steps=4, fragments=2, merge_delay=3, workers=2, shards=2, outer_lr=0.7, outer_momentum=0.5
)
KINDS = {
    "dense": STREAM,
    "sparse": replace(STREAM, compress="topk:0.1+int8"),
    "signs": replace(STREAM, compress="2bit", fragments=4, merge_delay=1),
    "sparse up, dense down": replace(STREAM, compress="topk:0.2", compress_down="dense", fragments=1),
    "more fragments than keys": replace(STREAM, local_steps=200, fragments=200, merge_delay=7),
    "auto": replace(STREAM, compress="auto"),
}


def steps(net: torch.nn.Module, optimizer: DistributedOptimizer, until: int, worker: int, of: int = 2) -> None:
    """Up to the begin of clock `until`: then all have taken part in the same ones."""
    while (step := step_count()) < until * engine_of(optimizer).mode.local_steps:
        optimizer.zero_grad()
        loss_of(net, step, worker, of).backward()
        optimizer.step()


def beat(member: Member, now_ns: int) -> e.MemberEffect:
    return e.Send(0, m.Heartbeat(member.worker, member.epoch, now_ns))


def master(started: Run) -> Array:
    stores = [store_of(server) for server in started.cluster.servers]
    return np.concatenate([store.x for store in stores if store is not None])


def ends(started: Run, optimizer: DistributedOptimizer, net: torch.nn.Module) -> Array:
    optimizer.finish()
    with optimizer.shared():
        return flat(net)


@pytest.mark.parametrize(
    ("kind", "expire_at"), [("dense", None), ("sparse", None), ("auto", 4), *zip(KINDS, cycle([3, 4]), strict=False)]
)
def test_all_end_with_one_model_whoever_had_to_join_again(kind: str, expire_at: int | None) -> None:
    def script(worker: int) -> Array:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        if expire_at is not None:
            steps(net, optimizer, expire_at, worker)
            if worker == 1:
                loss_of(net, 0).backward()
                optimizer.step()
                with started.cluster.changed:  # or the other may end, alone, before this one is back
                    started.expire(1)
                    engine_of(optimizer).link.call(lambda member, now: [beat(member, now)])
        steps(net, optimizer, 12, worker)
        return ends(started, optimizer, net)

    with run(KINDS[kind]) as started:
        seen = started.together(script)
        for model in seen:
            np.testing.assert_array_equal(model, master(started))
    assert np.isfinite(seen[0]).all() and distance(seen[0], flat(build())) > 0.005


@pytest.mark.parametrize("kind", ["dense", "sparse", "signs"])
def test_who_joins_late_takes_up_the_turn_of_the_others(kind: str) -> None:
    settings = replace(KINDS[kind], workers=1)
    ready: list[tuple[torch.nn.Module, DistributedOptimizer]] = []
    with run(settings) as started:
        for worker in range(2):
            if worker:
                started.join()
            net = build(seed=worker)
            ready.append((net, DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)))
            if not worker:
                steps(net, ready[0][1], 5, 0, 1)
        engine = engine_of(ready[1][1])
        assert engine.sync.clock == engine_of(ready[0][1]).sync.clock > 0
        stores = [store_of(server) for server in started.cluster.servers]
        np.testing.assert_array_equal(flat(ready[1][0]), np.concatenate([store.p for store in stores if store]))

        def script(worker: int) -> Array:
            net, optimizer = ready[worker]
            steps(net, optimizer, 14, worker)
            return ends(started, optimizer, net)

        one, other = started.together(script)
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, master(started))


class Strided(torch.nn.Module):
    """A parameter that does not lie in memory as its keys do, in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(60.0).reshape(4, 15).t().to(dtype))
        self.b = torch.nn.Parameter(torch.ones(7, dtype=dtype))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rounded_and_strided_parameters_are_merged_at_their_keys(dtype: torch.dtype, alpha: float) -> None:
    """One worker, outer rate 1: what it pushes comes back as it was, and nothing it did not move is pushed."""
    settings = Settings(sync="local", local_steps=3, fragments=3, merge_delay=0, merge_alpha=alpha, outer_lr=1.0,
                        outer_momentum=0.0)  # fmt: skip
    with run(settings) as started:
        net = Strided(dtype)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net)
        want = flat(net)
        assert not net.w.is_contiguous()
        for step in range(9):
            net.w.grad, net.b.grad = torch.zeros_like(net.w), torch.zeros_like(net.b)
            if step == 2:
                net.w.grad[3, 2] = 2.0
                want[3 * 4 + 2] -= 2.0
            optimizer.step()
            np.testing.assert_array_equal(flat(net), want)
        optimizer.finish()
        np.testing.assert_array_equal(master(started), want)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_state_dict_has_the_residuals_of_all_fragments(shards: int) -> None:
    settings = replace(STREAM, compress="topk:0.05", workers=1)
    with run(settings):
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        steps(net, optimizer, 7, 0, 1)
        state = optimizer.state_dict(residual=True)
        kept = state["narrows"]["residual"].numpy()
        assert np.count_nonzero(kept) > kept.size // 2
    with run(replace(settings, shards=shards, fragments=4)):
        other = build(seed=8)
        second = DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other)
        before = flat(other)
        second.load_state_dict(state)
        np.testing.assert_array_equal(engine_of(second).sync.residual(), kept)
        np.testing.assert_array_equal(flat(other), before + kept)  # no step was taken yet: it shows at once
        steps(other, second, 1, 0, 1)
        moved = flat(other)
        second.load_state_dict(state)
        np.testing.assert_array_equal(flat(other), moved)  # and what was moved since is not taken back


# The parts, by themselves.


def test_an_outer_step_leaves_the_momentum_of_other_keys_alone() -> None:
    store = Store(10, 16, barrier=True, outer=(1.0, 0.5))
    for keys in ((10, 12), (12, 16), (10, 12)):
        update = raw_pieces(np.ones(keys[1] - keys[0], np.float32), keys[0], [keys])
        store.apply(OuterStep(((1.0, update),), keys))
    assert store.momentum is not None
    np.testing.assert_array_equal(store.momentum, [1.5, 1.5, 1, 1, 1, 1])
    np.testing.assert_array_equal(store.x, [3.25, 3.25, 1.5, 1.5, 1.5, 1.5])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "specs", [["dense"], ["topk:0.1"], ["topk:0.1", "dense", "int8", "dense", "topk:0.2"]], ids=str
)
def test_who_follows_the_publications_of_fragments_has_the_published_state(specs: list[str], at_once: bool) -> None:
    """Whatever it has, and where what came from a server above has changed all keys."""
    size, fragments, random = 1200, 4, np.random.default_rng(2)
    store = Store(100, 100 + size, barrier=not at_once, codings=Ladder(tuple(Rung(spec, 4.0) for spec in specs)))
    store.apply(LoadArrays({"x": np.zeros(size, np.float32), "p": np.zeros(size, np.float32)}, 0))
    history = {0: store.p.copy()}
    lengths = set()
    for turn in range(40):
        keys = fragment(100, 100 + size, fragments, turn % fragments)
        store.x = store.x.copy()
        store.x[keys[0] - 100 : keys[1] - 100] += random.standard_normal(keys[1] - keys[0], dtype=np.float32)
        if turn in (17, 23):
            store.apply(Rebase(np.zeros(size, np.float32), random.standard_normal(size, dtype=np.float32)))
        store.p = store.x if store.shared else store.p
        store.apply(Publish(keys, specs[turn // 5 % len(specs)]))
        history[store.publication] = store.p.copy()
        for have, state in history.items():
            news = store.since(have)
            if not news:
                continue
            followed = state.copy()
            for _, (begin, end), payload in news:
                at = slice(begin - 100, end - 100)
                if payload is None:
                    followed[at] = store.p[at]
                else:
                    accumulate(payload, 1.0, followed[at])
            np.testing.assert_array_equal(followed, store.p, err_msg=f"from {have} to {store.publication}")
            lengths.add(len(news))
    assert {1, 2} <= lengths, "some are followed over several publications"


def pieces(**changes: Any) -> m.State:
    values: dict[str, Any] = {"worker": 0, "epoch": 1, "request": 0, "part": 0, "parts": 1, "begin": 10, "end": 14,
                              "whole": False, "add": False, "publication": 1, "min_clock": 1, "contains": (),
                              "settled": 1, "sent_ns": 0, "codec": RAW,
                              "payload": np.ones(4, np.float32).tobytes()}  # fmt: skip
    return m.State(**(values | changes))


def exchange_of(settings: Settings) -> Exchange[Array]:
    mode = settings.validated().mode()
    cuts = [fragment(10, 18, mode.fragments, index) for index in range(mode.fragments)]
    replica = HostReplica(10, 18, [(keys, ErrorFeedback(parse("dense"), keys[1] - keys[0])) for keys in cuts], parts)
    return Exchange(mode, replica, whole=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"begin": 9},
        {"end": 19},
        {"begin": 14, "end": 13},
        {"end": 13},
        {"codec": CODED},
        {"codec": 7},
        {"payload": b"1"},
    ],
    ids=str,
)
def test_a_difference_is_of_keys_of_the_shard(wrong: dict[str, Any]) -> None:
    exchange: Any = exchange_of(STREAM)
    exchange.take(e.StateArrived(0, (pieces(),)))
    np.testing.assert_array_equal(exchange.replica.pulled, [1, 1, 1, 1, 0, 0, 0, 0])
    with pytest.raises(RemoteProtocolError):
        exchange.take(e.StateArrived(0, (pieces(publication=2, **wrong),)))
    assert exchange.publication == 1
    with pytest.raises(RemoteProtocolError, match="does not cover"):
        exchange_of(replace(STREAM, fragments=1)).take(e.StateArrived(0, (pieces(),)))
