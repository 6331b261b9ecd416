"""Closes the clocks of a run: decides when a clock closes, and over which updates.

How it works

    worker 0  ──u5──u6──                 min_clock 5 -> 6: u5 of every member is on every shard
    worker 1  ──u5──────u6──             sets[5] = ((0, 5), (1, 5), (2, 5))    bsp, local: the shards fold these, in order
    worker 2  ────────u5────             staleness s: a worker computes clock c on a state of min_clock >= c - s

1. A shard reports how many updates of each worker have arrived there (`Report.arrived`). An update is open while all
   shards have it and no closed clock contains it.
2. `_closable`: a clock closes when each member has an open update. The clock does not wait for a member that has done
   its last step and waits for the last model.
3. With a barrier `_close` names a set: the oldest open update of each member, and of each member that left since. So
   the update of a worker that dies between two pushes is in the set of all shards, or of none.
4. With --quorum a clock also closes when that number of members have an open update and the grace after that is over.
   A later update is in the next set. The log names its age.
5. `norms` gathers the norm of a clock's mean over all shards, for `max_grad_norm`.
6. The last clock of a start (--start-steps) stays open until all members know that they hold after it (`ends_start`).

Staleness is enforced in three places. Here min_clock advances only when each member that still trains has an open update,
or, with --quorum, once the grace is over. A shard sends a whole state only once its child may compute on that state
(`Publications._whole`). A worker waits for a state that is settled to its clock - s (`Exchange.may_compute`). The shard
and the worker ask `Mode.allows`.

`stalls` names the members that keep a clock open while others wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from narrows.protocols import messages as m
from narrows.protocols.config.modes import holds_apart
from narrows.protocols.effects import NS, Log
from narrows.ps.coordinator.run import Decision, Run, Seat

# Adaptive grace, as a share of the time that recent rounds took until their quorum was there. The share leaves room for
# workers of equal speed. A worker that is far slower makes the rounds of the others at most a quarter longer.
GRACE_SHARE = 0.25
GRACE_MIN_NS = NS // 20  # the round trip of a long link, and two ticks
GRACE_MAX_NS = 60 * NS  # the grace is never longer than a lease either: a worker that is silent for a lease is dead
STALLED_NS = 10 * NS  # once others have waited so long for a clock, the log names the members that keep it open
FIRST_STEP_NS = 30 * NS  # the same for a member whose pace is not known yet: its first step compiles
STALLED_STEPS = 3  # a member is late only after this number of its own steps
NAMED = 8  # members that one log line names
ROUND_GAIN = 0.25  # weight of the newest round: after ten rounds a slow first one, with its warm-up, hardly counts


@dataclass(slots=True)
class MemberProgress:
    """How far the updates of one member have come."""

    arrived: list[int]  # by shard, the member's clock there: the number of its updates that the shard has
    taken: int  # with a barrier: updates below this number are in sets
    due: int  # the clock of the member's next update; the update is late if the set of a later clock takes it
    moved_ns: int  # when its newest update arrived on shard 0, or a clock closed with its update
    step_ns: int = 0  # longest recent time between two of its updates


class Clocks(Decision):
    """Decides when the present clock, min_clock, closes, and with a barrier over which updates."""

    def __init__(self, run: Run) -> None:
        self.run, self.mode = run, run.mode
        self.min_clock = max(run.restart_clock, 0)
        self.reached_ns: dict[int, int] = {}  # when min_clock came to each of the last s + 1 clocks
        self.progress: dict[int, MemberProgress] = {}  # by worker, of members
        self.departed: dict[int, int] = {}  # worker that left -> the number of its open update, for the next set
        self.sets: dict[int, tuple[tuple[int, int], ...]] = {}  # clock -> (worker, its update), by worker
        self.quorum_ns = -1  # when the present clock had its quorum; -1: not yet
        self.round_ns = 0  # smoothed time from the close of a clock to the quorum of the next
        self.norms: dict[int, float] = {}  # by clock, norm of its mean update over all shards
        self.shard_norms: dict[int, dict[int, float]] = {}  # by clock and shard, squared norms, until all have come
        self.said: list[Log] = []  # log events that go out with the ledger that has the set
        self.stop = -1  # clocks from this one on stay open; -1: no limit
        self.drains = False  # the present clock closes without its quorum (`drain`)
        self.stalled = -1  # the newest clock whose late members the log has named

    # Members.

    def enter(self, seat: Seat, now_ns: int) -> None:
        """Add a new member: clocks wait for its updates from `seat.start` on."""
        self.progress[seat.worker] = MemberProgress([seat.start] * self.run.shards, seat.start, seat.start, now_ns)

    def left(self, seat: Seat, how: str) -> None:
        """Forget a member. With a barrier its open update goes into the next set."""
        if seat.epoch and self.mode.barrier and self._open(seat):
            self.departed[seat.worker] = self.progress[seat.worker].taken
        self.progress.pop(seat.worker, None)

    def heard(self, report: m.Report, now_ns: int) -> None:
        """Take the report of a shard of the present generation: which updates and norms it has."""
        for worker, clock in report.arrived:
            progress = self.progress.get(worker)
            if progress is None or clock <= progress.arrived[report.shard]:
                continue
            progress.arrived[report.shard] = clock
            if report.shard == 0:
                # The time of a step has no waiting in it. A lease is at least three steps, so a wait for a dead member would
                # otherwise lengthen the lease of each member that waits.
                began_ns = max(progress.moved_ns, self.reached_ns.get(clock - 1 - (self.mode.bound or 0), 0))
                progress.step_ns = max(now_ns - began_ns, progress.step_ns // 2)
                progress.moved_ns = now_ns
        for clock, squares in report.norms:
            if clock not in self.norms:
                self.shard_norms.setdefault(clock, {})[report.shard] = squares

    def clock(self, seat: Seat) -> int:
        """The member's clock: the number of its updates that all shards have."""
        return min(self.progress[seat.worker].arrived)

    def reached(self, seat: Seat) -> int:
        """The clock of the member's next update. With a quorum it also counts the rounds that closed without the member."""
        progress = self.progress[seat.worker]
        return progress.due + min(progress.arrived) - progress.taken if self.mode.barrier else min(progress.arrived)

    def closed(self, worker: int) -> int:
        """The worker's updates below this number are in closed sets; without a barrier, on all shards."""
        progress = self.progress.get(worker)
        if progress is None:
            return self.departed.get(worker, m.CLOCK_MAX)
        return progress.taken if self.mode.barrier else min(progress.arrived)

    def final(self, seat: Seat) -> int:
        """With a barrier: if the member leaves now, its updates below this number are folded, and later ones are dropped."""
        return self.progress[seat.worker].taken + self._open(seat)

    def folded(self, worker: int) -> int:
        """The worker's updates below this number are in the model of all shards."""
        published = min((report.min_clock for report in self.run.reports.values()), default=0)
        closing = (dict(rows).get(worker) for clock, rows in self.sets.items() if clock >= published)
        return min((update for update in closing if update is not None), default=self.closed(worker))

    def step_ns(self, seat: Seat) -> int:
        """The member's longest recent step; 0 before it has one."""
        return self.progress[seat.worker].step_ns if seat.epoch else 0

    @property
    def resting(self) -> dict[int, int]:
        """Members that wait for the last model and whose updates are all in closed clocks, with their own clocks."""
        waiting = [report.finishing for report in self.run.reports.values()]
        if not waiting or not all(waiting):
            return {}
        here = set.intersection(*map(set, waiting)) & self.progress.keys()
        seats = [self.run.seats[worker] for worker in here]
        return {seat.worker: self.clock(seat) for seat in seats if not self._open(seat)}

    def _going(self) -> list[Seat]:
        """Members that a clock waits for."""
        resting = self.resting
        return [seat for seat in self.run.declared if seat.worker not in resting] if resting else self.run.declared

    def late(self) -> list[Seat]:
        """Members that the present clock waits for and whose update is not on all shards yet."""
        return [seat for seat in self._going() if not self._open(seat)]

    def _open(self, seat: Seat) -> bool:
        """True if all shards have an update of this member that no closed clock contains."""
        return self._ahead(seat) > 0

    # Clocks.

    def open(self, now_ns: int) -> None:
        """Note that the run starts, at the present clock."""
        self.reached_ns = {self.min_clock: now_ns}

    def begin(self, clock: int, now_ns: int) -> int:
        """Return the clock at which this cluster's new place in its parent's run begins.

        That is the present clock; if this cluster has no members, it first advances to `clock`, the parent's.
        """
        if not self.progress:
            self.min_clock = max(self.min_clock, clock)
            self.open(now_ns)
        return self.min_clock

    def anew(self) -> None:
        self.mode = self.run.mode  # a run that goes back may be in its start again
        self.min_clock, self.quorum_ns = max(self.run.restart_clock, 0), -1
        self.stop_at(-1)
        self.stalled = -1
        for table in (self.progress, self.departed, self.sets, self.norms, self.shard_norms):
            table.clear()

    @property
    def ends_start(self) -> bool:
        """True if the present clock is the last one of the run's start, or a later one."""
        settings = self.run.settings
        return settings.starting and self.min_clock >= settings.start_steps - 1

    def stop_at(self, clock: int) -> None:
        """Close no clock from this one on; -1 lifts the limit."""
        self.stop, self.drains = clock, False

    def drain(self) -> int:
        """With --quorum: close one more clock, over every update that is on all shards, however few these are.

        If there is none, close no clock. Return the clock at which no update is in no set.
        """
        self.stop, self.drains = self.min_clock + (not self._drained), True
        return self.stop

    @property
    def _drained(self) -> bool:
        """True if every update that is on all shards is in a closed set."""
        return not self.departed and not any(map(self._open, self.run.declared))

    def starts(self, at: int) -> dict[int, int]:
        """By member, the clock at which it goes on after a reshard at clock `at`, with all its updates folded."""
        apart = holds_apart(self.mode, self.run.settings.quorum)
        return {worker: min(progress.arrived) if apart else at for worker, progress in self.progress.items()}

    def shift(self) -> None:
        """Go on from the present clock over other shards or in another mode: every update of a member is folded."""
        self.mode = self.run.mode
        for worker, before in self.progress.items():
            start = self.run.seats[worker].start
            arrived = [start] * self.run.shards
            due = before.due if self.run.settings.quorum > 0 else start  # a late update is as late as it was
            self.progress[worker] = MemberProgress(arrived, start, due, before.moved_ns, before.step_ns)
        for table in (self.departed, self.sets, self.norms, self.shard_norms):
            table.clear()
        # Another bound looks up other clocks.
        self.reached_ns = {self.min_clock: self.reached_ns.get(self.min_clock, 0)}
        self.stop_at(-1)
        self.quorum_ns = -1

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
        # After the end no clock closes: it would wait for shards that have reached the last clock and ended.
        open_ = self.run.started and not self.run.over and self.min_clock != self.stop
        if self.stop < 0 and self.ends_start:
            return False  # the last clock of a start closes once all members know that they hold after it
        going = self._going() if open_ else []
        if not going:
            return False
        if not all(map(self._open, going)):
            pushed = sum(map(self._open, going)) + len(self.departed) if self.run.settings.quorum > 0 else 0
            if not (self.drains and pushed) and not self._grace_over(pushed, now_ns):
                return False
        # With a barrier the shards must have published the clock before: else late updates alone could close one clock
        # after the other without a state in between.
        return not self.mode.barrier or all(report.min_clock >= self.min_clock for report in self.run.current)

    def _grace_over(self, pushed: int, now_ns: int) -> bool:
        """True if the present clock, with `pushed` open updates, closes without the rest."""
        if not 0 < self.run.settings.quorum <= pushed:
            return False
        if self.quorum_ns < 0:
            self.quorum_ns = now_ns
            took = now_ns - self.reached_ns[self.min_clock]
            self.round_ns += int(ROUND_GAIN * (took - self.round_ns)) if self.round_ns else took
        return now_ns - self.quorum_ns >= self.grace_ns

    @property
    def grace_ns(self) -> int:
        """How long a clock stays open after it has its quorum."""
        if self.run.settings.grace >= 0:
            return int(self.run.settings.grace * NS)
        limit = min(GRACE_MAX_NS, int(self.run.settings.lease * NS))
        return min(max(int(GRACE_SHARE * self.round_ns), GRACE_MIN_NS), limit)

    def _close(self, now_ns: int) -> None:
        """Name the set of the present clock: the oldest open update of each worker."""
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
            progress.moved_ns = now_ns  # the worker's next step begins with the state of this clock
        self.sets[clock] = tuple(sorted(taken.items()))
        self.departed.clear()

    def _prune(self, done: int) -> None:
        """Forget clocks that all shards have published."""
        for table in (self.sets, self.norms):
            for clock in [clock for clock in table if clock < done]:
                del table[clock]

    def stalls(self, now_ns: int) -> list[Log]:
        """Log which members keep the present clock open while others wait for it, once for each clock."""
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
        """Number of updates of this member that no closed clock contains."""
        progress = self.progress[seat.worker]
        return min(progress.arrived) - (progress.taken if self.mode.barrier else self.min_clock)

    @staticmethod
    def _is_late(progress: MemberProgress, now_ns: int) -> bool:
        pace_ns = STALLED_STEPS * progress.step_ns or FIRST_STEP_NS
        return now_ns - progress.moved_ns >= max(STALLED_NS, pace_ns)

    # For the ledger.

    def tell(self) -> list[Log]:
        said, self.said = self.said, []
        return said

    def fields(self, shard: int) -> dict[str, object]:
        """min_clock, and the sets and norms of the clocks that this shard has not published yet."""
        report = self.run.reports.get(shard)
        published = report.min_clock if report is not None else 0
        sets = tuple((clock, *chain(*rows)) for clock, rows in self.sets.items() if clock >= published)
        norms = tuple((clock, norm) for clock, norm in self.norms.items() if clock >= published)
        return {"min_clock": self.min_clock, "sets": sets, "norms": norms, "departed": tuple(self.departed.items())}
