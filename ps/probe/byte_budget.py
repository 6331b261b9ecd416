"""The bytes that the pairs of a probe may send. No I/O.

Rules
- A first visit has a fixed bound. The rate that it measures bounds the second visit: rate x seconds, with a margin.
- Each pair has an equal share of all bytes, and gets no more.
- A pair that is measured once more, alone, now has a path to itself that it shared before. These pairs have equal
  shares of the bytes that the others were allowed and have not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrows.ps.probe import flows
from narrows.ps.probe.flows import FIRST_BYTES, LEAST_BYTES
from narrows.ps.probe.shared_paths import Pair, SharedPath

LEAST_PAIR_BYTES = LEAST_BYTES * (flows.STREAMS + 2)  # both visits of a pair; the first has one stream each way


class ByteBudget:
    """The budget of a probe.

    Args:
        seconds: the longest time of a second visit.
        most: bytes of payload that all pairs together may send.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most = seconds, most
        # Numbers of pairs and of pairs measured once more; bytes of a pair, and each way of a first visit.
        self.pairs = self.more = self.share = self.first = 0
        self.allowed: dict[Pair, float] = {}  # by (sender, receiver), bytes a second
        self.costs: dict[frozenset[int], float] = {}  # by pair, bytes of its second visit

    def begin(self, pairs: int, more: int) -> None:
        """Share the bytes over `pairs` pairs, of which up to `more` are measured once more."""
        self.pairs, self.more = pairs, more
        self.share = self.most // max(1, pairs + more)
        self.first = min(FIRST_BYTES, max(LEAST_BYTES, self.share // (flows.STREAMS + 2)))

    def saw(self, pair: Pair, rates: Sequence[float]) -> None:
        """Set the bound of a pair's second visit by the bit/s of its first, in the pair's direction and back."""
        bytes_s = [flows.allowed(rate) for rate in rates]
        self.costs[frozenset(pair)] = self._allow(pair, bytes_s, self.share - 2 * self.first)

    def _allow(self, pair: Pair, bytes_s: Sequence[float], most: float) -> float:
        there, back = flows.cut(bytes_s, self.seconds, most)
        self.allowed |= {pair: there, pair[::-1]: back}
        return flows.pair_bytes((there, back), self.seconds)

    def alone(self, all_shared: Sequence[SharedPath], sent: float) -> None:
        """Allow the first pair of each shared path the sum of what all its pairs were allowed.

        Args:
            all_shared: the shared paths.
            sent: bytes that all measured pairs have sent so far.
        """
        chosen = all_shared[: self.more]
        for each in chosen:
            there, back = (
                sum(self.allowed[pair] for pair in way) for way in (each.pairs, [p[::-1] for p in each.pairs])
            )
            self._allow(each.pairs[0], (there, back), (self.bytes - sent) / len(chosen))

    @property
    def first_bytes(self) -> int:
        """Bytes of the first visits of all pairs."""
        return 2 * self.first * self.pairs

    @property
    def bytes(self) -> float:
        """Bytes of all visits, known once all first visits are over."""
        return self.first_bytes + sum(self.costs.values()) + LEAST_PAIR_BYTES * self.more
