"""The process of kit/command_forker.py: it imports once, and forks a fork server for each process of the suite.

How it works
1. It imports what the variable NEEDS names, and takes connections at the socket LISTENS.
2. For each connection it forks a `CommandForkServer`. That forks commands, and ends with its connection.
3. It ends with the last of them. Before that it takes its socket's path away: who comes too late for it starts another.

Rules
- The descriptors of a request that NAMESPACE names are of namespaces. The command enters them, in their order, with all that it
  starts. The fork server itself stays out of the lab, whose hosts end with all their processes.
- A `ps-worker --check` has the hooks that its fork server installs as it imports the session. Here that was imported long ago,
  so the command installs them as it begins. Whom they watch is decided in each process, by its environment.
- This file is run by its path: nothing of the tests is on `sys.path` of a command.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import socket

from narrows.protocols.runtime.processes import interpreter
from narrows.protocols.runtime.processes.fork_server import Begins, ForkRequest, ForkServer

NEEDS = "NARROWS_TEST_NEEDS"  # variable: what is imported and called, as a JSON list of fork_server.py
LISTENS = "NARROWS_TEST_LISTENS"  # variable: the descriptor of the listening socket, and its path
NAMESPACE = "a namespace of a test"  # among the variables of a request that get descriptors; no command has it


def enter(namespace: int) -> None:
    """Move this process into the namespace of a descriptor, and close that. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):  # os.setns is of Python 3.12
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)


class CommandForkServer(ForkServer):
    """Forks commands of tests."""

    def _begins(self, fds: list[int], request: ForkRequest) -> Begins:
        for fd in fds[3:]:
            enter(fd)
        if "--check" in request.words:
            from narrows.worker import session
            from narrows.worker.check.script_watch import ScriptWatch
            from narrows.worker.runtime.launcher_pipe import tell

            session.watch = ScriptWatch([], tell)
        return super()._begins(fds[:3], ForkRequest(**{**vars(request), "handed": []}))


def forks(listener: socket.socket, path: str) -> Begins:
    """Fork a server for each connection. Returns only in such a server, with its task."""
    poll, running = select.poll(), dict[int, int]()
    poll.register(listener, select.POLLIN)
    listener.setblocking(False)
    ends = False
    while True:
        for fd, _ in poll.poll(0 if ends else None):
            if fd in running:
                os.waitpid(running.pop(fd), 0)
                poll.unregister(fd)
                os.close(fd)
                continue
            made, _ = listener.accept()
            made.setblocking(True)
            if not (pid := os.fork()):
                os.setsid()
                listener.close()
                for each in running:
                    os.close(each)
                return CommandForkServer(made).run
            made.close()
            poll.register(watched := os.pidfd_open(pid), select.POLLIN)
            running[watched], ends = pid, False
            break
        else:
            if ends:
                os._exit(0)
        if not running:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            ends = True  # once nobody waits who has found the path before


def main() -> None:
    # A test that measures may have started this process: its priority and its cores are not those of the others.
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    interpreter.will_fork(first=True)
    if NAMESPACE in os.environ:
        enter(int(os.environ.pop(NAMESPACE)))
    gc.disable()
    for _, name in json.loads(os.environ.pop(NEEDS)):
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)(lambda text: None)
    interpreter.will_fork()
    gc.enable()
    gc.freeze()
    fd, path = os.environ.pop(LISTENS).split(" ", 1)
    begins: Begins | None = forks(socket.socket(fileno=int(fd)), path)
    while begins is not None:
        begins = begins()


if __name__ == "__main__":
    main()
