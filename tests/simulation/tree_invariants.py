"""The invariants of a tree of clusters: those of invariants.py on each level, and what joins the levels.

`Level` is the checker of one cluster or of the root, `ClusterMirror` the mirror of one of its shards. They add:

    conservation  what a cluster sends up plus its residual is what its children's updates came to
    staleness     a cluster shows its workers a clock only once its update has left and the next one may be computed
    publications  of one number are bit-identical on a shard and in every cluster that pulled them
    the end       the model that a worker ends with is one that the root has sent
    progress      no wait for the root's next clock is longer than leases, the closed form and the repeats explain

A cluster is a child of the level above as a worker is of its cluster. Its shards give their parts of an update one by one.
What goes up is coded from differences of weights: sums of it are compared to `CLOSE`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from narrows.compression.codecs import add
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.effects import ServerEffect
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.run import Seat
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.replication.events import MachineEvent
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.store.changes import Change, Fold, LoadArrays, OuterStep, Publish, Rebase, Step
from narrows.ps.store.store import Store
from simulation.invariants import Checker
from simulation.mirror import FloatArray, Mirror, PushId, Violation

if TYPE_CHECKING:
    from simulation.actors import Process, Worker
    from simulation.trees import Node

CLOSE = 1e-3  # absolute and relative: some hundred float32 sums of values below a few hundred
Child = tuple[int, int]  # worker, epoch
Values = npt.NDArray[np.float64]


class Level(Checker):
    """One cluster, or the root, as its children and its own server processes tell it."""

    mirrors: dict[int, ClusterMirror]  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.node = node
        self.size = ModelSpec.unpacked(node.plan).size
        self.parts: dict[tuple[int, Child], int] = {}  # shard, cluster: updates of it that were given
        self.asked: dict[Child, set[int]] = {}  # shards that each has asked for the last model

    # Events of children. A worker tells them itself, a cluster by its mirrors and processes.

    def child_started(self, child: Child, clock: int) -> None:
        self.given.starts[child] = clock

    def child_gave(self, shard: int, child: Child, clock: int, values: FloatArray, samples: int) -> None:
        """One shard of a cluster gives its part of an update."""
        push = (*child, clock)
        whole, _ = self.given.pushes.setdefault(push, (np.full(self.size, np.nan, np.float32), samples))
        begin = self.mirrors[shard].store.begin
        whole[begin : begin + len(values)] = values
        self.given.parts[shard, push] = samples
        self.parts[shard, child] = clock + 1

    def child_holds(self, shard: int, child: Child, publication: int, pulled: FloatArray, who: str) -> None:
        number = (self.given.generation_of[child], shard, publication)
        if self.given.publications.get(number) != zlib.crc32(pulled.tobytes()):
            raise Violation(f"publication {publication} of {self.node.prefix}s{shard} is another one in {who}")

    def pulled(self, shard: int, pull: m.Pull) -> None:
        super().pulled(shard, pull)
        self.asked.setdefault((pull.worker, pull.epoch), set()).add(shard)

    def model_arrived(self, worker: Worker, shard: int, model: bytes) -> None:
        if not self.node.tree.root.checker.has_sent(shard, model):
            raise Violation(f"{worker.name} ends with a model that the root has never sent")

    def has_sent(self, shard: int, model: bytes) -> bool:
        """It has sent this last model."""
        return any(model == sent for (_, index), sent in self.last_models.items() if index == shard)

    # Events of servers.

    def mirror_of(self, process: Process, store: Store) -> ClusterMirror:
        return ClusterMirror(self, process, store)

    def follow(self, process: Process) -> None:
        before = self.mirrors.get(process.index)
        super().follow(process)
        after = self.mirrors.get(process.index)
        if before is not None and after is not None and after is not before:
            after.go_on(before)

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        super().server_event(process, effects, event, source)
        mirror, parent = self.mirrors.get(process.index), self.node.parent
        if mirror is None or parent is None:
            return
        mirror.follow_above()
        for effect in effects:
            if isinstance(effect, e.Send) and isinstance(effect.message, m.Pull):
                parent.checker.pulled(process.index, effect.message)
        if isinstance(mirror.planned.parent_slot.link, ParentPush):
            self._above(process, mirror.planned.parent_slot.link)

    def _on_master(self, mirror: Mirror, state: m.State, where: str) -> None:
        """A cluster hands on the last model of the server above."""
        parent = self.node.parent
        if parent is None:
            super()._on_master(mirror, state, where)
        elif not parent.checker.has_sent(mirror.index, mirror.model_of(state)):
            raise Violation(f"{where} is the last model, and the server above has never sent it")

    def _above(self, process: Process, above: ParentPush) -> None:
        """A cluster's server is a child of the level above."""
        parent, mirror, seat = self.node.parent, self.mirrors[process.index], above.seat
        place, exchange = seat.place, seat.exchange
        assert parent is not None
        child = (place.worker, place.epoch)
        if mirror.place != child:
            mirror.place, mirror.pulled = child, exchange.publication
            parent.checker.child_started(child, place.clock)
        if exchange.publication != mirror.pulled:
            mirror.pulled = exchange.publication
            parent.checker.child_holds(process.index, child, mirror.pulled, seat.replica.pulled, process.port)

    # Decisions of the coordinator.

    def closes(self) -> None:
        """A shard publishes: where it is alone, its clock is closed, folded and forgotten in one event."""
        coordinator = self.node.servers[0].coordinator
        if coordinator is None:
            return
        for clock, updates in coordinator.clocks.sets.items():
            self.given.sets.setdefault((coordinator.run.generation, clock), updates)

    def _decided(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        was = self.min_clock
        super()._decided(coordinator, effects)
        if self.min_clock < was:
            raise Violation(f"{self.node.name}: min_clock goes back from {was} to {self.min_clock}")
        if self.min_clock != was:
            self.node.tree.moved(self.node)

    def _moved(self, what: str, written_ns: int = 0) -> None:
        """The tree looks at the root's progress."""

    def _going(self, coordinator: Coordinator) -> list[Seat]:
        shards = coordinator.run.shards
        asked = {child for child, found in self.asked.items() if len(found) >= shards}
        return [seat for seat in coordinator.declared if (seat.worker, seat.epoch) not in asked]

    def _made(self, member: Seat) -> int:
        return min(self.made_by_shards((member.worker, member.epoch), member.start))

    def made_by_shards(self, child: Child, start: int) -> list[int]:
        """How many updates each shard of this child has given; a worker gives all parts of one at once."""
        made = self.made.get(child, start)
        return [self.parts.get((shard, child), made) for shard in range(self.run.settings.shards)]

    def whole(self) -> None:
        """Compare what is folded and gathered with what the machines hold."""
        for mirror in self.mirrors.values():
            mirror.whole()


class ClusterMirror(Mirror):
    """One shard, and what it owes the server above. A shard of the root owes nothing."""

    def __init__(self, level: Level, process: Process, store: Store) -> None:
        self.level, self.parent_slot = (
            level,
            process.shard.model_shard.parent_slot if process.shard.model_shard is not None else None,
        )
        self.above: ParentPush | None = None  # whose pushes it watches
        self.gathered: Values = np.zeros(store.size)  # folded since the last push to the server above
        self.residual: Values = np.zeros(store.size)  # kept back there
        self.began = 0  # the clock at which it got its weights
        self.place: Child = (-1, -1)
        self.pulled = -1  # publication of the shard above
        super().__init__(process, store, level.run.case, level.given)

    @property
    def planned(self) -> ModelShard:
        planned = self.process.shard.model_shard
        assert planned is not None
        return planned

    def adopt(self, process: Process) -> None:
        super().adopt(process)
        self.parent_slot = self.planned.parent_slot
        self.follow_above()

    def go_on(self, before: ClusterMirror) -> None:
        """The shard has another plan, and goes on with the weights and with what it owes."""
        if before.parent_slot is not self.parent_slot:
            raise Violation(f"{self.process.port} leaves its place above with the plan here")
        clock = self.process.shard.ledger.restart_clock
        self.loaded(before.saved(clock), clock)
        self.gathered, self.residual = before.gathered, before.residual
        self.place, self.pulled = before.place, before.pulled
        self.follow_above()

    def follow_above(self) -> None:
        above, parent = self.planned.parent_slot.link, self.level.node.parent
        if above is self.above or not isinstance(above, ParentPush):
            return
        assert parent is not None
        vars(above).pop("_push", None)  # another mirror has watched it
        self.above, push = above, above._push
        place = above.seat.place
        parent.checker.child_started((place.worker, place.epoch), place.clock)

        def pushes(*arguments: Any, **more: Any) -> Any:
            effects = push(*arguments, **more)
            self.level.follow(self.process)
            sent = [effect.message for effect in effects if isinstance(effect, e.Send)]
            self._sent_up(above, next(message.samples for message in sent if isinstance(message, m.Push)))
            return effects

        above._push = pushes  # type: ignore[method-assign]

    # Changes of the store.

    def _apply(self, change: Change) -> None:
        kept = change
        if isinstance(change, Rebase):  # others may write to these
            kept = replace(change, before=change.before.copy(), base=change.base.copy())
        self.plain(change)
        shown = isinstance(change, (Publish, LoadArrays))
        self.log.append((kept, zlib.crc32(self.store.p.tobytes()) if shown else 0))
        if isinstance(change, LoadArrays):
            self.began = self.planned.min_clock
        if isinstance(change, Publish):
            self.level.closes()
            self._shows()

    def _change(self, change: Change, checksum: int) -> None:
        held, before = self.held, self.held.x.astype(np.float64)
        match change:
            case Rebase():
                held.x -= change.before
                held.x += change.base
            case LoadArrays():  # the model of the run above
                held.x, held.publication, held.closed = change.arrays["x"].copy(), change.publication, self.began
                self.given.publications[self._publication()] = checksum
            case Fold() | OuterStep() | Step():
                super()._change(change, checksum)
                self.gathered = self.gathered + (held.x - before)
            case _:
                super()._change(change, checksum)

    def _once(self, push: PushId) -> PushId:
        if push in self.given.pushes and np.isnan(self._mine(self.given.pushes[push][0])).any():
            raise Violation(f"{push} on shard {self.index} was never pushed")
        return super()._once(push)

    def _shows(self) -> None:
        shard, above = self.process.shard, self.planned.parent_slot.link
        if (
            not isinstance(above, ParentPush)
            or self.mode.bound is None
            or not self.planned.parent_slot.placed(shard.ledger)
        ):
            return
        exchange = above.seat.exchange
        owes = above.seat.inner >= exchange.mode.local_steps
        if owes or not exchange.mode.allows(exchange.clock, exchange.min_clock):
            raise Violation(
                f"staleness: {self.process.port} shows clock {shard.min_clock}, {above.seat.inner} clocks after its update "
                f"{exchange.clock - 1}, on a state of {exchange.min_clock} above"
            )

    # Pushes to the server above.

    def _sent_up(self, above: ParentPush, samples: int) -> None:
        """Sent plus residual is what the children's updates came to since the last push."""
        parent, seat, begin = self.level.node.parent, above.seat, self.store.begin
        exchange = seat.exchange
        assert parent is not None
        clock = exchange.clock - 1
        sent = np.zeros(self.store.size, np.float32)
        for piece in exchange.own[clock]:
            add(piece, 1.0, sent, begin)
        owed = self.gathered + self.residual
        self.residual = np.zeros(self.store.size)
        for low, high, kept in seat.replica.residuals:
            self.residual[low - begin : high - begin] = kept
        if not np.allclose(sent + self.residual, owed, CLOSE, CLOSE):
            raise Violation(
                f"{self.process.port} sends {sent} up and keeps {self.residual}, its children's updates come to {owed}"
            )
        self.gathered = np.zeros(self.store.size)
        child = (seat.place.worker, seat.place.epoch)
        parent.checker.child_gave(self.index, child, clock, sent, samples)
        self.level.node.pushed_up(self.index)

    def whole(self) -> None:
        self._in_order()
        start = self.planned.parent_slot.kept.start
        if start is not None and not np.allclose(self.store.x - start, self.gathered, CLOSE, CLOSE):
            raise Violation(
                f"{self.process.port} has moved by {self.store.x - start} since its last push, the log gives "
                f"{self.gathered}"
            )

    def _in_order(self) -> None:
        """The next update of each child is the one after all that are folded or held."""
        folding = self.planned.folding
        for seat in self.planned.assembler.seats.values():
            child = (seat.worker, seat.epoch)
            folded = [*self.held.clocks.get(child, ())[-1:], *(push[2] for _, push in self.batch if push[:2] == child)]
            clock = max(folded) + 1 if folded else self.given.starts.get(child, seat.clock)
            waiting = folding.held.values() if isinstance(folding, FoldAtBarrier) else ()
            held = sum(seat.worker in by_worker for by_worker in waiting)
            if seat.clock != clock + held:
                raise Violation(f"{self.process.port} is at clock {seat.clock} of {child}: {clock} folded, {held} held")
