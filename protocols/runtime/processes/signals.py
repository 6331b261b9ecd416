"""Signals that end a command. A manager may send them to one process of a job, or to each: then the command decides alone.

Rules
- The same signal twice within a second is one: a manager tells all processes, and the shell above tells ours again.
- A terminal that was closed takes no more lines: they go nowhere, and the end goes on.
"""

from __future__ import annotations

import os
import signal
import threading
import time

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TO_ALL = (*ENDING, signal.SIGUSR1)  # what a manager may send to processes that a command has started
REPEAT_S = 1.0


def hear(heard: list[int], embedded: bool = False) -> None:
    """Append to `heard` each signal that asks this command to end. nohup keeps what it means.

    One that is embedded in another process is asked by the end of its stdin, and leaves signals to that one. One that has
    NARROWS_PARENT_FD is asked by the end of that too: nothing else says that who started it was killed.
    """
    parent_fd = 0 if embedded else int(os.environ.pop("NARROWS_PARENT_FD", -1))
    if parent_fd >= 0:
        threading.Thread(target=_until_it_ends, args=(parent_fd, heard), daemon=True).start()
    if embedded:
        for number in ENDING:
            signal.signal(number, lambda number, frame: None)  # to ignore it would be handed down to scripts
        return
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
    last: dict[int, float] = {}

    def handler(number: int, frame: object) -> None:
        now = time.monotonic()
        if now - last.get(number, -REPEAT_S) >= REPEAT_S:
            heard.append(number)
            last[number] = now
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in terminals:
                os.dup2(nowhere, fd)
            os.close(nowhere)

    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _until_it_ends(fd: int, heard: list[int]) -> None:
    while os.read(fd, 4096):
        pass
    heard.append(signal.SIGTERM)


def leave_to_parent() -> None:
    """In a process that a command has started, and ends by its stdin or its socket."""
    for number in TO_ALL:
        signal.signal(number, signal.SIG_IGN)
