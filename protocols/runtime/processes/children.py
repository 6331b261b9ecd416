"""The child processes of a command. All that they write comes to the command in one bounded queue of events.

How it works
1. `prepare` starts a fork server (fork_server.py), or takes the one that was forked with this command.
2. `start` makes pipes for the child. The fork server forks the child, or if it cannot, `subprocess` starts one.
3. A thread for each pipe reads lines and puts an event for each into `events`. The command takes them with `next`.
4. A thread for each child waits for its end, then for the end of its pipes, and puts the event "exit".

Rules
- A child leads a process group. So Ctrl-C reaches it through the command, once, and its own children can be killed with
  it.
- An event is (index of the child, kind, value). A line of a pipe of kind "event" is a JSON object: the event's kind is
  its field "event", and its value the object. A line of any other pipe is a value, with the kind of the pipe.
- "exit" is the last event of a child, with its exit code: it comes once the child's pipes are read.
- The fork server forks from its first event "ready" on. Before that, and if "ready" says why it cannot fork, each child
  is an interpreter of its own. The event "say" tells what the fork server is doing.
- The death of a fork server ends no child: the system makes the command their parent (`PR_SET_CHILD_SUBREAPER`). A new
  fork server imports the same, without events. Until it is ready, each child is an interpreter of its own.
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

EVENTS_MAX = 100_000  # lines in the queue; with more, the children that write them wait
PIPES_END_S = 2.0  # limit of reading an ended child's pipes: a process that it left behind may keep them open for ever
FORK_S = 30.0  # limit of a fork: it takes milliseconds, and longer on a machine that swaps
FORKER = -9  # the fork server's index, in place of a child's
# Variable of a child: the pids that may be its parent, separated by commas. A process whose parent is another one was
# started by the child in turn.
STARTED_BY = "NARROWS_STARTED_BY"
GONE = "the process that forks them has ended"
FORKERS_MAX = 20  # fork servers started in place of one that died
FORKER_END_S = 5.0  # limit of waiting for a fork server whose socket has ended: it dies within milliseconds
PR_SET_CHILD_SUBREAPER = 36

Event = tuple[int, str, Any]


class StartedChild:
    """One process, the leader of its group."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = -1  # the command's end of the child's stdin; -1: the command has none
        self.code: int | None = None  # once it has ended; negative: by this signal
        self._over = threading.Event()

    def write_to(self, stdin: int) -> None:
        """Take the command's end of the child's stdin, a file descriptor; -1 for none."""
        self.stdin = stdin

    def ended(self, code: int) -> None:
        self.code = code
        self._over.set()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the child's end. Returns its exit code, or None after `timeout_s`."""
        self._over.wait(timeout_s)
        return self.code

    def reap(self) -> int:
        """Wait for a child of this very process. Returns its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pass_on(self, number: int) -> None:
        """Send this signal if the process handles it, else SIGINT: Python then leaves `with` and `finally` in order."""
        self.signal(number if self._handles(number) else signal.SIGINT)

    def _handles(self, number: int) -> bool:
        try:
            with open(f"/proc/{self.pid}/status") as status:
                caught = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            return False
        return bool(int(caught, 16) >> (number - 1) & 1)

    def kill(self) -> None:
        """Kill the child and all processes of its group. A fork server that was forked with this command leads none."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.signal(signal.SIGKILL)

    def write(self, line: str) -> None:
        """Write a line to the child's stdin, if the child still reads."""
        with contextlib.suppress(BrokenPipeError):
            if self.stdin >= 0:
                os.write(self.stdin, line.encode() + b"\n")

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1


class ChildPipes:
    """The pipes between a command and one child that begins."""

    def __init__(self, listens: Mapping[int | str, str], stdin: bool, passed: Mapping[str, int]) -> None:
        """Make them; the arguments are those of `ChildProcesses.start`."""
        self.standard = [os.open(os.devnull, os.O_RDWR), 1, 2]  # the child's stdin, stdout and stderr
        self.handed = dict(passed)  # variable that names it -> further descriptor of the child
        self.ours: list[tuple[str, int]] = []  # kind of the events, and the end to read them from
        self.theirs = self.standard[:1]  # ends that are the child's alone
        self.to_child = -1  # the command's end of the child's stdin; -1: it has none
        for where, kind in listens.items():
            ours, end = os.pipe()
            self.ours.append((kind, ours))
            self.theirs.append(end)
            if isinstance(where, int):
                self.standard[where] = end
            else:
                self.handed[where] = end
        if stdin:
            self.standard[0], self.to_child = os.pipe()
            self.theirs.append(self.standard[0])

    def close_theirs(self) -> None:
        for fd in self.theirs:
            os.close(fd)

    def close(self) -> None:
        """Close both ends. A child that has its ends nevertheless reads the end of stdin, and writes to nobody."""
        self.close_theirs()
        for _, fd in self.ours:
            os.close(fd)
        if self.to_child >= 0:
            os.close(self.to_child)


