"""The bench kills each process of a run with `kill -9`, in each phase of a push: lost updates, and what is left of it.

    python bench/faults/phase_kills.py  # the whole matrix, some 200 kills
    python bench/faults/phase_kills.py --modes bsp --roles "a shard" --jobs 1

Rules
- All runs are real commands on this machine: a ps-serve with two shards, a ps-worker with two workers and another with one.
  All their frames go through shared memory.
- A worker or a shard that comes to the phase stops there by itself (tests/kit/fold_log_hook/sitecustomize.py). The bench kills
  whom the role names, and lets the stopped process go on if that was another one. Each strike comes some clocks later than the
  one before.
- With the fork server of ps-serve the stopped shard is killed too: else nobody would miss it.
- Without a standby the run is lost with ps-serve. The workers end with 6, and `--resume` goes on to the last step.
- The updates that each worker was acknowledged are held against those that each shard has folded (tests/kit/fold_logs.py).
  Where all workers come to their end in bsp or local, the model has to be that of an undisturbed run, bit for bit.
- While the run goes on, ps-serve has as many descriptors as before the strikes, and one for each shard whose fork server is
  gone. No other process has many more than the one that had most: a link of shared memory left by each strike would show.
- After the run there is no process of it, no process that maps its memory, and no socket of its servers; /dev/shm has nothing
  of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "../tests")]

from kit.fold_logs import folded, settled, telling, wrong
from kit.processes import GONE_S, Command, Server, parent, serving, started, until
from lab import record

STEPS, LAST = 110, 10  # steps of a run; a worker waits before the last of them until all strikes are made
EVERY = 3  # passes of a phase of a clock before the first strike
EVERY_EVENT = 60  # the same of a phase of each event
STOPS_S = 0.005  # between two looks for a process that has stopped
END_S = 100.0  # of a run
MORE_MAX = 10  # descriptors of a process for connections that come and go
LOST = "6"  # the exit code of who has lost the server
SHARDS = 2
# A model of some frames of 64 KiB and more for each shard.
SCRIPT = """
import os, sys, time, torch
from narrows.worker import DistributedOptimizer, rank, step_count

torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(rank()))
while step_count() < int(sys.argv[3]):
    while step_count() >= int(sys.argv[2]) and os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    time.sleep(0.005)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""
MODES = {
    "bsp": ("--sync", "bsp"),
    "ssp": ("--sync", "ssp", "--compress", "topk:0.11+sign"),
    "local": ("--sync", "local", "--local-steps", "2"),
}
EXACT = ("bsp", "local")  # modes whose model does not depend on the time
OF_WORKERS = (
    "before it copies a frame into its pool",
    "with a frame in its pool that is not sent",
    "after it has sent a frame",
    "as it opens a frame",
)
OF_SHARDS = (
    *("as it opens a frame", "before a push is in the journal", "after a push is in the journal"),
    *("amid a fold", "after a fold", "before it publishes", "with a frame in its pool that is not sent"),
    *("with a new machine in the journal and the old arrays", "with a new machine in the journal and the new arrays"),
)
OF_JOURNAL = OF_SHARDS[-2:]


@dataclass(frozen=True)
class Role:
    """Who is killed.

    Attributes:
        phases: at which one of them.
        strikes: of a run.
        codes: exit codes of both ps-worker; "": any.
    """

    phases: Sequence[str]
    strikes: int
    codes: tuple[str, str] = ("0", "0")


ROLES = {
    "nobody": Role(("",), 0),
    "a worker": Role(OF_WORKERS, 2, ("1", "0")),
    "ps-worker": Role(OF_WORKERS, 1, ("", "0")),
    "the fork server of ps-worker": Role(OF_WORKERS[:2], 1),
    "a shard": Role(OF_SHARDS, 5),
    "the fork server of ps-serve": Role(OF_SHARDS[1:6:2], 2),
    "ps-serve": Role(OF_SHARDS[1:8:2], 1, (LOST, LOST)),
}


