"""The record of a teacher: a JSON object a line, as ps-worker and ps-serve write them. docs/files.md has the events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from narrows.protocols.runtime.cli.output import as_json
from narrows.protocols.runtime.storage.record_file import open_record


class TeacherRecord:
    """Writes events of a teacher. The thread of the model and that of the sockets may both write.

    Args:
        path: the file, or an address in a store; "": nothing is written.
        say: gets sentences for the user.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._file = open_record(path, say) if path else None
        self._began_s = time.monotonic()
        self._writing = threading.Lock()
        self.note("start", began=round(time.time(), 3))

    def note(self, event: str, /, **values: Any) -> None:
        """Write one line: the event, the seconds since the start, and these values."""
        if self._file is not None:
            with self._writing:
                seconds = round(time.monotonic() - self._began_s, 6)
                self._file.line(as_json({"event": event, "seconds": seconds, **values}))

    def close(self) -> None:
        if self._file is not None:
            with self._writing:
                self._file.close()
