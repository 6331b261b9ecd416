"""Sends events to the ps-worker that started this process: lines of JSON, on the pipe of NARROWS_RECORD_FD."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, TextIO

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.output import CommandConsole
from narrows.worker.runtime.child_process import is_child
from narrows.worker.runtime.config import take, told

# The run's own figures in a line of the record, by name. record() refuses these names. All other names are the
# script's; the dashboard shows two of them, `loss` and `total_steps`.
FIGURES = {
    "event": "the kind of a line",
    "seconds": "the time of a line",
    "local_rank": "the worker",
    "clock": "the worker's clock",
    "push_bytes": "bytes sent in the step",
    "pull_bytes": "bytes received in the step",
    "step_seconds": "seconds of the step",
    "script_seconds": "seconds of it that the script took",
    "difference_seconds": "seconds of it that reading an update took",
    "encode_seconds": "seconds of it that went to encoding",
    "wait_seconds": "seconds of it that the worker waited",
    "fold_seconds": "seconds of it that adding received states took",
    "compose_seconds": "seconds of it that composing the replica took",
    "teacher_seconds": "seconds of it that the worker waited for a teacher",
    "teacher_bytes_up": "bytes sent to teachers in the step",
    "teacher_bytes_down": "bytes received from teachers in the step",
    "teacher_missed": "batches of the step without soft targets",
    "staleness": "clocks that the step was ahead of its state",
    "gain": "by how much updates are scaled",
    "agreement": "how alike the updates of the workers are",
    "held_back": "updates that compression holds back",
    "step_count": "the axis of the run at W&B",
}

_pipe: TextIO | None = None
_pid = 0  # the process that has opened the pipe


def find() -> bool:
    """Open the pipe, if there is one. Returns True if a ps-worker listens to this process; never in a child process."""
    global _pipe, _pid
    if told("record_fd") >= 0 and not is_child():
        _pipe, _pid = os.fdopen(take("record_fd"), "w"), os.getpid()
    return _pipe is not None and _pid == os.getpid()


def tell(event: str, /, **values: Any) -> None:
    """Send one event to ps-worker, as a line of JSON.

    Args:
        event: the kind of the event.
        values: its fields. A script's record() may have any names except those of FIGURES.
    """
    global _pipe
    if find() and _pipe is not None:
        try:
            _pipe.write(json.dumps({"event": event, **values}) + "\n")
            _pipe.flush()
        except OSError:
            _pipe = None  # ps-worker has ended


def check_names(names: Iterable[str]) -> None:
    """Raise UsageError if a name given to record() is one of FIGURES."""
    for name in names:
        if name in FIGURES:
            raise UsageError(
                f"record({name}=...): {name!r} is {FIGURES[name]} in the record of the run; give the value another name, for "
                f"example script_{name}"
            )


def _relay(text: str) -> bool:
    """Have ps-worker print a line. Returns False without a ps-worker."""
    if not find():
        return False
    tell("say", text=text)
    return True


say_here = CommandConsole("ps-worker").say  # each worker prints its own lines, on its stderr
say = CommandConsole("ps-worker", relay=_relay).say  # ps-worker prints a line once for all of its workers
