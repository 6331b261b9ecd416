"""Real ps-serve and ps-worker commands on loopback, and a worker of theirs in this process.

Each process that is started here is ended here, by its pid. Each wait has a limit, and no test sleeps to let something
happen.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from kit.command_forker import FORKED, Forked, forker_of
from kit.scripts import flat
from narrows.ps.dashboard.run_registry import VARIABLE
from narrows.worker.command.managers import MANAGERS
from narrows.worker.session import RunSession

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0  # for what takes a few seconds on an idle machine
GONE_S = 15.0  # a busy machine included: in which nothing may be left of a command
FOREIGN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} | {manager.there for manager in MANAGERS}

ENDED: list[str] = []  # what each command of the current test printed; conftest.py shows it where the test fails

# Trains until it has made argv[1] steps, or for ever; %s may do something in each.
SCRIPT = """
import os, sys, subprocess, time, torch
from narrows.worker import DistributedOptimizer, rank, record, step_count, world_size

model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
while len(sys.argv) < 2 or step_count() < int(sys.argv[1]):
    %s
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).square().sum()
    loss.backward()
    optimizer.step()
    record(loss=loss.item())
"""


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name == VARIABLE or not (name.startswith("NARROWS_") or name in FOREIGN)
    }
    return env | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (extra or {})


def until(done: Callable[[], Any], what: object, limit_s: float = LIMIT_S) -> Any:
    """Wait until `done` returns something true, and return it. Fails with `what` after `limit_s`, or as a command has ended."""
    deadline = time.monotonic() + limit_s
    while True:
        # Asked first: what it said last counts.
        ended = isinstance(what, Command) and what.process.poll() is not None
        if result := done():
            return result
        assert not ended, f"ended while waited for: {what}"
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.02)


class Command:
    """A started command, with its output so far."""

    def __init__(
        self,
        words: tuple[str, ...],
        env: dict[str, str],
        cwd: Path | None,
        out: str = "",
        terminal: int = -1,
        within: int = 0,
    ) -> None:
        self.words = words
        self.files = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]  # noqa: SIM115 - closed by end
        self.process: subprocess.Popen[str] | Forked
        with ExitStack() as stack:
            files = [stack.enter_context(open(os.devnull)), *self.files]
            if out:
                files[1] = stack.enter_context(open(out, "w"))
            fds = [terminal] * 3 if terminal >= 0 else [file.fileno() for file in files]
            self._start(words, env, cwd, fds, within)

    def _start(
        self, words: tuple[str, ...], env: dict[str, str], cwd: Path | None, fds: list[int], within: int
    ) -> None:
        forker = forker_of(env) if words[0] in FORKED else None
        if forker is not None:
            self.process = forker.fork(words, env, cwd, fds, within)
            return
        assert not within, f"{words[0]} is not forked"
        self.process = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]],
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            env=env,
            cwd=cwd,
            start_new_session=True,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self, index: int) -> str:
        size = os.fstat(self.files[index].fileno()).st_size
        return os.pread(self.files[index].fileno(), size, 0).decode()

    @property
    def out(self) -> str:
        return self._read(0)

    @property
    def err(self) -> str:
        return self._read(1)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end within {limit_s:.0f} s") from None

    def end(self) -> None:
        """Kill the command and its processes. A second call does nothing."""
        if self.files[0].closed:
            return
        if self.process.poll() is None:
            kill_all(self.pid)
        self.process.wait()
        ENDED.append(str(self))
        for file in self.files:
            file.close()

    def __str__(self) -> str:
        return f"{' '.join(self.words)}\n{self.out}\n{self.err}"


@contextmanager
def started(
    *words: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    out: str = "",
    terminal: int = -1,
    within: int = 0,
) -> Iterator[Command]:
    """Start a command, and end it after the context.

    Args:
        words: the command and its arguments.
        env: variables beside those of `environment`.
        cwd: its working folder.
        out: a file for its stdout, in place of one for `Command.out`.
        terminal: a descriptor for its stdin, stdout and stderr; -1: it reads nothing, and the test reads its files.
        within: the pid of a process to whose namespaces a forked command belongs; 0: it belongs to those of this thread.
    """
    command = Command(words, environment(env), cwd, out, terminal, within)
    try:
        yield command
    finally:
        command.end()


def finished(*words: str, **more: Any) -> tuple[int, str, str]:
    """Run a command, and return its exit code, stdout and stderr. The arguments are those of `started`."""
    with started(*words, **more) as command:
        code = command.wait()
        return code, command.out, command.err


def sentences(said: str) -> list[str]:
    """Return the lines of a command's stderr, without those that end with "..."."""
    return [line for line in said.splitlines() if not (line.startswith("ps-worker: ") and line.endswith(" ..."))]


