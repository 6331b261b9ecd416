"""A folder of an object store, by fsspec: the address of --checkpoint-dir and --record, such as s3://BUCKET/RUN.

How it works
1. `located` (addresses.py) reads the value of a flag. A path, and file:///FOLDER, is a folder of this machine, no store.
2. `FileStore` has the objects of one address. An object is put whole, and becomes visible with its last byte: a store
   has no rename and no append, and needs none for this.
3. Each request runs in a thread of its own, has a limit of time, and is repeated TRIES times in all. Meanwhile the
   caller gives signs of life (`alive`).
4. An upload in parts that was killed leaves parts behind, which no list shows and the owner of the bucket pays for.
   `abort` deletes them, where the store can list them.

Rules
- Credentials, endpoints and regions are those of fsspec and of the store's own package: environment, files, roles.
- Every failure is a `FileStoreError`: one sentence that names the address.
- No listing is cached: other processes write to the same address.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from narrows.protocols.addresses import STORES
from narrows.protocols.errors import UsageError

ARGUMENTS: dict[str, dict[str, Any]] = {"s3": {"max_concurrency": 4}}  # of the file system, by scheme
PART_BYTES = 16 << 20  # of an upload; four of them are in memory
TRIES = 3  # of a request
PAUSES_S = (1.0, 4.0)  # between two tries
REQUEST_S = 60.0  # limit of a request without its bytes
BYTES_PER_S = 1e6  # of the slowest link over which a file is sent: 8 Mbit/s
ALIVE_S = 0.5  # between two signs of life
REFUSED = "an object was not written"  # without its name: a trouble that stays is told once
PROBE = ".narrows-write-check"  # an object that `check` puts and removes

T = TypeVar("T")


class FileStoreError(OSError):
    """A store refused, failed or did not answer in time. The text is a sentence that names the address."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its size in bytes, and when it was put, in seconds since 1970, 0: not known."""

    size: int
    modified_unix: float


def put_limit_s(nbytes: int) -> float:
    """Return the seconds within which a file of this size is sent."""
    return REQUEST_S + nbytes / BYTES_PER_S


def file_system(what: str, scheme: str, **options: Any) -> Any:
    """Return the file system of fsspec for a scheme of STORES.

    Args:
        what: needs it, for errors: the flag, the address.
        scheme: of the address.
        options: of the file system.

    Raises:
        UsageError: a package is missing; names the line that installs it.
    """
    for name in ("fsspec", package := STORES[scheme]):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UsageError(f"{what}: {name} is missing here: pip install 'narrows[via]' {package}") from None
    import fsspec

    return fsspec.filesystem(scheme, use_listings_cache=False, **options)


