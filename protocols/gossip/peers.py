"""One worker's links to its peers (gossip): offers that are repeated until they are acked, peers that fall silent. No I/O.

Rules
- The exchanges of a pair are numbered. The next begins when this one is mixed here, which may be before the peer has our side
  of it: so at most two own offers are under way, and one that arrives.
- An offer is acked when all its parts are here, whatever its receiver does with it, and is delivered exactly once.
- Who dials as a peer has a routing id that begins as the roster says of the pair (or has the peer's key). Nobody else speaks
  for a peer.
- The coordinator introduces peers (`Roster`) and drops them. It may be gone: who is awaited and silent for a lease is lost,
  and stays lost. So is who says what no peer says.
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

EARLY_MAX = 64  # messages kept of workers that no roster has named yet
EARLY_BYTES_MAX = 1 << 20  # of these; an offer that finds no room is sent again
WHOLE = -1  # the number of an offer that answers Adopt


@dataclass(slots=True)
class GossipPeer:
    """One peer. `expected`: number of its next offer."""

    address: str
    heard_ns: int
    name: bytes = b""  # how its routing ids begin; b"": the roster does not say
    expected: int = 0
    parts: dict[int, m.Offer] = field(default_factory=dict)
    sent: dict[int, list[m.Offer]] = field(default_factory=dict)  # by number: those that are not acked yet
    sent_ns: int = 0
    awaited: int = -1  # number of the offer that must come
    adopting: bool = False
    adopt_ns: int = 0  # when its model was asked for, or a part of that last came
    asked_ns: int = 0

    @property
    def sent_bytes(self) -> int:
        return sum(len(offer.payload) for offers in self.sent.values() for offer in offers)


def _kind(offer: m.Offer) -> tuple[int, ...]:
    """Return the fields that all parts of one offer share."""
    return offer.number, offer.parts, offer.epoch, offer.round


class GossipPeers:
    """Messages of peers and rosters in, effects out. `worker`: this one's id, by which its peers name it. `shard`: of its
    cluster, where clusters gossip: it talks to the same one of others."""

    def __init__(self, worker: int, lease_ns: int, shard: int = 0) -> None:
        self.worker, self.lease_ns, self.shard = worker, lease_ns, shard
        self.epoch = 0  # of the newest roster
        self.peers: dict[int, GossipPeer] = {}
        self.lost: set[int] = set()
        self.early: deque[tuple[m.Message, bytes | None]] = deque()  # with the routing ids of their senders
        self.ended = False  # this worker is done, and waits for the others
        self.ended_ns = 0
        self.closing = False  # to be told once all have what was sent

    def roster(self, roster: m.Roster, now_ns: int) -> list[MemberEffect]:
        """Take over a newer roster. Raises RemoteProtocolError for one that is none."""
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
        effects: list[MemberEffect] = [e.RosterNews(roster)]
        for message, sender in early:
            with suppress(RemoteProtocolError):  # somebody has spoken for a peer that was to come
                effects += self.receive(message, now_ns, sender)
        return effects

    # Commands of the `GossipDriver`.

    def carry_out(self, say: PeerSay, now_ns: int) -> list[MemberEffect]:
        match say:
            case e.SendOffer(offers):
                return self.offer(offers, now_ns)
            case e.AskModel(peer):
                return self.adopt(peer, now_ns)
            case e.SayEnded():
                return self.end(now_ns)
            case e.SayOver():
                return self.over()
            case e.Drop(peer):
                return self.lose(peer)

    def offer(self, offers: Sequence[m.Offer], now_ns: int) -> list[MemberEffect]:
        """Send own side of an exchange, all its parts, and await the peer's. A peer that is gone is sent nothing."""
        peer = self.peers.get(offers[0].peer)
        if peer is None or offers[0].worker != self.worker:
            return []  # the latter: made before a rejoin that its maker has not seen yet
        if offers[0].number == WHOLE:
            return self._tell(peer, offers)
        if not peer.sent and peer.awaited < peer.expected:
            peer.heard_ns = max(peer.heard_ns, now_ns)  # from here on it must show that it lives
        peer.sent[offers[0].number] = list(offers)
        peer.sent_ns, peer.awaited = now_ns, offers[0].number
        return self._tell(peer, offers)

    def adopt(self, worker: int, now_ns: int) -> list[MemberEffect]:
        """Ask a peer for its whole model, and no other one any more."""
        peer = self.peers.get(worker)
        if peer is None:
            return []
        for other in self.peers.values():
            other.adopting = False
        peer.adopting, peer.heard_ns, peer.adopt_ns = True, now_ns, now_ns
        return self._tell(peer, [m.ModelRequest(self.worker, worker)])

    def end(self, now_ns: int) -> list[MemberEffect]:
        """This worker is done: say so until all are, or `over`."""
        self.ended, self.ended_ns = True, now_ns
        for peer in self.peers.values():
            peer.heard_ns = now_ns
        return self._say_ended()

    def lose(self, worker: int) -> list[MemberEffect]:
        """No longer listen to this peer."""
        self.peers.pop(worker, None)
        self.lost.add(worker)
        return self._settled()

    def over(self) -> list[MemberEffect]:
        """All are done: nobody is awaited any more, and only what is not acked yet is sent again."""
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
        """Return the effects of a peer's message.

        Args:
            message: what came.
            now_ns: the time.
            sender: the routing id of who dialled us; None: who it is was proved otherwise.

        Raises:
            RemoteProtocolError: no peer sends that, or it is not from the peer whose number it has.
        """
        if not isinstance(message, (m.Offer, m.OfferAck, m.GossipEnded, m.ModelRequest, m.Ping)):
            raise RemoteProtocolError(f"a peer takes no {type(message).__name__}")
        if message.peer != self.worker or message.worker in self.lost:
            return []  # for who was here before, or from one that is given up
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
            return [*self._ack(peer, message.worker), e.AdoptAsked(message.worker)]  # its owner may be busy for long
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
        """The connection to this peer is another one, or to all: the next tick says again what is not acked."""
        for peer in self.peers.values():
            if address in ("", peer.address):
                peer.sent_ns = peer.adopt_ns = peer.asked_ns = LONG_AGO_NS

    def tick(self, now_ns: int) -> list[MemberEffect]:
        """Send again what is not acked, look after those who are awaited, and give up who is silent."""
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
            # One part of its model may take so long. The peer may say other things meanwhile, and often.
            if peer.adopting and OFFER_RETRY.due(peer.adopt_ns, now_ns, FRAME_BYTES):
                peer.adopt_ns = now_ns
                effects += self._tell(peer, [m.ModelRequest(self.worker, worker)])
        if self.ended and now_ns - self.ended_ns >= ENDED_NS:
            self.ended_ns = now_ns
            effects += self._say_ended()
        return [*effects, *self._settled()]
