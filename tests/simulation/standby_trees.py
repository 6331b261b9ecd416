"""A tree whose root and clusters have standbys, in virtual time: machines are lost, links are cut one way, shards are killed.

    Pairs(pair_case(seed)).run()        raises Violation where an invariant does not hold

nothing lost   what a child was acknowledged is in the model of the server that serves in the end: once, and in its order
one story      what the server above has folded of a cluster is what the cluster has pushed; a publication is the same to all
one server     what a server lets out follows from events that are also with the one that takes its place
nobody rejoins each member has one place from its first step to its last
conservation   what a cluster has sent up, and what it keeps, is what its children's updates came to
progress       the run ends, and so does each worker, with a model that the root has sent

All machines are those that ship. They have a record of what they did (`recorded`): it goes to the standby with them,
and is lost with what is lost.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from narrows.compression.codecs import add
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.timing import standby_lost_ns
from narrows.protocols.effects import NS, MemberEffect, ServerEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member, MemberPhase
from narrows.protocols.wire import encode
from narrows.ps.journal.journal import JournalReplay
from narrows.ps.journal.machine_pickling import frozen, thaw
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.replication.replication_primary import ReplicationPrimary
from narrows.ps.replication.standby import MachineParts, PeerShards, Standby
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.shard.reports import COORDINATOR
from narrows.ps.store.changes import Change, Fold, OuterStep, Step
from narrows.ps.store.store import Store, assume_lent
from simulation.actors import Kit, Process, Worker, peer_of, source_of
from simulation.mirror import FloatArray, Violation, answered
from simulation.shard_kills import Kill, killed
from simulation.simulator import MS, Faults, Random
from simulation.tree_invariants import CLOSE
from simulation.trees import ABOVE, BELOW, Node, Road, Trace, Tree, TreeCase, tree_of

CLOCKS = 30  # of each worker: longer than a takeover
STRIKES_NS = (NS, 8 * NS)  # when faults begin
AGAIN_NS = NS // 4  # a machine that cannot be lost yet may be so much later
CUT_NS = (NS // 2, 7 * NS)
ALONE_NS = 6 * NS  # in which a server goes on alone: with a cut beside it more than half of its members may be missed
SETTLED_NS = 4 * NS  # after a cut and after a kill: by then members vote for nobody but who serves
HEARD_NS = 3 * NS  # a heartbeat is four times in a lease
LEASE_S = 10.0
END_NS = 120 * NS
KEPT = {"folded", "gathered"}  # of a store, under the plan after its own
MODES_ABOVE = ("bsp", "ssp", "ssp, sparse", "async", "local")
MODES_BELOW = ("bsp", "ssp", "async", "local")


@dataclass(frozen=True)
class Strike:
    """A fault of the server of this node: its machine is lost, or its standby; links are cut for a while; it hears its standby
    and its members, and they do not hear it (fenced)."""

    what: str
    node: str
    at_ns: int
    lasts_ns: int = 0


@dataclass(frozen=True)
class PairCase:
    """All of one run. `paired`: the nodes that have standbys."""

    tree: TreeCase
    paired: tuple[str, ...]
    strikes: tuple[Strike, ...]


def pair_case(seed: int, quiet: bool = False) -> PairCase:
    """By its seed. `quiet`: machines are lost, and nothing else happens."""
    random = Random(seed)
    between = random.between
    above, below = MODES_ABOVE[seed % len(MODES_ABOVE)], MODES_BELOW[seed // len(MODES_ABOVE) % len(MODES_BELOW)]
    shards = between(1, 2)
    tree = tree_of(seed, ABOVE[above], BELOW[below], 2, between(1, 2), CLOCKS, shards=shards)
    above_s, below_s = replace(tree.above, lease=LEASE_S), replace(tree.below, lease=LEASE_S)
    paired = (("root",), ("c0",), ("root", "c0"))[between(0, 2)]
    strikes = [Strike("machine", node, between(*STRIKES_NS)) for node in paired]
    kills: list[tuple[str, Kill]] = []
    faults = tree.faults
    if not quiet:
        faults = Faults(
            loss=between(0, 4) / 1000,
            duplication=between(0, 4) / 1000,
            reordering=between(0, 4) / 1000,
            delay_ns=(0, between(1, 10) * MS),
            late_ns=between(50, 500) * MS,
        )
        for _ in range(between(0, 3)):
            node, what = paired[between(0, len(paired) - 1)], ("cut", "cut", "standby")[between(0, 2)]
            strikes.append(Strike(what, node, between(*STRIKES_NS), between(*CUT_NS)))
        kills = [
            (("root", "c0", "c1")[between(0, 2)], killed(random, between(0, shards - 1))) for _ in range(between(0, 2))
        ]
    return PairCase(
        replace(tree, above=above_s, below=below_s, faults=faults, kills=tuple(kills)), paired, tuple(strikes)
    )


def fenced(seed: int) -> PairCase:
    """A cluster whose server lives on, and reaches the root alone, while its standby serves."""
    return replace(pair_case(seed, quiet=True), paired=("c0",), strikes=(Strike("fenced", "c0", 3 * NS, 12 * NS),))


def where(address: str) -> str:
    """Who listens at NODE.SERVER:PORT."""
    server, _, port = address.rpartition(":")
    node, _, which = server.rpartition(".")
    return ("" if node == "root" else f"{node}.") + f"s{int(port) - 1}" + (f"+{which}" if which != "0" else "")


# Records that machines keep of themselves.


def checksum(pieces: Iterable[Any], begin: int, size: int) -> tuple[int, FloatArray]:
    """The checksum of an update's values, which may be in parts, and the values as one array."""
    total = np.zeros(size, np.float32)
    for piece in pieces:
        add(piece, 1.0, total, begin)
    return zlib.crc32(total.tobytes()), total


