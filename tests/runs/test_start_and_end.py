"""The bytes of start and end, in models: first weights, the last updates, and the model that all workers end with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, Link, store_of
from kit.one_process import master
from kit.reference import rounded_last
from kit.scripts import Array, Run, flat, run, seeded, tree
from torch import nn
from torch.utils.data import DataLoader

from narrows.protocols.config.settings import Settings
from narrows.protocols.messages import Buffer
from narrows.worker import DistributedOptimizer, sampler

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, STEPS = 160, 8
FRAMES = 0.05  # models: the headers of all messages, and messages without values
MODEL = 4 * WIDTH * WIDTH  # bytes
SPARSE = "topk:0.05+int8"
DATA: Any = list(range(64))


class Counted(Cluster):
    """Counts the bytes of all frames of its workers, each way."""

    up = down = 0

    def send(self, link: Link, shard: int, frames: list[bytes]) -> None:
        size = sum(map(len, frames))
        self.up, self.down = self.up + size, self.down - size  # `hold` counts them too
        super().send(link, shard, frames)

    def hold(self, link: Link, frames: Sequence[Buffer]) -> None:
        self.down += sum(map(len, frames))
        super().hold(link, frames)

    def models(self, since: tuple[int, int] = (0, 0)) -> tuple[float, float]:
        """Return the models up and down since these bytes."""
        return (self.up - since[0]) / MODEL, (self.down - since[1]) / MODEL


def build() -> nn.Module:
    return seeded(lambda: nn.Linear(WIDTH, WIDTH, bias=False))


def begin() -> tuple[nn.Module, DistributedOptimizer]:
    net = build()
    return net, DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-3), net)


def train(net: nn.Module, optimizer: DistributedOptimizer, worker: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(worker)
    for _ in range(steps):
        x = torch.randn(4, WIDTH, generator=generator)
        optimizer.zero_grad()
        (net(x) - x).pow(2).mean().backward()
        optimizer.step()


class Ends:
    """Trains with all workers of a run. Attributes: the models up and down of start, and of the end."""

    def __init__(self, started: Run, cluster: Counted, steps: int = STEPS) -> None:
        self.cluster, self.steps = cluster, steps
        self.start = self.end = (0.0, 0.0)
        self.begun = threading.Barrier(len(started.sessions), self._begun, timeout=60.0)
        self.trained = threading.Barrier(len(started.sessions), self._trained, timeout=60.0)
        self.models = started.together(self._script)
        self.end = cluster.models(self.at)

    def _begun(self) -> None:
        self.start = self.cluster.models()

    def _trained(self) -> None:
        self.at = self.cluster.up, self.cluster.down

    def _script(self, worker: int) -> Array:
        net, optimizer = begin()
        self.begun.wait()
        train(net, optimizer, worker, self.steps)
        self.trained.wait()
        optimizer.finish()
        return flat(net)


# The flags of a run with two workers; models up and down at its end.
ENDS: dict[str, tuple[dict[str, Any], float, float]] = {
    "bsp": ({"sync": "bsp"}, 0.0, 0.0),
    "bsp, updates": ({"sync": "bsp", "push": "update", "compress": SPARSE}, 0.76, 2.0),
    "ssp, gradients": ({"sync": "ssp", "push": "gradient"}, 0.0, 2.0),
    "ssp": ({"sync": "ssp"}, 0.0, 2.0),
    "ssp int8": ({"sync": "ssp", "compress": "int8"}, 0.76, 0.76 + 1.0),
    "ssp sparse": ({"sync": "ssp", "compress": SPARSE}, 0.76, 0.76 + 0.1),
    "async sparse": ({"sync": "async", "compress": SPARSE}, 0.76, 0.76 + 0.1),
    "local": ({"sync": "local", "local_steps": 4}, 0.0, 0.0),
    "local 2bit": ({"sync": "local", "local_steps": 4, "compress": "2bit"}, 0.76, 0.76 + 0.15),
    "local, fragments": ({"sync": "local", "local_steps": 2, "fragments": 2, "compress": SPARSE}, 0.76, 0.76 + 0.1),
}


@pytest.mark.parametrize("name", ENDS)
def test_each_value_travels_once_at_start_and_end(name: str) -> None:
    """And all workers and the server end with the same values, bit for bit."""
    flags, up, down = ENDS[name]
    cluster = Counted(Settings(**flags, workers=2, shards=2))
    with run(cluster.settings, cluster) as started:
        ends = Ends(started, cluster)
        assert np.array_equal(ends.models[0], ends.models[1]) and np.array_equal(ends.models[0], master(started))
    assert ends.start[0] < 1 + FRAMES and ends.start[1] < 1 + FRAMES
    assert ends.end[0] <= up + FRAMES and ends.end[1] <= down + FRAMES


@pytest.mark.parametrize("compress", ["dense", SPARSE])
@pytest.mark.parametrize("sync", ["bsp", "ssp"])
def test_a_loader_that_ends_shows_the_shared_model_for_what_it_lacks(sync: str, compress: str) -> None:
    """The last step of `sampler(steps=)` shows it too; then the end takes what has changed since."""
    push = "update" if compress != "dense" else ""
    cluster = Counted(Settings(sync=sync, push=push, compress=compress, workers=2, shards=2))
    before = list[tuple[int, int]]()
    with run(cluster.settings, cluster) as started:
        last = threading.Barrier(2, lambda: before.append((cluster.up, cluster.down)), timeout=60.0)

        def script(worker: int) -> Array:
            net, optimizer = begin()
            for step, _ in enumerate(DataLoader(DATA, 4, sampler=sampler(DATA, 4, steps=STEPS))):
                if step == STEPS - 1:
                    last.wait()
                train(net, optimizer, worker, 1)
            optimizer.finish()
            return flat(net)

        one, other = started.together(script)
        assert np.array_equal(one, other) and np.array_equal(one, master(started))
    down = cluster.models(before[0])[1]
    # bsp: the states of the last step, and of the last updates; ssp: two models that are shown, or what they lack
    assert (
        down <= {"bsp": 2.0 if compress == "dense" else 4.0, "ssp": 6.0 if compress == "dense" else 1.7}[sync] + FRAMES
    )


def test_a_worker_that_leaves_takes_what_it_lacks() -> None:
    cluster = Counted(Settings(sync="ssp", compress=SPARSE, workers=2, shards=2))
    left = list[float]()
    with run(cluster.settings, cluster) as started:
        both = threading.Barrier(2, timeout=60.0)

        def script(worker: int) -> Array:
            net, optimizer = begin()
            train(net, optimizer, worker, STEPS)
            both.wait()
            if worker:
                at = cluster.up, cluster.down
                optimizer.leave()
                left.append(cluster.models(at)[1])
                stores = [store_of(server) for server in cluster.servers]
                shown = np.concatenate([store.p + rounded_last(store.x - store.p) for store in stores])
                assert np.array_equal(flat(net), shown)
            both.wait()
            train(net, optimizer, worker, 0 if worker else 2)
            optimizer.finish()
            return flat(net)

        one, _ = started.together(script)
        assert np.array_equal(one, master(started))
    assert left[0] < 0.38 + 0.1 + FRAMES


def test_a_worker_that_joins_late_ends_with_the_same_values() -> None:
    """It gets a state whole, and then, as the others do, what that lacks of the last model."""
    cluster = Counted(Settings(sync="ssp", compress=SPARSE, shards=2))
    at = list[tuple[int, int]]()
    with run(cluster.settings, cluster) as started:
        first = begin()
        train(*first, 0, 3)
        started.join()
        joined = threading.Barrier(2, timeout=60.0)
        trained = threading.Barrier(2, lambda: at.append((cluster.up, cluster.down)), timeout=60.0)

        def script(worker: int) -> Array:
            net, optimizer = begin() if worker else first
            joined.wait()
            assert optimizer._engine is not None
            while optimizer._engine.sync.clock < 7:  # of both alike: none waits for a push of the other after that
                train(net, optimizer, worker, 1)
            trained.wait()
            optimizer.finish()
            return flat(net)

        one, other = started.together(script)
        assert np.array_equal(one, other) and np.array_equal(one, master(started))
    up, down = cluster.models(at[0])
    assert up < 0.76 + FRAMES and down < 0.76 + 0.1 + FRAMES


def test_a_cluster_takes_the_last_model_as_a_difference() -> None:
    """And hands it on to its workers whole: all end with the values of the root."""
    root = Cluster(Settings(sync="ssp", compress=SPARSE, workers=2, shards=2))
    below = [Cluster(Settings(sync="bsp", workers=1, shards=2), root, f"cluster{index}") for index in range(2)]
    with tree(root, *below) as started:
        at = list[list[int]]()
        trained = threading.Barrier(2, lambda: at.extend([*each.bytes_above] for each in below), timeout=60.0)

        def script(worker: int) -> Array:
            net, optimizer = begin()
            train(net, optimizer, worker, STEPS)
            trained.wait()
            optimizer.finish()
            return flat(net)

        one, other = started.together(script)
        last = np.concatenate([store_of(server).x for server in root.servers])
        assert np.array_equal(one, other) and np.array_equal(one, last)
    for each, (up, down) in zip(below, at, strict=True):
        assert each.bytes_above[0] - up < (0.38 + FRAMES) * MODEL
        assert each.bytes_above[1] - down < (0.38 + 0.1 + FRAMES) * MODEL


def test_parameters_that_a_script_has_changed_are_no_pulled_state() -> None:
    """Where the parameters are the pulled state (bsp), they come again."""
    with run(Settings(sync="bsp", shards=2)) as started:
        net, optimizer = begin()
        train(net, optimizer, 0, 2)
        with torch.no_grad():
            net.get_parameter("weight").zero_()
        optimizer.finish()
        assert np.array_equal(flat(net), master(started)) and flat(net).any()
