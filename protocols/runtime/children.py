"""The child processes of a command, and what they say, in one bounded queue.

Rules
- A child leads a process group: Ctrl-C reaches it through us, once, and what it started can be ended with it.
- An event is (index of the child, kind, value). A pipe of kind "event" carries one JSON object a line, any other kind text.
- ("exit", code) is the last event of a child: it comes once its pipes are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

EVENTS_MAX = 100_000  # lines that wait to be shown: then their writers wait
PIPES_END_S = 2.0  # a process that a child left behind may keep its pipes open for ever

Event = tuple[int, str, Any]


class Child:
    """One process, the leader of its group."""

    def __init__(self, pid: int, stdin: int = -1) -> None:
        self.pid, self.stdin = pid, stdin
        self.code: int | None = None  # once it has ended; negative: by this signal
        self._over = threading.Event()

    def ended(self, code: int) -> None:
        self.code = code
        self._over.set()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, or None after `timeout_s`."""
        self._over.wait(timeout_s)
        return self.code

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """It and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def write(self, line: str) -> None:
        """Give it a line, if it is still there."""
        with contextlib.suppress(BrokenPipeError):
            if self.stdin >= 0:
                os.write(self.stdin, line.encode() + b"\n")

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1


class Children:
    """Starts children, and hears them."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue(EVENTS_MAX)

    def start(
        self,
        index: int,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        listens: Mapping[int | str, str],
        stdin: bool = False,
        passed: Mapping[str, int] | None = None,
    ) -> Child:
        """Start python with these words.

        listens: the kind of what comes on a descriptor (1, 2), or on one whose number is in a variable. stdin: it gets a pipe.
        passed: descriptors of ours, by the variable that names them to the child.
        """
        env, handed = dict(env), dict(passed or {})
        standard: dict[int, int] = {0: subprocess.DEVNULL}
        pipes: list[tuple[str, int]] = []
        closed: list[int] = []  # ends that are the child's alone
        for where, kind in listens.items():
            ours, theirs = os.pipe()
            pipes.append((kind, ours))
            closed.append(theirs)
            if isinstance(where, int):
                standard[where] = theirs
            else:
                handed[where] = theirs
        to_child = -1
        if stdin:
            standard[0], to_child = os.pipe()
            closed.append(standard[0])
        process = subprocess.Popen(
            [sys.executable, *words],
            env=env | {name: str(fd) for name, fd in handed.items()},
            stdin=standard[0],
            stdout=standard.get(1),
            stderr=standard.get(2),
            pass_fds=tuple(handed.values()),
            start_new_session=True,
        )
        for fd in closed:
            os.close(fd)
        child = Child(process.pid, to_child)
        readers = [threading.Thread(target=self._read, args=(index, *pipe), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(index, child, process, readers), daemon=True).start()
        return child

    def next(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s`."""
        try:
            return self.events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _read(self, index: int, kind: str, fd: int) -> None:
        with open(fd, "rb") as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                if kind != "event":
                    self.events.put((index, kind, text))
                elif line.endswith(b"\n"):  # else the last line of one that was killed while it wrote it
                    self.events.put(_event(index, text))

    def _wait(
        self, index: int, child: Child, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]
    ) -> None:
        child.ended(process.wait())
        deadline = time.monotonic() + PIPES_END_S
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self.events.put((index, "exit", child.code))


def _event(index: int, text: str) -> Event:
    """What stands in a line of events; a library may have written to it too."""
    try:
        return index, "event", json.loads(text)
    except ValueError:
        return index, "err", text


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
