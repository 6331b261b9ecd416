"""Every invariant of the design, checked as the events of a simulated run go by.

The checker keeps a log of its own: what each worker gave (by push id: worker, epoch, clock), and for each shard a mirror,
the state that follows from what was folded. It looks at what machines say, and at what they hold only to compare.

    staleness     a state for clock c is of a min_clock >= c - s, and min_clock is never ahead of a live member
    exactly once  a push is folded at most once, and is folded where it was acknowledged; what is given back never was
    weights       at a barrier samples over the sum of the set; at once over the live members, the dead ones' gone
    sets          every shard closes each clock over the set that the coordinator closed, which holds all live members
    publications  of one number are bit-identical, on a shard and in every worker that pulled them
    the model     is, after every event and bit for bit, what the log gives: for a barrier the sum in worker-id order
    progress      no wait is longer than a lease and the repeats of what was lost; every run ends
    restarts      go back to a checkpoint that all shards have, and say which clocks are lost
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, ServerEffect
from narrows.protocols.modes import Rule
from narrows.ps.store import Store

if TYPE_CHECKING:
    from simulation import Process, Run, Worker

FloatArray = npt.NDArray[np.float32]
PushId = tuple[int, int, int]  # worker, epoch, clock


class Violation(AssertionError):
    """An invariant does not hold."""


def need(holds: bool, text: Callable[[], str]) -> None:
    if not holds:
        raise Violation(text())


@dataclass(slots=True)
class Mirror:
    """What a shard must hold in one generation, by the checker's own log."""

    begin: int
    end: int
    x: FloatArray
    momentum: FloatArray
    folded: dict[PushId, float] = field(default_factory=dict)
    shown: dict[PushId, int] = field(default_factory=dict)  # the publication that first holds it
    publication: int = -1
    closed: int = 0  # clocks (barrier)
    samples: dict[int, int] = field(default_factory=dict)
    batch: list[tuple[float, PushId]] = field(default_factory=list)  # folded since the last publication (barrier)
    mean: list[tuple[float, PushId]] = field(default_factory=list)  # the arguments of the last Store.mean

    def copy(self) -> Mirror:
        return Mirror(
            self.begin, self.end, self.x.copy(), self.momentum.copy(), dict(self.folded), dict(self.shown),
            self.publication, self.closed,
        )  # fmt: skip


