"""Every invariant of the design, checked as the events of a simulated run go by.

    staleness     a state for clock c is of a min_clock >= c - s, and min_clock is never ahead of a live member
    exactly once  a push is folded at most once, and is folded where it was acknowledged; what is given back never was
    weights       at a barrier samples over the sum of the set; at once over the live members, the dead ones' gone
    sets          every shard closes each clock over the set that the coordinator closed, which holds all live members
    publications  of one number are bit-identical, on a shard and in every worker that pulled them
    the model     is, after every event and bit for bit, what the log gives: for a barrier the sum in worker-id order
    progress      no wait is longer than a lease and the repeats of what was lost; every run ends
    restarts      go back to a checkpoint that all shards have, and say which clocks are lost

What a shard must hold is in tests/mirrors.py. What machines hold is looked at only to be compared.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mirrors import FloatArray, Given, Held, Mirror, Violation

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.coordinator import Coordinator
from narrows.protocols.effects import NS, ServerEffect

if TYPE_CHECKING:
    from actors import Process, Worker
    from simulation import Run

SLACK_NS = NS  # ticks and a step of the protocol or two
COST_NS = NS  # what a message that is lost costs on top of its delay: its repeat


class Checker:
    """Told of everything by the run; raises Violation."""

    def __init__(self, run: Run) -> None:
        self.run = run
        settings = run.case.settings
        self.mode = settings.mode()
        self.bound = None if settings.sync == "async" else settings.staleness
        self.given = Given()
        self.made: dict[tuple[int, int], int] = {}  # worker, epoch -> its clock, as it knows itself
        self.pulls: dict[
            tuple[int, int, int, int], tuple[int, bool]
        ] = {}  # shard, worker, epoch, request -> clock, master
        self.mirrors: dict[int, Mirror] = {}
        self.disk: dict[tuple[int, int], Held] = {}  # shard, clock
        self.reached: dict[int, tuple[int, int]] = {}  # shard -> generation, min_clock
        # Of the coordinator, as of its last event.
        self.version = (0, 0)  # its life, and the version of what it decided
        self.generation = -1
        self.min_clock = 0
        self.started = False
        self.moved_ns = 0
        self.moved_struck: Counter[str] = Counter()

    # What workers do.

    def worker_started(self, worker: Worker) -> None:
        self.made[worker.worker, worker.epoch] = worker.clock

    def computes(self, worker: Worker, clock: int, min_clocks: Sequence[int]) -> None:
        if self.bound is not None and clock > min(min_clocks) + self.bound:
            raise Violation(
                f"staleness: {worker.name} computes with clock {clock} on states of {min_clocks}, s = {self.bound}"
            )

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        self.given.pushes[worker.worker, worker.epoch, clock] = (values, samples)
        self.made[worker.worker, worker.epoch] = clock + 1

    def pulled(self, shard: int, pull: m.Pull | None) -> None:
        if pull is not None:
            self.pulls[shard, pull.worker, pull.epoch, pull.request] = (pull.clock, pull.master)

    def settled(self, worker: Worker, event: e.PushSettled) -> None:
        push = (worker.worker, worker.epoch, event.clock)
        mirror = self.mirrors.get(event.shard)
        if mirror is None:
            return
        same = self.given.generation_of[push[:2]] == mirror.process.shard.generation  # else it went back with the shard
        if same and push not in mirror.held.folded:
            raise Violation(f"{push} was acknowledged and is not in shard {event.shard}")

    def state_arrived(self, worker: Worker, shard: int, publication: int, pulled: FloatArray) -> None:
        number = (self.given.generation_of[worker.worker, worker.epoch], shard, publication)
        if self.given.publications.get(number) != zlib.crc32(pulled.tobytes()):
            raise Violation(f"publication {publication} of shard {shard} is another one in {worker.name}")

    def model_arrived(self, worker: Worker, shard: int, model: bytes) -> None:
        pass  # looked at where it was sent

    # What servers do.

    def server_started(self, process: Process) -> None:
        self.mirrors.pop(process.index, None)
        self.reached.pop(process.index, None)

    def server_crashed(self, process: Process) -> None:
        if process.index == 0:
            self.generation = -1  # the next coordinator begins one of its own

    def follow(self, process: Process) -> None:
        """Take down what the coordinator decided, and what was done to the store since."""
        store, coordinator, given = process.shard.store, process.coordinator, self.given
        if coordinator is not None and (coordinator.first_epoch, coordinator.version) != self.version:
            self.version = (coordinator.first_epoch, coordinator.version)
            for member in coordinator.declared:
                given.generation_of.setdefault((member.worker, member.epoch), coordinator.generation)
            for clock, workers in coordinator.sets.items():
                given.sets.setdefault((coordinator.generation, clock), workers)
        if store is not None:
            mirror = self.mirrors.get(process.index)
            if mirror is None or mirror.store is not store:
                mirror = self.mirrors[process.index] = Mirror(process, store, self.run.case, given)
            mirror.follow()

    def saved(self, process: Process, clock: int) -> None:
        self.disk[process.index, clock] = self.mirrors[process.index].saved()

    def loaded(self, process: Process, clock: int) -> None:
        self.mirrors[process.index].loaded(self.disk[process.index, clock], clock)

    def server_event(self, process: Process, effects: Sequence[ServerEffect], why: str) -> None:
        """After every event of a server, its effects carried out."""
        self.follow(process)
        if process.coordinator is not None:
            self._decided(process.coordinator, effects)
        mirror = self.mirrors.get(process.index)
        if mirror is not None:
            mirror.compare(why)
            for effect in effects:
                if isinstance(effect, e.Send):
                    if isinstance(effect.message, m.State):
                        self._on_state(mirror, effect.message)
                    elif isinstance(effect.message, m.PushAck):
                        self._on_ack(mirror, effect.message)
        self._went_back(process, effects)

    def _on_state(self, mirror: Mirror, state: m.State) -> None:
        clock, master = self.pulls[mirror.index, state.worker, state.epoch, state.request]
        held, generation = mirror.held, mirror.process.shard.generation
        where = f"the state of shard {mirror.index} for clock {clock} of worker {state.worker}"
        coordinator = self.run.servers[0].coordinator
        assert coordinator is not None
        if coordinator.generation == generation and state.min_clock > coordinator.min_clock:
            raise Violation(f"{where} is ahead of the coordinator")
        bound = 0 if master else self.bound
        if bound is not None and clock > state.min_clock + bound:
            raise Violation(f"staleness: {where} is of min_clock {state.min_clock}, s = {bound}")
        if master:
            if bytes(state.payload) != held.x.tobytes():
                raise Violation(f"{where} is not the master copy")
            return
        number = (generation, mirror.index, state.publication)
        if not state.delta and zlib.crc32(state.payload) != self.given.publications[number]:
            raise Violation(f"{where} is not publication {number}")  # what deltas come to is seen where they arrive
        if not self.mode.barrier and state.part == state.parts - 1:
            self._on_contains(mirror, state, where)

    def _on_contains(self, mirror: Mirror, state: m.State, where: str) -> None:
        """A worker learns which of its own updates are in, and at which weight."""
        held = mirror.held
        shown = [
            (push[2], weight)
            for push, weight in held.folded.items()
            if push[:2] == (state.worker, state.epoch)
            and push[2] >= state.min_clock
            and held.shown[push] <= state.publication
        ]
        if self.bound is None:  # only the last ones are kept
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
        now = (shard.generation, shard.min_clock)
        generation, was = self.reached.get(process.index, now)
        if generation != shard.generation and was > shard.min_clock:
            self._named("lost", effects, shard.min_clock, was)
        self.reached[process.index] = now

    def _named(self, event: str, effects: Sequence[ServerEffect], goes_on: int, was: int) -> None:
        logs = [x.values for x in effects if isinstance(x, e.Log) and x.event == event]
        if [(values["from_clock"], values["to_clock"]) for values in logs] != [(goes_on, was)]:
            raise Violation(f"clocks {goes_on} to {was} are lost, and the record says {logs}")

    # What the coordinator decides.

    def _decided(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        if coordinator.generation != self.generation:
            self._on_generation(coordinator, effects)
        elif coordinator.min_clock != self.min_clock:
            self._on_min_clock(coordinator)
        elif coordinator.started and not self.started:
            self._moved("the start")
        self.started, self.min_clock = coordinator.started, coordinator.min_clock

    def _on_generation(self, coordinator: Coordinator, effects: Sequence[ServerEffect]) -> None:
        """The first, or a shard was restarted: back to a checkpoint that all shards have."""
        run, clock, was = self.run, coordinator.restart_clock, self.min_clock
        same_life, self.generation = self.generation >= 0, coordinator.generation
        self._moved("a generation")
        if not run.sim.struck["shard restarted"]:
            return
        for shard in range(run.case.settings.shards):
            if clock >= 0 and clock not in run.disk.clocks(shard):
                raise Violation(f"the run goes back to clock {clock}, shard {shard} has no checkpoint of it")
        if clock > was or coordinator.min_clock != max(clock, 0):
            raise Violation(f"the run goes on at {coordinator.min_clock}, from checkpoint {clock}; it was at {was}")
        if same_life:
            self._named("restart", effects, max(clock, 0), was)

    def _on_min_clock(self, coordinator: Coordinator) -> None:
        """min_clock comes to where every live member's update is on every shard."""
        self._moved(f"min_clock {coordinator.min_clock}")
        for clock in range(self.min_clock, coordinator.min_clock):
            workers = [member.worker for member in coordinator.declared if member.start <= clock]
            if self.mode.barrier:
                inside = self.given.sets.get((coordinator.generation, clock), ())
                if not set(workers) <= set(inside):
                    raise Violation(f"clock {clock} is closed over {inside}, and {workers} are live")
                workers = list(inside)
            for worker in workers:
                self._arrived_everywhere(worker, clock)
        for member in coordinator.declared:
            made = self.made.get((member.worker, member.epoch), member.start)
            if not self.min_clock < coordinator.min_clock <= made:
                raise Violation(
                    f"min_clock goes from {self.min_clock} to {coordinator.min_clock}, worker {member.worker} has {made}"
                )

    def _arrived_everywhere(self, worker: int, clock: int) -> None:
        for index, mirror in self.mirrors.items():
            process = mirror.process
            gone = not self.run.sim.alive(process.up) or process.shard.generation != self.generation
            if not gone and not mirror.has(worker, clock):
                raise Violation(f"clock {clock} is complete, shard {index} lacks the update of worker {worker}")

    # Progress.

    def _moved(self, what: str) -> None:
        """The run has moved: not later than a lease and what the faults in between may cost."""
        run, case = self.run, self.run.case
        now_ns, struck = run.sim.now_ns, run.sim.struck.copy()
        strikes = struck - self.moved_struck
        lease_ns = int(case.settings.lease * NS)
        allowed = lease_ns + 4 * max(case.step_ns) + SLACK_NS
        allowed += (strikes["lost"] + strikes["reordered"] + strikes["duplicated"]) * (COST_NS + case.faults.late_ns)
        if strikes["shard restarted"] and case.restart is not None:
            allowed += case.restart.lasts_ns + 2 * lease_ns  # it is down, and the rest may have to be waited for
        waited = now_ns - self.moved_ns
        if run.hurried and waited > allowed:
            raise Violation(
                f"progress: {waited / NS:.2f} s before {what}, allowed are {allowed / NS:.2f}: {dict(strikes)}"
            )
        self.moved_ns, self.moved_struck = now_ns, struck

    def whereabouts(self) -> str:
        workers = [f"{w.name} {w.member.phase} clock {w.clock}" for w in self.run.workers.values()]
        return f"min_clock {self.min_clock}, {'; '.join(workers)}"
