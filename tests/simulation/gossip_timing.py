"""A gossip run on narrow links in virtual time, and what its rounds cost in closed form: bytes of each worker, and seconds.

    Rounds(case).run()      raises AssertionError where an invariant does not hold (gossip_runs.py, `Books`)

Each worker has one way out, a `Road`: all its messages pass it, one after the other, and take its delay. The model is COUNT
values; rates are as much lower. All know each other from the start, and nobody else is there; the run ends with its rounds,
before the last exchange, which is of all pairs.

bytes_of: in each round both sides of a pair (protocols/config/topology.py, `edges`) send one offer and one ack, whatever else
happens. `encode` says how long these are; of the payload only its size is needed, which `dense` and `int8` fix.

finish_s: a worker offers to its partners when its step is done. With staleness s it goes on when all offers of round t - s are
there, and with s >= 1 it offers those of round t after that:

    a worker's way is free   f = max(f, offers made) + bytes / rate, of one offer after the other
    an offer is there        f + delay
    s = 0                    next step from max(own step done, offers of t there)
    s >= 1                   next step from max(own step done, offers of t - s there)

On like links, with k partners and u = k bytes / rate + delay, a round takes step + u for s = 0. For s = 1 it is max(step, v):
v is u and the ack of what came last, which passes before the next offer. In general an ack may hold up an offer or not: with
acks before every offer and without any, `finish_s` says what a run takes at most and at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from narrows.compression import parse
from narrows.compression.codecs import CODED, RAW
from narrows.protocols import messages as m
from narrows.protocols.config.topology import edges
from narrows.protocols.effects import NS
from narrows.protocols.wire import encode
from simulation.gossip_runs import COUNT, Array, Net, Wide
from simulation.simulator import MS, Random, Wire
from simulation.trees import STILL, Road

TICK_NS = NS  # none of the repeats that a tick looks after is needed here
EPOCH = 1  # of the only roster
OF_ONE_SIZE = ("dense", "int8")  # whose payloads are all of one size


@dataclass(frozen=True, slots=True)
class Case:
    """All of one run."""

    seed: int
    topology: str
    spec: str
    bound: int  # staleness
    rounds: int
    step_ns: tuple[int, ...]  # of each worker
    roads: tuple[Road, ...]  # of each worker, to all others

    @property
    def workers(self) -> range:
        return range(len(self.step_ns))


def drawn(seed: int, topology: str, spec: str, bound: int, rounds: int, workers: int) -> Case:
    """Roads of 5 to 80 ms and 10 to 50 kB/s, and steps of 50 to 200 ms, by the seed."""
    random = Random(seed)
    roads = tuple(Road(random.between(5 * MS, 80 * MS), random.between(10_000, 50_000)) for _ in range(workers))
    steps = tuple(random.between(50 * MS, 200 * MS) for _ in range(workers))
    return Case(seed, topology, spec, bound, rounds, steps, roads)


def distance(models: Array) -> float:
    """L2, of all to their mean."""
    wide = models.astype(np.float64)
    return float(np.linalg.norm(wide - wide.mean(0)))


class Rounds(Net):
    """One case, to the last of its rounds. `books` and the machines are looked at as in any other run."""

    ends = False

    def __init__(self, case: Case) -> None:
        super().__init__(case.topology, case.spec, STILL, case.seed, tick_ns=TICK_NS)
        self.case = case
        values = np.random.default_rng(case.seed)
        first = values.standard_normal(COUNT).astype(np.float32)
        for step_ns, road in zip(case.step_ns, case.roads, strict=True):
            node = self.add(case.rounds, case.bound, step_ns, wire=Wire(road.delay_ns, road.bytes_per_second))
            node.begin(first, values.standard_normal(COUNT).astype(np.float32))
        self.first = distance(self.models())
        self.introduce()

    @property
    def distance(self) -> float:
        """The distance of all models to their mean, as a share of what it was at first."""
        return distance(self.models()) / self.first

    @property
    def passed(self) -> list[int]:
        """Bytes that have left each worker."""
        return [node.wire.passed for node in self.nodes.values()]

    @property
    def round_s(self) -> float:
        return max(node.reached_ns for node in self.nodes.values()) / NS / self.case.rounds


@dataclass(frozen=True, slots=True)
class Sent:
    """One side of an exchange: of the sender's round, by whom, to whom, and how many bytes."""

    round: int
    worker: int
    peer: int
    offer_bytes: int
    ack_bytes: int


def exchanges(case: Case) -> Iterator[Sent]:
    """All there are, round by round; those of a worker in the order in which it makes them."""
    met: Counter[tuple[int, int]] = Counter()
    lossless = case.spec == "dense"
    payload = bytes(4 * COUNT if lossless else len(parse(case.spec).contraction().encode(np.ones(COUNT, np.float32))))
    codec = RAW if lossless else CODED
    for number in range(case.rounds):
        for a, b, weight in edges(case.topology, number, case.workers):
            at = met[a, b]
            met[a, b] += 1
            for worker, peer in ((a, b), (b, a)):
                offer = m.Offer(worker, peer, EPOCH, number, at, 0, 1, 0, COUNT, weight, lossless, codec, payload)
                yield Sent(number, worker, peer, size_of(offer), size_of(m.OfferAck(worker, peer, at)))


def size_of(message: m.Message) -> int:
    return sum(map(len, encode(message)))


def bytes_of(case: Case) -> list[int]:
    """That each worker sends."""
    sent = [0] * len(case.workers)
    for each in exchanges(case):
        sent[each.worker] += each.offer_bytes + each.ack_bytes
    return sent


def finish_s(case: Case, acks: bool) -> float:
    """When the last worker has mixed its last round. `acks`: those of a round pass before its offers."""
    rate = np.array([road.bytes_per_second for road in case.roads], np.float64)
    delay = np.array([road.delay_ns for road in case.roads]) / NS
    steps = np.array(case.step_ns) / NS
    rounds: list[list[Sent]] = [[] for _ in range(case.rounds)]
    for each in exchanges(case):
        rounds[each.round].append(each)
    begun: Wide = np.zeros(len(steps))
    free = begun.copy()
    there: list[Wide] = [begun] * case.bound  # of each round: when its offers are
    for sides in rounds:
        offered: Wide = np.maximum(begun + steps, there[-case.bound]) if case.bound else begun + steps
        free = np.maximum(free, offered)
        for each in sides if acks else ():
            free[each.worker] += each.ack_bytes / rate[each.worker]
        arrived: Wide = np.zeros(len(steps))
        for each in sides:
            free[each.worker] += each.offer_bytes / rate[each.worker]
            arrived[each.peer] = max(arrived[each.peer], free[each.worker] + delay[each.worker])
        there.append(arrived)
        begun = offered if case.bound else np.maximum(offered, arrived)
    return float(max(begun.max(), *(arrived.max() for arrived in there)))


@dataclass(frozen=True, slots=True)
class Form:
    """Seconds per round, at least and at most."""

    low: float
    high: float


def round_s(case: Case) -> Form:
    low, high = (finish_s(case, acks) / case.rounds for acks in (False, True))
    return Form(low, high)


def explained(form: Form, seconds: float) -> bool:
    """But for the whole nanoseconds in which the network counts."""
    return form.low - 1e-6 <= seconds <= form.high + 1e-6
