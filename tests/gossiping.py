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
from narrows.protocols.gossip import ARRIVED_MAX, LAST, Gossip
from narrows.protocols.mixing import Mixing
from narrows.protocols.peers import Peers
from narrows.protocols.simulator import Random
from narrows.protocols.topology import RANDOM, TOPOLOGIES
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
        self.gossip.alone = not net.serves
        self.peers = Peers(worker, LEASE_NS)
        self.number, self.phase = 0, "new"
        self.settled = False
        self.alive, self.going = True, False
        self.reached: Array = np.empty(0, np.float32)  # the model before the last round, which makes one of all
        self.bytes = 0
        self.lost: list[int] = []
        self.elder = -1  # whose model it has asked for
        self.without: set[int] = set()  # peers that have none either
        self.asking_ns = -1  # since when there is none that it could ask

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
                if self.phase == "asking":
                    self.mixing.take(effect.parts)
                    self.net.total += self.mixing.model
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
            elif isinstance(effect, e.AdoptAsked) and self.phase in ("new", "asking"):
                self.without.add(effect.peer)
            elif isinstance(effect, e.AdoptAsked):
                self.take(self.peers.offer(self.gossip.whole(effect.peer, self.number), self.net.now_ns))
        self.go_on()

    def exchange(self, upto: int) -> None:
        for offers in self.gossip.exchange(upto):
            self.take(self.peers.offer(offers, self.net.now_ns))

    def computed(self) -> None:
        if self.alive:
            update = self.net.update(self.worker, self.number)
            self.net.total += update
            self.mixing.model = self.mixing.model + update
            self.phase = "before"
            self.go_on()

    def go_on(self) -> None:
        """As far as the rules let it."""
        if not self.going:  # what it sends on the way must not set it going again
            self.going = True
            self._go_on()
            self.going = False

    def _go_on(self) -> None:
        able = self.gossip.pairs.keys() - self.without
        if self.phase == "asking" and self.gossip.started and self.elder not in able:
            self.asking_ns = self.net.now_ns if self.asking_ns < 0 else self.asking_ns
            self.elder = min(able, default=-1)
            if able:
                self.asking_ns = -1
                self.take(self.peers.adopt(self.elder, self.net.now_ns))
            elif self.net.now_ns - self.asking_ns > 3 * LEASE_NS:
                self.alive = False  # there is no model any more that it could begin with
                self.net.at(self.net.now_ns + LEASE_NS, self.net.introduce)
        if self.phase == "ready" and self.gossip.started:
            self.phase = "computing" if self.number < self.rounds else "flushing"
            if self.phase == "computing":
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

    serves = False  # a server introduces the nodes, and closes the run

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
        self.closed = False  # all have done their last step
        self.total: npt.NDArray[np.float64] = np.zeros(COUNT)  # of all models, as it must be

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
            roster = m.Roster(worker, self.epoch, True, rows, tuple(f"{w}" for w in live), self.closed)
            self.at(self.now_ns + self.delay(), lambda n=self.nodes[worker], r=roster: self.tell(n, r))  # type: ignore[misc]

    def tell(self, node: Node, roster: m.Roster) -> None:
        if node.alive and not (self.serves and node.gossip.alone):
            node.take(node.peers.roster(roster, self.now_ns))

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
                self.look()
            else:
                self.now_ns = ticked = ticked + NS // 20
                for node in self.nodes.values():
                    if node.alive and node.phase != "new":
                        node.take(node.peers.tick(self.now_ns))

    def look(self) -> None:
        """After each event."""

    def models(self) -> Array:
        return np.stack([node.mixing.model for node in self.nodes.values() if node.alive])


