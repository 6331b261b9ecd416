"""A convolutional network with batch norm under OneCycleLR, in plain PyTorch, on scikit-learn's digits.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/cnn.py --steps 200
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from narrows.worker import DistributedOptimizer, sampler  # 1


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def main(steps: int, batch: int, lr: float) -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    data, held_out = TensorDataset(images[300:], labels[300:]), (images[:300], labels[:300])
    model = nn.Sequential(
        convolution(1, 16), convolution(16, 32), nn.MaxPool2d(2), convolution(32, 64),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    optimizer = DistributedOptimizer(optimizer, model, schedule=schedule)  # 2
    loader = DataLoader(data, batch, sampler=sampler(data, batch, steps=steps))  # 3: until the run has made them
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    print(f"accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="of a worker")
    parser.add_argument("--lr", type=float, default=0.1)
    main(**vars(parser.parse_args()))
