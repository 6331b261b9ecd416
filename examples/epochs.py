"""A loop over epochs: a validation and a step of the schedule after each, the best model in a file. It may be stopped and
started again with --resume, and goes on in the epoch where it was.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 --checkpoint-dir run examples/epochs.py --epochs 10
ps-worker -n 2 --sync ssp --compress topk:0.05+int8 --checkpoint-dir run --resume examples/epochs.py --epochs 10
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from narrows.worker import DistributedOptimizer, rank, sampler  # 1


def main(epochs: int, batch: int, lr: float, best: Path) -> None:
    torch.manual_seed(0)
    pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    data, held_out = TensorDataset(pixels[300:].float() / 16, labels[300:]), (pixels[:300].float() / 16, labels[:300])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    optimizer = DistributedOptimizer(optimizer, model)  # 2
    share = sampler(data, batch)  # 3
    loader = DataLoader(data, batch, sampler=share)
    accuracy = highest = 0.0
    if share.epoch and best.exists():  # the run goes on
        highest = torch.load(best)["accuracy"]
    for epoch in share.epochs(epochs, schedule):  # 4: in place of range(epochs), from the epoch on that the run is in
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with optimizer.shared(), torch.no_grad():  # 5: the model of the run
            accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
            if rank() == 0 and accuracy > highest:  # 6
                highest = accuracy
                torch.save(
                    {"model": model.state_dict(), "accuracy": accuracy, "epoch": epoch}, best.with_suffix(".new")
                )
                best.with_suffix(".new").replace(best)
    print(f"accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="of a worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--best", type=Path, default=Path("best.pt"), help="where the best model goes")
    main(**vars(parser.parse_args()))
