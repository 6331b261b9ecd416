"""One number that all workers of a run agree on, at one step of their scripts: `narrows.worker.agree(value)`.

How it works
1. A worker asks (`AgreeAsk`): the step at which its script calls, which of the calls at that step it is, its clock, its value.
2. The coordinator waits for the same call of each other member that has not gone past that step. A member has gone past it
   once the shards have an update of it after that clock, or once it has done its last step. A member that dies is not waited
   for, and a member that joins later has begun at a later clock.
3. The answer is the mean of the values, weighted by the workers that are behind each. It is made once and kept: a worker that
   asks again, or calls late, has the same answer as the others.
4. A cluster does not answer: it asks the server above with the mean of its own workers, and hands down what it hears there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.protocols import messages as m
from narrows.protocols.config.modes import Rule
from narrows.protocols.effects import Send
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.coordinator.clock_quorum import Clocks
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Decision, Run, Seat

KEPT_MAX = 64  # answers: a worker that asks again does so within a few steps
Call = tuple[int, int]  # the step of the script, and which of its calls at that step


@dataclass(slots=True)
class ParentAgreement:
    """What a cluster asks the server above. said: the epoch there in which it was said, 0: not yet."""

    call: Call
    number: int
    value: float
    weight: int
    said: int = 0


@dataclass(slots=True)
class PendingAgreement:
    """The asks of one call, by worker."""

    asks: dict[int, m.AgreeAsk] = field(default_factory=dict)

    @property
    def clock(self) -> int:
        return max((ask.clock for ask in self.asks.values()), default=0)

    @property
    def weight(self) -> int:
        return sum(ask.weight for ask in self.asks.values())

    @property
    def mean(self) -> float:
        """In the order of the workers: a replay of the coordinator has the same bits."""
        return sum(self.asks[worker].value * self.asks[worker].weight for worker in sorted(self.asks)) / self.weight


class Agreements(Decision):
    def __init__(self, run: Run, rounds: Clocks, above: ParentPlace, meeting: GossipDirectory) -> None:
        self.run, self.rounds, self.above, self.meeting = run, rounds, above, meeting
        self.open: dict[Call, PendingAgreement] = {}
        self.made: dict[Call, float] = {}  # the newest KEPT_MAX
        self.upward: ParentAgreement | None = None  # is asked of the server above
        self.numbers = 0  # of those asks
        self._answers: list[Send] = []

    def hear(self, seat: Seat, ask: m.AgreeAsk) -> list[Send]:
        """Return the answer, where it is made already. Raises RemoteProtocolError for an ask that no worker makes."""
        if min(ask.number, ask.weight) < 1 or ask.weight > m.WORKERS_MAX or min(ask.at, ask.call, ask.clock) < 0:
            raise RemoteProtocolError(f"worker {seat.worker} asks for call {ask.call} at step {ask.at}: there is none")
        if not seat.epoch:
            return []
        call = (ask.at, ask.call)
        if call in self.made:
            return [_answer(seat, ask, self.made[call])]
        for other in [other for other, asked in self.open.items() if other != call and seat.worker in asked.asks]:
            self._withdraw(other, seat.worker)  # it had to join again, and calls at another step
        self.open.setdefault(call, PendingAgreement()).asks[seat.worker] = ask
        return []

    def _withdraw(self, call: Call, worker: int) -> None:
        self.open[call].asks.pop(worker, None)
        if not self.open[call].asks:
            del self.open[call]

    def decide(self, now_ns: int) -> bool:
        """Answer the first call that nobody is waited for any more."""
        for call in sorted(self.open):
            asked = self.open[call]
            # With a quorum steps of workers differ by the rounds that closed without one: a later call is past this one.
            later = {worker for other, each in self.open.items() if other > call for worker in each.asks}
            missing = [s for s in self.run.declared if s.worker not in asked.asks and s.worker not in later]
            if any(not self._past(seat, asked) for seat in missing):
                continue
            if self.above.child and not self.above.alone:
                if self.upward is None or self.upward.call != call:
                    self.numbers += 1
                    self.upward = ParentAgreement(call, self.numbers, asked.mean, asked.weight)
                return False
            self._make(call, asked.mean)
            return True
        return False

    def _past(self, seat: Seat, asked: PendingAgreement) -> bool:
        """This member does not make that call any more."""
        if seat.leaving or seat.worker in self.meeting.ended or seat.worker in self.rounds.resting:
            return True
        if self.run.mode.rule is Rule.MIX:  # its updates do not come here: it tells its round with its heartbeat
            return bool(seat.rows) and seat.rows[0].summary.clock > asked.clock
        return self.rounds.reached(seat) > asked.clock

    def _make(self, call: Call, value: float) -> None:
        self.made[call] = value
        while len(self.made) > KEPT_MAX:
            del self.made[next(iter(self.made))]
        seats = self.run.seats
        asks = self.open.pop(call).asks
        self._answers += [_answer(seats[worker], ask, value) for worker, ask in asks.items() if worker in seats]

    def answers(self) -> list[Send]:
        """To be sent, once."""
        answers, self._answers = self._answers, []
        return answers

    # The run above.

    def told_above(self, number: int, value: float) -> list[Send]:
        """The server above has answered."""
        if self.upward is None or self.upward.number != number:
            return []
        call, self.upward = self.upward.call, None
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
        self.upward = None


def _answer(seat: Seat, ask: m.AgreeAsk, value: float) -> Send:
    return Send(seat.peer, m.Agreed(seat.worker, seat.epoch, ask.number, value))
