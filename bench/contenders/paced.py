"""DDP over gloo and torchft's DiLoCo whose compute is slept: what speed/pace.py compares with. Started once for each rank.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... LAB_ADDRESS=... PACE_PHASE=... in the environment of
    python bench/contenders/paced.py ddp 0
    python bench/contenders/paced.py diloco 32

Emulated: forward, backward and the inner optimizer's step are sleeps. Gradients are a real update of the model. A third of
DDP's compute is the forward pass. Its backward pass is slept tensor by tensor, so that buckets of 25 MB, DDP's default, leave
during the rest. Collectives, quorums and the outer step are real; DiLoCo as in torchft_diloco.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders import ddp
from lab.replay import PhaseFile, Still, model_of

FORWARD = 1 / 3  # of a step's compute
BLOCKS = 12  # of the backward pass


class SleptBlock(torch.autograd.Function):
    """Tensors whose gradients are known, and come after so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Callable[[], None], gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.sleep, ctx.gradients = sleep, gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        ctx.sleep()
        return (outputs[0], None, None, *ctx.gradients)


class SleptModel(nn.Module):
    """The parameters of a model, in BLOCKS blocks of about as many values."""

    def __init__(self, model: nn.Module, update: Tensor, phase: PhaseFile) -> None:
        super().__init__()
        self.inner, self.phase = model, phase
        own = list(model.parameters())
        parts = update.split([p.numel() for p in own])
        per = update.numel() / BLOCKS
        self.blocks: list[tuple[float, list[nn.Parameter], list[Tensor]]] = []
        at = 0
        for p, part in zip(own, parts, strict=True):
            if at >= per * len(self.blocks):
                self.blocks.append((0.0, [], []))
            share, parameters, gradients = self.blocks[-1]
            self.blocks[-1] = (share + p.numel() / update.numel(), [*parameters, p], [*gradients, part.view_as(p)])
            at += p.numel()

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.phase.now().compute_s
        self.phase.sleep(FORWARD * seconds)
        for share, parameters, gradients in self.blocks:
            own = (1 - FORWARD) * seconds * share
            sleep = partial(self.phase.sleep, own)
            x = SleptBlock.apply(x, sleep, gradients, *parameters)  # type: ignore[no-untyped-call]
        return x


def main(name: str, local_steps: int) -> None:
    torch.set_num_threads(1)
    phase = PhaseFile(Path(os.environ["PACE_PHASE"]))
    update = torch.from_numpy(np.load(os.environ["PACE_UPDATES"], mmap_mode="r")[0].copy())
    model = model_of(os.environ["PACE_SIZE"])
    if name == "ddp":
        distributed.init_process_group("gloo", timeout=ddp.LIMIT)
        parallel = nn.parallel.DistributedDataParallel(SleptModel(model, update, phase))
        x = torch.zeros((), requires_grad=True)

        def step() -> None:
            parallel(x).backward()

        phase.follow(distributed.get_rank(), step)
    else:
        from contenders import torchft_diloco
        from torchft.local_sgd import DiLoCo

        manager, needed = torchft_diloco.replica_group()
        outer = torch.optim.SGD(
            model.parameters(), lr=torchft_diloco.OUTER_LR, momentum=torchft_diloco.OUTER_MOMENTUM, nesterov=True
        )
        inner = Still(model.parameters())

        def local_step() -> None:
            phase.sleep(phase.now().compute_s)
            inner.step()

        with DiLoCo(manager, [model], inner, outer, sync_every=local_steps, use_bucketization=True):
            phase.follow(distributed.get_rank(), local_step)
        del needed
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
