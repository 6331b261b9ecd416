"""Tells a worker from its child processes, which are no members of the run, and lets them read the worker's counters.

A worker may start any process: the processes of a DataLoader, a fork that writes a file, a program that evaluates. Each
inherits the worker's environment variables. A fork inherits its objects too: the session, sockets without their thread,
exit handlers.

How it works

    ps-worker ── NARROWS_STARTED_BY ──> worker ── NARROWS_COUNTERS ──> child process
                                        writes rank, clock, steps      reads them from shared memory

1. In NARROWS_STARTED_BY ps-worker names the pids that may be the parent of a worker: the pid of the process that forks
   it, and its own pid, in case that process has died. A process with another parent is a child process.
2. The process that opens the session names its pid and a shared memory in NARROWS_COUNTERS. Each process that it starts
   inherits the variable. So a process knows that it is a child, and reads the worker's present counters there.
3. Each handle (MemberLink, Group, the pipe to ps-worker) keeps the pid of the process that made it, and refuses to work
   in another process. Exit handlers and the hook for errors do nothing there (`only_here`).
4. If no session is open and ps-worker did not start the process, as under torchrun, the process may join a run, unless
   multiprocessing is importing the script in it or a DataLoader has started it.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from typing import ParamSpec

from narrows.protocols.errors import UsageError
from narrows.worker.runtime.config import told

COUNTERS = "NARROWS_COUNTERS"  # kind, pid and memory path of the process that has the session, separated by spaces
RUN, ALONE = "run", "alone"  # kinds: a worker of a run, or a script without one
MARK = int.from_bytes(b"narrows")  # the first value of that memory; a later process may have the same pid
NAMES = ("mark", "joined", "rank", "world_size", "clock", "step_count")  # int64 each

Args = ParamSpec("Args")


def only_here(function: Callable[Args, object]) -> Callable[Args, None]:
    """Return `function`, wrapped to do nothing in a process that is forked from this one."""
    pid = os.getpid()

    def guarded(*args: Args.args, **values: Args.kwargs) -> None:
        if os.getpid() == pid:
            function(*args, **values)

    return guarded


def is_child() -> bool:
    """True in a child process of a worker; False in a worker, and in a script without a run."""
    if not told("server"):
        return False
    kind, pid, _ = _announced()
    if pid == os.getpid():
        return False
    if started_by := told("started_by"):
        return os.getppid() not in started_by
    return kind == RUN or _imports() or _loads()


def _announced() -> tuple[str, int, str]:
    """Return kind, pid and memory path of the process that has opened the session; ("", 0, "") if none has."""
    kind, pid, path = os.environ.get(COUNTERS, " 0 ").split(" ", 2)
    return kind, int(pid), path


def _imports() -> bool:
    """True while multiprocessing imports the script in this process, before it runs the process's function."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _loads() -> bool:
    """True if a DataLoader has started this process."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


class SharedCounters:
    """The counters of process `pid`, int64 by NAMES, in memory that its child processes read."""

    def __init__(self, pid: int, memory: mmap.mmap) -> None:
        self.pid = pid
        self._values = memoryview(memory).cast("q")

    def read(self, name: str) -> int:
        return self._values[NAMES.index(name)]

    def write(self, **values: int) -> None:
        for name, value in values.items():
            self._values[NAMES.index(name)] = value


_own: SharedCounters | None = None  # counters of this process, or of the process from which it was forked


def announce(kind: str) -> None:
    """Begin the counters of this process at the start of a session, and name them in NARROWS_COUNTERS."""
    global _own
    pid, size = os.getpid(), 8 * len(NAMES)
    if _own is not None and _own.pid == pid:
        os.environ[COUNTERS] = " ".join([kind, *os.environ[COUNTERS].split(" ", 1)[1:]])
        _own.write(joined=0, clock=0, step_count=0)
        return
    if hasattr(os, "memfd_create"):  # such memory is freed however this process ends
        number = os.memfd_create("narrows-counters")
        path = f"/proc/{pid}/fd/{number}"
    else:
        number, path = tempfile.mkstemp(prefix="narrows-")
        atexit.register(only_here(lambda: os.unlink(path)))
    os.truncate(number, size)
    _own = SharedCounters(pid, mmap.mmap(number, size))
    _own.write(mark=MARK)
    os.environ[COUNTERS] = f"{kind} {pid} {path}"


def tell(rank: int, world_size: int, clock: int, step_count: int) -> None:
    """Write the counters of this process, which has joined. Does nothing in a child process."""
    if _own is not None and _own.pid == os.getpid():
        _own.write(joined=1, rank=rank, world_size=world_size, clock=clock, step_count=step_count)


def of_parent(kind: str) -> SharedCounters | None:
    """Return the counters of the process that has the session, of which this process is a child.

    Args:
        kind: RUN for those of a worker, ALONE for those of a script without a run.

    Returns:
        The counters; None if that process has ended, or has opened its session after this process was started.
    """
    found, pid, path = _announced()
    if found != kind or pid == os.getpid():
        return None
    if _own is not None and _own.pid == pid:
        return _own
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        counters = SharedCounters(pid, mmap.mmap(file.fileno(), 8 * len(NAMES), access=mmap.ACCESS_READ))
        if counters.read("mark") == MARK:
            return counters
    return None


class NotAWorkerError(UsageError):
    """A child process of a worker has made a call that only a worker may make."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call} in process {os.getpid()}, which a worker has started: only the worker itself is a member of the run. Call "
            "it in the process that ps-worker started; a program that is to train alone is started without NARROWS_SERVER"
        )


class LoaderFacts:
    """What the loaders of one process have said; part of its session."""

    steps = batch = 0  # `steps=` of the training, and samples of a step in this process; 0: no loader has said them

    def reads(self, batch: int) -> None:
        """Note the samples of a step."""
        self.batch = batch

    def ends_after(self, steps: int) -> None:
        """Note the steps of the whole training. Of several loaders the largest number counts."""
        self.steps = max(self.steps, steps)


class WorkerOfChild(LoaderFacts):
    """The session of a child process of a worker: it reads the worker's present counters, and changes nothing."""

    link = engine = group = None
    training = 0

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._counters = of_parent(RUN)

    def _read(self, name: str) -> int:
        if self._counters is None or not self._counters.read("joined"):
            raise UsageError(
                f"{name}() in process {self.pid}, which a worker has started before it joined the run: call rank() or make "
                "DistributedOptimizer in the worker before it starts processes"
            )
        return self._counters.read(name)

    @property
    def rank(self) -> int:
        return self._read("rank")

    @property
    def world_size(self) -> int:
        return self._read("world_size")

    @property
    def clock(self) -> int:
        return self._read("clock")

    @property
    def step_count(self) -> int:
        return self._read("step_count")

    def record(self, values: dict[str, float]) -> None:
        raise NotAWorkerError("record()")
