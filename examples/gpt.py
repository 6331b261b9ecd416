"""A loop in the style of nanoGPT: mixed precision, accumulated gradients, a cosine with a warm-up, tied embedding and head.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/gpt.py --steps 100
"""

import argparse
import math

import torch
from text import CONTEXT, Windows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from narrows.worker import DistributedOptimizer, sampler  # 1

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.norm_1(x)).chunk(3, 2)
        )
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.apply(self.first)
        self.token.weight = self.head.weight

    @staticmethod
    def first(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte at each position. tokens: int64[batch, CONTEXT]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of the next byte. tokens: int64[batch, CONTEXT]."""
        return next_byte_loss(self.logits(tokens), tokens)


def next_byte_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def rate(step: int, steps: int) -> float:
    """The share of the peak rate: it rises over a tenth of the steps, then falls along a cosine to a tenth."""
    warm = steps // 10
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def main(steps: int, batch: int, accumulate: int, lr: float, dtype: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    optimizer = DistributedOptimizer(optimizer, model, schedule=schedule)  # 2
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")  # bfloat16 has the exponents of float32
    forward = torch.compile(model) if compiled else model
    data = Windows()
    loader = DataLoader(data, batch, sampler=sampler(data, accumulate * batch, steps=steps))  # 3
    for part, rows in enumerate(loader, 1):
        with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "float32"):
            loss = forward(rows["input_ids"]) / accumulate
        scaler.scale(loss).backward()
        if part % accumulate:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [model(each["input_ids"]).item() for each in DataLoader(Windows(held_out=True), 50)]
    assert model.token.weight is model.head.weight
    print(f"loss {sum(losses) / len(losses):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="of a worker, in each of the backward passes of a step")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--compile", dest="compiled", action="store_true")
    main(**vars(parser.parse_args()))
