"""Starts the commands of tests by forking one process that has imported torch and loaded the kernels.

Otherwise each command of the suite would import torch. tests/system/test_launch.py starts commands as a shell does. All
processes of xdist share that process: its imports are 8 s of a core.

Rule: a command belongs to the namespaces of the thread that starts it, as with subprocess. So a test starts one on a host of
the lab within `host.inside()`. Or it belongs to those of another process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from kit import forker_process
from narrows.protocols.runtime.cli.flags import ALLOCATOR
from narrows.protocols.runtime.processes import fork_server
from narrows.protocols.runtime.processes.fork_server import ForkRequest
from narrows.ps.command import shard_supervisor
from narrows.worker.command import launcher

FORKED = {
    "ps-serve": ["-m", "narrows.ps.command.cli"],
    "ps-worker": ["-m", "narrows.worker.command.cli"],
    "ps-teach": ["-m", "narrows.worker.command.teach"],
    "torchrun": ["-m", "torch.distributed.run"],
    sys.executable: [],
}
NEEDS = [*shard_supervisor.NEEDS, *shard_supervisor.OPTIMIZERS, *launcher.NEEDS[1]]
NEEDS += [("", "s3fs")] * (find_spec("s3fs") is not None)  # half a second of each process that keeps objects in a store
ONCE = (
    "PYTHON",
    "NUMBA_",
    "MALLOC_",
    "OPENBLAS_",
    "MKL_",
)  # variables that are read when an interpreter starts, or never again
READY_S = 120.0  # a cold machine compiles kernels first
FORK_S, TURN_S = 30.0, 0.05
# As those of fork_server.py, these leave no name in __main__ and no folder on sys.path.
NO_FOLDER = fork_server.WORDS[1].partition(";")[0]
WORDS = ["-c", f"{NO_FOLDER};exec(open({forker_process.__file__!r}).read(), {{'__name__': '__main__'}})"]
KINDS = "user", "mnt", "net"  # of namespaces, in the order in which a process can enter them
THREAD = "/proc/thread-self"
CORES = os.sched_getaffinity(0)
POPEN = subprocess.Popen


def namespaces(of: str) -> dict[str, str]:
    """Return names and paths of the namespaces of a process or thread, which is a folder of /proc."""
    return {os.readlink(path): path for kind in KINDS if os.path.exists(path := f"{of}/ns/{kind}")}


HOME = namespaces(THREAD)
HOME_NET = os.open(f"{THREAD}/ns/net", os.O_RDONLY)  # for as long as this process lives


class Forked:
    """A forked command, with the part of subprocess.Popen's interface that tests and benchmarks use."""

    def __init__(self, forker: CommandForker, pid: int) -> None:
        self.forker, self.pid = forker, pid
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None  # the other end of its stdin, where that is a pipe

    def poll(self) -> int | None:
        self.forker.hear(lambda: self.returncode is not None, 0.0)
        return self.returncode

    def wait(self, timeout: float = 1e6) -> int:
        self.forker.hear(lambda: self.returncode is not None, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def communicate(self) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class CommandForker:
    """The process that forks the commands of this one: a fork of the one that all share. It ends with its connection."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.once = _once(env)
        self.running: dict[int, Forked] = {}
        self.answers: list[list[Any]] = []
        self.asking, self.hearing = threading.Lock(), threading.Lock()
        self.port = _connected(env)
        atexit.register(self.port.close)
        self.port.send(json.dumps(["need", []]).encode())
        assert self._answer(READY_S) == ["ready", ""]

    def fork(
        self, words: Sequence[str], env: Mapping[str, str], cwd: Path | None, fds: Sequence[int], within: int = 0
    ) -> Forked:
        """Fork a command.

        Args:
            words: the command and its arguments.
            env: its environment.
            cwd: its working folder; None: that of this process.
            fds: its stdin, stdout and stderr.
            within: the pid of a process to whose namespaces it belongs; 0: it belongs to those of this thread.
        """
        folder = str(cwd or os.getcwd())
        name, nests = Path(words[0]).name, words[0].startswith("ps-")
        with self.asking, contextlib.ExitStack() as stack:
            there = namespaces(f"/proc/{within}" if within else THREAD)
            others = [stack.enter_context(open(path)).fileno() for name, path in there.items() if name not in HOME]
            handed, fds = [forker_process.NAMESPACE] * len(others), [*fds, *others]
            request = ForkRequest([*FORKED[words[0]], *words[1:]], {**env}, folder, name, handed, [], nests=nests)
            request.send(self.port, fds)
            kind, pid = self._answer(FORK_S)
        assert kind == "pid", pid
        return self.running[pid]

    def _answer(self, limit_s: float) -> list[Any]:
        self.hear(lambda: bool(self.answers), limit_s)
        assert self.answers, f"the process that forks commands has not answered within {limit_s:.0f} s"
        return self.answers.pop()

    def hear(self, done: Callable[[], bool], limit_s: float) -> None:
        """Take answers and exits until `done()`, at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not done():
            with self.hearing:
                left = min(deadline - time.monotonic(), TURN_S)
                if select.select([self.port], [], [], max(0.0, left))[0]:
                    kind, *values = json.loads(self.port.recv(fork_server.MESSAGE_BYTES_MAX))
                    if kind == "ended":
                        self.running.pop(values[0]).returncode = values[1]
                    elif kind != "say":
                        self.answers.append([kind, *values])
                    if kind == "pid":
                        self.running[values[0]] = Forked(self, values[0])
                elif time.monotonic() >= deadline:
                    return


def _once(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork takes too late. One thread is what the process that forks has."""
    once = {name: value for name, value in env.items() if name.startswith(ONCE)}
    return {name: value for name, value in once.items() if (name[-12:], value) != ("_NUM_THREADS", "1")}


def _connected(env: Mapping[str, str]) -> socket.socket:
    """Connect to the process that all processes of this test run share, and start it first if there is none."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    digest = hashlib.sha256(json.dumps([run, _once(env)]).encode()).hexdigest()[:24]
    path = f"{tempfile.gettempdir()}/narrows-forker-{digest}"
    while True:
        port = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            port.connect(path)
            return port
        except FileNotFoundError:
            _begin(path, env)
        except ConnectionRefusedError:  # it was killed
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        port.close()


def _begin(path: str, env: Mapping[str, str]) -> None:
    """Start that process, unless another one has the path meanwhile. It outlives this one while others are connected."""
    own = f"{path}-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(own)
        stack.callback(os.unlink, own)
        listener.listen()
        try:
            os.link(own, path)  # a path that is there leads to a socket that listens
        except FileExistsError:
            return
        seed, passed = str(secrets.randbelow(1 << 32)), [listener.fileno()]
        env = ALLOCATOR | dict(env) | {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
        env |= {forker_process.NEEDS: json.dumps(NEEDS), forker_process.LISTENS: f"{passed[0]} {path}"}
        if namespaces(THREAD) != HOME:  # the first command of all begins on a host of the lab
            passed.append(HOME_NET)
            env[forker_process.NAMESPACE] = str(HOME_NET)
        for fd in passed:
            os.set_inheritable(fd, True)
        os.posix_spawn(sys.executable, [sys.executable, *WORDS], env, setsid=True)


_known: list[CommandForker] = []  # one for each environment of `forker_of`
_making = threading.Lock()  # tests have threads


def forker_of(env: Mapping[str, str]) -> CommandForker | None:
    """Return the forker whose commands behave as a fresh interpreter does in this environment.

    None: the environment is one of few tests, and no forker is made for it.
    """
    from kit.fold_logs import HOOKED
    from kit.processes import environment

    with _making:
        for common in (environment(), environment() | HOOKED):
            if _once(common) == _once(env):
                known = next((each for each in _known if each.once == _once(env)), None)
                if known is None:
                    _known.append(known := CommandForker(common))
                return known
    return None


def _fd(file: Any, known: Mapping[Any, int]) -> int:
    return known[file] if file in known else file if isinstance(file, int) else int(file.fileno())


PLAIN = {"cwd", "env", "stdin", "stdout", "stderr", "text"}  # options of subprocess.Popen that `popen` knows


def popen(command: Sequence[str], **options: Any) -> Forked | subprocess.Popen[Any]:
    """Start what subprocess.Popen starts, in its place. A Python program is forked, unless its output is a pipe."""
    words, env = [*command], options.get("env") or {**os.environ}
    piped, out, err = options.get("stdin"), options.get("stdout"), options.get("stderr")
    fits = words[0] == sys.executable and len(words) > 1 and words[1] != "-c" and {*options} <= PLAIN
    fits &= (
        piped in {None, subprocess.DEVNULL, subprocess.PIPE}
        and subprocess.PIPE not in (out, err)
        and os.sched_getaffinity(0) == CORES
    )
    if not fits or (forker := forker_of(env)) is None:
        return POPEN(command, **options)
    words[:3] = next(([name] for name, start in FORKED.items() if start and words[1:3] == start), words[:3])
    ours = -1
    with contextlib.ExitStack() as stack:
        if piped == subprocess.PIPE:
            theirs, ours = os.pipe()
        else:
            theirs = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, theirs)
        known: dict[Any, int] = {subprocess.DEVNULL: theirs}
        fds = [theirs, _fd(out, known | {None: 1})]
        fds.append(_fd(err, known | {None: 2, subprocess.STDOUT: fds[1]}))
        made = forker.fork(words, env, options.get("cwd"), fds)
    if ours >= 0:
        made.stdin = open(ours, "w" if options.get("text") else "wb")  # noqa: SIM115 - closed by communicate
    return made
