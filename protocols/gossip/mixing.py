"""The model of one worker of a gossip run, keys [begin, end), and what it shares with each peer. Pure numerics.

Rules
- Full precision: an offer is the model. Both workers add weight * (theirs - mine).
- Low precision (BAGUA 2107.01499, D_LP_S; Tang et al. 1803.06443, difference compression): the two of a pair keep one
  common reference c. An offer is q = C(x - c). Both add weight * (q_theirs - q_mine), and c += (q_mine + q_theirs) / 2.
  The part that C left out is still in x - c, so a later offer has it: error feedback. Since c moves with the values
  that both have seen, no value is mixed twice, and no consensus step size is needed (CHOCO-SGD has one, 1902.00340).
- Both workers compute the same from the same bytes, bit for bit: sums go in the order of ids.
- Arrays are those of `home` (narrows.compression.home, which protocols/ does not import): NumPy's, or a device's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import CodedPiece, Keys, covers, parts
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.gain import GossipGain
from narrows.protocols.gossip.outer_momentum import OuterMomentum

Array: TypeAlias = Any  # float32[count]; slices are views


class PieceEncoder(Protocol):
    """A compressor, as this module needs it; see narrows.compression."""

    @property
    def spec(self) -> str: ...


class ArrayHome(Protocol):
    """The code that computes on arrays, as this module needs it; narrows.compression.home describes each method."""

    def zeros(self, count: int) -> Array: ...
    def empty(self, count: int) -> Array: ...
    def copy(self, source: Array, out: Array) -> None: ...
    def add(self, piece: CodedPiece, weight: float, out: Array, origin: int) -> None: ...
    def raw_pieces(self, values: Array, origin: int, cuts: Iterable[Keys]) -> Sequence[CodedPiece]: ...
    def places(self, positions: npt.NDArray[np.int64]) -> Any: ...
    def sampled(self, values: Array, places: Any) -> npt.NDArray[np.float64]: ...
    def finite(self, values: Array) -> bool: ...
    def check(self, piece: CodedPiece, *, finite: bool = False) -> None: ...
    def code(self, compressor: Any, values: Array, memory: Any, begin: int) -> CodedPiece: ...


class Mixing:
    """One model, float32[end - begin], and one reference of the same size for each peer.

    Args:
        begin, end: the keys.
        compressor: of differences; None: each offer is the model itself.
        home: an ArrayHome, which computes on the arrays.
        remember: makes the memory of the compressor for one pair.
        gain: scales own updates; None: they are added as they are.
        outer: makes the outer step of a round; None: a round adds the sum of its updates.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        compressor: PieceEncoder | None,
        home: Any,
        remember: Any,
        gain: GossipGain | None = None,
        outer: OuterMomentum | None = None,
    ) -> None:
        self.begin, self.end, self.gain, self.outer = begin, end, gain, outer
        self.compressor, self.remember = compressor, remember
        self.home: ArrayHome = home
        self.places = home.places(gain.at) if gain is not None else None
        self.model: Array = home.zeros(end - begin)
        self.first: Array = self.model  # the weights that the run began with: the first reference of two founders
        self.references: dict[int, Array] = {}  # peer -> c; the same on both sides between two exchanges
        self.memories: dict[int, Any] = {}  # peer -> memory of the compressor
        self.sent: dict[int, tuple[bool, Sequence[CodedPiece]]] = {}  # peer -> own offer: True if the model; its parts
        self.raw: Sequence[CodedPiece] | None = None  # the model in raw parts, once offered, until the model changes

    def copied(self, values: Array) -> Array:
        copy = self.home.empty(len(values))
        self.home.copy(values, copy)
        return copy

    @property
    def finite(self) -> bool:
        return self.home.finite(self.model)

    def start(self, weights: Array, model: Array | None = None) -> None:
        """Begin with these weights, float32[end - begin]. No other code may change the arrays from now on.

        Args:
            weights: the weights, the same on all founders.
            model: this node's own model, if it has moved on from `weights` since.
        """
        self.first, self.raw = weights, None
        if model is None:
            model = weights if self.compressor is None else self.copied(weights)
        self.model = model

    def forget(self, peer: int) -> None:
        """Drop all state of a peer that is lost: the open exchange with it never completes."""
        for table in (self.references, self.memories, self.sent):
            table.pop(peer, None)

    def absorb(self, moved: Array, members: int, whole: bool = True) -> None:
        """Add an own update to the model.

        Args:
            moved: the update, float32[end - begin]; its memory is used.
            members: number of workers of the run.
            whole: the update of a whole round; False: of a part of one, without an outer step.
        """
        if self.gain is not None:
            moved = self.gain.scaled(moved, members, self.home.sampled(moved, self.places))
        self.model += self.outer.step(moved) if whole and self.outer is not None else moved
        self.raw = None

    # One exchange.

    def offer(self, peer: int, number: int, fresh: bool, last: bool) -> tuple[bool, Sequence[CodedPiece]]:
        """Make this worker's side of an exchange.

        Args:
            peer: the other worker.
            number: of the exchange, for this pair.
            fresh: the two share no reference yet.
            last: the exchange of round LAST.

        Returns:
            True if the offer is the model itself, False for a difference; and the parts of the offer.

        Raises:
            ValueError: the compressor found that the model is not finite; then nothing has changed.
        """
        if self.compressor is None or last or (fresh and peer not in self.references):
            self.sent[peer] = (True, self.whole())
            return self.sent[peer]
        reference = self.references.get(peer)
        if reference is None:
            reference = self.references[peer] = self.copied(self.first)
        memory = self.memories.setdefault(peer, self.remember())
        memory.go_to(number)  # alike on both sides
        piece = self.home.code(self.compressor, self.model - reference, memory, self.begin)
        self.sent[peer] = (False, [piece])
        return self.sent[peer]

    def sample(self, peer: int) -> bytes:
        """Return the sample of own updates for an offer to this peer, once a window, else b""; see `GossipGain`."""
        return b"" if self.gain is None else self.gain.tell(peer)

    def whole(self) -> Sequence[CodedPiece]:
        """Return a copy of the model in raw parts, one for all peers. The model may change while they are sent."""
        if self.raw is None:
            self.raw = self.home.raw_pieces(self.copied(self.model), self.begin, parts(self.begin, self.end))
        return self.raw

    def check(self, offers: tuple[m.Offer, ...]) -> None:
        """Raise RemoteProtocolError unless `offers` have finite values for all keys, each key exactly once."""
        who = f"worker {offers[0].worker}"
        if not covers([(offer.begin, offer.end) for offer in offers], self.begin, self.end):
            raise RemoteProtocolError(f"{who} offers other keys than [{self.begin}, {self.end})")
        whole = offers[0].whole
        if any(offer.whole != whole for offer in offers) or (self.compressor is None and not whole):
            raise RemoteProtocolError(f"{who} offers a model that is half a difference")
        if self.gain is not None:
            self.gain.check(offers[0].sample)
        for offer in offers:
            try:
                self.home.check(offer, finite=True)
            except ValueError as error:
                raise RemoteProtocolError(f"{who} offers no part of a finite model: {error}") from None

    def mix(self, worker: int, peer: int, weight: float, offers: tuple[m.Offer, ...]) -> None:
        """Complete an exchange: move the model, and the reference of the pair.

        Args:
            worker: this worker's id.
            peer: the other worker's id.
            weight: the smaller of both sides' weights, at most 0.5.
            offers: the parts of the peer's side.

        Raises:
            RemoteProtocolError: the offers are not valid; then the model has not changed.
        """
        self.check(offers)
        whole, mine = self.sent.pop(peer)
        if offers[0].whole != whole:
            raise RemoteProtocolError(f"worker {peer} offers a whole model for a difference, or the other way round")
        moved = self.home.zeros(self.end - self.begin)
        self._add(offers, weight, moved)
        self._add(mine, -weight, moved)
        self.model += moved
        self.raw = None
        if self.gain is not None:
            self.gain.heard(offers[0].sample)
        if self.compressor is None:
            return
        reference = self.home.zeros(self.end - self.begin) if whole else self.references[peer]
        for pieces in (mine, offers) if worker < peer else (offers, mine):
            self._add(pieces, 0.5, reference)
        self.references[peer] = reference

    def average(self, worker: int, last: dict[int, tuple[m.Offer, ...]]) -> None:
        """Set the model to the mean of all models of round LAST; the same on all workers, bit for bit.

        Args:
            worker: this worker's id.
            last: peer -> parts of its model.
        """
        for offers in last.values():
            self.check(offers)
        mine = next((self.sent[peer][1] for peer in last), None)
        if mine is None:
            return
        mean = self.home.zeros(self.end - self.begin)
        for _, pieces in sorted([(worker, mine), *last.items()], key=lambda each: each[0]):
            self._add(pieces, 1 / (len(last) + 1), mean)
        self.model, self.raw = mean, None
        self.sent.clear()

    def take(self, offers: tuple[m.Offer, ...]) -> None:
        """Begin with a peer's whole model.

        Raises:
            RemoteProtocolError: the offers are not valid; then nothing has changed.
        """
        self.check(offers)
        weights = self.home.zeros(self.end - self.begin)
        self._add(offers, 1.0, weights)
        self.start(weights)

    def _add(self, pieces: Sequence[CodedPiece], weight: float, out: Array) -> None:
        for piece in pieces:
            self.home.add(piece, weight, out, self.begin)
