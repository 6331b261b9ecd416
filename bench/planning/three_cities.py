"""From probe to plan to run in the lab: five machines in three cities, by the commands that a user types.

    python bench/planning/three_cities.py  # ps-probe on all, ps-plan, then the printed commands: about three minutes
    python bench/planning/three_cities.py --steps 20

Rules
- Each machine is a host of the lab with 1 Gbit/s to its city's switch. Cities are joined by the links of CITIES.
- Commands are run as they are printed, by bash. All machines share one folder, so that each has plan.json.
- All of them share the cores of this one: seconds are those of a busy machine. Lines and losses are those of the run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, netns
from lab.link import Way

TASK = launch.ROOT / "bench" / "tasks" / "bytelm.py"
INSIDE = Way(1000e6, 0.0001)
# (machines, the city's way to what joins the cities): Leipzig and Oslo 100 Mbit/s and 12 ms, both to Porto 20 Mbit/s and 36 ms.
CITIES = {"leipzig": (2, Way(100e6, 0.006)), "oslo": (2, Way(100e6, 0.006)), "porto": (1, Way(20e6, 0.03))}
SCRIPT = "train.py"  # in the folder: a link to TASK
BATCH, PARAMETERS, PORT = 30, "1.32e6", 5600
PROBE_S, PLAN_S, CALM_S = 400.0, 60.0, 0.2
PROGRESS = re.compile(r"\[ *\d+\.\d s\] |.* \.\.\.$")


@contextmanager
def cities() -> Iterator[dict[str, netns.Host]]:
    """Machines by name: each behind its city's switch, which is behind one between the cities."""
    with netns.Lab() as net:
        middle, found = net.host(), {}
        for city, (machines, way) in CITIES.items():
            switch = net.host()
            net.join(switch, middle, way)
            device = f"wan{len(net.links) - 1}"
            for number in range(machines):
                found[f"{city}-{number}"] = host = net.host()
                net.join(host, switch, INSIDE)
                netns.ip("-n", middle.netns, "route", "add", host.address, "dev", device, "congctl", net.congestion)
        yield found


class Shell:
    """Runs lines of bash on hosts, in one folder, and prints each with what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = launch.environment(PATH=path)

    def start(self, host: netns.Host, line: str) -> subprocess.Popen[Any]:
        with (self.folder / f"{host.netns}-{len(host.processes)}.log").open("wb") as log:
            return host.popen(["bash", "-c", line], stdout=log, stderr=log, cwd=self.folder, env=self.environment)

    def ended(self, name: str, host: netns.Host, line: str, process: subprocess.Popen[Any], deadline: float) -> str:
        """Wait for a command, print what it said without progress lines, and return all of it. Raises CommandFailed."""
        try:
            code: int | str = process.wait(max(CALM_S, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = "none, for it did not end in time"
        said = (self.folder / f"{host.netns}-{host.processes.index(process)}.log").read_text()
        shown = [text for text in said.splitlines() if not PROGRESS.match(text)]
        click.echo("\n".join([f"{name}$ {line}", *shown, f"exit code {code}", ""]))
        if code != 0:
            raise launch.CommandFailed(f"{line} on {name}: exit code {code}")
        return said

    def run(self, lines: Sequence[tuple[str, netns.Host, str]], limit_s: float) -> list[str]:
        """All at once; in the order of `lines`, what each said."""
        deadline, started = time.monotonic() + limit_s, [(*each, self.start(each[1], each[2])) for each in lines]
        return [self.ended(*each, deadline) for each in started]


def printed(said: str) -> list[tuple[str, str]]:
    """(host, command) of what ps-plan printed."""
    found, host = [], ""
    for text in said.splitlines():
        if match := re.fullmatch(r"on (\S+):", text):
            host = match[1]
        elif text.startswith("    ps-"):
            found.append((host, text.strip()))
    return found


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=60, help="of the run")
@click.option("--seconds", default=8.0, help="at most, of a round of ps-probe")
@click.option("--limit", default=500.0, help="seconds of the run")
def main(steps: int, seconds: float, limit: float) -> None:
    """Probe, plan and run."""
    if missing := netns.available():
        raise click.ClickException(missing)
    try:
        with tempfile.TemporaryDirectory() as folder, cities() as hosts:
            shell, first = Shell(Path(folder)), next(iter(hosts))
            (Path(folder) / SCRIPT).symlink_to(TASK)
            share = f"{SCRIPT} --batch {BATCH // len(hosts)} --steps 20"
            there = f"tcp://{hosts[first].address}:{PORT}"
            probes = [
                f"ps-probe --name {name} --insecure --script {shlex.quote(share)} "
                + (
                    f"--join {there}"
                    if name != first
                    else f"--bind {there} --machines {len(hosts)} --seconds {seconds:g}"
                )
                for name in hosts
            ]
            shell.run([(name, host, line) for (name, host), line in zip(hosts.items(), probes, strict=True)], PROBE_S)
            addresses = " ".join(f"--address {name}={host.address}" for name, host in hosts.items())
            script = shlex.quote(f"{SCRIPT} --batch {BATCH} --steps {steps}")
            plan = f"ps-plan network.json --parameters {PARAMETERS} --script {script} --insecure {addresses}"
            (said,) = shell.run([(first, hosts[first], plan)], PLAN_S)
            shell.run([(name, hosts[name], line) for name, line in printed(said)], limit)
            facts = launch.facts()
            click.echo(f"Commit {facts['commit']}; {facts['machine']}, load {facts['load']}; {facts['date'][:16]}.")
    except launch.CommandFailed as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
