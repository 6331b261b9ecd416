"""Names the processes of a group that hang, by counters in memory that all of them share.

A process that hangs still sends heartbeats, so the server counts it as live and its group waits without end. So the
waiting processes name those that have not reached the same collective operation.
"""

from __future__ import annotations

import os
import tempfile

import numpy as np

TOLD_S = 30.0  # a wait is reported after this time


class GroupLiveness:
    """The counters of a group, as process `rank` sees them.

    Args:
        memory: the path that `make` returned in rank 0. Rank 0 deletes the file once all ranks have opened it.
        rank: the rank of this process.
    """

    def __init__(self, memory: bytes, rank: int) -> None:
        self.rank = rank
        self.calls = 0  # collective operations of this rank so far
        self._all = np.memmap(os.fsdecode(memory), np.int64, "r+")  # `calls` of each rank; -1: it waits for a server

    @staticmethod
    def make(ranks: int) -> bytes:
        """Make the file of the counters, and return its path."""
        number, path = tempfile.mkstemp(prefix="narrows-")
        with os.fdopen(number, "wb") as file:
            file.write(bytes(8 * ranks))
        return os.fsencode(path)

    def come(self) -> None:
        """Note that this process has reached the next collective operation."""
        self.calls += 1
        self._all[self.rank] = self.calls

    def wait(self) -> None:
        """Note that this process waits for a server, and so does not hang."""
        self._all[self.rank] = -1

    def missing(self) -> str:
        """Return a sentence about the ranks that have not reached this operation.

        "": all others wait for a server, or a lower rank that waits here reports them.
        """
        here = [rank for rank, calls in enumerate(self._all) if calls >= self.calls]
        late = [rank for rank, calls in enumerate(self._all) if 0 <= calls < self.calls]
        if not late or min(here) != self.rank:
            return ""
        who = f"process {late[0]} has" if len(late) == 1 else f"processes {', '.join(map(str, late))} have"
        return f"{who} not come to where this group meets for {TOLD_S:g} s; the others wait"
