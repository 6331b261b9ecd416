"""A dense bsp step on one host beside gloo, and a whole training step beside DDP: ratios of contenders that take turns.

    python bench/speed/one_host.py                                    # SGD, 1, 25 and 100 MiB, 2 and 4 workers, 1 and 2 shards
    python bench/speed/one_host.py --sizes 25 --workers 2 --shards 2 --optimizers sgd,adamw
    python bench/speed/one_host.py --sizes 4 --tensors 10000 --workers 1 --shards 1 --contenders journal,torch
    python bench/speed/one_host.py --models 1.3M,9.8M --workers 2 --optimizers momentum,adamw  # a whole step beside DDP

Rules
- A contender is a set of processes, all of which start before the first round and stay until the last. In each round the
  contenders take turns: each makes `--steps` steps while the others wait. A round's time is the median of these steps, of the
  slowest worker. A ratio is of two times of one round; a row has the median over the rounds, and the smallest and the largest.
- "journal" and "no journal": ps-serve and its workers. A step is `optimizer.step()`: the gradient leaves p.grad, the server
  folds and steps its optimizer, and the state is written into the parameters. "overlap": "journal" with overlap=True.
  "group": "journal" with --group: the processes are one worker, and each steps with the mean of all.
- "gloo": all_reduce of one flat gradient, the division, and a step of torch's optimizer with fused=True, its fastest on a CPU.
- "ddp": DistributedDataParallel over gloo with its default buckets, and the same optimizer. "torch": one process, without any
  exchange.
- Where "overlap", "ddp" or "torch" is a contender, all steps have a forward and a backward pass: of the sum of all values.
- With --models they are those of the byte GPT (tasks/bytelm.py). A step is all of it: the choice of rows, zero_grad, both
  passes and `step()`. All contenders begin with the same weights, and rank r of step t has the same rows in each. Gradients
  are not clipped. gloo reduces each tensor by itself.
- Every process has one thread for arithmetic. The parameters of all contenders are equal to 1e-5 at the end, relative to
  their values, or the run fails. With --models all losses of all workers are, and a row has the greatest difference from the
  first contender.
- With more than two workers only the losses of the first 40 steps are. The sum of two gradients has one order, and the
  server's kernels step SGD and AdamW as torch's fused ones (tried on AMD EPYC): all losses are equal bit for bit then. More
  gradients are added in one order by a server, in others by DDP and gloo, and training magnifies a difference of one
  rounding: with 1.3 M parameters and 4 workers to 2e-5 at step 51 with SGD, from 3e-7 at step 64 to 2e-3 at step 78 with
  AdamW. AdamW moves a weight whose gradient is hardly more than a rounding as far as any other. Two kernels of torch, AdamW
  with fused=True and without it, on the same gradients, differ by 2e-4 within 100 steps; with eps=1e-3 by 4e-7.
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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed, nn

from narrows.worker import DistributedOptimizer
from narrows.worker import rank as of_run

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
from contenders.wan import SIZES
from lab import launch, record

MIB = 1 << 20
HERE = Path(__file__).resolve()
LIMIT_S = 300.0  # of a turn
WARM_UP = 8  # steps before the first round, for files, pages and kernels
POLL_S = 0.005
SAMPLE = 250  # values of the parameters that are compared
EQUAL = 1e-5  # relative: values, or losses, that differ by more fail the run
EQUAL_STEPS = 40  # whose losses are compared so where more than two gradients are added
GPT_STEPS = 20  # of each turn
Process = subprocess.Popen[Any]
Numbers = npt.NDArray[np.float64]
Step = Callable[[], Any]  # from p.grad to new parameters
Loss = Callable[[nn.Module, int], Tensor]  # of a model at a step
PAIRS = (
    ("journal", "no journal"), ("journal", "gloo"), ("no journal", "gloo"), ("journal", "torch"),
    ("journal", "ddp"), ("overlap", "ddp"), ("overlap", "journal"), ("group", "journal"), ("group", "gloo"),
)  # ours / theirs  # fmt: skip
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True),
}


def narrows(model: nn.Module, inner: torch.optim.Optimizer, overlap: bool = False) -> tuple[nn.Module, Step]:
    return model, DistributedOptimizer(inner, model, overlap=overlap).step


def gloo(model: nn.Module, inner: torch.optim.Optimizer) -> tuple[nn.Module, Step]:
    def step() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
            parameter.grad /= distributed.get_world_size()
        inner.step()

    return model, step


def ddp(model: nn.Module, inner: torch.optim.Optimizer) -> tuple[nn.Module, Step]:
    return nn.parallel.DistributedDataParallel(model), inner.step


def alone(model: nn.Module, inner: torch.optim.Optimizer) -> tuple[nn.Module, Step]:
    return model, inner.step


@dataclass(frozen=True)
class Contender:
    """How its workers train.

    Attributes:
        join: gets a model and its optimizer; returns the model whose forward pass a step has, and the step.
        serve: flags of ps-serve; None: there is no server.
        collective: its processes are a process group of gloo.
        backward: its step needs a backward pass before it.
        grouped: its processes are one worker of the server.
    """

    join: Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Step]]
    serve: tuple[str, ...] | None = None
    collective: bool = False
    backward: bool = False
    grouped: bool = False


CONTENDERS = {
    "journal": Contender(narrows, ()),
    "no journal": Contender(narrows, ("--no-journal",)),
    "group": Contender(narrows, (), grouped=True),
    "overlap": Contender(partial(narrows, overlap=True), (), backward=True),
    "gloo": Contender(gloo, collective=True),
    "ddp": Contender(ddp, collective=True, backward=True),
    "torch": Contender(alone, backward=True),
}


@dataclass(frozen=True)
class Task:
    """What the contenders of a row train.

    Attributes:
        name: first word of the row.
        flags: of each worker.
        steps: of a turn, by default, from the number of workers.
        arguments: of the row.
        contenders: the default.
        table: heading of the row's table.
        losses: workers tell their losses, which are compared; else values of the parameters.
    """

    name: str
    flags: tuple[str, ...]
    steps: Callable[[int], int]
    arguments: dict[str, record.Scalar]
    contenders: str = "journal,no journal,gloo"
    table: str = ""
    losses: bool = False


def values_task(size: str, tensors: int) -> Task:
    mib = float(size)
    arguments: dict[str, record.Scalar] = {"mib": mib}
    arguments |= {"tensors": tensors} if tensors > 4 else {}
    flags = ("--size", size, "--tensors", str(tensors))
    return Task(f"{mib:g} MiB", flags, lambda workers: min(200, int(max(5, 1000 / mib / workers))), arguments)


def gpt_task(size: str) -> Task:
    flags, contenders = ("--model", size, "--backward"), "journal,overlap,ddp"
    table = "A whole training step of the byte GPT"
    return Task(size, flags, lambda workers: GPT_STEPS, {"model": size}, contenders, table, losses=True)


class Values(nn.Module):
    """Parameters of `mib` MiB, float32, that are all zero. The loss is their sum times 1 + rank: workers' gradients differ."""

    def __init__(self, mib: float, tensors: int, rank: int) -> None:
        super().__init__()
        count = int(mib * MIB) // 4 // tensors
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(count)) for _ in range(tensors)])
        self.slope = 1.0 + rank
        for part in self.parts:
            part.grad = torch.full((count,), self.slope)

    def forward(self) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum() * self.slope


