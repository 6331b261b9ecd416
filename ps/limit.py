"""How long an update may be: at most so many times the median of recent ones on this shard (--max-update-norm). No I/O.

Rules
- A longer one is shortened to the median: who sends a million times its update counts as the others do. It is named, the first
  of each worker.
- It is known as at most the limit, so a run whose updates all grow at once goes on after half of RECENT.
- At a barrier the updates of the set are looked at together. Where updates are folded as they come, the first few are held
  against a tenth of the weights' own length, for nothing else is known yet.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence

from narrows.protocols.effects import Log
from narrows.ps.looks import Look

RECENT = 64  # lengths that the median is taken of
LEAST = 4  # known lengths: of fewer a median says nothing
FIRST = 0.1  # of the weights' length


class Limit:
    """Of shard `index`. `most`: times the median. `weights`: the length of the weights."""

    def __init__(self, index: int, most: float, weights: Callable[[], float]) -> None:
        self.index, self.most, self.weights = index, most, weights
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.struck: Counter[int] = Counter()  # updates of each worker that were shortened
        self.logs: list[Log] = []

    def factors(self, looks: Sequence[Look]) -> list[float]:
        """By what each is scaled: 1 where it is short enough."""
        if not looks:
            return []
        known = [*self.recent, *(look.length for look in looks)] if len(looks) > 1 else [*self.recent]
        usual = statistics.median(known) if len(known) >= min(LEAST, 2 * len(looks)) else FIRST * self.weights()
        limit = self.most * usual or math.inf
        for look in looks:
            self.recent.append(min(look.length, limit))
            if look.length > limit:
                self._strike(look, usual)
        return [usual / look.length if look.length > limit else 1.0 for look in looks]

    def _strike(self, look: Look, usual: float) -> None:
        self.struck[look.worker] += 1
        if self.struck[look.worker] > 1:
            return
        found = f"update {look.clock} of worker {look.worker} is {look.length / usual:.3g} times as long as usual"
        text = f"shard {self.index}: {found} and is shortened; more of its updates are only counted"
        told = {"worker": look.worker, "clock": look.clock, "shard": self.index, "text": text}
        self.logs.append(Log("long", told))

    def members(self, live: Container[int]) -> None:
        """What was sent stays what was sent."""
