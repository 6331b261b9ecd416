"""One member's conversation with one shard: pushes that are not settled, and the publications that it follows. No I/O.

Rules
- A push is repeated under the same id until it is answered. HELD stops the repeats; FOLDED, or a state that is settled beyond
  it, settles it. At most `window` are in flight: a push beyond that is a LocalProtocolError.
- Publications are numbered. A difference is taken once the one before it is here, a whole state if it is newer; what comes
  early is kept, what comes twice is dropped. So nothing that arrives is given up, however late it is.
- Follow says what is here. It is said again where nothing comes for a while; the shard knows what to send again, and when.
- An ask for rows, or for what an optimizer keeps, is a read: it is repeated until one answer is here.
- Silence settles nothing, and neither does a refusal: a push in flight when the member must join again may have been folded,
  and its ack lost. It is given up, never given back, or it could be folded a second time.
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

PULLS_MAX = 64  # requests of one pull whose answers are still taken: those of the first hours
Parts = dict[int, m.State]  # of one state, by part


@dataclass(slots=True)
class PushRecord:
    """One update on its way to the shard."""

    messages: list[m.Push]
    began_ns: int  # when its first part was sent
    sent_ns: int
    held: bool = False
    bytes: int = 0  # of their payloads
    repeated: bool = False  # so an ack may be of an earlier copy, and tells nothing of the link


@dataclass(slots=True)
class PendingRequest:
    """An ask that is on its way. times: how often it was sent."""

    ask: m.RowsAsk | m.MomentsAsk
    sent_ns: int
    times: int = 1


class Session:
    """The session of a member that has its place in the run. `Exchange` hands it the messages that it is to say."""

    def __init__(self, shard: int, epoch: int, mode: Mode, timing: Timing, meter: LinkMeter) -> None:
        self.shard, self.epoch, self.mode = shard, epoch, mode
        self.timing, self.meter = timing, meter
        self.patience = RetryTimer(timing.request)
        self.pushes: OrderedDict[int, PushRecord] = OrderedDict()
        self.follow: m.Follow | None = None  # as it was said last
        self.waits = False  # for the next publication
        self.lost = False  # what was sent to us does not come any more, and the shard is not told yet
        self.have = -1  # the newest publication that is here, and all before it
        self.coming: dict[tuple[bool, int], Parts] = {}  # not all here, or early; by (whole, publication)
        self.requests = 0
        self.pull: m.Pull | None = None  # under way, as it was said last
        self.pulled: dict[int, Parts] = {}  # of its answer, by the requests that it had
        self.pull_ns = 0  # when it was last asked for, or a part of it came
        self.heard_ns = 0  # the same, of the next publication
        self.asks: dict[tuple[type[m.Message], int], PendingRequest] = {}  # by kind and request
        self.wanted: dict[type[m.Message], m.RangeAsk | m.AgreeAsk] = {}  # of the coordinator, and not answered yet
        self.wanted_ns = 0  # when it was last asked

    @property
    def at_rest(self) -> bool:
        """The shard has all that was pushed."""
        return all(record.held for record in self.pushes.values())

    # Commands.

    def say(self, messages: Sequence[m.Message], now_ns: int) -> list[MemberEffect]:
        """Send these, and see to it that they are answered."""
        return [Send(self.shard, self._prepared(message, now_ns)) for message in messages]

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
        self.have = max(self.have, follow.have)  # of the shards before, where the keys were cut anew
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

    def _ask(self, ask: m.RowsAsk | m.MomentsAsk, now_ns: int) -> m.Message:
        self.asks[type(ask), ask.request] = PendingRequest(ask, now_ns)
        return ask

    def _want(self, ask: m.RangeAsk | m.AgreeAsk, now_ns: int) -> m.Message:
        self.wanted[type(ask)], self.wanted_ns = ask, now_ns
        return ask

    # Messages.

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """The effects of an answer of the shard; none for one of an earlier epoch."""
        if (
            not isinstance(
                message, (m.NeedWeights, m.PushAck, m.State, m.Buffers, m.Range, m.Agreed, m.Rows, m.Moments)
            )
            or message.epoch != self.epoch
        ):
            return []
        if isinstance(message, m.Buffers):
            return [*([e.BuffersWanted()] if message.clock < 0 else []), e.BuffersTold(bytes(message.payload))]
        if isinstance(message, (m.Range, m.Agreed)):
            return self._told(message)
        if isinstance(message, m.PushAck):
            return self._acked(message, now_ns)
        if isinstance(message, m.State):
            return self._state(message, now_ns)
        if isinstance(message, (m.Rows, m.Moments)):
            return self._read(message, now_ns)
        # A late one may come to a member that has had a state since.
        return [e.GiveWeights(self.shard, message.round, message.rank)] if self.waits and self.have < 0 else []

    def _told(self, told: m.Range | m.Agreed) -> list[MemberEffect]:
        kind: type[m.Message] = m.RangeAsk if isinstance(told, m.Range) else m.AgreeAsk
        if kind not in self.wanted or told.number != self.wanted[kind].number:
            return []
        del self.wanted[kind]
        if isinstance(told, m.Range):
            return [e.RangeTold(told.number, told.index, told.over)]
        return [e.AgreedTold(told.number, told.value)]

    def _acked(self, ack: m.PushAck, now_ns: int) -> list[MemberEffect]:
        effects: list[MemberEffect] = [e.BuffersWanted()] if ack.want_buffers else []
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
        parts[state.part] = state
        early: list[MemberEffect] = [e.StatePart(self.shard, state)] if state.whole else []
        return [*early, *self._taken(now_ns)]

    def _taken(self, now_ns: int) -> list[MemberEffect]:
        """All that is here whole and in its turn."""
        effects: list[MemberEffect] = []
        while parts := self._next():
            state = parts[-1]
            self.have = state.publication
            self.coming = {key: value for key, value in self.coming.items() if key[1] > self.have}
            for clock in [clock for clock in self.pushes if clock < state.settled]:
                del self.pushes[clock]
                effects.append(e.PushSettled(self.shard, clock))
            effects.append(e.StateArrived(self.shard, parts))
        if effects and self.follow is not None:
            # Whole states are asked for one by one; differences come as they are made, and are acknowledged.
            self.waits = self.follow.credit > 1
            if self.waits:
                effects += self.say([self.follow], now_ns)
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
        if len(parts) < state.parts:
            return []
        pull, self.pull = self.pull, None
        self.pulled.clear()
        return [e.MasterArrived(self.shard, pull.clock, tuple(parts[part] for part in sorted(parts)))]

    def _read(self, read: m.Rows | m.Moments, now_ns: int) -> list[MemberEffect]:
        """One answer is taken to each ask."""
        kind: type[m.Message] = m.RowsAsk if isinstance(read, m.Rows) else m.MomentsAsk
        if self.asks.pop((kind, read.request), None) is None:
            return []
        self.meter.down.passed(read.sent_ns, now_ns, len(read.payload))
        if isinstance(read, m.Rows):
            return [e.RowsArrived(self.shard, read.request, read.payload)]
        return [e.MomentsArrived(self.shard, read.request, read.clock, bytes(read.payload))]

    # Time.

    def repeat_soon(self) -> None:
        """The connection is another one, or nothing was taken for a while: what was not answered may be lost, either way."""
        for record in self.pushes.values():
            record.sent_ns = LONG_AGO_NS
        for asked in self.asks.values():
            asked.sent_ns = LONG_AGO_NS
        self.heard_ns = self.pull_ns = self.wanted_ns = LONG_AGO_NS
        self.lost = True

    def repeat(self, now_ns: int) -> list[MemberEffect]:
        """Say once more what was not answered in time."""
        effects: list[MemberEffect] = []
        for record in self.pushes.values():
            if not record.held and self.patience.due(record.sent_ns, now_ns, record.bytes):
                record.sent_ns, record.repeated = now_ns, True
                effects += [Send(self.shard, message) for message in record.messages]
        if self.follow is not None and self.waits and self.timing.request.due(self.heard_ns, now_ns):
            effects += self.say([self.follow], now_ns)
        for asked in self.asks.values():
            # Each answer may be a frame, and at a barrier it waits for the slowest: from one ask to the next it has longer.
            if self.timing.request.due(asked.sent_ns, now_ns, FRAME_BYTES, asked.times):
                asked.sent_ns, asked.times = now_ns, asked.times + 1
                effects.append(Send(self.shard, asked.ask))
        if self.wanted and self.timing.join.due(self.wanted_ns, now_ns):
            effects += self.say([*self.wanted.values()], now_ns)
        # Each copy of the answer is a model: from one to the next it is waited for longer.
        if self.pull is not None and self.timing.request.due(self.pull_ns, now_ns, FRAME_BYTES, len(self.pulled)):
            effects += self.say([self.pull], now_ns)
        return effects


PREPARE: dict[type[m.Message], Callable[[Session, Any, int], m.Message]] = {
    m.Push: Session._push,
    m.Follow: Session._follow,
    m.Pull: Session._pull,
    m.RowsAsk: Session._ask,
    m.MomentsAsk: Session._ask,
    m.RangeAsk: Session._want,
    m.AgreeAsk: Session._want,
}
