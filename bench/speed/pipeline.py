"""The byte GPT trains in stages across a link. The bench compares step, bytes and loss of each coding with the unsplit model.

    python bench/speed/pipeline.py  # step times: 4 stages, two in each of two cities, 100 Mbit/s and 20 ms
    python bench/speed/pipeline.py -- --rest 10  # the same, where each stage sleeps 30 ms a micro-batch beside
    python bench/speed/pipeline.py --rows planned  # the step that ps-plan --pipeline predicts, beside the one measured
    python bench/speed/pipeline.py --losses  # 400 steps: the unsplit model, int8, a subspace, its unsplit model
    python bench/speed/pipeline.py --grid  # 2 stages x 2 replicas, a city each
    python bench/speed/pipeline.py --rows int8/gpipe,whole:18 --steps 100 -- --lr 0.004  # what follows -- is the task's

Rows
- whole: the unsplit model in one process, each of its parts clipped on its own, as a stage is. whole:D: with a subspace.
- gloo: the same stages on loopback over torch's gloo and its 1F1B, without Narrows.
- dense, fp16, int8: across the link, with all edges coded so. subspace:D: docs/design/pipelines.md, its coefficients in int8.
  int8@loopback: without the link, as gloo is.
- planned: ps-plan lays out the stages over so many machines, half of them in each city, and says how long a step will take. Its
  network has the link as the lab was set to, and LOOPBACK inside a city. STEP is that of the unsplit model, over the part of a
  core that a stage has here, and what stages sleep.
- A schedule of the task follows a slash. Else a run of Narrows has ScheduleEager1F1B, with --in-flight across the link.

Rules
- A step has 128 windows of 64 bytes in 16 micro-batches. One takes a stage 20 ms of a core, and the link 6.6 ms in int8.
- Stages have bsp servers of their own in their city, so a pipeline of one replica steps as one process would.
- A step's time is the median of the slowest stage. Bytes are the kernel's at the second city's interface, over the whole run.
- The first activation and the last gradient cross the link while half of the stages wait: a step has two delays more.
- Losses are those of 32 windows a step in 8 micro-batches.
- The validation loss is that of the model.safetensors that the servers of the stages have written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from safetensors.torch import load_file

from narrows.protocols.config.deployment import even, parse

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
import pipelined
from contenders.wan import cities
from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way

TASK = Path(__file__).parents[1] / "tasks" / "pipelined.py"
PORT = 25_000  # of the servers, on hosts that nobody else is on; stages listen a hundred above
GRID = {"sync": "ssp", "compress": "topk:0.05+int8"}
LIMIT_S = 3600.0  # of one run
LOOPBACK = Way(10e9, 20e-6)  # between the machines of a city, for ps-plan
ROWS = ("gloo", "dense@loopback", "int8@loopback", "dense", "int8", "int8/1f1b", "int8/gpipe", "subspace:18")
LOSSES = ("whole", "int8", "whole:18", "subspace:18")
Result = dict[str, Any]


def plan(
    hosts: Sequence[netns.Host], stages: int, replicas: int, flags: dict[str, Any], coding: str, in_flight: int
) -> Result:
    """One replica lies across the cities, its first half in the first one; of several each has a city."""
    names = ["here", "there"][: len(set(hosts))]
    first = [names[stage * len(names) // stages] for stage in range(stages)]

    def place(stage: int, replica: int) -> str:
        return first[stage] if replicas == 1 else names[replica % len(names)]

    return {
        "version": 1,
        "hosts": dict(zip(names, dict.fromkeys(host.address for host in hosts), strict=True)),
        "stages": [{"host": first[stage], "port": PORT + stage, "flags": flags} for stage in range(stages)],
        "edges": [
            {"forward": coding, "backward": coding, "in_flight": in_flight * (place(stage, 0) != place(stage + 1, 0))}
            for stage in range(stages - 1)
        ],
        "processes": [
            {
                "stage": stage,
                "replica": replica,
                "host": place(stage, replica),
                "port": PORT + 100 + stages * replica + stage,
            }
            for replica in range(replicas)
            for stage in range(stages)
        ],
        "checkpoint_clocks": 20,
        "insecure": True,
    }


class Run:
    """The commands of one plan, a ps-serve and a ps-worker on each host."""

    def __init__(self, hosts: Sequence[netns.Host], layout: Result, folder: Path, args: Sequence[str]) -> None:
        self.hosts = dict(zip(layout["hosts"], hosts, strict=False))
        self.folder, self.args = folder, args
        self.layout = layout
        (folder / "plan.json").write_text(json.dumps(layout))

    def start(self, command: str, host: str, *words: str) -> Any:
        module = {"ps-serve": "ps.command.cli", "ps-worker": "worker.command.cli"}[command]
        line = [
            sys.executable,
            "-m",
            f"narrows.{module}",
            "--plan",
            str(self.folder / "plan.json"),
            "--host",
            host,
            *words,
        ]
        with (self.folder / f"{command}-{host}.log").open("a") as log:
            return self.hosts[host].popen(line, stdout=log, stderr=log, cwd=launch.ROOT)

    def said(self, command: str) -> str:
        return "".join((self.folder / f"{command}-{host}.log").read_text() for host in self.hosts)

    def go(self, limit_s: float) -> list[int]:
        """Exit codes of the ps-workers. The servers end with their workers. Raises CommandFailed after `limit_s`."""
        folder = ("--checkpoint-dir", str(self.folder / "checkpoints"))
        serving = {stage["host"] for stage in self.layout["stages"]}
        servers = [self.start("ps-serve", host, *folder) for host in self.hosts if host in serving]
        workers = [self.start("ps-worker", host, *folder, str(TASK), *self.args) for host in self.hosts]
        deadline, ended = time.monotonic() + limit_s, False
        while any(process.poll() is None for process in workers):
            if time.monotonic() > deadline:
                raise CommandFailed(f"it ran longer than {limit_s:.0f} s: {self.said('ps-worker')[-800:]}")
            if not ended and any(process.poll() for process in workers):
                ended = True
                for process in [*workers, *servers]:  # who starts a run again ends what is left of it
                    process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        codes = [process.returncode for process in workers]
        if any(codes) and not ended:
            for process in servers:
                process.send_signal(signal.SIGINT)
        for process in servers:
            process.wait(launch.SERVER_END_S)
        return codes


def figures(said: str) -> Result:
    """The figures that the task has printed, over all its stages."""
    steps = [float(each) for each in re.findall(r"median step ([\d.]+) ms", said)]
    differ = [float(a) / float(b) for a, b in re.findall(r"differ by (\S+), the largest is (\S+)", said)]
    losses = re.findall(r"training loss ([\d.]+)", said)
    return {
        "step_ms": max(steps, default=None),
        "differ": max(differ, default=None),
        "training": float(losses[-1]) if losses else None,
    }


def depths_of(layout: Result, total: int) -> list[range]:
    """The layers of each stage of a plan."""
    return parse(json.dumps(layout)).layers(total)


def trained(folder: Path, layout: Result, args: Sequence[str]) -> float:
    """The validation loss of the model that the stages' servers have written."""
    told = pipelined.arguments(args)
    pieces = pipelined.parts(told, depths_of(layout, told.layers))
    for stage, piece in enumerate(pieces):
        piece.load_state_dict(load_file(folder / "checkpoints" / f"stage-{stage}" / "model.safetensors"))
    return pipelined.validation(pieces, bytelm.library()[1], told.context)


