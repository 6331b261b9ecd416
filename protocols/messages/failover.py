"""A standby copies a server, and takes over once the server is lost.

How it works, copying
1. `ps-serve --standby` sends `ReplicationFollow` with shard -1 to shard 0 of the server. Shard 0 answers
   `ReplicationBegin`: what the processes of the standby must be told.
2. Each process of the standby sends `ReplicationFollow` to the shard that it copies. The shard sends
   `ReplicationEntry`: its machine in parts, and then each event of the machine.
3. `ReplicationFollow` acknowledges the entries. The shard holds the effects of an event back until the standby has the
   event.
4. Each shard tells shard 0 by `ReplicationProgress` how far the copy is.

How it works, taking over
1. Shard 0 sends `FailoverNotice` to members and shards: who serves in this view, and who stands by. Each member answers
   once in a view with `FailoverVote`.
2. A member that hears the server no more sends its `FailoverVote` to the standby.
3. The standby hears the server no more either, and half of the members vote for it. It serves, and sends
   `FailoverNotice` to the members. If the standby still hears the server, it answers `KeepServing` instead: the vote
   counts no more.

The same votes cannot keep the server and elect the standby. docs/protocol.md, "A standby", has each case.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages.base import Buffer, Ints, Message, Name


@dataclass(frozen=True, slots=True)
class ReplicationFollow(Message):
    """Standby to the shard that it copies: what is here of it. It acknowledges, and said again it is a sign of life."""

    shard: int  # -1: what must a server be told to stand by for you?
    have: int  # events up to this one, and what follows from them; -1: no machine
    life: int = -1  # of the shard, of which that is: an incarnation
    machine: int = -1  # of the machine as it was after this event ...
    parts: int = 0  # ... so many parts are here
    address: Name = ""  # where members find the standby (shard 0)


@dataclass(frozen=True, slots=True)
class ReplicationBegin(Message):
    """Shard 0 to a standby: what it must be told, a msgpack map."""

    told: bytes


@dataclass(frozen=True, slots=True)
class ReplicationEntry(Message):
    """Shard to its standby: event `number`, or where `parts` is not 0, a part of the machine as it was after that event."""

    life: int  # of the shard: its incarnation; events are counted anew in each
    number: int
    part: int
    parts: int
    about: bytes  # of an event: its kind, time, peer and values (ps/replication/events.py)
    frames: int  # of its message, 0: it has none
    header: bytes  # the first of them
    payload: Buffer  # the second; of a machine: this part of it


@dataclass(frozen=True, slots=True)
class ReplicationProgress(Message):
    """Shard to shard 0 of the same server, and the same between two that stand by: how far copying is."""

    shard: int
    view: int
    standby: Name  # which has all of this shard, or had it a moment ago: where members find it; "": none has
    port: int  # where this shard listens


@dataclass(frozen=True, slots=True)
class FailoverNotice(Message):
    """Who serves: shard 0 to members and to the other shards. Each change of who does has a number of its own.

    From the server that members know: it serves, and `standby` stands by, "": nobody does; not `decided`: it asks for votes.
    From the standby: it serves now, and its shards listen on `ports`, on the host where it was dialled.
    """

    view: int
    standby: Name
    decided: bool
    ports: Ints = ()


@dataclass(frozen=True, slots=True)
class FailoverVote(Message):
    """Member to the server, or to its standby: in view `view` I take you for the server, and nobody else."""

    worker: int
    epoch: int
    view: int
    attempt: int


@dataclass(frozen=True, slots=True)
class KeepServing(Message):
    """Standby to member: the server lives, and your vote does not count any more."""

    view: int
    attempt: int