@dataclass(frozen=True)
class Trial:
    """One run."""

    mode: str
    role: str
    phase: str
    steps: int = STEPS


def descriptors(pid: int) -> int:
    """The descriptors that a process has; 0: it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def state(pid: int) -> str:
    """The state of a process, a letter of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def of_folder(folder: Path) -> Iterator[int]:
    """The processes whose working folder this is."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "cwd") == str(folder) and state(int(entry.name)) != "Z":
                yield int(entry.name)


def holders() -> set[int]:
    """Processes that map memory of a run, or have it open."""
    found = set[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            names = [
                entry.joinpath("maps").read_text(),
                *(os.readlink(each) for each in entry.joinpath("fd").iterdir()),
            ]
            if any("memfd:narrows-" in name for name in names):
                found.add(int(entry.name))
    return found


def doors(ports: Sequence[int]) -> list[str]:
    """The names of Unix sockets of servers with these ports."""
    names = {f"@narrows-{port}{end}" for port in ports for end in ("", "-memory")}
    return [
        words[-1] for line in Path("/proc/net/unix").read_text().splitlines() if (words := line.split())[-1] in names
    ]


class Run:
    """One trial. Raises AssertionError where something takes too long."""

    def __init__(self, trial: Trial, folder: Path, stack: ExitStack) -> None:
        self.trial, self.role, self.folder, self.stack = trial, ROLES[trial.role], folder, stack
        self.here = folder / "here"  # the working folder of all processes of this run
        self.here.mkdir()
        self.script, self.hold, self.checkpoints = folder / "script.py", folder / "hold", folder / "checkpoints"
        self.script.write_text(SCRIPT)
        self.hold.touch()
        self.kills, self.acknowledged = 0, 0
        self.wrong, self.left = list[str](), list[str]()
        self.seen, self.ports = set[int](), list[int]()

    def _telling(self, name: str, struck: bool) -> dict[str, str]:
        env = telling(self.folder / name) | {"TMPDIR": str(self.here)}
        if struck and self.trial.phase:
            every = EVERY_EVENT if self.trial.phase in OF_JOURNAL else EVERY
            env |= {"PHASE": self.trial.phase, "STRIKES": str(self.role.strikes), "EVERY": str(every)}
        return env

    def _server(self, name: str, *flags: str) -> Server:
        at = self.trial.role not in ("a worker", "ps-worker", "the fork server of ps-worker")
        where = ("--checkpoint-dir", str(self.checkpoints), "--checkpoint-every", "0.3")
        words = (*MODES[self.trial.mode], "--workers", "3", "--shards", str(SHARDS), "--lease", "2", *where, *flags)
        server = self.stack.enter_context(serving(*words, cwd=self.here, env=self._telling(name, at and not flags)))
        self.ports += range(server.port, server.port + SHARDS)
        return server

    def _workers(self, server: Server, count: int, name: str, struck: bool) -> Command:
        silent_s = "4" if self.trial.role == "ps-serve" else "60"
        script = (self.script, self.hold, self.trial.steps - LAST, self.trial.steps)
        words = f"ps-worker -n {count} --server {server.address} --server-timeout {silent_s}".split()
        return self.stack.enter_context(
            started(*words, *map(str, script), cwd=self.here, env=self._telling(name, struck))
        )

    def go(self) -> None:
        server = self._server("server")
        of_workers = self.trial.role in ("a worker", "ps-worker", "the fork server of ps-worker")
        workers = [self._workers(server, 2, "first", of_workers), self._workers(server, 1, "other", False)]
        told = self.folder / ("first" if of_workers else "server")
        before, first = dict[int, int](), server.pids[0]
        for strike in range(self.role.strikes):
            stopped = self._stopped(told / f"struck-{strike}", server, workers)
            self._look()
            before = before or {pid: descriptors(pid) for pid in self.seen}
            self._strike(stopped, server, workers[0])
        self._look()
        lost = self.trial.role == "ps-serve"
        if before and not lost:
            most = dict.fromkeys(before, max(before.values()) + MORE_MAX)  # some have not met all others yet
            most[first] = before[first] + SHARDS * (self.trial.role == "the fork server of ps-serve")
            until(
                lambda: all(descriptors(pid) <= most[pid] for pid in most), f"no more descriptors than {most}", GONE_S
            )
        self.hold.unlink()
        self._ended(workers, self.role.codes)
        self._judge("server", "first", "other")
        if lost:
            self._gone()
            server = self._server("again", "--resume")
            workers = [self._workers(server, 2, "second", False), self._workers(server, 1, "last", False)]
            self._ended(workers, ("0", "0"))
            self._judge("again", "second", "last")
        self._expect("ps-serve", str(server.command.wait(END_S)), "0")
        said = server.command.out
        if self.trial.role in ("a shard", "the fork server of ps-serve"):
            self._expect("shards that went on", str(said.count("goes on where it was")), str(self.role.strikes))
        self.wrong += [f"ps-serve says {word!r}" for word in ("goes back", "discarded", "Traceback")
                       if self.role.codes == ("0", "0") and word in said + server.command.err]  # fmt: skip
        self._gone()

    def _look(self) -> None:
        self.seen |= {*of_folder(self.here)}

    def _stopped(self, path: Path, server: Server, workers: Sequence[Command]) -> int:
        """Return the pid of the process that has come to the phase."""
        deadline = time.monotonic() + END_S
        while not path.exists() or not path.read_text().endswith("\n"):
            ended = [each for each in (server.command, *workers) if each.process.poll() is not None]
            assert time.monotonic() < deadline, f"nobody came to {self.trial.phase}\n{server.command}"
            assert not ended or self.trial.role == "a worker", f"ended before {path.name}: {ended[0]}\n{server.command}"
            time.sleep(STOPS_S)
        pid = int(path.read_text())
        until(lambda: state(pid) == "T", f"{pid} to stop", END_S)
        return pid

    def _strike(self, stopped: int, server: Server, workers: Command) -> None:
        assert self.seen & holders() and doors(self.ports), "what must be gone in the end is seen while it is there"
        first, *shards = server.pids
        match self.trial.role:
            case "a worker" | "a shard":
                struck = [stopped]
            case "ps-worker":
                struck = [workers.pid]
            case "ps-serve":
                struck = [first]
            case "the fork server of ps-worker":
                struck = [parent(stopped)]
                assert struck != [workers.pid]
            case _:
                struck = [*({parent(pid) for pid in shards} - {first}), stopped]
        for pid in struck:
            os.kill(pid, signal.SIGKILL)
            self.kills += 1
        if stopped in struck and stopped in shards:
            # Without a fork server it imports torch first.
            until(lambda: stopped not in server.pids, "another shard", END_S)
        if stopped not in struck:
            os.kill(stopped, signal.SIGCONT)

    # The outcome.

    def _expect(self, what: str, found: str, right: str) -> None:
        if right and found != right:
            self.wrong.append(f"{what}: {found}, expected {right}")

    def _ended(self, workers: Sequence[Command], codes: Sequence[str]) -> None:
        for each, code in zip(workers, codes, strict=True):
            self._expect("the exit code of ps-worker", str(each.wait(END_S)), code)

    def _judge(self, server: str, *members: str) -> None:
        acknowledged = settled(*(self.folder / each for each in members))
        self.acknowledged += len(acknowledged)
        self.wrong += wrong(folded(self.folder / server), acknowledged, {})

    def _gone(self) -> None:
        """Nothing is left of the processes so far."""

        def left() -> list[str]:
            found = [f"process {pid}" for pid in of_folder(self.here)]
            found += [f"process {pid} that maps its memory" for pid in self.seen & holders()]
            found += [f"socket {name}" for name in doors(self.ports)]
            found += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "narrows" in name]
            return found + [f"{path}" for path in self.here.rglob("*") if path.is_socket()]

        with contextlib.suppress(AssertionError):
            until(lambda: not left(), "nothing to be left", GONE_S)
        self.left += left()

    def model(self) -> bytes:
        """The model that the run has ended with."""
        return (self.checkpoints / "model.safetensors").read_bytes()


def done(trial: Trial, models: dict[str, bytes]) -> dict[str, Any]:
    """Make a run. `models`: of undisturbed runs, by mode."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        row: dict[str, Any] = {"trial": trial, "kills": 0, "acknowledged": 0, "left": []}
        try:
            run = Run(trial, Path(folder).resolve(), stack)
            run.go()
            if trial.role == "nobody":
                models[trial.mode] = run.model()
            elif trial.mode in EXACT and ROLES[trial.role].codes == ("0", "0") and run.model() != models[trial.mode]:
                run.wrong.append("the model is not that of an undisturbed run")
        except (AssertionError, OSError) as error:
            return row | {"wrong": [f"{error}"]}
        return row | {"kills": run.kills, "acknowledged": run.acknowledged, "wrong": run.wrong, "left": run.left}


