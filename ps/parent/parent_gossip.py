"""One shard as a child that gossips: it mixes its keys with the same shard of other clusters. No I/O.

How it works

    x moves (clocks of the cluster fold) ──step──> driver ──offers──> peers
    offers of peers ──> driver ──mix──> model ──Rebase──> x = model + what was folded since the last round

1. `begin`: at clock 0 of the parent's run the first weights come from the parent. Later, a peer gives its model; a
   cluster that had a model at an earlier seat keeps it.
2. After `local_steps` clocks `send_up` begins a round: the driver takes what x moved by, and makes an offer to each
   peer of the round.
3. `hear` and `take` hand the peers' offers to the driver (`_go_on`), which mixes them into the model.
4. `may_publish` is False while a mix is awaited that the staleness bound requires. Then `rebase` moves x onto the
   model.
5. `finish` begins the last round, after which all clusters have one model. The cluster with the lowest number pushes it
   to the parent (`_over`).

Rules
- A cluster is to its peers what a worker of a gossip run is to its own. Its inner step is one advance of its min_clock,
  its update how far x moved since the last round. All shards begin rounds at the same clocks of the cluster.
- The parent gives the first weights and the roster, and takes the last model from the cluster with the lowest number.
  The run goes on if the parent is lost.
- Before a clock is published all rounds up to t - s are mixed in (round t, staleness bound s), and x is the mixed model
  plus what was folded since the last round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from narrows.compression import Memory
from narrows.compression.home import HOST
from narrows.compression.replica import HostReplica
from narrows.compression.sampling import gossip_sample
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS, Log, MemberEffect, PeerSay, SendToPeer
from narrows.protocols.gossip import mixing
from narrows.protocols.gossip.driver import GossipDriver, GossipPhase
from narrows.protocols.gossip.gain import GossipGain
from narrows.protocols.gossip.outer_momentum import outer
from narrows.protocols.gossip.peers import GossipPeers
from narrows.protocols.member.member import Member
from narrows.protocols.wire import decode
from narrows.ps.parent.parent_link import Asks, ParentSeat, ParentSession, ParentState
from narrows.ps.store.changes import Change, FloatArray

WAITING = (
    GossipPhase.CATCHING_UP,
    GossipPhase.MIXING,
)  # in these phases a peer's model is awaited before the next clock


class ParentGossip:
    """The keys [begin, end) toward the same shard of other clusters."""

    def __init__(
        self, index: int, place: ParentSeat, keys: Keys, kept: ParentState, member: Member | None, timing: Timing
    ) -> None:
        """A link before its first message.

        Args:
            index: The number of this shard.
            place: The seat.
            keys: The key range [begin, end) of the shard.
            kept: What an earlier seat has left.
            member: In process 0: the cluster's member. Its peers are this link's too, and `take` gets their events.
            timing: The limits of every wait.
        """
        replica = HostReplica(*keys, [], parts)
        self.seat = ParentSession(index, place, kept, member, timing, replica, whole=True)
        settings, worker = place.settings, place.worker
        seed, lease_ns = worker << 16 | index, int(settings.lease * NS)
        gain, step = self._gain(settings, keys[1] - keys[0]), kept.outer or outer(settings)
        self.seat.keep(gain=gain, outer=step)
        model = mixing.Mixing(*keys, place.codecs.up.mixer(), HOST, partial(Memory, seed=seed), gain, step)
        self.driver = GossipDriver(settings.topology, worker, self.seat.mode.bound or 0, lease_ns, model, place.round)
        ours = member.peers if member is not None else None
        self.peers = ours if ours is not None else GossipPeers(worker, lease_ns, index)
        self.alone = self.handed_over = False
        self.roster = b""

    def _gain(self, settings: Settings, size: int) -> GossipGain | None:
        """Return the gain of mixing, that of an earlier seat if there is one. None if a round has several clocks."""
        if self.seat.mode.local_steps > 1:
            return None
        fixed, kept = max(settings.update_gain, 0.0), self.seat.kept
        if kept.gain is None:
            return GossipGain(gossip_sample(size), kept.degree, fixed)
        kept.gain.fix(fixed)
        return kept.gain

    @property
    def kept(self) -> ParentState:
        """What outlives this seat, with the model as it is now."""
        kept = self.seat.kept
        return replace(kept, model=self.driver.mixing.model) if self.driver.has_model else kept

    @property
    def before(self) -> FloatArray | None:
        """The model that the workers here have computed on since an earlier seat, None if there is none."""
        kept = self.seat.kept
        return kept.model if kept.start is not None and not kept.renewed else None

    def begin(self, now_ns: int) -> Asks:
        """Begin with all pairs of peers anew.

        If the clock of the parent's run is 0, the run begins with the first weights. Else a model is at the peers, or
        here.
        """
        place, before = self.seat.place, self.before
        if place.clock == 0:
            return self.seat.begin(now_ns)
        self.seat.exchange.begin(place.worker, place.epoch, place.clock)
        self.seat.replica.handed_over()  # to nobody: no state of the parent comes at this clock
        if before is not None:
            self.driver.keep(before)
            self.seat.keep(model=None)
            return []
        return self._go_on(self.driver.late(now_ns), now_ns)

    def take(self, events: Iterable[MemberEffect], now_ns: int) -> Asks:
        effects: Asks = []
        for event in events:
            if isinstance(event, e.OfPeers):
                effects += self._go_on([event], now_ns)
                continue
            effects += self.seat.take(event, now_ns)
            if isinstance(event, e.StateArrived) and self.driver.phase is GossipPhase.EMPTY:
                self.driver.begin_as_founder(self.seat.replica.handed_over(), self.before)
                self.seat.keep(model=None)
                effects += self._go_on(self.driver.go_on(now_ns), now_ns)
        return effects

    # Peers.

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        return self.seat.give_weights(x, now_ns)

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> Asks:
        """Take the packed roster of the other clusters. `alone`: the parent is lost and will send no newer one."""
        effects: Asks = []
        if self.seat.own and roster != self.roster:
            self.roster, message = roster, decode([roster])
            if isinstance(message, m.Roster):
                effects += self._go_on(self.peers.roster(message, now_ns), now_ns)
        if alone and not self.alone:
            self.alone = True
            effects += self._go_on([e.ServerGone()], now_ns)
        return effects

    def hear(self, message: m.Message, now_ns: int) -> Asks:
        """Take a message of another cluster. Raises RemoteProtocolError for one that no cluster may send."""
        return self._go_on(self.peers.receive(message, now_ns), now_ns)

    def tick(self, now_ns: int) -> Asks:
        """Repeat what is not acknowledged, here and by peers."""
        effects = self.seat.tick(now_ns) if not self.alone else []
        seen = self.peers.tick(now_ns) if self.seat.own else []
        return [*effects, *self._go_on([*seen, *self.driver.go_on(now_ns)], now_ns)]

    def _go_on(self, seen: Iterable[MemberEffect | PeerSay | Log], now_ns: int) -> Asks:
        """Pass events to the driver, and the driver's messages to the peers, until neither has more to say."""
        effects, queue = Asks(), deque(seen)
        while queue:
            each = queue.popleft()
            if isinstance(each, SendToPeer):
                effects.append(each)
            elif isinstance(each, Log):
                who = f"shard {self.seat.index} no longer mixes with cluster {each.values['peer']} of the parent's run"
                effects.append(Log("above", {"shard": self.seat.index, "text": f"{who}: {each.values['why']}"}))
            elif isinstance(each, PeerSay):
                self.seat.outdate_base()
                queue.extend(self.peers.carry_out(each, now_ns))
            else:
                self.seat.outdate_base()
                queue.extendleft(reversed(self.driver.hear(each, now_ns)))
        return [*effects, *self._over(now_ns)]

    # Rounds.

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        begins = self.driver.has_model and not self.seat.ready
        return self.seat.begin_with(self.driver.mixing.model.copy, x, publication) if begins else []

    def _moved_by(self, x: FloatArray) -> FloatArray:
        """Return how far x moved since the last round, float32[size], and begin to count anew."""
        moved: FloatArray = x - self.seat.start
        self.seat.keep(start=x.copy())
        return moved

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Begin the next round with what the weights have moved by."""
        if self.seat.inner < self.seat.mode.local_steps:
            return [], True
        if not self.seat.ready or self.driver.phase in (GossipPhase.READY, *WAITING):
            return [], False
        self.seat.begin_round()
        return (self._go_on(self.driver.step(self._moved_by(x), now_ns), now_ns) if self.driver.may_step else []), True

    def may_publish(self) -> bool:
        return self.seat.ready and self.driver.phase not in WAITING

    def rebase(self) -> list[Change]:
        if not self.seat.due or not self.may_publish():
            return []
        self.seat.made_base()
        return self.seat.move_onto(self.driver.mixing.model.copy())

    # The end.

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Begin the last round, and answer peers until all clusters are done. The last model is the mean of all."""
        if not self.seat.ready or self.driver.phase in (GossipPhase.READY, *WAITING):
            return [], False
        self.seat.await_last()
        joins = self.driver.phase in (GossipPhase.COMPUTING, GossipPhase.OVER)
        return self._go_on(self.driver.finish(self._moved_by(x), now_ns) if joins else [], now_ns), True

    @property
    def at_rest(self) -> bool:
        """True if the parent and the peers have acknowledged all that was sent."""
        above = self.alone or self.seat.session.at_rest
        phase, done = self.driver.phase, self.driver.delivered
        return above and (
            phase not in (GossipPhase.FLUSHING, GossipPhase.ENDING, GossipPhase.OVER)
            or (phase is GossipPhase.OVER and done)
        )

    @property
    def ended(self) -> bool:
        """True if the last round is done here, and peers are only answered until all have done theirs."""
        return self.driver.phase in (GossipPhase.ENDING, GossipPhase.OVER)

    def _over(self, now_ns: int) -> Asks:
        """After the last round take the last model. The cluster with the lowest number pushes it to the parent."""
        if self.driver.phase is not GossipPhase.OVER:
            return []
        if self.seat.finishing:
            self.seat.take_last(self.driver.mixing.model.copy())
        lowest = all(peer > self.seat.place.worker for peer in self.driver.exchanges.pairs)
        if self.handed_over or self.alone or not lowest:
            return []
        self.handed_over = True
        return self.seat.send(self.seat.exchange.push(self.driver.mixing.whole(), 1), now_ns)
