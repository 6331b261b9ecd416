"""Keeps the checkpoints of remote shards in the folder of shard 0, the archive.

So the run can go back without the machine of such a shard, and --resume finds all files in one folder.

How it works

    machine of shard 5 (ArchiveClient)              machine of shard 0 (RemoteArchive)
    writes its file into its own folder
    WRITE offset 0, 1 MiB, 2 MiB, ...  ───────────> writes the parts into a temporary file
    KEEP size of the file              ───────────> gives the whole file its name, drops old files
      <──────────── the clocks that it now has ────
    deletes its own file
    ...
    FACTS clock, READ offset 0, ...    ───────────> to load a checkpoint: sends the facts, then parts of the files

1. The client sends requests (`FileRequest`) over a connection of its own, PARTS_AHEAD at a time, and waits for the
   answers where a local shard would wait for its disk.
2. The client repeats a request that has no answer in time. A request names the file and the offset, so a repeated one
   does no harm.
3. `BootstrapServer` hands the requests to the archive. The archive answers them in a thread, so that clocks close
   meanwhile; the runner sends the answers that `take` yields.

Rules
- A file has its name only once it is whole.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.config.timing import ARCHIVE_RETRY
from narrows.protocols.effects import NS
from narrows.protocols.errors import NarrowsError
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import Peer, Sockets
from narrows.protocols.runtime.storage.object_store import FileStoreError
from narrows.protocols.runtime.storage.store_copy import NO_COPY, FolderCopy
from narrows.protocols.wire import decode, encode, pack, unpack
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.checkpoints.array_files import publish
from narrows.ps.store.changes import LoadArrays

PART_BYTES = 1 << 20
PARTS_AHEAD = 16
QUIET_S = 120.0  # the client gives up after this time without an answer; a restart of process 0 takes less
ASKED_MAX = 1024  # requests that wait at the archive; it drops further ones, and clients repeat them
POLL_MS = 100
COMING = re.compile(r"[0-9a-f]{16}")  # the client's random name of a temporary file


class ArchiveJob(IntEnum):
    """What a FileRequest asks for. The names in backticks are its fields."""

    FACTS = 0  # send the facts of the checkpoint of `clock`
    READ = 1  # send the part of a file at `offset`
    WRITE = 2  # write `payload` into the temporary file at `offset`
    KEEP = 3  # the temporary file is whole and has `offset` bytes: give it its name
    SOUND = 4  # send the clocks that `shard`, of `shards`, can begin from
    HELD = 5  # send the clocks of the files of `shard`


class RemoteArchive:
    """Serves the folder of process 0, in a thread. Any thread may call `ask`; `take` yields the answers.

    Args:
        folder: the folder.
        copy: where else its files are kept.
    """

    def __init__(self, folder: Path, copy: FolderCopy = NO_COPY) -> None:
        self.folder, self.copy = folder, copy
        self.asked: queue.Queue[tuple[bytes, m.FileRequest]] = queue.Queue(ASKED_MAX)
        self.answers = deque[tuple[bytes, m.FileAnswer]]()
        self.thread: Thread | None = None

    def ask(self, peer: bytes, ask: m.FileRequest) -> None:
        """Queue a request of `peer`, or drop it if the queue is full: the client repeats it."""
        if self.thread is None:
            self.thread = Thread(target=self._main, name="narrows-archive", daemon=True)
            self.thread.start()
        with contextlib.suppress(queue.Full):
            self.asked.put_nowait((peer, ask))

    def take(self) -> Iterator[tuple[bytes, m.FileAnswer]]:
        """Yield the answers that are ready, with the peers to send them to."""
        while self.answers:
            yield self.answers.popleft()

    def _main(self) -> None:
        while True:
            peer, ask = self.asked.get()
            self.answers.append((peer, self.answer(ask)))

    def answer(self, ask: m.FileRequest) -> m.FileAnswer:
        """Carry out a request, and return its answer. An error becomes the text of the answer."""
        size, payload, text, clocks = 0, b"", "", m.Ints()
        try:
            match ask.what:
                case ArchiveJob.FACTS:
                    facts = checkpoint_files.facts_of(self.folder, ask.clock)
                    told = ("shards", "cut", "publication", "plan", "steps")
                    payload = pack({name: facts[name] for name in told if name in facts})
                case ArchiveJob.READ:
                    size, payload = self._read(checkpoint_files.path_of(self.folder, ask.shard, ask.clock), ask.offset)
                case ArchiveJob.WRITE:
                    self._write(ask)
                case ArchiveJob.KEEP:
                    clocks = self._keep(ask)
                case ArchiveJob.SOUND:
                    clocks = checkpoint_files.sound(self.folder, ask.shard, ask.shards)[0]
                case ArchiveJob.HELD:
                    clocks = checkpoint_files.clocks(self.folder, ask.shard)
                case _:
                    text = f"nothing is known of question {ask.what}"
        except FileStoreError as error:
            text = str(error)
        except OSError as error:
            text = f"{self.folder}: {error.strerror or error}"
        except NarrowsError as error:
            text = str(error)
        return m.FileAnswer(ask.number, size, clocks, text[: m.TEXT_MAX], payload)

    @staticmethod
    def _read(path: Path, offset: int) -> tuple[int, bytes]:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size, os.pread(file.fileno(), PART_BYTES, max(0, offset))

    def _coming(self, ask: m.FileRequest) -> Path:
        """The path of a request's temporary file. `checkpoint_files.drop_coming` drops files that are left over."""
        if not COMING.fullmatch(ask.name):
            raise NarrowsError("a file that is coming has a name of 16 hex digits")
        path = checkpoint_files.path_of(self.folder, ask.shard, ask.clock)
        return path.with_name(f"{path.name}.{ask.name}.tmp")

    def _write(self, ask: m.FileRequest) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self._coming(ask), os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            if os.pwrite(file, ask.payload, max(0, ask.offset)) != len(ask.payload):
                raise OSError("a part was not written whole")
        finally:
            os.close(file)

    def _keep(self, ask: m.FileRequest) -> tuple[int, ...]:
        path, coming = checkpoint_files.path_of(self.folder, ask.shard, ask.clock), self._coming(ask)
        if coming.exists():  # else the file already has its name, and the answer to that request was lost
            publish(coming, path, ask.offset, self.copy)
        checkpoint_files.drop_coming(self.folder, ask.shard)
        return checkpoint_files.tidy(self.folder, ask.shard, ask.clock, ask.shards, ask.shared, self.copy)


