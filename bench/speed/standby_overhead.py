"""How much a standby costs: a step of the byte GPT with one and without, in turn.

    python bench/speed/standby_overhead.py  # two cities, 20 Mbit/s and 60 ms between them
    python bench/speed/standby_overhead.py --link loopback --rounds 5  # everything on this machine
    python bench/speed/standby_overhead.py --where far  # the standby is in the other city, too
    python bench/speed/standby_overhead.py --apart  # workers share one core, the server and its standby another

Rules
- The server and a worker are on one machine of the first city, another worker in the second. `near`: the standby is a machine
  of the first city, 1 Gbit/s and 1 ms away. `far`: it is the machine in the second city, so that all it copies crosses the
  link between the cities, once more. On loopback all is one host.
- A round runs each of these once. A step is the median of a run's own, of the slower worker, after SETTLE steps; the ratio is
  that of two runs of one round. Medians over rounds, the least and the greatest are shown.
- All hosts share the cores of this machine: the standby, which does all that the server does, takes its time from the workers.
  With --apart it takes none of it: what is left is what waiting for it costs.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders.wan import LINKS, PORT, SETTLE, TASK, serve, steps_of
from lab import launch, netns
from lab.launch import CommandFailed
from lab.link import Way

WHOLE_S = 60.0  # until the standby has all
PLACES = {"none": -1, "near": 1, "far": 2}  # the host of the standby


def measure(where: str, link: str, flags: list[str], steps: int, limit_s: float, apart: bool) -> float:
    """Seconds of a step. Raises CommandFailed."""
    way, cores = LINKS[link], sorted(os.sched_getaffinity(0))
    servers, others = ({cores[0]}, {*cores[1:]}) if apart else ({*cores}, {*cores})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if way is None:
            hosts = [stack.enter_context(netns.Lab()).host()] * 3
            hosts[0].address = "127.0.0.1"
        else:
            near = Way(1e9, 0.001)
            hosts = stack.enter_context(netns.star([near, near, Way(way.rate, way.delay_s)])).hosts
        server = f"tcp://{hosts[0].address}:{PORT}"
        with launch.pinned(servers):
            serve(hosts[0], PORT, ["--workers", "2", "--replicas", str(int(where != "none")), *flags], folder, "server")
        if where != "none":
            host = hosts[PLACES[where]]
            command = [sys.executable, "-m", "narrows.ps.command.cli", "--standby", server, "--insecure"]
            command += ["--bind", f"tcp://{host.address}:{PORT + 100}", "--checkpoint-dir", "none"]
            with (folder / "standby.log").open("w") as log, launch.pinned(servers):
                host.popen(command, stdout=log, stderr=log, cwd=launch.ROOT)
        workers = []
        for rank, host in enumerate((hosts[0], hosts[2])):
            command = [sys.executable, "-m", "narrows.worker.command.cli", "--server", server]
            command += ["--record", str(folder / f"record{rank}"), TASK, "--steps", str(steps)]
            with (folder / f"worker{rank}.log").open("w") as log, launch.pinned(others):
                workers.append(host.popen(command, stdout=log, stderr=log, cwd=launch.ROOT))
        deadline, whole = time.monotonic() + limit_s, 0
        while any(worker.poll() is None for worker in workers):
            if time.monotonic() > deadline:
                raise CommandFailed(f"a run with a standby {where} took longer than {limit_s:.0f} s")
            if where != "none" and not whole and "it has all" in (folder / "server.log").read_text():
                whole = len(steps_of(folder / "record1"))
            time.sleep(0.2)
        if codes := [worker.returncode for worker in workers if worker.returncode]:
            raise CommandFailed(f"a worker ended with {codes[0]}: {(folder / 'worker0.log').read_text()[-800:]}")
        if where != "none" and not 0 < whole < steps // 2:
            raise CommandFailed(f"the standby had all after {whole} of {steps} steps: too late, or never")
        found = [steps_of(folder / f"record{rank}")[max(SETTLE, whole) : -1] for rank in range(2)]
        return max(float(statistics.median(b["seconds"] - a["seconds"] for a, b in pairwise(own))) for own in found)


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


@click.command(context_settings={"show_default": True})
@click.option("--link", type=click.Choice([*LINKS]), default="20mbit", help="between the cities")
@click.option("--where", type=click.Choice(["near", "far", "both"]), default="near")
@click.option("--sync", default="ssp")
@click.option("--compress", default="topk:0.01+int8")
@click.option("--apart", is_flag=True, help="servers and standby have a core of their own")
@click.option("--shards", default=2)
@click.option("--steps", default=150)
@click.option("--rounds", default=3)
@click.option("--limit", "limit_s", default=300.0, help="seconds after which a run counts as failed")
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "standby.json")
def main(
    link: str,
    where: str,
    sync: str,
    compress: str,
    apart: bool,
    shards: int,
    steps: int,
    rounds: int,
    limit_s: float,
    out: Path,
) -> None:
    """Compare a step with a standby and without."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    places = ["none", *(("near", "far") if where == "both" else (where,))]
    flags = ["--sync", sync, "--compress", compress, "--shards", str(shards)]
    found: dict[str, list[float]] = {place: [] for place in places}
    for round_ in range(rounds):
        for place in places[:: -1 if round_ % 2 else 1]:
            found[place].append(measure(place, link, flags, steps, limit_s, apart))
    click.echo("| standby | step, ms | times without |\n|---|---|---|")
    for place, own in found.items():
        ratios = [mine / bare for mine, bare in zip(own, found["none"], strict=True)]
        click.echo(f"| {place} | {', '.join(f'{1e3 * step:.0f}' for step in own)} | {shown(ratios)} |")
    told = {"link": link, "flags": flags, "steps": steps, "apart": apart} | launch.facts()
    results = json.loads(out.read_text()) if out.exists() else []
    launch.save(out, [*results, told | {"step_s": found}])
    click.echo(f"\n{link}, {' '.join(flags)}; commit {told['commit']}, {told['machine']}, load {told['load']}")


if __name__ == "__main__":
    main()
