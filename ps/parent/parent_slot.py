"""Gives one shard of one generation the place above that the ledger names, and takes it away again. No I/O.

Rules
- A place is taken between two clocks, at the clock that it names, by all shards alike.
- One that is at another server now, which has taken over from the one before, is kept as it is. So is one whose run has another
  plan: all shards have pushed as many updates at it, at whichever stage of a clock here each is.
- Messages of other clusters that come before the place is taken are kept until then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.modes import Rule
from narrows.protocols.config.timing import Timing
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.peers import EARLY_MAX
from narrows.protocols.member.member import Member
from narrows.ps.parent.parent_gossip import ParentGossip
from narrows.ps.parent.parent_link import Asks, ParentLink, ParentSeat, ParentState
from narrows.ps.parent.parent_push import ParentPush
from narrows.ps.store.changes import FloatArray

ABOVE: dict[Rule, type[ParentPush | ParentGossip]] = {
    Rule.MIX: ParentGossip
}  # by the rule of the run above; of all others Pushing


class ParentSlot:
    """The place above of shard `index`, keys [begin, end). `child`: the cluster is a member of a run above; `member`:
    which one (process 0). `degree`: of the optimizer here."""

    def __init__(
        self, index: int, keys: Keys, child: bool, member: Member | None, timing: Timing, degree: float
    ) -> None:
        self.index, self.keys, self.child, self.member, self.timing = index, keys, child, member, timing
        self.above = ParentLink(ParentState(degree=degree))
        self.taken = b""  # the place, as the ledger has it; b"": none
        self.finishes = 0  # of those that the ledger counts, how many were done at this place
        self.early: deque[m.Message] = deque(maxlen=EARLY_MAX)

    def placed(self, ledger: m.Ledger) -> bool:
        """Shard and ledger have the same place above."""
        return bool(ledger.above) and self.taken == ledger.above

    def wanted(self, ledger: m.Ledger) -> ParentSeat | None:
        """The place that is still to be taken. One that the ledger has no more is given up."""
        if not self.child or self.taken == ledger.above:
            return None
        if not ledger.above:
            self.above, self.taken = ParentLink(self.above.kept), b""
            return None
        return ParentSeat.unpacked(ledger.above)

    def keep(self, place: ParentSeat, ledger: m.Ledger, now_ns: int) -> Asks | None:
        """Keep a place that is ours, where only its server, plan or hold is another, and return the asks; else None."""
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
        """Keep what a life before this one owes to the run above; what is known already is newer."""
        if self.child and owed is not None and self.above.kept.residual is None:
            self.above.owe(owed)

    def renew(self) -> None:
        """Nobody here has a state of before."""
        self.above.kept = replace(self.above.kept, renewed=True)

    def take_place(self, place: ParentSeat, ledger: m.Ledger, now_ns: int) -> Asks:
        kind = ABOVE.get(place.settings.mode().rule, ParentPush)
        self.finishes, self.taken = 0, ledger.above
        self.above = kind(self.index, place, self.keys, self.above.kept, self.member, self.timing)
        return self.above.begin(now_ns)

    def introduce(self, ledger: m.Ledger, now_ns: int) -> Asks:
        """Tell what is above who the other clusters are, and what they have said too early."""
        if not self.placed(ledger):
            return []
        effects = self.above.introduce(ledger.roster, ledger.alone, now_ns)
        while self.early:
            with contextlib.suppress(RemoteProtocolError):
                effects += self.above.hear(self.early.popleft(), now_ns)
        return effects

    def hear(self, message: m.Message, ledger: m.Ledger, now_ns: int) -> Asks:
        """Take a message of another cluster. Raises RemoteProtocolError for one that none sends us."""
        if self.child and not self.placed(ledger):
            self.early.append(message)
            return []
        return self.above.hear(message, now_ns)

    def finish(self, ledger: m.Ledger, min_clock: int, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push all that is left, where all workers are done; false where that must wait. Of a root the last model is here."""
        if self.finishes == ledger.finishes or min_clock < ledger.finish_at or (self.child and not self.placed(ledger)):
            return [], True
        asked, done = self.above.finish(x, now_ns)
        if done:
            self.finishes = ledger.finishes
        return asked, done
