"""The membership of a cluster in its parent's run. Process 0 joins, takes a seat for all shards, and leaves. No I/O.

How it works

    MemberWelcomed ──> declare ──> MemberStarted ──> _placed ──> ledger with the seat ──> each shard begins there
                                        │                │
                                  gossip: ask a peer     ServerChanged | PushesPaused | MemberResharded: same seat, changed
                                  for the round          │
                                                         leave ──> MemberLeft ──> the process ends

1. `Server.start` sends a Hello. `_joined` checks whether the cluster can be a member under the parent's settings.
2. As soon as a worker has declared its model here, `declare` declares it to the parent.
3. `_started` takes the seat that the parent gives. `_placed` puts it into the coordinator's next ledger (`ParentSeat`),
   and each shard begins there between two clocks (ps/parent/parent_slot.py).
4. If the parent's standby takes over (`_turned`), or the parent's run holds (`_held`) or changes its plan (`_moved`),
   the seat stays and a ledger carries what is new of it.
5. While the cluster has no worker it leaves the parent's run, and joins again when enough are here
   (`_with_the_workers`).
6. After the last clock `leave` sends a Leave; on the answer the process ends.

Rules
- A cluster is a member of the parent's run only while it has a worker: that run would wait for a cluster without one.
- Methods return effects in the order of what happened. `Server._route` hands on those for shard 0 and the coordinator.
"""

from __future__ import annotations

from dataclasses import replace

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.addresses import LOCAL_HOSTS, behind
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Log, MemberEffect, Send, SendToPeer, ServerEffect, StopProcess
from narrows.protocols.gossip.peers import WHOLE
from narrows.protocols.member.heartbeat_summary import NAME_MAX, Summary, SummaryRow
from narrows.protocols.member.member import Member, MemberPhase
from narrows.protocols.wire import encode
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.run import Seat
from narrows.ps.parent.parent_link import ParentSeat, asks
from narrows.ps.shard.shard import Shard


class ParentHold:
    """The parent's newest request to hold, and whether all shards know of it.

    The parent changes its plan once it has the answer: no update from the named clock on comes after it. So the cluster
    answers once every shard has acknowledged the ledger that says so, and not when process 0 has heard of it.
    """

    def __init__(self, coordinator: Coordinator, member: Member) -> None:
        self.coordinator, self.member = coordinator, member
        self.request: e.PushesPaused | None = None  # the newest request
        self.version = 0  # version of the ledger that tells the shards

    def said(self, word: e.PushesPaused) -> None:
        """Note that the newest ledger tells this request to the shards."""
        self.request, self.version = word, self.coordinator.version

    def anew(self) -> None:
        """Forget the request: it was for an earlier seat."""
        self.request = None

    @property
    def all_know(self) -> bool:
        """True if all shards have acknowledged that ledger."""
        run = self.coordinator.run
        return run.complete and all(report.ledger_seen >= self.version for report in run.reports.values())

    def known(self, now_ns: int) -> list[ServerEffect]:
        """Answer the parent once all shards know."""
        if self.request is None or self.member.move >= self.request.number or not self.all_know:
            return []
        return [self.member.knows(self.request.number, now_ns)]


