"""The machine of one server process. No I/O.

How it works

    event of the runner ──> happen ──> HAPPENS[kind] ─┬─> Shard              every process
                                                      ├─> Coordinator        process 0
                                                      └─> ParentMembership   process 0 of a cluster with a parent
                                                            │ effects
    runner <── effects for others ─────────── _route <──────┘
    advance <── `inner` <── messages between shard 0 and the coordinator

1. The runner calls `happen` with each event: a message, a tick, a written checkpoint, a new connection.
2. `happen` returns the effects. A message between shard 0 and the coordinator is no effect: it goes to `inner`.
3. The runner carries out the effects. Then it calls `advance`, which handles the oldest message of `inner`, and carries
   out its effects, until `inner` is empty.
4. A message of a worker or a cluster goes to the machine that its type names: `FOR_COORDINATOR`, `OF_CLUSTERS`, or the
   shard. A message of the parent goes to the membership in process 0, and to the shard in each other process.

Rules
- The order of 3 matters: a ledger that closes a clock is on its way to the other shards before shard 0 folds, so all
  shards fold at the same time.
- Every fault of a peer's message is found before `handle` returns: what `advance` handles was made in this process.
- Nothing but `happen` and the `advance` after it changes a machine: a journal of its state and the events since can
  make it again. So a machine holds only what pickle can store, except for what its runner gave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from narrows.protocols import messages as m
from narrows.protocols.addresses import shard_address
from narrows.protocols.effects import Log, Send, ServerEffect, StopProcess
from narrows.protocols.errors import AuthenticationError, IncompatibleError, NarrowsError, RemoteProtocolError
from narrows.protocols.gossip.peers import GossipPeer
from narrows.protocols.member.member import Member
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.run import NO_KEY, Key, Seat
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.parent_membership import ParentMembership
from narrows.ps.shard.reports import COORDINATOR
from narrows.ps.shard.shard import Shard
from narrows.ps.shard.shard_requests import OfWorkers

OF_MEMBERS = (m.Hello, m.Declare, m.Heartbeat, m.Leave, m.Buffers, m.BuffersRequest, m.RangeRequest, m.AgreeRequest)
FOR_COORDINATOR = (*OF_MEMBERS, m.Report, m.RemoteShardsOffer)
# messages of clusters that gossip with this one
OF_CLUSTERS = (m.Offer, m.OfferAck, m.GossipEnded, m.ModelRequest, m.Ping)


class Server:
    """Routes each event to its machine."""

    def __init__(
        self,
        shard: Shard,
        coordinator: Coordinator | None,
        member: Member | None = None,
        parent: str = "",
        host: str = "",
        public: str = "",
        stands: bool = False,
    ) -> None:
        """A server process before its first event.

        Args:
            shard: The shard of this process.
            coordinator: In process 0: the coordinator.
            member: In process 0 of a cluster: its member of the run of the server at `parent`.
            parent: The address of the parent, "" for none.
            host: The host under which other clusters reach this one; HOST:PORT behind one port.
            public: The public key that other clusters find there, "" for none.
            stands: True if this server may have a standby.
        """
        self.shard, self.coordinator = shard, coordinator
        self.membership: ParentMembership | None = None  # in the parent's run
        if member is not None and coordinator is not None:
            self.membership = ParentMembership(shard, coordinator, member, parent, host, public, stands)
        self.inner: deque[m.Message] = deque()  # messages between shard 0 and the coordinator that are not handled yet
        self.tree_shown = False
        self.begun = False
        self.now_ns = 0  # time of the newest event
        self.happened, self.incarnation = 0, shard.incarnation  # events in this incarnation
        # The view, its standby, and the event that began it: ps/replication/replication_primary.py.
        self.view, self.standby, self.viewed = 0, "", 0
        self.before = ""  # address of the server that this one has replaced, if that was on another machine

    # What a runner reads.

    @property
    def over(self) -> bool:
        """True if the run is over: nothing waits for a process that dies now."""
        return self.coordinator.over if self.coordinator is not None else self.shard.ledger.over

    @property
    def ended(self) -> bool:
        """True if the run is over and this shard has reported all of it. The coordinator ends by `StopProcess` instead."""
        reported = self.shard.min_clock >= self.shard.ledger.min_clock and self.shard.at_rest
        return self.coordinator is None and (self.shard.retired or (self.over and reported))

    @property
    def above(self) -> str:
        """Address of the parent's shard, "" for none.

        It is a TCP address on the same machine too, so that the traffic is that of a link.
        """
        if self.membership is not None:
            return self.membership.parent
        if (seat := self.shard.parent_slot.seat) is None:
            return ""
        return shard_address(seat.place.server, seat.place.ports[self.shard.index], self.shard.index)

    @property
    def beside(self) -> str:
        """Address of the parent's standby while this cluster asks that one to serve, else ""."""
        views = self.membership.member.views if self.membership is not None else None
        return views.standby if views is not None and views.listens else ""

    @property
    def others(self) -> Mapping[int, GossipPeer]:
        """The other clusters that this shard mixes with, by their numbers in the parent's run."""
        member = self.membership.member if self.membership is not None else None
        # process 0 asks them for the round before its shard has a seat
        if member is not None and member.peers is not None:
            return member.peers.peers
        return self.shard.parent_slot.others

    def refused(self, peer: bytes, error: NarrowsError) -> list[ServerEffect]:
        """Return the effects of a message that caused `error`. A sender that is at fault gets a Refuse."""
        log: list[ServerEffect] = [Log("refused", {"text": str(error)})]
        if not isinstance(error, (RemoteProtocolError, IncompatibleError, AuthenticationError)):
            return log
        code = m.RefuseCode.AUTHENTICATION if isinstance(error, AuthenticationError) else m.RefuseCode.INCOMPATIBLE
        return [*log, Send(peer, m.Refuse(code, -1, 0, str(error)[: m.TEXT_MAX]))]

    @property
    def members(self) -> list[Seat]:
        """The members that the coordinator knows; [] in the other processes."""
        return self.coordinator.declared if self.coordinator is not None else []

    # Events.

    def happen(self, event: MachineEvent) -> list[ServerEffect]:
        """Return the effects of an event. Raises RemoteProtocolError for a message that breaks the protocol."""
        self.now_ns = event.now_ns
        self.happened += 1
        return HAPPENS[event.kind](self, event)

    def start(self, now_ns: int) -> list[ServerEffect]:
        """Send the first report of this shard, and a Hello to the parent.

        A machine that was restored has begun already: it repeats what may be lost.
        """
        where = [self.coordinator.resharding.where("")] if self.coordinator is not None else []
        if self.begun:
            if self.shard.model_shard is not None:
                self.shard.model_shard.publications.repeat_soon()
            return [*where, *self.linked(""), *self._route([self.shard.report(now_ns)], now_ns)]
        above, self.begun = self.membership, True
        effects = above.seen(above.member.join(now_ns), now_ns) if above is not None else []
        # Dated 0: process 0 may not listen yet, and the first tick sends the report again.
        return self._route([*where, *effects, self.shard.report(0)], now_ns)

    def serve(self, view: int, standby: str, port: int, before: str) -> list[ServerEffect]:
        """Begin another view.

        Args:
            view: The number of the view.
            standby: The address of its standby, "" for none.
            port: The port that this shard listens at now.
            before: The address of the server that this one replaces, if that was on another machine; else "".
        """
        if before and self.coordinator is not None:
            self.coordinator.members.standby_took_over(self.now_ns)
        self.before = before or self.before
        if self.membership is not None:
            self.membership.copied(standby)
        self.view, self.standby, self.viewed = view, standby, self.happened
        self.shard.listens(port)
        return []

    def linked(self, peer: str) -> list[ServerEffect]:
        """Have the next tick repeat what is not acknowledged by the parent's shard ("") or this peer.

        The runner calls it when the connection is a new one.
        """
        self.shard.parent_slot.repeat_soon(peer)
        if self.membership is not None and not peer:
            self.membership.member.repeat_soon(0)
        return []

    def ended_shards(self, shards: tuple[int, ...]) -> list[ServerEffect]:
        """Tell the coordinator which shards had ended before this process was restarted."""
        if self.coordinator is not None:
            self.coordinator.ended(shards)
        return []

    def reshard(self, shards: int, now_ns: int) -> list[ServerEffect]:
        """Cut the keys over `shards` shards; 0 calls a resharding off."""
        return self._route(self.coordinator.reshard(shards, now_ns), now_ns) if self.coordinator is not None else []

    def unreached(self, peer: bytes, now_ns: int) -> list[ServerEffect]:
        """Take note that a message to this peer found no connection."""
        if self.coordinator is not None:
            self.coordinator.members.unreached(peer, now_ns)
        if self.shard.model_shard is not None:
            self.shard.model_shard.publications.unreached(peer)
        return []

    def advance(self, now_ns: int) -> list[ServerEffect]:
        """Handle the oldest message of `inner`; return its effects."""
        assert self.coordinator is not None
        message = self.inner.popleft()
        if isinstance(message, m.Ledger):
            effects = self.shard.handle_ledger(message, now_ns)
            effects += self.membership.hand_on(now_ns) if self.membership is not None else []
            return self._route(effects, now_ns)
        effects = self.coordinator.handle(COORDINATOR, message, now_ns)
        if isinstance(message, m.Report):
            self.shard.reports.has_seen(message.version)
            effects += self._reported(message, now_ns)
        return self._route(effects, now_ns)

    def handle(self, peer: bytes, message: m.Message, now_ns: int, key: Key = NO_KEY) -> list[ServerEffect]:
        """Return the effects of a message of a worker, a shard or another cluster.

        Raises:
            RemoteProtocolError: The message breaks the protocol. Nothing has changed.
        """
        coordinator, above = self.coordinator, self.membership
        if isinstance(message, FOR_COORDINATOR):
            if coordinator is None:
                raise RemoteProtocolError("this is not the coordinator: dial the address of ps-serve, shard 0")
            effects = coordinator.handle(peer, message, now_ns, key)
            if isinstance(message, m.Report):
                effects += self._reported(message, now_ns)
            effects += [*above.declare(now_ns), *above.agree(now_ns)] if above is not None else []
        elif isinstance(message, OF_CLUSTERS):
            if above is not None:
                effects = above.seen(above.member.receive_peer(message, now_ns), now_ns)
            else:
                effects = self.shard.hear(message, now_ns)
        elif isinstance(message, m.Ledger):
            if peer != COORDINATOR:
                raise RemoteProtocolError("a ledger comes from the coordinator alone")
            effects = self.shard.handle_ledger(message, now_ns)
        else:
            effects = self.shard.handle(peer, message, now_ns)
            if coordinator is not None and isinstance(message, OfWorkers):
                coordinator.members.heard(message.worker, now_ns)
        return self._route(effects, now_ns)

    def tick(self, now_ns: int, moved: tuple[int, int] = (0, 0)) -> list[ServerEffect]:
        """Let time pass in all machines. `moved`: bytes sent to and received from the parent."""
        effects = self.shard.tick(now_ns, moved)
        if self.coordinator is not None:
            effects = effects + self.coordinator.tick(now_ns)
        effects = self._route(effects, now_ns)
        if self.membership is not None:
            effects += self._route(self.membership.tick(now_ns), now_ns)
        return effects + self._first_tree()

    def _first_tree(self) -> list[ServerEffect]:
        """Log the whole tree of clusters once, as soon as it has several levels and this cluster has begun."""
        coordinator = self.coordinator
        if coordinator is None or self.tree_shown or not coordinator.started:
            return []
        if not coordinator.parent_place.parent.tree and not any(child.below for child in coordinator.declared):
            return []
        self.tree_shown = True
        return self.show_tree()

    def show_tree(self) -> list[ServerEffect]:
        """Log all levels of the tree for the console."""
        coordinator = self.coordinator
        if coordinator is None:
            return []
        planned = self.shard.model_shard
        lines = [
            coordinator.parent_place.parent.tree or coordinator.tree(),
            *(planned.filters.lines() if planned is not None else ()),
        ]
        return [Log("tree", {"text": "\n".join(["the run:", *lines])})]

    def wrote_checkpoint(self, clock: int, kept: tuple[int, ...], took_ns: int, now_ns: int) -> list[ServerEffect]:
        """Report at once that the runner wrote a checkpoint or failed to: a crash may come before the next tick."""
        self.shard.wrote_checkpoint(clock, kept, took_ns)
        return self._route([self.shard.report(now_ns)], now_ns)

    def stop(self, now_ns: int) -> list[ServerEffect]:
        """Ctrl-C: let the coordinator end the run, and leave the parent's run."""
        if self.coordinator is None:
            return []
        above = self.membership.stop if self.membership is not None else lambda now_ns: []
        return self._route([*self.coordinator.stop(now_ns), *above(now_ns)], now_ns)

    # The parent.

    def handle_above(self, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a message of the parent's shard. Raises RemoteProtocolError."""
        if self.membership is not None:
            seen = self.membership.seen(self.membership.member.receive(0, message, now_ns), now_ns)
            return self._route(seen, now_ns)
        if isinstance(message, m.Refuse) and message.code != m.RefuseCode.NOT_A_MEMBER:
            return self.fail_above(message.text, now_ns)
        seat = self.shard.parent_slot.seat
        events = seat.session.receive(message, now_ns) if seat is not None else []
        return self._route(self.shard.from_above(events, now_ns), now_ns)

    def handle_beside(self, message: m.Message, now_ns: int) -> list[ServerEffect]:
        """Return the effects of a message of the parent's standby. Raises RemoteProtocolError."""
        above = self.membership
        assert above is not None
        return self._route(above.seen(above.member.receive_standby(message, now_ns), now_ns), now_ns)

    def fail_above(self, text: str, now_ns: int, code: int = m.RefuseCode.INCOMPATIBLE) -> list[ServerEffect]:
        """End this shard's session with the parent, and with it the cluster's; process 0 learns of it by a report."""
        if self.membership is not None:
            return self._route(self.membership.end(code, text, now_ns), now_ns)
        return self._route(self.shard.fail_above(text, now_ns), now_ns)

    def _reported(self, report: m.Report, now_ns: int) -> list[ServerEffect]:
        return self.membership.reported(report, now_ns) if self.membership is not None else []

    def _route(self, effects: list[ServerEffect], now_ns: int) -> list[ServerEffect]:
        """Return the effects for the runner; put messages between shard 0 and the coordinator into `inner`."""
        if self.coordinator is None:
            return effects
        outer: list[ServerEffect] = []
        for effect in effects:
            if isinstance(effect, StopProcess) and self.membership is not None:
                outer += self.membership.leave(now_ns)
            elif isinstance(effect, Send) and effect.peer == COORDINATOR:
                self.inner.append(effect.message)
            elif isinstance(effect, Send) and isinstance(effect.message, m.Welcome):
                outer.append(Send(effect.peer, replace(effect.message, view=self.view, standby=self.standby)))
            else:
                outer.append(effect)
        return outer


def _message(event: MachineEvent) -> m.Message:
    assert event.message is not None
    return event.message


def _key(event: MachineEvent) -> Key:
    name, others = event.values or NO_KEY
    return name, others


def _above(server: Server, event: MachineEvent) -> list[ServerEffect]:
    handle = server.handle_above if event.kind is EventKind.ABOVE else server.handle_beside
    try:
        return handle(_message(event), event.now_ns)
    except NarrowsError as error:
        return server.fail_above(str(error), event.now_ns)


def _failed_above(server: Server, event: MachineEvent) -> list[ServerEffect]:
    text, code = event.values
    return server.fail_above(text, event.now_ns, code)


def _wrote(server: Server, event: MachineEvent) -> list[ServerEffect]:
    clock, kept, took_ns = event.values
    return server.wrote_checkpoint(clock, tuple(kept), took_ns, event.now_ns)


HAPPENS: dict[EventKind, Callable[[Server, MachineEvent], list[ServerEffect]]] = {
    EventKind.START: lambda server, event: server.start(event.now_ns),
    EventKind.BELOW: lambda server, event: server.handle(event.peer, _message(event), event.now_ns, _key(event)),
    EventKind.COORDINATOR: lambda server, event: server.handle(COORDINATOR, _message(event), event.now_ns),
    EventKind.ABOVE: _above,
    EventKind.BESIDE: _above,
    EventKind.FAILED_ABOVE: _failed_above,
    EventKind.TICK: lambda server, event: server.tick(event.now_ns, event.values or (0, 0)),
    EventKind.WROTE: _wrote,
    EventKind.LINKED: lambda server, event: server.linked(*event.values),
    EventKind.ENDED: lambda server, event: server.ended_shards(event.values),
    EventKind.UNREACHED: lambda server, event: server.unreached(event.peer, event.now_ns),
    EventKind.VIEW: lambda server, event: server.serve(*event.values),
    EventKind.RESHARD: lambda server, event: server.reshard(event.values[0], event.now_ns),
    EventKind.STOP: lambda server, event: server.stop(event.now_ns),
}
