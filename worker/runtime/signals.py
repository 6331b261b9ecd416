"""Signals by which a manager ends a script that has joined a run."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

from narrows.worker.runtime.launcher_pipe import find

DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


_told = threading.Event()  # set by a signal; a further step clears it


def told_to_end() -> bool:
    """Return whether a signal ends this script, also if a Trainer has caught KeyboardInterrupt and calls sys.exit()."""
    return _told.is_set()


def goes_on() -> None:
    """Note that the script has taken another step, and so goes on in spite of a signal."""
    _told.clear()


def leave_when_told() -> None:
    """Make SIGTERM and SIGHUP end this script as Ctrl-C does: it leaves the run. The script's own handlers stay.

    A manager may signal each process of a job, and ps-worker passes the signal that it receives itself on. So the first
    signal raises KeyboardInterrupt, and further kinds of signals are ignored, as is one repetition of each kind if
    there is a ps-worker. A repetition after that ends the script at once.
    """
    worker, heard = os.getpid(), Counter[int]()
    passed_on = 1 if find() else 0

    def interrupt(number: int, frame: object) -> None:
        again, first = heard[number] > passed_on, not heard
        heard[number] += 1
        if number != signal.SIGINT and (again or os.getpid() != worker):  # a forked process is no worker
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif first or again or os.getpid() != worker:
            _told.set()
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) is default:
                signal.signal(number, interrupt)
