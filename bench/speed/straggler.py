"""One of two workers becomes 4 times slower. The bench compares the other worker's step with its step before.

    python bench/speed/straggler.py                # every mode, 3 rounds of 40 + 40 steps of the fast worker
    python bench/speed/straggler.py --rows async --rounds 6
    python bench/speed/straggler.py --server slow  # the server on the slowed worker's core, not wherever there is room

Rules
- Two workers of one thread, one core each, train tasks/bytelm.py on halves of the batch; straggler_worker.py slows the second
  one, which burns its core meanwhile. The server is a third process on these two cores, and its work is in every figure.
- The same processes all the time: blocks with both alike and blocks with one slowed take turns. The first steps of a block
  are left out; its figure is the median over the others of the fast worker's step.
- The ratio is that of the medians over blocks. The claim is at most 1.05, for async.
- "Wait": in step(), for others. "Queue": ready to run while another thread had its core. Both are means a step.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

WORKER = str(Path(__file__).with_name("straggler_worker.py"))
SLOWED = 4.0  # times its own step
SETTLE = 8  # steps of each block: the slowed worker is on its way out of a step, updates in flight
FIRST = 20  # steps before the first block: connections, first states, the kernels
START_S, BLOCK_S = 240.0, 300.0
PHASES = ("even", "slow")
FIGURES = {"step": "ms", "partner's step": "ms", "computed": "ms", "wait": "ms", "queue": "ms", "server": "of a core"}
TICKS = os.sysconf("SC_CLK_TCK")

ROWS = {
    "async": ("--sync", "async", "--compress", "topk:0.05+int8"),
    "ssp s=1": ("--sync", "ssp", "--compress", "topk:0.05+int8"),
    "bsp": ("--sync", "bsp"),
    "gossip random": ("--sync", "gossip", "--topology", "random", "--compress", "topk:0.05+int8"),
}

Result = dict[str, Any]


class Follower:
    """The steps in a record that is still written."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.steps = path, 0, list[Result]()

    def look(self) -> int:
        """How many there are by now."""
        if self.path.exists():
            with self.path.open("rb") as lines:
                lines.seek(self.offset)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self.offset += len(line)
                    event = json.loads(line)
                    if event["event"] == "step":
                        self.steps.append(event)
        return len(self.steps)


def processor_s(root: int) -> float:
    """Seconds of processor that a process and its children, theirs too, have had."""
    total, left = 0.0, [root]
    while left:
        pid = left.pop()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
        for thread in Path(f"/proc/{pid}/task").iterdir():
            left += map(int, (thread / "children").read_text().split())
    return total


def block_figures(fast: Sequence[Result], slow: Sequence[Result], server_s: float) -> Result:
    """The figures of one block; `server_s`: seconds of processor that the server had in all of it."""
    kept = fast[SETTLE:]
    partner = [b["at"] - a["at"] for a, b in pairwise(slow) if kept[0]["at"] <= b["at"] <= kept[-1]["at"]]
    return {
        "step": 1e3 * statistics.median(b["at"] - a["at"] for a, b in pairwise(kept)),
        "partner's step": 1e3 * statistics.median(partner) if partner else None,
        "computed": 1e3 * statistics.median(step["computed"] for step in kept),
        "wait": 1e3 * statistics.fmean(step["wait_seconds"] for step in kept),
        "queue": 1e3 * (kept[-1]["queued"] - kept[0]["queued"]) / (len(kept) - 1),
        "server": server_s / (fast[-1]["at"] - fast[0]["at"]),
    }


def measure(flags: Sequence[str], rounds: int, steps: int, cores: Sequence[int], server: set[int]) -> list[Result]:
    """The blocks of one run, in turn: even, slow, even, ... Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, port = Path(name), launch.free_ports(1)
        phase = folder / "phase"

        def say(text: str) -> None:
            (folder / "next").write_text(text)
            (folder / "next").replace(phase)

        say("even")
        with launch.pinned(server):
            serving = stack.enter_context(launch.serving(["--workers", "2", *flags], port))
        records = [Follower(folder / f"record{index}") for index in range(2)]
        for follower, core, times in zip(records, cores, (1.0, SLOWED), strict=True):
            env = launch.environment(STRAGGLER_PHASE=str(phase), STRAGGLER_TIMES=str(times))
            command = launch.ps_worker("--server", f"tcp://127.0.0.1:{port[0]}")
            with launch.pinned({core}):
                command += ["--record", str(follower.path), WORKER, "--steps", "1000000"]
                stack.enter_context(launch.started(command, env))
        fast, slow = records
        launch.until(lambda: fast.look() >= FIRST, "the first steps", START_S)
        blocks = []
        for number in range(2 * rounds):
            say(PHASES[number % 2])
            begin, before = fast.look(), processor_s(serving.pid)
            last = begin + SETTLE + steps + 1
            launch.until(lambda last=last: fast.look() >= last, "a block", BLOCK_S)  # type: ignore[misc]
            spent, end = processor_s(serving.pid) - before, fast.look()
            slow.look()
            blocks.append({"phase": PHASES[number % 2]} | block_figures(fast.steps[begin:end], slow.steps, spent))
        say("end")
        return blocks


def figures(blocks: Sequence[Result]) -> record.Figures:
    """Medians over blocks; the ratio is that of the fast worker's steps: with a slowed partner, and with one like itself."""
    found: record.Figures = {}
    for phase in PHASES:
        for name, unit in FIGURES.items():
            values = [block[name] for block in blocks if block["phase"] == phase and block[name] is not None]
            found[f"{name}, {phase}"] = (statistics.median(values) if values else None, unit)
    even, slow = (found[f"step, {phase}"][0] for phase in PHASES)
    assert even and slow
    return {"slowed over even": (slow / even, "")} | found


@click.command(context_settings={"show_default": True})
@record.rows_option(ROWS)
@click.option("--rounds", default=3, help="of a block with both alike and one with one slowed")
@click.option("--steps", default=40, help="of the fast worker that a block counts")
@click.option("--server", type=click.Choice(["both", "fast", "slow"]), default="both", help="cores of the server")
@record.out_option("speed/straggler")
def main(pattern: str, rounds: int, steps: int, server: str, out: Path) -> None:
    """Slow one of two workers, and time the other."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise click.ClickException("this needs two cores: one for each worker")
    room = {"both": set(cores), "fast": {cores[0]}, "slow": {cores[1]}}[server]
    recorder = record.Recorder("speed/straggler", out)
    arguments = {"rounds": rounds, "steps": steps, "server's cores": server, "slowed": SLOWED}

    def row(name: str) -> None:
        found = figures(measure(ROWS[name], rounds, steps, cores, room))
        recorder.add(name, found, seed=0, arguments=arguments)

    record.measure_rows(recorder, ROWS, pattern, row)


if __name__ == "__main__":
    main()
