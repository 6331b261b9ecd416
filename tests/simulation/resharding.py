"""Runs whose keys are cut anew over more or fewer shards, while every fault strikes. No other run can break these:

    one owner     no key is with two shards of one generation
    at a clock    the keys are cut where every member has pushed all updates before that clock, and none from it on
    exactly once  what was folded before is not folded again under the next epoch
    nothing lost  who leaves has every update in the model that it has pushed over whichever shards
    own writes    a state that a member is sent after a move has all updates that the member had pushed before it

`MemberResharded` stands where ps/command/reshard.py stands: it starts and ends processes as the coordinator says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise

from narrows.protocols import messages as m
from narrows.protocols.config.modes import holds_apart
from narrows.protocols.effects import ServerEffect
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.resharding import ReshardPhase
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.store.store import Store
from simulation.actors import Kit, Process, Worker
from simulation.campaigns import Case, Run, Trace, case_of
from simulation.invariants import Checker
from simulation.mirror import Held, Mirror, Violation
from simulation.simulator import MS, Random

SHARDS = (2, 3, 4)  # of one alone the checker cannot see a set: it is folded and forgotten in one event


@dataclass(frozen=True, slots=True)
class Moves:
    """A run, and to how many shards its keys move, from which clock on."""

    case: Case
    moves: tuple[tuple[int, int], ...]


def moves_of(seed: int, restart: bool = False, kills: bool = False, only: str = "") -> Moves:
    """The moves of a run whose keys can move. `only`: of a kind of mode (`kind_of`); "": of any."""
    random = Random(seed * 2 + restart)
    found = (case_of(other, restart, kills) for other in count(seed * 31))
    case = next(case for case in found if only in ("", kind_of(case)))
    shards, moves = case.settings.shards, list[tuple[int, int]]()
    for clock in (random.between(1, 7), random.between(9, 15)):
        shards = [each for each in SHARDS if each != shards][random.between(0, len(SHARDS) - 2)]
        moves.append((clock, shards))
    # The checkpoint of a move is the only one that the new shards can read: torn, it may end a run.
    return Moves(replace(case, torn=0), tuple(moves))


def kind_of(case: Case) -> str:
    """The mode of a run; "quorum" and "streams" for those of `local`."""
    streams, settings = case.settings.mode().streams, case.settings
    return "quorum" if settings.quorum > 0 else "streams" if streams else settings.sync


class MoveChecker(Checker):
    """The checker of a `MemberResharded`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.before: dict[tuple[int, int], tuple[int, int]] = {}  # worker, epoch -> the same before a move
        self.looked: dict[
            int, tuple[Held, set[tuple[tuple[int, int], int]]]
        ] = {}  # shard -> who has folded which clocks
        self.cut: dict[int, tuple[int, Store]] = {}  # shard -> generation and store, as they were looked at

    def _on_generation(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        moved = [seat for seat in coordinator.declared if seat.epoch == coordinator.run.generation]
        if self.generation < 0 or not moved:
            return super()._on_generation(coordinator, effects)
        at, was, self.generation = coordinator.run.restart_clock, self.generation, coordinator.run.generation
        self._moved("a move", 2 * self.run.disk.slow_ns)  # that of the move, which waits for the one before
        for seat in moved:
            who, apart = (seat.worker, seat.before), holds_apart(coordinator.run.mode, coordinator.run.settings.quorum)
            pushed = self.made.get(who, at)
            if self.ends.get(who) == pushed < at and not apart:
                pushed = at  # it waits for the last model: clocks have closed without it
            own = seat.start if apart else at  # each worker goes on where it was, and all may be past `at`
            reached = coordinator.min_clock
            if at != self.min_clock or not (at <= reached if apart else at == reached) or pushed != own:
                raise Violation(
                    f"the keys are cut at clock {at} of {self.min_clock}, worker {seat.worker} is at {pushed} and goes on "
                    f"at {own}"
                )
            self.before[seat.worker, seat.epoch] = who
            if self.quorum > 0:  # as late as it was
                self.due[self.generation, seat.worker] = self.due.pop((was, seat.worker))
        self.quorum_ns = self.closable_ns = -1

    def _drains(self, coordinator: Coordinator) -> bool:
        return coordinator.resharding.phase is ReshardPhase.HELD

    def _on_quorum(self, coordinator: Coordinator) -> None:
        if coordinator.resharding.holds:
            self.closable_ns = -1  # no clock closes for a quorum meanwhile
        else:
            super()._on_quorum(coordinator)

    def _line(self, who: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """It, and what it was before each move."""
        while True:
            yield who
            if who not in self.before:
                return
            who = self.before[who]

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        super().server_event(process, effects, event, source)
        self._one_owner(process)
        if process.index in self.mirrors:
            self._once(process.index, self.mirrors[process.index].held)

    def _once(self, index: int, held: Held) -> None:
        """An update of a member is folded once, before a move or after it."""
        if index not in self.looked or self.looked[index][0] is not held:
            self.looked[index] = (held, set())  # it has gone back
        _, found = self.looked[index]
        for worker, epoch, clock in islice(held.folded, len(found), None) if len(held.folded) > len(found) else ():
            *_, first = self._line((worker, epoch))
            if (first, clock) in found:
                raise Violation(f"update {clock} of worker {worker} is folded twice, before a move and after it")
            found.add((first, clock))

    def _on_state(self, mirror: Mirror, state: m.State) -> None:
        super()._on_state(mirror, state)
        who = (state.worker, state.epoch)
        if state.request or not state.whole or who not in self.before:
            return
        line = {*self._line(who)} - {who}
        lacks = [p for p, shown in mirror.held.shown.items() if p[:2] in line and shown > state.publication]
        if lacks:
            raise Violation(f"shard {mirror.index} shows worker {who[0]} a state without its updates {lacks}")

    def _one_owner(self, process: Process) -> None:
        """No two shards of a generation have a key. Each event may change those of its own shard."""
        planned, generation = process.shard.model_shard, process.shard.ledger.generation
        if planned is None or self.cut.get(process.index) == (generation, planned.store):
            return
        self.cut[process.index] = (generation, planned.store)
        shards = [each.shard for each in self.run.servers.values() if each.shard.model_shard is not None]
        stores = [
            shard.model_shard.store for shard in shards if shard.ledger.generation == generation and shard.model_shard
        ]
        cuts = sorted(store.whole for store in stores)
        for (_, end), (begin, _) in pairwise(cuts):
            if begin < end:
                raise Violation(f"keys [{begin}, {end}) are with two shards: {cuts}")

    def leaves(self, worker: Worker) -> None:
        super().leaves(worker)
        who = (worker.worker, worker.epoch)
        for mirror in self.mirrors.values():
            if self.given.generation_of.get(who) == mirror.process.shard.ledger.generation:
                line = {*self._line(who)}
                lost = [push for push in self.given.pushes if push[:2] in line and push not in mirror.held.folded]
                if lost:
                    raise Violation(f"{worker.name} leaves, and shard {mirror.index} lacks {lost} after a move")

    def gone(self, index: int) -> None:
        """The shard has no keys any more."""
        self.mirrors.pop(index, None)
        self.reached.pop(index, None)


class Moved(Run):
    """One run, to the end of everyone. `done`: the numbers of shards that it came to."""

    def __init__(self, moves: Moves, kit: Kit | None = None, trace: Trace | None = None) -> None:
        super().__init__(moves.case, kit, trace)
        self.checker: MoveChecker = MoveChecker(self)
        self.moves = [*moves.moves]
        self.wanted = 0  # shards that were asked for, 0: no move is under way
        self.heard = (self.settings.shards, self.settings.shards)  # of the coordinator: there are, and are to be
        self.lives: dict[int, int] = {}
        self.begun: set[int] = set()  # shards that are started, or have keys
        self.going: set[int] = set()  # that are let go, and have not ended: one that is to come again waits for that
        self.done: list[int] = []

    def _serve(self, index: int, life: int) -> None:
        if index and index not in self.begun and index >= self.heard[0]:
            return  # it is not to come any more
        self.lives[index] = self.lives.get(index, -1) + 1
        super()._serve(index, self.lives[index])
        self.begun.add(index)
        if index == 0 and self.wanted:
            self._ask()

    def server_event(self, process: Process) -> None:
        coordinator = process.coordinator
        if coordinator is not None and coordinator.resharding.holds:
            self._strike()
        super().server_event(process)
        if process.shard.retired and process.server.ended:
            self.sim.at(self.sim.now_ns, self._end, process)
        if coordinator is None or 0 not in self.begun or self.servers.get(0) is not process:
            return
        self._listen(coordinator.run.shards, coordinator.resharding.target)
        if self.moves and not self.wanted and coordinator.min_clock >= self.moves[0][0]:
            self.wanted = self.moves.pop(0)[1]
            self.sim.at(self.sim.now_ns, self._ask)

    def _strike(self) -> None:
        """Half of the crashes come in the midst of a move."""
        sim, half = self.sim, self.case.seed % 2
        if half and self.planned["restart"] and self.disk.shared(self.settings.shards) >= 0:
            self.planned["restart"] = False
            sim.at(sim.now_ns + sim.random.between(0, 300 * MS), self._shard_crashes)
        elif not half and self.planned["crash"]:
            self._crash_worker(sim.random.between(0, 300 * MS))

    def _ask(self) -> None:
        process = self.servers[0]
        if self.sim.alive(process.up):  # else the next one is asked
            process._happen(MachineEvent(EventKind.RESHARD, process.now_ns, values=(self.wanted,)))

    def _listen(self, shards: int, target: int) -> None:
        before, self.heard = self.heard, (shards, target)
        if before == self.heard:
            return
        moved = shards != self.settings.shards
        self.settings = replace(self.settings, shards=shards)
        for index in [index for index in self.begun if index >= max(shards, target)]:
            if index in self.servers:
                self.going.add(index)
                self.sim.at(self.sim.now_ns + 1000 * MS * moved, self._end, self.servers[index])
            else:
                self.begun.discard(index)
        for index in range(shards, target):
            if index not in self.going:
                self._begin(index)
        if shards == target:
            if shards == self.wanted:
                self.done.append(shards)
                self.sim.struck["keys moved"] += 1
            self.wanted = 0

    def _begin(self, index: int) -> None:
        self.begun.add(index)
        self.sim.at(self.sim.now_ns + self.sim.random.between(0, 300 * MS), self._serve, index, 0)

    def run(self) -> Moved:
        super().run()
        return self

    def _end(self, process: Process) -> None:
        if self.servers.get(process.index) is not process:
            return
        if self.sim.alive(process.up):
            self.sim.crash(process.port, process.up)
        del self.servers[process.index]
        self.begun.discard(process.index)
        self.checker.gone(process.index)
        if process.index in self.going:
            self.going.remove(process.index)
            if process.index < max(self.heard):
                self._begin(process.index)

    def _shard_crashes(self) -> None:
        assert self.case.restart is not None
        index = self.case.restart.who % self.settings.shards
        process = self.servers.get(index)
        if process is None or not self.sim.alive(process.port):  # it is still to come, or was killed: later
            self.sim.at(self.sim.now_ns + 1000 * MS, self._shard_crashes)
            return
        self._shard_ends(process, "shard restarted")
        self.sim.at(self.sim.now_ns + self.case.restart.lasts_ns, self._serve, index, 1)
