"""Tells the ps-worker that started this process: lines of JSON, on a pipe whose number is in a variable."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO

from narrows.protocols.runtime.output import STDERR
from narrows.worker.child_process import is_child

_pipe: TextIO | None = None
_pid = 0  # of the process that has opened it


def find() -> bool:
    """Whether a ps-worker listens to this process. It listens to no child process of a worker."""
    global _pipe, _pid
    if os.environ.get("NARROWS_RECORD_FD") and not is_child():
        _pipe, _pid = os.fdopen(int(os.environ.pop("NARROWS_RECORD_FD")), "w"), os.getpid()
    return _pipe is not None and _pid == os.getpid()


def tell(event: str, **values: Any) -> None:
    """One line of JSON to ps-worker."""
    global _pipe
    if find() and _pipe is not None:
        try:
            _pipe.write(json.dumps({"event": event, **values}) + "\n")
            _pipe.flush()
        except OSError:
            _pipe = None  # it is gone


def complain(text: str) -> None:
    """One line on stderr, which a script goes on without."""
    STDERR.line(f"ps-worker: {text}")


def say(text: str) -> None:
    """Once on the console of all workers of this ps-worker."""
    if find():
        tell("say", text=text)
    else:
        complain(text)
