"""Folders of servers: the lock of --checkpoint-dir, and a folder in the system's temporary one, for checkpoints that are not to
stay behind. A ps-worker has such a folder for what its workers tell each other (worker/runtime/device.py).

Rules
- A folder is locked by the process that made it, for as long as that lives. No child inherits the lock: exec closes it, and
  who forks children for us was started by exec.
- A server that was killed leaves its temporary folder behind. The next one to make a folder removes those of its user that
  nobody holds and that hold MARK: a user's folder may have the same prefix, and a lock of another program.
- The lock of --checkpoint-dir is on the folder itself (flock): it ends with its process and leaves no file. A machine does not
  see the locks of others, so servers on two machines are not kept apart on a shared disk.
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
REMOVED_MAX = 64  # folders, at one start


def lock(folder: str) -> int:
    """Lock the folder of --checkpoint-dir for the server of this process, until the process ends or closes the descriptor.

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
    """A folder, until `close`. `path` names it. Raises UsageError where none can be made."""

    def __init__(self) -> None:
        try:
            remove_left()
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            # The lock has its name only once it is held: nobody finds it before.
            new = Path(self.path, f"{LOCK}.new")
            self.lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(self.lock, MARK)
        except OSError as error:
            where = error.filename or "a temporary folder"
            raise UsageError(f"{where}: {error.strerror}; TMPDIR names a folder on another disk") from None
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it for us
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(Path(self.path, LOCK))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_left() -> None:
    """Remove what killed processes of this user have left, `REMOVED_MAX` folders at most."""
    removed = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # it is another user's, or another process removes it
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
