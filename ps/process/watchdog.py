"""The sign of life that a shard's loop gives to ps-serve, once a second, and by when it will give the next one. Strangers, and
what encryption costs, are looked at then.

A loop that hangs gives none, and neither does a process that was stopped. An event takes longer for larger arrays: they are
folded, copied for a checkpoint, or read from the disk.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.encryption_cost import SealingCost
from narrows.ps.process.access_control import AccessControl

BEAT_S = 1.0
HANG_S = 15.0  # half of the silence after which members take a server for lost; a kernel is compiled in less
BYTES_PER_S = 20e6  # of the slowest disk from which arrays are read


class Watchdog:
    """The sign of life of shard `index`, with checkpoints in `folder`. `seals`: bytes a second that a core encrypts."""

    def __init__(self, gate: AccessControl, index: int, folder: Path | None, seals: float = 0.0) -> None:
        self.gate, self.index, self.folder, self.due_s = gate, index, folder, 0.0
        self.sealing = SealingCost(seals)

    def beat(self, asked: Callable[[], int]) -> None:
        """The loop turns. `asked`: bytes of the machine's arrays."""
        if (now := time.monotonic()) < self.due_s:
            return
        self.due_s, nbytes = now + BEAT_S, asked()
        self.gate.look(nbytes)
        if text := self.sealing.look():
            emit("log", name="encryption", values={"shard": self.index, "text": f"shard {self.index}: {text}"})
        emit("alive", within=HANG_S + (nbytes or self._to_read()) / BYTES_PER_S)

    def _to_read(self) -> int:
        """Bytes of the largest checkpoint, while there are no arrays yet: the next message may bring it in."""
        with contextlib.suppress(OSError):
            return max((file.stat().st_size for file in self.folder.iterdir()), default=0) if self.folder else 0
        return 0
