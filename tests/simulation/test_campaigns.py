"""The machines under every fault: runs by the hundred, the same seed twice, bugs planted, and the bugs found so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrows.compression.codecs import RAW
from narrows.protocols import messages
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, GiveWeights, Log, Send, ServerEffect, StateArrived
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member
from narrows.protocols.member.session import Session
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.members import Members
from narrows.ps.coordinator.run import Seat
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.folding import FoldAtOnce
from narrows.ps.shard.model_shard import ModelShard
from narrows.ps.shard.publications import Publications
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence
from narrows.ps.shard.shard import Shard
from narrows.ps.shard.shard_requests import ShardRequests
from narrows.ps.store.changes import Change, FloatArray, Fold, LoadArrays, PushedUpdate, Terms
from narrows.ps.store.reduction import WeightedMean
from narrows.ps.store.store import Store
from simulation.actors import CLOCKS, Bug, Disk, Kit, planted
from simulation.bug_hunt import hunt
from simulation.campaigns import DRAWN_MODES, Case, Fault, Run, case_of
from simulation.mirror import Violation
from simulation.scenario import play
from simulation.simulator import Faults, Random

PLANTED_SEEDS = 40  # within so many a planted bug is found
SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def test_a_run_is_as_large_as_is_said_and_the_modes_take_turns() -> None:
    cases = [case_of(seed) for seed in range(128)]
    assert all(case.settings.workers >= 4 and case.settings.shards >= 2 for case in cases) and CLOCKS >= 20
    modes = {(c.settings.sync, c.settings.push, c.settings.staleness) for c in cases}
    assert {mode[:2] for mode in modes} == {
        *(("bsp", "gradient"), ("bsp", "update"), ("ssp", "update"), ("ssp", "gradient")),
        *(("async", "update"), ("async", "gradient"), ("local", "update")),
    }
    assert (
        {s for sync, _, s in modes if sync == "ssp"} == {s for sync, _, s in modes if sync == "local"} == {0, 1, 2, 3}
    )
    streams = [c.settings.mode() for c in cases if c.settings.mode().streams]
    assert {mode.fragments for mode in streams} == {2, 3, 4} and {mode.bound for mode in streams} == {0, 1, 2, 3}
    assert any(
        c.settings.sync == "local" and c.settings.mode().barrier and not c.settings.mode().streams for c in cases
    )


def test_runs_have_a_gain() -> None:
    """Else nothing above would look at it."""
    gains = [_gain_of(Run(case_of(seed)).run()) for seed in range(PLANTED_SEEDS) if case_of(seed).scaled]
    assert max(gains) > 1.05 and len(gains) >= 5


def _gain_of(run: Run) -> float:
    return max(mirror.held.gain for mirror in run.checker.mirrors.values())


def test_with_a_quorum_updates_are_late_and_none_is_lost() -> None:
    runs = [Run(with_quorum(seed)).run() for seed in range(8)]
    assert all(run.checker.late for run in runs)
    assert {run.case.settings.grace >= 0 for run in runs} == {True, False}
    assert max(age for run in runs for _, _, age in run.checker.late) > 3


@pytest.mark.parametrize("restart", [False, True])
def test_a_seed_replays_exactly(restart: bool) -> None:
    first, second, other = (Run(case_of(seed, restart)).run() for seed in (2, 2, 3))
    assert (first.sim.digest, first.sim.now_ns) == (second.sim.digest, second.sim.now_ns)
    assert first.sim.struck == second.sim.struck
    assert other.sim.digest != first.sim.digest


def test_the_generator_is_splitmix64() -> None:
    random = Random(1234567)
    assert [random.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    values = [random.between(3, 5) for _ in range(3000)]
    assert all(900 < values.count(value) < 1100 for value in (3, 4, 5))


# Progress: one death after the other, and no message lost but to the dead.


def deaths(seed: int) -> Case:
    """Two workers fall silent, one for good, one for longer than a lease; nothing else goes wrong."""
    case = case_of(seed)
    assert case.crash is not None
    crash = replace(case.crash, told=False)
    cut = Fault((crash.who + 1) % case.settings.workers, min(crash.clock + 2, CLOCKS - 2), 0, 5 * NS)
    return replace(case, faults=Faults(), crash=crash, cut=cut)


def test_a_death_delays_the_rest_by_at_most_a_lease() -> None:
    for seed in range(len(DRAWN_MODES)):
        Run(deaths(seed)).run()


# Planted bugs: what each machine guards, taken out.


def forgets_push(service: ShardRequests, seat: PushSequence, push: m.Push, ledger: m.Ledger, now_ns: int) -> Any:
    """A dedupe entry dropped: now and then the last push of a worker counts as new when it comes again."""
    if push.clock == seat.clock - 1 and push.clock % 5 == 4:
        seat.clock = push.clock
    return push_of(service, seat, push, ledger, now_ns)


def scales_again(service: ShardRequests, seat: PushSequence, push: m.Push, ledger: m.Ledger, now_ns: int) -> Any:
    """The gain applied twice: a push that comes again makes it grow once more."""
    if push.clock < seat.clock:
        service.store.gain.factor **= 2
    return push_of(service, seat, push, ledger, now_ns)


def weighs_again(folding: FoldAtOnce, seat: Any, update: Any, publication: int) -> list[Change]:
    """The gain applied twice: now and then the weight of an update is scaled once more."""
    (change,) = accept_of(folding, seat, update, publication)
    if isinstance(change, Fold) and seat.clock % 5 == 4:
        ((weight, terms),) = change.terms
        change = replace(change, terms=((weight * folding.gain.factor, terms),))
    return [change]


class OneEarly(Clocks):
    """A barrier closed one early: the last worker is not waited for."""

    def _going(self) -> list[Seat]:
        members = super()._going()
        late = [member for member in members if self.clock(member) <= self.min_clock]
        return [member for member in members if member not in late] if len(late) == 1 < len(members) else members


class AnyEpoch(Shard):
    """An epoch unchecked: what a worker of an earlier life sent counts for the one that has its number now."""

    def handle(self, peer: bytes, message: m.Message, now_ns: int) -> list[ServerEffect]:
        seat = self.assembler.seats.get(getattr(message, "worker", -1))
        if seat is not None and isinstance(message, (m.Push, m.Follow, m.Pull, m.FirstWeights)):
            message = replace(message, epoch=seat.epoch)
        return super().handle(peer, message, now_ns)


class CountsTheDead(Shard):
    """A dead worker's weight kept: its seat stays, and its samples with it."""

    def _members(self) -> list[Log]:
        before = dict(self.assembler.seats)
        logs = super()._members()
        for worker, seat in before.items():
            self.assembler.seats.setdefault(worker, seat)
        return logs


