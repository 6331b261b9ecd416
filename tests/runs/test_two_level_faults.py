"""Faults between a cluster and the server above: messages lost, late or twice, leases that end, workers that differ.

Virtual time: `pump` lets the clock of every machine run, and their timers with it.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, member_of
from kit.on_disk import OnDisk
from kit.processes import until
from kit.scripts import Array, build, distance, flat, loss_of, train, tree
from kit.seed import SEED
from kit.two_levels import ABOVE, BELOW, family, root_model
from kit.virtual_time import (
    REAL_S,
    Faults,
    Held,
    Script,
    clock_of,
    expire,
    expire_member,
    finished,
    pump,
    steps,
    waits,
)

from narrows.protocols import messages as m
from narrows.protocols.config.modes import WINDOW
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import ServerEffect
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import MemberPhase
from narrows.ps.checkpoints.checkpoint_files import read
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.shard.shard import Shard
from narrows.ps.store.changes import OWED, LoadArrays
from narrows.worker import DistributedOptimizer, clock

BARRIER = Settings(sync="bsp", push="update")


# Workers that differ.


@pytest.mark.parametrize("below", ["bsp", "ssp"])
def test_workers_of_one_cluster_may_take_different_numbers_of_steps(below: str) -> None:
    """Who is done waits for the last model, and nobody waits for it."""
    root, (cluster,) = family(BARRIER, replace(BELOW[below], workers=2), 1)
    with tree(root, cluster) as run:
        first, second = Script(run, 0, lambda: steps(4)), Script(run, 1, lambda: steps(7))
        a, b = finished(run, [root, cluster], first, second)
    assert np.array_equal(a, b) and np.array_equal(a, root_model(root))


def last_word(message: m.PushAck | m.State) -> bool:
    """An ack, or the publication that would settle the last of two updates: not the last model, which is asked for."""
    return isinstance(message, m.PushAck) or (message.request == 0 and message.settled > 1)


@pytest.mark.parametrize("shard", [0, 1])
def test_the_last_that_comes_from_above_may_be_an_ack(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last model is here and the workers have left when the server above says that it has the last update.

    The model comes whole, as after a newer publication has come before it: it waits for no publication.
    """
    asks = Exchange.ask_shared
    monkeypatch.setattr(Exchange, "ask_shared", lambda exchange, last, whole=False: asks(exchange, last, whole=True))
    root, (cluster,) = family(Settings(sync="ssp", shards=2), Settings(sync="bsp", shards=2), 1)
    held = Held(cluster, shard, (m.PushAck, m.State), last_word)
    ours, coordinator = cluster.servers[shard].shard, cluster.servers[0].coordinator
    assert coordinator is not None
    with tree(root, cluster) as run:
        finished(run, [root, cluster], Script(run, 0, lambda: steps(1)))
        run.sessions[0].close(failed=False)
        assert pump(run, [root, cluster], lambda: coordinator.over) and not ours.at_rest
        held.release()
        assert pump(run, [root, cluster], lambda: cluster.stopped and root.stopped)
    assert cluster.stopped is not None and cluster.stopped.code == 0


def finishes(shard: Shard) -> int:
    return shard.model_shard.parent_slot.finishes if shard.model_shard is not None else 0


def test_a_last_update_that_only_some_shards_have_pushed_is_pushed_again_at_the_next_place() -> None:
    """Once by each: one shard that pushed it twice would wait for a clock that the others never come to."""
    root, (one, other) = family(Settings(sync="async", shards=2, workers=2), Settings(sync="bsp", shards=2))
    late = Held(one, 1, (m.PushAck,))  # so that its window is full before the end
    here, there = (server.shard for server in one.servers)
    go = threading.Event()

    def at(step: int) -> None:
        if step == 0:  # once the other has come to clock 1 too, a state settles our first: the rest fill the window
            until(lambda: clock_of(root) >= 1, "both to have done a step", REAL_S)

    with tree(root, one, other) as run:
        first = Script(run, 0, lambda: steps(WINDOW + 1, at=at))
        second = Script(run, 1, lambda: steps(9, at=lambda step: waits(go, step == 0)))
        assert pump(run, [root, one, other], lambda: finishes(here) > finishes(there))
        seat = there.parent_slot.seat
        before = seat.place if seat is not None else None
        expire(one)
        assert pump(
            run, [root, one, other], lambda: seat is None or there.parent_slot.seat is not seat or seat.place != before
        )
        late.release()
        go.set()
        finished(run, [root, one, other], first, second)