class ArchiveClient:
    """A remote shard's access to the archive.

    Each method waits for the answers. It raises NarrowsError if none comes within QUIET_S, or if an answer is an error.

    Args:
        folder: folder of this machine, for files that are on their way.
        index: the shard's number.
        there: address of process 0.
        dial: makes sockets that can reach process 0.
        alive: is called each time that an answer comes, so that the watchdog does not take the wait for a hang.
    """

    def __init__(
        self, folder: Path, index: int, there: str, dial: Callable[[], Sockets], alive: Callable[[], object] = str
    ) -> None:
        self.folder, self.index, self.there, self.dial, self.alive = folder, index, there, dial, alive

    def sound(self, shards: int) -> tuple[int, ...]:
        """The clocks that this shard can begin from, in a run of `shards` shards."""
        return self._one(ArchiveJob.SOUND, shards=shards).clocks

    def held(self) -> tuple[int, ...]:
        """The clocks of this shard's files in the archive."""
        return self._one(ArchiveJob.HELD).clocks

    def load(self, shards: int, cut: str, clock: int) -> tuple[LoadArrays, bool, int]:
        """Fetch and read what this shard begins from, as `checkpoint_files.read_for`."""
        facts: Any = unpack(bytes(self._one(ArchiveJob.FACTS, clock=clock).payload))
        # A folder of its own: the shards of one machine begin at once, and fetch the same files.
        with TemporaryDirectory(dir=self.folder) as own:
            folder = Path(own)
            return checkpoint_files.read_for(
                folder,
                self.index,
                shards,
                cut,
                clock,
                facts,
                lambda shard: self._fetch(shard, clock, checkpoint_files.path_of(folder, shard, clock)),
            )

    def keep(self, clock: int, shards: int, shared: int) -> tuple[int, ...]:
        """Send the file of this clock to the archive, and delete it here. Return the archive's clocks after that."""
        path, name = checkpoint_files.path_of(self.folder, self.index, clock), os.urandom(8).hex()
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                where = {"clock": clock, "name": name}
                parts = (
                    self._ask(
                        number, ArchiveJob.WRITE, **where, offset=at, payload=os.pread(file.fileno(), PART_BYTES, at)
                    )
                    for number, at in enumerate(range(0, size, PART_BYTES))
                )
                self._each(parts, lambda ask, answer: None)
            return self._one(ArchiveJob.KEEP, **where, shards=shards, offset=size, shared=shared).clocks
        finally:
            path.unlink(missing_ok=True)

    def _fetch(self, shard: int, clock: int, path: Path) -> None:
        """Fetch the file of a shard to `path`."""
        whole = self._one(ArchiveJob.READ, shard=shard, clock=clock)
        offsets = range(PART_BYTES, whole.size, PART_BYTES)
        with open(path, "wb") as file:
            file.write(whole.payload)
            asks = (
                self._ask(number, ArchiveJob.READ, shard=shard, clock=clock, offset=at)
                for number, at in enumerate(offsets)
            )

            def write(ask: m.FileRequest, part: m.FileAnswer) -> None:
                file.seek(ask.offset)
                file.write(part.payload)

            self._each(asks, write)

    def _ask(self, number: int, what: ArchiveJob, **fields: Any) -> m.FileRequest:
        known: dict[str, Any] = {
            "shard": self.index,
            "shards": 0,
            "clock": -1,
            "offset": 0,
            "shared": -1,
            "name": "",
            "payload": b"",
        }
        return m.FileRequest(number=number, what=what, **known | fields)

    def _one(self, what: ArchiveJob, **fields: Any) -> m.FileAnswer:
        answers = list[m.FileAnswer]()
        self._each([self._ask(0, what, **fields)], lambda ask, answer: answers.append(answer))
        return answers[0]

    def _each(self, asks: Iterable[m.FileRequest], take: Callable[[m.FileRequest, m.FileAnswer], object]) -> None:
        """Send all of `asks`, at most PARTS_AHEAD in flight, and call `take` with each of them and its answer."""
        todo, sent = iter(asks), dict[int, tuple[int, m.FileRequest]]()
        heard_ns = time.monotonic_ns()

        def send_more() -> None:
            for ask in islice(todo, PARTS_AHEAD - len(sent)):
                sockets.send(self.there, encode(ask))
                sent[ask.number] = (time.monotonic_ns(), ask)

        def hear(peer: Peer, frames: list[m.Buffer]) -> None:
            nonlocal heard_ns
            answer = decode(frames)
            if isinstance(answer, m.Refuse) or (isinstance(answer, m.FileAnswer) and answer.text):
                raise NarrowsError(f"the checkpoints at {self.there}: {answer.text}")
            if isinstance(answer, m.FileAnswer) and answer.number in sent:
                heard_ns = time.monotonic_ns()
                self.alive()
                take(sent.pop(answer.number)[1], answer)

        def repeat(now_ns: int) -> None:
            if now_ns - heard_ns > QUIET_S * NS:
                raise NarrowsError(f"the checkpoints at {self.there}: no answer came within {QUIET_S:.0f} s")
            for number, (sent_ns, ask) in sent.items():
                if ARCHIVE_RETRY.due(sent_ns, now_ns):
                    sockets.send(self.there, encode(ask))
                    sent[number] = (now_ns, ask)

        with contextlib.closing(self.dial()) as sockets:
            send_more()
            Loop(sockets, hear, repeat, send_more, POLL_MS, tick_ms=0).run(time.monotonic_ns, lambda: bool(sent))
