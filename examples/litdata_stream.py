"""litdata: a small GPT on a dataset that is streamed from a folder. --rank-variables tells litdata which share is whose.

ps-worker -n 2 --rank-variables --sync ssp --compress topk:0.05+int8 examples/litdata_stream.py --steps 100
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import litdata
import torch
from gpt import GPT
from text import Windows
from torch.utils.data import DataLoader

from narrows.worker import DistributedOptimizer, resumable  # 1

SAMPLES = 5000


def sample(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def written(folder: str) -> str:
    """The folder with the dataset in it. Each process may write it: the first that renames its own copy wins."""
    target = Path(folder) / "train"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        own = tempfile.mkdtemp(dir=target.parent)
        texts = [window.numpy().tobytes() for window in Windows().windows[:SAMPLES]]
        litdata.optimize(sample, texts, own, num_workers=1, chunk_bytes="32KB")
        try:
            Path(own).rename(target)
        except OSError:  # it is there
            shutil.rmtree(own)
    return str(target)


def main(steps: int, batch: int, lr: float, folder: str) -> None:
    torch.manual_seed(0)
    data = written(folder or tempfile.mkdtemp())
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    optimizer = DistributedOptimizer(optimizer, model)  # 2: from now on the variables say the rank
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset(data, shuffle=True), batch_size=batch)
    batches = resumable(loader, f"{data}-states", steps=steps)  # 3: epoch after epoch, from the run's step on
    for rows in batches:
        optimizer.zero_grad()
        model(rows.long()).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [model(each["input_ids"]).item() for each in DataLoader(Windows(held_out=True), 50)]
    print(f"loss {sum(losses) / len(losses):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="of a worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--folder", default="", help="of the dataset, the same for all workers [one of its own each]")
    main(**vars(parser.parse_args()))
