"""A server process that is killed, and the next one, made of its journal: in a run, at any event, with others about it.

Rules
- An event is written before the machine handles it. A process that is killed in an event has sent some of the effects, in
  their order, and never sends the rest. All that it has sent arrives.
- The next process does the events again and sends nothing meanwhile. It stands where the killed one stood: the mirrors go on
  with it, and compare.
- Time stands still for the machine while nobody runs it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from narrows.protocols.effects import NS, ServerEffect
from narrows.protocols.wire import decode, encode
from narrows.ps.journal.array_segment import ArraySegment
from narrows.ps.journal.journal import COPY, LIVE, Journal, JournalReplay, files
from narrows.ps.replication.events import MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.store.store import ArrayAllocator, assume_lent
from simulation.simulator import Random

if TYPE_CHECKING:
    from simulation.actors import Process

BEGIN_EVERY = 150  # events, after which the machine is written anew
WATCHED = ("apply", "accept", "_push")


@dataclass(frozen=True, slots=True)
class Kill:
    """Kills server process `who` at its event number `event`, after `effects` effects; another runs `lasts_ns` later."""

    who: int
    event: int
    effects: int
    lasts_ns: int


def killed(random: Random, who: int) -> Kill:
    """By its number an event early or late in a run: as many die at the first ten as at the next hundreds."""
    event = random.between(1, 1 << random.between(2, 9))
    return Kill(who, event, random.between(0, 3), random.between(1, NS))


@contextmanager
def unwatched(server: Server) -> Iterator[None]:
    """Who watches a machine has put itself in the place of some methods: that is no part of the machine."""
    planned = server.shard.model_shard
    watched: list[Any] = [planned.store, planned.folding] if planned is not None else []
    watched += [planned.parent_slot.link] if planned is not None and planned.parent_slot.link is not None else []
    kept = [(each, name, each.__dict__.pop(name)) for each in watched for name in WATCHED if name in vars(each)]
    try:
        yield
    finally:
        for each, name, method in kept:
            setattr(each, name, method)


class Kept:
    """The journal of one process, whose arrays lie in its segment, also small ones."""

    def __init__(self, process: Process) -> None:
        self.process, self.files = process, files()
        self.journal = self.opened()
        shard = process.server.shard
        shard.resources = replace(shard.resources, arrays=self.journal.arrays)
        self.count, self.stale = 0, False
        self.begin()

    def __del__(self) -> None:
        for file in self.files:
            os.close(file)

    def arrays(self) -> ArrayAllocator:
        """The allocator of the next life's arrays."""
        both = os.dup(self.files[LIVE]), os.dup(self.files[COPY])  # arrays outlive a journal that nobody reads
        segment = ArraySegment(*both)
        for file in both:
            weakref.finalize(segment, os.close, file)
        segment.least = 1
        return segment

    def opened(self) -> Journal:
        """The journal of the next life. The machine reads small frames in it too, as it has small arrays there."""
        journal = Journal(self.files, assume_lent, arrays=self.arrays())
        journal.event_file.least = 1 if journal.segment is not None else journal.event_file.least
        return journal

    def begin(self) -> None:
        """From what the process is now."""
        with unwatched(self.process.server):
            self.journal.begin(self.process.server)
        assert not self.journal.failure, self.journal.failure
        self.stale = False

    def written(self, event: MachineEvent) -> MachineEvent:
        frames = self.journal.note(event, encode(event.message) if event.message is not None else [])
        return replace(event, message=decode(frames)) if frames else event

    def changed(self) -> None:
        """A checkpoint was read: it may be gone when it would be read again."""
        self.stale = True

    def happened(self, event: MachineEvent, effects: Sequence[ServerEffect]) -> None:
        self.count += 1
        if self.stale or self.count % BEGIN_EVERY == 0:
            self.begin()

    def again(
        self, take: Callable[[Server], None], load: Callable[[int], None], note: Callable[[MachineEvent], None]
    ) -> JournalReplay:
        """As the next process begins: `take` the machine as it was written, and do all again that has happened since. `note` is
        told of each event before."""
        self.journal = self.opened()
        assert self.journal.whole
        server = self.journal.machine()
        take(server)
        return self.journal.replay(server, load, note)
