"""The journal of one server process: its machine at one time, and each event since. A killed process goes on from it.

How it works

    file A: | machine of event 1000 | event 1001 | event 1002 | ...        in use
    file B: | machine of event 2000 |                            written next, then in use; A is emptied

1. `note` writes an event before the machine handles it. So the journal has the cause of everything that a peer has
   seen of this machine.
2. `begin` writes the whole machine anew into the file that is not in use, and then empties the other one. The runner
   calls it when `due`: after the longer of REPLAY_NS of handling and COPY_TIMES the time of a copy (2 % of the work), or
   when the events take as many bytes as the machine, and at least BYTES_MIN.
3. A process that was killed leaves both files. The next process reads the newest whole machine (`machine`) and handles
   its events again (`replay`). It sends nothing meanwhile: peers have seen the effects, or will ask for them again.

Rules
- The files have no name. They lie in memory where the system has memfd_create(2), and are temporary files elsewhere.
  ps-serve holds them too, so they outlive the process and end with ps-serve.
- A machine that is not whole does not count. A last event that is not whole has not happened.
- The journal takes at most three times the memory of the machine: the newest copy, a new copy while it is written, and
  events as large as a copy, or of BYTES_MIN if the copy is smaller.
- A machine that is larger than `most` has no journal: a process that dies then goes back to a checkpoint.
- machine_pickling.py writes and reads the machine, for the journal and for a standby.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from narrows.protocols.effects import NS, LoadCheckpoint, ServerEffect, StopProcess
from narrows.protocols.errors import NarrowsError
from narrows.protocols.messages import Buffer
from narrows.protocols.wire import pack, unpack
from narrows.ps.process.machine_pickling import freeze, thaw
from narrows.ps.replication.events import MachineEvent
from narrows.ps.server.server import Server

HEAD = struct.Struct("<QQ")  # serial number and bytes of the machine; serial 0: there is none
RECORD = struct.Struct("<I")  # bytes of the description of an event
REPLAY_NS = NS  # handling time that a replay repeats at most, unless COPY_TIMES allows more
COPY_TIMES = 50  # time from one copy to the next, in times of a copy: copies take 2 % of the work
BYTES_MIN = 1 << 26  # a file may have so many bytes of events, or as many as the machine has if that is more


def files() -> tuple[int, int]:
    """Make two files without a name, and return their descriptors. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("narrows-journal"), os.memfd_create("narrows-journal")
    made = []
    for _ in range(2):
        with tempfile.TemporaryFile() as file:
            made.append(os.dup(file.fileno()))
    return made[0], made[1]


class JournalReplay:
    """Lets a machine handle events again, without the effects that peers have seen.

    Args:
        server: the machine.
        load: reads the checkpoint of a clock into the machine.
    """

    def __init__(self, server: Server, load: Callable[[int], None]) -> None:
        self.server, self.load, self.events = server, load, 0
        self.stop: StopProcess | None = None  # the effect that ended the run, if one did

    def again(self, event: MachineEvent) -> None:
        """Let the machine handle an event again."""
        self.events += 1
        effects: list[ServerEffect] = []
        with contextlib.suppress(NarrowsError):  # the machine refused the message the first time too
            effects = self.server.happen(event)
        while effects or self.server.inner:
            for effect in effects:
                match effect:
                    case LoadCheckpoint(clock):
                        self.load(clock)
                    case StopProcess():
                        self.stop = effect
            effects = self.server.advance(event.now_ns) if self.server.inner else []


