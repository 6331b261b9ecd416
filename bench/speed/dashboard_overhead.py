"""How much looking at a run costs: a step of it with its page and metrics open, and with neither, in turn.

    python bench/speed/dashboard_overhead.py                            # the byte GPT on loopback, 2 workers, 3 rounds
    python bench/speed/dashboard_overhead.py --task digits --workers 4  # short steps: more of them for the same summaries

Rules
- `open`: a visitor reads each frame of the page, one a second, and another one scrapes the metrics every SCRAPE_S. `off`:
  neither flag is given. Both visitors are here, so what they do with what they read takes its time from the workers too.
- A round has one run of each. A step is the median of the slowest worker, after SETTLE steps; the ratio is that of one round.
- The claim is at most RATIO_MAX, by the median over rounds. It counts on a machine that does nothing else.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from narrows.protocols.errors import NarrowsError
from narrows.ps.dashboard.record_reader import frames

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch

RATIO_MAX = 1.01
SETTLE = 20
SCRAPE_S = 5.0
START_S = 120.0  # until the page is there
TASKS = {"bytelm": "bench/tasks/bytelm.py", "digits": "bench/tasks/digits.py"}
FLAGS = ("--sync", "ssp", "--compress", "topk:0.01+int8")


class Visitors:
    """Those who look at a run, from its beginning to its end."""

    def __init__(self, page: int, metrics: int) -> None:
        self.page, self.metrics = page, metrics
        self.over = threading.Event()
        self.frames = self.scrapes = self.bytes = 0
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._look, self._scrape)]
        for thread in self.threads:
            thread.start()

    def _look(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.frames and not self.over.is_set() and time.monotonic() < deadline:
            with suppress(NarrowsError):
                for _ in frames(f"127.0.0.1:{self.page}"):
                    self.frames += 1
            self.over.wait(0.2)

    def _scrape(self) -> None:
        while not self.over.wait(SCRAPE_S):
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=5) as told,
            ):
                self.bytes += len(told.read())
                self.scrapes += 1

    def close(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(10)


def step_s(lines: list[dict[str, Any]]) -> float:
    """The median step of the slowest worker, in seconds."""
    found: list[float] = []
    for worker in {line["local_rank"] for line in lines if line["event"] == "step"}:
        at = [line["seconds"] for line in lines if line["event"] == "step" and line["local_rank"] == worker][SETTLE:]
        found.append(statistics.median(b - a for a, b in pairwise(at)))
    return max(found)


def measure(task: str, workers: int, steps: int, looked: bool, limit_s: float) -> tuple[float, int, int]:
    """Seconds of a step; frames and scrapes that visitors had. Raises CommandFailed."""
    page, metrics = launch.free_ports(2)
    look = ["--dashboard", str(page), "--metrics", str(metrics)] if looked else []
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", str(workers), "--record", str(record)]
        visitors = Visitors(page, metrics) if looked else None
        try:
            launch.run([*command, *FLAGS, *look, TASKS[task], "--steps", str(steps)], limit_s)
        finally:
            if visitors is not None:
                visitors.close()
        seconds = step_s([json.loads(line) for line in record.read_text().splitlines()])
    if visitors is not None and not (visitors.frames and visitors.scrapes):
        raise launch.CommandFailed(
            f"nobody saw the run: {visitors.frames} frames, {visitors.scrapes} scrapes; more --steps"
        )
    return seconds, *((visitors.frames, visitors.scrapes) if visitors is not None else (0, 0))


@click.command(context_settings={"show_default": True})
@click.option("--task", type=click.Choice([*TASKS]), default="bytelm")
@click.option("--workers", default=2)
@click.option("--steps", default=200)
@click.option("--rounds", default=3)
@click.option("--limit", "limit_s", default=300.0, help="seconds after which a run counts as failed")
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "glance.json")
def main(task: str, workers: int, steps: int, rounds: int, limit_s: float, out: Path) -> None:
    """Compare a step that is looked at with one that is not."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for looked in (False, True) if number % 2 else (True, False):
            seconds, seen, scraped = measure(task, workers, steps, looked, limit_s)
            found[looked].append(seconds)
            how = f"open, {seen} frames, {scraped} scrapes" if looked else "off"
            click.echo(f"round {number}, {how}: {1e3 * seconds:.2f} ms")
    ratios = [mine / bare for mine, bare in zip(found[True], found[False], strict=True)]
    ratio = statistics.median(ratios)
    told = {"task": task, "workers": workers, "steps": steps, "flags": FLAGS} | launch.facts()
    results = json.loads(out.read_text()) if out.exists() else []
    launch.save(out, [*results, told | {"open_s": found[True], "off_s": found[False]}])
    verdict = "holds" if ratio <= RATIO_MAX else "fails"
    click.echo(f"open / off: {ratio:.4f} ({min(ratios):.4f} to {max(ratios):.4f}); at most {RATIO_MAX} {verdict}")
    click.echo(f"{task}, {workers} workers; commit {told['commit']}, {told['machine']}, load {told['load']}")


if __name__ == "__main__":
    main()
