"""The events of a server process's machine, each a record. The same state before and the same event always give the
same state after, so a machine whose process was killed can be made again (ps/process/journal.py). No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import decode, pack, unpack


class EventKind(IntEnum):
    """The values of an event are named behind its kind."""

    START = 0  # the process is there; its machine may have begun before
    BELOW = 1  # a message of a peer that dialled us; of a Hello or a Leave with keys: its name, how many other keys there are
    COORDINATOR = 2  # a message of shard 0
    ABOVE = 3  # a message of the shard above
    FAILED_ABOVE = 4  # text, code: the session with it is over
    TICK = 5  # bytes to and from above, if any have moved
    WROTE = 6  # clock, kept, took_ns: a checkpoint was written, or could not be
    STOP = 7  # Ctrl-C
    LINKED = 8  # peer: the connection to this cluster is another one; "": that to the shard above
    UNREACHED = 9  # nobody is connected under the name of this peer, which had dialled us
    ENDED = 10  # shards: these had ended when the process was started again
    VIEW = 11  # view, standby, port, before: who serves and stands by, where this shard listens, in whose place from now on
    RESHARD = 12  # shards: the keys are to be cut over so many
    BESIDE = 13  # a message of the standby of the server above


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """`values`: as its kind says."""

    kind: EventKind
    now_ns: int
    peer: bytes = b""
    message: m.Message | None = None
    values: tuple[Any, ...] = ()

    def described(self) -> bytes:
        """All of it but its message."""
        return pack([int(self.kind), self.now_ns, bytes(self.peer), [*self.values]])

    @classmethod
    def of(cls, about: bytes, frames: Sequence[m.Buffer]) -> MachineEvent:
        """The event that was described so, and whose message has these frames. Raises RemoteProtocolError."""
        described: Any = unpack(about)
        try:
            number, now_ns, peer, values = described
            kind, values = EventKind(number), tuple(values)
        except (TypeError, ValueError):
            raise RemoteProtocolError("an event has a kind, a time, a peer and values, and this one has not") from None
        return cls(kind, now_ns, peer, decode(frames) if frames else None, values)