Begun = tuple[StartedChild, Callable[[], int | None]]  # a child, and the function that waits for its exit code


class ChildProcesses:
    """Starts children, and collects their events."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue(EVENTS_MAX)
        self.given = fork_server.ForkedEnvironment.take()
        self.hash_seed = (self.given and self.given.hash_seed) or str(secrets.randbelow(1 << 32))
        self.forker: StartedChild | None = None
        self.why: str | None = None  # why the fork server does not fork; "": it does; None: it is not ready yet
        self.forkers = 0  # fork servers started in place of one that died
        self.needs: list[tuple[str, str]] = []  # imports and calls of every fork server
        self.closing = False
        self.forked: dict[int, StartedChild] = {}  # pid -> child of the fork server that has not ended
        self.answers: queue.Queue[StartedChild | str] = queue.Queue()  # a forked child, or why there is none

    @property
    def forks(self) -> bool:
        return self.why == ""

    def prepare(self, env: Mapping[str, str], needs: Sequence[tuple[str, str]]) -> None:
        """Start a fork server. The event "ready" comes later.

        Args:
            env: the environment that all children share.
            needs: modules to import and functions to call, as in fork_server.py.
        """
        if not fork_server.POSSIBLE:
            self._ready("they can be forked on Linux only")
            return
        self.env = env
        self.adopts = _adopt_orphans(True)
        self.port = self._given(env) or self._own(env)
        self.need(needs)
        threading.Thread(target=self._hear_forker, daemon=True).start()

    def need(self, needs: Sequence[tuple[str, str]]) -> None:
        """Have the fork server import more. It forks nothing until it says "ready" again."""
        self.needs += needs
        self._ask(needs)

    def _ask(self, needs: Sequence[tuple[str, str]]) -> None:
        with contextlib.suppress(OSError):  # the fork server has ended; the thread that reads its messages handles that
            self.port.send(json.dumps(["need", [*needs]]).encode())

    def _given(self, env: Mapping[str, str]) -> socket.socket | None:
        """Return the socket of the fork server that was forked with this command, if its hash seed suits."""
        if (given := self.given) is None:
            return None
        forker = StartedChild(given.pid)
        threading.Thread(target=self._wait, args=(FORKER, forker, forker.reap, ()), daemon=True).start()
        if env.get("PYTHONHASHSEED", given.hash_seed) != given.hash_seed:
            given.port.close()  # this ends the fork server
            return None
        self.forker = forker
        return given.port

    def _own(self, env: Mapping[str, str]) -> socket.socket:
        port, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The hash seed is set, so that a command among the children knows it. OpenBLAS makes its threads when it is
        # loaded: one here, and a child asks for more.
        env = {"PYTHONHASHSEED": self.hash_seed, **env, "OPENBLAS_NUM_THREADS": "1"}
        passed = {fork_server.SOCKET: theirs.fileno()}
        self.forker = self.start(FORKER, fork_server.WORDS, env, listens={1: "err", 2: "err"}, passed=passed)
        theirs.close()
        return port

    def close(self) -> None:
        """End the fork server."""
        self.closing = True
        if self.forker is not None:
            self.forker.kill()
            self.forker.wait()
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
        """Start a Python process.

        Args:
            index: of the child, in its events.
            words: the words that follow `python`.
            env: its environment.
            listens: the descriptors to read, each with the kind of its events. A descriptor is 1 or 2, or a new one
                whose number the child finds in this variable.
            stdin: the child's stdin is a pipe, for `StartedChild.write`.
            passed: descriptors of this process for the child, each by the variable that names its number.
            name: of the process, as `top` shows it, if it is forked.
            nests: the child is a command, and has children of its own.
        """
        pipes, begun = ChildPipes(listens, stdin, passed or {}), None
        if self.forks and (begun := self._fork(words, env, pipes, name, nests)) is None:
            pipes.close()
            pipes = ChildPipes(listens, stdin, passed or {})  # the fork server may fork a child with those, too late
        child, wait = begun or self._spawn(words, env, pipes)
        pipes.close_theirs()
        child.write_to(pipes.to_child)
        readers = [threading.Thread(target=self._read, args=(index, *pipe), daemon=True) for pipe in pipes.ours]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(index, child, wait, readers), daemon=True).start()
        return child

    def _spawn(self, words: Sequence[str], env: Mapping[str, str], pipes: ChildPipes) -> Begun:
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**env, STARTED_BY: str(os.getpid()), **{name: str(fd) for name, fd in pipes.handed.items()}},
            stdin=pipes.standard[0],
            stdout=pipes.standard[1],
            stderr=pipes.standard[2],
            pass_fds=tuple(pipes.handed.values()),
            start_new_session=True,
        )
        return StartedChild(process.pid), process.wait

    def _fork(
        self, words: Sequence[str], env: Mapping[str, str], pipes: ChildPipes, name: str, nests: bool
    ) -> Begun | None:
        """Have the fork server fork a child. None: it did not, and "ready" says why."""
        # The child ignores the signals that this process ignores, as after exec.
        ignored = [number for number in signals.TO_ALL if signal.getsignal(number) is signal.SIG_IGN]
        assert self.forker is not None
        own = {**env, STARTED_BY: f"{self.forker.pid},{os.getpid()}"}
        request = fork_server.ForkRequest([*words], own, os.getcwd(), name, [*pipes.handed], ignored, nests)
        try:
            request.send(self.port, [*pipes.standard, *pipes.handed.values()])
            answer = self.answers.get(timeout=FORK_S)
        except (OSError, queue.Empty) as error:
            answer = str(error) or f"no answer came within {FORK_S:.0f} s"
        if isinstance(answer, StartedChild):
            return answer, answer.wait
        self._ready(answer)
        return None

    def _ready(self, why: str) -> None:
        if not self.why:  # the event comes once
            self.why = why
            self.events.put((FORKER, "ready", {"why": why}))

    def _hear_forker(self) -> None:
        forker, answers, forked, again = self.forker, self.answers, self.forked, self.forkers > 0
        with self.port as port, contextlib.suppress(OSError):
            while raw := port.recv(fork_server.MESSAGE_BYTES_MAX):
                kind, *values = json.loads(raw)
                if kind == "pid":
                    forked[values[0]] = child = StartedChild(values[0])
                    if not self.forks:
                        child.kill()  # the answer came too late: another child was started in its place
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
                    self.events.put((FORKER, kind, {"text": values[0]}))
        assert forker is not None
        goes_on = (self.forks or again) and not self.closing
        if goes_on:
            self.why = GONE
        else:
            self._ready(GONE)
        answers.put(GONE)
        forker.wait(FORKER_END_S)  # after its end, its children are children of this process
        for child in forked.values():
            threading.Thread(target=self._adopt, args=(child,), daemon=True).start()
        if goes_on and self.forkers < FORKERS_MAX:
            self.forkers += 1
            self.forked, self.answers = {}, queue.Queue()
            self.port = self._own(self.env)
            self._ask(self.needs)
            self._hear_forker()

    def _adopt(self, child: StartedChild) -> None:
        """Wait for a child of a fork server that has died."""
        try:
            if self.closing or not self.adopts:
                raise ChildProcessError
            code = child.reap()
        except ChildProcessError:
            child.kill()
            code = -signal.SIGKILL
        child.ended(code)

    def next(self, timeout_s: float) -> Event | None:
        """Return the next event, or None after `timeout_s`."""
        try:
            return self.events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _read(self, index: int, kind: str, fd: int) -> None:
        with open(fd, "rb") as stream:
            for line in stream:
                if kind != "event":
                    # A progress bar overwrites its line many times: only its last text counts.
                    text = text_of(line).rstrip("\n")
                    self.events.put((index, kind, text.rstrip("\r").rpartition("\r")[2]))
                elif line.endswith(b"\n"):  # without it: the half line of a child that was killed in the middle
                    self.events.put((index, *event_of(line.decode(errors="replace").rstrip("\n"))))

    def _wait(
        self, index: int, child: StartedChild, wait: Callable[[], int | None], readers: Sequence[threading.Thread]
    ) -> None:
        child.ended(wait() or 0)
        deadline = time.monotonic() + PIPES_END_S
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if index != FORKER:
            self.events.put((index, "exit", child.code))


def _adopt_orphans(on: bool) -> bool:
    """Become the parent of descendants whose parent dies, in place of the system's first process, or stop being so.

    Returns:
        False if the kernel refuses.
    """
    try:
        return int(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def event_of(text: str) -> tuple[str, Any]:
    """Return kind and value of the event in a line; ("err", the line) for the text of a library on the same pipe."""
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
