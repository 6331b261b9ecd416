"""Moving keys to other shards, changing the plan of a run, and shards on other machines.

How it works, between coordinator and child
1. The coordinator sends `Move` with place 0 to every child: push no update from clock `at` on. Each child repeats the
   number of that `Move` in its `Heartbeat` (control.py).
2. All earlier clocks close. The shards write a checkpoint of clock `at` and cut their keys anew from it.
3. The coordinator sends `Move` with place > 0: the new shards, key ranges and settings. The child goes on at clock
   `at`. A `Move` with `at` -1 calls the change off.

How it works, between a guest (`ps-serve --join` on another machine) and shard 0
1. The guest sends `RemoteShardsOffer` without a token. Shard 0 answers `ReplicationBegin` (failover.py): what the
   processes of the guest must be told.
2. The guest sends `RemoteShardsOffer` once a second: its room for shards, and its wish to stay or to go. Shard 0
   answers `RemoteShardsGrant` with the numbers of the guest's shards. Keys move to them as above.
3. A shard of the guest sends `FileRequest` to shard 0 to write or read its part of a checkpoint. Shard 0 answers
   `FileAnswer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from narrows.protocols.messages.base import Buffer, Ints, Message, Name, Sets, Texts


@dataclass(frozen=True, slots=True)
class Move(Message):
    """Coordinator to worker: the keys are cut anew, or the run has another plan. The newest number replaces all before it.

    at >= 0, place 0: push no update from this clock on, until the next Move. place > 0: all updates before clock `at` are in
    the shards that are named here; go on with them at that clock, in the epoch `place`. at -1: go on as before.
    """

    worker: int
    epoch: int  # in which it joined, or came to the shards that it has
    number: int
    at: int
    place: int = 0
    ports: Ints = ()
    ranges: Sets = ()
    hosts: Texts = ()  # as in Welcome
    settings: bytes = b""  # of the run from that clock on, as in Welcome, with place > 0


class Wish(IntEnum):
    """The wish of a guest, which is a ps-serve on another machine with shards of this server."""

    STAY = 1
    GO = 2  # once its keys have moved back
    GONE = 3  # at once, and its keys are lost


@dataclass(frozen=True, slots=True)
class RemoteShardsOffer(Message):
    """Guest to shard 0: it has room for shards of this server. Said again, it is a sign of life."""

    token: Name  # names it, and this attempt to join; "": what must its shards be told? ReplicationBegin answers
    host: Name  # where members find its shards
    shards: int  # that it has room for
    first: int  # the first of those that it has, -1: it knows of none
    wish: int  # a `Wish`


@dataclass(frozen=True, slots=True)
class RemoteShardsGrant(Message):
    """Shard 0 to a guest: which shards are its. The newest epoch and version replaces all before it."""

    token: Name
    epoch: int
    version: int
    first: int  # -1: none so far
    count: int
    shards: int  # that there are of this server
    target: int  # that there are to be
    over: bool  # none are its any more:
    code: int  # with this it ends, 0: done; NOT_A_MEMBER: join again
    text: str


@dataclass(frozen=True, slots=True)
class FileRequest(Message):
    """Shard of a guest to shard 0, which has the checkpoints of all: about the file of `shard` and `clock`."""

    number: int  # which the answer repeats
    what: int  # a `ArchiveJob` (ps/checkpoints/remote_archive.py)
    shard: int
    shards: int
    clock: int
    offset: int
    shared: int  # the newest clock that all shards have
    name: Name  # of a file that is coming, while it is not whole
    payload: Buffer


@dataclass(frozen=True, slots=True)
class FileAnswer(Message):
    """Shard 0 to a shard of a guest."""

    number: int
    size: int  # of the file
    clocks: Ints
    text: str  # why there is no answer, "" where there is one
    payload: Buffer
