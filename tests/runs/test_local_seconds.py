"""Rounds by the clock (--local-seconds): as many steps as fit, weighed by them, beside the same loop in NumPy.

Each worker has a virtual time of its own, which its steps advance: so many seconds each. Only the last test has real time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from kit.groups import groups
from kit.in_process import Cluster
from kit.on_disk import OnDisk
from kit.processes import SCRIPT, finished, serving, started
from kit.scripts import Array, Run, build, flat, loss_of, run, tree
from kit.specs import MODES, modes
from kit.streaming_reference import RATE, SIZE, Flat, first, target
from torch.utils.data import DataLoader, TensorDataset

from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import fragment
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import STALENESS_MAX, Settings, contradiction
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.ps.planner.replanning import ChildRates, in_turn, unmeasured
from narrows.ps.shard.barrier import FoldAtBarrier
from narrows.ps.shard.folding import FoldAtOnce
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence
from narrows.worker import DistributedOptimizer, agree, clock, sampler, step_count
from narrows.worker.runtime import round_clock
from narrows.worker.runtime.round_clock import RoundClock
from narrows.worker.sync.engine import Engine

OUTER = (0.5, 0.5)
TIMED = Settings(sync="local", local_seconds=9.0, workers=2, outer_lr=OUTER[0], outer_momentum=OUTER[1])
COSTS = (1.0, 3.0)  # seconds of a step of each worker


def engine_of(optimizer: DistributedOptimizer) -> Engine:
    assert optimizer._engine is not None
    return optimizer._engine


class Times(threading.local):
    """The virtual time of the calling thread."""

    now_s = 0.0


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[Times]:
    here = Times()
    monkeypatch.setattr(round_clock, "monotonic", lambda: here.now_s)
    return here


# The clock of one worker.


def steps_of(rounds: RoundClock, times: Times, cost_s: float) -> int:
    """The local steps until the round ends."""
    for before in range(1000):
        times.now_s += cost_s
        if rounds.ends(before):
            return before + 1
    raise AssertionError("the round does not end")


def timed(seconds: float, **flags: Any) -> RoundClock:
    return RoundClock(Settings(sync="local", local_seconds=seconds, **flags).validated().mode())


@pytest.mark.parametrize(
    ("cost_s", "steps"), [(1.0, 9), (3.0, 3), (2.0, 4), (2.1, 4), (1.99, 5), (4.0, 2), (7.0, 1), (20.0, 1), (0.01, 900)]
)
def test_a_round_ends_with_the_step_that_ends_nearest_to_its_time(times: Times, cost_s: float, steps: int) -> None:
    """Half a step early or late at most: 4 steps of 2 s end as near to 9 s as 5, and then the round has fewer."""
    rounds = timed(9.0)
    assert steps_of(rounds, times, cost_s) == 1, "the first round at a place has one step"
    for _ in range(3):
        rounds.begin(steps, 0.0)
        assert steps_of(rounds, times, cost_s) == steps
    rounds.anew()
    assert steps_of(rounds, times, cost_s) == 1


def test_its_time_changes_with_the_machine_and_the_most_steps_hold(times: Times) -> None:
    rounds = timed(9.0, local_steps=20)
    for cost_s, steps in ((1.0, 1), (1.0, 9), (3.0, 3), (0.5, 18), (0.1, 20)):
        assert steps_of(rounds, times, cost_s) == steps
        rounds.begin(steps, 0.0)
        assert rounds.steps == steps


@pytest.mark.parametrize(
    ("waited_s", "exchange_s", "steps"), [(2.0, 2.0, 7), (50.0, 2.0, 7), (50.0, 0.0, 9), (1, 2, 8)]
)
def test_the_own_link_counts_and_waits_for_others_do_not(
    times: Times, waited_s: float, exchange_s: float, steps: int
) -> None:
    """A state that takes 2 s over the own link takes 2 s of the round; what one waits beyond that is not one's own."""
    rounds = timed(9.0)
    rounds.begin(1, exchange_s)
    for _ in range(2):  # in two waits as in one
        with rounds.waiting():
            times.now_s += waited_s / 2
    assert steps_of(rounds, times, 1.0) == steps
    rounds.begin(1, 4.0)  # 4 s of the link, and steps of 3.4 s: one ends at 7.4 s, two at 10.8
    with rounds.waiting():
        times.now_s += 4.0
    assert steps_of(rounds, times, 3.4) == 1


