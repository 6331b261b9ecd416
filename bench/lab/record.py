"""The results of benchmarks as data: a line of JSON for each run, in bench/results/NAME.jsonl.

How it works
- A script makes a `Recorder` before it measures anything: the commit, the machine and the load of that moment belong to
  all of its lines. `Recorder.add` appends a line as soon as a run has ended, so that an interrupted campaign keeps what it has.
- `read` checks each line of a file. `markdown` makes a table of lines: for the terminal at the end of a script, and for
  docs/results.md and README.md by bench/report.py.
- Lines that differ in their seed alone are one row of a table: the median, the smallest and the largest of their figures. Of
  each seed the newest commit counts, which is that of the last line in the file.
- A line that was recorded while the machine was busy has `busy`: its seconds mean little, its losses and bytes do not suffer.
"""

from __future__ import annotations

import datetime
import fnmatch
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

import click
from lab.launch import CommandFailed
from lab.link import Way

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
BUSY = 0.5  # load for each core, as a bench begins: above it the machine has other work
NOT_TOLD = "-"
TIMES = {"s", "ms", "min"}  # units, or parts of one, that depend on what else the machine does

Scalar = str | int | float | bool | None
Figures = dict[str, tuple[float | None, str]]  # of a run: value and unit
Command = TypeVar("Command", bound=Callable[..., Any])


class RecordError(Exception):
    """A line is no result. The text names the file and the line."""


@dataclass(frozen=True)
class Figure:
    """One number of a run. `unit`: "ms", "kB", "nats a byte", or "" for a ratio. `note`: a word on how it came about."""

    value: float
    unit: str = ""
    note: str = ""

    @property
    def timed(self) -> bool:
        return bool(TIMES & set(self.unit.replace("/", " ").split()))


@dataclass(frozen=True)
class Line:
    """One run. null, where nobody knows; `source`: "run", or "archive" for a figure of docs/archive/."""

    bench: str  # the script, in bench/ and without .py: "speed/compressors"
    run: str  # what ran: the first cell of its row
    figures: dict[str, Figure]
    table: str = ""  # the heading of the table that it belongs to
    beside: str = ""  # the run of that table with which its first figure is compared
    best_of: str = ""  # the argument of which a table shows the value with the lowest first figure alone
    seed: int | None = None
    link: dict[str, float] | None = None  # "mbit_per_s" and "delay_ms", one way
    arguments: dict[str, Scalar] = field(default_factory=dict)
    source: str = "run"
    note: str = ""
    commit: str | None = None
    date: str | None = None
    machine: dict[str, Scalar] | None = None  # "cpu", "cores", "ram_gb"
    load: float | None = None  # of the last minute, as the bench began
    busy: bool | None = None
    python: str | None = None
    torch: str | None = None

    def told(self) -> dict[str, Any]:
        """The line as JSON has it: without fields that say nothing, but with facts that are not known."""
        always = {each.name for each in fields(self)} - {"table", "beside", "best_of", "note", "arguments"}
        told = {name: value for name, value in asdict(self).items() if value or name in always}
        told["figures"] = {
            name: {key: value for key, value in asdict(figure).items() if value or key == "value"}
            for name, figure in self.figures.items()
        }
        return told


TYPES = get_type_hints(Line)


def line_of(text: str) -> Line:
    """Parse one line. Raises ValueError with the end of a sentence that names the line."""
    told = json.loads(text)
    if not isinstance(told, dict):
        raise ValueError("is no object")
    if unknown := told.keys() - TYPES.keys():
        raise ValueError(f"has the unknown field {min(unknown)!r}; fields are {', '.join(TYPES)}")
    for name in ("bench", "run", "figures"):
        if not told.get(name):
            raise ValueError(f"has no {name}")
    for name, value in told.items():
        kinds = get_args(TYPES[name]) if isinstance(TYPES[name], UnionType) else (TYPES[name],)
        allowed = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
        if not isinstance(value, (*allowed, int) if float in allowed else allowed):
            raise ValueError(f"has {name} {value!r}, which is no {' or '.join(kind.__name__ for kind in allowed)}")
    figures: dict[str, Figure] = {}
    for name, figure in told["figures"].items():
        value = figure.get("value") if isinstance(figure, dict) else None
        if not isinstance(value, int | float) or not figure.keys() <= {"value", "unit", "note"}:
            raise ValueError(f"has the figure {name!r} as {figure!r}; a figure is an object of value, unit and note")
        figures[name] = Figure(**figure)
    return Line(**told | {"figures": figures})


