"""Workers of a gossip run in virtual time: the real machines, on the network of simulator.py, no torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression import Memory, parse
from narrows.compression.home import HOST
from narrows.compression.sampling import gossip_sample
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.topology import RANDOM, TOPOLOGIES, partners
from narrows.protocols.effects import NS, Log, MemberEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.gossip.driver import GossipDriver, GossipPhase, Says
from narrows.protocols.gossip.exchanges import ARRIVED_MAX
from narrows.protocols.gossip.gain import GossipGain
from narrows.protocols.gossip.mixing import Mixing
from narrows.protocols.gossip.outer_momentum import OuterMomentum
from narrows.protocols.gossip.peers import GossipPeers
from narrows.protocols.wire import decode, encode
from simulation.mirror import Violation
from simulation.simulator import MS, Faults, Random, Simulator, Wire

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
    """Rules of all mixes, checked with each of them, whatever workers do and whoever dies.

    - Both sides of a round name each other, with one weight.
    - The exchanges of a pair are mixed once by each side, in order, and move the two by opposite values. So the sum of all
      models, but for what only one side has mixed yet, is the sum of what came in: first models and updates.
    - Who computes waits for no round up to its bound.
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
        epoch, worker = node.exchanges.epoch, node.worker
        mine = dict(partners(self.net.topology, number, node.exchanges.members, worker))
        for peer, weight in self.asked.pop((epoch, number, worker), {}).items():
            assert mine.get(peer) == weight, f"worker {peer} mixes with {worker} in round {number} at {weight}: {mine}"
        for peer, weight in mine.items():
            if (epoch, number, peer) not in self.begun:
                self.asked.setdefault((epoch, number, peer), {})[worker] = weight
        self.begun.add((epoch, number, worker))

    def computes(self, node: Node) -> None:
        """The steps of the next round."""
        due = node.number - 1 - node.bound
        waits = node.exchanges.waits and node.exchanges.waiting(due)
        assert not waits, f"worker {node.worker} computes round {node.number} and has not mixed round {due}"

    def whole(self) -> None:
        models = [node.mixing.last if node.mixing.averaged else node.mixing.model for node in self.net.nodes.values()]
        found = np.sum(models, axis=0, dtype=np.float64)
        assert np.abs(found - self.sum).max() <= 1e-3 * self.slack, "a model moves beside mixes and updates"
        for (worker, peer), count in self.applied.items():
            pair = self.net.nodes[worker].exchanges.pairs.get(peer)
            assert pair is None or pair.number == count, f"worker {worker} counts {pair} with {peer}, mixed are {count}"


