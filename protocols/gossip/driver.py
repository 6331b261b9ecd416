"""One node of a gossip run, a worker or a shard of a cluster: when it computes, mixes, asks for a model and ends. Pure.

How it works (TRANSITIONS has every phase)

    EMPTY ─> ASKING ─> READY ─> COMPUTING ─step─> ROOM ─> MIXING ─> COMPUTING ... ─finish─> FLUSHING ─> ENDING ─> OVER

1. A node that joins a run under way asks the longest-standing peer that has a model for it (ASKING), and begins with
   that peer's round.
2. COMPUTING: the owner takes the local steps of round t and hands over how far they moved the model (`step`).
3. ROOM: with s >= 1 the mixes that are due before round t are applied first, so that its offers hold them.
4. MIXING: round t is offered to its partners (`GossipExchanges.begin`). The next steps begin once all mixes up to
   round t - s are applied. s = 0 is D_FP_S of BAGUA (2107.01499); with s = 1 the link's time lies under the next
   computation.
5. `finish`: the node mixes the rounds that have begun (FLUSHING), then mixes with each peer that asks until all are
   done (ENDING). One last round of all pairs makes the mean of all models (OVER).

Rules
- Mixes are applied in the order of rounds and worker ids, each when its turn comes: two runs give the same models,
  bit for bit.
- The owner hands the driver what `GossipPeers` has received (`hear`), and hands `GossipPeers` what the driver
  returns. The two may run in two threads.
- `trouble` is one sentence that ends this node.
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
    """How far a node is."""

    EMPTY = "empty"  # the first weights are on their way
    ASKING = "asking"  # the run had begun: a peer is asked for its model
    READY = "ready"  # the model is here, the first roster is not
    COMPUTING = "computing"  # steps are taken
    ROOM = "room"  # a round is computed; the mixes that are due before it are awaited
    MIXING = "mixing"  # the round has begun; the mixes that are due before the next steps are awaited
    FLUSHING = "flushing"  # the last step is done; rounds that have begun are mixed
    ENDING = "ending"  # the others are awaited
    OVER = "over"  # the model is the mean of all


# An event -> the phases that it happens in -> the phase after it.
TRANSITIONS: dict[str, dict[GossipPhase, GossipPhase]] = {
    "late": {GossipPhase.EMPTY: GossipPhase.ASKING},
    "has a model": {GossipPhase.EMPTY: GossipPhase.READY, GossipPhase.ASKING: GossipPhase.READY},
    "introduced": {GossipPhase.READY: GossipPhase.COMPUTING},
    "stepped": {GossipPhase.COMPUTING: GossipPhase.ROOM},
    "has room": {GossipPhase.ROOM: GossipPhase.MIXING},
    "may go": {GossipPhase.MIXING: GossipPhase.COMPUTING},
    "finished": {GossipPhase.COMPUTING: GossipPhase.FLUSHING},
    "flushed": {GossipPhase.FLUSHING: GossipPhase.ENDING},
    "all mixed": {GossipPhase.ENDING: GossipPhase.OVER},
}


class GossipDriver:
    """`bound`: rounds that may be computed while one is mixed. `lease_ns`: of a peer that is asked for its model.

    trouble: what ends this node, one sentence, "" while nothing does.
    """

    def __init__(self, topology: str, worker: int, bound: int, lease_ns: int, mixing: Mixing, round: int = 0) -> None:
        self.mixing, self.bound, self.lease_ns = mixing, bound, lease_ns
        self.exchanges = GossipExchanges(topology, worker, mixing)
        self.phase = GossipPhase.EMPTY
        self.round = round  # the next
        self.without: set[int] = set()  # peers that have no model either
        self.elder = -1  # who is asked for the model
        self.asking_ns = -1  # since when there is nobody that could be asked
        self.delivered = False  # every peer has all that was sent to it at the end
        self.trouble = ""

    @property
    def has_model(self) -> bool:
        return self.phase not in (GossipPhase.EMPTY, GossipPhase.ASKING)

    @property
    def may_step(self) -> bool:
        return self.phase is GossipPhase.COMPUTING

    def _go(self, trigger: str) -> None:
        self.phase = TRANSITIONS[trigger][self.phase]

    # Beginning.

    def found(self, weights: Array, model: Array | None = None) -> None:
        """Begin with the first weights of the run. `model`: this node's own, where it had come on since."""
        self.mixing.start(weights)
        if model is not None:
            self.mixing.model = self.mixing.copied(model)
        self._go("has a model")

    def keep(self, model: Array) -> None:
        """Begin with the model that this node had at the place before."""
        self.mixing.start(model)
        self._go("has a model")

    def late(self, now_ns: int) -> Says:
        """Begin with the model of a peer: the run has begun."""
        self._go("late")
        return self.go_on(now_ns)

    def _ask(self, now_ns: int) -> Says:
        """One peer after the other for its model, the longest-standing first."""
        able = self.exchanges.pairs.keys() - self.without
        if not self.exchanges.started or self.elder in able:
            return []
        self.elder = min(able, default=-1)
        if able:
            self.asking_ns = -1
            return [e.AskModel(self.elder)]
        self.asking_ns = now_ns if self.asking_ns < 0 else self.asking_ns
        if now_ns - self.asking_ns > MODEL_WAIT_LEASES * self.lease_ns:
            self.trouble = "the run has begun, and nobody is left that could give its model: start it again"
        return []

    # Events of peers.

    def hear(self, event: MemberEffect, now_ns: int) -> Says:
        """Take an event that `GossipPeers` has seen."""
        says: Says = []
        match event:
            case e.RosterNews(roster):
                self.exchanges.admit(roster)
            case e.OfferArrived(peer, parts):
                if parts[0].number >= 0:
                    self.exchanges.arrived(event)
                elif self.phase is GossipPhase.ASKING:
                    self._adopt(event)
            case e.AdoptAsked(peer):
                if self.has_model:
                    says.append(e.SendOffer(tuple(self.exchanges.whole(peer, self.round))))
                else:
                    self.has_none(peer)
            case e.PeerEnded(peer):
                self.exchanges.peer_ended(peer)
            case e.PeerLost(peer, why):
                self.exchanges.lose(peer)
                says.append(_parted(peer, why))
            case e.PeersSettled():
                self.delivered = True
            case e.ServerGone():
                self.exchanges.alone = True
        return [*says, *self._refused(), *self.go_on(now_ns)]

    def has_none(self, peer: int) -> None:
        """It asks for a model itself, again and again, and is not asked."""
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
        """Part with peers whose offers were none."""
        refused, self.exchanges.refused = self.exchanges.refused, []
        return [say for peer, why in refused for say in (_parted(peer, why), e.Drop(peer))]

    # Rounds.

    def _exchange(self, upto: int) -> Says:
        """Mix what is complete of the rounds up to `upto`, and offer what is due."""
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
        """The steps of a round are done, and have moved the model by so much, None: all were left out; it `may_step` now."""
        if moved is not None:
            self._absorb(moved, whole=True)
        self._go("stepped")
        return self.go_on(now_ns)

    def finish(self, moved: Array, now_ns: int) -> Says:
        """The last step is done; what was computed since the last round has moved the model by so much."""
        if self.phase not in (GossipPhase.COMPUTING, GossipPhase.OVER):
            return []
        self._absorb(moved, whole=False)
        if self.phase is GossipPhase.COMPUTING:
            self._go("finished")
        return self.go_on(now_ns)

    def go_on(self, now_ns: int) -> Says:
        """As far as the rules let it."""
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

    def _room(self, now_ns: int) -> Says:
        due = self.round - self.bound
        says = self._exchange(due) if self.bound else []
        if not self.trouble and not (self.bound and self._waits(due)):
            self.exchanges.begin(self.round)
            self.round += 1
            self._go("has room")
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
        return [*says, e.SayEnded()]

    def _ending(self, now_ns: int) -> Says:
        says = self._exchange(LAST)
        if not self.exchanges.over or self.trouble:
            return says
        self._go("all mixed")
        return [*says, e.SayOver()]


def _parted(peer: int, why: str) -> Log:
    return Log("parted", {"peer": peer, "why": why})


GO: dict[GossipPhase, Callable[[GossipDriver, int], Says]] = {
    GossipPhase.ASKING: GossipDriver._ask,
    GossipPhase.READY: GossipDriver._ready,
    GossipPhase.COMPUTING: GossipDriver._computing,
    GossipPhase.ROOM: GossipDriver._room,
    GossipPhase.MIXING: GossipDriver._mixing,
    GossipPhase.FLUSHING: GossipDriver._flushing,
    GossipPhase.ENDING: GossipDriver._ending,
}
