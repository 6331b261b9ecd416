"""The record of a run: a file of lines, or, at an address of an object store, a folder of parts.

    run.jsonl                                              --record run.jsonl
    s3://BUCKET/run.jsonl/1/00000000, 00000001, ...        --record s3://BUCKET/run.jsonl, first run
    s3://BUCKET/run.jsonl/2/00000000, 00000001, ...        the same, second run

How it works
1. No store appends to an object. So lines wait in memory, and a thread puts them as the next part: PART_S after the
   first of them, once they are PART_BYTES, and at the end. A part has whole lines.
2. While the store fails, lines wait and the thread tries again. WAITING_MAX bytes are the most; further lines are
   lost, and counted as on a full disk.
3. Part 0 is empty. It is put before the run begins, so a store that takes no part is named at once.
4. `tail_of` reads either kind. Of an address that has several records it reads the newest.

Rules
- A process that is killed (kill -9) loses the lines of the last PART_S seconds, and of a part that is on its way.
- A part that was put is never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Condition, Thread
from typing import Any, Protocol

from narrows.protocols.addresses import is_stored
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.output import Output, set_aside
from narrows.protocols.runtime.storage.object_store import FileStore, FileStoreError

BUFFER_BYTES = 1 << 20  # of a file: a line that fits is written whole or, on a full disk, not at all
PART_S = 10.0  # the longest that a line waits for its part
PART_BYTES = 1 << 20  # a part is put once it has so many
WAITING_MAX = 16 << 20  # bytes of lines that wait while the store fails
END_S = 20.0  # how long the last part may take
AGAIN_S = 5.0  # from a part that was not put to the next try
LOOK_S = PART_S / 2  # between two lists that a reader asks for: the owner of a bucket pays for each


def open_record(path: str, say: Callable[[str], None]) -> Output:
    """Open the record of a run. Raises UsageError.

    A file with content is first renamed to PATH.1, or the next free number: counters and seconds of a record begin with
    its run. At an address the records of runs are numbered.
    """
    flag = f"--record {path}"
    if is_stored(path):
        parts = RecordParts(FileStore(path, "--record"), say)
        return Output(flag, lambda: parts, say)
    try:
        if kept := set_aside(path, "--record"):
            say(f"the record of an earlier run is kept as {kept}")
        file: Any = open(path, "w", buffering=BUFFER_BYTES)  # noqa: SIM115 - closed by Output.close
    except OSError as error:
        raise UsageError(f"{flag}: {error.strerror}") from None
    return Output(flag, lambda: file, say)


class RecordParts:
    """The lines of one record, as parts in a store.

    Args:
        store: of the record's address.
        say: gets a sentence where the store begins to fail, takes parts again, or lacks lines at the end.

    Raises:
        UsageError: the store takes no object.
    """

    encoding = "utf-8"

    def __init__(self, store: FileStore, say: Callable[[str], None]) -> None:
        self.say = say
        store.check()
        try:
            before = max((int(name) for name in store.folders() if name.isdecimal()), default=0)
            self.store = store.below(str(before + 1))
            self.store.put_bytes(b"", part_name(0))
        except FileStoreError as error:
            raise UsageError(f"--record {error}") from None
        if before:
            say(f"the record of an earlier run is kept as {store.address}/{before}")
        self.number = 1  # of the next part
        self.changed = Condition()  # guards the rest
        self.lines, self.nbytes = list[str](), 0  # that are in no part yet
        self.since_s = 0.0  # when the first of them came
        self.closing, self.failure = False, ""
        self.thread = Thread(target=self._main, name="narrows-record", daemon=True)
        self.thread.start()

    def write(self, text: str) -> None:
        """Take a line. Raises OSError if too many wait."""
        with self.changed:
            if self.nbytes + len(text) > WAITING_MAX:
                raise OSError(self.failure or "the store takes lines more slowly than they come")
            self.since_s = self.since_s if self.lines else time.monotonic()
            self.lines.append(text)
            self.nbytes += len(text)
            if len(self.lines) == 1 or self.nbytes >= PART_BYTES:
                self.changed.notify()

    def flush(self) -> None:
        """Do nothing: a line waits for its part."""

    def close(self) -> None:
        """Put what waits, within END_S."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(END_S)
        with self.changed:
            if self.lines:
                self.say(f"--record {self.store.address}: the last {len(self.lines):,} lines are missing")

    def _main(self) -> None:
        while True:
            with self.changed:
                while not self._due():
                    wait_s = self.since_s + PART_S - time.monotonic() if self.lines else None
                    self.changed.wait(None if wait_s is None else max(0.0, wait_s))
                count = len(self.lines)
                content = "".join(self.lines).encode()
            if not count:
                return
            try:
                self.store.put_bytes(content, part_name(self.number))
            except FileStoreError as error:
                if self._failed(str(error)):
                    return
                continue
            if self.failure:
                self.say(f"--record {self.store.address} can be written again")
            with self.changed:
                self.failure, self.number = "", self.number + 1
                self.lines, self.nbytes = self.lines[count:], self.nbytes - len(content)
                self.since_s = time.monotonic()

    def _due(self) -> bool:
        """True if a part is due, or the record ends."""
        waited = bool(self.lines) and time.monotonic() >= self.since_s + PART_S
        return self.closing or waited or self.nbytes >= PART_BYTES

    def _failed(self, why: str) -> bool:
        """Note that a part was not put, and wait. Return True if the record ends."""
        if not self.failure:
            self.say(f"--record {why}; the run goes on, and lines wait in memory")
        with self.changed:
            self.failure = why
            return self.closing or (self.changed.wait_for(lambda: self.closing, AGAIN_S) and not self.lines)


