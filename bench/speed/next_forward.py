"""A step of dense bsp with overlap=True across a link, where the next forward begins with the first layers or waits for all.

    python bench/speed/next_forward.py                                # 5 and 25 M parameters, 1 Gbit/s, five pairs of each row
    python bench/speed/next_forward.py --sizes 5 --compute 0.5 --rounds 2
    python bench/speed/next_forward.py --link 100mbit --sizes 5

Rules
- One worker in each of two cities of bench/contenders/wan.py, the shard in the first city. A model is LAYERS tensors alike.
- Arithmetic is a sleep of stated length: so many cores as processes are not here. `--compute` is the time of forward and
  backward, over that in which the link carries all gradients; backward takes twice as long as forward, and each layer as
  long as any other. Gradients, states, the fold, ZeroMQ and TCP are real.
- "whole": step() waits for the whole state. "first": the product, where each parameter waits for its own values.
- Both runs are up at once and take turns; a turn of each is a pair. A time is the median of the steps of a turn but the
  first, of the slower worker. A ratio is of two times of one pair; a row has their median, least and most.
- "up" and "down" are those of the worker across the link, by the trace of its pushes (docs/howto/trace.md): from its first byte
  out until the shard says that it has the last one, and from there until the last byte of the state is in.
- All parameters of both runs are equal bit for bit at the end, or the bench fails.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from narrows.protocols.member.push_trace import ACKED, ARRIVED, SENT
from narrows.worker import DistributedOptimizer, rank
from narrows.worker.sync import gradients

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders.wan import LINKS, PORT, cities, serve
from lab import launch, record
from lab.netns import Host

HERE = Path(__file__).resolve()
LAYERS = 12
FORWARD = 1 / 3  # of the compute of a step
CONTENDERS = ("whole", "first")
LIMIT_S = 240.0  # of a turn
WARM_UP = 3  # steps before the first pair
POLL_S = 0.005
Process = subprocess.Popen[Any]


class Slept(torch.autograd.Function):
    """One layer: x and the mean of a part of its weight, after a sleep in each pass. Its gradient has the layer's size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s, ctx.size = backward_s, weight.shape
        value = weight.view(-1)[:1024].mean()
        time.sleep(forward_s)
        ctx.save_for_backward(value)
        return x + value

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        time.sleep(ctx.backward_s)
        return gradient[0], torch.full(ctx.size, float(gradient[0]) * (1 + float(value))), None, None


