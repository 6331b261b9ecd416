"""By how much the mean of the workers' updates is scaled, so that a step of the model is as long as a step of one worker.

AdamW, and whatever else divides a gradient by its own size, makes updates of one length however noisy the gradient is. Those
of W workers are then nearly orthogonal where noise dominates, and their mean is up to sqrt(W) too short.

    gain = (sum_i w_i |U_i|^2 / |sum_i w_i U_i|^2) ^ ((1 - degree) / 2)        U_i: of worker i, the updates of a window summed

Rules
- Updates are looked at as they are folded, at a sample of the keys, a window of clocks at a time: within one, sparse updates
  have come by most keys. A window changes the gain of what is folded after it.
- `degree` says how an update grows with the gradient: 1 of SGD, whose gain is 1, and 0 of AdamW
  (worker/model/optimizer_scaling.py).
- The gain is a function of the folds in their order, so that it can be measured over again.

docs/design/gain.md has what was tried, and the figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from narrows.compression.sampling import sample_of
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import GAIN_MAX, Mode, Rule
from narrows.protocols.config.settings import Settings
from narrows.ps.store.changes import FloatArray

WINDOW = 8  # clocks: of 8, 16 and 32 the sums of sparse updates agree best with the updates themselves
SMOOTHING = 0.5  # of the logarithm, for each window: what a gain is worth changes over hundreds of clocks
LOOK_AHEAD = 0.5  # clocks
GONE = -1  # in the place of a worker that has left, and is not measured any more


@dataclass(slots=True)
class AgreementWindow:
    """Sums of one worker's updates. `whole`: that of the newest window that is over since the gain was measured."""

    clocks: int
    total: FloatArray
    whole: FloatArray | None = None
    share: float = 0.0


class MergeFactors(NamedTuple):
    """The fields of a state that say how updates are merged; as in `State`."""

    gain: float = 1.0
    ahead: float = 1.0
    agreement: float = 0.0


PLAIN = MergeFactors()


@dataclass(slots=True)
class Gain:
    """The gain of one shard. `fixed`: its value, 0: measured. `look`: how much more an own update in flight stands for.

    agreement: the length of the mean beside that of the updates (root mean square), 0: unknown yet.
    """

    size: int
    degree: float = 1.0
    fixed: float = 0.0
    look: float = 0.0
    factor: float = 1.0
    agreement: float = 0.0
    at: np.ndarray = field(init=False)
    windows: dict[int, AgreementWindow] = field(default_factory=dict)  # by worker

    def __post_init__(self) -> None:
        self.at = sample_of(self.size)
        self.factor = self.fixed or 1.0

    @staticmethod
    def of(settings: Settings, mode: Mode, plan: ModelSpec, size: int) -> Gain:
        """Make the gain of a shard of `size` keys from validated settings."""
        clocks = settings.look_ahead if settings.look_ahead >= 0 else LOOK_AHEAD * (1 - plan.degree)
        late = mode.rule is Rule.ADD and not mode.barrier and mode.bound
        return Gain(size, plan.degree, max(settings.update_gain, 0.0), clocks / late if late else 0.0)

    def merging(self, members: int) -> MergeFactors:
        """Say how updates are merged in a state that is published now. A single member has all its updates in its
        replica: there is nothing ahead of it."""
        ahead = self.factor * (1 + self.look * (members > 1))
        return MergeFactors(self.factor, min(ahead, GAIN_MAX), self.agreement)

    def saw(self, worker: int, share: float, weight: float, before: FloatArray, after: FloatArray) -> None:
        """An update was folded at this weight for `share` of a mean. before, after: the model at `at`, float32[len(at)]."""
        if worker == GONE:
            return
        own = self.windows.setdefault(worker, AgreementWindow(0, np.zeros(self.at.size, np.float32)))
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite measures nothing
            own.total += (after - before) / np.float32(weight)
        own.clocks += 1
        own.share = share
        if own.clocks < WINDOW:
            return
        own.whole, own.clocks, own.total = own.total, 0, np.zeros(self.at.size, np.float32)
        if len(self.windows) > 1 and all(each.whole is not None for each in self.windows.values()):
            self._measure()

    def forget(self, worker: int) -> None:
        """Its update was left out: the others do not wait for its window, and it begins a new one when it counts again."""
        self.windows.pop(worker, None)

    def state(self) -> FloatArray:
        """Return what a checkpoint keeps of the gain, float32[1]."""
        return np.array([self.agreement], np.float32)

    def load(self, state: FloatArray) -> None:
        """The gain follows, whatever it was: a run may go on with another --update-gain."""
        self.agreement = float(state[0])
        self._scale()

    def members(self, live: Iterable[int]) -> None:
        """Forget who left."""
        for worker in self.windows.keys() - set(live):
            self.forget(worker)

    def _measure(self) -> None:
        shares = np.array([each.share for each in self.windows.values()])
        shares /= shares.sum()
        sums = np.stack([each.whole for each in self.windows.values() if each.whole is not None]).astype(np.float64)
        for each in self.windows.values():
            each.whole = None
        with np.errstate(over="ignore", invalid="ignore"):
            mean = shares @ sums
            lengths, length = float(shares @ np.square(sums).sum(1)), float(mean @ mean)
        if not (length > 0 and lengths < float("inf")):
            return  # nothing moved, or it is not finite
        least = float(np.square(shares).sum())  # 1/W: of updates that have nothing in common
        measured = min(max(length / lengths, least), 1.0) ** 0.5  # of updates that are one it may be rounded up
        before = self.agreement or measured
        self.agreement = before**SMOOTHING * measured ** (1 - SMOOTHING)
        self._scale()

    def _scale(self) -> None:
        if not self.fixed and self.agreement:
            self.factor = self.agreement ** -(1 - self.degree)
