"""--robust: by which rule the updates of a worker that lies are kept out of the model."""

from __future__ import annotations

import re
from typing import NamedTuple

from narrows.protocols.errors import UsageError

LEAST = 3  # workers: of two nobody can say which one lies
COSINE, MEDIAN = "cosine", "median"
_TRIM = re.compile(r"trim:(0?\.\d+)", re.ASCII)


class Robust(NamedTuple):
    """`cut`: the share of the values of each key that is left out at either end, 0: none. `cosine`: a worker whose updates
    oppose those of the others is left out."""

    cut: float = 0.0
    cosine: bool = False

    @staticmethod
    def parse(text: str) -> Robust:
        """Raises UsageError, one sentence."""
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