class Drops(Clocks):
    """A late update dropped: the clock that closes without it counts as its own."""

    def _close(self, now_ns: int) -> None:
        super()._close(now_ns)
        for progress in self.progress.values():
            if progress.due <= self.min_clock:
                progress.taken += 1


class Impatient(Clocks):
    """A clock closed with its quorum, whatever the grace."""

    def _grace_over(self, pushed: int, now_ns: int) -> bool:
        super()._grace_over(pushed, now_ns)
        return 0 < self.run.settings.quorum <= pushed


class Patient(Clocks):
    """A grace that no tick ends."""

    heard_ns = -1

    def heard(self, report: m.Report, now_ns: int) -> None:
        super().heard(report, now_ns)
        self.heard_ns = now_ns

    def _grace_over(self, pushed: int, now_ns: int) -> bool:
        return super()._grace_over(pushed, now_ns) and now_ns == self.heard_ns


class NewestOfAny(CheckpointSchedule):
    """The run goes back to a checkpoint that one shard has, and not all."""

    def shared(self) -> int:
        return max(set[int]().union(*(report.checkpoints for report in self.run.reports.values())), default=-1)


class NoLease(Members):
    """A lease that does not end."""

    def expired(self, now_ns: int) -> list[Seat]:
        return []


def leaves_behind(shown: Publications, seat: PushSequence, number: int) -> int:
    """A state counts as settled as far as the run has come, though an update of the child is in no set yet."""
    return shown.made[number].min_clock


def out_of_turn(session: Session) -> tuple[m.State, ...]:
    """A difference is taken whatever is here."""
    for parts in session.coming.values():
        if len(parts) == next(iter(parts.values())).parts:
            return tuple(parts[part] for part in sorted(parts))
    return ()


def at_will(shown: Publications, seat: PushSequence, now_ns: int) -> list[Send]:
    """All that is kept is sent, whatever the child takes."""
    child = shown.child(seat)
    before, child.follow = (
        child.follow,
        replace(child.follow, credit=1 + child.follow.credit if child.follow.credit else 0),
    )
    effects = serve(shown, seat, now_ns)
    child.follow = before
    return effects


def half_here(inbox: PushAssembler, seat: PushSequence) -> Any:
    """An update counts as whole with its last part."""
    pieces = seat.partial.get(seat.clock, {})
    if pieces and max(pieces) + 1 == next(iter(pieces.values())).parts > len(pieces) and seat.clock % 3 == 2:
        del seat.partial[seat.clock]
        return PushedUpdate(pieces[part] for part in sorted(pieces))
    return next_whole(inbox, seat)


def alike(folding: FoldAtOnce, seat: Any, update: Any, weight: float, share: float, factor: float) -> Change:
    """Every update weighs the same."""
    return change_of(folding, seat, update, 1 / len(folding.assembler.seats), share, factor)


