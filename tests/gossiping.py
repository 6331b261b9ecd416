"""Workers of a gossip run in virtual time: the real machines, a network that loses, repeats and reorders, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

import narrows.compression
from narrows.compression import Memory, parse
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, MemberEffect
from narrows.protocols.gossip import LAST, Gossip
from narrows.protocols.mixing import Mixing
from narrows.protocols.peers import Peers
from narrows.protocols.simulator import Random
from narrows.protocols.wire import decode, encode

Array = npt.NDArray[np.float32]
LEASE_NS = 10 * NS
COUNT = 200


@dataclass
class Faults:
    """One in so many messages is lost, or comes twice; 0: none. `late_ns`: up to so much later than the others."""

    lost: int = 0
    twice: int = 0
    late_ns: int = 0


class Node:
    """One worker: what worker/gossip.py does, as a machine. `update(round)`: what its steps add."""

    def __init__(self, net: Net, worker: int, rounds: int, bound: int, step_ns: int) -> None:
        self.net, self.worker, self.rounds, self.bound, self.step_ns = net, worker, rounds, bound, step_ns
        spec = net.spec
        compressor = None if spec == "dense" else parse(spec).contraction()
        self.mixing = Mixing(0, COUNT, compressor, narrows.compression, lambda: Memory(seed=worker))
        self.gossip = Gossip(net.topology, worker, self.mixing)
        self.peers = Peers(worker, LEASE_NS)
        self.number, self.phase = 0, "new"
        self.settled = False
        self.alive, self.going = True, False
        self.reached: Array = np.empty(0, np.float32)  # the model before the last round, which makes one of all
        self.bytes = 0
        self.lost: list[int] = []

    def begin(self, weights: Array) -> None:
        """With the first weights; it waits for the first roster."""
        self.mixing.start(weights)
        self.phase = "ready"

    def take(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, e.Tell):
                self.net.send(self, effect)
            elif isinstance(effect, e.RosterNews):
                self.gossip.admit(effect.roster)
            elif isinstance(effect, e.OfferArrived) and effect.parts[0].number < 0:
                self.mixing.take(effect.parts)
                self.number, self.phase = effect.parts[0].round, "ready"
            elif isinstance(effect, e.OfferArrived):
                self.gossip.arrived(effect)
            elif isinstance(effect, e.PeerEnded):
                self.gossip.peer_ended(effect.peer)
            elif isinstance(effect, e.PeerLost):
                self.lost.append(effect.peer)
                self.gossip.lose(effect.peer)
            elif isinstance(effect, e.PeersSettled):
                self.settled = True
            elif isinstance(effect, e.AdoptAsked):
                self.take(self.peers.offer(self.gossip.whole(effect.peer, self.number), self.net.now_ns))
        self.go_on()

    def exchange(self, upto: int) -> None:
        for offers in self.gossip.exchange(upto):
            self.take(self.peers.offer(offers, self.net.now_ns))

    def computed(self) -> None:
        if self.alive:
            self.mixing.model = self.mixing.model + self.net.update(self.worker, self.number)
            self.phase = "before"
            self.go_on()

    def go_on(self) -> None:
        """As far as the rules let it."""
        if not self.going:  # what it sends on the way must not set it going again
            self.going = True
            self._go_on()
            self.going = False

    def _go_on(self) -> None:
        if self.phase == "ready" and self.gossip.started:
            self.phase = "computing"
            self.net.at(self.net.now_ns + self.step_ns, self.computed)
        due = self.number - self.bound
        waits = self.gossip.waits
        if self.phase == "before":
            if self.bound and waits:
                self.exchange(due)
                if self.gossip.waiting(due):
                    return
            self.gossip.begin(self.number)
            self.phase = "after"
        if self.phase == "after":
            self.exchange(due)
            if waits and self.gossip.waiting(due):
                return
            self.number += 1
            self.phase = "computing"
            if self.number < self.rounds:
                self.net.at(self.net.now_ns + self.step_ns, self.computed)
            else:
                self.phase = "flushing"
        if self.phase == "flushing":
            self.exchange(self.number)
            if self.gossip.waiting(self.number):
                return
            self.reached = self.mixing.model.copy()
            self.gossip.end()
            self.phase = "ending"
            self.take(self.peers.end(self.net.now_ns))
        if self.phase == "ending":
            self.exchange(LAST)
            if self.gossip.over and self.phase == "ending":
                self.phase = "over"
                self.take(self.peers.over())


class Net:
    """Nodes and the messages between them. All follows from the seed."""

    def __init__(
        self,
        topology: str,
        spec: str = "dense",
        faults: Faults | None = None,
        seed: int = 0,
        update: Callable[[int, int], Any] = lambda worker, number: np.float32(0),
    ) -> None:
        self.topology, self.spec, self.faults = topology, spec, faults or Faults()
        self.random = Random(seed)
        self.update = update
        self.nodes: dict[int, Node] = {}
        self.now_ns, self.count, self.epoch = 0, 0, 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.late: set[int] = set()  # joined when the run had begun

    def add(self, rounds: int, bound: int = 1, step_ns: int = NS // 100, joins: bool = False) -> Node:
        worker = len(self.nodes)
        node = self.nodes[worker] = Node(self, worker, rounds, bound, step_ns)
        if joins:
            self.late.add(worker)
        return node

    def at(self, when_ns: int, what: Callable[[], None]) -> None:
        self.count += 1
        heappush(self.events, (when_ns, self.count, what))

    def introduce(self) -> None:
        """A new roster of all that are alive and not over; each hears of it at a moment of its own."""
        self.epoch += 1
        live = [w for w, node in self.nodes.items() if node.alive and not node.settled]
        rows = tuple((w, 1, w, int(w in self.late)) for w in live)
        for worker in live:
            roster = m.Roster(worker, self.epoch, True, rows, tuple(f"{w}" for w in live))
            node = self.nodes[worker]
            self.at(self.now_ns + self.delay(), lambda n=node, r=roster: n.take(n.peers.roster(r, self.now_ns)))  # type: ignore[misc]

    def delay(self) -> int:
        return NS // 1000 + (self.random.between(0, self.faults.late_ns) if self.faults.late_ns else 0)

    def send(self, sender: Node, effect: e.Tell) -> None:
        frames = [bytes(frame) for frame in encode(effect.message)]
        sender.bytes += sum(map(len, frames))
        peer = self.nodes[int(effect.address)]
        if self.faults.lost and self.random.between(1, self.faults.lost) == 1:
            return
        copies = 2 if self.faults.twice and self.random.between(1, self.faults.twice) == 1 else 1
        for _ in range(copies):
            self.at(self.now_ns + self.delay(), lambda: self.deliver(peer, frames))

    def deliver(self, peer: Node, frames: list[bytes]) -> None:
        if peer.alive:
            peer.take(peer.peers.receive(decode(frames), self.now_ns))

    def run(self, limit_s: float = 3600.0) -> None:
        """Until all that live are over, or the limit: then this fails."""
        ticked = 0
        while not all(node.settled or not node.alive for node in self.nodes.values()):
            assert self.now_ns < limit_s * NS, {w: (n.phase, n.number) for w, n in self.nodes.items()}
            if self.events and self.events[0][0] <= ticked + NS // 20:
                self.now_ns, _, what = heappop(self.events)
                what()
            else:
                self.now_ns = ticked = ticked + NS // 20
                for node in self.nodes.values():
                    if node.alive and node.phase != "new":
                        node.take(node.peers.tick(self.now_ns))

    def models(self) -> Array:
        return np.stack([node.mixing.model for node in self.nodes.values() if node.alive])
