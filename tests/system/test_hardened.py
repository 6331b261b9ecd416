"""A container that is hardened: a user without a name, read-only packages, and no HOME."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from kit.processes import BIN, ROOT, SCRIPT, environment, free_ports

from narrows.protocols.runtime.network import key_files
from narrows.ps.command import cli as serve

# The nested user namespace makes us user 1234 of no name. Read-only are the sources, as an image's packages are.
INSIDE = """
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
shift
if [ -n "$MOUNTED" ]; then  # secrets, as kubelet mounts them with an fsGroup
    mount -t tmpfs none "$MOUNTED"
    cp -r "$SECRETS"/. "$MOUNTED"
    find "$MOUNTED" -type f -exec chmod 440 {} +
    mount -o remount,ro "$MOUNTED"
fi
unset HOME USER LOGNAME XDG_CACHE_HOME
exec unshare --user --map-user=1234 --map-group=1234 "$@"
"""
HARDENED = ["unshare", "--map-root-user", "--mount", "sh", "-ec", INSIDE, "inside", str(ROOT)]


def hardened(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    told = {"MOUNTED": ""} | environment() | env
    return subprocess.run([*HARDENED, *words], cwd=cwd, env=told, capture_output=True, text=True, timeout=100)


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


def test_a_printed_jobset_runs_so_with_secrets_of_its_group(tmp_path: Path) -> None:
    """Its commands, with keys of mode 0440 on a mount that nobody can write to."""
    secrets, mounted, run = (tmp_path / name for name in ("KEYS", "mounted", "run"))
    for folder in (mounted, run):
        folder.mkdir()
    key_files.make(str(secrets))
    key_files.add(str(secrets), "worker", "worker")
    words = ["--print", "jobset", "--workers", "1", "--bind", f"tcp://0.0.0.0:{free_ports(1)}", "--keys", str(secrets)]
    printed = CliRunner().invoke(serve.command, words, standalone_mode=False, catch_exceptions=False).output
    places = {"/keys": mounted, "/run/narrows": run, "/tmp/narrows-ready": tmp_path / "ready"}
    places |= {"narrows-server-0-0.narrows": Path("127.0.0.1"), "$(RUN_ID)": Path("uid-1")}  # as Kubernetes replaces it
    commands = list[str]()
    for job in yaml.safe_load(printed)["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        command, *args = container["command"] + container.get("args", [])
        for told, here in places.items():
            args = [word.replace(told, str(here)) for word in args]
        commands.append(shlex.join([str(BIN / command), *args, *(["3"] if command == "ps-worker" else [])]))
    (tmp_path / "train.py").write_text(SCRIPT % "")
    both = f"{commands[0]} & {commands[1]}; code=$?; wait $! && exit $code"
    ended = hardened("sh", "-c", both, cwd=tmp_path, MOUNTED=str(mounted), SECRETS=str(secrets))
    assert ended.returncode == 0 and "1 of 1 workers done" in ended.stderr, ended.stderr
    assert (run / "uid-1" / "model.safetensors").exists()
