"""Which updates count under --robust, and for how much: by the definitions, from the log of what workers gave.

Nothing here is of the machines: the means are those of all directions that were given, in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
KNOWN = 8  # updates of a worker
TOGETHER = 3  # workers: of two nobody can say which one lies
UNSURE = 1e-4  # a cosine that is so near to a bound may fall on either side: machines add in float32


class Screen:
    """The screen of one shard under `robust`, which is given as on the command line."""

    def __init__(self, robust: str) -> None:
        self.robust = robust
        self.cut = {"median": 0.5, "cosine": 0.0, "": 0.0}.get(robust) or float(robust.partition(":")[2] or 0)
        self.led: dict[int, Wide] = {}  # by worker: where its updates led, each of length 1, summed up
        self.count: Counter[int] = Counter()  # of these updates
        self.out: set[int] = set()  # workers whose newest update was left out

    def counts(self, updates: Sequence[tuple[int, Values]], live: Collection[int]) -> list[bool | None]:
        """Whether each of these, which are folded together, counts; None where it cannot be told. `live`: who is a member."""
        if self.robust != "cosine":
            return [True] * len(updates)
        for gone in [worker for worker in self.led if worker not in live]:
            del self.led[gone], self.count[gone]
            self.out.discard(gone)
        for worker, values in updates:
            length = float(np.linalg.norm(values.astype(np.float64)))
            if length:
                self.led[worker] = self.led.get(worker, 0.0) + values.astype(np.float64) / length
                self.count[worker] += 1
        means = {who: led / self.count[who] for who, led in self.led.items() if self.count[who] >= KNOWN}
        return [_count(worker, means) for worker, _ in updates]

    def settle(self, worker: int, counted: bool) -> None:
        """Note whether its newest update counted."""
        if counted:
            self.out.discard(worker)
        else:
            self.out.add(worker)

    def share(self, workers: Collection[int]) -> float:
        """The share of each of these that counts: all alike, whatever they say of their samples."""
        return 1 / max(1, sum(worker not in self.out for worker in workers))

    def mean(self, terms: Sequence[tuple[float, Values]]) -> Values:
        """At each key the sum, without the lowest and the highest values, as if they had been like the rest."""
        rows = [np.float32(weight) * values for weight, values in terms]
        count = len(rows)
        gone = min(math.ceil(self.cut * count), (count - 1) // 2)
        out = np.zeros(len(rows[0]), np.float32)
        for key in range(len(out)):
            kept = _without_ends([row[key] for row in rows], gone)
            total = kept[0]
            for value in kept[1:]:
                total = np.float32(total + value)
            out[key] = np.float32(total / np.float32(len(kept))) * np.float32(count)
        return out


def _without_ends(values: list[Any], gone: int) -> list[Any]:
    """The values without the lowest and the highest `gone`, in the order in which servers sum them up: that of a sort by
    exchanges of neighbours which ends once both ends are in their places. In float32 another order is another sum.
    """
    count = len(values)
    for done in range(gone):
        for i in (*range(done, count - 1 - done), *range(count - 3 - done, done - 1, -1)):
            values[i : i + 2] = sorted(values[i : i + 2])
    assert sorted(values)[gone : count - gone] == sorted(values[gone : count - gone])
    return values[gone : count - gone]


def _count(worker: int, means: dict[int, Wide]) -> bool | None:
    """`means`: where the updates of each known worker lead."""
    if worker not in means or len(means) < TOGETHER:
        return True
    lengths = {who: float(np.linalg.norm(mean)) for who, mean in means.items()}
    if min(lengths.values()) < UNSURE:
        return None

    def cosine(one: int, other: int) -> float:
        return float(means[one] @ means[other]) / (lengths[one] * lengths[other])

    rest = [who for who in means if who != worker]
    own = sum(cosine(worker, who) for who in rest) / len(rest)
    among = [cosine(one, other) for one, other in combinations(rest, 2)]
    others = sum(among) / len(among)
    if abs(others - 0.05) < UNSURE or abs(own - (others / 4 - 0.04)) < UNSURE:
        return None
    return not (others > 0.05 and own < others / 4 - 0.04)