def test_a_cluster_counts_above_once_it_can_train() -> None:
    root, (first,) = family(BARRIER, Settings(sync="bsp"), 1)
    late = Cluster(Settings(sync="bsp", workers=2), root, "late")
    with tree(root, first) as run:
        Script(run, 0, lambda: steps(100_000, finish=False))  # until the late one is there, and then no more
        assert pump(run, [root, first, late], lambda: clock_of(root) >= 10)
        with tree(root, late, first_rank=1) as others:
            one_of_two = Script(others, 0, lambda: steps(1, finish=False))
            coordinator = late.servers[0].coordinator
            assert coordinator is not None and pump(
                others, [root, first, late], lambda: coordinator.parent_place.undeclared
            )
            before = clock_of(root)
            assert pump(run, [root, first, late], lambda: clock_of(root) > before + 10)
            two = Script(others, 1, lambda: steps(1, finish=False))
            run.sessions += others.sessions
            finished(run, [root, first, late], one_of_two, two)


def test_the_first_weights_are_those_of_one_worker() -> None:
    """Also where the shards of a cluster learn at different times that weights are wanted, and of whom."""
    root, (cluster,) = family(replace(BARRIER, shards=2), Settings(sync="bsp", workers=2, shards=2), 1)
    held = Held(cluster, 1, (m.NeedWeights,))
    with tree(root, cluster) as run:
        second = Script(run, 1, lambda: steps(0, seed=11, finish=False))
        pump(run, [root, cluster], lambda: second.ended, 2.0)
        first = Script(run, 0, lambda: steps(0, seed=3, finish=False))
        pump(run, [root, cluster], lambda: False, 2.0)
        held.release()
        a, b = finished(run, [root, cluster], first, second)
    assert np.array_equal(a, b)
    assert any(np.array_equal(a, flat(build(seed))) for seed in (3, 11))


def test_the_first_weights_are_asked_for_once() -> None:
    """An answer is the whole model: what comes of others until it is here asks for no other one."""
    root, clusters = family(BARRIER, Settings(sync="bsp"), 2)
    held = [Held(cluster, 0, (m.NeedWeights,)) for cluster in clusters]
    with tree(root, *clusters) as run:
        # One after the other: of those that are there the one that came first gives them, and a model may be asked for twice.
        scripts = [Script(run, 0, lambda: steps(1, finish=False))]
        assert pump(run, [root, *clusters], lambda: held[0].late)
        scripts.append(Script(run, 1, lambda: steps(1, finish=False)))
        pump(run, [root, *clusters], lambda: False, 2.0)
        assert sum(len(each.late) for each in held) == 1
        for each in held:
            each.release()
        finished(run, [root, *clusters], *scripts)


# Leases that end.


def test_shards_begin_a_new_place_at_one_clock() -> None:
    """The state for one shard is late when the cluster is lost above: it has folded less than the other."""
    root, (cluster,) = family(replace(BARRIER, shards=2), Settings(sync="ssp", staleness=1, shards=2), 1)
    held: list[Held] = []
    go = threading.Event()

    def at(step: int) -> None:
        if step == 2:
            held.append(Held(cluster, 1, (m.State,)))
        waits(go, step == 8)

    with tree(root, cluster) as run:
        script = Script(run, 0, lambda: steps(12, at=at))
        ahead, behind = (server.shard for server in cluster.servers)
        until(lambda: ahead.min_clock > behind.min_clock, "one shard to be ahead", 10.0)
        expire(cluster)
        pump(run, [root, cluster], lambda: False, 3.0)
        held[0].release()
        go.set()
        (model,) = finished(run, [root, cluster], script)
    assert np.array_equal(model, root_model(root))