class Journal:
    """The journal of a machine, in two files.

    Args:
        both: descriptors of the files; what they have is kept.
        lent: the function that the runner gave its machine: True while arrays are on loan.
        most: the largest machine, in bytes.
    """

    def __init__(self, both: tuple[int, int], lent: Callable[[], bool], most: int = sys.maxsize) -> None:
        self.files, self.lent, self.most = both, lent, most
        heads = [self._head(file) for file in both]
        self.turn = int(heads[1] > heads[0])  # index of the file in use
        self.serial, self.size = heads[self.turn]  # of the machine in it; serial 0: there is none
        self.end = HEAD.size + self.size  # offset of the next event
        self.spent_ns = self.copy_ns = 0  # time of handling the events in it; time of writing its machine
        self.failure = ""  # why there is no journal any more, "": there is one

    @staticmethod
    def _head(file: int) -> tuple[int, int]:
        found = os.pread(file, HEAD.size, 0)
        serial, size = HEAD.unpack(found) if len(found) == HEAD.size else (0, 0)
        return (serial, size) if serial else (0, 0)

    @property
    def whole(self) -> bool:
        """True if the journal has a machine to go on with."""
        return self.serial > 0

    @property
    def due(self) -> bool:
        """True if it is time to write the machine anew."""
        longest = max(REPLAY_NS, COPY_TIMES * self.copy_ns)
        return not self.failure and (
            self.spent_ns >= longest or self.end - HEAD.size - self.size >= max(BYTES_MIN, self.size)
        )

    def spend(self, took_ns: int) -> None:
        """Count the time that handling an event took: a replay takes as long."""
        self.spent_ns += took_ns

    def begin(self, server: Server) -> None:
        """Write the machine into the other file; events go there from now on."""
        if self.failure:
            return
        began_ns, other = time.monotonic_ns(), self.files[1 - self.turn]
        try:
            if (size := max(server.shard.nbytes, self.size)) > self.most:
                raise OSError(f"it would take {size:,} bytes, and may take {self.most:,}")
            os.ftruncate(other, 0)
            with open(os.dup(other), "wb") as file:
                file.seek(HEAD.size)
                freeze(server, file, self.lent)
                self.size = file.tell() - HEAD.size
            self.serial += 1
            os.pwrite(other, HEAD.pack(self.serial, self.size), 0)
            os.ftruncate(self.files[self.turn], 0)
        except Exception as error:  # a run without a journal is better than none
            return self.give_up(error)
        self.turn, self.end = 1 - self.turn, HEAD.size + self.size
        self.spent_ns, self.copy_ns = 0, time.monotonic_ns() - began_ns

    def note(self, event: MachineEvent, frames: Sequence[Buffer]) -> None:
        """Write an event. `frames`: the frames of its message, as received."""
        if self.failure:
            return
        about = pack([event.described(), [len(f) for f in frames]])
        parts = [RECORD.pack(len(about)), about, *frames]
        size = sum(map(len, parts))
        try:
            written = os.pwritev(self.files[self.turn], parts, self.end)
            if written != size:
                raise OSError(f"{written} of {size} bytes were written")
        except OSError as error:
            return self.give_up(error)
        self.end += size

    def give_up(self, error: Exception) -> None:
        """Empty the journal: it lacks an event, so no process may go on with it. Most likely the memory is full."""
        self.failure = getattr(error, "strerror", None) or str(error)
        for file in self.files:
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)

    def machine(self) -> Server:
        """Read the machine as it was written."""
        with open(os.dup(self.files[self.turn]), "rb") as file:
            file.seek(HEAD.size)
            return thaw(file, self.lent)

    def events(self) -> Iterator[MachineEvent]:
        """Read each event since then. After the last one, new events are written behind it."""
        file, size = self.files[self.turn], os.fstat(self.files[self.turn]).st_size
        while self.end + RECORD.size <= size:
            (length,) = RECORD.unpack(os.pread(file, RECORD.size, self.end))
            at = self.end + RECORD.size + length
            if at > size:
                break
            described: Any = unpack(os.pread(file, length, self.end + RECORD.size))
            about, lengths = described
            if at + sum(lengths) > size:
                break
            frames: list[Buffer] = []
            for each in lengths:
                frames.append(os.pread(file, each, at))
                at += each
            yield MachineEvent.of(about, frames)
            self.end = at
        os.ftruncate(file, self.end)  # cuts off a last event that is not whole

    def replay(
        self, server: Server, load: Callable[[int], None], note: Callable[[MachineEvent], None] = lambda event: None
    ) -> JournalReplay:
        """Let the machine handle all events of the journal again.

        Args:
            server: the machine, as `machine` returned it.
            load: reads the checkpoint of a clock into the machine.
            note: is called with each event before the machine handles it.
        """
        done = JournalReplay(server, load)
        for event in self.events():
            note(event)
            done.again(event)
        return done
