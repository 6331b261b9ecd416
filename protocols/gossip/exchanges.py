"""The exchanges of one worker with its peers (gossip): when each begins, and which are complete. Pure.

`GossipDriver` alone calls this module.

How it works

    this worker                                    peer
    begin(t): needed[t] has each partner
    exchange: offer, label (epoch, t)  -------->   arrived: waits until the peer comes to round t
    arrived                            <--------   offer
    exchange: mix                                  mix

1. `begin` asks the topology for the partners of the round and notes an exchange with each in `needed`.
2. `due` names the offers to send now: those that `needed` asks for, and answers to offers that wait for no round of
   this worker. A pair has one own offer under way at a time.
3. `complete` names the exchanges whose two sides are here, in the order of worker ids. The exchanges of a round come
   together, once all are complete; under `random` each comes alone.
4. `exchange` repeats 2 and 3, and mixes, until nothing is left to do.
5. `end`: the last step is done. Once all members are done, every pair makes one exchange LAST of whole models.

Rules (BAGUA 2107.01499, D_FP_S and D_LP_S; Lian et al. 1710.06952 for `random`)
- An exchange of a pair is one offer each way. Both then move by weight * (theirs - mine), of what was offered. The two
  values are opposite, so the mean of the models stays, whatever the two workers have computed or mixed meanwhile.
- In a round a worker begins an exchange with each partner that the topology names for (round, members).
- An offer of a peer with the same roster waits until this worker comes to its round. Any other offer is answered at the
  next step: rosters change at different moments, and a worker that waits for a worker that waits for a third could
  wait for ever.
- A worker that is done answers all offers until all workers are done. One last exchange of all pairs, at weight 1 / n,
  makes the mean. The roster that closes the run names the n workers; without a server, the last roster does.
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

LAST = m.CLOCK_MAX  # number of the round that ends the run
ARRIVED_MAX = 2  # kept offers of a peer: of this exchange, and of the next if the peer has completed this one


@dataclass(frozen=True, slots=True)
class ExchangeLabel:
    """The round that one side of an exchange is for."""

    epoch: int  # of the sender's roster
    round: int


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """An offer to send now: this worker's side of exchange `number` with `peer`."""

    peer: int
    number: int
    label: ExchangeLabel
    weight: float  # of the mix, as this worker's topology has it
    fresh: bool  # the two share no reference yet


@dataclass(frozen=True, slots=True)
class CompleteExchange:
    """An exchange to mix now."""

    peer: int
    weight: float  # the smaller of both sides' weights
    last: bool  # of round LAST
    parts: tuple[m.Offer, ...]  # the peer's side


@dataclass(slots=True)
class GossipPair:
    """This worker and one peer."""

    founders: bool  # both began with the run, from the same weights
    number: int = 0  # count of complete exchanges, and so the number of the present one
    sent: tuple[ExchangeLabel, float] | None = None  # own side of the present exchange; None: not sent yet
    arrived: list[OfferArrived] = field(default_factory=list)  # the peer's sides, in order; at most ARRIVED_MAX
    done: tuple[ExchangeLabel, ...] = ()  # labels of the last complete exchange, of both sides
    ended: bool = False  # the peer has done its last step

    @property
    def ready(self) -> bool:
        """True if both sides of the present exchange are here."""
        return self.sent is not None and bool(self.arrived)


def label_of(arrived: OfferArrived) -> ExchangeLabel:
    return ExchangeLabel(arrived.parts[0].epoch, arrived.parts[0].round)


