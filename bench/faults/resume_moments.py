"""The cost of going on without the workers' moments: a small byte GPT under ssp, server and workers killed at once
soon after a checkpoint, then resumed, with the states of `ps-worker --checkpoint-dir` and without.

    python bench/faults/resume_moments.py --at 26 --seeds 2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch

LIMIT_S = 600.0
MODEL = ("--layers", "2", "--width", "64", "--heads", "4", "--lr", "0.004")
TASK = launch.ROOT / "bench" / "tasks" / "bytelm.py"


def start(module: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"narrows.{module}.command.cli", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=launch.ROOT, env=launch.environment(), text=True, **streams)  # type: ignore[call-overload, no-any-return]


def wait(done: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise launch.CommandFailed(f"{done} did not come: {process.communicate()[0][-800:]}")
        time.sleep(0.01)


def life(
    folder: Path, keeps: bool, clocks: int, args: Sequence[str], *resume: str, kill: bool = False
) -> tuple[float, str]:
    """The validation loss that the run ends with, and what its workers have said of their optimizers; (0, "") where it is
    killed after the checkpoint of so many clocks."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    run = (
        "--workers",
        "2",
        "--sync",
        "ssp",
        "--checkpoint-clocks",
        str(clocks),
        "--checkpoint-dir",
        str(folder / "run"),
    )
    server = start("ps", "--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready), *run, *resume)
    wait(ready, server)
    told = json.loads(ready.read_text())
    keep = ("--checkpoint-dir", str(folder / "states")) if keeps else ()
    workers = start("worker", "--server", told["address"], "-n", "2", *keep, str(TASK), *MODEL, *args)
    try:
        if kill:
            wait(folder / "run" / f"shard-0.clock-{clocks}.safetensors", server)
            for rank in range(2 if keeps else 0):
                wait(folder / "states" / f"narrows-optimizer-{rank}.pt", server)
            os.kill(told["pid"], signal.SIGSTOP)  # it would start its shards again
            for pid in (*told["shard_pids"], told["pid"], workers.pid):
                os.kill(pid, signal.SIGKILL)
            return 0.0, ""
        said, _ = workers.communicate(timeout=LIMIT_S)
        return float(re.findall(r"validation loss ([\d.]+)", said)[-1]), "; ".join(re.findall(r"optimizers? .*", said))
    finally:
        for process in (workers, server):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.0 if kill else launch.SERVER_END_S)
            launch.end(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--at", type=int, default=26, help="clocks from one checkpoint to the next (default 26)")
    parser.add_argument("--steps", type=int, default=250, help="(default 250)")
    parser.add_argument("--seeds", type=int, default=1, help="(default 1)")
    told = parser.parse_args()
    print(json.dumps(launch.facts()))
    for seed in range(told.seeds):
        args = ("--steps", str(told.steps), "--seed", str(seed))
        for name, keeps, killed in (("undisturbed", False, False), ("anew", False, True), ("kept", True, True)):
            with tempfile.TemporaryDirectory() as folder:
                if killed:
                    life(Path(folder), keeps, told.at, args, kill=True)
                loss, said = life(Path(folder), keeps, told.at, args, *["--resume"] * killed)
            print(f"seed {seed}, {name}: loss {loss:.4f}  {said}", flush=True)


if __name__ == "__main__":
    main()
