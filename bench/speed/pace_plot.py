"""pace.py --join: joins losses and paces to lines of the seconds to a loss, and draws docs/pace.svg."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from lab import record
from lab.record import Line

TARGET, STEPS = 2.1, 384  # the loss that plans are timed to, and the steps of each run
LOSSES = record.RESULTS / "run_jobs.jsonl"
PICTURE = record.ROOT / "docs" / "pace.svg"
QUARTERS = ("at a quarter", "at a half", "at three quarters", "loss")
TABLE = "seconds to a loss of {}, {} workers"
DENSE = {"mode": "bsp"}

# The picture, in its own units.
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 470, 360, 62, 34, 60, 20
COLOURS = (
    "#666", "#bbb", "#c78a00", "#b0413e", "#1f5fa8", "#2a8f5b", "#7a4fa0", "#00868b", "#d06aa6", "#8a6d3b", "#444", "#e07b39",
)  # fmt: skip


class Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def job(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Loss:
    """The loss at the end of a plan's run, and the steps to TARGET; None if the run does not reach TARGET."""

    end: float
    steps: float | None


def curve_steps(losses: Sequence[float], steps: int, target: float) -> float | None:
    """Return the steps to a loss, interpolated between the quarters of a run.

    Args:
        losses: at the end of each quarter.
        steps: of the whole run.

    Returns:
        A quarter of the steps if the first loss is low enough; None if no loss is.
    """
    ends = [steps * (1 + quarter) / len(losses) for quarter in range(len(losses))]
    if losses[0] <= target:
        return ends[0]
    for (low, before), (high, after) in pairwise(zip(ends, losses, strict=True)):
        if after <= target:
            return low + (high - low) * (before - target) / (before - after)
    return None


def loss_of(job: dict[str, Any], workers: int, lines: Sequence[Line]) -> Loss | None:
    """Return the lowest loss of the job's lines, and its steps to TARGET; None if the job has no line."""
    wanted = job | {"workers": workers, "steps": STEPS}
    own = [line for line in lines if "loss" in line.figures and wanted.items() <= line.arguments.items()]
    if not own:
        return None
    best = min(own, key=lambda line: line.figures["loss"].value)
    return Loss(best.figures["loss"].value, curve_steps([best.figures[name].value for name in QUARTERS], STEPS, TARGET))


def paces(lines: Sequence[Line]) -> dict[tuple[int, str, float], Line]:
    """The newest line of each (workers, plan, Mbit/s)."""
    found = {}
    for line in lines:
        if (
            line.link is not None
            and line.table.endswith("at a GPU's pace")
            and line.arguments.get("parameters") == "30.8M"
        ):
            found[int(line.table.split()[0]), line.run, line.link["mbit_per_s"]] = line
    return found


def join(recorder: record.Recorder, plans: Sequence[Named], losses: Path = LOSSES, picture: Path = PICTURE) -> None:
    """Record a line for each plan and link with a pace and a loss, and draw the picture."""
    own, found = record.read(losses), paces(recorder.lines)
    by_name, curves = {plan.name: plan for plan in plans}, dict[tuple[int, str], list[tuple[float, float]]]()
    order = {name: number for number, name in enumerate(by_name)}
    for (workers, name, mbit), line in sorted(
        found.items(), key=lambda each: (each[0][0], order[each[0][1]], each[0][2])
    ):
        loss, dense = (loss_of(job, workers, own) for job in (by_name[name].job, DENSE))
        if loss is None or dense is None:
            continue
        seconds = loss.steps * line.figures["step"].value / 1e3 if loss.steps else None
        told: record.Figures = {f"time to {TARGET}": (seconds, "s"), f"steps to {TARGET}": (loss.steps, "")}
        told |= {"loss": (loss.end, "nats a byte"), "over dense": (100 * (loss.end / dense.end - 1), "%")}
        told |= {"utilisation": (line.figures["utilisation"].value, "% of the card")}
        recorder.add(name, told, table=TABLE.format(TARGET, workers), link=line.link, seed=0, note=line.note)
        if seconds:
            curves.setdefault((workers, name), []).append((mbit, seconds))
    picture.write_text(drawn(curves, [plan.name for plan in plans]), "utf-8")


# The picture.


def drawn(curves: dict[tuple[int, str], list[tuple[float, float]]], names: Sequence[str]) -> str:
    """A panel for each number of workers: seconds to the loss by Mbit/s, both logarithmic. `curves`: by (workers, plan)."""
    counts = sorted({workers for workers, _ in curves})
    values = [seconds for points in curves.values() for _, seconds in points] or [1.0]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    shown = [name for name in names if any(name == each for _, each in curves)]
    width, height = LEFT + max(1, len(counts)) * (WIDTH + GAP), HEIGHT + 18 * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for place, workers in enumerate(counts):
        left = LEFT + place * (WIDTH + GAP)
        parts += axes(left, f"{workers} workers", low, high, first=place == 0)
        for name in shown:
            parts += curve(sorted(curves.get((workers, name), [])), left, low, high, COLOURS[names.index(name)])
    for number, name in enumerate(shown):
        y = HEIGHT - 10 + 18 * number
        parts.append(f'<rect x="{LEFT}" y="{y - 6}" width="14" height="4" fill="{COLOURS[names.index(name)]}"/>')
        parts.append(f'<text x="{LEFT + 20}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def at(mbit: float, seconds: float, left: float, low: int, high: int) -> tuple[float, float]:
    """The place of a point."""
    x = left + (WIDTH - 20) * (math.log10(mbit) - math.log10(40)) / (math.log10(6250) - math.log10(40))
    return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(seconds)) / (high - low)


def axes(left: float, title: str, low: int, high: int, first: bool) -> Iterator[str]:
    right, bottom = left + WIDTH - 20, HEIGHT - BOTTOM
    yield f'<text x="{left}" y="20" font-weight="bold">{title}: seconds to a loss of {TARGET}, by Mbit/s</text>'
    yield f'<path d="M{left} {TOP}V{bottom}H{right}" fill="none" stroke="#333"/>'
    for power in range(low, high + 1):
        _, y = at(50, 10.0**power, left, low, high)
        yield f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>'
        if first:
            yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10**power:,}</text>'
    for mbit in (50, 200, 1000, 5000):
        x, _ = at(mbit, 1.0, left, low, high)
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{mbit:,}</text>'


def curve(points: Sequence[tuple[float, float]], left: float, low: int, high: int, colour: str) -> Iterator[str]:
    places = [at(mbit, seconds, left, low, high) for mbit, seconds in points]
    if len(places) > 1:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
