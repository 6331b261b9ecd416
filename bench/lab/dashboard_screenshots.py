"""The page of two cities in the lab, with a straggler and a worker that is killed, in Chromium: pictures, and its figures.

    python bench/lab/dashboard_screenshots.py  # the byte GPT, 100 Mbit/s and 20 ms; pictures to docs/
    python bench/lab/dashboard_screenshots.py --steps 120 --out bench/out

Rules
- Each city has a cluster of two workers; the root is in the first. The second worker of the first city sleeps SLEEP_S a step.
- The second worker of the second city is killed with SIGKILL at a third of the steps. The pictures are taken once it is missed.
- A tile is compared with the frame that the page was sent, and the last frame with the record that ps-serve has written.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from narrows.ps.dashboard.record_reader import RecordReader, frames

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "../tests")]

from kit.browser import Browser, browser, missing
from kit.record_events import figures
from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way

TASK = str(launch.ROOT / "bench" / "tasks" / "bytelm.py")
SLEEP_S = 0.4
READY_S, RUN_S, MISSED_S = 150.0, 900.0, 60.0
LEASE_S = 5
PORT = 5555
# Runs a task of ours with a pause in each step.
SLOWED = """
import runpy, sys, time
from narrows.worker import DistributedOptimizer
step, pause = DistributedOptimizer.step, float(sys.argv[1])
def slowed(self, *args, **named):
    time.sleep(pause)
    return step(self, *args, **named)
DistributedOptimizer.step = slowed
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def until(done: Callable[[], Any], what: str, limit_s: float) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := done()):
        if time.monotonic() > deadline:
            raise CommandFailed(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.1)
    return found


class Cities:
    """The run: its root, its clusters and its workers, each of which has a log in `folder`."""

    def __init__(self, hosts: list[netns.Host], folder: Path, steps: int) -> None:
        self.hosts, self.folder, self.steps = hosts, folder, steps
        self.page = f"http://{hosts[0].address}:{PORT + 50}"
        root = ("--workers", "2", "--sync", "ssp", "--compress", "topk:0.11+sign", "--lease", str(LEASE_S))
        looks = ("--dashboard", f"{hosts[0].address}:{PORT + 50}", "--record", str(folder / "record"))
        self.serve(hosts[0], PORT, "root", *root, *looks)
        for number, host in enumerate(hosts):
            parent = ("--parent", f"tcp://{hosts[0].address}:{PORT}", "--lease", str(LEASE_S))
            self.serve(host, PORT + 10 * (1 + number), f"city{number}", *parent, "--workers", "2", "--sync", "bsp")
        slow = folder / "slowed.py"
        slow.write_text(SLOWED)
        plain = [TASK, "--steps", str(steps)]
        self.workers = [
            self.work(city, *(str(slow), str(SLEEP_S)) if (city, each) == (0, 1) else (), *plain)
            for city in range(2)
            for each in range(2)
        ]

    def start(self, host: netns.Host, name: str, module: str, *words: str) -> Any:
        with (self.folder / f"{name}.log").open("a") as log:
            return host.popen([sys.executable, "-m", module, *words], stdout=log, stderr=log, cwd=launch.ROOT)

    def serve(self, host: netns.Host, port: int, name: str, *flags: str) -> None:
        ready = self.folder / f"{name}.ready"
        bind = ("--bind", f"tcp://{host.address}:{port}", "--insecure", "--checkpoint-dir", "none")
        self.start(host, name, "narrows.ps.command.cli", *bind, "--ready-file", str(ready), *flags)
        until(ready.exists, f"{name}: {(self.folder / f'{name}.log').read_text()[-300:]}", READY_S)

    def work(self, city: int, *words: str) -> Any:
        server = f"tcp://{self.hosts[city].address}:{PORT + 10 * (1 + city)}"
        return self.start(self.hosts[city], f"work{city}", "narrows.worker.command.cli", "--server", server, *words)


class Seen:
    """The frames that a visitor is sent, from the beginning to the end."""

    def __init__(self, host: netns.Host, url: str) -> None:
        self.host, self.url = host, url
        self.last: dict[str, Any] = {}
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with self.host.inside():
            for frame in frames(self.url):
                self.last = frame


def descendants(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(word) for word in path.read_text().split()] if path.exists() else []
    return found + [each for child in found for each in descendants(child)]


def pictures(page: Browser, out: Path) -> None:
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        time.sleep(1.5)  # a frame is drawn in these colours
        (out / f"dashboard-{scheme}.png").write_bytes(page.picture())


def clock_of(page: Browser) -> int:
    tiles = page.run("return [...document.querySelectorAll('#tiles div')].map((each) => each.textContent)")
    (clock,) = [tile for tile in tiles if tile.startswith("clock")]
    return int(re.sub(r"\D", "", clock.split("of")[0]))


def told(run: Cities, out: Path) -> list[str]:
    """Look at the run until it ends, and say what was found."""
    here, found = run.hosts[0], list[str]()
    seen = Seen(here, run.page)
    until(lambda: seen.last.get("clock", 0) >= run.steps // 3, "a third of the steps", RUN_S)
    with here.inside(), browser(1280, 1000) as page:
        page.open(run.page)
        page.until("return document.body.dataset.frameMs")
        curve = page.run("return document.querySelectorAll('.uplot canvas').length")
        found.append(f"opened at clock {seen.last['clock']}: {curve} curves with what was before")
        victim = run.workers[3]
        pid = descendants(victim.pid)[0]
        os.kill(pid, signal.SIGKILL)
        struck = time.monotonic()
        gone = "return document.querySelectorAll('#members tr.gone').length"
        page.until(gone, MISSED_S)
        found.append(f"the killed worker is missed on the page {time.monotonic() - struck:.1f} s later")
        time.sleep(3 * LEASE_S)
        before, began = clock_of(page), time.monotonic()
        page.until(f"return document.querySelector('#tiles').textContent.indexOf('{before:,}') < 0")
        found.append(f"live: the clock moved on the page within {time.monotonic() - began:.2f} s")
        shown, sent = clock_of(page), seen.last["clock"]
        found.append(f"the page shows clock {shown}, the newest frame has {sent}")
        pictures(page, out)
        found.append(f"a frame took {float(page.run('return document.body.dataset.frameMs')):.1f} ms to draw")
        hosts = "return [...new Set(performance.getEntriesByType('resource').map((each) => new URL(each.name).host))]"
        found.append(f"hosts asked: {page.run(hosts)}; complaints: {page.complaints()}")
    until(lambda: seen.last.get("over"), "the end of the run", RUN_S)
    seen.thread.join(10)
    record = RecordReader(str(run.folder / "record"))
    record.read()
    same, last = figures(record.history.frame()), figures(seen.last)
    wrong = [name for name in same if same[name] != last[name]]
    found.append(f"last frame beside the record: {'every figure is equal' if not wrong else f'{wrong} differ'}")
    codes = [worker.wait(60) for worker in run.workers]
    found.append(f"clock {last['clock']}, loss {last['loss']}; exit codes of the workers {codes}")
    return found


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=240)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=launch.ROOT / "docs")
def main(steps: int, out: Path) -> None:
    """Run it, look at it, and print what was found."""
    if lacks := netns.available() or missing():
        raise click.ClickException(lacks)
    try:
        with tempfile.TemporaryDirectory() as folder, netns.pair(Way(100e6, 0.02)) as two:
            for line in told(Cities(two.hosts, Path(folder), steps), out):
                click.echo(f"- {line}")
    except CommandFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"\n{steps} steps; commit {record.commit()}")


if __name__ == "__main__":
    main()
