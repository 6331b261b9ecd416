"""Full disks and readers that have gone: /dev/full, closed pipes and small file systems in memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from kit.processes import SCRIPT, Worker, finished, serving, started, until
from safetensors.torch import load_file

MOUNTED = [shutil.which("unshare") or "unshare", "--map-root-user", "--mount", "sh", "-ec"]
SMALL = 'mount -t tmpfs -o size=$1 none "$2"; echo mounted; exec sleep 600'  # a disk of so many bytes at this folder


def mounts() -> bool:
    """Whether this system lets us mount."""
    try:
        return not subprocess.run([*MOUNTED, "mount -t tmpfs none /mnt"], capture_output=True).returncode
    except OSError:
        return False


def test_a_run_goes_on_where_console_and_record_take_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT % 'print("a line")')
    words = ("ps-worker", "--record", "/dev/full", "--checkpoint-dir", "run", "train.py", "20")
    code, _, said = finished(*words, cwd=tmp_path, out="/dev/full")
    assert code == 0, said
    for name in ("stdout", "--record /dev/full"):
        assert said.count(f"ps-worker: {name}: No space left on device; the run goes on") == 1, said
    assert "1 of 1 workers done" in said
    assert load_file(tmp_path / "run" / "model.safetensors")["weight"].shape == (2, 4)


def test_ps_serve_serves_on_where_nobody_reads_it(tmp_path: Path) -> None:
    """Its reader ends after a line, as `head` does; a shard that dies is told of then."""
    flags = ("--sync", "bsp", "--push", "update", "--checkpoint-dir", "run")  # a server that imports no torch
    with serving(*flags, cwd=tmp_path, into="head -n 1") as server:
        with Worker(server.address) as worker:
            worker.train(2)
            server.kill_shard(0)
            worker.train(2)
        until(lambda: server.command.process.poll() is not None, "the server to end")
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.skipif(not mounts(), reason="needs a user namespace that mounts")
def test_a_model_that_a_full_disk_does_not_take_is_named(tmp_path: Path) -> None:
    """Exit code 7, and not 1: the run was trained."""
    (tmp_path / "train.py").write_text((SCRIPT % "").replace("Linear(4, 2)", "Linear(4, 30_000)"))
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = ("--compress", "dense", "--checkpoint-every", "0", "--checkpoint-dir", str(disk / "run"))
    with started(*MOUNTED, SMALL, "sh", "800k", str(disk)) as mounted:
        until(lambda: "mounted" in mounted.out, mounted)
        code, _, said = finished("ps-worker", *flags, "train.py", "2", cwd=tmp_path, within=mounted.pid)
    assert code == 7 and not [*disk.iterdir()], said
    assert (
        f"the run was trained, but {disk / 'run' / 'model.safetensors'} is missing: shard 0: {disk / 'run'}: No space"
        in said
    )
    assert "no checkpoint is left" in said
