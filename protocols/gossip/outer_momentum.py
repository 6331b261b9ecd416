"""The outer step of a node that gossips: momentum over its rounds of local steps (GASLoC, 2606.11081).

    v <- beta v + d;  x <- x + eta (d + beta v)         d: the change of the model x by the steps of a round

A server takes the same step in mode `local` (ps/store/store.py), with the mean of all workers for d. The momentum v
leaves out the changes that come from mixing: they are no progress of this node.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrows.protocols.config.settings import Settings


class OuterMomentum:
    """The outer step of one node: `rate` is eta, `momentum` is beta, `velocity` is v (float32[size])."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = (float(np.float32(value)) for value in (rate, momentum))
        self.velocity: Any = None

    def step(self, moved: Any) -> Any:
        """Return the value to add to the model for a round that changed it by `moved`; both are float32[size]."""
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite ends the run, in its own words
            if self.velocity is None:
                self.velocity = moved * 1.0
            else:
                self.velocity *= self.momentum
                self.velocity += moved
            step = self.velocity * self.momentum
            step += moved
            step *= self.rate
            return step


def outer(settings: Settings) -> OuterMomentum | None:
    """Return the outer step of a run; None for rate 1 without momentum, where the step adds just the round's change."""
    rate, momentum = settings.outer_lr, settings.outer_momentum
    return None if (rate, momentum) == (1.0, 0.0) else OuterMomentum(rate, momentum)