def alone(stages: int, args: Sequence[str]) -> Result:
    """The unsplit model, in parts as they are clipped."""
    said, seconds = launch.run([sys.executable, str(TASK), *args], LIMIT_S)
    loss = float(re.findall(r"validation loss ([\d.]+)", said)[0])
    return figures(said) | {"loss": loss, "seconds": seconds}


def over_gloo(stages: int, args: Sequence[str]) -> Result:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}", str(TASK), "--gloo", *args]
    said, seconds = launch.run([sys.executable, *words], LIMIT_S)
    return figures(said) | {"seconds": seconds}


ONE_MACHINE = {"whole": alone, "gloo": over_gloo}


def measure(
    name: str, way: Way | None, stages: int, replicas: int, flags: dict[str, Any], in_flight: int, args: Sequence[str]
) -> Result:
    """One run of one plan. Raises CommandFailed."""
    coding = {"subspace": "int8", "grid": "int8"}.get(name, name)
    with tempfile.TemporaryDirectory() as told, cities(way) as hosts:
        folder, before = Path(told), sum(hosts[-1].bytes())
        layout = plan(hosts, stages, replicas, flags, coding, in_flight)
        run = Run(hosts, layout, folder, [*args, *["--check"] * (replicas == 1)])
        began = time.monotonic()
        codes = run.go(LIMIT_S)
        if any(codes):
            raise CommandFailed(f"{name}: exit codes {codes}: {run.said('ps-worker')[-1500:]}")
        result = figures(run.said("ps-worker")) | {"seconds": time.monotonic() - began}
        result["bytes"] = sum(hosts[-1].bytes()) - before
        return result | {"loss": trained(folder, layout, args)}


