"""A student: a GPT of bytes that learns from text, and from the soft targets of examples/teacher.py where --teacher names one.

ps-worker -n 2 --teacher tcp://127.0.0.1:5570 --sync ssp --compress topk:0.05+int8 examples/student.py --steps 100
"""

import argparse

import torch
from gpt import GPT, next_byte_loss
from text import Windows
from torch.utils.data import DataLoader

from narrows.worker import DistributedOptimizer, sampler, teacher  # 1


def main(steps: int, batch: int, lr: float, weight: float) -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=lr), model)  # 2
    data = Windows()
    loader = DataLoader(data, batch, sampler=sampler(data, batch, steps=steps))  # 3
    for rows, soft in teacher.ahead(loader):  # 4
        logits = model.logits(rows["input_ids"])
        loss = next_byte_loss(logits, rows["input_ids"])
        if soft is not None:  # 5: no --teacher, or it is lost
            loss = (1 - weight) * loss + weight * soft.loss(logits)  # 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [model(each["input_ids"]).item() for each in DataLoader(Windows(held_out=True), 50)]
    print(f"loss {sum(losses) / len(losses):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="of a worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight", type=float, default=0.5, help="of the teacher's part of the loss")
    main(**vars(parser.parse_args()))