def taken_twice(exchange: Exchange[Any], event: Any) -> Any:
    """A difference is added once more."""
    says = take_of(exchange, event)
    if isinstance(event, StateArrived) and event.parts[-1].add:
        exchange.replica.absorb(event.parts, True)
    return says


def without_last(mean: WeightedMean, terms: Terms) -> Any:
    """A mean lacks an update of the set."""
    return mean_of(mean, terms[:-1] or terms)


def longer(store: Store, terms: Terms) -> float:
    """The norm of a mean over all shards, by which it is clipped, is taken for another."""
    return 4 * norm_of(store, terms)


norm_of = Store.norm


def without_steps(shard: ModelShard, load: LoadArrays, recut: bool = False, steps: int = 0) -> None:
    """The run's steps are not in the checkpoint that a shard begins from."""
    begin_of(shard, load, recut)


def of_the_first(barrier: FoldAtBarrier, clock: int, pairs: Any) -> Any:
    """A round has the steps of its first worker."""
    pairs = list(pairs)
    first = barrier.held[pairs[0][1]][pairs[0][0]][0].steps
    found = terms_of(barrier, clock, pairs)
    barrier.steps[clock] = first
    return found


begin_of, terms_of = ModelShard.begin, FoldAtBarrier._terms
push_of, serve, next_whole, accept_of = ShardRequests._push, Publications.serve, PushAssembler.next, FoldAtOnce.accept
change_of, mean_of, take_of = FoldAtOnce._change, WeightedMean.of, Exchange._take


def with_quorum(seed: int) -> Case:
    return case_of(len(DRAWN_MODES) * seed + DRAWN_MODES.index({"sync": "local", "quorum": -1}))


def clipped_and_screened(seed: int) -> Case:
    """Each shard leaves out updates by its own keys, and the mean is clipped by its norm over all shards."""
    found = (case_of(other) for other in count(1000 * seed))
    return next(case for case in found if case.max_grad_norm and case.settings.robust == "cosine")


def with_restart(seed: int) -> Case:
    return case_of(seed, restart=True)


def by_the_wall(awake: AwakeClock) -> int:
    """All that the machine's clock says has passed counts, though nobody was listening; it is not let back."""
    awake.newest_ns = max(awake.newest_ns, awake.clock())
    return awake.newest_ns


def one_too_far(mode: Mode, clock: int, min_clock: int) -> bool:
    """The bound off by one, for shards and workers alike."""
    return mode.bound is None or clock <= min_clock + mode.bound + 1


def at_once(service: ShardRequests) -> FloatArray:
    """The last model is sent to a worker that is done, whoever goes on."""
    return service.store.x


sparse = lambda seed: with_states("topk:0.5", seed)  # noqa: E731
in_parts = lambda seed: with_barrier(seed)  # noqa: E731
PLANTED: dict[str, tuple[Bug, Callable[[int], Case], str]] = {
    "a dedupe entry dropped": ([(ShardRequests, "_push", forgets_push)], case_of, "is folded twice"),
    "the bound off by one": ([(Mode, "allows", one_too_far)], case_of, "staleness"),
    "the gain applied twice after a retry": ([(ShardRequests, "_push", scales_again)], case_of, "weight of"),
    "a fold weight scaled twice": ([(FoldAtOnce, "accept", weighs_again)], case_of, "weight of"),
    "a barrier closed one early": (OneEarly, case_of, "is closed over|is complete"),
    "an epoch unchecked": (Kit(shard=AnyEpoch), with_restart, "folded|blames|ended"),
    "a late update dropped": (Drops, with_quorum, "is closed over .* have pushed"),
    "a grace cut short": (Impatient, with_quorum, "is closed over"),
    "a grace without end": (Patient, with_quorum, "after its quorum"),
    "a late worker sent on without its update": (
        [(Publications, "_settled", leaves_behind)], with_quorum, "own writes|is settled to"
    ),
    "a last model sent while others go on": ([(ShardRequests, "_last", at_once)], case_of, "is the last model, and workers"),
    "a run's steps forgotten in a restart": ([(ModelShard, "begin", without_steps)], with_restart, "steps of the run"),
    "the steps of one worker for those of a round": ([(FoldAtBarrier, "_terms", of_the_first)], case_of, "steps of the run"),
    "a dead worker's weight kept": (Kit(shard=CountsTheDead), case_of, "weight of"),
    "a checkpoint that not all shards have": (NewestOfAny, with_restart, "has no checkpoint of it"),
    "a lease without end": (NoLease, case_of, "progress|has not ended"),
    "a difference taken out of turn": ([(Session, "_next", out_of_turn)], sparse, "is another one in"),
    "more sent than a child takes": (
        [(Publications, "serve", at_will), (messages, "CREDIT_MAX", 2)], sparse, "asked for were"
    ),
    "a difference taken twice": ([(Exchange, "_take", taken_twice)], sparse, "is another one in"),
    "a worker that waits for nobody": (
        [(Exchange, "may_compute", property(lambda exchange: exchange.settled >= 0))], case_of, "staleness: .* computes"
    ),
    "an update taken in part": ([(PushAssembler, "next", half_here)], in_parts, "the log gives|publishes|blames"),
    "samples that count for nothing": ([(FoldAtOnce, "_change", alike)], case_of, "weight of|the log gives"),
    "a mean of others than the set": ([(WeightedMean, "of", without_last)], in_parts, "the log gives|publishes"),
    "a jump of a clock taken for silence": (
        [(AwakeClock, "turn", by_the_wall), (AwakeClock, "now", by_the_wall)],
        case_of,
        "has not answered for|progress|has not ended",
    ),
    "a norm of other values": ([(Store, "norm", longer)], clipped_and_screened, "is shrunk by"),
}  # fmt: skip


