"""One member's session with one shard: it repeats requests, and puts the parts of states together. No I/O.

How it works

    Exchange --say--> Session --Send--> shard            the session keeps what needs an answer
    shard --receive--> Session --event--> Exchange       PushSettled, StateArrived, MasterArrived, ...
    tick --repeat--> Session --Send--> shard             what is not yet answered goes out again

1. `send` sends messages. PREPARE has a function for each kind that needs an answer: a Push is kept in `pushes`, a Follow
   in `follow`, a Pull in `pull`, a read (RowsRequest, MomentsRequest) in `asks`, a question to the coordinator in `wanted`.
2. `receive` takes an answer. PushAck HELD stops the repeats of a push, FOLDED settles it.
3. Parts of a State are kept in `coming` until the state is whole and its turn has come. The session then gives all
   parts on as one StateArrived, and acknowledges them with a Follow. With `in_place` the owner has used the payload of
   each part of a whole state by then, so none is kept.
4. `repeat` sends again what was not answered in time (`Timing`).

Rules
- A push is repeated under the same clock until it is answered. A FOLDED ack settles a push, and so does a state that is
  settled beyond it. At most `window` pushes are in flight: one more is a LocalProtocolError.
- Publications are numbered. A difference is taken once the publication before it is here; a whole state is taken if it
  is newer. Early parts are kept, second copies dropped. So nothing that arrives is wasted, however late it is.
- A Follow says which publication is here. It is sent again after a silence; the shard knows what to send again, and
  when.
- An ask for rows, or for the state of an optimizer, is a read: it is repeated until one answer is here.
- An answer to a Pull that is a difference to publication n is taken while n is the newest publication here. If a newer
  one has come before it, all values are asked for.
- Neither silence nor a refusal settles a push. A push in flight when the member must join again may have been folded,
  and its ack lost. The push is given up. It is never given back to the residual, or it could be folded twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.retry import LONG_AGO_NS, RetryTimer
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import MemberEffect, Send
from narrows.protocols.errors import LocalProtocolError
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.wire import FRAME_BYTES

PULLS_MAX = 64  # requests of one pull whose answers are still taken: with growing intervals, those of the first hours
Parts = dict[int, m.State]  # number of a part -> the part, of one state


@dataclass(slots=True)
class PushRecord:
    """One update on its way to the shard."""

    messages: list[m.Push]  # its parts
    began_ns: int  # when its first part was sent
    sent_ns: int  # when its newest part, or its newest repeat, was sent
    held: bool = False  # the shard has all parts: no more repeats
    bytes: int = 0  # of the payloads of all parts
    repeated: bool = False  # an ack may then answer an earlier copy, and says nothing of the link


@dataclass(slots=True)
class PendingRequest:
    """A read that is not yet answered."""

    ask: m.RowsRequest | m.MomentsRequest
    sent_ns: int  # when it was last sent
    times: int = 1  # how often it was sent


# The answers of a server to a session
ANSWERS = (m.NeedWeights, m.PushAck, m.State, m.Buffers, m.RangeAnswer, m.AgreeAnswer, m.RowsAnswer, m.MomentsAnswer)


class Session:
    """The session of one member with one shard, for one epoch of the member's place.

    Args:
        shard: number of the shard.
        epoch: of the member's place in the run; answers of another epoch are dropped.
        mode: of the run; `mode.window` limits `pushes`.
        timing: when requests are repeated.
        meter: of the link to the shard's machine; sessions with shards of one machine share it.
        in_place: the owner writes each part of a whole state at its StatePart; StateArrived has no payloads of it.
    """

    def __init__(
        self, shard: int, epoch: int, mode: Mode, timing: Timing, meter: LinkMeter, in_place: bool = False
    ) -> None:
        self.shard, self.epoch, self.mode = shard, epoch, mode
        self.timing, self.meter, self.in_place = timing, meter, in_place
        self.patience = RetryTimer(timing.request)  # of pushes
        self.pushes: OrderedDict[int, PushRecord] = OrderedDict()  # by clock; not settled; at most `mode.window`
        self.follow: m.Follow | None = None  # the newest
        self.waits = False  # `follow` asks for a publication that has not come
        self.lost = False  # messages to this member may be lost, and the shard does not know: the next Follow says so
        self.have = -1  # number of the newest publication taken, and with it all before
        self.coming: dict[tuple[bool, int], Parts] = {}  # (whole, publication) -> parts: incomplete, or early
        self.requests = 0  # number of the newest request for the master copy
        self.pull: m.Pull | None = None  # the newest Pull, while it is not answered
        self.pulled: dict[int, Parts] = {}  # request -> parts of its answer, for each repeat of `pull`
        self.pull_ns = 0  # when `pull` was last sent, or a part of its answer came
        self.heard_ns = 0  # when `follow` was last sent, or a part of a publication came
        self.asks: dict[tuple[type[m.Message], int], PendingRequest] = {}  # (kind, request) -> a read
        self.wanted: dict[
            type[m.Message], m.RangeRequest | m.AgreeRequest
        ] = {}  # unanswered questions to the coordinator
        self.wanted_ns = 0  # when one of them was last sent

    @property
    def at_rest(self) -> bool:
        """True if the shard has every update that was pushed."""
        return all(record.held for record in self.pushes.values())

    # Commands.

    def send(self, messages: Sequence[m.Message], now_ns: int) -> list[MemberEffect]:
        """Send messages, and keep those that need an answer for `repeat`.

        Raises:
            LocalProtocolError: a push more than `mode.window`.
        """
        prepared = list[m.Message]()
        for message in messages:
            each, last = self._prepared(message, now_ns), prepared[-1] if prepared else None
            if isinstance(each, m.Follow) and isinstance(last, m.Push) and self._joins(each):
                prepared[-1] = replace(last, follow=(each.clock, each.have, each.credit))
            else:
                prepared.append(each)
        return [Send(self.shard, each) for each in prepared]

    def _joins(self, follow: m.Follow) -> bool:
        """True if a Follow goes within the push before it. Without a barrier a shard may answer it before it has the push."""
        return self.mode.barrier and not follow.lost and not follow.coding

    def _prepared(self, message: m.Message, now_ns: int) -> m.Message:
        prepare = PREPARE.get(type(message))
        return prepare(self, message, now_ns) if prepare is not None else message

    def _push(self, push: m.Push, now_ns: int) -> m.Message:
        record = self.pushes.get(push.clock)
        if record is None:
            if len(self.pushes) >= self.mode.window:
                text = f"{len(self.pushes)} pushes in flight to shard {self.shard}: no more may be sent"
                raise LocalProtocolError(text)
            record = self.pushes[push.clock] = PushRecord([], now_ns, now_ns)
        record.messages.append(push)
        record.bytes += len(push.payload)
        record.sent_ns = now_ns
        return push

    def _follow(self, follow: m.Follow, now_ns: int) -> m.Message:
        self.have = max(self.have, follow.have)  # after a reshard the Exchange has publications of the earlier shards
        self.follow = follow if follow.have == self.have else replace(follow, have=self.have)
        self.waits, self.heard_ns = True, now_ns
        lost, self.lost = self.lost, False
        return replace(self.follow, lost=lost)

    def _pull(self, pull: m.Pull, now_ns: int) -> m.Message:
        self.requests += 1
        if pull is not self.pull:
            self.pulled.clear()
        self.pull, self.pull_ns = replace(pull, request=self.requests), now_ns
        self.pulled[self.requests] = {}
        while len(self.pulled) > PULLS_MAX:
            del self.pulled[min(self.pulled)]
        return self.pull

    def _ask(self, ask: m.RowsRequest | m.MomentsRequest, now_ns: int) -> m.Message:
        self.asks[type(ask), ask.request] = PendingRequest(ask, now_ns)
        return ask

    def _want(self, ask: m.RangeRequest | m.AgreeRequest, now_ns: int) -> m.Message:
        self.wanted[type(ask)], self.wanted_ns = ask, now_ns
        return ask

    # Messages.

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """Handle an answer of the shard. Answers of another epoch have no effect."""
        if not isinstance(message, ANSWERS) or message.epoch != self.epoch:
            return []
        if isinstance(message, m.Buffers):
            return [*([e.BuffersRequested()] if message.clock < 0 else []), e.BuffersArrived(bytes(message.payload))]
        if isinstance(message, (m.RangeAnswer, m.AgreeAnswer)):
            return self._told(message)
        if isinstance(message, m.PushAck):
            return self._acked(message, now_ns)
        if isinstance(message, m.State):
            return self._state(message, now_ns)
        if isinstance(message, (m.RowsAnswer, m.MomentsAnswer)):
            return self._read(message, now_ns)
        # NeedWeights. A late one may come to a member that has a state by now: no effect.
        return [e.GiveWeights(self.shard, message.round, message.rank)] if self.waits and self.have < 0 else []

    def _told(self, told: m.RangeAnswer | m.AgreeAnswer) -> list[MemberEffect]:
        kind: type[m.Message] = m.RangeRequest if isinstance(told, m.RangeAnswer) else m.AgreeRequest
        if kind not in self.wanted or told.number != self.wanted[kind].number:
            return []
        del self.wanted[kind]
        if isinstance(told, m.RangeAnswer):
            return [e.RangeArrived(told.number, told.index, told.over)]
        return [e.AgreementArrived(told.number, told.value)]

    def _acked(self, ack: m.PushAck, now_ns: int) -> list[MemberEffect]:
        effects: list[MemberEffect] = [e.BuffersRequested()] if ack.want_buffers else []
        self.meter.down.passed(ack.sent_ns, now_ns)
        record = self.pushes.get(ack.clock)
        if record is None:
            return effects
        if record.repeated and not record.held:
            self.patience.answered(record.began_ns, now_ns, record.bytes)
        elif not record.held:
            self.meter.up.passed(record.began_ns, ack.received_ns, record.bytes)
        if ack.status == m.PushStatus.FOLDED:
            del self.pushes[ack.clock]
            return [*effects, e.PushSettled(self.shard, ack.clock)]
        record.held = True
        return effects

    def _state(self, state: m.State, now_ns: int) -> list[MemberEffect]:
        if not 0 <= state.part < state.parts <= m.PARTS_MAX:
            return []
        if state.request:
            return self._of_the_master(state, now_ns)
        if not self.have < state.publication <= self.have + (1 << 62 if state.whole else m.CREDIT_MAX):
            return []
        self.heard_ns = now_ns
        self.meter.down.passed(state.sent_ns, now_ns, len(state.payload))
        newest = max((number for whole, number in self.coming if whole), default=-1)
        if state.whole and state.publication < newest:
            return []
        if state.whole and state.publication > newest:
            self.coming.pop((True, newest), None)
        parts = self.coming.setdefault((state.whole, state.publication), {})
        parts[state.part] = replace(state, payload=b"") if self.in_place and state.whole else state
        early: list[MemberEffect] = [e.StatePart(self.shard, state)] if state.whole else []
        return [*early, *self._taken(now_ns)]

    def _taken(self, now_ns: int) -> list[MemberEffect]:
        """Take each publication that is complete and whose turn has come, in order."""
        effects: list[MemberEffect] = []
        while parts := self._next():
            state = parts[-1]
            self.have = state.publication
            self.coming = {key: value for key, value in self.coming.items() if key[1] > self.have}
            for clock in [clock for clock in self.pushes if clock < state.settled]:
                del self.pushes[clock]
                effects.append(e.PushSettled(self.shard, clock))
            effects.append(e.StateArrived(self.shard, parts))
            effects += self._answered(now_ns)
        if effects and self.follow is not None:
            # The Exchange asks for whole states one by one. Differences come as they are made: acknowledge them here.
            self.waits = self.follow.credit > 1
            if self.waits:
                effects += self.send([self.follow], now_ns)
        return effects

    def _next(self) -> tuple[m.State, ...]:
        for (whole, number), parts in self.coming.items():
            if len(parts) == next(iter(parts.values())).parts and (whole or number == self.have + 1):
                return tuple(parts[part] for part in sorted(parts))
        return ()

    def _of_the_master(self, state: m.State, now_ns: int) -> list[MemberEffect]:
        parts = self.pulled.get(state.request)
        if parts is None or self.pull is None:
            return []
        self.meter.down.passed(state.sent_ns, now_ns, len(state.payload))
        self.pull_ns = now_ns
        parts[state.part] = state
        return self._answered(now_ns)

    def _answered(self, now_ns: int) -> list[MemberEffect]:
        """Pass the answer to the Pull on once it is complete, and the publication that it differs from is here."""
        pull = self.pull
        for parts in self.pulled.values() if pull is not None else ():
            first = next(iter(parts.values()), None)
            if pull is None or first is None or len(parts) < first.parts:
                continue
            if first.whole or first.publication == self.have:
                self.pull = None
                self.pulled.clear()
                return [e.MasterArrived(self.shard, pull.clock, tuple(parts[part] for part in sorted(parts)))]
            if first.publication < self.have:
                return self.send([replace(pull, whole=True)], now_ns)
        return []

    def _read(self, read: m.RowsAnswer | m.MomentsAnswer, now_ns: int) -> list[MemberEffect]:
        """Handle the answer to a read. Further answers to the same read are dropped."""
        kind: type[m.Message] = m.RowsRequest if isinstance(read, m.RowsAnswer) else m.MomentsRequest
        if self.asks.pop((kind, read.request), None) is None:
            return []
        self.meter.down.passed(read.sent_ns, now_ns, len(read.payload))
        if isinstance(read, m.RowsAnswer):
            return [e.RowsArrived(self.shard, read.request, read.payload)]
        return [e.MomentsArrived(self.shard, read.request, read.clock, bytes(read.payload))]

    # Time.

    def repeat_soon(self) -> None:
        """Repeat all that is not answered at the next tick.

        For a new connection, or a time in which this member took no messages: either way messages may be lost.
        """
        for record in self.pushes.values():
            record.sent_ns = LONG_AGO_NS
        for asked in self.asks.values():
            asked.sent_ns = LONG_AGO_NS
        self.heard_ns = self.pull_ns = self.wanted_ns = LONG_AGO_NS
        self.lost = True

    def repeat(self, now_ns: int) -> list[MemberEffect]:
        """Send again what was not answered in time."""
        effects: list[MemberEffect] = []
        for record in self.pushes.values():
            if not record.held and self.patience.due(record.sent_ns, now_ns, record.bytes):
                record.sent_ns, record.repeated = now_ns, True
                effects += [Send(self.shard, message) for message in record.messages]
        if self.follow is not None and self.waits and self.timing.request.due(self.heard_ns, now_ns):
            effects += self.send([self.follow], now_ns)
        for asked in self.asks.values():
            # An answer may be a frame, and at a barrier it waits for the slowest worker: the interval grows each time.
            if self.timing.request.due(asked.sent_ns, now_ns, FRAME_BYTES, asked.times):
                asked.sent_ns, asked.times = now_ns, asked.times + 1
                effects.append(Send(self.shard, asked.ask))
        if self.wanted and self.timing.join.due(self.wanted_ns, now_ns):
            effects += self.send([*self.wanted.values()], now_ns)
        # Each answer is a whole model: the interval grows each time.
        if self.pull is not None and self.timing.request.due(self.pull_ns, now_ns, FRAME_BYTES, len(self.pulled)):
            effects += self.send([self.pull], now_ns)
        return effects


PREPARE: dict[type[m.Message], Callable[[Session, Any, int], m.Message]] = {
    m.Push: Session._push,
    m.Follow: Session._follow,
    m.Pull: Session._pull,
    m.RowsRequest: Session._ask,
    m.MomentsRequest: Session._ask,
    m.RangeRequest: Session._want,
    m.AgreeRequest: Session._want,
}
