"""Starts the commands of tests by forking one process that has imported torch and loaded the kernels.

Otherwise each command of the suite would import torch. tests/system/test_launch.py starts commands as a shell does.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from narrows.protocols.runtime.cli.flags import ALLOCATOR
from narrows.protocols.runtime.processes import fork_server
from narrows.ps.command import shard_supervisor
from narrows.worker.command import launcher

FORKED = {
    "ps-serve": ["-m", "narrows.ps.command.cli"],
    "ps-worker": ["-m", "narrows.worker.command.cli"],
    "torchrun": ["-m", "torch.distributed.run"],
    sys.executable: [],
}
NEEDS = [*shard_supervisor.NEEDS, *shard_supervisor.OPTIMIZERS, *launcher.NEEDS[1]]
ONCE = (
    "PYTHON",
    "NUMBA_",
    "MALLOC_",
    "OPENBLAS_",
    "MKL_",
)  # variables that are read when an interpreter starts, or never again
READY_S = 120.0  # a cold machine compiles kernels first
FORK_S, TURN_S = 30.0, 0.05


class Forked:
    """A forked command, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, forker: CommandForker, pid: int) -> None:
        self.forker, self.pid = forker, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.forker.hear(lambda: self.returncode is not None, 0.0)
        return self.returncode

    def wait(self, timeout: float = 1e6) -> int:
        self.forker.hear(lambda: self.returncode is not None, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class CommandForker:
    """The process that forks commands. It ends with the test's process."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.once = _once(env)
        self.running: dict[int, Forked] = {}
        self.answers: list[list[Any]] = []
        self.asking, self.hearing = threading.Lock(), threading.Lock()
        self.port, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = ALLOCATOR | dict(env) | {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": str(secrets.randbelow(1 << 32))}
        env |= {fork_server.SOCKET: str(theirs.fileno())}
        words = [sys.executable, *fork_server.WORDS]
        self.process = subprocess.Popen(words, env=env, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self.port.send(json.dumps(["need", NEEDS]).encode())
        assert self._answer(READY_S) == ["ready", ""]

    def fork(self, words: Sequence[str], env: Mapping[str, str], cwd: Path | None, files: Sequence[IO[str]]) -> Forked:
        """Fork a command.

        Args:
            words: the command and its arguments.
            env: its environment.
            cwd: its working folder; None: that of this process.
            files: its stdout and stderr.
        """
        folder = str(cwd or os.getcwd())
        name, nests = Path(words[0]).name, words[0].startswith("ps-")
        request = fork_server.ForkRequest([*FORKED[words[0]], *words[1:]], {**env}, folder, name, [], [], nests=nests)
        with self.asking, open(os.devnull) as nothing:
            fds = [file.fileno() for file in (nothing, *files)]
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
    return {name: value for name, value in env.items() if name.startswith(ONCE)}


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
