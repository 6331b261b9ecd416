"""Rounds whose outer step has equal singular values (--outer iso) end as a simulation of the same rounds does.

The simulation steps each worker's AdamW by itself and takes the outer step of 2607.03011 with NumPy's decomposition.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import one_process as alone
from kit.in_process import Cluster, store_of
from kit.on_disk import OnDisk
from kit.one_process import ADAMW, until
from kit.scripts import Array, build, distance, flat, loss_of
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

WORKERS, STEPS, LOCAL_STEPS, EQUAL = 2, 12, 4, 1e-5
RATE, MOMENTUM = 1.8, 0.8  # the defaults of --outer iso


def settings(**flags: Any) -> Settings:
    known: dict[str, Any] = {"sync": "local", "local_steps": LOCAL_STEPS, "workers": WORKERS, "shards": 2}
    return Settings(**known | {"cut": "tensors", "outer": "iso"} | flags)


def isotropic(mean: Array) -> Array:
    """The flat mean update, each of its matrices with equal singular values."""
    out, low = mean.copy(), 0
    for p in build().parameters():
        high = low + p.numel()
        if p.ndim == 2:
            u, s, v = np.linalg.svd(mean[low:high].reshape(p.shape).astype(np.float64), full_matrices=False)
            out[low:high] = (s.mean() * u @ v).ravel()
        low = high
    return out


def simulated(rate: float = RATE, momentum: float = MOMENTUM) -> Array:
    nets = [build() for _ in range(WORKERS)]
    optimizers = [ADAMW(net.parameters()) for net in nets]
    x: Any = flat(nets[0]).astype(np.float64)
    velocity = np.zeros_like(x)
    for step in range(STEPS):
        for worker, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(net, step, worker, WORKERS).backward()
            optimizer.step()
        if (step + 1) % LOCAL_STEPS == 0:
            update = isotropic(np.mean([flat(net) - x for net in nets], axis=0))
            velocity = momentum * velocity + update
            x = x + rate * (update + momentum * velocity)
            for net in nets:
                nn.utils.vector_to_parameters(torch.from_numpy(x.astype(np.float32)), net.parameters())
    return np.asarray(x, np.float32)


def trained(settings: Settings) -> Array:
    """The model that both workers end with."""
    cluster = Cluster(settings)
    model = alone.trained(settings, ADAMW, until(STEPS), cluster=cluster)
    assert len({store_of(server).begin for server in cluster.servers}) == settings.shards
    return model


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_rounds_end_as_the_simulation(shards: int) -> None:
    expected = simulated()
    assert distance(trained(settings(shards=shards)), expected) < EQUAL
    plain = trained(settings(shards=shards, outer="nesterov", outer_lr=RATE, outer_momentum=MOMENTUM))
    assert distance(plain, expected) > 100 * EQUAL, "the spectrum does count"


def test_the_flags_of_rate_and_momentum_hold() -> None:
    expected = simulated(0.9, 0.5)
    assert distance(trained(settings(outer_lr=0.9, outer_momentum=0.5)), expected) < EQUAL


def test_keys_that_move_keep_the_matrices_and_the_momentum(tmp_path: Path) -> None:
    cluster = OnDisk(settings(), tmp_path)
    moved = alone.trained(settings(), ADAMW, until(STEPS, cluster.changing({1: 3, 2: 1})), cluster=cluster)
    assert distance(moved, simulated()) < EQUAL


def test_each_fragment_has_its_matrices() -> None:
    """The outer steps of test_reduction.py, in a run."""
    flags = {"fragments": 2, "merge_delay": 0, "merge_alpha": 0.0}
    ours = trained(settings(**flags))
    theirs = trained(settings(**flags, outer="nesterov", outer_lr=RATE, outer_momentum=MOMENTUM))
    assert distance(ours, theirs) > 100 * EQUAL


def test_defaults_and_refusals() -> None:
    filled = settings().validated()
    assert (filled.outer, filled.outer_lr, filled.outer_momentum) == ("iso", RATE, MOMENTUM)
    assert filled.validated() == filled and Settings.unpacked(filled.packed()) == filled
    local = Settings(sync="local").validated()
    assert (local.outer, Settings(sync="ssp").validated().outer) == ("nesterov", "")
    for flags, said in (
        ({"outer": "adam"}, "--outer adam: give one of nesterov, iso"),
        ({"cut": "values"}, "--outer iso: shards cut matrices, and it steps whole ones; give --cut tensors too"),
        ({"staleness": 1}, "--outer iso: with --staleness 1 each update is folded alone"),
        ({"sync": "gossip"}, "--outer: --sync gossip has no outer step on a server; --sync local has one"),
        ({"sync": "ssp", "local_steps": -1}, "--outer: --sync ssp has no outer step on a server"),
    ):
        with pytest.raises(UsageError, match=said):
            settings(**flags).validated()
