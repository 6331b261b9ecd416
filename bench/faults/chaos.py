"""The bench kills or stops a part of a run every so often, and compares it with the same run undisturbed.

    python bench/faults/chaos.py                                     # byte GPT, 3 workers, 2 shards, ssp; a failure every 20 s
    python bench/faults/chaos.py --sync bsp --every 10 --seed 1
    python bench/faults/chaos.py --strikes 'kill shard' --steps 200
    python bench/faults/chaos.py --standby --steps 2400 --share 0.2  # servers are killed too; two minutes undisturbed
    python bench/faults/chaos.py --standby --link 100mbit            # each on a host of the lab, and links are struck too

Rules
- All runs are real commands on this machine: one ps-serve, with --standby a second one that copies it, and one ps-worker for
  each worker. A worker is killed with its ps-worker, a shard alone, a server or a standby with all its shards. Who is stopped
  goes on after STOPPED_S. A server that is stopped so long is left for its standby, and ends.
- With --link each of them is on a host of its own, and that is its link to the switch between all. A link that is cut carries
  nothing for STOPPED_S, one that is slow a SLOWER-th of its rate for SLOW_S.
- The schedule follows from the seed: when, what, and whom. A worker that was killed comes back after BACK_S, as a spot machine,
  and so does a machine of the server, as the standby of the one that serves. Neither is struck while the other is alone.
- Goodput is the undisturbed run's time for a clock over that of the disturbed one, whatever was computed twice. With
  --share the undisturbed run does that share of the steps, once before and once after, since a machine's speed drifts.
- A stall is the longest time in which no worker's clock moved beyond where the run had been. Clocks are read from the records.
  It is told of each kind of strike, too: the longest stall until the next strike.
- Memory is the largest shard's resident set, at its most, beside that of the undisturbed run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders.wan import LINKS
from lab import launch, record
from lab.launch import CommandFailed
from lab.link import Link
from lab.netns import Host, Lab, star

TASK = str(launch.ROOT / "bench" / "tasks" / "bytelm.py")
SERVERS = 2  # hosts of them: one serves, the other stands by
STOPPED_S = 3.0
SLOW_S, SLOWER = 10.0, 10
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


def started(command: Sequence[str], said: Path, host: Host | None) -> subprocess.Popen[Any]:
    """Start a command on this host, None: this machine. Its output is added to `said`."""
    with said.open("a") as file:
        return (host.popen if host else subprocess.Popen)(
            command, cwd=launch.ROOT, env=launch.environment(), stdout=file, stderr=file
        )


@dataclass
class Worker:
    """One place of a worker, and who is there. `records`: of all lives so far."""

    index: int
    host: Host | None = None  # None: this machine
    process: subprocess.Popen[Any] | None = None
    records: list[Path] = field(default_factory=list)
    back_s: float = 0.0  # when it comes back, while nobody is there
    clock: int = -1
    read: int = 0  # bytes of the newest record
    last: dict[str, float] = field(default_factory=dict)

    def look(self) -> None:
        """Read the lines of its newest record that were not read yet."""
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


class Machine:
    """One ps-serve with its shards, which serves or stands by. It says what it does in `said`. `place`: of its host."""

    def __init__(self, folder: Path, number: int, flags: Sequence[str], place: int, host: Host | None) -> None:
        self.place, self.serves = place, False  # in the place of another
        self.ready, self.said = folder / f"ready.{number}", folder / f"server.{number}.log"
        where = f"{host.address if host else '127.0.0.1'}:0"
        command = launch.ps_serve(where, "--insecure", *flags, "--ready-file", str(self.ready))
        self.process = started(command, self.said, host)

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ready.read_text()) if self.ready.exists() else {}
        return found

    @property
    def address(self) -> str:
        return str(self.told()["address"])

    @property
    def shards(self) -> list[int]:
        return list(self.told().get("shard_pids", []))

    def says(self, text: str) -> bool:
        return text in self.said.read_text(errors="replace")

    def kill(self) -> None:
        strike(signal.SIGKILL, self.process.pid, *self.shards, *children_of(self.process.pid))
        self.process.wait()


class Run:
    """One run to its end. `strikes`: what may happen, none where it is undisturbed."""

    def __init__(
        self,
        flags: Sequence[str],
        workers: int,
        shards: int,
        steps: int,
        seed: int,
        limit_s: float,
        standby: bool,
        lab: Lab | None = None,
    ) -> None:
        self.flags, self.steps, self.seed, self.limit_s = list(flags), steps, seed, limit_s
        self.flags += ["--shards", str(shards), "--workers", str(workers), "--replicas", str(int(standby))]
        # The first two hosts of a lab are for the server and its standby, each of the others is for one worker.
        self.hosts: Sequence[Host | None] = lab.hosts if lab else [None] * (SERVERS + workers)
        self.links: Sequence[Link] = lab.links if lab else []
        self.standby, self.machines, self.numbers = standby, list[Machine](), itertools.count()
        self.next_s = 0.0  # when a machine comes back, while one is gone
        self.workers = [Worker(index, self.hosts[SERVERS + index]) for index in range(workers)]
        self.random = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.stalls: dict[str, list[float]] = {}  # of each kind of strike, the longest stall after each
        self.newest = ""  # of the strikes
        self.top, self.moved_s, self.stall_s, self.memory = -1, 0.0, 0.0, 0
        self.waking: list[tuple[float, Callable[[], None]]] = []  # what ends, and when

    def go(self, strikes: Sequence[str], every_s: float) -> dict[str, Any]:
        """Raises CommandFailed."""
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            try:
                server = self._machine(*self.flags)
                deadline = time.monotonic() + launch.SERVER_START_S
                while not server.ready.exists():
                    if server.process.poll() is not None or time.monotonic() > deadline:
                        raise CommandFailed("ps-serve did not start")
                    time.sleep(0.05)
                if self.standby:
                    self._machine("--standby", server.address)
                return self._run(strikes, every_s)
            except CommandFailed as error:
                said = "\n\n".join(
                    path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("server.*"))
                )
                raise CommandFailed(f"{error}; ps-serve said:\n{said}") from None
            finally:
                for worker in self.workers:
                    if worker.process is not None and worker.process.poll() is None:
                        strike(signal.SIGKILL, *children_of(worker.process.pid), worker.process.pid)
                        worker.process.wait()
                for machine in self.machines:
                    launch.end(machine.process)

    def _machine(self, *flags: str) -> Machine:
        place = min({*range(SERVERS)} - {machine.place for machine in self.machines})
        self.machines.append(Machine(self.folder, next(self.numbers), flags, place, self.hosts[place]))
        return self.machines[-1]

    def _machines(self, now: float) -> None:
        """The first serves. Who has ended is replaced, after a while, by a standby of the one that serves."""
        if len(self.machines) > 1 and not self.machines[1].serves and self.machines[1].says("serves in the place of"):
            self.machines[1].serves = True
            self.machines.append(self.machines.pop(0))  # which ends with 6, if it has not been killed
        if len(self.machines) > 1 and self.machines[1].process.poll() is not None:
            self.machines.pop(1)
            self.next_s = now + BACK_S
        if self.next_s and now > self.next_s and self.top < self.steps - 10:
            self.next_s = 0.0
            self._machine("--standby", self.machines[0].address)

    @property
    def safe(self) -> bool:
        """Either machine may be lost."""
        return (
            len(self.machines) > 1
            and all(machine.process.poll() is None for machine in self.machines)
            and self.machines[1].ready.exists()
            and self.machines[0].says(f"{self.machines[1].address} stands by: it has all")
        )

    def _start(self, worker: Worker, address: str) -> None:
        worker.records.append(self.folder / f"record.{worker.index}.{len(worker.records)}")
        worker.read, worker.back_s = 0, 0.0
        command = launch.ps_worker("--server", address, "--record", str(worker.records[-1]))
        command += [TASK, "--steps", str(self.steps), "--seed", str(self.seed)]
        worker.process = started(command, self.folder / f"worker.{worker.index}.log", worker.host)

    def _run(self, strikes: Sequence[str], every_s: float) -> dict[str, Any]:
        for worker in self.workers:
            self._start(worker, self.machines[0].address)
        began = next_s = 0.0
        deadline = time.monotonic() + self.limit_s
        while (server := self.machines[0].process).poll() is None or self._turning(server):
            now = time.monotonic()
            if now > deadline:
                raise CommandFailed(f"the run did not end within {self.limit_s:.0f} s; it was at clock {self.top}")
            self._look(now)
            self._machines(now)
            if self.top >= 0 and not began:
                began, next_s, self.moved_s = now, now + FIRST_S, now
            for each in [each for each in self.waking if each[0] <= now]:
                each[1]()
                self.waking.remove(each)
            for worker in self.workers:
                if worker.back_s and now > worker.back_s:
                    self._start(worker, self.machines[0].address)
            if strikes and began and now > next_s and self.top < self.steps - 10:
                calm = not self.standby or self.safe  # else the machine that is left must stay
                if can := [each for each in strikes if calm or each.split()[1] == "worker"]:
                    next_s = now + every_s
                    self._strike(self.random.choice(can), now)
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
                "stalls": self.stalls,
                "loss": losses[0] if losses else float("nan"), "clock": self.top}  # fmt: skip

    def _turning(self, server: subprocess.Popen[Any]) -> bool:
        """The server has ended with an error, and its standby is there."""
        return bool(server.returncode) and len(self.machines) > 1 and self.machines[1].process.poll() is None

    def _look(self, now: float) -> None:
        for worker in self.workers:
            worker.look()
        top = max(worker.clock for worker in self.workers)
        if top > self.top:
            self.top, self.moved_s = top, now
        elif self.top >= 0 and self.top < self.steps - 1:
            stall_s = now - self.moved_s
            self.stall_s = max(self.stall_s, stall_s)
            if self.newest:
                self.stalls[self.newest][-1] = max(self.stalls[self.newest][-1], stall_s)
        for pid in self.machines[0].shards:
            with contextlib.suppress(OSError, IndexError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.memory = max(self.memory, pages * os.sysconf("SC_PAGE_SIZE"))

    def _strike(self, what: str, now: float) -> None:
        how, _, whom = what.partition(" ")
        there = [worker for worker in self.workers if worker.process is not None and worker.process.poll() is None]
        if whom in ("server", "standby"):
            machine = self.machines[whom == "standby"]
            if how == "kill":
                machine.kill()
            elif how == "stop":
                self._stop(now, machine.process.pid, *machine.shards)
            else:
                self._hold(now, how, self.links[machine.place])
        elif whom == "shard":
            pid = self.random.choice(self.machines[0].shards)
            if how == "kill":
                strike(signal.SIGKILL, pid)
            else:
                self._stop(now, pid)
        elif len(there) < 2:
            return  # the last would take the run along
        else:
            worker = self.random.choice(there)
            assert worker.process is not None
            below = children_of(worker.process.pid)
            if how == "kill":
                strike(signal.SIGKILL, *below, worker.process.pid)
                worker.process.wait()
                worker.back_s = now + BACK_S
            elif how == "stop":
                self._stop(now, below[-1] if below else worker.process.pid)
            else:
                self._hold(now, how, self.links[SERVERS + worker.index])
        self.struck[what] += 1
        self.newest = what
        self.stalls.setdefault(what, []).append(0.0)

    def _stop(self, now: float, *pids: int) -> None:
        strike(signal.SIGSTOP, *pids)
        self.waking.append((now + STOPPED_S, partial(strike, signal.SIGCONT, *pids)))

    def _hold(self, now: float, how: str, link: Link) -> None:
        """Cut a link, or make it slow, for a while."""
        if how == "cut":
            link.cut()
            self.waking.append((now + STOPPED_S, link.mend))
        else:
            rate = link.there.rate
            link.change(rate=rate / SLOWER)
            self.waking.append((now + SLOW_S, partial(link.change, rate=rate)))


STRIKES = ("kill worker", "kill shard", "stop worker", "stop shard")
OF_MACHINES = ("kill server", "kill standby", "stop server")
OF_LINKS = ("cut worker", "slow worker")
OF_THEIR_LINKS = ("cut server", "cut standby", "slow server")


@click.command(context_settings={"show_default": True})
@click.option("--sync", default="ssp")
@click.option("--compress", default="topk:0.11+sign", help="bsp: dense")
@click.option("--workers", default=3)
@click.option("--shards", default=2)
@click.option("--steps", default=600, help="of the byte GPT")
@click.option("--every", "every_s", default=20.0, help="seconds between two failures")
@click.option("--standby", is_flag=True, help="a second ps-serve copies the first, in every run")
@click.option("--link", type=click.Choice([*LINKS]), default="loopback", help="of each host")
@click.option("--strikes", default="", help="comma-separated  [default: all there are]")
@click.option(
    "--share", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="of the steps, of an undisturbed run"
)
@click.option("--seed", default=0)
@click.option("--limit", "limit_s", default=1800.0, help="seconds after which a run counts as failed")
@record.out_option("faults/chaos")
def main(
    sync: str, compress: str, workers: int, shards: int, steps: int, every_s: float, standby: bool, link: str,
    strikes: str, share: float, seed: int, limit_s: float, out: Path,
) -> None:  # fmt: skip
    """Strike a run every so often, and compare it with the same run undisturbed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    way = LINKS[link]
    known = STRIKES + (OF_MACHINES if standby else ()) + (OF_LINKS if way else ())
    known += OF_THEIR_LINKS if standby and way else ()
    named = strikes.split(",") if strikes else list(known)
    if unknown := sorted(set(named) - set(known)):
        raise click.BadParameter(f"{', '.join(unknown)}; there are {', '.join(known)}", param_hint="--strikes")
    flags = ["--sync", sync, *(["--compress", compress] if sync != "bsp" else [])]
    plan: list[tuple[str, list[str], float]] = [("undisturbed", [], share), ("disturbed", named, 1.0)]
    if share < 1:
        plan.append(("undisturbed", [], share))
    arguments = {"steps": steps, "every": every_s, "sync": sync, "compress": compress if sync != "bsp" else "dense"}
    arguments |= {"workers": workers, "shards": shards, "standby": standby}
    table = f"{workers} workers, {shards} shards" + ", a standby" * standby + f", a failure every {every_s:g} s"
    with record.Recorder("faults/chaos", out) as recorder:
        for name, chosen, part in plan:
            with star([way] * (SERVERS + workers)) if way else nullcontext() as lab:
                row = Run(flags, workers, shards, int(steps * part), seed, limit_s, standby, lab).go(chosen, every_s)
            figures: record.Figures = {
                "clock": (1e3 * row["seconds"] / row["clock"], "ms"),  # its ratio is the goodput
                "time": (row["seconds"], "s"),
                "longest stall": (row["stall_s"], "s"),
                "largest shard": (row["shard_mb"], "MB"),
                "loss": (row["loss"], "nats a byte"),
                "clocks": (row["clock"], ""),
                "strikes": (sum(row["struck"].values()), ""),
            }
            figures |= {
                f"stall after {what}": (statistics.median(own), "s") for what, own in sorted(row["stalls"].items())
            }
            struck = ", ".join(f"{what} {count}" for what, count in sorted(row["struck"].items()))
            own = arguments | {"steps": int(steps * part)}
            recorder.add(name, figures, table=table, beside="undisturbed", seed=seed, link=record.link_of(way),
                         arguments=own, note=struck)  # fmt: skip


if __name__ == "__main__":
    main()
