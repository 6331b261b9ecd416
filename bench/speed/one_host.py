"""A dense bsp step on one host, with the journal and without it, beside gloo: ratios of contenders that take turns in one run.

    python bench/speed/one_host.py                                    # SGD, 1, 25 and 100 MiB, 2 and 4 workers, 1 and 2 shards
    python bench/speed/one_host.py --sizes 25 --workers 2 --shards 2 --optimizers sgd,adamw
    python bench/speed/one_host.py --sizes 4 --tensors 10000 --workers 1 --shards 1 --contenders journal,torch

Rules
- A contender is a set of processes, all of which start before the first round and stay until the last. In each round the
  contenders take turns: each makes `--steps` steps while the others wait. A round's time is the median of these steps, of the
  slowest worker. A ratio is of two times of one round; a row has the median over the rounds, and the smallest and the largest.
- "journal" and "no journal": ps-serve and its workers. A step is `optimizer.step()`: the gradient leaves p.grad, the server
  folds and steps its optimizer, and the state is written into the parameters.
- "gloo": all_reduce of one flat gradient, the division, and a step of torch's optimizer with fused=True, its fastest on a CPU.
- "torch": one process, without any exchange. Where it is a contender, all steps have a backward pass: of the sum of all
  values.
- Every process has one thread for arithmetic. The parameters of all contenders are equal at the end, or the run fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import distributed, nn

from narrows.worker import DistributedOptimizer
from narrows.worker import rank as of_run

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

MIB = 1 << 20
HERE = Path(__file__).resolve()
LIMIT_S = 300.0  # of a turn
WARM_UP = 8  # steps before the first round, for files, pages and kernels
POLL_S = 0.005
Process = subprocess.Popen[Any]
PAIRS = (("journal", "no journal"), ("journal", "gloo"), ("no journal", "gloo"), ("journal", "torch"))  # ours / theirs
OURS = {"journal": (), "no journal": ("--no-journal",)}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True),
}


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


@click.group(invoke_without_command=True)
@click.option("--sizes", default="1,25,100", show_default=True, help="MiB of float32 parameters")
@click.option("--workers", default="2,4", show_default=True)
@click.option("--shards", default="1,2", show_default=True)
@click.option("--optimizers", default="sgd", show_default=True, help="sgd, adamw")
@click.option("--tensors", default=4, show_default=True, help="that the parameters are, but of gloo, which has one")
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=0, help="of each turn  [default: so many that a turn of gloo takes a second]")
@click.option("--contenders", default="journal,no journal,gloo", show_default=True)
@record.out_option("speed/one_host")
@click.pass_context
def main(
    context: click.Context,
    sizes: str,
    workers: str,
    shards: str,
    optimizers: str,
    tensors: int,
    rounds: int,
    steps: int,
    contenders: str,
    out: Path,
) -> None:
    """Time a dense bsp step on one host beside gloo."""
    if context.invoked_subcommand:
        return
    with record.Recorder("speed/one_host", out) as recorder:
        for inner, size, count, parts in product(
            optimizers.split(","), map(float, sizes.split(",")), numbers(workers), numbers(shards)
        ):
            turn = steps or int(max(5, 1000 / size / count))
            script = f"--optimizer {inner} --size {size} --tensors {tensors} --steps {min(turn, 200)} --rounds {rounds}"
            times = measure(contenders.split(","), script.split(), count, parts, rounds)
            arguments: dict[str, record.Scalar] = {"optimizer": inner, "workers": count, "shards": parts, "mib": size}
            arguments |= {"tensors": tensors} if tensors > 4 else {}
            recorder.add(f"{size:g} MiB, {count} workers, {parts} shards", figures(times), arguments=arguments)


def figures(times: dict[str, list[float]]) -> record.Figures:
    """The median step of each contender, and the ratios between contenders: median, smallest and largest of all rounds."""
    found: record.Figures = {name: (1e3 * statistics.median(each), "ms") for name, each in times.items()}
    for one, other in PAIRS:
        if one in times and other in times:
            ratios = [ours / theirs for ours, theirs in zip(times[one], times[other], strict=True)]
            for name, of in (("", statistics.median), (" least", min), (" most", max)):
                found[f"{one} / {other}{name}"] = (of(ratios), "")
    return found


def measure(contenders: list[str], told: list[str], workers: int, shards: int, rounds: int) -> dict[str, list[float]]:
    """Return for each contender the seconds of a step in each round."""
    running: list[Process] = []
    times: dict[str, list[float]] = {name: [] for name in contenders}
    told = [*told, *["--backward"] * ("torch" in contenders)]
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as stack:
            for name in contenders:
                script = [str(HERE), "worker", "--name", name, "--folder", folder, *told]
                started = ours(name, workers, shards, script) if name in OURS else apart(workers, script)
                running += stack.enter_context(started)
            for turn in range(rounds + 1):
                for name in contenders:
                    (Path(folder) / f"go {name} {turn}").touch()
                    paths = [Path(folder) / f"{name} {turn} {rank}.json" for rank in range(workers)]
                    launch.until(partial(turn_ended, paths, running), f"{name}, round {turn}", LIMIT_S)
                    if turn:
                        times[name].append(max(json.loads(each.read_text()) for each in paths))
        last = [np.load(Path(folder) / f"{name}.npy") for name in contenders]
    for name, each in zip(contenders[1:], last[1:], strict=True):
        shared = min(len(each), len(last[0]))
        if not np.allclose(each[:shared], last[0][:shared], rtol=1e-5, atol=1e-6):
            raise click.ClickException(f"{name} ends with {each[:3]}, {contenders[0]} with {last[0][:3]}")
    return times


def turn_ended(told: list[Path], running: list[Process]) -> bool:
    """True once all workers have told their time. Raises ConnectionError if a process has failed."""
    if any(process.poll() for process in running):
        raise ConnectionError("a process has failed")
    return all(each.exists() for each in told)


@contextmanager
def ours(name: str, workers: int, shards: int, script: list[str]) -> Iterator[list[Process]]:
    """ps-serve and its workers."""
    ports = launch.free_ports(shards)
    command = launch.ps_worker("--server", f"tcp://127.0.0.1:{ports[0]}", "-n", str(workers), *script)
    flags = ["--sync", "bsp", "--workers", str(workers), *OURS[name]]
    with launch.serving(flags, ports) as server, launch.started(command) as started:
        yield [server, started]


@contextmanager
def apart(workers: int, script: list[str]) -> Iterator[list[Process]]:
    """The processes of torch."""
    (port,), started = launch.free_ports(1), list[Process]()
    with ExitStack() as stack:
        for rank in range(workers):
            env = launch.environment(
                RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            )
            started.append(stack.enter_context(launch.started([sys.executable, *script], env)))
        yield started


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S * 4
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path.name}: the bench has ended")
        time.sleep(POLL_S)


def reduced(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """A step on the mean gradient of all workers."""
    gradient = parameter.grad
    assert gradient is not None
    distributed.all_reduce(gradient)
    gradient /= distributed.get_world_size()
    optimizer.step()


def trained(parameters: list[nn.Parameter], step: Callable[[], Any]) -> None:
    """A step after the backward pass of the sum of all values."""
    for parameter in parameters:
        parameter.grad = None
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    step()


@main.command(hidden=True)
@click.option("--name")
@click.option("--optimizer", "inner")
@click.option("--size", type=float)
@click.option("--folder", type=Path)
@click.option("--tensors", type=int)
@click.option("--steps", type=int)
@click.option("--rounds", type=int)
@click.option("--backward", is_flag=True)
def worker(
    name: str, inner: str, size: float, folder: Path, tensors: int, steps: int, rounds: int, backward: bool
) -> None:
    """One worker of a contender."""
    torch.set_num_threads(1)
    rank, tensors = 0, 1 if name == "gloo" else tensors
    count = int(size * MIB) // 4 // tensors
    model = nn.ParameterList([nn.Parameter(torch.zeros(count)) for _ in range(tensors)])
    optimizer: Any = OPTIMIZERS[inner]([*model.parameters()])
    step: Callable[[], Any] = optimizer.step
    if name in OURS:
        rank, optimizer = of_run(), DistributedOptimizer(optimizer, model)
        step = optimizer.step
    elif name == "gloo":
        distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
        rank, step = distributed.get_rank(), partial(reduced, model[0], optimizer)
    if backward:
        step = partial(trained, [*model], step)
    for parameter in model:
        parameter.grad = torch.full((count,), 1.0 + rank)
    for turn in range(rounds + 1):
        wait_for(folder / f"go {name} {turn}")
        if name == "gloo":
            model[0].grad = torch.full((count,), 1.0 + rank)
            distributed.barrier()
        times = []
        for _ in range(steps if turn else WARM_UP):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        part = folder / f"{name} {turn} {rank}.part"
        part.write_text(json.dumps(statistics.median(times)))
        part.rename(part.with_suffix(".json"))
    if name in OURS:
        with optimizer.shared():
            last = model[0].detach().numpy()[:250].copy()
    else:
        last = model[0].detach().numpy()[:250].copy()
    if not rank:
        np.save(folder / f"{name}.npy", last)
    if name == "gloo":
        distributed.barrier()
        os._exit(0)  # gloo's threads may abort a process that ends by itself


if __name__ == "__main__":
    main()
