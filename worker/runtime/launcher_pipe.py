"""Tells the ps-worker that started this process: lines of JSON, on a pipe whose number is in a variable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, TextIO

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.output import STDERR
from narrows.worker.runtime.child_process import is_child

# What a line of the record has of the run, by name: record() takes no such name. Other names are the script's, `loss` and
# `total_steps` among them, which the page shows.
FIGURES = {
    "event": "the kind of a line",
    "seconds": "the time of a line",
    "local_rank": "the worker",
    "clock": "the worker's clock",
    "push_bytes": "bytes sent in the step",
    "pull_bytes": "bytes received in the step",
    "step_seconds": "seconds of the step",
    "encode_seconds": "seconds of it that went to encoding",
    "wait_seconds": "seconds of it that the worker waited",
    "staleness": "clocks that the step was ahead of its state",
    "gain": "by how much updates are scaled",
    "agreement": "how alike the updates of the workers are",
    "held_back": "updates that compression holds back",
    "step_count": "the axis of the run at W&B",
}

_pipe: TextIO | None = None
_pid = 0  # of the process that has opened it


def find() -> bool:
    """Whether a ps-worker listens to this process. It listens to no child process of a worker."""
    global _pipe, _pid
    if os.environ.get("NARROWS_RECORD_FD") and not is_child():
        _pipe, _pid = os.fdopen(int(os.environ.pop("NARROWS_RECORD_FD")), "w"), os.getpid()
    return _pipe is not None and _pid == os.getpid()


def tell(event: str, /, **values: Any) -> None:
    """One line of JSON to ps-worker. A script may have given any names of `values` but those of FIGURES."""
    global _pipe
    if find() and _pipe is not None:
        try:
            _pipe.write(json.dumps({"event": event, **values}) + "\n")
            _pipe.flush()
        except OSError:
            _pipe = None  # it is gone


def check_names(names: Iterable[str]) -> None:
    """Raise UsageError for a name of record() that is a figure of the run."""
    for name in names:
        if name in FIGURES:
            raise UsageError(
                f"record({name}=...): {name!r} is {FIGURES[name]} in the record of the run; give the value another name, for "
                f"example script_{name}"
            )


def complain(text: str) -> None:
    """One line on stderr, which a script goes on without."""
    STDERR.line(f"ps-worker: {text}")


def say(text: str) -> None:
    """Once on the console of all workers of this ps-worker."""
    if find():
        tell("say", text=text)
    else:
        complain(text)
