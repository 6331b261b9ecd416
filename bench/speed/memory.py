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
- "no journal": as by ps-serve --no-journal. Rows without it have one.
- "plain": PyTorch alone.
- "on a device": the worker's figures are those of its GPU over the script's own arrays: the most that torch has lent of the
  card's memory (torch.cuda.max_memory_allocated), less parameters, gradients and the optimizer's state. AdamW steps a tensor at
  a time there, for its foreach steps take one more model while they run. Without a GPU the CPU stands in for one, as
  NARROWS_ARRAYS=device has it, and the bench counts the arrays that are made there.
- "account": the same by protocols/config/memory.py, for the steps. The ratios compare it with what was measured, less what the
  first step of a small model takes, with all kernels loaded, and less what the servers took before there was a model. Servers
  count with the files of their journals there, which lie in memory. --give-back leaves out what glibc keeps of freed arrays,
  of PyTorch's too; the account names it "freed messages".
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

from narrows.compression.ladder import Codecs
from narrows.protocols.config.memory import ArrayFacts, ShardFacts, crossing, device_arrays, shard_arrays, worker_arrays
from narrows.protocols.config.settings import Settings

NO_JOURNAL = ("--journal", "0")  # of ps-serve, which ps-worker starts
ROWS: dict[str, tuple[str, ...] | None] = {
    "plain": None,
    "bsp": ("--sync", "bsp"),
    "bsp, no journal": ("--sync", "bsp", *NO_JOURNAL),
    "bsp int8": ("--sync", "bsp", "--compress", "int8"),
    "ssp s=1": ("--sync", "ssp", "--compress", "topk:0.05+int8"),
    "ssp s=1, no journal": ("--sync", "ssp", "--compress", "topk:0.05+int8", *NO_JOURNAL),
    "ssp s=1, checkpoints": ("--sync", "ssp", "--compress", "topk:0.05+int8", "--checkpoint-dir", "{folder}"),
    "ssp s=16": ("--sync", "ssp", "--staleness", "16", "--compress", "topk:0.05+int8"),
    "async": ("--sync", "async", "--compress", "topk:0.05+int8"),
    "local": ("--sync", "local", "--local-steps", "5"),
    "gossip": ("--sync", "gossip"),
    "gossip int8": ("--sync", "gossip", "--compress", "int8"),
    "bsp int8, on a device": ("--sync", "bsp", "--compress", "int8"),
    "ssp s=1, on a device": ("--sync", "ssp", "--compress", "topk:0.05+int8"),
    "ssp s=1 int4, on a device": ("--sync", "ssp", "--compress", "int4"),
    "ssp s=1 dense, on a device": ("--sync", "ssp"),
    "ssp s=16, on a device": ("--sync", "ssp", "--staleness", "16", "--compress", "topk:0.05+int8"),
    "async, on a device": ("--sync", "async", "--compress", "topk:0.05+int8"),
    "local, on a device": ("--sync", "local", "--local-steps", "5"),
    "local int4, on a device": ("--sync", "local", "--local-steps", "5", "--compress", "int4"),
    "gossip int8, on a device": ("--sync", "gossip", "--compress", "int8"),
}
ON_DEVICE = ", on a device"  # how the names of such rows end
FIRST = "first step"  # of a small model, before there is any other
MOMENTS = 2.0  # of AdamW
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
PHASES = ("join", "steps", "shared", "finish")
SHARDS, WORKERS, WIDTH, STEPS = 4, 2, 1024, 20
POLL_S, LIMIT_S = 0.05, 900.0
MARK = "memory of"