@contextmanager
def recorded() -> Iterator[None]:
    """Stores keep what they fold, exchanges what was acknowledged, and uplinks what they push."""
    apply, take, push = Store.apply, Exchange.take, ParentPush._push
    planned_goes_on, pushing_goes_on = ModelShard.go_on, ParentPush.go_on

    def applied(store: Store, change: Change) -> None:
        if not isinstance(change, (Fold, OuterStep, Step)):
            return apply(store, change)
        folded, before = store.__dict__.setdefault("folded", []), store.x.astype(np.float64)
        for _, update in change.terms:
            first: Any = update[0]
            folded.append((first.worker, first.epoch, first.clock, checksum(update, store.begin, store.size)[0]))
        apply(store, change)
        store.__dict__["gathered"] = store.__dict__.get("gathered", 0.0) + (store.x - before)

    def taken(exchange: Any, event: Any) -> Any:
        if isinstance(event, e.PushSettled):
            exchange.__dict__.setdefault("settled_own", []).append((exchange.worker, exchange.epoch, event.clock))
        return take(exchange, event)

    def pushed(above: ParentPush, *arguments: Any, **more: Any) -> Any:
        effects = push(above, *arguments, **more)
        exchange, replica = above.seat.exchange, above.seat.replica
        clock, begin, end = exchange.clock - 1, replica.begin, replica.end
        given, values = checksum(exchange.own[clock], begin, end - begin)
        above.__dict__.setdefault("given", {})[exchange.worker, exchange.epoch, clock] = given
        above.__dict__["sent"] = above.__dict__.get("sent", 0.0) + values.astype(np.float64)
        return effects

    def planned_went_on(planned: ModelShard, before: ModelShard) -> None:
        planned_goes_on(planned, before)
        planned.store.__dict__ |= {name: vars(before.store)[name] for name in KEPT & vars(before.store).keys()}

    def pushing_went_on(above: ParentPush, *arguments: Any) -> Any:
        settled = above.seat.exchange.__dict__.get("settled_own", [])
        effects = pushing_goes_on(above, *arguments)
        above.seat.exchange.__dict__["settled_own"] = settled
        return effects

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelShard, "go_on", planned_went_on)
        patch.setattr(ParentPush, "go_on", pushing_went_on)
        patch.setattr(Store, "apply", applied)
        patch.setattr(Exchange, "take", taken)
        patch.setattr(ParentPush, "_push", pushed)
        yield


