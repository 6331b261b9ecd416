"""Folders for temporary files: one that a killed process has left goes, one that somebody has stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from narrows.protocols.runtime.processes import scratch
from narrows.protocols.runtime.processes.scratch import LOCK, ScratchFolder

HOLDS = """
import sys
from narrows.protocols.runtime.processes.scratch import ScratchFolder
print(ScratchFolder().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def holder(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and its folder."""
    env = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, left):
        (left / "shard-0.clock-7.safetensors").touch()
        ScratchFolder().close()
        assert left.is_dir()  # it lives
        process.kill()
        process.wait()
        ours = ScratchFolder()
        assert [*tmp_path.iterdir()] == [Path(ours.path)]
        ours.close()
    assert not [*tmp_path.iterdir()]


def test_what_is_not_ours_stays_and_at_most_so_many_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "REMOVED_MAX", 3)
    for index in range(5):
        (tmp_path / f"narrows-{index}").mkdir()
        (tmp_path / f"narrows-{index}" / LOCK).write_bytes(scratch.MARK)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).write_bytes(scratch.MARK)
    (tmp_path / "narrows-link").symlink_to(elsewhere)
    (tmp_path / "narrows-other").mkdir()  # without a lock: somebody else's, or one that is being made
    scratch.remove_left()
    assert len([*tmp_path.glob(f"narrows-?/{LOCK}")]) == 2
    scratch.remove_left()
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "narrows-link", "narrows-other"}
    assert (elsewhere / LOCK).exists()


@pytest.mark.parametrize("content", [b"", b"of another program"])
def test_a_folder_of_the_user_stays_whatever_locks_it_has(content: bytes, tmp_path: Path) -> None:
    """Ray's server of a run with checkpoint_dir="/tmp/narrows-mine" has a lock of this name there."""
    mine = tmp_path / "narrows-mine"
    mine.mkdir()
    (mine / ".lock").write_bytes(content)
    (mine / "model.safetensors").touch()
    ScratchFolder().close()
    assert (mine / "model.safetensors").exists()
