"""The model of one worker of a gossip run, keys [begin, end), and what it shares with each peer. Pure numerics.

Rules
- Full precision: an offer is the model. Both add weight * (theirs - mine).
- Low precision (BAGUA 2107.01499, D_LP_S; Tang et al. 1803.06443, difference compression): the two of a pair keep one common
  reference c. An offer is q = C(x - c); both add weight * (q_theirs - q_mine), and c += (q_mine + q_theirs) / 2. What C left
  out is still in x - c, so it comes later: error feedback. As c moves with what both were told, a value is never mixed twice,
  and no consensus step size is needed (as CHOCO-SGD has one, 1902.00340).
- What both compute of the same bytes is the same bit for bit: sums go in the order of ids.
- Payloads are written and read by `coding`, which is narrows.compression: protocols/ does not import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from narrows.protocols import messages as m
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.keys import covers, parts
from narrows.protocols.member.view import Coded, Coding

FloatArray = npt.NDArray[np.float32]


class Compressor(Protocol):
    """See narrows.compression."""

    @property
    def spec(self) -> str: ...

    def encode(self, values: FloatArray, memory: Any = None) -> memoryview: ...


class Mixing:
    """One model, float32[end - begin], and the references of its pairs, each as large.

    `compressor`: of differences; None: offers are the model itself. `remember` makes the memory of a pair's compressor.
    """

    def __init__(self, begin: int, end: int, compressor: Compressor | None, coding: Coding, remember: Any) -> None:
        self.begin, self.end = begin, end
        self.compressor, self.coding, self.remember = compressor, coding, remember
        self.model: FloatArray = np.zeros(end - begin, np.float32)
        self.first: FloatArray = self.model  # the weights that the run began with: what founders share
        self.references: dict[int, FloatArray] = {}
        self.memories: dict[int, Any] = {}
        self.sent: dict[int, list[Coded]] = {}

    def start(self, weights: FloatArray) -> None:
        """The run begins here, or this worker's part of it."""
        self.model = weights.copy()
        self.first = weights.copy() if self.compressor is not None else self.model

    def forget(self, peer: int) -> None:
        """An exchange with it never becomes complete."""
        for table in (self.references, self.memories, self.sent):
            table.pop(peer, None)

    # One exchange.

    def offer(self, peer: int, number: int, fresh: bool, last: bool) -> tuple[bool, list[Coded]]:
        """Own side of exchange `number`: whether it is the model itself, and its parts.

        Raises what the compressor raises for a model that is not finite; then nothing has changed.
        """
        if self.compressor is None or last or (fresh and peer not in self.references):
            self.sent[peer] = self.whole()
            return True, self.sent[peer]
        reference = self.references.setdefault(peer, self.first.copy())
        memory = self.memories.setdefault(peer, self.remember())
        memory.step = number  # alike on both sides
        payload = self.compressor.encode(self.model - reference, memory)
        self.sent[peer] = [(m.CODED, self.begin, self.end, payload)]
        return False, self.sent[peer]

    def whole(self) -> list[Coded]:
        """The model in parts, raw; a copy, which may be sent at leisure."""
        raw = self.model.copy().view(np.uint8).data
        cuts = parts(self.begin, self.end)
        return [(m.RAW_FLOAT32, b, e, raw[4 * (b - self.begin) : 4 * (e - self.begin)]) for b, e in cuts]

    def check(self, offers: tuple[m.Offer, ...]) -> None:
        """Raise RemoteProtocolError unless `offers` hold finite values of these keys, each exactly once."""
        if not covers([(offer.begin, offer.end) for offer in offers], self.begin, self.end):
            raise RemoteProtocolError(f"worker {offers[0].worker} offers other keys than [{self.begin}, {self.end})")
        for offer in offers:
            count = offer.end - offer.begin
            if offer.whole != offers[0].whole or offer.codec != (m.RAW_FLOAT32 if offer.whole else m.CODED):
                raise RemoteProtocolError(f"worker {offer.worker} offers a model that is half a difference")
            if not offer.whole:
                try:
                    self.coding.check(offer.payload, count, finite=True)
                except ValueError as error:
                    raise RemoteProtocolError(f"worker {offer.worker} offers no payload: {error}") from None
            elif len(offer.payload) != 4 * count:
                raise RemoteProtocolError(f"worker {offer.worker} offers {len(offer.payload)} bytes for {count} keys")
            elif not np.isfinite(np.frombuffer(offer.payload, np.float32)).all():
                raise RemoteProtocolError(f"worker {offer.worker} offers a model that is not finite")

    def mix(self, worker: int, peer: int, weight: float, offers: tuple[m.Offer, ...]) -> None:
        """Complete the exchange of `worker`, this one, with `peer`. Raises RemoteProtocolError; then nothing has changed."""
        self.check(offers)
        mine = self.sent.pop(peer)
        theirs: list[Coded] = [(offer.codec, offer.begin, offer.end, offer.payload) for offer in offers]
        if offers[0].whole != (mine[0][0] == m.RAW_FLOAT32):
            raise RemoteProtocolError(f"worker {peer} offers a whole model for a difference, or the other way round")
        moved = np.zeros_like(self.model)
        self._add(theirs, weight, moved)
        self._add(mine, -weight, moved)
        self.model += moved
        if self.compressor is None:
            return
        reference = np.zeros_like(self.model) if offers[0].whole else self.references[peer]
        for coded in (mine, theirs) if worker < peer else (theirs, mine):
            self._add(coded, 0.5, reference)
        self.references[peer] = reference

    def average(self, worker: int, last: dict[int, tuple[m.Offer, ...]]) -> None:
        """The mean of this model and all that were offered at the end; the same on all, bit for bit."""
        for offers in last.values():
            self.check(offers)
        mine = next((self.sent[peer] for peer in last), None)
        if mine is None:
            return
        theirs = {peer: [(o.codec, o.begin, o.end, o.payload) for o in offers] for peer, offers in last.items()}
        mean = np.zeros_like(self.model)
        for _, coded in sorted((theirs | {worker: mine}).items()):
            self._add(coded, 1 / (len(last) + 1), mean)
        self.model = mean
        self.sent.clear()

    def take(self, offers: tuple[m.Offer, ...]) -> None:
        """Begin with a peer's whole model. Raises RemoteProtocolError; then nothing has changed."""
        self.check(offers)
        weights = np.zeros_like(self.model)
        self._add([(offer.codec, offer.begin, offer.end, offer.payload) for offer in offers], 1.0, weights)
        self.start(weights)

    def _add(self, coded: Iterable[Coded], weight: float, out: FloatArray) -> None:
        for codec, begin, end, payload in coded:
            add = self.coding.accumulate if codec == m.CODED else self.coding.add_raw
            add(payload, weight, out[begin - self.begin : end - self.begin])