class Story:
    """The story of one node: what its children were told, and what its servers have done in the end.

    Until then what is here may be lost, and come again."""

    def __init__(self, node: House) -> None:
        self.node = self.house = node
        self.min_clock = 0
        self.acknowledged: list[tuple[int, int, int, int]] = []  # shard, worker, epoch, clock: to workers
        self.values: dict[tuple[int, int, int, int], int] = {}  # of the same, a checksum
        self.shown: dict[tuple[int, int], int] = {}  # shard, publication: as a child has it
        self.models: set[tuple[int, int]] = set()  # shard, checksum: last models that left
        self.starts: dict[str, set[tuple[int, int]]] = {}  # of each worker, and of the node above

    def started_at(self, who: str, place: tuple[int, int]) -> None:
        places = self.starts.setdefault(who, set())
        places.add(place)
        if len(places) > 1:
            raise Violation(f"{who} has joined again: {sorted(places)}")

    def worker_started(self, worker: Worker) -> None:
        self.started_at(worker.name, (worker.worker, worker.epoch))

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        for shard, replica in enumerate(worker.replicas):
            mine = values[replica.begin : replica.end].astype(np.float32)
            self.values[shard, worker.worker, worker.epoch, clock] = zlib.crc32(mine.tobytes())

    def settled(self, worker: Worker, event: e.PushSettled) -> None:
        self.acknowledged.append((event.shard, worker.worker, worker.epoch, event.clock))

    def state_arrived(self, worker: Worker, shard: int, publication: int, pulled: FloatArray) -> None:
        self.shows(shard, publication, pulled, worker.name)

    def shows(self, shard: int, publication: int, pulled: FloatArray, who: str) -> None:
        found = zlib.crc32(pulled.tobytes())
        if self.shown.setdefault((shard, publication), found) != found:
            raise Violation(f"publication {publication} of {self.node.name}, shard {shard}, is another one in {who}")

    def moments_arrived(self, worker: Worker, shard: int, clock: int, payload: bytes) -> None:
        raise Violation(f"{worker.name} has the state of an optimizer, and no run of a tree has a start")

    def model_arrived(self, worker: Worker, shard: int, model: bytes) -> None:
        story = self.house.pairs.root.checker
        assert isinstance(story, Story)
        if (shard, zlib.crc32(model)) not in story.models:
            raise Violation(f"{worker.name} ends with a model that the root has never sent")

    def computes(self, worker: Worker, clock: int, min_clocks: Sequence[int]) -> None: ...
    def leaves(self, worker: Worker) -> None: ...
    def pulled(self, shard: int, pull: m.Pull) -> None: ...
    def heard(self, process: Process, message: m.Message) -> None: ...
    def server_started(self, process: Process) -> None: ...
    def replayed(self, process: Process) -> None: ...
    def follow(self, process: Process) -> None: ...
    def saved(self, process: Process, clock: int) -> None: ...
    def loaded(self, process: Process, clock: int) -> None: ...

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        if process.coordinator is not None:
            self.min_clock = process.coordinator.min_clock
        above, parent = process.shard.parent_slot.link, self.house.parent
        if not isinstance(above, ParentPush) or parent is None:
            return
        story, exchange = parent.checker, above.seat.exchange
        assert isinstance(story, Story)
        self.started_at(self.node.name, (above.seat.place.worker, above.seat.place.epoch))
        if exchange.publication >= 0:
            story.shows(process.index, exchange.publication, above.seat.replica.pulled, process.port)

    def end(self) -> None:
        """Check the server that serves in the end."""
        for index, process in sorted(self.house.servers.items()):
            planned = process.shard.model_shard
            if planned is None:
                raise Violation(f"{process.port} has no model in the end")
            folded: list[tuple[int, int, int, int]] = planned.store.__dict__.get("folded", [])
            newest: dict[tuple[int, int], int] = {}
            for worker, epoch, clock, _ in folded:
                before = newest.get((worker, epoch), clock - 1)
                if clock != before + 1:
                    raise Violation(f"{process.port} folds update {clock} of {worker, epoch} after {before}")
                newest[worker, epoch] = clock
            self._nothing_lost(index, {row[:3]: row[3] for row in folded})
            if above := self.pushing(index):
                self._conserved(process, planned.store, above)

    def pushing(self, index: int) -> ParentPush | None:
        """What this shard has above it."""
        planned = self.house.servers[index].shard.model_shard
        assert planned is not None
        return planned.parent_slot.link if isinstance(planned.parent_slot.link, ParentPush) else None

    def _nothing_lost(self, index: int, folded: dict[tuple[int, int, int], int]) -> None:
        rows = [row[1:] for row in self.acknowledged if row[0] == index]
        given = {row[1:]: value for row, value in self.values.items() if row[0] == index}
        for cluster in self.house.pairs.clusters if self.house.parent is None else ():
            if above := cluster.story.pushing(index):
                given |= above.__dict__.get("given", {})
                rows += above.seat.exchange.__dict__.get("settled_own", [])
        name = f"shard {index} of {self.node.name}"
        for row in rows:
            if row not in folded:
                raise Violation(f"update {row} was acknowledged, and {name} lacks it")
        for row, value in folded.items():
            if given.get(row) != value:
                raise Violation(f"{name} has folded an update {row} that its child has not given")

    def _conserved(self, process: Process, store: Store, above: ParentPush) -> None:
        kept = store.x.astype(np.float64) - (above.seat.start if above.kept.start is not None else store.x)
        for begin, end, residual in above.seat.replica.residuals:
            kept[begin - store.begin : end - store.begin] += residual
        sent, gathered = above.__dict__.get("sent", 0.0), store.__dict__.get("gathered", 0.0)
        if not np.allclose(sent + kept, gathered, CLOSE, CLOSE):
            raise Violation(
                f"{process.port} has sent {sent} and keeps {kept}; its children's updates come to {gathered}"
            )