class DeviceMemory:
    """The memory of a worker's device, a GPU or the CPU in place of one, over the arrays of its script.

    Attributes:
        own: bytes of the script's arrays on a GPU.
    """

    def __init__(self) -> None:
        import torch

        self.torch, self.own, self.there, self.most = torch, 0.0, 0, 0
        self.gpu = torch.cuda.is_available()
        if not self.gpu:
            self._count()

    def peak(self) -> float:
        """Return the most bytes since the last call."""
        if self.gpu:
            most = float(self.torch.cuda.max_memory_allocated()) - self.own
            self.torch.cuda.reset_peak_memory_stats()
            return most
        most, self.most = self.most, self.there
        return most

    def _count(self) -> None:
        """Count the arrays that a home of the CPU makes in place of a device."""
        from narrows.compression.device.home import DeviceHome
        from narrows.compression.device.host import HostKernels

        begin, empty = DeviceHome.__init__, HostKernels.empty

        def made(count: int) -> Any:
            return self.torch.from_numpy(self.counted(np.zeros(count, np.float32)))

        def begun(home: Any, kernels: Any, zeros: Any, name: str) -> None:
            begin(home, kernels, made, name)

        def given(kernels: Any, count: int, dtype: Any) -> Any:
            whole = empty(kernels, count, dtype)
            self.counted(owner_of(whole))
            return whole

        mock.patch.object(DeviceHome, "__init__", begun).start()
        mock.patch.object(HostKernels, "empty", given).start()
        mock.patch.object(
            HostKernels, "zeros", lambda kernels, count, dtype: zeroed(given(kernels, count, dtype))
        ).start()

    def counted(self, array: Any) -> Any:
        self.there += array.nbytes
        self.most = max(self.most, self.there)
        weakref.finalize(array, self._gone, array.nbytes)
        return array

    def _gone(self, size: int) -> None:
        self.there -= size


def owner_of(array: Any) -> Any:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def zeroed(array: Any) -> Any:
    array.fill(0)
    return array


