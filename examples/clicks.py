"""Click rates of users and items, whose embedding tables live on the servers: rows that a batch touches travel, no table does.

    ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/clicks.py --steps 300

With torch.nn.Embedding and without the numbered lines it is plain torch. The clicks are drawn from a planted model; popular
keys come up often, as in a Zipf law.
"""

import argparse

import torch
from torch import nn

from narrows.worker import DistributedOptimizer, Embedding, rank, step_count, world_size  # 1

DIM = 8


class Clicks(nn.Module):
    """Two towers: how a user's row and an item's row agree, and what a small net makes of both."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.users = Embedding(rows, DIM, sparse=True)  # 2
        self.items = Embedding(rows, DIM, sparse=True)  # 3
        self.net = nn.Sequential(nn.Linear(2 * DIM + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        user, item = self.users(keys[:, 0]), self.items(keys[:, 1])
        return self.net(torch.cat([user, item, (user * item).mean(1, keepdim=True)], 1)).squeeze(1)


def drawn(rows: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[count, 2], user and item, and float32[count], whether there was a click."""
    planted = torch.Generator().manual_seed(0)
    taste, appeal = torch.randn(2, rows, 2, generator=planted)
    bias = torch.randn(rows, generator=planted)
    generator = torch.Generator().manual_seed(seed)
    keys = (rows ** torch.rand(count, 2, generator=generator)).long() - 1  # how often falls as 1 / key
    rate = torch.sigmoid((taste[keys[:, 0]] * appeal[keys[:, 1]]).sum(1) + bias[keys[:, 1]])
    return keys, torch.bernoulli(rate, generator=generator)


def main(steps: int, batch: int, rows: int, lr: float) -> None:
    torch.manual_seed(0)
    model = Clicks(rows)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)
    optimizer = DistributedOptimizer(optimizer, model)  # 4
    for step in range(step_count(), steps):  # 5
        keys, clicked = (part[rank() :: world_size()] for part in drawn(rows, batch * world_size(), 1 + step))  # 6
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(keys), clicked).backward()
        optimizer.step()
    optimizer.eval()  # 7
    with torch.no_grad():
        keys, clicked = drawn(rows, 1 << 14, 0)
        print(f"loss {nn.functional.binary_cross_entropy_with_logits(model(keys), clicked):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256, help="of a worker")
    parser.add_argument("--rows", type=int, default=1000, help="of each table")
    parser.add_argument("--lr", type=float, default=0.1)
    main(**vars(parser.parse_args()))
