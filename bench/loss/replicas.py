"""The training of bytelm.py, and the codes of updates, for many replicas at once: one batch of arrays, on any device.

- The model, its rows and held-out loss, AdamW and Muon: as bytelm.py and torch.optim have them, to rounding.
- A code gives what a receiver decodes, not bytes. It selects and rounds as compression/ does, but for the exact borders of
  a block and ties.
"""

from __future__ import annotations

from collections.abc import Callable

import bytelm
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FLAGS = bytelm.arguments([])
MODEL = {name: getattr(FLAGS, name) for name in ("layers", "width", "heads", "context")}
BETAS, EPS = (0.9, 0.95), 1e-8  # as bytelm.py has them


# The model: rows of flat values, each as the tensors of bytelm.ByteGPT.


def layer_norm(x: Tensor, at: dict[str, Tensor], name: str) -> Tensor:
    return torch.addcmul(at[f"{name}.bias"][:, None], F.layer_norm(x, x.shape[-1:]), at[f"{name}.weight"][:, None])


def logits(at: dict[str, Tensor], x: Tensor, model: dict[str, int]) -> Tensor:
    """x: bytes [n, batch, context] of n models; [n, batch * context, 256]."""
    n, batch, context = x.shape
    vocabulary, width = at["bytes.weight"].shape[1:]
    offset = (torch.arange(n, device=x.device) * vocabulary)[:, None, None]  # one table of all models
    h = F.embedding(x + offset, at["bytes.weight"].reshape(-1, width)) + at["positions.weight"][:, None, :context]
    h = h.reshape(n, batch * context, width)
    for i in range(model["layers"]):
        block = f"blocks.{i}."
        y = layer_norm(h, at, block + "norm_attention").bmm(at[block + "qkv.weight"].mT)
        q, k, v = y.view(n * batch, context, 3, model["heads"], -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        h = h + mixed.reshape(n, batch * context, width).bmm(at[block + "attention_out.weight"].mT)
        y = F.gelu(layer_norm(h, at, block + "norm_mlp").bmm(at[block + "mlp_in.weight"].mT))
        h = h + y.bmm(at[block + "mlp_out.weight"].mT)
    return layer_norm(h, at, "norm").bmm(at["head.weight"].mT)


class Task:
    """The text on a device, and what a seed decides."""

    def __init__(self, training: Tensor, held_out: Tensor, device: str, model: dict[str, int] = MODEL) -> None:
        self.training, self.held_out, self.device = training.to(device), held_out, device
        self.model, self.context = model, model["context"]
        self.shapes = {name: tuple(p.shape) for name, p in bytelm.ByteGPT(**model).named_parameters()}
        self.sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Tensors of [n, size]."""
        parts = zip(self.shapes.items(), flat.split(self.sizes, 1), strict=True)
        return {name: part.view(-1, *shape) for (name, shape), part in parts}

    def weights(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in bytelm.ByteGPT(**self.model).parameters()]).to(self.device)

    def rows(self, seed: int, step: int, workers: int, batch: int = FLAGS.batch) -> Tensor:
        """[workers, batch / workers, context + 1], as bytelm.batch_rows deals them."""
        starts = np.random.default_rng((seed, step)).integers(0, len(self.training) - self.context, size=batch)
        dealt = torch.from_numpy(np.stack([starts[worker::workers] for worker in range(workers)])).to(self.device)
        return self.training[dealt[..., None] + torch.arange(self.context + 1, device=self.device)].long()

    def loss_sum(self, flat: Tensor, rows: Tensor) -> Tensor:
        """[n], each over its own rows."""
        out = logits(self.views(flat), rows[..., :-1], self.model)
        return F.cross_entropy(out.flatten(0, 1), rows[..., 1:].flatten(), reduction="none").view(len(flat), -1).sum(1)

    @torch.no_grad()
    def validation_loss(self, flat: Tensor) -> Tensor:
        """[n], as bytelm.validation_loss."""
        starts = np.linspace(0, len(self.held_out) - self.context - 1, bytelm.VALIDATION_WINDOWS).astype(np.int64)
        rows = bytelm.windows(self.held_out, starts, self.context).to(self.device)
        sums = [self.loss_sum(flat, part.expand(len(flat), *part.shape)) for part in rows.split(64)]
        return torch.stack(sums).sum(0) / (bytelm.VALIDATION_WINDOWS * self.context)


# Codes: what is to be sent [n, size], and the clock; what the receiver decodes.

Code = Callable[[Tensor, int], Tensor]
SAMPLED, LARGE = 16, 1 << 18  # of LARGE values one of SAMPLED decides a threshold: the density is then right to 2 %


def above(x: Tensor, density: float) -> Tensor:
    """Mask of about `density` of each row: the largest magnitudes."""
    size = x.abs()
    sample = size[:, :: SAMPLED if size.shape[1] > LARGE else 1]
    rank = min(sample.shape[1], max(1, round((1 - density) * sample.shape[1])))
    return size > sample.kthvalue(rank, dim=1, keepdim=True).values


def coded(x: Tensor, kept: Tensor, coding: str, density: float) -> Tensor:
    """x where `kept`, rounded. A scale serves the values of one block, which holds 256 of them on average."""
    block = round(256 / density)
    parts, mask = (F.pad(y, (0, -y.shape[1] % block)).view(len(x), -1, block) for y in (x * kept, kept.float()))
    if coding == "int8":
        scale = (parts.abs().amax(2, keepdim=True) / 127).clamp_min(1e-30)
        parts = (parts / scale).round() * scale
    elif coding == "sign":
        parts = parts.sign() * parts.abs().sum(2, keepdim=True) / mask.sum(2, keepdim=True).clamp_min(1)
    elif coding:
        raise ValueError(f"{coding!r} is neither int8 nor sign")
    return parts.reshape(len(x), -1)[:, : x.shape[1]]


def code(spec: str) -> Code:
    """SPECs of docs/compression.md: dense; int8, sign; topk:DENSITY, cycle:DENSITY[/SHARE], either with +int8 or +sign."""
    first, _, coding = spec.partition("+")
    name, _, argument = first.partition(":")
    density, _, share = argument.partition("/")

    def whole(x: Tensor, clock: int) -> Tensor:
        return coded(x, torch.ones_like(x, dtype=torch.bool), name, 1.0)

    def topk(x: Tensor, clock: int) -> Tensor:
        return coded(x, above(x, float(density)), coding, float(density))

    def cycle(x: Tensor, clock: int) -> Tensor:
        stride = round(1 / float(density))
        part, out = x[:, clock % stride :: stride], torch.zeros_like(x)
        kept = above(part, float(share)) if share else torch.ones_like(part, dtype=torch.bool)
        out[:, clock % stride :: stride] = coded(part, kept, coding, float(share or 1))
        return out

    return {"dense": lambda x, clock: x.clone(), "int8": whole, "sign": whole, "topk": topk, "cycle": cycle}[name]


# Inner optimizers, of arrays [..., size].


class AdamW:
    def __init__(self, like: Tensor) -> None:
        self.m, self.v, self.steps = torch.zeros_like(like), torch.zeros_like(like), 0

    def take(self, g: Tensor) -> None:
        self.m.lerp_(g, 1 - BETAS[0])
        self.v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        self.steps += 1

    def update(self, x: Tensor, rate: Tensor) -> Tensor:
        """How far x moves by the gradients taken.  rate: broadcast to x."""
        one, two = 1 - BETAS[0] ** self.steps, 1 - BETAS[1] ** self.steps
        scale = (self.v / two).sqrt_().add_(EPS)
        moved: Tensor = -rate * (self.m / one / scale + FLAGS.weight_decay * x)
        return moved


class Muon(AdamW):
    """torch.optim.Muon for the matrices of the blocks, AdamW for the rest; see bytelm.optimizers."""

    MOMENTUM = 0.95

    def __init__(self, like: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(like)
        self.momentum = torch.zeros_like(like)
        ends = np.cumsum([np.prod(shape) for shape in shapes.values()]).tolist()
        named = zip([0, *ends], ends, shapes.items(), strict=False)
        self.matrices = [(a, b, s) for a, b, (name, s) in named if name.startswith("blocks") and len(s) == 2]

    def take(self, g: Tensor) -> None:
        super().take(g)
        self.momentum.lerp_(g, 1 - self.MOMENTUM)
        self.nesterov = torch.lerp(g, self.momentum, self.MOMENTUM)

    def update(self, x: Tensor, rate: Tensor) -> Tensor:
        out = super().update(x, rate)
        for begin, end, shape in self.matrices:
            straight = newton_schulz(self.nesterov[..., begin:end].reshape(-1, *shape)).reshape(*x.shape[:-1], -1)
            decayed = 0.2 * max(shape) ** 0.5 * straight + FLAGS.weight_decay * x[..., begin:end]
            out[..., begin:end] = -rate * decayed
        return out


def newton_schulz(g: Tensor) -> Tensor:
    """[n, rows, columns] with singular values near 1: five quintic steps in bfloat16, as torch.optim.Muon has them."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (g.mT if g.shape[1] > g.shape[2] else g).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if g.shape[1] > g.shape[2] else x).float()


def clipped(g: Tensor) -> Tensor:
    """In place, as torch.nn.utils.clip_grad_norm_."""
    scale: Tensor = FLAGS.clip / (g.norm(dim=-1, keepdim=True) + 1e-6)
    return g.mul_(scale.clamp_max(1))
