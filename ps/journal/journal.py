"""The journal of one server process: its machine at one time, and each event since. A killed process goes on from it.

How it works

    file "machine 0": | serial 7 | the machine but for its large arrays |           of events long ago
    file "machine 1": | serial 8 | the machine but for its large arrays |           the newest
    files "live", "copy": the large arrays (array_segment.py)
    file "events": the events since then (event_file.py); serial 8
    a pair of sockets: the pools of peers, where frames lie that events name (frame_pools.py)

1. `note` writes an event before the machine handles it. So the journal has the cause of everything that a peer has
   seen of this machine. The machine reads large payloads in the journal.
2. `begin` writes the machine into the file that has the older one. With the last write, of the head, that machine is the
   newest, and its arrays are in "live". `begin` copies them to "copy", and begins the events anew.
3. The runner calls `begin` when it is `due`: after the longer of REPLAY_NS of handling and COPY_TIMES the time of a copy
   (2 % of the work), or when past events have too many bytes: EVENTS_RATIO of the machine's and at least BYTES_MIN in the
   file, or PEER_RATIO and PEER_BYTES_MIN in the memory of peers. Payloads that wait are no past. `due` waits for the next
   fold of a clock, up to twice these limits, for then the fewest pushes wait in the machine.
4. A process that was killed leaves the files. The next process reads the newest whole machine (`machine`) and handles
   its events again (`replay`). It sends nothing meanwhile: peers have seen the effects, or will ask for them again.

Rules
- The files have no name. They lie in memory where the system has memfd_create(2), and are temporary files elsewhere;
  then there is no segment, and the machine is written with its arrays. ps-serve holds the files too, so they outlive the
  process and end with ps-serve.
- A machine that is not whole does not count, nor does an event.
- The journal takes the memory of the arrays' copy, and of past events. These have at most twice the larger of BYTES_MIN
  and EVENTS_RATIO of the machine, or the payloads of one clock if they are more.
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

from narrows.protocols.config.memory import EVENTS_RATIO, PEER_BYTES_MIN, PEER_RATIO
from narrows.protocols.effects import NS, LoadCheckpoint, ServerEffect, StopProcess
from narrows.protocols.errors import NarrowsError
from narrows.protocols.messages import Buffer
from narrows.ps.journal.array_segment import ArraySegment
from narrows.ps.journal.event_file import EventFile
from narrows.ps.journal.frame_pools import FramePools, sockets
from narrows.ps.journal.machine_pickling import freeze, thaw
from narrows.ps.replication.events import MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.store.store import HEAP, ArrayAllocator

# Serial number of the machine (0: there is none), its bytes, and the file with its arrays (1: "live", 0: "copy").
HEAD = struct.Struct("<QQB")
REPLAY_NS = NS  # handling time that a replay repeats at most, unless COPY_TIMES allows more
COPY_TIMES = 50  # time from one copy to the next, in times of a copy: copies take 2 % of the work
BYTES_MIN = 1 << 25  # the events may have so many bytes, or EVENTS_RATIO of the machine's if that is more
MACHINES, EVENTS, COPY, LIVE, POOLS = slice(2), 2, 3, 4, slice(5, 7)  # indices of the files
NAMES = ("machine-0", "machine-1", "events", "copy", "live")


def files() -> tuple[int, ...]:
    """Make files without a name, and return their descriptors. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return (*(os.memfd_create(f"narrows-{name}") for name in NAMES), *sockets())
    made = []
    for _ in NAMES[:COPY]:
        with tempfile.TemporaryFile() as file:
            made.append(os.dup(file.fileno()))
    return tuple(made)