def read(path: Path) -> list[Line]:
    """The lines of a file, none where there is no such file. Raises RecordError."""
    found = []
    for number, text in enumerate(path.read_text("utf-8").splitlines() if path.exists() else [], 1):
        try:
            found.append(line_of(text))
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}, line {number} is no JSON: {error}; mend the line or delete it") from None
        except (TypeError, ValueError) as error:
            raise RecordError(f"{path}, line {number} {error}; mend the line or delete it") from None
    return found


def commit() -> str:
    """Short hash of HEAD, with -dirty where tracked files differ from it. Results that are written now are no difference."""
    told = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", ".",
                          ":!bench/results", ":!docs/results.md", ":!README.md"))]  # fmt: skip
    return (told[0] or "unknown") + ("-dirty" if told[1] else "")


def date() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def facts() -> dict[str, Any]:
    """The facts without which a figure is worth nothing, as fields of a Line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.split(":")[-1].strip() for line in lines if "model name" in line), platform.processor())
    cores, load = len(os.sched_getaffinity(0)), round(os.getloadavg()[0], 1)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "commit": commit(),
        "date": date(),
        "machine": {"cpu": processor, "cores": cores, "ram_gb": round(memory / 2**30, 1)},
        "load": load,
        "busy": load > BUSY * cores,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


class Recorder:
    """Appends the lines of one script to a file.

    Args:
        bench: the script, in bench/ and without .py.
        path: of the file. `lines` are those that it has, and those that are added.

    As a context it shows at its end what was added.
    """

    def __init__(self, bench: str, path: Path) -> None:
        self.bench, self.path, self.facts = bench, path, facts()
        self.lines = read(path)
        self.added: list[Line] = []

    def add(self, run: str, figures: Figures, **more: Any) -> Line:
        """Append a line. A figure is a value and a unit; None and NaN are left out. `more`: other fields of Line."""
        known = {name: Figure(float(f"{value:.9g}"), unit) for name, (value, unit) in figures.items()
                 if value is not None and math.isfinite(value)}  # fmt: skip
        now = {"date": date()}
        line = Line(self.bench, run, known, **(self.facts | now | more))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line.told(), ensure_ascii=False) + "\n")
        self.lines.append(line)
        self.added.append(line)
        return line

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.show()

    def found(self, **wanted: Any) -> list[Line]:
        """Lines of this commit with these fields and arguments."""
        mine = [line for line in self.lines if line.commit == self.facts["commit"] and line.source == "run"]
        return [line for line in mine if wanted.items() <= (vars(line) | line.arguments).items()]

    def show(self) -> None:
        """Print the tables of what was added, and where it is."""
        if not self.added:
            return
        for title, lines in by_table(self.added).items():
            click.echo(f"\n{title}\n" if title else "")
            click.echo(markdown(lines))
        click.echo(f"\n{len(self.added)} lines in {self.path}; python -m bench.report puts them on the pages")


def out_option(bench: str) -> Callable[[Command], Command]:
    """The option --out of a script."""
    default = RESULTS / f"{Path(bench).name}.jsonl"
    text = f"JSON lines  [default: bench/results/{default.name}, which the pages are made of]"
    return click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=default, help=text)


def rows_option(rows: Iterable[str]) -> Callable[[Command], Command]:
    """The option --rows of a script."""
    return click.option("--rows", "pattern", default="*", help=f"of {', '.join(rows)}")


def measure_rows(recorder: Recorder, rows: Iterable[str], pattern: str, measure: Callable[[str], object]) -> None:
    """Measure each row whose name matches a pattern, and record it.

    Args:
        recorder: Of the script.
        rows: The names of all rows.
        pattern: Of the names, as a shell has them.
        measure: Measures the row of a name, and records it.

    Raises:
        click.UsageError: No row matches.
        click.ClickException: A command of a row has failed.
    """
    chosen = fnmatch.filter(rows, pattern)
    if not chosen:
        raise click.UsageError(f"--rows {pattern}: there is none; rows: {', '.join(rows)}")
    with recorder:
        for name in chosen:
            try:
                measure(name)
            except CommandFailed as error:
                raise click.ClickException(f"{name}: {error}") from None


# Tables.


def by_table(lines: Iterable[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.table, []).append(line)
    return found


def newest(lines: Sequence[Line]) -> list[Line]:
    """Of each seed the lines of its newest commit. The last in the file are the newest."""
    commits = {line.seed: line.commit for line in lines}
    return [line for line in lines if line.commit == commits[line.seed]]


def groups(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines that differ in seed, commit and figures alone, each group a row. Of `best_of` the best value is left."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(json.dumps([line.run, line.link, line.arguments]), []).append(line)
    best: dict[str, list[Line]] = {}
    for own in map(newest, found.values()):
        rest = {name: value for name, value in own[0].arguments.items() if name != own[0].best_of}
        key = json.dumps([own[0].run, own[0].link, rest])
        if key not in best or (-len(own), first(own)) < (
            -len(best[key]),
            first(best[key]),
        ):  # most seeds, lowest figure
            best[key] = own
    return [*best.values()]


def first(lines: Sequence[Line]) -> float:
    """The median of their first figures."""
    return statistics.median(next(iter(line.figures.values())).value for line in lines)


def shown(value: float, unit: str = "") -> str:
    """Format a number: a loss to three decimals, others to four digits; thousands apart."""
    if unit.startswith("nats"):
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def figure(name: str, lines: Sequence[Line]) -> str:
    found = [line.figures[name] for line in lines if name in line.figures]
    if not found:
        return NOT_TOLD
    least, middle, most = (of(each.value for each in found) for of in (min, statistics.median, max))
    spread = f" ({shown(least, found[0].unit)} to {shown(most, found[0].unit)})" if least < most else ""
    notes = dict.fromkeys(each.note for each in found if each.note)
    return shown(middle, found[0].unit) + spread + "".join(f" ({note})" for note in notes)


def argument(name: str, lines: Sequence[Line]) -> str:
    return cell(lines[0].arguments.get(name))


def link_of(way: Way | None) -> dict[str, float] | None:
    return {"mbit_per_s": way.rate / 1e6, "delay_ms": 1e3 * way.delay_s} if way else None


def link_text(link: dict[str, float] | None) -> str:
    return f"{link['mbit_per_s']:g} Mbit/s, {link['delay_ms']:g} ms" if link else "none"


def machine_text(lines: Sequence[Line]) -> str:
    """What else the machine did while the times of a row were measured; where it has none, any figure."""
    timed = [line for line in lines if any(figure.timed for figure in line.figures.values())] or lines
    loads = [line.load for line in timed if line.busy and line.load is not None]
    if any(line.busy for line in timed):
        return "busy machine" + (f", load {max(loads):g}" if loads else "")
    return "idle machine" if any(line.busy is False for line in timed) else "load not told"


def cell(value: Scalar) -> str:
    match value:
        case None:
            return NOT_TOLD
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
    return f"{value}".replace("|", "/")


def markdown(lines: Sequence[Line]) -> str:
    """A table, a row for each group, and above it what all rows have in common."""
    rows = groups(lines)
    arguments = {name: [own[0].arguments.get(name) for own in rows] for own in rows for name in own[0].arguments}
    apart = [name for name, values in arguments.items() if len(set(values)) > 1]
    links = {link_text(own[0].link) for own in rows}
    units = {name: figure.unit for own in rows for line in own for name, figure in line.figures.items()}
    beside = next((own for own in rows if own[0].run == own[0].beside), None)
    columns: list[tuple[str, Callable[[list[Line]], str]]] = [("run", lambda own: own[0].run)]
    columns += [(name, partial(argument, name)) for name in apart]
    if len(links) > 1:
        columns += [("link", lambda own: link_text(own[0].link))]
    for name, unit in units.items():
        columns += [(f"{name}, {unit}" if unit else name, partial(figure, name))]
    if beside:
        columns += [(f"over {beside[0].run}", lambda own: over(own, beside))]
    columns += [
        ("lines", lambda own: str(len(own))),
        ("commit", lambda own: ", ".join(dict.fromkeys(cell(line.commit) for line in own))),
        ("machine", machine_text),
    ]
    if any(line.note for own in rows for line in own):
        columns += [("note", lambda own: "; ".join(dict.fromkeys(line.note for line in own if line.note)))]
    common = [f"{name} {cell(values[0])}" for name, values in arguments.items() if name not in apart]
    common += [f"link {text}" for text in links if len(links) == 1 and text != "none"]
    table = [[name for name, _ in columns], ["---"] * len(columns), *([of(own) for _, of in columns] for own in rows)]
    above = [f"All rows: {'; '.join(common)}.", ""] if common else []
    return "\n".join([*above, *(f"| {' | '.join(cells)} |" for cells in table)])


def over(own: list[Line], beside: list[Line]) -> str:
    """The first figure of one row over that of another, in percent."""
    return "" if own is beside else f"{round(100 * (first(own) / first(beside) - 1), 1) + 0.0:+.1f} %"
