"""Two workers train a model of 100 M parameters with AdamW. The bench measures the memory of workers and servers by the phase.

    python bench/speed/memory.py                          # every row
    python bench/speed/memory.py --rows 'ssp*' --millions 25

Rules
- Figures are in models: bytes over those of all parameters as float32.
- Of a worker: the peak of its resident memory in a phase (VmHWM) over what it had before the model was made, with PyTorch and
  Narrows imported. The larger of the two workers counts. Activations are small: batches of four rows.
- Of the servers: the most at one time of the proportional set sizes (PSS) of all processes but the workers', so pages that
  processes share count once. Each process has some 50 to 100 MB of Python, which is in the figure. The last phase is the end,
  once the workers have left.
- "checkpoints": of the servers and of the optimizers' states, and model.safetensors at the end. Other rows write no file.
- "plain": PyTorch alone.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

ROWS: dict[str, tuple[str, ...] | None] = {
    "plain": None,
    "bsp": ("--sync", "bsp"),
    "bsp int8": ("--sync", "bsp", "--compress", "int8"),
    "ssp s=1": ("--sync", "ssp", "--compress", "topk:0.05+int8"),
    "ssp s=1, checkpoints": ("--sync", "ssp", "--compress", "topk:0.05+int8", "--checkpoint-dir", "{folder}"),
    "ssp s=16": ("--sync", "ssp", "--staleness", "16", "--compress", "topk:0.05+int8"),
    "async": ("--sync", "async", "--compress", "topk:0.05+int8"),
    "local": ("--sync", "local", "--local-steps", "5"),
}
PHASES = ("join", "steps", "shared", "finish")
SHARDS, WORKERS, WIDTH, STEPS = 4, 2, 1024, 20
POLL_S, LIMIT_S = 0.05, 900.0
MARK = "memory of"


def worker(millions: int, plain: bool) -> None:
    """Train in one process, and print the peak of each phase."""

    def peak() -> int:
        told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return 1024 * int(told["VmHWM"].split()[0])

    import torch

    from narrows.worker import DistributedOptimizer

    peak()
    base = peak()
    layers = max(1, millions * 1_000_000 // WIDTH**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    models = 4.0 * layers * WIDTH**2
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not plain:
        optimizer = DistributedOptimizer(optimizer, model)

    def ended(phase: str) -> None:
        print(MARK, json.dumps([os.getpid(), phase, (peak() - base) / models, models]), flush=True)

    ended("join")
    for _ in range(STEPS):
        x = torch.randn(4, WIDTH)
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()
    ended("steps")
    if not plain:
        with optimizer.shared():
            pass
        ended("shared")
        optimizer.finish()
        ended("finish")


class ServersMemory:
    """Looks at the processes below one, but for workers, until `end`.

    Attributes:
        phase: the present phase.
        workers: the workers' process ids.
        most: by phase, the most bytes of all other processes together.
    """

    def __init__(self, root: int) -> None:
        self.root, self.phase, self.workers = root, "start", set[int]()
        self.most: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(POLL_S):
            phase, sizes = self.phase, [_pss(pid) for pid in _below(self.root) if pid not in self.workers]
            self.most[phase] = max(self.most.get(phase, 0), sum(sizes))


def _below(root: int) -> list[int]:
    """Return the process ids of a process and of all below it."""
    found, left = list[int](), [root]
    while left:
        found.append(left.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                left += map(int, children.read_text().split())
            except OSError:  # the process has ended
                continue
    return found


def _pss(pid: int) -> int:
    try:
        told = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # the process has ended
        return 0
    return 1024 * int(told[1]) if told else 0


def measure(flags: Sequence[str] | None, millions: int) -> record.Figures:
    """Run a row. Raises CommandFailed."""
    own = [str(Path(__file__).resolve()), "worker", str(millions), *(["plain"] if flags is None else [])]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        if flags is None:
            command = [sys.executable, *own]
        else:
            words = [word.format(folder=folder) for word in flags]
            command = launch.ps_worker("-n", str(WORKERS), *words, "--shards", str(SHARDS), *own)
        env = launch.environment()
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        servers, peaks, models = ServersMemory(process.pid), dict[str, float](), 0.0
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if MARK in line:
                    pid, phase, peak, models = json.loads(line[line.index(MARK) + len(MARK) :])
                    servers.workers.add(pid)
                    servers.phase, peaks[phase] = phase, max(peak, peaks.get(phase, 0.0))
            code = process.wait()
        finally:
            limit.cancel()
            servers.end()
            launch.end(process)
        if code:
            raise launch.CommandFailed(f"{' '.join(command)}\nexit code {code}\n{launch.tail(errors)}")
    figures: record.Figures = {f"worker, {phase}": (peaks.get(phase), "models") for phase in PHASES}
    if flags is not None:
        most = {phase: servers.most.get(phase, 0) / models for phase in ("join", "finish")}
        figures |= {"servers, steps": (most["join"], "models"), "servers, end": (most["finish"], "models")}
    return figures


@click.command(context_settings={"show_default": True})
@click.option("--rows", "pattern", default="*", help=f"of {', '.join(ROWS)}")
@click.option("--millions", default=100, help="parameters of the model")
@record.out_option("speed/memory")
def main(pattern: str, millions: int, out: Path) -> None:
    """Measure the memory of workers and servers."""
    chosen = {name: flags for name, flags in ROWS.items() if fnmatch.fnmatchcase(name, pattern)}
    if not chosen:
        raise click.UsageError(f"--rows {pattern}: there is none; rows: {', '.join(ROWS)}")
    with record.Recorder("speed/memory", out) as recorder:
        for name, flags in chosen.items():
            try:
                found = measure(flags, millions)
            except launch.CommandFailed as error:
                raise click.ClickException(f"{name}: {error}") from None
            recorder.add(name, found, arguments={"millions": millions})


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), "plain" in sys.argv[3:])
    else:
        main()
