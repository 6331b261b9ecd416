"""The events of a server process's machine, as records. No I/O.

The same state and the same event always give the same next state. So the machine of a killed process can be rebuilt
from its journal (ps/journal/journal.py), and a standby can follow a primary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import decode, pack, unpack


class EventKind(IntEnum):
    """The kinds of events. The comment of a kind names the `values` of its events, then a colon."""

    START = 0  # the process has started; its machine may be older
    BELOW = 1  # key name, number of other keys (with keys, of a Hello or Leave): a message of a peer that dialled us
    COORDINATOR = 2  # a message of shard 0
    ABOVE = 3  # a message of the parent's shard
    FAILED_ABOVE = 4  # text, code: the session with the parent is over
    TICK = 5  # bytes sent to the parent and received from it, if any: a tick
    WROTE = 6  # clock, kept, took_ns: a checkpoint was written, or could not be
    STOP = 7  # Ctrl-C
    LINKED = 8  # peer: there is a new connection to this cluster, or for "" to the parent's shard
    UNREACHED = 9  # no connection has the name of this peer, which had dialled us
    ENDED = 10  # shards: these had ended when this process was restarted
    VIEW = 11  # view, standby, port, before: a view begins; this shard, on `port`, has the place of that at `before`
    RESHARD = 12  # shards: the user asks for this number of shards
    BESIDE = 13  # a message of the parent's standby


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """One event of a server process's machine."""

    kind: EventKind
    now_ns: int
    peer: bytes = b""  # routing id of the message's sender, if it dialled us
    message: m.Message | None = None
    values: tuple[Any, ...] = ()  # as the comment of the kind names them

    def described(self) -> bytes:
        """The event without its message, packed."""
        return pack([int(self.kind), self.now_ns, bytes(self.peer), [*self.values]])

    @classmethod
    def of(cls, about: bytes, frames: Sequence[m.Buffer]) -> MachineEvent:
        """The event that `described` packed as `about`, with the message of these frames.

        Raises:
            RemoteProtocolError: `about` or `frames` hold no event.
        """
        described: Any = unpack(about)
        try:
            number, now_ns, peer, values = described
            kind, values = EventKind(number), tuple(values)
        except (TypeError, ValueError):
            raise RemoteProtocolError("an event has a kind, a time, a peer and values, and this one has not") from None
        return cls(kind, now_ns, peer, decode(frames) if frames else None, values)
