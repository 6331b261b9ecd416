"""Folders of servers: the lock of --checkpoint-dir, and temporary folders for checkpoints that are not kept.

A ps-worker has such a temporary folder too, for files that its workers share (worker/runtime/device.py).

Rules
- The process that made a folder holds its lock until that process ends. No child inherits the lock: exec closes it,
  and the fork server was started by exec.
- A killed server leaves its temporary folder behind. The next process that makes a folder removes those of its user
  that no process has locked and that contain MARK. Without MARK it might be a folder of the user with the same prefix,
  and a lock of another program.
- The lock of --checkpoint-dir is on the folder itself (flock): it ends with its process and leaves no file. One machine
  does not see the locks of another, so on a shared disk servers of two machines are not kept apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from narrows.protocols.errors import UsageError

PREFIX = "narrows-"
LOCK = ".lock"
MARK = b"a temporary folder of narrows\n"  # in the lock file
REMOVED_MAX = 64  # folders removed at one start


def lock(folder: str) -> int:
    """Lock the folder of --checkpoint-dir for this process's server, until the process ends or closes the descriptor.

    Returns:
        The descriptor that holds the lock.

    Raises:
        UsageError: another server of this machine has it.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise UsageError(
            f"--checkpoint-dir {folder}: another ps-serve on this machine writes there; end it, or name another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    return held


class ScratchFolder:
    """A temporary folder at `path`, until `close`. Raises UsageError if it cannot be made."""

    def __init__(self) -> None:
        try:
            remove_left()
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            # The lock file gets its name only once it is locked, so no other process finds it before.
            new = Path(self.path, f"{LOCK}.new")
            self.lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(self.lock, MARK)
        except OSError as error:
            where = error.filename or "a temporary folder"
            raise UsageError(f"{where}: {error.strerror}; TMPDIR names a folder on another disk") from None
        with contextlib.suppress(OSError):  # a file system without locks: no other process removes the folder then
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(Path(self.path, LOCK))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_left() -> None:
    """Remove folders that killed processes of this user have left, `REMOVED_MAX` at most."""
    removed = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # the folder is another user's, or another process removes it
            if path.parent.lstat().st_uid != os.getuid() or path.parent.is_symlink():
                continue
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.pread(lock, len(MARK) + 1, 0) == MARK:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent, ignore_errors=True)
                    removed += 1
            finally:
                os.close(lock)
        if removed == REMOVED_MAX:
            break
