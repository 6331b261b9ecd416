"""Reshards a run: cuts its keys over more or fewer shards, or gives it other settings, while training goes on.

How it works

    phase    the coordinator                                       ends when
    STILL    no resharding is under way                            the supervisor, a remote host or `Replans` asks
    ASKED    waits for the new shards                              all new shards have reported, and the run has started
    TOLD     sends members Reshard(at = min_clock + s + 1): push no   each member has acknowledged it
             update from clock `at` on; closes no clock
    HELD     closes clocks up to `at`                              each shard has published min_clock `at`
    WRITING  asks for a checkpoint of `at`                         each shard has written it
    PASSED   begins the next generation (`Run.shift`)              each shard of it has reported the new epoch
    STILL    sends each member its new epoch, ports and ranges

1. `at` is the first clock that no member can have pushed: no clock closes until all members know of the hold. So at
   the end of HELD each shard has folded all updates before `at`, and none after it.
2. Each shard writes a checkpoint of `at`. The next generation begins from it, over the new shards.
3. Members keep their seats, and the updates that they have not pushed. Each gets a new epoch, so that no message from
   before counts.
4. Where no clock is one that all members come to (`holds_apart`: async, --quorum), each member names the clock that it
   holds at (`Heartbeat.hold`), and goes on there. TOLD then ends once all shards have every update below that clock. In
   HELD one clock closes under async; with --quorum one more round does, over all updates that no set has (`Clocks.drain`).

Rules
- Until that checkpoint is on all disks (`may_stay`), a failure calls the resharding off, and the run goes on as before.
  From PASSED on a shard that fails goes back to that checkpoint, as to any other.
- While members hold, no worker becomes a member.
- A replan, to another mode and SPEC (replans.py), takes the same way: the next generation has other settings over the
  same shards. So every process of a generation has the same settings, and no payload of another codec counts there.
- So does the end of a start (--start-steps): its last clock stays open until all members know that they hold after it
  (`Clocks.ends_start`). A resharding that holds at that clock ends the start too.
- Remote shards (remote_shards.py) have the highest numbers. A report of a shard counts only if it comes from the host
  that the shard is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum

from narrows.protocols import messages as m
from narrows.protocols.config.modes import FoldRule, holds_apart
from narrows.protocols.config.settings import SHARDS_MAX, Settings
from narrows.protocols.config.timing import RESHARD_HOLD_LEASES
from narrows.protocols.effects import NS, Log, Send
from narrows.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.members import Members
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Decision, Run, Seat

LEVELS = (
    "this run has two levels: each shard of a cluster pushes to the shard above it with the same keys, so the keys of all "
    "levels would have to move at once"
)


class ReshardPhase(Enum):
    """How far a resharding has come; `MOVE_LIFE` has the transitions."""

    STILL = "still"  # no resharding is under way
    ASKED = "asked"  # the coordinator waits for the new shards and for the start of the run
    TOLD = "told"  # the coordinator has asked all members to hold
    HELD = "held"  # all members hold; the shards fold what was pushed before
    WRITING = "writing"  # the shards write the checkpoint of the clock that all members hold at
    PASSED = "passed"  # the shards of the next generation begin from that checkpoint


MOVE_LIFE: dict[ReshardPhase, dict[str, ReshardPhase]] = {
    ReshardPhase.STILL: {"ask": ReshardPhase.ASKED, "stay": ReshardPhase.STILL},
    ReshardPhase.ASKED: {"tell": ReshardPhase.TOLD, "stay": ReshardPhase.STILL},
    ReshardPhase.TOLD: {"hold": ReshardPhase.HELD, "stay": ReshardPhase.STILL},
    ReshardPhase.HELD: {"write": ReshardPhase.WRITING, "stay": ReshardPhase.STILL},
    ReshardPhase.WRITING: {"pass": ReshardPhase.PASSED, "stay": ReshardPhase.STILL},
    ReshardPhase.PASSED: {"serve": ReshardPhase.STILL, "stay": ReshardPhase.STILL},
}


class Resharding(Decision):
    """Decides when the run moves to another number of shards, or to other settings."""

    def __init__(
        self,
        run: Run,
        clocks: Clocks,
        above: ParentPlace,
        checkpoint_schedule: CheckpointSchedule,
        members: Members,
        away: Mapping[int, str],
    ) -> None:
        self.run, self.clocks, self.above = run, clocks, above
        self.checkpoint_schedule, self.members = checkpoint_schedule, members
        self.phase = ReshardPhase.STILL
        # The number of shards of the next generation; the clock at which members hold; number of the newest Reshard.
        self.target, self.at, self.number = run.shards, -1, 0
        self.next = run.settings  # the settings of the next generation
        self.most = run.shards  # the largest `target` so far
        self.since_ns = 0  # when the present phase began
        self.last_sent = 0  # the newest Reshard number that all members were sent
        self.away = {**away}  # by shard, the host of each remote shard, and of each that is to start
        self.why = ""  # why the newest resharding was called off
        self.offered: dict[int, tuple[bytes, m.Report]] = {}  # by new shard, its routing id and its newest report
        self.said: list[Log] = []

    @property
    def holds(self) -> bool:
        """True while members hold: no worker becomes a member, though members may leave."""
        return self.phase not in (ReshardPhase.STILL, ReshardPhase.ASKED)

    def _move(self, step: str) -> None:
        self.phase = MOVE_LIFE[self.phase][step]

    # Requests of the supervisor, which owns the shard processes, and of other decisions.

    def ask(self, shards: int, host: str = "") -> Log:
        """Ask for a resharding.

        Args:
            shards: the number of shards to have; 0 calls off the resharding under way, if that is still possible. The
                same number again changes nothing.
            host: the machine of the new shards, "" for that of shard 0.

        Returns:
            The log event with the answer.
        """
        if shards == self.target or not shards:
            return self.call_off("a new shard did not start") if not shards and self.may_stay else self.where("")
        if why := self.unfit(shards, host):
            return self.where(f"the keys stay where they are: {why}")
        self._move("ask")
        self.target, self.most = shards, max(self.most, shards)
        self.next = replace(self.run.settings, shards=shards)
        if host:
            self.away |= dict.fromkeys(range(self.run.shards, shards), host)
        plan = self.members.plan
        uneven = plan.imbalance(shards, self.run.settings.cut) if plan is not None else ""
        text = f"{self.run.shards} shards become {shards}{f', with those at {host}' if host else ''}"
        return self.where(f"{text}; {uneven}" if uneven else text)

    def change(self, settings: Settings) -> None:
        """Ask for a generation with these settings. The caller has checked `fixed`, and that the phase is STILL."""
        self._move("ask")
        self.next = settings

    @property
    def fixed(self) -> str:
        """Why this run cannot replan without a restart; "" if it can."""
        mode = self.run.mode
        if mode.rule is FoldRule.OPTIMIZER:
            return "the servers have the state of the optimizer, for gradients are pushed; with --push update workers have it"
        if mode.rule is FoldRule.OUTER:
            return "the servers have the momentum of the outer steps"
        if mode.bound is None:
            return f"--sync {mode.name} has no bound, so there is no clock at which all workers could change the plan"
        if self.away:
            return "some of its shards are on other machines"
        return self.never

    def unfit(self, shards: int, host: str = "") -> str:
        """Return why the run cannot reshard to this number of shards now; "" if it can."""
        if self.phase is not ReshardPhase.STILL:
            return "another move is under way"
        if not 1 <= shards <= SHARDS_MAX:
            return f"give a number of shards from 1 to {SHARDS_MAX}"
        if self.away and shards > self.run.shards and not host:
            return (
                "the last shards are on other machines: ps-serve --join adds more of them, Ctrl-C of it takes them back"
            )
        if host and self.run.settings.starting:
            return f"shards on other machines may join once the start of {self.run.settings.start_steps} steps is over"
        if self.members.plan is not None and (why := self.members.plan.why_not_cut(shards, self.run.settings.cut)):
            return why
        return LEVELS if self._levels else self.never

    @property
    def never(self) -> str:
        """Why this run can never reshard; "" if it can."""
        mode = self.run.mode
        if mode.rule is FoldRule.MIX:
            return "under --sync gossip the workers hold the model"
        if self.members.plan is not None and self.members.plan.tables:
            return "its model has an embedding table, whose rows stay on their shards"
        return "the run is over" if self.run.over else ""

    @property
    def _levels(self) -> bool:
        return self.above.child or any(seat.below for seat in self.run.declared)

    def where(self, text: str) -> Log:
        """Log event: `text`, with the number of shards that the run has and is to have."""
        values = {
            "shards": self.run.shards,
            "target": self.target,
            "clock": self.clocks.min_clock,
            "away": dict(self.away),
            "settings": asdict(self.run.settings),
        }
        return Log("move", values | {"text": text})

    @property
    def may_stay(self) -> bool:
        """True if a resharding is under way that can still be called off."""
        return self.phase not in (ReshardPhase.STILL, ReshardPhase.PASSED)

    def call_off(self, why: str) -> Log:
        """Call the resharding off: members that hold go on. Return the log event that names the reason."""
        stays = (
            "the keys stay where they are"
            if self.next.plan_number == self.run.settings.plan_number
            else "the plan stays as it is"
        )
        self.number += self.holds
        self._move("stay")
        self._settle()
        self.at, self.why = -1, why
        self.clocks.stop_at(-1)
        self.offered.clear()
        return self.where(f"{stays}: {why}")

    def _settle(self) -> None:
        """Forget the shards that were to come, and the settings of the generation that was to come."""
        self.target, self.next = self.run.shards, self.run.settings
        self.away = {shard: host for shard, host in self.away.items() if shard < self.target}

    def known(self, report: m.Report) -> bool:
        """True if the report comes from the host that this shard is on.

        An earlier host of the shard may still send reports, and its time is that of another machine.
        """
        return report.host == self.away.get(report.shard, "")

    def offer(self, peer: bytes, report: m.Report) -> bool:
        """Take the report of a shard that is to come, or that was resharded away. False if the shard is in the run."""
        if not self.run.shards <= report.shard < self.most:
            return False
        if report.shard >= self.target or not self.known(report):
            return True
        before = self.offered.get(report.shard)
        if before is None or (before[1].incarnation, before[1].version) <= (report.incarnation, report.version):
            self.offered[report.shard] = (peer, report)
        return True

    # The phases.

    def decide(self, now_ns: int) -> bool:
        """Call the resharding off if something broke, else go on to the next phase if this one is over."""
        if self.phase is ReshardPhase.STILL:
            if not (self.clocks.ends_start and self.run.started and not self.run.over):
                return False
            self.change(self.run.settings)  # `_tell` makes the plan that follows
        if self.may_stay and (why := self._broken(now_ns)):
            self.said.append(self.call_off(why))
            return True
        done = STEPS[self.phase](self)
        self.since_ns = now_ns if done else self.since_ns
        return done

    def _broken(self, now_ns: int) -> str:
        """Return why the resharding has to be called off; "" if it can go on."""
        if self.run.over:
            return "the run is over"
        if self.holds and not self.run.declared:
            return "no worker trains any more"
        if self._levels and self.target != self.run.shards:
            return LEVELS
        if self.phase is not ReshardPhase.TOLD:
            return ""
        for seat in self._waited_for:
            if now_ns - self.since_ns > RESHARD_HOLD_LEASES * self._lease_ns(seat) and not self._stands(seat):
                missing = "push the updates before the clock that it holds at"
                return f"worker {seat.worker} does not {missing if seat.move == self.number else 'say that it holds'}"
        return ""

    def _lease_ns(self, seat: Seat) -> float:
        """The lease of a member. A worker that names the clock it holds at answers between two of its own steps."""
        return self.members.lease_ns(seat) if self._apart else self.run.settings.lease * NS

    @property
    def _apart(self) -> bool:
        return holds_apart(self.run.mode, self.run.settings.quorum)

    @property
    def _rounds(self) -> bool:
        """True if a quorum closes rounds: a member may have fewer updates than the run has clocks."""
        return self.run.settings.quorum > 0

    def _stands(self, seat: Seat) -> bool:
        """True if this member holds: no push of it can come any more but those that close the clocks below `at`.

        Where members hold at clocks of their own, all updates of this member are also on all shards.
        """
        if seat.move != self.number or not self._apart:
            return seat.move == self.number
        return self.clocks.clock(seat) >= seat.hold or seat.worker in self.clocks.resting

    @property
    def _waited_for(self) -> list[Seat]:
        """Members that have to hold: a member that is leaving pushes nothing more."""
        return [seat for seat in self.run.declared if not seat.leaving]

    @property
    def _known(self) -> bool:
        """True if all these members hold by the newest Reshard."""
        return all(map(self._stands, self._waited_for))

    def _tell(self) -> bool:
        """ASKED to TOLD."""
        come = all(shard in self.offered for shard in range(self.run.shards, self.target))
        # A member has not acknowledged the resharding before. Or it has no Ready, and would hear of this one with a
        # heartbeat: at the end of a start all members wait for it.
        starting = self.next.starting
        unaware = any(seat.before or (starting and not seat.ready_sent) for seat in self.run.declared)
        # With a quorum the clock may stay as it is, and no clock has two generations' checkpoints.
        fresh = not self._rounds or self.clocks.min_clock > self.run.restart_clock
        if not (come and fresh and self.run.started and self._waited_for) or unaware:
            return False
        self._move("tell")
        self.number += 1
        self.at = 0 if self._rounds else self.clocks.min_clock + (self.run.mode.bound or 0) + 1
        if self.next.starting and self.at >= self.next.start_steps:
            self.next = self.next.relaxed(self.at)
        self.clocks.stop_at(self.clocks.min_clock)
        return True

    def _hold(self) -> bool:
        """TOLD to HELD."""
        if not self._known:
            return False
        self._move("hold")
        if self._rounds:
            self.at = self.clocks.drain()
        else:
            self.clocks.stop_at(self.at)
        return True

    def _write(self) -> bool:
        """HELD to WRITING, once all shards have published clock `at`."""
        here = self.run.complete and all(report.min_clock == self.at for report in self.run.current)
        if not here or len(self.run.current) < self.run.shards or len(self._waited_for) < len(self.run.declared):
            return False
        if not self.checkpoint_schedule.ask(self.at):
            return False
        self._move("write")
        return True

    def _pass(self) -> bool:
        """WRITING to PASSED, once all shards have the checkpoint; call the resharding off if a disk has refused it."""
        if not self.checkpoint_schedule.tried(self.at):
            return False
        lacks = [shard for shard, report in sorted(self.run.reports.items()) if self.at not in report.checkpoints]
        if lacks:
            self.said.append(self.call_off(f"shard {lacks[0]} could not write its checkpoint"))
            return True
        self._move("pass")
        before = self.run.settings
        self.run.shift(self.next, self.at, self.clocks.starts(self.at))
        for shard, (_, report) in self.offered.items():  # a new shard can begin from the checkpoint of the others
            self.run.reports[shard] = replace(report, checkpoints=(self.at,))
        self.clocks.shift()
        self.checkpoint_schedule.anew()
        cut = f"the keys of {before.shards} shards are those of {self.target} from clock {self.at} on"
        replan = Log("replan", self.next.told(self.at))
        self.said += [self.where(""), replan] if self.next.plan_number != before.plan_number else [self.where(cut)]
        return True

    def _serve(self) -> bool:
        """PASSED to STILL, once all shards of the new generation have reported its epoch."""
        current = self.run.current
        if len(current) < self.run.shards or any(report.epoch < self.run.generation for report in current):
            return False
        self._move("serve")
        self._settle()
        self.offered.clear()
        self.number += 1
        return True

    def anew(self) -> None:
        """A shard was restarted or lost: call the resharding off. All workers join again."""
        if self.may_stay:
            self.said.append(self.call_off("a shard was restarted"))
        self._settle()

    # Messages to members.

    def word(self, seat: Seat) -> list[Send]:
        """The newest Reshard, if this member has not acknowledged it."""
        if (
            seat.move == self.number
            or self.phase is ReshardPhase.PASSED
            or not seat.ready_sent
            or self.members.plan is None
        ):
            return []
        if self.holds:
            return [Send(seat.peer, m.Reshard(seat.worker, seat.epoch, self.number, self.at))]
        if not seat.before:
            return [Send(seat.peer, m.Reshard(seat.worker, seat.epoch, self.number, -1))]
        ports, hosts = self.run.where
        ranges = tuple(self.members.plan.ranges(self.run.shards, self.run.settings.cut))
        place = (seat.epoch, ports, ranges, hosts, self.run.settings.packed())
        return [Send(seat.peer, m.Reshard(seat.worker, seat.before, self.number, seat.start, *place))]

    def knows(self, seat: Seat, number: int, hold: int = -1) -> bool:
        """Note the newest Reshard that this member has, and the clock that it holds at. Return False if that was known."""
        return seat.follow(number, done=number == self.number and not self.holds, hold=hold)

    def tell(self) -> list[Log]:
        said, self.said = self.said, []
        return said

    def words(self) -> list[Send]:
        """The newest Reshard for all members, once; heartbeats repeat it (`word`)."""
        if self.last_sent == self.number or self.phase is ReshardPhase.PASSED:
            return []
        self.last_sent = self.number
        return [word for seat in self.run.declared for word in self.word(seat)]

    def fields(self, shard: int) -> dict[str, object]:
        return {"settings": b"" if self.run.planned(shard) else self.run.settings.packed()}


STEPS = {
    ReshardPhase.ASKED: Resharding._tell,
    ReshardPhase.TOLD: Resharding._hold,
    ReshardPhase.HELD: Resharding._write,
    ReshardPhase.WRITING: Resharding._pass,
    ReshardPhase.PASSED: Resharding._serve,
}
