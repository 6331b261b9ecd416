"""One training process of overlap.py: the byte GPT, stepped in blocks as the driver asks, under Narrows or under DDP.

Both sides run the same loop on the same rows of the same global batch and clip the mean gradient; between two blocks a
process sleeps in a read of its control connection. Times are time.monotonic(), one clock for all processes here.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrows.worker import DistributedOptimizer, session

sys.path.append(str(Path(__file__).resolve().parents[1] / "tasks"))

import bytelm


class NarrowsSide:
    """BSP, dense, gradients leave during backward; the shards clip the mean to `clip` and step AdamW."""

    def __init__(self, model: nn.Module, adamw: torch.optim.Optimizer, clip: float) -> None:
        self.model = model
        self.optimizer = DistributedOptimizer(adamw, model, overlap=True, max_grad_norm=clip)
        self.rank, self.of = session.rank(), session.world_size()

    def step(self) -> None:
        self.optimizer.step()

    def end(self) -> None:
        self.optimizer.finish()


class DDPSide:
    """DistributedDataParallel over gloo at its defaults; every rank clips the mean and steps its own AdamW."""

    def __init__(self, model: nn.Module, adamw: torch.optim.Optimizer, clip: float) -> None:
        torch.distributed.init_process_group("gloo")
        self.model: nn.Module = nn.parallel.DistributedDataParallel(model)
        self.optimizer, self.clip = adamw, clip
        self.rank, self.of = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def end(self) -> None:
        torch.distributed.destroy_process_group()


SIDES: dict[str, type[NarrowsSide] | type[DDPSide]] = {"narrows": NarrowsSide, "ddp": DDPSide}


class Training:
    """The loop of bytelm.py, a block at a time."""

    def __init__(self, kind: type[NarrowsSide] | type[DDPSide], text: Tensor) -> None:
        torch.manual_seed(0)
        self.flags, self.text, self.done = bytelm.arguments([]), text, 0
        model = bytelm.ByteGPT(self.flags.layers, self.flags.width, self.flags.heads, self.flags.context)
        decay = self.flags.weight_decay
        adamw = torch.optim.AdamW(model.parameters(), lr=self.flags.lr, betas=(0.9, 0.95), weight_decay=decay)
        self.side = kind(model, adamw, self.flags.clip)

    def block(self, steps: int) -> dict[str, Any]:
        """Seconds and loss of each step."""
        seconds, losses, flags, side = [], [], self.flags, self.side
        for _ in range(steps):
            begin = time.monotonic()
            for group in side.optimizer.param_groups:
                group["lr"] = bytelm.learning_rate(self.done, flags.steps, flags.lr, flags.warm_up)
            rows = bytelm.batch_rows(self.text, 0, self.done, flags.batch, flags.context, side.rank, side.of)
            side.optimizer.zero_grad()
            loss = bytelm.loss_sum(side.model, rows) * side.of / (flags.batch * flags.context)
            loss.backward()
            side.step()
            losses.append(loss.item())
            seconds.append(time.monotonic() - begin)
            self.done += 1
        return {"seconds": seconds, "losses": losses}


def main(side: str, control: str, index: str) -> None:
    torch.set_num_threads(1)
    text, _, _ = bytelm.library()
    training = Training(SIDES[side], text)
    host, port = control.split(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rw") as lines:
        print(json.dumps({"index": int(index)}), file=lines, flush=True)
        for line in lines:
            print(json.dumps(training.block(json.loads(line))), file=lines, flush=True)
    training.side.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
