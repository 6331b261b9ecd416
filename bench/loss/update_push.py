"""Modes of the loss probes that fold gradients or updates: bsp and updates (ssp, async).

All workers step at once. A worker sees the shared state exactly `staleness` clocks late. To it the worker adds its own updates
in flight and its residual, both multiplied by the gain, as the product does.
"""

from __future__ import annotations

import numpy as np
from loss.bf16_replicas import AdamWs, ByteTask, Coder, add_scaled, clip_scale, f4
from loss.job import Job, Outcome, Progress

from narrows.compression.buffers import FloatArray
from narrows.compression.sampling import sample_of
from narrows.ps.store.update_gain import SMOOTHING, WINDOW


class MeanGradient:
    """bsp: one optimizer steps along the mean of all workers' clipped gradients. A SPEC codes them with error feedback."""

    def __init__(self, task: ByteTask, job: Job, spec: str = "") -> None:
        self.task, self.job = task, job
        self.replicas, self.gradients = task.zeros(job.workers), task.zeros(job.workers)
        self.update = task.zeros(1)
        self.optimizer = AdamWs(task, 1, job.inner, job.beta1, job.beta2)
        self.code = Coder(spec) if spec else None
        self.residual, self.sent = (task.zeros(job.workers if spec else 0) for _ in range(2))

    def step(self, step: int, x: FloatArray) -> None:
        """Take one step of x, in place."""
        job, workers = self.job, self.job.workers
        self.replicas[:] = x
        self.task.gradients(self.replicas, self.task.rows(job.seed, step, workers, job.batch), self.gradients)
        mean = self.task.zeros(1)
        for w in range(workers):
            scale = clip_scale(self.gradients[w])
            if self.code is None:
                add_scaled(f4(scale / workers), self.gradients[w], mean[0])
            else:
                add_scaled(f4(scale), self.gradients[w], self.residual[w])
                self.code(self.residual[w], 1 / workers, mean[0], self.sent[w])
        if self.code is not None:
            self.code.advance()
        self.optimizer.updates(mean, x[None], job.rate_at(step), self.update)
        x += self.update[0]


def bsp(task: ByteTask, job: Job, progress: Progress) -> Outcome:
    x, mean = task.initial(job.seed), MeanGradient(task, job)
    for step in range(job.steps):
        mean.step(step, x)
        if progress(step + 1, x):
            break
    return x, {}


class Published:
    """The shared model as workers see it: coded on its way down, and `staleness` clocks late."""

    def __init__(self, x: FloatArray, spec: str, staleness: int) -> None:
        self.newest, self.code, self.staleness = x.copy(), Coder(spec), staleness
        self._residual, self._sent = np.zeros_like(x), np.zeros_like(x)
        self.show(x)

    def show(self, x: FloatArray) -> None:
        """Show x to all workers at once, without a code."""
        self.newest[:] = x
        self.seen = [self.newest.copy() for _ in range(self.staleness + 1)]  # the oldest is what workers have now

    def clock(self, x: FloatArray) -> None:
        np.subtract(x, self.newest, out=self._residual)
        self.code(self._residual, 1, np.zeros_like(x), self._sent)
        self.code.advance()
        self.newest += self._sent
        self.seen = [*self.seen[1:], self.newest.copy()]


class GainWindow:
    """The product's gain (ps/store/update_gain.py) for one shard whose workers are all as fast as each other."""

    def __init__(self, size: int) -> None:
        self.factor, self.agreement = 1.0, 0.0  # agreement 0: no window is complete yet
        self.at = sample_of(size)
        self.window: list[FloatArray] = []

    def saw(self, sent: FloatArray) -> None:
        """Take the updates of one clock, [workers, size]. WINDOW clocks later they change the gain."""
        self.window.append(sent[:, self.at])
        if len(self.window) < WINDOW:
            return
        sums = np.stack(self.window).sum(0, np.float64)
        share = np.square(sums.mean(0)).sum() / max(1e-30, np.square(sums).sum(1).mean())
        measured = max(share, 1 / len(sums)) ** 0.5
        self.agreement = (self.agreement or measured) ** SMOOTHING * measured ** (1 - SMOOTHING)
        self.factor, self.window = 1 / self.agreement, []


class Updates:
    """One run of mode updates: each worker's own optimizer makes its updates, and gain * their mean moves the model."""

    def __init__(self, task: ByteTask, job: Job) -> None:
        self.task, self.job, self.x = task, job, task.initial(job.seed)
        self.up = Coder(job.up)
        self.published = Published(self.x, job.down or job.up, job.staleness)
        self.replicas, self.gradients, self.residual, self.update = (task.zeros(job.workers) for _ in range(4))
        self.inner = AdamWs(task, job.workers, job.inner, job.beta1, job.beta2)
        self.window = GainWindow(task.size) if job.gain == "window" else None
        self.flying: list[FloatArray] = []  # updates that the state that workers see lacks
        self.agreement: list[float] = []

    @property
    def gain(self) -> float:
        """The gain of the next clock."""
        return float(self.window.factor**self.job.gain_power) if self.window else 1.0

    def train(self, progress: Progress) -> Outcome:
        job = self.job
        started = int(job.start * job.steps)
        dense = MeanGradient(self.task, job, job.start_up)
        for step in range(job.steps):
            if step < started:
                dense.step(step, self.x)
                self.published.show(self.x)
                if step == started - 1:
                    self.inner.take_over(dense.optimizer)
            else:
                self.clock(step)
            if progress(step + 1, self.x):
                break
        self.x += f4(self.gain) * self.residual.mean(0)  # finish(): each worker pushes its residual
        lengths = [float(np.linalg.norm(each, axis=1).mean()) for each in (self.residual, self.update)]
        facts = {"agreement": float(np.mean(self.agreement or [0])), "gain": self.gain}
        return self.x, facts | {"held_back": lengths[0] / max(1e-12, lengths[1])}

    def clock(self, step: int) -> None:
        task, job, workers = self.task, self.job, self.job.workers
        self._place_replicas()
        task.gradients(self.replicas, task.rows(job.seed, step, workers, job.batch), self.gradients)
        self.inner.updates(self.gradients, self.replicas, job.rate_at(step), self.update)
        if step % 10 == 0 and 2 * step >= job.steps:
            each = np.linalg.norm(self.update, axis=1).mean()
            self.agreement.append(float(np.linalg.norm(self.update.mean(0)) / each))
        mean, sent = task.zeros(), task.zeros(workers)
        for w in range(workers):
            self.residual[w] += self.update[w]
            self.up(self.residual[w], 1 / workers, mean, sent[w])
        self.up.advance()
        gain = self.gain
        if self.window:
            self.window.saw(sent)  # changes the gain of later clocks
        add_scaled(f4(gain), mean, self.x)
        self.published.clock(self.x)
        self.flying = [*self.flying, sent][-job.staleness :] if job.staleness else []

    def _place_replicas(self) -> None:
        """Set replicas[w] to the state that workers see, plus the residual and the updates in flight of worker w."""
        job, gain = self.job, self.gain
        stand = job.stand * gain * (1 + job.look_ahead / max(1, job.staleness))
        for w, replica in enumerate(self.replicas):
            replica[:] = self.published.seen[0]
            add_scaled(f4(job.kept * gain), self.residual[w], replica)
            for sent in self.flying:
                add_scaled(f4(stand), sent[w], replica)


def updates(task: ByteTask, job: Job, progress: Progress) -> Outcome:
    return Updates(task, job).train(progress)
