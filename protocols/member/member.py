"""The member machine: joining a run, having a place in it, leaving it, and finding out that the server is gone. No I/O.

Rules
- Join in two steps: Hello, Welcome; Declare, Ready. With Ready there is a place, and a `Session` for each shard.
- NOT_A_MEMBER for the present epoch means: join again under a new token, and begin anew from the run's clock.
- Under gossip the server may be gone once peers know each other: then the member is ALONE, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.modes import Rule
from narrows.protocols.config.retry import LONG_AGO_NS
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS, MemberEffect, Send
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.peers import GossipPeers
from narrows.protocols.member.failover_view import FailoverView
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.metrics import MemberMetrics
from narrows.protocols.member.server_layout_check import moved, readied, welcomed
from narrows.protocols.member.session import Session


class MemberPhase(Enum):
    """How far a member is."""

    NEW = "new"
    HELLO = "hello"
    WELCOME = "welcome"
    DECLARED = "declared"
    RUNNING = "running"
    ALONE = "alone"
    LEAVING = "leaving"
    OVER = "over"


# An event -> the phases that it happens in -> the phase after it. All else leaves a member as it is.
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
    """Commands and messages in, effects out. `peer` of a Send is the shard's number.

    `below`: of a cluster, itself and all below it, a line each. `address`: where peers reach this member, of a cluster one for
    each shard; whoever runs it sets it before it declares.
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
        self.asking: m.Message = self.hello  # what is repeated while the server owes an answer to it
        self.asked_ns = self.heard_ns = self.beat_ns = 0
        self.ever_heard = False
        self.welcome: m.Welcome | None = None
        self.settings = Settings()  # the run's, from Welcome on
        self.epoch = 0  # of our place in it, 0: none
        self.sessions: list[Session] = []
        self.meter, self.figures = LinkMeter(), MemberMetrics()
        self.plan = b""
        self.again = False  # we had a place before
        self.address = self.tree = ""  # all levels, as the server above has told last
        self.models: m.Pairs = ()  # rank, round: of a run before, in files here (gossip); set before it declares
        self.run_clock, self.waits = 0, ""  # and the run's clock, and for which members it waits
        self.peers: GossipPeers | None = None  # from Ready on, in a run of gossip
        self.ended = False  # we have done our last step there
        self.views = FailoverView(-1, 0)  # of who serves
        self.copied = False  # a standby has all that is here (clusters)
        self.move = 0  # number of the newest Move

    @property
    def token(self) -> str:
        return f"{self.hello.token}.{self.attempt}" if self.attempt else self.hello.token

    @property
    def worker(self) -> int:
        return self.welcome.worker if self.welcome is not None else -1

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the shards; none before a welcome."""
        return self.welcome.ports if self.welcome is not None else ()

    def _go(self, trigger: str) -> bool:
        """Whether this happens in the present phase; then on to the next."""
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

    def declare(self, plan: bytes, now_ns: int) -> list[MemberEffect]:
        self.plan = plan
        if self.welcome is None or not self._go("declare"):
            return []
        return self._ask(m.Declare(self.worker, self.welcome.epoch, plan, self.address, self.models), now_ns)

    def say(self, shard: int, messages: Sequence[m.Message], now_ns: int) -> list[MemberEffect]:
        """Send a shard what an `Exchange` has to say to it."""
        if self.phase is not MemberPhase.RUNNING or any(getattr(each, "epoch", 0) != self.epoch for each in messages):
            return []  # made before a rejoin that its maker has not seen yet
        return self.sessions[shard].say(messages, now_ns)

    def buffers(self, packed: bytes, clock: int) -> list[MemberEffect]:
        return [Send(0, m.Buffers(self.worker, self.epoch, clock, packed))]

    def ask_buffers(self, clock: int) -> list[MemberEffect]:
        ask = Send(0, m.BuffersAsk(self.worker, self.epoch, clock))
        return [
            ask if self.phase is MemberPhase.RUNNING else e.BuffersTold(b"")
        ]  # else its own are all that it can have

    def leave(self, clock: int, now_ns: int) -> list[MemberEffect]:
        """Go. `clock` >= 0: done, after that many updates; -1: it failed. A server that never answered is told once."""
        last = [self.beat(now_ns)] if self.phase is MemberPhase.RUNNING and self.figures.rows() else []
        said = [] if self.phase is MemberPhase.ALONE else [*last, *self._ask(m.Leave(self.token, clock), now_ns)]
        self._go("leave" if self.ever_heard else "end")
        return [*said, e.Left()] if self.phase is MemberPhase.OVER else said

    def end(self, now_ns: int) -> list[MemberEffect]:
        """The last step is done, and peers are answered until all have done theirs (gossip)."""
        said, self.ended = self.peers.end(now_ns) if self.peers is not None else [], True
        return [*said, *([self.beat(now_ns)] if self.phase is MemberPhase.RUNNING else [])]

    def beat(self, now_ns: int) -> Send:
        self.beat_ns = now_ns
        roster = self.peers.epoch if self.peers is not None else 0
        who = (self.worker, self._known_by)
        told, road_ns = self.figures.packed(self.meter, len(self.ports), now_ns), self.meter.road.most
        beat = m.Heartbeat(*who, now_ns, roster, self.below(), self.ended, self.move, self.copied, road_ns, told)
        return Send(0, beat)

    def rejoin(self, now_ns: int) -> list[MemberEffect]:
        """Join once more, under a token of its own; what was in flight is given up."""
        self.attempt, self.views = self.attempt + 1, FailoverView(-1, 0)
        self.epoch, self.ended, self.sessions, self.move = 0, False, [], 0
        return self.join(now_ns)

    def end_session(self) -> None:
        """It is over, whatever the server says."""
        self._go("end")

    def leave_server(self) -> list[MemberEffect]:
        """Go on without the server where peers know each other (gossip); nothing where they do not."""
        known = self.peers is not None and self.peers.epoch
        return [e.ServerGone()] if known and self._go("server gone") else []

    @property
    def _known_by(self) -> int:
        """The epoch that the server knows us by: of our place, or while we have none, of the life of it that let us in."""
        return self.epoch or (self.welcome.epoch if self.welcome is not None else 0)

    # Messages.

    def receive(self, shard: int, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """The effects of a message of a shard. Raises RemoteProtocolError for one that is none."""
        turned = self.views.turned
        told = self.views.told(message) if isinstance(message, m.FailoverNotice) else []
        if self.views.turned:
            return told
        if turned:
            self._back()
        if now_ns - self.heard_ns > self.timing.silent_ns(self.settings.lease):
            self.beat_ns = LONG_AGO_NS  # ours may have been lost too, and with them most of a lease
        self.heard_ns, self.ever_heard = now_ns, True
        self.views.cut.pop(shard, None)
        match message:
            case m.FailoverNotice():
                return told
            case m.Welcome():
                return self._welcomed(message, now_ns)
            case m.Ready():
                return self._readied(message)
            case m.HeartbeatAck():
                return self._beaten(message, now_ns)
            case m.Roster():
                return self.peers.roster(message, now_ns) if self.peers is not None else []
            case m.Move():
                return self._moved(message, now_ns)
            case m.LeaveAck(token):
                return [e.Left()] if token == self.token and self._go("LeaveAck") else []
            case m.Refuse():
                return self._refused(message, now_ns)
        placed = self.phase in (MemberPhase.RUNNING, MemberPhase.LEAVING) and shard < len(self.sessions)
        return self.sessions[shard].receive(message, now_ns) if placed else []

    def receive_standby(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """The effects of a message of the standby, or of the server that it has become."""
        if not self.views.listens:
            return []
        turned = self.views.turned
        if isinstance(message, m.FailoverNotice) and message.ports and len(message.ports) != len(self.sessions):
            raise RemoteProtocolError(f"the standby has {len(message.ports)} shards, the server {len(self.sessions)}")
        effects = self.views.hear(message, now_ns)
        self.heard_ns = now_ns if effects else self.heard_ns  # else the standby lives, and the server may not
        if effects or (turned and not self.views.turned):
            self._back()
        return effects

    def _back(self) -> None:
        """A server is listened to again: what it said meanwhile was not taken."""
        for shard in range(len(self.sessions)):
            self.repeat_soon(shard)

    def receive_peer(self, message: m.Message, now_ns: int, sender: bytes | None = None) -> list[MemberEffect]:
        """Arguments as of `GossipPeers.receive`."""
        return self.peers.receive(message, now_ns, sender) if self.peers is not None else []

    def _welcomed(self, message: m.Welcome, now_ns: int) -> list[MemberEffect]:
        if message.token != self.token or self.phase is not MemberPhase.HELLO:
            return []
        self.settings, self.welcome = welcomed(message), message
        self.views = FailoverView(message.worker, 0)  # who has declared may be counted before the Ready is here
        self._go("Welcome")
        joined = e.Joined(message.rank, message.world_size, message.settings, message.ports, message.hosts)
        return [joined, *(self.declare(self.plan, now_ns) if self.plan else [])]

    def _readied(self, message: m.Ready) -> list[MemberEffect]:
        if message.worker != self.worker or self.phase is not MemberPhase.DECLARED:
            return []
        ranges = readied(message, self.plan, len(self.ports))
        self._go("Ready")
        self._seat(message.epoch)
        if self.settings.mode().rule is Rule.MIX:
            self.peers, self.ended = GossipPeers(self.worker, int(self.settings.lease * NS)), False
        self.views.epoch, again, self.again = self.epoch, self.again, True
        place = (message.worker, message.epoch, message.clock, ranges, message.buffers, again)
        return [e.Started(*place, self.settings.packed())]

    def _seat(self, epoch: int) -> None:
        """A session with each shard."""
        self.epoch, mode = epoch, self.settings.mode()
        self.views.cut.clear()
        self.meter = LinkMeter(road=self.meter.road)  # the server may have been started anew, with another clock
        hosts = (self.welcome.hosts if self.welcome is not None else ()) or ("",) * len(self.ports)
        meters = {host: LinkMeter() for host in hosts} | {"": self.meter}
        self.sessions = [Session(i, epoch, mode, self.timing, meters[host]) for i, host in enumerate(hosts)]

    def _moved(self, move: m.Move, now_ns: int) -> list[MemberEffect]:
        """Keys or plan are about to change, or have. A cluster knows once all its shards do, and says so itself (`knows`)."""
        ours = move.worker == self.worker and move.epoch == self.epoch and self.phase is MemberPhase.RUNNING
        if not ours or move.number <= self.move or self.welcome is None:
            return []
        if not move.place:
            held = e.Held(move.at, move.number)
            return [held] if self.below() else [held, self.knows(move.number, now_ns)]
        self.settings, ranges = moved(move, self.plan, self.settings)
        self.welcome = replace(self.welcome, ports=move.ports, hosts=move.hosts)
        self._seat(move.place)
        where = (ranges, move.ports, move.hosts, move.settings)
        return [e.Moved(self.worker, self.epoch, move.at, *where), self.knows(move.number, now_ns)]

    def knows(self, number: int, now_ns: int) -> Send:
        """All here do as the Move of this number says."""
        self.move = number
        return self.beat(now_ns)

    def _beaten(self, message: m.HeartbeatAck, now_ns: int) -> list[MemberEffect]:
        if message.worker == self.worker:
            self.meter.beat(message.echo_ns, message.received_ns, message.sent_ns, now_ns)
            self.tree = message.tree or self.tree
            if message.stops:
                return [e.ServerStops()]
            if message.echo_ns:  # else it was sent to find out whether we live
                self.run_clock, self.waits = message.clock, message.waits
        return []

    def _refused(self, refuse: m.Refuse, now_ns: int) -> list[MemberEffect]:
        if refuse.code != m.RefuseCode.NOT_A_MEMBER:
            if refuse.code == m.RefuseCode.SERVER_LOST and (gone := self.leave_server()):
                return gone
            self._go("end")
            return [e.Failed(refuse.code, refuse.text)]
        # While leaving: the coordinator may have forgotten us with a restart, and must still hear that we are done.
        joins = self.phase in (MemberPhase.WELCOME, MemberPhase.DECLARED, MemberPhase.RUNNING)
        return self.rejoin(now_ns) if joins and (refuse.worker, refuse.epoch) == (self.worker, self._known_by) else []

    # Time.

    def repeat_soon(self, shard: int) -> None:
        """The connection to this shard is another one."""
        self.meter.anew()
        if shard < len(self.sessions):
            self.sessions[shard].meter.anew()
            self.sessions[shard].repeat_soon()
        if not shard:
            self.asked_ns = self.beat_ns = LONG_AGO_NS

    def cut(self, shard: int, now_ns: int) -> None:
        """The connection to this shard has ended."""
        if shard < len(self.sessions):
            self.views.cut.setdefault(shard, now_ns)

    def tick(self, now_ns: int) -> list[MemberEffect]:
        """Repeat what is unanswered, beat, and find the server lost."""
        if self.phase in (MemberPhase.NEW, MemberPhase.OVER):
            return []
        effects = self.peers.tick(now_ns) if self.peers is not None else []
        if self.phase is MemberPhase.ALONE:
            return effects
        limit_ns = self.timing.lost_ns if self.ever_heard else self.timing.connect_ns
        if now_ns - self.heard_ns > limit_ns:
            return [*effects, *(self.leave_server() or self._lost(f"{limit_ns / NS:g} s"))]
        effects += self.views.tick(self.heard_ns, len(self.sessions), now_ns) if self.sessions else []
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
            return [e.Failed(m.RefuseCode.SERVER_LOST, f"the server has not answered for {waited}")]
        text = f"no server answered within {waited}; check that ps-serve runs there and its ports are open"
        return [e.Failed(m.RefuseCode.UNREACHABLE, text)]
