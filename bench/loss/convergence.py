"""Each sync mode trains a task on loopback. The bench compares its loss or accuracy with that of one process.

    python bench/loss/convergence.py --preset modes                 # MNIST-5k, 4 workers, each mode at its default flags
    python bench/loss/convergence.py --preset modes --task digits
    python bench/loss/convergence.py --preset compress --workers 4  # byte GPT and MNIST-5k, one SPEC after the other
    python bench/loss/convergence.py --preset tuned --beta1 0.8     # byte GPT, 2 workers, each contender at its best rate
    python bench/loss/convergence.py --preset many --seeds 0        # the same with 16 workers, also as 4 clusters

Rules
- Runs are real `ps-serve` and `ps-worker --record` commands on loopback. The record has all figures but those of the single
  process.
- Workers reach the server over a Unix socket.
- Every worker, every server and the single process have one thread. Runs follow one another, all rows of a seed first.
- A run that --out has for this commit is not run again without --again.
- Bytes are those of a step, the mean over workers and over all steps but the first. "wait" is the time that a worker waited
  in the whole run, the mean over workers. "time" is that of the whole command.
- A tuned row runs at its best rate. The first seed goes up and down a ladder of rates, a factor of sqrt(2) apart, until the
  best rate has a worse one on either side. Further seeds run at the rates whose loss is within 0.5 % of the best.
- A run that fails is reported, and the others go on; the exit code is then 1.
"""

from __future__ import annotations

import fnmatch
import json
import re
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders import wan
from lab import launch, record
from lab.launch import CommandFailed
from loss.presets import DENSE, PRESETS, RATES, SINGLE, Preset, Row, Task, at_rate, climb

Result = dict[str, Any]
HOPEFUL = 0.005  # share of a loss by which seeds of one rate differ
FIGURES = (  # name, key in a Result, factor, unit
    ("up", "step_bytes_up", 1e-3, "kB a step"),
    ("down", "step_bytes_down", 1e-3, "kB a step"),
    ("all up", "bytes_up", 1e-6, "MB"),
    ("all down", "bytes_down", 1e-6, "MB"),
    ("staleness", "staleness", 1.0, "clocks"),
    ("wait", "wait_s", 1.0, "s"),
    ("step", "median_step_s", 1e3, "ms"),
    ("time", "seconds", 1.0, "s"),
)


def single(task: Task, row: Row, steps: int, seed: int, limit_s: float) -> Result:
    """The script as plain python. Raises CommandFailed."""
    said, seconds = launch.run([sys.executable, *task.arguments(steps, seed), *row.script], limit_s)
    step = re.search(r"median step ([\d.]+) s", said)
    metric = float(re.findall(r"\d+\.\d+", said.strip().splitlines()[-1])[-1])
    return {"metric": metric, "seconds": seconds, "median_step_s": float(step[1]) if step else None}