class Pid(int):
    """The pid of a process, and when it began. The system gives its number to another process once it has ended."""

    began: str


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ...; the time of the start is the 20th."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants(pid: int) -> list[Pid]:
    """Return the pids of all descendants of a process."""
    children: dict[int, list[Pid]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields, child = _stat(folder.name), Pid(folder.name)
            child.began = fields[19]
            children.setdefault(int(fields[1]), []).append(child)
    found = [*children.get(pid, [])]
    for each in found:
        found += children.get(each, [])
    return found


def relay_of(pid: int) -> int:
    """Return the pid of the process that serves the one port of a ps-serve; 0: there is none now."""
    names = dict[Pid, str]()
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            names[each] = Path(f"/proc/{each}/comm").read_text().strip()
    return next((int(each) for each, name in names.items() if name == "ps-one-port"), 0)


def kill_relay(pid: int) -> None:
    """Kill that process, and wait for another in its place."""
    old = relay_of(pid)
    os.kill(old, signal.SIGKILL)
    until(lambda: relay_of(pid) not in (0, old), "another process at the port")


def kill_all(pid: int) -> None:
    """Kill a process and its descendants.

    The process is stopped first: otherwise a ps-serve would start its shards again, and these would log a second time.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for each in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def alive(pid: int) -> bool:
    """Return whether a process is there and no zombie. `descendants` has told which one of that number."""
    try:
        fields = _stat(pid)
    except OSError:
        return False
    return fields[0] != "Z" and getattr(pid, "began", fields[19]) == fields[19]


# Tests that run at the same time look in other places. What was given out is not given again before all others were: nobody
# listens on it yet.
PLACE, PLACE_SIZE = 21_000 + 2_700 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4), 2_700
_looked_at = itertools.count(os.getpid())


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for _ in range(PLACE_SIZE):
        ports = [PLACE + next(_looked_at) % PLACE_SIZE for _ in range(count)]
        with contextlib.suppress(OSError), ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            if ports[-1] - ports[0] == count - 1:  # else they go over the end of the place
                return ports[0]
    raise AssertionError("no free ports")


class Server:
    """A ps-serve that workers can join."""

    def __init__(self, command: Command, ready: Path) -> None:
        self.command, self.ready = command, ready
        told = json.loads(ready.read_text())
        self.address: str = told["address"]
        self.port: int = told["ports"][0]

    @property
    def pids(self) -> list[int]:
        """The pids of ps-serve and of its present shards."""
        told = json.loads(self.ready.read_text())
        return [told["pid"], *told["shard_pids"]]

    def kill_shard(self, index: int) -> None:
        """Kill a shard, and wait until another process has replaced it."""
        old = self.pids[1 + index]
        os.kill(old, signal.SIGKILL)
        until(lambda: self.pids[1 + index] != old, f"another shard {index}")

    def kill(self) -> None:
        """Kill all processes of the server at once, as if its machine lost power."""
        os.kill(self.pids[0], signal.SIGSTOP)  # it would start them again
        for pid in reversed(self.pids):  # shards first: one whose parent is gone says good-bye
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, self.pids)), "the server to be gone", GONE_S)
        self.command.process.wait()


@contextmanager
def serving(
    *flags: str,
    cwd: Path | None = None,
    port: int = 0,
    descriptors: int = 0,
    env: dict[str, str] | None = None,
    into: str = "",
    host: str = "127.0.0.1",
) -> Iterator[Server]:
    """Start a ps-serve, and end it after the context.

    descriptors: the file descriptors that each process may have; 0: as many as this one. into: a command that reads its
    output.
    """
    limited = ("/bin/sh", "-c", f'ulimit -n {descriptors}; exec "$0" "$@"', str(BIN / "ps-serve"))
    piped = ("/bin/sh", "-c", f'exec "$0" "$@" 2>&1 | {into}', str(BIN / "ps-serve"))
    serve = limited if descriptors else piped if into else ("ps-serve",)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        bind = f"tcp://{host}:{port}"
        where = () if "--checkpoint-dir" in flags or cwd else ("--checkpoint-dir", "none")
        words = (*serve, "--bind", bind, "--ready-file", str(ready), *where, *flags)
        with started(*words, env=env, cwd=cwd) as command:
            until(lambda: ready.exists() or command.process.poll() is not None, command)
            assert ready.exists(), command
            server = Server(command, ready)
            try:
                yield server
            finally:
                first, *shards = server.pids
                if alive(first):
                    kill_all(first)
                for pid in filter(alive, shards):  # of one whose parent was killed
                    os.kill(pid, signal.SIGKILL)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: torch.Tensor = model(torch.randn(4, 6, generator=generator)).square().sum()
    return loss


Made = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def trained_alone(steps: int, rate: float = 0.05, make: Made | None = None) -> npt.NDArray[np.float32]:
    """The parameters that a `Worker` of a run of bsp ends with; here one process trains alone."""
    model = small_model()
    optimizer = make(model) if make else sgd(model, rate)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return flat(model)


class Worker:
    """A worker in this process, without a further import of torch."""

    def __init__(self, address: str, key: str = "", rate: float = 0.05, make: Made | None = None) -> None:
        self.model = small_model()
        os.environ["NARROWS_KEY"] = key  # which the session takes out again
        self.session = RunSession(address)
        inner = make(self.model) if make else sgd(self.model, rate)
        self.engine = self.session.attach(self.model, inner, 0.0, 0)

    @property
    def clock(self) -> int:
        return self.engine.sync.clock

    def step(self) -> None:
        self.model.zero_grad()
        loss_of(self.model, self.clock).backward()
        self.engine.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def close(self, failed: bool = False) -> None:
        """Leave the run once all other workers have done their last step."""
        self.session.close(failed)

    def leave(self) -> None:
        """Leave at once: other workers go on, in this thread too."""
        self.engine.finish(last=False)
        self.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(failed=error is not None)
