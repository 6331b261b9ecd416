"""The fork server: a process that imports once what the children of a command need, and forks each child.

How it works

    command                                     fork server                              child
    ["need", needs]              ---------->    imports, calls
                                 <----------    ["say", text], ["ready", why not]
    ["fork"] + descriptors       ---------->    forks              ------------------>   becomes `python WORDS`
                                 <----------    ["pid", number] or ["refused", why]
                                 <----------    ["ended", pid, code]                     ends

All messages are JSON lists on a Unix socket. Beside "fork" come descriptors. The first is of memory with the fields of
a `ForkRequest` as JSON: an environment may be longer than any message of a socket.

Rules
- The fork server forks only while it has one thread and no open device. Otherwise it says why not, and the command
  starts each child as an interpreter of its own.
- The command names the modules to import and the functions to call. None of them may start a pool of threads or open a
  device.
- The fork server ends when the socket to its command ends. Its children end by their own pipes.
- A child that is a command with children of its own gets a fork server too, forked from the child as it begins. So all
  of them share one import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from narrows.protocols.runtime.processes import interpreter, signals

# These words leave no name in __main__, which becomes a script's, and no folder on sys.path that a script lacks.
WORDS = [
    "-c",
    "__import__('sys').flags.safe_path or __import__('sys').path.pop(0);"
    "__import__('narrows.protocols.runtime.processes.fork_server', fromlist=['main']).main()",
]
SOCKET = "NARROWS_NURSERY_FD"
GIVEN = "NARROWS_NURSERY"  # variable of a command that was forked: socket, pid and hash seed of its fork server
_told = os.environ.get("PYTHONHASHSEED", "")
HASH_SEED = _told if _told.isdigit() else ""  # with which this interpreter began; "": unknown
MESSAGE_BYTES_MAX = 1 << 16  # of a message between a fork server and its command; the kernel's buffer holds one
REQUEST_BYTES_MAX = 1 << 26  # exec takes 6 MB of words and environment at most, and a character is 6 in JSON
DESCRIPTORS_MAX = 17
POSSIBLE = sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def unfit() -> str:
    """Return why this process must not fork; "" if it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads} threads are alive after the imports"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(DEVICES):
                return f"an import has opened {path}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the kernel has no pidfd ({error.strerror})"
    return ""


@dataclass(frozen=True)
class ForkRequest:
    """The request for a child. Descriptors travel beside it: stdin, stdout, stderr, and those of `handed`."""

    words: Sequence[str]  # the words that follow `python`
    env: dict[str, str]
    folder: str  # the child's working directory
    name: str  # of the process, as `top` shows it
    handed: Sequence[str]  # variables that get the numbers of the further descriptors
    ignored: Sequence[int]  # signals that the child ignores
    nests: bool  # the child is a command, and has children of its own

    def send(self, port: socket.socket, fds: Sequence[int]) -> None:
        """Send the request to the fork server at the other end of `port`, with the descriptors. Raises OSError."""
        with open(os.memfd_create("narrows-request"), "w+b") as memory:
            memory.write(json.dumps(asdict(self)).encode())
            memory.seek(0)
            socket.send_fds(port, [json.dumps(["fork"]).encode()], [memory.fileno(), *fds])

    @staticmethod
    def taken(fd: int) -> ForkRequest:
        """Read the request from this memory, and close the descriptor."""
        with open(fd, "rb") as memory:
            return ForkRequest(**json.loads(memory.read(REQUEST_BYTES_MAX)))


Begins = Callable[[], Any]  # the task of a child; returns the task of a child that it forked itself, or None


