"""A loop with Accelerate: a small GPT-2, gradients accumulated and clipped.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/accelerate_loop.py --steps 100

accelerator.is_main_process is true in every worker, for each is a world of its own: rank() says who writes.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from text import CONTEXT, Windows
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from narrows.worker import DistributedOptimizer, rank, sampler  # 1


def main(steps: int, batch: int, lr: float, save: str) -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=lr), model)  # 2
    data = Windows()
    loader = DataLoader(data, batch, sampler=sampler(data, 2 * batch, steps=steps))  # 3: until the run has made them
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for rows in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**rows).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [model(**rows).loss.item() for rows in DataLoader(Windows(held_out=True), 50)]
    if save and rank() == 0:  # 4: in place of accelerator.is_main_process
        torch.save(accelerator.unwrap_model(model).state_dict(), save)
    print(f"loss {sum(losses) / len(losses):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="of a worker, twice a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save", default="", help="a file for the model")
    main(**vars(parser.parse_args()))