def test_a_full_window_keeps_all_shards_at_one_clock() -> None:
    root, (cluster,) = family(Settings(sync="async", shards=2), Settings(sync="bsp", shards=2), 1)
    held: list[Held] = []

    def at(step: int) -> None:
        if step == 1:
            held.append(Held(cluster, 1, (m.State, m.PushAck)))
        if step == 5:
            held[0].release()

    with tree(root, cluster) as run:
        (model,) = finished(run, [root, cluster], Script(run, 0, lambda: steps(12, at=at)))
    assert np.array_equal(model, root_model(root))


def waits_above(cluster: Cluster) -> bool:
    """All workers of this cluster have done their last step, and it has asked for the model that all end with."""
    above = cluster.servers[0].shard.parent_slot.link
    return isinstance(above, ParentPush) and above.seat.finishing


def test_a_cluster_that_is_lost_while_it_finishes_comes_back_to_finish() -> None:
    root, (one, other) = family(replace(BARRIER, workers=2), Settings(sync="bsp"))
    go = threading.Event()
    with tree(root, one, other) as run:
        first = Script(run, 0, lambda: steps(3))
        second = Script(run, 1, lambda: steps(9, at=lambda step: waits(go, step == 2)))
        assert pump(run, [root, one, other], lambda: waits_above(one))
        expire(one)
        pump(run, [root, one, other], lambda: False, 5.0)
        go.set()
        finished(run, [root, one, other], first, second)


@pytest.mark.parametrize("above", ["bsp", "async", "local"])
def test_no_worker_joins_a_cluster_that_has_done_its_last_step(above: str) -> None:
    """The run above may end before it has an update of that worker, and it would be in one model and not in another."""
    root, (one, other) = family(replace(ABOVE[above], workers=2), Settings(sync="bsp"))
    go, late_go = threading.Event(), threading.Event()
    with tree(root, one, other) as run:
        first = Script(run, 0, lambda: steps(3))
        second = Script(run, 1, lambda: steps(9, at=lambda step: waits(go, step == 2)))
        assert pump(run, [root, one, other], lambda: waits_above(one))

        def joins() -> Array:
            run.join(0)
            return steps(5, at=lambda step: waits(late_go, step == 0))

        late = Script(run, 0, joins)
        pump(run, [root, one, other], lambda: late.ended, 5.0)
        go.set()
        pump(run, [root, one, other], lambda: second.ended)
        late_go.set()
        a, b = finished(run, [root, one, other], first, second)
        assert pump(run, [root, one, other], lambda: late.ended)
    assert np.array_equal(a, b) and np.array_equal(a, root_model(root))
    assert "their last step" in str(late.error)


def test_a_worker_whose_lease_ends_while_it_waits_for_the_last_model_comes_back_for_it() -> None:
    root, (one, other) = family(replace(BARRIER, workers=2), Settings(sync="bsp", workers=2))
    go = threading.Event()
    with tree(root, one, other) as run:
        done = [Script(run, session, lambda: steps(3)) for session in (0, 2)]
        going = [Script(run, session, lambda: steps(9, at=lambda step: waits(go, step == 2))) for session in (1, 3)]
        coordinator, membership, shard = one.servers[0].coordinator, one.servers[0].membership, one.servers[0].shard
        assert coordinator is not None and membership is not None
        assert pump(run, [root, one, other], lambda: waits_above(one))
        link = shard.parent_slot.link
        assert link is not None
        assert pump(run, [root, one, other], lambda: membership.clock == link.seat.clock), "the shard has reported it"
        before = membership.clock
        expire_member(one, 0)
        assert pump(run, [root, one, other], lambda: {*coordinator.clocks.resting} == {1, 2}), "it waits again"
        go.set()
        models = finished(run, [root, one, other], *done, *going)
        assert membership.clock == before, "it has pushed no more"
    assert all(np.array_equal(model, root_model(root)) for model in models)


