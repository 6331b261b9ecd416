"""The director of ps-probe: it decides which two machines measure with each other, and when. No I/O.

The name machine means here a computer that takes part, with a name in network.json.

How it works

    machine A             director              machine B
       | -- ProbeJoin -->     |  <-- ProbeJoin --   |
       | -- ProbeStepTime ->  |  <- ProbeStepTime - |     all have joined and timed their steps: the first round
       | <-- ProbeListen --   |                     |     A opens a port
       | -- ProbeListening -> |                     |
       |                      |  --- ProbeDial -->  |     B dials the port with the token
       | <========== streams over plain TCP ======> |     pairwise.py
       | -- ProbeReport -->   |  <-- ProbeReport -- |     both have reported: `_measured`

1. A machine joins, then times its steps. The first round begins once all machines have done both.
2. A round is a set of disjoint pairs. The two halves of the machines pass each other (shift-one), then each half does
   so within itself.
3. Each pair is visited twice. The first visit measures the round trip and a rough rate, which bound the bytes of the
   second visit (`ByteBudget`).
4. Pairs of one round may share a path out of a place. Then one of them is measured once more, alone (shared_paths.py).
5. When no round is left, the director sends ProbeEnd to all machines, and `links` has the result.

Rules
- A try is one attempt at a visit. Its token is unique. If the dialler cannot dial the port, the two machines change
  roles once.
- Every try has an end. A machine that is silent for SILENT_NS is dead: its pairs are named as failed, all others are
  measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

from narrows.protocols.effects import NS
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages import Message
from narrows.protocols.wire import unpack
from narrows.ps.probe.byte_budget import ByteBudget
from narrows.ps.probe.flows import FIRST_ROUND_S, Flow, begun, checked, whole
from narrows.ps.probe.measured_network import MeasuredLink, of_pair
from narrows.ps.probe.messages import (
    MESSAGE_BYTES_MAX,
    ProbeBeat,
    ProbeDial,
    ProbeEnd,
    ProbeJoin,
    ProbeListen,
    ProbeListening,
    ProbeReport,
    ProbeStepTime,
)
from narrows.ps.probe.probe_schedule import PairTry, PairVisit, ProbeFindings, again, rounds
from narrows.ps.probe.shared_paths import Pair, SharedPath, rounds_alone, shared, shares

MACHINES_MAX = 256
BEAT_NS = NS  # from one heartbeat of a machine to the next
SILENT_NS = 15 * NS  # a machine without a message for so long is dead; the queue of a measured link delays heartbeats
LATE_NS = 6 * NS  # time for the reports of a pair beyond its round
# A machine must have timed its steps within this, all that a script does before its first step included.
STEPS_S = 600.0
STEPS_NS = int(STEPS_S * NS) + 120 * NS  # and reported them within this: a script that does not end is killed first


@dataclass(frozen=True, slots=True)
class SendToMachine:
    """Effect: send a message to a machine."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class PrintLine:
    """Effect: print a line for the user."""

    text: str


Effects = list[SendToMachine | PrintLine]


@dataclass(slots=True)
class ProbedMachine:
    """A machine that has joined."""

    peer: bytes  # its routing id
    join: ProbeJoin
    came_ns: int  # when it joined
    heard_ns: int  # when its newest message came
    step_s: float | None = None  # None: it still times its steps; 0: not known


