"""The byte GPT under hivemind.Optimizer: what wan.py compares with. Started once for each rank, by wan.py.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... LAB_ADDRESS=... in the environment of
    python bench/contenders/hivemind_run.py HOW RECORD.jsonl [flags]

LAB_ADDRESS: of this rank's host. Means cross as half (Float16Compression). Rank 0 is the first peer of the DHT.
HOW is one of:
- delayed: gradients are averaged and the optimizer steps in the background, one round late; the weights are averaged after
  each, as in hivemind's ALBERT example. A step is one of hivemind's epochs: --batch rows of all ranks together, or the more
  that they have computed when they notice. AdamW clips the mean gradient.
- H, a number: local updates; every H steps of all ranks, or when they notice, the weights are averaged; hivemind's next
  step waits for that.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.compression import Float16Compression
from torch import Tensor, distributed, nn

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
from contenders import ddp

DELAYED = "delayed"
MATCHMAKING_S = 3.0  # at most, since a group of all ranks starts at once; the least that hivemind's docs name
REQUEST_S = 2.0  # less than that
REFRESH_S, REFRESH_MAX_S = 0.1, 0.5  # of what the others have computed; hivemind's 0.5 and 10 s are many steps here
MEET_S = 120.0


class ClippedAdamW(torch.optim.AdamW):
    clip = 1.0

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.clip)
        return super().step(closure)


def join(rank: int, here: str) -> hivemind.DHT:
    """A DHT of all ranks."""
    listen = [f"/ip4/{here}/tcp/0"]
    known: list[Any] = [None]
    if rank == 0:
        dht = hivemind.DHT(host_maddrs=listen, start=True)
        known = [[str(address) for address in dht.get_visible_maddrs()]]
    distributed.broadcast_object_list(known)
    return dht if rank == 0 else hivemind.DHT(initial_peers=known[0], host_maddrs=listen, start=True)


def optimizer(how: str, dht: hivemind.DHT, model: nn.Module, args: Namespace, of: int) -> hivemind.Optimizer:
    ClippedAdamW.clip = args.clip

    def inner(params: Any) -> torch.optim.Optimizer:
        return ClippedAdamW(params, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)

    late = {"offload_optimizer": True, "delay_optimizer_step": True, "delay_grad_averaging": True}
    return hivemind.Optimizer(
        dht=dht,
        run_id="bytelm",
        target_batch_size=args.batch if how == DELAYED else args.batch * int(how),
        batch_size_per_step=args.batch // of,
        params=list(model.parameters()),
        optimizer=inner,
        matchmaking_time=MATCHMAKING_S,
        grad_compression=Float16Compression(),
        state_averaging_compression=Float16Compression(),
        averager_opts={"target_group_size": of, "request_timeout": REQUEST_S},
        tracker_opts={
            "min_refresh_period": REFRESH_S,
            "default_refresh_period": REFRESH_S,
            "max_refresh_period": REFRESH_MAX_S,
        },
        verbose=True,
        **(late if how == DELAYED else {"use_local_updates": True}),
    )


def meet(opt: hivemind.Optimizer, of: int) -> None:
    """Until every rank knows of all: who sees nobody begins alone."""
    opt.tracker.report_local_progress(0, 1)  # it does not tell the others of none
    deadline = time.monotonic() + MEET_S
    while opt.tracker.global_progress.num_peers < of:
        if time.monotonic() > deadline:
            raise SystemExit(f"hivemind has not found all {of} ranks in {MEET_S:.0f} s")
        time.sleep(REFRESH_S)
    distributed.barrier()
    opt.tracker.report_local_progress(0, 0)


def train(how: str, opt: hivemind.Optimizer, model: nn.Module, args: Namespace, training: Tensor, record: Any) -> int:
    """All steps of this rank, each told to the record; the batches they took."""
    rank, of = distributed.get_rank(), distributed.get_world_size()
    step, batch, losses = 0, 0, list[float]()
    rounds = 0 if how == DELAYED else args.steps // int(how)
    while step < args.steps or opt.local_epoch < rounds:  # a rank that left before the last round would be waited for
        for group in opt.opt.param_groups:
            group["lr"] = bytelm.learning_rate(step, args.steps, args.lr, args.warm_up)
        rows = bytelm.batch_rows(training, args.seed, batch, args.batch, args.context, rank, of)
        opt.zero_grad()
        loss = bytelm.loss_sum(model, rows) * of / (args.batch * args.context)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        batch += 1
        now = opt.local_epoch if how == DELAYED else batch
        if now > step:
            step = now
            if step <= args.steps:
                ddp.tell(record, rank, step, statistics.fmean(losses))
            losses.clear()
    return batch


def main(how: str, out: Path, argv: list[str]) -> None:
    torch.set_num_threads(1)
    args = bytelm.arguments(argv)
    distributed.init_process_group("gloo", timeout=ddp.LIMIT)
    rank, of = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(args.seed)
    training, held_out, _ = bytelm.library()
    model = bytelm.ByteGPT(args.layers, args.width, args.heads, args.context)
    dht = join(rank, os.environ["LAB_ADDRESS"])
    opt = optimizer(how, dht, model, args, of)
    meet(opt, of)
    with out.open("w") as record:
        batches = train(how, opt, model, args, training, record)
        opt.state_averager.step(wait_for_delayed_updates=True)
        print(f"{batches} batches, {opt.local_epoch} epochs", flush=True)
        ddp.finish(model, args, held_out, record)
    opt.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