def network_of(way: Way, machines: int) -> Result:
    """Half of the machines in each city, as network.json."""
    city = [machine * 2 // machines for machine in range(machines)]
    links = [[way if a != b else LOOPBACK for b in city] for a in city]
    return {
        "format": 1,
        "hosts": [f"{('here', 'there')[at]}-{machine}" for machine, at in enumerate(city)],
        "delay_s": [[link.delay_s for link in row] for row in links],
        "rates": [{"message_bytes": 1, "bits_per_second": [[link.rate for link in row] for row in links]}],
    }


def step_s(stages: int, args: Sequence[str]) -> float:
    """Seconds of a step of the unsplit model as stages here have them: with a part of a core each, and their sleep."""
    told = pipelined.arguments(args)
    said, _ = launch.run([sys.executable, str(TASK), *args, "--steps", "5"], LIMIT_S)
    cores = len(os.sched_getaffinity(0))
    return figures(said)["step_ms"] / 1e3 * max(1.0, stages / cores) + 3 * told.rest / 1e3 * told.micro * stages  # type: ignore[no-any-return]


def planned(way: Way, stages: int, args: Sequence[str]) -> Result:
    """A run as ps-plan has planned it. Raises CommandFailed."""
    told = pipelined.arguments(args)
    size = sum(value.numel() for piece in pipelined.parts(told, even(told.layers, 1)) for value in piece.parameters())
    cut = 4 * (told.batch // told.micro) * told.context * told.width
    with tempfile.TemporaryDirectory() as temporary, cities(way) as hosts:
        folder, network = Path(temporary), network_of(way, stages)
        (folder / "network.json").write_text(json.dumps(network))
        homes = [hosts[machine * 2 // stages] for machine in range(stages)]
        addresses = zip(network["hosts"], homes, strict=True)
        flags = {"parameters": size, "step": step_s(stages, args), "pipeline": stages, "layers": told.layers}
        flags |= {"activation-bytes": cut, "micro-batches": told.micro, "out": folder / "plan.json"}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words += ["--insecure", *(word for name, home in addresses for word in ("--address", f"{name}={home.address}"))]
        said, _ = launch.run(
            [sys.executable, "-m", "narrows.ps.command.planning.plan", str(folder / "network.json"), *words], LIMIT_S
        )
        click.echo(said.partition("\non ")[0])
        layout = json.loads((folder / "plan.json").read_text())
        before, run = sum(hosts[-1].bytes()), Run(homes, layout, folder, [*args, "--check"])
        if any(codes := run.go(LIMIT_S)):
            raise CommandFailed(f"planned: exit codes {codes}: {run.said('ps-worker')[-1500:]}")
        value, unit = re.findall(r"predicted ([\d.]+) (m?s)", said)[0]
        found = figures(run.said("ps-worker")) | {"predicted_ms": float(value) * (1 if unit == "ms" else 1e3)}
        return found | {"bytes": sum(hosts[-1].bytes()) - before, "loss": trained(folder, layout, args)}


@click.command(context_settings={"show_default": True, "ignore_unknown_options": True})
@click.option("--rows", help=f"[{','.join(ROWS)}; with --losses {','.join(LOSSES)}]")
@click.option("--losses", is_flag=True, help="400 steps of 32 windows in 8 micro-batches")
@click.option("--grid", is_flag=True, help="the same steps, by 2 stages x 2 replicas in two cities")
@click.option("--in-flight", default=2, help="micro-batches across the link; its round trip over the time of one")
@click.option("--rate", type=netns.RATE, default="100mbit", help="of the link")
@click.option("--delay", type=netns.TIME, default="20ms", help="of the link, one way")
@click.option("--steps", type=int, help="[20; with --losses and --grid 400]")
@record.out_option("speed/pipeline")
@click.argument("more", nargs=-1)
def main(
    rows: str | None, losses: bool, grid: bool, in_flight: int, rate: float, delay: float, steps: int | None,
    out: Path, more: tuple[str, ...],
) -> None:  # fmt: skip
    """Measure each row; MORE goes to the task."""
    long = losses or grid
    steps, way, stages = steps or (400 if long else 20), Way(rate, delay), 2 if grid else 4
    batch = ("32", "8") if long else ("128", "16")
    args = ["--steps", str(steps), "--batch", batch[0], "--micro", batch[1], "--of", str(stages), *more]
    try:
        with record.Recorder("speed/pipeline", out) as recorder:
            usual = LOSSES if losses else ROWS
            for row in ("whole", "grid") if grid else rows.split(",") if rows else usual:
                found = run_of(row, args, way, stages, grid, in_flight)
                add(recorder, row, found, steps, way, in_flight, "losses" if long else "step times: 4 stages", args)
    except CommandFailed as error:
        raise click.ClickException(str(error)) from None


def run_of(row: str, args: list[str], way: Way, stages: int, grid: bool, in_flight: int) -> Result:
    """One run of a row. Raises CommandFailed."""
    coded, _, schedule = row.partition("/")
    coded, _, where = coded.partition("@")
    name, _, dimensions = coded.partition(":")
    words = [*args, *(["--subspace", dimensions] if dimensions else [])]
    words += ["--schedule", schedule or ("1f1b" if name == "gloo" else "eager")]
    if name in ONE_MACHINE:
        return ONE_MACHINE[name](stages, words)
    if name == "planned":
        return planned(way, stages, words)
    flags, link = GRID if grid else {"sync": "bsp"}, None if where == "loopback" else way
    return measure(name, link, stages, 2 if grid else 1, flags, in_flight, words)


def add(
    recorder: record.Recorder,
    row: str,
    found: Result,
    steps: int,
    way: Way,
    in_flight: int,
    table: str,
    args: list[str],
) -> None:
    told, name = pipelined.arguments(args), row.partition(":")[0]
    step: record.Figures = {"step": (found.get("step_ms"), "ms"), "predicted": (found.get("predicted_ms"), "ms")}
    loss: record.Figures = {
        "validation loss": (found.get("loss"), "nats a byte"),
        "training loss": (found.get("training"), "nats a byte"),
    }
    rest: record.Figures = {
        "gradients differ by": (found.get("differ"), ""),
        "bytes": (found["bytes"] / steps / 1e3 if found.get("bytes") else None, "kB a step"),
    }
    losses = table == "losses"
    arguments = {"steps": steps, "batch": told.batch, "micro": told.micro, "rate": told.lr, "in flight": in_flight}
    linked = record.link_of(way) if name not in ONE_MACHINE and "@" not in row else None
    recorder.add(row, loss | rest | step if losses else step | loss | rest, table=table, beside="whole" if losses else "gloo",
                 link=linked, seed=told.seed, arguments=arguments)  # fmt: skip


if __name__ == "__main__":
    main()
