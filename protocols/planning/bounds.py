"""How many bytes the pairs of a probe may send. Pure.

Rules
- A first visit has a bound of its own. What it sees bounds the second one: a rate x seconds, with a margin.
- Each pair has an equal share of what all may send, and gets no more.
- A pair that is measured once more, alone, had a part of a way, and has all of it now. It has at most the share of one of the
  dearest pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrows.protocols.planning import flows
from narrows.protocols.planning.flows import FIRST_BYTES, LEAST_BYTES
from narrows.protocols.planning.sharing import Pair, Shared

LEAST_PAIR_BYTES = LEAST_BYTES * (flows.STREAMS + 2)  # of both visits, the first one has a stream each way


class Bounds:
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
        self._allow(pair, [flows.allowed(rate) for rate in rates], self.share - 2 * self.first)

    def _allow(self, pair: Pair, bytes_s: Sequence[float], most: float) -> None:
        there, back = flows.cut(bytes_s, self.seconds, most)
        self.allowed |= {pair: there, pair[::-1]: back}
        self.costs[frozenset(pair)] = flows.pair_bytes((there, back), self.seconds)

    def alone(self, all_shared: Sequence[Shared]) -> None:
        """The first pair of each has as much as all of them together had."""
        summed = {
            each.pairs[0]: (
                sum(self.allowed[a, b] for a, b in each.pairs),
                sum(self.allowed[b, a] for a, b in each.pairs),
            )
            for each in all_shared[: self.more]
        }
        costs = sorted(self.costs.values(), reverse=True)
        for pair, most in zip(sorted(summed, key=lambda pair: -sum(summed[pair])), costs, strict=False):
            self._allow(pair, summed[pair], most)

    @property
    def first_bytes(self) -> int:
        """Of the first visits of all pairs."""
        return 2 * self.first * self.pairs

    @property
    def bytes(self) -> float:
        """Of all visits, once all first ones are over."""
        costs = sorted(self.costs.values(), reverse=True)
        return self.first_bytes + sum(costs) + sum(costs[: self.more])
