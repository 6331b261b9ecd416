"""How many bytes the pairs of a probe may send. Pure.

Rules
- A first visit has a bound of its own. What it sees bounds the second one: a rate x seconds, with a margin.
- Each pair has an equal share of what all may send, and gets no more.
- A pair that is measured once more, alone, had a part of a way, and has all of it now. Those pairs have an equal share of what
  the others were allowed and have not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrows.ps.probe import flows
from narrows.ps.probe.flows import FIRST_BYTES, LEAST_BYTES
from narrows.ps.probe.shared_paths import Pair, SharedPath

LEAST_PAIR_BYTES = LEAST_BYTES * (flows.STREAMS + 2)  # of both visits, the first one has a stream each way


class ByteBudget:
    """`seconds`: of a second visit at most. `most`: bytes of payload, of all pairs."""

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most = seconds, most
        self.pairs = self.more = self.share = self.first = 0
        self.allowed: dict[Pair, float] = {}  # bytes a second, from one machine to another
        self.costs: dict[frozenset[int], float] = {}  # bytes of a second visit

    def begin(self, pairs: int, more: int) -> None:
        """So many pairs are to be visited, and up to `more` of them once more."""
        self.pairs, self.more = pairs, more
        self.share = self.most // max(1, pairs + more)
        self.first = min(FIRST_BYTES, max(LEAST_BYTES, self.share // (flows.STREAMS + 2)))

    def saw(self, pair: Pair, rates: Sequence[float]) -> None:
        """The first visit of a pair has found these bit/s, one way and back."""
        bytes_s = [flows.allowed(rate) for rate in rates]
        self.costs[frozenset(pair)] = self._allow(pair, bytes_s, self.share - 2 * self.first)

    def _allow(self, pair: Pair, bytes_s: Sequence[float], most: float) -> float:
        there, back = flows.cut(bytes_s, self.seconds, most)
        self.allowed |= {pair: there, pair[::-1]: back}
        return flows.pair_bytes((there, back), self.seconds)

    def alone(self, all_shared: Sequence[SharedPath], sent: float) -> None:
        """The first pair of each has as much as all of them together had. `sent`: bytes, by all that was measured."""
        chosen = all_shared[: self.more]
        for each in chosen:
            there, back = (
                sum(self.allowed[pair] for pair in way) for way in (each.pairs, [p[::-1] for p in each.pairs])
            )
            self._allow(each.pairs[0], (there, back), (self.bytes - sent) / len(chosen))

    @property
    def first_bytes(self) -> int:
        """Of the first visits of all pairs."""
        return 2 * self.first * self.pairs

    @property
    def bytes(self) -> float:
        """Of all visits, once all first ones are over."""
        return self.first_bytes + sum(self.costs.values()) + LEAST_PAIR_BYTES * self.more
