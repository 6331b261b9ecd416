"""Decides whether a running run would gain from another mode and SPEC, by what its members measure. docs/planning.md.

Rules
- A way is a mode and a SPEC. The plans of a run are the ways that it takes one after the other, numbered from 1
  (`Settings.plan_number`). `Resharding` brings a new plan to all processes at one clock. It also makes the plan after a
  start (--start-steps); until then nothing is decided here.
- `prices` computes the present way and all others from the newest figures of every member. There are no prices before
  each member has sent figures.
- This decision proposes a way that has saved more than GAIN for --replan-after seconds without a break, once in each
  plan. With --replan change it becomes the next plan.
- A way that needs more memory than a host has is not compared (`too_small`, ps/planner/host_memory.py).
- Figures measured under one plan do not count under the next. So a change back takes as long to decide as the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import OF_PLAN
from narrows.protocols.effects import NS, Log
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.members import Members
from narrows.ps.coordinator.resharding import Resharding, ReshardPhase
from narrows.ps.coordinator.run import Decision, Run, Seat
from narrows.ps.planner.codec_costs import CodecCost
from narrows.ps.planner.host_memory import UNKNOWN, VALUE_BYTES, HostMemory, server_models, too_small
from narrows.ps.planner.modes_and_specs import IN_RUN, WAYS, ModeAndSpec
from narrows.ps.planner.replanning import ChildRates, WayPrice, in_turn, present, prices, unmeasured

GAIN = 0.2  # the share of the time to a loss that another way must save
LOOKS = 10  # comparisons in --replan-after seconds
MEMBERS_MAX = 256  # a comparison with this number of members takes 22 ms, one with 1,023 takes 143 ms
# Time between two comparisons; a member sends figures several times in a lease.
LOOK_MIN_NS, LOOK_MAX_NS = NS // 2, 10 * NS


@dataclass(slots=True)
class StepMeter:
    """What is known of the steps of one worker."""

    newest: Summary
    own_s: float = 0.0  # seconds of computing in a step, between the two newest summaries; 0: not known yet


class Replans(Decision):
    """Decides whether to replan.

    Args:
        coded: cost of each SPEC. If one of the run's own SPECs has none, no way is compared.
        here: memory of the host of the coordinator, and of all shards that are not on another machine.
    """

    def __init__(
        self,
        run: Run,
        clocks: Clocks,
        members: Members,
        resharding: Resharding,
        coded: Mapping[str, CodecCost],
        here: HostMemory = UNKNOWN,
    ) -> None:
        self.run, self.clocks, self.members, self.resharding, self.coded = run, clocks, members, resharding, coded
        self.here = here
        self.plan = run.settings.plan_number  # the plan that the following figures belong to
        self.steps: dict[tuple[int, ...], StepMeter] = {}  # by (member, ranks of the path to the worker below it)
        self.due_ns, self.since_ns = 0, -1  # the next comparison; since when another way has gained, -1: none has
        self.proposed: set[ModeAndSpec] = set()  # ways that were proposed in this plan
        self.said: list[Log] = []

    def heard(self, seat: Seat, rows: tuple[SummaryRow, ...]) -> None:
        """Store the summaries of a member and of the members below it.

        A cluster counts as computing for as long as the slowest worker below it.
        """
        if self.plan != self.run.settings.plan_number:
            self.anew()
        seat.show(rows)
        for row in rows:
            key, news = (seat.worker, *row.path), row.summary
            before = self.steps.get(key)
            if row.runs:
                continue
            if before is None or news.steps < before.newest.steps:
                self.steps[key] = StepMeter(news)
            elif news.steps > before.newest.steps:
                own_s = (_own_seconds(news) - _own_seconds(before.newest)) / (news.steps - before.newest.steps)
                self.steps[key] = StepMeter(news, max(own_s, 0.0))

    def left(self, seat: Seat, how: str) -> None:
        self.steps = {key: steps for key, steps in self.steps.items() if key[0] != seat.worker}

    def anew(self) -> None:
        self.plan, self.since_ns = self.run.settings.plan_number, -1
        self.steps.clear()
        self.proposed.clear()

    def decide(self, now_ns: int) -> bool:
        """Compare the ways LOOKS times in --replan-after, and propose one that has gained for that long."""
        settings, after_ns = self.run.settings, int(self.run.settings.replan_after * NS)
        specs = {settings.compress, settings.compress_down}
        if settings.replan == "off" or settings.starting or specs - self.coded.keys() or now_ns < self.due_ns:
            return False
        self.due_ns = now_ns + min(max(after_ns // LOOKS, LOOK_MIN_NS), LOOK_MAX_NS)
        best = self._best()
        if best is None or best[0].cost >= (1 - GAIN) * best[1].cost:
            self.since_ns = -1
            return False
        self.since_ns = now_ns if self.since_ns < 0 else self.since_ns
        if now_ns - self.since_ns < after_ns or best[0].way in self.proposed:
            return False
        self._propose(*best)
        return True

    def _children(self) -> list[tuple[Seat, ChildRates]]:
        """Return the figures of each member; [] if a member has none yet, or if there are too many members."""
        found, members = [], self.run.declared
        for seat in members if len(members) <= MEMBERS_MAX else ():
            own_s = [steps.own_s for key, steps in self.steps.items() if key[0] == seat.worker]
            if not own_s or not min(own_s) or not seat.rows:
                return []
            link = seat.rows[0].summary
            found.append((seat, ChildRates(max(own_s), link.rate_up, link.rate_down, link.round_trip_seconds)))
        return found

    def _best(self) -> tuple[WayPrice, WayPrice, Seat, ChildRates] | None:
        """The cheapest other way, the present way, and the member with the slowest link with its figures.

        None while there are no prices, or while the run cannot change.
        """
        run, children = self.run, self._children()
        open_ = (
            run.started
            and not run.over
            and run.mode.rule is not FoldRule.MIX
            and self.resharding.phase is ReshardPhase.STILL
        )
        if not open_ or not children or self.members.plan is None or self.plan != run.settings.plan_number:
            return None
        rates = [child for _, child in children]
        at_once = in_turn(rates) if run.mode.seconds else rates
        now = present(run.settings, self.coded, at_once[0].own_s)
        ways = self._roomy(now, WAYS if self.resharding.fixed else IN_RUN)
        (here,) = prices(at_once, self.members.plan.size, self.coded, [now])
        others = prices(rates, self.members.plan.size, self.coded, ways) if ways else []
        if not others:
            return None
        slowest = max(children, key=lambda each: 1 / (each[1].up or 1e30) + 1 / (each[1].down or 1e30))
        return min(others, key=lambda price: price.cost), here, *slowest

    def _roomy(self, now: ModeAndSpec, ways: Sequence[ModeAndSpec]) -> list[ModeAndSpec]:
        """Return the ways for which all hosts of the run have memory."""
        away, members = len(self.resharding.away), self.run.declared
        servers = [self.here] * (self.run.shards - away) + [UNKNOWN] * away
        workers = [
            HostMemory(seat.host, seat.rows[0].summary.memory_bytes) for seat in members if not seat.rows[0].runs
        ]
        clusters = [
            HostMemory(seat.host.rpartition(":")[0], seat.rows[0].summary.memory_bytes)
            for seat in members
            if seat.rows[0].runs
        ]
        size, updates = self.members.plan.size if self.members.plan is not None else 0, self._updates
        return [way for way in ways if not too_small(way, now, size, servers, workers, clusters, updates)]

    @property
    def _updates(self) -> bool:
        return self.run.settings.push == "update"

    def room(self) -> int:
        """Return the memory that this server leaves of its host for what its parent's mode needs; 0: not known."""
        if self.members.plan is None or not self.here.bytes:
            return 0
        models = server_models(unmeasured(self.run.settings), len(self.run.declared), self._updates)
        return max(1, self.here.bytes - int(VALUE_BYTES * models * self.members.plan.size))

    def _propose(self, best: WayPrice, here: WayPrice, seat: Seat, child: ChildRates) -> None:
        run, fixed = self.run, self.resharding.fixed
        number, ratio = run.settings.plan_number + 1, best.cost / here.cost
        changes = run.settings.replan == "change" and not fixed
        text = (
            f"plan {number}: {best.way} instead of {here.way} would take {ratio:.2f} of the time to a loss, "
            f"{_ms(best.step_s)} a step and not {_ms(here.step_s)}; the slowest link, to rank {seat.rank} ({seat.host}), has "
            f"{_rate(child.up)} up, {_rate(child.down)} down and a round trip of {_ms(child.round_trip_s)}, its step "
            f"{_ms(child.own_s)} of computing; "
        )
        text += f"it takes a restart: {fixed}" if fixed else ""
        text += "" if fixed else "the run changes to it" if changes else "--replan change changes a running run to it"
        values = {"plan": number, "from": str(here.way), "to": str(best.way), "clock": self.clocks.min_clock}
        values |= {"gain": round(1 - ratio, 3), "before_seconds": here.step_s, "after_seconds": best.step_s}
        self.said.append(Log("replan", values | {"changes": changes, "text": text}))
        self.since_ns = -1
        if changes:
            flags = {name: value for name, value in best.way.flags().items() if name in OF_PLAN}
            self.resharding.change(run.settings.changed(**flags))
        else:
            self.proposed.add(best.way)

    def tell(self) -> list[Log]:
        said, self.said = self.said, []
        return said


def _own_seconds(summary: Summary) -> float:
    """Return the seconds of steps that no other way would change: computing, and waiting for a teacher."""
    return summary.compute_seconds + summary.teacher_seconds


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _rate(rate: float) -> str:
    return f"{8e-6 * rate:.3g} Mbit/s" if rate else "no limit seen"
