"""Beside a server process a twin: it was made of what the process was once, and has been told the same since. Both must do the
same, whatever happens. So a process that is killed can be made again from its journal.

    monkeypatch.setattr(Process, "shadow_of", Twin)        each process that is made from then on has one
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from narrows.protocols import effects as e
from narrows.protocols.effects import ServerEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.wire import encode
from narrows.ps.journal.journal import Journal
from narrows.ps.replication.events import MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.store.store import HEAP, ArrayAllocator, assume_lent
from simulation.mirror import Violation
from simulation.shard_kills import Kept

REPLAY_EVERY = 37  # events, from one replay of all that was written to the next
BEGIN_EVERY = 3  # of those, after which the journal begins anew


def said(effects: Sequence[ServerEffect]) -> list[Any]:
    """Effects as they can be compared: a message by its bytes."""
    out: list[Any] = []
    for effect in effects:
        if isinstance(effect, (e.Send, e.SendToPeer)):
            to = effect.peer if isinstance(effect, e.Send) else effect.address
            out.append((to, type(effect.message).__name__, tuple(bytes(frame) for frame in encode(effect.message))))
        else:
            out.append(effect)
    return out


class Twin(Kept):
    """The twin of one process."""

    replays = 0  # of all twins

    def arrays(self) -> ArrayAllocator:
        """The process and its twin live at one time: they cannot have one segment."""
        return HEAP

    def begin(self) -> None:
        super().begin()
        self.server = self.journal.machine()

    def happened(self, event: MachineEvent, effects: Sequence[ServerEffect]) -> None:
        """The process has done that; so must the twin."""
        if self.stale:  # it was told of that in the midst of the event
            return self.begin()
        ours, theirs = said(effects), said(_follow(self.server, event))
        if ours != theirs:
            found = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]] or [(ours, theirs)]
            raise Violation(f"at {event.kind.name} {self.process.port} and its twin do not do the same: {found[0]}")
        self.count += 1
        if self.count % REPLAY_EVERY == 0:
            self._replay()

    def _replay(self) -> None:
        """Another twin, of all that is written."""
        Twin.replays += 1
        journal = Journal(self.files, assume_lent)
        self.server = journal.machine()
        for event in journal.events():
            with suppress(NarrowsError):  # a message that was refused
                _follow(self.server, event)
        assert (journal.serial, journal.event_file.end) == (self.journal.serial, self.journal.event_file.end)
        if self.count % (BEGIN_EVERY * REPLAY_EVERY) == 0:
            self.begin()


def _follow(server: Server, event: MachineEvent) -> list[ServerEffect]:
    effects = server.happen(event)
    while server.inner:
        effects = [*effects, *server.advance(event.now_ns)]
    return effects
