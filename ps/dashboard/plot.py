"""The pictures of ps-plot: loss by steps, seconds and bytes; time and link of each member; several runs compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

from narrows.ps.dashboard.history import RunHistory
from narrows.ps.dashboard.member_timeline import TIMES

MEMBERS = 40  # the first members are drawn
NAMES = {"steps": "optimizer steps", "seconds": "seconds since the first step", "bytes": "MB up and down"}
LEGEND: dict[str, Any] = {"frameon": False, "loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3}
COLORS = {"compute_seconds": "#2f6fb3", "encode_seconds": "#e0962f", "wait_seconds": "#d5dbe2"}


def plot(history: RunHistory, title: str) -> Figure:
    """A figure of two rows for one record: curves of the loss above, times and links of the members below."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 6)
    figure.suptitle(_title(title, history))
    _losses(figure, grid, {title: history})
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


def compared(histories: Mapping[str, RunHistory]) -> Figure:
    """A figure of one row for several records, by file name: the loss of each by steps, seconds and bytes."""
    figure = Figure(figsize=(12, 4.2 + 0.2 * len(histories)), layout="constrained")
    grid = figure.add_gridspec(1, 6)
    figure.suptitle("loss by steps, seconds and bytes")
    _losses(figure, grid, histories)
    handles, _ = figure.axes[0].get_legend_handles_labels()
    names = [_title(name, history) for name, history in histories.items()]
    figure.legend(handles, names, frameon=False, loc="outside lower center", fontsize=8)
    return figure


def _losses(figure: Figure, grid: GridSpec, histories: Mapping[str, RunHistory]) -> None:
    """Draw the loss of each history into the first row of `grid`, once for each axis of NAMES."""
    curves = {name: history.curve.columns for name, history in histories.items()}
    logarithmic = all(loss > 0 for curve in curves.values() for loss in curve["loss"])
    for column, (name, label) in enumerate(NAMES.items()):
        axes = figure.add_subplot(grid[0, 2 * column : 2 * column + 2])
        for title, curve in curves.items():
            began = curve["seconds"][0] if curve["seconds"] and name == "seconds" else 0.0
            values = [(value - began) / (1e6 if name == "bytes" else 1) for value in curve[name]]
            axes.plot(values, curve["loss"], label=title)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.set_yscale("log" if logarithmic else "linear")
        if name == "steps":
            axes.set_ylabel("loss")


def _title(name: str, history: RunHistory) -> str:
    """The file name of a record, and the mode and SPEC of its run."""
    run = history.run
    about = run.get("summary") or f"--sync {run.get('mode', '?')}, --compress {run.get('compress', '?')}"
    return f"{Path(name).name}: {about}"


def _name(path: tuple[int, ...]) -> str:
    return ".".join(map(str, path))
