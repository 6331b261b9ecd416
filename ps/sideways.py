"""One shard's part of gossip among clusters: it mixes its keys with the same shard of other clusters. No I/O.

Rules
- A cluster is to its peers what a worker of a gossip run is to its own: its inner step is one advance of its min_clock, its
  update what x moved by since the last round. All shards begin rounds at the same clocks of the cluster.
- The server above gives the first weights and the roster, and takes the last model of the lowest cluster. It may be gone.
- Before a clock is published all rounds up to t - s are mixed in, and x stands on the model of the mixes plus what was
  folded since the last round.
- Once all workers are done the last round makes one model of all clusters. What workers who come after that add stays here.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np

import narrows.compression
from narrows.compression import Memory, NonFiniteError, parse
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, Log, MemberEffect, Tell
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.exchanges import LAST, Gossip
from narrows.protocols.gossip.mixing import Mixing
from narrows.protocols.gossip.peers import Peers
from narrows.protocols.wire import decode
from narrows.ps.uplink import FloatArray, Seen, Uplink


class Phase(Enum):
    """How far this shard is on the way to the last model."""

    ROUNDS = "rounds"
    FLUSHING = "flushing"  # the workers are done; rounds that have begun are mixed
    ENDING = "ending"  # the other clusters are waited for
    OVER = "over"  # the last round is mixed


class Sideways(Uplink):
    """Keys [begin, end) of one shard, toward the same shard of other clusters; `clock` is that of the server above."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.mixing = Mixing(0, 0, None, narrows.compression, Memory)
        self.gossip = Gossip("", -1, self.mixing)
        self.peers = Peers(-1, 0)
        self.round = 0  # the next
        self.phase = Phase.ROUNDS
        self.keeps = False  # the model that was here before this place
        self.heard: tuple[bytes, bool] = (b"", False)  # the ledger's roster, and whether the server above is gone
        self.without: set[int] = set()  # peers that have no model either
        self.delivered = False  # every peer has all that was sent to it at the end

    @property
    def at_rest(self) -> bool:
        above = self.heard[1] or super().at_rest
        return above and (self.phase is Phase.ROUNDS or (self.phase is Phase.OVER and self.delivered))

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.ENDING, Phase.OVER)

    @property
    def behind(self) -> int:
        """Rounds that may be computed while one is mixed."""
        return self.view.mode.bound or 0 if self.view is not None else 0

    def _take_up(self, renewed: bool, now_ns: int) -> list[MemberEffect]:
        """All pairs begin anew at this place, and the model stays where workers here compute on it."""
        place, view = self.place, self.view
        assert place is not None and view is not None
        self.keeps = self.start is not None and not renewed
        settings, seed = place.settings, place.worker << 16 | self.index
        compressor = None if settings.compress == "dense" else parse(settings.compress).contraction()
        mixing = Mixing(view.begin, view.end, compressor, narrows.compression, lambda: Memory(seed=seed))
        if self.keeps:
            mixing.start(self.mixing.model)
        self.mixing = mixing
        self.gossip = Gossip(settings.topology, place.worker, mixing)
        self.peers = Peers(place.worker, int(settings.lease * NS), self.index)
        self.without.clear()
        self.round, self.phase, self.heard, self.delivered = place.round, Phase.ROUNDS, (b"", False), False
        # With a clock above of 0 the run begins, from the weights that are there; else its model is with the peers.
        self.ready = self.keeps and place.clock > 0
        return self._pull(now_ns) if place.clock == 0 else []

    def arrived(self, event: e.StateArrived, now_ns: int) -> list[MemberEffect]:
        """Take over the first weights. Raises RemoteProtocolError; then nothing has changed."""
        assert self.view is not None and self.view.pulled is not None
        self.view.arrived(event)
        if self.ready or event.master:
            return []
        if self.keeps:
            self.mixing.first = self.view.pulled.copy()  # what all founders share
        else:
            self.mixing.start(self.view.pulled)
        self.due = True
        return []

    # Peers.

    @property
    def addresses(self) -> set[str]:
        return {peer.address for peer in self.peers.peers.values()}

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> list[Seen]:
        """Go by the roster of the ledger; `alone`: no server above will say more."""
        if self.place is None or (roster, alone) == self.heard:
            return []
        self.heard = (roster, alone)
        self.gossip.alone = alone
        message = decode([roster]) if roster else None
        seen = self.peers.roster(message, now_ns) if isinstance(message, m.Roster) else []
        return [*self._take(seen, now_ns), *self._go_on(now_ns)]

    def hear(self, message: m.Message, now_ns: int) -> list[Seen]:
        """Return the effects of a peer's message. Raises RemoteProtocolError for one that no peer sends."""
        return [*self._take(self.peers.receive(message, now_ns), now_ns), *self._go_on(now_ns)]

    def tick(self, now_ns: int, repeats: bool) -> list[Seen]:
        effects: list[Seen] = [*super().tick(now_ns, repeats and not self.heard[1])]
        seen = self.peers.tick(now_ns)
        return [*effects, *self._take(seen, now_ns), *self._go_on(now_ns)] if seen else effects

    def _take(self, events: Iterable[MemberEffect], now_ns: int) -> list[Seen]:
        effects: list[Seen] = []
        for event in events:
            if isinstance(event, Tell):
                effects.append(event)
            elif isinstance(event, e.RosterNews):
                self.gossip.admit(event.roster)
            elif isinstance(event, e.OfferArrived):
                self._offered(event)
            elif isinstance(event, e.AdoptAsked):
                if self.ready:
                    effects += self.peers.offer(self.gossip.whole(event.peer, self.round), now_ns)
                elif event.peer in self.peers.peers:
                    self.without.add(event.peer)  # it asks again, and is not asked
                    self.peers.peers[event.peer].adopting = False
            elif isinstance(event, e.PeerEnded):
                self.gossip.peer_ended(event.peer)
            elif isinstance(event, e.PeerLost):
                effects.append(self._parted(event.peer, event.why))
                self.gossip.lose(event.peer)
            elif isinstance(event, e.PeersSettled):
                self.delivered = True
        while self.gossip.refused:
            peer, why = self.gossip.refused.pop()
            effects += [self._parted(peer, why), *self._take(self.peers.lose(peer), now_ns)]
        return effects

    def _offered(self, event: e.OfferArrived) -> None:
        if event.parts[0].number >= 0:
            self.gossip.arrived(event)
        elif not self.ready and not self.due:
            try:
                self.mixing.take(event.parts)
            except RemoteProtocolError as error:
                self.gossip.lose(event.peer)
                self.gossip.refused.append((event.peer, str(error)))
                return
            self.round, self.due = max(self.round, event.parts[0].round), True

    def _parted(self, peer: int, why: str) -> Log:
        text = f"shard {self.index} mixes no more with cluster {peer} of the run above: {why}"
        return Log("above", {"shard": self.index, "text": text})

    def _ask(self, now_ns: int) -> list[Seen]:
        """The model, of the longest-standing peer, where the run had begun without this cluster."""
        assert self.place is not None
        asked = any(peer.adopting for peer in self.peers.peers.values())
        if self.ready or self.due or asked or not self.gossip.started or not self.place.clock:
            return []
        have = self.gossip.pairs.keys() - self.without
        if not have:
            self.trouble = "the run has begun, and no cluster is left that could give its model: start it again"
            return []
        return [*self.peers.adopt(min(have), now_ns)]

    # Rounds.

    def _exchange(self, upto: int, now_ns: int) -> list[Seen]:
        """Mix what is complete of the rounds up to `upto`, and offer what is due."""
        effects: list[Seen] = []
        while self.ready and not self.trouble and self.phase is not Phase.OVER:
            try:
                offers = self.gossip.exchange(upto)
            except NonFiniteError as error:
                assert self.place is not None
                self.trouble = (
                    f"the model is not finite ({error}), and --compress {self.place.settings.compress} can only send finite "
                    "values: lower the learning rate or clip"
                )
                break
            self.due = True
            effects += [effect for each in offers for effect in self.peers.offer(each, now_ns)]
            refused = bool(self.gossip.refused)
            effects += self._take([], now_ns)
            if not refused:
                break
        return effects

    def _go_on(self, now_ns: int) -> list[Seen]:
        """As far as the rules let it."""
        if self.place is None:
            return []
        effects = self._ask(now_ns)
        # The rounds after that are mixed when the next one begins, so that two runs are the same.
        effects += self._exchange(self.round - 1 - self.behind if self.phase is Phase.ROUNDS else LAST, now_ns)
        if self.phase is Phase.FLUSHING and not self.gossip.waiting(self.round):
            self.phase = Phase.ENDING
            self.gossip.end()
            effects += self._take(self.peers.end(now_ns), now_ns)
            effects += self._exchange(LAST, now_ns)
        if self.phase is Phase.ENDING and self.gossip.over:
            self.phase = Phase.OVER
            effects += self._take(self.peers.over(), now_ns)
            effects += self._hand_over(now_ns)
        if self.phase is Phase.OVER and self.finishing:
            self.master, self.finishing = self.mixing.model.copy(), False
        return effects

    def make_room(self, now_ns: int) -> list[Seen]:
        """With s >= 1 the offers of a round hold the mixes that are due before it."""
        return self._exchange(self.round - self.behind, now_ns) if self.behind and self.phase is Phase.ROUNDS else []

    @property
    def has_room(self) -> bool:
        if not self.ready or not self.gossip.started:
            return False
        return self.phase is not Phase.ROUNDS or not self.behind or not self._waits(self.round - self.behind)

    @property
    def may_go(self) -> bool:
        """Whether the next clock may be computed on what is here."""
        return self.ready and (self.phase is not Phase.ROUNDS or not self._waits(self.round - 1 - self.behind))

    def _waits(self, number: int) -> bool:
        return self.gossip.waits and self.gossip.waiting(number)

    def _absorb(self, weights: FloatArray) -> None:
        """What x has moved by is the model's."""
        assert self.start is not None
        self.mixing.model = self.mixing.model + (weights - self.start)
        if not np.isfinite(self.mixing.model).all():
            self.trouble = "the model is not finite: lower the learning rate or clip"
        self.start = weights.copy()

    def push(self, weights: FloatArray, now_ns: int) -> list[Seen]:
        """Begin the next round with what the weights have moved by."""
        if self.phase is Phase.ROUNDS:
            self._absorb(weights)
            self.gossip.begin(self.round)
            self.round += 1
        self.inner = self.samples = 0
        return self._go_on(now_ns)

    def base(self) -> FloatArray | None:
        """What the weights are to be based on from now on, where that is new; else None."""
        if not self.due or not self.may_go:
            return None
        self.due = False
        return self.mixing.model.copy()

    # The end.

    def finish(self, weights: FloatArray, now_ns: int) -> list[Seen]:
        """Mix with whoever asks until all clusters are done; then the mean of all is the last model."""
        self.finishing, self.master = True, None
        if self.phase in (Phase.ROUNDS, Phase.OVER):
            self._absorb(weights)
        if self.phase is Phase.ROUNDS:
            self.phase = Phase.FLUSHING
        return self._go_on(now_ns)

    def _hand_over(self, now_ns: int) -> list[Seen]:
        """The last model, to the server above: by the cluster with the lowest id, for all."""
        place, session = self.place, self.session
        assert place is not None and session is not None
        if self.heard[1] or any(peer < place.worker for peer in self.gossip.pairs):
            return []
        cuts = self.mixing.whole()
        messages = [
            m.Push(place.worker, place.epoch, self.clock, part, len(cuts), begin, end, 1, b"", codec, payload)
            for part, (codec, begin, end, payload) in enumerate(cuts)
        ]
        self.clock += 1
        return [*session.push(messages, now_ns)]
