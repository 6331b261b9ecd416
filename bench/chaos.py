"""A run in which something dies every so often, beside the same run undisturbed: goodput, stalls, memory and loss.

    python bench/chaos.py                                       # byte GPT, 3 workers, 2 shards, ssp; a failure every 20 s
    python bench/chaos.py --sync bsp --every 10 --seed 1
    python bench/chaos.py --strikes 'kill shard' --steps 200

Rules
- Both runs are real commands on this machine: one ps-serve, and one ps-worker for each worker, all told to make the same number
  of steps. A worker is killed with its ps-worker, a shard alone; who is stopped goes on after STOPPED_S.
- The schedule follows from the seed: when, what, and whom. A worker that was killed comes back after BACK_S, as a spot machine.
- Goodput is the time of the undisturbed run over that of the disturbed one: what was computed twice is no good.
- A stall is the longest time in which no worker's clock moved beyond where the run had been. Clocks are read from the records.
- Memory is the largest shard's resident set, at its most, beside that of the undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import launch
from launch import CommandFailed

TASK = str(launch.ROOT / "bench" / "tasks" / "bytelm.py")
STOPPED_S = 3.0
BACK_S = 5.0
LOOK_S = 0.25
FIRST_S = 8.0  # the first failure, after the first step


def children_of(pid: int) -> list[int]:
    """All that a process has started, and they in turn."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found[1:]


