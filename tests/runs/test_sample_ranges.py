"""Ranges of samples that a run hands out: each is in the model when the loops end, also of workers that die."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from kit.groups import groups
from kit.in_process import Cluster
from kit.scripts import Run, alone, build, distance, flat, loss_of, run, tree
from kit.specs import MODES, modes

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.ps.coordinator.sample_leases import RangeLedger
from narrows.worker import DistributedOptimizer, ranges

SAMPLES, SIZE = 103, 8
STREAMLESS = modes(lambda settings: settings.sync != "gossip" and not settings.mode().streams)


def train(started: Run, worker: int, epochs: int = 2, accumulate: int = 1, leave: int = -1, **more: Any) -> list[int]:
    """The samples of each step of this worker, epoch by epoch; it leaves the loop in step `leave`, without a word."""
    model = build()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, **more)
    rows_of: list[int] = []
    work = ranges(SAMPLES, SIZE, epochs=epochs)
    optimizer.zero_grad()
    taken = 0
    for rows in work:
        if taken == leave:
            return rows_of
        loss_of(model, len(rows_of)).backward()
        rows_of += [work.epoch * SAMPLES + row for row in rows.tolist()]
        taken += 1
        if taken % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    if taken % accumulate:
        optimizer.step()
    optimizer.finish()
    return rows_of


def epochs_told(cluster: Cluster) -> list[str]:
    return [str(log.values["text"]) for log in cluster.logs if log.event == "epoch"]


def work_of(started: Run) -> RangeLedger:
    coordinator = started.cluster.servers[0].coordinator
    assert coordinator is not None
    return coordinator.ranges.work


def flat_of(told: list[list[int]]) -> list[int]:
    return sorted(row for rows in told for row in rows)


EACH_ONCE = [f"epoch {epoch}: 103 samples in 13 ranges, 0 ranges done twice" for epoch in range(2)]


@pytest.mark.parametrize("mode", STREAMLESS)
def test_each_sample_is_taken_once(mode: str) -> None:
    with run(Settings(workers=3, shards=2, **MODES[mode])) as started:
        told = started.together(lambda worker: train(started, worker))
    assert flat_of(told) == list(range(2 * SAMPLES))
    assert epochs_told(started.cluster) == EACH_ONCE and not work_of(started).back


@pytest.mark.parametrize("mode", ["bsp", "ssp", "async"])
def test_several_ranges_may_be_in_a_step_and_gradients_may_leave_early(mode: str) -> None:
    """13 ranges, 3 a step: what is left has a step of its own, and nobody waits for ever for itself."""
    overlap = {"overlap": True} if mode == "bsp" else {}
    with run(Settings(workers=2, shards=2, **MODES[mode])) as started:
        told = started.together(lambda worker: train(started, worker, accumulate=1 if overlap else 3, **overlap))
    assert flat_of(told) == list(range(2 * SAMPLES))
    assert epochs_told(started.cluster) == EACH_ONCE


@pytest.mark.parametrize("mode", ["bsp", "ssp", "async", "local"])
def test_what_a_dead_worker_has_not_done_is_done_by_others(mode: str) -> None:
    """One stops in its fourth step, with a range in its hands, and its lease runs out while the others wait for it."""
    with run(Settings(workers=3, shards=2, **MODES[mode])) as started:
        stopped = threading.Event()

        def work(worker: int) -> list[int]:
            if worker:
                return train(started, worker)
            rows = train(started, worker, leave=3)
            stopped.set()
            return rows

        def reaper() -> None:
            assert stopped.wait(60)
            started.expire(0)

        thread = threading.Thread(target=reaper, daemon=True)
        thread.start()
        told = started.together(work)
        thread.join(60)
    assert {*flat_of(told)} == {*range(2 * SAMPLES)}
    # It said what it had taken, and not whether that is done: with a barrier nothing is done twice.
    again = [row for row, times in Counter(flat_of(told)).items() if times > 1]
    assert len(again) <= SIZE * MODES[mode].get("local_steps", 1)
    assert epochs_told(started.cluster) == EACH_ONCE


def test_who_joins_late_takes_what_is_left_and_an_epoch_that_is_over_is_over() -> None:
    with run(Settings(sync="ssp", workers=1)) as started:
        first = train(started, 0, leave=18)
        started.join()
        for worker in (1,):
            started.become(worker)
            model = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
            assert list(ranges(SAMPLES, SIZE, epochs=1)) == []
            thread = threading.Thread(target=started.expire, args=(0,))
            thread.start()
            thread.join(60)
            rows: list[int] = []
            for epochs in (1, 2):
                work = ranges(SAMPLES, SIZE, epochs=epochs)
                for each in work:
                    loss_of(model, 0).backward()
                    optimizer.step()
                    rows += [work.epoch * SAMPLES + row for row in each.tolist()]
            optimizer.finish()
    assert len(rows) < SAMPLES and {*first, *rows} == {*range(2 * SAMPLES)}


def test_who_has_to_join_again_gives_back_what_it_holds() -> None:
    """Its gradient is dropped, and its range handed out again; it takes part in the same loop."""
    with run(Settings(sync="ssp", workers=1)) as started:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        seen: list[int] = []
        for step, rows in enumerate(ranges(SAMPLES, SIZE)):
            if step == 3:
                started.expire(0)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            seen += rows.tolist()
        optimizer.finish()
    assert {*seen} == {*range(SAMPLES)} and SAMPLES < len(seen) <= SAMPLES + 2 * SIZE
    assert epochs_told(started.cluster) == EACH_ONCE[:1]


def test_a_loop_that_is_left_gives_back_what_no_step_has_taken() -> None:
    with run(Settings(sync="ssp", workers=1, compress="topk:0.1+int8")) as started:
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for step, _ in enumerate(ranges(SAMPLES, SIZE)):
            if step == 5:
                break
            loss_of(model, step).backward()
            optimizer.step()
        optimizer.finish()
    assert (work_of(started).next, work_of(started).back) == (6, [5])


def test_an_update_without_values_weighs_nothing() -> None:
    """One worker has all ranges of bsp, and the other takes part: the model is that of the first one alone."""
    found = []
    for workers in (1, 2):
        with run(Settings(sync="bsp", workers=workers, shards=2)) as started:

            def work(worker: int) -> Any:
                model = build()
                optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
                engine: Any = optimizer._engine
                for step in range(6):
                    if worker:
                        engine.sync.idle()
                        continue
                    optimizer.zero_grad()
                    loss_of(model, step).backward()
                    optimizer.step()
                optimizer.finish()
                return flat(model)

            found += started.together(work)
    assert all(distance(each, found[0]) < 1e-6 for each in found)


def test_ranges_that_are_none_are_refused() -> None:
    with run(Settings(sync="ssp", workers=1)) as started:
        started.become(0)
        with pytest.raises(UsageError, match="before DistributedOptimizer was made"):
            next(ranges(SAMPLES, SIZE))
        model = build()
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        next(ranges(SAMPLES, SIZE))
        with pytest.raises(RuntimeError, match="are of 103 samples, 8 each, and this script asks for 104, 8 each"):
            next(ranges(SAMPLES + 1, SIZE))
    for settings, why in (
        (Settings(sync="gossip", workers=1), "under --sync gossip"),
        (Settings(sync="local", fragments=2, workers=1), "with --fragments"),
    ):
        with run(settings) as started:
            started.become(0)
            model = build()
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            with pytest.raises(UsageError, match=why):
                next(ranges(SAMPLES, SIZE))
    with pytest.raises(UsageError, match=r"ranges\(0, 8, epochs=1\)"):
        ranges(0, SIZE)


def test_workers_of_a_cluster_are_told_of_the_sampler() -> None:
    root = Cluster(Settings(sync="ssp", workers=1))
    with tree(root, Cluster(Settings(sync="bsp", workers=1), root)) as started:
        started.become(0)
        model = build()
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(RuntimeError, match=r"use sampler\(\)"):
            next(ranges(SAMPLES, SIZE))


@pytest.mark.parametrize("mode", ["bsp", "async", "local"])
def test_the_ranks_of_a_group_share_each_range(mode: str) -> None:
    """One of a single sample, the last of 103, is all ranks' where the group has it."""
    with groups(Settings(workers=2, shards=2, **MODES[mode]), (2, 1)) as started:

        def script(member: int, rank: int) -> list[int]:
            model = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
            rows_of: list[int] = []
            for rows in ranges(SAMPLES, 6):
                optimizer.zero_grad()
                loss_of(model, len(rows_of)).backward()
                optimizer.step()
                rows_of += rows.tolist()
            optimizer.finish()
            return rows_of

        told = started.together(script)
    times = Counter(row for rows in told.values() for row in rows)
    assert {*times} == {*range(SAMPLES)} and times.total() <= SAMPLES + 1


def test_alone_it_has_all() -> None:
    with alone():
        each = [rows.tolist() for epochs in (1, 2) for rows in ranges(7, 3, epochs=epochs)]
        assert [len(rows) for rows in each] == [3, 3, 1, 3, 3, 1]
        assert sorted(chain(*each[:3])) == sorted(chain(*each[3:])) == list(range(7)) and each[:3] != each[3:]
        assert list(ranges(7, 3, epochs=2)) == []
    with alone():
        work = ranges(7, 3, shuffle=False)
        assert [(work.epoch, rows.tolist()) for rows in work] == [(0, [0, 1, 2]), (0, [3, 4, 5]), (0, [6])]
