"""The screens of ps-top: a frame on a terminal, and a list of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.table import Table
from rich.text import Text

from narrows.protocols.errors import printable
from narrows.ps.dashboard.run_table import COLUMNS as RUN_COLUMNS
from narrows.ps.dashboard.run_table import MORE, RunRow, cells
from narrows.ps.dashboard.time_buckets import LEVELS

BARS = " ▁▂▃▄▅▆▇█"
STRIP, STRIP_LEAST = 40, 10  # characters of a strip: at most, at least
EVENTS = 6  # the newest events are shown
MEMBERS = 200  # the first members are shown
COLUMNS = ("step", "compute", "encode", "wait", "behind", "stale", "up", "down", "round trip", "busy")
LISTED = (*RUN_COLUMNS[:-1], *MORE, RUN_COLUMNS[-1])  # columns of a list of runs; the page is last
LEFT_OUT = ("busy", "round trip", "encode", "compute", "stale", "wait", "behind")  # dropped in this order if narrow


def screen(frame: dict[str, Any]) -> Group:
    """Return a frame as text: the run, its members and its newest events."""
    run = frame["run"]
    about = run.get("summary") or f"--sync {run.get('mode', '?')}, --compress {run.get('compress', '?')}"
    about = f"{run['name']}: {about}" if run.get("name") else about
    figures = [
        f"clock {frame['clock']}",
        *([f"loss {frame['loss']:.4g}"] if frame["loss"] is not None else []),
        f"{frame['steps_rate']:.3g} steps/s"
        if frame["samples_rate"] is None
        else f"{frame['samples_rate']:.3g} samples/s",
        f"up {size(frame['bytes_up'])}" + (f" ({frame['ratio']:.0f}x less than fp32)" if frame["ratio"] > 1.5 else ""),
        f"down {size(frame['bytes_down'])}",
        *([f"through a relay {size(frame['relay_bytes'])}"] if frame["relay_bytes"] else []),
        *([_taught(frame)] if any(frame["teacher_bytes"]) or frame["teacher_missed"] else []),
        f"{frame['seconds']:.0f} s",
        *([f"{frame['left_seconds']:.0f} s left"] if frame["left_seconds"] is not None else []),
        *(["over"] if frame["over"] else []),
    ]
    hidden = len(frame["members"]) - MEMBERS
    more = [Text(f"and {hidden} more", style="dim")] if hidden > 0 else []
    more += [Text(_gpu(member), style="dim") for member in frame["members"][:MEMBERS] if member["gpu"][0]]
    more += [Text(_teacher(member), style="dim") for member in frame["members"][:MEMBERS] if member["teacher"]]
    events = [
        Text(f"{seconds:8.1f} s  {printable(text)}", style="dim") for seconds, _, text in frame["events"][-EVENTS:]
    ]
    head = [Text(printable(about), style="dim"), Text("   ".join(figures), style="bold")]
    head += [Text(printable(frame["waits"]), style="bold yellow")] if frame["waits"] else []
    return Group(*head, Text(), MembersTable(frame), *more, Text(), *events)


def run_list(rows: Sequence[RunRow], numbered: bool = False) -> Group:
    """Return several runs as a table, a line for each.

    Args:
        rows: the runs.
        numbered: the first nine lines have the key that opens them.
    """
    if not rows:
        return Group(Text("no run of this user on this machine"))
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in (*["key"] * numbered, *LISTED):
        table.add_column(name, justify="right" if name in ("clock", "loss") else "left", overflow="fold")
    for number, row in enumerate(rows[:MEMBERS], 1):
        texts, key = cells(row), str(number) if number < 10 else ""
        table.add_row(*([Text(key)] if numbered else []), *(Text(texts[name]) for name in LISTED))
    hidden = len(rows) - MEMBERS
    about = ["a digit opens the run of that line; Ctrl-C ends ps-top"] if numbered else []
    about += [f"and {hidden} more"] if hidden > 0 else []
    return Group(table, *(Text(text, style="dim") for text in about))


@dataclass(frozen=True)
class MembersTable:
    """The table of members, as wide as the terminal. A narrow terminal gets a shorter strip, then fewer columns."""

    frame: dict[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        members, cells = self.frame["members"][:MEMBERS], self.frame["cells"]
        names = [_name(member) for member in members]
        figures = [_figures(member) for member in members]
        kept = list(COLUMNS)
        widths = {name: max(map(len, (name, *(row[name] for row in figures)))) for name in kept}

        def room(strip_width: int) -> int:
            """Return the characters that the kept columns leave free; each column has a space on both sides."""
            taken = max(map(len, ("member", *names))) + strip_width + sum(widths[name] for name in kept)
            return options.max_width - taken - 2 * (len(kept) + 2)

        for name in LEFT_OUT:
            if room(STRIP_LEAST) < 0:
                kept.remove(name)
        width = max(STRIP_LEAST, min(STRIP, STRIP + room(STRIP)))
        table = Table(box=None, padding=(0, 1), header_style="dim")
        table.add_column("member", no_wrap=True)
        shown = min(width, cells) * self.frame["cell_seconds"]
        table.add_column(f"steps, {shown:.0f} s"[:width], no_wrap=True)
        for name in kept:
            table.add_column(name, justify="right", no_wrap=True)
        for member, name, row in zip(members, names, figures, strict=True):
            texts = [Text(name), Text(strip(member["strip"], cells, width)), *(Text(row[each]) for each in kept)]
            table.add_row(*texts, style="" if member["live"] else "dim")
        yield table


def _name(member: dict[str, Any]) -> str:
    indent, kind = "  " * (len(member["path"]) - 1), "cluster of rank" if member["runs"] else "rank"
    name = f"{indent}{kind} {'.'.join(map(str, member['path']))} {printable(member['host'])}"
    skipped = f"({member['skipped']:.0f} skipped)" if member["skipped"] else ""
    relayed = f"(met through a relay, {size(member['relay_bytes'])})" if member["relayed"] else ""
    return " ".join(filter(None, (name, member["how"], skipped, relayed)))


def _gpu(member: dict[str, Any]) -> str:
    rank, (launches, replays, graphs, scratch) = ".".join(map(str, member["path"])), member["gpu"]
    shown = (
        f"{graphs} graphs kept, {replays:.0f} replayed; {launches:.0f} kernels launched; scratch memory {size(scratch)}"
    )
    return f"GPU of rank {rank}: {shown}"


def _taught(frame: dict[str, Any]) -> str:
    up, down = map(size, frame["teacher_bytes"])
    missed = f", {frame['teacher_missed']:.0f} batches without" if frame["teacher_missed"] else ""
    return f"teachers: up {up}, down {down}{missed}"


def _teacher(member: dict[str, Any]) -> str:
    rank, figures = ".".join(map(str, member["path"])), member["teacher"]
    moved = f"up {size(figures['bytes_up'])}, down {size(figures['bytes_down'])}"
    return (
        f"teachers of rank {rank}: {moved}; {figures['missed']:.0f} batches without soft targets; "
        f"waited {figures['seconds']:.1f} s"
    )


def _figures(member: dict[str, Any]) -> dict[str, str]:
    """Return the text of each column for one member."""
    step = sum(member["step_seconds"])
    texts = (
        f"{1e3 * step:.3g} ms" if step else "-",
        *(f"{seconds / step:.0%}" if step else "-" for seconds in member["step_seconds"]),
        str(member["lag"]),
        str(member["staleness"]),
        *(f"{8 * each / 1e6:.3g} Mbit/s" if each else "-" for each in member["rate"]),
        f"{1e3 * member['round_trip_seconds']:.3g} ms",
        f"{max(member['busy']):.0%}",
    )
    return dict(zip(COLUMNS, texts, strict=True))


def strip(cells: dict[str, str] | None, count: int, width: int = STRIP) -> str:
    """Return the newest time buckets as bars, with a gap where no step was made."""
    if cells is None:
        return ""
    steps = cells["steps"].ljust(count, "0")[:count][-width:]
    return "".join(BARS[-(-8 * LEVELS.index(each) // 35)] for each in steps)


def size(value: float) -> str:
    return f"{value / 1e6:.2f} MB" if value < 1e9 else f"{value / 1e9:.2f} GB"
