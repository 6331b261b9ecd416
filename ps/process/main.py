"""One server process, started by ps-serve: `python -m narrows.ps.process.main`, told what it is by a line of JSON on stdin.

It prints one JSON object a line. The end of stdin means: checkpoint and stop; so no process outlives its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import partial

from narrows.protocols.runtime.processes import signals

DESCRIPTORS_MAX = 1 << 16
JOURNAL = ("NARROWS_JOURNAL_0", "NARROWS_JOURNAL_1")  # variables that name the descriptors of its files


def may_open_more() -> None:
    """Connections that never speak must not take the last descriptor: as many as the system lets this process have."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def first_line(fd: int) -> bytes:
    """Of what is read there, and no byte more: the runner watches the rest. b"": it ends before."""
    line = bytearray()
    while byte := os.read(fd, 1):
        if byte == b"\n":
            return bytes(line)
        line += byte
    return b""


def main() -> int:
    may_open_more()
    signals.leave_to_parent()
    line = first_line(0)
    if not line:
        return 0  # its parent was killed before it said anything
    told = json.loads(line)
    from narrows.compression import warm_up
    from narrows.protocols.config.settings import Settings
    from narrows.protocols.errors import NarrowsError
    from narrows.protocols.runtime.cli.output import emit
    from narrows.ps.process.machine_factory import MachineFactory
    from narrows.ps.process.process_lifecycle import run

    settings, told["done"] = Settings(**told.pop("settings")), tuple(told["done"])
    warm_up(lambda text: emit("say", text=text))
    both = (int(os.environ[JOURNAL[0]]), int(os.environ[JOURNAL[1]])) if JOURNAL[0] in os.environ else None
    try:
        run(MachineFactory(settings=settings, **told), partial(emit, "bound"), both)
    except NarrowsError as error:
        emit("error", text=str(error), code=error.exit_code)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
