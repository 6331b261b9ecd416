"""Every mode, compression and number of levels by flags alone, on one unchanged script."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit.in_process import Cluster
from kit.scripts import Array, build, flat, mean_loss, run, train, tree
from kit.specs import SMALL_MODEL_SPECS

from narrows.protocols.config.modes import MODES, FoldRule
from narrows.protocols.config.settings import Settings

STEPS = 8
# The server above a cluster has these modes: what the cities of the README run, and a barrier.
ABOVE = {"ssp": {"staleness": 1}, "bsp": {"push": "update"}}


def script(worker: int) -> Array:
    return train(STEPS, lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))


def settings(mode: str, compress: str) -> Settings:
    """Two local steps, so that several rounds fit; the outer rate that suits so few."""
    local = {"local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0} if mode == "local" else {}
    return Settings(sync=mode, compress=compress, workers=2, shards=2, **local)  # type: ignore[arg-type]


def check(models: list[Array]) -> None:
    assert all(np.array_equal(model, models[0]) for model in models), "all end with one model"
    assert mean_loss(models[0], STEPS) < mean_loss(flat(build()), STEPS) - 0.02


@pytest.mark.parametrize("compress", SMALL_MODEL_SPECS)
@pytest.mark.parametrize("mode", MODES)
def test_one_level(mode: str, compress: str) -> None:
    with run(settings(mode, compress)) as started:
        check(started.together(script))


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
