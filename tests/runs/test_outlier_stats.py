"""Each worker's updates beside the others': cosine, overlap and what was left out, for the console and the record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kit.lying_worker import LIAR, TAUGHT
from kit.scripts import run

from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Log
from narrows.ps.command.shard_supervisor import ShardSupervisor
from narrows.ps.filters.outlier_stats import EVERY, OutlierStats
from narrows.ps.filters.update_sample import UpdateSample
from narrows.worker import DistributedOptimizer

KEYS, WORKERS = 200, 4
Floats = npt.NDArray[np.float32]


def reference(newest: dict[int, Floats], worker: int) -> tuple[float, float]:
    """Cosine of its update with the mean of the others', each of length 1; share of its keys that any of them keeps."""
    own = newest[worker].astype(np.float64)
    others = [each.astype(np.float64) for who, each in newest.items() if who != worker]
    mean = np.mean([each / np.linalg.norm(each) for each in others], axis=0)
    kept = np.nonzero(own)[0]
    shared = [key for key in kept if any(each[key] for each in others)]
    return float(own @ mean / np.linalg.norm(own) / np.linalg.norm(mean)), len(shared) / len(kept)


@pytest.mark.parametrize("together", [True, False])
def test_figures_are_those_of_the_definition(together: bool) -> None:
    rng = np.random.default_rng(5)
    beside = OutlierStats(0, KEYS)
    newest: dict[int, Floats] = {}
    sums = np.zeros((WORKERS, 2))
    for clock in range(EVERY):
        sent = {}
        for worker in range(WORKERS):
            update = (1 + rng.standard_normal(KEYS)) * (rng.random(KEYS) < 0.2) * rng.lognormal(0, 3)
            sent[worker] = update.astype(np.float32)
        looks = [UpdateSample(worker, clock, 1.0, update) for worker, update in sent.items()]
        factors = [0.0 if look.worker == LIAR else 0.5 if look.worker == 1 else 1.0 for look in looks]
        for turn in [looks] if together else [[look] for look in looks]:
            beside.saw(turn, factors if together else [factors[turn[0].worker]])
            newest |= {look.worker: look.sample for look in turn}
            for look in turn if len(newest) > 1 else ():
                sums[look.worker] += reference(newest, look.worker)
    if not together:  # the first had nobody beside it yet
        assert [log.values["worker"] for log in beside.logs] == [1, 2, 3]
        beside.saw([UpdateSample(0, EVERY, 1.0, newest[0])], [1.0])
        sums[0] += reference(newest, 0)
        beside.logs.sort(key=lambda log: str(log.values["worker"]))
    for worker, log in enumerate(beside.logs):
        values = log.values
        assert (values["worker"], values["shard"]) == (worker, 0)
        assert [values["cosine"], values["overlap"]] == pytest.approx((sums[worker] / EVERY).tolist(), abs=2e-4)
        assert values["left_out"] == EVERY * (worker == LIAR) and values["shortened"] == EVERY * (worker == 1)
    beside.logs.clear()
    beside.members({0, 1, 3})
    (left,) = beside.logs
    assert f"of {EVERY} {EVERY} were left out and 0 shortened (it has left)" in str(left.values["text"])
    np.testing.assert_allclose(
        beside.total, sum(row.unit.astype(np.float64) for row in beside.rows.values()), atol=1e-5
    )
    assert (beside.holders == sum(row.kept for row in beside.rows.values())).all()


@pytest.mark.parametrize(
    ("flags", "looked"), [({}, False), ({"robust": "median"}, True), ({"max_update_norm": 5.0}, True)], ids=str
)
def test_it_is_taken_where_a_flag_asks_for_it_and_the_tree_shows_it(flags: dict[str, Any], looked: bool) -> None:
    settings, shown = Settings(sync="bsp", workers=WORKERS, **flags), list[str]()

    def script(worker: int) -> None:
        net = TAUGHT.build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for step in range(3):
            optimizer.zero_grad()
            TAUGHT.loss_of(net, step, worker, WORKERS).backward()
            optimizer.step()
        if worker == 0:  # the others are done or wait for it to leave
            shown.extend(
                str(log.values["text"]) for log in started.cluster.servers[0].show_tree() if isinstance(log, Log)
            )
        optimizer.finish()

    with run(settings) as started:
        started.together(script)
        for server in started.cluster.servers:
            assert (
                server.shard.model_shard is not None
                and (server.shard.model_shard.filters.outlier_stats is not None) == looked
            )
    assert shown[0].startswith("the run:\n--sync bsp")
    line = r"\nworker 0: its updates have a cosine of 0\.\d\d with .*, and 100% of its keys are theirs too; of 3 0 were"
    assert bool(re.search(line, shown[0])) == looked


def test_a_record_has_each_event_of_the_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ShardSupervisor(Settings(workers=3, robust="cosine").validated())
    cluster.run_watch.open_record(str(tmp_path / "record.jsonl"), print)
    values = {"worker": 1, "shard": 0, "clock": 49, "cosine": 0.5, "overlap": 1.0, "left_out": 0, "shortened": 2}
    for told in (values, values | {"text": "worker 1: (it has left)"}):
        cluster._taken((0, "log", {"name": "worker", "values": told}))
    cluster.kill()
    rows = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["worker", "worker"] and rows[0]["seconds"] >= 0
    assert {name: rows[0][name] for name in values} == values
    assert capsys.readouterr().out == "ps-serve: worker 1: (it has left)\n"