class Checker:
    """Told of everything by the run; raises Violation."""

    def __init__(self, run: Run) -> None:
        self.run = run
        settings = run.case.settings
        self.mode = settings.mode()
        self.bound = None if settings.sync == "async" else settings.staleness
        self.given: dict[PushId, tuple[FloatArray, int]] = {}
        self.made: dict[tuple[int, int], int] = {}  # worker, epoch -> clocks pushed, counted from the run's first
        self.pulls: dict[tuple[int, int, int, int], tuple[int, bool]] = {}
        self.returned: set[tuple[int, PushId]] = set()  # by shard: given back to the worker
        self.mirrors: dict[int, Mirror] = {}
        self.stores: dict[int, Store] = {}
        self.logs: dict[int, list[tuple[Any, ...]]] = {}
        self.disk: dict[tuple[int, int], Mirror] = {}
        self.generation = -1
        self.generation_of: dict[tuple[int, int], int] = {}  # worker, epoch -> generation
        self.sets: dict[tuple[int, int], tuple[int, ...]] = {}  # generation, clock -> members
        self.publications: dict[tuple[int, int, int], int] = {}  # generation, shard, number -> checksum
        self.version = (0, 0)  # life and version of what the coordinator decided
        self.min_clock = 0
        self.started = False
        self.lost_ns: list[int] = []
        self.moved_ns = 0
        self.moved_struck = self._strikes()
        self.lost_to = -1  # min_clock when a shard crashed
        self.closed_ns = 0

    # What workers do.

    def worker_started(self, worker: Worker) -> None:
        self.made[worker.worker, worker.epoch] = worker.clock

    def computes(self, worker: Worker, clock: int, min_clocks: Sequence[int]) -> None:
        if self.bound is not None:
            bound = self.bound
            need(
                all(clock <= known + bound for known in min_clocks),
                lambda: f"staleness: {worker.name} computes with clock {clock} on states of {min_clocks}, s = {bound}",
            )

    def pushed(self, worker: Worker, clock: int, values: FloatArray, samples: int) -> None:
        self.given[worker.worker, worker.epoch, clock] = (values, samples)
        self.made[worker.worker, worker.epoch] = clock + 1

    def pulled(self, worker: Worker, shard: int, pull: m.Pull | None) -> None:
        if pull is not None:
            self.pulls[shard, pull.worker, pull.epoch, pull.request] = (pull.clock, pull.master)

    def settled(self, worker: Worker, event: e.PushSettled) -> None:
        push = (worker.worker, worker.epoch, event.clock)
        mirror = self.mirrors.get(event.shard)
        if not event.folded:
            self.returned.add((event.shard, push))
            need(mirror is None or push not in mirror.folded, lambda: f"{push} was given back and is folded")
        elif mirror is not None and self.generation_of[push[:2]] == self.run.servers[event.shard].shard.generation:
            need(push in mirror.folded, lambda: f"{push} was acknowledged and is not in shard {event.shard}")

    def state_arrived(self, worker: Worker, shard: int, publication: int, pulled: FloatArray) -> None:
        key = (self.generation_of[worker.worker, worker.epoch], shard, publication)
        need(
            self.publications.get(key) == zlib.crc32(pulled.tobytes()),
            lambda: f"publication {publication} of shard {shard} is another one in {worker.name}",
        )

    def worker_crashed(self, worker: Worker) -> None:
        """Nothing is asked of a dead worker; the rest wait for it no longer than a lease (`_moved`)."""

    # What shards do.

    def server_started(self, process: Process) -> None:
        self.mirrors.pop(process.index, None)
        self.stores.pop(process.index, None)

    def server_crashed(self, process: Process) -> None:
        coordinator = self.run.servers[0].coordinator
        assert coordinator is not None
        self.lost_to = coordinator.min_clock
        if process.index == 0:
            self.generation = -1

    def _watch(self, index: int, store: Store) -> None:
        """A new store: log what is done to it, from outside."""
        self.stores[index], log = store, []
        self.logs[index] = log
        zeros = np.zeros(store.size, np.float32)
        self.mirrors[index] = Mirror(store.begin, store.end, zeros.copy(), zeros.copy())
        for name in ("first_weights", "fold_update", "mean", "fold_outer", "fold_gradient", "publish"):
            setattr(store, name, self._logged(store, log, name, getattr(store, name)))

    @staticmethod
    def _logged(store: Store, log: list[tuple[Any, ...]], name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = plain(*arguments)
            log.append((name, *arguments) if name != "publish" else (name, zlib.crc32(store.p.tobytes())))
            return result

        return call

    def folds(self, process: Process) -> None:
        """Take down what the coordinator decided, and carry the mirror over what was done to the store."""
        index, store, coordinator = process.index, process.shard.store, process.coordinator
        if coordinator is not None and (coordinator.first_epoch, coordinator.version) != self.version:
            self.version = (coordinator.first_epoch, coordinator.version)
            for member in coordinator.declared:
                self.generation_of.setdefault((member.worker, member.epoch), coordinator.generation)
            for clock, workers in coordinator.sets.items():
                self.sets.setdefault((coordinator.generation, clock), workers)
        if store is None:
            return
        if self.stores.get(index) is not store:
            self._watch(index, store)
        log, mirror = self.logs[index], self.mirrors[index]
        for name, *arguments in log:
            getattr(self, f"_on_{name}")(process, mirror, *arguments)
        log.clear()

    def _on_first_weights(self, process: Process, mirror: Mirror, pieces: Sequence[m.FirstWeights]) -> None:
        mirror.x = np.concatenate([np.frombuffer(p.payload, np.float32) for p in sorted(pieces, key=lambda p: p.begin)])
        need(not mirror.folded, lambda: "first weights after the first fold")
        mirror.publication = -1
        self._on_publish(process, mirror, zlib.crc32(mirror.x.tobytes()))

    def _id(self, process: Process, mirror: Mirror, pieces: Sequence[m.Push]) -> tuple[PushId, FloatArray, int]:
        """Whose push is folded: once only, of a member of this epoch, and with what it gave."""
        first = pieces[0]
        push = (first.worker, first.epoch, first.clock)
        where = f"{push} on shard {process.index}"
        need(push in self.given, lambda: f"{where} was never pushed")
        need(push not in mirror.folded, lambda: f"{where} is folded twice")
        need((process.index, push) not in self.returned, lambda: f"{where} was given back and is folded")
        need(
            self.generation_of.get(push[:2]) == process.shard.generation,
            lambda: f"{where} is of another generation: epoch unchecked",
        )
        values, samples = self.given[push]
        return push, values[mirror.begin : mirror.end], samples

    def _weight(self, process: Process, mirror: Mirror, push: PushId, samples: int) -> float:
        """At once: over the last known samples of the live members; where unknown, as this one's."""
        ledger = process.shard.ledger
        assert ledger is not None
        live = [row[0] for row in ledger.members]
        need(
            (push[0], push[1]) in [row[:2] for row in ledger.members],
            lambda: f"{push} is folded on shard {process.index}, and its worker is no member",
        )
        mirror.samples[push[0]] = samples
        return samples / sum(mirror.samples.get(worker, samples) for worker in live)

    def _on_fold_update(self, process: Process, mirror: Mirror, pieces: Sequence[m.Push], weight: float) -> None:
        push, values, samples = self._id(process, mirror, pieces)
        mirror.x += np.float32(weight) * values
        if self.mode.barrier:
            mirror.batch.append((weight, push))
        else:
            self._fold_at_once(process, mirror, push, samples, weight)

    def _fold_at_once(self, process: Process, mirror: Mirror, push: PushId, samples: int, weight: float) -> None:
        right = self._weight(process, mirror, push, samples)
        need(weight == right, lambda: f"weight of {push} on shard {process.index} is {weight}, not {right}")
        mirror.folded[push] = weight
        mirror.shown[push] = mirror.publication + 1

    def _on_mean(self, process: Process, mirror: Mirror, pushes: Sequence[tuple[float, Sequence[m.Push]]]) -> None:
        mirror.mean = [(weight, self._id(process, mirror, pieces)[0]) for weight, pieces in pushes]

    def _mean(self, process: Process, mirror: Mirror, weight: float) -> FloatArray:
        """What Store.mean must have given, from the log. Under a barrier the norm of the whole is clipped."""
        terms = mirror.mean
        if self.mode.barrier:
            mirror.batch += terms
        else:
            push = terms[0][1]
            self._fold_at_once(process, mirror, push, self.given[push][1], weight)
        whole = sum_of([(w, self.given[push][0]) for w, push in terms])
        clip = self.run.case.max_grad_norm
        if clip:
            squares = [float(np.dot(part, part)) for part in self._cut(whole)]
            coefficient = clip / (sum(squares) ** 0.5 + 1e-6)
            if coefficient < 1.0:
                whole *= np.float32(coefficient)
        return whole[mirror.begin : mirror.end]

    def _cut(self, whole: FloatArray) -> list[FloatArray]:
        return [whole[mirror.begin : mirror.end] for _, mirror in sorted(self.mirrors.items())]

    def _on_fold_outer(self, process: Process, mirror: Mirror, mean: FloatArray) -> None:
        mean = self._mean(process, mirror, mirror.mean[0][0])
        settings = self.run.case.settings
        rate, momentum = np.float32(settings.outer_lr), np.float32(settings.outer_momentum)
        mirror.momentum = momentum * mirror.momentum + mean
        mirror.x += rate * (mean + momentum * mirror.momentum)

    def _on_fold_gradient(
        self, process: Process, mirror: Mirror, mean: FloatArray, hyper: bytes, absent: Sequence[int], scale: float
    ) -> None:
        from simulation import RATE

        mirror.x -= np.float32(RATE * scale) * self._mean(process, mirror, scale)

    def _on_publish(self, process: Process, mirror: Mirror, checksum: int) -> None:
        mirror.publication += 1
        key = (process.shard.generation, process.index, mirror.publication)
        need(self.publications.setdefault(key, checksum) == checksum, lambda: f"publication {key} is there twice")
        if self.run.case.settings.compress_down == "dense":
            need(
                zlib.crc32(mirror.x.tobytes()) == checksum,
                lambda: f"what shard {process.index} publishes is not the sum of what was folded: {mirror.x}",
            )
        if self.mode.barrier and mirror.publication > 0:
            self._on_close(process, mirror)

    def _on_close(self, process: Process, mirror: Mirror) -> None:
        """A shard has closed a clock: over the coordinator's set, in id order, with samples over their sum."""
        clock, where = mirror.closed, f"clock {mirror.closed} on shard {process.index}"
        workers = tuple(push[0] for _, push in mirror.batch)
        right = self.sets.get((process.shard.generation, clock))
        need(workers == right, lambda: f"{where} is closed over {workers}, not {right}")
        total = sum(self.given[push][1] for _, push in mirror.batch)
        for weight, push in mirror.batch:
            need(push[2] == clock, lambda push=push: f"{where} holds {push}")  # type: ignore[misc]
            expected = self.given[push][1] / total
            need(weight == expected, lambda push=push: f"weight of {push} in {where}")  # type: ignore[misc]
            mirror.folded[push], mirror.shown[push] = weight, mirror.publication
        mirror.batch, mirror.closed = [], clock + 1

    def saved(self, process: Process, clock: int) -> None:
        self.disk[process.index, clock] = self.mirrors[process.index].copy()

    def loaded(self, process: Process, clock: int) -> None:
        mirror = self.mirrors[process.index] = self.disk[process.index, clock].copy()
        need(not self.mode.barrier or mirror.closed == clock, lambda: f"checkpoint {clock} is of clock {mirror.closed}")
        key = (process.shard.generation, process.index, mirror.publication)
        store = process.shard.store
        assert store is not None
        self.publications[key] = zlib.crc32(store.p.tobytes())

    def server_event(self, process: Process, effects: Sequence[ServerEffect], why: str) -> None:
        """After every event of a server, its effects carried out."""
        index, store = process.index, process.shard.store
        self.folds(process)
        if process.coordinator is not None:
            self._coordinator_event(process, effects)
        if store is not None and store.publication >= 0:
            mirror = self.mirrors[index]
            need(
                store.x.tobytes() == mirror.x.tobytes(),
                lambda: f"shard {index} holds {store.x} after {why}, the log gives {mirror.x}",
            )
        for effect in effects:
            if isinstance(effect, e.Send):
                if isinstance(effect.message, m.State):
                    self._on_state(process, effect.message)
                elif isinstance(effect.message, m.PushAck):
                    self._on_ack(process, effect.message)

    def _on_state(self, process: Process, state: m.State) -> None:
        index, mirror = process.index, self.mirrors[process.index]
        clock, master = self.pulls[index, state.worker, state.epoch, state.request]
        where = f"the state of shard {index} for clock {clock} of worker {state.worker}"
        live = self.run.servers[0].coordinator
        assert live is not None
        if live.generation == process.shard.generation:
            need(state.min_clock <= live.min_clock, lambda: f"{where} is ahead of the coordinator")
        bound = 0 if master else self.bound
        need(
            bound is None or clock <= state.min_clock + bound,
            lambda: f"staleness: {where} is of min_clock {state.min_clock}, s = {bound}",
        )
        if master:
            need(bytes(state.payload) == mirror.x.tobytes(), lambda: f"{where} is not the master copy")
            return
        if not state.delta:
            key = (process.shard.generation, index, state.publication)
            need(zlib.crc32(state.payload) == self.publications[key], lambda: f"{where} is not publication {key}")
        if not self.mode.barrier and state.part == state.parts - 1:
            mine = (state.worker, state.epoch)
            shown = [
                (push[2], weight)
                for push, weight in mirror.folded.items()
                if push[:2] == mine and push[2] >= state.min_clock and mirror.shown[push] <= state.publication
            ]
            if self.bound is None:
                shown = shown[-len(state.contains) :] if state.contains else []
            need(list(state.contains) == shown, lambda: f"{where} says it contains {state.contains}, not {shown}")

    def _on_ack(self, process: Process, ack: m.PushAck) -> None:
        push, mirror = (ack.worker, ack.epoch, ack.clock), self.mirrors[process.index]
        if ack.status == m.PushStatus.FOLDED:
            weight = mirror.folded.get(push)
            need(weight is not None, lambda: f"{push} is acknowledged as folded by shard {process.index} and is not")
            need(ack.weight in (0.0, weight), lambda: f"{push} is acknowledged with {ack.weight}, folded with {weight}")
        else:
            need(  # or it was folded in the same event, after the ack was made
                push in mirror.folded or self._is_held(process, ack.worker, ack.clock),
                lambda: f"{push} is acknowledged as held by shard {process.index} and is not",
            )

    def _is_held(self, process: Process, worker: int, clock: int) -> bool:
        """Whole on the shard and not yet folded, be it in a mean that waits for the norm over all shards."""
        waits = clock in process.shard.means and any(push[0] == worker for _, push in self.mirrors[process.index].mean)
        return waits or worker in process.shard.held.get(clock, {})

    # What the coordinator decides.

    def _coordinator_event(self, process: Process, effects: Sequence[ServerEffect]) -> None:
        coordinator = process.coordinator
        assert coordinator is not None
        if coordinator.generation != self.generation:
            self._on_generation(process, effects)
        elif coordinator.min_clock != self.min_clock:
            self._on_min_clock(process)
            for member in coordinator.declared:
                made = self.made.get((member.worker, member.epoch), member.start)
                need(
                    coordinator.min_clock <= made,
                    lambda w=member.worker, made=made: f"min_clock is {coordinator.min_clock}, live worker {w} has {made}",  # type: ignore[misc]
                )
        elif coordinator.started and not self.started:
            self._moved("the start")
        self.started, self.min_clock = coordinator.started, coordinator.min_clock

    def _on_generation(self, process: Process, effects: Sequence[ServerEffect]) -> None:
        coordinator = process.coordinator
        assert coordinator is not None
        run, again = self.run, self.lost_to >= 0
        self.generation, self.min_clock = coordinator.generation, coordinator.min_clock
        self._moved("a generation")
        if not again:
            return
        clock = coordinator.restart_clock
        for shard in range(run.case.settings.shards):
            need(
                clock < 0 or clock in run.disk.clocks(shard),
                lambda shard=shard: f"the run goes back to clock {clock}, shard {shard} has no checkpoint of it",  # type: ignore[misc]
            )
        need(clock <= self.lost_to, lambda: f"the run goes on at {clock}, after clock {self.lost_to}")
        need(coordinator.min_clock == max(clock, 0), lambda: f"min_clock {coordinator.min_clock} after a restart")

    def _on_min_clock(self, process: Process) -> None:
        coordinator = process.coordinator
        assert coordinator is not None
        need(coordinator.min_clock > self.min_clock, lambda: f"min_clock falls to {coordinator.min_clock}")
        self._moved(f"min_clock {coordinator.min_clock}")
        for clock in range(self.min_clock, coordinator.min_clock):
            inside = self.sets.get((coordinator.generation, clock))
            live = [w.worker for w in coordinator.declared if w.start <= clock]
            if self.mode.barrier:
                need(inside is not None, lambda clock=clock: f"clock {clock} has no set")  # type: ignore[misc]
                assert inside is not None
                need(set(live) <= set(inside), lambda clock=clock, inside=inside, live=live: f"clock {clock} is closed over {inside}, {live} are live")  # type: ignore[misc] # fmt: skip # noqa: E501
                live = list(inside)
            for worker in live:
                self._arrived_everywhere(worker, clock)

    def _arrived_everywhere(self, worker: int, clock: int) -> None:
        """min_clock has passed what it may pass: an update that is on every shard."""
        for index, process in self.run.servers.items():
            if not self.run.sim.alive(process.up) or process.shard.generation != self.generation:
                continue
            if index not in self.mirrors or self._is_held(process, worker, clock):
                continue
            need(
                any(push[0] == worker and push[2] == clock for push in self.mirrors[index].folded),
                lambda index=index: f"clock {clock} is complete, shard {index} lacks the update of worker {worker}",  # type: ignore[misc]
            )

    # Progress.

    def _strikes(self) -> Counter[str]:
        return Counter(self.run.sim.struck)

    def _moved(self, what: str) -> None:
        """The run has moved: not later than a lease and what the faults in between may cost."""
        run, now_ns = self.run, self.run.sim.now_ns
        strikes = self._strikes() - self.moved_struck
        timing_ns = NS
        lease_ns = int(run.case.settings.lease * NS)
        allowed = lease_ns + 4 * max(run.case.step_ns) + timing_ns
        allowed += (strikes["lost"] + strikes["reordered"] + strikes["duplicated"]) * (NS + run.case.faults.late_ns)
        if strikes["shard restarted"] and run.case.restart is not None:
            allowed += run.case.restart[3] + 2 * lease_ns
        waited = now_ns - self.moved_ns
        need(
            waited <= allowed,
            lambda: f"progress: {waited / NS:.2f} s before {what}, allowed are {allowed / NS:.2f}: {dict(strikes)}",
        )
        self.moved_ns, self.moved_struck = now_ns, self._strikes()

    def whereabouts(self) -> str:
        workers = [
            f"{w.name} {w.member.phase} clock {w.clock}{' ended' if w.ended else ''}" for w in self.run.workers.values()
        ]
        return f"min_clock {self.min_clock}, {'; '.join(workers)}"

    def ended(self) -> None:
        """The last look: what every shard holds is the first weights and all that was folded, in the order of the log."""
        for index, mirror in self.mirrors.items():
            store = self.stores[index]
            need(store.x.tobytes() == mirror.x.tobytes(), lambda index=index: f"shard {index} at the end")  # type: ignore[misc]


def sum_of(terms: Sequence[tuple[float, FloatArray]]) -> FloatArray:
    """Sum of weight * values in the order given, in float32."""
    total = np.float32(terms[0][0]) * terms[0][1]
    for weight, values in terms[1:]:
        total = total + np.float32(weight) * values
    return np.asarray(total, np.float32)


_ = Rule