def worker(millions: int, plain: bool, device: bool) -> None:
    """Train in one process, and print the peak of each phase."""

    def resident() -> float:
        told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return 1024 * int(told["VmHWM"].split()[0])

    import torch

    from narrows.compression import warm_up
    from narrows.worker import DistributedOptimizer

    layers, models = len(sizes(millions)), 4.0 * sum(sizes(millions))
    there = DeviceMemory() if device else None
    place = "cuda" if there is not None and there.gpu else "cpu"
    peak = resident if there is None else there.peak
    peak()
    base = peak()

    def ended(phase: str) -> None:
        print(MARK, json.dumps([os.getpid(), phase, (peak() - base) / models, models]), flush=True)

    def step(model: torch.nn.Module, optimizer: Any, width: int = WIDTH) -> None:
        x = torch.randn(4, width, device=place)
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()

    if not plain:
        warm_up()  # the kernels, which ps-worker loads in any case
    small = torch.nn.Linear(1, 1, device=place)
    step(small, torch.optim.AdamW(small.parameters()), 1)
    peak()
    ended(FIRST)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, device=place) for _ in range(layers)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False if place == "cuda" else None)
    if not plain:
        optimizer = DistributedOptimizer(optimizer, model)
    if there is not None:
        there.own = models  # the parameters
    ended("join")
    if there is not None:
        there.own = (2 + MOMENTS) * models
    for _ in range(STEPS):
        step(model, optimizer)
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
        whole: the same, with the files in memory that they have open.
        base: the least of `whole` since the first worker was heard, and before there was a model.
    """

    def __init__(self, root: int) -> None:
        self.root, self.phase, self.workers = root, "start", set[int]()
        self.most, self.whole, self.base = dict[str, int](), dict[str, int](), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(POLL_S):
            phase, servers = self.phase, [pid for pid in _below(self.root) if pid not in self.workers]
            sizes, files = [_pss(pid) for pid in servers], dict[int, int]()
            for pid in servers:
                files |= _files(pid)
            whole = sum(each - shared for each, shared in sizes) + sum(files.values())
            self.most[phase] = max(self.most.get(phase, 0), sum(each for each, _ in sizes))
            self.whole[phase] = max(self.whole.get(phase, 0), whole)
            if phase == FIRST:
                self.base = min(self.base or whole, whole)


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


def _pss(pid: int) -> tuple[int, int]:
    """Return the proportional set size of a process, and the part of it that is files in memory."""
    try:
        told = dict(
            re.findall(r"^(Pss|Pss_Shmem):\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        )
    except OSError:  # the process has ended
        told = {}
    return 1024 * int(told.get("Pss", 0)), 1024 * int(told.get("Pss_Shmem", 0))


def _files(pid: int) -> dict[int, int]:
    """Return the bytes of each file in memory that a process has open, by inode."""
    found = dict[int, int]()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if os.readlink(path).startswith("/memfd:"):
                about = path.stat()
                found[about.st_ino] = 512 * about.st_blocks
        except OSError:  # the process has ended, or closed it
            continue
    return found


def sizes(millions: int) -> list[int]:
    """Return the values of each tensor of the model."""
    return [WIDTH**2] * max(1, millions * 1_000_000 // WIDTH**2)


def account(flags: Sequence[str] | None, millions: int, device: bool) -> tuple[float, float]:
    """Return what a worker, or its device, and all servers hold in the steps of a row, in models."""
    if flags is None:
        return 2 + MOMENTS, 0.0
    words = {
        flag.removeprefix("--").replace("-", "_"): word for flag, word in zip(flags[::2], flags[1::2], strict=True)
    }
    words.pop("checkpoint_dir", "")  # a checkpoint takes no array
    journal = words.pop("journal", "1") == "1"
    given: dict[str, Any] = {name: int(word) if word.isdigit() else word for name, word in words.items()}
    settings = Settings(workers=WORKERS, shards=SHARDS, **given).validated()
    mode, codecs = settings.mode(), Codecs.of(settings.compress, settings.compress_down)
    shards = ShardFacts.of(settings, codecs, MOMENTS)._replace(journal=journal)
    facts = ArrayFacts.of(settings, codecs, MOMENTS)._replace(copied=crossing(sizes(millions), SHARDS))
    here, there = (device_arrays if device else worker_arrays)(mode, facts), shard_arrays(mode, shards)
    return sum(row.models for row in here), sum(row.models for row in there)


def measure(name: str, millions: int, give_back: bool) -> record.Figures:
    """Run a row. Raises CommandFailed."""
    flags, device = ROWS[name], name.endswith(ON_DEVICE)
    how = [*(["plain"] if flags is None else []), *(["device"] if device else [])]
    own = [str(Path(__file__).resolve()), "worker", str(millions), *how]
    unkept = flags is not None and flags[-2:] == NO_JOURNAL
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        if flags is None:
            command = [sys.executable, *own]
        else:
            words = [word.format(folder=folder) for word in (flags[:-2] if unkept else flags)]
            command = launch.ps_worker("-n", str(WORKERS), *words, "--shards", str(SHARDS), *own)
        env = launch.environment() | (GIVING_BACK if give_back else {})
        if unkept:
            env["NARROWS_JOURNAL"] = "0"
        if device:
            env["NARROWS_ARRAYS"] = "device"
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
    ours, theirs = account(flags, millions, device)
    first = 0.0 if device else peaks[FIRST]
    figures |= {"worker, account": (ours, "models"), "worker, ratio": ((peaks["steps"] - first) / ours, "")}
    if flags is not None:
        most = {phase: servers.most.get(phase, 0) / models for phase in ("join", "finish")}
        whole = (servers.whole.get("join", 0) - servers.base) / models
        figures |= {"servers, steps": (most["join"], "models"), "servers, end": (most["finish"], "models")}
        figures |= {"servers, account": (theirs, "models"), "servers, ratio": (whole / theirs, "")}
    return figures


@click.command(context_settings={"show_default": True})
@record.rows_option(ROWS)
@click.option("--millions", default=100, help="parameters of the model")
@click.option(
    "--give-back", is_flag=True, help="glibc gives arrays back as they are freed, so what it would keep is not counted"
)
@record.out_option("speed/memory")
def main(pattern: str, millions: int, give_back: bool, out: Path) -> None:
    """Measure the memory of workers and servers."""
    recorder = record.Recorder("speed/memory", out)
    arguments = {"millions": millions} | ({"give-back": True} if give_back else {})

    def row(name: str) -> None:
        recorder.add(name, measure(name, millions, give_back), arguments=arguments)

    record.measure_rows(recorder, ROWS, pattern, row)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), "plain" in sys.argv[3:], "device" in sys.argv[3:])
    else:
        main()