def test_without_the_flag_a_round_has_its_steps_and_no_time_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_clock, "monotonic", None)
    rounds = RoundClock(Settings(sync="local", local_steps=3).validated().mode())
    assert [rounds.ends(before) for before in range(3)] == [False, False, True]
    with rounds.waiting():
        rounds.begin(3, 0.0)


# A run, beside its reference. The loop of one process: each worker's round by its costs, the mean weighed by steps.


def count_of(cost_s: float, seconds: float) -> int:
    """Steps of `cost_s` that end nearest to `seconds`; the fewer of two that are as near."""
    return min(range(1, 1000), key=lambda n: (abs(n * cost_s - seconds), n))


@dataclass
class Reference:
    """Plain SGD on the quadratic losses of kit/streaming_reference, and the servers' outer step, in float64."""

    settings: Settings
    costs: Sequence[float] = COSTS
    x: Array = field(default_factory=lambda: first().astype(np.float64))
    run_steps: int = 0
    clock: int = 0

    def __post_init__(self) -> None:
        self.settings = self.settings.validated()
        self.velocity = np.zeros(SIZE)
        self.local = [self.x.copy() for _ in self.costs]
        self.base = [self.x.copy() for _ in self.costs]
        self.taken = [0 for _ in self.costs]
        self.due: slice | None = None  # keys that are pushed and not merged

    def merge(self, worker: int) -> None:
        if self.due is not None:
            alpha = self.settings.merge_alpha
            self.local[worker][self.due] *= alpha
            self.local[worker][self.due] += (1 - alpha) * self.x[self.due]
            self.base[worker][self.due] = self.x[self.due]

    def round(self, at_end: bool = False, left: Sequence[int] | None = None) -> list[int]:
        """One clock. `left`: the steps of a last round that its time did not end. Returns the steps of each worker."""
        settings, fragments = self.settings, self.settings.fragments
        each_s = settings.local_seconds / fragments
        counts = [1 if not self.clock else count_of(cost_s, each_s) for cost_s in self.costs]
        counts = list(left) if left is not None else counts
        for worker, count in enumerate(counts):
            merged = False
            for step in range(count):
                local = self.local[worker]
                local -= RATE * (local - target(worker, self.taken[worker]))
                self.taken[worker] += 1
                if step + 1 == settings.merge_delay and not at_end:
                    self.merge(worker)
                    merged = True
            if settings.merge_delay and not merged:
                self.merge(worker)
        keys = slice(*fragment(0, SIZE, fragments, self.clock % fragments))
        weights = np.ones(len(counts)) if settings.weigh == "equal" else np.array(counts, np.float64)
        updates = [local[keys] - base[keys] for local, base in zip(self.local, self.base, strict=True)]
        mean = np.average(updates, axis=0, weights=weights)
        self.velocity[keys] = settings.outer_momentum * self.velocity[keys] + mean
        self.x[keys] += settings.outer_lr * (mean + settings.outer_momentum * self.velocity[keys])
        self.due = keys
        if not settings.merge_delay:
            for worker in range(len(counts)):
                self.merge(worker)
        self.clock += 1
        self.run_steps += max(counts)
        return counts


def train(started_: Run, times: Times, rounds: int, costs: Sequence[float] = COSTS, samples: int = 0) -> list[Any]:
    """By worker: its parameters, the run's step and its own steps at the end of each round; `samples`: of each step."""

    def script(worker: int) -> list[tuple[Array, int, int]]:
        model = Flat()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model)
        seen, step, before = [], 0, 0
        while clock() < rounds:
            optimizer.zero_grad()
            model.loss(worker, step).backward()
            times.now_s += costs[worker]
            if samples:
                optimizer.step_samples(samples)
            count = step_count()
            optimizer.step()
            assert step_count() >= count + 1, "the run's step grows with each own step"
            step += 1
            if clock() > before:
                before = clock()
                seen.append((flat(model), step_count(), step))
        return seen

    return started_.together(script)


