"""A frame on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from narrows.ps.command.console import printable
from narrows.ps.glance.cells import LEVELS

BARS = " ▁▂▃▄▅▆▇█"
STRIP = 40  # characters
EVENTS = 6
MEMBERS = 200


def screen(frame: dict[str, Any]) -> Group:
    """The run, its members and its newest events."""
    run = frame["run"]
    about = run.get("summary") or f"--sync {run.get('mode', '?')}, --compress {run.get('compress', '?')}"
    figures = [
        f"clock {frame['clock']}",
        *([f"loss {frame['loss']:.4g}"] if frame["loss"] is not None else []),
        f"{frame['steps_rate']:.3g} steps/s"
        if frame["samples_rate"] is None
        else f"{frame['samples_rate']:.3g} samples/s",
        f"up {size(frame['bytes_up'])}" + (f" ({frame['ratio']:.0f}x less than fp32)" if frame["ratio"] > 1.5 else ""),
        f"down {size(frame['bytes_down'])}",
        f"{frame['seconds']:.0f} s",
        *([f"{frame['left_seconds']:.0f} s left"] if frame["left_seconds"] is not None else []),
        *(["over"] if frame["over"] else []),
    ]
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("member", no_wrap=True)
    table.add_column(f"steps in {frame['cells'] * frame['cell_seconds']:.0f} s", no_wrap=True)
    for name in ("step", "compute", "encode", "wait", "behind", "stale", "up", "down", "round trip", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for member in frame["members"][:MEMBERS]:
        table.add_row(*_row(member, frame["cells"]), style="" if member["live"] else "dim")
    hidden = len(frame["members"]) - MEMBERS
    more = [Text(f"and {hidden} more", style="dim")] if hidden > 0 else []
    events = [
        Text(f"{seconds:8.1f} s  {printable(text)}", style="dim") for seconds, _, text in frame["events"][-EVENTS:]
    ]
    head = [Text(printable(about), style="dim"), Text("   ".join(figures), style="bold")]
    return Group(*head, Text(), table, *more, Text(), *events)


def _row(member: dict[str, Any], cells: int) -> list[Text]:
    step = sum(member["step_seconds"])
    shares = [f"{seconds / step:.0%}" if step else "-" for seconds in member["step_seconds"]]
    indent, kind = "  " * (len(member["path"]) - 1), "cluster of rank" if member["runs"] else "rank"
    name = f"{indent}{kind} {'.'.join(map(str, member['path']))} {printable(member['host'])}"
    texts = [
        f"{name} {member['how']}".rstrip(),
        strip(member["strip"], cells),
        f"{1e3 * step:.3g} ms" if step else "-",
        *shares,
        str(member["lag"]),
        str(member["staleness"]),
        *(f"{8 * each / 1e6:.3g} Mbit/s" if each else "-" for each in member["rate"]),
        f"{1e3 * member['round_trip_seconds']:.3g} ms",
        f"{max(member['busy']):.0%}",
    ]
    return [Text(text) for text in texts]


def strip(cells: dict[str, str] | None, count: int) -> str:
    """The newest cells, as bars: a gap where no step was taken."""
    if cells is None:
        return ""
    steps = cells["steps"].ljust(count, "0")[:count][-STRIP:]
    return "".join(BARS[-(-8 * LEVELS.index(each) // 35)] for each in steps)


def size(value: float) -> str:
    return f"{value / 1e6:.2f} MB" if value < 1e9 else f"{value / 1e9:.2f} GB"
