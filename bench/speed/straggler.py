"""How much a worker's step costs while its partner is 4 times slower, against what it costs while both are alike.

    python bench/speed/straggler.py                # every mode, 3 rounds of 40 + 40 steps of the fast worker
    python bench/speed/straggler.py --rows async --rounds 6
    python bench/speed/straggler.py --server slow  # the server on the slowed worker's core, not wherever there is room

Rules
- Two workers of one thread, one core each, train tasks/bytelm.py on halves of the batch; straggler_worker.py slows the second
  one, which burns its core meanwhile. The server is a third process on these two cores, and its work is in every figure.
- The same processes all the time: blocks with both alike and blocks with one slowed take turns. The first steps of a block
  are left out; its figure is the median over the others of the fast worker's step.
- The ratio is that of the medians over blocks, the claim is for async.
- "Wait": in step(), for others. "Queue": ready to run while another thread had its core. Both are means a step.
"""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch
from lab.launch import CommandFailed

WORKER = str(Path(__file__).with_name("straggler_worker.py"))
RATIO_MAX = 1.05  # the claim, for async
SLOWED = 4.0  # times its own step
SETTLE = 8  # steps of each block: the slowed worker is on its way out of a step, updates in flight
FIRST = 20  # steps before the first block: connections, first states, the kernels
POLL_S = 0.1
START_S, BLOCK_S = 240.0, 300.0
PHASES = ("even", "slow")
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
        "step_ms": 1e3 * statistics.median(b["at"] - a["at"] for a, b in pairwise(kept)),
        "partner_ms": 1e3 * statistics.median(partner) if partner else None,
        "computed_ms": 1e3 * statistics.median(step["computed"] for step in kept),
        "wait_ms": 1e3 * statistics.fmean(step["wait_seconds"] for step in kept),
        "queue_ms": 1e3 * (kept[-1]["queued"] - kept[0]["queued"]) / (len(kept) - 1),
        "server_share": server_s / (fast[-1]["at"] - fast[0]["at"]),
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
        for record, core, times in zip(records, cores, (1.0, SLOWED), strict=True):
            env = launch.environment(STRAGGLER_PHASE=str(phase), STRAGGLER_TIMES=str(times))
            command = [sys.executable, "-m", "narrows.worker.command.cli", "--server", f"tcp://127.0.0.1:{port[0]}"]
            with launch.pinned({core}):
                command += ["--record", str(record.path), WORKER, "--steps", "1000000"]
                stack.enter_context(launch.started(command, env))
        fast, slow = records
        until(lambda: fast.look() >= FIRST, START_S, "the first steps")
        blocks = []
        for number in range(2 * rounds):
            say(PHASES[number % 2])
            begin, before = fast.look(), processor_s(serving.pid)
            last = begin + SETTLE + steps + 1
            until(lambda last=last: fast.look() >= last, BLOCK_S, "a block")  # type: ignore[misc]
            spent, end = processor_s(serving.pid) - before, fast.look()
            slow.look()
            blocks.append({"phase": PHASES[number % 2]} | block_figures(fast.steps[begin:end], slow.steps, spent))
        say("end")
        return blocks


def until(done: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took longer than {limit_s:.0f} s")
        time.sleep(POLL_S)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def of(blocks: Sequence[Result], phase: str, name: str) -> list[float]:
    return [block[name] for block in blocks if block["phase"] == phase and block[name] is not None]


def ratio(blocks: Sequence[Result]) -> float:
    """The ratio of the fast worker's step with a slowed partner to that with one like itself."""
    return statistics.median(of(blocks, "slow", "step_ms")) / statistics.median(of(blocks, "even", "step_ms"))


def table(found: dict[str, list[Result]]) -> str:
    lines = ["| mode | fast worker's step, ms: both alike | partner slowed | ratio | by pair of blocks | partner's step, ms "
             "| computed, ms | wait, ms | queue, ms | server, % of a core |", "|---" * 10 + "|"]  # fmt: skip
    for name, blocks in found.items():
        steps = {phase: of(blocks, phase, "step_ms") for phase in PHASES}
        pairs = [slow / even for even, slow in zip(steps["even"], steps["slow"], strict=True)]
        both = {
            what: "{:.1f}, {:.1f}".format(*(scale * statistics.median(of(blocks, phase, what)) for phase in PHASES))
            for what, scale in (
                ("partner_ms", 1),
                ("computed_ms", 1),
                ("wait_ms", 1),
                ("queue_ms", 1),
                ("server_share", 100),
            )
        }
        cells = [name, *(spread(steps[phase]) for phase in PHASES), f"{ratio(blocks):.3f}"]
        cells += [f"{min(pairs):.3f} to {max(pairs):.3f}", *both.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--rows", "pattern", default="*", help=f"of {', '.join(ROWS)}")
@click.option("--rounds", default=3, help="of a block with both alike and one with one slowed")
@click.option("--steps", default=40, help="of the fast worker that a block counts")
@click.option("--server", type=click.Choice(["both", "fast", "slow"]), default="both", help="cores of the server")
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "straggler.json")
def main(pattern: str, rounds: int, steps: int, server: str, out: Path) -> None:
    """Slow one of two workers, and time the other."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise click.ClickException("this needs two cores: one for each worker")
    chosen = {name: flags for name, flags in ROWS.items() if fnmatch.fnmatchcase(name, pattern)}
    if not chosen:
        raise click.UsageError(f"--rows {pattern}: there is none; rows: {', '.join(ROWS)}")
    room = {"both": set(cores), "fast": {cores[0]}, "slow": {cores[1]}}[server]
    found: dict[str, list[Result]] = {}
    for name, flags in chosen.items():
        try:
            found[name] = measure(flags, rounds, steps, cores, room)
        except CommandFailed as error:
            raise click.ClickException(f"{name}: {error}") from None
        facts = launch.facts()
        launch.save(out, facts | {"server": server, "steps": steps, "slowed": SLOWED, "rows": found})
        click.echo(f"{name}: {ratio(found[name]):.3f}")
    click.echo(f"\n{table(found)}\n")
    if "async" in found:
        holds = ratio(found["async"]) <= RATIO_MAX
        click.echo(f"claim, at most {RATIO_MAX} under async: {'holds' if holds else 'MISSED'}")
    click.echo(
        f"{rounds} rounds of {steps} + {steps} steps, pairs: alike, slowed; server on {server} core{'s' * (server == 'both')}; "
        "commit {commit}; {machine}, load {load}; torch {torch}; {date}".format(**facts)
    )


if __name__ == "__main__":
    main()
