"""A teacher: a GPT of bytes that trains for some seconds, or is loaded from a file, and then answers students until Ctrl-C.

ps-teach examples/teacher.py --steps 200
"""

import argparse
from pathlib import Path

import torch
from gpt import GPT, next_byte_loss
from text import Windows
from torch import Tensor
from torch.utils.data import DataLoader

from narrows.worker import teacher  # 1


class Teacher(GPT):
    def forward(self, input_ids: Tensor) -> Tensor:
        """The inputs are those that a student's batch has by name."""
        return self.logits(input_ids)


def train(model: Teacher, steps: int, batch: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    data = Windows()
    order = torch.utils.data.RandomSampler(data, replacement=True, num_samples=steps * batch)
    for rows in DataLoader(data, batch, sampler=order):
        optimizer.zero_grad()
        next_byte_loss(model(rows["input_ids"]), rows["input_ids"]).backward()
        optimizer.step()


def main(steps: int, batch: int, lr: float, weights: Path | None) -> None:
    torch.manual_seed(1)
    model = Teacher(width=96, layers=3)
    if weights is not None and weights.exists():
        model.load_state_dict(torch.load(weights))
    else:
        train(model, steps, batch, lr)
        if weights is not None:
            torch.save(model.state_dict(), weights)
    teacher.serve(model)  # 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weights", type=Path, help="a file: loaded if it is there, else written after the training")
    main(**vars(parser.parse_args()))
