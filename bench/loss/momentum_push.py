"""Mode momentum of the loss probes: workers push momentum or gradients, and the non-linear part of the step follows the fold.

A row of RULES each:
- onebit: 1-bit Adam. The first share of the steps (`start`) is dense AdamW; then the second moments v are frozen. Worker i
  sends C((b M + (1 - b) g_i) / root v + its residual). The shared M is root v * C'(their mean + the server's residual).
- onebitmuon: the same with Newton-Schulz of the shared M for the matrices of the blocks.
- demo: DeMo. m_i = b m_i + g_i; q_i = top-k of the DCT of m_i; m_i -= alpha q_i. The model steps by the sign of the mean of
  q_i.
- ef21: M_i = b M_i + (1 - b) g_i; q_i = C(M_i - G_i), tensors scaled to one size; G_i += q_i. The server's AdamW steps the
  model by the mean of G_i.
- ef21muon: the same with Muon for the matrices of the blocks.

A worker has the shared state `staleness` clocks late. At `look_ahead` it goes on by the step that led there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from loss.bf16_replicas import MOMENTUM, ByteTask, Coder, clip_scale, f4, muon_step
from loss.job import Job, Outcome, Progress
from loss.replicas import EPS, FLAGS, newton_schulz

from narrows.compression.buffers import FloatArray

DECAY = f4(FLAGS.weight_decay)
BLOCK = 64  # of the DCT
MEASURED = 100  # of the last steps: the mean of a rule's lag is over these


class Rule(Protocol):
    def step(self, step: int, rate: float, gradients: FloatArray, x: FloatArray) -> None:
        """x moves by the workers' clipped gradients [W, size], in place."""

    def facts(self) -> dict[str, float]:
        """What the rule has measured by the end of the run."""


class OneBitAdam:
    def __init__(self, task: ByteTask, job: Job) -> None:
        self.task, self.job = task, job
        self.up, self.down = Coder(job.up), Coder(job.down or job.up)
        self.residual, self.sent = task.zeros(job.workers), task.zeros(job.workers)
        self.server_residual, self.server_sent = task.zeros(), task.zeros()
        self.momentum, self.v, self.root = task.zeros(), task.zeros(), task.zeros()
        self.matrices = task.matrices if job.rule == "onebitmuon" else []
        self.beta1 = np.full(task.size, job.beta1, f4)
        for begin, end, _ in self.matrices:
            self.beta1[begin:end] = MOMENTUM
        self.start = int(job.start * job.steps)
        self.refreshes = {int(self.start * 1.5**k) for k in range(1, 20)} if job.refresh else set[int]()
        self.dense_steps = 0

    def step(self, step: int, rate: float, gradients: FloatArray, x: FloatArray) -> None:
        if step < self.start or step in self.refreshes:
            self._dense(gradients)
            unbias = (1 - self.beta1 ** (step + 1)) if step < self.start else 1
            direction = self._direction(self.momentum / unbias)
        else:
            self._coded(gradients)
            direction = self._direction(self.momentum)
        x -= f4(rate) * (direction + DECAY * x)

    def facts(self) -> dict[str, float]:
        return {}

    def _dense(self, gradients: FloatArray) -> None:
        beta2 = self.job.beta2
        mean = gradients.mean(0)
        self.momentum = self.beta1 * self.momentum + (1 - self.beta1) * mean
        self.v = f4(beta2) * self.v + f4(1 - beta2) * mean * mean
        self.dense_steps += 1
        self.root = np.sqrt(self.v / f4(1 - beta2**self.dense_steps)) + f4(EPS)
        for begin, end, _ in self.matrices:
            self.root[begin:end] = f4(math.sqrt(float(np.mean(self.momentum[begin:end] ** 2))) + 1e-12)

    def _coded(self, gradients: FloatArray) -> None:
        mean, shared = self.task.zeros(), self.momentum / self.root
        for w, gradient in enumerate(gradients):
            self.residual[w] += self.beta1 * shared + (1 - self.beta1) * gradient / self.root
            self.up(self.residual[w], 1 / self.job.workers, mean, self.sent[w])
        self.server_residual += mean
        self.down(self.server_residual, 1, self.task.zeros(), self.server_sent)
        self.momentum = self.server_sent * self.root

    def _direction(self, momentum: FloatArray) -> FloatArray:
        direction: FloatArray = momentum / self.root
        flat, into = torch.from_numpy(momentum), torch.from_numpy(direction)
        for begin, end, shape in self.matrices:
            straight = newton_schulz(flat[begin:end].view(1, *shape)).flatten()
            into[begin:end] = 0.2 * max(shape) ** 0.5 * straight
        return direction


