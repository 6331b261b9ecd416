"""Runs that another machine joins with shards, which goes again or is lost, while every fault strikes. The invariants are
those of a move, and

    told at last   who has no shards any more is told so, and why; who is not lost loses nothing

`Machine` stands where ps/command/remote_shards.py stands: it starts and ends processes as `RemoteShardsGrant` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

from narrows.protocols import messages as m
from narrows.protocols.effects import NS
from narrows.protocols.messages import RemoteShardsWish
from narrows.ps.shard.shard import Shard
from simulation.actors import Kit, Process
from simulation.campaigns import Case, Trace, case_of
from simulation.mirror import Violation
from simulation.resharding import Moved, Moves, kind_of
from simulation.simulator import MS, Random


@dataclass(frozen=True, slots=True)
class Visit:
    """A run in which a machine joins at a clock with so many shards; it goes at a clock, or is lost so long after it
    joined, 0: it is not."""

    case: Case
    joins: int
    shards: int
    goes: int
    lost_ns: int


def visit_of(seed: int, lost: bool = False, only: str = "") -> Visit:
    """`only`: as in `moves_of`."""
    random = Random(seed * 2 + lost)
    found = (case_of(other) for other in count(seed * 31 + 7))
    # The mirror of a norm over all shards does not know what each of them leaves out.
    known = (case for case in found if not (case.settings.robust and case.max_grad_norm))
    case = next(case for case in known if only in ("", kind_of(case)))
    joins, shards, goes = random.between(1, 5), random.between(1, 2), random.between(8, 14)
    return Visit(case, joins, shards, goes, random.between(1, 4 * NS) if lost else 0)


class Hosted(Shard):
    """It says on which machine it is."""

    hosts: ClassVar[dict[int, str]] = {}

    def _report_of(self, version: int) -> m.Report:
        return replace(super()._report_of(version), host=self.hosts.get(self.index, ""))


class Machine:
    """The one that joins. `over`: what it was told last."""

    def __init__(self, run: Visited, name: str, shards: int) -> None:
        self.run, self.name, self.shards = run, name, shards
        self.join = m.RemoteShardsOffer(f"token {name}", f"host-{name}", shards, -1, RemoteShardsWish.STAY)
        self.room: m.RemoteShardsGrant | None = None
        self.mine: set[int] = set()  # shards that are started here
        run.sim.start(self, name)

    def tick(self, now_ns: int) -> None:
        self.run.send(self.name, "s0", self.join)

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        before = self.room
        if not isinstance(message, m.RemoteShardsGrant) or (before is not None and before.over):
            return
        if before is not None and (message.epoch, message.version) < (before.epoch, before.version):
            return
        self.room = room = message
        most = max(room.shards, room.target)
        wanted = set(range(room.first, min(room.first + room.count, most))) if room.first >= 0 else set()
        if room.first >= 0:
            self.join = replace(self.join, first=room.first)
        for index in sorted(self.mine - wanted):
            self.run.end_there(index, 1000 * MS)  # it hears of it itself, most likely before
        for index in sorted(wanted - self.mine):
            Hosted.hosts[index] = self.join.host
            self.run.begin_there(index)
        self.mine = wanted

    @property
    def serves(self) -> bool:
        return self.room is not None and bool(self.mine) and max(self.mine) < self.room.shards


class Visited(Moved):
    """One run, to the end of everyone."""

    hurried = False  # a machine that is lost is waited for

    def __init__(self, visit: Visit, kit: Kit | None = None, trace: Trace | None = None) -> None:
        Hosted.hosts = {}
        super().__init__(Moves(visit.case, ()), replace(kit or Kit(), shard=Hosted), trace)
        self.visit = visit
        self.machine: Machine | None = None
        self.served = self.gone = False  # it has had keys; its visit has ended

    def _listen(self, shards: int, target: int) -> None:
        """None of its own shards comes or goes."""
        self.heard = (shards, target)
        self.settings = replace(self.settings, shards=shards)

    def server_event(self, process: Process) -> None:
        super().server_event(process)
        coordinator, visit, machine = process.coordinator, self.visit, self.machine
        if coordinator is None or self.over:
            return
        if machine is None and coordinator.min_clock >= visit.joins:
            self.machine = machine = Machine(self, "g0", visit.shards)
            if visit.lost_ns:
                self.sim.at(self.sim.now_ns + visit.lost_ns, self._lost)
        if machine is None or self.gone:
            return
        self.served |= machine.serves
        if machine.serves and not visit.lost_ns and coordinator.min_clock >= visit.goes:
            machine.join = replace(machine.join, wish=RemoteShardsWish.GO)
        if machine.room is not None and machine.room.over:
            self._told(machine.room)

    def _told(self, room: m.RemoteShardsGrant) -> None:
        self.gone = True
        if room.code not in (0, 1) or (room.code and self.served):
            raise Violation(f"a machine that is not lost is told {room.code}: {room.text}")
        self.sim.struck["machine went" if self.served else "machine stayed away"] += 1

    def begin_there(self, index: int) -> None:
        self.begun.add(index)
        self.sim.at(self.sim.now_ns + self.sim.random.between(0, 300 * MS), self._serve_there, index)

    def _serve_there(self, index: int) -> None:
        if index in self.begun and index not in self.servers and not self.gone:
            self._serve(index, 0)

    def end_there(self, index: int, later_ns: int) -> None:
        if index in self.servers:
            self.sim.at(self.sim.now_ns + later_ns, self._end, self.servers[index])
        else:
            self.begun.discard(index)

    def _lost(self) -> None:
        """With all that is on it, and nobody says so."""
        machine = self.machine
        assert machine is not None
        if self.over or self.gone or (self.servers[0].coordinator and self.servers[0].coordinator.over):
            return
        self.gone = True
        self.sim.struck["machine lost"] += 1
        self.sim.struck["with keys"] += machine.serves
        self.sim.crash(machine.name)
        for index in sorted(machine.mine):
            self.begun.discard(index)
            if index in self.servers:
                self._end(self.servers[index])

    def run(self) -> Visited:
        super().run()
        return self
