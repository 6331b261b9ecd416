"""The clock of one worker's rounds: says at each local step whether the round ends with it. The main thread owns it.

How it works (`--local-seconds T`, two workers, one 3 times slower)

    fast      push  state  |--|--|--|--|--|--|--|--|--|  push      9 steps, weight 9
    slow      push  state  |--------|--------|--------|  push      3 steps, weight 3
                           <----------- T ------------>

1. A round begins with the push that ended the one before (`begin`), and ends with the step whose end is nearest to T
   seconds later: with this step, if another one would end further from T.
2. A wait for a state counts for as long as the exchange over this worker's own link takes. The rest of the wait is for the
   other workers, and does not count. So pushes of all workers arrive at the servers at once: a worker with a slow link
   pushes earlier. And if one worker was late, the others shift with it.
3. A round has at least one step, and at most `Mode.local_steps`.
4. The first round at a place in the run has one step: the other workers are in the midst of theirs, and should not wait.
   A first step is also far longer than others, because it compiles.
5. In a group the first rank decides for all ranks, so all make the same number of steps.

Without the flag a round has `Mode.local_steps` steps, and no time is read.

The timer is that of BAGUA's asynchronous model average (2107.01499), which has equal weights and no barrier. Here a barrier
folds the round of all workers, and each update weighs by its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from narrows.protocols.config.modes import Mode


class RoundClock:
    """The rounds of one worker.

    Args:
        mode: of the run.
        of_first: in a group, returns what the first rank has given it. All ranks call it together.
    """

    def __init__(self, mode: Mode, of_first: Callable[[bool], bool] = bool) -> None:
        self.mode, self.of_first = mode, of_first
        self.began_s = 0.0  # when the round began; later by the waits for other workers
        self.exchange_s = 0.0  # of the exchange over the own link that this round waits for
        self.waited_s = 0.0  # for states in this round
        self.first = True  # the round is the first at its place in the run
        self.steps = 0  # local steps of the newest round that has ended

    def anew(self) -> None:
        """Begin the first round at a place in the run."""
        self.first = True

    def begin(self, steps: int, exchange_s: float) -> None:
        """Begin a round: the update of the one before is about to be pushed.

        Args:
            steps: local steps of the round that ends.
            exchange_s: seconds that the own link takes for an update and a state; 0: not measured.
        """
        if self.mode.seconds:
            self.first, self.steps = False, steps
            self.began_s, self.exchange_s, self.waited_s = monotonic(), exchange_s, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for states or for room to push."""
        if not self.mode.seconds:
            yield
            return
        since_s = monotonic()
        yield
        before_s = max(0.0, self.waited_s - self.exchange_s)
        self.waited_s += monotonic() - since_s
        self.began_s += max(0.0, self.waited_s - self.exchange_s) - before_s

    def ends(self, before: int) -> bool:
        """Return whether the round ends with the present step, whose gradient is computed.

        Args:
            before: local steps of the round before this one.
        """
        here = before + 1
        if not self.mode.seconds or here >= self.mode.local_steps:
            return here >= self.mode.local_steps
        took_s = monotonic() - self.began_s
        step_s = (took_s - min(self.waited_s, self.exchange_s)) / here
        return self.of_first(self.first or took_s + step_s / 2 >= self.mode.seconds)
