"""The bench kills each process of a run in turn with `kill -9`, in each mode: exit codes, stalls, lost updates, loss.

    python bench/faults/kills.py  # the whole matrix
    python bench/faults/kills.py --modes ssp,async --roles worker,standby --jobs 1

Rules
- All runs are real commands on this machine: one ps-serve with two shards and one ps-worker with three workers, on digits.
  With a standby a second ps-serve copies the first. In a tree they are a cluster with bsp below a root that has the mode.
- Who is struck is killed at a quarter and at half of the steps: a worker, shard 0, shard 1, ps-serve alone, the standby or the
  cluster's server with all its shards. A standby that was lost or serves is replaced by another before the next strike. Without
  a standby ps-serve, or the server of a cluster, dies once: the workers end with 6, and `--resume` goes on to the last step.
- The updates that each worker was acknowledged are held against those that each shard of who serves last has folded
  (tests/kit/fold_logs.py), on both levels. If a life was ended, they are held against those that it had folded.
- A stall is the longest time in which no worker came to a clock beyond those before. Times are those of ps-worker's record,
  less what the worker that came there had waited for a strike.
- Losses of undisturbed runs are the smallest and the largest of `--seeds` seeds; all other runs have seed 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "../tests")]

from faults.chaos import Worker, children_of
from kit.fold_logs import folded, settled, telling, wrong
from kit.processes import Command, Server, alive, parent, serving, started, until
from lab import launch, record

# digits at a pace. Late in the run workers wait while somebody is still to be killed: whoever takes the place of the one before
# has to start, which takes a busy machine as long as it takes.
PACE_S, LAST = 0.06, 0.8
TASK = f"""
import os, sys, time
sys.path.insert(0, {str(launch.ROOT / "bench" / "tasks")!r})
import digits
plain = digits.record
def record(**values):
    began = time.monotonic()
    while os.path.exists("HOLD") and digits.step_count() > {LAST} * digits.arguments().steps:
        time.sleep({PACE_S})
    held = time.monotonic() - began
    time.sleep({PACE_S})
    plain(**values, held=held)
