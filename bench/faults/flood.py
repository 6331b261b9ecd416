"""Strangers dial the server of a run: silent connections, floods of frames. The bench measures step and memory meanwhile.

    python bench/faults/flood.py                      digits, one worker, one shard, bsp; every kind of stranger in turn
    python bench/faults/flood.py --kinds noise --rate 0     as many frames as one process sends
    python bench/faults/flood.py --keys               the same, where both ends have keys

Rules
- One run of real commands on loopback goes on all the while. Phases of --seconds follow each other: undisturbed, the same
  strangers at a listener that has nothing to do with the run, the strangers at the run; then the next kind.
- Strangers on this machine take its cores from the run, whomever they dial. So the step beside strangers is compared with the
  one beside the unrelated listener, too. That listener throws away what it gets, in a process of its own.
- A step is that of the worker's loop, computing and `optimizer.step()`. Times are medians over all steps. A ratio is that of
  two phases side by side: the median over all rounds.
- Connections are opened before their phase begins. The steps meanwhile are told apart.
- Memory is the resident set of each server process, at its most in a phase.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from narrows.protocols.runtime.network.key_files import add, make

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

from lab import launch, record

HERE = Path(__file__).resolve()
STRANGERS = str(HERE.parent / "hostile_connections.py")
KINDS = {
    "connected": ("silent", "10000", "0", "connected"),
    "greeting": ("silent", "10000", "0", "greeting"),
    "handshake": ("silent", "10000", "0", "handshake"),
    "again": ("silent", "2000", "1000", "handshake"),
    "noise": ("frames", "RATE", "noise"),
    "ours": ("frames", "RATE", "ours"),
    "resets": ("resets", "500", "old"),
    "late resets": ("resets", "500", "handshake"),
}
SHOWN = {
    "connected": "10,000 connections that say nothing",
    "greeting": "10,000 half greetings",
    "handshake": "10,000 finished handshakes",
    "again": "2,000 of these, and 1,000 more a second",
    "noise": "frames of random bytes",
    "ours": "random frames that begin as ours do",
    "resets": "500 connections a second that are reset after a message of ZMTP 1.0",
    "late resets": "500 connections a second that are reset after a handshake and a frame",
}
LOOK_S = 0.2
PAUSE_S = 0.3  # after a phase: what it has left behind is gone
COUNTS = {kind: int(words[1]) for kind, words in KINDS.items() if words[0] == "silent"}


class Watched:
    """Processes, and the most memory that each has had since it was last asked."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.pids, self.most = pids, dict.fromkeys(pids, 0)
        self.over = threading.Event()
        threading.Thread(target=self._main, daemon=True).start()

    def _main(self) -> None:
        while not self.over.wait(LOOK_S):
            for name, pid in self.pids.items():
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    kib = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
                    self.most[name] = max(self.most[name], kib)

    def mb(self) -> dict[str, int]:
        most, self.most = self.most, dict.fromkeys(self.pids, 0)
        return {name: kib // 1024 for name, kib in most.items()}


@contextmanager
def stranger(kind: str, port: int, rate: int) -> Iterator[dict[str, float]]:
    """One of a kind at `port`; what it has told."""
    words = [str(rate) if word == "RATE" else word for word in KINDS[kind]]
    process = subprocess.Popen(
        [sys.executable, STRANGERS, words[0], str(port), *words[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    told: dict[str, float] = {}

    def hear() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told.update(json.loads(line))

    reader = threading.Thread(target=hear, daemon=True)
    reader.start()
    try:
        yield told
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)
        reader.join(10)


@contextmanager
def drain() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, STRANGERS, "drain"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        yield int(process.stdout.readline())
        process.stdin.close()
        process.wait(10)
    finally:
        launch.end(process)


def steps(file: Path, begin: float, end: float) -> list[float]:
    """Milliseconds of each step that lay in this time."""
    rows = [line.split() for line in file.read_text().splitlines() if line.endswith(";")]
    return [1e3 * float(took) for at, took, _ in rows if begin <= float(at) < end - float(took)]


@click.group(invoke_without_command=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="of a phase")
@click.option("--rate", default=100_000, show_default=True, help="frames a second; 0: as many as one process sends")
@click.option("--shards", default=1, show_default=True)
@click.option("--sync", default="bsp", show_default=True)
@click.option("--keys", "keyed", is_flag=True, help="the run has keys, and strangers have none")
@record.out_option("faults/flood")
@click.pass_context
def main(
    context: click.Context,
    kinds: str,
    rounds: int,
    seconds: float,
    rate: int,
    shards: int,
    sync: str,
    keyed: bool,
    out: Path,
) -> None:
    """Time a run beside strangers."""
    if context.invoked_subcommand:
        return
    with tempfile.TemporaryDirectory() as name, drain() as elsewhere:
        folder = Path(name)
        flags, key = ["--sync", sync], list[str]()
        if keyed:
            make(str(folder / "keys"))
            flags += ["--keys", str(folder / "keys")]
            key = ["--key", str(add(str(folder / "keys"), "bench", "worker"))]
        arguments = {"seconds": seconds, "rate": rate, "shards": shards, "sync": sync, "keys": keyed}
        with record.Recorder("faults/flood", out) as recorder:
            for row in measured(folder, flags, key, elsewhere, kinds.split(","), rounds, seconds, rate, shards):
                told: record.Figures = row.result()
                recorder.add(SHOWN[row.kind], told, arguments=arguments, note=row.did())


def measured(
    folder: Path,
    flags: list[str],
    key: list[str],
    elsewhere: int,
    kinds: list[str],
    rounds: int,
    seconds: float,
    rate: int,
    shards: int,
) -> list[Row]:
    """One row for each kind."""
    times, over, ready = folder / "times", folder / "over", folder / "ready.json"
    bound = ("--shards", str(shards), "--ready-file", str(ready))
    script = [str(HERE), "worker", str(times), str(over)]
    with launch.started(launch.ps_serve("127.0.0.1:0", *bound, *flags)):
        launch.until(ready.exists, "the start of ps-serve")
        told = json.loads(ready.read_text())
        port = told["ports"][0]
        worker = launch.ps_worker("--server", told["address"], *key, *script)
        watched = Watched({f"shard {i}": pid for i, pid in enumerate(told["shard_pids"])} | {"ps-serve": told["pid"]})
        with launch.started(worker):
            launch.until(lambda: times.exists() and times.stat().st_size > 5_000, "the first steps")
            rows = [Row(kind) for kind in kinds]
            for _ in range(rounds):
                for row in rows:
                    row.round(times, watched, port, elsewhere, seconds, rate)
            over.touch()
    watched.over.set()
    return rows


class Row:
    """All rounds of one kind of stranger."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rounds: dict[str, list[list[float]]] = {"quiet": [], "elsewhere": [], "beside": []}
        self.coming: list[float] = []  # steps while connections were opened
        self.mb: dict[str, dict[str, int]] = {"quiet": {}, "beside": {}}
        self.told: list[dict[str, float]] = []

    def round(self, times: Path, watched: Watched, port: int, elsewhere: int, seconds: float, rate: int) -> None:
        for phase, where in (("quiet", None), ("elsewhere", elsewhere), ("beside", port)):
            with contextlib.ExitStack() as stack:
                told = stack.enter_context(stranger(self.kind, where, rate)) if where else {}
                watched.mb()
                began = time.monotonic()
                if where:
                    opened = partial(
                        lambda told, n: told and told.get("opened", 0) >= n, told, COUNTS.get(self.kind, 0)
                    )
                    launch.until(opened, "the strangers")
                begin = time.monotonic()
                time.sleep(seconds)
                self.rounds[phase].append(steps(times, begin, time.monotonic()))
                if phase in self.mb:
                    most = watched.mb()
                    self.mb[phase] = {name: max(mb, self.mb[phase].get(name, 0)) for name, mb in most.items()}
            if phase == "beside":
                self.told.append(dict(told))
                self.coming += steps(times, began, begin)
            time.sleep(PAUSE_S)

    def did(self) -> str:
        """What the strangers did in a phase."""
        last = {name: statistics.median(each.get(name, 0.0) for each in self.told) for name in self.told[-1]}
        if "per_second" in last:
            return f"{last['per_second']:,.0f} frames a second, {last['dials']:,.0f} connections"
        return f"{last['opened']:,.0f} opened, {last['open']:,.0f} open at its end"

    def result(self) -> record.Figures:
        flat = {phase: [ms for found in rounds for ms in found] for phase, rounds in self.rounds.items()}
        found: record.Figures = {f"step {phase}": (statistics.median(own), "ms") for phase, own in flat.items()}
        for name, phase in (("of undisturbed", "quiet"), ("of elsewhere", "elsewhere")):
            found[name] = (ratio(self.rounds["beside"], self.rounds[phase]), "")
        found["step while they come"] = (statistics.median(self.coming) if self.coming else None, "ms")
        found["longest step beside"] = (max(flat["beside"]), "ms")
        return found | {f"shard 0, {phase}": (mb["shard 0"], "MB") for phase, mb in self.mb.items()}


def ratio(these: list[list[float]], those: list[list[float]]) -> float:
    """The median of the ratios of their medians, round for round."""
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in zip(these, those, strict=True))


@main.command(hidden=True)
@click.argument("times", type=Path)
@click.argument("over", type=Path)
def worker(times: Path, over: Path) -> None:
    """The digits under ps-worker, until a file is there; writes down when each step began and how long it took."""
    import torch
    import torch.nn.functional as F
    from digits import batch_rows, build_model, digits

    from narrows.worker import DistributedOptimizer

    torch.manual_seed(0)
    train_x, _, train_y, _ = digits()
    model = build_model()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    step = 0
    with times.open("w", buffering=1) as file:
        while not over.exists():
            began = time.monotonic()
            rows = batch_rows(len(train_x), 64, 0, step)
            optimizer.zero_grad()
            F.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
            optimizer.step()
            file.write(f"{began} {time.monotonic() - began} ;\n")
            step += 1
    optimizer.finish()


if __name__ == "__main__":
    main()
