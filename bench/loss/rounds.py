"""Mode local of the loss probes: rounds of local steps, and an outer step along the mean of their updates.

A worker begins a round at the state that the server published, plus its residual, as the product does. It keeps its own
optimizer from round to round. `outer` names the rule of the outer step, for the mean update u of a round:

- nesterov: m <- beta m + u; x <- x + eta (u + beta m). The product's, DiLoCo's (2311.08105).
- iso: the same, once each matrix of a block of u = U S V' has become mean(S) U V' (IsoLoCo, 2607.03011).
- iso-all: the same for every matrix of the model, embeddings and head too.
- iso-ema: as iso, with m <- beta m + (1 - beta) u and x <- x + eta ((1 - beta) u + beta m), the momentum of torch's Muon.

`moments_every` N: after each N rounds all workers go on with the means of their moments (2505.22549).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from loss.bf16_replicas import AdamWs, ByteTask, Coder, f4
from loss.job import Job, Outcome, Progress
from loss.update_push import Published

from narrows.compression.buffers import FloatArray

Matrices = Sequence[tuple[int, int, tuple[int, ...]]]  # (begin, end, shape)


def matrices(task: ByteTask, every: bool) -> Matrices:
    """Return the matrices of the blocks, or with `every` those of the embeddings and the head too."""
    found = zip(task.ranges, task.shapes.values(), strict=True)
    return [(a, b, shape) for (a, b), shape in found if len(shape) == 2] if every else task.matrices


def equal_spectrum(of: Matrices, update: FloatArray) -> None:
    """Set all singular values of each of these matrices of the update to their mean, in place."""
    for begin, end, shape in of:
        u, s, v = torch.linalg.svd(torch.from_numpy(update[begin:end]).view(shape), full_matrices=False)
        update[begin:end] = (s.mean() * (u @ v)).flatten().numpy()


class OuterStep:
    """The server's step at the end of a round."""

    def __init__(self, task: ByteTask, job: Job) -> None:
        self.matrices = matrices(task, job.outer == "iso-all") if job.outer.startswith("iso") else []
        self.rate, self.beta = f4(job.outer_lr), f4(job.outer_momentum)
        self.share = f4(1 - job.outer_momentum) if job.outer == "iso-ema" else f4(1)  # of an update in the momentum
        self.momentum = task.zeros()

    def __call__(self, update: FloatArray, x: FloatArray) -> None:
        """Step x along the mean update of a round, in place. Overwrites `update`."""
        equal_spectrum(self.matrices, update)
        update *= self.share
        self.momentum *= self.beta
        self.momentum += update
        x += self.rate * (update + self.beta * self.momentum)


def local(task: ByteTask, job: Job, progress: Progress) -> Outcome:
    workers, x = job.workers, task.initial(job.seed)
    up, outer = Coder(job.up), OuterStep(task, job)
    published = Published(x, job.down or job.up, 0)
    replicas, begun, gradients, update, residual, sent = (task.zeros(workers) for _ in range(6))
    inner = AdamWs(task, workers, job.inner, job.beta1, job.beta2)
    agreement: list[float] = []
    for step in range(job.steps):
        if step % job.local_steps == 0:
            np.add(published.newest, residual, out=replicas)
            begun[:] = replicas
        task.gradients(replicas, task.rows(job.seed, step, workers, job.batch), gradients)
        inner.updates(gradients, replicas, job.rate_at(step), update)
        replicas += update
        if (step + 1) % job.local_steps == 0:
            replicas -= begun
            agreement.append(float(np.linalg.norm(replicas.mean(0)) / np.linalg.norm(replicas, axis=1).mean()))
            residual += replicas
            outer(coded_mean(task, up, residual, sent), x)
            published.clock(x)
            if job.moments_every and (step + 1) // job.local_steps % job.moments_every == 0:
                inner.share_moments()
        if progress(step + 1, x):
            break
    if not up.dense:  # finish(): each worker pushes its residual, as one more round
        outer(residual.mean(0), x)
    return x, {"agreement": float(np.mean(agreement[len(agreement) // 2 :] or [0]))}


def coded_mean(task: ByteTask, code: Coder, residual: FloatArray, sent: FloatArray) -> FloatArray:
    """The mean of what the workers send of their residuals [W, size], which lose it."""
    mean = task.zeros()
    for w in range(len(residual)):
        code(residual[w], 1 / len(residual), mean, sent[w])
    code.advance()
    return mean
