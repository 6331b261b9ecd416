"""The child processes of a command, and what they say, in one bounded queue.

Rules
- A child leads a process group: Ctrl-C reaches it through us, once, and what it started can be ended with it.
- An event is (index of the child, kind, value). A line of a pipe of kind "event" is a JSON object: its "event" is the kind, and
  it the value. A line of any other pipe is the value, with the kind of the pipe.
- "exit" is the last event of a child, with its code: it comes once its pipes are read.
- Children are forked by a nursery (fork_server.py) from its first event "ready" on. Before that, and where that says
  why there is no fork, each is an interpreter of its own. The nursery's "say" is what it does meanwhile.
- A nursery that dies takes no child along: the system makes the command their parent (`PR_SET_CHILD_SUBREAPER`). Another
  nursery imports the same in silence; until it is ready, each child is an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from narrows.protocols.runtime.cli.output import text_of
from narrows.protocols.runtime.processes import fork_server, signals

EVENTS_MAX = 100_000  # lines that wait to be shown: then their writers wait
PIPES_END_S = 2.0  # a process that a child left behind may keep its pipes open for ever
FORK_S = 30.0  # a fork takes milliseconds, and on a machine that swaps longer
NURSERY = -9  # in place of a child's index
STARTED_BY = (
    "NARROWS_STARTED_BY"  # who may be the parent of a child, after commas: of what that starts in turn, others are
)
GONE = "the process that forks them has ended"
NURSERIES_MAX = 20  # that take the place of one that died
NURSERY_END_S = 5.0  # a process whose socket has ended is gone within milliseconds
PR_SET_CHILD_SUBREAPER = 36

Event = tuple[int, str, Any]


class StartedChild:
    """One process, the leader of its group."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = -1  # where its stdin is ours
        self.code: int | None = None  # once it has ended; negative: by this signal
        self._over = threading.Event()

    def ended(self, code: int) -> None:
        self.code = code
        self._over.set()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, or None after `timeout_s`."""
        self._over.wait(timeout_s)
        return self.code

    def reap(self) -> int:
        """Wait for it where it is our own; returns its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pass_on(self, number: int) -> None:
        """Send this signal where the process handles it, else SIGINT: Python then leaves `with` and `finally` in order."""
        self.signal(number if self._handles(number) else signal.SIGINT)

    def _handles(self, number: int) -> bool:
        try:
            with open(f"/proc/{self.pid}/status") as status:
                caught = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            return False
        return bool(int(caught, 16) >> (number - 1) & 1)

    def kill(self) -> None:
        """It and whatever it started. A nursery that was given to us leads no group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.signal(signal.SIGKILL)

    def write(self, line: str) -> None:
        """Give it a line, if it is still there."""
        with contextlib.suppress(BrokenPipeError):
            if self.stdin >= 0:
                os.write(self.stdin, line.encode() + b"\n")

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1


class ChildProcesses:
    """Starts children, and hears them."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue(EVENTS_MAX)
        self.given = fork_server.ForkedEnvironment.take()
        self.hash_seed = (self.given and self.given.hash_seed) or str(secrets.randbelow(1 << 32))
        self.nursery: StartedChild | None = None
        self.why: str | None = None  # the nursery does not fork; "": it does; None: it has not said yet
        self.nurseries = 0  # that took the place of one that died
        self.needs: list[tuple[str, str]] = []  # of all nurseries
        self.closing = False
        self.forked: dict[int, StartedChild] = {}  # by it, that have not ended
        self.answers: queue.Queue[StartedChild | str] = queue.Queue()  # of the nursery: a child, or why there is none

    @property
    def forks(self) -> bool:
        return self.why == ""

    def prepare(self, env: Mapping[str, str], needs: Sequence[tuple[str, str]]) -> None:
        """Have a nursery, in the environment that all children share; `needs` as in fork_server.py. "ready" is to come."""
        if not fork_server.POSSIBLE:
            self._ready("they can be forked on Linux only")
            return
        self.env = env
        self.adopts = _adopt_orphans(True)
        self.port = self._given(env) or self._own(env)
        self.need(needs)
        threading.Thread(target=self._hear_nursery, daemon=True).start()

    def need(self, needs: Sequence[tuple[str, str]]) -> None:
        """Let the nursery import more, and say "ready" again; until then it forks nothing."""
        self.needs += needs
        self._ask(needs)

    def _ask(self, needs: Sequence[tuple[str, str]]) -> None:
        with contextlib.suppress(OSError):  # it has ended, and whoever hears it says so
            self.port.send(json.dumps(["need", [*needs]]).encode())

    def _given(self, env: Mapping[str, str]) -> socket.socket | None:
        """The socket of the nursery that was forked with this command, if its children may have that one's hash seed."""
        if (given := self.given) is None:
            return None
        nursery = StartedChild(given.pid)
        threading.Thread(target=self._wait, args=(NURSERY, nursery, nursery.reap, ()), daemon=True).start()
        if env.get("PYTHONHASHSEED", given.hash_seed) != given.hash_seed:
            given.port.close()  # which ends it
            return None
        self.nursery = nursery
        return given.port

    def _own(self, env: Mapping[str, str]) -> socket.socket:
        port, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The hash seed is known, so that a command among the children can tell it. OpenBLAS makes its threads when it is
        # loaded: a child asks for more.
        env = {"PYTHONHASHSEED": self.hash_seed, **env, "OPENBLAS_NUM_THREADS": "1"}
        passed = {fork_server.SOCKET: theirs.fileno()}
        self.nursery = self.start(NURSERY, fork_server.WORDS, env, listens={1: "err", 2: "err"}, passed=passed)
        theirs.close()
        return port

    def close(self) -> None:
        """End the nursery."""
        self.closing = True
        if self.nursery is not None:
            self.nursery.kill()
            self.nursery.wait()
        _adopt_orphans(False)

    def start(
        self,
        index: int,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        listens: Mapping[int | str, str],
        stdin: bool = False,
        passed: Mapping[str, int] | None = None,
        name: str = "",
        nests: bool = False,
    ) -> StartedChild:
        """Start python with these words.

        listens: the kind of what comes on a descriptor (1, 2), or on one whose number is in a variable. stdin: it gets a pipe.
        passed: descriptors of ours, by the variable that names them to the child. name: as `top` shows it, where it is forked.
        nests: it is a command, which has children of its own.
        """
        standard, handed = [os.open(os.devnull, os.O_RDWR), 1, 2], dict(passed or {})
        pipes: list[tuple[str, int]] = []
        theirs = standard[:1]  # ends that are the child's alone
        for where, kind in listens.items():
            ours, end = os.pipe()
            pipes.append((kind, ours))
            theirs.append(end)
            if isinstance(where, int):
                standard[where] = end
            else:
                handed[where] = end
        to_child = -1
        if stdin:
            standard[0], to_child = os.pipe()
            theirs.append(standard[0])
        forked = self._fork(words, env, name, nests, standard, handed) if self.forks else None
        child, wait = forked or self._spawn(words, env, standard, handed)
        for fd in theirs:
            os.close(fd)
        child.stdin = to_child
        readers = [threading.Thread(target=self._read, args=(index, *pipe), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(index, child, wait, readers), daemon=True).start()
        return child

    def _spawn(
        self, words: Sequence[str], env: Mapping[str, str], standard: Sequence[int], handed: Mapping[str, int]
    ) -> tuple[StartedChild, Callable[[], int | None]]:
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**env, STARTED_BY: str(os.getpid()), **{name: str(fd) for name, fd in handed.items()}},
            stdin=standard[0],
            stdout=standard[1],
            stderr=standard[2],
            pass_fds=tuple(handed.values()),
            start_new_session=True,
        )
        return StartedChild(process.pid), process.wait

    def _fork(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        name: str,
        nests: bool,
        standard: Sequence[int],
        handed: Mapping[str, int],
    ) -> tuple[StartedChild, Callable[[], int | None]] | None:
        """A child of the nursery, or None where it does not fork."""
        # As exec hands them down.
        ignored = [number for number in signals.TO_ALL if signal.getsignal(number) is signal.SIG_IGN]
        assert self.nursery is not None
        own = {**env, STARTED_BY: f"{self.nursery.pid},{os.getpid()}"}
        request = fork_server.ForkRequest([*words], own, os.getcwd(), name, [*handed], ignored, nests)
        try:
            request.send(self.port, [*standard, *handed.values()])
            answer = self.answers.get(timeout=FORK_S)
        except (OSError, queue.Empty) as error:
            answer = str(error) or f"no answer came within {FORK_S:.0f} s"
        if isinstance(answer, StartedChild):
            return answer, answer.wait
        self._ready(answer)
        return None

    def _ready(self, why: str) -> None:
        if not self.why:  # it is said once
            self.why = why
            self.events.put((NURSERY, "ready", {"why": why}))

    def _hear_nursery(self) -> None:
        nursery, answers, forked, again = self.nursery, self.answers, self.forked, self.nurseries > 0
        with self.port as port, contextlib.suppress(OSError):
            while raw := port.recv(fork_server.MESSAGE_BYTES_MAX):
                kind, *values = json.loads(raw)
                if kind == "pid":
                    forked[values[0]] = child = StartedChild(values[0])
                    if not self.forks:
                        child.kill()  # it came too late: another one was started in its place
                    answers.put(child)
                elif kind == "ended":
                    forked.pop(values[0]).ended(values[1])
                elif kind == "refused":
                    answers.put(values[0])
                elif again:
                    self.why = values[0] if kind == "ready" else self.why
                elif kind == "ready":
                    self._ready(values[0])
                else:
                    self.events.put((NURSERY, kind, {"text": values[0]}))
        assert nursery is not None
        goes_on = (self.forks or again) and not self.closing
        if goes_on:
            self.why = GONE
        else:
            self._ready(GONE)
        answers.put(GONE)
        nursery.wait(NURSERY_END_S)  # then its children are ours
        for child in forked.values():
            threading.Thread(target=self._adopt, args=(child,), daemon=True).start()
        if goes_on and self.nurseries < NURSERIES_MAX:
            self.nurseries += 1
            self.forked, self.answers = {}, queue.Queue()
            self.port = self._own(self.env)
            self._ask(self.needs)
            self._hear_nursery()

    def _adopt(self, child: StartedChild) -> None:
        """Wait for a child of a nursery that has died."""
        try:
            if self.closing or not self.adopts:
                raise ChildProcessError
            code = child.reap()
        except ChildProcessError:
            child.kill()
            code = -signal.SIGKILL
        child.ended(code)

    def next(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s`."""
        try:
            return self.events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _read(self, index: int, kind: str, fd: int) -> None:
        with open(fd, "rb") as stream:
            for line in stream:
                if kind != "event":
                    # A progress bar is written over and over: what it ended with is the line.
                    text = text_of(line).rstrip("\n")
                    self.events.put((index, kind, text.rstrip("\r").rpartition("\r")[2]))
                elif line.endswith(b"\n"):  # else the last line of one that was killed while it wrote it
                    self.events.put((index, *event_of(line.decode(errors="replace").rstrip("\n"))))

    def _wait(
        self, index: int, child: StartedChild, wait: Callable[[], int | None], readers: Sequence[threading.Thread]
    ) -> None:
        child.ended(wait() or 0)
        deadline = time.monotonic() + PIPES_END_S
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if index != NURSERY:
            self.events.put((index, "exit", child.code))


def _adopt_orphans(on: bool) -> bool:
    """Become the parent of descendants whose parent dies from now on, in place of the system's first process, or do so no
    more. False: the kernel refuses."""
    try:
        return int(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def event_of(text: str) -> tuple[str, Any]:
    """Return kind and value of the event that a line holds: ("err", the line) where a library has written to the pipe too."""
    try:
        event = json.loads(text)
        return event["event"], event
    except (ValueError, TypeError, KeyError):
        return "err", text


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
