"""The membership of a cluster in the run above: process 0 joins it, takes a place for all shards, and leaves it. No I/O.

Rules
- The cluster is there while a worker of its own is: the run above would wait for one that has none.
- Its methods return effects in the order of what happened. The server sends on what is for shard 0 or the coordinator.
"""

from __future__ import annotations

from dataclasses import replace

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.addresses import LOCAL_HOSTS
from narrows.protocols.config.modes import Rule
from narrows.protocols.config.retry import LONG_AGO_NS
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Log, MemberEffect, Send, SendToPeer, ServerEffect, Stop
from narrows.protocols.gossip.peers import WHOLE
from narrows.protocols.member.heartbeat_summary import NAME_MAX, SummaryRow
from narrows.protocols.member.member import Member, MemberPhase
from narrows.protocols.wire import encode
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.run import Seat
from narrows.ps.parent.parent_link import ParentSeat, asks
from narrows.ps.server.parent_hold import ParentHold
from narrows.ps.shard.shard import Shard


class ParentMembership:
    """`member`: in the run of the server at `parent`. `host`: by which other clusters reach this one, and `public` the key that
    they find there. `stands`: it may have a standby."""

    def __init__(
        self,
        shard: Shard,
        coordinator: Coordinator,
        member: Member,
        parent: str,
        host: str,
        public: str,
        stands: bool,
    ) -> None:
        self.public, self.stands = public, stands
        self.shard, self.coordinator, self.member, self.parent, self.host = shard, coordinator, member, parent, host
        self.place: ParentSeat | None = None
        self.leaves = False  # all is done, and the server above has been told
        self.late: e.Started | None = None  # a run of gossip that had begun: it waits for a peer's round
        self.early: list[MemberEffect] = []  # of peers, before shard 0 has the newest place
        self.holding = ParentHold(coordinator, member)
        self.final = Stop()  # what this process ends with
        coordinator.tree_above, member.figures.rows = self._tree, self._rows
        coordinator.attendance.says_above = self._waits

    def _tree(self) -> str:
        return self.member.tree

    def _waits(self) -> str:
        return self.member.waits

    def _rows(self) -> tuple[SummaryRow, ...]:
        """This cluster, and all below it."""
        coordinator = self.coordinator
        below = [row for seat in coordinator.declared for row in _now(coordinator, seat)]
        ours = [row.summary for row in below if len(row.path) == 1]
        losses = [summary.loss for summary in ours if summary.loss is not None]
        own = replace(
            self.shard.above.summary(),
            bytes_up=sum(report.bytes_up for report in coordinator.reports.values()),
            bytes_down=sum(report.bytes_down for report in coordinator.reports.values()),
            samples=sum(summary.samples for summary in ours),
            loss=sum(losses) / len(losses) if losses else None,
            left_steps=max((summary.left_steps for summary in ours), default=0),
            lost=coordinator.roster.lost,
        )
        return SummaryRow((), "", coordinator.run.settings.summary()[:NAME_MAX], own), *below

    # Events.

    def declare(self, now_ns: int) -> list[ServerEffect]:
        """Tell the server above of the model as soon as a worker has told us."""
        member, coordinator = self.member, self.coordinator
        if coordinator.roster.plan is None or member.plan or not coordinator.generations.may_declare:
            return []
        # Only updates go up: what steps the weights is ours alone.
        ports = [coordinator.reports[shard].port for shard in range(coordinator.run.shards)]
        there = f"/{self.public}" if self.public else ""
        member.address = " ".join(f"tcp://{self.host}:{port}{there}" for port in ports)
        upward = replace(coordinator.roster.plan, optimizer="", max_grad_norm=0.0)
        return asks(member.declare(upward.packed(), now_ns))

    def agree(self, now_ns: int) -> list[ServerEffect]:
        """Ask the server above for the value that all agree on, where our workers wait for one."""
        upward, member, place = self.coordinator.agreements.upward, self.member, self.place
        if upward is None or place is None or member.phase is not MemberPhase.RUNNING or upward.said == member.epoch:
            return []
        upward.said = member.epoch
        clock = max(self.shard.above.clock, place.clock)
        asked = (upward.number, *upward.call, clock, upward.value, upward.weight)
        return asks(member.say(0, [m.AgreeAsk(member.worker, member.epoch, *asked)], now_ns))

    def tick(self, now_ns: int) -> list[ServerEffect]:
        return [
            *self._with_the_workers(now_ns),
            *self.agree(now_ns),
            *self.seen(self.member.tick(now_ns), now_ns),
            *self.hand_on(now_ns),
        ]

    def _with_the_workers(self, now_ns: int) -> list[ServerEffect]:
        """Leave while no worker is here, for the run above would wait for us; join again when there are enough."""
        member, coordinator = self.member, self.coordinator
        someone = coordinator.declared or coordinator.above.undeclared
        if member.phase is MemberPhase.ALONE and not someone and not coordinator.over:
            return self.end(m.RefuseCode.SERVER_LOST, "it is gone, and so is the last worker here", now_ns)
        if member.phase in (MemberPhase.DECLARED, MemberPhase.RUNNING) and not someone and not coordinator.over:
            return [*asks(member.leave(-1, now_ns)), *coordinator.placed(b"", 0, now_ns)]
        if member.phase is MemberPhase.OVER and coordinator.generations.may_declare and not coordinator.over:
            return asks(member.rejoin(now_ns))
        return self.declare(now_ns)

    def seen(self, events: list[MemberEffect], now_ns: int) -> list[ServerEffect]:
        """Carry out what the member has seen, in its order."""
        effects: list[ServerEffect] = []
        for event in events:
            effects += self._see(event, now_ns)
        return effects

    def _see(self, event: MemberEffect, now_ns: int) -> list[ServerEffect]:
        coordinator = self.coordinator
        if isinstance(event, (Send, SendToPeer)):
            return [event]
        if isinstance(event, e.Joined):
            return self._joined(event, now_ns)
        if isinstance(event, e.Turned):
            return self._turned(event, now_ns)
        if isinstance(event, e.Held):
            return self._held(event, now_ns)
        if isinstance(event, e.Moved):
            return self._moved(event, now_ns)
        if isinstance(event, e.Started):
            coordinator.buffers.packed = coordinator.buffers.packed or event.buffers
            return self._started(event, now_ns)
        if isinstance(event, e.OfPeers):
            return self._of_peers(event, now_ns)
        if isinstance(event, e.ServerGone):
            text = f"the server above, {self.parent}, is gone; the clusters go on among themselves"
            told = coordinator.introduced_above(coordinator.above.roster, True, now_ns)
            return [Log("above", {"text": text}), *told]
        if isinstance(event, e.Failed):
            return self.end(event.code, event.text, now_ns)
        if isinstance(event, e.BuffersWanted):
            # Its workers' clocks are not those of the run above: what it has is the newest that it can have.
            return asks(self.member.buffers(packed, m.CLOCK_MAX)) if (packed := coordinator.buffers.packed) else []
        if isinstance(event, e.AgreedTold):
            return [*self.coordinator.agreements.told_above(event.number, event.value)]
        if isinstance(event, e.Left):
            # All was at rest when we said so. A peer that asks once more, as one does that was killed, finds nobody's repeats.
            return [self.final] if self.leaves else []
        return self.shard.from_above([event], now_ns)

    def reported(self, report: m.Report, now_ns: int) -> list[ServerEffect]:
        """Return what the server above is told of a shard's report."""
        member = self.member
        if report.trouble:
            return self.end(m.RefuseCode.INCOMPATIBLE, report.trouble, now_ns)
        if known := self.holding.known(now_ns):
            return known
        if member.ended or member.phase is not MemberPhase.RUNNING or not self.coordinator.above.ended:
            return []
        member.ended = True
        return [member.beat(now_ns)]

    # Standbys, of the server above and of this cluster.

    def _turned(self, event: e.Turned, now_ns: int) -> list[ServerEffect]:
        """The server above is another one from now on. Each shard keeps its place, and goes on with it there."""
        self.parent = event.address
        text = f"the standby at {self.parent} serves above now; training goes on"
        log = Log("above", {"text": text, "parent": self.parent})
        if self.place is None or not self.coordinator.above.place:
            return [log]
        self.place = replace(self.place, ports=event.ports, server=self.parent)
        return [log, *self._keeps(now_ns)]

    def _keeps(self, now_ns: int) -> list[ServerEffect]:
        """Our place is the same, and something of it is new."""
        assert self.place is not None
        return self.coordinator.turned_above(self.place.packed(), self.place.epoch, now_ns)

    def copied(self, standby: str) -> None:
        """Another server has all that is here, "": none has. The one above is told soon: it waits a lease for that one."""
        self.member.copied, self.member.beat_ns = bool(standby), LONG_AGO_NS

    # Another plan of the run above.

    def _held(self, event: e.Held, now_ns: int) -> list[ServerEffect]:
        """No shard is to push an update from that clock on."""
        if self.place is None or not self.coordinator.above.place or event == self.holding.word:
            return []
        self.place = replace(self.place, hold=event.at)
        told = self._keeps(now_ns)
        self.holding.said(event)
        return told

    def _moved(self, event: e.Moved, now_ns: int) -> list[ServerEffect]:
        """Each shard keeps its place there, and what it owes; the workers here notice a pause."""
        assert self.place is not None
        settings, before = self.member.settings, self.place.epoch
        begun = replace(self.place, epoch=event.epoch, clock=event.clock, at=self.coordinator.min_clock)
        self.place = replace(begun, settings=settings, ports=event.ports, before=before, hold=-1)
        text = f"the run above has plan {settings.plan_number} from its clock {event.clock} on: {settings.summary()}"
        return [Log("above", {"text": text}), *self._keeps(now_ns)]

    # Peers, where clusters gossip.

    def _of_peers(self, event: MemberEffect, now_ns: int) -> list[ServerEffect]:
        """Take what other clusters say to this one: shard 0 mixes with them, but the first round is asked for here."""
        late, told = self.late, list[ServerEffect]()
        if late is not None and isinstance(event, e.OfferArrived) and event.parts[0].number == WHOLE:
            self.late = None
            return self._placed(late, event.parts[0].round, event.parts[0].round, now_ns)
        self.early.append(event)
        if isinstance(event, e.RosterNews):
            told = self.coordinator.introduced_above(bytes(encode(event.roster)[0]), False, now_ns)
        return [*told, *self._ask(now_ns), *self.hand_on(now_ns)]

    def hand_on(self, now_ns: int) -> list[ServerEffect]:
        """Hand shard 0 what peers have said, once it has the newest place."""
        planned, early = self.shard.planned, self.early
        if not early or self.late is not None or planned is None or planned.above.place != self.place:
            return []
        self.early = []
        return self.shard.from_above(early, now_ns)

    def _ask(self, now_ns: int) -> list[ServerEffect]:
        """The longest-standing peer for the round that the run has come to, where we are late."""
        peers = self.member.peers
        if self.late is None or peers is None or not peers.epoch or any(p.adopting for p in peers.peers.values()):
            return []
        if peers.peers:
            return self.seen(peers.adopt(min(peers.peers), now_ns), now_ns)
        text = "the run has begun, and no cluster is left that could give its model: start it again"
        return self.end(m.RefuseCode.INCOMPATIBLE, text, now_ns)

    # The beginning: joined, then started, then at a place.

    def _joined(self, event: e.Joined, now_ns: int) -> list[ServerEffect]:
        settings = Settings.unpacked(event.settings)
        why = self._cannot_join(settings, self.coordinator.run.shards, len(event.ports), any(event.hosts))
        if why:
            return self.end(m.RefuseCode.INCOMPATIBLE, why, now_ns)
        place = f"is member {event.rank + 1} of {event.world_size} of {self.parent}"
        told = self.coordinator.joined_above(event.rank, event.world_size, now_ns)
        return [Log("above", {"text": f"{place}: {settings.summary()}"}), *told]

    def _cannot_join(self, settings: Settings, ours: int, theirs: int, elsewhere: bool) -> str:
        """Why this cluster cannot be a worker of a run of these settings; `ours`, `theirs`: shards; `elsewhere`: some of those
        are on other machines. "" where it can."""
        mode = settings.mode()
        if mode.rule is Rule.MIX and self._unreachable:
            return (
                f"its clusters gossip, and from other machines nobody reaches {self.host}: give --bind an address of this "
                "machine that they reach"
            )
        if mode.rule is Rule.MIX and self.stands:
            return "its clusters gossip, and would not find a standby of this one: leave out --replicas"
        if mode.streams:
            return (
                "it merges fragments of the model (--fragments, --merge-delay, --merge-alpha), and a cluster exchanges all of "
                "it at once: start it without these flags"
            )
        if mode.rule is Rule.OPTIMIZER:
            return (
                f"it takes gradients (--sync {settings.sync}) and a cluster pushes updates: start it with --push update"
            )
        if settings.dp_clip > 0:
            return "it asks for --dp-clip, which workers alone obey: give the flag to this ps-serve, and start that one without"
        if elsewhere:
            return "some of its shards are on other machines, which no cluster dials: end ps-serve --join there first"
        if ours != theirs:
            return (
                f"it has {theirs} shards and this cluster {ours}, and each pushes to one: give --shards {theirs} here"
            )
        return ""

    @property
    def _unreachable(self) -> bool:
        """This cluster listens where only this machine reaches it, and the server above is on another."""
        above = self.parent.removeprefix("tcp://").rpartition(":")[0]
        return self.host in LOCAL_HOSTS and above not in LOCAL_HOSTS

    def _started(self, event: e.Started, now_ns: int) -> list[ServerEffect]:
        """Take our place above. In a run of gossip the server above does not know the round: its clock says only
        whether it has begun; then a peer tells it, or we go on from our own."""
        coordinator, before = self.coordinator, self.place
        assert self.member.settings is not None
        mode = self.member.settings.mode()
        self.late, self.early, self.holding.word = None, [], None
        if mode.rule is not Rule.MIX:
            return self._placed(event, 0, event.clock, now_ns)
        if coordinator.declared and before is not None:
            number = before.round + (coordinator.min_clock - before.at) // mode.local_steps
            return self._placed(event, number, 0, now_ns)
        if event.clock:
            self.late = event
            return self._ask(now_ns)
        return self._placed(event, 0, 0, now_ns)

    def _placed(self, event: e.Started, number: int, clock: int, now_ns: int) -> list[ServerEffect]:
        """Begin at round `number` (gossip), where nobody here is further at `clock`, that of the run above."""
        member, coordinator = self.member, self.coordinator
        assert member.settings is not None
        at = coordinator.rounds.begin(clock * member.settings.mode().local_steps, now_ns)
        if not coordinator.declared:
            # Shards go there at once, and may pass the clock of the checkpoint that was asked for.
            coordinator.generations.anew()
        where = (event.worker, event.epoch, event.clock, at)
        self.place = ParentSeat(member.settings, *where, member.ports, number, self.parent)
        return coordinator.placed(self.place.packed(), event.epoch, now_ns)

    # The end.

    def stop(self, now_ns: int) -> list[ServerEffect]:
        """Ctrl-C: leave the run above too."""
        if self.member.phase in (MemberPhase.LEAVING, MemberPhase.OVER):
            return []
        return [*asks(self.member.leave(-1, now_ns)), *self.coordinator.cut_off(now_ns)]

    def end(self, code: int, text: str, now_ns: int) -> list[ServerEffect]:
        """The session above is over: tell the workers why, write a checkpoint, and end."""
        coordinator = self.coordinator
        self.member.end_session()
        if self.leaves:
            return [Stop()]  # all was at rest, and other shards may have ended: they will not see a later ledger
        if coordinator.over:
            return coordinator.cut_off(now_ns) if coordinator.above.place else []  # all our workers are done
        text = f"the server above, {self.parent}: {text}"[: m.TEXT_MAX]
        self.final = Stop(code, text)
        return [*coordinator.roster.refuse_all(code, text), *coordinator.cut_off(now_ns)]

    def leave(self, now_ns: int) -> list[ServerEffect]:
        """All is done here: leave the run above, and then end."""
        if self.member.phase in (MemberPhase.OVER, MemberPhase.NEW):
            return [self.final]
        if self.member.phase is MemberPhase.LEAVING:
            return []
        self.leaves = True
        return self.seen(self.member.leave(self.shard.above.clock, now_ns), now_ns)


def _now(coordinator: Coordinator, seat: Seat) -> tuple[SummaryRow, ...]:
    """The rows of a member, with the clock that it has now: clocks of one moment can be compared."""
    if not seat.rows or coordinator.run.mode.rule is Rule.MIX:  # peers count for themselves
        return seat.rows
    first, *others = seat.rows
    return replace(first, summary=replace(first.summary, clock=coordinator.rounds.clock(seat))), *others