def byte_gpt(size: str, rank: int, workers: int) -> tuple[nn.Module, Loss]:
    """The model of tasks/bytelm.py with its first weights, and the loss of this rank's rows."""
    args, text = bytelm.arguments(SIZES[size]), bytelm.library()[0]
    torch.manual_seed(args.seed)

    def loss(model: nn.Module, step: int) -> Tensor:
        rows = bytelm.batch_rows(text, args.seed, step, args.batch, args.context, rank, workers)
        mean: Tensor = bytelm.loss_sum(model, rows) * workers / (args.batch * args.context)
        return mean

    return bytelm.ByteGPT(args.layers, args.width, args.heads, args.context), loss


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


@click.group(invoke_without_command=True)
@click.option("--sizes", default="1,25,100", show_default=True, help="MiB of float32 parameters")
@click.option("--models", default="", help=f"byte GPTs to train instead: {', '.join(SIZES)}")
@click.option("--workers", default="2,4", show_default=True)
@click.option("--shards", default="1,2", show_default=True)
@click.option("--optimizers", default="sgd", show_default=True, help=", ".join(OPTIMIZERS))
@click.option("--tensors", default=4, show_default=True, help="that the parameters are, but of gloo, which has one")
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=0, help=f"of each turn  [default: about a second of gloo; {GPT_STEPS} of a model]")
@click.option("--contenders", default="", help="[default: journal,no journal,gloo; of a model: journal,overlap,ddp]")
@record.out_option("speed/one_host")
@click.pass_context
def main(
    context: click.Context,
    sizes: str,
    models: str,
    workers: str,
    shards: str,
    optimizers: str,
    tensors: int,
    rounds: int,
    steps: int,
    contenders: str,
    out: Path,
) -> None:
    """Time a dense bsp step on one host beside gloo, or a whole training step beside DDP."""
    if context.invoked_subcommand:
        return
    given = (("models", models, SIZES), ("optimizers", optimizers, OPTIMIZERS), ("contenders", contenders, CONTENDERS))
    for option, text, known in given:
        if unknown := {*filter(None, text.split(","))} - known.keys():
            raise click.UsageError(f"--{option}: there is no {min(unknown)}; there are {', '.join(known)}")
    tasks = [gpt_task(size) for size in models.split(",")] if models else []
    tasks = tasks or [values_task(size, tensors) for size in sizes.split(",")]
    with record.Recorder("speed/one_host", out) as recorder:
        for inner, task, count, parts in product(optimizers.split(","), tasks, numbers(workers), numbers(shards)):
            names, turn = (contenders or task.contenders).split(","), steps or task.steps(count)
            script = ["--optimizer", inner, "--steps", str(turn), "--rounds", str(rounds), *task.flags]
            script += ["--backward"] * any(CONTENDERS[name].backward for name in names)
            times, told = measure(names, script, count, parts, rounds)
            apart = differences(told, EQUAL_STEPS if task.losses and count > 2 else None)
            found = figures(times)
            arguments: dict[str, record.Scalar] = {"optimizer": inner, "workers": count, "shards": parts}
            arguments |= task.arguments
            if task.losses:
                arguments["steps"] = WARM_UP + rounds * turn
                found |= {f"loss of {name}": (float(each[:, -1].mean()), "nats a byte") for name, each in told.items()}
                found |= {f"greatest difference of {name}": (each, "") for name, each in apart.items()}
            what = f"{task.name}, {count} workers, {parts} shards"
            recorder.add(what, found, arguments=arguments, table=task.table)


