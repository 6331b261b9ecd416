"""Draws a history: loss by steps, seconds and bytes; how each member's time was spent; its link."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from narrows.ps.glance.history import History
from narrows.ps.glance.lanes import TIMES

MEMBERS = 40  # that are drawn; of a larger run the first
NAMES = {"steps": "optimizer steps", "seconds": "seconds", "bytes": "MB up and down"}
LEGEND: dict[str, Any] = {"frameon": False, "loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3}
COLORS = {"compute_seconds": "#2f6fb3", "encode_seconds": "#e0962f", "wait_seconds": "#d5dbe2"}


def plot(history: History) -> Figure:
    """A figure of two rows."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 6)
    curve = history.curve.columns
    for column, (name, label) in enumerate(NAMES.items()):
        axes = figure.add_subplot(grid[0, 2 * column : 2 * column + 2])
        axes.plot([value / 1e6 if name == "bytes" else value for value in curve[name]], curve["loss"], color="#2f6fb3")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if name == "steps":
            axes.set_ylabel("loss")
    lanes = [history.lanes[path] for path in sorted(history.lanes)][:MEMBERS]
    workers = [lane for lane in lanes if not lane.newest["runs"]]
    spent, moved = figure.add_subplot(grid[1, :3]), figure.add_subplot(grid[1, 3:])
    left = [0.0] * len(workers)
    for name in TIMES:
        values = [lane.total[name] for lane in workers]
        spent.barh(
            [_name(lane.path) for lane in workers], values, left=left, color=COLORS[name], label=name.split("_")[0]
        )
        left = [before + value for before, value in zip(left, values, strict=True)]
    spent.set_xlabel("seconds of all steps")
    spent.invert_yaxis()
    spent.legend(**LEGEND)
    names = [_name(lane.path) for lane in lanes]
    for shift, way, color in ((-0.2, "up", "#2f6fb3"), (0.2, "down", "#8fb7dd")):
        values = [lane.total[f"bytes_{way}"] / 1e6 for lane in lanes]
        bars = moved.barh([at + shift for at in range(len(lanes))], values, height=0.4, color=color, label=f"MB {way}")
        rates = [lane.newest[f"rate_{way}"] * 8 / 1e6 for lane in lanes]
        moved.bar_label(bars, [f" {rate:.3g} Mbit/s" if rate else "" for rate in rates], fontsize=8)
    moved.set_yticks(range(len(lanes)), names)
    moved.set_xlabel("MB over each link, and its measured rate")
    moved.invert_yaxis()
    moved.margins(x=0.2)
    moved.legend(**LEGEND)
    return figure


def _name(path: tuple[int, ...]) -> str:
    return ".".join(map(str, path))
