"""The byte GPT of many workers in one process and one thread: gradients in bfloat16, states, optimizers and codes in float32.

A run has the arrays of its W workers as [W, size]. Numba compiles the loops over them. Losses are those of float32 to about
0.1 %, and with AVX512_BF16 a step takes half of the time.

- `ByteTask`: the model of bytelm.py for all workers at once: gradients, held-out loss, the rows of a step.
- `Coder`: takes out of a residual what a receiver decodes of a SPEC. It selects and rounds as compression/ does, but for the
  exact borders of a block, and ties.
- `AdamWs`: an optimizer for each worker: AdamW, or Muon for matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import bytelm
import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from narrows.compression.buffers import FloatArray
from narrows.compression.kernels.cpu import decode_2bit, encode_2bit
from narrows.compression.kernels.levels import TWO_BIT_BLOCK

P = ParamSpec("P")
R = TypeVar("R")
f4 = np.float32
BF16 = torch.bfloat16
FLAGS = bytelm.arguments([])
EPS = 1e-8  # of AdamW, as bytelm.py has it
SAMPLED = 16  # one of so many values decides a threshold: of 2^18 values the density is then right to 2 %
HEAD_WIDTH = 32
MOMENTUM = 0.95  # of Muon
EXACT, INT8, SIGN, INT4 = range(4)  # value codings of `emit`
CODINGS = {"": EXACT, "int8": INT8, "sign": SIGN, "int4": INT4}


def layer_norm(x: Tensor, at: dict[str, Tensor], name: str) -> Tensor:
    return torch.addcmul(at[f"{name}.bias"][:, None], F.layer_norm(x, x.shape[-1:]), at[f"{name}.weight"][:, None])


class ByteTask:
    """The text and a byte GPT of so many layers, width and heads; the width is 32 times the heads."""

    def __init__(
        self, training: Tensor, held_out: Tensor, layers: int, width: int, heads: int, context: int = 64
    ) -> None:
        if width != HEAD_WIDTH * heads:
            raise ValueError(f"{heads} heads of {HEAD_WIDTH} have a width of {HEAD_WIDTH * heads}, not {width}")
        self.training, self.held_out, self.context = training, held_out, context
        self.model = {"layers": layers, "width": width, "heads": heads, "context": context}
        self.shapes = {name: tuple(p.shape) for name, p in bytelm.ByteGPT(**self.model).named_parameters()}
        self.sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        self.size = sum(self.sizes)
        self.ends: list[int] = np.cumsum(self.sizes).tolist()
        self.ranges = list(zip([0, *self.ends[:-1]], self.ends, strict=True))
        named = zip(self.ranges, self.shapes.items(), strict=True)
        self.matrices = [(a, b, s) for (a, b), (name, s) in named if name.startswith("blocks") and len(s) == 2]
        self.mask = torch.full((context, context), float("-inf")).triu(1)

    def zeros(self, *workers: int) -> FloatArray:
        return np.zeros((*workers, self.size), f4)

    def initial(self, seed: int) -> FloatArray:
        torch.manual_seed(seed)
        weights: FloatArray = torch.cat(
            [p.detach().flatten() for p in bytelm.ByteGPT(**self.model).parameters()]
        ).numpy()
        return weights

    def rows(self, seed: int, step: int, workers: int, batch: int = FLAGS.batch) -> Tensor:
        """Return the rows of each worker, int64[workers, batch / workers, context + 1]."""
        text, context = self.training, self.context
        return torch.stack(
            [bytelm.batch_rows(text, seed, step, batch, context, worker, workers) for worker in range(workers)]
        )

    def lowered(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors of n models, float32[n, size], by name: matrices in bfloat16, the rest as it is."""
        parts = zip(self.shapes.items(), flat.split(self.sizes, 1), strict=True)
        named = {name: part.view(-1, *shape) for (name, shape), part in parts}
        return {name: part.to(BF16) if part.ndim == 3 else part for name, part in named.items()}

    def forward(self, at: dict[str, Tensor], x: Tensor) -> Tensor:
        """Logits [n, batch * context, 256] of bytes [n, batch, context]: bfloat16, but for a float32 residual stream."""
        n, batch, context = x.shape
        width, heads = self.model["width"], self.model["heads"]
        offset = (torch.arange(n) * 256)[:, None, None]
        h = F.embedding(x + offset, at["bytes.weight"].reshape(-1, width)) + at["positions.weight"][:, None, :context]
        h = h.reshape(n, batch * context, width).float()
        for i in range(self.model["layers"]):
            block = f"blocks.{i}."
            y = layer_norm(h, at, block + "norm_attention").to(BF16).bmm(at[block + "qkv.weight"].mT)
            parts = y.view(n * batch, context, 3, heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
            q, k, v = parts.reshape(3, n * batch * heads, context, HEAD_WIDTH).unbind(0)
            mask = self.mask[:context, :context].to(BF16).expand(q.shape[0], -1, -1)
            scores = torch.baddbmm(mask, q, k.mT, alpha=HEAD_WIDTH**-0.5)
            mixed = torch.softmax(scores, -1).bmm(v).view(n * batch, heads, context, HEAD_WIDTH).transpose(1, 2)
            h = h + mixed.reshape(n, batch * context, width).bmm(at[block + "attention_out.weight"].mT)
            y = F.gelu(layer_norm(h, at, block + "norm_mlp").to(BF16).bmm(at[block + "mlp_in.weight"].mT))
            h = h + y.bmm(at[block + "mlp_out.weight"].mT)
        return layer_norm(h, at, "norm").to(BF16).bmm(at["head.weight"].mT).float()

    def gradients(self, x: FloatArray, rows: Tensor, out: FloatArray) -> None:
        """Each worker's gradient of the mean loss of its own rows, at its own weights.

        Args:
            x: [W, size].
            rows: [W, windows, context + 1].
            out: [W, size], overwritten.
        """
        at = {name: part.detach().requires_grad_() for name, part in self.lowered(torch.from_numpy(x)).items()}
        logits = self.forward(at, rows[..., :-1])
        targets = rows[..., 1:].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / (rows.shape[1] * self.context)
        into = torch.from_numpy(out)
        for gradient, (begin, end) in zip(torch.autograd.grad(loss, list(at.values())), self.ranges, strict=True):
            into[:, begin:end].copy_(gradient.reshape(len(x), -1))

    @torch.no_grad()
    def loss(self, x: FloatArray, count: int = bytelm.VALIDATION_WINDOWS) -> float:
        """Held-out loss in nats a byte, of `count` of bytelm.py's windows."""
        every = bytelm.VALIDATION_WINDOWS
        starts = np.linspace(0, len(self.held_out) - self.context - 1, every).astype(np.int64)[:: every // count]
        at = self.lowered(torch.from_numpy(x)[None])
        total = 0.0
        for part in bytelm.windows(self.held_out, starts, self.context).split(64):
            logits = self.forward(at, part[None, :, :-1])[0]
            total += F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item()
        return total / (len(starts) * self.context)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """With fastmath, unlike the product's kernels: sums may be reordered, so two machines may differ in the last bit."""
    return cast(Callable[P, R], numba.njit(fastmath=True, cache=True, error_model="numpy")(function))


@kernel
def squared_norm(g: FloatArray) -> np.float32:
    total = f4(0)
    for i in range(g.size):
        total += g[i] * g[i]
    return total


@kernel
def adamw(
    g: FloatArray,
    scale: np.float32,
    m: FloatArray,
    v: FloatArray,
    x: FloatArray,
    update: FloatArray,
    beta1: np.float32,
    beta2: np.float32,
    unbias1: np.float32,
    unbias2: np.float32,
    eps: np.float32,
    rate: np.float32,
    decay: np.float32,
) -> None:
    """update <- the step of one worker by scale * g. unbias: 1 / (1 - beta ** steps)."""
    one = f4(1)
    for i in range(g.size):
        gi = g[i] * scale
        m[i] = beta1 * m[i] + (one - beta1) * gi
        v[i] = beta2 * v[i] + (one - beta2) * gi * gi
        update[i] = -rate * (m[i] * unbias1 / (np.sqrt(v[i] * unbias2) + eps) + decay * x[i])


@kernel
def add_scaled(a: np.float32, x: FloatArray, y: FloatArray) -> None:
    for i in range(y.size):
        y[i] += a * x[i]


@kernel
def emit(
    residual: FloatArray,
    threshold: np.float32,
    block: int,
    coding: int,
    weight: np.float32,
    mean: FloatArray,
    sent: FloatArray,
) -> None:
    """Sends the values of `residual` above the threshold: sent <- them, rounded; residual -= sent; mean += weight * sent."""
    zero, one = f4(0), f4(1)
    sent[:] = zero
    for begin in range(0, residual.size, block):
        end = min(residual.size, begin + block)
        top, total, kept = zero, zero, zero
        for i in range(begin, end):
            size = abs(residual[i])
            above = size > threshold
            total += size if above else zero
            kept += one if above else zero
            top = max(top, size)
        if top <= threshold:
            continue
        average = total / max(kept, one)
        if coding == SIGN:
            for i in range(begin, end):
                value = residual[i]
                s = average if value > zero else -average
                s = s if abs(value) > threshold else zero
                sent[i] = s
                residual[i] = value - s
                mean[i] += weight * s
        elif coding in (INT8, INT4):
            step = top / f4(127 if coding == INT8 else 7)
            inverse = one / max(step, f4(1e-30))
            for i in range(begin, end):
                value = residual[i]
                s = np.rint(value * inverse) * step
                s = s if abs(value) > threshold else zero
                sent[i] = s
                residual[i] = value - s
                mean[i] += weight * s
        else:
            for i in range(begin, end):
                value = residual[i]
                s = value if abs(value) > threshold else zero
                sent[i] = s
                residual[i] = value - s
                mean[i] += weight * s


class Coder:
    """The code of one SPEC: dense, int8, int4, sign, 2bit, or topk|cycle:DENSITY[+int8|+int4|+sign].

    A sample decides the threshold of topk. `advance` begins the next turn of a cycle. 2bit is coded and decoded by the
    product's kernels.
    """

    def __init__(self, spec: str) -> None:
        first, _, coding = spec.partition("+")
        name, _, density = first.partition(":")
        if name not in ("dense", "2bit", "topk", "cycle", "int8", "int4", "sign") or coding not in CODINGS:
            raise ValueError(
                f"{spec!r} is none of dense, int8, int4, sign, 2bit, topk|cycle:DENSITY[+int8|+int4|+sign]"
            )
        self.dense, self.two_bit = name == "dense", name == "2bit"
        self.stride, self.turn = round(1 / float(density)) if name == "cycle" else 1, 0
        self.density = 1.0 if name == "cycle" else float(density or 1)
        self.coding = CODINGS[name if name in CODINGS else coding]
        self.block = round(256 / self.density)

    def __call__(self, residual: FloatArray, weight: float, mean: FloatArray, sent: FloatArray) -> None:
        """sent <- the values that a receiver decodes of `residual`; residual -= sent; mean += weight * sent."""
        if self.dense:
            sent[:] = residual
            residual[:] = 0
            add_scaled(f4(weight), sent, mean)
            return
        if self.two_bit:
            levels = np.empty(3 * -(-residual.size // TWO_BIT_BLOCK), np.uint8)
            signs, highs = (np.empty(-(-residual.size // 8), np.uint8) for _ in range(2))
            encode_2bit(residual, levels, signs, highs)
            decode_2bit(levels, signs, highs, sent)
            residual -= sent
            add_scaled(f4(weight), sent, mean)
            return
        if self.stride > 1:
            at = slice(self.turn % self.stride, None, self.stride)
            parts = [np.ascontiguousarray(each[at]) for each in (residual, mean, sent)]
            emit(parts[0], f4(-1), self.block, self.coding, f4(weight), *parts[1:])
            sent[:] = 0
            for each, part in zip((residual, mean, sent), parts, strict=True):
                each[at] = part
            return
        threshold = f4(-1)
        if self.density < 1:
            sample = np.abs(residual[::SAMPLED])
            rank = min(len(sample), max(1, round((1 - self.density) * len(sample)))) - 1
            threshold = np.partition(sample, rank)[rank]
        emit(residual, threshold, self.block, self.coding, f4(weight), mean, sent)

    def advance(self) -> None:
        """Begin the next clock, in which a cycle sends other values."""
        self.turn += 1


def clip_scale(g: FloatArray) -> float:
    """The factor that clips one worker's gradient, as torch.nn.utils.clip_grad_norm_."""
    return min(1.0, float(FLAGS.clip) / (math.sqrt(squared_norm(g)) + 1e-6))


def newton_schulz(g: Tensor) -> Tensor:
    """[n, rows, columns] with singular values near 1: five quintic steps in bfloat16, as torch.optim.Muon has them."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (g.mT if g.shape[1] > g.shape[2] else g).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if g.shape[1] > g.shape[2] else x).float()


def muon_step(
    task: ByteTask, directions: Callable[[int, int], Tensor], x: FloatArray, rate: float, out: FloatArray
) -> None:
    """out <- Muon's step for the matrices of the blocks; directions(begin, end): the momentum of one of them."""
    into, weights = torch.from_numpy(out), torch.from_numpy(x)
    for begin, end, shape in task.matrices:
        straight = newton_schulz(directions(begin, end).view(1, *shape)).flatten()
        decayed = 0.2 * max(shape) ** 0.5 * straight + FLAGS.weight_decay * weights[begin:end]
        into[begin:end] = -rate * decayed


class AdamWs:
    """The optimizers of n workers: AdamW, or Muon for the matrices of the blocks and AdamW for the rest."""

    def __init__(self, task: ByteTask, n: int, kind: str, beta1: float, beta2: float) -> None:
        self.task, self.beta1, self.beta2, self.steps = task, beta1, beta2, 0
        self.m, self.v = task.zeros(n), task.zeros(n)
        self.momentum = task.zeros(n) if kind == "muon" else None

    def updates(self, g: FloatArray, x: FloatArray, rate: float, out: FloatArray) -> None:
        """out[w] <- the step of worker w by its gradient g[w], clipped, at its weights x[w]. All are [n, size]."""
        self.steps += 1
        betas = f4(self.beta1), f4(self.beta2)
        unbias = [f4(1 / (1 - beta**self.steps)) for beta in (self.beta1, self.beta2)]
        numbers = (*betas, *unbias, f4(EPS), f4(rate), f4(FLAGS.weight_decay))
        for w in range(len(g)):
            scale = f4(clip_scale(g[w]))
            adamw(g[w], scale, self.m[w], self.v[w], x[w], out[w], *numbers)
            if self.momentum is not None:
                self._muon(g[w], float(scale), self.momentum[w], x[w], rate, out[w])

    def _muon(
        self, g: FloatArray, scale: float, momentum: FloatArray, x: FloatArray, rate: float, out: FloatArray
    ) -> None:
        gradient, mean = torch.from_numpy(g), torch.from_numpy(momentum)

        def nesterov(begin: int, end: int) -> Tensor:
            clipped = gradient[begin:end] * scale
            mean[begin:end].lerp_(clipped, 1 - MOMENTUM)
            return torch.lerp(clipped, mean[begin:end], MOMENTUM)

        muon_step(self.task, nesterov, x, rate, out)

    def take_over(self, other: AdamWs) -> None:
        """Every worker goes on with the moments of the one optimizer `other`."""
        self.m[:], self.v[:], self.steps = other.m, other.v, other.steps
        if self.momentum is not None and other.momentum is not None:
            self.momentum[:] = other.momentum

    def share_moments(self) -> None:
        """Every worker goes on with the mean of all workers' moments."""
        for moments in (self.m, self.v, self.momentum):
            if moments is not None:
                moments[:] = moments.mean(0)