def allocator(files: Sequence[int] | None) -> ArrayAllocator:
    """Return the allocator of the machine's arrays: the segment of these files, if they have one."""
    return ArraySegment(files[LIVE], files[COPY]) if files is not None and len(files) > LIVE else HEAP


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
    """The journal of a machine.

    Args:
        files: descriptors, as `files` returns them; what they have is kept.
        lent: the function that the runner gave its machine: True while arrays are on loan.
        most: the largest machine, in bytes.
        arrays: the allocator of the machine's arrays; a segment has its arrays in the same files.
    """

    def __init__(
        self,
        files: Sequence[int],
        lent: Callable[[], bool],
        most: int = sys.maxsize,
        arrays: ArrayAllocator = HEAP,
    ) -> None:
        self.files, self.lent, self.most, self.arrays = files, lent, most, arrays
        self.segment = arrays if isinstance(arrays, ArraySegment) else None
        heads = [self._head(file) for file in files[MACHINES]]
        self.turn = int(heads[1] > heads[0])  # index of the newest machine's file
        self.serial, self.size, self.live = heads[self.turn]  # of the machine in it; serial 0: there is none
        self.pools = FramePools(files[POOLS]) if self.segment is not None and files[POOLS] else None
        self.event_file = EventFile(files[EVENTS], self.segment is not None, self.pools)
        self.spent_ns = self.copy_ns = 0  # time of handling the events; time of writing their machine
        self.clock = -1  # the machine's min clock, as `due` has seen it last
        self.failure = ""  # why there is no journal any more, "": there is one

    @staticmethod
    def _head(file: int) -> tuple[int, int, int]:
        found = os.pread(file, HEAD.size, 0)
        serial, size, live = HEAD.unpack(found) if len(found) == HEAD.size else (0, 0, 0)
        return (serial, size, live) if serial else (0, 0, 0)

    @property
    def whole(self) -> bool:
        """True if the journal has a machine to go on with."""
        return self.serial > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the newest machine with its arrays."""
        return self.size + (self.segment.nbytes if self.segment is not None else 0)

    def due(self, clock: int) -> bool:
        """Return True if it is time to write the machine anew.

        Args:
            clock: the min clock of the machine after its newest event; -1: it has no weights.
        """
        times, self.clock = 1 if clock != self.clock else 2, clock
        if self.failure:
            return False
        nbytes, events = self.nbytes, self.event_file
        return (
            self.spent_ns >= times * max(REPLAY_NS, COPY_TIMES * self.copy_ns)
            or events.past_bytes >= times * max(BYTES_MIN, EVENTS_RATIO * nbytes)
            or events.past_peer_bytes >= times * max(PEER_BYTES_MIN, PEER_RATIO * nbytes)
        )

    def spend(self, took_ns: int) -> None:
        """Count the time that handling an event took: a replay takes as long."""
        self.spent_ns += took_ns

    def begin(self, server: Server) -> None:
        """Write the machine anew; it is between two events. Events follow it from now on."""
        if self.failure:
            return
        began_ns, other = time.monotonic_ns(), self.files[MACHINES][1 - self.turn]
        try:
            if (size := max(server.shard.nbytes, self.size)) > self.most:
                raise OSError(f"it would take {size:,} bytes, and may take {self.most:,}")
            os.ftruncate(other, 0)
            with open(os.dup(other), "wb") as file:
                file.seek(HEAD.size)
                freeze(server, file, self.lent, self.segment, self.event_file)
                self.size = file.tell() - HEAD.size
            self.serial, self.turn = self.serial + 1, 1 - self.turn
            os.pwrite(other, HEAD.pack(self.serial, self.size, 1), 0)
            self._settle()
        except Exception as error:  # a run without a journal is better than none
            return self.give_up(error)
        self.spent_ns, self.copy_ns = 0, time.monotonic_ns() - began_ns

    def _settle(self) -> None:
        """Copy the arrays of the newest machine, which are in "live". Events follow it from now on. Raises OSError."""
        os.ftruncate(self.files[MACHINES][1 - self.turn], 0)
        self.event_file.restart(self.serial)  # first: it gives back pages, and the copy may take them
        if self.segment is not None:
            self.segment.keep()
        os.pwrite(self.files[MACHINES][self.turn], HEAD.pack(self.serial, self.size, 0), 0)
        self.live = 0

    def note(self, event: MachineEvent, frames: Sequence[Buffer], in_place: bool = False) -> Sequence[Buffer]:
        """Write an event.

        Args:
            event: the event.
            frames: the frames of its message, as received.
            in_place: a frame in a peer's memory may stay there; see `EventFile.append`.

        Returns:
            The same frames; the journal has the large ones, and the machine should read them there.
        """
        try:
            return frames if self.failure else self.event_file.append(event, frames, in_place)
        except OSError as error:
            self.give_up(error)
            return frames

    def give_up(self, error: Exception) -> None:
        """Empty the journal: it lacks an event, so no process may go on with it. Most likely the memory is full."""
        self.failure = getattr(error, "strerror", None) or str(error)
        for file in self.files[MACHINES]:
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
        self.event_file.drop()
        if self.segment is not None:
            self.segment.drop_copy()

    def machine(self) -> Server:
        """Read the machine as it was written.

        Raises:
            NarrowsError: the machine cannot be read, or the system has no memory for the copy of its arrays.
        """
        with open(os.dup(self.files[MACHINES][self.turn]), "rb") as file:
            file.seek(HEAD.size)
            server = thaw(file, self.lent, self.arrays, back=not self.live, events=self.event_file)
        if self.segment is not None:
            self.segment.begun()
        if self.live:
            try:
                self._settle()
            except OSError as error:
                self.give_up(error)
        return server

    def events(self) -> Iterator[MachineEvent]:
        """Read each event that followed the newest machine. `note` then writes new events behind the last one."""
        return iter(()) if self.failure or self.event_file.serial != self.serial else self.event_file.events()

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
