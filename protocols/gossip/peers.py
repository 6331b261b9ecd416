"""One worker's links to its peers (gossip): offers repeated until they are acknowledged, and silent peers. No I/O.

How it works

    GossipDriver --carry_out--> GossipPeers --SendToPeer--> peer
    peer --receive--> GossipPeers --OfferArrived, PeerEnded, PeerLost, ...--> GossipDriver.hear

1. `roster` takes the peers and their addresses from the coordinator. Messages of workers that no roster has named yet
   wait in `early`.
2. `carry_out` does what the driver asks: send an offer, ask for a model, tell all peers that this worker is done.
3. `receive` puts the parts of an offer together. A complete offer is acknowledged and goes to the driver.
4. `tick` sends again what is not acknowledged, sends Ping to a peer that is awaited and silent, and gives up a peer
   that is silent for a lease.

Rules
- The exchanges of a pair are numbered. The next begins when this one is mixed here. The peer may lack this worker's
  side then. So at most two own offers of a pair are under way, and one offer of the peer.
- An offer is acknowledged once all its parts are here, whatever the driver does with it. It is delivered exactly once.
- A peer that dials has a routing id that begins as the roster says of the pair (or has the peer's key). A message from
  any other connection is refused.
- The coordinator introduces peers (`Roster`) and drops them. The coordinator may be lost: so a peer that is awaited and
  silent for a lease is lost, and stays lost. The same holds for a peer that sends a message that is not valid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.retry import LONG_AGO_NS, transfer_ns
from narrows.protocols.config.timing import BEATS, ENDED_NS, OFFER_RETRY
from narrows.protocols.effects import MemberEffect, PeerSay, SendToPeer
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import FRAME_BYTES

EARLY_MAX = 64  # kept messages of workers that no roster has named yet
EARLY_BYTES_MAX = 1 << 20  # of their payloads; a peer sends an offer again that had no room
WHOLE = -1  # the number of an offer that answers a ModelRequest


@dataclass(slots=True)
class GossipPeer:
    """One peer."""

    address: str
    heard_ns: int  # when its last message came, or from when on it must show that it is live
    name: bytes = b""  # how its routing ids begin; b"": the roster does not say
    expected: int = 0  # number of its next offer
    parts: dict[int, m.Offer] = field(default_factory=dict)  # of its next offer, by part
    sent: dict[int, list[m.Offer]] = field(default_factory=dict)  # number -> own offer, not yet acknowledged; at most 2
    sent_ns: int = 0  # when an own offer was last sent
    awaited: int = -1  # number of the offer that this worker waits for; < `expected`: none
    adopting: bool = False  # this worker waits for the peer's whole model
    adopt_ns: int = 0  # when the model was last asked for, or a part of it came
    asked_ns: int = 0  # when the last Ping was sent

    @property
    def sent_bytes(self) -> int:
        return sum(len(offer.payload) for offers in self.sent.values() for offer in offers)


def _kind(offer: m.Offer) -> tuple[int, ...]:
    """Return the fields that all parts of one offer share."""
    return offer.number, offer.parts, offer.epoch, offer.round


class GossipPeers:
    """The links of one worker to its peers. Messages and rosters in, effects out.

    Args:
        worker: this worker's id, as its peers know it.
        lease_ns: silence after which a peer that is awaited is lost.
        shard: if clusters gossip, the number of this shard. Its peers are the shards of this number of other clusters.
    """

    def __init__(self, worker: int, lease_ns: int, shard: int = 0) -> None:
        self.worker, self.lease_ns, self.shard = worker, lease_ns, shard
        self.epoch = 0  # of the newest roster
        self.peers: dict[int, GossipPeer] = {}
        self.lost: set[int] = set()
        self.early: deque[tuple[m.Message, bytes | None]] = deque()  # messages of unknown workers; their routing ids
        self.ended = False  # this worker is done, and waits for the others
        self.ended_ns = 0  # when GossipEnded was last sent
        self.closing = False  # PeersSettled is due once all offers are acknowledged

    def roster(self, roster: m.Roster, now_ns: int) -> list[MemberEffect]:
        """Take over a newer roster, and handle the early messages of workers that it names.

        Raises:
            RemoteProtocolError: the roster is not valid.
        """
        if (roster.epoch, roster.started) <= (self.epoch, False) or roster.worker != self.worker:
            return []
        if len(roster.addresses) != len(roster.members) or len(roster.names) not in (0, len(roster.members)):
            raise RemoteProtocolError("a roster has an address and a name for each member")
        self.epoch = roster.epoch
        named = {row[0]: address for row, address in zip(roster.members, roster.addresses, strict=True)}
        self.peers = {worker: peer for worker, peer in self.peers.items() if worker in named}
        for worker, address in named.items():
            if worker not in self.peers and worker != self.worker and worker not in self.lost:
                addresses = address.split(" ")  # one for each shard of a cluster
                self.peers[worker] = GossipPeer(addresses[min(self.shard, len(addresses) - 1)], now_ns)
        for (worker, *_), name in zip(roster.members, roster.names, strict=False):
            if worker in self.peers:
                self.peers[worker].name = name.encode()
        early, self.early = self.early, deque()
        effects: list[MemberEffect] = [e.RosterChanged(roster)]
        for message, sender in early:
            with suppress(RemoteProtocolError):  # a stranger sent it under the number of a peer that came later
                effects += self.receive(message, now_ns, sender)
        return effects

    # Commands of the `GossipDriver`.

    def carry_out(self, say: PeerSay, now_ns: int) -> list[MemberEffect]:
        match say:
            case e.SendOffer(offers):
                return self.offer(offers, now_ns)
            case e.RequestModel(peer):
                return self.adopt(peer, now_ns)
            case e.AnnounceEnd():
                return self.end(now_ns)
            case e.EndAnnouncement():
                return self.over()
            case e.DropPeer(peer):
                return self.lose(peer)

    def offer(self, offers: Sequence[m.Offer], now_ns: int) -> list[MemberEffect]:
        """Send all parts of this worker's side of an exchange, and await the peer's side. A lost peer gets nothing."""
        peer = self.peers.get(offers[0].peer)
        if peer is None or offers[0].worker != self.worker:
            return []  # with another worker id: the driver made the offer before it handled a rejoin
        if offers[0].number == WHOLE:
            return self._tell(peer, offers)
        if not peer.sent and peer.awaited < peer.expected:
            peer.heard_ns = max(peer.heard_ns, now_ns)  # from here on the peer must show that it is live
        peer.sent[offers[0].number] = list(offers)
        peer.sent_ns, peer.awaited = now_ns, offers[0].number
        return self._tell(peer, offers)

    def adopt(self, worker: int, now_ns: int) -> list[MemberEffect]:
        """Ask a peer for its whole model, and stop asking any other."""
        peer = self.peers.get(worker)
        if peer is None:
            return []
        for other in self.peers.values():
            other.adopting = False
        peer.adopting, peer.heard_ns, peer.adopt_ns = True, now_ns, now_ns
        return self._tell(peer, [m.ModelRequest(self.worker, worker)])

    def end(self, now_ns: int) -> list[MemberEffect]:
        """Tell all peers that this worker is done, again and again until `over`."""
        self.ended, self.ended_ns = True, now_ns
        for peer in self.peers.values():
            peer.heard_ns = now_ns
        return self._say_ended()

    def lose(self, worker: int) -> list[MemberEffect]:
        """Drop a peer and all its further messages."""
        self.peers.pop(worker, None)
        self.lost.add(worker)
        return self._settled()

    def over(self) -> list[MemberEffect]:
        """Await no peer any more: all are done. Offers that are not yet acknowledged are still repeated."""
        self.ended, self.closing = False, True
        return self._settled()

    def _settled(self) -> list[MemberEffect]:
        if not self.closing or any(peer.sent for peer in self.peers.values()):
            return []
        self.closing = False
        return [e.PeersSettled()]

    def _say_ended(self) -> list[MemberEffect]:
        return [SendToPeer(peer.address, m.GossipEnded(self.worker, worker)) for worker, peer in self.peers.items()]

    def _tell(self, peer: GossipPeer, messages: Iterable[m.Message]) -> list[MemberEffect]:
        return [SendToPeer(peer.address, message) for message in messages]

    # Messages.

    def receive(self, message: m.Message, now_ns: int, sender: bytes | None = None) -> list[MemberEffect]:
        """Handle a message of a peer.

        Args:
            message: from the peer that `message.worker` names.
            now_ns: the time.
            sender: the routing id of a peer that dialled this worker; None: the sender was proved otherwise.

        Raises:
            RemoteProtocolError: no peer sends such a message, or the sender is not the peer that it names.
        """
        if not isinstance(message, (m.Offer, m.OfferAck, m.GossipEnded, m.ModelRequest, m.Ping)):
            raise RemoteProtocolError(f"a peer takes no {type(message).__name__}")
        if message.peer != self.worker or message.worker in self.lost:
            return []  # for an earlier process at this address, or from a lost peer
        peer = self.peers.get(message.worker)
        if peer is None:
            self._keep(message, sender)
            return []
        if sender is not None and not sender.startswith(peer.name):
            raise RemoteProtocolError(f"it is not from worker {message.worker}, whose number it has")
        peer.heard_ns = now_ns
        if isinstance(message, m.Offer):
            return self._offered(peer, message)
        if isinstance(message, m.OfferAck):
            peer.sent = {number: offers for number, offers in peer.sent.items() if number > message.number}
            return self._settled()
        if isinstance(message, m.GossipEnded):
            return [e.PeerEnded(message.worker)]
        if isinstance(message, m.ModelRequest):
            # The acknowledgement shows that this worker is live: its owner may compute for long before it answers.
            return [*self._ack(peer, message.worker), e.ModelRequested(message.worker)]
        return self._ack(peer, message.worker)

    def _keep(self, message: m.Message, sender: bytes | None) -> None:
        """Keep a message of a worker that the next roster may name."""
        self.early.append((message, sender))
        size = sum(len(each.payload) for each, _ in self.early if isinstance(each, m.Offer))
        while len(self.early) > EARLY_MAX or size > EARLY_BYTES_MAX:
            gone, _ = self.early.popleft()
            size -= len(gone.payload) if isinstance(gone, m.Offer) else 0

    def _ack(self, peer: GossipPeer, worker: int) -> list[MemberEffect]:
        return self._tell(peer, [m.OfferAck(self.worker, worker, peer.expected - 1)])

    def _offered(self, peer: GossipPeer, offer: m.Offer) -> list[MemberEffect]:
        whole = offer.number == WHOLE
        if whole and not peer.adopting:
            return []
        if not whole and offer.number != peer.expected:
            return self._ack(peer, offer.worker) if offer.number < peer.expected else []
        sound = 0 <= offer.part < offer.parts <= m.PARTS_MAX and 0 <= offer.round <= m.CLOCK_MAX
        if not sound or not 0.0 < offer.weight <= 0.5:
            what = f"part {offer.part} of {offer.parts} for round {offer.round}, weight {offer.weight:g}"
            return [e.PeerLost(offer.worker, f"it offers {what}"), *self.lose(offer.worker)]
        if any(_kind(part) != _kind(offer) for part in peer.parts.values()):
            peer.parts.clear()
        peer.parts[offer.part] = offer
        peer.adopt_ns = peer.heard_ns
        if len(peer.parts) < offer.parts:
            return []
        parts = tuple(peer.parts[part] for part in range(offer.parts))
        peer.parts = {}
        if whole:
            peer.adopting = False
            return [e.OfferArrived(offer.worker, parts)]
        peer.expected += 1
        return [*self._ack(peer, offer.worker), e.OfferArrived(offer.worker, parts)]

    # Time.

    def repeat_soon(self, address: str = "") -> None:
        """Repeat all that is not acknowledged at the next tick: the connection is a new one.

        Args:
            address: of the peer; "": of all peers.
        """
        for peer in self.peers.values():
            if address in ("", peer.address):
                peer.sent_ns = peer.adopt_ns = peer.asked_ns = LONG_AGO_NS

    def tick(self, now_ns: int) -> list[MemberEffect]:
        """Repeat what is not acknowledged, send Ping to quiet peers, and give up peers that are silent for a lease."""
        effects: list[MemberEffect] = []
        for worker, peer in list(self.peers.items()):
            awaited = bool(peer.sent) or peer.awaited >= peer.expected or peer.adopting or self.ended
            if awaited and now_ns - peer.heard_ns > self.lease_ns + transfer_ns(peer.sent_bytes):
                effects += [e.PeerLost(worker, "it has been silent for a lease"), *self.lose(worker)]
                continue
            if peer.sent and OFFER_RETRY.due(peer.sent_ns, now_ns, peer.sent_bytes):
                peer.sent_ns = now_ns
                for offers in peer.sent.values():
                    effects += self._tell(peer, offers)
            quiet = now_ns - max(peer.heard_ns, peer.asked_ns)
            if awaited and quiet >= self.lease_ns // BEATS:
                peer.asked_ns = now_ns
                effects += self._tell(peer, [m.Ping(self.worker, worker)])
            # One part of a model may take that long. Other messages of the peer do not count as an answer.
            if peer.adopting and OFFER_RETRY.due(peer.adopt_ns, now_ns, FRAME_BYTES):
                peer.adopt_ns = now_ns
                effects += self._tell(peer, [m.ModelRequest(self.worker, worker)])
        if self.ended and now_ns - self.ended_ns >= ENDED_NS:
            self.ended_ns = now_ns
            effects += self._say_ended()
        return [*effects, *self._settled()]