class Layers(nn.Module):
    def __init__(self, millions: float, compute_s: float, rank: int) -> None:
        super().__init__()
        count = int(millions * 1e6) // LAYERS
        self.weights = nn.ParameterList([nn.Parameter(torch.full((count,), 0.01 * i)) for i in range(LAYERS)])
        self.forward_s, self.backward_s = (share * compute_s / LAYERS for share in (FORWARD, 1 - FORWARD))
        self.slope = 1.0 + rank

    def forward(self) -> torch.Tensor:
        x = torch.zeros(())
        for weight in self.weights:
            x = Slept.apply(x, weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return x * self.slope


@click.group(invoke_without_command=True)
@click.option("--link", default="1gbit", show_default=True, help=f"one of {', '.join(LINKS)}")
@click.option("--sizes", default="5,25", show_default=True, help="millions of parameters")
@click.option("--compute", default="0.5,1,2", show_default=True, help="over the time of all gradients on the link")
@click.option("--shards", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="pairs")
@click.option("--steps", default=8, show_default=True, help="of each turn")
@record.out_option("speed/next_forward")
@click.pass_context
def main(
    context: click.Context, link: str, sizes: str, compute: str, shards: int, rounds: int, steps: int, out: Path
) -> None:
    """Time a step of dense bsp with overlap=True across a link, with and without an early forward."""
    if context.invoked_subcommand:
        return
    way = LINKS[link]
    assert way is not None
    with record.Recorder("speed/next_forward", out) as recorder:
        for millions in map(float, sizes.split(",")):
            for share in map(float, compute.split(",")):
                compute_s = share * millions * 4e6 * 8 / way.rate
                told = measure(link, millions, compute_s, shards, rounds, steps)
                arguments = {"millions": millions, "compute over up": share, "shards": shards, "steps": steps}
                recorder.add(
                    f"{millions:g} M parameters, compute {1e3 * compute_s:.0f} ms",
                    figures(told),
                    link=record.link_of(way),
                    arguments=arguments,
                    table="A step whose next forward begins with the first layers",
                )


def figures(told: dict[str, list[list[dict[str, Any]]]]) -> record.Figures:
    """Args: told: by contender, for each pair what each worker told of its turn."""
    times = {name: [1e3 * max(each["step"] for each in turn) for turn in turns] for name, turns in told.items()}
    found: record.Figures = {f"step, {name}": (statistics.median(each), "ms") for name, each in times.items()}
    ratios = [first / whole for whole, first in zip(times["whole"], times["first"], strict=True)]
    for word, of in (("", statistics.median), (" least", min), (" most", max)):
        found[f"first / whole{word}"] = (of(ratios), "")
    for name in ("up", "down"):
        across = [max(turn, key=lambda each: each["up"])[name] for turn in told["whole"]]
        found[name] = (1e3 * statistics.median(across), "ms")
    return found


def measure(
    link: str, millions: float, compute_s: float, shards: int, rounds: int, steps: int
) -> dict[str, list[list[dict[str, Any]]]]:
    told: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, running = Path(name), list[Process]()
        hosts = stack.enter_context(cities(LINKS[link]))
        for number, contender in enumerate(CONTENDERS):
            port = PORT + 10 * number
            flags = ["--sync", "bsp", "--workers", "2", "--shards", str(shards)]
            serve(hosts[0], port, flags, folder, contender)
            for worker, host in enumerate(hosts):
                script = ["worker", "--name", contender, "--folder", str(folder), "--millions", str(millions)]
                script += ["--compute", str(compute_s), "--rounds", str(rounds), "--steps", str(steps)]
                running.append(
                    started(host, f"tcp://{hosts[0].address}:{port}", script, folder / f"{contender} {worker}")
                )
        for turn in range(rounds + 1):
            for contender in CONTENDERS:
                (folder / f"go {contender} {turn}").touch()
                paths = [folder / f"{contender} {turn} {each}.json" for each in range(2)]
                launch.until(partial(turn_ended, paths, running), f"{contender}, turn {turn}", LIMIT_S)
                if turn:
                    told[contender].append([json.loads(each.read_text()) for each in paths])
        for process in running:
            if (code := process.wait(LIMIT_S)) != 0:
                raise click.ClickException(f"a worker ended with exit code {code}")
        ends = [np.load(folder / f"{contender} {each}.npy") for contender in CONTENDERS for each in range(2)]
        if any(not np.array_equal(ends[0], each) for each in ends[1:]):
            raise click.ClickException("the parameters of the two runs differ")
    return told


def started(host: Host, server: str, script: Sequence[str], log: Path) -> Process:
    with log.open("w") as said:
        command = launch.ps_worker("--server", server, str(HERE), *script)
        return host.popen(command, stdout=said, stderr=said, cwd=launch.ROOT)


def turn_ended(told: list[Path], running: list[Process]) -> bool:
    """True once all workers have told their time. Raises ConnectionError if a process has failed."""
    if any(process.poll() for process in running):
        raise ConnectionError(f"a process has failed; {' '.join(each.name for each in told)}")
    return all(each.exists() for each in told)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S * 4
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path.name}: the bench has ended")
        time.sleep(POLL_S)


@main.command(hidden=True)
@click.option("--name")
@click.option("--folder", type=Path)
@click.option("--millions", type=float)
@click.option("--compute", "compute_s", type=float)
@click.option("--rounds", type=int)
@click.option("--steps", type=int)
def worker(name: str, folder: Path, millions: float, compute_s: float, rounds: int, steps: int) -> None:
    """One worker of a contender."""
    torch.set_num_threads(1)
    if name == "whole":
        vars(gradients)["why_not"] = lambda flat: "the bench wants step() to wait"
    here = rank()
    model = Layers(millions, compute_s, here)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    optimizer = DistributedOptimizer(inner, model, overlap=True)
    pushes = optimizer._engine.link.trace(1)  # type: ignore[union-attr]
    for turn in range(rounds + 1):
        wait_for(folder / f"go {name} {turn}")
        times = []
        for _ in range(steps if turn else WARM_UP):
            began = time.perf_counter()
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            times.append(time.perf_counter() - began)
        model.weights[-1].sum()  # the whole state is here before the other run has its turn
        rows = [row for row in pushes.take() if row[ACKED] and row[ARRIVED]][1:]
        told: dict[str, Any] = {
            "up": statistics.median(row[ACKED] - row[SENT] for row in rows) / 1e9,
            "down": statistics.median(row[ARRIVED] - row[ACKED] for row in rows) / 1e9,
        }
        told["step"] = statistics.median(times[1:])
        path = folder / f"{name} {turn} {here}.part"
        path.write_text(json.dumps(told))
        path.rename(path.with_suffix(".json"))
    values = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    np.save(folder / f"{name} {here}.npy", values)
    optimizer.finish()


if __name__ == "__main__":
    main()