def part_name(number: int) -> str:
    """Return the name of a part; names sort as numbers do."""
    return f"{number:08d}"


# Readers.


class RecordTail(Protocol):
    """The lines of a record that no call has yielded yet."""

    def lines(self) -> Iterator[bytes]:
        """Yield each whole line that was added, without its end. Raises OSError."""
        ...


class FileTail:
    """Reads a record that is a file."""

    def __init__(self, path: str) -> None:
        self.path, self.offset = path, 0

    def lines(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is incomplete
                self.offset += len(line)
                yield line[:-1]


class PartsTail:
    """Reads a record of parts: that of the address itself, or the newest in it. An object of this name is read, too."""

    def __init__(self, store: FileStore) -> None:
        self.store, self.number, self.offset = store, 0, 0
        self.found = False  # `store` is that of the parts
        self.due_s = 0.0  # of time.monotonic(): no list before this

    def lines(self) -> Iterator[bytes]:
        if (now := time.monotonic()) < self.due_s:
            return
        self.due_s = now + LOOK_S
        parts = self.store.objects()
        if not self.found and part_name(0) not in parts:
            numbers = [int(name) for name in self.store.folders() if name.isdecimal()]
            if not numbers:
                yield from self._object()
                return
            self.store = self.store.below(str(max(numbers)))
            parts = self.store.objects()
        self.found = True
        while (name := part_name(self.number)) in parts:
            content = self.store.read(name) if parts[name].size else b""
            self.number += 1
            yield from content.splitlines()

    def _object(self) -> Iterator[bytes]:
        """Yield the lines of a record that a user has copied to the store as one object."""
        address, _, name = self.store.address.rpartition("/")
        content = FileStore(address, self.store.flag, system=self.store.system).read(name)
        *whole, _ = content[self.offset :].split(b"\n")
        self.offset += sum(len(line) + 1 for line in whole)
        yield from whole


def tail_of(place: str) -> RecordTail:
    """Return the reader of a record at a path or an address."""
    return PartsTail(FileStore(place, "--record")) if is_stored(place) else FileTail(place)


def told(place: str, error: OSError) -> str:
    """Return a sentence for a record that cannot be read."""
    return str(error) if isinstance(error, FileStoreError) else f"{place}: {error.strerror}"
