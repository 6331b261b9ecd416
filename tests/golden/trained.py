"""Part of the golden record: final models of runs in one process, bit for bit. The mode is bsp on every level, so nothing
depends on time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from kit.in_process import Cluster
from kit.scripts import Array, alone, build, flat, loss_of, run, train, tree
from kit.two_levels import family, root_model
from torch import nn

from golden.digests import Entries, arrays_digest, digest
from narrows.protocols.config.settings import Settings

STEPS = 12
WORKERS = 2
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
}
# --compress, --compress-down
RECORDED_SPECS: dict[str, dict[str, Any]] = {
    "default": {},
    "dense": {"compress": "dense", "compress_down": "dense"},
    "topk:0.2+int8": {"compress": "topk:0.2+int8"},
    "topk:0.2+int8 both ways": {"compress": "topk:0.2+int8", "compress_down": "topk:0.2+int8"},
    "cycle:0.5+sign": {"compress": "cycle:0.5+sign"},
}
WHERE = {"server": "gradient", "worker": "update"}  # steps: --push


def bsp_part() -> Entries:
    """Each final model, by mode, SPEC, optimizer, where it steps, and shards."""
    found: Entries = {}
    for spec, flags in RECORDED_SPECS.items():
        for where, push in WHERE.items():
            for name in OPTIMIZERS:
                for shards in (1, 3):
                    settings = Settings(sync="bsp", push=push, workers=WORKERS, shards=shards, **flags)
                    found[f"{spec}, {name} at the {where}, {shards} shards"] = partial(_one_cluster, settings, name)
        for shards in (1, 3):
            above = Settings(sync="bsp", push="update", workers=2, shards=shards, **flags)
            below = replace(above, push="", compress="dense", compress_down="")
            found[f"two clusters, {spec}, {shards} shards"] = partial(_two_clusters, above, below)
    return found


def _script(name: str) -> Callable[[int], Array]:
    return lambda worker: train(STEPS, OPTIMIZERS[name])


def _one_cluster(settings: Settings, name: str) -> str:
    cluster = Cluster(settings)
    with run(settings, cluster) as started:
        models = started.together(_script(name))
    return arrays_digest([*models, root_model(cluster)])


def _two_clusters(above: Settings, below: Settings) -> str:
    root, clusters = family(above, below)
    with tree(root, *clusters) as started:
        models = started.together(_script("SGD"))
    return arrays_digest([*models, root_model(root)])


def machine_digest() -> str:
    """What torch alone makes of the same model here, without a server: where another machine or torch rounds otherwise, no
    digest of a trained model can hold."""
    models = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for make in OPTIMIZERS.values():
        with alone():
            net = build()
            optimizer = make(net)
            for step in range(STEPS):
                optimizer.zero_grad()
                for worker in range(WORKERS):
                    loss_of(net, step, worker, WORKERS).backward()
                optimizer.step()
            models.append(flat(net))
    torch.set_num_threads(threads)
    return digest(torch.__version__.partition("+")[0].encode(), arrays_digest(models).encode())
