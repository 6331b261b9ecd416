"""How a manager ends a script that has joined a run."""

from __future__ import annotations

import os
import signal
import threading

DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


def leave_when_told() -> None:
    """SIGTERM and SIGHUP end this script as Ctrl-C does: it leaves the run. A handler of the script's own stays.

    A manager may send them to each process of a job, and ps-worker, which was told too, sends SIGINT: the first one counts, and
    another one is of the same end. The same one again does not wait.
    """
    worker, heard = os.getpid(), set[int]()

    def interrupt(number: int, frame: object) -> None:
        again, first = number in heard, not heard
        heard.add(number)
        if number != signal.SIGINT and (again or os.getpid() != worker):  # a process that the script has forked is none
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif first or again or os.getpid() != worker:
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) is default:
                signal.signal(number, interrupt)
