"""bench/faults/kills.py strikes a real run, and says what was acknowledged and what is in the model."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from faults.kills import ROLES, add, main, matrix
from lab import record
from lab.record import Figure, Recorder

STEPS = 60  # the last fifth of them waits until a standby that was killed has one in its place


def test_a_standby_is_killed_twice_and_nothing_is_lost(tmp_path: Path) -> None:
    """tests/system/test_shard_kills.py kills workers and shards."""
    out = tmp_path / "kills.jsonl"
    words = ["--modes", "bsp", "--roles", "the standby", "--steps", f"{STEPS}", "--jobs", "1", "--out", str(out)]
    told = CliRunner().invoke(main, words)
    assert told.exit_code == 0, told.output
    (row,) = record.read(out)
    assert (row.run, row.arguments["standby"], row.note) == ("the standby", True, "exit codes 0, 0")
    assert (row.figures["killed"].value, row.figures["wrong"].value) == (2, 0)
    assert row.figures["acknowledged"].value > 2 * STEPS and row.figures["longest stall"].value > 0


def test_the_matrix_has_each_process_in_each_mode() -> None:
    trials = matrix(["bsp", "ssp"], [*ROLES], 3, 100)
    struck = [trial for trial in trials if not trial.role.startswith("nobody")]
    assert len({(trial.mode, trial.role, trial.standby) for trial in struck}) == len(struck) == 2 * 11
    assert len(trials) - len(struck) == 2 * 2 * 3


def test_a_run_that_failed_is_a_line_too(tmp_path: Path) -> None:
    row = {"mode": "bsp", "killed": "a worker", "standby": False, "seed": 0, "codes": [], "wrong": ["it did not\nend"]}
    add(Recorder("faults/kills", tmp_path / "out"), row, 100)
    (line,) = record.read(tmp_path / "out")
    assert line.figures == {"wrong": Figure(1, "updates")} and line.note == "it did not end"
