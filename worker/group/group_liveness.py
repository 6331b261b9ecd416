"""How far each process of a group is, in memory of this machine that all of them see. Those that wait name those that have not
come: nothing else would, for a process that hangs is alive to the server, and its group waits."""

from __future__ import annotations

import os
import tempfile

import numpy as np

TOLD_S = 30.0  # a wait of a group is silent for so long


class GroupLiveness:
    """As process `rank` sees it. memory: the path that `make` has returned in the first one, until all have opened it."""

    def __init__(self, memory: bytes, rank: int) -> None:
        self.rank = rank
        self.calls = 0  # into the group, so far
        self._all = np.memmap(os.fsdecode(memory), np.int64, "r+")  # calls of each, below 0: it waits for a server

    @staticmethod
    def make(ranks: int) -> bytes:
        number, path = tempfile.mkstemp(prefix="narrows-")
        with os.fdopen(number, "wb") as file:
            file.write(bytes(8 * ranks))
        return os.fsencode(path)

    def come(self) -> None:
        """This process is where all of them meet next."""
        self.calls += 1
        self._all[self.rank] = self.calls

    def wait(self) -> None:
        """This process waits for a server, which is no fault of its own."""
        self._all[self.rank] = -1

    def missing(self) -> str:
        """A sentence about those that have not come where this one waits; "": another process says it, or they wait too."""
        here = [rank for rank, calls in enumerate(self._all) if calls >= self.calls]
        late = [rank for rank, calls in enumerate(self._all) if 0 <= calls < self.calls]
        if not late or min(here) != self.rank:
            return ""
        who = f"process {late[0]} has" if len(late) == 1 else f"processes {', '.join(map(str, late))} have"
        return f"{who} not come to where this group meets for {TOLD_S:g} s; the others wait"
