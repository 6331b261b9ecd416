"""Closes the clocks of a run: when a clock closes, and over which updates.

How it works

    worker 0  ──u5──u6──                 min_clock 5 -> 6: u5 of every member is on every shard
    worker 1  ──u5──────u6──             sets[5] = ((0, 5), (1, 5))    bsp, local: the shards fold these, in this order
    worker 2  ────────u5────             staleness s: a worker computes clock c on a state of min_clock >= c - s

1. A shard reports how many updates of each worker have arrived there (`Report.arrived`). An update is open once it is
   on all shards and in no set.
2. `_closable`: a clock closes when each member has an open update. A member that waits for the last model is not
   waited for.
3. With a barrier `_close` names a set: the oldest open update of each member, and of each member that left since. So
   a worker that dies between two shards is in the set of all shards, or of none.
4. With --quorum a clock also closes when so many members have an open update and the grace after that is over. A
   later update is in the next set. The log names its age.
5. `norms` gathers the norm of a clock's mean over all shards, for `max_grad_norm`.

Staleness is enforced in two places: here, since min_clock advances only when all members' updates are there; and at
the worker, which waits for a state that is settled to its clock - s (`Exchange.may_compute`).

`stalls` names the members that keep a clock open while others wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from narrows.protocols import messages as m
from narrows.protocols.effects import NS, Log
from narrows.ps.coordinator.run import Decision, Run, Seat

# Adaptive grace, as a share of what a round took of late until its quorum was there: room for workers that are meant to be
# alike, and a quarter of their pace at most is what one that is truly slow can cost the others.
GRACE_SHARE = 0.25
GRACE_MIN_NS = NS // 20  # the round trip of a long link, and two ticks
GRACE_MAX_NS = 60 * NS  # nor longer than a lease: who is silent for so long is dead
STALLED_NS = 10 * NS  # a clock that others wait for so long: who keeps it open is named
FIRST_STEP_NS = 30 * NS  # the same, of a member whose pace is not known: a first step compiles
STALLED_STEPS = 3  # and so many steps of its own pace
NAMED = 8  # members in one line
ROUND_GAIN = 0.25  # weight of the newest round: a slow first one, with all its warming up, is forgotten in ten


@dataclass(slots=True)
class MemberProgress:
    """One member's. `arrived[i]`: its clock on shard i."""

    arrived: list[int]
    taken: int  # its updates below are in sets (barrier)
    due: int  # the clock whose set its next update is for: one in a later set is late
    moved_ns: int
    step_ns: int = 0  # longest recent time between two of its updates


