"""Part of the golden record: digits in two cities, each a cluster of two workers below one root, in one process.

Under bsp on both levels the last model is the same bit for bit. Under ssp it depends on which worker is faster. In one recorded
run workers take turns. Of three runs without turns the record has the medians of loss and bytes, which are compared with room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from kit.scripts import seeded, tree
from kit.tasks import load
from kit.two_levels import family, root_model
from torch import nn

from golden.digests import Entries, arrays_digest
from narrows.protocols.config.settings import Settings
from narrows.worker import DistributedOptimizer, rank, world_size

RUNS = 3  # without turns
STEPS = 200
BATCH = 256  # of all workers
WORKERS = 2  # of each city, as cities
COMPRESS = "topk:0.05+int8"
BSP = (
    Settings(sync="bsp", push="update", compress=COMPRESS, workers=WORKERS),
    Settings(sync="bsp", workers=WORKERS),
)
SSP = (
    Settings(sync="ssp", staleness=2, compress=COMPRESS, compress_down=COMPRESS, workers=WORKERS),
    Settings(sync="ssp", staleness=2, workers=WORKERS),
)


class Measured(NamedTuple):
    """Of one run: the loss of the last model on all images for training, bytes between cities and root, up and down, and a
    digest of that model."""

    loss: float
    up: int
    down: int
    model: str


class Turns:
    """Workers step one after the other. One that has done its last step gives up its turn for good."""

    def __init__(self, workers: int) -> None:
        self.queue, self.changed = [*range(workers)], threading.Condition()

    @contextmanager
    def of(self, worker: int) -> Iterator[None]:
        with self.changed:
            if not self.changed.wait_for(lambda: self.queue[0] == worker, timeout=60.0):
                raise TimeoutError(f"worker {worker} never had its turn")
        yield
        with self.changed:
            self.queue.append(self.queue.pop(0))
            self.changed.notify_all()

    def end(self, worker: int) -> None:
        with self.of(worker):
            pass
        with self.changed:
            self.queue.remove(worker)
            self.changed.notify_all()


def cities_part() -> Entries:
    return {"bsp over bsp, model": _bsp, TURNS: _in_turn, MEDIANS: _medians}


TURNS = "ssp over ssp, workers in turn: loss, bytes up, bytes down"
MEDIANS = "ssp over ssp, medians: loss, bytes"
ROOMS = {
    TURNS: (0.0005, 0.0005, 0.0005),
    MEDIANS: (0.006, 0.01),
}  # relative; who ends first is left to chance also in turn


def same(name: str, then: str, now: str) -> bool:
    """Whether an entry is the same: losses and bytes within their room, all else to the bit."""
    if name not in ROOMS:
        return then == now
    pairs = zip(then.split(), now.split(), ROOMS[name], strict=True)
    return all(abs(float(after) - float(before)) <= room * float(before) for before, after, room in pairs)


def _bsp() -> str:
    return _measured(*BSP, turns=False).model


def _in_turn() -> str:
    run = _measured(*SSP, turns=True)
    return f"{run.loss:.5f} {run.up} {run.down}"


def _medians() -> str:
    runs = [_measured(*SSP, turns=False) for _ in range(RUNS)]
    return f"{median(run.loss for run in runs):.5f} {median(run.up + run.down for run in runs)}"


def _measured(above: Settings, below: Settings, turns: bool) -> Measured:
    digits = load("digits")
    images, _, labels, _ = digits.digits()
    root, clusters = family(above, below)
    order = Turns(WORKERS * WORKERS)

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def loss_of(model: nn.Module, rows: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images[rows]), labels[rows])

    def script(worker: int) -> None:
        model = seeded(build)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(STEPS):
            rows = digits.batch_rows(len(images), BATCH, 0, step, rank(), world_size())
            with order.of(worker) if turns else nullcontext():
                optimizer.zero_grad()
                loss_of(model, rows).backward()
                optimizer.step()
        if turns:
            order.end(worker)
        optimizer.finish()

    with tree(root, *clusters) as started:
        started.together(script)
    weights = root_model(root)
    model = build()
    nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
    with torch.no_grad():
        loss = loss_of(model, slice(None)).item()
    up, down = (sum(each) for each in zip(*(cluster.bytes_above for cluster in clusters), strict=True))
    return Measured(loss, up, down, arrays_digest([weights]))
