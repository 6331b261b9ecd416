"""Streaming DiLoCo as in the paper (2501.18512, alg. 2), in one loop of NumPy, and runs of real workers to compare."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from kit.reference import rounded_last
from kit.scripts import Run, flat
from narrows.compression import ErrorFeedback, Memory, accumulate, parse
from narrows.protocols.config.key_ranges import fragment, split
from narrows.protocols.config.settings import Settings
from narrows.worker import DistributedOptimizer

Array = npt.NDArray[np.float32]
# Fragments cut tensors; of each some values are left out (over 64).
SHAPES = ((23, 31), (5,), (0,), (3, 2, 117))
SIZE = 1420
RATE = 0.25  # a power of two: its products are exact, so fused or not the inner step is the same
OUTER = (0.5, 0.5)
DENSE = Settings(sync="local", local_steps=8, workers=2, outer_lr=OUTER[0], outer_momentum=OUTER[1])


# A quadratic loss of each worker and step, plain SGD.


def first() -> Array:
    return np.random.default_rng(1).standard_normal(SIZE, dtype=np.float32)


def target(worker: int, step: int) -> Array:
    return np.random.default_rng((worker, step)).standard_normal(SIZE, dtype=np.float32)


class Reference:
    """All workers and servers of a run in one loop. `local` are the workers' parameters, x the servers'.

    `moves`: by clock, the number of shards that the keys are cut over from this clock on.
    """

    def __init__(self, settings: Settings, moves: Mapping[int, int] | None = None) -> None:
        self.moves = moves if moves is not None else {}
        self.settings = settings = settings.validated()
        self.every = settings.local_steps // settings.fragments
        self.up, self.down = parse(settings.compress), parse(settings.compress_down).contraction()
        self.x, self.p = first(), first()
        self.velocity = np.zeros(SIZE, np.float32)
        self.local = [first() for _ in range(settings.workers)]
        self.base = [first() for _ in range(settings.workers)]
        self.feedback: dict[tuple[int, int, int], ErrorFeedback] = {}  # worker, shard, fragment
        self.memory: dict[tuple[int, int], Memory] = {}  # shard, fragment
        self.step = self.clock = 0
        self.waiting: list[tuple[int, int]] = []  # clock, and the step at which it is merged

    def keys(self, clock: int) -> list[tuple[int, slice]]:
        """Return shard and keys of each part of update `clock`."""
        ranges = enumerate(split(SIZE, self.settings.shards))
        turn = clock % self.settings.fragments
        return [(shard, slice(*fragment(*keys, self.settings.fragments, turn))) for shard, keys in ranges]

    def take_step(self) -> None:
        self.step += 1
        for worker, local in enumerate(self.local):
            local -= np.float32(RATE) * (local - target(worker, self.step))
        self.merge(self.step)
        if self.step % self.every == 0:
            self.move()
            self.waiting.append((self.clock, self.step + self.settings.merge_delay))
            self.exchange()
            self.merge(self.step)

    def move(self) -> None:
        """Cut the keys anew, if they move at this clock: all that was pushed before is merged at the keys of then."""
        if self.clock in self.moves:
            self.merge(1 << 30)
            self.settings = replace(self.settings, shards=self.moves[self.clock])
            self.feedback.clear()  # dense: there is no residual

    def exchange(self, last: bool = False) -> None:
        """Let each worker push, and the servers fold and publish."""
        settings = self.settings
        for shard, keys in self.keys(self.clock):
            size = keys.stop - keys.start
            mean = np.zeros(size, np.float32)
            for worker in range(settings.workers):
                update = self.local[worker][keys] - self.base[worker][keys]
                place = (worker, shard, self.clock % settings.fragments)
                feedback = self.feedback.setdefault(place, ErrorFeedback(self.up, size, seed=worker << 16 | shard))
                feedback.memory.go_to(self.clock)
                if last or self.up.spec == "dense":
                    sent = update if feedback.residual is None else rounded_last(update + feedback.residual)
                    feedback.load_state_dict({})
                else:
                    sent = np.zeros(size, np.float32)
                    accumulate(feedback.encode(update), 1.0, sent)
                mean += np.float32(1 / settings.workers) * sent
            rate, momentum = np.float32(settings.outer_lr), np.float32(settings.outer_momentum)
            self.velocity[keys] = momentum * self.velocity[keys] + mean
            self.x[keys] += rate * (mean + momentum * self.velocity[keys])
            if self.down.lossless:
                self.p[keys] = self.x[keys]
            else:
                seed = split(SIZE, settings.shards)[shard][0]
                memory = self.memory.setdefault((shard, self.clock % settings.fragments), Memory(seed=seed))
                memory.step = self.clock
                accumulate(self.down.encode(self.x[keys] - self.p[keys], memory), 1.0, self.p[keys])
        self.clock += 1

    def merge(self, step: int) -> None:
        alpha = np.float32(self.settings.merge_alpha)
        while self.waiting and self.waiting[0][1] <= step:
            clock, _ = self.waiting.pop(0)
            for shard, keys in self.keys(clock):
                for worker, local in enumerate(self.local):
                    residual = self.feedback[worker, shard, clock % self.settings.fragments].residual
                    shown = self.p[keys] if residual is None else self.p[keys] + residual
                    local[keys] = alpha * local[keys] + (1 - alpha) * shown if alpha else shown
                    self.base[worker][keys] = shown

    def finish(self) -> None:
        """Exchange the rest of each fragment in turn. The fragment pushed last is left out if it has no rest."""
        self.merge(1 << 30)
        last = [(worker, keys) for _, keys in self.keys(self.clock - 1) for worker in range(self.settings.workers)]
        left = any((self.local[worker][keys] != self.base[worker][keys]).any() for worker, keys in last)
        left |= any(kept.residual is not None and kept.residual.any() for kept in self.feedback.values())
        for _ in range(self.settings.fragments if left or self.step % self.every else self.settings.fragments - 1):
            self.exchange(last=True)
        for keys in [slice(*keys) for keys in split(SIZE, self.settings.shards)] if not self.down.lossless else []:
            self.x[keys] = self.p[keys] + rounded_last(self.x[keys] - self.p[keys])

    def resume(self) -> None:
        """Let all workers begin anew from the published state of the servers."""
        self.waiting.clear()
        self.feedback.clear()
        self.memory.clear()
        for worker in range(self.settings.workers):
            self.local[worker], self.base[worker] = self.p.copy(), self.p.copy()
        self.step = self.clock * self.every


class Flat(nn.Module):
    """Parameters that hold the reference's `first`."""

    def __init__(self) -> None:
        super().__init__()
        at, values = 0, torch.from_numpy(first())
        for i, shape in enumerate(SHAPES):
            size = int(np.prod(shape))
            self.register_parameter(f"w{i}", nn.Parameter(values[at : at + size].reshape(shape).clone()))
            at += size
        assert at == SIZE

    def loss(self, worker: int, step: int) -> torch.Tensor:
        whole = torch.cat([p.reshape(-1) for p in self.parameters()])
        return 0.5 * (whole - torch.from_numpy(target(worker, step))).square().sum()