class Watched(Mixing):
    """Tells the books of each mix."""

    averaged = False

    def __init__(self, books: Books, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.books = books
        self.last = self.model  # before the last round

    def take(self, offers: tuple[m.Offer, ...]) -> None:
        super().take(offers)
        self.books.came(self.model, np.float32(0), self.model)

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
    """One worker: a driver and its peers on one thread. `net.update(worker, round)`: what its steps add."""

    def __init__(self, net: Net, worker: int, rounds: int, bound: int, step_ns: int, wire: Wire) -> None:
        self.net, self.worker, self.rounds, self.bound, self.step_ns = net, worker, rounds, bound, step_ns
        self.name, self.wire = f"{worker}", wire  # all that it sends passes this wire
        spec = net.spec
        compressor = None if spec == "dense" else parse(spec).contraction()
        gain = None if net.degree is None else GossipGain(gossip_sample(COUNT), net.degree)
        self.mixing = Watched(
            net.books,
            0,
            COUNT,
            compressor,
            HOST,
            lambda: Memory(seed=worker),
            gain,
            net.outer and OuterMomentum(*net.outer),
        )
        self.velocity: Array = np.zeros(COUNT, np.float32)  # of the outer step, as it should be
        self.driver = net.driver(net.topology, worker, bound, LEASE_NS, self.mixing)
        self.exchanges = self.driver.exchanges
        self.exchanges.alone = not net.serves
        self.exchanges.begin, self._begin = self._begins, self.exchanges.begin  # type: ignore[method-assign]
        self.peers = GossipPeers(worker, LEASE_NS)
        self.computing = self.finishing = False
        self.reached: Array = np.empty(0, np.float32)  # the model before the last round, which makes one of all
        self.reached_ns = 0
        self.lost: list[int] = []
        self.asks = False
        net.sim.start(self, self.name)

    def _begins(self, number: int) -> None:
        if self.exchanges.waits:
            self.net.books.begins(self, number)
        self._begin(number)

    @property
    def phase(self) -> GossipPhase:
        return self.driver.phase

    @property
    def number(self) -> int:
        return self.driver.round

    @property
    def settled(self) -> bool:
        return self.driver.delivered

    @property
    def alive(self) -> bool:
        return self.net.sim.alive(self.name)

    def die(self) -> None:
        self.net.open.discard(self.worker)
        self.net.sim.crash(self.name)

    def begin(self, weights: Array, model: Array | None = None) -> None:
        """With the first weights; it waits for the first roster. `model`: its own, where it has come on since."""
        self.driver.begin_as_founder(weights.copy(), None if model is None else model.copy())
        self.came(np.float32(0), self.mixing.model, self.mixing.model)

    def resume(self, before: Node) -> None:
        """With the model and the round that it had under another number."""
        self.driver.round = before.number
        self.driver.keep(before.mixing.model.copy())
        self.mixing.outer, self.velocity = before.mixing.outer, before.velocity
        self.came(np.float32(0), self.mixing.model, self.mixing.model)

    def came(self, before: Array | np.float32, values: Array, after: Array) -> None:
        self.net.books.came(values, before, after)

    def ask(self) -> None:
        """Begin with the model of a peer: the run has begun."""
        self.asks = True
        self.carry_out(self.driver.late(self.net.now_ns))

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self.take(self.peers.receive(message, now_ns))

    def tick(self, now_ns: int) -> None:
        if self.asks or self.driver.has_model:
            self.take(self.peers.tick(now_ns))
            self.carry_out(self.driver.go_on(now_ns))

    def take(self, effects: Sequence[MemberEffect]) -> None:
        """Tell the driver what peers say, and carry out what it answers."""
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, e.SendToPeer):
                self.net.send(self, effect)
                continue
            if isinstance(effect, e.PeerLost):
                self.lost.append(effect.peer)
            queue.extend(self.carried_out(self.driver.hear(effect, self.net.now_ns)))
        self.go_on()

    def carried_out(self, says: Says) -> list[MemberEffect]:
        said = [say for say in says if not isinstance(say, Log | (e.AnnounceEnd if not self.net.ends else Log))]
        return [effect for say in said for effect in self.peers.carry_out(say, self.net.now_ns)]

    def carry_out(self, says: Says) -> None:
        self.take(self.carried_out(says))

    def go_on(self) -> None:
        """Compute, or end after the last step."""
        if self.phase in (GossipPhase.ENDING, GossipPhase.OVER) and not self.reached.size:
            before = self.mixing.last if self.mixing.averaged else self.mixing.model
            self.reached, self.reached_ns = before.copy(), self.net.now_ns
        if self.settled or (self.reached.size and not self.net.ends):
            self.net.open.discard(self.worker)
        if self.driver.trouble and self.alive:
            self.die()  # there is no model that it could begin with
            self.net.at(self.net.now_ns + LEASE_NS, self.net.introduce)
        if not self.driver.may_step or self.computing or self.finishing:
            return
        if self.number < self.rounds:
            self.computing = True
            self.net.books.computes(self)
            self.net.at(self.net.now_ns + self.step_ns, self.computed)
            return
        self.finishing = True
        self.carry_out(self.driver.finish(np.zeros(COUNT, np.float32), self.net.now_ns))

    def computed(self) -> None:
        self.computing = False
        if self.alive:
            before, update = self.mixing.model, self.net.update(self.worker, self.number)
            scaled = update
            if (gain := self.mixing.gain) is not None:
                gain.members = len(self.exchanges.pairs) + 1  # as it will find them
                scaled = update * np.float32(gain.factor)
            if self.net.outer is not None:
                rate, momentum = map(np.float32, self.net.outer)
                self.velocity = momentum * self.velocity + scaled
                scaled = rate * (scaled + momentum * self.velocity)
            self.came(before, scaled, before + scaled)
            self.carry_out(self.driver.step(np.zeros(COUNT, np.float32) + update, self.net.now_ns))


