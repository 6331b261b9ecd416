"""A network that is not there: virtual time, and machines whose messages are delayed, lost, repeated and reordered.

Rules
- All follows from the seed: one generator, one heap of events, ties in the order in which they were made.
- It knows no message and no machine, only that a machine handles and ticks. A machine speaks through `send`.
- A link is a pair of addresses. It keeps the order of what is sent unless a fault strikes. Messages under way to a
  machine that has crashed reach the next one at that address, or nobody.
- Links may share a wire, which has a rate: bytes pass one message after the other, then take the delay. The delay of a
  fault comes on top; a message that it loses has passed the wire.
- `struck` counts what the faults really did to a machine that is there, not what was drawn.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from narrows.protocols.effects import NS
from narrows.ps.planner.timeline import Timeline
from narrows.ps.planner.timeline import Wire as Wire

MS = NS // 1000
AT_ONCE = 512  # values of a generator
_MASK = (1 << 64) - 1
with np.errstate(over="ignore"):
    _STEPS = np.arange(1, AT_ONCE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

Message = TypeVar("Message")
Heard = TypeVar("Heard", contravariant=True)


class Random:
    """SplitMix64 (Steele, Lea, Flood 2014): sixty-four bits of state, and the same stream everywhere."""

    __slots__ = ("next",)

    def __init__(self, seed: int) -> None:
        self.next: Callable[[], int] = _values(seed & _MASK).__next__  # of 2**64 values

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + (self.next() * (high - low + 1) >> 64)

    def chance(self, probability: float) -> bool:
        return self.next() < probability * (_MASK + 1)


def _values(state: int) -> Iterator[int]:
    """Many are made at once: each event of a run draws several."""
    while True:
        with np.errstate(over="ignore"):
            z = np.uint64(state) + _STEPS
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        yield from (z ^ (z >> np.uint64(31))).tolist()  # outside: who closes this may be in another context
        state = (state + AT_ONCE * 0x9E3779B97F4A7C15) & _MASK


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that a link draws for each message: probabilities, and delays in ns."""

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0  # of being held back, so that later ones overtake it
    delay_ns: tuple[int, int] = (MS, 20 * MS)
    late_ns: int = NS  # the longest that a message is held back, or its copy comes after it


class Machine(Protocol[Heard]):
    """The machine at an address. Both calls may `send`, `start` and `crash`. If it has `unreached`, that is told of
    an address where its message found nobody; `disconnected`, of one where the machine connected to it is gone."""

    def handle(self, source: str, message: Heard, now_ns: int) -> None: ...

    def tick(self, now_ns: int) -> None: ...


@dataclass(slots=True)
class _Link:
    sent: int = 0
    newest: int = -1  # the greatest number that has arrived
    free_ns: int = 0  # what is sent next does not arrive before this
    cut_ns: int = 0  # until then it loses everything
    wire: Wire | None = None


