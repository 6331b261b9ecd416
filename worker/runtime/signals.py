"""How a manager ends a script that has joined a run."""

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


_told = threading.Event()  # to end, and no step was taken since


def told_to_end() -> bool:
    """Whether this script was told to end, and ends: also where a Trainer has caught KeyboardInterrupt and calls sys.exit()."""
    return _told.is_set()


def goes_on() -> None:
    """The script has taken another step."""
    _told.clear()


def leave_when_told() -> None:
    """SIGTERM and SIGHUP end this script as Ctrl-C does: it leaves the run. A handler of the script's own stays.

    A manager may send them to each process of a job, and ps-worker, which was told too, passes its own on: the first one counts
    and another one is of the same end. So is a second of its kind where there is a ps-worker. Once more does not wait.
    """
    worker, heard = os.getpid(), Counter[int]()
    passed_on = 1 if find() else 0

    def interrupt(number: int, frame: object) -> None:
        again, first = heard[number] > passed_on, not heard
        heard[number] += 1
        if number != signal.SIGINT and (again or os.getpid() != worker):  # a process that the script has forked is none
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif first or again or os.getpid() != worker:
            _told.set()
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) is default:
                signal.signal(number, interrupt)
