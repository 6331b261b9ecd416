"""The coordinator of a gossip run in virtual time, with real members and every fault; workers compute, and exchange nothing.

Hall(seed).run()        raises Violation where an invariant does not hold

rosters   of one epoch are one roster, and name the members of that epoch
closed    only when every member that lives has done its last step; then nobody joins any more
the end   every worker that lives hears that all are done, and leaves; when one has left so, the run is over
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, MemberEffect, ServerEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.member.member import Member
from narrows.ps.coordinator.coordinator import Coordinator
from simulation.actors import PLANS, TIMING
from simulation.mirror import Violation
from simulation.simulator import MS, Faults, Random, Simulator

END_NS = 240 * NS  # virtual time in which every run has ended
LEASE_S = 2.0


class Guest:
    """A worker: so many steps, then it waits for the others."""

    def __init__(self, hall: Hall, index: int, life: int) -> None:
        self.hall, self.index = hall, index
        self.name, self.left = f"w{index}.{life}", hall.random.between(1, 12)  # steps to do
        self.member = Member(self.name, "here", timing=TIMING)
        self.member.reached_at(self.name)
        self.place = (-1, 0, 0)  # worker, epoch, clock
        self.gone = False
        hall.guests[self.name] = self
        hall.sim.start(self, self.name)
        self._take(self.member.join(hall.sim.now_ns))
        hall.sim.at(hall.sim.now_ns + hall.random.between(0, 2 * NS), self._declare)  # once its script has a model

    def _declare(self) -> None:
        if not self.gone and self.hall.sim.alive(self.name):
            self._take(self.member.declare(PLANS[0.0], self.hall.sim.now_ns))

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self._take(self.member.receive(0, message, now_ns))

    def tick(self, now_ns: int) -> None:
        self._take(self.member.tick(now_ns))

    def _take(self, effects: Sequence[MemberEffect]) -> None:
        hall = self.hall
        for effect in effects:
            if isinstance(effect, e.Send):
                hall.sim.send(self.name, "s0", effect.message)
            elif isinstance(effect, e.MemberStarted):
                self.place = (effect.worker, effect.epoch, effect.clock)
                self._step(effect.epoch, 0)
            elif isinstance(effect, e.RosterChanged) and effect.roster.closed and not self.left:
                self._take(self.member.leave(self.place[2], hall.sim.now_ns))
            elif isinstance(effect, (e.MemberLeft, e.MemberFailed)):
                self.gone = True
                if isinstance(effect, e.MemberFailed) and effect.code != m.RefuseCode.OVER:
                    raise Violation(f"{self.name} fails: {effect.text}")

    def _step(self, epoch: int, done: int) -> None:
        if self.gone or epoch != self.place[1] or not self.hall.sim.alive(self.name):
            return  # it has joined again since
        self.left -= done
        if self.left:
            self.hall.sim.at(self.hall.sim.now_ns + self.hall.random.between(10, 400) * MS, self._step, epoch, 1)
        else:
            self._take(self.member.end(self.hall.sim.now_ns))


class Hall:
    """The coordinator, a shard that does what its ledgers say, and all that befalls the guests."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        between, chance = self.random.between, self.random.chance
        delay_ns, late_ns = (MS, between(2, 30) * MS), between(50, 1000) * MS
        faults = Faults(between(10, 150) / 1000, between(10, 80) / 1000, between(20, 150) / 1000, delay_ns, late_ns)
        self.sim: Simulator[m.Message] = Simulator(seed, faults, 100 * MS)
        workers = between(1, 5)
        self.coordinator = Coordinator(
            Settings(sync="gossip", workers=workers, lease=LEASE_S).validated(), 1 << 20, keys_max=100
        )
        self.guests: dict[str, Guest] = {}
        self.rosters: dict[int, m.Roster] = {}  # by epoch, as the first was sent
        self.members: set[int] | None = None  # once the meeting is closed
        self.reports, self.over = 0, False
        self.sim.start(self, "s0")
        self._apply([e.Send(b"", m.Ledger(0, 0, -1, 0, False, -1, (), 0, (), (), (), -1, False, 0, b""))])
        for index in range(workers + between(0, 3)):
            self.sim.at(between(0, 200 * MS) if index < workers else between(0, 6 * NS), self._come, index, 0)
        for index in range(workers):
            if chance(0.4):
                self.sim.at(between(300 * MS, 4 * NS), self._crash, index, between(20 * MS, 4 * NS), chance(0.5))
            elif chance(0.3):
                at_ns = between(300 * MS, 4 * NS)
                self.sim.at(at_ns, self.sim.cut, f"w{index}.0", "s0", at_ns + between(NS, 5 * NS))

    def _come(self, index: int, life: int) -> None:
        Guest(self, index, life)

    def _crash(self, index: int, lasts_ns: int, told: bool) -> None:
        name = f"w{index}.0"
        if name in self.guests and not self.guests[name].gone:
            self.sim.crash(name)
            self.sim.struck["worker crashed"] += 1
            if told:
                self.sim.send(f"l{index}", "s0", m.Leave(self.guests[name].member.token, -1))
            self.sim.at(self.sim.now_ns + lasts_ns, self._come, index, 1)

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        self._apply(self.coordinator.handle(source.encode(), message, now_ns))

    def tick(self, now_ns: int) -> None:
        self._apply(self.coordinator.tick(now_ns))

    def _apply(self, effects: list[ServerEffect]) -> None:
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            self.over |= isinstance(effect, e.StopProcess)
            if isinstance(effect, e.Send) and isinstance(effect.message, m.Ledger):
                todo += self.coordinator.handle(b"", self._report(effect.message), self.sim.now_ns)
            elif isinstance(effect, e.Send) and isinstance(effect.peer, bytes):
                if isinstance(effect.message, m.Roster):
                    self._introduced(effect.message)
                self.sim.send("s0", effect.peer.decode(), effect.message)
        self._look()

    def _report(self, ledger: m.Ledger) -> m.Report:
        self.reports += 1
        standing = (ledger.version, ledger.epoch, ledger.generation > 0, ledger.initialiser, ledger.min_clock)
        return m.Report(0, 1, self.reports, 1, ledger.generation, *standing, (), (), ())

    def _introduced(self, roster: m.Roster) -> None:
        first = self.rosters.setdefault(roster.epoch, roster)
        if (roster.members, roster.addresses, roster.closed) != (first.members, first.addresses, first.closed):
            raise Violation(f"two rosters of epoch {roster.epoch}: {first} and {roster}")

    def _look(self) -> None:
        live = {guest.place[:2]: guest for guest in self.guests.values() if self.sim.alive(guest.name)}
        declared = {seat.worker for seat in self.coordinator.declared}
        if self.members is None and self.coordinator.gossip_directory.closed:
            self.members = declared
            for seat in self.coordinator.declared:
                guest = live.get((seat.worker, seat.epoch))
                if guest is not None and guest.left:
                    raise Violation(f"the meeting is closed, and {guest.name} has {guest.left} steps to do")
        if self.members is not None and not declared <= self.members:
            raise Violation(f"{declared - self.members} joined after all had done their last step")
        newest = self.rosters.get(self.coordinator.run.epoch)
        if newest is not None and {row[0] for row in newest.members} != declared:
            raise Violation(f"{newest} names others than {declared}")

    def _deserted(self) -> bool:
        """All died after their last step and before they could leave: the server lets nobody in, and waits to be stopped."""
        done = all(guest.gone or not self.sim.alive(guest.name) for guest in self.guests.values())
        return self.members is not None and not self.coordinator.seats and done

    def run(self) -> Hall:
        """Run to the end. Raises Violation with the seed in it."""
        try:
            while not self.over and not self._deserted():
                if not self.sim.step() or self.sim.now_ns > END_NS:
                    waiting = [
                        guest.name for guest in self.guests.values() if self.sim.alive(guest.name) and not guest.gone
                    ]
                    raise Violation(f"the run has not ended; {', '.join(waiting)} wait")
        except (AssertionError, NarrowsError, KeyError) as error:
            text = f"seed {self.seed} at {self.sim.now_ns / NS:.4f} s: {type(error).__name__}: {error}"
            raise Violation(text) from error
        return self
