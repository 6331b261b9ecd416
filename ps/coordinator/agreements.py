"""One number that all workers of a run agree on, at one step of their scripts: `narrows.worker.agree(value)`.

How it works
1. A worker sends `AgreeRequest`: the step at which its script calls, the number of the call at that step, its clock, its
   value.
2. The coordinator waits for the same call of each other member that has not gone past that step. A member has gone
   past it once the shards have an update of the member after that clock, or once the member has done its last step.
   The coordinator does not wait for a dead member. A member that joins later has begun at a later clock.
3. The answer is the mean of the values, each weighted by the number of workers behind it. The coordinator makes it
   once and keeps it. So a worker that asks again, or late, gets the same answer as the others.
4. A cluster makes no answer of its own. It asks its parent with the mean of its workers, and sends them the parent's
   answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.protocols import messages as m
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.effects import Send
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Decision, Run, Seat

KEPT_MAX = 64  # answers that are kept: a worker that asks again does so within a few steps
Call = tuple[int, int]  # the step of the script, and the number of the call at that step


@dataclass(slots=True)
class ParentAgreement:
    """What a cluster asks its parent."""

    call: Call
    number: int
    value: float
    weight: int  # number of workers behind the value
    said: int = 0  # the parent's epoch in which the ask was sent, 0: it was not sent yet


@dataclass(slots=True)
class PendingAgreement:
    """The asks of one call that has no answer yet, by worker."""

    asks: dict[int, m.AgreeRequest] = field(default_factory=dict)

    @property
    def clock(self) -> int:
        """The largest clock of the workers that have asked."""
        return max((ask.clock for ask in self.asks.values()), default=0)

    @property
    def weight(self) -> int:
        """The number of workers behind the asks."""
        return sum(ask.weight for ask in self.asks.values())

    @property
    def mean(self) -> float:
        """Weighted mean of the values, summed in the order of the workers, so that a replay gives the same bits."""
        return sum(self.asks[worker].value * self.asks[worker].weight for worker in sorted(self.asks)) / self.weight


class Agreements(Decision):
    """Decides when a call has its answer."""

    def __init__(self, run: Run, clocks: Clocks, above: ParentPlace, gossip_directory: GossipDirectory) -> None:
        self.run, self.clocks, self.above, self.gossip_directory = run, clocks, above, gossip_directory
        self.open: dict[Call, PendingAgreement] = {}  # calls without an answer
        self.made: dict[Call, float] = {}  # the newest KEPT_MAX answers
        self.parent_agreement: ParentAgreement | None = None  # the ask that waits for the parent's answer
        self.numbers = 0  # number of asks sent to the parent
        self._answers: list[Send] = []

    def hear(self, seat: Seat, ask: m.AgreeRequest) -> list[Send]:
        """Take an ask, and return the answer if there is one already.

        Raises:
            RemoteProtocolError: no worker sends such numbers.
        """
        if min(ask.number, ask.weight) < 1 or ask.weight > m.WORKERS_MAX or min(ask.at, ask.call, ask.clock) < 0:
            raise RemoteProtocolError(f"worker {seat.worker} asks for call {ask.call} at step {ask.at}: there is none")
        if not seat.epoch:
            return []
        call = (ask.at, ask.call)
        if call in self.made:
            return [_answer(seat, ask, self.made[call])]
        for other in [other for other, asked in self.open.items() if other != call and seat.worker in asked.asks]:
            self._withdraw(other, seat.worker)  # the worker had to join again, and now calls at another step
        self.open.setdefault(call, PendingAgreement()).asks[seat.worker] = ask
        return []

    def _withdraw(self, call: Call, worker: int) -> None:
        self.open[call].asks.pop(worker, None)
        if not self.open[call].asks:
            del self.open[call]

    def decide(self, now_ns: int) -> bool:
        """Answer the first call that waits for no member any more; a cluster asks its parent instead."""
        for call in sorted(self.open):
            asked = self.open[call]
            # With a quorum, workers' steps differ by the rounds that closed without them. A worker with a later call
            # has gone past this one.
            later = {worker for other, each in self.open.items() if other > call for worker in each.asks}
            missing = [s for s in self.run.declared if s.worker not in asked.asks and s.worker not in later]
            if any(not self._past(seat, asked) for seat in missing):
                continue
            if self.above.child and not self.above.alone:
                if self.parent_agreement is None or self.parent_agreement.call != call:
                    self.numbers += 1
                    self.parent_agreement = ParentAgreement(call, self.numbers, asked.mean, asked.weight)
                return False
            self._make(call, asked.mean)
            return True
        return False

    def _past(self, seat: Seat, asked: PendingAgreement) -> bool:
        """True if this member will not make that call any more."""
        if seat.leaving or seat.worker in self.gossip_directory.ended or seat.worker in self.clocks.resting:
            return True
        if self.run.mode.rule is FoldRule.MIX:  # gossip updates do not come to the server: heartbeats name the round
            return bool(seat.rows) and seat.rows[0].summary.clock > asked.clock
        return self.clocks.reached(seat) > asked.clock

    def _make(self, call: Call, value: float) -> None:
        self.made[call] = value
        while len(self.made) > KEPT_MAX:
            del self.made[next(iter(self.made))]
        seats = self.run.seats
        asks = self.open.pop(call).asks
        self._answers += [_answer(seats[worker], ask, value) for worker, ask in asks.items() if worker in seats]

    def answers(self) -> list[Send]:
        """Answers to send, each once."""
        answers, self._answers = self._answers, []
        return answers

    # The parent.

    def ask_above(self, epoch: int) -> ParentAgreement | None:
        """Return the ask to send to the parent in its epoch `epoch`. None if there is none, or if it was sent."""
        upward = self.parent_agreement
        if upward is None or upward.said == epoch:
            return None
        upward.said = epoch
        return upward

    def told_above(self, number: int, value: float) -> list[Send]:
        """Take the parent's answer to the ask of this number, and return the answers to the workers."""
        if self.parent_agreement is None or self.parent_agreement.number != number:
            return []
        call, self.parent_agreement = self.parent_agreement.call, None
        if call in self.open:
            self._make(call, value)
        return self.answers()

    # The members.

    def left(self, seat: Seat, how: str) -> None:
        for call in [call for call, asked in self.open.items() if seat.worker in asked.asks]:
            self._withdraw(call, seat.worker)

    def anew(self) -> None:
        self.open.clear()
        self.made.clear()
        self.parent_agreement = None


def _answer(seat: Seat, ask: m.AgreeRequest, value: float) -> Send:
    return Send(seat.peer, m.AgreeAnswer(seat.worker, seat.epoch, ask.number, value))
