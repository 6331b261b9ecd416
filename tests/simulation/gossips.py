"""Workers of a gossip run in virtual time: the real machines, on the network of protocols/simulator.py, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import narrows.compression
from narrows.compression import Memory, parse
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, MemberEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.gossip.exchanges import ARRIVED_MAX, LAST, Gossip
from narrows.protocols.gossip.mixing import Mixing
from narrows.protocols.gossip.peers import Peers
from narrows.protocols.gossip.topology import RANDOM, TOPOLOGIES, partners
from narrows.protocols.wire import decode, encode
from simulation.mirrors import Violation
from simulation.network import MS, Faults, Random, Simulator, Wire

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
Trace = Callable[[int, str, m.Message | None], None]

LEASE_NS = 10 * NS
TICK_NS = NS // 20
COUNT = 200
WHOLE_EVERY = 1000  # events between two full counts
ROUNDING = 2.0**-23  # of a float32, relative: a mix rounds twice
FAST = 1 << 62  # bytes per second: no message keeps such a wire busy
SOUND = Faults(delay_ns=(MS, MS))


def bad(loss: float, duplication: float, late_ns: int) -> Faults:
    """Messages come up to `late_ns` later than others, before those or after them."""
    return Faults(loss, duplication, 0.3 if late_ns else 0.0, (MS, MS + late_ns), late_ns)


class Books:
    """What holds of all mixes, looked at with each of them, whatever workers do and whoever dies.

    - Both sides of a round name each other, with one weight.
    - The exchanges of a pair are mixed once by each side, in order, and move the two by opposite values. So the sum of all
      models, but for what only one side has mixed yet, is the sum of what came in: first models and updates.
    - `sum` and `applied` are kept from event to event; `whole` compares them with what the machines hold.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        self.total: Wide = np.zeros(COUNT)  # of what came in
        self.sum: Wide = np.zeros(COUNT)  # of all models before the last round, also of the dead
        self.half: Wide = np.zeros(COUNT)  # of it, what one side alone has mixed
        self.slack = 0.0  # what roundings may have added up to
        self.open: dict[tuple[int, int, int], tuple[Wide, float]] = {}  # by pair and number: what one side has moved by
        self.applied: Counter[tuple[int, int]] = Counter()
        self.begun: set[tuple[int, int, int]] = set()  # epoch, round, worker
        self.asked: dict[tuple[int, int, int], dict[int, float]] = {}  # of whom, by who has begun already

    def came(self, values: Any, before: Array | np.float32, after: Array) -> None:
        """A first model, or an update."""
        self.total += values
        self._moved(before, after)

    def _moved(self, before: Array | np.float32, after: Array) -> tuple[Wide, float]:
        """By how much, and how far from that a rounding may be."""
        moved: Wide = after.astype(np.float64) - before
        rounding = ROUNDING * float(np.abs(after).max())
        self.sum += moved
        self.slack += rounding
        return moved, rounding

    def mixed(self, worker: int, peer: int, number: int, before: Array, after: Array) -> None:
        self.ordered(worker, peer, number)
        moved, rounding = self._moved(before, after)
        key = (min(worker, peer), max(worker, peer), number)
        if key in self.open:
            theirs, other = self.open.pop(key)
            self.half -= theirs
            apart = float(np.abs(moved + theirs).max())
            assert apart <= rounding + other, f"exchange {number} of {key[:2]} moves the sum of its two by {apart}"
        else:
            self.open[key] = moved, rounding
            self.half += moved
        off = float(np.abs(self.sum - self.half - self.total).max())
        assert off <= self.slack, (
            f"the mean has moved by {off / len(self.net.nodes)} with exchange {number} of {key[:2]}"
        )

    def ordered(self, worker: int, peer: int, number: int) -> None:
        due = self.applied[worker, peer]
        assert number == due, f"worker {worker} mixes exchange {number} with {peer}, not {due}"
        self.applied[worker, peer] += 1

    def begins(self, node: Node, number: int) -> None:
        """A round."""
        epoch, worker = node.gossip.epoch, node.worker
        mine = dict(partners(self.net.topology, number, node.gossip.members, worker))
        for peer, weight in self.asked.pop((epoch, number, worker), {}).items():
            assert mine.get(peer) == weight, f"worker {peer} mixes with {worker} in round {number} at {weight}: {mine}"
        for peer, weight in mine.items():
            if (epoch, number, peer) not in self.begun:
                self.asked.setdefault((epoch, number, peer), {})[worker] = weight
        self.begun.add((epoch, number, worker))

    def whole(self) -> None:
        models = [node.mixing.last if node.mixing.averaged else node.mixing.model for node in self.net.nodes.values()]
        found = np.sum(models, axis=0, dtype=np.float64)
        assert np.abs(found - self.sum).max() <= 1e-3 * self.slack, "a model moves beside mixes and updates"
        for (worker, peer), count in self.applied.items():
            pair = self.net.nodes[worker].gossip.pairs.get(peer)
            assert pair is None or pair.number == count, f"worker {worker} counts {pair} with {peer}, mixed are {count}"