class Served(Net):
    """With a server, which may die: it introduces who comes and goes, and closes the run when all have done their last step."""

    serves = True

    def __init__(self, *arguments: Any, **kinds: Any) -> None:
        super().__init__(*arguments, **kinds)
        self.dead = False
        self.gone: set[int] = set()  # that the server knows to have left
        self.torn = False  # a worker was given up in the midst of exchanges: the mean may move
        self.apart = False  # it happened at the end, or without a server: their last models may differ

    def introduce(self) -> None:
        if not self.dead:
            super().introduce()

    @property
    def going(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive and not node.settled]

    def look(self) -> None:
        left = {worker for worker, node in self.nodes.items() if node.settled} - self.gone
        ended = bool(self.going) and all(node.phase in ("ending", "over") for node in self.going)
        if left or (ended and not self.closed and not self.dead):
            self.gone |= left
            self.closed |= ended
            self.introduce()

    def join(self, rounds: int, bound: int, step_ns: int) -> None:
        if not self.closed and not self.dead and self.going:
            self.add(rounds, bound, step_ns, joins=True).phase = "asking"
            self.introduce()

    def die(self, node: Node) -> None:
        """The server finds out within a lease; the others, where there is none, by its silence."""
        if node in self.going and len(self.going) > 1:
            node.alive, self.torn = False, True
            self.apart |= self.dead or any(other.phase in ("ending", "over") for other in self.nodes.values())
            self.at(self.now_ns + self.random.between(0, LEASE_NS), self.introduce)

    def expire(self, node: Node) -> None:
        """It is taken for dead, and joins again under another number."""
        if node in self.going and not self.closed and not self.dead and node.phase not in ("new", "asking"):
            node.alive, self.torn = False, True
            again = self.add(node.rounds, node.bound, node.step_ns, joins=True)
            again.number, again.phase = node.number, "ready"
            again.mixing.start(node.mixing.model)
            self.introduce()

    def kill_server(self) -> None:
        """Each node finds out at a moment of its own."""
        self.dead = True
        for node in self.going:
            self.at(self.now_ns + self.random.between(0, 5 * NS), lambda n=node: self.find_out(n))  # type: ignore[misc]

    def find_out(self, node: Node) -> None:
        if node.peers.epoch:
            node.gossip.alone = True
            node.take([])
        else:
            node.alive = False  # nobody has introduced it: it ends with an error


def campaign(seed: int) -> Served:
    """One run in which anything may happen; looked at, to its end."""
    random = Random(seed ^ 0x60551B)

    def one(of: list[Any]) -> Any:
        return of[random.between(0, len(of) - 1)]

    spec = one(["dense", "dense", "int8", "topk:0.05+int8"])
    faults = Faults(one([0, 0, 5, 20]), one([0, 7]), one([0, NS // 50, NS // 2]))
    values = np.random.default_rng(seed)
    drift = values.standard_normal((64, COUNT)).astype(np.float32)
    net = Served(
        one([*TOPOLOGIES, RANDOM]), spec, faults, seed, lambda worker, number: drift[(worker * 7 + number) % 64]
    )
    count, rounds, bound = random.between(1, 6), random.between(1, 30), one([0, 1, 1, 2, 3])

    def pace() -> int:
        return int(one([NS // 100, NS // 100, NS // 10, 3 * NS, 12 * NS if rounds < 8 else NS]))

    for _ in range(count):
        net.add(random.between(1, rounds) if random.chance(0.2) else rounds, bound, pace())
    net.introduce()
    weights = values.standard_normal(COUNT).astype(np.float32)
    for node in list(net.nodes.values()):
        node.begin(weights)
        net.total += weights
    span = int(one([NS, 10 * NS, 60 * NS]))
    calm = random.chance(0.3)
    for _ in range(random.between(0, 2 if calm else 6)):
        what = one(["join", "introduce"] if calm else ["join", "join", "die", "expire", "introduce"])
        when = random.between(0, span)
        if what == "join":
            slow = pace()
            net.at(when, lambda slow=slow: net.join(rounds, bound, slow))  # type: ignore[misc]
        elif what == "introduce":
            net.at(when, net.introduce)
        else:
            does = net.die if what == "die" else net.expire
            net.at(when, lambda does=does: does(one(list(net.nodes.values()))))  # type: ignore[misc]
    if random.chance(0.25):
        net.at(random.between(0, span), net.kill_server)
    net.run(limit_s=1500)
    here = [node for node in net.nodes.values() if node.alive]
    lost = any(node.lost for node in net.nodes.values())
    assert all(np.isfinite(node.mixing.model).all() for node in here)
    if not net.dead and not net.torn and not faults.lost:
        assert not lost, "nobody is given up who lives"
    if not (lost or net.apart or net.dead):
        assert all(np.array_equal(node.mixing.model, here[0].mixing.model) for node in here), "all end with one model"
        if not net.torn:
            mean = net.total / len(here)
            np.testing.assert_allclose(here[0].mixing.model, mean, atol=2e-5 * (1 + np.abs(mean).max()))
    for node in here:
        assert all(len(pair.arrived) <= ARRIVED_MAX for pair in node.gossip.pairs.values())
        assert not any(peer.sent for peer in node.peers.peers.values())
    return net
