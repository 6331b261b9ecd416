"""The byte GPT under DistributedDataParallel over gloo: what wan.py compares with. Started once for each rank, by wan.py.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... in the environment of
    python bench/contenders/ddp.py HOOK RECORD.jsonl [flags of tasks/bytelm.py]

HOOK: none; fp16 (gradients cross as half); powersgd (rank 4, with error feedback and warm start, from step 2 on). Same rows,
schedule and clipping of the mean gradient as bytelm.py. One bucket for all gradients: PowerSGD hangs over gloo with several.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

sys.path.append(str(Path(__file__).resolve().parents[1] / "tasks"))

import bytelm

BUCKET_MB = 200
LIMIT = timedelta(minutes=20)  # of one collective


def with_hook(model: nn.Module, hook: str) -> nn.parallel.DistributedDataParallel:
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: Namespace, training: Tensor, record: TextIO
) -> None:
    """All steps of this rank, each told to the record."""
    rank, of = distributed.get_rank(), distributed.get_world_size()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = bytelm.learning_rate(step, args.steps, args.lr, args.warm_up)
        rows = bytelm.batch_rows(training, args.seed, step, args.batch, args.context, rank, of)
        optimizer.zero_grad()
        loss = bytelm.loss_sum(model, rows) * of / (args.batch * args.context)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        tell(record, rank, step + 1, loss.item())


def tell(record: TextIO, rank: int, step: int, loss: float) -> None:
    told = {"event": "step", "local_rank": rank, "clock": step, "seconds": time.monotonic(), "loss": loss}
    print(json.dumps(told), file=record, flush=True)


def finish(model: nn.Module, args: Namespace, held_out: Tensor, record: TextIO) -> None:
    """The last line of the record; nobody leaves before all are here."""
    distributed.barrier()
    last = {"loss": bytelm.validation_loss(model, held_out, args.context)}
    print(json.dumps({"event": "done", "last": last}), file=record, flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def main(hook: str, out: Path, argv: list[str]) -> None:
    torch.set_num_threads(1)
    args = bytelm.arguments(argv)
    distributed.init_process_group("gloo", timeout=LIMIT)
    torch.manual_seed(args.seed)
    training, held_out, _ = bytelm.library()
    model = bytelm.ByteGPT(args.layers, args.width, args.heads, args.context)
    parallel = with_hook(model, hook)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(args.beta1, 0.95), weight_decay=args.weight_decay)
    with out.open("w") as record:
        train(parallel, adamw, args, training, record)
        finish(model, args, held_out, record)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
