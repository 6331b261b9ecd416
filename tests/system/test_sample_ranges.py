"""Ranges of samples that a run of real processes hands out: two of four workers are killed, and one comes late."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from kit.fold_logs import folded, telling
from kit.processes import Worker, alive, serving, started, until

from narrows.worker import ranges, session

SAMPLES, SIZE = 4_000, 8
TWICE_MOST = 0.02

# Each work range goes into a file before its update leaves: worker, its epoch, clock, and the samples.
SCRIPT = f"""
import json, os, sys, time, torch
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
from narrows.worker import DistributedOptimizer, ranges

torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
shards, told = optimizer._engine.sync.shards, open(sys.argv[1] + "/" + str(os.getpid()), "a")
data = torch.randn({SAMPLES}, 4, generator=torch.Generator().manual_seed(0))
for rows in ranges({SAMPLES}, {SIZE}):
    optimizer.zero_grad()
    model(data[rows]).square().mean().backward()
    print(json.dumps([shards.worker, shards.place, shards.clock, rows.tolist()]), file=told, flush=True)
    time.sleep(0.004)
    optimizer.step()
optimizer.finish()
"""


def trained(folder: Path) -> dict[tuple[int, int, int], list[int]]:
    """The samples of each update, of all workers so far."""
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines() if line.endswith("]]")]
    return {(worker, epoch, clock): rows for worker, epoch, clock, rows in map(json.loads, lines)}


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "the end of a worker")


def test_no_sample_is_left_out_where_two_of_four_workers_are_killed_and_one_comes_late(tmp_path: Path) -> None:
    script, taken, told, go = (tmp_path / name for name in ("script.py", "taken", "told", "go"))
    script.write_text(SCRIPT)
    taken.mkdir()
    flags = ("--sync", "async", "--shards", "2", "--workers", "4", "--lease", "4")
    with serving(*flags, env=telling(told)) as server:
        join = ("ps-worker", "--server", server.address)
        with (
            started(*join, "-n", "4", str(script), str(taken)) as four,
            started(*join, str(script), str(taken), str(go)) as late,
        ):
            until(lambda: len(trained(taken)) > 60, four)
            first, second = sorted(int(path.name) for path in taken.iterdir())[:2]
            killed(first)
            go.touch()
            until(lambda: len([*taken.iterdir()]) == 5, late)
            killed(second)
            assert (four.wait(), late.wait(), server.command.wait()) == (1, 0, 0), f"{four}\n{late}\n{server.command}"
            said = server.command.out
    of = trained(taken)
    found = re.search(rf"epoch 0: 4,000 samples in {SAMPLES // SIZE} ranges, (\d+) ranges? done twice", said)
    assert found, said
    by_shard = [Counter(row for update, _ in rows for row in of.get(update, ())) for rows in folded(told)]
    twice = {row for counts in by_shard for row, times in counts.items() if times > 1}
    each = [len(path.read_text().splitlines()) for path in taken.iterdir()]
    print(f"ranges of each worker: {each}; {len(twice)} samples twice in a shard; ps-serve says: {found[0]}")
    assert len(by_shard) == 2 and all({*counts} == {*range(SAMPLES)} for counts in by_shard)
    assert len(twice) == SIZE * int(found[1]) <= TWICE_MOST * SAMPLES


def test_a_run_that_is_resumed_does_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker leaves in the midst of the second epoch, and the run ends with a checkpoint."""
    seen: list[int] = []
    said = ""
    for some, more in ((18, ()), (100, ("--resume", "--steps", "100"))):
        with serving("--sync", "ssp", "--shards", "2", "--checkpoint-dir", str(tmp_path), *more) as server:
            worker = Worker(server.address)
            monkeypatch.setattr(session, "_session", worker.session)
            work = ranges(103, SIZE, epochs=2)
            for rows in islice(work, some):
                seen += [work.epoch * 103 + row for row in rows.tolist()]
                worker.step()
            worker.close()
            assert server.command.wait() == 0, server.command
            said += server.command.out
    assert sorted(seen) == list(range(2 * 103))
    assert [said.count(f"epoch {epoch}: 103 samples in 13 ranges, 0 ranges done twice") for epoch in (0, 1)] == [1, 1]
