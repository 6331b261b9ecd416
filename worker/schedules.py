"""Advances a script's learning rate schedule to the step of the run."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from narrows.protocols.errors import UsageError
from narrows.worker import session


class ScheduleCatchUp(Protocol):
    """A scheduler of torch.optim.lr_scheduler, or a container of several that steps like one."""

    def step(self) -> Any: ...


def catch_up(schedule: ScheduleCatchUp, steps: int) -> None:
    """Step `schedule` `steps` times. Most schedules cannot jump to a step, as each rate follows from the one before.

    Raises UsageError for ReduceLROnPlateau, which follows a metric.
    """
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "schedule=ReduceLROnPlateau(...) follows a metric and no steps, so each worker's begins anew: leave it out"
        )
    session.follows("schedule")
    if (optimizer := getattr(schedule, "optimizer", None)) is not None:
        # Torch warns if a schedule steps before its optimizer. Here other workers have stepped, or the server steps.
        optimizer._opt_called = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            schedule.step()
