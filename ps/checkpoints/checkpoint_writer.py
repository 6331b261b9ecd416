"""Writes the checkpoints of one shard in a thread of its own, so that folding goes on. One at a time.

Rules
- The thread writes a copy: the store changes meanwhile. Its memory is kept for the next one: fresh memory costs more
  than the copy itself. That of the first one is asked for in advance, by the thread.
- A disk that refuses ends nothing. Its error is in `WrittenCheckpoint`, and the coordinator asks again in time.
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
    """`kept`: the clocks now on disk. `trouble`: why `clock` is not among them, "" where it is. `took_ns`: copy and all."""

    clock: int
    kept: tuple[int, ...]
    took_ns: int
    trouble: str = ""


class CheckpointWriter:
    """Writes shard `index` into `folder`; files go on `away`, where the folder of checkpoints is on another machine."""

    def __init__(self, folder: Path, index: int, away: ArchiveClient | None = None) -> None:
        self.folder, self.index, self.away = folder, index, away
        self._kept: tuple[int, ...] = ()  # there, as it was said last
        self._copies: dict[str, FloatArray] = {}
        self._thread: Thread | None = None
        self._written: WrittenCheckpoint | None = None

    def write(self, clock: int, arrays: Mapping[str, FloatArray], facts: dict[str, Any], shared: int = -1) -> None:
        """Copy the arrays, and begin to write them; returns before that is done. Waits for the one before. `shared` as in
        checkpoints.write."""
        self.wait()
        began_ns = time.monotonic_ns()
        copies = self._copy(arrays)
        self._thread = Thread(target=self._run, args=(clock, copies, facts, shared, began_ns), daemon=True)
        self._thread.start()

    def prepare(self, arrays: Mapping[str, FloatArray]) -> None:
        """Have the system give the memory of copies of these arrays, beside all else."""
        self._thread = Thread(target=self._touch, args=(dict(arrays),), daemon=True)
        self._thread.start()

    def _touch(self, arrays: dict[str, FloatArray]) -> None:
        rooms = {id(array): np.empty_like(array) for array in arrays.values()}
        for room in rooms.values():
            room.fill(0)
        self._copies = {name: rooms[id(array)] for name, array in arrays.items()}

    def _copy(self, arrays: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
        """One of each, also of an array that has two names."""
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
        """Until nothing is being written. A disk that hangs holds its process, as it would hold any other."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> WrittenCheckpoint | None:
        """Return what was written since the last call."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread, written, self._written = None, self._written, None
        return written

    def forget(self) -> None:
        """Wait for a write, and drop what it says: it belongs to a life of the run that is over."""
        self.wait()
        self.take()
