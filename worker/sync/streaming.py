"""The step of a worker that goes on computing while its update is exchanged (Streaming DiLoCo, 2501.18512, alg. 2).

Some steps later the worker merges the global values of the fragment into its local ones. The main thread owns it.

    inner steps    ... (c + 1) h ............... (c + 1) h + merge_delay ...
    worker         push update c, go on          wait for the state of clock c, merge its fragment
    shards                       fold, publish

Rules
- Update c is of one fragment. The worker pushes it after inner step (c + 1) h of the run. `merge_delay` inner steps
  later the worker waits for the state that has clock c, and merges the global values G (the replica of the fragment)
  into its local values L: L = a L + (1 - a) G. The next update of the fragment is L - G.
- With --local-seconds a clock ends by time (`RoundClock`), so its steps differ between workers. A worker with fewer than
  `merge_delay` steps in a clock merges before its next push.
- If keys move, other fragments take turns, and their keys are not those of the fragments before. So an update keeps the
  keys that it was of (`Unmerged`), and the updates of before are all merged before the next push.
- At the end of the run each fragment is pushed once more, with its residual. The number of these turns follows
  from the settings and the clock alone, because all workers must take part in the same turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from narrows.protocols import effects as e
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.effects import MemberEffect
from narrows.worker.model.arrays import SharedWeights, WorkerArrays
from narrows.worker.sync.sync_step import StepEngine
from narrows.worker.sync.updates import UpdateStep


@dataclass(frozen=True, slots=True)
class Unmerged:
    """An update that was pushed, and whose fragment is not merged yet. `keys`: of the fragment, on each shard of then."""

    clock: int
    keys: Sequence[Keys]


class StreamingStep(UpdateStep):
    """See `SyncStep`."""

    def __init__(self, engine: StepEngine, arrays: WorkerArrays, before: UpdateStep | None = None) -> None:
        super().__init__(engine, arrays, before)
        self.unmerged = deque[Unmerged]()  # by clock, rising
        self.moved_at = -1  # the clock at which keys have moved last, in this epoch

    def begin(self, event: e.MemberStarted) -> None:
        self.unmerged, self.moved_at = deque(), -1
        super().begin(event)

    def handle(self, event: MemberEffect) -> None:
        super().handle(event)
        if isinstance(event, e.MemberResharded):
            self.moved_at = event.clock

    def step(self, closure: Callable[[], Any] | None) -> Any:
        if self.unmerged:
            self.shards.need(self.unmerged[-1].clock + 1)  # the state may then arrive during this step
        pushes = self.awaits_turn()
        if self.resume() and self.drops(closure):
            return None
        loss = self.inner_step(closure)
        if self._merge_due(pushes) and pushes:
            self.push()
            self._pushed()
        self.seen_missed()
        return loss

    def _pushed(self) -> None:
        clock = self.shards.clock - 1
        self.unmerged.append(Unmerged(clock, self.shards.turn(clock)))
        self._merge_due(False)

    def idle(self) -> None:
        self.shards.wait_window()
        if self.resume() or not self._merge_due(True):
            return
        self.push() if self.local_step else self.skip()
        self._pushed()
        self.seen_missed()

    def _merge_due(self, pushes: bool) -> bool:
        """Merge the fragments of all clocks whose delay is over. Returns False if this worker had to rejoin.

        Args:
            pushes: the present clock ends. One that ends by time has then merged all clocks before it, and the first
                one after a move of keys has merged all clocks before the move.
        """
        steps, delay = self.mode.local_steps, self.mode.merge_delay
        while self.unmerged:
            clock = self.unmerged[0].clock
            since = (self.shards.clock - clock - 1) * steps + self.local_step
            if since < delay and not (pushes and (self.mode.seconds or clock < self.moved_at)):
                return True
            if not self._merge():
                return False
        return True

    def _merge(self) -> bool:
        """Wait until the oldest clock is folded, and merge its fragment. Returns False if this worker had to rejoin."""
        with self.round.waiting():
            self.shards.wait_settled(self.unmerged[0].clock + 1)
        if self.resume():
            return False
        merged = self.unmerged.popleft()
        with self.engine.trace.compose:
            for exchange in self.shards.exchanges:
                begin, end = exchange.replica.begin, exchange.replica.end
                for low, high in [(max(begin, low), min(end, high)) for low, high in merged.keys]:
                    if low < high:
                        self.arrays.merge(exchange, (low, high), self.mode.merge_alpha)
        self.moved &= self.mode.streams
        return True

    def flush(self, last: bool) -> SharedWeights:
        self.resume()
        while self.unmerged and self._merge():
            pass
        # The fragment that was pushed last has nothing left to send, unless a residual or a merge has left some.
        kept = not self.shards.tuning.up_lossless or self.mode.merge_alpha > 0 if self.mode.streams else self.owes
        turns = self.mode.fragments
        kept |= self.moved_at == self.shards.clock  # no fragment of this cut was pushed yet
        for _ in range(turns if self.local_step or kept else turns - 1):
            self.shards.wait_window()
            self.push(last=True)
            self.shards.wait_settled(self.shards.clock)
            self.resume()  # after a rejoin updates in flight are given up, the residuals are kept
        return self.end(last)
