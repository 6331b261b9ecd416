"""A container that is hardened: a user without a name, read-only packages, and no HOME."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from kit.processes import BIN, ROOT, SCRIPT, environment

# The nested user namespace makes us user 1234 of no name. Read-only are the sources, as an image's packages are.
INSIDE = """
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
shift
unset HOME USER LOGNAME XDG_CACHE_HOME
exec unshare --user --map-user=1234 --map-group=1234 "$@"
"""
HARDENED = ["unshare", "--map-root-user", "--mount", "sh", "-ec", INSIDE, "inside", str(ROOT)]


def hardened(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HARDENED, *words], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60)


def possible() -> bool:
    return bool(shutil.which("unshare")) and not hardened("true", cwd=ROOT).returncode


pytestmark = pytest.mark.skipif(not possible(), reason="needs user namespaces that mount, and unshare --map-user")


def test_a_user_without_home_trains_with_read_only_packages(tmp_path: Path) -> None:
    """The kernels that the installation has are taken: to compile them takes half a minute."""
    (tmp_path / "train.py").write_text(SCRIPT % "")
    assert hardened("touch", str(ROOT / "x"), cwd=tmp_path).returncode
    ended = hardened(str(BIN / "ps-worker"), "-n", "2", "--compress", "topk:0.5+int8", "train.py", "5", cwd=tmp_path)
    assert ended.returncode == 0 and "2 of 2 workers done" in ended.stderr, ended.stderr
    assert "compiling kernels" not in ended.stderr
