"""Checks the arguments of `narrows.worker.ray.train` before an actor starts: clusters, limits, flags, the script.

This file does not import Ray.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli import flags

Bounds = int | tuple[int, int]  # the number of workers, or its lowest and highest value
SWITCHES = ("journal",)  # flags of ps-serve that `train` accepts and Settings does not have


@dataclass(frozen=True)
class RayCity:
    """One cluster of a run: its workers and the nodes on which they run."""

    low: int  # workers with which the cluster starts, and without which it fails; 1 <= low <= high
    high: int  # the most workers that it admits
    labels: Mapping[str, str]  # the label selector of its nodes, as Ray names labels; empty: any node


@dataclass(frozen=True)
class RayLimits:
    """The time limits of `train`, in seconds."""

    every_s: float  # from one report to the next
    room_s: float  # how long an actor may be without a node; > 0, math.inf: no limit
    after_s: float  # how long scripts may run on after the root's server has ended

    def __post_init__(self) -> None:
        if not self.room_s > 0:
            raise UsageError(f"room_s={self.room_s:g}: give more than 0 s, or math.inf to wait for a node for ever")


def run_flags(run: Mapping[str, Any], **more: int) -> list[str]:
    """Turn keyword arguments of `train` into the command-line flags of ps-serve.

    Args:
        run: the keywords, by the name of the flag; a value of None is left out.
        more: further flags, which win over `run`.

    Returns:
        The words of the command line, as ["--sync", "bsp"].

    Raises:
        UsageError: ps-serve would refuse the flags.
    """
    given = flags.as_given(run, SWITCHES) | more
    Settings(**{name: value for name, value in given.items() if name not in SWITCHES}).validated()
    return flags.words(given)


def cities_of(
    clusters: Sequence[Mapping[str, Any]], workers: Bounds | None, labels: Mapping[str, str] | None
) -> list[RayCity]:
    """Return the clusters of a run.

    Args:
        clusters: {"labels": ..., "workers": ...} for each cluster; both entries may be absent. Empty: the run is one
            cluster.
        workers: the workers of each cluster that names none.
        labels: the labels of the nodes, if the run is one cluster.

    Raises:
        UsageError: an entry is unknown, or a number of workers is absent or impossible.
    """
    if not clusters:
        return [_city("", workers, labels)]
    for index, cluster in enumerate(clusters):
        if unknown := sorted(cluster.keys() - {"labels", "workers"}):
            form = '{"labels": {"city": "jena"}, "workers": (1, 4)}'
            raise UsageError(f"clusters[{index}] has {unknown[0]!r}: write a cluster as {form}")
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
    """Return the command that ps-worker runs.

    Args:
        script: the path of a script, or a function at the top level of a file.
        args: the arguments of the script.

    Raises:
        UsageError: the function cannot be found by a name in a file.
    """
    if isinstance(script, str):
        return [script, *args]
    name, file = getattr(script, "__qualname__", ""), inspect.getsourcefile(script)
    if file is None or not name.isidentifier():
        raise UsageError(f"{name or script}: give a function that stands at the top of a file, or the path of a script")
    return ["-m", "narrows.worker.integrations.function_entry", os.path.abspath(file), name, *args]
