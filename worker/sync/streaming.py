"""A worker that goes on computing while its update is exchanged, and merges what comes of it (Streaming DiLoCo, 2501.18512,
alg. 2). The main thread owns it.

Rules
- Update c is of one fragment, and is pushed after inner step (c + 1) h of the run. `merge_delay` inner steps later the worker
  waits for the state with that clock in it, and takes global values G = the replica of that fragment into its local ones L:
  L = a L + (1 - a) G. The next update of the fragment is L - G.
- At the end each fragment has its turn once more, dense. How many turns that are follows from the settings and the clock: each
  worker must take part in the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from narrows.protocols import effects as e
from narrows.worker.model.flat import Array
from narrows.worker.sync.updates import UpdateStep


class StreamingStep(UpdateStep):
    """See `SyncStep`."""

    unmerged: deque[int]  # own clocks whose state is not in the parameters yet

    def begin(self, event: e.Started) -> None:
        self.unmerged = deque()
        super().begin(event)

    def step(self, closure: Callable[[], Any] | None) -> Any:
        if self.unmerged:
            self.shards.need(self.unmerged[-1] + 1)  # so that it comes under this step too
        pushes = self.local_step + 1 >= self.mode.local_steps
        self.shards.wait_window() if pushes else self.engine.waiting.agree()
        if self.resume() and self.drops(closure):
            return None
        loss = self.inner_step(closure)
        self.shards.wait_s = 0.0
        if self._merge_due() and pushes:
            self.push()
            self._pushed()
        self.seen_missed()
        return loss

    def _pushed(self) -> None:
        self.unmerged.append(self.shards.clock - 1)
        self._merge_due()

    def idle(self) -> None:
        self.shards.wait_window()
        if self.resume() or not self._merge_due():
            return
        self.push() if self.local_step else self.shards.skip()
        self._pushed()
        self.seen_missed()

    def _merge_due(self) -> bool:
        """Merge the clocks whose delay is over. False where this worker had to join again."""
        steps, delay = self.mode.local_steps, self.mode.merge_delay
        while self.unmerged and self.shards.clock * steps + self.local_step >= (self.unmerged[0] + 1) * steps + delay:
            if not self._merge():
                return False
        return True

    def _merge(self) -> bool:
        """Merge the fragment of the oldest clock, once its round is folded. False where this worker had to join again."""
        self.shards.wait_settled(self.unmerged[0] + 1)
        if self.resume():
            return False
        clock = self.unmerged.popleft()
        for exchange in self.shards.exchanges:
            self.arrays.merge(exchange, exchange.turn(clock), self.mode.merge_alpha)
        return True

    def flush(self, last: bool) -> Array:
        self.resume()
        while self.unmerged and self._merge():
            pass
        # Nothing is left of the fragment pushed last, unless some of it was kept back or mixed.
        kept = not self.shards.tuning.up_lossless or self.mode.merge_alpha > 0 if self.mode.streams else self.owes
        turns = self.mode.fragments
        for _ in range(turns if self.local_step or kept else turns - 1):
            self.shards.wait_window()
            self.push(dense=True)
            self.shards.wait_settled(self.shards.clock)
            self.resume()  # what was in flight is given up, as ever; the residuals are not
        return self.end(last)
