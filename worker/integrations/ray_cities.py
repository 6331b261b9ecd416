"""What narrows.worker.ray is told of a run, checked before anything is started: clusters, limits, flags,
the script. No Ray."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli import flags

Bounds = int | tuple[int, int]  # how many workers; low and high
SWITCHES = ("journal",)  # flags of ps-serve beside those of a run


@dataclass(frozen=True)
class RayCity:
    """A cluster: low to high workers on nodes with these labels."""

    low: int
    high: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class RayLimits:
    """Seconds: from one report to the next, that an actor may be without a node, and that scripts have after the server."""

    every_s: float
    room_s: float
    after_s: float

    def __post_init__(self) -> None:
        if not self.room_s > 0:
            raise UsageError(f"room_s={self.room_s:g}: give more than 0 s, or math.inf to wait for a node for ever")


def run_flags(run: Mapping[str, Any], **more: int) -> list[str]:
    """Words of ps-serve for these keywords of train, and for the flags in `more`. Raises UsageError, as ps-serve would."""
    given = flags.as_given(run, SWITCHES) | more
    Settings(**{name: value for name, value in given.items() if name not in SWITCHES}).validated()
    return flags.words(given)


def cities_of(
    clusters: Sequence[Mapping[str, Any]], workers: Bounds | None, labels: Mapping[str, str] | None
) -> list[RayCity]:
    """The clusters of a run, one where none is named. Raises UsageError."""
    if not clusters:
        return [_city("", workers, labels)]
    for index, cluster in enumerate(clusters):
        if unknown := sorted(cluster.keys() - {"labels", "workers"}):
            form = '{"labels": {"city": "jena"}, "workers": (1, 4)}'
            raise UsageError(f"clusters[{index}] has {unknown[0]!r}: a cluster is told as {form}")
    return [
        _city(f"clusters[{index}]: ", each.get("workers", workers), each.get("labels"))
        for index, each in enumerate(clusters)
    ]


def _city(where: str, workers: Bounds | None, labels: Mapping[str, str] | None) -> RayCity:
    if workers is None:
        raise UsageError(f"{where}workers: give how many, or (low, high)")
    low, high = (workers, workers) if isinstance(workers, int) else workers
    if not 1 <= low <= high:
        raise UsageError(f"{where}workers=({low}, {high}): give 1 <= low <= high")
    return RayCity(low, high, dict(labels or {}))


def command_of(script: str | Callable[[], Any], args: Sequence[str]) -> list[str]:
    """Return the command that ps-worker runs. Raises UsageError where a function cannot be found by its name."""
    if isinstance(script, str):
        return [script, *args]
    name, file = getattr(script, "__qualname__", ""), inspect.getsourcefile(script)
    if file is None or not name.isidentifier():
        raise UsageError(f"{name or script}: give a function that stands at the top of a file, or the path of a script")
    return ["-m", "narrows.worker.integrations.function_entry", os.path.abspath(file), name, *args]
