"""Admits the workers of a run, checks their model spec, and expires the leases of silent ones.

How it works

    worker                          Members
    Hello  ───────────────────────> a seat at the lowest free rank, once all shards have reported and a parent, if there
           <─────────────── Welcome   is one, knows this cluster; before that the Hello waits in `waiting`
    Declare model spec ───────────> `refusal` checks it; the first worker's spec becomes that of the run
           <───────────────── Ready once every shard has reported the epoch of the new member
    Heartbeat, any message ───────> renews the lease
    silent for longer than `lease_ns`, or without a connection for longer than a limit below it: `expired`
    Leave after the last step ────> the seat ends once every shard has reported the worker's last update (`done`)
    Leave before it ──────────────> the seat ends at once

1. A worker joins in two steps: its Hello reserves a rank; its Declare makes it a member in a new epoch, at the
   min_clock of the members.
2. A member whose connection is cut has less time than a silent one: a live member connects again soon. `probes` sends
   a small message to a silent member, and the runner reports a name that has no connection (`unreached`).
3. A cluster with a standby keeps its whole lease, since the standby goes on over another connection.

Rules
- The coordinator adopts a model spec only after its check.
- A worker's messages count only under the name that its first routing id began with. No other peer speaks for it.
"""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import why_not
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.run_name import other_run
from narrows.protocols.config.settings import contradiction
from narrows.protocols.config.timing import (
    LEASE_STEPS,
    MEMBER_PROBE_NS,
    RECONNECT_LEASES,
    RECONNECT_LEAST_NS,
    RECONNECT_ROUND_TRIPS,
)
from narrows.protocols.effects import NS, Log, Send, ServerEffect
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.messages import RefuseCode, check_name
from narrows.protocols.wire import unpack
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import NO_KEY, Decision, Key, Run, Seat

WAITING_MAX = 1024  # joiners that wait for the shards to report
EXPECT_BYTES_MAX = 64 << 10  # the flags in a Hello, which any peer may send

ENDED = "the run has ended; start the server again"
ENDING = "the run is about to end: all its workers have done their last step; start the server again"
WAITING = "all workers of this cluster have done their last step: join another cluster of the run"