def strike(number: int, *pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass
class Worker:
    """One place of a worker, and who is there. `record`: of all lives so far, and its newest."""

    index: int
    process: subprocess.Popen[Any] | None = None
    records: list[Path] = field(default_factory=list)
    back_s: float = 0.0  # when it comes back, while nobody is there
    clock: int = -1
    read: int = 0  # bytes of the newest record
    last: dict[str, float] = field(default_factory=dict)

    def look(self) -> None:
        """What its newest record has that was not read."""
        if not self.records or not self.records[-1].exists():
            return
        with self.records[-1].open("rb") as file:
            file.seek(self.read)
            text = file.read()
        whole = text.rpartition(b"\n")[0]
        self.read += len(whole) + bool(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                self.clock = event["clock"]
            elif event["event"] == "done":
                self.last = event["last"]


class Run:
    """One run to its end. `strikes`: what may happen, none where it is undisturbed."""

    def __init__(self, flags: Sequence[str], workers: int, shards: int, steps: int, seed: int, limit_s: float) -> None:
        self.flags, self.shards, self.steps, self.seed, self.limit_s = flags, shards, steps, seed, limit_s
        self.workers = [Worker(index) for index in range(workers)]
        self.random = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.top, self.moved_s, self.stall_s, self.memory = -1, 0.0, 0.0, 0
        self.waking: list[tuple[float, int]] = []

    def go(self, strikes: Sequence[str], every_s: float) -> dict[str, Any]:
        """Raises CommandFailed."""
        with tempfile.TemporaryDirectory() as folder:
            self.folder, ready = Path(folder), Path(folder) / "ready"
            command = [sys.executable, "-m", "narrows.ps.command.cli", "--bind", "tcp://127.0.0.1:0", *self.flags]
            command += ["--shards", str(self.shards), "--workers", str(len(self.workers)), "--ready-file", str(ready)]
            with (self.folder / "server.log").open("w+") as said:
                server = subprocess.Popen(
                    [*command, "--checkpoint-dir", "none"],
                    cwd=launch.ROOT,
                    env=launch.environment(),
                    stdout=said,
                    stderr=said,
                )
                try:
                    self._until(ready.exists, server)
                    return self._run(server, ready, strikes, every_s)
                except CommandFailed as error:
                    raise CommandFailed(f"{error}; ps-serve said:\n{launch.tail(said)}") from None
                finally:
                    for worker in self.workers:
                        if worker.process is not None and worker.process.poll() is None:
                            strike(signal.SIGKILL, *children_of(worker.process.pid), worker.process.pid)
                            worker.process.wait()
                    launch.end(server)

    def _until(self, done: Callable[[], bool], server: subprocess.Popen[Any]) -> None:
        deadline = time.monotonic() + launch.SERVER_START_S
        while not done():
            if server.poll() is not None or time.monotonic() > deadline:
                raise CommandFailed("ps-serve did not start")
            time.sleep(0.05)

    def _start(self, worker: Worker, address: str) -> None:
        worker.records.append(self.folder / f"record.{worker.index}.{len(worker.records)}")
        worker.read, worker.back_s = 0, 0.0
        words = ["-m", "narrows.worker.command.cli", "--server", address, "--record", str(worker.records[-1])]
        with (self.folder / f"worker.{worker.index}.log").open("a") as said:
            worker.process = subprocess.Popen(
                [sys.executable, *words, TASK, "--steps", str(self.steps), "--seed", str(self.seed)],
                cwd=launch.ROOT, env=launch.environment(), stdout=said, stderr=said)  # fmt: skip

    def _run(
        self, server: subprocess.Popen[Any], ready: Path, strikes: Sequence[str], every_s: float
    ) -> dict[str, Any]:
        address = json.loads(ready.read_text())["address"]
        for worker in self.workers:
            self._start(worker, address)
        began = next_s = 0.0
        deadline = time.monotonic() + self.limit_s
        while server.poll() is None:
            now = time.monotonic()
            if now > deadline:
                raise CommandFailed(f"the run did not end within {self.limit_s:.0f} s; it was at clock {self.top}")
            self._look(now, ready)
            if self.top >= 0 and not began:
                began, next_s, self.moved_s = now, now + FIRST_S, now
            for wake_s, pid in [each for each in self.waking if each[0] <= now]:
                strike(signal.SIGCONT, pid)
                self.waking.remove((wake_s, pid))
            for worker in self.workers:
                if worker.back_s and now > worker.back_s:
                    self._start(worker, address)
            if strikes and began and now > next_s and self.top < self.steps - 10:
                next_s = now + every_s
                self._strike(self.random.choice(list(strikes)), ready, now)
            time.sleep(LOOK_S)
        took = time.monotonic() - began
        if server.returncode:
            raise CommandFailed(f"ps-serve ended with {server.returncode} at clock {self.top}")
        for worker in self.workers:
            if worker.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(launch.TERMINATE_S)
            worker.look()
        losses = [worker.last["loss"] for worker in self.workers if "loss" in worker.last]
        return {"seconds": took, "stall_s": self.stall_s, "shard_mb": self.memory / 1e6, "struck": dict(self.struck),
                "loss": losses[0] if losses else float("nan"), "clock": self.top}  # fmt: skip

    def _look(self, now: float, ready: Path) -> None:
        for worker in self.workers:
            worker.look()
        top = max(worker.clock for worker in self.workers)
        if top > self.top:
            self.top, self.moved_s = top, now
        elif self.top >= 0 and self.top < self.steps - 1:
            self.stall_s = max(self.stall_s, now - self.moved_s)
        for pid in json.loads(ready.read_text())["shard_pids"]:
            with contextlib.suppress(OSError, IndexError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.memory = max(self.memory, pages * os.sysconf("SC_PAGE_SIZE"))

    def _strike(self, what: str, ready: Path, now: float) -> None:
        how, _, whom = what.partition(" ")
        there = [worker for worker in self.workers if worker.process is not None and worker.process.poll() is None]
        if whom == "shard":
            pid = self.random.choice(json.loads(ready.read_text())["shard_pids"])
            strike(signal.SIGKILL if how == "kill" else signal.SIGSTOP, pid)
        elif len(there) < 2:
            return  # the last would take the run along
        else:
            worker = self.random.choice(there)
            assert worker.process is not None
            below = children_of(worker.process.pid)
            pid = below[-1] if below else worker.process.pid
            if how == "kill":
                strike(signal.SIGKILL, *below, worker.process.pid)
                worker.process.wait()
                worker.back_s = now + BACK_S
            else:
                strike(signal.SIGSTOP, pid)
        if how == "stop":
            self.waking.append((now + STOPPED_S, pid))
        self.struck[what] += 1


STRIKES = ("kill worker", "kill shard", "stop worker", "stop shard")


@click.command(context_settings={"show_default": True})
@click.option("--sync", default="ssp")
@click.option("--compress", default="topk:0.11+sign", help="bsp: dense")
@click.option("--workers", default=3)
@click.option("--shards", default=2)
@click.option("--steps", default=600, help="of the byte GPT")
@click.option("--every", "every_s", default=20.0, help="seconds between two failures")
@click.option("--strikes", default=",".join(STRIKES), help="comma-separated")
@click.option("--seed", default=0)
@click.option("--limit", "limit_s", default=1800.0, help="seconds after which a run counts as failed")
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "chaos.json")
def main(
    sync: str, compress: str, workers: int, shards: int, steps: int, every_s: float, strikes: str, seed: int,
    limit_s: float, out: Path,
) -> None:  # fmt: skip
    """Strike a run every so often, and compare it with the same run undisturbed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    named = strikes.split(",")
    if unknown := sorted(set(named) - set(STRIKES)):
        raise click.BadParameter(f"{', '.join(unknown)}; there are {', '.join(STRIKES)}", param_hint="--strikes")
    flags = ["--sync", sync, *(["--compress", compress] if sync != "bsp" else [])]
    found: dict[str, dict[str, Any]] = {}
    for name, chosen in (("undisturbed", []), ("disturbed", named)):
        found[name] = Run(flags, workers, shards, steps, seed, limit_s).go(chosen, every_s)
    told = {"flags": flags, "workers": workers, "shards": shards, "steps": steps, "every_s": every_s, "seed": seed}
    results = json.loads(out.read_text()) if out.exists() else []
    launch.save(out, [*results, told | launch.facts() | found])
    click.echo("| run | s | longest stall, s | largest shard, MB | loss | struck |\n|---|---|---|---|---|---|")
    for name, row in found.items():
        struck = ", ".join(f"{what} {count}" for what, count in sorted(row["struck"].items())) or "-"
        click.echo(
            f"| {name} | {row['seconds']:.0f} | {row['stall_s']:.1f} | {row['shard_mb']:.0f} | {row['loss']:.3f} | {struck} |"
        )
    goodput = found["undisturbed"]["seconds"] / found["disturbed"]["seconds"]
    click.echo(f"\ngoodput {goodput:.2f} of undisturbed; commit {launch.commit()}")


if __name__ == "__main__":
    main()
