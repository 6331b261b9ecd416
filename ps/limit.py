"""How long an update may be: at most so many times the median of recent ones on this shard (--max-update-norm). No I/O.

Rules
- A longer one is shortened to that length; one that is not finite counts for nothing. Both are named, the first of each worker.
- At a barrier the updates of the set are looked at together. Where updates are folded as they come, the first few are held
  against a tenth of the weights' own length, for nothing else is known yet.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Container
from typing import Any

from narrows.protocols.effects import Log
from narrows.ps.screen import Pushed

RECENT = 64  # lengths that the median is taken of
LEAST = 4  # known lengths: of fewer a median says nothing
FIRST = 0.1  # of the weights' length


class Limit:
    """Of shard `index`. `most`: times the median. `length`: the L2 norm of an update. `weights`: that of the weights."""

    def __init__(self, index: int, most: float, length: Callable[[Any], float], weights: Callable[[], float]) -> None:
        self.index, self.most, self.length, self.weights = index, most, length, weights
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.struck: Counter[int] = Counter()  # updates of each worker that were shortened or left out
        self.logs: list[Log] = []
        self.opposing: set[int] = set()  # each update stands for itself

    def factors(self, updates: Pushed) -> list[float]:
        """By what each is scaled: 1 where it is short enough, 0 where it is not finite."""
        lengths = [self.length(update) for _, _, update in updates]
        finite = [length for length in lengths if math.isfinite(length)]
        known = [*self.recent, *finite] if len(updates) > 1 else [*self.recent]
        usual = statistics.median(known) if len(known) >= min(LEAST, 2 * len(updates)) else FIRST * self.weights()
        found = []
        for (worker, clock, _), length in zip(updates, lengths, strict=True):
            limit = self.most * usual
            factor = 0.0 if not math.isfinite(length) else 1.0 if length <= limit or not limit else limit / length
            found.append(factor)
            if factor:
                self.recent.append(length * factor)
            if factor != 1:
                self._strike(worker, clock, length / usual if usual else math.inf)
        return found

    def _strike(self, worker: int, clock: int, times: float) -> None:
        self.struck[worker] += 1
        if self.struck[worker] > 1:
            return
        found = (
            f"{times:.3g} times as long as usual and is shortened"
            if math.isfinite(times)
            else "not finite and is left out"
        )
        text = f"shard {self.index}: update {clock} of worker {worker} is {found}; more of its updates are only counted"
        self.logs.append(Log("long", {"worker": worker, "clock": clock, "shard": self.index, "text": text}))

    def members(self, live: Container[int]) -> None:
        """What was sent stays what was sent."""
