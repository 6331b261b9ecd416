"""The byte GPT in stages across a link: step time, bytes at the interface and loss of each coding, beside the unsplit model.

    python bench/pipeline.py                       # 4 stages, two in each of two cities, 100 Mbit/s and 20 ms, 400 steps
    python bench/pipeline.py --rows 'dense,int8' --steps 100
    python bench/pipeline.py --grid                # 2 stages x 2 replicas: a replica in each city, ssp between
    python bench/pipeline.py --grid --kill         # a stage is killed in the middle, and the run goes on with --resume
    python bench/pipeline.py --steps 5 -- --layers 4 --width 32 --heads 2 --context 16    # small; the rest is the task's

Rows
- whole: the unsplit model in one process, each of its parts clipped on its own, as a stage is.
- gloo: the same stages on loopback over torch's gloo, without Narrows. loopback: over Narrows on loopback, dense.
- dense, fp16, int8: across the link, with all edges coded so. subspace:D: docs/design/pipelines.md, with coefficients in fp16.

Rules
- Stages have bsp servers of their own in their city, so a pipeline of one replica steps as one process would.
- A step's time is the median of the slowest stage. Bytes are the kernel's at the second city's interface, over the whole run.
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
import lab
import launch
from launch import CommandFailed
from link import Way
from safetensors.torch import load_file
from wan import cities

sys.path.insert(0, str(launch.ROOT / "tests"))
sys.path.insert(0, str(launch.ROOT / "bench" / "tasks"))

import bytelm
import pipelined
from kit.processes import descendants

TASK = Path(__file__).parent / "tasks" / "pipelined.py"
PORT = 25_000  # of the servers, on hosts that nobody else is on; stages listen a hundred above
GRID = {"sync": "ssp", "compress": "topk:0.05+int8"}
OUT = launch.OUT / "pipeline.json"
LIMIT_S = 3600.0  # of one run
ROWS = ("whole", "gloo", "loopback", "dense", "fp16", "int8", "subspace:4", "subspace:8", "subspace:16")
Result = dict[str, Any]


def plan(hosts: Sequence[lab.Host], stages: int, replicas: int, flags: dict[str, Any], coding: str) -> Result:
    """One replica lies across the cities, its first half in the first one; of several each has a city."""
    names = ["here", "there"][: len(set(hosts))]
    first = [names[stage * len(names) // stages] for stage in range(stages)]

    def place(stage: int, replica: int) -> str:
        return first[stage] if replicas == 1 else names[replica % len(names)]

    return {
        "version": 1,
        "hosts": dict(zip(names, dict.fromkeys(host.address for host in hosts), strict=True)),
        "stages": [{"host": first[stage], "port": PORT + stage, "flags": flags} for stage in range(stages)],
        "edges": [{"forward": coding, "backward": coding}] * (stages - 1),
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

    def __init__(self, hosts: Sequence[lab.Host], layout: Result, folder: Path, args: Sequence[str]) -> None:
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

    def go(self, limit_s: float, *serve: str, kill: bool = False) -> list[int]:
        """Exit codes of the ps-workers. The servers end with their workers. Raises CommandFailed after `limit_s`."""
        folder = ("--checkpoint-dir", str(self.folder / "checkpoints"))
        serving = {stage["host"] for stage in self.layout["stages"]}
        servers = [self.start("ps-serve", host, *folder, *serve) for host in self.hosts if host in serving]
        workers = [self.start("ps-worker", host, str(TASK), *self.args) for host in self.hosts]
        deadline, killed, ended = time.monotonic() + limit_s, not kill, False
        while any(process.poll() is None for process in workers):
            if time.monotonic() > deadline:
                raise CommandFailed(f"it ran longer than {limit_s:.0f} s: {self.said('ps-worker')[-800:]}")
            if not killed and "checkpoint of clock 20" in self.said("ps-serve"):
                killed = True
                kill_stage(workers[0].pid)
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


def kill_stage(pid: int) -> None:
    """The second process of this ps-worker, as when its machine loses power: its stage is the last of a grid of two."""
    for each in descendants(pid):
        if Path(f"/proc/{each}/comm").read_text().strip() == "ps-worker-1":
            os.kill(each, signal.SIGKILL)
            return
    raise CommandFailed("no stage to kill was found")


def figures(said: str) -> Result:
    """What the task has printed, of all its stages."""
    steps = [float(each) for each in re.findall(r"median step ([\d.]+) ms", said)]
    differ = [float(a) / float(b) for a, b in re.findall(r"differ by (\S+), the largest is (\S+)", said)]
    losses = re.findall(r"training loss ([\d.]+)", said)
    return {
        "step_ms": max(steps, default=None),
        "differ": max(differ, default=None),
        "training": float(losses[-1]) if losses else None,
    }


def trained(folder: Path, stages: int, args: Sequence[str]) -> float:
    """The validation loss of the model that the stages' servers have written."""
    told = pipelined.arguments([*args, "--of", str(stages)])
    pieces = pipelined.parts(told, stages)
    for stage, piece in enumerate(pieces):
        piece.load_state_dict(load_file(folder / "checkpoints" / f"stage-{stage}" / "model.safetensors"))
    return pipelined.validation(pieces, bytelm.library()[1], told.context)


