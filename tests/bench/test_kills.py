"""bench/faults/kills.py strikes a real run, and says what was acknowledged and what is in the model."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from faults.kills import ROLES, line, main, matrix

STEPS = 60  # the last fifth of them waits until a standby that was killed has one in its place


def test_a_standby_is_killed_twice_and_nothing_is_lost(tmp_path: Path) -> None:
    """tests/system/test_shard_kills.py kills workers and shards."""
    out = tmp_path / "kills.json"
    words = ["--modes", "bsp", "--roles", "the standby", "--steps", f"{STEPS}", "--jobs", "1", "--out", str(out)]
    told = CliRunner().invoke(main, words)
    assert told.exit_code == 0, told.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["standby"], row["times"], row["codes"], row["wrong"]) for row in rows] == [
        (True, 2, ["0", "0"], []),
    ]
    assert all(row["acknowledged"] > 2 * STEPS and row["stall_s"] > 0 for row in rows)
    assert "| bsp | yes | the standby | 2 | 0, 0 |" in told.output


def test_the_matrix_has_each_process_in_each_mode() -> None:
    trials = matrix(["bsp", "ssp"], [*ROLES], 3, 100)
    struck = [trial for trial in trials if not trial.role.startswith("nobody")]
    assert len({(trial.mode, trial.role, trial.standby) for trial in struck}) == len(struck) == 2 * 11
    assert len(trials) - len(struck) == 2 * 2 * 3


def test_a_run_that_failed_is_a_line_too() -> None:
    row = {"mode": "bsp", "killed": "a worker", "standby": False, "codes": [], "wrong": ["it did not end"]}
    assert line(row, [0.1, 0.2]).count("|") == 11 and "0.1000 to 0.2000" in line(row, [0.1, 0.2])