def matrix(modes: Sequence[str], roles: Sequence[str]) -> list[Trial]:
    """The runs with kills."""
    return [Trial(mode, role, phase) for mode in modes for role in roles for phase in ROLES[role].phases if phase]


def add(recorder: record.Recorder, mode: str, role: str, rows: Sequence[dict[str, Any]]) -> None:
    """Record all runs of a mode and a role as one line."""
    figures: record.Figures = {
        "killed": (sum(row["kills"] for row in rows), "times"),
        "phases": (len(rows), ""),
        "acknowledged": (sum(row["acknowledged"] for row in rows), "updates"),
        "wrong": (sum(len(row["wrong"]) for row in rows), ""),
        "left": (sum(len(row["left"]) for row in rows), "processes, sockets or memory"),
    }
    table = f"{mode}: 3 workers, {SHARDS} shards, all frames in shared memory"
    recorder.add(role, figures, table=table, arguments={"steps": STEPS})


@click.command(context_settings={"show_default": True})
@click.option("--modes", default=",".join(MODES))
@click.option("--roles", default=",".join(role for role in ROLES if role != "nobody"))
@click.option("--jobs", default=2, help="runs at a time")
@record.out_option("faults/phase_kills")
def main(modes: str, roles: str, jobs: int, out: Path) -> None:
    """Kill each process of a run in each phase."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    for told, known, name in ((modes, [*MODES], "--modes"), (roles, [*ROLES], "--roles")):
        if unknown := sorted({*told.split(",")} - {*known}):
            raise click.BadParameter(f"{', '.join(unknown)}; there are {', '.join(known)}", param_hint=name)
    models, rows = dict[str, bytes](), list[dict[str, Any]]()
    with record.Recorder("faults/phase_kills", out) as recorder, ThreadPoolExecutor(jobs) as pool:
        for trials in (
            [Trial(mode, "nobody", "") for mode in modes.split(",")],
            matrix(modes.split(","), roles.split(",")),
        ):
            for row in pool.map(lambda trial: done(trial, models), trials):
                trial: Trial = row["trial"]
                click.echo(f"{trial.mode}, {trial.role}, {trial.phase}: {row['kills']} kills", err=True)
                for text in (*row["wrong"], *row["left"]):
                    click.echo(f"    {text}", err=True)
                rows.append(row)
        for mode in modes.split(","):
            for role in roles.split(","):
                ours = [row for row in rows if (row["trial"].mode, row["trial"].role) == (mode, role)]
                add(recorder, mode, role, ours)
    sys.exit(any(row["wrong"] or row["left"] for row in rows))


if __name__ == "__main__":
    main()
