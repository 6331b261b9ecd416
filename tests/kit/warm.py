"""Commands that start at once: each is forked from a process that has imported what it and its children need.

A command and its nursery (protocols/runtime/launch.py) import for seconds, and the tests start hundreds of them. Here the
stove, a process that has imported it all, forks the command, and beside it what is to be its nursery. So the command's
children are its own, each forked by its nursery, as ever. Only the interpreters are not started. Rules
- A command that needs another environment when it imports is started cold. So is each in tests with the fixture `cold`.
- A nursery is as a fresh one is: it has one thread, no name in __main__, the environment and the descriptors that it is given.
- It has the stove's hash seed, and a ps-serve is told that one. A nursery that is to have another is started cold.
- Whatever ends this process ends the stove. Commands are ended by whoever started them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOCKET = "NARROWS_STOVE_FD"  # not handed to commands
SEED = "17"
MESSAGE_BYTES_MAX = 1 << 17
DESCRIPTORS_MAX = 16
HIGH = 200  # descriptors of a nursery are moved up here first, so that none is closed by another's place
START_S = 60.0
COMMANDS = {"ps-serve": "narrows.ps.command.cli", "ps-worker": "narrows.worker.command.cli"}
WORDS = [
    "-c",
    "__import__('sys').path.pop(0);__import__('kit.warm', fromlist=['main']).main()()",
]
ON = True


class Warm:
    """A command that was forked, as subprocess.Popen shows one."""

    def __init__(self, pid: int, ends: int) -> None:
        self.pid, self.ends = pid, ends
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self.ends], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(os.read(self.ends, 16))
            os.close(self.ends)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def _stove() -> socket.socket:
    """The socket to the one of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_S)
    tests = Path(__file__).resolve().parents[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NARROWS_")}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env |= {SOCKET: str(theirs.fileno()), "PYTHONHASHSEED": SEED, "PYTHONPATH": str(tests)}
    words = [sys.executable, *WORDS]
    stove = subprocess.Popen(words, env=env, cwd=tests, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    atexit.register(stove.wait)
    atexit.register(ours.close)  # before that
    return ours


def started(words: Sequence[str], env: Mapping[str, str], cwd: Path | None, streams: Sequence[Any]) -> Warm | None:
    """A command with these words, whose stdout and stderr are `streams`; None: it is to be started cold."""
    if not ON or words[0] not in COMMANDS or sys.platform != "linux":
        return None
    stove, (ends, theirs) = _stove(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    request = {"words": [*words], "env": dict(env), "cwd": str(cwd or os.getcwd())}
    socket.send_fds(stove, [json.dumps(request).encode()], [nothing, *(each.fileno() for each in streams), theirs])
    os.close(nothing)
    os.close(theirs)
    return Warm(int(stove.recv(16)), ends)


# In the stove.


def main() -> Callable[[], None]:
    """Return in a command, or in a nursery, only: what is to be done in it."""
    port = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    from narrows.protocols.runtime import launch
    from narrows.ps.command import cluster
    from narrows.worker.command import launcher

    for _, need in (*cluster.NEEDS, *cluster.OPTIMIZERS, *launcher.NEEDS):
        module, _, function = need.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)(lambda text: None)
    for name in COMMANDS.values():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert not (why := launch.unfit()), why
    ended: dict[int, tuple[int, int]] = {}  # by the pidfd of a command, it and the pipe that is told its exit code
    poll = select.poll()
    poll.register(port, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in ended:
                poll.unregister(fd)
                os.close(fd)
                pid, pipe = ended.pop(fd)
                with contextlib.suppress(BrokenPipeError):
                    os.write(pipe, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(pipe)
                continue
            raw, fds, _, _ = socket.recv_fds(port, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
            if not raw:
                os._exit(0)
            leads, led = os.pipe()
            if not (pid := os.fork()):
                os.setsid()
                os.close(led)
                return _command(fds[:3], **json.loads(raw))
            os.close(led)
            os.read(leads, 1)  # its end: the command leads its session
            os.close(leads)
            for each in fds[:3]:
                os.close(each)
            watched = os.pidfd_open(pid)
            ended[watched] = pid, fds[3]
            poll.register(watched, select.POLLIN)
            port.send(str(pid).encode())


def _command(fds: list[int], words: list[str], env: dict[str, str], cwd: str) -> Callable[[], None]:
    from narrows.protocols.runtime import children, interpreter, launch
    from narrows.ps.command import cluster

    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(3, 1 << 12)
    os.chdir(cwd)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not (pid := os.fork()):
        ours.close()
        return _nursery(theirs)
    theirs.close()
    interpreter.begin(words[0], env)
    tempfile.tempdir = None  # by what the stove's environment had
    sys.argv = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    sys.path.remove(str(Path(__file__).resolve().parents[1]))
    free = [Nursery(pid, ours)]

    def popen(asked: list[str], *, env: dict[str, str], **rest: Any) -> Any:
        fits = asked[1:] == launch.WORDS and env.get("PYTHONHASHSEED", SEED) == SEED
        return free.pop().begin(env, **rest) if fits and free else subprocess.Popen(asked, env=env, **rest)

    setattr(children, "subprocess", SimpleNamespace(Popen=popen))  # noqa: B010 - a module, for mypy
    setattr(cluster, "secrets", SimpleNamespace(randbelow=lambda below: int(SEED)))  # noqa: B010 - the same
    main: Callable[[], None] = importlib.import_module(COMMANDS[words[0]]).main
    return main


class Nursery:
    """The process that is to be a command's nursery, as subprocess.Popen shows one."""

    def __init__(self, pid: int, port: socket.socket) -> None:
        self.pid, self.port = pid, port

    def begin(
        self, env: dict[str, str], stdin: int, stdout: int, stderr: int, pass_fds: tuple[int, ...], **rest: Any
    ) -> Nursery:
        request = json.dumps([env, pass_fds]).encode()
        socket.send_fds(self.port, [request], [stdin, stdout, stderr, *pass_fds])
        self.port.recv(1)
        self.port.close()
        return self

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _nursery(port: socket.socket) -> Callable[[], None]:
    """Become one, once the command wants it; end with the command."""
    from narrows.protocols.runtime import interpreter, launch

    os.setsid()
    for number in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    os.closerange(3, port.fileno())
    os.closerange(port.fileno() + 1, 1 << 12)
    raw, fds, _, _ = socket.recv_fds(port, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
    if not raw:
        os._exit(0)
    env, passed = json.loads(raw)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in (*fds, port.fileno())]
    os.closerange(3, HIGH)
    for fd, number in zip(high, (0, 1, 2, *passed), strict=False):
        os.dup2(fd, number)
    os.write(high[-1], b".")
    for fd in high:
        os.close(fd)
    port.detach()
    for module in ("narrows.ps.process.main", *COMMANDS.values()):  # what children run, they import themselves
        sys.modules.pop(module)
    sys.path.remove(str(Path(__file__).resolve().parents[1]))
    interpreter.begin("python", env)
    return launch.main
