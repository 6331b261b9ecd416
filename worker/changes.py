"""Tells a script, once, that it has changed weights between two steps where that is no plain part of its next update."""

from __future__ import annotations

from narrows.protocols.modes import Rule
from narrows.protocols.settings import Settings
from narrows.worker.flat import Flat
from narrows.worker.telling import complain as say

LOST = (
    "{!r} was changed between two steps: where gradients are pushed the server's model holds, and that change is lost; load "
    "weights before DistributedOptimizer is made, or use --push update"
)
NOT_JUST_THAT = (
    "{!r} was changed between two steps: with --outer-momentum the model goes on changing so, with --merge-delay it keeps "
    "a part of that; load weights before DistributedOptimizer is made, or use --outer-momentum 0 and no --merge-delay"
)


class Changes:
    """Of the parameters `flat`, in a run of these settings."""

    def __init__(self, flat: Flat, settings: Settings) -> None:
        inexact = NOT_JUST_THAT if settings.outer_momentum > 0 or settings.merge_delay > 0 else ""
        self.flat, self.text = flat, LOST if settings.mode().rule is Rule.OPTIMIZER else inexact

    def ours(self) -> None:
        """We have written the parameters."""
        self.flat.written()

    def look(self) -> None:
        """The script has had the parameters since."""
        if self.text and (tensor := self.flat.overwritten()):
            say(self.text.format(tensor))
            self.text = ""