class Clocks(Decision):
    def __init__(self, run: Run) -> None:
        self.run, self.mode = run, run.mode
        self.min_clock = max(run.restart_clock, 0)
        self.reached_ns: dict[int, int] = {}  # when min_clock came to each of the last s + 1 clocks
        self.progress: dict[int, MemberProgress] = {}  # of members
        self.departed: dict[int, int] = {}  # worker that left -> its open update
        self.sets: dict[int, tuple[tuple[int, int], ...]] = {}  # clock -> (worker, its update), by worker
        self.quorum_ns = -1  # when the quorum of the present clock was there, -1: not yet
        self.round_ns = 0  # smoothed: from the close of a clock to the quorum of the next
        self.norms: dict[int, float] = {}
        self.shard_norms: dict[int, dict[int, float]] = {}  # squared, of clocks for which some are awaited
        self.said: list[Log] = []  # to be told with the ledger that has the set
        self.stop = -1  # no clock from here on closes, -1: all may
        self.stalled = -1  # the clock of which it was told who keeps it open

    # Members.

    def enter(self, seat: Seat, now_ns: int) -> None:
        self.progress[seat.worker] = MemberProgress([seat.start] * self.run.shards, seat.start, seat.start, now_ns)

    def left(self, seat: Seat, how: str) -> None:
        if seat.epoch and self.mode.barrier and self._open(seat):
            self.departed[seat.worker] = self.progress[seat.worker].taken
        self.progress.pop(seat.worker, None)

    def heard(self, report: m.Report, now_ns: int) -> None:
        """A shard of the present generation says what has arrived there."""
        for worker, clock in report.arrived:
            progress = self.progress.get(worker)
            if progress is None or clock <= progress.arrived[report.shard]:
                continue
            progress.arrived[report.shard] = clock
            if report.shard == 0:
                # Waiting for others is no step, or one death would lengthen the lease of all who waited for it.
                began_ns = max(progress.moved_ns, self.reached_ns.get(clock - 1 - (self.mode.bound or 0), 0))
                progress.step_ns = max(now_ns - began_ns, progress.step_ns // 2)
                progress.moved_ns = now_ns
        for clock, squares in report.norms:
            if clock not in self.norms:
                self.shard_norms.setdefault(clock, {})[report.shard] = squares

    def clock(self, seat: Seat) -> int:
        return min(self.progress[seat.worker].arrived)

    def reached(self, seat: Seat) -> int:
        """Its own clock, as the shards know it: with a quorum it has passed the rounds that closed without it too."""
        progress = self.progress[seat.worker]
        return progress.due + min(progress.arrived) - progress.taken if self.mode.barrier else min(progress.arrived)

    def closed(self, worker: int) -> int:
        """Updates of it below this are in closed sets; without a barrier: are on all shards."""
        progress = self.progress.get(worker)
        if progress is None:
            return self.departed.get(worker, m.CLOCK_MAX)
        return progress.taken if self.mode.barrier else min(progress.arrived)

    def final(self, seat: Seat) -> int:
        """With a barrier: updates of it below this count if it leaves now."""
        return self.progress[seat.worker].taken + self._open(seat)

    def folded(self, worker: int) -> int:
        """Updates of it below this are in the model of all shards."""
        published = min((report.min_clock for report in self.run.reports.values()), default=0)
        closing = (dict(rows).get(worker) for clock, rows in self.sets.items() if clock >= published)
        return min((update for update in closing if update is not None), default=self.closed(worker))

    def step_ns(self, seat: Seat) -> int:
        return self.progress[seat.worker].step_ns if seat.epoch else 0

    @property
    def resting(self) -> dict[int, int]:
        """Members, with their clocks, that wait for the last model, all that they pushed being in."""
        waiting = [report.finishing for report in self.run.reports.values()]
        if not waiting or not all(waiting):
            return {}
        here = set.intersection(*map(set, waiting)) & self.progress.keys()
        seats = [self.run.seats[worker] for worker in here]
        return {seat.worker: self.clock(seat) for seat in seats if not self._open(seat)}

    def _going(self) -> list[Seat]:
        """Members that are waited for."""
        resting = self.resting
        return [seat for seat in self.run.declared if seat.worker not in resting] if resting else self.run.declared

    def late(self) -> list[Seat]:
        """Members that are waited for, whose update of the present clock is not on all shards."""
        return [seat for seat in self._going() if not self._open(seat)]

    def _open(self, seat: Seat) -> bool:
        """An update of it is on all shards that no closed clock has."""
        return self._ahead(seat) > 0

    # Clocks.

    def open(self, now_ns: int) -> None:
        """The run begins with the present clock."""
        self.reached_ns = {self.min_clock: now_ns}

    def begin(self, clock: int, now_ns: int) -> int:
        """The clock at which a new place above begins: `clock`, that of the run above, where nobody here is further."""
        if not self.progress:
            self.min_clock = max(self.min_clock, clock)
            self.open(now_ns)
        return self.min_clock

    def anew(self) -> None:
        self.min_clock, self.quorum_ns, self.stop = max(self.run.restart_clock, 0), -1, -1
        self.stalled = -1
        for table in (self.progress, self.departed, self.sets, self.norms, self.shard_norms):
            table.clear()

    def stop_at(self, clock: int) -> None:
        """Close no clock from this one on; -1: as before."""
        self.stop = clock

    def shift(self) -> None:
        """All members go on from this clock, over other shards or in another mode; none has an update that is not folded."""
        self.mode = self.run.mode
        for worker, before in self.progress.items():
            start = self.run.seats[worker].start
            arrived = [start] * self.run.shards
            self.progress[worker] = MemberProgress(arrived, start, start, before.moved_ns, before.step_ns)
        for table in (self.departed, self.sets, self.norms, self.shard_norms):
            table.clear()
        self.reached_ns = {
            self.min_clock: self.reached_ns.get(self.min_clock, 0)
        }  # with another bound others are asked for
        self.stop = -1

    def decide(self, now_ns: int) -> bool:
        """Close a clock, or complete a norm."""
        if self._closable(now_ns):
            if self.mode.barrier:
                self._close(now_ns)
            self.quorum_ns = -1
            self.min_clock += 1
            self.reached_ns[self.min_clock] = now_ns
            self.reached_ns.pop(self.min_clock - (self.mode.bound or 0) - 1, None)
            return True
        for clock, squares in self.shard_norms.items():
            if len(squares) == self.run.shards:
                self.norms[clock] = sum(squares[shard] for shard in range(self.run.shards)) ** 0.5
                del self.shard_norms[clock]
                return True
        if self.run.complete and (self.sets or self.norms):
            self._prune(min(report.min_clock for report in self.run.reports.values()))
        return False

    def _closable(self, now_ns: int) -> bool:
        # After the end no clock closes: a shard that has reached the last one is gone, and would be waited for.
        open_ = self.run.started and not self.run.over and self.min_clock != self.stop
        going = self._going() if open_ else []
        if not going:
            return False
        if not all(map(self._open, going)):
            pushed = sum(map(self._open, going)) + len(self.departed) if self.run.settings.quorum > 0 else 0
            if not self._grace_over(pushed, now_ns):
                return False
        # Late updates alone could close one clock after the other, with no one to see them.
        return not self.mode.barrier or all(report.min_clock >= self.min_clock for report in self.run.current)

    def _grace_over(self, pushed: int, now_ns: int) -> bool:
        """Whether the present clock, with so many open updates, is to be closed without the rest."""
        if not 0 < self.run.settings.quorum <= pushed:
            return False
        if self.quorum_ns < 0:
            self.quorum_ns = now_ns
            took = now_ns - self.reached_ns[self.min_clock]
            self.round_ns += int(ROUND_GAIN * (took - self.round_ns)) if self.round_ns else took
        return now_ns - self.quorum_ns >= self.grace_ns

    @property
    def grace_ns(self) -> int:
        """How long a clock stays open once its quorum is there."""
        if self.run.settings.grace >= 0:
            return int(self.run.settings.grace * NS)
        limit = min(GRACE_MAX_NS, int(self.run.settings.lease * NS))
        return min(max(int(GRACE_SHARE * self.round_ns), GRACE_MIN_NS), limit)

    def _close(self, now_ns: int) -> None:
        """The set of the present clock: the oldest open update of each worker."""
        clock, taken = self.min_clock, dict(self.departed)
        for seat in filter(self._open, self.run.declared):
            progress = self.progress[seat.worker]
            taken[seat.worker] = progress.taken
            age = clock - progress.due
            if age:
                which = {"worker": seat.worker, "rank": seat.rank, "clock": clock, "age": age}
                late = f"the update of worker {seat.worker} for clock {progress.due} came late"
                self.said.append(Log("late", which | {"text": f"{late} and is in clock {clock}, {age} after it"}))
            progress.taken += 1
            progress.due = clock + 1
            progress.moved_ns = now_ns  # its next step begins with what this clock is folded to
        self.sets[clock] = tuple(sorted(taken.items()))
        self.departed.clear()

    def _prune(self, done: int) -> None:
        """Forget clocks that all shards have published."""
        for table in (self.sets, self.norms):
            for clock in [clock for clock in table if clock < done]:
                del table[clock]

    def stalls(self, now_ns: int) -> list[Log]:
        """Name the members that keep the present clock open while others wait for it. Each clock is told of once."""
        since_ns, bound = self.reached_ns.get(self.min_clock, now_ns), self.mode.bound
        open_ = self.run.started and not self.run.over and self.min_clock not in (self.stop, self.stalled)
        if not open_ or bound is None or now_ns - since_ns < STALLED_NS:
            return []
        going, waiting = self._going(), len(self.resting)
        waiting += sum(self._ahead(seat) > bound for seat in going)
        late = [seat for seat in going if not self._open(seat) and self._is_late(self.progress[seat.worker], now_ns)]
        if not late or not waiting:
            return []
        self.stalled = self.min_clock
        named = ", ".join(f"worker {seat.worker} (rank {seat.rank}, {seat.host})" for seat in late[:NAMED])
        named += f" and {len(late) - NAMED} more" if len(late) > NAMED else ""
        silent_s = (now_ns - max(self.progress[seat.worker].moved_ns for seat in late)) // NS
        verb, wait = ("have", "them") if len(late) > 1 else ("has", "it")
        others = "1 other waits" if waiting == 1 else f"{waiting} others wait"
        text = f"{named} {verb} pushed no update for {silent_s} s; {others} for {wait} at clock {self.min_clock}"
        return [Log("stalled", {"workers": [seat.worker for seat in late], "clock": self.min_clock, "text": text})]

    def _ahead(self, seat: Seat) -> int:
        """Updates of this member that no closed clock has."""
        progress = self.progress[seat.worker]
        return min(progress.arrived) - (progress.taken if self.mode.barrier else self.min_clock)

    @staticmethod
    def _is_late(progress: MemberProgress, now_ns: int) -> bool:
        pace_ns = STALLED_STEPS * progress.step_ns or FIRST_STEP_NS
        return now_ns - progress.moved_ns >= max(STALLED_NS, pace_ns)

    # For the broadcast.

    def tell(self) -> list[Log]:
        said, self.said = self.said, []
        return said

    def fields(self, shard: int) -> dict[str, object]:
        report = self.run.reports.get(shard)
        published = report.min_clock if report is not None else 0
        sets = tuple((clock, *chain(*rows)) for clock, rows in self.sets.items() if clock >= published)
        norms = tuple((clock, norm) for clock, norm in self.norms.items() if clock >= published)
        return {"min_clock": self.min_clock, "sets": sets, "norms": norms, "departed": tuple(self.departed.items())}
