"""A standby copies a server, and takes over once the server is lost.

How it works, copying
1. `ps-serve --standby` sends `ReplicationFollow` with shard -1 to shard 0 of the server. Shard 0 answers
   `ReplicationBegin`: the settings that the processes of the standby need.
2. Each process of the standby sends `ReplicationFollow` to the shard that it copies. The shard sends
   `ReplicationEntry`: its machine in parts, and then each event of the machine.
3. `ReplicationFollow` acknowledges the entries. The shard holds the effects of an event back until the standby has the
   event.
4. Each shard tells shard 0 by `ReplicationProgress` how far the copy is.

How it works, taking over
1. Shard 0 sends `FailoverNotice` to members and shards: the view, and the standby's address. Each member answers once
   in a view with `FailoverVote`.
2. A member that receives nothing from the server any more sends its `FailoverVote` to the standby.
3. The standby receives nothing from the server either, and half of the members vote for it. It serves, and sends
   `FailoverNotice` to the members. If the standby still receives from the server, it answers `KeepServing` instead: the
   vote no longer counts.

The same votes cannot keep the server and elect the standby. docs/protocol.md, "A standby", has each case.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages.base import Buffer, Ints, Message, Name


@dataclass(frozen=True, slots=True)
class ReplicationFollow(Message):
    """Standby to the shard that it copies: how much the standby has. An acknowledgement and a heartbeat."""

    shard: int  # -1: a request for ReplicationBegin
    have: int  # number of the newest event that the standby has replayed; -1: no machine yet
    life: int = -1  # the incarnation of the shard that `have` counts events of
    machine: int = -1  # of the copy of the machine as it was after this event ...
    parts: int = 0  # ... the standby has this many parts
    address: Name = ""  # where members find the standby (shard 0)


@dataclass(frozen=True, slots=True)
class ReplicationBegin(Message):
    """Shard 0 to a standby: the settings that its processes need."""

    told: bytes  # a msgpack map


@dataclass(frozen=True, slots=True)
class ReplicationEntry(Message):
    """Shard to its standby: one event, or if `parts` > 0, one part of the machine as it was after event `number`."""

    life: int  # incarnation of the shard; events are counted anew in each
    number: int  # of the event
    part: int
    parts: int  # 0: an event
    about: bytes  # kind, time, peer and values of the event (ps/replication/events.py)
    frames: int  # number of frames of the event's message; 0: no message
    header: bytes  # the first frame
    payload: Buffer  # the second frame; or the part of the machine


@dataclass(frozen=True, slots=True)
class ReplicationProgress(Message):
    """Shard to shard 0 of the same server, or of the same standby: the progress of the copy."""

    shard: int
    view: int
    standby: Name  # address of the standby that has all of this shard, or had it a moment ago; "": none
    port: int  # by which members reach this shard, 0 behind one port


@dataclass(frozen=True, slots=True)
class FailoverNotice(Message):
    """Shard 0 to members and to the other shards: the server of a view. Each change of server has a new view.

    From the server that members know: this server serves. From the standby: the standby serves now, and its shards
    listen on `ports`, on the host where members dialled it; ports of 0 are behind the port that members dialled.
    """

    view: int
    standby: Name  # address of the server's standby; "": none
    decided: bool  # False: the server asks for votes
    ports: Ints = ()


@dataclass(frozen=True, slots=True)
class FailoverVote(Message):
    """Member to the server, or to its standby: the member's vote for the receiver as the server of view `view`."""

    worker: int
    epoch: int
    view: int
    attempt: int


@dataclass(frozen=True, slots=True)
class KeepServing(Message):
    """Standby to member: the server is live, and the member's vote no longer counts."""

    view: int
    attempt: int