def cluster(task: Task, row: Row, workers: int, steps: int, seed: int, limit_s: float) -> Result:
    """A server, perhaps clusters below it, and the workers. The record is of the first cluster. Raises CommandFailed."""
    root, *ports = launch.free_ports(1 + row.clusters)
    own, script = str(workers // max(1, row.clusters)), [*task.arguments(steps, seed), *row.script]
    with ExitStack() as stack:
        told = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "record.jsonl"
        stack.enter_context(launch.serving([*row.flags, "--workers", str(row.clusters or workers)], [root]))
        for port in ports:
            flags = ["--sync", "bsp", "--parent", f"tcp://127.0.0.1:{root}", "--workers", own]
            stack.enter_context(launch.serving(flags, [port]))
        first, *others = (
            launch.ps_worker("--server", f"tcp://127.0.0.1:{port}", "-n", own) for port in ports or [root]
        )
        for command in others:
            stack.enter_context(launch.started([*command, *script]))
        _, seconds = launch.run([*first, "--record", str(told), *script], limit_s)
        events = [json.loads(line) for line in told.read_text().splitlines()]
    return read(events, task.metric) | {"seconds": seconds}


def beside(task: Task, row: Row, workers: int, steps: int, seed: int, limit_s: float) -> Result:
    """A row of wan.py, which no link holds up. A script there has as many ranks as asked for. Raises CommandFailed."""
    theirs = next(each for each in wan.ROWS if each.name == row.wan)
    theirs = replace(theirs, each=workers // 2) if theirs.script else theirs
    if lacks := theirs.lacks():
        raise CommandFailed(lacks)
    told = wan.measure(theirs, None, [*task.arguments(steps, seed)[1:], *row.script], limit_s)
    return {"metric": told[task.metric], "seconds": told["seconds"], "median_step_s": told["step_s"]}


def read(events: list[Result], metric: str) -> Result:
    """The figures of one record. A worker's first step, which carries its first state, is in the totals alone."""
    done = events[-1]
    by_worker: dict[int, list[Result]] = {}
    for event in events:
        if event["event"] == "step":
            by_worker.setdefault(event["local_rank"], []).append(event)
    steps = [step for own in by_worker.values() for step in own[1:]]
    between = [b["seconds"] - a["seconds"] for own in by_worker.values() for a, b in pairwise(own)]
    return {
        "metric": done["last"][metric],
        "median_step_s": statistics.median(between),
        "step_bytes_up": statistics.fmean(step["push_bytes"] for step in steps),
        "step_bytes_down": statistics.fmean(step["pull_bytes"] for step in steps),
        "bytes_up": done["bytes_up"],
        "bytes_down": done["bytes_down"],
        "staleness": statistics.fmean(step["staleness"] for step in steps),
        "wait_s": statistics.fmean(sum(step["wait_seconds"] for step in own) for own in by_worker.values()),
    }


class Campaign:
    """Runs the rows of a preset that --out does not have yet."""

    def __init__(self, name: str, preset: Preset, task: Task, steps: int, path: Path, limit_s: float) -> None:
        self.name, self.preset, self.task, self.steps = name, preset, task, steps
        self.recorder = record.Recorder("loss/convergence", path)
        self.limit_s, self.failed = limit_s, list[str]()

    def arguments(self, row: Row) -> dict[str, record.Scalar]:
        told: dict[str, record.Scalar] = {"task": self.task.name, "workers": self.preset.workers, "steps": self.steps}
        told |= {"beta1": self.task.beta1} if self.task.beta1 else {}
        return told | {"rate": float(row.rate)} if row.rate else told

    def found(self, row: Row, seed: int | None = None) -> list[record.Line]:
        wanted = {"run": row.name, **({} if seed is None else {"seed": seed}), **self.arguments(row)}
        return self.recorder.found(**wanted)

    def metric(self, row: Row, seed: int) -> float | None:
        found = self.found(row, seed)
        return next(iter(found[-1].figures.values())).value if found else None

    def run(self, row: Row, seed: int, again: bool) -> None:
        if self.found(row, seed) and not again:
            return
        if self.task.beta1:
            row = replace(row, script=(*row.script, "--beta1", str(self.task.beta1)))
        name = f"{self.task.name}, {row.name}{f', rate {row.rate}' * bool(row.rate)}, {self.steps} steps, seed {seed}"
        try:
            if row.wan:
                told = beside(self.task, row, self.preset.workers, self.steps, seed, self.limit_s)
            elif row.flags:
                told = cluster(self.task, row, self.preset.workers, self.steps, seed, self.limit_s)
            else:
                told = single(self.task, row, self.steps, seed, self.limit_s)
        except (CommandFailed, OSError) as error:
            self.failed.append(name)
            click.echo(f"FAILED {name}: {error}", err=True)
            return
        self.add(row, seed, told)
        click.echo(f"{name}: {self.task.metric} {told['metric']:.4f} in {told['seconds']:.0f} s")

    def add(self, row: Row, seed: int, told: Result) -> None:
        scale, unit = (1.0, "nats a byte") if self.task.metric == "loss" else (100.0, "%")
        figures: record.Figures = {self.task.metric: (scale * told["metric"], unit)}
        for name, key, factor, unit in FIGURES:
            figures[name] = (factor * told[key] if told.get(key) is not None else None, unit)
        muon = ", muon" * row.name.endswith(", muon")
        table = f"{self.name}: {self.task.name}, {self.preset.workers} workers"
        table += (", each at its best rate" + muon) * self.preset.tuned
        base = DENSE.name if self.name in ("compress", "many", "tuned") and not muon else SINGLE.name + muon
        self.recorder.add(row.name, figures, table=table, beside=base, best_of="rate" if self.preset.tuned else "",
                          seed=seed, arguments=self.arguments(row))  # fmt: skip

    def tune(self, row: Row, seeds_before: list[int], seed: int, again: bool) -> None:
        """The first seed climbs RATES to the best one; a further seed runs the rates that are still HOPEFUL."""
        if seeds_before:
            for rate in self.hopeful(row, seeds_before):
                self.run(at_rate(row, rate), seed, again)
            return

        def loss_at(rate: str) -> float | None:
            self.run(at_rate(row, rate), seed, again)
            return self.metric(at_rate(row, rate), seed)

        climb(row.start, loss_at)

    def hopeful(self, row: Row, seeds: list[int]) -> list[str]:
        """Rates that have run with all `seeds`, and whose mean is near the best one's."""
        means = {}
        for rate in RATES:
            losses = [self.metric(at_rate(row, rate), seed) for seed in seeds]
            known = [loss for loss in losses if loss is not None]
            if len(known) == len(seeds):
                means[rate] = statistics.fmean(known)
        return [rate for rate, mean in means.items() if mean <= (1 + HOPEFUL) * min(means.values())]


@click.command(context_settings={"show_default": True})
@click.option("--preset", "name", type=click.Choice(list(PRESETS)), required=True)
@click.option("--workers", type=int, help="the preset's own by default")
@click.option("--task", "task_name", help="of the preset; the first by default")
@click.option("--seeds", "seed_list", default="0,1,2", help="comma-separated")
@click.option("--rows", "pattern", default="*", help="only rows whose name matches, such as 'bsp*'")
@click.option("--steps", type=int, help="for quick looks; whole epochs where the script counts those")
@click.option("--beta1", type=float, help="of the script's AdamW; the script's own by default")
@click.option("--again", is_flag=True, help="run what --out already holds for this commit")
@record.out_option("loss/convergence")
@click.option("--limit", "limit_s", type=float, default=3600.0, help="seconds after which a run counts as failed")
def main(
    name: str,
    workers: int | None,
    task_name: str | None,
    seed_list: str,
    pattern: str,
    steps: int | None,
    beta1: float | None,
    again: bool,
    out: Path,
    limit_s: float,
) -> None:
    """Compare sync modes with the same script alone in one process."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    preset = replace(PRESETS[name], workers=workers or PRESETS[name].workers)
    task = next((task for task in preset.tasks if task_name in (None, task.name)), None)
    if task is None:
        raise click.BadParameter(f"--preset {name} has {', '.join(t.name for t in preset.tasks)}", param_hint="--task")
    if beta1 is not None:
        if task.beta1 is None:
            raise click.BadParameter(f"{task.name} has no such flag", param_hint="--beta1")
        task = replace(task, beta1=beta1)
    campaign = Campaign(name, preset, task, task.rounded(steps or task.steps), out, limit_s)
    chosen = [row for row in preset.rows if fnmatch.fnmatchcase(row.name, pattern)]
    if not chosen:
        raise click.BadParameter(
            f"no row matches {pattern!r}; {'; '.join(r.name for r in preset.rows)}", param_hint="--rows"
        )
    seeds = [int(seed) for seed in seed_list.split(",")]
    for place, seed in enumerate(seeds):
        for row in chosen:
            if preset.tuned:
                campaign.tune(row, seeds[:place], seed, again)
            else:
                campaign.run(row, seed, again)
    campaign.recorder.show()
    if campaign.failed:
        click.echo("failed: " + "; ".join(campaign.failed), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
