"""A link gets narrow in the midst of a run: when the coordinator notices, what it proposes, and what a step takes then.

    python bench/planning/replan.py               # 100 to 5 Mbit/s after 40 steps, --replan change after 20 s
    python bench/planning/replan.py --replan say  # only said
    python bench/planning/replan.py --from 'ssp, dense' --after 60
    python bench/planning/replan.py --levels 2    # two clusters of two workers each, the root changes its plan

Rules
- Two hosts of the lab: one has ps-serve and a worker, the other a worker. Both train tasks/bytelm.py on halves of the batch.
- On two levels three hosts: one has the root, each of the others a cluster (`BELOW`) with its two workers, on quarters of the
  batch. Each cluster's link to the root gets narrow.
- A step is the mean of the first worker's between two marks: the drop, the proposal, the clock of the new plan. SETTLE seconds
  after a mark do not count: updates of before it are on their way.
- A plan counts as noticed when ps-serve's record has it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders import wan
from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way
from speed.straggler import Follower

PORT = 5555
WAYS = {
    "ssp, int4": ("--sync", "ssp", "--compress", "int4"),
    "ssp, dense": ("--sync", "ssp"),
    "bsp, dense": ("--sync", "bsp", "--push", "update"),
}
BELOW = ("--sync", "bsp", "--workers", "2", "--replan", "off")  # as README has it
BACKBONE = Way(1e9)  # from the root's host: the links of the clusters alone are narrow
SETTLE_S, POLL_S = 5.0, 0.2
START_S = 240.0


Process = Popen[Any]


@dataclass
class Seen:
    """A run as it was watched: steps so far at each look, and what the server's record said when."""

    steps: Follower
    told_at: Path
    looks: list[tuple[float, int]] = field(default_factory=list)
    told: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def look(self) -> None:
        now = time.monotonic()
        self.looks.append((now, self.steps.look()))
        lines = self.told_at.read_text().splitlines() if self.told_at.exists() else []
        events = [json.loads(line) for line in lines if '"replan"' in line and line.endswith("}")]
        self.told += [(now, event) for event in events if event["event"] == "replan"][len(self.told) :]

    def until(self, done: Callable[[], bool], limit_s: float, what: str) -> float:
        """When it was. Raises CommandFailed."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                raise CommandFailed(f"waited {limit_s:.0f} s for {what}")
            time.sleep(POLL_S)
            self.look()
        return time.monotonic()

    def step_ms(self, begin: float, end: float) -> float:
        inside = [each for each in self.looks if begin + SETTLE_S <= each[0] <= end]
        steps = inside[-1][1] - inside[0][1] if inside else 0
        return 1e3 * (inside[-1][0] - inside[0][0]) / steps if steps else float("nan")


def network(levels: int, way: Way) -> AbstractContextManager[netns.Lab]:
    """The root's host is the last of two, and the first of a star: see `started`."""
    return netns.pair(way) if levels == 1 else netns.star([BACKBONE, *2 * [way]])


def started(net: netns.Lab, levels: int, flags: list[str], folder: Path, log: IO[str]) -> list[Process]:
    """All processes of the run: those that end first come first."""
    told: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": launch.ROOT}

    def serve(host: netns.Host, *more: str) -> Process:
        return host.popen(launch.ps_serve(f"{host.address}:{PORT}", "--insecure", *more), **told)

    def work(host: netns.Host, server: netns.Host, number: int) -> Process:
        command = launch.ps_worker(
            "--server", f"tcp://{server.address}:{PORT}", "--record", str(folder / f"worker{number}")
        )
        return host.popen([*command, wan.TASK, "--steps", "100000"], **told)

    first = ("--record", str(folder / "server"), "--workers", "2", *flags)
    if levels == 1:
        far, near = net.hosts
        root = serve(near, *first)
        return [work(near, near, 0), work(far, near, 1), root]
    near, *cities = net.hosts[:3]
    root = serve(near, *first)
    below = [serve(city, *BELOW, "--parent", f"tcp://{near.address}:{PORT}") for city in cities]
    workers = [work(city, city, 2 * number + each) for number, city in enumerate(cities) for each in range(2)]
    return [*workers, *below, root]


