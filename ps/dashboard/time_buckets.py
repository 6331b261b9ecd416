"""Time buckets: sums of what a member did in each stretch of time, and the strips that show them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CELLS = 120  # buckets of a member
CELL_S = 1.0  # seconds of a bucket at first
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"  # one character for a share: 0 is nothing, z all
ROWS = ("steps", "compute_seconds", "encode_seconds", "wait_seconds")
FAST = 0.9  # quantile of buckets, by their fastest member's steps, that fills a column of a strip
_CHARACTERS = np.frombuffer(LEVELS.encode(), np.uint8)


class TimeBuckets:
    """The time buckets of one member."""

    def __init__(self) -> None:
        self.width = CELL_S  # seconds of a bucket
        self.sums = np.zeros((len(ROWS), CELLS))  # float64[rows, buckets]

    def fit(self, width: float) -> None:
        """Join buckets, two into one, until each is `width` seconds wide."""
        while self.width < width:
            self.width *= 2
            half = CELLS // 2
            self.sums[:, :half] = self.sums[:, ::2] + self.sums[:, 1::2]
            self.sums[:, half:] = 0

    def spread(self, begin_s: float, end_s: float, values: Sequence[float]) -> None:
        """Add one value for each of ROWS, spread evenly over the buckets from `begin_s` to `end_s`."""
        first, last = int(begin_s / self.width), min(int(end_s / self.width), CELLS - 1)
        gathered = np.asarray(values, np.float64)
        for index in range(first, last + 1):
            low, high = max(begin_s, index * self.width), min(end_s, (index + 1) * self.width)
            share = (high - low) / (end_s - begin_s) if end_s > begin_s else 1.0 / (last + 1 - first)
            self.sums[:, index] += gathered * share


def strips(members: Sequence[TimeBuckets]) -> tuple[int, list[dict[str, str]]]:
    """Return the buckets of members as strips of characters of LEVELS.

    Returns: The first bucket in which a member did something; and for each member three strings, a character for each
        bucket: "steps" beside those of a fast member, "compute", the share of the time that went to computing, and
        "encode".
    """
    if not members:
        return 0, []
    sums = np.stack([each.sums for each in members])
    steps, time = sums[:, 0], sums[:, 1:].sum(1)
    fastest = steps.max(0)
    used = np.flatnonzero(sums.any((0, 1)))
    stretches = np.sort(fastest[fastest > 0])
    most = stretches[int(FAST * len(stretches))] if len(stretches) else 0.0
    parts = {"steps": (steps, most), "compute": (sums[:, 1], time), "encode": (sums[:, 2], time)}
    levels = {name: _levels(part, whole) for name, (part, whole) in parts.items()}
    rows = zip(*levels.values(), strict=True)
    return int(used[0]) if len(used) else 0, [dict(zip(levels, row, strict=True)) for row in rows]


def _levels(part: npt.NDArray[np.float64], whole: npt.NDArray[np.float64] | float) -> list[str]:
    """Return rows of characters for `part` / `whole`. A part that is not 0 shows, however small."""
    there = (part > 1e-9) & (np.asarray(whole) > 0)
    share = np.divide(part, whole, out=np.zeros_like(part), where=there)
    levels = np.where(there, np.clip(np.rint((len(LEVELS) - 1) * share), 1, len(LEVELS) - 1), 0).astype(np.intp)
    return [row.tobytes().decode().rstrip("0") for row in _CHARACTERS[levels]]
