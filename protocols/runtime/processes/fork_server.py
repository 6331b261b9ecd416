"""The nursery: a process that imports what children of a command need, once, and forks each of them.

Rules
- It forks while it has one thread and no device, and else says why not: then each child is an interpreter of its own.
- The command names what is imported, and called. None of it may start a pool of threads or open a device.
- It ends with the socket to its command. Its children end by their own pipes.
- A child that is a command with children of its own gets a nursery too, which is forked from it as it begins: what is imported
  is imported once for all of them.
- Its command says JSON lists to it: ["need", needs], ["fork"]. Beside "fork" come descriptors. The first is of memory with
  the fields of a Request as JSON: an environment may be longer than any message of a socket.
- It says JSON lists to its command: ["say", text], ["ready", why not], ["pid", number], ["refused", why],
  ["ended", pid, code].
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

# It leaves no name in __main__, which becomes that of a script, and no folder that a script has not on its path.
WORDS = [
    "-c",
    "__import__('sys').flags.safe_path or __import__('sys').path.pop(0);"
    "__import__('narrows.protocols.runtime.processes.fork_server', fromlist=['main']).main()",
]
SOCKET = "NARROWS_NURSERY_FD"
GIVEN = "NARROWS_NURSERY"  # to a command that was forked: socket, pid and hash seed of its nursery
_told = os.environ.get("PYTHONHASHSEED", "")
HASH_SEED = _told if _told.isdigit() else ""  # that this interpreter began with, where it is known
MESSAGE_BYTES_MAX = 1 << 16  # of a line between a nursery and its command; the kernel's buffer holds one of them
REQUEST_BYTES_MAX = 1 << 26  # exec takes 6 MB of words and environment at most, and a character is 6 in JSON
DESCRIPTORS_MAX = 17
POSSIBLE = sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def unfit() -> str:
    """Why this process must not be forked, "" where it may be."""
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
    """A child that is to be started, with descriptors beside: stdin, stdout, stderr, and those of `handed`."""

    words: Sequence[str]  # what follows `python`
    env: dict[str, str]
    folder: str  # where it begins
    name: str
    handed: Sequence[str]  # variables that are to hold the numbers of descriptors
    ignored: Sequence[int]  # signals
    nests: bool  # it is a command, and has children of its own

    def send(self, port: socket.socket, fds: Sequence[int]) -> None:
        """Ask the nursery at the other end of `port`. `fds`: see above. Raises OSError."""
        with open(os.memfd_create("narrows-request"), "w+b") as memory:
            memory.write(json.dumps(asdict(self)).encode())
            memory.seek(0)
            socket.send_fds(port, [json.dumps(["fork"]).encode()], [memory.fileno(), *fds])

    @staticmethod
    def taken(fd: int) -> ForkRequest:
        """The request in this memory, which is closed."""
        with open(fd, "rb") as memory:
            return ForkRequest(**json.loads(memory.read(REQUEST_BYTES_MAX)))


Begins = Callable[[], Any]  # what a child is to do; it returns the same of a child of its own, or None


class ForkServer:
    """One command's nursery, at the other end of `port`."""

    def __init__(self, port: socket.socket) -> None:
        self.port = port
        self.poll = select.poll()
        self.poll.register(port, select.POLLIN)
        signals.leave_to_parent()
        self.running: dict[int, int] = {}  # children that have not ended, by their pidfd

    def run(self) -> Begins:
        """Import and fork on request. Returns in a child only, with what it is to do."""
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
            os.read(leads, 1)  # its end: the child leads its group, so that it can be ended
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
    """Fork a nursery from a command that begins; returns it there. `fds`: those of the command alone."""
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
    """The nursery that was forked with this command, at the other end of `port`."""

    port: socket.socket
    pid: int
    hash_seed: str  # "": nobody knows it

    @staticmethod
    def take() -> ForkedEnvironment | None:
        """Return it where there is one, once. Nothing that this process starts hears of it."""
        fd, pid, hash_seed = os.environ.pop(GIVEN, "  ").split(" ")
        if not fd:
            return None
        os.set_inheritable(int(fd), False)
        return ForkedEnvironment(socket.socket(fileno=int(fd)), int(pid), hash_seed)


def main() -> None:
    begins: Begins | None = ForkServer(socket.socket(fileno=int(os.environ.pop(SOCKET)))).run
    while begins is not None:
        begins = begins()
