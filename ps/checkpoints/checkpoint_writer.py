"""Writes the checkpoints of one shard in a thread, one at a time, so that the shard folds meanwhile.

Rules
- The thread writes a copy of the arrays, since the store changes meanwhile. The memory of the copy is kept for the next
  one: fresh memory costs more than the copy itself. The thread gets the memory of the first copy in advance.
- A write that fails ends nothing. Its error is in `WrittenCheckpoint`, and the coordinator asks for a later checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from narrows.protocols.errors import NarrowsError
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.checkpoints.remote_archive import ArchiveClient
from narrows.ps.store.changes import FloatArray


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """The result of one write."""

    clock: int
    kept: tuple[int, ...]  # the clocks whose files are now on disk, ascending
    took_ns: int  # time of copy and write together
    trouble: str = ""  # why `clock` is not among them, "" if it is


class CheckpointWriter:
    """Writes the checkpoints of one shard.

    Args:
        folder: the folder to write to.
        index: the shard's number.
        away: of a remote shard: sends each file on to the folder of shard 0's machine.
    """

    def __init__(self, folder: Path, index: int, away: ArchiveClient | None = None) -> None:
        self.folder, self.index, self.away = folder, index, away
        self._kept: tuple[int, ...] = ()  # clocks on shard 0's machine, by its newest answer
        self._copies: dict[str, FloatArray] = {}  # memory for the next copy, by the name of the array
        self._thread: Thread | None = None
        self._written: WrittenCheckpoint | None = None

    def write(self, clock: int, arrays: Mapping[str, FloatArray], facts: dict[str, Any], shared: int = -1) -> None:
        """Copy the arrays, and begin to write them. Returns after the copy; first waits for an earlier write.

        Args:
            clock: of the checkpoint.
            arrays: float32 arrays by name; one array may have two names.
            facts: what the file says of itself, as in `checkpoint_files.write`.
            shared: as in `checkpoint_files.write`.
        """
        self.wait()
        began_ns = time.monotonic_ns()
        copies = self._copy(arrays)
        self._thread = Thread(target=self._run, args=(clock, copies, facts, shared, began_ns), daemon=True)
        self._thread.start()

    def prepare(self, arrays: Mapping[str, FloatArray]) -> None:
        """Get memory for copies of these arrays from the system, in the thread."""
        self._thread = Thread(target=self._touch, args=(dict(arrays),), daemon=True)
        self._thread.start()

    def _touch(self, arrays: dict[str, FloatArray]) -> None:
        rooms = {id(array): np.empty_like(array) for array in arrays.values()}
        for room in rooms.values():
            room.fill(0)
        self._copies = {name: rooms[id(array)] for name, array in arrays.items()}

    def _copy(self, arrays: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
        """Copy each array once, also one that has two names."""
        of: dict[int, FloatArray] = {}
        spare, self._copies = self._copies, {}
        for name, array in arrays.items():
            copy = of.get(id(array))
            if copy is None:
                copy = spare.get(name)
                if copy is None or copy.shape != array.shape or any(copy is used for used in of.values()):
                    copy = np.empty_like(array)
                np.copyto(copy, array)
                of[id(array)] = copy
            self._copies[name] = copy
        return self._copies

    def _run(
        self, clock: int, arrays: dict[str, FloatArray], facts: dict[str, Any], shared: int, began_ns: int
    ) -> None:
        trouble = ""
        try:
            kept = checkpoint_files.write(self.folder, self.index, clock, arrays, facts, shared)
            if self.away is not None:
                kept = self._kept = self.away.keep(clock, facts["shards"], shared)
        except (OSError, NarrowsError) as error:
            kept = self._kept if self.away is not None else checkpoint_files.clocks(self.folder, self.index)
            trouble = str(error) if isinstance(error, NarrowsError) else f"{self.folder}: {error.strerror or error}"
        self._written = WrittenCheckpoint(clock, kept, time.monotonic_ns() - began_ns, trouble)

    def wait(self) -> None:
        """Wait until no write is under way. A disk that hangs makes its process wait without limit, as any process."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> WrittenCheckpoint | None:
        """Return the result of the write that ended since the last call, None: none has."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread, written, self._written = None, self._written, None
        return written

    def forget(self) -> None:
        """Wait for a write under way, and drop its result: it belongs to a generation that is over."""
        self.wait()
        self.take()
