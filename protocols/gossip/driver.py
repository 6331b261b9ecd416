"""One node of a gossip run (a worker or a shard of a cluster): when the node computes, mixes and ends. Pure.

How it works (TRANSITIONS has every phase)

    EMPTY ─> ASKING ─> READY ─> COMPUTING ─step─> CATCHING_UP ─> MIXING ─> COMPUTING ... ─finish─> FLUSHING ─> ENDING ─> OVER

1. A node that joins a run under way asks the longest-standing peer that has a model for it (ASKING), and begins with
   that peer's round.
2. COMPUTING: the owner takes the local steps of round t and hands over the sum of them (`step`).
3. CATCHING_UP: with s >= 1 the node waits for the mixes up to round t - s and applies them, so that its offers of round
   t contain them. With s = 0 it does not wait here.
4. MIXING: the node offers round t to its partners (`GossipExchanges.begin`). With s = 0 the next steps begin once round t
   itself is mixed: BAGUA's decentralized full-precision synchronous SGD (D_FP_S, 2107.01499). With s >= 1 they begin at
   once, and the transfer of round t overlaps the next computation.
5. `finish`: the node mixes the rounds that have begun (FLUSHING), then mixes with each peer that asks until all are
   done (ENDING). One last round of all pairs makes the mean of all models (OVER).

Rules
- The node applies mixes in the order of rounds and worker ids, each in its turn. So two runs give the same models, bit
  for bit.
- The owner hands the driver each event of `GossipPeers` (`hear`), and hands `GossipPeers` what the driver returns. The
  two may run in two threads.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from narrows.protocols import effects as e
from narrows.protocols.config.timing import MODEL_WAIT_LEASES
from narrows.protocols.effects import Log, MemberEffect, PeerSay
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.exchanges import LAST, GossipExchanges
from narrows.protocols.gossip.mixing import Array, Mixing

Says = list[PeerSay | Log]


class GossipPhase(Enum):
    """The phase of a node, from EMPTY to OVER."""

    EMPTY = "empty"  # the node has no weights yet
    ASKING = "asking"  # the run has begun: the node asks a peer for its model
    READY = "ready"  # the node has a model, and no roster yet
    COMPUTING = "computing"  # the owner takes the steps of a round
    CATCHING_UP = "catching up"  # the round t is computed; with s >= 1 the node waits for the mixes up to t - s
    MIXING = "mixing"  # the round t is offered; with s = 0 the node waits for its mix
    FLUSHING = "flushing"  # the last step is done; the node mixes the rounds that have begun
    ENDING = "ending"  # the node waits until its peers are done, and mixes with those that ask
    OVER = "over"  # the model is the mean of all models


# Event -> phases in which it may happen -> the phase after it.
TRANSITIONS: dict[str, dict[GossipPhase, GossipPhase]] = {
    "late": {GossipPhase.EMPTY: GossipPhase.ASKING},
    "has a model": {GossipPhase.EMPTY: GossipPhase.READY, GossipPhase.ASKING: GossipPhase.READY},
    "introduced": {GossipPhase.READY: GossipPhase.COMPUTING},
    "stepped": {GossipPhase.COMPUTING: GossipPhase.CATCHING_UP},
    "caught up": {GossipPhase.CATCHING_UP: GossipPhase.MIXING},
    "may go": {GossipPhase.MIXING: GossipPhase.COMPUTING},
    "finished": {GossipPhase.COMPUTING: GossipPhase.FLUSHING},
    "flushed": {GossipPhase.FLUSHING: GossipPhase.ENDING},
    "all mixed": {GossipPhase.ENDING: GossipPhase.OVER},
}


class GossipDriver:
    """The phases of one node.

    Args:
        topology: a key of TOPOLOGIES, or RANDOM.
        worker: this node's number.
        bound: s, the rounds that may be computed while one is mixed.
        lease_ns: of the run. A new node waits MODEL_WAIT_LEASES of these for a peer that has a model.
        mixing: the model and what it shares with each peer.
        round: that this node begins with.
    """

    def __init__(self, topology: str, worker: int, bound: int, lease_ns: int, mixing: Mixing, round: int = 0) -> None:
        self.mixing, self.bound, self.lease_ns = mixing, bound, lease_ns
        self.exchanges = GossipExchanges(topology, worker, mixing)
        self.phase = GossipPhase.EMPTY
        self.round = round  # the next round
        self.without: set[int] = set()  # peers that have no model either
        self.elder = -1  # the peer that is asked for its model; -1: none
        self.asking_ns = -1  # since when no peer can be asked; -1: one can
        self.delivered = False  # at the end: every peer has acknowledged all offers
        self.trouble = ""  # the error that ends this node, one sentence; "": none

    @property
    def has_model(self) -> bool:
        return self.phase not in (GossipPhase.EMPTY, GossipPhase.ASKING)

    @property
    def may_step(self) -> bool:
        return self.phase is GossipPhase.COMPUTING

    def _go(self, trigger: str) -> None:
        self.phase = TRANSITIONS[trigger][self.phase]

    # Beginning.

    def begin_as_founder(self, weights: Array, model: Array | None = None) -> None:
        """Begin with the first weights of the run. No other code may change the arrays from now on.

        Args:
            weights: float32[size], the same on all founders.
            model: this node's own model, if it has moved on from `weights` since.
        """
        self.mixing.start(weights, model)
        self._go("has a model")

    def keep(self, model: Array) -> None:
        """Begin with the model that this node had at its earlier place in the run; no other code may change it."""
        self.mixing.start(model)
        self._go("has a model")

    def late(self, now_ns: int) -> Says:
        """Ask a peer for its model, to begin with it: the run is under way."""
        self._go("late")
        return self.go_on(now_ns)

    def _ask(self, now_ns: int) -> Says:
        """Ask one peer after the other for its model, the longest-standing first. Sets `trouble` if none is left."""
        able = self.exchanges.pairs.keys() - self.without
        if not self.exchanges.started or self.elder in able:
            return []
        self.elder = min(able, default=-1)
        if able:
            self.asking_ns = -1
            return [e.RequestModel(self.elder)]
        self.asking_ns = now_ns if self.asking_ns < 0 else self.asking_ns
        if now_ns - self.asking_ns > MODEL_WAIT_LEASES * self.lease_ns:
            self.trouble = "the run has begun, and no worker is left that has its model: start it again"
        return []

    # Events of peers.

    def hear(self, event: MemberEffect, now_ns: int) -> Says:
        """Handle an event of `GossipPeers`. Returns what `GossipPeers` is to do."""
        says: Says = []
        match event:
            case e.RosterChanged(roster):
                self.exchanges.admit(roster)
            case e.OfferArrived(peer, parts):
                if parts[0].number >= 0:
                    self.exchanges.arrived(event)
                elif self.phase is GossipPhase.ASKING:
                    self._adopt(event)
            case e.ModelRequested(peer):
                if self.has_model:
                    says.append(e.SendOffer(tuple(self.exchanges.whole(peer, self.round))))
                else:
                    self.peer_without_model(peer)
            case e.PeerEnded(peer):
                self.exchanges.peer_ended(peer)
            case e.PeerLost(peer, why):
                self.exchanges.lose(peer)
                says.append(_parted(peer, why))
            case e.PeersSettled():
                self.delivered = True
            case e.ServerGone():
                self.exchanges.leave_server()
        return [*says, *self._refused(), *self.go_on(now_ns)]

    def peer_without_model(self, peer: int) -> None:
        """Note that a peer which asked for a model has none itself. The peer repeats its request, so no answer is due."""
        self.without.add(peer)

    def _adopt(self, event: e.OfferArrived) -> None:
        try:
            self.mixing.take(event.parts)
        except RemoteProtocolError as error:
            self.exchanges.refuse(event.peer, error)
            return
        self.round = max(self.round, event.parts[0].round)
        self._go("has a model")

    def _refused(self) -> Says:
        """Drop peers whose offers were not valid."""
        return [say for peer, why in self.exchanges.take_refused() for say in (_parted(peer, why), e.DropPeer(peer))]

    # Rounds.

    def _exchange(self, upto: int) -> Says:
        """Mix the complete exchanges of the rounds up to `upto`, and send the offers that are due."""
        says: Says = []
        while True:
            try:
                offers = self.exchanges.exchange(upto)
            except ValueError as error:
                self._not_finite(f" ({error})")
                return says
            says += [e.SendOffer(tuple(each)) for each in offers]
            refused = self._refused()
            if not refused:
                return says
            says += refused

    def _not_finite(self, why: str = "") -> None:
        spec = self.mixing.compressor.spec if self.mixing.compressor is not None else "dense"
        what = f", and --compress {spec} can only send finite values" if why else ""
        self.trouble = f"the model is not finite after round {self.round}{why}{what}: lower the learning rate or clip"

    def _waits(self, number: int) -> bool:
        return self.exchanges.waits and self.exchanges.waiting(number)

    def _absorb(self, moved: Array, whole: bool) -> None:
        self.mixing.absorb(moved, len(self.exchanges.pairs) + 1, whole)
        if not self.mixing.finite:
            self._not_finite()

    def step(self, moved: Array | None, now_ns: int) -> Says:
        """End the local steps of a round. Call when `may_step`.

        Args:
            moved: float32[size], the change of the model by these steps; None: all steps were skipped.
            now_ns: the time.
        """
        if moved is not None:
            self._absorb(moved, whole=True)
        del moved  # an offer and a mix take as much
        self._go("stepped")
        return self.go_on(now_ns)

    def finish(self, moved: Array, now_ns: int) -> Says:
        """End after the last step. `moved`: float32[size], the change of the model by steps since the last round."""
        if self.phase not in (GossipPhase.COMPUTING, GossipPhase.OVER):
            return []
        self._absorb(moved, whole=False)
        if self.phase is GossipPhase.COMPUTING:
            self._go("finished")
        return self.go_on(now_ns)

    def go_on(self, now_ns: int) -> Says:
        """Go from phase to phase as far as the rules allow."""
        says: Says = []
        before = None
        while self.phase is not before and not self.trouble:
            before = self.phase
            says += GO[self.phase](self, now_ns) if self.phase in GO else []
        return says

    def _ready(self, now_ns: int) -> Says:
        if self.exchanges.started:
            self.round = max(self.round, self.exchanges.first_round)
            self._go("introduced")
        return []

    def _computing(self, now_ns: int) -> Says:
        return self._exchange(self.round - 1 - self.bound)

    def _catching_up(self, now_ns: int) -> Says:
        due = self.round - self.bound
        says = self._exchange(due) if self.bound else []
        if not self.trouble and not (self.bound and self._waits(due)):
            self.exchanges.begin(self.round)
            self.round += 1
            self._go("caught up")
        return says

    def _mixing(self, now_ns: int) -> Says:
        due = self.round - 1 - self.bound
        says = self._exchange(due)
        if not self._waits(due):
            self._go("may go")
        return says

    def _flushing(self, now_ns: int) -> Says:
        says = self._exchange(self.round)
        if self.exchanges.waiting(self.round) or self.trouble:
            return says
        self.exchanges.end()
        self._go("flushed")
        return [*says, e.AnnounceEnd()]

    def _ending(self, now_ns: int) -> Says:
        says = self._exchange(LAST)
        if not self.exchanges.over or self.trouble:
            return says
        self._go("all mixed")
        return [*says, e.EndAnnouncement()]


def _parted(peer: int, why: str) -> Log:
    return Log("parted", {"peer": peer, "why": why})


GO: dict[GossipPhase, Callable[[GossipDriver, int], Says]] = {
    GossipPhase.ASKING: GossipDriver._ask,
    GossipPhase.READY: GossipDriver._ready,
    GossipPhase.COMPUTING: GossipDriver._computing,
    GossipPhase.CATCHING_UP: GossipDriver._catching_up,
    GossipPhase.MIXING: GossipDriver._mixing,
    GossipPhase.FLUSHING: GossipDriver._flushing,
    GossipPhase.ENDING: GossipDriver._ending,
}
