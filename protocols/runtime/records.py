"""The file of a record: what an earlier run has written is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from narrows.protocols.errors import UsageError

KEPT_MAX = 1000  # records of earlier runs beside a new one


def open_record(path: str, say: Callable[[str], None]) -> TextIO:
    """Open `path` for a run. A file that has something is renamed to PATH.1 first, or the next number that is free: counters
    and seconds of a record begin with its run. Raises UsageError."""
    try:
        if os.path.isfile(path) and os.path.getsize(path):
            free = (name for n in range(KEPT_MAX) if not os.path.lexists(name := f"{path}.{n + 1}"))
            if (kept := next(free, None)) is None:
                raise UsageError(
                    f"--record {path}: {KEPT_MAX} older ones are beside it; move some away, or name another file"
                )
            os.rename(path, kept)
            say(f"the record of an earlier run is kept as {kept}")
        return open(path, "w")
    except OSError as error:
        raise UsageError(f"--record {path}: {error.strerror}") from None
