"""The door of a run: who comes in, with which plan, and who has to go.

Rules
- A worker joins in two steps: Hello reserves a rank; Declare makes it a member in a new epoch, at the members' min_clock.
- Ready is sent once every shard knows that epoch.
- A plan is adopted after it was checked, or never.
- Who said Hello for a worker speaks for it, by the name that its routing ids begin with, and nobody else does.
"""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import why_not
from narrows.protocols.config.key_ranges import split
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import ELEMENTWISE, Rule
from narrows.protocols.config.settings import contradiction
from narrows.protocols.config.timing import (
    LEASE_STEPS,
    MEMBER_PROBE_NS,
    RECONNECT_LEASES,
    RECONNECT_LEAST_NS,
    RECONNECT_ROUND_TRIPS,
    ROUND_TRIP_MAX_NS,
)
from narrows.protocols.effects import NS, Log, Send, ServerEffect
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.messages import RefuseCode, check_name
from narrows.protocols.wire import unpack
from narrows.ps.coordinator.clock_quorum import Clocks
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import NO_KEY, Decision, Key, Run, Seat

WAITING_MAX = 1024  # joiners that wait for the shards to report
EXPECT_BYTES_MAX = 64 << 10  # the flags of a worker, which anybody may send

ENDED = "the run has ended; start the server again"
ENDING = "the run is about to end: all its workers have done their last step; start the server again"
WAITING = "all workers of this cluster have done their last step: join another cluster of the run"


