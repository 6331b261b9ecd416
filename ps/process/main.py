"""The main function of one server process, `python -m narrows.ps.process.main`, which ps-serve starts.

The first line of stdin is the process's `ServerConfig`. The process prints one JSON object a
line. At the end of stdin it writes a checkpoint and stops, so no server process outlives ps-serve.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial

from narrows.protocols.runtime.processes import signals

DESCRIPTORS_MAX = 1 << 16


def may_open_more() -> None:
    """Raise the limit of open files as far as allowed, so that silent connections cannot take the last descriptor."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def first_line(fd: int) -> bytes:
    """Read the first line from `fd` and no byte more, as the runner watches the rest. b"": `fd` ends before."""
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
        return 0  # ps-serve was killed before it sent the config
    from narrows.compression import warm_up
    from narrows.protocols.errors import NarrowsError
    from narrows.protocols.runtime.cli.output import emit
    from narrows.ps.process.config import ServerConfig
    from narrows.ps.process.process_lifecycle import run

    config = ServerConfig.decode(line, os.environ)
    warm_up(lambda text: emit("say", text=text))
    try:
        run(config, partial(emit, "bound"))
    except NarrowsError as error:
        emit("error", text=str(error), code=error.exit_code)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
