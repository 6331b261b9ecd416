"""One of two workers becomes 4 times slower. The bench compares the other worker's step with its step before.

    python bench/speed/straggler.py                # every mode, 3 rounds of 40 + 40 steps of the fast worker
    python bench/speed/straggler.py --rows async --rounds 6
    python bench/speed/straggler.py --server slow  # the server on the slowed worker's core, not wherever there is room
    python bench/speed/straggler.py --local-seconds 2 --train 400 --times 3  # rounds by the clock, beside fixed ones

Rules
- Two workers of one thread, one core each, train tasks/bytelm.py on halves of the batch; straggler_worker.py slows the second
  one, which burns its core meanwhile. The server is a third process on these two cores, and its work is in every figure.
- The same processes all the time: blocks with both alike and blocks with one slowed take turns. The first steps of a block
  are left out; its figure is the median over the others of the fast worker's step.
- The ratio is that of the medians over blocks. The claim is at most 1.05, for async.
- With --local-seconds one worker is slower all the time, and both train to the end: by the clock, so with equal weights, and
  with as many steps a round as the two had by the clock on average. All three runs have as many steps of workers in all.
  Goodput: steps a second of both, over the sum of both alone. Alone: steps over the seconds that Narrows did not take, of the
  same run. The first round, which has one step, is left out, and so is the last.
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

# With --local-seconds: row -> flags; "fixed H" has the mean of the first row's steps in a round.
TIMED_ROWS = {"by the clock": (), "by the clock, equal weights": ("--weigh", "equal"), "fixed H": ()}
CODED = ("--sync", "local", "--compress", "int8")
TRAIN_S = 1800.0

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


def measure(
    flags: Sequence[str], rounds: int, steps: int, cores: Sequence[int], server: set[int], times: float
) -> list[Result]:
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
        for follower, core, slower in zip(records, cores, (1.0, times), strict=True):
            env = launch.environment(STRAGGLER_PHASE=str(phase), STRAGGLER_TIMES=str(slower))
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


def train(flags: Sequence[str], steps: int, times: float, lr: float, seed: int) -> record.Figures:
    """Train the task to the end with one worker that is `times` slower. Raises CommandFailed.

    Args:
        flags: of ps-serve.
        steps: of the run, as step_count() has them.
        times: what a step of the second worker costs, in steps of the first.
        lr: the peak learning rate.
        seed: of the task.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), launch.free_ports(1)
        (folder / "phase").write_text("slow")
        paths = [folder / f"record{index}" for index in range(2)]
        with ExitStack() as stack:
            serving = stack.enter_context(launch.serving(["--workers", "2", *CODED, *flags], port))
            for path, core, slower in zip(paths, cores, (1.0, times), strict=True):
                env = launch.environment(STRAGGLER_PHASE=str(folder / "phase"), STRAGGLER_TIMES=str(slower))
                command = launch.ps_worker("--server", f"tcp://127.0.0.1:{port[0]}", "--record", str(path), WORKER)
                command += [f"--steps={steps}", f"--lr={lr}", f"--seed={seed}"]
                with launch.pinned({core}):
                    stack.enter_context(launch.started(command, env))
            launch.until(lambda: serving.poll() is not None, "the training", TRAIN_S)
        return training_figures([[json.loads(line) for line in path.read_text().splitlines()] for path in paths])


def training_figures(events: Sequence[Sequence[Result]]) -> record.Figures:
    """The figures of a training. `events`: of the record of each worker, the fast one first."""
    kept, alone = list[list[Result]](), 0.0
    steps = [[event for event in mine if event["event"] == "step"] for mine in events]
    last = min(mine[-1]["clock"] for mine in steps)
    for mine in steps:
        kept.append([after for before, after in pairwise(mine) if 1 < before["clock"] < last])
        alone += len(kept[-1]) / sum(step["script_seconds"] for step in kept[-1])
    begin, end = (pick(mine[at]["at"] for mine in kept) for pick, at in ((max, 0), (min, -1)))
    within = [[step for step in mine if begin < step["at"] <= end] for mine in kept]
    rounds = last - 2
    return {
        "goodput": (sum(map(len, within)) / (end - begin) / alone, ""),
        "loss": (events[0][-1]["last"]["loss"], "nats a byte"),
        "steps": (sum(map(len, steps)), "of both"),
        "a round, fast": (len(kept[0]) / rounds, "steps"),
        "a round, slow": (len(kept[1]) / rounds, "steps"),
        "wait, fast": (sum(step["wait_seconds"] for step in kept[0]) / rounds, "s a round"),
        "wait, slow": (sum(step["wait_seconds"] for step in kept[1]) / rounds, "s a round"),
        "seconds": (max(mine[-1]["at"] for mine in steps) - min(mine[0]["at"] for mine in steps), "s"),
    }


def measure_timed(recorder: record.Recorder, pattern: str, arguments: Result, seed: int) -> None:
    """Train each of TIMED_ROWS. Arguments: those of the command line."""
    seconds, times, lr = arguments["local seconds"], arguments["slowed"], arguments["rate"]
    known: Result = {}

    def row(name: str) -> None:
        timed, count = name != "fixed H", arguments["steps"]
        flags = (*TIMED_ROWS[name], "--local-seconds", str(seconds))
        if not timed:  # as many steps in all: of each worker half, in rounds of the mean length
            both = known["a round, fast"] + known["a round, slow"]
            flags, count = ("--local-steps", str(round(both / 2))), round(known["steps"] / 2)
        found = train(flags, count, times, lr, seed)
        known.update({name: value for name, (value, _) in found.items()} if not known else {})
        recorder.add(
            f"{name}, {times:g} times slower", found, seed=seed, arguments=arguments | {"flags": " ".join(flags)}
        )

    record.measure_rows(recorder, TIMED_ROWS, pattern, row)


@click.command(context_settings={"show_default": True})
@record.rows_option(ROWS)
@click.option("--rounds", default=3, help="of a block with both alike and one with one slowed")
@click.option("--steps", default=40, help="of the fast worker that a block counts")
@click.option("--server", type=click.Choice(["both", "fast", "slow"]), default="both", help="cores of the server")
@click.option("--local-seconds", default=0.0, help="of a round: train by the clock instead, to the end")
@click.option("--train", "count", default=400, help="steps of the run, with --local-seconds")
@click.option("--times", default=SLOWED, help="what a step of the slower worker costs, in steps of the other")
@click.option("--lr", default=2e-3, help="peak learning rate, with --local-seconds")
@click.option("--seed", default=0, help="of the task, with --local-seconds")
@record.out_option("speed/straggler")
def main(
    pattern: str, rounds: int, steps: int, server: str, local_seconds: float, count: int, times: float, lr: float,
    seed: int, out: Path,
) -> None:  # fmt: skip
    """Slow one of two workers, and time the other."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise click.ClickException("this needs two cores: one for each worker")
    room = {"both": set(cores), "fast": {cores[0]}, "slow": {cores[1]}}[server]
    recorder = record.Recorder("speed/straggler", out)
    if local_seconds:
        arguments: Result = {"local seconds": local_seconds, "steps": count, "slowed": times, "rate": lr}
        return measure_timed(recorder, pattern, arguments, seed)
    arguments = {"rounds": rounds, "steps": steps, "server's cores": server, "slowed": times}

    def row(name: str) -> None:
        found = figures(measure(ROWS[name], rounds, steps, cores, room, times))
        recorder.add(name, found, seed=0, arguments=arguments)

    record.measure_rows(recorder, ROWS, pattern, row)


if __name__ == "__main__":
    main()
