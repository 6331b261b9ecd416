"""A model that FSDP2 has sharded over one process: its parameters are DTensors, and each is whole in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit.scripts import Array, build, distance, loss_of, run
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer
from narrows.worker.model.flat import local_part

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8
Model = Callable[[], nn.Module]


@contextmanager
def processes(count: int) -> Iterator[None]:
    """The process group of the script: of this process alone, or of others that do not exist."""
    if count == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded() -> nn.Module:
    net = build()
    for each in (*(module for module in net.children() if [*module.parameters()]), net):
        fully_shard(each)
    assert isinstance(net, FSDPModule)
    return net


def values(net: nn.Module) -> Array:
    parts = [local_part(parameter).detach().reshape(-1) for parameter in net.parameters()]
    found: Array = torch.cat(parts).numpy().copy()
    return found


def train(net: nn.Module, clip: float, worker: int = 0, of: int = 1) -> tuple[Array, Array, float]:
    """Return (parameters after some steps, the run's model at the end, a loss of it)."""
    optimizer = DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), net, max_grad_norm=clip)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, worker, of).backward()
        optimizer.step()
        if step == 3:  # FSDP keeps what a forward pass without a backward pass has gathered of the outermost module
            with optimizer.shared(), torch.no_grad():
                loss_of(net, step)
    state: Any = optimizer.state_dict()
    optimizer.load_state_dict(state)
    before = values(net)
    optimizer.finish()
    with torch.no_grad():
        return before, values(net), loss_of(net, 0).item()


MODES: dict[str, dict[str, Any]] = {
    "bsp": {"sync": "bsp", "shards": 2},
    "bsp, clipped": {"sync": "bsp"},
    "bsp, two workers": {"sync": "bsp", "workers": 2},
    "bsp, updates": {"sync": "bsp", "push": "update"},
    "ssp": {"sync": "ssp", "staleness": 2, "shards": 2, "compress": "topk:0.2+int8"},
    "ssp, cycle": {"sync": "ssp", "shards": 2, "compress": "cycle:0.25+sign"},
    "async": {"sync": "async", "compress": "topk:0.2+int8"},
    "local": {"sync": "local", "local_steps": 2},
    "fragments": {"sync": "local", "local_steps": 2, "fragments": 2},
    "gossip": {"sync": "gossip", "compress": "topk:0.2+sign"},
}


@pytest.mark.parametrize("arrays", ["host", "device"])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_sharded_over_one_process_trains_as_the_plain_one(
    mode: str, arrays: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the code for a GPU. Two workers have one model each, of which one is plain: the servers see no difference."""
    monkeypatch.setenv("NARROWS_ARRAYS", arrays)
    settings, clip = Settings(**MODES[mode]), 0.5 if "clipped" in mode else 0.0

    def trained(first: Model) -> list[tuple[Array, Array, float]]:
        with run(settings) as started:
            return started.together(
                lambda worker: train(build() if worker else first(), clip, worker, settings.workers)
            )

    reference = trained(build)
    with processes(1):
        found = trained(sharded)
    for ours, theirs in zip(found, reference, strict=True):
        assert distance(ours[0], theirs[0]) < 1e-6 and distance(ours[1], theirs[1]) < 1e-6
        assert abs(ours[2] - theirs[2]) < 1e-6, "FSDP computes on the parameters that the run has written"
    assert distance(found[0][0], values(build())) > 0.01


def test_a_forward_pass_before_the_wrapper_leaves_no_copies_of_parameters() -> None:
    with processes(1), run(Settings(sync="bsp")) as started:

        def script(worker: int) -> Array:
            net = sharded()
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            with torch.no_grad():
                loss_of(net, 0)
            DistributedOptimizer(inner, net).finish()
            return values(net)

        assert np.array_equal(started.together(script)[0], values(build()))


@pytest.mark.parametrize(("count", "overlap", "told"), [
    (2, False, r"'\S+' is sharded over 2 processes, and each of them is a worker here: .* ps-worker --group, .* one process"),
    (1, True, "overlap=True: FSDP hands over gradients when the backward pass ends, .*; leave it out"),
])  # fmt: skip
def test_what_a_worker_without_a_group_cannot_shard_is_refused(count: int, overlap: bool, told: str) -> None:
    with run(Settings(sync="bsp")), processes(count):  # as a copy of ps-worker -n 2: no group
        net = sharded()
        with pytest.raises(UsageError, match=told):
            DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, overlap=overlap)
