"""bench/faults/phase_kills.py: processes that are killed in a phase of a push lose no update, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.phase_kills import MODES, ROLES, Trial, add, done, matrix
from kit.fold_logs import HOOKED
from lab import record

from narrows.protocols.runtime.network.shared_memory import available

pytestmark = pytest.mark.skipif(not available(), reason="the system has no shared memory")


@pytest.mark.parametrize(("mode", "role", "phase"), [
    ("ssp", "a shard", "amid a fold"),
    ("bsp", "a worker", "with a frame in its pool that is not sent"),
])  # fmt: skip
def test_nothing_is_lost_or_left(mode: str, role: str, phase: str, tmp_path: Path) -> None:
    row = done(Trial(mode, role, phase, steps=60), {})
    assert (row["wrong"], row["left"], row["kills"]) == ([], [], ROLES[role].strikes)
    assert row["acknowledged"] > 20
    recorder = record.Recorder("faults/phase_kills", tmp_path / "out")
    add(recorder, mode, role, [row])
    (line,) = record.read(tmp_path / "out")
    assert line.figures["killed"].value == row["kills"] and line.figures["wrong"].value == 0


def test_the_matrix_has_200_kills_in_every_phase() -> None:
    trials = matrix([*MODES], [*ROLES])
    assert sum(ROLES[trial.role].strikes for trial in trials) > 190  # with a fork server a shard is killed too
    phases, hook = {trial.phase for trial in trials}, (Path(HOOKED["PYTHONPATH"]) / "sitecustomize.py").read_text()
    assert len(phases) > 10 and all(f'    "{phase}": (' in hook for phase in phases)
