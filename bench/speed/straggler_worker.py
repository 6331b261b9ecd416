"""One training process of straggler.py: tasks/bytelm.py, slowed while the driver says so.

    STRAGGLER_PHASE   a file, read after each step: "even", "slow" or "end"
    STRAGGLER_TIMES   while it says "slow", a step of this worker costs so many times what it costs else; 1: never slowed

The slowing keeps its core busy, as a slow processor is: a worker that slept would leave its core to the others. It lets
the interpreter go meanwhile, as a step does, so that the session's own thread answers as ever.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from narrows.worker import DistributedOptimizer, record

sys.path.append(str(Path(__file__).resolve().parents[1] / "tasks"))

import bytelm

PIECE = 256  # rows and columns of the products that are burnt: under a millisecond each


def burn(seconds: float) -> None:
    """Keep this thread computing until it has had so much of a processor."""
    until = time.thread_time() + seconds
    factor, product = torch.ones(PIECE, PIECE), torch.empty(PIECE, PIECE)
    while time.thread_time() < until:
        torch.mm(factor, factor, out=product)


def queued() -> float:
    """Seconds that this thread was ready to run while others had its core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Paced(DistributedOptimizer):
    """Tells when each step ended, and makes the next one late."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.phase, self.times = Path(os.environ["STRAGGLER_PHASE"]), float(os.environ["STRAGGLER_TIMES"])
        self.begun = time.thread_time()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        own, phase = time.thread_time() - self.begun, self.phase.read_text()
        if phase == "end":
            sys.exit()  # the session ends well: it flushes, and leaves
        if phase == "slow":
            burn((self.times - 1) * own)
        record(at=time.monotonic(), computed=own, queued=queued())
        self.begun = time.thread_time()
        return loss


if __name__ == "__main__":
    vars(bytelm)["DistributedOptimizer"] = Paced  # the task names it as its own
    bytelm.main(bytelm.arguments())