def alone(stages: int, args: Sequence[str]) -> Result:
    """The unsplit model, in parts as they are clipped."""
    said, seconds = launch.run([sys.executable, str(TASK), *args, "--of", str(stages)], LIMIT_S)
    loss = float(re.findall(r"validation loss ([\d.]+)", said)[0])
    return figures(said) | {"loss": loss, "seconds": seconds}


def over_gloo(stages: int, args: Sequence[str]) -> Result:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}", str(TASK), "--gloo", *args]
    said, seconds = launch.run([sys.executable, *words], LIMIT_S)
    return figures(said) | {"seconds": seconds}


def measure(
    row: str, way: Way | None, stages: int, replicas: int, flags: dict[str, Any], args: Sequence[str]
) -> Result:
    """One run of one plan. Raises CommandFailed."""
    name, _, dimensions = row.partition(":")
    coding = {"subspace": "fp16", "loopback": "dense", "grid": "int8"}.get(name, name)
    args = [*args, *(["--subspace", dimensions] if dimensions else [])]
    with tempfile.TemporaryDirectory() as told, cities(way) as hosts:
        folder, before = Path(told), sum(hosts[-1].bytes())
        layout = plan(hosts, stages, replicas, flags, coding)
        run = Run(hosts, layout, folder, [*args, *["--check"] * (replicas == 1)])
        began = time.monotonic()
        codes = run.go(LIMIT_S)
        if any(codes):
            raise CommandFailed(f"{row}: exit codes {codes}: {run.said('ps-worker')[-1500:]}")
        result = figures(run.said("ps-worker")) | {"seconds": time.monotonic() - began}
        result["bytes"] = sum(hosts[-1].bytes()) - before
        return result | {"loss": trained(folder, stages, args)}


def killed(way: Way, args: Sequence[str]) -> Result:
    """The grid, in which a stage of the first city is killed; then the same again with --resume. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as told, cities(way) as hosts:
        folder = Path(told)
        run = Run(hosts, plan(hosts, 2, 2, GRID, "int8"), folder, args)
        codes = run.go(LIMIT_S, kill=True)
        lost = re.findall(r"ps-worker: (stage 1 of replica 0 .*?),", run.said("ps-worker"))
        again = run.go(LIMIT_S, "--resume")
        clock = re.findall(r"all stages go on from clock (\d+)", run.said("ps-serve"))
        return {"codes": codes, "again": again, "lost": lost[:1], "from": clock[:1], "loss": trained(folder, 2, args)}


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@click.command(context_settings={"show_default": True, "ignore_unknown_options": True})
@click.option("--rows", default=",".join(ROWS), help="which, with commas between")
@click.option("--grid", is_flag=True, help="2 stages x 2 replicas in two cities in the place of 4 stages")
@click.option("--kill", is_flag=True, help="with --grid: kill a stage and go on")
@click.option("--rate", type=lab.RATE, default="100mbit", help="of the link")
@click.option("--delay", type=lab.TIME, default="20ms", help="of the link, one way")
@click.option("--steps", default=400)
@click.argument("more", nargs=-1)
def main(rows: str, grid: bool, kill: bool, rate: float, delay: float, steps: int, more: tuple[str, ...]) -> None:
    """Measure each row; MORE goes to the task."""
    args, way = ["--steps", str(steps), *more], Way(rate, delay)
    stages = 2 if grid else 4
    results: dict[str, Result] = {}
    try:
        if kill:
            results["killed"] = killed(way, args)
            click.echo(results["killed"])
        for row in ("whole", "grid") if grid else rows.split(","):
            if row == "whole":
                found = alone(stages, args)
            elif row == "gloo":
                found = over_gloo(stages, args)
            else:
                flags = GRID if grid else {"sync": "bsp"}
                found = measure(row, None if row == "loopback" else way, stages, 2 if grid else 1, flags, args)
            results[row] = found
            click.echo(f"{row}: {found}")
            launch.save(OUT, {"args": args, "way": str(way), "facts": launch.facts(), "results": results})
    except CommandFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        "| run | step, ms | gradients differ by | kB a step at the interface | training loss | validation loss |"
    )
    click.echo("|---|---|---|---|---|---|")
    for row, found in results.items():
        kilobytes = found["bytes"] / steps / 1e3 if found.get("bytes") else None
        cells = [found.get("step_ms"), found.get("differ"), kilobytes, found.get("training"), found.get("loss")]
        click.echo(f"| {row} | {' | '.join(map(shown, cells))} |")
    facts = launch.facts()
    click.echo(
        f"\n{steps} steps, {way}; commit {facts['commit']}; {facts['machine']}, load {facts['load']}; {facts['date'][:16]}."
    )


if __name__ == "__main__":
    main()