def test_a_worker_that_comes_to_a_cluster_without_any_begins_at_the_run() -> None:
    root, (one, other) = family(replace(BARRIER, workers=2), Settings(sync="bsp"))
    go = threading.Event()
    with tree(root, one, other) as run:
        first = Script(run, 0, lambda: steps(20, finish=False, at=lambda step: waits(go, step == 1)))
        second = Script(run, 1, lambda: steps(2, finish=False))
        assert pump(run, [root, one, other], lambda: second.ended)
        run.sessions.pop(1).close(failed=True)
        member = member_of(other)
        assert pump(run, [root, one, other], lambda: member.phase is MemberPhase.OVER)
        go.set()
        assert pump(run, [root, one, other], lambda: first.ended)
        run.join(1)
        began: list[int] = []

        def joins() -> Array:
            model = steps(0, seed=9, finish=False)
            began.append(clock())
            return model

        (model,) = finished(run, [root, one, other], Script(run, 1, joins))
    assert began == [20] and np.array_equal(model, root_model(root))


# Servers above that refuse or go.


def test_a_refusal_of_any_shard_ends_the_cluster_with_its_sentence() -> None:
    above = replace(BARRIER, shards=2, compress_down="topk:0.2")
    root, (cluster,) = family(above, Settings(sync="bsp", shards=2), 1)

    def refused() -> None:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net)
        loss_of(net, 0).backward()
        optimizer.step()

    real = root.servers[1].handle

    def handle(peer: bytes, message: m.Message, now_ns: int) -> list[ServerEffect]:
        if not isinstance(message, m.Push):
            return real(peer, message, now_ns)
        below, shard = root.children[peer]
        refuse = m.Refuse(m.RefuseCode.INCOMPATIBLE, -1, 0, "no more of these")
        below._apply(shard, below.servers[shard].handle_above(refuse, now_ns))
        return []

    root.heard[1] = handle
    with tree(root, cluster) as run:
        script = Script(run, 0, refused)
        assert pump(run, [root, cluster], lambda: script.ended and cluster.stopped)
    assert cluster.stopped is not None and cluster.stopped.code == 5
    assert "no more of these" in cluster.stopped.text
    assert "no more of these" in str(script.error)


def test_a_cluster_whose_server_above_is_gone_leaves_a_checkpoint() -> None:
    root, (cluster,) = family(BARRIER, Settings(sync="bsp"), 1)
    gone = threading.Event()
    with tree(root, cluster) as run:
        script = Script(run, 0, lambda: steps(1000, at=lambda step: gone.set() if step == 5 else None))
        gone.wait(REAL_S)
        with root.changed:
            Held(cluster, 0, (m.Message,))
        assert pump(run, [cluster], lambda: cluster.stopped and script.ended)
    assert cluster.stopped is not None and cluster.stopped.code == 6
    assert cluster.checkpoints == [clock_of(cluster)]
    assert "the server has not answered for 30 s" in str(script.error)


SPARSE = Settings(sync="ssp", compress="topk:0.2+int8", compress_down="dense", shards=2)


def stopped_with_a_debt(root: Cluster, folder: Path) -> tuple[OnDisk, Array]:
    """A cluster below `root` that was stopped by Ctrl-C in the midst of its run; and the model that it had then."""
    cluster, go = OnDisk(Settings(sync="bsp", push="update", shards=2), folder, parent=root), threading.Event()
    with tree(root, cluster) as run:
        script = Script(run, 0, lambda: steps(1000, at=lambda step: go.set() if step == 7 else None))
        assert pump(run, [root, cluster], go.is_set)
        cluster.interrupt()
        assert pump(run, [root, cluster], lambda: script.ended and not cluster.runners[0].running)
    return cluster, root_model(cluster)


def ended(root: Cluster, cluster: Cluster) -> Array:
    """The model of the run above, after a worker here that adds nothing to it."""
    with tree(root, cluster) as run:
        finished(
            run,
            [root, cluster],
            Script(run, 0, lambda: train(2, lambda net: torch.optim.SGD(net.parameters(), lr=0.0))),
        )
    return root_model(root)


