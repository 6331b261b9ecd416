"""Says for which members a run waits, in one clause that consoles, dashboards and the members themselves show.

Rules
- Before the start the clause counts the workers that have joined. After it, the clause names the members whose update
  the present clock lacks. At the end it counts the members that have done their last step.
- If a cluster lacks none of its own workers, its clause is that of its parent.
- The console shows a clause after it has held for SAY_NS, and again after intervals that double. A dashboard gets each
  change.
"""

from __future__ import annotations

from narrows.protocols.config.modes import FoldRule
from narrows.protocols.effects import NS, Log
from narrows.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Run, Seat

FRESH_NS = NS // 2  # a clause is kept for so long, since each heartbeat of a thousand members asks for it
SAY_NS = 10 * NS  # a clause has held for so long when the console first shows it
SAY_MOST_NS = 600 * NS  # longest time from one line on the console to the next
NAMED_MAX = 3  # members that a clause names


class StartNotice:
    """Makes the clause of a run."""

    def __init__(
        self,
        run: Run,
        clocks: Clocks,
        above: ParentPlace,
        checkpoint_schedule: CheckpointSchedule,
        gossip_directory: GossipDirectory,
    ) -> None:
        self.run, self.clocks, self.above = run, clocks, above
        self.checkpoint_schedule, self.gossip_directory = checkpoint_schedule, gossip_directory
        self.made = ""  # the newest clause
        self.made_ns = self.began_ns = -1  # when it was made; since when members are missing, -1: none is
        self.logged = ""  # the clause of the newest log event
        self.said_ns, self.every_ns = 0, SAY_NS  # when the console got it, and the time to the next line

    def clause(self, now_ns: int) -> str:
        """The clause, "" if the run waits for no member."""
        if self.made_ns < 0 or now_ns - self.made_ns >= FRESH_NS:
            self.made, self.made_ns = self._clause(), now_ns
        return self.made

    def _clause(self) -> str:
        if self.run.over:
            return ""
        if not self.run.started:
            return self._gathering()
        return self._ending() or self._lagging()

    def _noun(self, count: int) -> str:
        noun = "cluster" if any(seat.below for seat in self.run.seats.values()) else "worker"
        return f"{count} {noun}{'s' * (count != 1)}"

    def _gathering(self) -> str:
        needed, here = self.checkpoint_schedule.needed, len(self.run.seats)
        joined = f"{min(here, needed)} of {self._noun(needed)} joined"
        if here < needed:
            return f"{joined}; waiting for {needed - here}"
        without = here - len(self.run.declared) - len(self.above.undeclared)
        if without > 0:
            return f"{joined}; waiting for the model of {without}"
        return self._above() if self.above.child else ""

    def _above(self) -> str:
        says = self.above.parent.waits
        return f"in the parent's run: {says}" if says else ""

    def _ending(self) -> str:
        declared, done = self.run.declared, [seat for seat in self.run.declared if self._done(seat)]
        if not done:
            return ""
        going = len(declared) - len(done)
        if not going:
            return self._above() if self.above.child else ""
        clock = "" if self.run.mode.rule is FoldRule.MIX else f", at clock {self.clocks.min_clock}"
        have = "has done its" if len(done) == 1 else "have done their"
        return f"{len(done)} of {self._noun(len(declared))} {have} last step; waiting for {going}{clock}"

    def _done(self, seat: Seat) -> bool:
        return seat.leaving or seat.worker in self.gossip_directory.ended or seat.worker in self.clocks.resting

    def _lagging(self) -> str:
        """The members whose update of the present clock is missing while others have pushed theirs."""
        if self.run.mode.rule is FoldRule.MIX or self.run.mode.bound is None:
            return ""
        late = self.clocks.late()
        if not 0 < len(late) < len(self.run.declared):
            return self._above() if self.above.child and not late else ""
        names = ", ".join(f"{seat.rank} ({seat.host})" for seat in late[:NAMED_MAX])
        more = f" and {len(late) - NAMED_MAX} more" if len(late) > NAMED_MAX else ""
        return f"waiting for rank{'s' * (len(late) > 1)} {names}{more}, at clock {self.clocks.min_clock}"

    def tick(self, now_ns: int) -> list[Log]:
        """Log the clause: each change for dashboards, and at growing intervals for the console."""
        clause = self.clause(now_ns)
        missing = clause if not self.run.started or self._ending() else ""
        if not missing:
            self.began_ns, self.every_ns = -1, SAY_NS
        elif self.began_ns < 0:
            self.began_ns = self.said_ns = now_ns
        values: dict[str, object] = {"waits": missing}
        if missing and now_ns - self.said_ns >= self.every_ns:
            self.said_ns, self.every_ns = now_ns, min(2 * self.every_ns, SAY_MOST_NS)
            values["text"] = f"{missing}, {(now_ns - self.began_ns) // NS} s so far"
        elif missing == self.logged:
            return []
        self.logged = missing
        return [Log("waits", values)]
