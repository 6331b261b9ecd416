"""The outer step of a node that gossips: momentum over its rounds of local steps (GASLoC, 2606.11081).

    v <- beta v + d;  x <- x + eta (d + beta v)         d: what the steps of a round moved the model x by

It is the step that the server takes under `local` (ps/store.py), with the node's own rounds for the mean of all. What partners
mix in is not in v: it is no progress of this node.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from narrows.protocols.settings import Settings

FloatArray = npt.NDArray[np.float32]


class Outer:
    """v, float32[size], as of the first round."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = np.float32(rate), np.float32(momentum)
        self.velocity: FloatArray | None = None

    def step(self, moved: FloatArray) -> FloatArray:
        """What is added to the model for a round that moved it by so much."""
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite ends the run, in its own words
            self.velocity = moved.copy() if self.velocity is None else self.momentum * self.velocity + moved
            return self.rate * (moved + self.momentum * self.velocity)


def outer(settings: Settings) -> Outer | None:
    """None where the step adds what the round moved: rate 1 without momentum."""
    rate, momentum = settings.outer_lr, settings.outer_momentum
    return None if (rate, momentum) == (1.0, 0.0) else Outer(rate, momentum)
