"""By how much a worker of a gossip run scales its own updates, so that a step of the mean model is as long as one of its own.

ps/store/update_gain.py says what for. Here nobody sees all updates: two workers that mix tell each other theirs, summed over
a window of rounds, at a sample of the keys.

    common = 2 (U_i . U_j) / (|U_i|^2 + |U_j|^2)                U_i, U_j: the sums of this worker and of its partner
    agreement = sqrt(common + (1 - common) / W)                 W workers
    gain = agreement ^ -(1 - degree)

Rules
- W updates that share `common` of their squared length, and nothing else, have a mean of that squared length: agreement^2.
- A window is told to each partner once, and compared with the newest one there. So a worker that has another count of rounds
  is measured too.
- Each worker measures alone and smooths what it finds. Their gains are therefore near each other and not equal. Mixing keeps
  the mean of the models whatever they are.
- All follows from updates and offers in their order: two runs are the same, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.protocols.errors import RemoteProtocolError

FloatArray = npt.NDArray[np.float32]

WINDOW = 7  # rounds: most topologies have come to each partner in so many
SMOOTHING = 0.75  # of `common`, for each window that is heard: 512 keys alone are right to 0.04


class GossipGain:
    """`at`: the keys that are looked at, int64[n]. `degree`: see worker/model/optimizer_scaling.py. `fixed`: the gain
    itself, 0: measured.

    common: 0 to 1 but for noise, None: unknown yet. members: W, with the newest update.
    """

    def __init__(self, at: npt.NDArray[np.int64], degree: float, fixed: float = 0.0) -> None:
        self.at, self.degree, self.fixed = at, degree, fixed
        self.common: float | None = None
        self.members = 1
        self.rounds = 0  # of the window that is under way
        self.total: FloatArray = np.zeros(at.size, np.float32)
        self.whole: FloatArray | None = None  # of the newest window that is over
        self.told: set[int] = set()  # who has heard of that one

    @property
    def agreement(self) -> float:
        """The length of the mean of all updates beside that of each; 0: unknown yet."""
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
        """An own update, float32[size], as it is to be added to the model of one of so many workers; `sample`: its values at
        `at`."""
        self.members = members
        factor = float(np.float32(self.factor))
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite ends the run, in its own words
            self.total += sample.astype(np.float32)
            self.rounds += 1
            if self.rounds == WINDOW:
                self.whole, self.rounds = self.total, 0
                self.total = np.zeros(self.at.size, np.float32)
                self.told.clear()
            return moved if factor == 1 else moved * factor

    def tell(self, peer: int) -> bytes:
        """The newest window, float32[n]; empty where this peer was told."""
        if self.whole is None or peer in self.told:
            return b""
        self.told.add(peer)
        return self.whole.astype("<f4").tobytes()

    def check(self, sample: bytes) -> None:
        """Raise RemoteProtocolError unless it is what `tell` makes."""
        if len(sample) not in (0, 4 * self.at.size) or not np.isfinite(np.frombuffer(sample, "<f4")).all():
            raise RemoteProtocolError(f"a sample of updates is {self.at.size} finite values")

    def heard(self, sample: bytes) -> None:
        """A partner's newest window."""
        if not sample or self.whole is None:
            return
        mine, theirs = self.whole.astype(np.float64), np.frombuffer(sample, "<f4").astype(np.float64)
        lengths = float(mine @ mine + theirs @ theirs)
        if not 0 < lengths < float("inf"):
            return  # nobody moved
        common = 2 * float(mine @ theirs) / lengths
        before = common if self.common is None else self.common
        self.common = SMOOTHING * before + (1 - SMOOTHING) * common