class Simulator(Timeline, Generic[Message]):
    """Runs machines on one heap of events. `trace`, where given, is told of each: when, what, and the message in it."""

    def __init__(
        self,
        seed: int,
        faults: Faults,
        tick_ns: int,
        trace: Callable[[int, str, Message | None], None] | None = None,
    ) -> None:
        super().__init__()
        self.random = Random(seed)
        self.faults, self.tick_ns, self.trace = faults, tick_ns, trace
        # A random number of 64 bits is a fault where it is below these.
        self._lost, self._held_back, self._copied = (
            p * (_MASK + 1) for p in (faults.loss, faults.reordering, faults.duplication)
        )
        self.struck: Counter[str] = Counter()
        self.digest = 0  # of all events so far: two runs are the same where it is
        self._machines: dict[str, Machine[Message]] = {}
        self._ticks: dict[str, int] = {}  # by address: which of its ticks count, those of the newest start
        self._stopped: dict[str, int] = {}  # by address: until when
        self._links: dict[tuple[str, str], _Link] = {}

    # Machines.

    def start(self, machine: Machine[Message], *addresses: str) -> None:
        """Put a machine at its addresses; it ticks from now on, out of step with the others."""
        for address in addresses:
            self._machines[address] = machine
        self.note(f"start {' '.join(addresses)}")
        self._ticks[addresses[0]] = self._made
        self.at(self.now_ns + self.random.between(1, self.tick_ns), self._tick, addresses[0], self._made)

    def crash(self, *addresses: str) -> None:
        """Take away the machine at these addresses."""
        for address in addresses:
            del self._machines[address]
        self.note(f"crash {' '.join(addresses)}")
        for source, target in [*self._links]:
            if target in addresses and source in self._machines and self.now_ns >= self._link(target, source).cut_ns:
                self.at(self.now_ns + self.faults.delay_ns[1], self.disconnect, source, target)

    def stop(self, until_ns: int, *addresses: str) -> None:
        """The machine there does nothing until then. Messages wait for it meanwhile."""
        for address in addresses:
            self._stopped[address] = until_ns
        self.note(f"stop {' '.join(addresses)}")

    def alive(self, address: str) -> bool:
        return address in self._machines

    # Messages.

    def lay(self, source: str, target: str, wire: Wire) -> None:
        """All that is sent from `source` to `target` goes over this wire from now on."""
        self._link(source, target).wire = wire

    def send(self, source: str, target: str, message: Message, size: int = 0) -> None:
        """`size`: bytes, for a link that is laid over a wire."""
        random, faults, now_ns = self.random, self.faults, self.now_ns
        link = self._links.get((source, target)) or self._link(source, target)
        number, link.sent = link.sent, link.sent + 1
        there_ns = now_ns if link.wire is None else link.wire.arrival_ns(now_ns, size)
        if now_ns < link.cut_ns or random.next() < self._lost:
            self.struck["cut off" if now_ns < link.cut_ns else "lost"] += target in self._machines
            return
        arrival = link.free_ns = max(there_ns + random.between(*faults.delay_ns), link.free_ns)
        if random.next() < self._held_back:
            arrival += random.between(0, faults.late_ns)
        self.at(arrival, self._deliver, link, number, False, source, target, message)
        if random.next() < self._copied:
            arrival += random.between(0, faults.late_ns)
            self.at(arrival, self._deliver, link, number, True, source, target, message)

    def disconnect(self, one: str, other: str) -> None:
        """The connection that `one` had with `other` has ended, and it is told."""
        machine = self._machines.get(one)
        if (told := getattr(machine, "disconnected", None)) is None:
            return
        if (until_ns := self._stopped.get(one, 0)) > self.now_ns:
            self.at(until_ns, self.disconnect, one, other)
            return
        self.note(f"{one} disconnected from {other}")
        told(other, self.now_ns)

    def cut(self, one: str, other: str, until_ns: int) -> None:
        """Lose all that is sent between two addresses until then."""
        self.cut_way(one, other, until_ns)
        self.cut_way(other, one, until_ns)

    def cut_way(self, source: str, target: str, until_ns: int) -> None:
        """Lose what is sent from `source` to `target` until then; what is said back arrives."""
        self._link(source, target).cut_ns = until_ns

    def _link(self, source: str, target: str) -> _Link:
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = _Link()
        return link

    # Time.

    def note(self, text: str, message: Message | None = None) -> None:
        """A line of the trace, and part of the digest."""
        self.digest = zlib.crc32(b"%d %s" % (self.now_ns, text.encode()), self.digest)
        if self.trace is not None:
            self.trace(self.now_ns, text, message)

    def _deliver(self, link: _Link, number: int, copy: bool, source: str, target: str, message: Message) -> None:
        machine = self._machines.get(target)
        if machine is None:
            self.struck["to nobody"] += 1
            if unreached := getattr(self._machines.get(source), "unreached", None):
                unreached(target, self.now_ns)  # as a connection that was closed shows it
            return
        if self._stopped and (until_ns := self._stopped.get(target, 0)) > self.now_ns:
            self.at(until_ns, self._deliver, link, number, copy, source, target, message)
            return
        if copy:
            self.struck["duplicated"] += 1
        elif number < link.newest:
            self.struck["reordered"] += 1
        link.newest = max(link.newest, number)
        self.note(f"{source} > {target} {type(message).__name__}", message)
        machine.handle(source, message, self.now_ns)

    def _tick(self, address: str, which: int) -> None:
        machine = self._machines.get(address)
        if machine is None or self._ticks[address] != which:
            return
        if (until_ns := self._stopped.get(address, 0)) > self.now_ns:
            self.at(until_ns, self._tick, address, which)
            return
        machine.tick(self.now_ns)
        self.at(self.now_ns + self.tick_ns, self._tick, address, which)