class Roamer(Worker):
    """A worker that turns to a standby."""

    def __init__(self, run: House, index: int, life: int) -> None:
        self.shards = [run.sites[0].port(shard) for shard in range(run.settings.shards)]
        super().__init__(run, index, life)

    def server_at(self, shard: int) -> str:
        return self.shards[shard]

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        standby = self.member.views.standby
        if source in self.shards:
            super().handle(f"s{self.shards.index(source)}", message, now_ns)
        elif standby and source == where(standby):
            self._apply(self.member.receive_standby(message, now_ns))
            self._go()

    def disconnected(self, target: str, now_ns: int) -> None:
        if target in self.shards:
            self.member.cut(self.shards.index(target), now_ns)

    def _apply(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case e.SendToPeer(address, message):
                    self.run.send(self.name, where(address), message)
                case e.ServerChanged(address, ports):
                    host = address.rpartition(":")[0]
                    self.shards = [where(f"{host}:{port}") for port in ports]
                    self.run.sim.struck["turned"] += 1
                case _:
                    super()._apply([effect])


class Site:
    """One ps-serve of a node: the first server, or a standby of the one at `follows`."""

    def __init__(self, node: House, which: int, follows: Site | None = None) -> None:
        self.node, self.which, self.follows = node, which, follows
        self.lost = False
        self.shards: dict[int, Serving | Second] = {}
        self.out: dict[int, int] = {}  # of each shard, the newest event that something has left of
        self.begins: dict[int, int] = {}  # the last event of the one before, where a shard serves in its place

    def address(self, index: int) -> str:
        return f"{self.node.name}.{self.which}:{1 + index}"

    def port(self, index: int) -> str:
        return where(self.address(index))

    def stands_by(self) -> bool:
        shards = [self.shards.get(index) for index in range(self.node.settings.shards)]
        return not self.lost and all(isinstance(shard, Second) and shard.standby.stands_by for shard in shards)

    def lets_out(self, index: int, event: int) -> None:
        self.out[index] = max(self.out.get(index, 0), event)
        for after in self.node.sites:
            if after.follows is self and index in after.begins:
                self.check(index, after)

    def check(self, index: int, after: Site) -> None:
        if self.out.get(index, 0) > after.begins[index]:
            raise Violation(
                f"{self.port(index)} has told of its event {self.out[index]}, and {after.port(index)} serves in its place "
                f"from event {after.begins[index]} on"
            )

    def takes_over(self, second: Second) -> None:
        assert self.follows is not None
        index, node = second.index, self.node
        self.begins[index] = second.server.happened
        self.follows.check(index, self)
        node.serving = self
        if not index:
            node.sim.struck["took over"] += 1
        self.shards[index] = node.servers[index] = Serving(self, index, second)

    def end(self) -> None:
        """Its machine is lost, or it has been told that another one serves."""
        self.lost = True
        for shard in self.shards.values():
            shard.held.clear()
            if self.node.sim.alive(shard.up):
                self.node.sim.crash(shard.port, shard.up)


class Serving(Process):
    """A server process that may have a standby. `second`: that it was itself, until now."""

    def __init__(self, site: Site, index: int, second: Second | None = None) -> None:
        self.site, self.second, self.house = site, second, site.node
        self.run, self.index, self.life = site.node, index, site.node.life
        self.port, self.up, self.first_port = site.port(index), f"{site.port(index)}.0", site.port(0)
        self.held: deque[tuple[int, ServerEffect]] = deque()
        self._serve(second.server if second is not None else self._machine())
        self._begin()

    def _serve(self, server: Server) -> None:
        super()._serve(server)
        lost_ns = standby_lost_ns(self.run.settings.lease)
        siblings, before = PeerShards(self.run.settings.shards, lost_ns), ""
        if self.second is not None:
            siblings, before = self.second.standby.siblings, self.second.standby.original
        freeze = lambda: frozen(server, assume_lent)  # noqa: E731
        self.original = ReplicationPrimary(self.index, server, 1 + self.index, lost_ns, freeze, siblings, 0, before)

    def late_ns(self) -> int:
        return self.run.sim.now_ns - self.server.now_ns if self.second is not None else super().late_ns()

    def first(self) -> None:
        second, self.second = self.second, None
        if second is None:
            return super().first()
        self._at_once(second.serves)
        self._go_on(second.replay)

    # Where others are.

    @property
    def parent(self) -> str:
        return self.house.parent.sites[0].address(0) if self.house.parent is not None else ""

    @property
    def above(self) -> str:
        return where(self.server.above) if self.server.above else ""

    def kind(self, source: str) -> EventKind:
        beside = self.server.beside
        return EventKind.BESIDE if beside and source == where(beside) else super().kind(source)

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        kind, parent = self.kind(source), self.house.parent
        if kind is EventKind.BELOW and parent is not None and source in parent.ports:
            return  # it was hung up on, or has not been turned to
        if (
            source in self.house.ports
            and source != self.first_port
            and not isinstance(message, (m.ReplicationFollow, m.FailoverNotice))
        ):
            return  # of another server of this node, which would find nobody here
        if kind is EventKind.COORDINATOR and isinstance(message, m.FailoverNotice):
            self._at_once(self.original.hear_view(message))
        elif kind is not EventKind.BELOW or not isinstance(message, m.OF_COPIES):
            super().handle(source, message, now_ns)
        else:
            self._at_once(self.original.receive(peer_of(source), message, self.now_ns))

    def unreached(self, target: str, now_ns: int) -> None:
        parent = self.house.parent
        if target not in self.house.ports and (parent is None or target not in parent.ports):
            super().unreached(target, now_ns)

    def disconnected(self, target: str, now_ns: int) -> None:
        if peer_of(target) == self.original.feed.peer:
            self.original.feed.cut(self.now_ns)
        else:
            self.unreached(target, now_ns)

    def tick(self, now_ns: int) -> None:
        super().tick(now_ns)
        if self.run.sim.alive(self.up):
            self._at_once(self.original.tick(self.now_ns))

    # Events and effects.

    def _happen(self, event: MachineEvent, source: str = "") -> None:
        if not self.run.sim.alive(self.up):
            return  # it was killed in the event before this one
        if self.kills and not self.house.may_be_struck:
            self.kills[-1] = replace(
                self.kills[-1], event=max(self.kills[-1].event, self.events + 2)
            )  # so not in this one
        frames = [bytes(frame) for frame in encode(event.message)] if event.message is not None else []
        self._at_once(self.original.note(event, frames))
        super()._happen(event, source)
        self._release()

    def _again(self, event: MachineEvent) -> None:
        self.original.again(event)

    def _carry_out(self, effects: Sequence[ServerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, (e.Log, e.WriteCheckpoint, e.LoadCheckpoint)):
                super()._carry_out([effect])
            elif self.leave:
                self.leave -= 1
                self.held.append((self.server.happened, effect))
        self._release()

    def _release(self) -> None:
        original, held = self.original, self.held
        while held and (not original.holds or held[0][0] <= original.feed.acked):
            number, effect = held.popleft()
            self.site.lets_out(self.index, number)
            self._let_out(effect)

    def _let_out(self, effect: ServerEffect) -> None:
        node = self.house
        match effect:
            case e.Send(int(), message):
                if self.above:
                    node.send(self.port, self.above, message)
            case e.Send(peer, message) if peer == COORDINATOR:
                node.send(self.up, self.first_port, message)
            case e.Send(bytes(peer), message):
                if isinstance(message, m.State) and message.request and node.parent is None:
                    planned = self.shard.model_shard
                    assert planned is not None
                    node.story.models.add((self.index, zlib.crc32(answered(message, planned.store))))
                node.send(self.port, source_of(peer), message)
            case e.SendToPeer(address, message):
                if not isinstance(message, m.FailoverVote) or address == self.server.beside:
                    node.send(self.port, where(address), message)
            case e.StopProcess():
                node.stopped(self, effect)

    def _at_once(self, effects: Iterable[e.CopyEffect]) -> None:
        for effect in effects:
            match effect:
                case e.StartServing(view, standby):
                    before = self.original.before if self.original.before != self.server.before else ""
                    self._happen(
                        MachineEvent(EventKind.VIEW, self.now_ns, values=(view, standby, 1 + self.index, before))
                    )
                    if not standby:
                        self.original.feed.forget()
                        self.run.sim.struck["alone"] += not self.index and not before
                case e.StopProcess(_, text):
                    self.run.sim.note(f"{self.port} stops: {text}")
                    self.run.sim.struck["deposed"] += not self.site.lost
                    self.site.end()
                case e.Log():
                    pass
                case _:
                    self._let_out(effect)
        self._release()

    def _die(self, kill: Kill) -> None:
        self.held.clear()
        self.house.settles(kill.lasts_ns + SETTLED_NS)
        super()._die(kill)

    def _revive(self) -> None:
        if not self.site.lost:
            super()._revive()


class Second:
    """A shard that stands by, where ps/process/standby_runner.py stands."""

    def __init__(self, site: Site, index: int) -> None:
        assert site.follows is not None
        self.site, self.node, self.index = site, site.node, index
        self.port, self.up = site.port(index), f"{site.port(index)}.0"
        self.serves: list[e.StartServing] = []
        self.held = deque[tuple[int, ServerEffect]]()  # of nobody
        self.replay: JournalReplay
        self.stale = False
        lost_ns = standby_lost_ns(self.node.settings.lease)
        siblings = PeerShards(self.node.settings.shards, lost_ns)
        original, address = site.follows.address(index), site.address(0)
        self.standby = Standby(index, original, address, 1 + index, lost_ns, siblings, self._thaw, self._again)
        self.standby.heard_ns = self.node.sim.now_ns
        self.node.sim.start(self, self.port, self.up)

    @property
    def server(self) -> Server:
        return self.replay.server

    def _thaw(self, packed: MachineParts) -> Server:
        self.replay = JournalReplay(thaw(packed, assume_lent), self._load)
        return self.server

    def _load(self, clock: int) -> None:
        self.stale = True  # as of a checkpoint that the other machine has

    def _again(self, event: MachineEvent) -> None:
        self.replay.again(event)
        if self.stale:
            self.stale = False
            self.standby.begin_anew()

    def handle(self, source: str, message: m.Message, now_ns: int) -> None:
        standby = self.standby
        match message:
            case m.ReplicationEntry() if source == where(standby.original):
                standby.receive(message, now_ns)
                self._carry_out(standby.acknowledge(now_ns))
            case m.FailoverNotice() if source == self.site.port(0):
                self._carry_out(standby.hear_view(message))
            case m.FailoverVote():
                self._carry_out(standby.vote(peer_of(source), message, now_ns))
            case m.ReplicationProgress():
                standby.siblings.hear(peer_of(source), message, now_ns)

    def disconnected(self, target: str, now_ns: int) -> None:
        if target == where(self.standby.original):
            self.standby.cut(now_ns)

    def tick(self, now_ns: int) -> None:
        self._carry_out([*self.standby.acknowledge(now_ns), *self.standby.tick(now_ns)])

    def _carry_out(self, effects: Iterable[e.CopyEffect]) -> None:
        for effect in effects:
            match effect:
                case e.Send(peer, message) if peer == COORDINATOR:
                    self.node.send(self.up, self.site.port(0), message)
                case e.Send(bytes(peer), message):
                    self.node.send(self.port, source_of(peer), message)
                case e.SendToPeer(address, message):
                    self.node.send(self.port, where(address), message)
                case e.StartServing():
                    self.serves.append(effect)
        if self.serves and self.site.shards[self.index] is self:
            self.site.takes_over(self)


class House(Node):
    """One cluster of the tree, or its root, whose server may have a standby."""

    checker: Story  # type: ignore[assignment]
    parent: House | None
    life = 0  # of its first server; 1: one that goes on with checkpoints

    def __init__(self, tree: Tree, name: str, settings: Any, parent: Node | None, road: Road | None) -> None:
        super().__init__(tree, name, settings, parent, road)
        assert isinstance(tree, Pairs)
        self.pairs = tree
        self.checker = self.story = Story(self)
        self.sites = [Site(self, 0)]
        self.serving = self.sites[0]
        self.cut_ns = self.alone_ns = 0  # until then a cut or a kill is at work; its standby is missed
        self.mended_ns = 0  # by then all is mended of cuts that overlap: together they are no longer than one
        if name in tree.pair.paired:
            self.sim.at(self.sim.random.between(0, NS), self._stand_by)

    @property
    def ports(self) -> set[str]:
        """The ports of all of its servers so far."""
        return {site.port(index) for site in self.sites for index in range(self.settings.shards)}

    def _serve(self, index: int) -> None:
        self.serving.shards[index] = self.servers[index] = Serving(self.serving, index)

    def _stand_by(self) -> None:
        """Have a standby for who serves, from now on."""
        there = [site for site in self.sites if site.follows is self.serving and not site.lost]
        if not there and len(self.servers) == self.settings.shards and not self.serving.lost and not self.over:
            site = Site(self, len(self.sites), self.serving)
            self.sites.append(site)
            for index in range(self.settings.shards):
                site.shards[index] = Second(site, index)
        self.sim.at(self.sim.now_ns + self.sim.random.between(NS, 3 * NS), self._stand_by)

    def work(self, index: int, life: int) -> None:
        self._join([f"{self.prefix}w{index}.{life}"], self, self.tree.case.roads[index])
        self.workers[index] = Roamer(self, index, life)

    def end_if_over(self) -> None:
        for site in self.sites if self.over else ():
            site.end()

    def stopped(self, process: Process, stop: e.StopProcess) -> None:
        """A server process here ends."""
        self.over = True

    def worker_failed(self, worker: Worker, failed: e.MemberFailed) -> None:
        raise Violation(f"{worker.name} fails, though somebody serves: {failed.text}")

    # Faults.

    def strike(self, strike: Strike) -> None:
        if self.over:
            return
        after = [site for site in self.sites if site.follows is self.serving and not site.lost]
        now_ns = self.sim.now_ns
        if not self.may_be_struck:
            self.sim.at(now_ns + AGAIN_NS, self.strike, strike)
        elif strike.what in ("cut", "fenced") and self._may_be_cut():
            self._cut(strike, after)
        elif strike.what == "standby" and after and now_ns > self.cut_ns and not self.serving.lost:
            self.sim.struck["standby lost"] += 1
            self.alone_ns = now_ns + ALONE_NS
            self.settles(ALONE_NS)
            after[0].end()
        elif strike.what == "machine" and after and self._safe(after[0]):
            self.sim.struck[f"{'root' if self.parent is None else 'cluster'} lost"] += 1
            self.serving.end()
            self.settles(int(LEASE_S * NS))
        else:
            self.sim.at(now_ns + AGAIN_NS, self.strike, strike)

    @property
    def may_be_struck(self) -> bool:
        """No standby of it is missed, and the server above hears it: who has a fault and is not heard joins again."""
        now_ns, server = self.sim.now_ns, self.serving.shards.get(0)
        missed = isinstance(server, Serving) and server.original.missed_ns and now_ns > self.mended_ns
        return not missed and now_ns > self.alone_ns and (self.parent is None or now_ns > self.parent.mended_ns)

    def settles(self, lasts_ns: int) -> None:
        """Until then most faults wait, here and of the server above."""
        for node in filter(None, (self, self.parent)):
            node.cut_ns = max(node.cut_ns, self.sim.now_ns + lasts_ns)

    @property
    def machine(self) -> Server:
        """The machine of process 0: of whoever serves, or is about to."""
        if self.serving.lost:
            after = next(site for site in self.sites if site.follows is self.serving and site.stands_by())
            return after.shards[0].server
        return self.servers[0].server

    def _safe(self, standby: Site) -> bool:
        """It may take over: nothing else has failed, it has all, and all members know it."""
        now_ns, server = self.sim.now_ns, self.serving.shards[0]
        if self.serving.lost or not isinstance(server, Serving) or server.original.missed_ns:
            return False  # who has voted for it may not vote for the standby
        if server.server.standby != standby.address(0):
            return False  # it has gone on alone
        if now_ns < self.cut_ns or not standby.stands_by() or server.coordinator is None or server.coordinator.over:
            return False
        if not self._all_know(standby.address(0)):
            return False
        alive = any(not worker.ended for node in (self, *self.pairs.clusters) for worker in node.workers.values())
        return alive and (self.parent is None or self._is_known_above())

    def _all_know(self, standby: str) -> bool:
        """All members: who does not is left behind by those that turn to it."""
        for worker in self.workers.values():
            ready = worker.member.phase in (MemberPhase.RUNNING, MemberPhase.LEAVING)
            if not worker.ended and not (ready and self._knows(worker.member, standby)):
                return False
        for cluster in self.pairs.clusters if self.parent is None else ():
            above = cluster.machine.membership
            if not cluster.over and (above is None or not self._knows(above.member, standby)):
                return False
        return True

    def _knows(self, member: Member, standby: str) -> bool:
        """It has voted for nobody in a later view: that would be one fault more."""
        return member.views.standby == standby and member.views.view == self.machine.view

    def _is_known_above(self) -> bool:
        """That it has a standby, which has most of a lease to say a word there."""
        assert self.parent is not None
        above, mine = self.parent.machine.coordinator, self.machine.membership
        seat = above.seats.get(mine.member.worker) if above is not None and mine is not None else None
        if seat is None or not seat.copied or self.parent.machine.now_ns - seat.seen_ns > HEARD_NS:
            return False
        return any(not worker.ended for worker in self.workers.values())

    def _may_be_cut(self) -> bool:
        """Nothing else is wrong but what the last cut has done, and who stands by is known."""
        server = self.serving.shards[0]
        if self.serving.lost or not isinstance(server, Serving) or self.mended_ns < self.sim.now_ns < self.cut_ns:
            return False
        return self.sim.now_ns < self.mended_ns or not server.server.standby or self._all_know(server.server.standby)

    def _cut(self, strike: Strike, after: Sequence[Site]) -> None:
        """One way or both, between this server and its standby, its members, or some of all."""
        self.sim.struck["cuts"] += 1
        random, now_ns, shards = self.sim.random, self.sim.now_ns, range(self.settings.shards)
        if now_ns >= self.mended_ns:
            self.mended_ns = now_ns + max(CUT_NS[1], strike.lasts_ns)
        until_ns = min(now_ns + strike.lasts_ns, self.mended_ns)
        self.settles(until_ns - now_ns + SETTLED_NS)
        standby = [site.port(index) for site in after for index in shards]
        members = [worker.name for worker in self.workers.values()]
        members += [port for each in self.pairs.clusters if self.parent is None for port in sorted(each.ports)]
        some = [each for each in standby + members if random.chance(0.5)]
        away = [standby, members, standby + members, some][2 if strike.what == "fenced" else random.between(0, 3)]
        resets = random.chance(
            0.3
        )  # whatever is between them ends the connections, but those of members are none to us
        for other in away:
            way = 2 if strike.what == "fenced" else random.between(0, 2)
            for index in shards:
                if resets:
                    self.sim.at(now_ns + AGAIN_NS, self.sim.disconnect, other, self.serving.port(index))
                    if other in standby:
                        self.sim.at(now_ns + AGAIN_NS, self.sim.disconnect, self.serving.port(index), other)
                if way != 1:
                    self.sim.cut_way(self.serving.port(index), other, until_ns)
                if way != 2:
                    self.sim.cut_way(other, self.serving.port(index), until_ns)


class Pairs(Tree):
    """One case, from the first start to the end of everyone."""

    node = House
    clusters: list[House]  # type: ignore[assignment]

    def __init__(self, pair: PairCase, kit: Kit | None = None, trace: Trace | None = None) -> None:
        self.pair = pair
        super().__init__(pair.tree, kit, trace)
        for strike in pair.strikes:
            node = next(node for node in self.nodes if node.name == strike.node)
            assert isinstance(node, House)
            self.sim.at(strike.at_ns, node.strike, strike)

    @property
    def over(self) -> bool:
        return self.root.over

    def run(self) -> Pairs:
        """Run to the end. Raises Violation with the seed in it."""
        try:
            with recorded():
                while not self.over:
                    if not self.sim.step() or self.sim.now_ns > END_NS:
                        raise Violation(f"the run has not ended; {self.whereabouts()}")
                    self.events += 1
                for node in self.nodes:
                    assert isinstance(node, House)
                    node.story.end()
        except (AssertionError, NarrowsError, KeyError, Violation) as error:
            text = f"seed {self.case.seed} at {self.sim.now_ns / NS:.4f} s: {type(error).__name__}: {error}"
            raise Violation(text) from error
        return self