def measure(
    begins: str, levels: int, replan: str, after_s: float, steps: int, way: Way, narrow: float
) -> tuple[list[tuple[str, float, str]], record.Figures, str]:
    """Each stretch, its ms a step and its way; when the plan was noticed and in force; its text. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as temporary, network(levels, way) as net:
        folder = Path(temporary)
        flags = [*WAYS[begins], "--replan", replan, "--replan-after", f"{after_s:g}"]
        with (folder / "log").open("w") as log:
            processes = started(net, levels, flags, folder, log)
        seen = Seen(Follower(folder / "worker0"), folder / "server")
        try:
            begin = seen.until(lambda: seen.steps.look() > 5, START_S, "the first steps")
            drop = seen.until(lambda: seen.steps.look() > steps, START_S, "steps before the drop")
            if seen.told:
                raise CommandFailed(f"a plan before the drop: {seen.told[0][1]['text']}")
            for link in net.links[levels - 1 :]:  # on two levels the first is the root's
                link.change(rate=narrow)
            said = seen.until(lambda: bool(seen.told), 20 * after_s + 60, "a proposal")
            event = seen.told[0][1]
            changed = end = seen.until(lambda: len(seen.told) > 1, 180, "the new plan") if event["changes"] else said
            if event["changes"]:
                end = seen.until(lambda: time.monotonic() > changed + 30, 60, "steps after it")
        except CommandFailed as error:
            raise CommandFailed(f"{error}\n{(folder / 'log').read_text()[-2000:]}") from None
        finally:
            for process in processes:
                launch.end(process)
        rows = [("before the drop", seen.step_ms(begin - SETTLE_S, drop)), ("after it", seen.step_ms(drop, said))]
        rows += [("with plan 2", seen.step_ms(changed, end))] if event["changes"] else []
        ways = (event["from"], event["from"], event["to"])
        times: record.Figures = {"noticed after": (said - drop, "s")}
        times["in force after that"] = (changed - said if event["changes"] else None, "s")
        return [(name, ms, way) for (name, ms), way in zip(rows, ways, strict=False)], times, event["text"]


@click.command(context_settings={"show_default": True})
@click.option("--from", "begins", type=click.Choice([*WAYS]), default="ssp, int4")
@click.option("--levels", type=click.IntRange(1, 2), default=1)
@click.option("--replan", type=click.Choice(["say", "change"]), default="change")
@click.option("--after", "after_s", default=20.0, help="--replan-after")
@click.option("--steps", default=40, help="before the drop")
@click.option("--rate", type=netns.RATE, default="100mbit")
@click.option("--narrow", type=netns.RATE, default="5mbit")
@click.option("--delay", type=netns.TIME, default="10ms", help="one way")
@record.out_option("planning/replan")
def main(
    begins: str,
    levels: int,
    replan: str,
    after_s: float,
    steps: int,
    rate: float,
    narrow: float,
    delay: float,
    out: Path,
) -> None:
    """Show what --replan does when a link gets narrow."""
    if missing := netns.available():
        raise click.ClickException(missing)
    try:
        stretches, times, text = measure(begins, levels, replan, after_s, steps, Way(rate, delay), narrow)
    except CommandFailed as error:
        raise click.ClickException(str(error)) from None
    arguments = {"from": begins, "levels": levels, "replan": replan, "after": after_s, "narrow": narrow / 1e6}
    with record.Recorder("planning/replan", out) as recorder:
        for name, ms, way in stretches:
            recorder.add(name, {"step": (ms, "ms")}, beside=stretches[0][0], table=f"from {begins}, {levels} levels",
                         link=record.link_of(Way(rate, delay)), arguments=arguments, note=way)  # fmt: skip
        recorder.add("the plan", times, table="when a plan is changed", arguments=arguments, note=text)


if __name__ == "__main__":
    main()