class FileStore:
    """The objects of one address. Objects of folders below it have a slash in their name.

    Args:
        address: of the folder, as `located` returns it.
        flag: that named it, for errors.
        alive: is called while a request is on its way.
        system: the file system of fsspec; None: that of the address, made with the first request.
    """

    def __init__(
        self, address: str, flag: str = "--checkpoint-dir", alive: Callable[[], object] = str, system: Any = None
    ) -> None:
        self.address, self.flag, self.alive = address, flag, alive
        self.root = address.partition("://")[2] or address
        self._system = system

    @property
    def system(self) -> Any:
        if self._system is None:
            scheme = self.address.partition("://")[0]
            self._system = file_system(f"{self.flag} {self.address}", scheme, **ARGUMENTS.get(scheme, {}))
        return self._system

    def below(self, name: str) -> FileStore:
        """Return the store of the folder `name` of this one."""
        return FileStore(f"{self.address}/{name}", self.flag, self.alive, self._system)

    def check(self) -> None:
        """Put a small object and remove it. Raises UsageError, one sentence, where that fails."""
        system, limit_s = self.system, REQUEST_S / 2
        try:
            self._tried("", limit_s, lambda: system.pipe_file(self._path(PROBE), b"narrows"), 1)
            self._tried("", limit_s, lambda: system.rm_file(self._path(PROBE)), 1)
        except FileStoreError as error:
            raise UsageError(f"{self.flag} {error}") from None

    def objects(self) -> dict[str, StoredObject]:
        """Return the objects directly in this folder, by name; none if there is no such folder."""

        def listed() -> list[dict[str, Any]]:
            try:
                found: list[dict[str, Any]] = self.system.ls(self.root, detail=True, refresh=True)
            except FileNotFoundError:
                return []
            return found

        found = self._tried("its list cannot be read", REQUEST_S, listed)
        files = [each for each in found if each["type"] == "file" and each["name"].startswith(f"{self.root}/")]
        return {
            each["name"].removeprefix(f"{self.root}/"): StoredObject(int(each["size"] or 0), _modified(each))
            for each in files
        }

    def folders(self) -> list[str]:
        """Return the names of the folders directly in this one."""

        def listed() -> list[str]:
            try:
                return [each["name"] for each in self.system.ls(self.root, detail=True, refresh=True)
                        if each["type"] == "directory"]  # fmt: skip
            except FileNotFoundError:
                return []

        found = self._tried("its list cannot be read", REQUEST_S, listed)
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def put(self, path: Path, name: str) -> None:
        """Put a file. The object is there as a whole once this returns, and before that not at all."""
        size = path.stat().st_size
        self._tried(
            REFUSED,
            put_limit_s(size),
            lambda: self.system.put_file(str(path), self._path(name), chunksize=PART_BYTES),
        )

    def put_bytes(self, content: bytes, name: str) -> None:
        """Put an object with this content, as `put`."""
        limit_s = put_limit_s(len(content))
        self._tried(REFUSED, limit_s, lambda: self.system.pipe_file(self._path(name), content))

    def get(self, name: str, path: Path, size: int) -> None:
        """Fetch an object of `size` bytes to a file, whole or not at all."""
        coming = path.with_name(f"{path.name}.coming")
        try:
            self._tried(
                f"{name} cannot be read",
                put_limit_s(size),
                lambda: self.system.get_file(self._path(name), str(coming)),
            )
            if coming.stat().st_size != size:
                raise FileStoreError(f"{self.address}: {name} was not read whole")
            coming.replace(path)
        finally:
            coming.unlink(missing_ok=True)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes [begin, end) of an object; None: up to its end."""
        return bytes(
            self._tried(
                f"{name} cannot be read",
                put_limit_s((end or 0) - begin),
                lambda: self.system.cat_file(self._path(name), start=begin or None, end=end),
            )
        )

    def move(self, name: str, new: str) -> None:
        """Copy an object to another name within the store, and remove it."""
        there, here = self._path(new), self._path(name)
        self._tried(f"{name} cannot be copied", REQUEST_S * 10, lambda: self.system.cp_file(here, there))
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. One that is gone already is no error."""

        def removed(name: str) -> None:
            with suppress(FileNotFoundError):
                self.system.rm_file(self._path(name))

        for name in names:
            self._tried(f"{name} cannot be removed", REQUEST_S, lambda: removed(name))  # noqa: B023 - called at once

    def abort(self, prefix: str) -> int:
        """Delete the parts of uploads that were killed, of objects whose name begins with `prefix`. Return their number.

        Google's store drops such uploads by itself after a week.
        """
        call = getattr(self.system, "call_s3", None)
        if call is None:
            return 0
        bucket, _, key = self._path(prefix).partition("/")

        def aborted() -> int:
            found = call("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads") or []
            for each in found:
                call("abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])
            return len(found)

        return self._tried("the parts of a killed upload cannot be removed", REQUEST_S, aborted)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _tried(self, what: str, limit_s: float, call: Callable[[], T], tries: int = TRIES) -> T:
        """Return what `call` returns.

        Args:
            what: has failed, where it fails.
            limit_s: of each try.
            call: the request.
            tries: the most tries. What the store refuses is not tried again.

        Raises:
            FileStoreError: no try has succeeded.
        """
        self.system  # noqa: B018 - a missing package is a UsageError here, and nothing to try again
        for number in range(1, tries + 1):
            found, error = self._within(limit_s, call)
            if error is None:
                return found  # type: ignore[return-value]  # it is what `call` returned
            if number == tries or isinstance(error, (FileNotFoundError, PermissionError)):
                break
            time.sleep(PAUSES_S[number - 1])
        why = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError) and "bucket does not exist" not in why:
            why = "it does not exist"
        raise FileStoreError(f"{self.address}: {what}{': ' if what else ''}{why}")

    def _within(self, limit_s: float, call: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Run a request in a thread: a socket that hangs keeps the thread and not its caller."""
        done = list[tuple[T | None, Exception | None]]()

        def run() -> None:
            try:
                done.append((call(), None))
            except Exception as error:  # packages of stores raise what they like
                done.append((None, error))

        thread, stop_s = Thread(target=run, name="narrows-store", daemon=True), time.monotonic() + limit_s
        thread.start()
        while thread.is_alive() and time.monotonic() < stop_s:
            thread.join(ALIVE_S)
            self.alive()
        return done[0] if done else (None, TimeoutError(f"no answer came within {limit_s:.0f} s"))


def _modified(info: dict[str, Any]) -> float:
    """Return when an object was put, in seconds since 1970, by what fsspec says of it; 0.0: it does not say."""
    value = next((info[name] for name in ("LastModified", "mtime", "updated", "last_modified") if info.get(name)), 0.0)
    if isinstance(value, str):
        from datetime import datetime

        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    return float(value.timestamp()) if hasattr(value, "timestamp") else float(value)
