"""The 1,797 handwritten digits inside scikit-learn, 8 x 8 pixels each, and a small convolutional network.

An ordinary script; the lines marked "Narrows" join it to a parameter server. Run as plain python it trains alone.
The 360 test digits are the same for every seed; the last line is the accuracy on them.
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from narrows.worker import DistributedOptimizer, rank, record, step_count, world_size  # Narrows


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, training and test labels."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        pixels.astype(np.float32).reshape(-1, 1, 8, 8) / 16, labels, test_size=360, stratify=labels, random_state=0
    )
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return train_x, test_x, train_y, test_y


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
        record(loss=loss.item())

    optimizer.finish()  # Narrows
    with optimizer.shared(), torch.no_grad():  # Narrows
        outputs = model(test_x)
    accuracy = (outputs.argmax(1) == test_y).float().mean().item()
    record(accuracy=accuracy, loss=F.cross_entropy(outputs, test_y).item())
    print(f"test accuracy {accuracy:.4f}" + (f" (rank {rank()})" if world_size() > 1 else ""))


if __name__ == "__main__":
    main(arguments())