ENDING = (GossipPhase.ENDING, GossipPhase.OVER)


class Net:
    """Nodes on one network. All follows from the seed. Who ticks when does too: each is out of step with the others."""

    serves = False  # a server introduces the nodes, and closes the run
    ends = True  # with the last round, of all pairs
    driver: type[GossipDriver] = GossipDriver

    def __init__(
        self,
        topology: str,
        spec: str = "dense",
        faults: Faults = SOUND,
        seed: int = 0,
        update: Callable[[int, int], Any] = lambda worker, number: np.float32(0),
        tick_ns: int = TICK_NS,
        trace: Trace | None = None,
        degree: float | None = None,  # of an optimizer; None: updates are added as they are
        outer: tuple[float, float] | None = None,  # rate and momentum; None: no outer step
    ) -> None:
        self.topology, self.spec, self.faults, self.update = topology, spec, faults, update
        self.degree, self.outer = degree, outer
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
        if node.alive and not (self.serves and node.exchanges.alone):
            node.take(node.peers.roster(roster, self.now_ns))

    def send(self, sender: Node, effect: e.SendToPeer) -> None:
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
        return {
            worker: (self.nodes[worker].phase.value, self.nodes[worker].number) for worker in sorted(self.open)[:10]
        }

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
        ended = bool(self.open) and all(node.phase in ENDING for node in self.going)
        if left or (ended and not self.closed and not self.dead):
            self.gone |= left
            self.closed |= ended
            self.introduce()

    def join(self, rounds: int, bound: int, step_ns: int) -> None:
        if not self.closed and not self.dead and self.open:
            self.add(rounds, bound, step_ns, joins=True).ask()
            self.introduce()

    def die(self, node: Node) -> None:
        """The server finds out within a lease; the others, where there is none, by its silence."""
        if node in self.going and len(self.going) > 1:
            node.die()
            self.torn = True
            self.sim.struck["worker crashed"] += 1
            self.apart |= self.dead or any(other.phase in ENDING for other in self.nodes.values())
            self.at(self.now_ns + self.random.between(0, LEASE_NS), self.introduce)

    def expire(self, node: Node) -> None:
        """It is taken for dead, and joins again under another number."""
        if node in self.going and not self.closed and not self.dead and node.driver.has_model:
            node.die()
            self.torn = True
            self.sim.struck["worker expired"] += 1
            again = self.add(node.rounds, node.bound, node.step_ns, joins=True)
            again.resume(node)
            self.introduce()

    def kill_server(self) -> None:
        """Each node finds out at a moment of its own."""
        self.dead = True
        self.sim.struck["server crashed"] += 1
        for node in self.going:
            self.at(self.now_ns + self.random.between(0, 5 * NS), self.find_out, node)

    def find_out(self, node: Node) -> None:
        if node.alive and node.peers.epoch:
            node.take([e.ServerGone()])
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
            degree=None if seed % 3 == 0 else 0.0,
            outer=(0.7, 0.6) if seed % 4 == 0 else None,
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
        """Run to its end. Raises Violation with the seed in it."""
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
            assert all(len(pair.arrived) <= ARRIVED_MAX for pair in node.exchanges.pairs.values())
            assert not any(peer.sent for peer in node.peers.peers.values())
