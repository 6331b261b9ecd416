"""Servers, their standbys and members in virtual time, under every fault: links cut, processes and whole machines killed.

    Theatre(seed).run()         raises Violation where an invariant does not hold

nothing lost   what a member was told is done, is done on the server that serves in the end, and once
in order       what shard 0 knows of another shard, that shard has
one server     two servers of which neither knows the other's newest never both serve
progress       where a server or its standby lives and members reach it, all that is asked gets done

`ReplicationPrimary`, `Standby` and `FailoverView` are those that ship. A `Box` stands in the place of a shard's
machine: it keeps what was asked of it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.timing import standby_lost_ns
from narrows.protocols.effects import NS
from narrows.protocols.member.failover_view import FailoverView
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.replication.replication_primary import ReplicationPrimary
from narrows.ps.replication.standby import MachineParts, PeerShards, Standby
from narrows.ps.shard.reports import COORDINATOR
from simulation.mirror import Violation
from simulation.simulator import MS, Faults, Random, Simulator

Trace = Callable[[int, str, Any], None]

LEASE_S = 3.0
TICK_NS = 100 * MS
FAULTS_NS = 30 * NS  # then all that lives is left alone
END_NS = 120 * NS
LOST_S = 8  # of silence, after which a member fails
ASKS = 30  # of each member
VIEWS_OF_A_LIFE = 1000  # more than shard 0 comes to in one


@dataclass(frozen=True)
class Ask:
    """A member asks a shard to do this."""

    worker: int
    number: int


@dataclass(frozen=True)
class Done:
    """A shard tells a member that it is done, or shard 0, so that it knows."""

    shard: int
    worker: int
    number: int


@dataclass
class Seat:
    worker: int
    peer: bytes
    name: bytes


@dataclass
class Box:
    """The state of a shard: what it has done, in order, and who is a member."""

    index: int
    view: int = 0
    standby: str = ""
    happened: int = 0
    incarnation: int = 0
    viewed: int = 0
    before: str = ""
    done: list[tuple[int, int]] = field(default_factory=list)
    known: list[tuple[int, int, int]] = field(default_factory=list)  # by shard 0, of the others
    seats: dict[int, bytes] = field(default_factory=dict)

    @property
    def members(self) -> list[Seat]:
        return [Seat(worker, peer, m.name_of(peer)) for worker, peer in sorted(self.seats.items())]

    def happen(self, event: MachineEvent) -> list[tuple[bytes, Any]]:
        """Handle an event, and return what is to be sent, and to whom."""
        self.happened += 1
        if event.kind is EventKind.VIEW:
            self.view, self.standby, _, before = event.values
            self.before = before or self.before
            self.viewed = self.happened
            return []
        what, shard, worker, number = event.values
        if what == "go":
            self.seats.pop(worker, None)
        elif what == "known":
            if (shard, worker, number) not in self.known:
                self.known.append((shard, worker, number))
            return [(self.seats[worker], Done(shard, worker, number))] if worker in self.seats else []
        elif what == "ask":
            if not self.index:
                self.seats[worker] = event.peer  # a new member, or one that is back
            if (worker, number) not in self.done:
                self.done.append((worker, number))
            to = event.peer if not self.index else COORDINATOR
            return [(to, Done(self.index, worker, number))]
        return []

    def packed(self) -> bytes:
        state = [
            self.view,
            self.standby,
            self.happened,
            self.incarnation,
            self.viewed,
            self.before,
            self.done,
            self.known,
        ]
        seats = [[worker, peer.decode()] for worker, peer in self.seats.items()]
        return json.dumps([self.index, state, seats]).encode()

    @classmethod
    def of(cls, packed: bytes) -> Box:
        index, (*counts, done, known), seats = json.loads(packed)
        done, known = ([tuple(each) for each in rows] for rows in (done, known))
        kept: list[Any] = [*counts, done, known, {worker: peer.encode() for worker, peer in seats}]
        return cls(index, *kept)

    def reborn(self) -> Box:
        """The box of a life that begins from a checkpoint, which has all but views."""
        return replace(
            Box.of(self.packed()), view=0, standby="", happened=0, viewed=0, incarnation=self.incarnation + 1
        )


class Shard:
    """One process of a server: it follows, or serves. `box`: of a process before it, which was killed."""

    def __init__(self, theatre: Theatre, server: Server, index: int, follows: str, box: Box | None = None) -> None:
        self.theatre, self.server, self.index = theatre, server, index
        self.name, self.first = f"{server.name}{index}", f"{server.name}0"
        self.held: deque[tuple[int, bytes, Any]] = deque()
        self.original: ReplicationPrimary | None = None
        self.standby: Standby | None = None
        lost_ns, shards = standby_lost_ns(LEASE_S), theatre.shards
        if follows:
            self.standby = Standby(
                index,
                f"{follows}{index}",
                self.first,
                index,
                lost_ns,
                PeerShards(shards, lost_ns),
                self._thaw,
                self._again,
            )
            self.standby.heard_ns = theatre.sim.now_ns
        else:
            self._serves(box or Box(index), PeerShards(shards, lost_ns))
            if box is not None:
                for event in server.tails[index]:  # as a journal has them
                    self._original.feed.tail.append(event)
        self.heard: dict[int, int] = {}  # of members, when
        theatre.sim.start(self, self.name)

    @property
    def _original(self) -> ReplicationPrimary:
        assert self.original is not None
        return self.original

    @property
    def box(self) -> Box:
        if self.original is None:
            assert self.standby is not None and isinstance(self.standby.machine, Box)
            return self.standby.machine
        box = self.original.machine
        assert isinstance(box, Box)
        return box

    def _thaw(self, packed: MachineParts) -> Box:
        return Box.of(packed.read())

    def _again(self, event: MachineEvent) -> None:
        self.box.happen(event)

    def _serves(self, box: Box, siblings: PeerShards) -> None:
        before = self.standby.original if self.standby is not None else ""
        first_view = VIEWS_OF_A_LIFE * box.incarnation
        lost_ns = standby_lost_ns(LEASE_S)
        self.original = ReplicationPrimary(
            self.index, box, self.index, lost_ns, box.packed, siblings, first_view, before
        )

    def _happen(self, event: MachineEvent) -> None:
        original = self._original
        self._at_once(original.note(event, ()))
        for to, message in self.box.happen(event):
            if original.holds or self.held:
                self.held.append((self.box.happened, to, message))
            else:
                self._send(to, message)
        self.server.tails[self.index] = original.feed.tail.copy()

    def _send(self, to: bytes | int | str, message: Any) -> None:
        target = self.first if to == COORDINATOR else to.decode() if isinstance(to, bytes) else str(to)
        if target == self.name:
            self.handle(self.name, message, self.theatre.sim.now_ns)
        elif target.startswith("w") or target[:-1] != self.server.name or self.theatre.sim.alive(target):
            self.theatre.sim.send(self.name, target, message)

    def _at_once(self, effects: Iterable[e.CopyEffect]) -> None:
        for effect in effects:
            match effect:
                case e.Send(to, message):
                    self._send(to, message)
                case e.SendToPeer(address, message):
                    self._send(address, message)
                case e.StartServing(view, standby):
                    if self.original is None:
                        assert self.standby is not None
                        self._serves(self.box, self.standby.siblings)
                        self.theatre.sim.struck["took over"] += not self.index
                        self.server.leads = True
                    before = self._original.before if self._original.before != self.box.before else ""
                    self._happen(MachineEvent(EventKind.VIEW, 0, values=(view, standby, self.index, before)))
                    if not standby:
                        self.theatre.sim.struck["alone"] += 1
                        self._original.feed.forget()
                case e.StopProcess():
                    self.theatre.sim.struck["deposed"] += 1
                    self.server.end()
        self._release()

    def _release(self) -> None:
        original = self.original
        while original is not None and self.held and (not original.holds or self.held[0][0] <= original.feed.acked):
            _, to, message = self.held.popleft()
            self._send(to, message)

    def handle(self, source: str, message: Any, now_ns: int) -> None:
        peer, original = source.encode(), self.original
        if source.startswith("w") and self.original is not None:
            self.heard[int(source[1:])] = now_ns
        if isinstance(message, m.ReplicationProgress):
            (original or self.standby).siblings.hear(peer, message, now_ns)  # type: ignore[union-attr]
        elif original is None:
            self._follow(source, message, now_ns)
        elif isinstance(message, Ask):
            self._happen(
                MachineEvent(EventKind.WROTE, now_ns, peer, None, ("ask", self.index, message.worker, message.number))
            )
        elif isinstance(message, Done):
            values = ("known", message.shard, message.worker, message.number)
            self._happen(MachineEvent(EventKind.WROTE, now_ns, peer, None, values))
        elif isinstance(message, m.ReplicationFollow):
            self._at_once(original.feed.copy(peer, message, now_ns))
        elif isinstance(message, m.FailoverVote):
            self._at_once(original.vote(peer, message))
        elif isinstance(message, m.FailoverNotice) and source == self.first:
            self._at_once(original.hear_view(message))
        elif isinstance(message, m.FailoverNotice):
            self._at_once(original.deposed(message))

    def disconnected(self, target: str, now_ns: int) -> None:
        if self.original is not None and target.encode() == self.original.feed.peer:
            self.original.feed.cut(now_ns)
        elif self.original is None and self.standby is not None and target == self.standby.original:
            self.standby.cut(now_ns)

    def _follow(self, source: str, message: Any, now_ns: int) -> None:
        standby = self.standby
        assert standby is not None
        if isinstance(message, m.ReplicationEntry) and source == standby.original:
            standby.receive(message, now_ns)
            if standby.machine is not None and standby.machine.happened + len(standby.events) != standby.have:
                raise Violation(f"{self.name} has {standby.have} events, and {standby.machine.happened} have happened")
        elif isinstance(message, m.FailoverVote):
            self._at_once(standby.vote(source.encode(), message, now_ns))
        elif isinstance(message, m.FailoverNotice) and source == self.first:
            self._at_once(standby.hear_view(message))

    def tick(self, now_ns: int) -> None:
        if self.original is not None:
            for seat in self.box.members if not self.index else ():
                if now_ns - self.heard.setdefault(seat.worker, now_ns) > LEASE_S * NS:
                    self.theatre.sim.struck["expired"] += 1
                    self._happen(MachineEvent(EventKind.WROTE, now_ns, b"", None, ("go", 0, seat.worker, 0)))
            return self._at_once(self.original.tick(now_ns))
        assert self.standby is not None
        self._at_once([*self.standby.acknowledge(now_ns), *self.standby.tick(now_ns)])


class Server:
    """All processes of one ps-serve. `leads`: it serves, or takes over just now."""

    def __init__(self, theatre: Theatre, name: str, follows: str = "") -> None:
        self.theatre, self.name, self.follows = theatre, name, follows
        self.tails: list[deque[m.ReplicationEntry]] = [deque() for _ in range(theatre.shards)]
        self.leads, self.over = not follows, False
        self.shards = [Shard(theatre, self, index, follows) for index in range(theatre.shards)]

    @property
    def alive(self) -> bool:
        return not self.over

    def end(self) -> None:
        """Its machine is lost."""
        if not self.over:
            self.over = True
            for shard in self.shards:
                if self.theatre.sim.alive(shard.name):
                    self.theatre.sim.crash(shard.name)

    def restart(self, index: int) -> None:
        """Kill one process; another goes on where it was, by its journal."""
        shard = self.shards[index]
        if self.over or not self.theatre.sim.alive(shard.name):
            return
        self.theatre.sim.crash(shard.name)
        follows = self.follows if shard.original is None else ""
        box = Box.of(shard.box.packed()) if shard.original is not None else None
        self.shards[index] = Shard(self.theatre, self, index, follows, box)

    def fail(self, index: int) -> None:
        """One process fails by itself; another begins from a checkpoint. Where a standby stands by, that takes over instead."""
        shard = self.shards[index]
        alone = all(each.original is not None and not each.box.standby for each in self.shards)
        if self.over or not alone or not self.theatre.sim.alive(shard.name):
            return
        self.theatre.sim.struck["failed by itself"] += 1
        self.theatre.sim.crash(shard.name)
        self.tails[index].clear()
        self.shards[index] = Shard(self.theatre, self, index, "", shard.box.reborn())


class Guest:
    """A member that asks for one thing after the other, of each shard in turn."""

    def __init__(self, theatre: Theatre, worker: int) -> None:
        self.theatre, self.worker, self.name = theatre, worker, f"w{worker}"
        self.views, self.server = FailoverView(worker, 1), theatre.first
        self.asked = self.told = 0
        self.asked_ns = self.heard_ns = 0
        self.done: list[tuple[int, int]] = []  # shard, number
        self.done_ns = self.stall_ns = 0  # when something was done last, and the longest wait for that
        self.failed = False
        theatre.sim.start(self, self.name)

    def handle(self, source: str, message: Any, now_ns: int) -> None:
        if source[:-1] == self.server:
            if isinstance(message, m.FailoverNotice):
                self._say(self.views.told(message))
            if self.views.turned:
                return
            self.heard_ns = now_ns
            self.views.cut.pop(int(source[-1]), None)
            if isinstance(message, Done) and message.number == self.asked:
                self.done.append((message.shard, message.number))
                self.stall_ns = max(self.stall_ns, now_ns - self.done_ns)
                self.asked, self.asked_ns, self.done_ns = self.asked + 1, 0, now_ns
        elif (
            source == self.views.standby
            and self.views.listens
            and isinstance(message, (m.KeepServing, m.FailoverNotice))
        ):
            effects, self.asked_ns = self.views.hear(message, now_ns), 0
            self.heard_ns = now_ns if effects else self.heard_ns
            self._say(effects)

    def disconnected(self, target: str, now_ns: int) -> None:
        if target[:-1] == self.server:
            self.views.cut.setdefault(int(target[-1]), now_ns)

    def _say(self, effects: Sequence[e.MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case e.Send(_, message):
                    self.theatre.sim.send(self.name, f"{self.server}0", message)
                case e.SendToPeer(address, message):
                    self.theatre.sim.send(self.name, address, message)
                case e.ServerChanged(address, ports):
                    if list(ports) != list(range(self.theatre.shards)):
                        raise Violation(f"{self.name} was told of the ports {ports}")
                    self.server = address[:-1]
                    self.theatre.sim.struck["moved"] += 1

    @property
    def ended(self) -> bool:
        return self.failed or self.asked >= ASKS

    def tick(self, now_ns: int) -> None:
        if self.failed or now_ns - self.heard_ns > LOST_S * NS:
            self.failed = True  # as a worker fails whose server does not answer
            return
        self._say(self.views.tick(self.heard_ns, self.theatre.shards, now_ns))
        if now_ns - self.asked_ns >= NS // 2 and not self.views.turned:
            self.asked_ns = now_ns
            shard = self.asked % self.theatre.shards
            self.theatre.sim.send(self.name, f"{self.server}{shard}", Ask(self.worker, self.asked))


class Theatre:
    """One run: a server, its standby, whoever stands by after it, and members."""

    def __init__(self, seed: int, quiet: bool = False, trace: Trace | None = None) -> None:
        self.random = random = Random(seed)
        self.seed, self.shards = seed, random.between(1, 3)
        faults = Faults(
            loss=random.between(0, 30) / 1000,
            duplication=random.between(0, 30) / 1000,
            reordering=random.between(0, 30) / 1000,
            delay_ns=(MS, random.between(2, 30) * MS),
            late_ns=random.between(50, 1000) * MS,
        )
        self.sim: Simulator[Any] = Simulator(seed, Faults() if quiet else faults, TICK_NS, trace)
        self.first = "a"
        self.servers: dict[str, Server] = {}
        self.servers["a"] = Server(self, "a")
        self.guests = [Guest(self, worker) for worker in range(random.between(1, 5))]
        self.case = f"seed {seed}: {self.shards} shards, {len(self.guests)} members, {faults}"
        self.sim.at(random.between(0, 5 * NS), self._another)
        for _ in range(0 if quiet else random.between(1, 6)):
            self.sim.at(random.between(NS, FAULTS_NS), self._strike)
        if not quiet and random.chance(0.5):  # most standbys have all by then, and stand by later
            self.sim.at(random.between(0, 6 * NS), self.servers["a"].fail, random.between(0, self.shards - 1))

    # Faults.

    def _leader(self) -> Server | None:
        """Whom most members take for the server."""
        names = [guest.server for guest in self.guests]
        name = max(dict.fromkeys(names), key=names.count)
        return self.servers[name] if self.servers[name].alive else None

    def _another(self) -> None:
        """A standby for who serves, where it has none."""
        leader = self._leader()
        stand_by = {each.follows for each in self.servers.values() if each.alive and not each.leads}
        if leader is not None and leader.leads and leader.name not in stand_by and len(self.servers) < 8:
            name = "abcdefgh"[len(self.servers)]
            self.servers[name] = Server(self, name, leader.name)
        self.sim.at(self.sim.now_ns + self.random.between(2, 8) * NS, self._another)

    def _strike(self) -> None:
        random = self.random
        living = [each for each in self.servers.values() if each.alive]
        server = living[random.between(0, len(living) - 1)]
        fault = random.between(0, 5)
        if fault == 0 and sum(each.alive for each in self.servers.values()) > 1 and self._safe(server):
            self.sim.struck["machine lost"] += 1
            server.end()
        elif fault == 1:
            self.sim.struck["process killed"] += 1
            server.restart(random.between(0, self.shards - 1))
        else:
            self._cut(server, fault)

    def _safe(self, server: Server) -> bool:
        """The other one of the pair can go on."""
        followers = [s for s in self.servers.values() if s.follows == server.name and s.alive and not s.leads]
        if not server.leads:
            return True
        return any(
            all(shard.standby is not None and shard.standby.stands_by for shard in each.shards)
            and all(guest.views.standby == f"{each.name}0" for guest in self.guests)
            for each in followers
        )

    def _cut(self, server: Server, fault: int) -> None:
        self.sim.struck["cuts"] += 1
        ours = [shard.name for shard in server.shards]
        others = [shard.name for each in self.servers.values() if each is not server for shard in each.shards]
        guests = [guest.name for guest in self.guests]
        away = {2: others, 3: guests, 4: others + guests}.get(fault)
        if away is None:
            away = [name for name in others + guests if self.random.chance(0.5)]
        now_ns = self.sim.now_ns
        for other in away:  # each is there again in its own time
            until_ns = min(now_ns + self.random.between(NS // 2, 12 * NS), FAULTS_NS)
            way = self.random.between(0, 3)
            for one in ours:
                if way != 1:
                    self.sim.cut_way(one, other, until_ns)
                if way != 2:
                    self.sim.cut_way(other, one, until_ns)

    # The end, and what must hold.

    def run(self) -> Theatre:
        try:
            while not self._ended():
                if self.sim.now_ns > END_NS or not self.sim.step():
                    where = [(each.name, each.server, each.views.view, each.views.turned) for each in self.guests]
                    alive = [each.name for each in self.servers.values() if each.alive]
                    raise Violation(f"not all was done: {where}, alive {alive}")
            self._check()
        except AssertionError as error:
            raise Violation(f"seed {self.seed} at {self.sim.now_ns / NS:.3f} s: {error}") from error
        except Violation as error:
            raise Violation(f"seed {self.seed} at {self.sim.now_ns / NS:.3f} s: {error}") from error
        return self

    def _ended(self) -> bool:
        return self.sim.now_ns > FAULTS_NS + 2 * LOST_S * NS and all(guest.ended for guest in self.guests)

    def _check(self) -> None:
        self.sim.struck["failed"] += sum(guest.failed for guest in self.guests)
        lives = [guest for guest in self.guests if not guest.failed]
        names = {guest.server for guest in lives}
        if len(names) > 1:
            raise Violation(f"in the end members have several servers: {sorted(names)}")
        if not lives:
            return
        server = self.servers[lives[0].server]
        for guest in self.guests:
            for shard, number in guest.done:
                box = server.shards[shard].box
                if (guest.worker, number) not in box.done:
                    raise Violation(f"{number} of {guest.name} was done, and {server.name} does not know of it")
        boxes = [shard.box for shard in server.shards]
        for shard, worker, number in boxes[0].known:
            if (worker, number) not in boxes[shard].done:
                raise Violation(f"shard 0 knows {number} of w{worker}, and shard {shard} does not")
