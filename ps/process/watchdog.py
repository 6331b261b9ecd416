"""The sign of life of a shard's loop: once a second it tells ps-serve by when the next one will come.

ps-serve ends a process whose next sign of life is late: its loop hangs, or the process was stopped. An event takes
longer for larger arrays, which are folded, written for a checkpoint, or read from the disk; so the time allowed grows
with them. Each beat also counts the connections of strangers that were ended, and checks what encryption costs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.encryption_cost import EncryptionCost
from narrows.ps.process.access_control import AccessControl

BEAT_S = 1.0
HANG_S = 15.0  # half of the silence after which members take a server for lost; a kernel is compiled in less
BYTES_PER_S = 20e6  # speed of the slowest disk from which arrays are read


class Watchdog:
    """The sign of life of one shard.

    Args:
        access_control: access control of the process.
        index: the shard's number.
        folder: its folder of checkpoints; None: it has none.
        seals: bytes per second that one core encrypts, 0: not measured.
    """

    def __init__(self, access_control: AccessControl, index: int, folder: Path | None, seals: float = 0.0) -> None:
        self.access_control, self.index, self.folder, self.due_s = access_control, index, folder, 0.0
        self.encryption_cost = EncryptionCost(seals)

    def beat(self, asked: Callable[[], int], clock: Callable[[], int] = lambda: -1) -> None:
        """Give a sign of life if one is due; the loop calls this each turn.

        Args:
            asked: returns the bytes of the arrays.
            clock: returns the clock that all live members have reached; -1: not known.
        """
        if (now := time.monotonic()) < self.due_s:
            return
        self.due_s, nbytes = now + BEAT_S, asked()
        self.access_control.look(nbytes)
        if text := self.encryption_cost.look():
            emit("log", name="encryption", values={"shard": self.index, "text": f"shard {self.index}: {text}"})
        emit("alive", within=HANG_S + (nbytes or self._to_read()) / BYTES_PER_S, clock=clock())

    def _to_read(self) -> int:
        """Bytes of the largest checkpoint: the next message may make a shard without arrays read it."""
        with contextlib.suppress(OSError):
            return max((file.stat().st_size for file in self.folder.iterdir()), default=0) if self.folder else 0
        return 0
