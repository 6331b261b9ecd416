"""What the processes of speed/pace.py share: the phase of the run, updates that were made beforehand, and their payloads.

A phase is a file of JSON, which pace.py replaces as a whole. Workers read it before each step, servers before each message.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrows.compression import parse
from narrows.compression.buffers import FloatArray
from narrows.compression.feedback import ErrorFeedback

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
from lab import launch

SIZES = {"30.8M": (10, 504, 8), "tiny": (1, 32, 1)}  # layers, width, heads of the byte GPT
MADE = 4  # updates, and so payloads of each range of keys: a cycle's turns differ little in length
POLL_S = 0.02  # between two looks for the next phase
WARM_UP, WINDOWS, RATE = 4, 4, 1e-3  # steps before the first of them, windows of each step, AdamW's rate


@dataclass(frozen=True)
class Coding:
    """The time of coding, in seconds for each value that is coded.

    Attributes:
        encode: difference and encode of an update, in a worker.
        fold: fold of a state, in a worker.
        compose: composition of the replica, and its write to the parameters, in a worker.
        add: fold of one update, in a server.
        publish: code of a state, in a server.
        host: the other work of a worker's main thread in a push to one shard, in seconds, whatever the number of values. It
            stands for the thread's CPU time in step(). 0: not known; the CPU time in step() is stretched instead.
    """

    encode: float = 0.0
    fold: float = 0.0
    compose: float = 0.0
    add: float = 0.0
    publish: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Phase:
    """One phase of a run: what each worker does in it.

    Attributes:
        number: of the phase, from 0; -1: all processes end.
        steps: that each worker makes.
        settle: how many of the first steps do not count.
        compute_s: seconds of compute in a step.
        dilation: all sleeps of this phase, and stretched CPU time, take so many times as long.
        coding: the time of coding.
    """

    number: int
    steps: int
    settle: int = 0
    compute_s: float = 0.0
    dilation: float = 1.0
    coding: Coding = field(default_factory=Coding)

    def write(self, path: Path) -> None:
        replaced(path, json.dumps(asdict(self)))


class PhaseFile:
    """The file with the newest phase. `now` reads it again once pace.py has replaced it."""

    def __init__(self, path: Path) -> None:
        self.path, self._stamp, self.used_s = path, (0, 0), 0.0
        self._phase = Phase(0, 0)

    def now(self) -> Phase:
        told = self.path.stat()
        if (stamp := (told.st_ino, told.st_mtime_ns)) != self._stamp:
            found = json.loads(self.path.read_text())
            self._phase = Phase(**found | {"coding": Coding(**found["coding"])})
            self._stamp = stamp
        return self._phase

    def sleep(self, seconds: float) -> None:
        """Sleep for so many seconds of the task: dilation times as long."""
        if seconds > 0:
            time.sleep(seconds * self.now().dilation)

    @contextmanager
    def stretched(self, out: bool = False) -> Iterator[None]:
        """Count the CPU time of this thread in the block, and sleep after it until that has taken dilation times as long.

        `out`: count, and do not sleep.
        """
        before = time.thread_time()
        yield
        used_s = time.thread_time() - before
        self.used_s += used_s
        if not out:
            time.sleep(max(0.0, used_s * (self.now().dilation - 1)))

    def follow(self, rank: int, step: Callable[[], None]) -> None:
        """Make the steps of each phase until the last one. Write a file for each phase: when it began, when each step ended,
        and the CPU seconds of a step in `stretched` blocks."""
        number = 0  # of the phase in which processes start
        while (phase := self.now()).number >= 0:
            if phase.number == number:
                time.sleep(POLL_S)
                continue
            number, self.used_s, ends = phase.number, 0.0, [time.monotonic()]
            for _ in range(phase.steps):
                step()
                ends.append(time.monotonic())
            replaced(
                told_path(self.path, number, rank),
                json.dumps({"ends": ends, "cpu_s": self.used_s / max(1, phase.steps)}),
            )


def told_path(phase: Path, number: int, rank: int) -> Path:
    return phase.with_name(f"told-{number}-{rank}")


def replaced(path: Path, text: str) -> None:
    """Write a file as a whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


class Still(torch.optim.Optimizer):
    """An optimizer that does nothing: the script's step, a sleep, has its time."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


def model_of(size: str) -> bytelm.ByteGPT:
    torch.manual_seed(0)
    return bytelm.ByteGPT(*SIZES[size])


def updates_of(size: str) -> Path:
    """The file of updates of a model, float32[MADE, parameters]: AdamW's steps on the byte GPT. Made where there is none."""
    path = launch.OUT / f"updates-{size}.npy"
    if not path.exists():
        text, _, _ = bytelm.library()
        model = model_of(size)
        adamw = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
        made = []
        for step in range(WARM_UP + MADE):
            rows = bytelm.batch_rows(text, 0, step, WINDOWS, 64)
            adamw.zero_grad()
            (bytelm.loss_sum(model, rows) / (WINDOWS * 64)).backward()
            before = flat_of(model)
            adamw.step()
            made.append(flat_of(model) - before)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npy")
        np.save(temporary, np.stack(made[WARM_UP:]))
        os.replace(temporary, path)
    return path


def flat_of(model: torch.nn.Module) -> FloatArray:
    values: FloatArray = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    return values


class Payloads:
    """Payloads of one SPEC for any range of keys, of updates from a file, through error feedback. Each is made once."""

    def __init__(self, spec: str, updates: Path) -> None:
        self.compressor, self.updates = parse(spec), np.load(updates, mmap_mode="r")
        self.raw = spec == "dense"
        self._made: dict[tuple[int, int], list[memoryview]] = {}

    def values(self, begin: int, end: int, turn: int) -> FloatArray:
        return np.array(self.updates[turn % MADE, begin:end])

    def of(self, begin: int, end: int, turn: int) -> memoryview:
        """The payload of keys [begin, end) at this turn, which has the length and the values of a real one."""
        self.make(begin, end)
        return self._made[begin, end][turn % MADE]

    def make(self, begin: int, end: int) -> None:
        """Make the payloads of these keys, unless they are there; dense values need none."""
        if self.raw or (begin, end) in self._made:
            return
        feedback = ErrorFeedback(self.compressor, end - begin)
        made = [feedback.encode(self.values(begin, end, turn)) for turn in range(2 * MADE)]
        self._made[begin, end] = made[MADE:]  # the first ones began with hardly a residual


def environment(folder: Path, size: str, spec: str) -> dict[str, str]:
    """The variables of each process."""
    return {
        "PACE_PHASE": str(folder / "phase"),
        "PACE_SIZE": size,
        "PACE_SPEC": spec,
        "PACE_UPDATES": str(updates_of(size)),
    }
