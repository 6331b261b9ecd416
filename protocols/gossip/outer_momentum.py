"""The outer step of a node that gossips: momentum over its rounds of local steps (GASLoC, 2606.11081).

    v <- beta v + d;  x <- x + eta (d + beta v)         d: what the steps of a round moved the model x by

It is the step that the server takes under `local` (ps/store/store.py), with the node's own rounds for the mean of all. v
leaves out what partners mix in: it is no progress of this node.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrows.protocols.config.settings import Settings


class OuterMomentum:
    """v, float32[size], as of the first round."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = (float(np.float32(value)) for value in (rate, momentum))
        self.velocity: Any = None

    def step(self, moved: Any) -> Any:
        """Return what is added to the model for a round that moved it by `moved`; both are float32[size]."""
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite ends the run, in its own words
            self.velocity = moved * 1.0 if self.velocity is None else self.momentum * self.velocity + moved
            return self.rate * (moved + self.momentum * self.velocity)


def outer(settings: Settings) -> OuterMomentum | None:
    """None where the step adds what the round moved: rate 1 without momentum."""
    rate, momentum = settings.outer_lr, settings.outer_momentum
    return None if (rate, momentum) == (1.0, 0.0) else OuterMomentum(rate, momentum)
