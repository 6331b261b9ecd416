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

NAME_BYTES = 8  # of a routing id: a secret of who dials, by which a server knows it again
WORKERS_MAX = 1 << 16  # a rank fits 16 bits; the table of members is sent whole
MODELS_MAX = 1 << 10  # models in files that a worker of gossip offers a run which is resumed


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Worker to coordinator: I want to join. `expect` is a msgpack map of the flags it was started with."""

    token: Name  # names this process and this attempt to join; a retry repeats it
    host: Name
    expect: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Coordinator to worker: your id, your rank, and the settings of the run (a msgpack map)."""

    token: str
    worker: int
    rank: int
    world_size: int
    epoch: int
    settings: bytes
    ports: Ints  # of each shard
    hosts: Texts = ()  # where each is, "" and (): on the host that the worker dialled


@dataclass(frozen=True, slots=True)
class Declare(Message):
    """Worker to coordinator: my model and optimizer (`ModelSpec`, packed). From here on it counts as a member."""

    worker: int
    epoch: int
    plan: bytes
    address: Name = ""  # where its peers reach it (gossip); of a cluster one for each shard, with spaces between them
    models: Pairs = ()  # rank, round: models of a run before that it has in files (gossip), at most MODELS_MAX


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """Coordinator to worker: the key ranges of each shard, and the clock to start from."""

    worker: int
    epoch: int
    clock: int
    ranges: Sets  # per shard: begin, end, begin, end, ...
    buffers: bytes  # newest module buffers of the run (BatchNorm), or empty


@dataclass(frozen=True, slots=True)
class NeedWeights(Message):
    """Shard to worker: the run has no weights yet and yours are to be the first, or in their mean."""

    worker: int
    epoch: int
    round: int = -1  # those of the model of this round, which you have in a file (gossip); -1: those that you have now
    rank: int = -1  # of the worker that wrote it


@dataclass(frozen=True, slots=True)
class FirstWeights(Message):
    """Worker to shard: one part of the first weights."""

    worker: int
    epoch: int
    part: int
    parts: int
    begin: int
    end: int
    codec: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Worker (or the launcher, for a child that died) to coordinator. `clock`: its clock when it is done, else -1."""

    token: Name
    clock: int


@dataclass(frozen=True, slots=True)
class LeaveAck(Message):
    token: str


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """Server to worker, one sentence. `epoch` is the one refused (0: none), so that a late refusal is known as such."""

    code: int
    worker: int
    epoch: int
    text: str


def name_of(peer: bytes) -> bytes:
    """bytes[NAME_BYTES]: how the routing id of a peer begins."""
    return peer[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


def check_name(peer: bytes, name: bytes, worker: int) -> None:
    """Raise RemoteProtocolError unless `peer` has the name of this worker."""
    if name_of(peer) != name:
        raise RemoteProtocolError(f"it is not from worker {worker}, whose number it has")
