"""Every invariant of the design, checked as the events of a simulated run go by.

    staleness     a state for clock c is of a min_clock >= c - s, and min_clock is never ahead of a live member
    exactly once  a push is folded at most once, and is folded where it was acknowledged; what is given back never was
    weights       at a barrier samples over the sum of the set; at once over the live members, the dead ones' gone; where
                  updates are added that times the gain, which is measured anew from what was given, and counted once
    steps         of the run before a clock are, of each round of `local`, the most of one worker, also after a restart
    sets          every shard closes each clock over the set that the coordinator closed, which holds all live members
    quorum        or so many of them, once the grace is over and not later; it holds every update that is on all shards
    the end       all workers end with one model, which is sent once all have done their last step
    own writes    a state has all own updates that it says are settled; who leaves has every update of its own in the model
    rows          of a table are those that the log gives; who is sent them for clock c has all own updates before c in
                  them, and those of others before c - s
    publications  of one number are bit-identical, on a shard and in every worker that pulled them
    the model     is, after every event and bit for bit, what the log gives: for a barrier the sum in worker-id order
    progress      no wait is longer than a lease and the repeats of what was lost; every run ends
    restarts      go back to a checkpoint that all shards have, and say which clocks are lost

The state that a shard must hold is in mirror.py. The state of machines is looked at only to be compared.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, ServerEffect
from narrows.protocols.runtime.network.awake_clock import TURN_NS
from narrows.ps.coordinator.clocks import GRACE_MAX_NS, GRACE_MIN_NS
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.run import Seat
from narrows.ps.replication.events import MachineEvent
from narrows.ps.store.store import Store
from simulation.mirror import BOTH, FloatArray, Given, Held, Mirror, Violation

if TYPE_CHECKING:
    from simulation.actors import Process, Worker
    from simulation.campaigns import Run
    from simulation.trees import Node

SLACK_NS = NS  # ticks and a step of the protocol or two
COST_NS = NS  # what a message that is lost costs on top of its delay: its repeat


def bound_of(settings: Settings) -> int | None:
    """The staleness that they allow; None: any."""
    delay, clock_steps = settings.merge_delay, settings.local_steps // settings.fragments
    late = next(clocks for clocks in range(delay + 1) if clocks * clock_steps >= delay)  # begun before a merge is due
    return None if settings.sync == "async" else settings.staleness + late


class Checker:
    """Told of everything by the run; raises Violation."""

    def __init__(self, run: Run | Node) -> None:
        self.run = run
        self.quorum = run.case.settings.quorum
        self.given = Given()
        self.made: dict[tuple[int, int], int] = {}  # worker, epoch -> its clock, as it knows itself
        self.pulls: dict[tuple[int, int, int, int], m.Pull] = {}  # shard, worker, epoch, request
        self.ends: dict[tuple[int, int], int] = {}  # worker, epoch -> its clock, once it has asked for the last model
        self.last_models: dict[tuple[int, int], bytes] = {}  # generation, shard
        self.asks: dict[tuple[int, int, int, int], int] = {}  # the same, for rows
        self.follows: dict[tuple[int, int, int], m.Follow] = {}  # shard, worker, epoch -> the newest that has come
        self.mirrors: dict[int, Mirror] = {}
        self.disk: dict[tuple[int, int, int], Held] = {}  # shard, clock, shards
        self.reached: dict[int, tuple[int, int]] = {}  # shard -> generation, min_clock
        # The coordinator as of its last event.
        self.version = (0, 0)  # its life, and the version of what it decided
        self.generation = -1
        self.min_clock = 0
        self.started = False
        self.quorum_ns = -1  # when so many had an update on all shards that no set has
        self.closable_ns = -1  # and when all shards had published the clock before
        self.next: dict[tuple[int, int], int] = {}  # generation, worker -> its first update that no set has
        self.due: dict[tuple[int, int], int] = {}  # and the clock since which it is waited for
        self.late: list[tuple[int, int, int]] = []  # worker, clock, age: of all updates that were
        self.moved_ns = 0
        self.moved_struck: Counter[str] = Counter()

    # Events of workers.

    def worker_started(self, worker: Worker) -> None:
        self.made[worker.worker, worker.epoch] = self.given.starts[worker.worker, worker.epoch] = worker.clock

    def computes(self, worker: Worker, clock: int, min_clocks: Sequence[int]) -> None:
        bound = bound_of(worker.settings)
        if bound is not None and clock > min(min_clocks) + bound:
            raise Violation(
                f"staleness: {worker.name} computes with clock {clock} on states of {min_clocks}, s = {bound}"
            )

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        self.given.pushes[worker.worker, worker.epoch, clock] = (values, samples)
        self.made[worker.worker, worker.epoch] = clock + 1

    def pulled(self, shard: int, pull: m.Pull) -> None:
        self.pulls[shard, pull.worker, pull.epoch, pull.request] = pull
        if pull.last:
            self.ends[pull.worker, pull.epoch] = pull.clock

    def heard(self, process: Process, message: m.Message) -> None:
        follow = message.asks() if isinstance(message, m.Push) else message
        if isinstance(follow, m.Follow):
            who = (process.index, follow.worker, follow.epoch)
            before = self.follows.get(who)
            if before is None or (follow.clock >= before.clock and follow.have >= before.have):
                self.follows[who] = follow
        elif isinstance(message, m.RowsRequest):
            self.asks[process.index, message.worker, message.epoch, message.request] = message.clock

    def settled(self, worker: Worker, event: e.PushSettled) -> None:
        push = (worker.worker, worker.epoch, event.clock)
        mirror = self.mirrors.get(event.shard)
        if mirror is None:
            return
        same = (
            self.given.generation_of[push[:2]] == mirror.process.shard.ledger.generation
        )  # else it went back with the shard
        if same and push not in mirror.held.folded:
            raise Violation(f"{push} was acknowledged and is not in shard {event.shard}")

    def state_arrived(self, worker: Worker, shard: int, publication: int, pulled: FloatArray) -> None:
        number = (self.given.generation_of[worker.worker, worker.epoch], shard, publication)
        if self.given.publications.get(number) != zlib.crc32(pulled.tobytes()):
            raise Violation(f"publication {publication} of shard {shard} is another one in {worker.name}")

    def model_arrived(self, worker: Worker, shard: int, model: bytes) -> None:
        pass  # looked at where it was sent

    def moments_arrived(self, worker: Worker, shard: int, clock: int, payload: bytes) -> None:
        raise Violation(f"{worker.name} has the state of an optimizer, and the run has no start")

    # Events of servers.

    def server_started(self, process: Process) -> None:
        self.mirrors.pop(process.index, None)
        self.reached.pop(process.index, None)

    def replayed(self, process: Process) -> None:
        """The mirror of the killed one goes on with the next, which has the checkpoints that it says it has."""
        newest = max(process.shard.checkpoints, default=-1)
        on_disk = self.run.disk.known(process.index, process.shard.settings.shards)
        if newest >= 0 and newest not in on_disk:
            raise Violation(f"shard {process.index} says it has checkpoint {newest}, on its disk are {sorted(on_disk)}")
        if process.index in self.mirrors:
            self.mirrors[process.index].adopt(process)

    def server_crashed(self, process: Process) -> None:
        if process.index == 0:
            self.generation = -1  # the next coordinator begins one of its own

    def follow(self, process: Process) -> None:
        """Take down what the coordinator decided, and what was done to the store since."""
        planned, coordinator, given = process.shard.model_shard, process.coordinator, self.given
        if coordinator is not None and (coordinator.run.first_epoch, coordinator.version) != self.version:
            self.version = (coordinator.run.first_epoch, coordinator.version)
            for member in coordinator.declared:
                given.generation_of.setdefault((member.worker, member.epoch), coordinator.run.generation)
                for table in (self.next, self.due):
                    table.setdefault((coordinator.run.generation, member.worker), member.start)
            for clock, updates in coordinator.clocks.sets.items():
                given.sets.setdefault((coordinator.run.generation, clock), updates)
        if planned is not None:
            mirror = self.mirrors.get(process.index)
            if mirror is None or mirror.store is not planned.store:
                mirror = self.mirrors[process.index] = self.mirror_of(process, planned.store)
            mirror.follow()

    def mirror_of(self, process: Process, store: Store) -> Mirror:
        return Mirror(process, store, self.run.case, self.given)

    def saved(self, process: Process, clock: int) -> None:
        shards = process.shard.settings.shards
        self.disk[process.index, clock, shards] = self.mirrors[process.index].saved(clock)

    def loaded(self, process: Process, clock: int) -> None:
        shards = self.run.disk.shards(clock)
        if shards == process.shard.settings.shards:
            saved = self.disk[process.index, clock, shards]
        else:
            saved = self._joined([self.disk[index, clock, shards] for index in range(shards)], process)
        self.mirrors[process.index].loaded(saved, clock)

    def _joined(self, parts: Sequence[Held], process: Process) -> Held:
        """The keys of this shard, of what so many others held. All of them have folded the same updates of the members."""
        first, live, coordinator = (
            parts[0],
            {row[0] for row in process.shard.ledger.members},
            self.run.servers[0].coordinator,
        )
        life = coordinator.run.first_epoch if coordinator is not None else 0  # numbers of workers begin anew in each
        for other in parts[1:]:
            differ = other.folded.keys() ^ first.folded.keys()
            if some := [push for push in differ if push[0] in live and push[1] >= life]:
                raise Violation(f"the keys are cut anew where not all shards have folded {sorted(some)[:4]}")
        mirror, ends = self.mirrors[process.index], np.cumsum([0, *(part.x.size for part in parts)])
        begin, end = mirror.store.whole
        common = [max(0, min(end, high) - max(begin, low)) for low, high in pairwise(ends.tolist())]
        known = [(part.agreement, keys) for part, keys in zip(parts, common, strict=True) if part.agreement and keys]
        agreement = sum(a * keys for a, keys in known) / sum(keys for _, keys in known) if known else 0.0
        x, momentum = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "momentum"))
        gain = 1 / agreement if agreement and self.run.case.scaled else 1.0
        held = replace(deepcopy(first), x=x[begin:end], momentum=momentum[begin:end])
        ours = [part for part, keys in zip(parts, common, strict=True) if keys]
        held.folded = {push: weight for part in ours for push, weight in part.folded.items()}
        held.torn = held.folded.keys() - set.intersection(*(part.folded.keys() - part.torn for part in ours))
        return replace(held, agreement=agreement, gain=gain)

    def server_event(self, process: Process, effects: Sequence[ServerEffect], event: MachineEvent, source: str) -> None:
        """After every event of a server, its effects carried out."""
        self.follow(process)
        if process.coordinator is not None:
            self._decided(process.coordinator, effects)
        mirror = self.mirrors.get(process.index)
        if mirror is not None:
            mirror.compare(event, source)
            for effect in effects:
                if isinstance(effect, e.Send):
                    if isinstance(effect.message, m.State):
                        self._on_state(mirror, effect.message)
                    elif isinstance(effect.message, m.PushAck):
                        self._on_ack(mirror, effect.message)
                    elif isinstance(effect.message, m.RowsAnswer):
                        self._on_rows(mirror, effect.message)
        self._went_back(process, effects)
        if self.run.ranges is not None:
            self.run.ranges.server_event(process, effects)

    def _on_state(self, mirror: Mirror, state: m.State) -> None:
        who, master = (mirror.index, state.worker, state.epoch), state.request > 0
        follow = self.follows.get(who)
        clock = self.pulls[*who, state.request].clock if master else follow.clock if follow is not None else -1
        held, generation = mirror.held, mirror.process.shard.ledger.generation
        where = f"the state of shard {mirror.index} for clock {clock} of worker {state.worker}"
        coordinator = self.run.servers[0].coordinator
        assert coordinator is not None
        if coordinator.run.generation == generation and state.min_clock > coordinator.min_clock:
            raise Violation(f"{where} is ahead of the coordinator")
        own = bound_of(mirror.settings)
        bound = 0 if master else own
        if follow is not None and not master and state.publication - follow.have > follow.credit and not state.whole:
            raise Violation(f"{where} is publication {state.publication}, asked for were {follow}")
        # Differences are followed from the first on, whatever the clock: a worker computes on them when it may.
        if (master or state.whole) and bound is not None and clock > state.settled + bound:
            raise Violation(f"staleness: {where} is settled to {state.settled}, s = {bound}")
        # Clocks close without a worker that waits for the last model, and have none of its updates.
        least = min(state.min_clock, self.ends.get(who[1:], state.min_clock))
        if state.settled > state.min_clock or (self.quorum < 0 and state.settled < least):
            raise Violation(f"{where} is settled to {state.settled}, of min_clock {state.min_clock}")
        complete = own is not None  # with none a publication may be older than min_clock is
        for each in range(max(state.settled - 3, 0), state.settled) if complete else ():
            push = (state.worker, state.epoch, each)
            shown = push in held.folded if master else held.shown.get(push, state.publication + 1) <= state.publication
            if push in self.given.pushes and not shown:
                raise Violation(f"own writes: {where} is settled to {state.settled} and lacks {push}")
        steps = held.steps.get(state.min_clock, state.steps)
        if mirror.mode.barrier and not master and state.steps != steps:
            raise Violation(f"{where} says {state.steps} steps of the run, and its rounds had {steps}")
        if master:
            self._on_master(mirror, state, where)
            if self.pulls[*who, state.request].last:
                self._on_last(coordinator, generation, mirror, state, where)
            return
        if state.whole:  # what differences come to is seen where they arrive
            number = (generation, mirror.index, state.publication)
            if zlib.crc32(state.payload) != self.given.publications[number]:
                raise Violation(f"{where} is not publication {number}")
        if not mirror.mode.barrier:
            self._on_contains(mirror, state, where)

    def _on_master(self, mirror: Mirror, state: m.State, where: str) -> None:
        if mirror.model_of(state) != mirror.held.x.tobytes():
            raise Violation(f"{where} is not the master copy")

    def _on_last(self, coordinator: Coordinator, generation: int, mirror: Mirror, state: m.State, where: str) -> None:
        """All workers end with one model, and it is sent once all have done their last step."""
        model = mirror.model_of(state)
        if self.last_models.setdefault((generation, mirror.index), model) != model:
            raise Violation(f"{where} is another last model than a worker had before")
        ended = {worker for worker, _ in self.ends}
        going = [member.worker for member in coordinator.declared if member.worker not in ended]
        if coordinator.run.generation == generation and going:
            raise Violation(f"{where} is the last model, and workers {going} go on")

    def _on_rows(self, mirror: Mirror, rows: m.RowsAnswer) -> None:
        clock = self.asks[mirror.index, rows.worker, rows.epoch, rows.request]
        for worker, epoch, joined in mirror.process.shard.ledger.members:
            own = (worker, epoch) == (rows.worker, rows.epoch)
            bound = bound_of(mirror.settings)
            least = clock if own else clock - bound if bound is not None else joined
            for each in range(joined, max(joined, least)):
                if (worker, epoch, each) not in mirror.held.folded:
                    raise Violation(f"rows for clock {clock} of worker {rows.worker} lack {(worker, epoch, each)}")
        self.run.sim.struck["rows sent"] += 1

    def _on_contains(self, mirror: Mirror, state: m.State, where: str) -> None:
        """A worker learns which of its own updates are in, and at which weight."""
        held = mirror.held
        who = (state.worker, state.epoch)
        shown = [
            (clock, held.folded[*who, clock])
            for clock in held.clocks.get(who, ())
            if clock >= state.min_clock and held.shown[*who, clock] <= state.publication
        ]
        if bound_of(mirror.settings) is None:  # only the last ones are kept
            shown = shown[len(shown) - len(state.contains) :]
        if list(state.contains) != shown:
            raise Violation(f"{where} says it contains {state.contains}, not {shown}")

    def _on_ack(self, mirror: Mirror, ack: m.PushAck) -> None:
        push, held = (ack.worker, ack.epoch, ack.clock), mirror.held
        if ack.status == m.PushStatus.FOLDED:
            weight = held.folded.get(push)
            if weight is None or ack.weight not in (0.0, weight):
                raise Violation(f"{push} is acknowledged by shard {mirror.index} at {ack.weight}, folded at {weight}")
        elif not mirror.has(ack.worker, ack.clock):
            raise Violation(f"{push} is acknowledged as held by shard {mirror.index} and is not")

    def _went_back(self, process: Process, effects: Sequence[ServerEffect]) -> None:
        """A shard that goes back names the clocks that are lost."""
        shard = process.shard
        now = (shard.ledger.generation, shard.min_clock)
        generation, was = self.reached.get(process.index, now)
        if generation != shard.ledger.generation and was > shard.min_clock:
            self._named("lost", effects, shard.min_clock, was)
        self.reached[process.index] = now

    def _named(self, event: str, effects: Sequence[ServerEffect], goes_on: int, was: int) -> None:
        logs = [x.values for x in effects if isinstance(x, e.Log) and x.event == event]
        if [(values["from_clock"], values["to_clock"]) for values in logs] != [(goes_on, was)]:
            raise Violation(f"clocks {goes_on} to {was} are lost, and the record says {logs}")

    # Decisions of the coordinator.

    def _decided(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        if coordinator.run.generation != self.generation:
            self._on_generation(coordinator, effects)
        elif coordinator.min_clock != self.min_clock:
            self._on_min_clock(coordinator, effects)
        elif coordinator.started and not self.started:
            self._moved("the start")
        self.started, self.min_clock = coordinator.started, coordinator.min_clock
        if self.quorum > 0 and coordinator.started:
            self._on_quorum(coordinator)

    def _on_generation(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        """The first, or a shard was restarted: back to a checkpoint that all shards have."""
        run, clock, was = self.run, coordinator.run.restart_clock, self.min_clock
        same_life, self.generation = self.generation >= 0, coordinator.run.generation
        self.quorum_ns = self.closable_ns = -1
        self._moved("a generation")
        if not run.sim.struck["shard restarted"] + run.sim.struck["shard failed"]:
            return
        for shard in range(run.settings.shards):
            if clock >= 0 and clock not in run.disk.known(shard, run.settings.shards):
                raise Violation(f"the run goes back to clock {clock}, shard {shard} has no checkpoint of it")
        if clock > was or coordinator.min_clock != max(clock, 0):
            raise Violation(f"the run goes on at {coordinator.min_clock}, from checkpoint {clock}; it was at {was}")
        if same_life:
            self._named("restart", effects, max(clock, 0), was)

    def _on_min_clock(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        """min_clock comes to where every live member's update is on every shard."""
        self._moved(f"min_clock {coordinator.min_clock}")
        late = len(self.late)
        for clock in range(self.min_clock, coordinator.min_clock):
            workers = [member.worker for member in self._going(coordinator) if member.start <= clock]
            updates = [(worker, clock) for worker in workers]
            if coordinator.run.mode.barrier:
                updates = list(self.given.sets.get((coordinator.run.generation, clock), ()))
                self._on_set(coordinator, clock, updates)
            for worker, update in updates:
                self._arrived_everywhere(worker, update)
        said = [x.values for x in effects if isinstance(x, e.Log) and x.event == "late"]
        if [(v["worker"], v["clock"], v["age"]) for v in said] != self.late[late:]:
            raise Violation(f"late are {self.late[late:]}, and the record says {said}")
        for member in self._going(coordinator) if self.quorum < 0 else ():
            made = self._made(member)
            if not self.min_clock < coordinator.min_clock <= made:
                raise Violation(
                    f"min_clock goes from {self.min_clock} to {coordinator.min_clock}, worker {member.worker} has {made}"
                )

    def _made(self, member: Seat) -> int:
        """How many updates it has made, as it knows itself."""
        return self.made.get((member.worker, member.epoch), member.start)

    def _going(self, coordinator: Coordinator) -> list[Seat]:
        """Live members, without those that have asked all shards for the last model: no clock waits for these."""
        workers = self.run.workers.values()
        done = {each.worker for each in workers if len(each.asked) >= coordinator.run.shards}
        return [member for member in coordinator.declared if member.worker not in done]

    def _open(self, coordinator: Coordinator) -> set[int]:
        """Live workers with an update on all shards that no set has, as the shards have reported."""
        return {
            member.worker
            for member in coordinator.declared
            if coordinator.clocks.clock(member) > self.next[coordinator.run.generation, member.worker]
        }

    def _on_set(self, coordinator: Coordinator, clock: int, updates: Sequence[tuple[int, int]]) -> None:
        """All live members, or with a quorum all that have pushed; of each the first update that no set has."""
        live = {member.worker for member in self._going(coordinator) if member.start <= clock}
        inside, pushed = {worker for worker, _ in updates}, self._open(coordinator)
        if not (live if self.quorum < 0 else pushed) <= inside:
            raise Violation(f"clock {clock} is closed over {updates}, and {live} are live, {pushed} have pushed")
        waited = self.run.servers[0].now_ns - self.quorum_ns if self.quorum_ns >= 0 else 0
        early = len(inside) < self.quorum or waited < coordinator.clocks.grace_ns
        if not live <= inside and early and not self._drains(coordinator):
            raise Violation(f"clock {clock} is closed over {updates} after {waited / NS:.3f} s, and {live} are live")
        for worker, update in updates:
            if update != self.next[coordinator.run.generation, worker]:
                raise Violation(f"clock {clock} has update {update} of worker {worker} before the one that it lacks")
            who = (coordinator.run.generation, worker)
            age, self.next[who], self.due[who] = clock - self.due[who], update + 1, clock + 1
            if age and worker in live:
                self.late.append((worker, clock, age))
        self.quorum_ns = self.closable_ns = -1

    def _drains(self, coordinator: Coordinator) -> bool:
        """True if the present clock may close without its quorum."""
        return False

    def _on_quorum(self, coordinator: Coordinator) -> None:
        """No clock is open for longer than the grace after its quorum, but for the ticks that look at the time."""
        settings, now_ns = self.run.case.settings, self.run.servers[0].now_ns
        published = all(report.min_clock >= coordinator.min_clock for report in coordinator.reports.values())
        if len(self._open(coordinator)) + len(coordinator.clocks.departed) < self.quorum or coordinator.over:
            self.quorum_ns = self.closable_ns = -1
            return
        self.quorum_ns = self.quorum_ns if self.quorum_ns >= 0 else now_ns
        if not published:
            self.closable_ns = -1
        elif self.closable_ns < 0:
            self.closable_ns = now_ns
        grace_ns, lease_ns = coordinator.clocks.grace_ns, int(settings.lease * NS)
        right = grace_ns == int(settings.grace * NS) if settings.grace >= 0 else GRACE_MIN_NS <= grace_ns <= lease_ns
        if not right or grace_ns > GRACE_MAX_NS:
            raise Violation(f"the grace is {grace_ns / NS} s, asked for were {settings.grace}")
        due_ns = max(self.quorum_ns + grace_ns, self.closable_ns)
        if self.closable_ns >= 0 and now_ns > due_ns + self.run.sim.tick_ns + TURN_NS:
            waited = (now_ns - self.quorum_ns) / NS
            raise Violation(
                f"clock {coordinator.min_clock} is open {waited:.3f} s after its quorum, {grace_ns / NS} allowed"
            )

    def leaves(self, worker: Worker) -> None:
        """A worker that is done has lost nothing of what it pushed."""
        who = (worker.worker, worker.epoch)
        for mirror in self.mirrors.values():
            if self.given.generation_of.get(who) == mirror.process.shard.ledger.generation:
                lost = [p for p in self.given.pushes if p[:2] == who and p not in mirror.held.folded]
                if lost:
                    raise Violation(f"{worker.name} leaves, and shard {mirror.index} lacks {lost}")

    def _arrived_everywhere(self, worker: int, clock: int) -> None:
        for index, mirror in self.mirrors.items():
            process = mirror.process
            gone = not self.run.sim.alive(process.up) or process.shard.ledger.generation != self.generation
            if not gone and not mirror.has(worker, clock):
                raise Violation(f"clock {clock} is complete, shard {index} lacks the update of worker {worker}")

    # Progress.

    def _moved(self, what: str, written_ns: int = 0) -> None:
        """The run has moved: not later than a lease and what the faults in between may cost. `written_ns`: what writing took
        that it has waited for."""
        run, case = self.run, self.run.case
        now_ns, struck = run.sim.now_ns, run.sim.struck.copy()
        strikes = struck - self.moved_struck
        lease_ns = int(case.settings.lease * NS)
        allowed = lease_ns + 4 * max(case.step_ns) + SLACK_NS + int(max(case.settings.grace, 0) * NS)
        allowed += written_ns + (strikes["lost"] + strikes["reordered"] + strikes["duplicated"]) * (
            COST_NS + case.faults.late_ns
        )
        anew = strikes["shard restarted"] + strikes["shard failed"]
        if anew and case.restart is not None:  # it is down, and the rest may have to be waited for
            allowed += anew * (case.restart.lasts_ns + 2 * lease_ns)
        if strikes["cut off"] and case.cut is not None and case.cut.way != BOTH:
            allowed += case.cut.lasts_ns  # who is heard and hears nothing keeps its lease
        allowed += 2 * (
            case.faults.delay_ns[1] + case.faults.late_ns
        )  # the road of who died, by which its lease was longer
        allowed += strikes["shard killed"] * (COST_NS + max((kill.lasts_ns for kill in case.kills), default=0))
        if strikes["shard stopped"] and case.stop is not None:
            allowed += case.stop.lasts_ns + lease_ns
        waited = now_ns - self.moved_ns
        if run.hurried and waited > allowed:
            raise Violation(
                f"progress: {waited / NS:.2f} s before {what}, allowed are {allowed / NS:.2f}: {dict(strikes)}"
            )
        self.moved_ns, self.moved_struck = now_ns, struck

    def whereabouts(self) -> str:
        workers = [f"{w.name} {w.member.phase} clock {w.clock}" for w in self.run.workers.values()]
        return f"min_clock {self.min_clock}, {'; '.join(workers)}"