class ForkServer:
    """The fork server of one command; the command is at the other end of `port`."""

    def __init__(self, port: socket.socket) -> None:
        self.port = port
        self.poll = select.poll()
        self.poll.register(port, select.POLLIN)
        signals.leave_to_parent()
        self.running: dict[int, int] = {}  # pidfd -> pid of each child that has not ended

    def run(self) -> Begins:
        """Import and fork on request. Returns only in a child, with the child's task."""
        with contextlib.suppress(ConnectionError):
            while True:
                for fd, _ in self.poll.poll():
                    if fd in self.running:
                        self._reap(fd)
                        continue
                    raw, fds, _, _ = socket.recv_fds(
                        self.port, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                    )
                    if not raw:
                        os._exit(0)  # the command has ended
                    kind, *asked = json.loads(raw)
                    if kind == "need":
                        self.prepare(*asked)
                    elif begins := self._fork(fds[1:], ForkRequest.taken(fds[0])):
                        return begins
        os._exit(0)

    def tell(self, kind: str, *values: Any) -> None:
        self.port.send(json.dumps([kind, *values]).encode())

    def prepare(self, needs: Sequence[tuple[str, str]]) -> None:
        """`needs`: what is said, and "module" to be imported, or "module:function" to be called; it may say more."""
        say = partial(self.tell, "say")
        gc.disable()  # nothing that is imported is garbage, and it is looked at again and again
        for text, name in needs:
            if text:
                say(text)
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)(say)
        interpreter.will_fork()
        gc.enable()
        gc.freeze()  # so that no child copies these pages by looking for garbage on them
        self.tell("ready", unfit())

    def _reap(self, fd: int) -> None:
        pid = self.running.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self.tell("ended", pid, os.waitstatus_to_exitcode(status))

    def _fork(self, fds: list[int], request: ForkRequest) -> Begins | None:
        if why := unfit():
            self.tell("refused", why)
        else:
            leads, led = os.pipe()
            pid = os.fork()
            if not pid:
                os.setsid()
                self.port.close()
                for fd in (leads, led, *self.running):
                    os.close(fd)
                return self._begins(fds, request)
            os.close(led)
            os.read(leads, 1)  # returns at the pipe's end: the child leads its group now, so killing the group works
            os.close(leads)
            watched = os.pidfd_open(pid)
            self.running[watched] = pid
            self.poll.register(watched, select.POLLIN)
            self.tell("pid", pid)
        for fd in fds:
            os.close(fd)
        return None

    def _begins(self, fds: list[int], request: ForkRequest) -> Begins:
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
            os.close(fd)
        env = request.env
        for variable, fd in zip(request.handed, fds[3:], strict=True):
            os.set_inheritable(fd, True)
            env[variable] = str(fd)
        for number in signals.TO_ALL:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in request.ignored else default)
        os.chdir(request.folder)
        interpreter.begin(request.name, env)
        if request.nests and (nested := _nest(fds[3:])):
            return nested.run
        return partial(interpreter.run, [*request.words])


def _nest(fds: Sequence[int]) -> ForkServer | None:
    """Fork a fork server from a command that begins.

    Args:
        fds: descriptors that only the command keeps.

    Returns:
        None in the command; the fork server in the new process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        ours.set_inheritable(True)
        os.environ[GIVEN] = f"{ours.detach()} {pid} {HASH_SEED}"
        return None
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for fd in (nothing, *fds):
        os.close(fd)
    ours.close()
    return ForkServer(theirs)


@dataclass(frozen=True)
class ForkedEnvironment:
    """The fork server that was forked with this command, at the other end of `port`."""

    port: socket.socket
    pid: int
    hash_seed: str  # "": unknown

    @staticmethod
    def take() -> ForkedEnvironment | None:
        """Return it at the first call, if there is one. Processes that this command starts do not inherit it."""
        fd, pid, hash_seed = os.environ.pop(GIVEN, "  ").split(" ")
        if not fd:
            return None
        os.set_inheritable(int(fd), False)
        return ForkedEnvironment(socket.socket(fileno=int(fd)), int(pid), hash_seed)


def main() -> None:
    interpreter.will_fork(first=True)
    begins: Begins | None = ForkServer(socket.socket(fileno=int(os.environ.pop(SOCKET)))).run
    while begins is not None:
        begins = begins()
