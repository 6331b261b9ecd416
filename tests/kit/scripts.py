"""Runs training scripts as users write them, in threads: each worker has its own session on an in-process cluster.

`session.current` is per process by design; here it is per thread. Everything else is the product, except sockets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from kit import in_process
from kit.in_process import THREAD, Cluster, together
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.worker import DistributedOptimizer, rank, session, world_size

Array = npt.NDArray[np.float32]
BATCH = 16
ENDS_S = 10.0  # a thread ends within this, once nothing is left to wait for
_here = threading.local()
_seeding = threading.Lock()


class Link(in_process.Link):
    """An in-process link whose session has not yet taken the event that it joined."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        super().__init__(cluster, token)
        self.events.appendleft(self.joined)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class Run:
    """One cluster, or those of a tree, and the sessions of their workers; made by `run` and `tree`."""

    def __init__(self, *clusters: Cluster) -> None:
        self.clusters, self.cluster = clusters, clusters[0]
        self.sessions: list[session.RunSession] = []
        self.before = set(threading.enumerate())

    def end(self) -> None:
        """Wake all waiting threads, so that no thread outlives its run."""
        for each in self.sessions:
            cast(Link, each.link).end("the run of this test is over")
        threads = [each for each in threading.enumerate() if each.name == THREAD and each not in self.before]
        deadline = time.monotonic() + ENDS_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        assert not any(thread.is_alive() for thread in threads), f"a thread goes on {ENDS_S:.0f} s after its run"

    def join(self, cluster: int = 0) -> session.RunSession:
        """Join with a new worker. Its session becomes that of the calling thread."""
        joined = session.RunSession(f"tcp://in-process:{1 + cluster}")
        self.sessions.append(joined)
        _here.session = joined
        return joined

    def become(self, worker: int) -> None:
        """Give the calling thread the session of `worker`."""
        _here.session = self.sessions[worker]

    def together(self, script: Callable[[int], Any]) -> list[Any]:
        """Run script(worker) for each session, each in its own thread."""

        def work(worker: int) -> Any:
            torch.set_num_threads(1)
            self.become(worker)
            return script(worker)

        return together(work, len(self.sessions))

    def aside(self, script: Callable[[], Any]) -> threading.Thread:
        """Start script() in a thread, with the session that joined last."""

        def work() -> None:
            self.become(-1)
            script()

        thread = threading.Thread(target=work, daemon=True, name=THREAD)
        thread.start()
        return thread

    def expire(self, worker: int) -> None:
        """Let the lease of this one worker run out: its next message is refused, and it joins again."""
        cluster, expired = self.cluster, cast(Link, self.sessions[worker].link).member.worker
        coordinator = cluster.servers[0].coordinator
        assert coordinator is not None
        with cluster.changed:
            later = cluster.now() + int(3 * cluster.settings.lease * NS)
            for other in coordinator.seats:
                if other != expired:
                    coordinator.members.heard(other, later)
            cluster._apply(0, cluster.servers[0].tick(later))
            assert expired not in coordinator.seats


@contextmanager
def run(settings: Settings, cluster: Cluster | None = None) -> Iterator[Run]:
    """Make a run whose workers have all joined, in the order of their ranks."""
    cluster = cluster or Cluster(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "MemberLink", lambda address, token, *rest: Link(cluster, token))
        patch.setattr(session, "current", lambda: _here.session)
        started = Run(cluster)
        try:
            for worker in range(cluster.settings.workers):
                assert started.join().rank == worker
            yield started
        finally:
            started.end()


@contextmanager
def tree(root: Cluster, *clusters: Cluster, first_rank: int = 0) -> Iterator[Run]:
    """Make child clusters of `root` whose workers have all joined, one of each cluster in turn: by rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "MemberLink", lambda address, token, *rest: Link(clusters[int(address[-1]) - 1], token))
        patch.setattr(session, "current", lambda: _here.session)
        started = Run(*clusters)
        try:
            for worker in range(clusters[0].settings.workers):
                for index in range(len(clusters)):
                    assert started.join(index).rank == worker * len(clusters) + index + first_rank
            yield started
        finally:
            started.end()


@contextmanager
def alone() -> Iterator[session.LocalSession]:
    """Run with the session of a script that runs as plain python."""
    with pytest.MonkeyPatch.context() as patch:
        only = session.LocalSession()
        patch.setattr(session, "_session", only)
        yield only


# A small model and its data, the same in every process.


def seeded(make: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """Call make() from a seed. All threads share torch's generator, so they take turns."""
    with _seeding:
        torch.manual_seed(seed)
        return make()


def build(seed: int = 7) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 5)), seed)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and labels of a step, which are the caller's own."""
    x, y = _drawn(step)
    return x.clone(), y.clone()


@cache
def _drawn(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(BATCH, 9, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


def loss_of(model: nn.Module, step: int, worker: int = 0, of: int = 1) -> torch.Tensor:
    """Return the loss of every `of`th row of the batch, from row `worker` on."""
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x[worker::of]), y[worker::of])


def flat(model: nn.Module) -> Array:
    real = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in model.parameters()]
    return np.concatenate([p.float().reshape(-1).numpy() for p in real])


def mean_loss(weights: Array, steps: int) -> float:
    """Return the mean loss of a model with these weights, over the batches of so many steps."""
    model = build()
    nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
    with torch.no_grad():
        return float(np.mean([loss_of(model, step) for step in range(steps)]))


def train(
    steps: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    seed: int = 7,
    at: Callable[[int], None] = lambda step: None,
    finish: bool = True,
) -> Array:
    """Train as a user's script does, whatever the mode. Call `at` after each step. Return the final model."""
    model = build(seed)
    optimizer = DistributedOptimizer(make(model), model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank(), world_size()).backward()
        optimizer.step()
        at(step)
    if not finish:
        return flat(model)
    optimizer.finish()
    with optimizer.shared():
        return flat(model)


class Each:
    """Several optimizers that step one after the other: the reference of several in one wrapper."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def distance(a: Array, b: Array) -> float:
    """Return the relative distance in L2 norm."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
