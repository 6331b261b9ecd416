"""Adapters only: a small GPT-2 whose weights are frozen, and LoRA by peft. Only the adapters travel.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/lora.py --steps 100
"""

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from text import CONTEXT, Windows
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from narrows.worker import DistributedOptimizer, sampler  # 1


def main(steps: int, batch: int, lr: float) -> None:
    set_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4))
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc", "lm_head"]))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    optimizer = DistributedOptimizer(optimizer, model)  # 2
    data = Windows()
    loader = DataLoader(data, batch, sampler=sampler(data, batch, steps=steps))  # 3: until the run has made them
    for rows in loader:
        optimizer.zero_grad()
        model(**rows).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [model(**rows).loss.item() for rows in DataLoader(Windows(held_out=True), 50)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the shared adapter, as peft loads it
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    print(f"loss {sum(losses) / len(losses):.4f}; {trained} of {sum(p.numel() for p in model.parameters())} parameters are "
          f"trained, the adapter's file has {size} bytes", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="of a worker")
    parser.add_argument("--lr", type=float, default=5e-3)
    main(**vars(parser.parse_args()))