class DeMo:
    def __init__(self, task: ByteTask, job: Job) -> None:
        self.task, self.job = task, job
        self.up, self.momentum = Coder(job.up), task.zeros(job.workers)
        self.padded = task.size + -task.size % BLOCK
        n = np.arange(BLOCK)
        basis = np.cos(np.pi * (2 * n[None] + 1) * n[:, None] / (2 * BLOCK)) * math.sqrt(2 / BLOCK)
        basis[0] /= math.sqrt(2)
        self.basis = torch.from_numpy(basis.astype(f4))

    def step(self, step: int, rate: float, gradients: FloatArray, x: FloatArray) -> None:
        total, sent = np.zeros(self.padded, f4), np.zeros(self.padded, f4)
        for momentum, gradient in zip(self.momentum, gradients, strict=True):
            momentum *= f4(self.job.beta1)
            momentum += gradient
            self.up(self._there(momentum), 1 / self.job.workers, total, sent)
            momentum -= f4(self.job.alpha) * self._back(sent)
        x -= f4(rate) * (np.sign(self._back(total)) + DECAY * x)

    def facts(self) -> dict[str, float]:
        return {}

    def _there(self, values: FloatArray) -> FloatArray:
        padded = F.pad(torch.from_numpy(values), (0, self.padded - len(values)))
        if self.job.dct:
            padded = (padded.view(-1, BLOCK) @ self.basis.T).flatten()
        found: FloatArray = padded.numpy()
        return found.copy()

    def _back(self, coefficients: FloatArray) -> FloatArray:
        flat = torch.from_numpy(coefficients)
        values: FloatArray = ((flat.view(-1, BLOCK) @ self.basis).flatten() if self.job.dct else flat).numpy()
        return values[: self.task.size]


class EF21:
    def __init__(self, task: ByteTask, job: Job) -> None:
        self.task, self.job = task, job
        self.up, self.down = Coder(job.up), Coder(job.down) if job.down else None
        self.momentum, self.known, self.sent = (task.zeros(job.workers) for _ in range(3))
        self.mean, self.v, self.residual, self.server_sent = (task.zeros() for _ in range(4))
        self.beta1 = job.server_momentum or job.beta1
        self.lags: list[float] = []

    def facts(self) -> dict[str, float]:
        """lag: the length of the momentum that the server lacks, over that of the whole."""
        return {"lag": float(np.mean(self.lags[-MEASURED:]))}

    def step(self, step: int, rate: float, gradients: FloatArray, x: FloatArray) -> None:
        self.momentum += f4(1 - self.beta1) * (gradients - self.momentum)
        self._send(self.mean if step else self.momentum.mean(0))
        beta2 = self.job.beta2
        self.v = f4(beta2) * self.v + f4(1 - beta2) * self.mean * self.mean
        unbias = f4(1 / (1 - beta2 ** (step + 1)))
        moved = -f4(rate) * (self.mean / (np.sqrt(self.v * unbias) + f4(EPS)) + DECAY * x)
        if self.job.rule == "ef21muon":
            mean = torch.from_numpy(self.mean)
            muon_step(self.task, lambda begin, end: mean[begin:end], x, rate, moved)
        if self.down is None:
            x += moved
        else:
            self.residual += moved
            self.down(self.residual, 1, self.task.zeros(), self.server_sent)
            x += self.server_sent

    def _send(self, scaling: FloatArray) -> None:
        """Each worker's code of what the server lacks. `scaling`, which all know, says how large each tensor is."""
        scale = np.ones(self.task.size, f4)
        for begin, end in self.task.ranges:
            scale[begin:end] = f4(1 / max(1e-12, float(np.sqrt(np.mean(scaling[begin:end] ** 2)))))
        mean = self.task.zeros()
        for w, known in enumerate(self.known):
            folded = self.task.zeros()
            self.up((self.momentum[w] - known) * scale, 1 / self.job.workers, folded, self.sent[w])
            known += self.sent[w] / scale
            mean += folded / scale
        lacking, whole = ((each.mean(0) * scale) for each in (self.momentum - self.known, self.momentum))
        self.lags.append(float(np.linalg.norm(lacking) / np.linalg.norm(whole)))
        self.mean += mean


RULES: dict[str, Callable[[ByteTask, Job], Rule]] = {
    "onebit": OneBitAdam,
    "onebitmuon": OneBitAdam,
    "demo": DeMo,
    "ef21": EF21,
    "ef21muon": EF21,
}


def momentum(task: ByteTask, job: Job, progress: Progress) -> Outcome:
    x, rule = task.initial(job.seed), RULES[job.rule](task, job)
    replicas, gradients = task.zeros(job.workers), task.zeros(job.workers)
    last, known = task.zeros(), task.zeros()
    seen = [x.copy() for _ in range(job.staleness + 1)]
    for step in range(job.steps):
        replicas[:] = seen[0] + (f4(job.look_ahead) * known if job.staleness else 0)
        task.gradients(replicas, task.rows(job.seed, step, job.workers, job.batch), gradients)
        for gradient in gradients:
            gradient *= f4(clip_scale(gradient))
        before = x.copy()
        rule.step(step, job.rate_at(step), gradients, x)
        known, last = last, x - before  # the step that led to the state that a worker has
        seen = [*seen[1:], x.copy()]
        if progress(step + 1, x):
            break
    return x, rule.facts()