digits.record = record
digits.main(digits.arguments())
"""
WORKERS, SHARDS = 3, 2
STRIKES = (0.25, 0.5)  # when, as a share of the steps
LOOK_S = 0.05
END_S = 240.0  # of a run
LOST = 6  # the exit code of who has lost the server
SILENT_S = 10  # after which a worker takes a server without a standby for lost
LOCAL_STEPS = 4
NOTE_MAX = 200  # characters of what was wrong
BELOW = ("--sync", "bsp", "--push", "update")
MODES = {
    "bsp": ("--sync", "bsp"),
    "ssp": ("--sync", "ssp", "--compress", "topk:0.11+sign"),
    "async": ("--sync", "async"),
    "local": ("--sync", "local", "--local-steps", f"{LOCAL_STEPS}"),
}


@dataclass(frozen=True)
class Role:
    """Who is killed. `serves`: the run is lost with it, unless it has a standby. `tree`: a cluster below a root."""

    serves: bool = False
    tree: bool = False
    standby: tuple[bool, ...] = (False, True)  # with and without one


ROLES = {
    "nobody": Role(standby=(False,)),
    "a worker": Role(),
    "shard 0": Role(),
    "shard 1": Role(),
    "ps-serve": Role(serves=True),
    "the standby": Role(standby=(True,)),
    "nobody in a tree": Role(tree=True, standby=(False,)),
    "the server of a cluster": Role(serves=True, tree=True),
}


@dataclass(frozen=True)
class Trial:
    """One run of the matrix."""

    mode: str
    role: str
    standby: bool
    seed: int
    steps: int


class Run:
    """One trial. `folder` is for what its processes write. Raises AssertionError where something takes too long."""

    def __init__(self, trial: Trial, folder: Path, stack: ExitStack) -> None:
        self.trial, self.role, self.folder, self.stack = trial, ROLES[trial.role], folder, stack
        self.lives, self.codes = 0, list[str]()
        self.root = self._serve(*self._mode(), "--workers", "1", "--shards", str(SHARDS)) if self.role.tree else None
        self.told = self.newest  # of whom the workers' updates go to
        self.server = self._server()
        self.second = self._standby() if trial.standby else None
        self.struck, self.notes, self.stall_s = 0, list[str](), 0.0
        self.wrong, self.acknowledged, self.loss = list[str](), 0, float("nan")

    # Who takes part.

    def _mode(self) -> Sequence[str]:
        more = ("--push", "update") if self.role.tree and self.trial.mode == "bsp" else ()
        return *MODES[self.trial.mode], *more

    @property
    def newest(self) -> Path:
        return self.folder / f"server{self.lives}"

    def _serve(self, *flags: str) -> Server:
        self.lives += 1
        return self.stack.enter_context(serving(*flags, env=telling(self.newest)))

    def _server(self, *more: str) -> Server:
        above = ("--parent", self.root.address) if self.root else ()
        flags = (
            *(BELOW if self.root else self._mode()),
            *above,
            "--workers",
            str(WORKERS),
            "--shards",
            str(SHARDS),
            *more,
        )
        where = ("--checkpoint-dir", str(self.folder / "checkpoints"), "--checkpoint-every", "0.5")
        server = self._serve(*flags, "--replicas", str(int(self.trial.standby)), *where)
        self.told = self.newest
        return server

    def _standby(self) -> Server:
        return self._serve("--standby", self.server.address)

    # The run.

    def go(self) -> None:
        code, lost = self._train("first"), self.role.serves and not self.trial.standby
        self._look(code, (str(LOST),) if lost and self.struck else ("1",) if self.trial.role == "a worker" else ("0",))
        if lost and self.struck:
            self._judge("first", self.told)
            before = self.reached
            until(lambda: not any(map(alive, self.server.pids)), "the shards to be gone", 60.0)
            self.server = self._server("--resume")
            self._look(self._train("second"), ("0",))
            self.notes.append(f"resumed at {self.began}, from {before}")
        for server in filter(None, (self.server, self.root)):
            self._look(str(server.command.wait(END_S)), ("0",))
        self._judge("second" if lost and self.struck else "first", self.told)
        if self.root is not None:
            self._above()

    def _look(self, code: str, right: Sequence[str]) -> None:
        self.codes.append(code)
        if code not in right:
            self.wrong.append(f"exit code {code}, expected {right[0]}")

    def _train(self, life: str) -> str:
        """All workers to their end; the exit code of ps-worker."""
        told, steps, seed = self.folder / f"{life}.record", str(self.trial.steps), str(self.trial.seed)
        command = ("ps-worker", "-n", str(WORKERS), "--server", self.server.address, "--record", str(told),
                   "--server-timeout", str(SILENT_S))  # fmt: skip
        env = telling(self.folder / life)
        script = self.folder / "task.py"
        hold = self.folder / "hold"
        hold.touch()
        script.write_text(TASK.replace("HOLD", str(hold)))
        clocks = self.trial.steps // (LOCAL_STEPS if self.trial.mode == "local" and self.root is None else 1)
        with started(*command, str(script), "--steps", steps, "--seed", seed, "--batch", "48", env=env) as workers:
            seen, deadline = Worker(0, records=[told]), time.monotonic() + END_S
            strikes = [] if self.struck or self.trial.role.startswith("nobody") else [*STRIKES]
            if self.role.serves and not self.trial.standby:
                strikes = strikes[-1:]
            while workers.process.poll() is None:
                if time.monotonic() > deadline:
                    raise AssertionError(
                        f"the run did not end within {END_S:.0f} s; it was at clock {seen.clock}\n{workers}"
                    )
                seen.look()
                if strikes and seen.clock >= strikes[0] * clocks and self._safe():
                    strikes.pop(0)
                    self._strike(workers)
                if not strikes:
                    hold.unlink(missing_ok=True)
                time.sleep(LOOK_S)
            if strikes:
                self.wrong.append(f"{len(strikes)} strikes were not made")
            self._turn()
            self._read(told)
            return str(workers.process.returncode)

    def _safe(self) -> bool:
        """One fault at a time: a standby that there is to be has all, and whoever was killed is replaced."""
        self._turn()
        server = self.server
        if self.trial.standby and self.second is None:
            self.second = self._standby()
            return False
        return self.second is None or f"{self.second.address} stands by: it has all" in server.command.out

    def _turn(self) -> None:
        """The standby serves, where it does."""
        if self.second is not None and "serves in the place of" in self.second.command.out:
            self.server, self.second, self.told = self.second, None, self.newest

    def _strike(self, workers: Command) -> None:
        time.sleep(0.3)  # who has joined is told of the standby within a tick
        self.struck += 1
        match self.trial.role:
            case "a worker":
                there = children_of(workers.pid)
                forked = [pid for pid in there if parent(pid) in there and alive(pid)]
                os.kill(forked[0], signal.SIGKILL)
            case "shard 0" | "shard 1":
                self.server.kill_shard(int(self.trial.role[-1]))
            case "ps-serve":
                os.kill(self.server.pids[0], signal.SIGKILL)
            case "the server of a cluster":
                self.server.kill()
            case "the standby":
                assert self.second is not None
                self.second.kill()
                server, self.second = self.server, None
                until(lambda: "goes on without one" in server.command.out, str(server.command))

    # The outcome.

    def _read(self, told: Path) -> None:
        """Read from a record the longest stall, the first and the last clock, and the loss."""
        top, moved_s = -1, 0.0
        self.began = -1
        for line in told.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                self.began = event["clock"] if self.began < 0 else self.began
                if event["clock"] > top:
                    stood_s = event["seconds"] - moved_s - event.get("held", 0.0)
                    self.stall_s = max(self.stall_s, stood_s) if top >= 0 else self.stall_s
                    top, moved_s = event["clock"], event["seconds"]
            elif event["event"] == "done":
                self.loss = event["last"].get("loss", self.loss)
        self.reached = top

    def _judge(self, life: str, told: Path) -> None:
        acknowledged = settled(self.folder / life)
        self.acknowledged += len(acknowledged)
        self.wrong += wrong(folded(told), acknowledged, {})

    def _above(self) -> None:
        """Check what the root, the first server of all, has acknowledged to the cluster in all its lives."""
        lives = [self.folder / f"server{life}" for life in range(2, self.lives + 1)]
        # Processes that copy each other: what two of them have is there twice.
        acknowledged = [*dict.fromkeys(row for life in lives for row in settled(life))]
        self.acknowledged += len(acknowledged)
        self.wrong += wrong(folded(self.folder / "server1"), acknowledged, {})


def done(trial: Trial) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        began = time.monotonic()
        row: dict[str, Any] = {"mode": trial.mode, "killed": trial.role, "standby": trial.standby, "seed": trial.seed}
        try:
            run = Run(trial, Path(folder), stack)
            run.go()
        except (AssertionError, OSError) as error:
            return row | {"wrong": [f"{error}"], "codes": [], "seconds": time.monotonic() - began}
        return row | {"times": run.struck, "codes": run.codes, "stall_s": run.stall_s, "loss": run.loss,
                      "acknowledged": run.acknowledged, "wrong": run.wrong, "notes": run.notes,
                      "seconds": time.monotonic() - began}  # fmt: skip


def add(recorder: record.Recorder, row: dict[str, Any], steps: int) -> None:
    """A line of one run. Of a run that did not end, what was wrong."""
    figures: record.Figures = {
        "killed": (row.get("times"), "times"),
        "longest stall": (row.get("stall_s"), "s"),
        "loss": (row.get("loss"), "nats"),
        "acknowledged": (row.get("acknowledged"), "updates"),
        "wrong": (len(row["wrong"]), "updates"),
    }
    told = [f"exit codes {', '.join(row['codes'])}"] * bool(row["codes"]) + row.get("notes", row["wrong"])
    table = f"{row['mode']}: digits, {WORKERS} workers, {SHARDS} shards"
    recorder.add(row["killed"], figures, table=table, seed=row["seed"], note="; ".join(told).replace("\n", " ")[:NOTE_MAX],
                 arguments={"steps": steps, "standby": row["standby"]})  # fmt: skip


def matrix(modes: Sequence[str], roles: Sequence[str], seeds: int, steps: int) -> list[Trial]:
    return [
        Trial(mode, role, standby, seed, steps)
        for mode in modes
        for role in roles
        for standby in ROLES[role].standby
        for seed in range(seeds if role.startswith("nobody") else 1)
    ]


@click.command(context_settings={"show_default": True})
@click.option("--modes", default=",".join(MODES))
@click.option("--roles", default=",".join(ROLES))
@click.option("--steps", default=240, help="of digits")
@click.option("--seeds", default=3, help="of the undisturbed runs")
@click.option("--jobs", default=4, help="runs at a time")
@record.out_option("faults/kills")
def main(modes: str, roles: str, steps: int, seeds: int, jobs: int, out: Path) -> None:
    """Kill each process of a run in turn, in every mode."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    for told, known, name in ((modes, [*MODES], "--modes"), (roles, [*ROLES], "--roles")):
        if unknown := sorted({*told.split(",")} - {*known}):
            raise click.BadParameter(f"{', '.join(unknown)}; there are {', '.join(known)}", param_hint=name)
    trials = matrix(modes.split(","), roles.split(","), seeds, steps)
    wrong = False
    with record.Recorder("faults/kills", out) as recorder, ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(done, trials):
            click.echo(f"{row['mode']}, {row['killed']}, standby {row['standby']}: {row['seconds']:.0f} s", err=True)
            for text in row["wrong"]:
                click.echo(f"    {text}", err=True)
            add(recorder, row, steps)
            wrong |= bool(row["wrong"])
    sys.exit(wrong)


if __name__ == "__main__":
    main()
