"""Writes the checkpoints of one shard. The shard's own thread writes the arrays, another one what takes longer.

How it works
1. `write` hands the arrays to the system, in BLOCK_BYTES at a time (checkpoint_files.py: `ComingCheckpoint`). That is as
   fast as a copy while the system has memory for files, and the arrays may change afterwards.
2. A slow disk holds the shard's thread for DIRECT_S at most. The blocks that are left are copied.
3. A thread writes these blocks, reads the file for its checksums, flushes it, sends it to the address of the run, if the
   run has one, and gives it its name. So the shard folds meanwhile.

Rules
- A write that fails ends nothing. Its error is in `WrittenCheckpoint`, and the coordinator asks for a later checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from narrows.protocols.errors import NarrowsError
from narrows.protocols.runtime.storage.object_store import FileStoreError
from narrows.protocols.runtime.storage.store_copy import NO_COPY, FolderCopy
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.checkpoints.checkpoint_files import ComingCheckpoint
from narrows.ps.checkpoints.remote_archive import ArchiveClient
from narrows.ps.store.changes import FloatArray

DIRECT_S = 2.0  # how long a shard's own thread writes; workers take a server for lost after much longer


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """The result of one write."""

    clock: int
    kept: tuple[int, ...]  # the clocks whose files are now on disk, ascending
    took_ns: int  # time of the whole write
    trouble: str = ""  # why `clock` is not among them, "" if it is


class CheckpointWriter:
    """Writes the checkpoints of one shard.

    Args:
        folder: the folder to write to.
        index: the shard's number.
        away: of a remote shard: sends each file on to the folder of shard 0's machine.
        copy: where else the files of the folder are kept.
    """

    def __init__(self, folder: Path, index: int, away: ArchiveClient | None = None, copy: FolderCopy = NO_COPY) -> None:
        self.folder, self.index, self.away, self.copy = folder, index, away, copy
        self._kept: tuple[int, ...] = ()  # clocks on shard 0's machine, by its newest answer
        self._thread: Thread | None = None
        self._written: WrittenCheckpoint | None = None

    def write(self, clock: int, arrays: Mapping[str, FloatArray], facts: dict[str, Any], shared: int = -1) -> None:
        """Begin to write the arrays. They may change once this returns. First waits for an earlier write.

        Args:
            clock: of the checkpoint.
            arrays: float32 arrays by name; one array may have two names.
            facts: what the file says of itself, as in `checkpoint_files.write`.
            shared: as in `checkpoint_files.write`.
        """
        self.wait()
        began_ns = time.monotonic_ns()
        begun: ComingCheckpoint | OSError
        try:
            begun = ComingCheckpoint(self.folder, self.index, clock, arrays, facts, DIRECT_S, self.copy)
        except OSError as error:
            begun = error
        self._thread = Thread(target=self._run, args=(clock, begun, facts["shards"], shared, began_ns), daemon=True)
        self._thread.start()

    def _run(self, clock: int, begun: ComingCheckpoint | OSError, shards: int, shared: int, began_ns: int) -> None:
        trouble = ""
        try:
            if isinstance(begun, OSError):
                raise begun
            kept = begun.finish(shared)
            if self.away is not None:
                kept = self._kept = self.away.keep(clock, shards, shared)
        except (OSError, NarrowsError) as error:
            kept = self._kept if self.away is not None else checkpoint_files.clocks(self.folder, self.index)
            named = isinstance(error, (NarrowsError, FileStoreError))
            trouble = str(error) if named else f"{self.folder}: {getattr(error, 'strerror', None) or error}"
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
