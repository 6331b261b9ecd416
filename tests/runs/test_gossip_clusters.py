"""Gossip among clusters: shards of servers mix as workers do; the server above is only where they meet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.gossip_reference import STEPS, TRAINS, adamw, ends, reference, sgd
from kit.in_process import Cluster, member_of, store_of
from kit.processes import serving, started, until
from kit.scripts import Array, build, distance, flat, loss_of, mean_loss, train, tree
from kit.two_levels import family, one_process, root_model
from kit.virtual_time import Held, Script, finished, pump, steps, waits

from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import Log, ServerEffect, WriteCheckpoint
from narrows.protocols.gossip.gain import WINDOW
from narrows.protocols.member.member import MemberPhase
from narrows.protocols.wire import encode
from narrows.ps.parent.parent_gossip import ParentGossip
from narrows.ps.parent.parent_link import ParentSeat, ParentState
from narrows.ps.shard.shard import Shard
from narrows.worker import DistributedOptimizer, clock, rank, world_size


def gossip(**more: Any) -> Settings:
    told: dict[str, Any] = {"sync": "gossip", "topology": "matching", "staleness": 0}
    return Settings(**told | more)


def script(worker: int) -> Array:
    return train(STEPS, sgd)


def round_of(shard: Shard) -> int:
    """0 before it knows the clusters that it mixes with."""
    return shard.parent_slot.link.driver.round if isinstance(shard.parent_slot.link, ParentGossip) else 0


def trained(above: Settings, below: Settings, clusters: int) -> tuple[Cluster, list[Cluster], list[Array]]:
    """A run of `clusters`, all of whose workers run the script to its end; their models."""
    root, families = family(above, below, clusters)
    with tree(root, *families) as run:
        models = run.together(script)
        for session in run.sessions:
            session.close(failed=False)
        everyone = [*families, root]
        assert pump(run, everyone, lambda: all(cluster.stopped for cluster in everyone), 60.0), "they end"
    return root, families, models


def test_clusters_scale_their_updates_by_what_others_tell() -> None:
    """Each shard by its own keys; of SGD the gain is 1, and the reference above holds."""

    def gains(make: Any, **more: Any) -> list[float | None]:
        root, families = family(gossip(workers=2, shards=2, **more), Settings(shards=2), 2)
        with tree(root, *families) as run:
            run.together(lambda worker: train(3 * WINDOW, make))
            found = [cast(Any, server).shard.parent_slot.kept.gain for each in families for server in each.servers]
        return [gain and gain.factor for gain in found]

    assert all(gain is not None and 1.01 < gain <= 2**0.5 for gain in gains(adamw))
    assert gains(sgd) == [1.0] * 4
    assert gains(adamw, update_gain=1.125) == [1.125] * 4
    assert gains(adamw, local_steps=2) == [None] * 4


def assert_ended(root: Cluster, clusters: list[Cluster], models: list[Array]) -> None:
    for model in models:
        np.testing.assert_array_equal(model, models[0])
    np.testing.assert_array_equal(models[0], root_model(root))
    for cluster in (root, *clusters):
        assert cluster.stopped is not None and cluster.stopped.code == 0
        assert all(server.shard.at_rest for server in cluster.servers)


@pytest.mark.parametrize(
    ("clusters", "workers", "bound", "shards"), [(2, 2, 0, 1), (2, 2, 1, 2), (3, 1, 0, 2), (3, 1, 1, 1)]
)
def test_barriers_below_are_decentralized_sgd(clusters: int, workers: int, bound: int, shards: int) -> None:
    """SGD is linear in the gradient: a cluster is one worker with the mean gradient of its own; twice the same, bit for bit."""
    ends = []
    for _ in range(2):
        above = gossip(workers=clusters, staleness=bound, shards=shards)
        ended = trained(above, Settings(sync="bsp", workers=workers, shards=shards), clusters)
        assert_ended(*ended)
        ends.append(ended[2][0])
    assert np.array_equal(ends[0], ends[1])
    assert distance(ends[0], reference("matching", clusters, bound)) < 1e-5


def test_clusters_make_an_outer_step_of_each_round() -> None:
    above = gossip(workers=2, staleness=0, outer_lr=0.7, outer_momentum=0.6)
    ended = trained(above, Settings(sync="bsp", workers=2), 2)
    assert_ended(*ended)
    assert distance(ended[2][0], reference("matching", 2, 0, outer=(0.7, 0.6))) < 1e-5


BELOW = {
    "bsp": Settings(sync="bsp", workers=2),
    "ssp": Settings(sync="ssp", staleness=1, compress="topk:0.3", workers=2),
    "async": Settings(sync="async", workers=2),
    "local": Settings(sync="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0, workers=2),
}


MIXES: list[dict[str, Any]] = [
    {"compress": "dense"},
    {"compress": "topk:0.1+int8", "staleness": 1},
    {"compress": "topk:0.1+int8", "topology": "ring", "local_steps": 3},
    {"topology": "random", "staleness": -1},
]


@pytest.mark.parametrize(
    ("above", "shards", "below"),
    [(above, 1 + (row + column) % 2, below) for row, above in enumerate(MIXES) for column, below in enumerate(BELOW)],
    ids=str,
)
def test_every_mode_below_ends_with_one_model(above: dict[str, Any], shards: int, below: str) -> None:
    settings = Settings(**{name: getattr(BELOW[below], name) for name in Settings.__slots__} | {"shards": shards})
    root, clusters, models = trained(gossip(workers=3, shards=shards, **above), settings, 3)
    assert_ended(root, clusters, models)
    first, alone_, ours = (mean_loss(weights, STEPS) for weights in (flat(build()), one_process(), models[0]))
    assert ours < first - 0.25 * (first - alone_)


class Writing(Cluster):
    """Its shards have a disk, from which nobody reads: a shard whose plan changes goes on from its memory."""

    def _carry_out(self, index: int, made: Sequence[ServerEffect]) -> None:
        super()._carry_out(index, made)
        for at in [effect.clock for effect in made if isinstance(effect, WriteCheckpoint)]:
            self._apply(index, self.servers[index].wrote_checkpoint(at, (at,), 0, self.now()))

    def change(self, **way: Any) -> None:
        """Change settings of the running run, as --replan change does."""
        coordinator = self.servers[0].coordinator
        assert coordinator is not None
        with self.changed:
            coordinator.resharding.change(coordinator.run.settings.changed(**way))
            self._apply(0, self.servers[0].tick(self.now()))


def test_a_cluster_changes_its_own_plan_and_mixes_on() -> None:
    """Its shards go on with their weights and their peers: all end with one model, near that of the clusters as they began."""
    below = Settings(sync="bsp", push="update", workers=1, shards=2, update_gain=1.0)

    def ended(plans: bool) -> Array:
        root = Cluster(gossip(workers=2, shards=2))
        changing = Writing(below, root, "cluster0")
        clusters = [changing, Cluster(below, root, "cluster1")]

        def changes(worker: int) -> Array:
            net = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(net, step, worker, 2).backward()
                if plans and worker == 0 and step == STEPS // 3:
                    changing.change(sync="ssp", staleness=2, compress="int8")
                optimizer.step()
            optimizer.finish()
            with optimizer.shared():
                return flat(net)

        with tree(root, *clusters) as run:
            models = run.together(changes)
            for session in run.sessions:
                session.close(failed=False)
            everyone = [*clusters, root]
            assert pump(run, everyone, lambda: all(cluster.stopped for cluster in everyone), 60.0), "they end"
        coordinator = changing.servers[0].coordinator
        assert coordinator is not None
        plan = coordinator.run.settings
        assert (plan.plan_number, plan.sync, plan.compress) == ((2, "ssp", "int8") if plans else (1, "bsp", "dense"))
        assert_ended(root, clusters, models)
        model: Array = models[0]
        return model

    undisturbed = ended(plans=False)
    assert distance(ended(plans=True), undisturbed) < 0.1 * distance(flat(build()), undisturbed)


def test_the_mean_of_the_clusters_is_kept_by_every_round() -> None:
    """Clusters that compute alike would hide it: each has rows of its own, and mixes one value in ten."""
    above = gossip(workers=3, topology="ring", compress="topk:0.1+int8", staleness=1)
    root, clusters = family(above, Settings(sync="bsp"), 3)
    shards = [cluster.servers[0].shard for cluster in clusters]
    go = threading.Event()
    with tree(root, *clusters) as run:
        scripts = [Script(run, worker, lambda: steps(9, at=lambda step: waits(go, step == 8))) for worker in range(3)]
        until(lambda: all(round_of(shard) == 9 for shard in shards), "nine rounds", 20.0)
        with root.changed:
            models = np.stack([store_of(cluster.servers[0]).x for cluster in clusters]).astype(np.float64)
        assert len({model.tobytes() for model in models}) == 3
        go.set()
        ended = finished(run, [root, *clusters], *scripts)
    np.testing.assert_allclose(ended[0], models.mean(0), atol=1e-6)


def test_a_cluster_that_comes_late_begins_with_the_model_and_the_round_of_a_peer() -> None:
    root, clusters = family(gossip(workers=2, shards=2), Settings(sync="bsp", shards=2), 2)
    go = threading.Event()
    began: list[tuple[int, Array]] = []

    def late() -> Array:
        net = build(seed=99)
        optimizer = DistributedOptimizer(sgd(net), net)
        began.append((clock(), flat(net)))
        for _ in range(clock(), 9):
            optimizer.zero_grad()
            loss_of(net, clock(), rank(), world_size()).backward()
            optimizer.step()
        optimizer.finish()
        with optimizer.shared():
            return flat(net)

    with tree(root, *clusters) as run:
        two = [Script(run, worker, lambda: steps(9, at=lambda step: waits(go, step == 4))) for worker in range(2)]
        shard = clusters[0].servers[0].shard
        until(lambda: round_of(shard) == 5, "five rounds", 20.0)
        joining = Cluster(Settings(sync="bsp", shards=2), root, "late")
        with tree(root, joining, first_rank=2) as others:
            third = Script(others, 0, late)
            assert pump(run, [root, *clusters, joining], lambda: began)
            go.set()
            run.sessions += others.sessions
            models = finished(run, [root, *clusters, joining], *two, third)
    ((at, first),) = began
    assert at == 5 and distance(first, flat(build(seed=99))) > 0.5
    assert all(np.array_equal(model, models[0]) for model in models)


def test_a_late_cluster_waits_for_a_peer_whose_first_weights_are_still_on_their_way() -> None:
    """It has no model to give yet, and says so for longer than a lease: that is not silence."""
    root, (first,) = family(gossip(workers=1), Settings(sync="bsp"), 1)
    held = Held(first, 0, (m.State,))
    with tree(root, first) as run:
        one = Script(run, 0, lambda: steps(3))
        assert pump(run, [root, first], lambda: held.late)
        joining = Cluster(Settings(sync="bsp"), root, "late")
        with tree(root, joining, first_rank=1) as others:
            two = Script(others, 0, lambda: steps(3))
            run.sessions += others.sessions
            assert not pump(run, [root, first, joining], lambda: joining.stopped, 30.0), joining.stopped
            held.release()
            models = finished(run, [root, first, joining], one, two)
    assert np.array_equal(models[0], models[1])


def nine_steps(silent: bool) -> Array:
    """The last model of two clusters; `silent`: the server above is, from round 5 on."""
    root, clusters = family(gossip(workers=2, shards=2), Settings(sync="bsp", shards=2), 2)
    go = threading.Event()
    with tree(root, *clusters) as run:
        two = [Script(run, worker, lambda: steps(9, at=lambda step: waits(go, step == 4))) for worker in range(2)]
        members = [member_of(cluster) for cluster in clusters]
        if silent:
            until(lambda: round_of(clusters[0].servers[0].shard) == 5, "five rounds", 20.0)
            for index in range(len(root.servers)):
                root.heard[index] = lambda *told: []
            assert pump(run, clusters, lambda: all(member.phase is MemberPhase.ALONE for member in members), 60.0)
        go.set()
        everyone = clusters if silent else [root, *clusters]
        model = finished(run, everyone, *two)[0]
        for session in run.sessions:
            session.close(failed=False)
        assert pump(run, everyone, lambda: all(cluster.stopped for cluster in clusters), 60.0)
    assert [cluster.stopped.code for cluster in clusters if cluster.stopped is not None] == [0, 0]
    return model


def test_the_server_above_is_not_needed_once_the_clusters_know_each_other() -> None:
    """Silent from the middle on: all steps and the end are the same, bit for bit."""
    assert np.array_equal(nine_steps(silent=False), nine_steps(silent=True))


def test_a_cluster_that_falls_silent_is_mixed_with_no_more() -> None:
    root, clusters = family(gossip(workers=3), Settings(sync="bsp"), 3)
    go = threading.Event()
    with tree(root, *clusters) as run:
        two = [Script(run, worker, lambda: steps(9, at=lambda step: waits(go, step == 4))) for worker in range(2)]
        Script(run, 2, lambda: steps(3, finish=False))
        dead = clusters.pop()
        until(lambda: round_of(dead.servers[0].shard) == 3, "three rounds", 20.0)
        with root.changed:
            dead.heard[0] = lambda *told: []
        run.sessions.pop()
        go.set()
        models = finished(run, [root, *clusters], *two)
    assert np.array_equal(models[0], models[1])


def test_a_cluster_that_leaves_with_its_last_ack_lost_keeps_nobody_from_ending() -> None:
    root, clusters = family(gossip(workers=2), Settings(sync="bsp"), 2)
    with tree(root, *clusters) as run:
        leaver = member_of(clusters[1])
        root.lost = lambda tell: isinstance(tell.message, m.OfferAck) and tell.message.worker == leaver.worker
        finished(run, [root, *clusters], *(Script(run, worker, lambda: steps(3)) for worker in range(2)))
        for session in run.sessions:
            session.close(failed=False)
        everyone = [root, *clusters]
        assert pump(run, everyone, lambda: all(cluster.stopped for cluster in everyone), 120.0), "they end"
    assert [cluster.stopped.code for cluster in everyone if cluster.stopped is not None] == [0, 0, 0]


def test_a_peer_that_says_nonsense_before_it_is_known_is_dropped() -> None:
    """It asks for the model, which is not here yet, and offers none that is one, before the roster names it."""
    place = ParentSeat(gossip(workers=2).validated(), 0, 1, 0, 0, (1,))
    shard = ParentGossip(0, place, (0, 4), ParentState(), None, Timing())
    shard.begin(0)
    for message in (m.ModelRequest(1, 0), m.Offer(1, 0, 1, 0, 0, 0, 1, 0, 4, 9.0, True, RAW, bytes(16))):
        assert shard.hear(message, 0) == []
    rows = tuple((worker, 1, worker, 0) for worker in range(2))
    roster = m.Roster(0, 1, False, rows, ("tcp://a:1", "tcp://b:1"), False)
    (parted,) = (each for each in shard.introduce(bytes(encode(roster)[0]), False, 0) if isinstance(each, Log))
    assert "weight 9" in str(parted.values["text"]) and not shard.peers.peers


def test_processes_go_on_when_the_server_above_is_killed(tmp_path: Path) -> None:
    """Two clusters of two shards and two workers each; all end with one model, and with 0."""
    path = tmp_path / "script.py"
    path.write_text(TRAINS.replace('print("ends"', 'with optimizer.shared(): print("ends"'))
    below = ("--sync", "bsp", "--push", "update", "--workers", "2", "--shards", "2", "--parent-timeout", "3")
    with serving("--sync", "gossip", "--workers", "2", "--shards", "2", cwd=tmp_path) as root:
        parent = ("--parent", root.address)
        with (
            serving(*below, *parent) as one,
            serving(*below, *parent) as other,
            started("ps-worker", "--server", one.address, "-n", "2", str(path)) as first,
            started("ps-worker", "--server", other.address, "-n", "2", str(path)) as second,
        ):
            until(lambda: (first.out + second.out).count("trains") == 4, f"{first}\n{second}")
            root.kill()
            for command in (first, second, one.command, other.command):
                assert command.wait() == 0, command
            assert len(ends(first.out) | ends(second.out)) == 1
            assert "is lost; the clusters go on without it" in one.command.out
