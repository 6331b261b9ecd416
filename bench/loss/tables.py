"""The tables and pictures of bench/loss/convergence.py, from the runs of one campaign."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from loss.presets import BASES, CONTENDERS, DENSE, RATES, SCRIPT_RATE, SINGLE, Preset, Row, Task, at_rate

Result = dict[str, Any]
POINT = 0.01  # of accuracy: how far below the single process the claim allows a mode's mean


class Runs:
    """The runs of one preset and task, and the JSON that holds them."""

    def __init__(self, preset: Preset, task: Task, steps: int, path: Path) -> None:
        self.preset, self.task, self.steps, self.path = preset, task, steps, path
        self.results: list[Result] = json.loads(path.read_text()) if path.exists() else []

    def found(self, commit: str, row: Row, seed: int | None = None) -> list[Result]:
        """Runs of this row, oldest seed first."""
        wanted = {"task": self.task.name, "row": row.key, "steps": self.steps, "commit": commit}
        if row.flags:
            wanted["workers"] = self.preset.workers
        hits = [
            result for result in self.results if wanted.items() <= result.items() and seed in (None, result["seed"])
        ]
        return sorted(hits, key=lambda result: int(result["seed"]))

    def rows(self, commit: str) -> list[tuple[Row, list[Result]]]:
        """Those that have runs."""
        each = self.preset.rows
        if self.preset.tuned:
            each = tuple(at_rate(row, rate) for row in each for rate in RATES)
        return [(row, found) for row in each if (found := self.found(commit, row))]

    def newest_commit(self) -> str:
        """The commit of the newest run of these steps."""
        mine = [r for r in self.results if r["task"] == self.task.name and r["steps"] == self.steps]
        return str(mine[-1]["commit"]) if mine else "none"


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


def best_of(rows: list[tuple[Row, list[Result]]]) -> dict[Row, tuple[str, list[Result]]]:
    """Contenders that were run, each with its best rate and the runs there."""
    by_key = {row.key: found for row, found in rows}
    return {row: chosen for row in CONTENDERS if (chosen := best_rate(row, by_key))}


def tuned_table(rows: list[tuple[Row, list[Result]]]) -> list[str]:
    """Each contender at its best rate, beside the better of the single process and bsp at theirs."""
    by_key = {row.key: found for row, found in rows}
    best = best_of(rows)
    lines = [
        f"| contender | rate | loss | seeds | to dense | loss at {SCRIPT_RATE} | kB a step up, down |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, (rate, found) in best.items():
        alike = [best[base][1] for base in BASES if base in best and base.script == row.script]
        losses = [statistics.fmean(result["metric"] for result in runs) for runs in alike]
        metric = statistics.fmean(result["metric"] for result in found)
        gap = cost(metric, min(losses), "loss") if losses else "-"
        kilobytes = ", ".join(shown(mean(found, name), 1, 1e-3) for name in ("step_bytes_up", "step_bytes_down"))
        own = mean(by_key.get(at_rate(row, SCRIPT_RATE).key, []), "metric")
        cells = [row.name, rate, shown(metric, 3), seeds(found, 3), gap, shown(own, 3), kilobytes]
        lines.append(f"| {' | '.join(cells)} |")
    dense = (
        "Dense: the better of single process and bsp at their best rates; beside Muon, the single process with Muon."
    )
    return [*lines, "", dense]


def plot_specs(campaign: Runs, commit: str, path: Path) -> None:
    """Ratio, both ways together, against what it costs beside dense bsp; a colour for each recipe."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = spec_points(campaign.rows(commit))
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


def plot_tuned(campaign: Runs, commit: str, path: Path) -> None:
    """Loss at the best rate against bytes a step, the mean of up and down; a line where no bytes are counted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 6.5), layout="constrained")
    best = best_of(campaign.rows(commit))
    for place, row in enumerate(sorted(best, key=lambda row: (bool(row.script), mean(best[row][1], "metric") or 0.0))):
        rate, found = best[row]
        loss, colour = mean(found, "metric") or 0.0, "C1" if row.script else "C0"
        ways = [each for name in ("step_bytes_up", "step_bytes_down") if (each := mean(found, name))]
        label: dict[str, Any] = {"text": f"{row.name} ({rate})", "fontsize": 7, "color": colour}
        if ways:
            at = (statistics.fmean(ways) / 1e3, loss)
            left = at[0] > 1e3 or (place % 2 and at[0] > 10)  # neighbours have theirs on either side
            axis.plot(*at, marker="o", color=colour)
            axis.annotate(
                xy=at,
                textcoords="offset points",
                xytext=(-6 if left else 6, -2),
                ha="right" if left else "left",
                **label,
            )
        else:
            axis.axhline(loss, color=colour, linewidth=0.7, linestyle="--")
            axis.annotate(
                xy=(0.99 - 0.3 * (place % 2), loss),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                **label,
            )
    axis.set(xscale="log", xlabel="kB a step of a worker, mean of up and down", ylabel="held-out loss after 400 steps")
    axis.set(title=f"{campaign.task.name}, {campaign.preset.workers} workers, each at its best peak rate (in brackets)")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def markdown(campaign: Runs, commit: str) -> str:
    """The table of one commit, and below it what its figures are worth nothing without."""
    rows, task = campaign.rows(commit), campaign.task
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
