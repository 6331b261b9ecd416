"""bench/loss/convergence.py --preset tuned: its runs can run, and its table chooses rates and compares like with like."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import bytelm
import pytest
from contenders.wan import ROWS
from lab.record import markdown
from loss.convergence import Campaign
from loss.presets import CONTENDERS, PRESETS, RATES, at_rate

from narrows.protocols.config.modes import MODES

TUNED = PRESETS["tuned"]
BY_NAME = {row.name: row for row in CONTENDERS}


def test_every_contender_begins_on_the_ladder_under_a_name_of_its_own() -> None:
    assert len({row.name for row in CONTENDERS}) == len(CONTENDERS)
    assert all(RATES.index(row.start) for row in CONTENDERS)
    assert all(1.35 < float(b) / float(a) < 1.46 for a, b in pairwise(RATES))


@pytest.mark.parametrize("row", CONTENDERS, ids=lambda row: row.name)
def test_a_name_says_what_runs(row: Any) -> None:
    flags = dict(zip(row.flags[::2], row.flags[1::2], strict=True))
    assert row.flags == () or (flags["--sync"] in MODES and row.name.startswith(flags["--sync"]))
    assert flags.get("--compress", "") in row.name
    assert ("muon" in row.name) == (bytelm.arguments(row.script).optimizer == "muon")
    assert row.wan == "" or row.wan in {each.name for each in ROWS}


class Tried(Campaign):
    """A campaign whose runs end at a loss that a function of rate and seed knows."""

    def __init__(self, path: Path, loss: Callable[[float, int], float | None]) -> None:
        super().__init__("tuned", TUNED, TUNED.tasks[0], 400, path, 0.0)
        self.loss, self.order = loss, list[tuple[str, int]]()

    def run(self, row: Any, seed: int, again: bool) -> None:
        self.order.append((row.rate, seed))
        if (loss := self.loss(float(row.rate), seed)) is not None:
            self.add(row, seed, {"metric": loss, "step_bytes_up": 5e3})


def test_the_first_seed_climbs_to_the_best_rate_and_the_next_runs_what_is_near_it(tmp_path: Path) -> None:
    row = BY_NAME["bsp"]
    tried = Tried(tmp_path / "none", lambda rate, seed: 2 + 0.1 * abs(math.log2(rate / 0.0052)))
    tried.tune(row, [], 0, False)
    assert tried.order == [(rate, 0) for rate in ("0.0028", "0.002", "0.004", "0.0056", "0.008")]
    tried.order.clear()
    tried.tune(row, [0], 1, False)
    assert tried.order == [("0.0056", 1)]
    assert [line.seed for line in tried.found(at_rate(row, "0.0056"))] == [0, 1]
    table = markdown(tried.recorder.lines)  # its best rate alone, among those with the most seeds
    assert "| bsp | 2.011 | 5 |  | 2 |" in table and "rate 0.0056" in table


def test_a_rate_that_fails_counts_as_the_worst(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "none", lambda rate, seed: None if rate > 0.002 else 2 + rate)
    tried.tune(BY_NAME["bsp"], [], 0, False)
    assert tried.order[0] == ("0.0028", 0) and tried.order[-1] == (RATES[0], 0)
    tried.order.clear()
    tried.tune(BY_NAME["bsp"], [0], 1, False)
    assert {rate for rate, _ in tried.order} == set(RATES[: RATES.index("0.0028")])


def test_muon_is_compared_with_muon_in_one_process(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "none", lambda rate, seed: 2.0)
    for name in ("single process", "bsp", "single process, muon", "ssp, s = 1, topk:0.11+sign, muon"):
        tried.run(at_rate(BY_NAME[name], "0.004"), 0, False)
    lines = tried.recorder.lines
    assert [line.beside for line in lines] == ["bsp", "bsp", "single process, muon", "single process, muon"]
    assert len({line.table for line in lines}) == 2 and {line.best_of for line in lines} == {"rate"}


def test_a_run_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    path, row = tmp_path / "tuned.jsonl", at_rate(BY_NAME["single process"], "0.004")
    Tried(path, lambda rate, seed: 2.0).run(row, 0, False)
    campaign = Campaign("tuned", TUNED, TUNED.tasks[0], 400, path, 0.0)  # no time to run anything
    campaign.run(row, 0, again=False)
    assert campaign.failed == [] and len(campaign.recorder.lines) == 1 and campaign.metric(row, 0) == 2.0
    campaign.run(row, 1, again=False)
    assert len(campaign.failed) == 1
