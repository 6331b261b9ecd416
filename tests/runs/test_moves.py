"""The keys of a run are cut anew while it trains: no update is lost, and none is folded twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.on_disk import OnDisk
from kit.scripts import Array, build, distance, flat, loss_of, run

from narrows.protocols.settings import Settings
from narrows.worker import DistributedOptimizer, clock, rank

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 24
MOVES = {8: 3, 16: 2}  # by the step of the first worker


def trained(settings: Settings, folder: Path, moves: dict[int, int], make: Any, **more: Any) -> Any:
    cluster = OnDisk(settings, folder)

    def script(worker: int) -> Array:
        net = build()
        optimizer = DistributedOptimizer(make(net.parameters()), net, **more)
        while clock() < STEPS:
            if worker == 0 and clock() in moves:
                cluster.move(moves[clock()])
            optimizer.zero_grad()
            loss_of(net, clock(), rank(), settings.workers).backward()
            optimizer.step()
        optimizer.finish()
        with optimizer.shared():
            return flat(net)

    with run(settings, cluster) as started:
        results = started.together(script)
    assert all(np.array_equal(results[0], other) for other in results)
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None
    assert coordinator.shards == ([*moves.values()] or [settings.shards])[-1]
    return results[0]


ADAMW: Any = lambda p: torch.optim.AdamW(p, lr=3e-3)  # noqa: E731


def test_bsp_is_the_undisturbed_run(tmp_path: Path) -> None:
    settings = Settings(sync="bsp", workers=2, shards=2)
    moved = trained(settings, tmp_path / "a", MOVES, ADAMW)
    assert distance(moved, trained(settings, tmp_path / "b", {}, ADAMW)) < 1e-6
