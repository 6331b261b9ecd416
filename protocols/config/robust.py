"""The flag --robust: the rule that keeps the updates of a lying worker out of the model."""

from __future__ import annotations

import re
from typing import NamedTuple

from narrows.protocols.errors import UsageError

LEAST = 3  # workers of a run: with two, no rule can find the one that lies
COSINE, MEDIAN = "cosine", "median"
_TRIM = re.compile(r"trim:(0?\.\d+)", re.ASCII)


class Robust(NamedTuple):
    """The parsed flag."""

    cut: float = 0.0  # share of the workers' values left out at either end, for each key; 0: no trimming; 0.5: median
    cosine: bool = False  # drop the updates of a worker that oppose those of the others

    @staticmethod
    def parse(text: str) -> Robust:
        """Parse the flag's text; "" is no rule. Raises UsageError, one sentence."""
        if not text:
            return Robust()
        if text == COSINE:
            return Robust(cosine=True)
        if text == MEDIAN:
            return Robust(cut=0.5)
        written = _TRIM.fullmatch(text)
        if written is None or not 0 < float(written[1]) < 0.5:
            raise UsageError(f"--robust {text}: give cosine, median or trim:SHARE, with a share between 0 and 0.5")
        return Robust(cut=float(written[1]))

    def __bool__(self) -> bool:
        return self.cosine or self.cut > 0
