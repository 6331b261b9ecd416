"""bench/convergence.py --preset tuned: its runs can run, and its table chooses rates and compares like with like."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import bytelm
import pytest
from click.testing import CliRunner
from convergence import CONTENDERS, PRESETS, RATES, Campaign, at_rate, main, tuned_table

from narrows.protocols.modes import MODES

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


def test_every_contender_runs_at_every_rate_under_a_name_of_its_own() -> None:
    keys = [row.key for row in TUNED.rows]
    assert len(set(keys)) == len(keys) == len(CONTENDERS) * len(RATES) == 13 * 3
    rates = Counter(bytelm.arguments(row.script).lr for row in TUNED.rows)
    assert rates == dict.fromkeys((0.002, 0.0028, 0.004), 13)
    assert float(RATES[0]) == bytelm.arguments([]).lr


@pytest.mark.parametrize("row", CONTENDERS, ids=lambda row: row.name)
def test_a_name_says_what_runs(row: Any) -> None:
    flags = dict(zip(row.flags[::2], row.flags[1::2], strict=True))
    assert row.flags == () or (flags["--sync"] in MODES and row.name.startswith(flags["--sync"]))
    assert flags.get("--compress", "") in row.name
    assert ("muon" in row.name) == (bytelm.arguments(row.script).optimizer == "muon")


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
