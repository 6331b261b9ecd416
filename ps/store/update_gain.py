"""The gain: the factor on the mean of the workers' updates that makes a step of the model as long as one worker's step.

AdamW, like every optimizer that divides a gradient by its own size, makes updates of one length, however noisy the
gradient is. If noise dominates, the updates of W workers are nearly orthogonal, and their mean is up to sqrt(W) too
short.

    gain = (sum_i w_i |U_i|^2 / |sum_i w_i U_i|^2) ^ ((1 - degree) / 2)     U_i: worker i's updates of a window, summed

Rules
- The gain is measured as updates are folded, at a sample of the keys, one window of clocks at a time: within a window,
  sparse updates reach most keys. A window changes the gain of the updates that are folded after it.
- `degree` says how an update grows with the gradient: 1 for SGD, whose gain is 1, and 0 for AdamW
  (worker/model/optimizer_scaling.py).
- The gain is a function of the folds in their order, so a replay measures the same.

docs/design/gain.md has the reasons, docs/archive/design-figures.md what else was tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from narrows.compression.sampling import sample_of
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import GAIN_MAX, FoldRule, Mode
from narrows.protocols.config.settings import Settings
from narrows.ps.store.changes import FloatArray

WINDOW = 8  # clocks: among 8, 16 and 32, sums of sparse updates over 8 agree best with the updates themselves
SMOOTHING = 0.5  # of the logarithm, for each window; the best gain changes over hundreds of clocks
LOOK_AHEAD = 0.5  # clocks; times (1 - degree) if the user names none
GONE = -1  # stands for a worker that has left and is not measured any more


@dataclass(slots=True)
class AgreementWindow:
    """The sums of one worker's updates at the sample.

    Attributes:
        clocks: Updates in the present window so far.
        total: Their sum.
        whole: The sum of the newest complete window since the gain was last measured; None if there is none.
        share: The share of its newest update in the mean.
    """

    clocks: int
    total: FloatArray
    whole: FloatArray | None = None
    share: float = 0.0


class MergeFactors(NamedTuple):
    """The fields of a state that say how a child merges its own updates; each has its meaning in `State`."""

    gain: float = 1.0
    ahead: float = 1.0
    agreement: float = 0.0


PLAIN = MergeFactors()


@dataclass(slots=True)
class Gain:
    """The gain of one shard.

    Attributes:
        size: The number of keys of the shard.
        degree: How an update grows with the gradient, 0 to 1.
        fixed: The value of --update-gain; 0 if the gain is measured.
        look: What is added to the factor on a child's own updates in flight, as a share of the gain.
        factor: The gain now.
        agreement: The length of the mean update over that of one update (root mean square); 0 while unknown.
        at: The sample: indices of keys of the shard.
        windows: The sums of each worker, by worker.
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
        """Make the gain of a shard of `size` keys from checked settings."""
        clocks = settings.look_ahead if settings.look_ahead >= 0 else LOOK_AHEAD * (1 - plan.degree)
        late = mode.rule is FoldRule.ADD and not mode.barrier and mode.bound
        return Gain(size, plan.degree, max(settings.update_gain, 0.0), clocks / late if late else 0.0)

    def merging(self, members: int) -> MergeFactors:
        """Return how a child merges its own updates into a state that is published now.

        A single member has all its updates in its replica, so nothing is ahead of it.
        """
        ahead = self.factor * (1 + self.look * (members > 1))
        return MergeFactors(self.factor, min(ahead, GAIN_MAX), self.agreement)

    def saw(self, worker: int, share: float, weight: float, before: FloatArray, after: FloatArray) -> None:
        """Take note of one folded update.

        Args:
            worker: The worker, or GONE.
            share: The share of the update in its mean.
            weight: The weight that it was folded with.
            before: The model at `at` before the fold, float32[len(at)].
            after: The model at `at` after it.
        """
        if worker == GONE:
            return
        own = self.windows.setdefault(worker, AgreementWindow(0, np.zeros(self.at.size, np.float32)))
        with np.errstate(over="ignore", invalid="ignore"):  # a window that is not finite gives no measurement
            own.total += (after - before) / np.float32(weight)
        own.clocks += 1
        own.share = share
        if own.clocks < WINDOW:
            return
        own.whole, own.clocks, own.total = own.total, 0, np.zeros(self.at.size, np.float32)
        if len(self.windows) > 1 and all(each.whole is not None for each in self.windows.values()):
            self._measure()

    def forget(self, worker: int) -> None:
        """Drop the window of a worker whose update was left out, so that the others do not wait for it.

        The worker begins a new window with its next update that counts.
        """
        self.windows.pop(worker, None)

    def state(self) -> FloatArray:
        """Return what a checkpoint keeps of the gain, float32[1]."""
        return np.array([self.agreement], np.float32)

    def load(self, state: FloatArray) -> None:
        """Take over the agreement of a checkpoint. The gain follows from it: the run may have another --update-gain."""
        self.agreement = float(state[0])
        self._scale()

    def members(self, live: Iterable[int]) -> None:
        """Forget workers that have left."""
        for worker in self.windows.keys() - set(live):
            self.forget(worker)

    def _measure(self) -> None:
        """Measure the agreement from one complete window of each worker."""
        shares = np.array([each.share for each in self.windows.values()])
        shares /= shares.sum()
        sums = np.stack([each.whole for each in self.windows.values() if each.whole is not None]).astype(np.float64)
        for each in self.windows.values():
            each.whole = None
        with np.errstate(over="ignore", invalid="ignore"):
            mean = shares @ sums
            lengths, length = float(shares @ np.square(sums).sum(1)), float(mean @ mean)
        if not (length > 0 and lengths < float("inf")):
            return  # no update moved the model, or a sum is not finite
        # the square of the agreement of orthogonal updates: 1/W if all shares are equal
        least = float(np.square(shares).sum())
        measured = min(max(length / lengths, least), 1.0) ** 0.5  # equal updates may round to more than 1
        before = self.agreement or measured
        self.agreement = before**SMOOTHING * measured ** (1 - SMOOTHING)
        self._scale()

    def _scale(self) -> None:
        """Compute the factor from the agreement, unless it is fixed."""
        if not self.fixed and self.agreement:
            self.factor = self.agreement ** -(1 - self.degree)
