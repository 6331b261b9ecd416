"""The second place of the files of a folder: none, or an object store.

A run keeps the files of an address in a temporary folder of its machine. It maps them there, flushes them and renames
them as those of any folder, and each is in the store before it gets its name in the folder. So whatever has a name in
the folder is in the store, and a process that is killed in between leaves an object that is whole.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Protocol

from narrows.protocols.addresses import is_stored
from narrows.protocols.runtime.cli.output import set_aside
from narrows.protocols.runtime.processes.scratch import ScratchFolder
from narrows.protocols.runtime.storage.object_store import FileStore

Wanted = Callable[[str], object]  # true for the names that are meant


class FolderCopy(Protocol):
    """The other place of a folder's files. Each method raises `FileStoreError`, an OSError, if the place fails."""

    def put(self, path: Path, name: str) -> object:
        """Copy a file that is about to get this name in its folder. It is safe there once this returns."""
        ...

    def names(self, folder: Path) -> Collection[str]:
        """Return the names of all files, there and in the folder."""
        ...

    def pull(self, folder: Path, wanted: Wanted) -> int:
        """Fetch the files that the folder lacks, and return their number. Their times are those of the other place."""
        ...

    def remove(self, which: Callable[[Collection[str]], Iterable[str]]) -> object:
        """Remove files there. `which` gets all names, and returns those to remove."""
        ...

    def set_aside(self, folder: Path, wanted: Wanted, before_unix: float) -> list[str]:
        """Rename files that were written before this time, to NAME.1 or the next free number. Return the new names."""
        ...


class NoCopy:
    """A folder of this machine, whose files are nowhere else."""

    def put(self, path: Path, name: str) -> None: ...

    def names(self, folder: Path) -> Collection[str]:
        return [path.name for path in folder.glob("*")]

    def pull(self, folder: Path, wanted: Wanted) -> int:
        return 0

    def remove(self, which: Callable[[Collection[str]], Iterable[str]]) -> None: ...

    def set_aside(self, folder: Path, wanted: Wanted, before_unix: float) -> list[str]:
        kept = list[str]()
        for path in sorted(folder.glob("*")):
            with suppress(OSError):  # another worker may rename it first
                if wanted(path.name) and path.stat().st_mtime < before_unix:
                    kept += filter(None, [set_aside(path)])
        return kept


class StoreCopy:
    """Keeps the files of a folder in an object store.

    Args:
        store: the store.
        prefix: of the names that this process alone writes. Before its first file, parts that a killed process has left
            of such uploads are removed.
    """

    def __init__(self, store: FileStore, prefix: str = "") -> None:
        self.store, self.prefix = store, prefix

    def put(self, path: Path, name: str) -> None:
        if self.prefix:
            with suppress(OSError):  # a user who may put objects need not be allowed to list uploads
                self.store.abort(self.prefix)
            self.prefix = ""
        self.store.put(path, name)

    def names(self, folder: Path) -> Collection[str]:
        return {*self.store.objects(), *NO_COPY.names(folder)}

    def pull(self, folder: Path, wanted: Wanted) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        objects = self.store.objects()
        lacking = [name for name in objects if wanted(name) and not (folder / name).exists()]
        for name in lacking:
            self.store.get(name, folder / name, objects[name].size)
            os.utime(folder / name, (objects[name].modified_unix, objects[name].modified_unix))
        return len(lacking)

    def remove(self, which: Callable[[Collection[str]], Iterable[str]]) -> None:
        self.store.remove(which(self.store.objects().keys()))

    def set_aside(self, folder: Path, wanted: Wanted, before_unix: float) -> list[str]:
        found = self.store.objects()
        kept = list[str]()
        for name in [name for name in found if wanted(name) and found[name].modified_unix < before_unix]:
            new = next(new for number in count(1) if (new := f"{name}.{number}") not in found)
            self.store.move(name, new)
            (folder / name).unlink(missing_ok=True)
            kept.append(f"{self.store.address}/{new}")
        return kept


NO_COPY = NoCopy()


def opened(place: str, prefix: str = "", flag: str = "--checkpoint-dir") -> tuple[Path, FolderCopy]:
    """Return the folder of a path or an address, and its copy. That of an address is temporary, and goes with the process.

    Args:
        place: as `located` returns it.
        prefix: as in `StoreCopy`.
        flag: that named it, for errors.

    Raises:
        UsageError: a package is missing, or no temporary folder can be made.
    """
    if not is_stored(place):
        return Path(place), NO_COPY
    scratch, made_by = ScratchFolder(), os.getpid()

    def close() -> None:
        if os.getpid() == made_by:  # and no fork of this process
            scratch.close()

    atexit.register(close)
    return Path(scratch.path), StoreCopy(FileStore(place, flag), prefix)
