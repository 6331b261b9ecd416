"""The machine of one server process: a shard, in process 0 the coordinator beside it, and there, in a cluster with a server
above, the member that joins and leaves that run. No I/O.

Rules
- A method returns the effects of one event, and leaves in `inner` what shard 0 and the coordinator then have to say to each
  other. Its runner carries out the effects, and only then calls `advance`, until `inner` is empty: so a ledger that closes a
  clock is on its way to the other shards before shard 0 folds, and all shards fold at the same time.
- All that a peer can get wrong is found before `handle` returns: what `advance` handles was made here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.addresses import LOCAL_HOSTS
from narrows.protocols.cluster.coordinator import Coordinator
from narrows.protocols.effects import Log, MemberEffect, Send, ServerEffect, Stop, Tell
from narrows.protocols.errors import IncompatibleError, NarrowsError, RemoteProtocolError
from narrows.protocols.gossip.peers import WHOLE
from narrows.protocols.member.member import Member, Phase
from narrows.protocols.modes import Rule
from narrows.protocols.settings import Settings
from narrows.protocols.wire import encode
from narrows.ps.above import Place, asks
from narrows.ps.mixing import OF_PEERS
from narrows.ps.reports import COORDINATOR
from narrows.ps.shard import Shard

FOR_COORDINATOR = (m.Hello, m.Declare, m.Heartbeat, m.Leave, m.Buffers, m.Report)
OF_CLUSTERS = (m.Offer, m.OfferAck, m.Ended, m.Adopt, m.Ping)  # that gossip with this one


class Server:
    """Routes messages to its machines; what they tell each other in one process never leaves it.

    `member`: of process 0, where this cluster is a worker of the server at `parent`. `host`: by which other clusters reach
    this one.
    """

    def __init__(
        self,
        shard: Shard,
        coordinator: Coordinator | None,
        member: Member | None = None,
        parent: str = "",
        host: str = "",
    ) -> None:
        self.shard, self.coordinator, self.member, self.parent, self.host = shard, coordinator, member, parent, host
        self.place: Place | None = None  # in the run above
        self.leaves = False  # all is done, and the server above has been told
        self.late: e.Started | None = None  # a run of gossip that had begun: it waits for a peer's round
        self.early: list[MemberEffect] = []  # of peers, before shard 0 has the newest place
        self.inner: deque[m.Message] = deque()  # between shard 0 and the coordinator, not handled yet
        self.final = Stop()  # what this process ends with
        self.tree_shown = False
        if member is not None and coordinator is not None:
            coordinator.tree_above = lambda: member.tree

    # Asked by a runner.

    @property
    def over(self) -> bool:
        """The run is over: who is gone is missed by nobody."""
        return self.coordinator.over if self.coordinator is not None else self.shard.ledger.over

    @property
    def ended(self) -> bool:
        """The run is over, and what the coordinator is to hear of it is on its way. The coordinator itself ends by `Stop`."""
        reported = self.shard.min_clock >= self.shard.ledger.min_clock and self.shard.at_rest
        return self.coordinator is None and self.over and reported

    @property
    def above(self) -> str:
        """Where the shard above is dialled, "" where there is none: over TCP also on this machine, so that its bytes are those
        of a link."""
        place, index = self.shard.above.place, self.shard.index
        if not index or place is None:
            return self.parent
        return f"{self.parent.rpartition(':')[0]}:{place.ports[index]}"

    @property
    def clusters(self) -> set[str]:
        """Where those are dialled that gossip with this one."""
        return self.shard.above.addresses

    def refused(self, peer: bytes, error: NarrowsError) -> list[ServerEffect]:
        """The effects of a message in which `error` was found; its sender is told where that is the sender's fault."""
        log: list[ServerEffect] = [Log("refused", {"text": str(error)})]
        if not isinstance(error, (RemoteProtocolError, IncompatibleError)):
            return log
        return [*log, Send(peer, m.Refuse(m.RefuseCode.INCOMPATIBLE, -1, 0, str(error)[: m.TEXT_MAX]))]

    # Events.

    def start(self, now_ns: int) -> list[ServerEffect]:
        """The first report of this shard, and where there is a server above, a Hello to it."""
        effects = self._seen(self.member.join(now_ns), now_ns) if self.member is not None else []
        return [*effects, *self._local([self.shard.report(now_ns)], now_ns)]

    def advance(self, now_ns: int) -> list[ServerEffect]:
        """Handle the oldest message of `inner`; return its effects."""
        assert self.coordinator is not None
        message = self.inner.popleft()
        if isinstance(message, m.Ledger):
            done = self._local(self.shard.handle_ledger(message, now_ns), now_ns)
            return [*done, *self._hand_on(now_ns)]
        effects = self.coordinator.handle(COORDINATOR, message, now_ns)
        if isinstance(message, m.Report):
            self.shard.reports.has_seen(message.version)
            effects += self._reported(message, now_ns)
        return self._local(effects, now_ns)

    def handle(self, peer: bytes, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a message. Raises RemoteProtocolError; then nothing has changed."""
        coordinator = self.coordinator
        if isinstance(message, FOR_COORDINATOR):
            if coordinator is None:
                raise RemoteProtocolError("this is not the coordinator: dial the address of ps-serve, shard 0")
            effects = coordinator.handle(peer, message, now_ns)
            if isinstance(message, m.Report):
                effects += self._reported(message, now_ns)
            return self._local([*effects, *self._declare(now_ns)], now_ns)
        if isinstance(message, OF_CLUSTERS):
            if self.member is not None:
                return self._seen(self.member.receive_peer(message, now_ns), now_ns)
            return self._local(self.shard.hear(message, now_ns), now_ns)
        if isinstance(message, m.Ledger):
            if peer != COORDINATOR:
                raise RemoteProtocolError("a ledger comes from the coordinator alone")
            return self._local(self.shard.handle_ledger(message, now_ns), now_ns)
        if coordinator is not None and isinstance(message, (m.Push, m.Follow, m.Pull, m.FirstWeights)):
            coordinator.heard(message.worker, now_ns)
        return self._local(self.shard.handle(peer, message, now_ns), now_ns)

    def tick(self, now_ns: int) -> list[ServerEffect]:
        effects = self.shard.tick(now_ns)
        if self.coordinator is not None:
            effects = effects + self.coordinator.tick(now_ns)
        effects = self._local(effects, now_ns)
        if self.member is not None:
            effects += self._local(self._with_the_workers(now_ns), now_ns)
            effects += [*self._seen(self.member.tick(now_ns), now_ns), *self._hand_on(now_ns)]
        return effects + self._first_tree()

    def _first_tree(self) -> list[ServerEffect]:
        """The whole tree, once there is one of several levels and this cluster has begun."""
        coordinator = self.coordinator
        if coordinator is None or self.tree_shown or not coordinator.started:
            return []
        if not coordinator.tree_above() and not any(child.below for child in coordinator.declared):
            return []
        self.tree_shown = True
        return self.show_tree()

    def show_tree(self) -> list[ServerEffect]:
        """All levels, for the console."""
        coordinator = self.coordinator
        if coordinator is None:
            return []
        return [Log("tree", {"text": f"the run:\n{coordinator.tree_above() or coordinator.tree()}"})]

    def stop(self, now_ns: int) -> list[ServerEffect]:
        """Ctrl-C, told to the coordinator, and to the server above."""
        if self.coordinator is None:
            return []
        effects = self.coordinator.stop(now_ns)
        if self.member is not None and self.member.phase not in (Phase.LEAVING, Phase.OVER):
            effects += [*asks(self.member.leave(-1, now_ns)), *self.coordinator.cut_off(now_ns)]
        return self._local(effects, now_ns)

    # The server above.

    def handle_above(self, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a message of the shard above. Raises RemoteProtocolError."""
        if self.member is not None:
            return self._seen(self.member.receive(0, message, now_ns), now_ns)
        if isinstance(message, m.Refuse) and message.code != m.RefuseCode.NOT_A_MEMBER:
            return self.fail_above(message.text, now_ns)
        return self._local(self.shard.from_above(self.shard.above.receive(message, now_ns), now_ns), now_ns)

    def fail_above(self, text: str, now_ns: int) -> list[ServerEffect]:
        """The session of this shard is over, and with it the cluster's; process 0 is told."""
        if self.coordinator is not None:
            return self._local(self._end(m.RefuseCode.INCOMPATIBLE, text, now_ns), now_ns)
        self.shard.trouble = text[: m.TEXT_MAX]
        return self._local([self.shard.report(now_ns)], now_ns)

    def _declare(self, now_ns: int) -> list[ServerEffect]:
        """Tell the server above of the model as soon as a worker has told us."""
        member, coordinator = self.member, self.coordinator
        if member is None or coordinator is None or coordinator.roster.plan is None or member.plan:
            return []
        if not coordinator.generations.may_declare:
            return []
        # Only updates go up: what steps the weights is ours alone.
        ports = [coordinator.reports[shard].port for shard in range(coordinator.shards)]
        member.address = " ".join(f"tcp://{self.host}:{port}" for port in ports)
        upward = replace(coordinator.roster.plan, optimizer="", max_grad_norm=0.0)
        return asks(member.declare(upward.packed(), now_ns))

    def _with_the_workers(self, now_ns: int) -> list[ServerEffect]:
        """Leave while no worker is here, for the run above would wait for us; join again when there are enough."""
        member, coordinator = self.member, self.coordinator
        assert member is not None and coordinator is not None
        someone = coordinator.declared or coordinator.above.undeclared
        if member.phase is Phase.ALONE and not someone and not coordinator.over:
            return self._end(m.RefuseCode.SERVER_LOST, "it is gone, and so is the last worker here", now_ns)
        if member.phase in (Phase.DECLARED, Phase.RUNNING) and not someone and not coordinator.over:
            return [*asks(member.leave(-1, now_ns)), *coordinator.placed(b"", 0, now_ns)]
        if member.phase is Phase.OVER and coordinator.generations.may_declare and not coordinator.over:
            return asks(member.rejoin(now_ns))
        return self._declare(now_ns)

    def _seen(self, events: list[MemberEffect], now_ns: int) -> list[ServerEffect]:
        """Carry out what the member has seen, in its order."""
        member, coordinator = self.member, self.coordinator
        assert member is not None and coordinator is not None
        effects: list[ServerEffect] = []
        for event in events:
            if isinstance(event, (Send, Tell)):
                effects.append(event)
            elif isinstance(event, e.Joined):
                effects += self._joined(event, now_ns)
            elif isinstance(event, e.Started):
                coordinator.buffers = coordinator.buffers or event.buffers
                effects += self._started(event, now_ns)
            elif isinstance(event, OF_PEERS):
                effects += self._of_peers(event, now_ns)
            elif isinstance(event, e.ServerGone):
                text = f"the server above, {self.parent}, is gone; the clusters go on among themselves"
                effects.append(Log("above", {"text": text}))
                effects += self._local(coordinator.introduced_above(coordinator.above.roster, True, now_ns), now_ns)
            elif isinstance(event, e.Failed):
                effects += self._local(self._end(event.code, event.text, now_ns), now_ns)
            elif isinstance(event, e.Left):
                pass  # where the run is over, the next tick sees that all is done
            elif isinstance(event, e.BuffersWanted):
                if coordinator.buffers:
                    effects += asks(member.buffers(coordinator.buffers))
            else:
                effects += self._local(self.shard.from_above([event], now_ns), now_ns)
        return effects

    def _of_peers(self, event: MemberEffect, now_ns: int) -> list[ServerEffect]:
        """What other clusters say to this one: shard 0 mixes with them, but the first round is asked for here."""
        coordinator, late = self.coordinator, self.late
        assert coordinator is not None
        if late is not None and isinstance(event, e.OfferArrived) and event.parts[0].number == WHOLE:
            self.late = None
            return self._placed(late, event.parts[0].round, event.parts[0].round, now_ns)
        self.early.append(event)
        if not isinstance(event, e.RosterNews):
            return [*self._ask(now_ns), *self._hand_on(now_ns)]
        roster = bytes(encode(event.roster)[0])
        told = self._local(coordinator.introduced_above(roster, False, now_ns), now_ns)
        return [*told, *self._ask(now_ns), *self._hand_on(now_ns)]

    def _hand_on(self, now_ns: int) -> list[ServerEffect]:
        """What peers have said, to shard 0, once it has the newest place."""
        planned, early = self.shard.planned, self.early
        if not early or self.late is not None or planned is None or planned.above.place != self.place:
            return []
        self.early = []
        return self._local(self.shard.from_above(early, now_ns), now_ns)

    def _started(self, event: e.Started, now_ns: int) -> list[ServerEffect]:
        """Take our place above. Of a run of gossip the server above does not know the round: its clock says only whether it
        has begun; then a peer tells it, or we go on from our own."""
        member, coordinator, before = self.member, self.coordinator, self.place
        assert member is not None and coordinator is not None and member.settings is not None
        mode = member.settings.mode()
        self.late, self.early = None, []
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
        assert member is not None and coordinator is not None and member.settings is not None
        at = coordinator.rounds.begin(clock * member.settings.mode().local_steps, now_ns)
        where = (event.worker, event.epoch, event.clock, at)
        self.place = Place(member.settings, *where, member.ports, number)
        return self._local(coordinator.placed(self.place.packed(), event.epoch, now_ns), now_ns)

    def _ask(self, now_ns: int) -> list[ServerEffect]:
        """The longest-standing peer for the round that the run has come to, where we are late."""
        peers = self.member.peers if self.member is not None else None
        if self.late is None or peers is None or not peers.epoch or any(p.adopting for p in peers.peers.values()):
            return []
        if peers.peers:
            return self._seen(peers.adopt(min(peers.peers), now_ns), now_ns)
        text = "the run has begun, and no cluster is left that could give its model: start it again"
        return self._local(self._end(m.RefuseCode.INCOMPATIBLE, text, now_ns), now_ns)

    def _joined(self, event: e.Joined, now_ns: int) -> list[ServerEffect]:
        coordinator, settings = self.coordinator, Settings.unpacked(event.settings)
        assert coordinator is not None
        why = self._cannot_join(settings, coordinator.shards, len(event.ports))
        if why:
            return self._local(self._end(m.RefuseCode.INCOMPATIBLE, why, now_ns), now_ns)
        place = f"is member {event.rank + 1} of {event.world_size} of {self.parent}"
        effects = self._local(coordinator.joined_above(event.rank, event.world_size, now_ns), now_ns)
        return [Log("above", {"text": f"{place}: {settings.summary()}"}), *effects]

    def _cannot_join(self, settings: Settings, ours: int, theirs: int) -> str:
        """Why this cluster cannot be a worker of a run of these settings; `ours`, `theirs`: shards. "" where it can."""
        mode = settings.mode()
        if mode.rule is Rule.MIX and self._unreachable:
            return (
                f"its clusters gossip, and from other machines nobody reaches {self.host}: give --bind an address of this "
                "machine that they reach"
            )
        if mode.streams:
            return (
                "it merges fragments of the model (--fragments, --merge-delay, --merge-alpha), and a cluster exchanges all of "
                "it at once: start it without these flags"
            )
        if mode.rule is Rule.OPTIMIZER:
            return (
                f"it takes gradients (--sync {settings.sync}) and a cluster pushes updates: start it with --push update"
            )
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

    def _end(self, code: int, text: str, now_ns: int) -> list[ServerEffect]:
        """The session above is over: tell the workers why, write a checkpoint, and end."""
        member, coordinator = self.member, self.coordinator
        assert member is not None and coordinator is not None
        member.end_session()
        if self.leaves:
            return [Stop()]  # all was at rest, and other shards may have ended: they will not see a later ledger
        if coordinator.over:
            return coordinator.cut_off(now_ns) if coordinator.above.place else []  # all our workers are done
        text = f"the server above, {self.parent}: {text}"[: m.TEXT_MAX]
        self.final = Stop(code, text)
        return [*coordinator.roster.refuse_all(code, text), *coordinator.cut_off(now_ns)]

    def _local(self, effects: list[ServerEffect], now_ns: int) -> list[ServerEffect]:
        """The effects for the runner; what shard 0 and the coordinator send each other goes to `inner`."""
        outer: list[ServerEffect] = []
        for effect in effects:
            if isinstance(effect, Stop):
                outer += self._leave_above(now_ns)
            elif self.coordinator is not None and isinstance(effect, Send) and effect.peer == COORDINATOR:
                self.inner.append(effect.message)
            else:
                outer.append(effect)
        return outer

    def _leave_above(self, now_ns: int) -> list[ServerEffect]:
        """All is done here: leave the run above, and then end."""
        member = self.member
        if member is None or member.phase in (Phase.OVER, Phase.NEW):
            return [self.final]
        if member.phase is Phase.LEAVING:
            return []
        self.leaves = True
        return asks(member.leave(self.shard.above.clock, now_ns))

    def _reported(self, report: m.Report, now_ns: int) -> list[ServerEffect]:
        """What the server above is told of a shard's report."""
        member, coordinator = self.member, self.coordinator
        if report.trouble:
            return self._end(m.RefuseCode.INCOMPATIBLE, report.trouble, now_ns)
        if member is None or coordinator is None or member.ended or member.phase is not Phase.RUNNING:
            return []
        if not coordinator.above.ended:
            return []
        member.ended = True
        return [member.beat(now_ns)]
