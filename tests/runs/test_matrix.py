"""Every mode, compression and number of levels by flags alone, on one unchanged script."""

from __future__ import annotations

from contextlib import closing
from itertools import cycle

import numpy as np
import pytest
import torch
from kit import specs
from kit.in_process import Cluster
from kit.ports import Ports, SharedPorts
from kit.scripts import Array, build, flat, mean_loss, run, train, tree
from kit.specs import SMALL_MODEL_SPECS, same_bits

from narrows.protocols.config.modes import MODES, FoldRule
from narrows.protocols.config.settings import Settings

STEPS = 8
# The server above a cluster has these modes: what the cities of the README run, and a barrier.
ABOVE = {"ssp": {"staleness": 1}, "bsp": {"push": "update"}}

WAYS = (Ports, SharedPorts)
# Modes of kit/specs.py in which the updates of several workers are folded in the same order in each run.
IN_ORDER = ("bsp", "bsp, updates", "local", "gossip")


def script(worker: int) -> Array:
    return train(STEPS, lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))


def settings(mode: str, compress: str) -> Settings:
    """Two local steps, so that several rounds fit; the outer rate that suits so few."""
    local = {"local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0} if mode == "local" else {}
    return Settings(sync=mode, compress=compress, workers=2, shards=2, **local)  # type: ignore[arg-type]


def check(models: list[Array]) -> None:
    assert all(np.array_equal(model, models[0]) for model in models), "all end with one model"
    assert mean_loss(models[0], STEPS) < mean_loss(flat(build()), STEPS) - 0.02


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compress", SMALL_MODEL_SPECS)
@pytest.mark.parametrize("mode", MODES)
def test_one_level(mode: str, compress: str, way: type[Ports]) -> None:
    with closing(way()) as ports, run(Settings(), Cluster(settings(mode, compress), ports=ports)) as started:
        check(started.together(script))


@pytest.mark.parametrize(("mode", "compress"), [*zip(specs.MODES, cycle(SMALL_MODEL_SPECS), strict=False)])
def test_shared_memory_changes_no_bit(mode: str, compress: str) -> None:
    """One worker, where it depends on the time in what order the updates of several are folded."""
    models, flags = list[Array](), specs.MODES[mode]
    for way in WAYS:
        workers = 2 if mode in IN_ORDER else 1
        cluster = Settings(**flags, compress=compress, workers=workers, shards=2)
        with closing(way()) as ports, run(Settings(), Cluster(cluster, ports=ports)) as started:
            models += started.together(script)
        assert not isinstance(ports, SharedPorts) or ports.carried
    assert all(same_bits(model, models[0]) for model in models)


BELOW = [name for name, mode in MODES.items() if mode.update_rule is not FoldRule.MIX]


@pytest.mark.parametrize(
    ("mode", "compress", "above"),
    [
        (mode, compress, [*ABOVE][(row + column) % 2])
        for row, mode in enumerate(BELOW)
        for column, compress in enumerate(SMALL_MODEL_SPECS[::2])
    ],
)
def test_two_levels(mode: str, compress: str, above: str) -> None:
    """Compressed above, where the link is narrow."""
    root = Cluster(Settings(sync=above, compress=compress, workers=2, shards=2, **ABOVE[above]))  # type: ignore[arg-type]
    clusters = [Cluster(settings(mode, "dense"), root, f"cluster{index}") for index in range(2)]
    with tree(root, *clusters) as started:
        check(started.together(script))
