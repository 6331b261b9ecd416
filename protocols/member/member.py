"""The member machine: one worker's side of the protocol, toward every shard of its server. No I/O.

Rules
- A push is repeated under the same id until it is answered, pulls under new ones: what an answer to the old one adds to is
  not known any more, but for the first, which adds to what is here. Their timers start anew with each sign of progress.
- An answer that comes once its pull was asked for again was late, not lost: it is taken, and from then on a state may take
  as long. Else a link that is slower than the wait would carry nothing but answers to what was given up.
- Silence settles nothing, and neither does a refusal: a push in flight when we must join again may have been folded, and
  its ack lost. It is given up, never given back, or it could be folded a second time.
- Several pulls may be under way. Each but the first names the one before it, whose answer its own will add to, and their
  states are taken in that order.
- HELD stops the repeats of a push; FOLDED, or a pulled state that is settled beyond it, settles it.
- At most `window` pushes of a shard are in flight: `push` beyond that is a LocalProtocolError.
- NOT_A_MEMBER for the present epoch means: join again under a new token, and begin anew from the run's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, MemberEffect, Send
from narrows.protocols.errors import LocalProtocolError, RemoteProtocolError
from narrows.protocols.gossip.peers import Peers
from narrows.protocols.member.meter import LinkMeter
from narrows.protocols.modes import Mode, Rule, Settings
from narrows.protocols.wire import FRAME_BYTES

LATE_MAX = 64  # requests of one pull that are remembered: those of the first 20 minutes
# What is added at most to the wait for a state: a link that stood still tells little of the next one.
LATE_NS_MAX = 600 * NS


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of every wait, in ns."""

    join_retry_ns: int = NS // 2
    request_retry_ns: int = 5 * NS
    bytes_per_second: int = 125_000  # the slowest link: a request of n bytes gets n / this on top
    lost_ns: int = 30 * NS  # no sign of the server for so long: it is lost
    connect_ns: int = 30 * NS  # no first answer for so long: it cannot be reached


@dataclass(slots=True)
class PushRecord:
    """One update on its way to one shard."""

    messages: list[m.Push]
    sent_ns: int
    began_ns: int  # when its first part was sent
    held: bool = False
    repeated: bool = False  # so an ack may be of an earlier copy, and tells nothing of the link

    @property
    def bytes(self) -> int:
        return sum(len(message.payload) for message in self.messages)


@dataclass(slots=True)
class PullRecord:
    """One pull, and what has come of its answer, by part."""

    pull: m.Pull
    asked_ns: int
    parts: dict[int, m.State] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return any(len(self.parts) == part.parts for part in self.parts.values())


