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
    """Coordinator to worker: the workers that may mix from now on (gossip)."""

    worker: int  # the receiver
    epoch: int
    started: bool
    members: Quads  # worker, epoch joined, rank, 0 if it began with the run
    addresses: Texts  # of each member
    closed: bool = False  # all members have done their last step, and no worker may join any more
    names: Texts = ()  # of each member: `pair_name` of the member and the receiver
    round: int = 0  # the first of the run


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """Peer to peer: one part of the sender's side of an exchange, keys [begin, end)."""

    worker: int  # the sender
    peer: int  # the receiver
    epoch: int  # of the sender's roster
    round: int  # of the sender
    number: int  # of the exchange, counted for this pair; -1: the answer to a ModelRequest
    part: int  # number of this part, from 0 on
    parts: int  # number of all parts
    begin: int
    end: int
    weight: float  # of the mix, at most 0.5
    whole: bool  # the values are the model itself; False: its difference to the pair's common reference
    codec: int
    payload: Buffer
    sample: bytes = b""  # float32: see gossip/gain.py; in part 0 of the first offer after a window, else b""


@dataclass(frozen=True, slots=True)
class OfferAck(Message):
    """Peer to peer: all parts of the receiver's side of exchange `number` are here."""

    worker: int
    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class ModelRequest(Message):
    """Peer to peer: the sender is new and asks for the whole model; the answer is an Offer of number -1."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Peer to peer: the sender tests whether the receiver is live; the answer is its newest OfferAck."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class GossipEnded(Message):
    """Peer to peer: the sender has done its last step. It mixes with peers that ask until all have done theirs."""

    worker: int
    peer: int


def pair_name(one: bytes, other: bytes) -> str:
    """Return the first characters of the routing ids with which two members dial each other.

    The name follows from the names of both. Only the coordinator knows both names, so no stranger can make it up.

    Args:
        one, other: bytes[NAME_BYTES], the first bytes of each member's routing id at its server.
    """
    low, high = sorted((one, other))
    return hashlib.sha256(low + high).hexdigest()[: 2 * NAME_BYTES]
