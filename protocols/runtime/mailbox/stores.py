"""Object stores: a bucket by fsspec, or a folder that machines share. `MeteredStore` counts what each request costs.

How it works

    Mailbox ── MeteredStore ─┬─ BucketStore   s3://BUCKET/RUN, gs://BUCKET/RUN
                             └─ FolderStore   file:///SHARED/FOLDER

1. `opened` makes the store of an address and tests it: it puts an object, lists it, gets it and deletes it. So a wrong
   credential or a missing bucket ends the command at once.
2. A name is a path below the address. A list holds all objects whose name begins with the given text.
3. The time of the test is a first measure of how long a request takes.

Rules
- A reader never sees half an object: a bucket promises that, and a folder gets each file by a rename.
- A list shows each object whose put has returned: S3 (since 2020), GCS and a folder of one machine promise that. A folder
  of NFS may show an object later; then the sender repeats its message.
- Each call waits for the network: only the threads of a mailbox and a process that starts or ends make it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from narrows.protocols.errors import AuthenticationError, NarrowsError, UnreachableError, UsageError
from narrows.protocols.runtime.storage.object_store import file_system

PUT, GET, LIST, DELETE = REQUESTS = ("PUT", "GET", "LIST", "DELETE")
OPEN_S = 30.0  # a store must pass its test within this time
AGAIN_S = 1.0  # wait after a failed test
CONNECT_S, READ_S = 10, 60  # limits of one request to a bucket; a larger object takes longer than its first byte
PROBE_BYTES = 64
# Options of fsspec. One connection for a get: with more, s3fs asks for the size first. No lists are kept: objects come.
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "max_concurrency": 1,
        "config_kwargs": {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"max_attempts": 1}},
    },
    "gs": {},
}


class StoreError(OSError):
    """A request failed in the library below, which raises errors of many kinds. `__cause__` is its error."""


class ObjectStore(Protocol):
    """Objects by name. Any thread may call; each call waits, and raises an OSError if it fails."""

    def put(self, name: str, content: bytes) -> None:
        """Write an object whole. An object of this name is replaced."""

    def get(self, name: str) -> bytes:
        """Return an object. Raises FileNotFoundError if there is none."""

    def list(self, begins: str) -> dict[str, int]:
        """Return the size in bytes of each object whose name begins with this text; a text with a "/" ends with it."""

    def delete(self, name: str) -> None:
        """Delete an object; nothing happens if there is none."""


class FolderStore:
    """A folder that all machines share. `root`: its path; the folder above it exists."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def put(self, name: str, content: bytes) -> None:
        path = self.root / name
        half = path.parent / f".{path.name[:64]}-{secrets.token_hex(8)}"
        try:
            half.write_bytes(content)
        except FileNotFoundError:
            if not self.root.parent.is_dir():
                raise
            path.parent.mkdir(parents=True, exist_ok=True)
            half.write_bytes(content)
        os.replace(half, path)

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def list(self, begins: str) -> dict[str, int]:
        found = dict[str, int]()
        folder, deep = begins.rpartition("/")[0], "/" not in begins
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith(".") or not name.startswith(begins):
                    continue
                if deep and entry.is_dir():
                    found |= self.list(f"{name}/")
                    continue
                with contextlib.suppress(FileNotFoundError):  # its reader has deleted it meanwhile
                    found[name] = entry.stat().st_size
        return found

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.root / name).unlink()

    def close(self) -> None:
        """Remove folders that are empty, and halves of files whose writer was killed."""
        for folder, _, files in os.walk(self.root, topdown=False):
            for name in files:
                if name.startswith("."):
                    Path(folder, name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.rmdir(folder)


class BucketStore:
    """A bucket by fsspec.

    Args:
        scheme: of the address, a key of OPTIONS.
        root: BUCKET/RUN.

    Raises:
        UsageError: fsspec, or its library for this kind of bucket, is not installed.
    """

    def __init__(self, scheme: str, root: str) -> None:
        options = {"skip_instance_cache": True, **OPTIONS[scheme]}
        self.files = file_system(f"{scheme}://{root}", scheme, **options)
        self.root = root

    def put(self, name: str, content: bytes) -> None:
        with _of_the_library():
            self.files.pipe_file(f"{self.root}/{name}", content)

    def get(self, name: str) -> bytes:
        with _of_the_library():
            return bytes(self.files.cat_file(f"{self.root}/{name}"))

    def list(self, begins: str) -> dict[str, int]:
        with contextlib.suppress(FileNotFoundError), _of_the_library():
            found = self.files.find(self.root, detail=True, **({"prefix": begins} if begins else {}))
            return {path.removeprefix(f"{self.root}/"): int(each["size"]) for path, each in found.items()}
        return {}

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _of_the_library():
            self.files.rm_file(f"{self.root}/{name}")


@contextlib.contextmanager
def _of_the_library() -> Iterator[None]:
    """Raise each error of a library of buckets as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise StoreError(str(error) or type(error).__name__) from error


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What a process has asked of its store so far: requests by kind, and bytes each way."""

    requests: Mapping[str, int]
    bytes_up: int
    bytes_down: int
    failed: int

    def told(self) -> dict[str, int]:
        """Return the counts as values of the record."""
        asked = {f"{kind.lower()}s": self.requests.get(kind, 0) for kind in REQUESTS}
        return {**asked, "failed": self.failed, "bytes_up": self.bytes_up, "bytes_down": self.bytes_down}

    def text(self) -> str:
        """Describe the counts in a clause."""
        asked = ", ".join(f"{self.requests.get(kind, 0)} {kind}" for kind in REQUESTS)
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{asked}{failed}; {self.bytes_up / 1e6:.2f} MB up, {self.bytes_down / 1e6:.2f} MB down"


class MeteredStore:
    """Counts the requests to a store, and measures how long they take."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._bytes = {PUT: 0, GET: 0}
        self._failed = 0
        self.took_s: dict[str, float] = {}  # by kind, the time of the newest request

    def _timed(self, kind: str, call: Callable[[], Any]) -> Any:
        began, failed = time.monotonic(), True
        try:
            result = call()
            failed = False
            return result
        except FileNotFoundError:
            failed = kind == PUT
            raise
        finally:
            with self._lock:
                self._requests[kind] += 1
                self._failed += failed
                self.took_s[kind] = time.monotonic() - began

    def put(self, name: str, content: bytes) -> None:
        self._timed(PUT, lambda: self.store.put(name, content))
        with self._lock:
            self._bytes[PUT] += len(content)

    def get(self, name: str) -> bytes:
        content: bytes = self._timed(GET, lambda: self.store.get(name))
        with self._lock:
            self._bytes[GET] += len(content)
        return content

    def list(self, begins: str) -> dict[str, int]:
        found: dict[str, int] = self._timed(LIST, lambda: self.store.list(begins))
        return found

    def delete(self, name: str) -> None:
        self._timed(DELETE, lambda: self.store.delete(name))

    @property
    def counts(self) -> StoreCounts:
        with self._lock:
            return StoreCounts(dict(self._requests), self._bytes[PUT], self._bytes[GET], self._failed)

    def passage_s(self) -> float:
        """Return how long an object takes from its sender to a receiver that looks for it: a put, a list and a get."""
        with self._lock:
            return sum(self.took_s.get(kind, 0.0) for kind in (PUT, LIST, GET))


def store_of(address: str) -> ObjectStore:
    """Return the store of an address. Raises UsageError."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        return FolderStore(unquote(parts.path))
    return BucketStore(parts.scheme, f"{parts.netloc}{parts.path}")


def refusal_of(address: str, error: OSError) -> NarrowsError | None:
    """Return the error that ends a command whose first request to a store failed; None if a later one may pass."""
    text, cause = str(error).strip() or type(error).__name__, type(error.__cause__).__name__
    if isinstance(error, FileNotFoundError):
        what = "folder" if address.startswith("file:") else "bucket"
        return UsageError(f"{address}: there is no such {what} ({text}); make it first")
    # botocore has no base class for a credential that is missing: NoCredentialsError, PartialCredentialsError, ...
    if isinstance(error, PermissionError) or "Credential" in cause or "Auth" in cause:
        return AuthenticationError(
            f"{address}: the store refuses this machine ({text}); give its credentials as for any tool of this store"
        )
    return None


def opened(address: str, limit_s: float = OPEN_S) -> MeteredStore:
    """Open the store of an address, and test it.

    Args:
        address: a mailbox, as `is_mailbox` knows it.
        limit_s: a store that cannot be reached is tried again for so long.

    Raises:
        UsageError: the bucket or the folder does not exist, or a library is missing.
        AuthenticationError: the store refuses this machine.
        UnreachableError: the store did not answer within `limit_s`.
    """
    metered = MeteredStore(store_of(address))
    name, content = f"probe-{secrets.token_hex(8)}", bytes(PROBE_BYTES)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            metered.put(name, content)
            same = name in metered.list(name) and metered.get(name) == content
            metered.delete(name)
        except OSError as error:
            if (refused := refusal_of(address, error)) is not None:
                raise refused from None
            if time.monotonic() > deadline:
                raise UnreachableError(f"{address}: the store did not answer within {limit_s:g} s ({error})") from None
            time.sleep(AGAIN_S)
            continue
        if not same:
            raise UnreachableError(f"{address}: the store does not give back what was put into it; use another one")
        return metered


def cleared(store: ObjectStore, keep: Sequence[str] = ()) -> int:
    """Delete all objects but those whose names begin with one of `keep`. Return their number."""
    names = [name for name in store.list("") if not name.startswith(tuple(keep))]
    for name in names:
        store.delete(name)
    if isinstance(inner := getattr(store, "store", store), FolderStore) and not keep:
        inner.close()
    return len(names)