class Session:
    """Toward one shard, by a member that has its place in the run: pushes and the pull that are not answered yet."""

    def __init__(self, shard: int, worker: int, epoch: int, mode: Mode, timing: Timing, meter: LinkMeter) -> None:
        self.shard, self.worker, self.epoch, self.mode = shard, worker, epoch, mode
        self.timing, self.meter = timing, meter
        self.pushes: OrderedDict[int, PushRecord] = OrderedDict()
        self.pulls: OrderedDict[int, PullRecord] = OrderedDict()  # by request
        self.late: OrderedDict[int, PullRecord] = OrderedDict()  # the first of them, by the requests that it had before
        self.late_ns = 0  # what one that was late took on the link
        self.asked_ns = 0
        self.requests = 0
        self.have = -1  # publication of the newest state that is here whole

    def send(self, messages: Sequence[m.Message]) -> list[MemberEffect]:
        """What is not repeated by us: the shard asks for it again."""
        return [Send(self.shard, message) for message in messages]

    def push(self, messages: list[m.Push], now_ns: int) -> list[MemberEffect]:
        """Send update `clock` (all its parts); parts may be added by further calls (overlap)."""
        clock = messages[0].clock
        record = self.pushes.get(clock)
        if record is None:
            if len(self.pushes) >= self.mode.window:
                raise LocalProtocolError(
                    f"{len(self.pushes)} pushes in flight to shard {self.shard}: no more may be sent"
                )
            self.pushes[clock] = PushRecord(list(messages), now_ns, now_ns)
        else:
            record.messages += messages
            record.sent_ns = now_ns
        return self.send(messages)

    def pull(self, clock: int, master: bool, now_ns: int, coding: str = "", follow: bool = False) -> list[MemberEffect]:
        """Ask for a state, in the place of all that was asked for; `follow`: for the one after those."""
        if not follow:
            self.pulls.clear()
            self.late.clear()
        if not self.pulls:
            self.asked_ns = now_ns
        return [self._ask(clock, master, coding, now_ns)]

    def _ask(self, clock: int, master: bool, coding: str, now_ns: int) -> Send:
        self.requests += 1
        after = next(reversed(self.pulls), 0)
        pull = m.Pull(self.worker, self.epoch, self.requests, clock, self.have, master, coding, after)
        self.pulls[self.requests] = PullRecord(pull, now_ns)
        return Send(self.shard, pull)

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """The effects of an answer of the shard; none for one of an earlier epoch."""
        if isinstance(message, (m.NeedWeights, m.PushAck, m.State)) and message.epoch == self.epoch:
            if isinstance(message, m.PushAck):
                return self._acked(message, now_ns)
            if isinstance(message, m.State):
                return self._state(message, now_ns)
            # A late one, to a member that has had a state since, must not make it pull anew from a publication it is about
            # to leave: the same delta would be added twice.
            return [e.GiveWeights(self.shard)] if self.pulls and self.have < 0 else []
        return []

    def _acked(self, ack: m.PushAck, now_ns: int) -> list[MemberEffect]:
        effects: list[MemberEffect] = [e.BuffersWanted()] if ack.want_buffers else []
        self.meter.down.passed(ack.sent_ns, now_ns)
        record = self.pushes.get(ack.clock)
        if record is None:
            return effects
        if not record.held and not record.repeated:
            self.meter.up.passed(record.began_ns, ack.received_ns, record.bytes)
        if ack.status == m.PushStatus.FOLDED:
            del self.pushes[ack.clock]
            return [*effects, e.PushSettled(self.shard, ack.clock, ack.weight)]
        record.held = True
        return effects

    def _state(self, state: m.State, now_ns: int) -> list[MemberEffect]:
        self.asked_ns = now_ns
        record = self.pulls.get(state.request) or self.late.get(state.request)
        if record is None or not 0 <= state.part < state.parts <= m.PARTS_MAX:
            return []
        self.meter.down.passed(state.sent_ns, now_ns, len(state.payload))
        record.parts[state.part] = state
        effects: list[MemberEffect] = []
        if not state.delta and not record.pull.master and next(iter(self.pulls)) == state.request:
            effects.append(e.StatePart(self.shard, state))
        if state.request in self.late:
            return [*effects, *self._arrived_late(record, state, now_ns)] if record.whole else effects
        while self.pulls and next(iter(self.pulls.values())).whole:
            _, first = self.pulls.popitem(last=False)
            self.late.clear()
            effects += self._arrived(first)
        return effects

    def _arrived_late(self, record: PullRecord, last: m.State, now_ns: int) -> list[MemberEffect]:
        """Take the answer to the first pull as it was asked for before. What was asked for since adds to another state."""
        took_ns = now_ns - record.asked_ns - (last.sent_ns - last.received_ns)  # the time at the server is no link's
        self.late_ns = min(max(self.late_ns, took_ns), LATE_NS_MAX)
        rest = [other.pull for other in self.pulls.values()][1:]
        self.pulls.clear()
        self.late.clear()
        whole = [part for part in record.parts.values() if not part.delta and not record.pull.master]
        effects: list[MemberEffect] = [e.StatePart(self.shard, part) for part in whole]
        effects += self._arrived(record)
        return [*effects, *(self._ask(pull.clock, pull.master, pull.coding, now_ns) for pull in rest)]

    def _arrived(self, record: PullRecord) -> list[MemberEffect]:
        whole = tuple(record.parts[part] for part in sorted(record.parts))
        effects: list[MemberEffect] = []
        if not record.pull.master:
            self.have = whole[-1].publication
            for clock in [c for c in self.pushes if c < whole[-1].settled]:
                del self.pushes[clock]
                effects.append(e.PushSettled(self.shard, clock, 0.0))
        return [*effects, e.StateArrived(self.shard, record.pull.clock, record.pull.master, whole)]

    def repeat(self, now_ns: int) -> list[MemberEffect]:
        """What was not answered in time, once more."""
        effects: list[MemberEffect] = []
        for record in self.pushes.values():
            wait = self.timing.request_retry_ns + record.bytes * NS // self.timing.bytes_per_second
            if not record.held and now_ns - record.sent_ns >= wait:
                record.sent_ns, record.repeated = now_ns, True
                effects += [Send(self.shard, message) for message in record.messages]
        if self.pulls and now_ns - self.asked_ns >= self._pull_wait():
            self.asked_ns = now_ns
            again = [record.pull for record in self.pulls.values()]
            number, first = self.pulls.popitem(last=False)
            self.pulls.clear()
            self.late[number] = first
            while len(self.late) > LATE_MAX:
                self.late.popitem(last=False)
            effects += [self._ask(pull.clock, pull.master, pull.coding, now_ns) for pull in again]
        return effects

    def _pull_wait(self) -> int:
        return self.timing.request_retry_ns + FRAME_BYTES * NS // self.timing.bytes_per_second + self.late_ns


