"""A training script as users with a GPU write it: a small CNN on made-up images with one feature of torch besides.

    ps-worker -n 2 --device cuda --sync ssp --compress topk:0.05+int8 bench/gpu/user.py KIND STEPS
    python bench/gpu/user.py two 8  # alone; on the CPU if there is no GPU

KIND: amp16 (float16 autocast and GradScaler), bf16 (bfloat16 autocast), compile (torch.compile), channels (channels_last),
two (two optimizers), stream (a CUDA stream of the script's own: needs a GPU). At its end each rank prints a JSON object: its
first and its last loss, the median milliseconds of a step, each of which ends with a wait for the device, and when its first
step ended.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrows.worker import DistributedOptimizer, device, rank, step_count

KINDS = ("amp16", "bf16", "compile", "channels", "two", "stream")
BATCH, SIDE, CLASSES = 32, 16, 10
SETTLING_STEPS = 5  # they compile and warm up; the median is of those after them


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    )


def optimizer_of(kind: str, net: nn.Module) -> DistributedOptimizer:
    if kind != "two":
        return DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-3), net)
    parameters = list(net.parameters())
    sgd = torch.optim.SGD(parameters[:4], lr=0.02, momentum=0.9)
    return DistributedOptimizer([sgd, torch.optim.AdamW(parameters[4:], lr=1e-3)], net)


@contextmanager
def side_stream() -> Iterator[None]:
    """A stream that waits for all work of the default stream, which waits for this one's then."""
    side, default = torch.cuda.Stream(), torch.cuda.default_stream()
    side.wait_stream(default)
    with torch.cuda.stream(side):
        yield
    default.wait_stream(side)


def main(kind: str, steps: int) -> None:
    here = torch.device(device())
    torch.manual_seed(0)
    layout = torch.channels_last if kind == "channels" else torch.contiguous_format
    net = network().to(here)
    net.to(memory_format=layout)  # type: ignore[call-overload]  # an overload that torch does not declare
    classes = torch.randn(CLASSES, 3, SIDE, SIDE).to(here)
    optimizer = optimizer_of(kind, net)
    model = torch.compile(net) if kind == "compile" else net
    scaler = torch.amp.GradScaler(here.type, enabled=kind == "amp16")
    low = torch.float16 if kind == "amp16" else torch.bfloat16
    generator = torch.Generator(device=here)
    seconds: list[float] = []
    losses: list[float] = []
    first_step_at = 0.0

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(here.type, low, enabled=kind in ("amp16", "bf16")):
            return F.cross_entropy(model(x), y)

    while (step := step_count()) < steps:
        before = time.perf_counter()
        generator.manual_seed(step * 100 + rank())
        y = torch.randint(CLASSES, (BATCH,), device=here, generator=generator)
        x = classes[y] + torch.randn(BATCH, 3, SIDE, SIDE, device=here, generator=generator)
        x = x.to(memory_format=layout)
        optimizer.zero_grad(set_to_none=True)
        with side_stream() if kind == "stream" else nullcontext():
            value = loss_of(x, y)
            if kind == "amp16":
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                value.backward()
                optimizer.step()
        losses.append(value.item())
        seconds.append(time.perf_counter() - before)
        first_step_at = first_step_at or time.time()
    with optimizer.shared():
        pass
    middle = statistics.median(seconds[SETTLING_STEPS:] or seconds or [0.0])
    told = {
        "kind": kind,
        "rank": rank(),
        "first loss": losses[0],
        "last loss": losses[-1],
        "median step ms": middle * 1e3,
    }
    print(json.dumps(told | {"first step at": first_step_at}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: user.py {'|'.join(KINDS)} STEPS")
    main(sys.argv[1], int(sys.argv[2]))
