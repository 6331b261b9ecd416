"""The session of this process: who it is in the run, how far the run is, and what it records."""

from __future__ import annotations


class Alone:
    """The session of a script that runs as plain python: one worker, no server."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.steps = 0


_session = Alone()


def current() -> Alone:
    """The session of this process."""
    return _session


def rank() -> int:
    """Rank of this worker among the live ones, from 0."""
    return _session.rank


def world_size() -> int:
    """Number of workers that the run was started for."""
    return _session.world_size


def clock() -> int:
    """The run's clock: updates that this worker has completed."""
    return _session.steps


def step_count() -> int:
    """Optimizer steps of this run so far: the clock times the local steps, plus those since."""
    return _session.steps


def record(**values: float) -> None:
    """Feed named figures to the record of the run; alone there is none."""
