"""Every sync mode on every task against the same script alone in one process: its metric, seconds, bytes up and down.

    python bench/convergence.py --preset modes                 # MNIST-5k, 4 workers, each mode at its default flags
    python bench/convergence.py --preset modes --task digits
    python bench/convergence.py --preset gossip --workers 8    # MNIST-5k, each topology, full and low precision
    python bench/convergence.py --preset sparse                # byte GPT, 2 workers, 5 % and 1 % of each update
    python bench/convergence.py --preset compress --workers 4  # byte GPT and MNIST-5k, one SPEC after the other
    python bench/convergence.py --preset tuned                 # byte GPT, 2 workers, each contender at its best of three rates
    python bench/convergence.py --preset sparse --show         # print what the last campaign found, as Markdown

Rules
- Real `ps-serve` and `ps-worker --record` commands on loopback; all figures but the single process's are from the record.
- Workers that dial 127.0.0.1 reach the server over a Unix socket, those behind the proxy over TCP.
- Every worker, server and the single process has one thread. Runs follow one another, all rows of a seed first.
- A held row goes through proxy.py, which holds every chunk for the median step of the first `bsp` row, each way.
- Each run is written to the JSON at once; one that is there for this commit is not run again without --again.
- A run that fails is reported and the others go on; the exit code is then 1.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import signal
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import launch
from launch import CommandFailed
from proxy import LISTEN, Proxy

PROBE_STEPS = 40
POINT = 0.01  # of accuracy: how far below the single process the claim allows a mode's mean

Result = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A script of bench/tasks. `metric` is the name that it records; its last line ends with the figure."""

    name: str
    metric: str
    steps: int
    steps_per_epoch: int = 0  # 0: the script takes --steps

    def arguments(self, steps: int, seed: int) -> list[str]:
        flag = ["--epochs", steps // self.steps_per_epoch] if self.steps_per_epoch else ["--steps", steps]
        return [str(launch.ROOT / "bench" / "tasks" / f"{self.name}.py"), *map(str, flag), "--seed", str(seed)]

    def rounded(self, steps: int) -> int:
        """What the script can run: whole epochs."""
        whole = self.steps_per_epoch or 1
        return max(1, steps // whole) * whole


@dataclass(frozen=True)
class Row:
    """One line of the table: flags of ps-serve, or none for the single process."""

    name: str
    flags: tuple[str, ...] = ()
    held: bool = False
    script: tuple[str, ...] = ()  # further arguments of the script

    @property
    def key(self) -> str:
        return self.name + (", held" if self.held else "")


SINGLE, DENSE = Row("single process"), Row("bsp", ("--sync", "bsp"))


def ssp(staleness: int, compress: str, push: str = "") -> Row:
    flags = ("--sync", "ssp", "--staleness", str(staleness), "--compress", compress)
    name = f"ssp, s = {staleness}, {compress}"
    return Row(f"{name}, push {push}", (*flags, "--push", push)) if push else Row(name, flags)


@dataclass(frozen=True)
class Preset:
    tasks: tuple[Task, ...]
    workers: int
    rows: tuple[Row, ...]
    specs: bool = False  # a row is a SPEC: bytes against what they cost, beside dense bsp
    tuned: bool = False  # a row is a contender at one rate; the table has each contender once


SPARSE = tuple(ssp(s, compress, push) for push in ("", "gradient") for s, compress in ((1, "topk:0.05+int8"), (2, "topk:0.01+int8")))  # fmt: skip  # noqa: E501


LOCAL_SGD = ("--outer-lr", "1", "--outer-momentum", "0")  # updates are added as they come, as in ssp


def pushed(compress: str, local_steps: int = 1, staleness: int = 1, rate: str = "") -> Row:
    """Updates of the worker's own optimizer, both ways through `compress`; `rate`: another one for the script."""
    mode = ("ssp",) if local_steps == 1 else ("local", "--local-steps", str(local_steps), *LOCAL_SGD)
    flags = ("--sync", *mode, "--staleness", str(staleness), "--compress", compress)
    parts = [compress]
    if local_steps > 1:
        parts.append(f"H = {local_steps}")
    if staleness != 1:
        parts.append(f"s = {staleness}")
    if rate:
        parts.append(f"rate {rate}")
    return Row(", ".join(parts), flags, script=("--lr", rate) if rate else ())


RATE = "0.0028"  # the byte GPT's own times the root of two workers: does averaging updates ask for more?
# First what every task and number of workers is shown with, then more of the curve.
TABLE = (
    *(pushed(spec) for spec in ("dense", "topk:0.05+int8", "sign", "topk:0.01+int8", "cycle:0.15+sign")),
    pushed("topk:123/4096+2bit", 4, 0),
)
CURVE = (
    *(
        pushed(spec)
        for spec in ("cycle:0.25+sign", "cycle:0.08+2bit", "topk:0.015+2bit", "cycle:0.06+sign", "cycle:0.03+sign")
    ),
    pushed("cycle:0.12+sign", 4, 0),
    Row(f"bsp, rate {RATE}", ("--sync", "bsp"), script=("--lr", RATE)),
    *(
        pushed(spec, rate=RATE)
        for spec in ("sign", "topk:0.01+int8", "cycle:0.15+sign", "cycle:0.06+sign", "cycle:0.03+sign")
    ),
    *(pushed(spec, 4, 0, RATE) for spec in ("topk:123/4096+2bit", "cycle:0.12+sign")),
)

GOSSIP = tuple(
    Row(f"gossip, {topology}, {compress}", ("--sync", "gossip", "--topology", topology, "--compress", compress))
    for topology, compress in (
        *(("matching", "dense"), ("matching", "int8"), ("matching", "topk:0.05+int8"), ("ring", "dense")),
        *(("exponential", "dense"), ("shift-one", "dense"), ("random", "dense")),
    )
)

# One inner optimizer is compared with itself. Muon needs whole tensors: bsp, which steps on the server, cannot have it.
RATES = ("0.002", "0.0028", "0.004")  # the script's own is the first
LOCAL = Row("local, H = 50", ("--sync", "local", "--local-steps", "50"))


def muon(row: Row) -> Row:
    return replace(row, name=f"{row.name}, muon", script=("--optimizer", "muon"))


def at_rate(row: Row, rate: str) -> Row:
    return replace(row, name=f"{row.name}, rate {rate}", script=(*row.script, "--lr", rate))


BASES = (SINGLE, DENSE, muon(SINGLE))
CONTENDERS = (
    SINGLE,
    DENSE,
    *(ssp(1, spec) for spec in ("dense", "topk:0.05+int8", "topk:0.11+sign")),
    *(ssp(2, spec) for spec in ("cycle:0.15+sign", "cycle:0.15/0.24+sign")),
    Row("async, topk:0.11+sign", ("--sync", "async", "--compress", "topk:0.11+sign")),
    LOCAL,
    Row("gossip, topk:0.05+int8", ("--sync", "gossip", "--compress", "topk:0.05+int8")),
    *(muon(row) for row in (SINGLE, ssp(1, "topk:0.11+sign"), LOCAL)),
)

PRESETS = {
    "modes": Preset(
        (Task("mnist5k", "accuracy", 744, steps_per_epoch=62), Task("digits", "accuracy", 600)),
        workers=4,
        rows=(SINGLE, *(Row(mode, ("--sync", mode)) for mode in ("bsp", "ssp", "async", "local"))),
    ),
    "gossip": Preset(
        (Task("mnist5k", "accuracy", 744, steps_per_epoch=62),),
        workers=4,
        rows=(SINGLE, DENSE, *GOSSIP),
    ),
    "sparse": Preset(
        (Task("bytelm", "loss", 400),),
        workers=2,
        rows=(SINGLE, *(replace(row, held=held) for row in (DENSE, *SPARSE) for held in (False, True))),
    ),
    "compress": Preset(
        (Task("bytelm", "loss", 400), Task("mnist5k", "accuracy", 744, steps_per_epoch=62)),
        workers=2,
        rows=(SINGLE, DENSE, *TABLE, *CURVE),
        specs=True,
    ),
    "tuned": Preset(
        (Task("bytelm", "loss", 400),),
        workers=2,
        rows=tuple(at_rate(row, rate) for rate in RATES for row in CONTENDERS),
        tuned=True,
    ),
}


# Runs.


def single(task: Task, row: Row, steps: int, seed: int, limit_s: float) -> Result:
    """The script as plain python. Raises CommandFailed."""
    said, seconds = launch.run([sys.executable, *task.arguments(steps, seed), *row.script], limit_s)
    step = re.search(r"median step ([\d.]+) s", said)
    metric = float(re.findall(r"\d+\.\d+", said.strip().splitlines()[-1])[-1])
    return {"metric": metric, "seconds": seconds, "median_step_s": float(step[1]) if step else None}


def cluster(task: Task, row: Row, workers: int, steps: int, seed: int, hold_s: float, limit_s: float) -> Result:
    """A server, perhaps the proxy, and the workers. Raises CommandFailed."""
    ports = launch.free_ports(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        launch.serving([*row.flags, "--workers", str(workers)], ports),
        Proxy(ports, 1000 * hold_s) if row.held else nullcontext(),
    ):
        record = Path(folder) / "record.jsonl"
        address = f"tcp://{LISTEN if row.held else '127.0.0.1'}:{ports[0]}"
        command = [sys.executable, "-m", "narrows.worker.command.cli", "--server", address, "-n", str(workers)]
        _, seconds = launch.run([*command, "--record", str(record), *task.arguments(steps, seed), *row.script], limit_s)
        events = [json.loads(line) for line in record.read_text().splitlines()]
    held = {"hold_ms": 1000 * hold_s} if row.held else {}
    return read(events, task.metric) | {"seconds": seconds, "workers": workers, "flags": list(row.flags)} | held


def read(events: list[Result], metric: str) -> Result:
    """The figures of one record. A worker's first step, which carries its first state, is in the totals alone."""
    done = events[-1]
    by_worker: dict[int, list[Result]] = {}
    for event in events:
        if event["event"] == "step":
            by_worker.setdefault(event["worker"], []).append(event)
    steps = [step for own in by_worker.values() for step in own[1:]]
    between = [b["seconds"] - a["seconds"] for own in by_worker.values() for a, b in pairwise(own)]
    return {
        "metric": done["last"][metric],
        "median_step_s": statistics.median(between),
        "step_bytes_up": statistics.fmean(step["push_bytes"] for step in steps),
        "step_bytes_down": statistics.fmean(step["pull_bytes"] for step in steps),
        "bytes_up": done["bytes_up"],
        "bytes_down": done["bytes_down"],
        "staleness": {str(n): count for n, count in sorted(Counter(step["staleness"] for step in steps).items())},
        "wait_s": statistics.fmean(sum(step["wait_seconds"] for step in own) for own in by_worker.values()),
    }


class Campaign:
    """The runs of one preset and task, and the JSON that holds them."""

    def __init__(self, preset: Preset, task: Task, steps: int, path: Path, limit_s: float, hold_ms: float) -> None:
        self.preset, self.task, self.steps, self.path, self.limit_s = preset, task, steps, path, limit_s
        self.hold_ms = hold_ms  # 0: one step's time
        self.results: list[Result] = json.loads(path.read_text()) if path.exists() else []
        self.facts = launch.facts()
        self.failed: list[str] = []

    def found(self, commit: str, row: Row, seed: int | None = None) -> list[Result]:
        """Runs of this row, oldest seed first."""
        wanted = {"task": self.task.name, "row": row.key, "steps": self.steps, "commit": commit}
        if row.flags:
            wanted["workers"] = self.preset.workers
        hits = [
            result for result in self.results if wanted.items() <= result.items() and seed in (None, result["seed"])
        ]
        return sorted(hits, key=lambda result: int(result["seed"]))

    def hold_s(self, seed: int) -> float:
        """One step's time, the same for all held rows of a campaign: what they had so far, or the first bsp row's."""
        if self.hold_ms:
            return self.hold_ms / 1000
        commit = self.facts["commit"]
        before = [result for row in self.preset.rows if row.held for result in self.found(commit, row)]
        if before:
            return float(before[0]["hold_ms"]) / 1000
        dense = self.found(commit, DENSE)
        if not dense:
            dense = [cluster(self.task, DENSE, self.preset.workers, PROBE_STEPS, seed, 0, self.limit_s)]
        click.echo(f"held rows hold for the median step of bsp, {1000 * dense[0]['median_step_s']:.1f} ms, each way")
        return float(dense[0]["median_step_s"])

    def run(self, row: Row, seed: int, again: bool) -> None:
        if self.found(self.facts["commit"], row, seed) and not again:
            return
        name = f"{self.task.name}, {row.key}, {self.steps} steps, seed {seed}"
        try:
            if row.flags:
                hold_s = self.hold_s(seed) if row.held else 0.0
                figures = cluster(self.task, row, self.preset.workers, self.steps, seed, hold_s, self.limit_s)
            else:
                figures = single(self.task, row, self.steps, seed, self.limit_s)
        except (CommandFailed, OSError) as error:
            self.failed.append(name)
            click.echo(f"FAILED {name}: {error}", err=True)
            return
        key = {"task": self.task.name, "row": row.key, "seed": seed, "steps": self.steps}
        old = self.found(self.facts["commit"], row, seed)
        self.results = [result for result in self.results if result not in old]
        now = {name: value for name, value in launch.facts().items() if name != "commit"}
        self.results.append(key | self.facts | now | figures)
        launch.save(self.path, self.results)
        click.echo(f"{name}: {self.task.metric} {figures['metric']:.4f} in {figures['seconds']:.0f} s")

    def newest_commit(self) -> str:
        """Of the runs of these steps."""
        mine = [r for r in self.results if r["task"] == self.task.name and r["steps"] == self.steps]
        return str(mine[-1]["commit"]) if mine else "none"


# Tables.


def mean(results: list[Result], name: str) -> float | None:
    values = [result[name] for result in results if result.get(name) is not None]
    return statistics.fmean(values) if values else None


def shown(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def seeds(results: list[Result], digits: int, scale: float = 1.0) -> str:
    return " ".join(f"{result['metric'] * scale:.{digits}f}" for result in results)


def histogram(results: list[Result]) -> str:
    """Percent of the steps at each staleness; `async` has a long tail, shown as one entry."""
    count: Counter[int] = Counter()
    for result in results:
        count.update({min(int(n), 4): hits for n, hits in result.get("staleness", {}).items()})
    return " ".join(f"{n}{'+' if n == 4 else ''}:{100 * count[n] / count.total():.0f}" for n in sorted(count)) or "-"


def accuracy_table(rows: list[tuple[Row, list[Result]]]) -> list[str]:
    base = mean({row.key: found for row, found in rows}.get(SINGLE.key, []), "metric")
    lines = [
        "| mode | accuracy, % | seeds | to single, points | claim | MB up | MB down | wait, s | staleness, % | step, ms | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, found in rows:
        metric = mean(found, "metric")
        gap = None if base is None or metric is None or not row.flags else metric - base
        claim = "-" if gap is None else "holds" if gap >= -POINT - 1e-9 else "MISSED"
        cells = [
            *(row.key, shown(metric, 2, 100), seeds(found, 1, 100), "-" if gap is None else f"{100 * gap:+.2f}", claim),
            *(shown(mean(found, "bytes_up"), 1, 1e-6), shown(mean(found, "bytes_down"), 1, 1e-6)),
            *(shown(mean(found, "wait_s"), 1), histogram(found), shown(mean(found, "median_step_s"), 1, 1000)),
            shown(mean(found, "seconds"), 0),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def loss_table(rows: list[tuple[Row, list[Result]]]) -> list[str]:
    by_key = {row.key: found for row, found in rows}
    base, dense = mean(by_key.get(SINGLE.key, []), "metric"), by_key.get(DENSE.key, [])
    lines = [
        "| run | loss | seeds | to single | kB up | of dense | kB down | of dense | wait, s | staleness, % | step, ms | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, found in rows:
        metric = mean(found, "metric")
        gap = "-" if base is None or metric is None or not row.flags else f"{100 * (metric / base - 1):+.1f} %"
        link: list[str] = []
        for name in ("step_bytes_up", "step_bytes_down"):
            bytes_, full = mean(found, name), mean(dense, name)
            link += [shown(bytes_, 1, 1e-3), "-" if not bytes_ or not full else f"1/{full / bytes_:.0f}"]
        cells = [
            *(row.key, shown(metric, 3), seeds(found, 3), gap, *link, shown(mean(found, "wait_s"), 1)),
            *(histogram(found), shown(mean(found, "median_step_s"), 1, 1000), shown(mean(found, "seconds"), 0)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spec_points(rows: list[tuple[Row, list[Result]]]) -> list[tuple[Row, list[Result], float, float, float]]:
    """(row, its runs, metric, ratio up, ratio down) of each SPEC; ratios are those of dense bsp's bytes a step to its own."""
    dense = next((found for row, found in rows if row.key == DENSE.key), [])
    points = []
    for row, found in rows:
        metric = mean(found, "metric")
        ratios = []
        for name in ("step_bytes_up", "step_bytes_down"):
            full, own = mean(dense, name), mean(found, name)
            # Under local steps a record's line is a step, and the bytes of a round lie on one of them.
            ratios.append(full / own if full and own else math.nan)
        if metric is not None and row.flags:
            points.append((row, found, metric, ratios[0], ratios[1]))
    return points


def cost(metric: float, dense: float, name: str) -> str:
    """How far below dense: percent of a loss, points of an accuracy."""
    return f"{100 * (metric - dense):+.2f}" if name == "accuracy" else f"{100 * (metric / dense - 1):+.1f} %"


def spec_table(rows: list[tuple[Row, list[Result]]], name: str) -> list[str]:
    points = spec_points(rows)
    at = {row.key: metric for row, _, metric, *_ in points}
    digits, scale = (2, 100) if name == "accuracy" else (3, 1)
    lines = [
        f"| SPEC, updates pushed | {name} | seeds | to dense | to bsp | kB a step up, down | of bsp | staleness, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, found, metric, up, down in points:
        gaps = ["-" if base not in at else cost(metric, at[base], name) for base in ("dense", DENSE.key)]
        kilobytes = ", ".join(shown(mean(found, key), 2, 1e-3) for key in ("step_bytes_up", "step_bytes_down"))
        cells = [f"`{row.key}`", shown(metric, digits, scale), seeds(found, digits, scale), *gaps]
        lines.append(f"| {' | '.join([*cells, kilobytes, f'1/{up:.0f}, 1/{down:.0f}', histogram(found)])} |")
    return lines


def best_rate(row: Row, by_key: dict[str, list[Result]]) -> tuple[str, list[Result]] | None:
    """The rate with the lowest mean among those with the most seeds, and its runs; None: nothing was run."""
    runs = {rate: by_key.get(at_rate(row, rate).key, []) for rate in RATES}
    most = max(map(len, runs.values()))
    if not most:
        return None
    return min(
        ((rate, found) for rate, found in runs.items() if len(found) == most),
        key=lambda each: statistics.fmean(result["metric"] for result in each[1]),
    )


def tuned_table(rows: list[tuple[Row, list[Result]]]) -> list[str]:
    """Each contender at its best rate, beside the better of the single process and bsp at theirs."""
    by_key = {row.key: found for row, found in rows}
    best = {row: chosen for row in CONTENDERS if (chosen := best_rate(row, by_key))}
    lines = [
        f"| contender | rate | loss | seeds | to dense | loss at {RATES[0]} | kB a step up, down |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, (rate, found) in best.items():
        alike = [best[base][1] for base in BASES if base in best and base.script == row.script]
        losses = [statistics.fmean(result["metric"] for result in runs) for runs in alike]
        metric = statistics.fmean(result["metric"] for result in found)
        gap = cost(metric, min(losses), "loss") if losses else "-"
        kilobytes = ", ".join(shown(mean(found, name), 1, 1e-3) for name in ("step_bytes_up", "step_bytes_down"))
        own = mean(by_key.get(at_rate(row, RATES[0]).key, []), "metric")
        cells = [row.name, rate, shown(metric, 3), seeds(found, 3), gap, shown(own, 3), kilobytes]
        lines.append(f"| {' | '.join(cells)} |")
    dense = (
        "Dense: the better of single process and bsp at their best rates; beside Muon, the single process with Muon."
    )
    return [*lines, "", dense]


def plot_specs(campaign: Campaign, commit: str, path: Path) -> None:
    """Ratio, both ways together, against what it costs beside dense bsp; a colour for each recipe."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = spec_points([(row, campaign.found(commit, row)) for row in campaign.preset.rows])
    dense = next(metric for row, _, metric, *_ in points if row.key == DENSE.key)
    figure, axis = pyplot.subplots(figsize=(10, 5.5), layout="constrained")
    by_recipe: dict[str, list[tuple[float, float, str]]] = {}
    for row, found, metric, up, down in points:
        spec, _, recipe = row.key.partition(", ")
        gap = 100 * (metric / dense - 1) if campaign.task.metric == "loss" else 100 * (dense - metric)
        label = f"{spec} ({len(found)})"
        by_recipe.setdefault(recipe or "H = 1, s = 1", []).append((2 / (1 / up + 1 / down), gap, label))
    for recipe, own in sorted(by_recipe.items()):
        xs, ys, labels = zip(*sorted(own), strict=True)
        axis.plot(xs, ys, marker="o", linewidth=0, label=recipe)
        for x, y, label in zip(xs, ys, labels, strict=True):
            axis.annotate(label, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    unit = "%" if campaign.task.metric == "loss" else "points"
    axis.set(xscale="log", xlabel="bytes of dense bsp / bytes, up and down together")
    axis.set(
        ylabel=f"{campaign.task.metric} behind dense bsp, {unit} (seeds)",
        title=f"{campaign.task.name}, {campaign.preset.workers} workers",
    )
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


def markdown(campaign: Campaign, commit: str) -> str:
    """The table of one commit, and below it what its figures are worth nothing without."""
    rows = [(row, campaign.found(commit, row)) for row in campaign.preset.rows]
    rows = [(row, found) for row, found in rows if found]
    task = campaign.task
    if not rows:
        return f"{campaign.path} holds no run of {task.name}, {campaign.steps} steps, at commit {commit}"
    if campaign.preset.specs:
        lines = spec_table(rows, task.metric)
    elif campaign.preset.tuned:
        lines = tuned_table(rows)
    else:
        lines = accuracy_table(rows) if task.metric == "accuracy" else loss_table(rows)
    runs = [result for _, found in rows for result in found]
    holds = sorted({f"{result['hold_ms']:.0f}" for result in runs if "hold_ms" in result})
    facts, loads, dates = runs[-1], [run["load"] for run in runs], [run["date"][:16] for run in runs]
    lines += [
        "",
        f"{task.name}, {campaign.steps} steps, {campaign.preset.workers} workers, one thread each; commit {commit}; "
        f"{facts['machine']}, load {min(loads)} to {max(loads)}; torch {facts['torch']}; {min(dates)} to {max(dates)}. kB "
        "are a worker's mean step after its first, MB the whole run of all workers; wait is a worker's mean total; s is the "
        "whole command" + (f"; held: every chunk for {' or '.join(holds)} ms, each way." if holds else "."),
    ]
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--preset", "name", type=click.Choice(list(PRESETS)), required=True)
@click.option("--workers", type=int, help="the preset's own by default")
@click.option("--task", "task_name", help="of the preset; the first by default")
@click.option("--seeds", "seed_list", default="0,1,2", help="comma-separated")
@click.option("--rows", "pattern", default="*", help="only rows whose name matches, such as '*held' or 'bsp*'")
@click.option("--steps", type=int, help="for quick looks; whole epochs where the script counts those")
@click.option("--again", is_flag=True, help="run what the JSON already holds for this commit")
@click.option("--show", is_flag=True, help="run nothing, print the table")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="as --show, as a PNG; --preset compress")
@click.option("--commit", help="whose runs --show prints; the newest by default")
@click.option("--out", type=click.Path(path_type=Path), help="the JSON; bench/out/PRESET.json by default")
@click.option("--hold-ms", default=0.0, help="of held rows, each way; 0: the median step of bsp, measured first")
@click.option("--limit", "limit_s", type=float, default=3600.0, help="seconds after which a run counts as failed")
def main(
    name: str,
    workers: int | None,
    task_name: str | None,
    seed_list: str,
    pattern: str,
    steps: int | None,
    again: bool,
    show: bool,
    plot_path: Path | None,
    commit: str | None,
    out: Path | None,
    limit_s: float,
    hold_ms: float,
) -> None:
    """Compare sync modes with the same script alone in one process."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    preset = replace(PRESETS[name], workers=workers or PRESETS[name].workers)
    task = next((task for task in preset.tasks if task_name in (None, task.name)), None)
    if task is None:
        raise click.BadParameter(f"--preset {name} has {', '.join(t.name for t in preset.tasks)}", param_hint="--task")
    path = out or launch.OUT / f"{name}.json"
    campaign = Campaign(preset, task, task.rounded(steps or task.steps), path, limit_s, hold_ms)
    if plot_path:
        plot_specs(campaign, commit or campaign.newest_commit(), plot_path)
        return
    if show:
        click.echo(markdown(campaign, commit or campaign.newest_commit()))
        return
    chosen = [row for row in preset.rows if fnmatch.fnmatchcase(row.key, pattern)]
    if not chosen:
        raise click.BadParameter(
            f"no row matches {pattern!r}; {'; '.join(r.key for r in preset.rows)}", param_hint="--rows"
        )
    for seed in map(int, seed_list.split(",")):
        for row in chosen:
            campaign.run(row, seed, again)
    click.echo(f"\n{markdown(campaign, campaign.facts['commit'])}")
    if campaign.failed:
        click.echo("failed: " + "; ".join(campaign.failed), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