class Watched(Mixing):
    """Tells the books of each mix."""

    averaged = False

    def __init__(self, books: Books, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.books = books
        self.last = self.model  # before the last round

    def mix(self, worker: int, peer: int, weight: float, offers: tuple[m.Offer, ...]) -> None:
        before = self.model.copy()
        super().mix(worker, peer, weight, offers)
        self.books.mixed(worker, peer, offers[0].number, before, self.model)

    def average(self, worker: int, last: dict[int, tuple[m.Offer, ...]]) -> None:
        for peer, offers in last.items():
            self.books.ordered(worker, peer, offers[0].number)
        self.last, self.averaged = self.model.copy(), True
        super().average(worker, last)


class Node:
    """One worker: what worker/gossip.py does, as a machine. `net.update(worker, round)`: what its steps add."""

    def __init__(self, net: Net, worker: int, rounds: int, bound: int, step_ns: int, wire: Wire) -> None:
        self.net, self.worker, self.rounds, self.bound, self.step_ns = net, worker, rounds, bound, step_ns
        self.name, self.wire = f"{worker}", wire  # all that it sends passes this wire
        spec = net.spec
        compressor = None if spec == "dense" else parse(spec).contraction()
        self.mixing = Watched(net.books, 0, COUNT, compressor, narrows.compression, lambda: Memory(seed=worker))
        self.gossip = Gossip(net.topology, worker, self.mixing)
        self.gossip.alone = not net.serves
        self.peers = Peers(worker, LEASE_NS)
        self.number, self.phase = 0, "new"
        self.settled = self.going = False
        self.reached: Array = np.empty(0, np.float32)  # the model before the last round, which makes one of all
        self.reached_ns = 0
        self.lost: list[int] = []
        self.elder = -1  # whose model it has asked for
        self.without: set[int] = set()  # peers that have none either
        self.asking_ns = -1  # since when there is none that it could ask
        net.sim.start(self, self.name)

    @property
    def alive(self) -> bool:
        return self.net.sim.alive(self.name)

    def die(self) -> None:
        self.net.open.discard(self.worker)
        self.net.sim.crash(self.name)

    def begin(self, weights: Array, model: Array | None = None) -> None:
        """With the first weights; it waits for the first roster. `model`: its own, where it has come on since."""
        self.mixing.start(weights)
        self._come(weights if model is None else model)

    def _come(self, model: Array) -> None:
        self.mixing.model = model.copy()
        self.net.books.came(model, np.float32(0), self.mixing.model)
        self.phase = "ready"

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self.take(self.peers.receive(message, now_ns))

    def tick(self, now_ns: int) -> None:
        if self.phase != "new":
            self.take(self.peers.tick(now_ns))

    def take(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, e.Tell):
                self.net.send(self, effect)
            elif isinstance(effect, e.RosterNews):
                self.gossip.admit(effect.roster)
            elif isinstance(effect, e.OfferArrived) and effect.parts[0].number < 0:
                if self.phase == "asking":
                    self.mixing.take(effect.parts)
                    self.number = effect.parts[0].round
                    self._come(self.mixing.model)
            elif isinstance(effect, e.OfferArrived):
                self.gossip.arrived(effect)
            elif isinstance(effect, e.PeerEnded):
                self.gossip.peer_ended(effect.peer)
            elif isinstance(effect, e.PeerLost):
                self.lost.append(effect.peer)
                self.gossip.lose(effect.peer)
            elif isinstance(effect, e.PeersSettled):
                self.settled = True
                self.net.open.discard(self.worker)
            elif isinstance(effect, e.AdoptAsked) and self.phase in ("new", "asking"):
                self.has_none(effect.peer)
            elif isinstance(effect, e.AdoptAsked):
                self.take(self.peers.offer(self.gossip.whole(effect.peer, self.number), self.net.now_ns))
        self.go_on()

    def has_none(self, peer: int) -> None:
        """It asks for a model, and so is not asked."""
        self.without.add(peer)

    def exchange(self, upto: int) -> None:
        for offers in self.gossip.exchange(upto):
            self.take(self.peers.offer(offers, self.net.now_ns))

    def compute(self) -> None:
        """One more step, or it was the last."""
        self.phase = "computing" if self.number < self.rounds else "flushing"
        if self.phase == "computing":
            self.net.at(self.net.now_ns + self.step_ns, self.computed)

    def computed(self) -> None:
        if self.alive:
            before, update = self.mixing.model, self.net.update(self.worker, self.number)
            self.mixing.model = before + update
            self.net.books.came(update, before, self.mixing.model)
            self.phase = "before"
            self.go_on()

    def go_on(self) -> None:
        """As far as the rules let it."""
        if not self.going:  # what it sends on the way must not set it going again
            self.going = True
            self._go_on()
            self.going = False

    def _ask(self) -> None:
        """For a model, of one after the other."""
        able = self.gossip.pairs.keys() - self.without
        if not self.gossip.started or self.elder in able:
            return
        self.asking_ns = self.net.now_ns if self.asking_ns < 0 else self.asking_ns
        self.elder = min(able, default=-1)
        if able:
            self.asking_ns = -1
            self.take(self.peers.adopt(self.elder, self.net.now_ns))
        elif self.net.now_ns - self.asking_ns > 3 * LEASE_NS:
            self.die()  # there is no model any more that it could begin with
            self.net.at(self.net.now_ns + LEASE_NS, self.net.introduce)

    def _go_on(self) -> None:
        if self.phase == "asking":
            self._ask()
        if self.phase == "ready" and self.gossip.started:
            self.compute()
        due = self.number - self.bound
        waits = self.gossip.waits
        if self.phase == "before":
            if self.bound and waits:
                self.exchange(due)
                if self.gossip.waiting(due):
                    return
            if waits:
                self.net.books.begins(self, self.number)
            self.gossip.begin(self.number)
            self.phase = "after"
        if self.phase == "after":
            self.exchange(due)
            if waits and self.gossip.waiting(due):
                return
            self.number += 1
            self.compute()
        if self.phase == "flushing":
            self.exchange(self.number)
            if self.gossip.waiting(self.number):
                return
            self.reached, self.reached_ns = self.mixing.model.copy(), self.net.now_ns
            self.phase = "ending"
            if not self.net.ends:
                self.net.open.discard(self.worker)
                return
            self.gossip.end()
            self.take(self.peers.end(self.net.now_ns))
        if self.phase == "ending" and self.net.ends:
            self.exchange(LAST)
            if self.gossip.over and self.phase == "ending":
                self.phase = "over"
                self.take(self.peers.over())


class Net:
    """Nodes on one network. All follows from the seed. Who ticks when does too: each is out of step with the others."""

    serves = False  # a server introduces the nodes, and closes the run
    ends = True  # with the last round, of all pairs

    def __init__(
        self,
        topology: str,
        spec: str = "dense",
        faults: Faults = SOUND,
        seed: int = 0,
        update: Callable[[int, int], Any] = lambda worker, number: np.float32(0),
        tick_ns: int = TICK_NS,
        trace: Trace | None = None,
    ) -> None:
        self.topology, self.spec, self.faults, self.update = topology, spec, faults, update
        self.sim: Simulator[m.Message] = Simulator(seed, faults, tick_ns, trace)
        self.at, self.random = self.sim.at, self.sim.random
        self.books = Books(self)
        self.nodes: dict[int, Node] = {}
        self.open: set[int] = set()  # neither dead nor settled
        self.epoch = self.events = 0
        self.late: set[int] = set()  # joined when the run had begun
        self.closed = False  # all have done their last step

    @property
    def now_ns(self) -> int:
        return self.sim.now_ns

    def add(
        self, rounds: int, bound: int = 1, step_ns: int = NS // 100, joins: bool = False, wire: Wire | None = None
    ) -> Node:
        worker = len(self.nodes)
        node = self.nodes[worker] = Node(self, worker, rounds, bound, step_ns, wire or Wire(0, FAST))
        self.open.add(worker)
        if joins:
            self.late.add(worker)
        return node

    def introduce(self) -> None:
        """A new roster of all that are alive and not over; each hears of it at a moment of its own."""
        self.epoch += 1
        live = sorted(self.open)
        rows, names = tuple((w, 1, w, int(w in self.late)) for w in live), tuple(f"{w}" for w in live)
        for worker in live:
            roster = m.Roster(worker, self.epoch, True, rows, names, self.closed)
            self.at(self.now_ns + self.random.between(*self.faults.delay_ns), self.tell, self.nodes[worker], roster)

    def tell(self, node: Node, roster: m.Roster) -> None:
        if node.alive and not (self.serves and node.gossip.alone):
            node.take(node.peers.roster(roster, self.now_ns))

    def send(self, sender: Node, effect: e.Tell) -> None:
        frames = [bytes(frame) for frame in encode(effect.message)]
        self.sim.lay(sender.name, effect.address, sender.wire)
        self.sim.send(sender.name, effect.address, decode(frames), sum(map(len, frames)))

    def run(self, limit_s: float = 3600.0) -> None:
        """Until all that live are over, or the limit: then this fails."""
        while self.open:
            assert self.now_ns < limit_s * NS, f"the run has not ended: {self.whereabouts()}"
            self.sim.step()
            self.events += 1
            self.look()
            if self.events % WHOLE_EVERY == 0:
                self.books.whole()
        self.books.whole()

    def look(self) -> None:
        """After each event."""

    def whereabouts(self) -> dict[int, tuple[str, int]]:
        """Where the first of those are that are not over."""
        return {worker: (self.nodes[worker].phase, self.nodes[worker].number) for worker in sorted(self.open)[:10]}

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
        return [self.nodes[worker] for worker in sorted(self.open)]

    def look(self) -> None:
        left = {worker for worker, node in self.nodes.items() if node.settled} - self.gone
        ended = bool(self.open) and all(node.phase in ("ending", "over") for node in self.going)
        if left or (ended and not self.closed and not self.dead):
            self.gone |= left
            self.closed |= ended
            self.introduce()

    def join(self, rounds: int, bound: int, step_ns: int) -> None:
        if not self.closed and not self.dead and self.open:
            self.add(rounds, bound, step_ns, joins=True).phase = "asking"
            self.introduce()

    def die(self, node: Node) -> None:
        """The server finds out within a lease; the others, where there is none, by its silence."""
        if node in self.going and len(self.going) > 1:
            node.die()
            self.torn = True
            self.sim.struck["worker crashed"] += 1
            self.apart |= self.dead or any(other.phase in ("ending", "over") for other in self.nodes.values())
            self.at(self.now_ns + self.random.between(0, LEASE_NS), self.introduce)

    def expire(self, node: Node) -> None:
        """It is taken for dead, and joins again under another number."""
        if node in self.going and not self.closed and not self.dead and node.phase not in ("new", "asking"):
            node.die()
            self.torn = True
            self.sim.struck["worker expired"] += 1
            again = self.add(node.rounds, node.bound, node.step_ns, joins=True)
            again.begin(node.mixing.model)
            again.number = node.number
            self.introduce()

    def kill_server(self) -> None:
        """Each node finds out at a moment of its own."""
        self.dead = True
        self.sim.struck["server crashed"] += 1
        for node in self.going:
            self.at(self.now_ns + self.random.between(0, 5 * NS), self.find_out, node)

    def find_out(self, node: Node) -> None:
        if node.alive and node.peers.epoch:
            node.gossip.alone = True
            node.take([])
        elif node.alive:
            node.die()  # nobody has introduced it: it ends with an error


class Campaign(Served):
    """One run in which anything may happen, by its seed."""

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        random = Random(seed ^ 0x60551B)

        def one(of: list[Any]) -> Any:
            return of[random.between(0, len(of) - 1)]

        spec = one(["dense", "dense", "int8", "topk:0.05+int8"])
        faults = bad(one([0, 0, 1 / 5, 1 / 20]), one([0, 1 / 7]), one([0, NS // 50, NS // 2]))
        values = np.random.default_rng(seed)
        drift = values.standard_normal((64, COUNT)).astype(np.float32)
        super().__init__(
            one([*TOPOLOGIES, RANDOM]),
            spec,
            faults,
            seed,
            lambda worker, number: drift[(worker * 7 + number) % 64],
            trace=trace,
        )
        count, rounds, bound = random.between(1, 6), random.between(1, 30), one([0, 1, 1, 2, 3])
        self.case = (
            f"seed {seed}: {count} workers, {rounds} rounds, staleness {bound}, {self.topology}, {spec}, {faults}"
        )

        def pace() -> int:
            return int(one([NS // 100, NS // 100, NS // 10, 3 * NS, 12 * NS if rounds < 8 else NS]))

        for _ in range(count):
            self.add(random.between(1, rounds) if random.chance(0.2) else rounds, bound, pace())
        self.introduce()
        weights = values.standard_normal(COUNT).astype(np.float32)
        for node in self.nodes.values():
            node.begin(weights)
        span = int(one([NS, 10 * NS, 60 * NS]))
        calm = random.chance(0.3)
        for _ in range(random.between(0, 2 if calm else 6)):
            what = one(["join", "introduce"] if calm else ["join", "join", "die", "expire", "introduce"])
            when = random.between(0, span)
            if what == "join":
                self.at(when, self.join, rounds, bound, pace())
            elif what == "introduce":
                self.at(when, self.introduce)
            else:
                does = self.die if what == "die" else self.expire
                self.at(when, lambda does=does: does(one([*self.nodes.values()])))
        if random.chance(0.25):
            self.at(random.between(0, span), self.kill_server)

    def run(self, limit_s: float = 1500.0) -> None:
        """To its end. Raises Violation with the seed in it."""
        try:
            super().run(limit_s)
            self._ended()
        except (AssertionError, NarrowsError, KeyError) as error:
            raise Violation(f"{self.case}, at {self.now_ns / NS:.4f} s: {type(error).__name__}: {error}") from error

    def _ended(self) -> None:
        here = [node for node in self.nodes.values() if node.alive]
        lost = any(node.lost for node in self.nodes.values())
        assert all(np.isfinite(node.mixing.model).all() for node in here)
        if not self.dead and not self.torn and not self.faults.loss:
            assert not lost, "nobody is given up who lives"
        if not (lost or self.apart or self.dead):
            assert all(np.array_equal(node.mixing.model, here[0].mixing.model) for node in here), (
                "all end with one model"
            )
            if not self.torn:
                mean = self.books.total / len(here)
                np.testing.assert_allclose(here[0].mixing.model, mean, atol=2e-5 * (1 + np.abs(mean).max()))
        for node in here:
            assert all(len(pair.arrived) <= ARRIVED_MAX for pair in node.gossip.pairs.values())
            assert not any(peer.sent for peer in node.peers.peers.values())
