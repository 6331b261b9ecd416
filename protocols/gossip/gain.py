"""The gain of a gossip worker: it scales own updates, so that a step of the mean model is as long as one worker's.

ps/store/update_gain.py gives the reason. In gossip no worker sees all updates. Two workers that mix send each other the
sum of their own updates over a window of rounds, at a sample of the keys.

    common = 2 (U_i . U_j) / (|U_i|^2 + |U_j|^2)                U_i, U_j: the sums of this worker and of its partner
    agreement = sqrt(common + (1 - common) / W)                 W workers
    gain = agreement ^ -(1 - degree)

Rules
- If W updates share `common` of their squared length, and nothing else, the squared length of their mean is agreement^2
  times that of one update.
- A worker sends each partner a window once. The partner compares it with its own newest window. So workers with
  different counts of rounds are measured too.
- Each worker measures alone and smooths its figures. So the gains of two workers are near each other and not equal.
  Mixing keeps the mean of the models for any gains.
- All values follow from updates and offers in their order: two runs are the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.protocols.errors import RemoteProtocolError

FloatArray = npt.NDArray[np.float32]

WINDOW = 7  # rounds: in this many, most topologies come to each partner
SMOOTHING = 0.75  # weight of the earlier `common` when a window is received: a sample of 512 keys alone errs by 0.04


class GossipGain:
    """The gain of one worker.

    Args:
        at: the keys of the sample, int64[n].
        degree: of the optimizer's scaling; see worker/model/optimizer_scaling.py.
        fixed: the gain, as the user gave it; 0: measured.
    """

    def __init__(self, at: npt.NDArray[np.int64], degree: float, fixed: float = 0.0) -> None:
        self.at, self.degree, self.fixed = at, degree, fixed
        self.common: float | None = None  # 0 to 1, but for noise; None: not measured yet
        self.members = 1  # W, at the newest update
        self.rounds = 0  # of the open window
        self.total: FloatArray = np.zeros(at.size, np.float32)  # sum of own updates in the open window, at the sample
        self.whole: FloatArray | None = None  # the same of the newest closed window; None: none is closed
        self.sent_whole: set[int] = set()  # peers that were sent `whole`

    def fix(self, fixed: float) -> None:
        """Take the gain that the user gave the next run; 0: measured. What was measured stays."""
        self.fixed = fixed

    @property
    def agreement(self) -> float:
        """The length of the mean of all updates, over the length of one update; 0: not measured yet."""
        if self.common is None:
            return 0.0
        common = min(max(self.common, 0.0), 1.0)
        return float((common + (1 - common) / self.members) ** 0.5)

    @property
    def factor(self) -> float:
        if self.fixed:
            return self.fixed
        return self.agreement ** -(1 - self.degree) if self.common is not None else 1.0

    def scaled(self, moved: Any, members: int, sample: npt.NDArray[np.float64]) -> Any:
        """Return an own update, scaled by the gain, and add it to the open window.

        Args:
            moved: the update, float32[size]; its memory is used.
            members: number of workers of the run.
            sample: the values of `moved` at the keys `at`, float64[n].
        """
        self.members = members
        factor = float(np.float32(self.factor))
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite ends the run, in its own words
            self.total += sample.astype(np.float32)
            self.rounds += 1
            if self.rounds == WINDOW:
                self.whole, self.rounds = self.total, 0
                self.total = np.zeros(self.at.size, np.float32)
                self.sent_whole.clear()
            if factor != 1:
                moved *= factor
            return moved

    def tell(self, peer: int) -> bytes:
        """Return the newest closed window for a peer, float32[n] as bytes; b"" if there is none that the peer lacks."""
        if self.whole is None or peer in self.sent_whole:
            return b""
        self.sent_whole.add(peer)
        return self.whole.astype("<f4").tobytes()

    def check(self, sample: bytes) -> None:
        """Raise RemoteProtocolError unless `sample` is b"" or n finite values."""
        if len(sample) not in (0, 4 * self.at.size) or not np.isfinite(np.frombuffer(sample, "<f4")).all():
            raise RemoteProtocolError(f"a sample of updates is {self.at.size} finite values")

    def heard(self, sample: bytes) -> None:
        """Measure `common` anew with a partner's window, float32[n] as bytes or b""."""
        if not sample or self.whole is None:
            return
        mine, theirs = self.whole.astype(np.float64), np.frombuffer(sample, "<f4").astype(np.float64)
        lengths = float(mine @ mine + theirs @ theirs)
        if not 0 < lengths < float("inf"):
            return  # both sums are zero, or too large
        common = 2 * float(mine @ theirs) / lengths
        before = common if self.common is None else self.common
        self.common = SMOOTHING * before + (1 - SMOOTHING) * common
