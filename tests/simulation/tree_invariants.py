"""The invariants of a tree of clusters, one `TrialLevel` for each cluster and the root, kept as the events go by.

    staleness     a state for clock c is of a min_clock >= c - s, on every level; a cluster shows its workers a clock only
                  once its update has left and the next one may be computed; min_clock is never ahead of a live child
    exactly once  the updates of one child are folded in their order, each once, and only after it was given
    conservation  what a cluster sends up plus its residual is what its children's updates came to, and x is what the log
                  gives; the model that a worker ends with is one that the root has sent
    the end       a root sends one last model to all its children
    sets          every shard closes a clock over the set that the coordinator closed; the weights in it sum to 1
    publications  of one number are bit-identical on a shard and in every child that pulled them
    progress      no wait for the root's next clock is longer than leases, the closed form and the repeats explain

An event costs what it is about: one child's counters and the few keys of one update. `whole` counts all of it anew from
what the machines hold. Sums are in float64, machines add in float32: they are compared to `CLOSE`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from kit.gain_reference import TrueGain

from narrows.compression.codecs import add
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import ServerEffect
from narrows.protocols.member.member import MemberPhase
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.replication.events import MachineEvent
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.store.changes import (
    Change,
    Fold,
    LoadArrays,
    OuterStep,
    Publish,
    Rebase,
    SetFirstWeights,
    Step,
    Terms,
    Update,
)
from narrows.ps.store.update_gain import GONE
from simulation.mirror import RATE, FloatArray, Violation

if TYPE_CHECKING:
    from simulation.actors import Process, Worker
    from simulation.trees import Node

CLOSE = 1e-3  # absolute and relative: some hundred float32 sums of values below a few hundred
Child = tuple[int, int]  # worker, epoch
Values = npt.NDArray[np.float64]


def bound_of(settings: Settings) -> int | None:
    return None if settings.sync == "async" else settings.staleness


class Front:
    """How far each live child is, and how many are at each clock: the lowest costs nothing to know."""

    def __init__(self) -> None:
        self.at: dict[Child, int] = {}
        self.counts: Counter[int] = Counter()

    def enter(self, child: Child, clock: int) -> None:
        self.at[child] = clock
        self.counts[clock] += 1

    def leave(self, child: Child) -> None:
        clock = self.at.pop(child, None)
        if clock is not None:
            self.counts[clock] -= 1

    def move(self, child: Child, clock: int) -> None:
        was = self.at.get(child)
        if was is not None and clock > was:
            self.counts[was] -= 1
            self.counts[clock] += 1
            self.at[child] = clock

    def someone_in(self, begin: int, end: int) -> bool:
        return any(self.counts[clock] for clock in range(begin, end))

    def recount(self) -> bool:
        """Whether the counts are those of the clocks."""
        return Counter(self.at.values()) == +self.counts


class Level:
    """One cluster, or the root, as its children and its own server processes tell it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.mode = node.settings.mode()
        shards = node.settings.shards
        self.started: dict[Child, int] = {}  # the clock that each begins from
        self.given: dict[tuple[int, int, int, int], Values] = {}  # shard, worker, epoch, clock
        self.made: dict[tuple[int, Child], int] = {}  # shard, child: updates of it that were given
        self.pulls: dict[tuple[int, int, int, int], int] = {}  # shard, worker, epoch, request -> clock
        self.follows: dict[tuple[int, int, int], m.Follow] = {}  # shard, worker, epoch: the newest that has come
        self.sent = [Front() for _ in range(shards)]  # updates that a live child has sent
        self.taken = [Front() for _ in range(shards)]  # and those that the shard has acknowledged
        self.published: dict[tuple[int, int], int] = {}  # shard, number: checksum
        self.masters: list[set[int]] = [set() for _ in range(shards)]  # checksums of the last models sent
        self.mirrors: dict[int, Mirror] = {}
        self.epoch = self.min_clock = 0
        self.done: set[Child] = set()  # wait for the last model, and are waited for by nobody
        self.holds: dict[tuple[int, str], tuple[int, int]] = {}  # shard, worker: publication held, checksum

    # Events of children. A worker tells them itself, a cluster by its mirrors and processes.

    def child_started(self, child: Child, clock: int) -> None:
        self.started[child] = clock

    def child_gave(self, shard: int, child: Child, clock: int, values: Values) -> None:
        self.given[shard, *child, clock] = values
        self.made[shard, child] = clock + 1
        self.sent[shard].move(child, clock + 1)

    def child_holds(self, shard: int, publication: int, checksum: int, who: str) -> None:
        if self.published.get((shard, publication)) != checksum:
            raise Violation(f"publication {publication} of {self.node.prefix}s{shard} is another one in {who}")
        self.holds[shard, who] = (publication, checksum)

    def child_asks(self, shard: int, pull: m.Pull) -> None:
        child = (pull.worker, pull.epoch)
        self.pulls[shard, *child, pull.request] = pull.clock
        self.done.add(child)
        for front in (*self.sent, *self.taken):
            front.leave(child)

    def worker_started(self, worker: Worker) -> None:
        self.child_started((worker.worker, worker.epoch), worker.clock)

    def computes(self, worker: Worker, clock: int, min_clocks: Sequence[int]) -> None:
        bound = bound_of(worker.settings)
        if bound is not None and clock > min(min_clocks) + bound:
            raise Violation(
                f"staleness: {worker.name} computes with clock {clock} on states of {min_clocks}, s = {bound}"
            )

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        for shard, replica in enumerate(worker.replicas):
            mine = values[replica.begin : replica.end].astype(np.float64)
            self.child_gave(shard, (worker.worker, worker.epoch), clock, mine)

    def heard(self, process: Process, message: m.Message) -> None:
        if isinstance(message, m.Follow):
            who = (process.index, message.worker, message.epoch)
            before = self.follows.get(who)
            if before is None or (message.clock >= before.clock and message.have >= before.have):
                self.follows[who] = message

    def pulled(self, shard: int, pull: m.Pull) -> None:
        self.child_asks(shard, pull)

    def leaves(self, worker: Worker) -> None:
        """That all of its updates are in the model is looked at where its shards' counters are."""

    def settled(self, worker: Worker, event: e.PushSettled) -> None:
        mirror, child = self.mirrors[event.shard], (worker.worker, worker.epoch)
        if event.clock >= mirror.folded.get(child, 0):
            raise Violation(f"update {event.clock} of {worker.name} was acknowledged and is not in {mirror.name}")

    def state_arrived(self, worker: Worker, shard: int, publication: int, pulled: FloatArray) -> None:
        self.child_holds(shard, publication, zlib.crc32(pulled.tobytes()), worker.name)

    def model_arrived(self, worker: Worker, shard: int, model: bytes) -> None:
        root = self.node.tree.root.checker
        if zlib.crc32(model) not in root.masters[shard]:
            raise Violation(f"{worker.name} ends with a model that the root has never sent")

    # Events of servers.

    def server_started(self, process: Process) -> None:
        pass

    def replayed(self, process: Process) -> None:
        """The mirror of the killed one goes on with the next."""
        planned = process.shard.model_shard
        if process.index in self.mirrors:
            assert planned is not None, f"{process.port} has forgotten its model"
            self.mirrors[process.index].adopt(planned)

    def follow(self, process: Process) -> None:
        pass  # the mirrors follow at once

    def saved(self, process: Process, clock: int) -> None:
        pass

    def loaded(self, process: Process, clock: int) -> None:
        pass

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        """After every event of a server, its effects carried out."""
        index, planned = process.index, process.shard.model_shard
        mirror = self.mirrors.get(index)
        if planned is not None and (mirror is None or mirror.store is not planned.store):
            mirror = self.mirrors[index] = Mirror(self, process, planned)
        if mirror is not None:
            mirror.follow_above()
        sent = [effect.message for effect in effects if isinstance(effect, e.Send)]
        for message in sent:
            if isinstance(message, m.PushAck):
                self._on_ack(index, message)
        if process.coordinator is not None:
            self._decided(process.coordinator)
        for message in sent:
            if isinstance(message, m.State):
                self._on_state(index, message)
            elif isinstance(message, m.Pull) and self.node.parent is not None:
                self.node.parent.checker.child_asks(index, message)
        if planned is not None and isinstance(planned.above, ParentPush):
            self._above(process, planned.above)

    def _on_state(self, shard: int, state: m.State) -> None:
        who, master = (shard, state.worker, state.epoch), state.request > 0
        follow = self.follows.get(who)
        clock = self.pulls[*who, state.request] if master else follow.clock if follow is not None else -1
        where = f"the state of {self.node.prefix}s{shard} for clock {clock} of child {state.worker}"
        if state.min_clock > self.min_clock:
            raise Violation(f"{where} is ahead of the coordinator")
        bound = 0 if master else bound_of(self.node.servers[shard].shard.settings)
        if (master or state.whole) and bound is not None and clock > state.min_clock + bound:
            raise Violation(f"staleness: {where} is of min_clock {state.min_clock}, s = {bound}")
        if master:
            checksum, parent = zlib.crc32(state.payload), self.node.parent
            if parent is not None and checksum not in parent.checker.masters[shard]:
                raise Violation(f"{where} is the last model, and the server above has never sent it")
            if parent is None and self.masters[shard] - {checksum}:
                raise Violation(f"{where} is another last model than a child had before")
            self.masters[shard].add(checksum)

    def _on_ack(self, shard: int, ack: m.PushAck) -> None:
        child, mirror = (ack.worker, ack.epoch), self.mirrors[shard]
        if ack.status == m.PushStatus.FOLDED and ack.clock >= mirror.folded.get(child, 0):
            raise Violation(f"update {ack.clock} of {child} is acknowledged by {mirror.name} and was not folded")
        if (shard, *child, ack.clock) not in self.given:
            raise Violation(f"update {ack.clock} of {child} is acknowledged by {mirror.name} and was never given")
        self.taken[shard].move(child, ack.clock + 1)

    def _above(self, process: Process, above: ParentPush) -> None:
        """A cluster's server is a child of the level above."""
        parent, mirror, place, exchange = self.node.parent, self.mirrors[process.index], above.here, above.exchange
        assert parent is not None
        child = (place.worker, place.epoch)
        if mirror.place != child:
            mirror.place, mirror.publication = child, -1
            parent.checker.child_started(child, place.clock)
        if exchange.publication != mirror.publication:
            mirror.publication = exchange.publication
            checksum = zlib.crc32(above.replica.pulled.tobytes())
            parent.checker.child_holds(process.index, mirror.publication, checksum, process.port)

    # Decisions of the coordinator.

    def _decided(self, coordinator: Coordinator) -> None:
        if coordinator.run.epoch != self.epoch:
            self.epoch = coordinator.run.epoch
            self._members(coordinator)
        if coordinator.min_clock == self.min_clock:
            return
        was, now = self.min_clock, coordinator.min_clock
        for what, fronts in (("has not given", self.sent), ("has not sent all shards", self.taken)):
            for front in fronts:
                if front.someone_in(was, now):
                    late = [child for child, clock in front.at.items() if clock < now]
                    raise Violation(
                        f"{self.node.name}: min_clock goes from {was} to {now}, and {late[0]} {what} its updates"
                    )
        if now < was:
            raise Violation(f"{self.node.name}: min_clock goes back from {was} to {now}")
        self.min_clock = now
        self.node.tree.moved(self.node)

    def _members(self, coordinator: Coordinator) -> None:
        live = {(member.worker, member.epoch): member.start for member in coordinator.declared}
        for fronts in (self.sent, self.taken):
            for shard, front in enumerate(fronts):
                for child in [child for child in front.at if child not in live]:
                    front.leave(child)
                for child, start in live.items():
                    if child not in front.at and child not in self.done:
                        made = self.made.get((shard, child), start) if fronts is self.sent else start
                        front.enter(child, made)

    # All of it anew.

    def whole(self) -> None:
        """Compare what was kept with what the machines hold. O(all)."""
        node = self.node
        server = node.servers.get(0)
        coordinator = server.coordinator if server is not None else None
        if coordinator is None:
            return
        live = {(member.worker, member.epoch) for member in coordinator.declared}
        for front in (*self.sent, *self.taken):
            if not front.recount() or set(front.at) != live - self.done:
                raise Violation(f"{node.name}: kept are {front.at} as {+front.counts}, live are {live}")
            if min(front.at.values(), default=self.min_clock) < coordinator.min_clock:
                raise Violation(f"{node.name}: min_clock is {coordinator.min_clock}, children are at {front.at}")
        for index, mirror in self.mirrors.items():
            mirror.whole()
            folding = mirror.planned.folding
            for inbox in mirror.planned.assembler.seats.values():
                child = (inbox.worker, inbox.epoch)
                taken = self.taken[index].at.get(child, inbox.clock)
                waiting = folding.held.values() if isinstance(folding, FoldAtBarrier) else ()
                held = sum(inbox.worker in by_worker for by_worker in waiting)
                folded = mirror.folded.get(child, self.started.get(child, inbox.clock))
                if taken > inbox.clock or inbox.clock != folded + held:
                    raise Violation(
                        f"{mirror.name} is at clock {inbox.clock} of {child}: {folded} folded, {held} held, "
                        f"{taken} acknowledged"
                    )
        for worker in node.workers.values():
            here = worker.member.phase is MemberPhase.RUNNING and worker.member.epoch == worker.epoch
            if here and worker.computing and node.tree.sim.alive(worker.name):
                self.computes(worker, worker.clock, [x.min_clock for x in worker.exchanges])
        for (shard, who), (publication, checksum) in self.holds.items():
            if self.published[shard, publication] != checksum:
                raise Violation(f"{who} holds another publication {publication} of {node.prefix}s{shard}")


