"""Gossip among clusters: shards of servers mix as workers do; the server above is only where they meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from in_process import Cluster
from scripts import Array, build, distance, flat, loss_of, tree
from test_gossip import STEPS, reference, sgd
from test_tree import family, mean_loss, one_process, root_model
from test_tree_faults import pump

from narrows.protocols.modes import Settings
from narrows.worker import DistributedOptimizer, rank, world_size


def gossip(**more: Any) -> Settings:
    return Settings(**{"sync": "gossip", "topology": "matching", "staleness": 0} | more)


def script(worker: int) -> Array:
    """STEPS steps on this worker's share of the batch; the model that it ends with."""
    net = build()
    optimizer = DistributedOptimizer(sgd(net), net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, rank(), world_size()).backward()
        optimizer.step()
    optimizer.finish()
    with optimizer.shared():
        return flat(net)


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


def assert_ended(root: Cluster, clusters: list[Cluster], models: list[Array]) -> None:
    for model in models:
        np.testing.assert_array_equal(model, models[0])
    np.testing.assert_array_equal(models[0], root_model(root))
    for cluster in (root, *clusters):
        assert cluster.stopped is not None and cluster.stopped.code == 0
        assert all(server.shard.at_rest for server in cluster.servers)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize(("clusters", "workers"), [(2, 2), (3, 1)])
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


BELOW = {
    "bsp": Settings(sync="bsp", workers=2),
    "ssp": Settings(sync="ssp", staleness=1, compress="topk:0.3", workers=2),
    "async": Settings(sync="async", workers=2),
    "local": Settings(sync="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0, workers=2),
}


@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "above",
    [
        {"compress": "dense"},
        {"compress": "topk:0.1+int8", "staleness": 1},
        {"compress": "topk:0.1+int8", "topology": "ring", "local_steps": 3},
        {"topology": "random", "staleness": -1},
    ],
    ids=str,
)
def test_every_mode_below_ends_with_one_model(above: dict[str, Any], shards: int, below: str) -> None:
    settings = Settings(**{name: getattr(BELOW[below], name) for name in Settings.__slots__} | {"shards": shards})
    root, clusters, models = trained(gossip(workers=3, shards=shards, **above), settings, 3)
    assert_ended(root, clusters, models)
    first, alone_, ours = (mean_loss(weights) for weights in (flat(build()), one_process(), models[0]))
    assert ours < first - 0.25 * (first - alone_)
