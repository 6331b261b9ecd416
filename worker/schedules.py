"""Brings a script's schedule of learning rates to where the run is."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from narrows.protocols.errors import UsageError


class Schedule(Protocol):
    """A scheduler of torch.optim.lr_scheduler, or a container of them that steps like one."""

    def step(self) -> Any: ...


def catch_up(schedule: Schedule, steps: int) -> None:
    """Step a new `schedule` so often. Most schedules know no other way: their rate follows from the one before.

    Raises UsageError for ReduceLROnPlateau, which follows a metric.
    """
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "schedule=ReduceLROnPlateau(...) follows a metric and no steps, so each worker's begins anew: leave it out"
        )
    if steps and (optimizer := getattr(schedule, "optimizer", None)) is not None:
        optimizer._opt_called = True  # torch warns of a schedule that steps first; here the other workers have stepped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            schedule.step()