class Members(Decision):
    """`keys_max`: parameters of a model that the servers have memory for."""

    def __init__(self, run: Run, rounds: Clocks, above: ParentPlace, meeting: GossipDirectory, keys_max: int) -> None:
        self.run, self.rounds, self.above, self.meeting, self.keys_max = run, rounds, above, meeting, keys_max
        self.plan: ModelSpec | None = None
        self.plan_packed = b""
        self.waiting: dict[str, tuple[bytes, m.Hello, Key]] = {}
        self.dialled_ns = 0  # from then on who is connected has dialled
        self.gone: dict[str, None] = {}  # tokens that left; bounded by WAITING_MAX
        self.lost = 0  # workers that went before they were done

    def _closed(self, name: bytes) -> str:
        """The reason to let the worker of this name in no more, since all have done their last step; "": it may come."""
        if not (self.meeting.closed or self.above.closed) or self.above.waited(name):
            return ""
        return WAITING if self.above.child else ENDING

    # Hello.

    def hello(self, peer: bytes, hello: m.Hello, now_ns: int, key: Key = NO_KEY) -> list[ServerEffect]:
        """Welcome a worker, as soon as all shards have reported and the run above knows this cluster."""
        if len(hello.expect) > EXPECT_BYTES_MAX:
            raise RemoteProtocolError(
                f"the flags of a Hello have {len(hello.expect)} bytes, more than {EXPECT_BYTES_MAX}"
            )
        if hello.token in self.gone and not self.run.over:
            return []
        seat = self.run.named(hello.token)
        code, text = self._unwelcome(m.name_of(peer), hello, seat)
        if not text and (not self.run.complete or self.above.rank < 0):
            if len(self.waiting) < WAITING_MAX:
                self.waiting[hello.token] = (peer, hello, key)
            return []
        if seat is not None:
            check_name(peer, seat.name, seat.worker)
        if not text and seat is None and len(self.run.seats) >= m.WORKERS_MAX:
            text = "the run is full"
        if text:
            return [Send(peer, m.Refuse(code, -1, 0, text))]
        effects: list[ServerEffect] = []
        if seat is None:
            seat = self.run.sit(hello, peer, now_ns, key)
            effects.append(self.event("joined", seat))
        self._saw(seat, now_ns, peer)
        return [*effects, Send(peer, self._welcome(seat))]

    def _unwelcome(self, name: bytes, hello: m.Hello, seat: Seat | None) -> tuple[int, str]:
        if self.run.over:
            return RefuseCode.OVER, ENDED
        if seat is None and (closed := self._closed(name)):
            return RefuseCode.OVER, closed
        expect = unpack(hello.expect) if hello.expect else {}
        conflict = contradiction(expect, self.run.settings) if isinstance(expect, dict) else "the flags are no map"
        return RefuseCode.INCOMPATIBLE, conflict or ""

    def _welcome(self, seat: Seat) -> m.Welcome:
        settings, clusters = self.run.settings, self.above.clusters
        return m.Welcome(
            seat.token,
            seat.worker,
            self.above.rank + clusters * seat.rank,  # one to each cluster in turn: however many there are of us
            clusters * settings.workers,
            self.run.epoch,
            settings.packed(),
            *self.run.where,
        )

    def greet(self, now_ns: int) -> list[ServerEffect]:
        """Answer those who had to wait."""
        waiting, self.waiting = self.waiting, {}
        return [effect for peer, hello, key in waiting.values() for effect in self.hello(peer, hello, now_ns, key)]

    # Declare.

    def adopt(self, packed: bytes) -> None:
        """The run's plan: of its first worker, or of an earlier life."""
        self.plan, self.plan_packed = ModelSpec.unpacked(packed), packed

    def refusal(self, seat: Seat, declare: m.Declare) -> m.Refuse | None:
        """Why this worker cannot be a member; where it can, its plan is that of the run."""
        if closed := self._closed(seat.name):
            return m.Refuse(RefuseCode.OVER, seat.worker, 0, closed)
        if conflict := self._unfit(ModelSpec.unpacked(declare.plan)) or self.meeting.mismatch(declare.address):
            return m.Refuse(RefuseCode.INCOMPATIBLE, seat.worker, 0, conflict)
        if self.plan is None:
            self.adopt(declare.plan)
        return None

    def _unfit(self, plan: ModelSpec) -> str:
        """Why this run cannot train a model of this plan; "" where it can."""
        if self.plan is not None:
            try:
                self.plan.check_same(plan)
            except IncompatibleError as error:
                return str(error)
        if self.run.mode.rule is Rule.OPTIMIZER and plan.optimizer not in ELEMENTWISE:
            return f"the server cannot rebuild optimizer {plan.optimizer[:60]!r}: use --push update"
        if plan.tables and (why := why_not(self.run.settings, self.run.mode, self.above.child)):
            return why
        # The server holds two values of a key, one of a row, and its optimizer's.
        if (size := plan.size + sum(table.size for table in plan.tables) // 2) > self.keys_max:
            return f"the model has {size} parameters, and the server's memory holds {self.keys_max} at most"
        return ""

    def admit(self, seat: Seat, address: str, now_ns: int) -> None:
        """Make it a member. Under gossip no clock closes here: 1 says that the run has begun, its model is with the workers."""
        seat.declare(self.run.changed(), self.rounds.min_clock + self.meeting.begun, address)
        self.rounds.enter(seat, now_ns)

    def readies(self, buffers: bytes, only: Seat | None = None) -> list[ServerEffect]:
        """Ready for each member whose epoch every shard knows by now; for `only`, once more."""
        waiting = [seat for seat in self.run.declared if not seat.ready_sent] if only is None else [only]
        if not waiting or self.plan is None or not self.run.complete:
            return []
        reports = self.run.reports
        if self.run.started and any(report.from_above != self.above.epoch for report in reports.values()):
            return []  # what the shards have is older than our place
        known = min(report.epoch if self.run.planned(shard) else 0 for shard, report in reports.items())
        ranges = tuple(split(self.plan.size, self.run.shards))
        effects: list[ServerEffect] = []
        for seat in waiting:
            if seat.epoch <= known:
                seat.ready_sent = True
                ready = m.Ready(seat.worker, seat.epoch, seat.start, ranges, buffers)
                effects += [Send(seat.peer, ready), *self.meeting.rosters([seat])]
        return effects

    # Those who are here, and those who go.

    def seated(
        self,
        peer: bytes,
        message: m.Declare | m.Heartbeat | m.Buffers | m.BuffersAsk | m.RangeAsk | m.AgreeAsk,
        now_ns: int,
    ) -> Seat | None:
        """Who sent this, and lives. Worker numbers begin anew in each life of the coordinator. Raises RemoteProtocolError."""
        seat = self.run.seats.get(message.worker)
        if seat is None or message.epoch < self.run.first_epoch:
            return None
        check_name(peer, seat.name, seat.worker)
        self._saw(seat, now_ns, peer)
        if isinstance(message, m.Heartbeat):
            seat.below, seat.copied = message.below, message.copied
            seat.road_ns = min(max(0, message.road_ns), ROUND_TRIP_MAX_NS)
        return seat

    def heard(self, worker: int, now_ns: int) -> None:
        """Any message of a member to shard 0 renews its lease."""
        if worker in self.run.seats:
            self._saw(self.run.seats[worker], now_ns)

    @staticmethod
    def _saw(seat: Seat, now_ns: int, peer: bytes = b"") -> None:
        seat.peer, seat.seen_ns, seat.cut_ns = peer or seat.peer, now_ns, 0

    def moved(self, now_ns: int) -> None:
        """The server is on another machine from now on: members have a lease to find it."""
        self.dialled_ns = now_ns + int(self.run.settings.lease * NS)
        for seat in self.run.seats.values():
            seat.seen_ns, seat.cut_ns = now_ns, 0

    def unreached(self, peer: bytes, now_ns: int) -> None:
        """Nobody is connected under this name. Who lives connects again soon, and says something; a standby has a lease."""
        for seat in self.run.seats.values():
            if seat.name == m.name_of(peer) and not seat.copied and now_ns >= self.dialled_ns:
                seat.cut_ns = seat.cut_ns or now_ns

    def probes(self, now_ns: int) -> list[Send]:
        """Something small for each member that is silent: where nobody is connected, we are told."""
        effects = []
        for seat in self.run.declared:
            if now_ns - max(seat.seen_ns, seat.asked_ns) >= MEMBER_PROBE_NS:
                seat.asked_ns = now_ns
                effects.append(Send(seat.peer, m.HeartbeatAck(seat.worker, seat.epoch, 0, now_ns, now_ns)))
        return effects

    def unknown(self, worker: int, epoch: int) -> m.Refuse:
        text = f"worker {worker} is no member of this run (its lease expired, or the server was restarted)"
        return m.Refuse(RefuseCode.NOT_A_MEMBER, worker, epoch, text)

    def refuse_all(self, code: int, text: str) -> list[ServerEffect]:
        """Who is still there need not find out by silence."""
        there = [seat for seat in self.run.seats.values() if not seat.leaving]
        return [Send(seat.peer, m.Refuse(code, seat.worker, seat.epoch, text)) for seat in there]

    def expired(self, now_ns: int) -> list[Seat]:
        cut_ns = max(RECONNECT_LEAST_NS, int(self.run.settings.lease * RECONNECT_LEASES * NS))

        def gone(seat: Seat) -> bool:
            lease_ns = self.lease_ns(seat)
            if seat.cut_ns and now_ns - seat.cut_ns > min(lease_ns, cut_ns + RECONNECT_ROUND_TRIPS * seat.road_ns):
                return True
            return now_ns - seat.seen_ns > lease_ns

        return [seat for seat in self.run.seats.values() if gone(seat)]

    def lease_ns(self, seat: Seat) -> int:
        """How long this one may be silent: as was told, or three steps of its own; and its road on top: a word may be as late
        as that behind the one before."""
        return max(int(self.run.settings.lease * NS), LEASE_STEPS * self.rounds.step_ns(seat)) + seat.road_ns

    def done(self) -> list[Seat]:
        """Those who leave and whose last update every shard has reported: a shard may know it earlier than we do."""
        return [seat for seat in self.run.declared if seat.leaving and self.rounds.clock(seat) >= seat.last]

    def left(self, seat: Seat, how: str) -> None:
        del self.run.seats[seat.worker]
        if seat.epoch:
            self.run.changed()
        self.lost += how in ("stopped", "expired")
        if how != "expired":
            self.forget(seat.token)

    def forget(self, token: str) -> bool:
        """Who has this token does not come any more. False: that was known."""
        self.waiting.pop(token, None)
        news = token not in self.gone
        self.gone[token] = None
        while len(self.gone) > WAITING_MAX:
            self.gone.pop(next(iter(self.gone)))
        return news

    def event(self, how: str, seat: Seat) -> Log:
        values: dict[str, object] = {"worker": seat.worker, "rank": seat.rank, "host": seat.host, "how": how}
        return Log("member", values | {"clock": self.rounds.min_clock, "live": len(self.run.seats)})

    def fields(self, shard: int) -> dict[str, object]:
        members = tuple((seat.worker, seat.epoch, seat.start) for seat in self.run.declared)
        plan = b"" if self.run.planned(shard) else self.plan_packed
        names = b"".join(seat.name for seat in self.run.declared)
        return {"epoch": self.run.epoch, "members": members, "names": names, "plan": plan}
