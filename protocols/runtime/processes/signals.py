"""Signals that end a command. A manager may send them to one process of a job or to all; only the command acts on them.

Rules
- The same signal twice within a second counts once: a manager sends it to all processes, and the parent shell sends it
  to the command again.
- A terminal that was closed takes no more lines. The lines are dropped, and the command ends in order.
"""

from __future__ import annotations

import os
import signal
import threading
import time

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TO_ALL = (*ENDING, signal.SIGUSR1)  # signals that a manager may send to processes that a command has started
REPEAT_S = 1.0  # the same signal within this time counts once


def hear(heard: list[int], embedded: bool = False) -> None:
    """Append to `heard` each signal that asks this command to end. Under nohup, SIGHUP stays ignored.

    With NARROWS_PARENT_FD, the end of that descriptor counts as SIGTERM too: nothing else shows that the command's
    parent process was killed.

    Args:
        heard: gets the numbers of the signals.
        embedded: the command runs for another command. The end of its stdin asks it to end, and it ignores signals.
    """
    parent_fd = 0 if embedded else int(os.environ.pop("NARROWS_PARENT_FD", -1))
    if parent_fd >= 0:
        threading.Thread(target=_until_it_ends, args=(parent_fd, heard), daemon=True).start()
    if embedded:
        for number in ENDING:
            signal.signal(number, lambda number, frame: None)  # a handler: scripts would inherit SIG_IGN
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
    """Ignore signals, in a process that a command has started and ends by its stdin or its socket."""
    for number in TO_ALL:
        signal.signal(number, signal.SIG_IGN)
