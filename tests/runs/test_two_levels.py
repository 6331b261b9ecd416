"""Clusters below a server: each is one worker of it, reads its own writes toward it, and all end with one model."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, member_of
from kit.processes import until
from kit.scripts import Array, build, distance, flat, loss_of, mean_loss, train, tree
from kit.two_levels import ABOVE, BELOW, STEPS, family, one_process, root_model, sgd

from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, Log
from narrows.protocols.member.member import MemberPhase
from narrows.protocols.messages import TEXT_MAX, Hello
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.worker import DistributedOptimizer, clock, world_size


def script(worker: int) -> Array:
    return train(STEPS, sgd)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("clusters", "workers"), [(1, 2), (2, 1), (2, 2)])
def test_barriers_on_both_levels_are_one_process(shards: int, clusters: int, workers: int) -> None:
    """SGD is linear in the gradient: the mean of the clusters' updates is the update of the mean gradient."""
    root, below = family(
        Settings(sync="bsp", push="update", shards=shards, workers=clusters),
        Settings(sync="bsp", shards=shards, workers=workers),
        clusters,
    )
    with tree(root, *below) as started:
        models = started.together(script)
    assert all(np.array_equal(model, models[0]) for model in models)
    assert np.array_equal(models[0], root_model(root))
    assert distance(models[0], one_process()) < 1e-5


@pytest.mark.parametrize(
    ("above", "below"),
    [(a, b) for row, a in enumerate(ABOVE) for column, b in enumerate(BELOW) if (row + column) % 2 == 0],
)  # every second pair: each mode with three of the others; tests/runs/test_two_level_faults.py draws any pair
def test_every_mode_on_both_levels(above: str, below: str) -> None:
    def settings(base: Settings, **more: Any) -> Settings:
        return Settings(**{name: getattr(base, name) for name in Settings.__slots__} | more)

    root, clusters = family(settings(ABOVE[above], shards=2, workers=2), settings(BELOW[below], shards=2, workers=2))
    with tree(root, *clusters) as started:
        models = started.together(script)
        for session in started.sessions:
            session.close(failed=False)
    assert np.isfinite(models[0]).all()
    for model in models:
        np.testing.assert_array_equal(model, models[0])
    np.testing.assert_array_equal(models[0], root_model(root))
    for cluster in clusters:
        for server in cluster.servers:
            assert server.shard.at_rest
            assert server.coordinator is None or server.coordinator.over
    assert root.servers[0].coordinator is not None and root.servers[0].coordinator.over
    first, alone_, ours = (mean_loss(weights, STEPS) for weights in (flat(build()), one_process(), models[0]))
    assert ours < first - 0.3 * (first - alone_)


def test_bytes_above_are_those_of_one_worker() -> None:
    """However many workers a cluster has: what they push is folded before it is coded (HiTopKComm, 2010.10458)."""
    above = Settings(sync="bsp", push="update", workers=2, compress="topk:0.1+int8")
    moved = []
    for workers in (1, 4):
        root, below = family(above, Settings(sync="bsp", workers=workers))
        with tree(root, *below) as started:
            started.together(script)
        moved.append([cluster.bytes_above for cluster in below])
    for one, four in zip(*moved, strict=True):
        # A state more or less is a matter of timing; flat it would be 4 times as much.
        assert four == pytest.approx(one, rel=0.3)