@pytest.mark.parametrize(
    ("flags", "costs"),
    [
        ({}, COSTS),
        ({"weigh": "equal"}, COSTS),
        ({"shards": 3}, (1.0, 3.0, 2.0)),
        ({"local_seconds": 2.0}, (1.0, 3.0)),
        ({"merge_delay": 2, "merge_alpha": 0.25}, COSTS),
        ({"merge_delay": 5, "merge_alpha": 0.25}, COSTS),  # the slow one has fewer steps, and merges before its push
        ({"fragments": 3, "local_seconds": 27.0, "merge_alpha": 0.5, "shards": 1}, COSTS),
    ],
    ids=str,
)
def test_a_run_weighs_each_update_by_its_steps(times: Times, flags: dict[str, Any], costs: tuple[float, ...]) -> None:
    settings = replace(TIMED, workers=len(costs), **flags)
    reference = Reference(settings, costs)
    with run(settings) as started_:
        results = train(started_, times, 5, costs)
    for index in range(5):
        counts = reference.round()
        assert index == 0 or max(counts) > min(counts)
        for worker, seen in enumerate(results):
            weights, steps, own = seen[index]
            assert own == reference.taken[worker], f"worker {worker}, round {index}"
            known = reference.run_steps if not settings.validated().merge_delay else steps  # the state is still to come
            assert own <= steps == known <= reference.run_steps
            np.testing.assert_allclose(weights, reference.local[worker], rtol=2e-5, atol=2e-5)


def test_the_samples_that_a_script_names_are_the_weights(times: Times) -> None:
    """Fast and slow name as many for each step, so the means are those without a name."""
    with run(TIMED) as started_:
        plain = train(started_, times, 4)
    times.now_s = 0.0
    with run(TIMED) as started_:
        named = train(started_, times, 4, samples=16)
    for one, other in zip(plain, named, strict=True):
        np.testing.assert_array_equal(one[-1][0], other[-1][0])


