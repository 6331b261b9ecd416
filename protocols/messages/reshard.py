"""Moving keys to other shards, changing the plan of a run, and shards on other machines.

How it works, between coordinator and child
1. The coordinator sends `Reshard` with place 0 to every child: push no update from clock `at` on. Each child repeats the
   number of that `Reshard` in its `Heartbeat` (control.py). In a mode without a staleness bound a child may be past `at`:
   it holds at a clock of its own, and its `Heartbeat` names that clock (`hold`).
2. All earlier clocks close. The shards write a checkpoint of clock `at` and cut their keys anew from it.
3. The coordinator sends `Reshard` with place > 0: the new shards, key ranges and settings. The child goes on at clock
   `at` of that message, the clock that it holds at. A `Reshard` with `at` -1 calls the change off.

How it works, between a remote shard host (`ps-serve --join` on another machine) and shard 0
1. The host sends `RemoteShardsOffer` without a token. Shard 0 answers `ReplicationBegin` (failover.py): the settings
   that the processes of the host need.
2. The host sends `RemoteShardsOffer` once a second: its room for shards, and its wish to stay or to go. Shard 0 answers
   `RemoteShardsGrant` with the numbers of the host's shards. Keys move to these shards as described before.
3. A remote shard sends `FileRequest` to shard 0 to write or read its part of a checkpoint. Shard 0 answers
   `FileAnswer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from narrows.protocols.messages.base import Buffer, Ints, Message, Name, Sets, Texts


@dataclass(frozen=True, slots=True)
class Reshard(Message):
    """Coordinator to child: the keys are cut anew, or the run has another plan. The newest Reshard replaces all before.

    - `at` >= 0, `place` 0: push no update from this clock on, until the next Reshard. A child of a mode without a bound
      that is past this clock holds at its own.
    - `place` > 0: the shards named here have all updates before clock `at`. Go on with them at that clock, in the epoch
      `place`.
    - `at` -1: the change is off, go on as before.
    """

    worker: int
    epoch: int  # of the child's place: in which it joined, or came to the shards that it has
    number: int
    at: int  # a clock
    place: int = 0  # the new epoch
    ports: Ints = ()
    ranges: Sets = ()
    hosts: Texts = ()  # as in Welcome
    settings: bytes = b""  # of the run from that clock on, as in Welcome, with place > 0


class RemoteShardsWish(IntEnum):
    """The wish of a remote shard host, a ps-serve on another machine with shards of this server."""

    STAY = 1
    GO = 2  # leave once its keys have moved back
    GONE = 3  # leave at once: its keys are lost


@dataclass(frozen=True, slots=True)
class RemoteShardsOffer(Message):
    """Remote shard host to shard 0: it has room for shards of this server. Sent again as a heartbeat."""

    token: Name  # names the host and this attempt to join; "": a request for ReplicationBegin
    host: Name  # where members find its shards; behind one port HOST:PORT
    shards: int  # number of shards that it has room for
    first: int  # number of the first shard that it has; -1: it knows of none
    wish: int  # a `RemoteShardsWish`


@dataclass(frozen=True, slots=True)
class RemoteShardsGrant(Message):
    """Shard 0 to a remote shard host: the shards of that host. The newest epoch and version replaces all before it."""

    token: Name
    epoch: int
    version: int
    first: int  # number of the host's first shard; -1: none so far
    count: int  # number of its shards
    shards: int  # number of all shards of the server now
    target: int  # the same after the reshard that is under way
    over: bool  # the host has no shard any more, and ends with `code` and `text`
    code: int  # exit code, 0: done; NOT_A_MEMBER: join again
    text: str


@dataclass(frozen=True, slots=True)
class FileRequest(Message):
    """Remote shard to shard 0, which has the checkpoints of all: a request about the file of `shard` and `clock`."""

    number: int  # of the request; the answer repeats it
    what: int  # an `ArchiveJob` (ps/checkpoints/remote_archive.py)
    shard: int
    shards: int
    clock: int
    offset: int  # bytes
    shared: int  # clock of the newest checkpoint that all shards have
    name: Name  # of the temporary file, while it is not complete
    payload: Buffer


@dataclass(frozen=True, slots=True)
class FileAnswer(Message):
    """Shard 0 to a remote shard: the answer to a FileRequest."""

    number: int  # of the FileRequest
    size: int  # bytes of the file
    clocks: Ints
    text: str  # why the request failed; "": it did not
    payload: Buffer
