"""breakpoint() in a script that ps-worker has started on a terminal: PYTHONBREAKPOINT names `enter`."""

from __future__ import annotations

import os
import pdb
import sys
from typing import Any

from narrows.worker.runtime.config import told
from narrows.worker.runtime.launcher_pipe import tell

_debugger: pdb.Pdb | None = None


def enter(*args: Any, **values: Any) -> None:
    """Stop in the line of breakpoint(). Heartbeats go on, so the other workers wait for this one."""
    global _debugger
    if _debugger is None:
        tell("say", text="a worker is in the debugger: no further progress is shown", quiet=True)
        # ps-worker keeps the terminal, and receives Ctrl-C.
        terminal = os.open(told("tty"), os.O_RDWR | os.O_NOCTTY)
        stdin, stdout = open(terminal), open(os.dup(terminal), "w")  # noqa: SIM115 - as long as the process
        _debugger = pdb.Pdb(stdin=stdin, stdout=stdout, nosigint=True)
    _debugger.set_trace(sys._getframe(1))
