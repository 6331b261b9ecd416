"""The trace of one server process for ps-plot --trace (ps-serve --trace): when clocks were folded, and pushes to the parent.

How it works
1. The runner hands over each message to and of the parent's shard. `PushTrace` keeps the times of sampled updates.
2. After each event the runner says how long the machine has handled it. Where there is a barrier, the event in which the
   shard passed the fold of a clock is the fold of that clock. Without one each update is folded as it comes, and its
   acknowledgement has the time.
3. `take` gives the rows of both, with the places (epochs) of the members: the traces of workers name them, too.

Rules
- The machine knows nothing of a trace: it is replayed from a journal, and by a standby.
- FOLDS_MAX rows are kept between two calls of `take`.
"""

from __future__ import annotations

from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.effects import NS
from narrows.protocols.member.push_trace import PushTrace, offset
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ClockStage

TELL_NS = NS // 2  # from one event "trace" to the next
FOLDS_MAX = 4096


class ShardTrace:
    """The rows of one server process.

    Args:
        every: N of --trace.
        index: the number of the shard.
    """

    def __init__(self, every: int, index: int) -> None:
        self.every, self.index = every, index
        self.pushes = PushTrace(every)
        self.folds: list[list[int]] = []  # clock, begin and end by this process's clock, in ns
        self.reached = -1  # clocks below this one are folded; -1: not known yet
        self.dropped = 0  # folds that had no room
        self.epochs: list[int] = []
        self.told_ns = 0

    def sent(self, message: m.Message, now_ns: int) -> None:
        """Note a message to the parent's shard."""
        self.pushes.sent(self.index, message, now_ns)

    def heard(self, message: m.Message, now_ns: int) -> None:
        """Note a message of the parent's shard."""
        self.pushes.heard(self.index, message, now_ns)

    def handled(self, server: Server, began_ns: int, now_ns: int) -> None:
        """Note that the machine has handled an event, from `began_ns` until now."""
        shard = server.shard.model_shard
        if shard is None or not shard.mode.barrier:
            return
        reached = shard.min_clock + (shard.stage is not ClockStage.FOLD and shard.stage is not ClockStage.CHECKPOINT)
        for clock in range(self.reached, reached) if self.reached >= 0 else ():
            if clock % self.every == 0:
                if len(self.folds) < FOLDS_MAX:
                    self.folds.append([clock, began_ns, now_ns])
                else:
                    self.dropped += 1
        self.reached = reached

    def take(self, server: Server, now_ns: int, last: bool = False) -> dict[str, Any]:
        """Return the values of an event "trace"; {} if there is nothing to tell, or the last one is TELL_NS old at most.

        Args:
            server: the machine.
            now_ns: the time now.
            last: the process ends, and tells all rows that are left.
        """
        if now_ns - self.told_ns < TELL_NS and not last:
            return {}
        self.told_ns = now_ns
        epochs = sorted(seat.epoch for seat in server.shard.assembler.seats.values())
        pushes, folds, self.folds = self.pushes.take(last), self.folds, []
        if not pushes and not folds and epochs == self.epochs:
            return {}
        self.epochs = epochs or self.epochs
        member = server.membership.member if server.membership is not None else None
        found = offset(member.meter) if member is not None else None
        return {
            "shard": self.index,
            "every": self.every,
            "epochs": self.epochs,
            "parent": server.above,
            "at": now_ns,
            "offsets": {} if found is None else {str(self.index): found},
            "folds": folds,
            "pushes": pushes,
            "dropped": self.dropped + self.pushes.dropped,
        }
