"""How long an update may be, beside the median of recent ones on this shard. No I/O.

Rules
- `UnboundedNorms`, in every run: one that is 2^24 times as long as that, and as the weights, is left out. Nothing
  would be left of the model in float32, so no honest run gets there. The length was known when it came, and costs nothing.
- `NormClip`, with --max-update-norm: at most so many times the median.
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
from collections.abc import Callable, Collection, Container, Sequence

from narrows.protocols.effects import Log
from narrows.ps.filters.update_sample import UpdateSample

RECENT = 64  # lengths that the median is taken of
LEAST = 4  # known lengths: of fewer a median says nothing
FIRST = 0.1  # of the weights' length
FAR = 2.0**24  # of two numbers as far apart a float32 sum keeps the larger one alone
KNOWN = 3  # lengths: of two nobody can say which is usual, so the longer one may be


class UnboundedNorms:
    """Updates so long that they are a fault or a lie. `weights`: their length. `gradients`: these have no unit in common with
    the weights, so while no length is known none is too long.

    Where the newest updates of all members are too long, it is the run that has changed, and they count. A run whose updates
    are zero most of the time has its weights to go by: what is usual there says nothing.
    """

    def __init__(self, weights: Callable[[], float], gradients: bool) -> None:
        self.weights, self.gradients = weights, gradients
        self.recent: deque[float] = deque(maxlen=RECENT)  # of updates that counted
        self.live: set[int] = set()
        self.out: set[int] = set()  # members whose newest update was too long

    def leaves_out(self, updates: Sequence[tuple[int, float]]) -> list[bool]:
        """Say of each update (worker, length) whether it is too long; at a barrier they are those of one set."""
        lengths = [length for _, length in updates]
        known = sorted([*self.recent, *lengths] if len(lengths) > 1 else self.recent)
        usual = known[(len(known) - 1) // 2] if len(known) >= KNOWN else 0.0
        usual = usual or (math.inf if self.gradients else max(self.recent, default=0.0))
        far = [length > FAR * usual and length > FAR * self.weights() > 0 for length in lengths]
        self.out -= {worker for worker, _ in updates}
        self.out |= {worker for (worker, _), too_long in zip(updates, far, strict=True) if too_long}
        if self.live and self.live <= self.out:
            self.out.clear()
            self.recent.clear()
            self.recent += lengths * KNOWN  # they are what is usual from now on
            far = [False] * len(far)
        self.recent += [length for length, too_long in zip(lengths, far, strict=True) if not too_long]
        return far

    def members(self, live: Collection[int]) -> None:
        self.live = set(live)
        self.out &= self.live


class NormClip:
    """Shortens updates on shard `index` longer than `most` times the median. `weights`: the length of the weights."""

    def __init__(self, index: int, most: float, weights: Callable[[], float]) -> None:
        self.index, self.most, self.weights = index, most, weights
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.struck: Counter[int] = Counter()  # updates of each worker that were shortened
        self.logs: list[Log] = []

    def factors(self, looks: Sequence[UpdateSample]) -> list[float]:
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

    def _strike(self, look: UpdateSample, usual: float) -> None:
        self.struck[look.worker] += 1
        if self.struck[look.worker] > 1:
            return
        found = f"update {look.clock} of worker {look.worker} is {look.length / usual:.3g} times as long as usual"
        text = f"shard {self.index}: {found} and is shortened; more of its updates are only counted"
        told = {"worker": look.worker, "clock": look.clock, "shard": self.index, "text": text}
        self.logs.append(Log("long", told))

    def members(self, live: Container[int]) -> None:
        """Nothing changes: the lengths of updates that were sent still count."""
