"""Joining and leaving a run. The sender is a child (a worker, or the server of a cluster); the receiver is a server.

How it works
1. The child sends `Hello` to the coordinator. The coordinator answers `Welcome`: the child's number and rank, the
   settings of the run, and the address of each shard.
2. The child sends `Declare` to the coordinator: its model and optimizer. From here on the coordinator counts it as a
   member: the epoch grows, and a `Ledger` (control.py) tells every shard.
3. Once every shard has reported that epoch, the coordinator sends `Ready`: the key ranges of each shard and the clock
   to start from.
4. The child sends `Follow` (state.py) to each shard. In a run that has no weights yet, a shard answers `NeedWeights` to
   the child whose weights are to be the first. That child sends `FirstWeights`, in parts. All others wait for the
   state.
5. The child sends `Leave` to the coordinator once it is done. The coordinator answers `LeaveAck`. The launcher sends
   `Leave` for a worker process that died.

A server may answer any message of a child with `Refuse`: one sentence and a `RefuseCode`. A child repeats each request
until the answer comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages.base import Buffer, Ints, Message, Name, Pairs, Sets, Texts

NAME_BYTES = 8  # first bytes of a routing id, a secret of the child: by these a server knows the child again
WORKERS_MAX = 1 << 16  # a rank fits 16 bits; the table of members is sent whole
MODELS_MAX = 1 << 10  # models in files that a worker offers when a gossip run resumes


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Child to coordinator: the request to join."""

    token: Name  # names this process and this attempt to join; a retry repeats it
    host: Name  # name of the child's machine, for the user
    expect: bytes = b""  # the flags of the run that the child was started with, a msgpack map


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Coordinator to child: the child's number and rank, and the settings of the run."""

    token: str  # of the Hello that this answers
    worker: int
    rank: int
    world_size: int
    epoch: int
    settings: bytes  # `Settings`, packed
    ports: Ints  # of each shard; 0: it is behind one port
    hosts: Texts = ()  # of each shard; "" or (): the host that the child dialled. With port 0 HOST:PORT, or the same
    view: int = 0  # number of the newest view (failover.py)
    standby: Name = ""  # address of the standby of that view; "": none
    relay: Texts = ()  # gossip: name and key of the child at the relay, the relay's address ("": the server's); (): none


@dataclass(frozen=True, slots=True)
class Declare(Message):
    """Child to coordinator: its model and optimizer. From here on the child counts as a member."""

    worker: int
    epoch: int
    plan: bytes  # `ModelSpec`, packed
    address: Name = ""  # where peers reach the child (gossip); of a cluster one for each shard, separated by spaces
    models: Pairs = ()  # rank, round: models of an earlier run in files of the child (gossip), at most MODELS_MAX


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """Coordinator to child: the key ranges of each shard, and the clock to start from."""

    worker: int
    epoch: int
    clock: int
    ranges: Sets  # per shard: begin, end, begin, end, ...
    buffers: bytes  # newest module buffers of the run (BatchNorm), or empty


@dataclass(frozen=True, slots=True)
class NeedWeights(Message):
    """Shard to child: send your weights. The run has none yet, and takes these or a mean with them."""

    worker: int
    epoch: int
    round: int = -1  # of a model in a file of the child, whose weights are meant (gossip); -1: its weights now
    rank: int = -1  # of the worker that wrote that file


@dataclass(frozen=True, slots=True)
class FirstWeights(Message):
    """Child to shard: one part of the first weights, keys [begin, end)."""

    worker: int
    epoch: int
    part: int  # number of this part, from 0 on
    parts: int  # number of all parts
    begin: int
    end: int
    codec: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Child to coordinator: it leaves. The launcher sends this for a worker process that died."""

    token: Name
    clock: int  # the child's clock if it is done, else -1


@dataclass(frozen=True, slots=True)
class LeaveAck(Message):
    token: str


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """Server to child: its message is refused."""

    code: int  # a `RefuseCode`
    worker: int
    epoch: int  # of the refused message, 0: none; a child that is in another epoch by now ignores the refusal
    text: str  # one sentence


def name_of(peer: bytes) -> bytes:
    """Return the first NAME_BYTES bytes of the routing id of a peer."""
    return peer[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


def check_name(peer: bytes, name: bytes, worker: int) -> None:
    """Raise RemoteProtocolError unless the routing id `peer` begins with `name`, the name of `worker`."""
    if name_of(peer) != name:
        raise RemoteProtocolError(f"it is not from worker {worker}, whose number it has")
