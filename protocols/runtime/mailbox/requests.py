"""The requests of a mailbox to its store, by threads: each is repeated until it passes, and deletions wait in a queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from narrows.protocols.errors import NarrowsError, UnreachableError
from narrows.protocols.runtime.mailbox.stores import MeteredStore

RETRY_S, RETRY_MOST_S = 0.5, 10.0  # wait after a request that failed: the first, and the longest
STORE_LOST_S = 600.0  # a store that has failed for so long is lost; members give their server up sooner

T = TypeVar("T")


class StoreRequests:
    """The requests of one mailbox, and its threads.

    Args:
        address: of the mailbox, for errors.
        store: of this address.
        tell: is called from any thread when `lost` is set.
    """

    def __init__(self, address: str, store: MeteredStore, tell: Callable[[], object]) -> None:
        self.address, self.store, self.tell = address, store, tell
        self.over = threading.Event()  # the mailbox is closed: no request begins any more
        self.trouble = ""  # why requests fail now; "": they do not
        self.lost: NarrowsError | None = None  # what ends the owner of the mailbox
        self.threads = list[threading.Thread]()
        self._failing_s = 0.0  # since when requests fail
        self._changed = threading.Condition()
        self._deleting: deque[str] = deque()
        self._doomed: dict[str, None] = {}
        self.begin("delete", self._delete)

    def begin(self, what: str, run: Callable[[], None]) -> None:
        """Start a thread of this mailbox."""
        self.threads.append(threading.Thread(target=run, name=f"narrows-mailbox-{what}", daemon=True))
        self.threads[-1].start()

    def lose(self, error: NarrowsError) -> None:
        """End the owner of this mailbox with an error."""
        self.lost = self.lost or error
        self.tell()

    def persist(self, call: Callable[[], T]) -> T | None:
        """Repeat a request until it passes. None: the mailbox was closed."""
        wait_s = RETRY_S
        while not self.over.is_set():
            try:
                result = call()
            except OSError as error:
                now = time.monotonic()
                self._failing_s = self._failing_s if self.trouble else now
                self.trouble = str(error) or type(error).__name__
                if now - self._failing_s > STORE_LOST_S:
                    text = f"{self.address}: the store has not answered for {STORE_LOST_S:g} s ({self.trouble})"
                    self.lose(UnreachableError(text))
                self.over.wait(wait_s)
                wait_s = min(RETRY_MOST_S, 2 * wait_s)
            else:
                self.trouble = ""
                return result
        return None

    def put(self, name: str, content: bytes) -> bool:
        """Put an object. False: the mailbox was closed before."""

        def put() -> bool:
            self.store.put(name, content)
            return True

        return self.persist(put) or False

    def list(self, box: str) -> dict[str, int] | None:
        """Return the objects of a box, and their sizes. None: the mailbox was closed."""
        return self.persist(lambda: self.store.list(f"{box}/"))

    def get(self, name: str) -> bytes:
        """Return an object; b"" if there is none any more, or the mailbox was closed."""

        def got() -> bytes:
            try:
                return self.store.get(name)
            except FileNotFoundError:  # its sender, or the owner of the store, has deleted it
                return b""

        return self.persist(got) or b""

    # Deletions.

    def hold(self, name: str) -> None:
        """Note an object that was taken, and will be deleted once it was handled: it is not to be taken again."""
        with self._changed:
            self._doomed[name] = None

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, soon."""
        with self._changed:
            self._doomed.update(dict.fromkeys(names))
            self._deleting.extend(names)
            self._changed.notify_all()

    @property
    def doomed(self) -> set[str]:
        """The objects that were taken and are not deleted yet."""
        with self._changed:
            return set(self._doomed)

    def _delete(self) -> None:
        """The deleting thread."""
        while not self.over.is_set():
            with self._changed:
                while not self._deleting and not self.over.is_set():
                    self._changed.wait(1.0)
                name = self._deleting.popleft() if self._deleting else ""
            done = self.persist(lambda: self._deleted(name)) if name else False  # noqa: B023 - called at once
            if done:
                with self._changed:
                    self._doomed.pop(name, None)

    def _deleted(self, name: str) -> bool:
        self.store.delete(name)
        return True

    def close(self, limit_s: float) -> None:
        """End all threads within this time. What still waits to be deleted stays."""
        self.over.set()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + limit_s
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
