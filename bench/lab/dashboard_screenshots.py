"""The pictures of the page of a run: two cities in the lab, with a straggler and a worker that is killed, in Chromium.

    python bench/lab/dashboard_screenshots.py  # the byte GPT, 100 Mbit/s and 20 ms; pictures to docs/
    python bench/lab/dashboard_screenshots.py --steps 120 --out bench/out

Each city has a cluster of two workers; the root is in the first. The second worker of the first city sleeps SLEEP_S a step.
The second worker of the second city is killed with SIGKILL at a third of the steps. The pictures are taken once it is missed.
tests/system/test_dashboard.py compares what the page shows with the record.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "../tests")]

from contenders import wan
from kit.browser import Browser, browser, missing
from kit.processes import descendants
from lab import launch, netns
from lab.launch import CommandFailed
from lab.link import Way

SLEEP_S = 0.4
RUN_S, MISSED_S, LEASE_S = 900.0, 60.0, 5
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


def start(hosts: list[netns.Host], folder: Path, steps: int) -> list[Any]:
    """The root, a cluster in each city, and two workers of each, which are returned."""
    page = ("--dashboard", f"{hosts[0].address}:{PORT + 50}", "--lease", str(LEASE_S))
    root = ("--workers", "2", "--sync", "ssp", "--compress", "topk:0.11+sign")
    wan.serve(hosts[0], PORT, [*root, *page], folder, "root")
    slow = folder / "slowed.py"
    slow.write_text(SLOWED)
    workers = []
    for city, host in enumerate(hosts):
        port = PORT + 10 * (1 + city)
        parent = ("--parent", f"tcp://{hosts[0].address}:{PORT}", "--lease", str(LEASE_S))
        wan.serve(host, port, [*parent, "--workers", "2", "--sync", "bsp"], folder, f"city{city}")
        for slept in ([], [str(slow), str(SLEEP_S)] if city == 0 else []):
            words = ("--server", f"tcp://{host.address}:{port}", *slept, wan.TASK, "--steps", str(steps))
            with (folder / f"work{city}.log").open("a") as log:
                workers.append(host.popen(launch.ps_worker(*words), stdout=log, stderr=log, cwd=launch.ROOT))
    return workers


def clock_of(page: Browser) -> int:
    """The clock that the page shows."""
    tiles = page.run("return [...document.querySelectorAll('#tiles div')].map((each) => each.textContent)")
    (clock,) = [tile for tile in tiles if tile.startswith("clock")]
    return int(re.sub(r"\D", "", clock.split("of")[0]))


def pictures(hosts: list[netns.Host], workers: list[Any], steps: int, out: Path) -> None:
    """Wait for a third of the steps, kill a worker, and take a picture in each colour. Raises CommandFailed."""
    with hosts[0].inside(), browser(1280, 1000) as page:
        page.open(f"http://{hosts[0].address}:{PORT + 50}")
        page.until("return document.body.dataset.frameMs")
        deadline = time.monotonic() + RUN_S
        while clock_of(page) < steps // 3:
            if time.monotonic() > deadline:
                raise CommandFailed(f"waited {RUN_S:.0f} s for a third of the steps")
            time.sleep(0.5)
        os.kill(descendants(workers[3].pid)[0], signal.SIGKILL)
        page.until("return document.querySelectorAll('#members tr.gone').length", MISSED_S)
        time.sleep(3 * LEASE_S)  # the curves show what came after it
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            time.sleep(1.5)  # a frame is drawn in these colours
            (out / f"dashboard-{scheme}.png").write_bytes(page.picture())


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=240)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=launch.ROOT / "docs")
def main(steps: int, out: Path) -> None:
    """Run it, and take its pictures."""
    if lacks := netns.available() or missing():
        raise click.ClickException(lacks)
    try:
        with tempfile.TemporaryDirectory() as folder, netns.pair(Way(100e6, 0.02)) as two:
            pictures(two.hosts, start(two.hosts, Path(folder), steps), steps, out)
    except CommandFailed as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