class Member:
    """Commands and messages in, effects out. `peer` of a Send is the shard's number."""

    def __init__(self, token: str, host: str, expect: bytes = b"", timing: Timing | None = None) -> None:
        self.base_token, self.host, self.expect = token, host, expect
        self.timing = timing or Timing()
        self.attempt = 0
        self.worker, self.epoch, self.rank = -1, 0, -1
        self.welcomed = 0  # the epoch that the coordinator was in when it let us in: it names that life of it
        self.settings: Settings | None = None
        self.mode: Mode | None = None
        self.sessions: list[Session] = []
        self.ports: tuple[int, ...] = ()  # of the shards
        self.plan = b""
        self.below: Callable[[], str] = lambda: ""  # of a cluster: itself and all below it, a line each
        self.tree = ""  # all levels, as the server above has told last
        self.address = ""  # where peers reach this member; its runner knows
        self.peers: Peers | None = None  # once it has its place in a run of gossip
        self.ended = False  # it has done its last step there
        self.phase = "new"  # new, hello, welcome, declared, running, alone, leaving, over
        self.again = False
        self.heard_ns = 0
        self.asked_ns = 0
        self.beat_ns = 0
        self.lease_ns = 0
        self.final_clock = -1
        self.meter = LinkMeter()
        self.ever_heard = False

    @property
    def token(self) -> str:
        return f"{self.base_token}.{self.attempt}" if self.attempt else self.base_token

    # Commands.

    def join(self, now_ns: int) -> list[MemberEffect]:
        self.phase, self.heard_ns, self.asked_ns = "hello", now_ns, now_ns
        return [Send(0, m.Hello(self.token, self.host, self.expect))]

    def declare(self, plan: bytes, now_ns: int) -> list[MemberEffect]:
        self.plan, self.asked_ns = plan, now_ns
        if self.phase != "welcome":
            return []
        self.phase = "declared"
        return [Send(0, self._joining())]

    def first_weights(self, shard: int, messages: list[m.FirstWeights]) -> list[MemberEffect]:
        return self.sessions[shard].send(messages)

    def push(self, shard: int, messages: list[m.Push], now_ns: int) -> list[MemberEffect]:
        """Send update `clock` (all its parts) to a shard; parts may be added by further calls (overlap)."""
        if self.phase != "running" or messages[0].epoch != self.epoch:
            return []  # made before a rejoin that its maker has not seen yet
        return self.sessions[shard].push(messages, now_ns)

    def pull(
        self, shard: int, clock: int, master: bool, now_ns: int, coding: str = "", follow: bool = False
    ) -> list[MemberEffect]:
        """Ask a shard for a state (Session.pull)."""
        if self.phase != "running":
            return []  # asked before a rejoin: Started comes, and with it the reason to ask again
        return self.sessions[shard].pull(clock, master, now_ns, coding, follow)

    def buffers(self, packed: bytes) -> list[MemberEffect]:
        return [Send(0, m.Buffers(self.worker, self.epoch, packed))]

    def look_at_link(self) -> list[MemberEffect]:
        """Tell what was seen of the link since this was last asked."""
        return [self.meter.read()]

    def leave(self, clock: int, now_ns: int) -> list[MemberEffect]:
        """Go. `clock` >= 0: done, after that many updates; -1: the script failed."""
        if self.phase == "alone":
            self.phase = "over"
            return [e.Left()]
        self.phase, self.final_clock, self.asked_ns = "leaving", clock, now_ns
        return [Send(0, m.Leave(self.token, clock))]

    def end(self, now_ns: int) -> list[MemberEffect]:
        """The last step is done, and peers are answered until all have done theirs (gossip)."""
        self.ended = True
        said = self.peers.end(now_ns) if self.peers is not None else []
        return [*said, *([self.beat(now_ns)] if self.phase == "running" else [])]

    def beat(self, now_ns: int) -> Send:
        self.beat_ns = now_ns
        roster = self.peers.epoch if self.peers is not None else 0
        epoch = self.epoch or self.welcomed
        return Send(0, m.Heartbeat(self.worker, epoch, now_ns, roster, self.below(), self.ended))

    def rejoin(self, now_ns: int) -> list[MemberEffect]:
        """Join once more, under a token of its own; what was in flight is given up."""
        self.attempt += 1
        self.epoch = 0
        self.ended = False
        return self.join(now_ns)

    def leave_server(self) -> list[MemberEffect]:
        """Go on without the server where peers know each other (gossip); nothing where they do not."""
        if self.phase != "running" or self.peers is None or not self.peers.epoch:
            return []
        self.phase = "alone"
        return [e.ServerGone()]

    # Messages.

    def receive(self, shard: int, message: m.Message, now_ns: int) -> list[MemberEffect]:
        self.heard_ns = now_ns
        self.ever_heard = True
        if isinstance(message, m.Refuse):
            return self._refused(shard, message, now_ns)
        if isinstance(message, m.LeaveAck):
            if self.phase == "leaving" and message.token == self.token:
                self.phase = "over"
                return [e.Left()]
            return []
        if isinstance(message, m.Welcome):
            return self._welcome(message, now_ns)
        if isinstance(message, m.Ready):
            return self._ready(message, now_ns)
        if isinstance(message, m.HeartbeatAck):
            if message.worker == self.worker:
                self.meter.up.passed(message.echo_ns, message.received_ns)
                self.meter.down.passed(message.sent_ns, now_ns)
                self.tree = message.tree or self.tree
            return []
        if isinstance(message, m.Roster):
            return self.peers.roster(message, now_ns) if self.peers is not None else []
        return self.sessions[shard].receive(message, now_ns) if self.phase in ("running", "leaving") else []

    def receive_peer(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """The effects of a message of another worker (gossip)."""
        return self.peers.receive(message, now_ns) if self.peers is not None else []

    def _welcome(self, message: m.Welcome, now_ns: int) -> list[MemberEffect]:
        if self.phase != "hello" or message.token != self.token:
            return []
        self.phase, self.worker, self.rank = "welcome", message.worker, message.rank
        self.welcomed = message.epoch
        self.settings = Settings.unpacked(message.settings)
        self.mode, self.ports = self.settings.mode(), message.ports
        self.lease_ns = message.lease_ms * 1_000_000
        self.sessions = [
            Session(shard, self.worker, 0, self.mode, self.timing, self.meter) for shard in range(len(message.ports))
        ]
        joined = e.Joined(message.worker, message.rank, message.world_size, message.settings, message.ports)
        return [joined, *(self.declare(self.plan, now_ns) if self.plan else [])]

    def _ready(self, message: m.Ready, now_ns: int) -> list[MemberEffect]:
        if self.phase != "declared" or message.worker != self.worker:
            return []
        self.phase, self.epoch = "running", message.epoch
        self.meter = LinkMeter()  # the server may have been started anew, on a machine with another clock
        for session in self.sessions:
            session.epoch, session.meter = message.epoch, self.meter
        if any(len(keys) != 2 for keys in message.ranges):
            raise RemoteProtocolError("the server sent key ranges that are none")
        ranges = tuple((keys[0], keys[1]) for keys in message.ranges)
        if self.mode is not None and self.mode.rule is Rule.MIX:
            self.peers, self.ended = Peers(self.worker, self.lease_ns), False
        again, self.again = self.again, True
        return [e.Started(message.worker, message.epoch, message.clock, ranges, message.buffers, again)]

    def _refused(self, shard: int, refuse: m.Refuse, now_ns: int) -> list[MemberEffect]:
        if refuse.code != m.RefuseCode.NOT_A_MEMBER:
            if refuse.code == m.RefuseCode.SERVER_LOST and (gone := self.leave_server()):
                return gone
            self.phase = "over"
            return [e.Failed(refuse.code, refuse.text)]
        epoch = self.epoch or self.welcomed
        if refuse.worker != self.worker or refuse.epoch != epoch or self.phase in ("hello", "alone", "over"):
            return []
        if self.phase == "leaving":
            return []  # the coordinator may have forgotten us with a restart, and must still hear that we are done
        return self.rejoin(now_ns)

    # Time.

    def tick(self, now_ns: int) -> list[MemberEffect]:
        """Repeat what is unanswered, beat, and find the server lost."""
        timing = self.timing
        if self.phase in ("new", "over"):
            return []
        gossip = self.peers.tick(now_ns) if self.peers is not None else []
        if self.phase == "alone":
            return gossip
        limit = timing.lost_ns if self.ever_heard else timing.connect_ns
        if now_ns - self.heard_ns > limit:
            if gone := self.leave_server():
                return [*gossip, *gone]
            code = m.RefuseCode.SERVER_LOST if self.ever_heard else m.RefuseCode.UNREACHABLE
            self.phase = "over"
            text = f"the server has not answered for {limit / NS:g} s"
            if not self.ever_heard:
                text = (
                    f"no server answered within {limit / NS:g} s; check that ps-serve runs there and its ports are open"
                )
            return [e.Failed(int(code), text)]
        effects: list[MemberEffect] = gossip
        if self.phase in ("hello", "declared", "leaving") and now_ns - self.asked_ns >= timing.join_retry_ns:
            self.asked_ns = now_ns
            effects.append(Send(0, self._joining()))
        if self.phase in ("running", "leaving"):
            for session in self.sessions:
                effects += session.repeat(now_ns)
        beat = min(self.lease_ns // 4 or NS, timing.lost_ns // 4)
        if self.worker >= 0 and self.phase != "hello" and now_ns - self.beat_ns >= beat:
            effects.append(self.beat(now_ns))
        return effects

    def _joining(self) -> m.Message:
        if self.phase == "hello":
            return m.Hello(self.token, self.host, self.expect)
        if self.phase == "declared":
            return m.Declare(self.worker, self.welcomed, self.plan, self.address)
        return m.Leave(self.token, self.final_clock)
