"""bench/loss/convergence.py --preset tuned: its runs can run, and its table chooses rates and compares like with like."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import bytelm
import pytest
from click.testing import CliRunner
from contenders.wan import ROWS
from loss.convergence import Campaign, main
from loss.presets import CONTENDERS, PRESETS, RATES, SCRIPT_RATE, at_rate
from loss.tables import tuned_table

from narrows.protocols.config.modes import MODES

TUNED = PRESETS["tuned"]
BY_NAME = {row.name: row for row in CONTENDERS}


def run(metric: float, seed: int = 0, kilobytes: float = 0.0) -> dict[str, Any]:
    bytes_ = {"step_bytes_up": 1e3 * kilobytes, "step_bytes_down": 2e3 * kilobytes} if kilobytes else {}
    return {"metric": metric, "seed": seed, **bytes_}


def table(**runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """Cells by contender."""
    rows = [(at_rate(BY_NAME[name], rate), found) for name, rates in runs.items() for rate, found in rates.items()]
    lines = [line[2:-2].split(" | ") for line in tuned_table(rows) if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[1:]}


def test_every_contender_begins_on_the_ladder_under_a_name_of_its_own() -> None:
    keys = [at_rate(row, rate).key for row in CONTENDERS for rate in RATES]
    assert len(set(keys)) == len(keys) == len(CONTENDERS) * len(RATES)
    assert all(RATES.index(row.start) for row in CONTENDERS)
    assert float(SCRIPT_RATE) == bytelm.arguments([]).lr
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
        super().__init__(TUNED, TUNED.tasks[0], 400, path, 0.0, 0.0)
        self.loss, self.order = loss, list[tuple[str, int]]()

    def run(self, row: Any, seed: int, again: bool) -> None:
        rate = row.script[-1]
        self.order.append((rate, seed))
        if (loss := self.loss(float(rate), seed)) is not None:
            key = {"task": "bytelm", "row": row.key, "steps": 400, "workers": 2, "commit": self.facts["commit"]}
            self.results.append(key | run(loss, seed))


def test_the_first_seed_climbs_to_the_best_rate_and_the_next_runs_what_is_near_it(tmp_path: Path) -> None:
    row = BY_NAME["bsp"]
    tried = Tried(tmp_path / "none", lambda rate, seed: 2 + 0.1 * abs(math.log2(rate / 0.0052)))
    tried.tune(row, [], 0, False)
    assert tried.order == [(rate, 0) for rate in ("0.0028", "0.002", "0.004", "0.0056", "0.008")]
    tried.order.clear()
    tried.tune(row, [0], 1, False)
    assert tried.order == [("0.0056", 1)]
    assert tried.rows(tried.facts["commit"])[-2][1] == tried.found(tried.facts["commit"], at_rate(row, "0.0056"))


def test_a_rate_that_fails_counts_as_the_worst(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "none", lambda rate, seed: None if rate > 0.002 else 2 + rate)
    tried.tune(BY_NAME["bsp"], [], 0, False)
    assert tried.order[0] == ("0.0028", 0) and tried.order[-1] == (RATES[0], 0)
    tried.order.clear()
    tried.tune(BY_NAME["bsp"], [0], 1, False)
    assert {rate for rate, _ in tried.order} == set(RATES[: RATES.index("0.0028")])


def test_a_contender_is_shown_at_its_best_rate_beside_the_better_dense_one() -> None:
    ssp = "ssp, s = 1, topk:0.11+sign"
    cells = table(
        **{
            "single process": {"0.002": [run(2.0), run(2.2, 1)], "0.0028": [run(2.05), run(2.05, 1)]},
            "bsp": {"0.002": [run(2.1, 0, 5.0), run(2.1, 1, 5.0)], "0.004": [run(2.0, 0, 5.0), run(2.0, 1, 5.0)]},
            ssp: {"0.002": [run(2.5), run(2.5, 1)], "0.004": [run(2.1, 0, 0.7), run(2.3, 1, 0.7)]},
        }
    )
    assert cells["single process"] == ["0.0028", "2.050", "2.050 2.050", "+2.5 %", "2.100", "-, -"]
    assert cells["bsp"] == ["0.004", "2.000", "2.000 2.000", "+0.0 %", "2.100", "5.0, 10.0"]
    assert cells[ssp] == ["0.004", "2.200", "2.100 2.300", "+10.0 %", "2.500", "0.7, 1.4"]


def test_muon_is_compared_with_dense_muon() -> None:
    muon = "ssp, s = 1, topk:0.11+sign, muon"
    both = {"single process": {"0.002": [run(2.0)]}, muon: {"0.004": [run(1.8)]}}
    assert table(**both)[muon] == ["0.004", "1.800", "1.800", "-", "-", "-, -"]
    dense = {"single process, muon": {"0.002": [run(1.6)], "0.004": [run(1.5)]}}
    assert table(**both, **dense)[muon][3] == "+20.0 %"
    assert table(**both, **dense)["single process"][3] == "+0.0 %"


def test_a_rate_that_has_fewer_seeds_yet_is_not_chosen() -> None:
    cells = table(bsp={"0.002": [run(2.1), run(2.2, 1)], "0.004": [run(1.9)]})
    assert cells["bsp"][:2] == ["0.002", "2.150"]


def test_a_run_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("[]")
    task = TUNED.tasks[0]
    campaign = Campaign(TUNED, task, 400, path, 0.0, 0.0)  # no time to run anything
    row = at_rate(BY_NAME["bsp"], "0.004")
    key = {"task": "bytelm", "row": row.key, "steps": 400, "seed": 0, "workers": 2}
    path.write_text(json.dumps([key | campaign.facts | run(2.0, 0, 5.0)]))
    campaign = Campaign(TUNED, task, 400, path, 0.0, 0.0)
    campaign.run(row, 0, again=False)
    assert campaign.failed == [] and len(campaign.results) == 1
    shown = CliRunner().invoke(main, ["--preset", "tuned", "--show", "--out", str(path)])
    assert shown.exit_code == 0 and "| bsp | 0.004 | 2.000 |" in shown.output