class ProbeDirector:
    """The machine that directs a probe.

    Args:
        count: the number of machines.
        seconds: the longest time of a round.
        bytes_max: bytes of payload that all pairs together may send.
        secret: makes tokens that outsiders cannot guess.
        known: pairs of names that need not be measured.
    """

    def __init__(
        self, count: int, seconds: float, bytes_max: int, secret: str, known: frozenset[frozenset[str]]
    ) -> None:
        self.count, self.seconds, self.secret, self.known = count, seconds, secret, known
        self.bounds = ByteBudget(seconds, bytes_max)
        self.visits: dict[frozenset[int], PairVisit] = {}  # by pair, its first visit, once that is over
        self.first = True  # the present rounds are first visits
        self.machines: list[ProbedMachine] = []  # a machine's number is its index
        self.rounds: list[list[Pair]] = []
        self.pairs = 0  # pairs to measure; a pair that is measured once more counts twice
        self.number = 0  # rounds that have begun
        self.tries: dict[str, PairTry] = {}  # by token, those under way
        self.gone: set[int] = set()  # dead machines
        self.found: list[ProbeFindings] = []  # results, one for each second visit
        self.failed: list[str] = []  # a sentence for each pair or machine that failed
        self.began_ns: int | None = None  # when the first round began
        self.shared: list[SharedPath] | None = None  # None until all second visits are over
        self.finished = False  # nothing is left to measure

    def name(self, machine: int) -> str:
        return self.machines[machine].join.name

    def missing(self) -> str:
        """Return a sentence with the machines that have joined, and how many were awaited."""
        names = ", ".join(machine.join.name for machine in self.machines) or "none"
        return f"{len(self.machines)} of {self.count} machines have come ({names})"

    def hear(self, peer: bytes, message: Message, now_ns: int) -> Effects:
        """Handle a message.

        Args:
            peer: the sender's routing id.
            message: the message.
            now_ns: the time.

        Raises:
            RemoteProtocolError: this sender may not send this message now.
        """
        if isinstance(message, ProbeJoin):
            return self._joined(peer, message, now_ns)
        number = next((i for i, machine in enumerate(self.machines) if machine.peer == peer), -1)
        if number < 0:
            return [SendToMachine(peer, ProbeEnd("the director does not know this machine any more"))]
        self.machines[number].heard_ns = now_ns
        if isinstance(message, ProbeBeat):
            return [SendToMachine(peer, message)]
        match message:
            case ProbeListening(token, port) if (trial := self.tries.get(token)) and number == trial.listener:
                if not 0 < port < 65536:
                    raise RemoteProtocolError(f"{self.name(number)} names port {port}")
                host = self.machines[number].join.host
                return [self._tell(trial.dialler, self._dial(trial, host, port))]
            case ProbeReport(token, why, flows) if (trial := self.tries.get(token)) and number in (
                trial.listener,
                trial.dialler,
            ):
                return self._reported(trial, number, why, checked(unpack(flows, MESSAGE_BYTES_MAX)), now_ns)
            case ProbeListening() | ProbeReport():
                return []  # the try is over
            case ProbeStepTime(seconds) if 0 <= seconds < math.inf:
                self.machines[number].step_s = seconds
                return self._begin(now_ns)
        raise RemoteProtocolError(f"a machine does not send {type(message).__name__}")

    def _joined(self, peer: bytes, join: ProbeJoin, now_ns: int) -> Effects:
        if any(machine.peer == peer for machine in self.machines):
            return []
        why = ""
        if len(self.machines) >= self.count:
            why = f"all {self.count} machines are here already; --machines says how many"
        elif any(machine.join.name == join.name for machine in self.machines):
            why = f"another machine is named {join.name} too; give this one a --name"
        if why:
            return [SendToMachine(peer, ProbeEnd(why)), PrintLine(f"{join.name} was refused: {why}")]
        self.machines.append(ProbedMachine(peer, join, now_ns, now_ns))
        return [PrintLine(f"{join.name} has come")]

    def without(self, why: str, now_ns: int, name: str = "") -> Effects:
        """Go on without a machine before the first round, or without all machines that have not joined.

        The first round begins if all remaining machines are ready.

        Args:
            why: a sentence for the user.
            now_ns: the time.
            name: the machine to leave out; "": all that have not joined.
        """
        self.failed.append(why)
        self.machines = [machine for machine in self.machines if machine.join.name != name]
        self.count = max(len(self.machines), self.count - 1 if name else 0)
        return [PrintLine(why), *self._begin(now_ns)]

    def _begin(self, now_ns: int) -> Effects:
        """Begin the first round, if all machines have joined and timed their steps."""
        awaited = len(self.machines) < self.count or any(machine.step_s is None for machine in self.machines)
        if awaited or self.count < 2 or self.began_ns is not None:
            return []
        self.began_ns = now_ns
        named = [
            [pair for pair in row if frozenset(map(self.name, pair)) not in self.known]
            for row in rounds(range(self.count))
        ]
        self.rounds = [row for row in named if row]
        self.pairs = sum(map(len, self.rounds))
        self.bounds.begin(self.pairs, again(self.count))
        limit = f"at most {len(self.rounds) * self._round_s:,.0f} s and {self.bounds.first_bytes / 1e6:,.0f} MB"
        text = f"{self.pairs} pairs in {len(self.rounds)} rounds, for round trips and first readings: {limit}"
        return [PrintLine(text), *self._next(now_ns)]

    @property
    def _round_s(self) -> float:
        return min(self.seconds, FIRST_ROUND_S) if self.first else self.seconds

    def _second(self) -> Effects:
        """Set up the rounds of second visits, of the pairs whose first visit succeeded."""
        rows = [[self.visits[both].pair for both in map(frozenset, row) if both in self.visits] for row in self.rounds]
        for a, b in chain.from_iterable(rows):
            if gone := sorted(self.gone & {a, b}):
                self.failed.append(f"{self.name(a)} - {self.name(b)}: {self.name(gone[0])} is lost")
        rows = [[pair for pair in row if not self.gone.intersection(pair)] for row in rows]
        self.first, self.number, self.rounds = False, 0, [row for row in rows if row]
        if not self.rounds:
            return []
        most = again(self.count)
        more = f", and up to {most} pairs once more" if most else ""
        limit = (
            f"at most {(len(self.rounds) + most) * self.seconds:,.0f} s and {self.bounds.bytes / 1e6:,.0f} MB in all"
        )
        return [PrintLine(f"streams of {sum(map(len, self.rounds))} pairs in {len(self.rounds)} rounds{more}: {limit}")]

    @property
    def sent(self) -> float:
        """Bytes that all measured pairs have sent."""
        return sum(flow.figures.get("sent_bytes", 0.0) for each in self.found for flow in each.flows)

    def links(self) -> dict[tuple[str, str], MeasuredLink]:
        """Return the measured links by (sender, receiver).

        Of a shared path, each link has the rate that it has alone.
        """
        number = {machine.join.name: at for at, machine in enumerate(self.machines)}
        before: dict[Pair, MeasuredLink] = {}
        made: dict[Pair, MeasuredLink] = {}
        for found in self.found:
            for way, link in of_pair(found.names, found.flows, 0.0).items():
                at = number[way[0]], number[way[1]]
                before.setdefault(at, link)
                made[at] = link
        for each in self.shared or ():
            made |= shares(each, before, made, " - ".join(map(self.name, each.pairs[0])))
        return {(self.name(a), self.name(b)): link for (a, b), link in made.items()}

    def _alone(self) -> list[list[Pair]]:
        """Return the rounds of pairs to measure once more, alone.

        They are made once, when all other rounds are over.
        """
        if self.shared is not None:
            return []
        links, machines = self.links(), range(self.count)
        names = {(a, b): (self.name(a), self.name(b)) for a in machines for b in machines}
        rates = {pair: max(links[way].rates.values()) for pair, way in names.items() if way in links}
        self.shared = shared(self.count, self.rounds, rates)
        self.bounds.alone(self.shared, self.sent)
        return rounds_alone(self.shared, again(self.count))

    def _next(self, now_ns: int) -> Effects:
        """Begin the next round, if the present one is over."""
        said: Effects = []
        while not self.tries and not self.finished:
            if self.first and self.number == len(self.rounds):
                said += self._second()
            if self.number == len(self.rounds) and (more := self._alone()):
                self.rounds += more
                count = sum(map(len, more))
                self.pairs += count
                said.append(PrintLine(f"{count} pairs shared a way with others: they are measured once more, alone"))
            if self.number == len(self.rounds):
                self.finished = True
                return [*said, *(SendToMachine(machine.peer, ProbeEnd("")) for machine in self.machines)]
            pairs = self.rounds[self.number]
            self.number += 1
            live = [pair for pair in pairs if not self.gone.intersection(pair)]
            live = live if self.first else [self.visits[frozenset(pair)].pair for pair in live]
            names = ", ".join(f"{self.name(a)} - {self.name(b)}" for a, b in live)
            kind = "first round" if self.first else "round"
            said += [PrintLine(f"{kind} {self.number} of {len(self.rounds)}: {names}")] if live else []
            said += chain.from_iterable(self._try(a, b, now_ns, again=False) for a, b in live)
        return said

    def _try(self, listener: int, dialler: int, now_ns: int, again: bool) -> Effects:
        text = f"{self.secret} {self.first} {self.number} {listener} {dialler} {again}".encode()
        token = blake2b(text, digest_size=16).hexdigest()
        ends_ns = now_ns + int(self._round_s * NS) + LATE_NS
        self.tries[token] = PairTry(token, listener, dialler, ends_ns, again)
        return [self._tell(listener, ProbeListen(token, self._round_s, self.first))]

    def _dial(self, trial: PairTry, host: str, port: int) -> ProbeDial:
        pair, most = (trial.listener, trial.dialler), (self.bounds.first, self.bounds.first)
        if not self.first:
            most = int(self.bounds.allowed[pair]), int(self.bounds.allowed[pair[::-1]])
        trip_s = 0.0 if self.first else self.visits[frozenset(pair)].trip_s
        return ProbeDial(trial.token, host, port, self._round_s, self.first, *most, trip_s)

    def _tell(self, machine: int, message: Message) -> SendToMachine:
        return SendToMachine(self.machines[machine].peer, message)

    def _reported(self, trial: PairTry, number: int, why: str, flows: list[Flow], now_ns: int) -> Effects:
        if trial.token not in self.tries:
            return []
        if why and not trial.again and not trial.reports and number == trial.dialler and not flows:
            del self.tries[trial.token]
            said = self._try(trial.dialler, trial.listener, now_ns, again=True)
            return [PrintLine(f"{why}; the other way is tried"), *said]
        if why:
            return self._fail(trial, why, now_ns)
        trial.reports[number] = flows
        return self._measured(trial, now_ns) if len(trial.reports) == 2 else []

    def _measured(self, trial: PairTry, now_ns: int) -> Effects:
        del self.tries[trial.token]
        merged: dict[tuple[int, int], dict[str, float]] = {}
        for each in chain.from_iterable(trial.reports.values()):
            merged.setdefault((each.phase, each.way), {}).update(each.figures)
        rows = tuple(Flow(phase, way, figures) for (phase, way), figures in sorted(merged.items()))
        pair = trial.listener, trial.dialler
        if self.first and (seen := begun(rows)):
            self.visits[frozenset(pair)] = PairVisit(pair, seen[0], rows)
            self.bounds.saw(pair, seen[1])
        elif not self.first and whole(rows):
            names = self.name(trial.listener), self.name(trial.dialler)
            self.found.append(ProbeFindings(names, (*rows, *self.visits[frozenset(pair)].flows)))
        else:
            self.failed.append(f"{self.name(pair[0])} - {self.name(pair[1])}: their reports do not say all")
        return self._next(now_ns)

    def _fail(self, trial: PairTry, why: str, now_ns: int) -> Effects:
        del self.tries[trial.token]
        self.failed.append(f"{self.name(trial.listener)} - {self.name(trial.dialler)}: {why}")
        return [PrintLine(self.failed[-1]), *self._next(now_ns)]

    def tick(self, now_ns: int) -> Effects:
        """Handle the passing of time: end tries that are late, and drop machines that are silent."""
        said: Effects = []
        for number in reversed(range(len(self.machines))):  # from the end: a machine may leave the list
            if number not in self.gone and not self.finished and now_ns - self.machines[number].heard_ns >= SILENT_NS:
                said += self._lost(number, now_ns)
        for machine in [each for each in self.machines if each.step_s is None and now_ns - each.came_ns > STEPS_NS]:
            why = f"{machine.join.name}: its steps were not timed within {STEPS_NS // NS} s"
            said += [SendToMachine(machine.peer, ProbeEnd(why)), *self.without(why, now_ns, machine.join.name)]
        for trial in [trial for trial in self.tries.values() if now_ns >= trial.ends_ns]:
            silent = [self.name(each) for each in (trial.listener, trial.dialler) if each not in trial.reports]
            said += self._fail(trial, f"no report of {' and '.join(silent)} within {self._round_s:g} s", now_ns)
        return said

    def _lost(self, number: int, now_ns: int) -> Effects:
        if self.began_ns is None:  # another machine may join in its place
            machine = self.machines.pop(number)
            return [PrintLine(f"{machine.join.name} has left")]
        self.gone.add(number)
        name = self.name(number)
        left = [pair for row in self.rounds[self.number :] for pair in row if number in pair]
        left = [pair for pair in left if not (self.gone - {number}).intersection(pair)]
        self.failed += [f"{self.name(a)} - {self.name(b)}: {name} is lost" for a, b in left]
        said: Effects = [
            PrintLine(f"{name} was silent for {SILENT_NS // NS} s: it counts as dead, and its pairs are left out")
        ]
        for trial in [trial for trial in self.tries.values() if number in (trial.listener, trial.dialler)]:
            said += self._fail(trial, f"{name} is lost", now_ns)
        return said