def figures(times: dict[str, list[float]]) -> record.Figures:
    """The median step of each contender, and the ratios between contenders: median, smallest and largest of all rounds."""
    found: record.Figures = {name: (1e3 * statistics.median(each), "ms") for name, each in times.items()}
    for one, other in PAIRS:
        if one in times and other in times:
            ratios = [ours / theirs for ours, theirs in zip(times[one], times[other], strict=True)]
            for name, of in (("", statistics.median), (" least", min), (" most", max)):
                found[f"{one} / {other}{name}"] = (of(ratios), "")
    return found


def differences(told: dict[str, Numbers], first: int | None) -> dict[str, float]:
    """Return the greatest relative difference of each contender from the first one.

    Args:
        told: by contender, float64[workers, count]: values of the parameters, or the losses of all steps.
        first: so many of each worker may differ by EQUAL at most; None: all.

    Raises:
        click.ClickException: one of these differs by more.
    """
    (base, expected), *others = told.items()
    found: dict[str, float] = {}
    for name, each in others:
        apart = np.abs(each / expected - 1)
        for rank, at in np.argwhere(~(apart[:, :first] <= EQUAL)):
            values = f"{each[rank, at]:.9g}, {base} {expected[rank, at]:.9g}"
            raise click.ClickException(f"number {at} of what worker {rank} tells: {name} has {values}")
        found[name] = float(apart.max())
    return found