@pytest.mark.parametrize("mode", modes(lambda settings: settings.mode().rule is not FoldRule.MIX))
def test_equal_weights_are_a_plain_mean_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker names 1 sample a step, the other 3: with --weigh equal each has half of the mean, else 1/4 and 3/4."""
    shares: list[float] = []
    at_once, at_barrier = FoldAtOnce.accept, FoldAtBarrier._terms

    def accepted(folding: FoldAtOnce, seat: Any, *rest: Any) -> Any:
        changes = at_once(folding, seat, *rest)
        known = len(folding.assembler.seats) == 2 and all(each.samples > 0 for each in folding.assembler.seats.values())
        shares.extend([folding.folded[seat.worker][-1][1]] if known else [])
        return changes

    def terms(barrier: FoldAtBarrier, *rest: Any) -> Any:
        found = at_barrier(barrier, *rest)
        shares.extend(found[1] if len(found[1]) == 2 else ())
        return found

    monkeypatch.setattr(FoldAtOnce, "accept", accepted)
    monkeypatch.setattr(FoldAtBarrier, "_terms", terms)

    def script(worker: int) -> None:
        model = Flat()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model)
        for step in range(24):
            optimizer.zero_grad()
            model.loss(worker, step).backward()
            optimizer.step_samples(1 + 2 * worker)
            optimizer.step()
            if step == 11:
                half.wait(60.0)  # from here on the shards know the samples of both
        half.wait(60.0)
        optimizer.leave()

    half = threading.Barrier(2)

    flags = MODES[mode] | ({"quorum": 2} if "quorum" in MODES[mode] else {})
    for weigh, expected in (("equal", {0.5}), ("samples", {0.25, 0.75})):
        shares.clear()
        with run(Settings(workers=2, weigh=weigh, **flags)) as started_:
            started_.together(script)
        found = {round(share, 3) for share in shares}
        # Without the flag a residual at the end has no samples that the script has named, and counts as 1.
        assert found == expected if weigh == "equal" else expected <= found, weigh


def test_with_a_staleness_bound_steps_count_likewise(times: Times) -> None:
    """Updates are folded as they come, so models depend on who is first; the steps of a clock do not."""
    with run(replace(TIMED, staleness=1, shards=2)) as started_:
        results = train(started_, times, 6)
    for seen, cost_s in zip(results, COSTS, strict=True):
        assert [own for *_, own in seen] == [1 + index * count_of(cost_s, 9.0) for index in range(6)]
        steps = [count for _, count, _ in seen]
        assert all(own <= count <= 1 + 9 * (index + 1) for index, (_, count, own) in enumerate(seen)), steps


def test_the_same_data_ends_for_all_at_the_same_step_of_the_run(times: Times) -> None:
    """A loader with steps=: the slow worker makes a third, and no worker trains alone at the end."""
    data = TensorDataset(torch.arange(64.0))
    made: dict[int, list[int]] = {0: [], 1: []}

    def script(worker: int) -> tuple[Array, int]:
        model = Flat()
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.5, 46)
        optimizer = DistributedOptimizer(inner, model, schedule=schedule)
        for step, _ in enumerate(DataLoader(data, 4, sampler=sampler(data, 4, steps=46))):
            optimizer.zero_grad()
            model.loss(worker, step).backward()
            times.now_s += COSTS[worker]
            optimizer.step()
            schedule.step()
            made[worker].append(clock())
        optimizer.finish()
        assert schedule.last_epoch == step_count() == 46, "the rate follows the run, not the worker's own steps"
        return flat(model), step_count()

    with run(TIMED) as started_:
        (fast, _), (slow, _) = started_.together(script)
    np.testing.assert_array_equal(fast, slow)
    assert len(made[0]) == 46  # 1 + 9 * 5
    assert len(made[1]) == 1 + 3 * 5
    assert made[0][-1] == made[1][-1] == 6


def test_a_quorum_closes_rounds_without_who_is_late(times: Times) -> None:
    """The run's step never goes back, and the late one's jumps over what it missed."""
    jumps: list[int] = []

    def script(worker: int) -> Array:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        step = 0
        while (before := step_count()) < 60:
            optimizer.zero_grad()
            loss_of(model, step, worker, 3).backward()
            times.now_s += (*COSTS, 2.0)[worker]
            optimizer.step()
            assert step_count() > before
            jumps.append(step_count() - before)
            step += 1
        optimizer.finish()
        return flat(model)

    with run(replace(TIMED, workers=3, quorum=2, grace=0.0, shards=2)) as started_:
        models = started_.together(script)
    assert all(np.isfinite(model).all() for model in models) and max(jumps) > 1


def test_a_push_with_impossible_steps_is_refused() -> None:
    assembler = PushAssembler(0, TIMED.validated().mode())
    seat = PushSequence(1, 1, 0, 0, 0)
    push = m.Push(1, 1, 0, 0, 1, 0, 4, 1, b"", RAW, bytes(16), STALENESS_MAX + 1)
    with pytest.raises(RemoteProtocolError, match="local steps"):
        assembler.add(seat, push, (0, 4))
    assert not seat.partial
    assembler.add(seat, replace(push, steps=STALENESS_MAX), (0, 4))


def test_calls_of_agree_in_a_round_go_together(times: Times) -> None:
    """Both call once a round, after unlike numbers of steps, and stop together."""

    def script(worker: int) -> int:
        model = Flat()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model)
        before = 0
        for step in range(200):
            optimizer.zero_grad()
            model.loss(worker, step).backward()
            times.now_s += COSTS[worker]
            optimizer.step()
            if clock() > before:
                before = clock()
                if agree(worker == 0 and before >= 4) > 0.4:
                    break
        optimizer.finish()
        return before

    with run(TIMED) as started_:
        assert started_.together(script) == [4, 4]


@pytest.mark.parametrize("number", [0, 1])
def test_who_has_to_join_again_begins_with_a_round_of_one_step(times: Times, number: int) -> None:
    """And all end with one model. The lease of one worker runs out in the midst of a round."""
    meet = threading.Barrier(2)

    def script(worker: int) -> tuple[Array, list[tuple[int, int]]]:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        clocks, step = [], 0
        while step_count() < 60:
            optimizer.zero_grad()
            loss_of(model, step, worker, 2).backward()
            times.now_s += COSTS[worker]
            if step == (6, 2)[worker]:  # of the same round
                meet.wait(60.0)
                if worker == number:
                    started_.expire(number)
                meet.wait(60.0)
            optimizer.step()
            step += 1
            clocks.append((engine_of(optimizer).sync.shards.epoch, clock()))
        optimizer.finish()
        return flat(model), clocks

    with run(replace(TIMED, shards=2, compress="topk:0.2")) as started_:
        (fast, clocks_0), (slow, clocks_1) = started_.together(script)
    np.testing.assert_array_equal(fast, slow)
    seen = (clocks_0, clocks_1)[number]
    begun = next(at for at, (epoch, _) in enumerate(seen) if epoch != seen[0][0])
    assert seen[begun + 1][1] == seen[begun][1] + 1, (
        "the step during which it joined is dropped, and one ends its round"
    )
    assert [at for _, at in seen[begun + 1 :]].count(seen[begun][1] + 1) in (9, 3)


def test_who_comes_late_counts_from_the_runs_step(times: Times) -> None:
    late: list[tuple[int, int]] = []

    def script(worker: int) -> Array:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        if worker == 2:
            late.append((step_count(), clock()))
        step = 0
        while step_count() < 90:
            optimizer.zero_grad()
            loss_of(model, step, worker, 3).backward()
            times.now_s += (*COSTS, 2.0)[worker]
            optimizer.step()
            step += 1
            if worker == 0 and clock() == 3 and len(started_.sessions) == 2:
                joined.append(_beside(started_, script))
        optimizer.finish()
        return flat(model)

    joined: list[Any] = []
    with run(TIMED) as started_:
        models = started_.together(script)
        joined[0].join(60.0)
        models.append(joined[0].result)
    assert late[0][1] >= 3 and late[0][0] == 1 + 9 * (late[0][1] - 1)
    for model in models[1:]:
        np.testing.assert_array_equal(model, models[0])


def _beside(started_: Run, script: Any) -> threading.Thread:
    """A third worker, which joins and trains in a thread of its own."""

    def work() -> None:
        torch.set_num_threads(1)
        started_.join()
        thread.result = script(2)  # type: ignore[attr-defined]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_ranks_of_a_group_make_as_many_steps_as_their_first(times: Times) -> None:
    """Whatever their own clocks say; and the group weighs by steps, and by its ranks."""
    costs = {(0, 0): 1.0, (0, 1): 2.5, (1, 0): 3.0}
    own: dict[tuple[int, int], list[tuple[int, int]]] = {each: [] for each in costs}

    def script(member: int, rank: int) -> Array:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for step in range(200):
            optimizer.zero_grad()
            loss_of(model, step, member, 2).backward()
            times.now_s += costs[member, rank]
            optimizer.step()
            own[member, rank].append((clock(), step_count()))
            if step_count() >= 46:
                break
        optimizer.finish()
        with optimizer.shared():
            return flat(model)

    with groups(replace(TIMED, shards=3), [2, 1]) as started_:
        models = started_.together(script)
    assert own[0, 0] == own[0, 1] and len(own[0, 0]) == 46
    assert len(own[1, 0]) == 1 + 3 * 5
    for weights in models.values():
        np.testing.assert_array_equal(weights, models[0, 0])


def test_the_runs_step_goes_on_from_a_checkpoint_and_over_other_shards(times: Times, tmp_path: Path) -> None:
    settings = replace(TIMED, shards=2, checkpoint_every=1000.0)
    seen: list[int] = []

    def script(until: int, move: bool) -> Any:
        def work(worker: int) -> Array:
            model = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
            if not worker:
                seen.append(step_count())
            step = 0
            while step_count() < until:
                optimizer.zero_grad()
                loss_of(model, step, worker, 2).backward()
                times.now_s += COSTS[worker]
                optimizer.step()
                step += 1
                if move and not worker and clock() == 3 and len(cluster.servers) == 2:
                    cluster.move(3)
                if not worker:
                    seen.append(step_count())
            optimizer.finish()
            return flat(model)

        return work

    cluster = OnDisk(settings, tmp_path)
    with run(settings, cluster) as started_:
        first_models = started_.together(script(46, move=True))
    assert seen[0] == 0 and seen[-1] == 46 and sorted(seen) == seen
    assert [log.values["steps"] for log in cluster.logs if log.event == "ended"] in ([], [46])
    seen.clear()
    with run(settings, OnDisk(replace(settings, shards=3), tmp_path, resume=True)) as started_:
        models = started_.together(script(73, move=False))
    assert seen[0] == 46 and seen[-1] >= 73
    np.testing.assert_array_equal(models[0], models[1])
    assert not np.array_equal(models[0], first_models[0])


def test_a_cluster_may_have_rounds_by_the_clock_and_its_parent_may_not(times: Times) -> None:
    """The parent weighs each cluster by all steps of its workers."""
    root = Cluster(Settings(sync="bsp", push="update", workers=2))
    cities = [Cluster(replace(TIMED, workers=1), root, f"city{index}") for index in range(2)]

    def script(worker: int) -> Array:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        step = 0
        while clock() < 6:
            optimizer.zero_grad()
            loss_of(model, step, worker, 2).backward()
            times.now_s += COSTS[worker]
            optimizer.step()
            step += 1
            if not worker and clock() == 4 and not weighed:
                with root.changed:
                    folding: Any = root.servers[0].shard.model_shard.folding  # type: ignore[union-attr]
                    weighed.append(folding.samples)
        optimizer.finish()
        return flat(model)

    weighed: list[int] = []
    with tree(root, *cities) as started_:
        models = started_.together(script)
    np.testing.assert_array_equal(models[0], models[1])
    assert weighed == [9 + 3]


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"sync": "bsp"}, "--local-seconds: --sync bsp pushes every step; --sync local has rounds by the clock"),
    ({"sync": "gossip"}, "--local-seconds: under --sync gossip whole models are mixed"),
    ({"local_seconds": 0.0}, "--local-seconds 0: give seconds above 0, at most 86400"),
    ({"local_seconds": float("nan")}, "--local-seconds nan: give seconds above 0"),
    ({"weigh": "speed"}, "--weigh speed: give one of samples, equal"),
    (
        {"sync": "gossip", "local_seconds": -1.0, "weigh": "equal"},
        "--weigh equal: under --sync gossip models are mixed",
    ),
    ({"local_steps": 10, "fragments": 3}, "--fragments 3: --local-steps 10 is no multiple of it"),
)


@pytest.mark.parametrize(("flags", "sentence"), REFUSED, ids=str)
def test_what_contradicts_is_refused_with_a_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        Settings(**{"sync": "local", "local_seconds": 5.0, **flags}).validated()
    assert sentence in str(error.value)


def test_settings_say_it_and_are_the_same_on_the_other_side() -> None:
    settings = Settings(sync="local", local_seconds=20.0, fragments=4, weigh="equal").validated()
    assert "--local-seconds 20, --fragments 4" in settings.summary() and "--weigh equal" in settings.summary()
    assert "--local-steps" not in settings.summary()
    assert Settings.unpacked(settings.packed()) == settings == settings.validated()
    assert contradiction({"local_seconds": 20.0, "weigh": "equal"}, settings) is None
    assert "which has no --local-steps under --sync local" in (contradiction({"local_steps": 9}, settings) or "")
    mode = settings.mode()
    assert (mode.seconds, mode.bound) == (5.0, 1)
    assert (settings.outer_lr, settings.outer_momentum) == (0.7, 0.6)  # as of long rounds


def test_a_replan_prices_the_steps_that_fit_and_no_wait_for_the_slow() -> None:
    children = [ChildRates(own_s, 1e6, 1e6, 0.01) for own_s in (0.1, 0.3)]
    even = in_turn(children)
    assert [child.own_s for child in even] == pytest.approx([0.15, 0.15])
    assert unmeasured(Settings(sync="local", local_seconds=15.0).validated(), even[0].own_s).local_steps == 100
    assert unmeasured(Settings(sync="local", local_steps=12).validated(), even[0].own_s).local_steps == 12


def test_processes_of_unlike_speed_end_their_rounds_together(tmp_path: Path) -> None:
    """In real time: one worker sleeps 3 times as long in a step. The fast one makes more steps, and waits little."""
    script, record = tmp_path / "script.py", tmp_path / "run.jsonl"
    script.write_text(SCRIPT % "time.sleep(0.09 if rank() == 1 else 0.03)")
    flags = ("--sync", "local", "--local-seconds", "1", "--workers", "2", "--shards", "2")
    with (
        serving(*flags) as server,
        started(
            "ps-worker", "--server", server.address, "-n", "2", "--record", str(record), str(script), "160"
        ) as work,
    ):
        assert work.wait() == 0, work
    events = [json.loads(line) for line in record.read_text().splitlines()]
    assert next(event for event in events if event["event"] == "start")["local_seconds"] == 1.0
    steps: dict[int, dict[int, int]] = {0: {}, 1: {}}
    waits: dict[int, dict[int, float]] = {0: {}, 1: {}}
    for event in events:
        if event["event"] == "step":
            counts, waited = steps[event["local_rank"]], waits[event["local_rank"]]
            counts[event["clock"]] = counts.get(event["clock"], 0) + 1
            waited[event["clock"]] = waited.get(event["clock"], 0.0) + event["wait_seconds"]
    fast, slow = sorted((0, 1), key=lambda local_rank: -sum(steps[local_rank].values()))
    inner = [clock for clock in steps[fast] if clock >= 3 and clock in steps[slow] and clock + 1 in steps[slow]]
    ratios = [steps[fast][clock] / steps[slow][clock] for clock in inner]
    assert len(ratios) >= 2 and 1.7 < median(ratios) < 4, (steps, ratios)
    assert median(waits[fast][clock] for clock in inner) < 0.5, "a fixed number of steps makes it wait 2/3 of a round"
    code, _, err = finished("ps-serve", "--sync", "ssp", "--local-seconds", "5")
    assert code == 2 and "--local-seconds: --sync ssp pushes every step" in err
