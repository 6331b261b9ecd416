"""Bounds the length of updates, measured against the median of recent updates on this shard. No I/O.

Rules
- `UnboundedNorms`, in every run: an update that is 2^24 times as long as the usual one, and as the weights, is left
  out. In float32 nothing would be left of the model, so no honest run gets there. The length is known from the check of
  the push, and costs nothing.
- `NormClip`, with --max-update-norm: an update may be at most that many times as long as the median. A longer one is
  shortened to the median: a worker that sends a million times its update counts like the others. The first such update
  of each worker is logged.
- The length of a shortened update enters the median as the limit. So if all updates of a run grow at once, the run goes
  on unshortened after half of RECENT.
- At a barrier the updates of a set are judged together. Without a barrier the first few updates are compared with a
  tenth of the length of the weights, since no other length is known yet.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Sequence

from narrows.protocols.effects import Log
from narrows.ps.filters.update_sample import UpdateSample

RECENT = 64  # lengths that the median is taken of
LEAST = 4  # known lengths that a median needs
FIRST = 0.1  # share of the weights' length that stands for the median while too few lengths are known
FAR = 2.0**24  # of two numbers that differ by this factor, a float32 sum keeps the larger one alone
KNOWN = 3  # known lengths needed: of two, either may be the usual one


class UnboundedNorms:
    """Finds updates that are so long that they are a fault or a lie.

    If the newest updates of all members are too long, the run itself has changed, and they count. In a run whose
    updates are zero most of the time, the usual length says nothing, and the length of the weights is the measure.
    """

    def __init__(self, weights: Callable[[], float], gradients: bool) -> None:
        """A filter that knows no length yet.

        Args:
            weights: Gives the L2 norm of the shard's weights.
            gradients: True if workers push gradients. These have no unit in common with the weights, so while no length
                is known, none is too long.
        """
        self.weights, self.gradients = weights, gradients
        self.recent: deque[float] = deque(maxlen=RECENT)  # lengths of updates that counted
        self.live: set[int] = set()  # the members now
        self.out: set[int] = set()  # members whose newest update was too long

    def leaves_out(self, updates: Sequence[tuple[int, float]]) -> list[bool]:
        """Return for each (worker, length) whether the update is too long. At a barrier the updates are one set."""
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
            self.recent += lengths * KNOWN  # these lengths are the usual ones from now on
            far = [False] * len(far)
        self.recent += [length for length, too_long in zip(lengths, far, strict=True) if not too_long]
        return far

    def members(self, live: Collection[int]) -> None:
        """Take over the members that are live now."""
        self.live = set(live)
        self.out &= self.live


class NormClip:
    """Shortens updates that are longer than a multiple of the median."""

    def __init__(self, index: int, most: float, weights: Callable[[], float]) -> None:
        """A filter that knows no length yet.

        Args:
            index: The number of the shard.
            most: How many times the median an update may be long.
            weights: Gives the L2 norm of the shard's weights.
        """
        self.index, self.most, self.weights = index, most, weights
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.struck: Counter[int] = Counter()  # updates of each worker that were shortened
        self.logs: list[Log] = []

    def factors(self, sampled: Sequence[UpdateSample]) -> list[float]:
        """Return the factor of each update: 1 if it is short enough."""
        if not sampled:
            return []
        known = [*self.recent, *(update.length for update in sampled)] if len(sampled) > 1 else [*self.recent]
        usual = statistics.median(known) if len(known) >= min(LEAST, 2 * len(sampled)) else FIRST * self.weights()
        limit = self.most * usual or math.inf
        for update in sampled:
            self.recent.append(min(update.length, limit))
            if update.length > limit:
                self._strike(update, usual)
        return [usual / update.length if update.length > limit else 1.0 for update in sampled]

    def _strike(self, update: UpdateSample, usual: float) -> None:
        """Count a shortened update, and log the first of each worker."""
        self.struck[update.worker] += 1
        if self.struck[update.worker] > 1:
            return
        found = f"update {update.clock} of worker {update.worker} is {update.length / usual:.3g} times as long as usual"
        text = f"shard {self.index}: {found} and is shortened; more of its updates are only counted"
        values = {"worker": update.worker, "clock": update.clock, "shard": self.index, "text": text}
        self.logs.append(Log("long", values))

    def take(self) -> list[Log]:
        """Return the log lines since the last call."""
        found, self.logs = self.logs, []
        return found

    def members(self, live: Container[int]) -> None:
        """Change nothing: the lengths of a departed worker's updates still count."""
