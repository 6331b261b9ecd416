"""The exchanges of one worker's pairs (gossip): which begins when, and which are complete. Pure; its `GossipDriver`
alone calls it.

Rules (BAGUA 2107.01499, D_FP_S and D_LP_S; Lian et al. 1710.06952 for `random`)
- An exchange of a pair is one offer each way. Both then move by weight * (theirs - mine), of what was offered: opposite
  values, so the mean of the models stays whatever the workers have done meanwhile, and whoever else they mix with.
- In a round a worker begins an exchange with each partner that the topology names for (round, members).
- An offer of a peer that has the same roster waits for this worker to come to its round. Any other is answered at the next
  step: rosters change at different moments, and nobody may wait for one who waits for a third.
- Who is done answers all, until all are; then one last exchange of all pairs at weight 1 / n makes the mean. Who all are is
  in the roster that closes the run; without a server, they are those of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import CodedPiece
from narrows.protocols.config.modes import WINDOW
from narrows.protocols.config.topology import HALF, RANDOM, partners
from narrows.protocols.effects import OfferArrived
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.mixing import Mixing
from narrows.protocols.gossip.peers import WHOLE

LAST = m.CLOCK_MAX  # the round that ends the run
ARRIVED_MAX = 2  # offers of a peer: of this exchange and the next, if it has completed this one already


@dataclass(frozen=True, slots=True)
class ExchangeLabel:
    """The round that one side of an exchange is for, under the roster of an epoch."""

    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """Offer this now: own side of exchange `number` with `peer`. `fresh`: the two share no reference yet."""

    peer: int
    number: int
    label: ExchangeLabel
    weight: float
    fresh: bool


@dataclass(frozen=True, slots=True)
class CompleteExchange:
    """Mix this now."""

    peer: int
    weight: float
    last: bool
    parts: tuple[m.Offer, ...]


@dataclass(slots=True)
class GossipPair:
    """This worker and one peer. `number`: exchanges that are complete."""

    founders: bool  # both began with the run, from the same weights
    number: int = 0
    sent: tuple[ExchangeLabel, float] | None = None
    arrived: list[OfferArrived] = field(default_factory=list)
    done: tuple[ExchangeLabel, ...] = ()  # what the last exchange was for, on either side
    ended: bool = False

    @property
    def ready(self) -> bool:
        """Both sides of the exchange are here."""
        return self.sent is not None and bool(self.arrived)


def label_of(arrived: OfferArrived) -> ExchangeLabel:
    return ExchangeLabel(arrived.parts[0].epoch, arrived.parts[0].round)


class GossipExchanges:
    """`topology`: a name of protocols/config/topology.py. A worker that is not in any roster yet has no pairs."""

    def __init__(self, topology: str, worker: int, mixing: Mixing) -> None:
        self.topology, self.worker, self.mixing = topology, worker, mixing
        self.waits = topology != RANDOM
        self.epoch, self.round = 0, -1
        self.first_round = 0  # that the run begins with
        self.started = False
        self.closed = False  # nobody joins any more, and all have done their last step
        self.alone = False  # there is no server that could say so
        self.members: tuple[int, ...] = ()
        self.founders: frozenset[int] = frozenset()
        self.pairs: dict[int, GossipPair] = {}
        self.lost: set[int] = set()
        self.needed: dict[int, dict[int, tuple[ExchangeLabel, float]]] = {}  # round -> peer
        self.ending = self.last = False
        self.refused: list[tuple[int, str]] = []  # peers whose offers were none, and why; whoever tells takes them out

    def admit(self, roster: m.Roster) -> None:
        """Go by this roster from the next round on.

        Exchanges with who is not in it are given up, but where both sides are here: it has mixed, and left in good order.
        """
        self.epoch, self.started, self.closed = roster.epoch, roster.started, roster.closed
        self.first_round = roster.round
        self.members = tuple(sorted(row[0] for row in roster.members))
        self.founders = frozenset(row[0] for row in roster.members if row[3] == 0)
        for peer in [peer for peer, pair in self.pairs.items() if peer not in self.members and not pair.ready]:
            self._drop(peer)
        for peer in self.members:
            if peer != self.worker and peer not in self.pairs and peer not in self.lost:
                self.pairs[peer] = GossipPair({peer, self.worker} <= self.founders)

    def lose(self, peer: int) -> None:
        """It is silent, or does not speak as a peer does: from now on it is not mixed with."""
        self.lost.add(peer)
        self._drop(peer)

    def _drop(self, peer: int) -> None:
        self.pairs.pop(peer, None)
        self.mixing.forget(peer)
        for need in self.needed.values():
            need.pop(peer, None)

    # Rounds.

    def begin(self, number: int) -> None:
        """This worker has come to round `number`."""
        self.round = number
        label = ExchangeLabel(self.epoch, number)
        if not self.waits and sum(pair.sent is not None for pair in self.pairs.values()) >= WINDOW:
            return
        for peer, weight in partners(self.topology, number, self.members, self.worker):
            pair = self.pairs.get(peer)
            if pair is None or label in pair.done or (not self.waits and pair.sent is not None):
                continue
            self.needed.setdefault(number, {})[peer] = (label, weight)

    def end(self) -> None:
        """The last step is done, and no round is waited for."""
        self.ending = True

    def peer_ended(self, peer: int) -> None:
        if peer in self.pairs:
            self.pairs[peer].ended = True

    def waiting(self, number: int) -> bool:
        """Whether a round up to `number` is not mixed yet."""
        return any(need and at <= number for at, need in self.needed.items())

    @property
    def under_way(self) -> list[int]:
        """Rounds that are not mixed yet."""
        return [number for number, need in self.needed.items() if need]

    @property
    def over(self) -> bool:
        """The last round is mixed."""
        return self.last and not self.waiting(LAST)

    def refuse(self, peer: int, error: RemoteProtocolError) -> None:
        """It is mixed with no more, since what it offers is none."""
        self.refused.append((peer, str(error)))
        self.lose(peer)

    def arrived(self, offer: OfferArrived) -> None:
        """A peer's side of an exchange is here."""
        pair = self.pairs.get(offer.peer)
        if pair is None:
            return
        try:
            if len(pair.arrived) >= ARRIVED_MAX:
                raise RemoteProtocolError("it begins exchanges before the ones before them are complete")
            self.mixing.check(offer.parts)
        except RemoteProtocolError as error:
            self.refuse(offer.peer, error)
            return
        pair.arrived.append(offer)
        pair.ended |= label_of(offer).round == LAST

    def exchange(self, number: int) -> list[list[m.Offer]]:
        """Mix what is complete of the rounds up to `number`; return what is to be offered now.

        Raises ValueError, the compressor's, for a model that is not finite.
        """
        offers: list[list[m.Offer]] = []
        while True:
            due, complete = self.due(), self.complete(number)
            for each in due:
                whole, coded = self.mixing.offer(each.peer, each.number, each.fresh, each.label.round == LAST)
                sample = b"" if each.label.round == LAST else self.mixing.sample(each.peer)
                offers.append(self._offer(each, whole, coded, sample))
            for done in complete:
                if not done.last:
                    self._mix(done)
            last = {done.peer: done.parts for done in complete if done.last}
            if last:
                self.mixing.average(self.worker, last)
            for done in complete:
                if done.peer not in self.members:
                    self._drop(done.peer)  # it was kept for this exchange
            if not due and not complete:
                return offers

    def _mix(self, exchange: CompleteExchange) -> None:
        try:
            self.mixing.mix(self.worker, exchange.peer, exchange.weight, exchange.parts)
        except RemoteProtocolError as error:
            self.refuse(exchange.peer, error)

    def whole(self, peer: int, number: int) -> list[m.Offer]:
        """The answer to Adopt: the model as it is, for one who begins with round `number`."""
        return self._offer(
            PendingExchange(peer, WHOLE, ExchangeLabel(self.epoch, number), HALF, True), True, self.mixing.whole()
        )

    def _offer(
        self, due: PendingExchange, whole: bool, pieces: Sequence[CodedPiece], sample: bytes = b""
    ) -> list[m.Offer]:
        what = (self.worker, due.peer, due.label.epoch, due.label.round, due.number)
        how = (due.weight, whole)
        return [
            m.Offer(*what, i, len(pieces), each.begin, each.end, *how, each.codec, each.payload, b"" if i else sample)
            for i, each in enumerate(pieces)
        ]

    def due(self) -> list[PendingExchange]:
        """Return what is to be offered now; it counts as sent."""
        ended = self.closed or (self.alone and all(pair.ended for pair in self.pairs.values()))
        if self.ending and not self.last and ended:
            self.last = True
            weight = 1 / (len(self.pairs) + 1)
            self.needed[LAST] = {peer: (ExchangeLabel(self.epoch, LAST), weight) for peer in self.pairs}
        found: list[PendingExchange] = []
        for number in sorted(self.needed):
            for peer, (label, weight) in self.needed[number].items():
                self._send(peer, label, weight, found)
        for peer, pair in self.pairs.items():
            if pair.arrived and self._answers(pair.arrived[0]):
                self._send(peer, label_of(pair.arrived[0]), pair.arrived[0].parts[0].weight, found)
        return found

    def _send(self, peer: int, label: ExchangeLabel, weight: float, found: list[PendingExchange]) -> None:
        pair = self.pairs[peer]
        if pair.sent is None:
            pair.sent = (label, weight)
            found.append(
                PendingExchange(peer, pair.number, label, weight, fresh=pair.number == 0 and not pair.founders)
            )

    def _answers(self, arrived: OfferArrived) -> bool:
        """Whether an offer that no round of ours asks for is answered now."""
        label = label_of(arrived)
        if label.round == LAST:
            return False  # with our own last one
        return self.ending or not self.waits or label.epoch != self.epoch or label.round < self.round

    def complete(self, upto: int) -> list[CompleteExchange]:
        """Return what is to be mixed now, a round as a whole and in the order of ids: so every run does the same."""
        ready = {peer for peer, pair in self.pairs.items() if pair.ready}
        found: list[CompleteExchange] = []
        for number in sorted(self.needed):
            peers = self.needed[number].keys()
            whole = all(peer in ready and self._is_of(peer, number) for peer in peers)
            if (self.waits or number == LAST) and (number > upto or not whole):
                # A partner that is in the midst of another exchange is no reason to keep that one waiting. Nor is one whose
                # side is of another round, as after a change of the roster: three who keep each other waiting for
                # different rounds would wait for ever.
                ready -= {peer for peer in peers if self._is_of(peer, number) and self._in_step(peer)}
        for peer in sorted(ready):
            pair = self.pairs[peer]
            assert pair.sent is not None
            (label, mine), theirs = pair.sent, pair.arrived.pop(0)
            last = label.round == LAST
            if last != (label_of(theirs).round == LAST) or (last and not theirs.parts[0].whole):
                self.refuse(peer, RemoteProtocolError("its last offer is not for the last round, or is no model"))
                continue
            for number in (label.round, label_of(theirs).round):
                self.needed.get(number, {}).pop(peer, None)
            weight = min(mine, theirs.parts[0].weight)
            found.append(CompleteExchange(peer, weight, last, theirs.parts))
            pair.number += 1
            pair.done = (label, label_of(theirs))
            pair.sent = None
        self.needed = {number: need for number, need in self.needed.items() if need}
        return found

    def _is_of(self, peer: int, number: int) -> bool:
        """Whether what is under way with `peer` is of this round."""
        sent = self.pairs[peer].sent
        return sent is not None and sent[0].round == number

    def _in_step(self, peer: int) -> bool:
        """Whether its side of what is under way, where that is here, is of the same round as ours."""
        pair = self.pairs[peer]
        return pair.sent is None or not pair.arrived or pair.sent[0].round == label_of(pair.arrived[0]).round