class Mirror:
    """One shard: what is done to its store and its uplink, done over again from what the children gave."""

    def __init__(self, level: Level, process: Process, planned: ModelShard) -> None:
        self.level, self.process, self.planned, self.store = level, process, planned, planned.store
        self.index, self.name, self.mode = process.index, process.port, level.mode
        store = self.store
        self.folded: dict[Child, int] = {}  # the clock of its next update to be folded
        self.x: Values = store.x.astype(np.float64)
        self.momentum = np.zeros(store.size)
        self.gathered = np.zeros(store.size)  # folded since the last push to the server above
        self.residual = np.zeros(store.size)  # kept back there
        self.batch: list[tuple[float, int]] = []  # weight and worker, since the last publication (barrier)
        self.above: object = None
        self.place: Child = (-1, -1)
        self.gain, self.folded_at = TrueGain(planned.plan.degree), 1.0
        self.publication = -1  # held of the shard above
        self._watch()
        if store.publication >= 0:
            self._show()

    def _watch(self) -> None:
        self.plain, self.store.apply = self.store.apply, self._apply  # type: ignore[method-assign]

    def adopt(self, planned: ModelShard) -> None:
        """Another process goes on where this shard was."""
        self.planned, self.store = planned, planned.store
        self._watch()
        self.follow_above()

    def follow_above(self) -> None:
        above, parent = self.planned.above, self.level.node.parent
        if above is self.above or not isinstance(above, ParentPush):
            return
        assert parent is not None
        self.above, push = above, above._push
        parent.checker.child_started((above.here.worker, above.here.epoch), above.here.clock)

        def pushes(*arguments: Any, **more: Any) -> Any:
            effects = push(*arguments, **more)
            self._sent_up(above)
            return effects

        above._push = pushes  # type: ignore[method-assign]

    # Changes of the store.

    def _apply(self, change: Change) -> None:
        match change:
            case SetFirstWeights():
                if self.folded:
                    raise Violation(f"{self.name} takes first weights after the first fold")
            case Fold(terms, of):
                self._fold(terms, of)
            case OuterStep(terms):
                settings, mean = self.level.node.settings, self._sum(terms)
                self.momentum = settings.outer_momentum * self.momentum + mean
                self._add(settings.outer_lr * (mean + settings.outer_momentum * self.momentum))
            case Step(terms, _, _, scale):
                self._add(-RATE * scale * self._sum(terms))
            case Rebase(before, base):
                self.x = self.x - before + base
        self.plain(change)
        match change:
            case SetFirstWeights() | LoadArrays():
                self.x = self.store.x.astype(np.float64)
                self._show()
            case Publish():
                self._publish()

    def _fold(self, terms: Terms, of: tuple[tuple[int, float], ...]) -> None:
        self.folded_at, live = self.gain.factor, {row[0] for row in self.process.shard.ledger.members}
        for (weight, update), (worker, share) in zip(terms, of, strict=True):
            given = self._once(update, weight)
            if abs(weight - share * self.folded_at) > CLOSE * weight:
                raise Violation(f"{self.name} folds a share of {share} at {weight}, and the gain is {self.folded_at}")
            self._add(weight * given)
            if worker != GONE:
                self.gain.saw(worker, live, share, given.astype(np.float32))

    def _show(self) -> None:
        number = (self.index, self.store.publication)
        checksum = zlib.crc32(self.store.p.tobytes())
        if self.level.published.setdefault(number, checksum) != checksum:
            raise Violation(f"publication {number[1]} of {self.name} is there twice, and not the same")

    def _sum(self, terms: Terms) -> Values:
        total = np.zeros(self.store.size)
        for weight, update in terms:
            total += weight * self._once(update, weight)
        return total

    def _add(self, values: Values) -> None:
        self.x += values
        self.gathered += values

    def _once(self, update: Update, weight: float) -> Values:
        """The values that the child gave for this push; it is folded after the one before, and once only."""
        push = update[0]
        assert isinstance(push, m.Push)
        child, where = (push.worker, push.epoch), f"update {push.clock} of {push.worker, push.epoch} on {self.name}"
        given = self.level.given.get((self.index, *child, push.clock))
        if given is None:
            raise Violation(f"{where} was never given")
        expected = self.folded.get(child, self.level.started[child])
        if push.clock != expected:
            raise Violation(
                f"{where} is folded {'twice' if push.clock < expected else 'too early'}, {expected} is next"
            )
        if not 0 < weight <= self.gain.factor * (1 + CLOSE):
            raise Violation(f"{where} is folded at {weight}, and the gain is {self.gain.factor}")
        self.folded[child] = push.clock + 1
        if self.mode.barrier:
            self.batch.append((weight, push.worker))
        return given

    def _publish(self) -> None:
        self._show()
        shard, above = self.process.shard, self.planned.above
        if self.mode.barrier:
            self._closed(shard.min_clock - 1)
        if not isinstance(above, ParentPush) or self.mode.bound is None or not self.planned.upward.placed(shard.ledger):
            return
        exchange = above.exchange
        owes = above.inner >= exchange.mode.local_steps
        if owes or not exchange.mode.allows(exchange.clock, exchange.min_clock):
            raise Violation(
                f"staleness: {self.name} shows clock {shard.min_clock}, {above.inner} clocks after its update "
                f"{exchange.clock - 1}, on a state of {exchange.min_clock} above"
            )

    def _closed(self, clock: int) -> None:
        coordinator = self.level.node.servers[0].coordinator
        workers, weights = [worker for _, worker in self.batch], [weight for weight, _ in self.batch]
        right = coordinator.clocks.sets.get(clock) if coordinator is not None else None
        if right is None or workers != [worker for worker, _ in right]:
            raise Violation(f"{self.name} closes clock {clock} over {workers}, the coordinator over {right}")
        if weights and abs(sum(weights) - self.folded_at) > CLOSE * self.folded_at:
            raise Violation(f"{self.name} closes clock {clock} with weights that sum to {sum(weights)}")
        self.batch = []

    # Pushes to the server above.

    def _sent_up(self, above: ParentPush) -> None:
        """Sent plus residual is what the children's updates came to since the last push."""
        parent, exchange = self.level.node.parent, above.exchange
        assert parent is not None
        clock = exchange.clock - 1
        sent = np.zeros(self.store.size, np.float32)
        for piece in exchange.own[clock]:
            add(piece, 1.0, sent, self.store.begin)
        owed = self.gathered + self.residual
        self.residual = np.zeros(self.store.size)
        for begin, end, kept in above.replica.residuals:
            self.residual[begin - self.store.begin : end - self.store.begin] = kept
        if not np.allclose(sent + self.residual, owed, CLOSE, CLOSE):
            raise Violation(
                f"{self.name} sends {sent} up and keeps {self.residual}, its children's updates come to {owed}"
            )
        self.gathered = np.zeros(self.store.size)
        child = (above.here.worker, above.here.epoch)
        parent.checker.child_gave(self.index, child, clock, sent.astype(np.float64))
        self.level.node.pushed_up(self.index)

    def whole(self) -> None:
        store, start = self.store, self.planned.above.kept.start
        if store.publication >= 0 and not np.allclose(store.x, self.x, CLOSE, CLOSE):
            raise Violation(f"{self.name} holds {store.x}, the log gives {self.x}")
        if start is not None:
            moved = store.x - start
            if not np.allclose(moved, self.gathered, CLOSE, CLOSE):
                raise Violation(f"{self.name} has moved by {moved} since its last push, the log gives {self.gathered}")