def test_a_cluster_that_comes_late_begins_where_the_run_is() -> None:
    """And its workers' clock is the run's, in steps of theirs."""
    root, (first,) = family(
        Settings(sync="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0), Settings(sync="bsp"), 1
    )

    def steps(net: torch.nn.Module, optimizer: DistributedOptimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(net, clock()).backward()
            optimizer.step()

    with tree(root, first):
        early = build()
        optimizer = DistributedOptimizer(sgd(early), early)
        steps(early, optimizer, 6)
        assert clock() == 6
        with tree(root, Cluster(Settings(sync="bsp"), root, "late"), first_rank=1) as joined:
            net = build(seed=3)
            DistributedOptimizer(sgd(net), net)
            assert clock() == 6 and world_size() == 1
            np.testing.assert_array_equal(flat(net), root_model(root))
            joined.sessions[0].close(failed=True)


def test_without_workers_a_cluster_leaves_and_comes_back() -> None:
    """Or the run above would wait for it."""
    root, below = family(Settings(sync="bsp", push="update", workers=2), Settings(sync="bsp"))
    with tree(root, *below) as started:
        coordinator, member = root.servers[0].coordinator, member_of(below[1])
        assert coordinator is not None

        def one(worker: int) -> None:
            net = build()
            optimizer = DistributedOptimizer(sgd(net), net)
            loss_of(net, 0).backward()
            optimizer.step()
            if worker == 1:
                started.sessions[1].close(failed=True)

        started.together(one)
        assert len(coordinator.declared) == 2
        with root.changed:
            below[1]._apply(0, below[1].servers[0].tick(below[1].now()))
        assert len(coordinator.declared) == 1 and member.phase is MemberPhase.OVER
        before = coordinator.min_clock
        started.join(1)
        net = build(seed=9)

        def declare() -> None:
            DistributedOptimizer(sgd(net), net)

        thread = started.aside(declare)
        late = below[1].servers[0].coordinator
        assert late is not None
        until(lambda: late.parent_place.undeclared, "the worker to declare its model", 10.0)
        with root.changed:
            below[1]._apply(0, below[1].servers[0].tick(below[1].now()))
        thread.join(10.0)
        assert not thread.is_alive() and len(coordinator.declared) == 2 and coordinator.min_clock >= before
        np.testing.assert_array_equal(flat(net), root_model(root))


@pytest.mark.parametrize(("above", "below", "said"), [
    (Settings(sync="bsp"), Settings(), "it takes gradients (--sync bsp) and a cluster pushes updates: start it with --push"),
    (Settings(sync="local", local_seconds=5.0), Settings(), "its rounds end by time (--local-seconds), and a cluster's shards"),
    (Settings(sync="local", fragments=2), Settings(), "it merges fragments of the model (--fragments, --merge-delay, --merge-"),
    (Settings(dp_clip=1.0), Settings(), "it asks for --dp-clip, which workers alone obey: give the flag to this ps-serve"),
    (Settings(shards=2), Settings(), "it has 2 shards and this cluster 1, and each pushes to one: give --shards 2 here"),
    (Settings(), Settings(cut="tensors"), "it has --cut values and this cluster --cut tensors, so shards have other keys"),
])  # fmt: skip
def test_what_does_not_fit_is_one_sentence(above: Settings, below: Settings, said: str) -> None:
    root, (cluster,) = family(above, below, 1)
    assert cluster.stopped is not None and cluster.stopped.code == 5
    assert said in cluster.stopped.text and cluster.stopped.text.startswith("the parent, tcp://parent:1: ")
    assert root.servers[0].coordinator is not None


def test_every_level_shows_the_whole_tree() -> None:
    root, clusters = family(Settings(sync="ssp", compress="topk:0.2", workers=2), Settings(sync="bsp", workers=2))
    shown: list[str] = []
    pause = threading.Barrier(4)

    def look(worker: int) -> None:
        net = build()
        optimizer = DistributedOptimizer(sgd(net), net)
        pause.wait(30)
        for _ in range(
            2 if worker == 0 else 0
        ):  # a heartbeat of each brings what is below it, its answer all that is known
            root.held_ns += 3 * NS
            for each in clusters:
                with root.changed:
                    each.held_ns = root.held_ns
                    each._apply(0, each.servers[0].tick(each.now()))
        for each in (root, *clusters) if worker == 0 else ():
            (log,) = each.servers[0].show_tree()
            assert isinstance(log, Log)
            shown.append(str(log.values["text"]))
        pause.wait(30)
        optimizer.finish()

    with tree(root, *clusters) as started:
        started.together(look)
    assert shown[0] == shown[2], "who asked last knows as much as the root"
    lines = shown[0].splitlines()
    assert lines[1].startswith("--sync ssp, staleness 1, --compress topk:0.2, --compress-down topk:0.2, 1 shards")
    assert [line.split(" (")[0] for line in lines[2:]] == [
        *("    rank 0", "        rank 0", "        rank 1", "    rank 1", "        rank 0", "        rank 1"),
    ]
    assert "cluster: --sync bsp, staleness 0, --compress dense" in lines[2]


def test_a_large_tree_is_shown_as_far_as_it_fits_a_message() -> None:
    coordinator = Coordinator(Settings(workers=400).validated(), 1)
    for worker in range(400):
        seat = coordinator.run.sit(Hello(f"{worker}", "host"), b"", 0)
        coordinator.members.admit(seat, "", 0)
    lines = coordinator.tree().splitlines()
    assert len("\n".join(lines)) <= TEXT_MAX and lines[-1] == f"    and {401 - (len(lines) - 1)} lines more"
