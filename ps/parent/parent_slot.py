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
from dataclasses import replace

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.timing import Timing
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.peers import EARLY_MAX
from narrows.protocols.member.member import Member
from narrows.ps.parent.parent_gossip import ParentGossip
from narrows.ps.parent.parent_link import Asks, ParentLink, ParentSeat, ParentState
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
        self.above = ParentLink(ParentState(degree=degree))
        self.taken = b""  # the packed seat, as the ledger has it; b"" for none
        self.finishes = 0  # the ledger's `finishes` that this shard has carried out at this seat
        self.early: deque[m.Message] = deque(maxlen=EARLY_MAX)

    def placed(self, ledger: m.Ledger) -> bool:
        """True if the shard has the seat that the ledger names."""
        return bool(ledger.above) and self.taken == ledger.above

    def wanted(self, ledger: m.Ledger) -> ParentSeat | None:
        """Return the seat that is still to be taken, None for none. Give up a seat that the ledger no longer names."""
        if not self.child or self.taken == ledger.above:
            return None
        if not ledger.above:
            self.above, self.taken = ParentLink(self.above.kept), b""
            return None
        return ParentSeat.unpacked(ledger.above)

    def keep(self, place: ParentSeat, ledger: m.Ledger, now_ns: int) -> Asks | None:
        """Keep a seat that differs only in its server, plan or hold.

        Returns:
            The effects, or None if `place` is another seat.
        """
        above, said = self.above, Asks()
        if place.turned(above.place):
            above.turn(place)
        elif place.follows(above.place):
            said = above.go_on(place, now_ns)
        else:
            return None
        self.taken = ledger.above
        return said

    def owe(self, owed: FloatArray | None) -> None:
        """Keep what an earlier process owes the parent, unless this one knows newer figures."""
        if self.child and owed is not None and self.above.kept.residual is None:
            self.above.owe(owed)

    def renew(self) -> None:
        """Note that no worker here has a state of an earlier seat."""
        self.above.kept = replace(self.above.kept, renewed=True)

    def take_place(self, place: ParentSeat, ledger: m.Ledger, now_ns: int) -> Asks:
        """Begin at this seat."""
        kind = ABOVE.get(place.settings.mode().rule, ParentPush)
        self.finishes, self.taken = 0, ledger.above
        self.above = kind(self.index, place, self.keys, self.above.kept, self.member, self.timing)
        return self.above.begin(now_ns)

    def introduce(self, ledger: m.Ledger, now_ns: int) -> Asks:
        """Hand the link the roster of the other clusters, and the messages of theirs that came too early."""
        if not self.placed(ledger):
            return []
        effects = self.above.introduce(ledger.roster, ledger.alone, now_ns)
        while self.early:
            with contextlib.suppress(RemoteProtocolError):
                effects += self.above.hear(self.early.popleft(), now_ns)
        return effects

    def hear(self, message: m.Message, ledger: m.Ledger, now_ns: int) -> Asks:
        """Take a message of another cluster. Raises RemoteProtocolError for one that no cluster may send."""
        if self.child and not self.placed(ledger):
            self.early.append(message)
            return []
        return self.above.hear(message, now_ns)

    def finish(self, ledger: m.Ledger, min_clock: int, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push the rest once all workers are done.

        Returns:
            The effects, and False if the push must wait. A root has the last model here already.
        """
        if self.finishes == ledger.finishes or min_clock < ledger.finish_at or (self.child and not self.placed(ledger)):
            return [], True
        asked, done = self.above.finish(x, now_ns)
        if done:
            self.finishes = ledger.finishes
        return asked, done
