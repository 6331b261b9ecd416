"""One run of the loss probes. A line in the queue of run_jobs.py describes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import bytelm
from loss.bf16_replicas import FLAGS

from narrows.compression.buffers import FloatArray

MODES, OUTER = ("bsp", "updates", "local"), ("nesterov", "iso", "iso-all", "iso-ema")
DIVERGED = 9.0  # a loss in nats a byte; guessing makes 5.5
Progress = Callable[[int, FloatArray], bool]  # the steps done and the shared weights; true ends the run early
Outcome = tuple[FloatArray, dict[str, float]]  # the final weights, and facts of the run


@dataclass(frozen=True)
class Job:
    """A way to train, its rate and its seed. SPECs are those of bf16_replicas.Coder."""

    mode: str = "updates"  # bsp; updates: each worker's own optimizer makes them; local: rounds of local steps
    workers: int = 8
    windows: int = 0  # of text, for each worker and step; 0: bytelm.py's 32 shared by all workers
    steps: int = 200
    warm_up: int = 40  # of the rate
    rate: float = 0.002  # its peak
    seed: int = 0
    inner: str = "adamw"  # or muon: for the matrices of the blocks
    beta1: float = 0.9
    beta2: float = 0.95
    staleness: int = 1  # clocks
    up: str = "topk:0.11+sign"
    down: str = ""  # as up

    # updates
    gain: str = "window"  # the product's; anything else: 1
    gain_power: float = 1.0  # exponent of the measured gain
    look_ahead: float = 0.5  # in clocks: own updates in flight count 1 + look_ahead / staleness times
    stand: float = 1.0  # weight of own updates in flight in a worker's replica, divided by the gain
    kept: float = 1.0  # weight of the residual there, divided by the gain
    start: float = 0.0  # share of the steps that a start in bsp takes
    start_up: str = ""  # SPEC of the gradients of that start; "": dense

    # local; the names in OUTER and what they do are in rounds.py
    local_steps: int = 1
    outer: str = "nesterov"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    moments_every: int = 0  # the workers average their moments after each so many rounds; 0: never

    # STEPS:LOSS,...: the run ends early if its loss is not below LOSS after STEPS, a quarter, a half or three quarters of all.
    give_up: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"{self.mode!r} is no mode: {', '.join(MODES)}")
        if self.outer not in OUTER:
            raise ValueError(f"{self.outer!r} is no outer step: {', '.join(OUTER)}")
        if self.steps % self.local_steps:
            raise ValueError(f"{self.steps} steps are no whole rounds of {self.local_steps}")
        if not self.windows and FLAGS.batch % self.workers:
            raise ValueError(f"{self.workers} workers cannot share {FLAGS.batch} windows evenly")
        if self.steps < 4:
            raise ValueError("a run has at least 4 steps: its loss is taken at each quarter")

    def __str__(self) -> str:
        """Return the fields that differ from the defaults, without rate and seed: the name of a row in a table."""
        own = [f for f in fields(self) if f.name not in ("rate", "seed")]
        told = [f"{f.name} {value}" for f in own if (value := getattr(self, f.name)) != f.default]
        return ", ".join(told) or "defaults"

    def arguments(self) -> dict[str, Any]:
        """Return all fields but the seed."""
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    @property
    def batch(self) -> int:
        """Windows of a step, over all workers."""
        return self.windows * self.workers or int(FLAGS.batch)

    def rate_at(self, step: int) -> float:
        return bytelm.learning_rate(step, self.steps, self.rate, self.warm_up)

    def limit(self, steps: int) -> float:
        """Return a loss: the run ends if it is not below that after so many steps."""
        limits = dict(part.split(":") for part in self.give_up.split(",") if part)
        return float(limits.get(str(steps), DIVERGED))
