"""Click rates of users and items, whose embedding tables live on the servers: rows that a batch touches travel, no table does.

    ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/clicks.py --steps 300

With Embedding of torch.nn and without the numbered lines it is plain torch. The clicks are drawn from a planted model; popular
keys come up often, as in a Zipf law.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from narrows.worker import DistributedOptimizer, Embedding, sampler  # 1: Embedding in place of torch.nn's

DIM, SAMPLES = 8, 1 << 18


class Clicks(nn.Module):
    """Two towers: how a user's row and an item's row agree, and what a small net makes of both."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.users = Embedding(rows, DIM, sparse=True)
        self.items = Embedding(rows, DIM, sparse=True)
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
    optimizer = DistributedOptimizer(optimizer, model)  # 2
    data = TensorDataset(*drawn(rows, SAMPLES, 1))
    loader = DataLoader(data, batch, sampler=sampler(data, batch, steps=steps))  # 3: until the run has made them
    for keys, clicked in loader:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(keys), clicked).backward()
        optimizer.step()
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