def test_a_cluster_that_is_resumed_owes_what_it_owed(tmp_path: Path) -> None:
    """The run above gets it once, as the residual of the next update: all that workers here had been acknowledged."""
    root = Cluster(SPARSE)
    cluster, had = stopped_with_a_debt(root, tmp_path)
    owed = np.concatenate([read(tmp_path, shard, clock_of(cluster))[0][OWED] for shard in range(2)])
    assert distance(root_model(root), had) > 1e-3 and distance(root_model(root) + owed, had) < 1e-5
    assert distance(ended(root, OnDisk(cluster.settings, tmp_path, resume=True, parent=root)), had) < 1e-5


def test_it_owes_nothing_where_the_run_above_begins_with_its_weights(tmp_path: Path) -> None:
    """Over other shards too."""
    _, had = stopped_with_a_debt(Cluster(SPARSE), tmp_path)
    root, below = Cluster(replace(SPARSE, shards=3)), Settings(sync="bsp", push="update", shards=3)
    assert distance(ended(root, OnDisk(below, tmp_path, resume=True, parent=root)), had) < 1e-5


def test_a_shard_that_goes_back_owes_what_it_owes(tmp_path: Path) -> None:
    """Another one failed. This one's pushes since then are in the model above, so an older debt would count twice."""
    root = Cluster(SPARSE)
    cluster, go = (
        OnDisk(replace(Settings(sync="bsp", push="update"), shards=2), tmp_path, parent=root),
        threading.Event(),
    )
    with tree(root, cluster) as run:
        script = Script(run, 0, lambda: steps(1000, at=lambda step: go.set() if step == 7 else None))
        assert pump(run, [root, cluster], go.is_set)
        with root.changed:
            server, coordinator = cluster.servers[0], cluster.servers[0].coordinator
            assert coordinator is not None and server.shard.parent_slot.kept.residual is not None
            owes = server.shard.parent_slot.kept.residual.copy()
            assert owes.any()
            ledger = replace(server.shard.ledger, members=(), plan=coordinator.members.plan_packed)
            server.shard.handle_ledger(replace(ledger, generation=ledger.generation + 1), root.now())
            planned = server.shard.model_shard
            assert planned is not None
            arrays = planned.store.arrays()
            planned.begin(LoadArrays(arrays | {OWED: np.ones_like(arrays["x"])}, 0))
            assert planned.parent_slot.kept.residual is not None and np.array_equal(
                planned.parent_slot.kept.residual, owes
            )
        run.sessions[0].close(failed=True)
        cluster.interrupt()
        pump(run, [root, cluster], lambda: script.ended)


# Everything at once.


@pytest.mark.parametrize("number", range(8))
def test_a_bad_link_between_levels_loses_nothing(number: int) -> None:
    """All end, and with the root's model. NARROWS_TEST_SEED replays a run."""
    rng = random.Random(f"{SEED} {number}")
    above, below = rng.choice(list(ABOVE)), rng.choice(list(BELOW))
    shards, clusters, deep = rng.choice([1, 2]), rng.choice([1, 2]), rng.random() < 0.3
    told = f"seed {SEED}: {below} below {above}, {shards} shards, {clusters} clusters, {3 if deep else 2} levels"
    root = Cluster(replace(ABOVE[above], shards=shards, workers=1 if deep else clusters))
    middle = [Cluster(replace(ABOVE[above], shards=shards, workers=clusters), root, "middle")] if deep else []
    parent = middle[0] if deep else root
    leaves = [Cluster(replace(BELOW[below], shards=shards, workers=2), parent, f"leaf{i}") for i in range(clusters)]
    everyone = [root, *middle, *leaves]
    faults = Faults(rng, 0.05)
    for child in (*middle, *leaves):
        faults.between(child)

    def done() -> bool:
        with root.changed:
            faults.some()
        return all(script.ended for script in scripts)

    with tree(root, *leaves) as run:
        scripts = [Script(run, session, lambda: steps(8)) for session in range(len(run.sessions))]
        assert pump(run, everyone, done), f"stuck, {told}"
    assert [script.error for script in scripts] == [None] * len(scripts), told
    for script in scripts:
        assert distance(script.result, root_model(root)) == 0.0, told
