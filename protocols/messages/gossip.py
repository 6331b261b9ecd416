"""Mixing without a server in the path (gossip). The peers are the workers of a run, or the shards of clusters below one
server.

How it works
1. The coordinator sends `Roster` to each member whenever the members change: who they are and where each listens.
2. A peer that came later has no model yet. It sends `ModelRequest` to another peer, which answers with `Offer` number
   -1: its whole model.
3. Two peers exchange. Each sends the other its side of exchange `number`, in parts (`Offer`), and acknowledges the
   other's side once all parts are there (`OfferAck`). Then each mixes both sides.
4. A peer that waits for an `Offer` sends `Ping`. The other peer answers with its newest `OfferAck`.
5. A peer that has made its last step sends `GossipEnded`. It still answers exchanges until all peers have ended.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from narrows.protocols.messages.base import Buffer, Message, Quads, Texts
from narrows.protocols.messages.join import NAME_BYTES


@dataclass(frozen=True, slots=True)
class Roster(Message):
    """Coordinator to worker: who may mix with whom from now on (gossip)."""

    worker: int  # that it is for
    epoch: int
    started: bool
    members: Quads  # worker, epoch joined, rank, 0 for one that began with the run
    addresses: Texts  # of each member
    closed: bool = False  # all of them have done their last step, and nobody joins any more
    names: Texts = ()  # for each member: how the routing ids begin by which it and this worker dial each other
    round: int = 0  # that the run begins with


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """Peer to peer: one part of the sender's side of exchange `number` of this pair, keys [begin, end).

    `whole`: the model itself; else its difference to what the two share. `sample`: float32, what the sender's updates of
    its newest window sum up to at a sample of the keys, in part 0 of the first offer after that; else empty.
    """

    worker: int
    peer: int  # that it is for
    epoch: int  # of the sender's roster
    round: int
    number: int
    part: int
    parts: int
    begin: int
    end: int
    weight: float
    whole: bool
    codec: int
    payload: Buffer
    sample: bytes = b""


@dataclass(frozen=True, slots=True)
class OfferAck(Message):
    """Peer to peer: all parts of your side of exchange `number` are here."""

    worker: int
    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class ModelRequest(Message):
    """Peer to peer: I am new; the answer to this is an Offer of number -1, your whole model."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Peer to peer: are you there? Answered with the newest OfferAck."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class GossipEnded(Message):
    """Peer to peer: I have done my last step, and mix with whoever asks until all have."""

    worker: int
    peer: int


def pair_name(one: bytes, other: bytes) -> str:
    """Return how the routing ids of two members begin by which they dial each other. It follows from the names of both, which
    the coordinator alone knows together.

    Args:
        one, other: bytes[NAME_BYTES], how the routing ids of each begin at its server.
    """
    low, high = sorted((one, other))
    return hashlib.sha256(low + high).hexdigest()[: 2 * NAME_BYTES]
