"""The runs of this user on this machine: one small file for each ps-serve, in a folder of the user.

    /tmp/narrows-runs-UID/1f0c2a...e9.run     a checksum, and a JSON object: name, address, mode, workers, clock, page, ...

How it works
1. `RunEntry` makes the file under another name, locks it (flock), and renames it. It holds the lock until its process
   ends, however that ends: no child inherits the lock. So a file without a lock is what a killed server left.
2. `RunEntry.note` takes the events of the run, and writes the file again, at most once in WRITE_S, in place: the file,
   and with it the lock, stays the same.
3. `runs` reads all files. It removes those that nobody has locked.

Rules
- The folder and its files are the user's own, and nobody else can write there; else they are not used. Links are not
  followed. Everything that is read has a bound, and a file that is no entry is left alone.
- A run without an entry trains as any other: the console says why it is not listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
import zlib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrows.protocols.config.run_name import NAME
from narrows.protocols.errors import UsageError

VARIABLE = "NARROWS_RUNS"  # names another folder
ENTRY = re.compile(r"[0-9a-f]{32}\.run")
ENTRIES_MAX = 1024  # of a folder that are looked at
BYTES_MAX = 1 << 15  # of an entry: six texts, each character as \uXXXX, and numbers
TEXT_MAX = 256  # characters of one text in it
NUMBER_MAX = 1 << 53  # the size of a number in it
WRITE_S = 2.0  # from one writing to the next
TRIES, PAUSE_S = 3, 0.01  # readings of a file that is being written


@dataclass(frozen=True)
class RunFacts:
    """What an entry says of its run.

    Attributes:
        name: --name, "" for none.
        address: where workers join.
        mode: --sync.
        summary: the flags of the run, in words.
        workers: live workers, and clusters.
        wanted: the value of --workers.
        clock: the clock that all live members have reached; -1: not known.
        began: when the run began, in seconds since 1970.
        pid: of its ps-serve.
        page: the address of its page, "" for none.
        parent: the address of its parent's server, "" for none.
        copies: the address of the server that this standby copies, "" for no standby.
    """

    name: str = ""
    address: str = ""
    mode: str = ""
    summary: str = ""
    workers: int = 0
    wanted: int = 0
    clock: int = -1
    began: float = 0.0
    pid: int = 0
    page: str = ""
    parent: str = ""
    copies: str = ""

    @staticmethod
    def of(values: object) -> RunFacts:
        """Check values that were read. Raises ValueError."""
        if not isinstance(values, dict):
            raise ValueError("no map")
        known = {each.name: str(each.type) for each in fields(RunFacts)}
        for field, value in values.items():
            kind = {"float": (int, float), "int": (int,), "str": (str,)}.get(known.get(field, ""), ())
            if type(value) not in kind or (isinstance(value, str) and len(value) > TEXT_MAX):
                raise ValueError(field)
            if not isinstance(value, str) and not abs(value) <= NUMBER_MAX:  # NaN is not
                raise ValueError(field)
        if (name := values.get("name", "")) and not NAME.fullmatch(name):
            raise ValueError("name")
        return RunFacts(**values)

    def told(self, now: float) -> dict[str, Any]:
        """Return the facts as values of JSON, with the run's age in seconds."""
        return asdict(self) | {"seconds": round(max(0.0, now - self.began), 1)}


def folder() -> Path:
    """The folder of the entries: that of NARROWS_RUNS, else one that all sessions of this user have in common."""
    return Path(os.environ.get(VARIABLE, "") or f"/tmp/narrows-runs-{os.getuid()}")


def _why_not(path: Path) -> str:
    """Return why this folder cannot be used, "" if it can. Raises OSError without one."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is no folder: remove it, or name another by {VARIABLE}"
    if found.st_uid != os.getuid():
        return f"{path} is of another user: name another folder by {VARIABLE}"
    if found.st_mode & 0o022:
        return f"other users can write to {path}: chmod go-w it, or name another folder by {VARIABLE}"
    return ""


class RunEntry:
    """The entry of one run, until `close`.

    Raises:
        OSError: the folder or the file cannot be made.
        UsageError: the folder is not the user's alone.
    """

    def __init__(self, facts: RunFacts) -> None:
        where = folder()
        with contextlib.suppress(FileExistsError):
            os.mkdir(where, 0o700)
        if why := _why_not(where):
            raise UsageError(why)
        self.path = where / f"{secrets.token_hex(16)}.run"
        self.facts, self.written, self.due_s = facts, facts, 0.0
        new = self.path.with_suffix(".new")
        self.file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
            os.rename(new, self.path)
        except OSError:
            os.close(self.file)
            new.unlink(missing_ok=True)
            raise

    def _write(self) -> None:
        texts = {name: value[:TEXT_MAX] for name, value in asdict(self.facts).items() if isinstance(value, str)}
        data = json.dumps(asdict(self.facts) | texts).encode()
        os.pwrite(self.file, b"%08x %s\n" % (zlib.crc32(data), data), 0)
        self.written, self.due_s = self.facts, time.monotonic() + WRITE_S

    def note(self, **values: Any) -> None:
        """Take new values of facts, and write them if that is due. A disk that refuses them costs the news alone."""
        self.facts = replace(self.facts, **values)
        if self.facts != self.written and time.monotonic() >= self.due_s:
            with contextlib.suppress(OSError):
                self._write()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self.file)


def runs() -> list[RunFacts]:
    """Return the runs of this user on this machine, the oldest first.

    Raises:
        UsageError: the folder of the entries is not the user's alone.
    """
    where, found = folder(), list[RunFacts]()
    try:
        if why := _why_not(where):
            raise UsageError(why)
        with os.scandir(where) as entries:
            names = [each.name for each, _ in zip(entries, range(ENTRIES_MAX), strict=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}; name another folder by {VARIABLE}") from None
    for name in filter(ENTRY.fullmatch, names):
        with contextlib.suppress(OSError, ValueError):  # it is no entry, or its run has just ended
            found += _read(where / name)
    return sorted(found, key=lambda facts: (facts.began, facts.pid))


def _read(path: Path) -> list[RunFacts]:
    """Read an entry: one run, or none if no process has locked the file, which is then removed."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_size > BYTES_MAX:
            return []
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return [_facts(file)]
        path.unlink()
        return []
    finally:
        os.close(file)


def _facts(file: int) -> RunFacts:
    """Read the facts of a file. Raises ValueError if it holds none, whenever it is read."""
    for _ in range(TRIES):
        line = os.pread(file, BYTES_MAX, 0).partition(b"\n")[0]
        if line[:9] == b"%08x " % zlib.crc32(line[9:]):
            with contextlib.suppress(RecursionError):
                return RunFacts.of(json.loads(line[9:]))
        time.sleep(PAUSE_S)
    raise ValueError("no entry")