class GossipExchanges:
    """The exchanges of one worker. It has no pairs before its first roster.

    Args:
        topology: a key of TOPOLOGIES, or RANDOM (protocols/config/topology.py).
        worker: this worker's number.
        mixing: the model, which `exchange` reads and changes.
    """

    def __init__(self, topology: str, worker: int, mixing: Mixing) -> None:
        self.topology, self.worker, self.mixing = topology, worker, mixing
        self.waits = topology != RANDOM  # a worker waits for all exchanges of a round
        self.epoch, self.round = 0, -1  # of the newest roster; the newest round that has begun
        self.first_round = 0  # of the run
        self.started = False  # the run has started, by the newest roster
        self.closed = False  # no worker may join any more, and all have done their last step, by the newest roster
        self.alone = False  # the server is lost: no roster can close the run
        self.members: tuple[int, ...] = ()  # worker ids of the newest roster, sorted
        self.founders: frozenset[int] = frozenset()  # members that began with the run
        self.pairs: dict[int, GossipPair] = {}  # by peer
        self.lost: set[int] = set()  # peers that this worker never mixes with again
        self.needed: dict[int, dict[int, tuple[ExchangeLabel, float]]] = {}  # round -> peer -> label, weight; not mixed
        self.ending = self.last = False  # own last step is done; round LAST has begun
        self.refused: list[tuple[int, str]] = []  # peers whose offers were not valid, and why (`take_refused`)

    def admit(self, roster: m.Roster) -> None:
        """Use this roster from the next round on.

        Exchanges with peers that are not in the roster are given up. An exchange whose two sides are here stays: that
        peer has mixed, and left in good order.
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
        """Give a peer up for good: it is silent, or sent a message that is not valid."""
        self.lost.add(peer)
        self._drop(peer)

    def _drop(self, peer: int) -> None:
        self.pairs.pop(peer, None)
        self.mixing.forget(peer)
        for need in self.needed.values():
            need.pop(peer, None)

    # Rounds.

    def begin(self, number: int) -> None:
        """Begin round `number`: note an exchange with each partner."""
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
        """Note that this worker has done its last step, and mixed all its rounds."""
        self.ending = True

    def leave_server(self) -> None:
        """Go on without the server: no roster can close the run any more."""
        self.alone = True

    def take_refused(self) -> list[tuple[int, str]]:
        """Return (peer, why) of the peers whose offers were not valid, since the last call."""
        refused, self.refused = self.refused, []
        return refused

    def peer_ended(self, peer: int) -> None:
        if peer in self.pairs:
            self.pairs[peer].ended = True

    def waiting(self, number: int) -> bool:
        """True if a round up to `number` is not mixed yet."""
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
        """Give a peer up for good: its offer is not valid, as `error` says."""
        self.refused.append((peer, str(error)))
        self.lose(peer)

    def arrived(self, offer: OfferArrived) -> None:
        """Take a peer's side of an exchange. A peer whose offer is not valid is refused."""
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
        """Mix the complete exchanges of the rounds up to `number`.

        Returns:
            The offers to send now, each as its parts.

        Raises:
            ValueError: the compressor found that the model is not finite.
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
                    self._drop(done.peer)  # a peer that has left was kept for this exchange
            if not due and not complete:
                return offers

    def _mix(self, exchange: CompleteExchange) -> None:
        try:
            self.mixing.mix(self.worker, exchange.peer, exchange.weight, exchange.parts)
        except RemoteProtocolError as error:
            self.refuse(exchange.peer, error)

    def whole(self, peer: int, number: int) -> list[m.Offer]:
        """Return the answer to a ModelRequest: the whole model, for a peer that begins with round `number`."""
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
        """Return the offers to send now, and count them as sent."""
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
        """True if an offer is answered now, though no round of this worker asks for the exchange."""
        label = label_of(arrived)
        if label.round == LAST:
            return False  # this worker's own round LAST answers it
        return self.ending or not self.waits or label.epoch != self.epoch or label.round < self.round

    def complete(self, upto: int) -> list[CompleteExchange]:
        """Return the exchanges to mix now: all of a round together, in the order of ids. So every run does the same."""
        ready = {peer for peer, pair in self.pairs.items() if pair.ready}
        found: list[CompleteExchange] = []
        for number in sorted(self.needed):
            peers = self.needed[number].keys()
            whole = all(peer in ready and self._is_of(peer, number) for peer in peers)
            if (self.waits or number == LAST) and (number > upto or not whole):
                # Keep back the exchanges of this round. Two kinds are not kept back: an exchange of another round with
                # the same partner, and an exchange whose other side is of another round, as after a change of the
                # roster. Otherwise three workers that wait for each other in different rounds would wait for ever.
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
        """True if this worker has sent `peer` an offer of round `number`, in the present exchange."""
        sent = self.pairs[peer].sent
        return sent is not None and sent[0].round == number

    def _in_step(self, peer: int) -> bool:
        """True unless both sides of the present exchange with `peer` are here and are of different rounds."""
        pair = self.pairs[peer]
        return pair.sent is None or not pair.arrived or pair.sent[0].round == label_of(pair.arrived[0]).round
