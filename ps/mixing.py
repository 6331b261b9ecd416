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

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from narrows.compression import Memory, codecs, parse
from narrows.compression.replica import HostReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, Log, MemberEffect, Tell
from narrows.protocols.gossip import mixing
from narrows.protocols.gossip.driver import Driver, Phase, Says
from narrows.protocols.gossip.peers import Peers
from narrows.protocols.keys import Keys, parts
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member
from narrows.protocols.timing import Timing
from narrows.protocols.wire import decode
from narrows.ps.above import Asks, Kept, Place, Root, asks, session_of
from narrows.ps.store import Change, FloatArray, Load, Rebase

OF_PEERS = (e.RosterNews, e.OfferArrived, e.AdoptAsked, e.PeerEnded, e.PeerLost, e.PeersSettled)
WAITING = (Phase.ROOM, Phase.MIXING)  # a peer's model is awaited before the next clock


class Mixing(Root):
    """Keys [begin, end) of one shard, toward the same shard of other clusters. `member`: in process 0, whose session and peers
    are ours too; what they see comes to `take`."""

    def __init__(self, index: int, place: Place, keys: Keys, kept: Kept, member: Member | None, timing: Timing) -> None:
        settings, mode = place.settings, place.settings.mode()
        compressor = None if settings.compress == "dense" else parse(settings.compress).contraction()
        seed, lease_ns = place.worker << 16 | index, int(settings.lease * NS)
        model = mixing.Mixing(*keys, compressor, codecs, lambda: Memory(seed=seed))
        super().__init__(kept, place)
        self.index, self.here, self.keys = index, place, keys
        self.session, self.own = session_of(index, place, member, timing), member is None
        self.driver = Driver(settings.topology, place.worker, mode.bound or 0, lease_ns, model, place.round)
        ours = member.peers if member is not None else None
        self.peers = ours if ours is not None else Peers(place.worker, lease_ns, index)
        # With the server above: the first weights come from it, the last model goes to it.
        self.pulled = HostReplica(*keys, [], parts)
        self.exchange: Exchange[FloatArray] = Exchange(index, mode, self.pulled, whole=True)
        self.steps, self.inner = mode.local_steps, 0  # clocks of the cluster in a round, and since the last
        self.due = False  # something was mixed since the base was made
        self.finishing = self.alone = self.handed_over = False
        self.roster = b""

    @property
    def kept(self) -> Kept:
        return replace(self._kept, model=self.driver.mixing.model if self.driver.has_model else self._kept.model)

    @kept.setter
    def kept(self, kept: Kept) -> None:
        self._kept = kept

    @property
    def keeps(self) -> bool:
        """Workers here compute on the model that was here before this place."""
        return self._kept.start is not None and self._kept.model is not None and not self._kept.renewed

    def begin(self, now_ns: int) -> Asks:
        """All pairs begin anew at this place. With a clock above of 0 the run begins, from the weights that are there; else its
        model is with the peers."""
        place = self.here
        if place.clock == 0:
            return self._say(self.exchange.begin(place.worker, place.epoch, 0), now_ns)
        self.exchange.begin(place.worker, place.epoch, place.clock)
        if self.keeps and self._kept.model is not None:
            self.driver.keep(self._kept.model)
            return []
        return self._do(self.driver.late(now_ns), now_ns)

    def _say(self, messages: list[m.Message], now_ns: int) -> Asks:
        return asks(self.session.say(messages, now_ns))

    def take(self, events: Iterable[MemberEffect], x: FloatArray, now_ns: int) -> Asks:
        effects: Asks = []
        for event in events:
            effects += asks([event])
            if isinstance(event, OF_PEERS):
                effects += self._pump([event], now_ns)
                continue
            self.wants_weights |= isinstance(event, e.GiveWeights)
            effects += self._say(self.exchange.take(event), now_ns)
            if isinstance(event, e.StateArrived) and self.driver.phase is Phase.EMPTY:
                weights = self.pulled.pulled
                self.driver.found(weights, self._kept.model if self.keeps else None)
                effects += self._do(self.driver.go_on(now_ns), now_ns)
        return effects

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        self.wants_weights = False
        return self._say(self.exchange.give(codecs.raw_pieces(x.copy(), self.keys[0], parts(*self.keys))), now_ns)

    # Peers.

    @property
    def addresses(self) -> set[str]:
        return {peer.address for peer in self.peers.peers.values()}

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> Asks:
        effects: Asks = []
        if self.own and roster != self.roster:
            self.roster, message = roster, decode([roster])
            if isinstance(message, m.Roster):
                effects += self._pump(self.peers.roster(message, now_ns), now_ns)
        if alone and not self.alone:
            self.alone = True
            effects += self._pump([e.ServerGone()], now_ns)
        return effects

    def hear(self, message: m.Message, now_ns: int) -> Asks:
        return self._pump(self.peers.receive(message, now_ns), now_ns)

    def tick(self, now_ns: int) -> Asks:
        effects = asks(self.session.repeat(now_ns)) if self.own and not self.alone else []
        seen = self.peers.tick(now_ns) if self.own else []
        return [*effects, *self._pump(seen, now_ns), *self._do(self.driver.tick(now_ns), now_ns)]

    def _pump(self, events: Iterable[MemberEffect], now_ns: int) -> Asks:
        """What peers have said, to the driver, and what that says back."""
        effects, queue = Asks(), deque(events)
        while queue:
            event = queue.popleft()
            if isinstance(event, Tell):
                effects.append(event)
                continue
            for say in self.driver.hear(event, now_ns):
                if isinstance(say, Log):
                    effects.append(self._parted(say))
                else:
                    queue.extend(self.peers.carry_out(say, now_ns))
            self.due = True
        return [*effects, *self._over(now_ns)]

    def _do(self, says: Says, now_ns: int) -> Asks:
        effects: Asks = []
        for say in says:
            known = isinstance(say, Log)
            effects += (
                [self._parted(say)] if isinstance(say, Log) else self._pump(self.peers.carry_out(say, now_ns), now_ns)
            )
            self.due |= not known
        return [*effects, *self._over(now_ns)]

    def _parted(self, log: Log) -> Log:
        text = (
            f"shard {self.index} mixes no more with cluster {log.values['peer']} of the run above: {log.values['why']}"
        )
        return Log("above", {"shard": self.index, "text": text})

    @property
    def trouble(self) -> str:
        return self.driver.trouble

    # Rounds.

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        if self.ready or not self.driver.has_model:
            return []
        self.ready, before = True, self._kept.start
        if before is not None and self.keeps:
            return []
        base = self.driver.mixing.model.copy()
        self._kept = replace(self._kept, start=base, renewed=False)
        weights = base if before is None else x - before + base
        return [Load({"x": weights, "p": weights}, publication)]

    def _moved_by(self, x: FloatArray) -> FloatArray:
        assert self._kept.start is not None  # ready
        moved: FloatArray = x - self._kept.start
        self._kept = replace(self._kept, start=x.copy())
        return moved

    def stepped(self, samples: int) -> None:
        self.inner += 1
        self.moved()

    def moved(self) -> None:
        self.master, self.finishing = None, False

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Begin the next round with what the weights have moved by."""
        if self.inner < self.steps:
            return [], True
        if not self.ready or self.driver.phase in (Phase.READY, *WAITING):
            return [], False
        self.inner, self.due = 0, True
        return (self._do(self.driver.step(self._moved_by(x), now_ns), now_ns) if self.driver.may_step else []), True

    def may_publish(self) -> bool:
        return self.ready and self.driver.phase not in WAITING

    def rebase(self) -> list[Change]:
        if not self.due or not self.may_publish():
            return []
        self.due = False
        return self._on(self.driver.mixing.model.copy())

    def last(self) -> list[Change]:
        return self._on(self.master) if self.master is not None and self._kept.start is not self.master else []

    def _on(self, base: FloatArray) -> list[Change]:
        before, self._kept = self._kept.start, replace(self._kept, start=base)
        assert before is not None
        return [Rebase(before, base)]

    # The end.

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Mix with whoever asks until all clusters are done; then the mean of all is the last model."""
        if not self.ready or self.driver.phase in (Phase.READY, *WAITING):
            return [], False
        self.finishing, self.master = True, None
        joins = self.driver.phase in (Phase.COMPUTING, Phase.OVER)
        return self._do(self.driver.finish(self._moved_by(x), now_ns) if joins else [], now_ns), True

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        return self.session.receive(message, now_ns)

    @property
    def clock(self) -> int:
        return self.exchange.clock if self.ready else -1

    @property
    def at_rest(self) -> bool:
        above = self.alone or self.session.at_rest
        phase, done = self.driver.phase, self.driver.delivered
        return above and (phase not in (Phase.FLUSHING, Phase.ENDING, Phase.OVER) or (phase is Phase.OVER and done))

    @property
    def ended(self) -> bool:
        return self.driver.phase in (Phase.ENDING, Phase.OVER)

    def _over(self, now_ns: int) -> Asks:
        """The last round is mixed: the cluster with the lowest id hands the model to the server above, for all."""
        if self.driver.phase is not Phase.OVER:
            return []
        if self.finishing:
            self.master, self.finishing = self.driver.mixing.model.copy(), False
        lowest = all(peer > self.here.worker for peer in self.driver.exchanges.pairs)
        if self.handed_over or self.alone or not lowest:
            return []
        self.handed_over = True
        return self._say(self.exchange.push(self.driver.mixing.whole(), 1), now_ns)