def train(started: Run, steps: range, finish: bool = True, look: bool = False) -> list[tuple[list[Array], list[Array]]]:
    """Train, and return by worker its parameters after each step, and the shared model at the end.

    look: return the shared model after each step too.
    """
    together = threading.Barrier(len(started.sessions))

    def script(worker: int) -> tuple[list[Array], list[Array]]:
        model = Flat()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model)
        seen, shared = [], []
        for step in steps:
            optimizer.zero_grad()
            model.loss(worker, step).backward()
            optimizer.step()
            seen.append(flat(model))
            if look:
                together.wait(60.0)
                with optimizer.shared():
                    shared.append(flat(model))
                together.wait(60.0)
        if finish:
            optimizer.finish()
            with optimizer.shared():
                shared.append(flat(model))
        return seen, shared

    return started.together(script)


def compare(
    started: Run, reference: Reference, steps: range, exact: bool, finish: bool = True, look: bool = False
) -> None:
    """Train, and compare each worker after each step, and at the end, with the reference."""
    same: Callable[..., None] = np.testing.assert_array_equal if exact else np.testing.assert_allclose
    close: dict[str, Any] = {} if exact else {"rtol": 2e-5, "atol": 2e-6}
    results = train(started, steps, finish, look)
    for turn, step in enumerate(steps):
        reference.take_step()
        for worker, (seen, shared) in enumerate(results):
            same(seen[turn], reference.local[worker], err_msg=f"worker {worker}, step {step}", **close)
            if look:
                same(shared[turn], reference.x, err_msg=f"shared, step {step}", **close)
    if finish:
        reference.finish()
        for _, shared in results:
            same(shared[-1], reference.x, **close)
            np.testing.assert_array_equal(shared[-1], results[0][1][-1])