class ParentMembership:
    """A cluster as a member of its parent's run."""

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
        """A membership before its Hello.

        Args:
            shard: Shard 0 of this cluster.
            coordinator: The coordinator of this cluster.
            member: The member of the parent's run.
            parent: The address of the parent.
            host: The host under which other clusters reach this one; HOST:PORT behind one port.
            public: The public key that other clusters find there, "" for none.
            stands: True if this server may have a standby.
        """
        self.public, self.stands = public, stands
        self.shard, self.coordinator, self.member, self.parent, self.host = shard, coordinator, member, parent, host
        self.place: ParentSeat | None = None
        self.leaves = False  # True once all is done and the parent was sent a Leave
        # gossip: a run that had begun before us, while a peer is asked for the round
        self.late: e.MemberStarted | None = None
        self.early: list[MemberEffect] = []  # events of peers that came before shard 0 had the newest seat
        self.holding = ParentHold(coordinator, member)
        self.final = StopProcess()  # the effect that this process ends with
        coordinator.parent_place.listen(member)
        member.figures.read_from(self._rows)

    @property
    def clock(self) -> int:
        """Updates that shard 0 has pushed at its seat; -1 before the seat has begun."""
        seat = self.shard.parent_slot.seat
        return seat.clock if seat is not None else -1

    def _rows(self) -> tuple[SummaryRow, ...]:
        """Return the figures of this cluster, and of all workers and clusters below it."""
        coordinator, seat = self.coordinator, self.shard.parent_slot.seat
        below = [row for child in coordinator.declared for row in _now(coordinator, child)]
        ours = [row.summary for row in below if len(row.path) == 1]
        losses = [summary.loss for summary in ours if summary.loss is not None]
        own = replace(
            seat.summary() if seat is not None else Summary(),
            bytes_up=sum(report.bytes_up for report in coordinator.reports.values()),
            bytes_down=sum(report.bytes_down for report in coordinator.reports.values()),
            samples=sum(summary.samples for summary in ours),
            loss=sum(losses) / len(losses) if losses else None,
            left_steps=max((summary.left_steps for summary in ours), default=0),
            lost=coordinator.members.lost,
            memory_bytes=coordinator.replans.room(),
        )
        return SummaryRow((), "", coordinator.run.settings.summary()[:NAME_MAX], own), *below

    # Events.

    def declare(self, now_ns: int) -> list[ServerEffect]:
        """Declare the model to the parent as soon as a worker has declared it here."""
        member, coordinator = self.member, self.coordinator
        if coordinator.members.plan is None or member.plan or not coordinator.checkpoint_schedule.may_declare:
            return []
        # The parent gets updates only, so the optimizer and the clipping are this cluster's own.
        ports = [coordinator.reports[shard].port for shard in range(coordinator.run.shards)]
        there = f"/{self.public}" if self.public else ""
        where = [
            f"tcp://{self.host}:{port}" if port else behind(f"tcp://{self.host}", shard)
            for shard, port in enumerate(ports)
        ]
        member.reached_at(" ".join(address + there for address in where))
        upward = replace(coordinator.members.plan, optimizer="", max_grad_norm=0.0)
        return asks(member.declare(upward.packed(), now_ns))

    def agree(self, now_ns: int) -> list[ServerEffect]:
        """Ask the parent for a value that all workers must agree on, if workers here wait for one."""
        member, place = self.member, self.place
        if place is None or member.phase is not MemberPhase.RUNNING:
            return []
        if (upward := self.coordinator.agreements.ask_above(member.epoch)) is None:
            return []
        clock = max(self.clock, place.clock)
        asked = (upward.number, *upward.call, clock, upward.value, upward.weight)
        return asks(member.send(0, [m.AgreeRequest(member.worker, member.epoch, *asked)], now_ns))

    def tick(self, now_ns: int) -> list[ServerEffect]:
        """Let time pass: join or leave with the workers, and repeat what is not acknowledged."""
        return [
            *self._with_the_workers(now_ns),
            *self.agree(now_ns),
            *self.seen(self.member.tick(now_ns), now_ns),
            *self.hand_on(now_ns),
        ]

    def _with_the_workers(self, now_ns: int) -> list[ServerEffect]:
        """Leave the parent's run while no worker is here; join again when there are enough."""
        member, coordinator = self.member, self.coordinator
        someone = coordinator.declared or coordinator.parent_place.undeclared
        if member.phase is MemberPhase.ALONE and not someone and not coordinator.over:
            return self.end(m.RefuseCode.SERVER_LOST, "it is lost, and the last worker here has left", now_ns)
        if member.phase in (MemberPhase.DECLARED, MemberPhase.RUNNING) and not someone and not coordinator.over:
            return [*asks(member.leave(-1, now_ns)), *coordinator.placed(b"", 0, now_ns)]
        if member.phase is MemberPhase.OVER and coordinator.checkpoint_schedule.may_declare and not coordinator.over:
            return asks(member.rejoin(now_ns))
        return self.declare(now_ns)

    def seen(self, events: list[MemberEffect], now_ns: int) -> list[ServerEffect]:
        """Carry out the events of the member, in their order."""
        effects: list[ServerEffect] = []
        for event in events:
            effects += self._see(event, now_ns)
        return effects

    def _see(self, event: MemberEffect, now_ns: int) -> list[ServerEffect]:
        """Carry out one event of the member. An event that concerns the shard alone goes to shard 0."""
        coordinator = self.coordinator
        if isinstance(event, (Send, SendToPeer)):
            return [event]
        if isinstance(event, e.MemberWelcomed):
            return self._joined(event, now_ns)
        if isinstance(event, e.ServerChanged):
            return self._turned(event, now_ns)
        if isinstance(event, e.PushesPaused):
            return self._held(event, now_ns)
        if isinstance(event, e.MemberResharded):
            return self._moved(event, now_ns)
        if isinstance(event, e.MemberStarted):
            coordinator.buffers.adopt(event.buffers)
            return self._started(event, now_ns)
        if isinstance(event, e.OfPeers):
            return self._of_peers(event, now_ns)
        if isinstance(event, e.ServerGone):
            text = f"the parent, {self.parent}, is lost; the clusters go on without it"
            effects = coordinator.introduced_above(coordinator.parent_place.roster, True, now_ns)
            return [Log("above", {"text": text}), *effects]
        if isinstance(event, e.MemberFailed):
            return self.end(event.code, event.text, now_ns)
        if isinstance(event, e.BuffersRequested):
            # The clocks of workers here are not those of the parent's run: their buffers count as the newest there are.
            return asks(self.member.buffers(packed, m.CLOCK_MAX)) if (packed := coordinator.buffers.packed) else []
        if isinstance(event, e.AgreementArrived):
            return [*self.coordinator.agreements.told_above(event.number, event.value)]
        if isinstance(event, e.MemberLeft):
            # All was acknowledged before the Leave. A restarted peer that asks again gets no answer from this process.
            return [self.final] if self.leaves else []
        return self.shard.from_above([event], now_ns)

    def reported(self, report: m.Report, now_ns: int) -> list[ServerEffect]:
        """Return what the parent must know of a shard's report."""
        member = self.member
        if report.trouble:
            return self.end(m.RefuseCode.INCOMPATIBLE, report.trouble, now_ns)
        if known := self.holding.known(now_ns):
            return known
        if member.ended or member.phase is not MemberPhase.RUNNING or not self.coordinator.parent_place.ended:
            return []
        return asks(member.tell_ended(now_ns))

    # Standbys, of the parent and of this cluster.

    def _turned(self, event: e.ServerChanged, now_ns: int) -> list[ServerEffect]:
        """Go on with the parent's standby, which serves now. Each shard keeps its seat there."""
        self.parent = event.address
        text = f"the parent's standby at {self.parent} serves now; training goes on"
        log = Log("above", {"text": text, "parent": self.parent})
        if self.place is None or not self.coordinator.parent_place.place:
            return [log]
        self.place = replace(self.place, ports=event.ports, server=self.parent)
        return [log, *self._keeps(now_ns)]

    def _keeps(self, now_ns: int) -> list[ServerEffect]:
        """Put the same seat with its changed fields into the next ledger."""
        assert self.place is not None
        return self.coordinator.turned_above(self.place.packed(), self.place.epoch, now_ns)

    def copied(self, standby: str) -> None:
        """Take note that a standby copies this server, "" for none.

        A heartbeat tells the parent at once: if this server is lost, the parent waits a lease for the standby.
        """
        self.member.copied_by(standby)

    # Another plan of the parent's run.

    def _held(self, event: e.PushesPaused, now_ns: int) -> list[ServerEffect]:
        """Have each shard push no update from that clock on."""
        if self.place is None or not self.coordinator.parent_place.place or event == self.holding.request:
            return []
        self.place = replace(self.place, hold=event.at)
        effects = self._keeps(now_ns)
        self.holding.said(event)
        return effects

    def _moved(self, event: e.MemberResharded, now_ns: int) -> list[ServerEffect]:
        """Go on under another plan of the parent's run.

        Each shard keeps its seat and its residual; the workers here notice no more than a pause.
        """
        assert self.place is not None
        settings, before = self.member.settings, self.place.epoch
        begun = replace(self.place, epoch=event.epoch, clock=event.clock, at=self.coordinator.min_clock)
        self.place = replace(begun, settings=settings, ports=event.ports, before=before, hold=-1)
        text = f"the parent's run has plan {settings.plan_number} from its clock {event.clock} on: {settings.summary()}"
        return [Log("above", {"text": text}), *self._keeps(now_ns)]

    # Peers, if clusters gossip.

    def _of_peers(self, event: MemberEffect, now_ns: int) -> list[ServerEffect]:
        """Take an event of another cluster: shard 0 gets it, except the answer to our question for the round."""
        late, effects = self.late, list[ServerEffect]()
        if late is not None and isinstance(event, e.OfferArrived) and event.parts[0].number == WHOLE:
            self.late = None
            return self._placed(late, event.parts[0].round, event.parts[0].round, now_ns)
        self.early.append(event)
        if isinstance(event, e.RosterChanged):
            effects = self.coordinator.introduced_above(bytes(encode(event.roster)[0]), False, now_ns)
        return [*effects, *self._ask(now_ns), *self.hand_on(now_ns)]

    def hand_on(self, now_ns: int) -> list[ServerEffect]:
        """Hand shard 0 the events of peers, once it has the newest seat."""
        planned, early, seat = self.shard.model_shard, self.early, self.shard.parent_slot.seat
        here = seat.place if seat is not None else None
        if not early or self.late is not None or planned is None or here != self.place:
            return []
        self.early = []
        return self.shard.from_above(early, now_ns)

    def _ask(self, now_ns: int) -> list[ServerEffect]:
        """Ask the longest-standing peer for the round of a run that had begun before us."""
        peers = self.member.peers
        if self.late is None or peers is None or not peers.epoch or any(p.adopting for p in peers.peers.values()):
            return []
        if peers.peers:
            return self.seen(peers.adopt(min(peers.peers), now_ns), now_ns)
        text = "the run has begun, and no cluster is left that could give its model: start it again"
        return self.end(m.RefuseCode.INCOMPATIBLE, text, now_ns)

    # The beginning: joined, then started, then seated.

    def _joined(self, event: e.MemberWelcomed, now_ns: int) -> list[ServerEffect]:
        """Check the parent's settings, and let workers come; end if the cluster cannot be a member."""
        settings = Settings.unpacked(event.settings)
        why = self._cannot_join(settings, self.coordinator.run.settings, len(event.ports), any(event.hosts))
        if why:
            return self.end(m.RefuseCode.INCOMPATIBLE, why, now_ns)
        place = f"is member {event.rank + 1} of {event.world_size} of {self.parent}"
        effects = self.coordinator.joined_above(event.rank, event.world_size, now_ns)
        return [Log("above", {"text": f"{place}: {settings.summary()}"}), *effects]

    def _cannot_join(self, settings: Settings, ours: Settings, theirs: int, elsewhere: bool) -> str:
        """Return why this cluster cannot be a member of a run with these settings, "" if it can.

        Args:
            settings: The settings of the parent's run.
            ours: The settings of this cluster.
            theirs: The number of shards of the parent.
            elsewhere: True if some of the parent's shards are on other machines.
        """
        mode = settings.mode()
        if mode.rule is FoldRule.MIX and self._unreachable:
            return (
                f"its clusters gossip, and other machines cannot reach {self.host}: give --bind an address of this "
                "machine that they reach"
            )
        if mode.rule is FoldRule.MIX and self.stands:
            return (
                "its clusters gossip, and would not find a standby of this one: each dials the address that another one joined "
                "with; leave out --replicas"
            )
        if mode.streams:
            return (
                "it merges fragments of the model (--fragments, --merge-delay, --merge-alpha), and a cluster exchanges all of "
                "it at once: start it without these flags"
            )
        if mode.seconds:
            return (
                "its rounds end by time (--local-seconds), and a cluster's shards push at the same clock of the cluster: start "
                "it with --local-steps, and give --local-seconds to this ps-serve"
            )
        if settings.start_steps > 0:
            return (
                "it begins with pushed gradients (--start-steps), and a cluster pushes updates: start it without, or give "
                "--sync bsp to this ps-serve"
            )
        if mode.rule is FoldRule.OPTIMIZER:
            return (
                f"it takes gradients (--sync {settings.sync}) and a cluster pushes updates: start it with --push update"
            )
        if settings.dp_clip > 0:
            return "it asks for --dp-clip, which workers alone obey: give the flag to this ps-serve, and start that one without"
        if elsewhere:
            return "some of its shards are on other machines, which no cluster dials: end ps-serve --join there first"
        if ours.shards != theirs:
            return f"it has {theirs} shards and this cluster {ours.shards}, and each pushes to one: give --shards {theirs} here"
        if ours.cut != settings.cut:
            both = f"it has --cut {settings.cut} and this cluster --cut {ours.cut}"
            return f"{both}, so shards have other keys: give both the same"
        return ""

    @property
    def _unreachable(self) -> bool:
        """True if only this machine can reach this cluster, and the parent is on another machine."""
        above = self.parent.removeprefix("tcp://").rpartition(":")[0]
        return self.host.partition(":")[0] in LOCAL_HOSTS and above not in LOCAL_HOSTS

    def _started(self, event: e.MemberStarted, now_ns: int) -> list[ServerEffect]:
        """Take the seat that the parent gives.

        Under gossip the parent does not know the round: its clock only says whether the run has begun. Then a peer says
        which round it is, or this cluster goes on from its own.
        """
        coordinator, before = self.coordinator, self.place
        assert self.member.settings is not None
        mode = self.member.settings.mode()
        self.late, self.early = None, []
        self.holding.anew()
        if mode.rule is not FoldRule.MIX:
            return self._placed(event, 0, event.clock, now_ns)
        if coordinator.declared and before is not None:
            number = before.round + (coordinator.min_clock - before.at) // mode.local_steps
            return self._placed(event, number, 0, now_ns)
        if event.clock:
            self.late = event
            return self._ask(now_ns)
        return self._placed(event, 0, 0, now_ns)

    def _placed(self, event: e.MemberStarted, number: int, clock: int, now_ns: int) -> list[ServerEffect]:
        """Begin at the seat of `event`.

        Args:
            event: The parent's answer to the declaration.
            number: The first round at this seat (gossip).
            clock: The clock of the parent's run. A cluster without progress of its own begins there.
            now_ns: The time now.
        """
        member, coordinator = self.member, self.coordinator
        assert member.settings is not None
        at = coordinator.clocks.begin(clock * member.settings.mode().local_steps, now_ns)
        if not coordinator.declared:
            # The shards go there at once, and may pass the clock of a checkpoint that was asked for.
            coordinator.checkpoint_schedule.anew()
        where = (event.worker, event.epoch, event.clock, at)
        self.place = ParentSeat(member.settings, *where, member.ports, number, self.parent)
        return coordinator.placed(self.place.packed(), event.epoch, now_ns)

    # The end.

    def stop(self, now_ns: int) -> list[ServerEffect]:
        """Ctrl-C: leave the parent's run too."""
        if self.member.phase in (MemberPhase.LEAVING, MemberPhase.OVER):
            return []
        return [*asks(self.member.leave(-1, now_ns)), *self.coordinator.cut_off(now_ns)]

    def end(self, code: int, text: str, now_ns: int) -> list[ServerEffect]:
        """End the session with the parent: tell the workers why, write a checkpoint, and end."""
        coordinator = self.coordinator
        self.member.end_session()
        if self.leaves:
            return [StopProcess()]  # all was acknowledged, and shards that have ended would not see a later ledger
        if coordinator.over:
            return coordinator.cut_off(now_ns) if coordinator.parent_place.place else []  # all workers here are done
        text = f"the parent, {self.parent}: {text}"[: m.TEXT_MAX]
        self.final = StopProcess(code, text)
        return [*coordinator.members.refuse_all(code, text), *coordinator.cut_off(now_ns)]

    def leave(self, now_ns: int) -> list[ServerEffect]:
        """Leave the parent's run after the last clock, and then end."""
        if self.member.phase in (MemberPhase.OVER, MemberPhase.NEW):
            return [self.final]
        if self.member.phase is MemberPhase.LEAVING:
            return []
        self.leaves = True
        return self.seen(self.member.leave(self.clock, now_ns), now_ns)


def _now(coordinator: Coordinator, seat: Seat) -> tuple[SummaryRow, ...]:
    """Return the figures of a member with its present clock, so that clocks of one moment are compared."""
    if not seat.rows or coordinator.run.mode.rule is FoldRule.MIX:  # under gossip each peer counts its own clocks
        return seat.rows
    first, *others = seat.rows
    return replace(first, summary=replace(first.summary, clock=coordinator.clocks.clock(seat))), *others
