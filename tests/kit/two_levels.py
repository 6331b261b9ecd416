"""Clusters with a root in one process, and the training of one process on the same batches."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from kit.in_process import Cluster, store_of
from kit.scripts import Array, alone, build, flat, loss_of
from narrows.protocols.config.settings import Settings

STEPS = 12


def family(above: Settings, below: Settings, clusters: int = 2) -> tuple[Cluster, list[Cluster]]:
    root = Cluster(above)
    return root, [Cluster(below, root, f"cluster{index}") for index in range(clusters)]


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)


@cache
def one_process() -> Array:
    """Return the model of one process. Not to be written to."""
    with alone():
        net = build()
        optimizer = sgd(net)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
        return flat(net)


def root_model(root: Cluster) -> Array:
    return np.concatenate([store_of(server).x for server in root.servers])


ABOVE = {
    "bsp": Settings(sync="bsp", push="update"),
    "ssp": Settings(sync="ssp", compress="topk:0.2+int8"),
    "async": Settings(sync="async", compress="topk:0.2", compress_down="int8"),
    "local": Settings(sync="local", local_steps=3, outer_lr=1.0, outer_momentum=0.0, compress="cycle:0.5+sign"),
    "diloco, late": Settings(sync="local", local_steps=2, staleness=1, outer_momentum=0.3),
}


BELOW = {
    "bsp": Settings(sync="bsp"),
    "ssp": Settings(sync="ssp", staleness=2, compress="topk:0.3"),
    "async": Settings(sync="async"),
    "local": Settings(sync="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0),
    "streaming": Settings(sync="local", local_steps=2, fragments=2, outer_lr=1.0, outer_momentum=0.0),
    "streaming, sparse": Settings(sync="local", local_steps=2, fragments=2, compress="topk:0.3", outer_lr=1.0,
                                  outer_momentum=0.0),
}  # fmt: skip
