"""The shard machine: one key range, its store, the pushes and pulls of every member, and where the cluster has a server
above, when its uplink pushes and what waits for it. No I/O.

Rules
- A push is held until all its parts are here. Update c of a worker is accepted after update c-1, exactly once.
- At once: an accepted push is folded and acked FOLDED. With a barrier it is acked HELD, and folded when the ledger closes
  a clock over a set that names it; what no set ever will, since its worker left, is discarded, named and counted.
- With a barrier a pull is answered once all that the worker pushed before is in the published state.
- What a message says is checked before anything changes. The ledger is obeyed, never second-guessed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from narrows.compression import ladder, parse
from narrows.protocols import messages as m
from narrows.protocols.effects import (
    NS,
    Checkpoint,
    GiveWeights,
    Load,
    Log,
    MemberEffect,
    PushSettled,
    Send,
    ServerEffect,
    StateArrived,
    Tell,
)
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.peers import EARLY_MAX
from narrows.protocols.keys import Plan, covers, fragment, parts, split
from narrows.protocols.member.member import Session, Timing
from narrows.protocols.member.meter import LinkMeter
from narrows.protocols.modes import PULLS_MAX, Rule, Settings
from narrows.protocols.wire import unpack
from narrows.ps.sideways import Sideways
from narrows.ps.store import FloatArray, Keys, ServerOptimizer, Store, check_payload
from narrows.ps.uplink import Place, Seen, Uplink

REPORT_RETRY_NS = NS // 5
REPORT_AGAIN_NS = NS  # a restarted coordinator knows no shard until it hears from it
COORDINATOR = b""  # the peer that a shard's report goes to
UPLINKS: dict[Rule, type[Uplink]] = {Rule.MIX: Sideways}  # by the rule of the run above; of all others `Uplink`


@dataclass(slots=True)
class Inbox:
    """One member on this shard. `clock`: updates of it accepted here; `moved`: the first report that tells of the last."""

    worker: int
    epoch: int
    clock: int
    taken: int = 0  # updates of it below are in x (barrier)
    settled: int = 0  # and below this in the published state, or min_clock is here, before which it was no member
    moved: int = 0
    peer: bytes = b""
    samples: int = 0
    partial: dict[int, dict[int, m.Push]] = field(default_factory=dict)
    contained: deque[tuple[int, float, int]] = field(default_factory=deque)  # clock, weight, publication it is in
    pulls: deque[tuple[m.Pull, int]] = field(default_factory=deque)  # not answered yet, and when they came
    asked: int = 0  # the newest request
    answered: tuple[int, int] = (0, -1)  # the last request, and the publication that it was answered with
    coding: str = ""  # SPEC that it asks for, where published states are coded with `auto`


class Shard:
    """Messages of workers and ledgers in, effects out."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        incarnation: int,
        port: int = 0,
        *,
        optimizer: Callable[[Plan, int, int], ServerOptimizer] | None = None,
        lent: Callable[[], bool] = lambda: True,
        checkpoints: tuple[int, ...] = (),
        child: bool = False,
    ) -> None:
        self.index, self.settings, self.mode = index, settings, settings.mode()
        self.incarnation, self.port = incarnation, port
        self.make_optimizer, self.lent = optimizer, lent
        self.checkpoints = list(checkpoints)
        self.store: Store | None = None
        self.plan: Plan | None = None
        self.ledger: m.Ledger | None = None
        self.inboxes: dict[int, Inbox] = {}
        self.held: dict[int, dict[int, list[m.Push]]] = {}  # update -> worker -> parts
        self.first: dict[int, m.FirstWeights] = {}
        self.weights_from = -1
        self.min_clock = 0  # what is folded has all updates below it
        self.published = 0  # and what is published, all below this
        self.generation = 0
        self.epoch = 0
        self.folds = 0  # since the last publication (async)
        self.samples = 0  # of the newest set (barrier)
        self.means: dict[int, tuple[FloatArray, bytes, tuple[int, ...]]] = {}  # folded, waiting for the norm
        self.norms: dict[int, float] = {}
        self.summed: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}  # parts of the mean taken early, of whom
        # What the downlink may be coded with, densest first: the sparsest that a live worker asks for, or the last.
        rungs = ladder(settings.compress_down, sparse=self.mode.rule is not Rule.OPTIMIZER)
        self.codings = [rung.spec for rung in rungs]
        self.lossy_down = not all(parse(spec).lossless for spec in self.codings)
        self.written = -1
        self.writes = False  # a checkpoint, before the clocks after it may be folded: the next tick goes on
        self.version = 0
        self.report_seen = -1
        self.newest: m.Report | None = None
        self.reported_ns = 0
        self.discarded = 0
        self.hyper_differs = False
        self.wants_buffers: Callable[[int, int], bool] = lambda worker, now_ns: False
        self.uplink = Uplink(index) if child else None  # where this cluster is a member of a run above
        self.place: Place | None = None  # there, as the ledger has it
        self.early: deque[m.Message] = deque(maxlen=EARLY_MAX)  # of other clusters, before this one has its place
        self.folded = 0  # clocks whose updates are all in x; those from min_clock on wait for the run above
        self.session: Callable[[Place], Session] = self._own_session
        self.repeats = True  # what the shard above does not answer; in process 0 the member does
        self.renewed = False  # nobody here has a state of before the present place
        self.finishes = 0
        self.trouble = ""
        self.told: tuple[int | bool | str, ...] | None = None  # `_standing` as of the newest report

    # The ledger.

    def handle_ledger(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Obey the newest decisions of the coordinator."""
        if ledger.generation < self.generation:
            return []  # of a coordinator before this one: its versions count for nothing
        self.seen(ledger.report_seen)
        if self.ledger is not None and (ledger.generation, ledger.version) <= (self.generation, self.ledger.version):
            return []
        effects: list[ServerEffect] = []
        if ledger.generation != self.generation:
            if ledger.restart_clock >= 0 and not ledger.plan:
                return effects  # it comes with the next ledger
            effects += self._restart(ledger)
        if ledger.plan and self.plan is None:
            self._adopt_plan(Plan.unpacked(ledger.plan))
        if self.ledger is None or ledger.above != self.ledger.above:
            self.place = Place.unpacked(ledger.above) if ledger.above else None
            kind = UPLINKS.get(self.place.settings.mode().rule, Uplink) if self.place is not None else Uplink
            if self.place is not None and type(self.uplink) is not kind:
                self.uplink = kind(self.index)
        self.ledger = ledger
        effects += self._take_place(ledger, now_ns)
        effects += self._introduce(ledger, now_ns)
        effects += self._members(ledger, now_ns)
        if self.uplink is not None and self.store is not None:
            effects += self._give_weights(self.uplink, self.store, ledger, now_ns)
        effects += self._advance(ledger, now_ns)
        effects += self._answer_pulls(now_ns)
        return [*effects, self._report(now_ns)]

    def _adopt_plan(self, plan: Plan) -> None:
        self.plan = plan
        begin, end = split(plan.size, self.settings.shards)[self.index]
        rule = self.mode.rule
        self.store = Store(
            begin,
            end,
            barrier=self.mode.barrier,
            compress_down=self.settings.compress_down,
            outer=(self.settings.outer_lr, self.settings.outer_momentum) if rule is Rule.OUTER else None,
            lent=self.lent,
        )
        self.store.code_with(self.codings[-1])
        if rule is Rule.OPTIMIZER:
            if self.make_optimizer is None:
                raise RemoteProtocolError("this server has no optimizer for pushed gradients")
            self.store.optimizer = self.make_optimizer(plan, begin, end)

    def _restart(self, ledger: m.Ledger) -> list[ServerEffect]:
        """A new generation: forget every member and all of the store, and go back to its checkpoint."""
        effects: list[ServerEffect] = []
        lost = sum(len(workers) for workers in self.held.values()) + sum(len(i.partial) for i in self.inboxes.values())
        self.generation = ledger.generation
        self.inboxes.clear()
        self.held.clear()
        self.first.clear()
        self.means.clear()
        self.norms.clear()
        self.summed.clear()
        self.discarded += lost
        self.plan = self.store = None
        self.uplink, self.renewed, self.finishes = (Uplink(self.index) if self.uplink is not None else None), False, 0
        self.weights_from, self.written, self.writes, self.folds = -1, -1, False, 0
        reached, self.min_clock = self.min_clock, max(ledger.restart_clock, 0)
        self.folded = self.published = self.min_clock
        if reached > self.min_clock:  # said by each shard: where shard 0 was restarted, its coordinator does not know
            where = {"shard": self.index, "from_clock": self.min_clock, "to_clock": reached}
            text = (
                f"shard {self.index} goes back from clock {reached} to {self.min_clock}: what was folded since is lost"
            )
            effects.append(Log("lost", where | {"text": text}))
        load = ledger.restart_clock >= 0 or self.checkpoints
        self.checkpoints = [clock for clock in self.checkpoints if clock <= ledger.restart_clock]
        return [*effects, Load(ledger.restart_clock)] if load else effects

    def _members(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        effects: list[ServerEffect] = []
        if ledger.epoch == self.epoch:
            return effects
        self.epoch = ledger.epoch
        now_members = {worker: (epoch, clock) for worker, epoch, clock in ledger.members}
        for worker in [w for w in self.inboxes if w not in now_members]:
            inbox = self.inboxes.pop(worker)
            for clock, pieces in inbox.partial.items():
                effects.append(self._discard(worker, clock, f"{len(pieces)} of its parts had come"))
        for worker, (epoch, clock) in now_members.items():
            if worker not in self.inboxes:
                self.inboxes[worker] = Inbox(worker, epoch, clock, clock, min(clock, self.min_clock))
        wanted = {*ledger.departed, *(pair for row in ledger.sets for pair in _pairs(row))}
        for update, by_worker in list(self.held.items()):
            for worker in [w for w in by_worker if w not in self.inboxes and (w, update) not in wanted]:
                self._take_held(worker, update)
                effects.append(self._discard(worker, update, "it left before all shards had it"))
        return effects

    def _take_held(self, worker: int, update: int) -> list[m.Push]:
        by_worker = self.held[update]
        pieces = by_worker.pop(worker)
        if not by_worker:
            del self.held[update]
        return pieces

    def _discard(self, worker: int, clock: int, why: str) -> Log:
        self.discarded += 1
        return Log("discarded", {"worker": worker, "clock": clock, "shard": self.index, "why": why})

    def _advance(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        effects: list[ServerEffect] = []
        sets = {row[0]: _pairs(row) for row in ledger.sets}
        norms = dict(ledger.norms)
        uplink, store = self.uplink, self.store
        while self.min_clock < ledger.min_clock and store is not None:
            clock = self.min_clock
            if self.folded == clock:
                if uplink is not None:
                    effects += self._take_place(ledger, now_ns)
                    more, done = self._finish(uplink, store, ledger, now_ns)
                    effects += more
                    if not done:
                        break
                if self.mode.barrier:
                    if clock not in sets:
                        break
                    done, more = self._close(clock, sets[clock], norms)
                    effects += more
                    if not done:
                        break
                self.folded += 1
                if uplink is not None:
                    live = sum(inbox.samples for inbox in self.inboxes.values())
                    uplink.stepped(self.samples if self.mode.barrier else live)
            if uplink is not None:
                more, done = self._upward(uplink, store, ledger, now_ns)
                effects += more
                if not done:
                    break
            self.min_clock += 1
            for inbox in self.inboxes.values():
                inbox.settled = min(inbox.taken, self.min_clock)
            if self.mode.bound is not None:
                effects += self._publish()
            if ledger.checkpoint == self.min_clock and self.written != self.min_clock:
                effects.append(self._checkpoint())
                self.writes = self.mode.barrier and self.min_clock < ledger.min_clock
                if self.writes:
                    break
        if uplink is not None and store is not None and self.folded == self.min_clock:
            effects += self._take_place(ledger, now_ns)
            effects += self._finish(uplink, store, ledger, now_ns)[0]
            if uplink.master is not None and uplink.start is not uplink.master:
                self._rebase(uplink, store, uplink.master)
        at = ledger.checkpoint == self.min_clock == ledger.min_clock and self.written != self.min_clock
        if at and self.store is not None and self.store.publication >= 0:
            effects.append(self._checkpoint())
        return effects

    def _checkpoint(self) -> Checkpoint:
        self.written = self.min_clock
        return Checkpoint(self.min_clock)

    def wrote_checkpoint(self, clock: int, kept: tuple[int, ...]) -> None:
        """The runner wrote it; `kept` are the clocks now on disk. The next tick reports it."""
        self.checkpoints = list(kept)
        self.version += 1

    def _close(self, clock: int, updates: list[m.Pair], norms: dict[int, float]) -> tuple[bool, list[ServerEffect]]:
        """Fold the closed set of `clock`: (worker, its update). False while the norm over all shards is awaited."""
        store = self.store
        effects: list[ServerEffect] = []
        assert store is not None
        if clock not in self.means:
            missing = [(w, update) for w, update in updates if w not in self.held.get(update, {})]
            assert not missing, f"shard {self.index} lacks updates {missing} in the set of clock {clock}"
            held = {worker: self._take_held(worker, update) for worker, update in updates}
            workers = tuple(held)
            for worker, update in updates:
                if worker in self.inboxes:
                    self.inboxes[worker].taken = update + 1
            self.samples = total = sum(held[w][0].samples for w in workers)
            pushes = [(held[w][0].samples / total, held[w]) for w in workers]
            if not pushes:
                return True, effects
            if self.mode.rule is Rule.ADD:
                for weight, pieces in pushes:
                    store.fold_update(pieces, weight)
                return True, effects
            by_whom = tuple((w, held[w][0].samples) for w in workers)
            early = all(self.summed.get((part.begin, part.end)) == by_whom for w in workers for part in held[w])
            mean = store.total() if early else store.mean(pushes)
            self.summed.clear()
            if self.mode.rule is Rule.OUTER:
                store.fold_outer(mean, self._turn(store, clock))
                return True, effects
            hyper, absent, differs = self._hyper(held, workers)
            if differs and not self.hyper_differs:
                self.hyper_differs = True
                effects.append(Log("hyper", {"clock": clock, "text": "learning rates or other hyper-parameters differ "
                                             "between workers; those of the longest-standing member hold"}))  # fmt: skip
            self.means[clock] = (mean, hyper, absent)
        mean, hyper, absent = self.means[clock]
        assert self.plan is not None
        if self.plan.max_grad_norm > 0:
            self.norms[clock] = float(np.dot(mean, mean))
            if clock not in norms:
                return False, effects
            coefficient = self.plan.max_grad_norm / (norms[clock] + 1e-6)  # torch.nn.utils.clip_grad_norm_
            if coefficient < 1.0:
                mean *= np.float32(coefficient)
            self.norms.pop(clock)
        store.fold_gradient(mean, hyper, absent, 1.0)
        del self.means[clock]
        return True, effects

    def _turn(self, store: Store, clock: int) -> Keys:
        """The keys that updates of this clock carry."""
        return fragment(store.begin, store.end, self.mode.fragments, self.mode.fragment(clock))

    def _hyper(self, held: dict[int, list[m.Push]], workers: m.Ints) -> tuple[bytes, tuple[int, ...], bool]:
        """Hyper-parameters of the longest-standing member, tensors that no one has a gradient of, and whether any differ."""
        values = []
        for worker in workers:
            hyper, absent = _unpack_hyper(held[worker][0].hyper)
            values.append((hyper, set(absent)))
        absent_in_all = set.intersection(*(absent for _, absent in values))
        return values[0][0], tuple(sorted(absent_in_all)), any(hyper != values[0][0] for hyper, _ in values)

    def _publish(self) -> list[ServerEffect]:
        store = self.store
        assert store is not None
        effects: list[ServerEffect] = []
        # One residual for all children: the slowest link decides. Who does not know its link yet is content with what is.
        before = store.down.spec
        asked = [(self.codings.index(i.coding or before), i.worker) for i in self.inboxes.values()]
        rung, worker = max(asked, default=(self.codings.index(before), -1))
        after = self.codings[rung]
        if after != before:
            where = {"shard": self.index, "clock": self.min_clock, "from": before, "to": after}
            text = f"shard {self.index} codes states with {after}, not {before}: worker {worker} asks for it"
            effects.append(Log("compress", where | {"text": text}))
            store.code_with(after)
        store.publish(self._turn(store, self.min_clock - 1) if self.mode.fragments > 1 else None)
        self.folds, self.published = 0, self.min_clock
        return effects

    # The run above.

    def _own_session(self, place: Place) -> Session:
        """Of a shard that has no member of its own beside it."""
        return Session(self.index, place.worker, place.epoch, place.settings.mode(), Timing(), LinkMeter())

    def _take_place(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Begin at the place that the ledger names, where the clocks before it are folded."""
        uplink, store, place = self.uplink, self.store, self.place
        if uplink is None or store is None or place is None or not self._displaced():
            return []
        if not self.inboxes.keys() & {worker for worker, *_ in ledger.members}:
            self.min_clock = self.folded = self.published = place.at  # the run above has gone on without us
            self.renewed = True
        if self.folded < place.at or self.min_clock < place.at:
            return []
        self.finishes = 0
        taken = uplink.adopt(place, (store.begin, store.end), self.session(place), self.renewed, now_ns)
        return [*sends(taken), *self._introduce(ledger, now_ns)]

    def _displaced(self) -> bool:
        """The ledger has a place that the uplink has not taken yet."""
        return self.uplink is not None and self.place is not None and self.uplink.place != self.place

    def _upward(self, uplink: Uplink, store: Store, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Push what is owed and let x stand on what has come; false where the clock folded last must wait for either."""
        if not ledger.above or self._displaced():
            return [], True  # the run above has lost us, or we it
        effects: list[ServerEffect] = []
        if uplink.owes:
            effects += sends(uplink.make_room(now_ns))
            if not uplink.has_room:
                return effects, False
            effects += sends(uplink.push(store.x, now_ns))
        if not uplink.ready or not uplink.may_go:
            return effects, False
        self._rebase(uplink, store, uplink.base())
        return effects, True

    def _rebase(self, uplink: Uplink, store: Store, base: FloatArray | None) -> None:
        if base is not None and uplink.start is not None:
            store.rebase(uplink.start, base)
            uplink.start = base

    def _finish(self, uplink: Uplink, store: Store, ledger: m.Ledger, now_ns: int) -> tuple[list[ServerEffect], bool]:
        """Once all workers are done: push all that is left. False where this is yet to be done, before the next clock."""
        if self.finishes == ledger.finishes or self.folded < ledger.finish_at:
            return [], True
        if not ledger.above or self._displaced():
            return [], True
        effects = sends(uplink.make_room(now_ns))
        if not uplink.has_room or not uplink.may_go:
            return effects, False
        self.finishes = ledger.finishes
        return [*effects, *sends(uplink.finish(store.x, now_ns))], True

    def from_above(self, seen: Iterable[MemberEffect], now_ns: int) -> list[ServerEffect]:
        """Return the effects of what a session toward the shard above has seen."""
        effects: list[ServerEffect] = []
        uplink, store, ledger = self.uplink, self.store, self.ledger
        if uplink is None or store is None or ledger is None:
            return effects
        for event in seen:
            if isinstance(event, GiveWeights):
                uplink.wants_weights = True
                effects += self._give_weights(uplink, store, ledger, now_ns)
            elif isinstance(event, PushSettled):
                uplink.settled(event.clock)
            elif isinstance(event, StateArrived):
                effects += sends(uplink.arrived(event, now_ns))
            else:
                effects += sends([event])
        return self._went_on(effects, ledger, now_ns)

    def _went_on(self, effects: list[ServerEffect], ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """`effects`, and all that can be done now that something has come from above or from another cluster."""
        uplink, store = self.uplink, self.store
        if uplink is not None and store is not None and not uplink.ready and uplink.due:
            self._begin(uplink, store)
        effects = [*effects, *self._advance(ledger, now_ns), *self._answer_pulls(now_ns)]
        if uplink is not None and uplink.trouble:
            self.trouble = uplink.trouble[: m.TEXT_MAX]
        if self.told != self._standing:  # not: what has changed here, for the session has changed before we hear of it
            effects.append(self._report(now_ns))
        return effects

    def hear(self, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of another cluster's message. Raises RemoteProtocolError for one that none sends us."""
        uplink, ledger = self.uplink, self.ledger
        if uplink is None:
            raise RemoteProtocolError(f"a shard takes no {type(message).__name__}: this cluster has no server above")
        if ledger is None or self.place is None or self._displaced():
            self.early.append(message)
            return []
        return self._went_on(sends(uplink.hear(message, now_ns)), ledger, now_ns)

    def _introduce(self, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Tell the uplink who the other clusters are, and what they have said too early."""
        uplink = self.uplink
        if uplink is None or self.place is None or self._displaced():
            return []
        effects = sends(uplink.introduce(ledger.roster, ledger.alone, now_ns))
        while self.early:
            with contextlib.suppress(RemoteProtocolError):
                effects += sends(uplink.hear(self.early.popleft(), now_ns))
        return effects

    def _begin(self, uplink: Uplink, store: Store) -> None:
        """The first state at this place is here. Who has nothing of ours yet is shown it at once."""
        uplink.ready = True
        if uplink.start is None:
            base = uplink.base()
            assert base is not None
            uplink.start = base
            store.restart(base.copy(), base.copy(), store.publication + 1)
        elif self.renewed:
            self._rebase(uplink, store, uplink.base())
            store.restart(store.x, store.x.copy(), store.publication + 1)
        self.renewed = False

    def _give_weights(self, uplink: Uplink, store: Store, ledger: m.Ledger, now_ns: int) -> list[ServerEffect]:
        """Hand up the first weights, once all shards have those of one worker, or a checkpoint."""
        decided = self.weights_from < 0 or ledger.weights == self.weights_from
        if not uplink.wants_weights or store.publication < 0 or not decided:
            return []
        return sends(uplink.give_weights(store.x, now_ns))

    @property
    def at_rest(self) -> bool:
        """The run above has all that is to come from this shard."""
        uplink, ledger = self.uplink, self.ledger
        if uplink is None or ledger is None or not ledger.above:
            return True
        return ledger.over and self.min_clock >= ledger.min_clock and uplink.at_rest

    @property
    def _standing(self) -> tuple[int | bool | str, ...]:
        """What the run above may change of a report."""
        ready, ended = (self.uplink.ready, self.uplink.ended) if self.uplink is not None else (False, False)
        return (self.min_clock, ready, self.at_rest, self.finishes, ended, self.trouble)

    # Messages of workers.

    def handle(self, peer: bytes, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a worker's message. Raises RemoteProtocolError for one that is none."""
        if not isinstance(message, (m.Push, m.Pull, m.FirstWeights)):
            raise RemoteProtocolError(f"a shard takes no {type(message).__name__}")
        inbox = self.inboxes.get(message.worker)
        if inbox is None or message.epoch != inbox.epoch:
            if self.ledger is None or message.epoch > self.epoch:
                return []  # who is a member has not reached this shard yet; it will ask again
            text = f"worker {message.worker} is no member (its lease expired, or the server was restarted)"
            return [Send(peer, m.Refuse(m.RefuseCode.NOT_A_MEMBER, message.worker, message.epoch, text))]
        inbox.peer = peer
        if isinstance(message, m.Push):
            return self._push(inbox, message, now_ns)
        if isinstance(message, m.FirstWeights):
            return self._first_weights(inbox, message, now_ns)
        if message.request <= inbox.asked:
            return []  # a copy, or overtaken by a newer one, which it must not replace
        if message.coding and message.coding not in self.codings:
            raise RemoteProtocolError(
                f"worker {inbox.worker} asks for states coded with {message.coding[:60]!r}; --compress-down "
                f"{self.settings.compress_down} is {', '.join(self.codings)}"
            )
        if not message.after:
            inbox.pulls.clear()
        elif message.after != (inbox.pulls[-1][0].request if inbox.pulls else inbox.answered[0]):
            return []  # the one before it was lost: both will be asked for again
        elif len(inbox.pulls) >= 2 * PULLS_MAX:  # it may take one for answered that it gave up
            raise RemoteProtocolError(f"worker {inbox.worker} has {len(inbox.pulls)} pulls under way: no more may be")
        inbox.pulls.append((message, now_ns))
        inbox.asked, inbox.coding = message.request, message.coding
        effects = self._answer(inbox, now_ns)
        # Who waits for the last model needs not be waited for: the coordinator must know.
        return [*effects, self._report(now_ns)] if self._finishing(inbox) else effects

    def _finishing(self, inbox: Inbox) -> bool:
        """It is done, and waits for the model that all clusters end with."""
        if self.uplink is None or not inbox.pulls:
            return False
        pull, _ = inbox.pulls[0]
        return pull.master and 0 < pull.clock <= inbox.clock

    def _check_part(self, message: m.Push | m.FirstWeights) -> Store:
        store = self.store
        if store is None:
            raise RemoteProtocolError("a push before any model was declared")
        inside = store.begin <= message.begin <= message.end <= store.end
        if not inside or not 0 <= message.part < message.parts <= m.PARTS_MAX:
            raise RemoteProtocolError(
                f"part {message.part} of {message.parts}, keys [{message.begin}, {message.end}), is not within "
                f"this shard's [{store.begin}, {store.end})"
            )
        check_payload(message, finite=self.lossy_down)
        return store

    def _first_weights(self, inbox: Inbox, message: m.FirstWeights, now_ns: int) -> list[ServerEffect]:
        ledger = self.ledger
        assert ledger is not None
        if ledger.started or ledger.initialiser != inbox.worker or self.weights_from == inbox.worker:
            return []
        if self.uplink is not None and not self.uplink.wants_weights:
            return []  # the run above has some by now
        store = self._check_part(message)
        if any(part.worker != inbox.worker for part in self.first.values()):
            self.first.clear()
        self.first[message.part] = message
        pieces = list(self.first.values())
        if len(pieces) < message.parts:
            return []
        if not covers([(p.begin, p.end) for p in pieces], store.begin, store.end):
            self.first.clear()
            raise RemoteProtocolError("the first weights do not cover this shard's keys exactly once")
        store.first_weights(pieces)
        self.first.clear()
        self.weights_from = inbox.worker
        return [self._report(now_ns)]

    def _push(self, inbox: Inbox, push: m.Push, now_ns: int) -> list[ServerEffect]:
        ledger = self.ledger
        assert ledger is not None
        if push.clock < inbox.clock:
            return [self._ack(inbox, push.clock, now_ns)]
        if not ledger.started:
            return []
        if push.clock >= inbox.clock + self.mode.window:
            raise RemoteProtocolError(
                f"update {push.clock} of worker {inbox.worker}, whose clock is {inbox.clock}: "
                f"at most {self.mode.window} may be in flight"
            )
        if not 0 < push.samples <= m.CLOCK_MAX:
            raise RemoteProtocolError(f"{push.samples} samples")
        store = self._check_part(push)
        if push.part == 0 and store.optimizer is not None:
            store.optimizer.check(_unpack_hyper(push.hyper)[0])
        inbox.partial.setdefault(push.clock, {})[push.part] = push
        if self.mode.barrier and push.clock == inbox.taken and self.mode.rule is not Rule.ADD:
            self._sum_early(push.part)
        effects: list[ServerEffect] = []
        while True:
            pieces = inbox.partial.get(inbox.clock)
            if pieces is None or len(pieces) < pieces[min(pieces)].parts:
                break
            ordered = [pieces[part] for part in sorted(pieces)]
            del inbox.partial[inbox.clock]
            if not covers([(p.begin, p.end) for p in ordered], *self._turn(store, inbox.clock)):
                raise RemoteProtocolError("the parts of a push do not cover this shard's keys exactly once")
            effects += self._accept(inbox, ordered, now_ns)
        return effects

    def _sum_early(self, part: int) -> None:
        """Take the mean of one part as soon as all live members have sent it, while other parts are still on their way.

        Most likely they are the set that the clock is closed over; `_close` looks whether they were, and else begins anew.
        """
        pieces: list[tuple[int, m.Push]] = []
        for worker, inbox in sorted(self.inboxes.items()):
            accepted = self.held.get(inbox.taken, {}).get(worker)
            found = dict(enumerate(accepted)) if accepted else inbox.partial.get(inbox.taken, {})
            if part not in found:
                return
            pieces.append((worker, found[part]))
        keys = {(piece.begin, piece.end) for _, piece in pieces}
        if len(keys) == 1 and self.store is not None:
            total = sum(piece.samples for _, piece in pieces)
            self.store.mean([(piece.samples / total, [piece]) for _, piece in pieces])
            self.summed[keys.pop()] = tuple((worker, piece.samples) for worker, piece in pieces)

    def _accept(self, inbox: Inbox, pieces: list[m.Push], now_ns: int) -> list[ServerEffect]:
        clock = inbox.clock
        inbox.samples = pieces[0].samples
        if self.mode.barrier:
            self.held.setdefault(clock, {})[inbox.worker] = pieces
        else:
            weight = self._weight(inbox)
            self._fold_at_once(pieces, weight)
            if self.uplink is not None:
                self.uplink.moved()
            assert self.store is not None
            inbox.contained.append((clock, weight, self.store.publication + 1))
            while len(inbox.contained) > 4 * self.mode.window:
                inbox.contained.popleft()
        inbox.clock += 1
        inbox.moved = self.version + 1
        effects: list[ServerEffect] = [self._ack(inbox, clock, now_ns)]
        if self.mode.bound is None:
            self.folds += 1
            if self.folds >= len(self.inboxes):
                effects += self._publish()
                effects += self._answer_pulls(now_ns)
        return [*effects, self._report(now_ns)]

    def _weight(self, inbox: Inbox) -> float:
        """samples over the sum of the last known samples of the live members; unknown ones count as this one's."""
        return inbox.samples / sum(other.samples or inbox.samples for other in self.inboxes.values())

    def _fold_at_once(self, pieces: list[m.Push], weight: float) -> None:
        store, rule = self.store, self.mode.rule
        assert store is not None
        if rule is Rule.ADD:
            store.fold_update(pieces, weight)
        elif rule is Rule.MIX:
            store.first_weights(pieces)  # the last model, of one worker for all
        elif rule is Rule.OUTER:
            store.fold_outer(store.mean([(weight, pieces)]), (store.begin, store.end))
        else:
            assert self.plan is not None
            hyper, absent = _unpack_hyper(pieces[0].hyper)
            store.fold_gradient(store.mean([(1.0, pieces)]), hyper, absent, weight)

    def _ack(self, inbox: Inbox, clock: int, now_ns: int) -> Send:
        folded = not self.mode.barrier or clock < inbox.settled
        weight = next((w for c, w, _ in inbox.contained if c == clock), 0.0)
        status = m.PushStatus.FOLDED if folded else m.PushStatus.HELD
        wants = self.wants_buffers(inbox.worker, now_ns)
        ack = m.PushAck(inbox.worker, inbox.epoch, clock, int(status), weight, wants, now_ns, now_ns)
        return Send(inbox.peer, ack)

    # Pulls.

    def _answer_pulls(self, now_ns: int) -> list[ServerEffect]:
        effects: list[ServerEffect] = []
        for inbox in self.inboxes.values():
            if inbox.pulls:
                effects += self._answer(inbox, now_ns)
        return effects

    def _answer(self, inbox: Inbox, now_ns: int) -> list[ServerEffect]:
        """Answer the oldest pull, if that is to be answered now. Then there is nothing newer for the one after it; behind
        a master copy it waits for the next turn."""
        ledger, store = self.ledger, self.store
        pull, asked_ns = inbox.pulls[0]
        assert ledger is not None
        if not ledger.started or store is None or store.publication < 0:
            wanted = self.uplink is None or self.uplink.wants_weights
            if wanted and ledger.initialiser == inbox.worker and self.weights_from != inbox.worker:
                return [Send(inbox.peer, m.NeedWeights(inbox.worker, inbox.epoch))]
            return []
        # With no bound clocks are complete between two publications: then they are in x, and not in p yet.
        min_clock = self.min_clock if pull.master else self.published
        settled = inbox.settled if self.mode.barrier else min_clock
        if pull.clock > settled if pull.master else not self.mode.allows(pull.clock, settled):
            return []
        have = inbox.answered[1] if pull.after else pull.have
        if not pull.master and have == store.publication:
            return []  # it has the newest: the next publication is its answer
        final = self.uplink.master if self.uplink is not None else None
        if self._finishing(inbox) and final is None:
            return []
        last = final if self._finishing(inbox) else None
        inbox.pulls.popleft()
        inbox.answered = (pull.request, -1 if pull.master else store.publication)
        since = None if pull.master else store.since(have)
        while inbox.contained and inbox.contained[0][0] < self.published:
            inbox.contained.popleft()
        contains = tuple((c, w) for c, w, publication in inbox.contained if publication <= store.publication)
        array = store.p
        if last is not None:
            array = last
        elif pull.master and not store.shared:
            array = store.x.copy()
        whole = array.view(np.uint8).data
        pieces: list[tuple[int, int, bool, int, int, m.Buffer]] = []
        for number, keys, payload in since or [(store.publication, (store.begin, store.end), None)]:
            if payload is not None:
                pieces.append((*keys, True, number, m.CODED, payload))
                continue
            for b, e in parts(*keys):
                raw = whole[4 * (b - store.begin) : 4 * (e - store.begin)]
                pieces.append((b, e, since is not None, number, m.RAW_FLOAT32, raw))
        return [
            Send(
                inbox.peer,
                m.State(
                    worker=inbox.worker,
                    epoch=inbox.epoch,
                    request=pull.request,
                    part=part,
                    parts=len(pieces),
                    begin=begin,
                    end=end,
                    delta=delta,
                    publication=publication,
                    min_clock=min_clock,
                    settled=settled,
                    contains=contains,
                    received_ns=asked_ns,
                    sent_ns=now_ns,
                    codec=codec,
                    payload=payload,
                ),
            )
            for part, (begin, end, delta, publication, codec, payload) in enumerate(pieces)
        ]

    # Reports.

    def report(self) -> m.Report:
        """What this shard has seen and done, under a new version."""
        self.version += 1
        self.told, uplink = self._standing, self.uplink
        self.newest = m.Report(
            shard=self.index,
            port=self.port,
            version=self.version,
            incarnation=self.incarnation,
            generation=self.generation,
            ledger_seen=self.ledger.version if self.ledger is not None else 0,
            epoch=self.epoch,
            planned=self.plan is not None,
            weights_from=self.weights_from,
            min_clock=self.min_clock,
            # All would cost each of a thousand members a look for each push of one of them.
            arrived=tuple((i.worker, i.clock) for i in self.inboxes.values() if i.moved > self.report_seen),
            norms=tuple(self.norms.items()),
            checkpoints=tuple(self.checkpoints),
            from_above=uplink.place.epoch if uplink is not None and uplink.ready and uplink.place is not None else 0,
            finishing=tuple(i.worker for i in self.inboxes.values() if self._finishing(i))
            if uplink is not None
            else (),
            finishes=self.finishes,
            at_rest=self.at_rest,
            ended=self.uplink is not None and self.uplink.ended,
            trouble=self.trouble,
        )
        return self.newest

    def seen(self, version: int) -> None:
        """The coordinator has the report of this version."""
        self.report_seen = max(self.report_seen, version)

    def _report(self, now_ns: int) -> Send:
        self.reported_ns = now_ns
        return Send(COORDINATOR, self.report())

    def tick(self, now_ns: int) -> list[ServerEffect]:
        """Report again what the coordinator has not seen; and now and then all, to one that was restarted."""
        if self.uplink is not None and self.ledger is not None and self.place is not None:
            again = sends(self.uplink.tick(now_ns, self.repeats))
            if again or self.told != self._standing:  # that nobody is waited for any more shows in no effect
                return self._went_on(again, self.ledger, now_ns)
        if self.writes and self.ledger is not None:
            self.writes = False
            return [*self._advance(self.ledger, now_ns), *self._answer_pulls(now_ns), self._report(now_ns)]
        if self.report_seen < self.version and now_ns - self.reported_ns >= REPORT_RETRY_NS:
            return [self._report(now_ns)]
        if self.newest is not None and now_ns - self.reported_ns >= REPORT_AGAIN_NS:
            self.reported_ns = now_ns
            return [Send(COORDINATOR, self.newest)]
        return []


def sends(effects: Iterable[Seen]) -> list[ServerEffect]:
    """What a session asks a runner to do: send to the shard above, whose number is the peer, or tell another cluster."""
    return [effect for effect in effects if isinstance(effect, (Send, Tell, Log))]


def _pairs(row: m.Ints) -> list[m.Pair]:
    """The (worker, update) of one row of a ledger's sets."""
    return list(zip(row[1::2], row[2::2], strict=True))


def _unpack_hyper(packed: bytes) -> tuple[bytes, tuple[int, ...]]:
    """(packed groups, tensors without a gradient)."""
    match unpack(packed):
        case [bytes(groups), list(absent)] if all(type(tensor) is int for tensor in absent):
            return groups, tuple(absent)
    raise RemoteProtocolError("hyper-parameters are packed groups and a list of tensors without a gradient")
