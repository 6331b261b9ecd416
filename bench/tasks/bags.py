"""A bag of rows of a large table and a head, on generated keys: the task of `bench/speed/embedding_rows.py`.

Each step records the rows that it touched and the memory of this process.
"""

import argparse
import resource
from pathlib import Path

import torch
from torch import nn

from narrows.worker import DistributedOptimizer, Embedding, rank, record, step_count, world_size


class Bag(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = Embedding(rows, dim, sparse=True, std=0.1, seed=1)
        self.head = nn.Linear(dim, 1)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.squeeze(self.head(self.table(keys).mean(1)), 1)


def drawn(rows: int, count: int, bag: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[count, bag], half of them as in a Zipf law, and float32[count]: whether most of them are even."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(count, bag, generator=generator, dtype=torch.float64)
    zipf = torch.rand(count, bag, generator=generator) < 0.5
    keys = torch.where(zipf, rows**share - 1, rows * share).long()
    return keys, (keys % 2 == 0).float().mean(1).round()


def memory() -> dict[str, float]:
    """MB of this process: that it has had at most; of its own at present, which are not pages of files, such as libraries;
    its part of what it shares with others (PSS); and what no other process has."""
    found = {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    sums = {"own_mb": ["Anonymous"], "pss_mb": ["Pss"], "private_mb": ["Private_Clean", "Private_Dirty"]}
    file = Path("/proc/self/smaps_rollup")
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    each = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return found | {name: sum(each.get(row, 0) for row in rows) / 1024 for name, rows in sums.items()}


def main(steps: int, batch: int, bag: int, rows: int, dim: int) -> None:
    torch.manual_seed(0)
    model = Bag(rows, dim)
    optimizer = DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model)
    while (step := step_count()) < steps:
        keys, wanted = drawn(rows, batch, bag, step * world_size() + rank())
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(keys), wanted)
        loss.backward()
        optimizer.step()
        record(loss=loss.item(), touched=torch.unique(keys).numel(), **memory())
    optimizer.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--bag", type=int, default=16)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=32)
    main(**vars(parser.parse_args()))
