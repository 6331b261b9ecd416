"""The coordinator of a cluster: who is a member, in which epoch, and which clocks are closed over which members.

It lives with shard 0 and is the one owner of membership. Rules
- Two state messages carry all of it: `Ledger` (what is decided) down, `Report` (what a shard has seen and done) up. Each
  replaces the one before and is sent again until the other side has shown that it has it, so losing one costs time only.
- A worker joins in two steps: Hello reserves a rank; Declare makes it a member in a new epoch, at the live members'
  min_clock. Ready is sent once every shard knows the epoch.
- min_clock advances when every live member's update has arrived at every shard. With a barrier the set of a clock is
  closed at that moment: the oldest open update, on all shards and in no set yet, of each member and of those who left
  since. So a worker that died between two shards is in the set of all of them or of none.
- With a quorum it also advances when so many have an open update and the grace after them is over. Who comes later is in
  the next set: its update counts there as any other, and its worker, which waits for that set, is not asked for one more.
- Under gossip it introduces the workers to each other (`Roster`): at each change, and to who says that it has an older one.
  Once all have done their last step nobody joins any more, so all end with the mean of the same models.
- Of a cluster below another server it also decides when it takes part there, from which clock, and when all are done.
- A restarted shard begins a generation: every shard goes back to the newest checkpoint they share, all must rejoin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from narrows.protocols import messages as m
from narrows.protocols.effects import NS, Log, Send, ServerEffect, Stop
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.keys import KEYS_MAX, Plan, split
from narrows.protocols.modes import ELEMENTWISE, Rule, Settings, contradiction
from narrows.protocols.wire import unpack

LEDGER_RETRY_NS = NS // 5  # unseen ledgers are sent again this often
LEASE_STEPS = 3  # a lease is never under three measured steps
TREE_CHARACTERS_MAX = m.TEXT_MAX - 64  # of what is shown of a tree: one string of a message, with the line that ends it
WAITING_MAX = 1024  # joiners that wait for the shards to report

# Adaptive grace, as a share of what a round took of late until its quorum was there: room for workers that are meant to be
# alike, and a quarter of their pace at most is what one that is truly slow can cost the others.
GRACE_SHARE = 0.25
GRACE_MIN_NS = NS // 20  # the round trip of a long link, and two ticks
GRACE_MAX_NS = 60 * NS  # nor longer than a lease: who is silent for so long is dead
ROUND_GAIN = 0.25  # weight of the newest round: a slow first one, with all its warming up, is forgotten in ten


@dataclass(slots=True)
class Member:
    """One worker. `epoch` is the one it joined in (0 until it has declared); `arrived[i]` its clock on shard i."""

    worker: int
    token: str
    host: str
    rank: int
    peer: bytes
    seen_ns: int
    epoch: int = 0
    start: int = 0
    arrived: list[int] = field(default_factory=list)
    taken: int = 0  # its updates below are in sets (barrier)
    due: int = 0  # the clock whose set its next update is for: one in a later set is late
    ready_sent: bool = False
    leaving: int = -1  # its final clock, once it is done
    moved_ns: int = 0
    step_ns: int = 0  # longest recent time between two of its updates
    below: str = ""  # of a cluster: itself and all below it, a line each
    address: str = ""  # where its peers reach it (gossip)
    ended: bool = False  # it has done its last step (gossip)

    @property
    def clock(self) -> int:
        return min(self.arrived)


class Coordinator:
    """Messages from workers and Reports in, effects out. `first_epoch` is greater than any epoch of an earlier life.

    `child`: this cluster is a member of a run above, and admits workers once it has its place there (`joined_above`,
    `placed`). `keys_max`: parameters of a model that the servers have memory for.
    """

    def __init__(
        self,
        settings: Settings,
        first_epoch: int,
        restart_clock: int = -1,
        child: bool = False,
        keys_max: int = KEYS_MAX,
    ) -> None:
        self.settings, self.keys_max = settings, keys_max
        self.mode = settings.mode()
        self.shards = settings.shards
        self.first_epoch = first_epoch  # worker ids begin anew in each life: with an older epoch they mean others
        self.epoch = first_epoch
        self.generation = first_epoch
        self.restart_clock = restart_clock
        self.needed = settings.workers
        self.min_clock = max(restart_clock, 0)
        self.started = False
        self.over = False
        self.over_version = 0
        self.plan: Plan | None = None
        self.plan_packed = b""
        self.members: dict[int, Member] = {}
        self.departed: dict[int, int] = {}  # worker that left -> its open update
        self.sets: dict[int, tuple[tuple[int, int], ...]] = {}  # clock -> (worker, its update), by worker
        self.quorum_ns = -1  # when the quorum of the present clock was there, -1: not yet
        self.round_ns = 0  # smoothed: from the close of a clock to the quorum of the next
        self.said: list[ServerEffect] = []  # what is to be told of decisions, with the ledger that has them
        self.norms: dict[int, float] = {}
        self.shard_norms: dict[int, dict[int, float]] = {}
        self.reports: dict[int, m.Report] = {}
        self.shard_peers: dict[int, bytes] = {0: b""}
        self.shard_seen: list[int] = [-1] * self.shards
        self.buffers: bytes = b""
        self.buffers_ns = 0
        self.checkpoint = -1
        self.checkpoint_ns = 0
        self.version = 1
        self.reached_ns: dict[int, int] = {}  # when min_clock came to each of the last s + 1 clocks
        self.sent_ns = [0] * self.shards
        self.next_worker = 0
        self.gone: dict[str, None] = {}  # tokens that left; bounded by WAITING_MAX
        self.waiting: dict[str, tuple[bytes, m.Hello]] = {}
        self.generation_ns = 0  # when members were last told to rejoin, 0: never
        self.ticked = False
        self.finished_once = False
        self.child = child
        self.rank_above, self.clusters = (-1, 0) if child else (0, 1)  # this cluster's rank, of so many
        self.above, self.place = b"", 0  # our place there, packed, and its epoch
        self.roster = b""  # of clusters that gossip, encoded
        self.alone = False  # no server above will send another
        self.weights = -1  # the worker whose first weights are those of the run, once they are on all shards
        self.finishes, self.finish_at = 0, 0
        self.finished: set[tuple[int, int]] = set()  # workers and their clocks, of the last finish
        self.tree_above: Callable[[], str] = lambda: ""  # all levels, as the server above tells them
        self.introduced = 0  # epoch of the roster that all were sent
        self.closed = False  # all members have done their last step (gossip)
        self.undeclared: dict[int, tuple[bytes, m.Declare]] = {}  # workers whose Declare waits for our place above

    # What a runner or a machine beside it may read.

    @property
    def declared(self) -> list[Member]:
        return [member for member in self.members.values() if member.epoch]

    @property
    def initialiser(self) -> int:
        """Whose weights are the first: the longest-standing member, while the run has none."""
        if self.started or self.restart_clock >= 0:
            return -1
        if self.weights >= 0:
            return self.weights
        return min((member.worker for member in self.declared), default=-1)

    def adopt_plan(self, packed: bytes) -> None:
        """The plan of an earlier life, from its checkpoint."""
        self.plan, self.plan_packed = Plan.unpacked(packed), packed

    # Messages.

    def handle(self, peer: bytes, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a message from `peer`. Raises RemoteProtocolError for one that no worker sends."""
        if isinstance(message, m.Report):
            return self._report(peer, message, now_ns)
        if isinstance(message, m.Hello):
            return self._hello(peer, message, now_ns)
        if isinstance(message, m.Leave):
            return self._leave(peer, message, now_ns)
        if isinstance(message, (m.Declare, m.Heartbeat, m.Buffers)):
            member = self.members.get(message.worker)
            if member is None or message.epoch < self.first_epoch:
                return [self._not_a_member(peer, message.worker, message.epoch)]
            member.seen_ns, member.peer = now_ns, peer
            if isinstance(message, m.Declare):
                return self._declare(member, message, now_ns)
            if isinstance(message, m.Heartbeat):
                member.below = message.below
                pulse: list[ServerEffect] = [Send(peer, self._pulse(member, message, now_ns))]
                if message.ended and not member.ended:
                    member.ended = True
                    pulse += self._settle(now_ns)
                return pulse + self._rosters([member] if message.roster != self._roster_epoch else [])
            self.buffers, self.buffers_ns = bytes(message.payload), now_ns
            return []
        raise RemoteProtocolError(f"a coordinator takes no {type(message).__name__}")

    def heard(self, worker: int, now_ns: int) -> None:
        """Any message of a member to shard 0 renews its lease."""
        member = self.members.get(worker)
        if member is not None:
            member.seen_ns = now_ns

    def wants_buffers(self, worker: int, now_ns: int) -> bool:
        """Whether this worker, the lowest live rank, should send its module's buffers now."""
        member = self.members.get(worker)
        if member is None or any(other.rank < member.rank for other in self.declared):
            return False
        every = self.settings.checkpoint_every or self.settings.lease
        return not self.buffers_ns or now_ns - self.buffers_ns >= every * NS / 2

    def _not_a_member(self, peer: bytes, worker: int, epoch: int) -> Send:
        text = f"worker {worker} is no member of this run (its lease expired, or the server was restarted)"
        return Send(peer, m.Refuse(m.RefuseCode.NOT_A_MEMBER, worker, epoch, text))

    def _too_late(self, worker: int) -> m.Refuse:
        text = "the run is about to end: all its workers have done their last step; start the server again"
        return m.Refuse(m.RefuseCode.OVER, worker, 0, text)

    def _hello(self, peer: bytes, hello: m.Hello, now_ns: int) -> list[ServerEffect]:
        if self.over:
            return [Send(peer, m.Refuse(m.RefuseCode.OVER, -1, 0, "the run has ended; start the server again"))]
        if hello.token in self.gone:
            return []
        if self.closed and all(w.token != hello.token for w in self.members.values()):
            return [Send(peer, self._too_late(-1))]
        expect = unpack(hello.expect) if hello.expect else {}
        conflict = contradiction(expect, self.settings) if isinstance(expect, dict) else "the flags are no map"
        if conflict:
            return [Send(peer, m.Refuse(m.RefuseCode.INCOMPATIBLE, -1, 0, conflict))]
        if len(self.reports) < self.shards or self.rank_above < 0:
            if len(self.waiting) < WAITING_MAX:
                self.waiting[hello.token] = (peer, hello)
            return []
        member = next((w for w in self.members.values() if w.token == hello.token), None)
        effects: list[ServerEffect] = []
        if member is None:
            if len(self.members) >= m.WORKERS_MAX:
                return [Send(peer, m.Refuse(m.RefuseCode.INCOMPATIBLE, -1, 0, "the run is full"))]
            taken = {w.rank for w in self.members.values()}
            rank = next(r for r in range(len(taken) + 1) if r not in taken)
            member = Member(self.next_worker, hello.token, hello.host, rank, peer, now_ns)
            self.members[member.worker] = member
            self.next_worker += 1
            effects.append(self._event("joined", member))
        member.peer, member.seen_ns = peer, now_ns
        ports = tuple(self.reports[i].port for i in range(self.shards))
        lease_ms = int(self.settings.lease * 1000)
        welcome = m.Welcome(
            hello.token,
            member.worker,
            self.rank_above + self.clusters * member.rank,  # one to each cluster in turn: however many there are of us
            self.clusters * self.settings.workers,
            self.epoch,
            lease_ms,
            self.settings.packed(),
            ports,
        )
        return [*effects, Send(peer, welcome)]

    def _declare(self, member: Member, declare: m.Declare, now_ns: int) -> list[ServerEffect]:
        if member.epoch:
            return self._readies(only=member)
        if self.closed:
            return [Send(member.peer, self._too_late(member.worker)), *self._remove(member, "refused", now_ns)]
        plan = Plan.unpacked(declare.plan)
        if conflict := self._unfit(plan) or self._mismatch(declare.address):
            refuse = m.Refuse(m.RefuseCode.INCOMPATIBLE, member.worker, 0, conflict)
            return [Send(member.peer, refuse), *self._remove(member, "refused", now_ns)]
        if self.plan is None:
            self.plan, self.plan_packed = plan, declare.plan
        if self.child and not self.above:
            self.undeclared[member.worker] = (member.peer, declare)
            return []
        self.epoch += 1
        # Under gossip no clock closes here: 1 says that the run has begun, and its model is with the workers.
        begun = self.mode.rule is Rule.MIX and self.started
        member.epoch, member.start, member.moved_ns = self.epoch, self.min_clock + begun, now_ns
        member.address = declare.address
        member.arrived = [member.start] * self.shards
        member.taken = member.due = member.start
        self._decide(now_ns)
        return self._broadcast(now_ns)

    def _unfit(self, plan: Plan) -> str:
        """Why this run cannot train a model of this plan; "" where it can. A plan is adopted after this, or never."""
        if self.plan is not None:
            try:
                self.plan.check_same(plan)
            except IncompatibleError as error:
                return str(error)
        if self.mode.rule is Rule.OPTIMIZER and plan.optimizer not in ELEMENTWISE:
            return f"the server cannot rebuild optimizer {plan.optimizer[:60]!r}: use --push update"
        if plan.size > self.keys_max:
            return f"the model has {plan.size} parameters, and the server's memory holds {self.keys_max} at most"
        return ""

    def _mismatch(self, address: str) -> str:
        """Why who has this address cannot gossip with those who are here: shards mix with the same shard of others."""
        ours = {len(other.address.split(" ")) for other in self.declared} if self.mode.rule is Rule.MIX else set()
        if not ours or len(address.split(" ")) in ours:
            return ""
        return (
            "workers and clusters of more than one shard do not gossip with each other: let each of them join what the "
            "others join"
        )

    def joined_above(self, rank: int, clusters: int, now_ns: int) -> list[ServerEffect]:
        """The run above knows this cluster; workers may come."""
        self.rank_above, self.clusters = rank, clusters
        return self._greet(now_ns)

    @property
    def may_declare(self) -> bool:
        """There are workers enough to take part in the run above."""
        return len(self.undeclared) >= (1 if self.started else self.needed)

    def begin(self, clock: int, now_ns: int) -> int:
        """The clock at which a new place above begins: `clock`, that of the run above, where nobody here is further."""
        if not self.declared:
            self.min_clock = max(self.min_clock, clock)
            self.reached_ns = {self.min_clock: now_ns}
        return self.min_clock

    def placed(self, above: bytes, epoch: int, now_ns: int) -> list[ServerEffect]:
        """This cluster's place in the run above; b"" when it gives it up."""
        if self.over:
            return []
        self.above, self.place = above, epoch
        # Who waits for the last model asks for it at the new place. Its finishes count from 0: of the last one at the place
        # before, some shards may have pushed theirs and others not.
        self.finishes, self.finished = 0, set()
        effects = self._broadcast(now_ns)
        waiting, self.undeclared = (self.undeclared, {}) if above else ({}, self.undeclared)
        for worker, (_, declare) in waiting.items():
            if worker in self.members:
                effects += self._declare(self.members[worker], declare, now_ns)
        return effects

    def introduced_above(self, roster: bytes, alone: bool, now_ns: int) -> list[ServerEffect]:
        """Who this cluster may gossip with. `alone`: the server above is gone."""
        self.roster, self.alone = roster, alone
        return self._broadcast(now_ns)

    @property
    def ended(self) -> bool:
        """All shards have done their last round with other clusters, but for that of all (gossip)."""
        reports = self.reports.values()
        return len(reports) == self.shards and all(r.ended and r.from_above == self.place for r in reports)

    def cut_off(self, now_ns: int) -> list[ServerEffect]:
        """There is no run above any more: checkpoint at the clock reached, and end."""
        self.above, self.place = b"", 0
        self._end()
        return self._broadcast(now_ns)

    def _greet(self, now_ns: int) -> list[ServerEffect]:
        """Answer those who had to wait."""
        waiting, self.waiting = self.waiting, {}
        return [effect for peer, hello in waiting.values() for effect in self._hello(peer, hello, now_ns)]

    def refuse_all(self, code: int, text: str) -> list[ServerEffect]:
        """Who is still there need not find out by silence."""
        return [Send(w.peer, m.Refuse(code, w.worker, w.epoch, text)) for w in self.members.values() if w.leaving < 0]

    def _readies(self, only: Member | None = None) -> list[ServerEffect]:
        """Ready for each member whose epoch every shard knows by now."""
        effects: list[ServerEffect] = []
        if self.plan is None or len(self.reports) < self.shards:
            return effects
        known = min(r.epoch if r.planned and r.generation == self.generation else 0 for r in self.reports.values())
        if self.child and self.started and any(r.from_above != self.place for r in self.reports.values()):
            return effects  # what the shards have is older than our place
        ranges = tuple(split(self.plan.size, self.shards))
        for member in [only] if only is not None else self.declared:
            if member.epoch and member.epoch <= known and (only is not None or not member.ready_sent):
                member.ready_sent = True
                ready = m.Ready(member.worker, member.epoch, member.start, ranges, self.buffers)
                effects += [Send(member.peer, ready), *self._rosters([member])]
        return effects

    def _pulse(self, member: Member, beat: m.Heartbeat, now_ns: int) -> m.HeartbeatAck:
        return m.HeartbeatAck(
            member.worker,
            member.epoch,
            beat.sent_ns,
            now_ns,
            now_ns,
            self.tree_above() or self.tree() if beat.below else "",
        )

    def tree(self) -> str:
        """This server and all below it, a line each; of a large run the first lines."""
        lines = [f"{self.settings.summary()}, {self.shards} shards, clock {self.min_clock}"]
        for member in sorted(self.declared, key=lambda member: member.rank):
            first, *rest = member.below.splitlines() or [""]
            what = f"cluster: {first}" if first else f"worker, clock {member.clock}"
            lines += [f"    rank {member.rank} ({member.host}) {what}", *(f"    {line}" for line in rest)]
        kept, size = 0, 0
        while kept < len(lines) and size + len(lines[kept]) < TREE_CHARACTERS_MAX:
            size += len(lines[kept]) + 1
            kept += 1
        more = [f"    and {len(lines) - kept} lines more"] if kept < len(lines) else []
        return "\n".join(lines[:kept] + more)

    @property
    def _roster_epoch(self) -> int:
        """That of the newest roster that a member may have; 0: there is none."""
        return self.epoch if self.mode.rule is Rule.MIX and self.started else 0

    def _rosters(self, members: list[Member]) -> list[ServerEffect]:
        """The roster, for each of `members`."""
        if not self._roster_epoch:
            return []
        declared = self.declared
        rows = tuple((w.worker, w.epoch, w.rank, w.start) for w in declared)
        addresses = tuple(w.address for w in declared)
        return [
            Send(w.peer, m.Roster(w.worker, self.epoch, self.started, rows, addresses, self.closed))
            for w in members
            if w.ready_sent  # earlier it would not know what to do with it
        ]

    def _leave(self, peer: bytes, leave: m.Leave, now_ns: int) -> list[ServerEffect]:
        ack = Send(peer, m.LeaveAck(leave.token))
        self.waiting.pop(leave.token, None)
        if leave.token in self.gone:
            return [ack]
        member = next((w for w in self.members.values() if w.token == leave.token), None)
        if member is None:
            self._forget(leave.token)
            self.finished_once |= leave.clock >= 0  # it was done, and forgotten when a shard was restarted
            if not self.started:  # it died before it could join: the others need not wait for it
                self.needed = max(1, self.needed - 1)
                self._decide(now_ns)
            return [ack, *self._broadcast(now_ns)]
        if leave.clock >= 0 and member.epoch:
            # Its last update may be known to a shard and not yet to us: it stays until every shard has reported it.
            member.leaving, member.seen_ns = leave.clock, now_ns
            return [ack, *self._settle(now_ns)]
        return [ack, *self._remove(member, "left", now_ns)]

    def _forget(self, token: str) -> None:
        self.gone[token] = None
        while len(self.gone) > WAITING_MAX:
            self.gone.pop(next(iter(self.gone)))

    def _remove(self, member: Member, how: str, now_ns: int) -> list[ServerEffect]:
        del self.members[member.worker]
        self.undeclared.pop(member.worker, None)
        if how != "expired":
            self._forget(member.token)
        if member.epoch:
            self.epoch += 1
            if self.mode.barrier and self._open(member):
                self.departed[member.worker] = member.taken
        if not self.started and how != "refused":
            self.needed = max(1, self.needed - 1)
        self._decide(now_ns)
        if member.leaving >= 0:
            self.finished_once = True
        if not self.members and self.finished_once:
            self._end()
        return [self._event(how, member), *self._broadcast(now_ns)]

    def _event(self, how: str, member: Member) -> Log:
        values: dict[str, object] = {"worker": member.worker, "rank": member.rank, "host": member.host, "how": how}
        return Log("member", values | {"clock": self.min_clock, "live": len(self.members)})

    # Reports and decisions.

    def _report(self, peer: bytes, report: m.Report, now_ns: int) -> list[ServerEffect]:
        index = report.shard
        if not 0 <= index < self.shards or (index == 0) != (peer == b""):  # shard 0 is in our process
            raise RemoteProtocolError(f"there is no shard {index} at that peer")
        before = self.reports.get(index)
        if before is not None and (report.incarnation, report.version) <= (before.incarnation, before.version):
            return []  # overtaken by a newer one, be it of the process that came after
        self.shard_peers[index] = peer
        self.reports[index] = report
        effects: list[ServerEffect] = []
        if before is not None and report.incarnation != before.incarnation:
            effects += self._new_generation(index, now_ns)
        elif report.generation == self.generation:
            for worker, clock in report.arrived:
                member = self.members.get(worker)
                if member is not None and member.epoch and clock > member.arrived[index]:
                    member.arrived[index] = clock
                    if index == 0:
                        # Waiting for others is no step, or one death would lengthen the lease of all who waited for it.
                        began_ns = max(member.moved_ns, self.reached_ns.get(clock - 1 - (self.mode.bound or 0), 0))
                        member.step_ns = max(now_ns - began_ns, member.step_ns // 2)
                        member.moved_ns = now_ns
            for clock, squares in report.norms:
                if clock not in self.norms:
                    self.shard_norms.setdefault(clock, {})[index] = squares
        if len(self.reports) == self.shards:
            effects += self._greet(now_ns)
        effects += self._settle(now_ns)
        return [*effects, *self._readies()]

    def _new_generation(self, index: int, now_ns: int) -> list[ServerEffect]:
        shared = set.intersection(*(set(report.checkpoints) for report in self.reports.values()))
        reached, self.restart_clock = self.min_clock, max(shared, default=-1)
        self.epoch += 1
        self.generation = self.epoch
        self.min_clock = max(self.restart_clock, 0)
        self.started = False
        self.needed = max(1, len(self.declared))
        self.finished_once |= any(member.leaving >= 0 for member in self.declared)
        self.generation_ns = now_ns
        self.members.clear()
        self.closed = False
        self.departed.clear()
        self.quorum_ns = -1
        self.sets.clear()
        self.norms.clear()
        self.shard_norms.clear()
        self.finishes, self.finished = 0, set()
        self.checkpoint = -1
        lost: dict[str, object] = {"shard": index, "from_clock": self.min_clock, "to_clock": reached}
        return [Log("restart", lost), *self._broadcast(now_ns)]

    def _settle(self, now_ns: int) -> list[ServerEffect]:
        """Decide all that can be decided, and tell the shards if anything was."""
        version = self.version
        self._decide(now_ns)
        effects: list[ServerEffect] = []
        for member in [w for w in self.members.values() if w.leaving >= 0 and w.clock >= w.leaving]:
            effects += self._remove(member, "left", now_ns)
        if self.version != version:
            effects += self._broadcast(now_ns)
        if self.over and all(self._at_rest(r) for r in self.reports.values()) and len(self.reports) == self.shards:
            effects.append(Stop())
        return effects

    def _at_rest(self, report: m.Report) -> bool:
        """Whether a shard has seen the end and done all that comes before it."""
        return report.ledger_seen >= self.over_version and report.min_clock >= self.min_clock and report.at_rest

    def _ready(self, report: m.Report) -> bool:
        """This shard has the weights that the run begins with."""
        return report.from_above == self.place > 0 if self.child else report.weights_from == self.initialiser

    def _done(self) -> dict[int, int]:
        """Workers, with their clocks, that wait for the last model, all that they pushed being in: nobody waits for them."""
        if not self.child or not self.reports:
            return {}
        waiting = set.intersection(*(set(report.finishing) for report in self.reports.values()))
        members = [self.members[worker] for worker in sorted(waiting & self.members.keys())]
        return {w.worker: w.clock for w in members if w.epoch and not self._open(w)}

    def _open(self, member: Member) -> bool:
        """An update of it is on all shards that no closed clock has."""
        return member.clock > (member.taken if self.mode.barrier else self.min_clock)

    def _grace_over(self, pushed: int, now_ns: int) -> bool:
        """Whether the present clock, with so many open updates, is to be closed without the rest."""
        if not 0 < self.settings.quorum <= pushed:
            return False
        if self.quorum_ns < 0:
            self.quorum_ns = now_ns
            took = now_ns - self.reached_ns[self.min_clock]
            self.round_ns += int(ROUND_GAIN * (took - self.round_ns)) if self.round_ns else took
        return now_ns - self.quorum_ns >= self.grace_ns

    @property
    def grace_ns(self) -> int:
        """How long a clock stays open once its quorum is there."""
        if self.settings.grace >= 0:
            return int(self.settings.grace * NS)
        limit = min(GRACE_MAX_NS, int(self.settings.lease * NS))
        return min(max(int(GRACE_SHARE * self.round_ns), GRACE_MIN_NS), limit)

    def _close(self, now_ns: int) -> None:
        """The set of the present clock: the oldest open update of each worker."""
        clock = self.min_clock
        taken = dict(self.departed)
        for member in filter(self._open, self.declared):
            taken[member.worker] = member.taken
            age = clock - member.due
            if age:
                which = {"worker": member.worker, "rank": member.rank, "clock": clock, "age": age}
                late = f"the update of worker {member.worker} for clock {member.due} came late"
                self.said.append(Log("late", which | {"text": f"{late} and is in clock {clock}, {age} after it"}))
            member.taken += 1
            member.due = clock + 1
            member.moved_ns = now_ns  # its next step begins with what this clock is folded to
        self.sets[clock] = tuple(sorted(taken.items()))
        self.departed.clear()

    def _decide(self, now_ns: int) -> None:
        declared = self.declared
        fresh = self.child or self.restart_clock < 0
        current = [r for r in self.reports.values() if r.generation == self.generation and r.planned]
        if not self.started and declared and len(current) == self.shards:
            enough = len(declared) >= self.needed
            if self.generation_ns and now_ns - self.generation_ns > self.settings.lease * NS:
                enough = True
            if enough and (not fresh or all(self._ready(r) for r in current)):
                self.started = True
                self.reached_ns = {self.min_clock: now_ns}
                self.version += 1
        # After the end no clock closes: a shard that has reached the last one is gone, and would be waited for.
        while self.started and not self.over:
            resting = self._done()
            going = [w for w in declared if w.worker not in resting]
            pushed = sum(map(self._open, going))
            if not going or not (pushed == len(going) or self._grace_over(pushed + len(self.departed), now_ns)):
                break
            if self.mode.barrier:
                if any(report.min_clock < self.min_clock for report in current):
                    break  # late updates alone could close one clock after the other, with no one to see them
                self._close(now_ns)
            self.quorum_ns = -1
            self.min_clock += 1
            self.version += 1
            self.reached_ns[self.min_clock] = now_ns
            self.reached_ns.pop(self.min_clock - (self.mode.bound or 0) - 1, None)
        mixes = self.mode.rule is Rule.MIX and self.started and not self.closed
        if mixes and declared and all(w.ended or w.leaving >= 0 for w in declared):
            self.closed = True
            self.epoch += 1
            self.version += 1
        undecided = self.child and self.weights < 0 and self.initialiser >= 0 and len(current) == self.shards
        if undecided and all(report.weights_from == self.initialiser for report in current):
            self.weights = self.initialiser
            self.version += 1
        ended = set(self._done().items())
        # One after the other: a shard that saw two at once would push once less than the others.
        idle = all((r.from_above, r.finishes) == (self.place, self.finishes) for r in self.reports.values())
        if idle and declared and len(ended) == len(declared) and not ended <= self.finished and not self.over:
            self.finished, self.finishes, self.finish_at = ended, self.finishes + 1, self.min_clock
            self.version += 1
        for clock, by_shard in list(self.shard_norms.items()):
            if len(by_shard) == self.shards:
                self.norms[clock] = sum(by_shard[i] for i in range(self.shards)) ** 0.5
                del self.shard_norms[clock]
                self.version += 1
        if len(self.reports) == self.shards:
            done = min(report.min_clock for report in self.reports.values())
            for table in (self.sets, self.norms):
                for clock in [c for c in table if c < done]:
                    del table[clock]

    def _end(self) -> None:
        """The run is over; every shard writes its last checkpoint, of the clock reached."""
        self.over, self.checkpoint, self.over_version = True, self.min_clock, self.version + 1

    def stop(self, now_ns: int) -> list[ServerEffect]:
        """Ctrl-C: checkpoint at the clock reached, and end."""
        text = f"the server was stopped at clock {self.min_clock}"
        refuse = self.refuse_all(m.RefuseCode.SERVER_LOST, text)
        self._end()
        return [*refuse, *self._broadcast(now_ns)]

    def tick(self, now_ns: int) -> list[ServerEffect]:
        """Expire leases, ask for checkpoints, send unseen ledgers again."""
        effects: list[ServerEffect] = []
        if not self.ticked:
            self.ticked, self.checkpoint_ns = True, now_ns
            if self.restart_clock >= 0:
                self.generation_ns = now_ns
        for member in list(self.members.values()):
            lease_ns = max(int(self.settings.lease * NS), LEASE_STEPS * member.step_ns)
            if now_ns - member.seen_ns > lease_ns:
                effects += self._remove(member, "expired", now_ns)
        waited = self.generation_ns and now_ns - self.generation_ns > self.settings.lease * NS
        if waited and self.finished_once and not self.members and not self.over:
            self._end()  # all that there were had finished when a shard was restarted: nobody comes back
            effects += self._broadcast(now_ns)
        every = int(self.settings.checkpoint_every * NS)
        # One at a time: a shard keeps few, and the run can only go back to one that all shards have.
        written = all(self.checkpoint in (-1, *report.checkpoints) for report in self.reports.values())
        if every and written and self.started and not self.over and now_ns - self.checkpoint_ns >= every:
            self.checkpoint, self.checkpoint_ns = self.min_clock + 1, now_ns
            effects += self._broadcast(now_ns)
        effects += self._settle(now_ns)
        for index in range(1, self.shards):
            report = self.reports.get(index)
            late = now_ns - self.sent_ns[index] >= LEDGER_RETRY_NS
            unseen = report is not None and (report.ledger_seen < self.version or report.generation != self.generation)
            if report is not None and late and (unseen or self.shard_seen[index] < report.version):
                effects.append(self._ledger(index, now_ns))
        return effects

    def _broadcast(self, now_ns: int) -> list[ServerEffect]:
        self.version += 1
        said, self.said = self.said, []
        effects: list[ServerEffect] = [*said, *(self._ledger(index, now_ns) for index in self.shard_peers)]
        if self.introduced != self._roster_epoch:
            self.introduced = self._roster_epoch
            effects += self._rosters(self.declared)
        return effects

    def _ledger(self, index: int, now_ns: int) -> Send:
        report = self.reports.get(index)
        self.sent_ns[index] = now_ns
        self.shard_seen[index] = report.version if report is not None else -1
        published = report.min_clock if report is not None else 0
        planned = report is not None and report.planned and report.generation == self.generation
        ledger = m.Ledger(
            version=self.version,
            generation=self.generation,
            restart_clock=self.restart_clock,
            epoch=self.epoch,
            started=self.started,
            initialiser=self.initialiser,
            members=tuple((w.worker, w.epoch, w.start) for w in self.declared),
            min_clock=self.min_clock,
            sets=tuple((clock, *chain(*rows)) for clock, rows in self.sets.items() if clock >= published),
            departed=tuple(self.departed.items()),
            norms=tuple((clock, norm) for clock, norm in self.norms.items() if clock >= published),
            checkpoint=self.checkpoint,
            over=self.over,
            report_seen=self.shard_seen[index],
            plan=b"" if planned else self.plan_packed,
            above=self.above,
            weights=self.weights,
            finishes=self.finishes,
            finish_at=self.finish_at,
            roster=self.roster,
            alone=self.alone,
        )
        return Send(self.shard_peers[index], ledger)