class Members(Decision):
    """Decides who is a member.

    Args:
        run, clocks, above, gossip_directory: of the coordinator.
        keys_max: the largest number of model parameters that the shards have memory for.
        connected: members come over connections, which `probes` tests; False: through a mailbox.
    """

    def __init__(
        self,
        run: Run,
        clocks: Clocks,
        above: ParentPlace,
        gossip_directory: GossipDirectory,
        keys_max: int,
        connected: bool = True,
    ) -> None:
        self.connected = connected
        self.run, self.clocks, self.above, self.gossip_directory, self.keys_max = (
            run,
            clocks,
            above,
            gossip_directory,
            keys_max,
        )
        self.plan: ModelSpec | None = None  # the model spec of the run, None: no worker has declared one yet
        self.plan_packed = b""  # the same, packed
        self.waiting: dict[str, tuple[bytes, m.Hello, Key]] = {}  # by token, Hellos that have no answer yet
        self.dialled_ns = 0  # until then members are still dialling a server that moved to another machine
        self.gone: dict[str, None] = {}  # tokens of workers that left, at most WAITING_MAX
        self.lost = 0  # number of workers that stopped or expired before they were done

    def _closed(self, name: bytes) -> str:
        """Return why the worker of this name cannot join after all others did their last step; "" if it can join."""
        if not (self.gossip_directory.closed or self.above.closed) or self.above.waited(name):
            return ""
        return WAITING if self.above.child else ENDING

    # Hello.

    def hello(self, peer: bytes, hello: m.Hello, now_ns: int, key: Key = NO_KEY) -> list[ServerEffect]:
        """Welcome a worker once all shards have reported and the parent, if there is one, knows this cluster."""
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
        seat.heard(now_ns, peer)
        return [*effects, Send(peer, self._welcome(seat))]

    def _unwelcome(self, name: bytes, hello: m.Hello, seat: Seat | None) -> tuple[int, str]:
        expect = unpack(hello.expect) if hello.expect else {}
        if not isinstance(expect, dict):
            return RefuseCode.INCOMPATIBLE, "the flags are no map"
        if other := other_run(expect.get("name", ""), self.run.settings.name):  # also of a run that is over
            return RefuseCode.INCOMPATIBLE, other
        if self.run.over:
            return RefuseCode.OVER, ENDED
        if seat is None and (closed := self._closed(name)):
            return RefuseCode.OVER, closed
        return RefuseCode.INCOMPATIBLE, contradiction(expect, self.run.settings) or ""

    def _welcome(self, seat: Seat) -> m.Welcome:
        settings, clusters = self.run.settings, self.above.clusters
        return m.Welcome(
            seat.token,
            seat.worker,
            self.above.rank + clusters * seat.rank,  # clusters take ranks in turn, so no cluster needs a fixed size
            clusters * settings.workers,
            self.run.epoch,
            settings.packed(),
            *self.run.where,
            relay=self.gossip_directory.ticket(seat.token),
        )

    def greet(self, now_ns: int) -> list[ServerEffect]:
        """Answer the Hellos that wait."""
        waiting, self.waiting = self.waiting, {}
        return [effect for peer, hello, key in waiting.values() for effect in self.hello(peer, hello, now_ns, key)]

    # Declare.

    def adopt(self, packed: bytes) -> None:
        """Adopt the run's packed model spec: that of its first worker, or of the checkpoint it resumes from."""
        self.plan, self.plan_packed = ModelSpec.unpacked(packed), packed

    def refusal(self, seat: Seat, declare: m.Declare) -> m.Refuse | None:
        """Return why this worker cannot be a member. If it can be one, the first worker's spec becomes the run's."""
        if closed := self._closed(seat.name):
            return m.Refuse(RefuseCode.OVER, seat.worker, 0, closed)
        if conflict := self._unfit(ModelSpec.unpacked(declare.plan)) or self.gossip_directory.mismatch(declare.address):
            return m.Refuse(RefuseCode.INCOMPATIBLE, seat.worker, 0, conflict)
        if self.plan is None:
            self.adopt(declare.plan)
        return None

    def _unfit(self, plan: ModelSpec) -> str:
        """Return why this run cannot train a model of this spec; "" if it can."""
        if self.plan is not None:
            try:
                self.plan.check_same(plan)
            except IncompatibleError as error:
                return str(error)
        steps = self.run.mode.rule is FoldRule.OPTIMIZER
        if why := plan.why_not_held(self.run.shards, self.run.settings.cut, steps):
            return why
        if plan.tables and (why := why_not(self.run.settings, self.run.mode, self.above.child)):
            return why
        # The shards hold two float32 of each key, one of each value of a row, and the state of their optimizer.
        if (size := plan.size + sum(table.size for table in plan.tables) // 2) > self.keys_max:
            return f"the model has {size} parameters, and the server's memory holds {self.keys_max} at most"
        return ""

    def admit(self, seat: Seat, address: str, now_ns: int, models: m.Pairs = ()) -> None:
        """Make the worker a member, at the members' min_clock.

        Under gossip the coordinator closes no clock. There a start clock of 1 means that the run has begun and the
        workers have the model; 0 means that it has not.
        """
        seat.declare(self.run.changed(), self.clocks.min_clock + self.gossip_directory.begun, address, models)
        self.clocks.enter(seat, now_ns)

    def readies(self, buffers: bytes, only: Seat | None = None) -> list[ServerEffect]:
        """Return Ready for each member whose epoch every shard has reported; with `only`, for that member again."""
        waiting = [seat for seat in self.run.declared if not seat.ready_sent] if only is None else [only]
        if not waiting or self.plan is None or not self.run.complete:
            return []
        reports = self.run.reports
        if self.run.started and any(report.from_above != self.above.epoch for report in reports.values()):
            return []  # the shards' state is older than this cluster's place in the parent's run
        known = min(report.epoch if self.run.planned(shard) else 0 for shard, report in reports.items())
        ranges = tuple(self.plan.ranges(self.run.shards, self.run.settings.cut))
        effects: list[ServerEffect] = []
        for seat in waiting:
            if seat.epoch <= known:
                seat.readied()
                ready = m.Ready(seat.worker, seat.epoch, seat.start, ranges, buffers)
                effects += [Send(seat.peer, ready), *self.gossip_directory.rosters([seat])]
        return effects

    # Live members, and members that leave.

    def renew_lease(
        self,
        peer: bytes,
        message: m.Declare | m.Heartbeat | m.Buffers | m.BuffersRequest | m.RangeRequest | m.AgreeRequest,
        now_ns: int,
    ) -> Seat | None:
        """Return the seat of a message's sender, and renew its lease.

        Worker numbers begin anew in each life of the coordinator, so the epoch of the message decides too.

        Returns:
            None if the worker has no seat, or has one of an earlier life of the coordinator alone.

        Raises:
            RemoteProtocolError: the routing id of `peer` has another name than the seat.
        """
        seat = self.run.seats.get(message.worker)
        if seat is None or message.epoch < self.run.first_epoch:
            return None
        check_name(peer, seat.name, seat.worker)
        seat.heard(now_ns, peer)
        if isinstance(message, m.Heartbeat):
            seat.beat(message)
        return seat

    def heard(self, worker: int, now_ns: int) -> None:
        """Renew the lease of a member that sent any message to shard 0."""
        if worker in self.run.seats:
            self.run.seats[worker].heard(now_ns)

    def standby_took_over(self, now_ns: int) -> None:
        """The standby has taken over, on another machine: each member has a lease's time to connect to it."""
        self.dialled_ns = now_ns + int(self.run.settings.lease * NS)
        for seat in self.run.seats.values():
            seat.heard(now_ns)

    def unreached(self, peer: bytes, now_ns: int) -> None:
        """No connection has the name of `peer`: shorten the time that its member may be silent.

        A live member connects again soon and sends a message. A cluster with a standby keeps its whole lease.
        """
        for seat in self.run.seats.values():
            if seat.name == m.name_of(peer) and not seat.copied and now_ns >= self.dialled_ns:
                seat.unreached(now_ns)

    def probes(self, now_ns: int) -> list[Send]:
        """Return a small message to each silent member: the runner reports a name that has no connection."""
        effects = []
        for seat in self.run.declared if self.connected else ():
            if now_ns - max(seat.seen_ns, seat.asked_ns) >= MEMBER_PROBE_NS:
                seat.probed(now_ns)
                effects.append(Send(seat.peer, m.HeartbeatAck(seat.worker, seat.epoch, 0, now_ns, now_ns)))
        return effects

    def unknown(self, worker: int, epoch: int) -> m.Refuse:
        """The answer to a worker that has no seat."""
        text = f"worker {worker} is no member of this run (its lease expired, or the server was restarted)"
        return m.Refuse(RefuseCode.NOT_A_MEMBER, worker, epoch, text)

    def refuse_all(self, code: int, text: str) -> list[ServerEffect]:
        """Refuse all members that are still here, so that none has to wait for its timeout."""
        there = [seat for seat in self.run.seats.values() if not seat.leaving]
        return [Send(seat.peer, m.Refuse(code, seat.worker, seat.epoch, text)) for seat in there]

    def expired(self, now_ns: int) -> list[Seat]:
        """Return the seats of members that are lost.

        A member is lost after a silence longer than its lease. It is also lost after a time without a connection, the
        time to connect again: RECONNECT_LEASES leases and RECONNECT_ROUND_TRIPS round trips, at most its lease.
        """
        reconnect_ns = max(RECONNECT_LEAST_NS, int(self.run.settings.lease * RECONNECT_LEASES * NS))

        def gone(seat: Seat) -> bool:
            lease_ns = self.lease_ns(seat)
            if seat.cut_ns and now_ns - seat.cut_ns > min(
                lease_ns, reconnect_ns + RECONNECT_ROUND_TRIPS * seat.road_ns
            ):
                return True
            return now_ns - seat.seen_ns > lease_ns

        return [seat for seat in self.run.seats.values() if gone(seat)]

    def lease_ns(self, seat: Seat) -> int:
        """How long this worker may be silent: --lease or three of its own steps, the larger, plus its round trip.

        A message may arrive later than the one before it by as much as a round trip.
        """
        return max(int(self.run.settings.lease * NS), LEASE_STEPS * self.clocks.step_ns(seat)) + seat.road_ns

    def done(self) -> list[Seat]:
        """Members that are leaving and whose last update every shard has reported."""
        return [seat for seat in self.run.declared if seat.leaving and self.clocks.clock(seat) >= seat.last]

    def left(self, seat: Seat, how: str) -> None:
        del self.run.seats[seat.worker]
        if seat.epoch:
            self.run.changed()
        self.lost += how in ("stopped", "expired")
        if how != "expired":
            self.forget(seat.token)

    def forget(self, token: str) -> bool:
        """Note that the worker with this token does not come any more. Return False if that was known."""
        self.waiting.pop(token, None)
        news = token not in self.gone
        self.gone[token] = None
        while len(self.gone) > WAITING_MAX:
            self.gone.pop(next(iter(self.gone)))
        return news

    def event(self, how: str, seat: Seat) -> Log:
        """Log event: a worker joined or is gone. `how`: "joined", or as in `left`."""
        values: dict[str, object] = {"worker": seat.worker, "rank": seat.rank, "host": seat.host, "how": how}
        return Log("member", values | {"clock": self.clocks.min_clock, "live": len(self.run.seats)})

    def fields(self, shard: int) -> dict[str, object]:
        members = tuple((seat.worker, seat.epoch, seat.start) for seat in self.run.declared)
        plan = b"" if self.run.planned(shard) else self.plan_packed
        names = b"".join(seat.name for seat in self.run.declared)
        return {"epoch": self.run.epoch, "members": members, "names": names, "plan": plan}
