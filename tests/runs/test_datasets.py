"""The sampler of a run: shares of each epoch, by the run's clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.scripts import Run, alone, build, loss_of, run
from torch.utils.data import DataLoader

from narrows.protocols.errors import UsageError
from narrows.protocols.settings import Settings
from narrows.worker import DistributedOptimizer, sampler

SAMPLES, BATCH = 103, 8


def epochs(started: Run, worker: int, count: int, leave: int = -1) -> list[list[int]]:
    """The indices of each epoch that this worker trained on; it leaves in the step `leave`."""
    model = build()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    data: Any = list(range(SAMPLES))
    loader: Any = DataLoader(data, BATCH, sampler=sampler(data, BATCH))
    seen: list[list[int]] = []
    step = 0
    for _ in range(count):
        seen.append([])
        for batch in loader:
            if step == leave:
                return seen
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            seen[-1] += batch.tolist()
            step += 1
    optimizer.finish()
    return seen


def test_shares_are_apart_and_each_epoch_has_an_order_of_its_own() -> None:
    with run(Settings(sync="ssp", workers=3)) as started:
        told = started.together(lambda worker: epochs(started, worker, 3))
    for epoch in range(3):
        shares = [seen[epoch] for seen in told]
        assert [len(share) for share in shares] == [SAMPLES // 3] * 3
        assert len({index for share in shares for index in share}) == SAMPLES // 3 * 3
    assert told[0][0] != told[0][1] and {*told[0][0]} != {*told[0][1]}


def test_who_joins_in_the_middle_goes_on_there() -> None:
    with run(Settings(sync="async", workers=1)) as started:
        whole = epochs(started, 0, 2)
    with run(Settings(sync="async", workers=1)) as started:
        begun = epochs(started, 0, 2, leave=17)  # 13 steps an epoch
        started.expire(0)
        started.join()
        again = epochs(started, 1, 1)
    assert begun[0] + begun[1] + again[0] == whole[0] + whole[1]
    assert len(again[0]) == len(whole[1]) - 4 * BATCH


def test_alone_it_has_all() -> None:
    with alone():
        assert sorted(sampler(range(7), 2)) == list(range(7))
        assert list(sampler(range(7), 2, shuffle=False)) == list(range(7))
        with pytest.raises(UsageError, match="a dataset of 0 samples has none for each of 1 workers"):
            sampler([], 2)
        with pytest.raises(UsageError, match="batch=0"):
            sampler(range(7), 0)