def measure(
    contenders: list[str], told: list[str], workers: int, shards: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Numbers]]:
    """Return for each contender the seconds of a step in each round, and what its workers tell at the end, as `differences`
    takes it."""
    running: list[Process] = []
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as stack:
            for name in contenders:
                script = [str(HERE), "worker", "--name", name, "--folder", folder, "--workers", str(workers), *told]
                each = CONTENDERS[name]
                started = apart(workers, script) if each.serve is None else ours(each, workers, shards, script)
                running += stack.enter_context(started)
            for turn in range(rounds + 1):
                for name in contenders:
                    (Path(folder) / f"go {name} {turn}").touch()
                    paths = [Path(folder) / f"{name} {turn} {rank}.json" for rank in range(workers)]
                    launch.until(partial(turn_ended, paths, running), f"{name}, round {turn}", LIMIT_S)
                    if turn:
                        times[name].append(max(json.loads(each.read_text()) for each in paths))
        ends = {
            name: np.stack([np.load(Path(folder) / f"{name} {rank}.npy") for rank in range(workers)])
            for name in contenders
        }
    return times, ends


def turn_ended(told: list[Path], running: list[Process]) -> bool:
    """True once all workers have told their time. Raises ConnectionError if a process has failed."""
    if any(process.poll() for process in running):
        raise ConnectionError("a process has failed")
    return all(each.exists() for each in told)


@contextmanager
def ours(contender: Contender, workers: int, shards: int, script: list[str]) -> Iterator[list[Process]]:
    """ps-serve and its workers."""
    ports, grouped = launch.free_ports(shards), contender.grouped
    start = ["-n", str(workers), *["--group"] * grouped]
    command = launch.ps_worker("--server", f"tcp://127.0.0.1:{ports[0]}", *start, *script)
    flags = ["--sync", "bsp", "--workers", "1" if grouped else str(workers), *(contender.serve or ())]
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


@main.command(hidden=True)
@click.option("--name")
@click.option("--optimizer", "inner")
@click.option("--model", "gpt", default="")
@click.option("--size", type=float)
@click.option("--tensors", type=int)
@click.option("--folder", type=Path)
@click.option("--workers", type=int)
@click.option("--steps", type=int)
@click.option("--rounds", type=int)
@click.option("--backward", is_flag=True)
def worker(
    name: str,
    inner: str,
    gpt: str,
    size: float,
    tensors: int,
    folder: Path,
    workers: int,
    steps: int,
    rounds: int,
    backward: bool,
) -> None:
    """One worker of a contender."""
    torch.set_num_threads(1)
    contender = CONTENDERS[name]
    if contender.collective:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = int(os.environ["RANK"]) if contender.serve is None else of_run()
    model: nn.Module
    if gpt:
        model, loss = byte_gpt(gpt, rank, workers)
    else:
        model, loss = Values(size, 1 if name == "gloo" else tensors, rank), lambda forward, step: forward()
    forward, step = contender.join(model, OPTIMIZERS[inner]([*model.parameters()]))
    losses: list[float] = []
    for turn in range(rounds + 1):
        wait_for(folder / f"go {name} {turn}")
        if contender.collective:
            distributed.barrier()
        times = []
        for _ in range(steps if turn else WARM_UP):
            begin = time.perf_counter()
            if backward:
                model.zero_grad()
                error = loss(forward, len(losses))
                error.backward()
                losses.append(error.item())
            step()
            times.append(time.perf_counter() - begin)
        part = folder / f"{name} {turn} {rank}.part"
        part.write_text(json.dumps(statistics.median(times)))
        part.rename(part.with_suffix(".json"))
    values = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    values = values[:: max(1, len(values) // SAMPLE)][:SAMPLE]
    np.save(folder / f"{name} {rank}.npy", np.array(losses if gpt else values, np.float64))
    if contender.collective:
        distributed.barrier()
        os._exit(0)  # gloo's threads may abort a process that ends by itself


if __name__ == "__main__":
    main()
