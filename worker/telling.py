"""Tells the ps-worker that started this process: lines of JSON, on a pipe whose number is in a variable."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO

from narrows.protocols.runtime.output import STDERR

_pipe: TextIO | None = None


def find() -> bool:
    """Whether a ps-worker listens. Processes that the script starts do not find it."""
    global _pipe
    if record_fd := os.environ.pop("NARROWS_RECORD_FD", ""):
        _pipe = os.fdopen(int(record_fd), "w")
    return _pipe is not None


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