def with_states(spec: str, seed: int) -> Case:
    """With states coded so."""
    case = case_of(seed + seed // 8)
    settings = replace(case.settings, compress_down=spec if case.settings.sync != "bsp" else "dense").validated()
    return replace(case, settings=settings)


def with_barrier(seed: int) -> Case:
    """A case of a mode with a barrier, in which a shard restarts."""
    found = (case_of(other, restart=True) for other in range(99 * seed, 99 * seed + 99))
    return next(case for case in found if case.settings.mode().barrier)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, case, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Run(case(seed), kit).run(), PLANTED_SEEDS, complaint)


def test_a_late_need_for_weights_moves_no_member_that_has_a_state() -> None:
    # 1. the member follows   2. an old NeedWeights: give weights   3. the state   4. the same NeedWeights again (seed 455)
    member = Member("w", "here")
    member.join(0)
    member.declare(ModelSpec((TensorSpec("w", (4,), "float32"),), "", ((0,),)).packed(), 0)
    member.receive(0, m.Welcome("w", 3, 0, 1, 7, Settings().validated().packed(), (1,)), 0)
    member.receive(0, m.Ready(3, 8, 0, ((0, 4),), b""), 0)
    member.send(0, [m.Follow(3, 8, 0, -1, 1)], 0)
    assert member.receive(0, m.NeedWeights(3, 8), 0) == [GiveWeights(0)]
    first = m.State(3, 8, 0, 0, 1, 0, 4, True, False, 0, 0, 0, (), 0, RAW, bytes(16))
    assert member.receive(0, first, 0)
    member.send(0, [m.Follow(3, 8, 2, -1, 1)], 0)
    assert member.receive(0, m.NeedWeights(3, 8), 0) == []


def test_the_disk_keeps_what_the_real_one_keeps(tmp_path: Path) -> None:
    disk, x = Disk(), np.zeros(3, np.float32)
    facts = {"publication": 0, "plan": b"", "buffers": b"", "shards": 1}
    # The run has gone back from 9 to some clock before 6; then the disk of another shard refuses 7 and 8.
    for clock, shared in ((4, -1), (8, 4), (9, 8), (6, 4), (7, 6), (8, 6), (10, 6), (11, 10), (12, 11)):
        disk.write(0, clock, {"x": x, "p": x}, 0, b"", shared)
        assert checkpoint_files.write(tmp_path, 0, clock, {"x": x, "p": x}, facts, shared) == disk.clocks(0)
    # Two shards become one: the file of the second goes when the first does not need that clock any more.
    for shard, clock, shards, shared in (
        (0, 14, 2, 12),
        (1, 14, 2, 14),
        (0, 16, 1, 14),
        (0, 18, 1, 14),
        (0, 20, 1, 18),
    ):
        disk.write(shard, clock, {"x": x, "p": x}, 0, b"", shared, shards)
        checkpoint_files.write(tmp_path, shard, clock, {"x": x, "p": x}, facts | {"shards": shards}, shared)
        for each in range(2):
            assert checkpoint_files.clocks(tmp_path, each) == disk.clocks(each)
            assert checkpoint_files.sound(tmp_path, each, shards)[0] == disk.sound(each, shards)
    assert disk.clocks(1) == ()
    for clock in (6, -1):
        disk.drop_after(0, clock)
        checkpoint_files.drop_after(tmp_path, 0, clock)
        assert checkpoint_files.clocks(tmp_path, 0) == disk.clocks(0)


# Bugs that were found, each as a scenario. After a change of the machines: play, and read the diff as code.


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_comes_out_as_it_is_written(path: Path) -> None:
    text = path.read_text("utf-8")
    assert play(text) == text
