"""The member machine: a child joins a run, takes part in it, leaves it, and finds out that its server is lost. No I/O.

How it works (TRANSITIONS has every phase)

    NEW -join-> HELLO -Welcome-> WELCOME -declare-> DECLARED -Ready-> RUNNING -leave-> LEAVING -LeaveAck-> OVER
                                                                         |                                  ^
                                                                         +-server gone (gossip)-> ALONE ----+ leave

1. `join` sends Hello. The coordinator answers Welcome: rank, settings of the run, address of each shard.
2. `declare` sends the model spec. The coordinator answers Ready: the place in the run. The member makes a `Session` for
   each shard, and in gossip `GossipPeers`.
3. RUNNING: the owner of the member hands the messages of its `Exchange` to `send`. `receive` routes an answer of a shard
   to the session of that shard, and handles the answers of the coordinator itself.
4. `tick` repeats each request that is not yet answered, sends heartbeats, and finds the server lost after a silence of
   `Timing.lost_ns`. `FailoverView` decides when the member changes to the standby.
5. The coordinator sends Reshard when it cuts the keys anew or changes the plan. The member makes new sessions.
6. `leave` sends Leave until the coordinator answers LeaveAck.

Rules
- A Refuse with NOT_A_MEMBER for the present epoch: the member joins again under a new token, and begins anew from the
  clock of the run.
- In gossip the run goes on without the server once the peers know each other. The member is then ALONE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.addresses import are_addresses
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import FoldRule, holds_apart
from narrows.protocols.config.retry import LONG_AGO_NS
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS, MemberEffect, Send
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.gossip.peers import GossipPeers
from narrows.protocols.member.failover_view import FailoverView
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.metrics import MemberMetrics
from narrows.protocols.member.session import Session

# Checks of a server's layout before the member takes it over: the addresses of its shards, and how it cuts the model.
# Each raises RemoteProtocolError for a layout that cannot be. `plan` is the member's `ModelSpec`, packed.


def _cut(ranges: m.Sets, plan: bytes, shards: int, cut: str) -> tuple[Keys, ...] | None:
    """Return `ranges` as keys if they cut the model for this number of shards as the run does, else None."""
    try:
        right = ModelSpec.unpacked(plan).ranges(shards, cut)
    except IncompatibleError:  # a server with so many shards would have refused the model
        return None
    return tuple(right) if list(ranges) == right else None


def welcomed(welcome: m.Welcome) -> Settings:
    """Check a Welcome. Returns the settings of the run."""
    settings, ports = Settings.unpacked(welcome.settings), welcome.ports
    if len(ports) != settings.shards or not are_addresses(welcome.hosts, ports):
        text = f"the server has {settings.shards} shards and sent {len(ports)} ports, or an invalid port"
        raise RemoteProtocolError(text)
    return settings


def readied(ready: m.Ready, plan: bytes, shards: int, cut: str) -> tuple[Keys, ...]:
    """Check a Ready. Returns the keys of each shard."""
    ranges = _cut(ready.ranges, plan, shards, cut)
    if ranges is None or not 0 <= ready.clock <= m.CLOCK_MAX:
        text = "the server sent an invalid place: it cuts the model elsewhere, or has no such clock"
        raise RemoteProtocolError(text)
    return ranges


def moved(move: m.Reshard, plan: bytes, before: Settings) -> tuple[Settings, tuple[Keys, ...]]:
    """Check a Reshard.

    Args:
        move: with a place > 0.
        plan: the member's `ModelSpec`, packed.
        before: the settings of the run until this move.

    Returns:
        The settings of the run from this move on, and the keys of each shard.
    """
    settings, ranges = Settings.unpacked(move.settings), _cut(move.ranges, plan, len(move.ports), before.cut)
    placed = len(move.ports) == settings.shards and are_addresses(move.hosts, move.ports)
    if ranges is None or not placed or not settings.follows(before):
        raise RemoteProtocolError("the server sent an invalid place: it cuts the model elsewhere")
    return settings, ranges


class MemberPhase(Enum):
    """The phase of a member, from NEW to OVER."""

    NEW = "new"
    HELLO = "hello"
    WELCOME = "welcome"
    DECLARED = "declared"
    RUNNING = "running"
    ALONE = "alone"
    LEAVING = "leaving"
    OVER = "over"


# Event -> phases in which it counts -> the phase after it. In every other phase the event changes nothing.
TRANSITIONS: dict[str, dict[MemberPhase, MemberPhase]] = {
    "join": dict.fromkeys(MemberPhase, MemberPhase.HELLO),
    "Welcome": {MemberPhase.HELLO: MemberPhase.WELCOME},
    "declare": {MemberPhase.WELCOME: MemberPhase.DECLARED},
    "Ready": {MemberPhase.DECLARED: MemberPhase.RUNNING},
    "server gone": {MemberPhase.RUNNING: MemberPhase.ALONE},
    "leave": dict.fromkeys(MemberPhase, MemberPhase.LEAVING) | {MemberPhase.ALONE: MemberPhase.OVER},
    "LeaveAck": {MemberPhase.LEAVING: MemberPhase.OVER},
    "end": dict.fromkeys(MemberPhase, MemberPhase.OVER),
}


class Member:
    """The session of one child, a worker or a cluster, with its server. Commands and messages in, effects out.

    The `peer` of each Send is the number of a shard; the coordinator is at shard 0.

    Args:
        token: name of this process, unique among those that join.
        host: name of the machine, for the user.
        expect: the flags that the process was started with, a msgpack map. The coordinator refuses a contradiction.
        timing: limits of the waits.
        below: returns the tree of a cluster: a line for itself and one for each member below it; "" for a worker.
    """

    def __init__(
        self,
        token: str,
        host: str,
        expect: bytes = b"",
        timing: Timing | None = None,
        below: Callable[[], str] = str,
    ) -> None:
        self.hello = m.Hello(token, host, expect)
        self.timing, self.below = timing or Timing(), below
        self.attempt, self.phase = 0, MemberPhase.NEW
        self.asking: m.Message = self.hello  # the newest request of the join or leave; repeated until it is answered
        self.asked_ns = self.heard_ns = self.beat_ns = 0
        self.ever_heard = False
        self.welcome: m.Welcome | None = None
        self.settings = Settings()  # of the run, from Welcome on
        self.epoch = 0  # of this member's place in the run; 0: no place
        self.sessions: list[Session] = []
        self.meter, self.figures = LinkMeter(), MemberMetrics()
        self.plan = b""
        self.in_place = False  # as in `Session`
        self.again = False  # this member had a place before
        # address: where peers reach this member, one address for each shard of a cluster (`reached_at`).
        # tree: all levels of the tree of clusters, from the root down, as the newest HeartbeatAck has them.
        self.address = self.tree = ""
        self.models: m.Pairs = ()  # rank, round: models of an earlier run in files here (gossip)
        self.run_clock, self.waits = 0, ""  # clock of the run; the members that the run waits for, as a clause
        self.peers: GossipPeers | None = None  # from Ready on, in a gossip run
        self.ended = False  # this member has done its last step (gossip)
        self.views = FailoverView(-1, 0)
        self.copied = False  # of a cluster: its own standby has a copy of all its state
        self.move = 0  # number of the newest Reshard that this member has carried out
        self.hold = -1  # the clock that it holds at, where it has chosen one (`holds_at`)

    @property
    def token(self) -> str:
        return f"{self.hello.token}.{self.attempt}" if self.attempt else self.hello.token

    @property
    def worker(self) -> int:
        return self.welcome.worker if self.welcome is not None else -1

    @property
    def ports(self) -> tuple[int, ...]:
        """The port of each shard; () before the Welcome."""
        return self.welcome.ports if self.welcome is not None else ()

    def _go(self, trigger: str) -> bool:
        """Take the transition of `trigger`. Returns False, and changes nothing, if the present phase has none."""
        after = TRANSITIONS[trigger].get(self.phase)
        self.phase = after or self.phase
        return after is not None

    def _ask(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        self.asking, self.asked_ns = message, now_ns
        return [Send(0, message)]

    # Commands.

    def join(self, now_ns: int) -> list[MemberEffect]:
        self._go("join")
        self.heard_ns = now_ns
        return self._ask(replace(self.hello, token=self.token), now_ns)

    def reached_at(self, address: str) -> None:
        """Name the address at which peers reach this member. Called before `declare`."""
        self.address = address

    def offer(self, models: m.Pairs) -> None:
        """Take rank and round of each model of an earlier run in files here. Called before `declare` (gossip)."""
        self.models = models

    def declare(self, plan: bytes, now_ns: int) -> list[MemberEffect]:
        self.plan = plan
        if self.welcome is None or not self._go("declare"):
            return []
        return self._ask(m.Declare(self.worker, self.welcome.epoch, plan, self.address, self.models), now_ns)

    def write_in_place(self) -> list[MemberEffect]:
        """Keep no payload of a part of a whole state: the owner writes it at its StatePart. To be called before `declare`."""
        self.in_place = True
        return []

    def send(self, shard: int, messages: Sequence[m.Message], now_ns: int) -> list[MemberEffect]:
        """Send the messages of an `Exchange` to its shard; drop them if they are of an earlier epoch."""
        if self.phase is not MemberPhase.RUNNING or any(getattr(each, "epoch", 0) != self.epoch for each in messages):
            return []  # the Exchange made them before it handled the rejoin
        return self.sessions[shard].send(messages, now_ns)

    def buffers(self, packed: bytes, clock: int) -> list[MemberEffect]:
        return [Send(0, m.Buffers(self.worker, self.epoch, clock, packed))]

    def ask_buffers(self, clock: int) -> list[MemberEffect]:
        ask = Send(0, m.BuffersRequest(self.worker, self.epoch, clock))
        return [
            ask if self.phase is MemberPhase.RUNNING else e.BuffersArrived(b"")
        ]  # without a place in the run, the worker keeps its own buffers

    def leave(self, clock: int, now_ns: int) -> list[MemberEffect]:
        """Leave the run.

        Sends the last figures and a Leave. Repeats the Leave until the LeaveAck, unless the server has never answered.

        Args:
            clock: the number of updates of a worker that is done; -1: the worker failed.
        """
        last = [self.beat(now_ns)] if self.phase is MemberPhase.RUNNING and self.figures.rows() else []
        said = [] if self.phase is MemberPhase.ALONE else [*last, *self._ask(m.Leave(self.token, clock), now_ns)]
        self._go("leave" if self.ever_heard else "end")
        return [*said, e.MemberLeft()] if self.phase is MemberPhase.OVER else said

    def end(self, now_ns: int) -> list[MemberEffect]:
        """Tell server and peers that the last step is done (gossip). Peers are answered until all have done theirs."""
        said = self.peers.end(now_ns) if self.peers is not None else []
        return [*said, *self.tell_ended(now_ns)]

    def tell_ended(self, now_ns: int) -> list[MemberEffect]:
        """Tell the server alone that the last step is done (gossip). A cluster's shards tell their peers themselves."""
        self.ended = True
        return [self.beat(now_ns)] if self.phase is MemberPhase.RUNNING else []

    def copied_by(self, standby: str) -> None:
        """Note the standby that has a copy of all of this cluster, "" for none. The next tick sends a heartbeat."""
        self.copied, self.beat_ns = bool(standby), LONG_AGO_NS

    def beat(self, now_ns: int) -> Send:
        self.beat_ns = now_ns
        roster = self.peers.epoch if self.peers is not None else 0
        who = (self.worker, self._known_by)
        packed_rows, road_ns = self.figures.packed(self.meter, len(self.ports), now_ns), self.meter.road.most
        beat = m.Heartbeat(*who, now_ns, roster, self.below(), self.ended, self.move, self.copied, road_ns, packed_rows)
        return Send(0, beat if self.hold < 0 else replace(beat, hold=self.hold))

    def rejoin(self, now_ns: int) -> list[MemberEffect]:
        """Join again, under a new token. Updates in flight are given up."""
        self.attempt, self.epoch, self.ended, self.sessions, self.move = self.attempt + 1, 0, False, [], 0
        self.hold = -1
        return self.join(now_ns)

    def end_session(self) -> None:
        """End the session without a Leave."""
        self._go("end")

    def leave_server(self) -> list[MemberEffect]:
        """Go on without the server if the peers know each other (gossip). Returns [] if they do not."""
        known = self.peers is not None and self.peers.epoch
        return [e.ServerGone()] if known and self._go("server gone") else []

    @property
    def _known_by(self) -> int:
        """The epoch by which the server knows this member: that of its place, or before Ready that of the Welcome."""
        return self.epoch or (self.welcome.epoch if self.welcome is not None else 0)

    # Messages.

    def receive(self, shard: int, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """Handle a message of shard number `shard`.

        Raises:
            RemoteProtocolError: the message is not valid.
        """
        turned = self.views.turned
        voted = self.views.told(message) if isinstance(message, m.FailoverNotice) else []
        if self.views.turned:
            return voted
        if turned:
            self._back()
        if now_ns - self.heard_ns > self.timing.silent_ns(self.settings.lease):
            self.beat_ns = LONG_AGO_NS  # heartbeats may have been lost too, and most of the lease is over: send one now
        self.heard_ns, self.ever_heard = now_ns, True
        self.views.cut.pop(shard, None)
        match message:
            case m.FailoverNotice():
                return voted
            case m.Welcome():
                return self._welcomed(message, now_ns)
            case m.Ready():
                return self._readied(message)
            case m.HeartbeatAck():
                return self._beaten(message, now_ns)
            case m.Roster():
                return self.peers.roster(message, now_ns) if self.peers is not None else []
            case m.Reshard():
                return self._moved(message, now_ns)
            case m.LeaveAck(token):
                return [e.MemberLeft()] if token == self.token and self._go("LeaveAck") else []
            case m.Refuse():
                return self._refused(message, now_ns)
        placed = self.phase in (MemberPhase.RUNNING, MemberPhase.LEAVING) and shard < len(self.sessions)
        return self.sessions[shard].receive(message, now_ns) if placed else []

    def receive_standby(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """Handle a message of the standby, or of the server that the standby has become.

        Raises:
            RemoteProtocolError: the standby has another number of shards than the server.
        """
        if not self.views.listens:
            return []
        turned = self.views.turned
        if isinstance(message, m.FailoverNotice) and message.ports and len(message.ports) != len(self.ports):
            raise RemoteProtocolError(f"the standby has {len(message.ports)} shards, the server {len(self.ports)}")
        changes = self.views.hear(message, now_ns)
        for change in changes:
            self.heard_ns = now_ns  # other messages show only that the standby is live
            self.welcome = replace(self.welcome, ports=change.ports, hosts=()) if self.welcome is not None else None
        if changes or (turned and not self.views.turned):
            self._back()
        return [*changes]

    def _back(self) -> None:
        """Repeat all requests: the member listens to a server again, and dropped its messages meanwhile."""
        for shard in range(len(self.ports)):
            self.repeat_soon(shard)

    def receive_peer(self, message: m.Message, now_ns: int, sender: bytes | None = None) -> list[MemberEffect]:
        """Handle a message of a gossip peer. Arguments as of `GossipPeers.receive`."""
        return self.peers.receive(message, now_ns, sender) if self.peers is not None else []

    def _welcomed(self, message: m.Welcome, now_ns: int) -> list[MemberEffect]:
        if message.token != self.token or self.phase is not MemberPhase.HELLO:
            return []
        self.settings, self.welcome = welcomed(message), message
        # The server may be lost at any time from here on, also before the first FailoverNotice or the Ready arrives.
        self.views = FailoverView(message.worker, 0, message.view, message.standby)
        self._go("Welcome")
        joined = e.MemberWelcomed(message.rank, message.world_size, message.settings, message.ports, message.hosts)
        return [joined, *(self.declare(self.plan, now_ns) if self.plan else [])]

    def _readied(self, message: m.Ready) -> list[MemberEffect]:
        if message.worker != self.worker or self.phase is not MemberPhase.DECLARED:
            return []
        ranges = readied(message, self.plan, len(self.ports), self.settings.cut)
        self._go("Ready")
        self._seat(message.epoch)
        if self.settings.mode().rule is FoldRule.MIX:
            self.peers, self.ended = GossipPeers(self.worker, int(self.settings.lease * NS)), False
        self.views.seated(self.epoch)
        again, self.again = self.again, True
        place = (message.worker, message.epoch, message.clock, ranges, message.buffers, again)
        return [e.MemberStarted(*place, self.settings.packed())]

    def _seat(self, epoch: int) -> None:
        """Make a new session with each shard, in the place of `epoch`."""
        self.epoch, mode = epoch, self.settings.mode()
        self.views.cut.clear()
        self.meter = LinkMeter(road=self.meter.road)  # a server that was restarted may have another system clock
        hosts = (self.welcome.hosts if self.welcome is not None else ()) or ("",) * len(self.ports)
        meters = {host: LinkMeter() for host in hosts} | {"": self.meter}
        # A worker that takes updates of its own over from a start has arrays for its states.
        in_place = self.in_place and (mode.rule is FoldRule.OPTIMIZER or self.settings.start_steps < 0)
        self.sessions = [Session(i, epoch, mode, self.timing, meters[host], in_place) for i, host in enumerate(hosts)]

    def _moved(self, move: m.Reshard, now_ns: int) -> list[MemberEffect]:
        """Handle a Reshard: keys or plan are about to change (`place` 0), or have changed.

        A worker acknowledges the hold at once. A cluster calls `knows` itself, once all its shards hold. Where the
        coordinator can name no clock that all workers come to, the owner of this member names one (`holds_at`).
        """
        ours = move.worker == self.worker and move.epoch == self.epoch and self.phase is MemberPhase.RUNNING
        if not ours or move.number <= self.move or self.welcome is None:
            return []
        if not move.place:
            held = e.PushesPaused(move.at, move.number)
            chosen = move.at >= 0 and holds_apart(self.settings.mode(), self.settings.quorum)
            return [held] if self.below() or chosen else [held, self.knows(move.number, now_ns)]
        self.settings, ranges = moved(move, self.plan, self.settings)
        self.welcome = replace(self.welcome, ports=move.ports, hosts=move.hosts)
        self._seat(move.place)
        where = (ranges, move.ports, move.hosts, move.settings)
        return [e.MemberResharded(self.worker, self.epoch, move.at, *where), self.knows(move.number, now_ns)]

    def knows(self, number: int, now_ns: int) -> Send:
        """Acknowledge the Reshard of this number, with a heartbeat: all processes of this member carry it out."""
        self.move, self.hold = number, -1
        return self.beat(now_ns)

    def holds_at(self, number: int, clock: int, now_ns: int) -> list[MemberEffect]:
        """Acknowledge the Reshard of this number: this member pushes all updates below `clock`, and none from it on."""
        if number <= self.move or self.phase is not MemberPhase.RUNNING:
            return []  # a newer Reshard has called it off, or the member has another place
        self.move, self.hold = number, clock
        return [self.beat(now_ns)]

    def _beaten(self, message: m.HeartbeatAck, now_ns: int) -> list[MemberEffect]:
        if message.worker == self.worker:
            self.meter.beat(message.echo_ns, message.received_ns, message.sent_ns, now_ns)
            self.tree = message.tree or self.tree
            if message.stops:
                return [e.ServerStops()]
            if message.echo_ns:  # 0: the coordinator sent it without a heartbeat, to test the connection
                self.run_clock, self.waits = message.clock, message.waits
        return []

    def _refused(self, refuse: m.Refuse, now_ns: int) -> list[MemberEffect]:
        if refuse.code != m.RefuseCode.NOT_A_MEMBER:
            if refuse.code == m.RefuseCode.SERVER_LOST and (gone := self.leave_server()):
                return gone
            self._go("end")
            return [e.MemberFailed(refuse.code, refuse.text)]
        # Not in LEAVING: a coordinator that was restarted may not know this member, and must still get the Leave.
        joins = self.phase in (MemberPhase.WELCOME, MemberPhase.DECLARED, MemberPhase.RUNNING)
        return self.rejoin(now_ns) if joins and (refuse.worker, refuse.epoch) == (self.worker, self._known_by) else []

    # Time.

    def repeat_soon(self, shard: int) -> None:
        """Repeat all requests to a shard at the next tick: the connection to it is a new one."""
        self.meter.anew()
        if shard < len(self.sessions):
            self.sessions[shard].meter.anew()
            self.sessions[shard].repeat_soon()
        if not shard:
            self.asked_ns = self.beat_ns = LONG_AGO_NS

    def cut(self, shard: int, now_ns: int) -> None:
        """Note that the connection to this shard has ended."""
        if shard < len(self.ports):
            self.views.cut.setdefault(shard, now_ns)

    def tick(self, now_ns: int) -> list[MemberEffect]:
        """Repeat requests that are not yet answered, send a heartbeat that is due, and fail if the server is lost."""
        if self.phase in (MemberPhase.NEW, MemberPhase.OVER):
            return []
        effects = self.peers.tick(now_ns) if self.peers is not None else []
        if self.phase is MemberPhase.ALONE:
            return effects
        limit_ns = self.timing.lost_ns if self.ever_heard else self.timing.connect_ns
        if now_ns - self.heard_ns > limit_ns:
            return [*effects, *(self.leave_server() or self._lost(f"{limit_ns / NS:g} s"))]
        effects += self.views.tick(self.heard_ns, len(self.ports), now_ns)
        owed = self.phase in (MemberPhase.HELLO, MemberPhase.DECLARED, MemberPhase.LEAVING)
        if owed and self.timing.join.due(self.asked_ns, now_ns):
            effects += self._ask(self.asking, now_ns)
        for session in self.sessions if self.phase in (MemberPhase.RUNNING, MemberPhase.LEAVING) else ():
            effects += session.repeat(now_ns)
        due = now_ns - self.beat_ns >= self.timing.beat_ns(self.settings.lease, self.figures.size)
        if self.welcome is not None and self.phase is not MemberPhase.HELLO and due:
            effects.append(self.beat(now_ns))
        return effects

    def _lost(self, waited: str) -> list[MemberEffect]:
        self._go("end")
        if self.ever_heard:
            return [e.MemberFailed(m.RefuseCode.SERVER_LOST, f"the server has not answered for {waited}")]
        text = f"no server answered within {waited}; check that ps-serve runs there and its ports are open"
        return [e.MemberFailed(m.RefuseCode.UNREACHABLE, text)]
