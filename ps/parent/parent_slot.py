"""Gives one shard, in one generation, the seat at the parent that the ledger names, and takes it away. No I/O.

Rules
- A seat is taken between two clocks, at the clock that it names, by all shards alike.
- A seat is kept as it is if its server is another (a standby has taken over), or if the parent's run has another plan:
  all shards have pushed equally many updates there, at whichever stage of its clock each shard is.
- Messages of other clusters that come before the seat is taken are kept until then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.timing import Timing
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.peers import EARLY_MAX, GossipPeer
from narrows.protocols.member.member import Member
from narrows.ps.parent.parent_gossip import ParentGossip
from narrows.ps.parent.parent_link import Asks, ParentLink, ParentSeat, ParentSession, ParentState
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.store.changes import FloatArray

# By the rule of the parent's run; ParentPush for all other rules.
ABOVE: dict[FoldRule, type[ParentPush | ParentGossip]] = {FoldRule.MIX: ParentGossip}


class ParentSlot:
    """The slot of one shard: empty, or with a seat in the parent's run."""

    def __init__(
        self, index: int, keys: Keys, child: bool, member: Member | None, timing: Timing, degree: float
    ) -> None:
        """An empty slot.

        Args:
            index: The number of the shard.
            keys: The key range [begin, end) of the shard.
            child: True if the cluster has a parent.
            member: In process 0: the cluster's member of the parent's run.
            timing: The limits of every wait.
            degree: How updates of the optimizer here scale, as in `ModelSpec`.
        """
        self.index, self.keys, self.child, self.member, self.timing = index, keys, child, member, timing
        self.link: ParentLink | None = None  # while the cluster has a seat
        self._kept = ParentState(degree=degree)  # of the seat before, while there is none
        self.taken = b""  # the packed seat, as the ledger has it; b"" for none
        self.finishes = 0  # the ledger's `finishes` that this shard has carried out at this seat
        self.early: deque[m.Message] = deque(maxlen=EARLY_MAX)

    @property
    def kept(self) -> ParentState:
        """What outlives a seat."""
        return self.link.kept if self.link is not None else self._kept

    @property
    def seat(self) -> ParentSession | None:
        """The seat, None for none."""
        return self.link.seat if self.link is not None else None

    @property
    def gossip(self) -> ParentGossip | None:
        """The link, if it gossips."""
        return self.link if isinstance(self.link, ParentGossip) else None

    @property
    def others(self) -> Mapping[int, GossipPeer]:
        """The other clusters, by their numbers in the parent's run (gossip)."""
        return self.gossip.peers.peers if self.gossip is not None else {}

    @property
    def addresses(self) -> set[str]:
        """The addresses of the other clusters."""
        return {peer.address for peer in self.others.values()}

    @property
    def trouble(self) -> str:
        """The reason to end this link, and the cluster with it; "" for none."""
        return self.gossip.driver.trouble if self.gossip is not None else ""

    @property
    def ready(self) -> bool:
        """True once the first state of this seat is here."""
        return self.link is not None and self.link.seat.ready

    @property
    def at_rest(self) -> bool:
        """True if the parent has acknowledged all that was pushed."""
        if self.gossip is not None:
            return self.gossip.at_rest
        return self.seat is None or self.seat.session.at_rest

    @property
    def ended(self) -> bool:
        """True if the last round is done here, and peers are only answered until all have done theirs (gossip)."""
        return isinstance(self.link, ParentGossip) and self.link.ended

    def placed(self, ledger: m.Ledger) -> bool:
        """True if the shard has the seat that the ledger names."""
        return bool(ledger.above) and self.taken == ledger.above

    def wanted(self, ledger: m.Ledger) -> ParentSeat | None:
        """Return the seat that is still to be taken, None for none. Give up a seat that the ledger no longer names."""
        if not self.child or self.taken == ledger.above:
            return None
        if not ledger.above:
            self.link, self._kept, self.taken = None, self.kept, b""
            return None
        return ParentSeat.unpacked(ledger.above)

    def keep(self, place: ParentSeat, ledger: m.Ledger, now_ns: int) -> Asks | None:
        """Keep a seat that differs only in its server, plan or hold.

        Returns:
            The effects, or None if `place` is another seat.
        """
        seat, said = self.seat, Asks()
        if seat is not None and place.turned(seat.place):
            if seat.turn(place):
                self.repeat_soon()
        elif seat is not None and place.follows(seat.place):
            if not isinstance(self.link, ParentPush):
                raise RemoteProtocolError("no parent has a plan that changes")
            said = self.link.go_on(place, now_ns)
        else:
            return None
        self.taken = ledger.above
        return said

    def owe(self, owed: FloatArray | None) -> None:
        """Keep what an earlier process owes the parent, unless this one knows newer figures."""
        if not self.child or owed is None or self.kept.residual is not None:
            return
        if isinstance(self.link, ParentPush):
            self.link.owe(owed)
        else:
            self._keep(owed=owed)

    def renew(self) -> None:
        """Note that no worker here has a state of an earlier seat."""
        self._keep(renewed=True)

    def _keep(self, **changes: Any) -> None:
        """Change fields of what outlives a seat."""
        if self.seat is not None:
            self.seat.keep(**changes)
        else:
            self._kept = replace(self._kept, **changes)

    def take_place(self, place: ParentSeat, ledger: m.Ledger, now_ns: int) -> Asks:
        """Begin at this seat."""
        kind = ABOVE.get(place.settings.mode().rule, ParentPush)
        self.finishes, self.taken = 0, ledger.above
        self.link = kind(self.index, place, self.keys, self.kept, self.member, self.timing)
        self._kept = ParentState()  # the seat has it now
        return self.link.begin(now_ns)

    def introduce(self, ledger: m.Ledger, now_ns: int) -> Asks:
        """Hand the link the roster of the other clusters, and the messages of theirs that came too early."""
        if not self.placed(ledger):
            return []
        gossip = self.gossip
        effects = gossip.introduce(ledger.roster, ledger.alone, now_ns) if gossip is not None else []
        while self.early:
            with contextlib.suppress(RemoteProtocolError):
                effects += self._heard(self.early.popleft(), now_ns)
        return effects

    def hear(self, message: m.Message, ledger: m.Ledger, now_ns: int) -> Asks:
        """Take a message of another cluster. Raises RemoteProtocolError for one that no cluster may send."""
        if self.child and not self.placed(ledger):
            self.early.append(message)
            return []
        return self._heard(message, now_ns)

    def _heard(self, message: m.Message, now_ns: int) -> Asks:
        if self.gossip is None:
            raise RemoteProtocolError(f"a shard takes no {type(message).__name__}: this cluster has no parent")
        return self.gossip.hear(message, now_ns)

    def repeat_soon(self, peer: str = "") -> None:
        """Have the next tick repeat what is not acknowledged.

        Args:
            peer: The address of another cluster whose connection is new; "" for the parent's shard.
        """
        if self.seat is not None and not peer:
            self.seat.session.repeat_soon()
        if self.gossip is not None:
            self.gossip.peers.repeat_soon(peer)

    def tick(self, now_ns: int) -> Asks:
        """Repeat what is not acknowledged."""
        if self.gossip is not None:
            return self.gossip.tick(now_ns)
        return self.seat.tick(now_ns) if self.seat is not None else []

    def finish(self, ledger: m.Ledger, min_clock: int, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push the rest once all workers are done.

        Returns:
            The effects, and False if the push must wait. A root has the last model here already.
        """
        if self.finishes == ledger.finishes or min_clock < ledger.finish_at or (self.child and not self.placed(ledger)):
            return [], True
        asked, done = self.link.finish(x, now_ns) if self.link is not None else ([], True)
        if done:
            self.finishes = ledger.finishes
        return asked, done
