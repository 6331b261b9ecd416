"""Train on a Ray cluster: `train` starts the server and the workers of a run as actors, and waits for the model.

Rules
- Each actor keeps one command of ours running on its node: keeper.py.
- Ray starts an actor again that died, alone or with its node. The others go on. A server goes on from its newest checkpoint.
- A worker whose server is lost asks its actor where it is now. So it may be on another node.
- Nothing is pickled but arguments of actors, by Ray. A function is called by its name in its file, which each node must have.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker.command.recording import STEP
from narrows.worker.keeper import END_S, Facts, Keeper

LOOPBACK = ("127.", "localhost", "[::1]")
OURS = ("seconds", "local_rank", *STEP)  # of a row of the record; the rest is the script's


@dataclass(frozen=True)
class Progress:
    """How far the run is. `workers`, `servers`: those that answered, by index. `values`: means of what was recorded last."""

    seconds: float
    clock: int
    workers: Mapping[int, Facts]
    servers: Mapping[int, Facts]
    values: Mapping[str, float]

    def __str__(self) -> str:
        told = "  ".join(f"{name} {value:.4f}" for name, value in self.values.items())
        return f"[{self.seconds:6.1f} s] clock {self.clock}  {len(self.workers)} workers  {told}".rstrip()


@dataclass(frozen=True)
class Result:
    """`model`: path of model.safetensors in `checkpoint_dir`."""

    model: str
    checkpoint_dir: str
    seconds: float
    clock: int
    values: Mapping[str, float]


def command_of(script: str | Callable[[], Any], args: Sequence[str]) -> list[str]:
    """Return the command that ps-worker runs. Raises UsageError where a function cannot be found by its name."""
    if isinstance(script, str):
        return [script, *args]
    name, file = getattr(script, "__qualname__", ""), inspect.getsourcefile(script)
    if file is None or not name.isidentifier():
        raise UsageError(f"{name or script}: give a function that stands at the top of a file, or the path of a script")
    return ["-m", "narrows.worker.call", os.path.abspath(file), name, *args]


@dataclass
class City:
    """A server and its workers. `low`: as many must be there for the run to start."""

    server: Any
    serves: Any  # reference of its run
    workers: list[Any]
    works: dict[int, Any]  # references of theirs, by index
    group: Any
    low: int


def train(
    script: str | Callable[[], Any],
    args: Sequence[str] = (),
    *,
    workers: int | tuple[int, int],
    shards: int = 1,
    clusters: Sequence[Mapping[str, str]] = (),
    labels: Mapping[str, str] | None = None,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    checkpoint_dir: str = "",
    keys: str = "",
    insecure: bool = False,
    host: str = "",
    restarts: int = 0,
    report: Callable[[Progress], None] | None = print,
    every_s: float = 2.0,
    **run: Any,
) -> Result:
    """Train `script`, a path or a function, and return where the model is.

    workers: (low, high) of each cluster. The run starts with low, and takes in more as there is room for them.
    shards, run: flags of ps-serve, such as sync and compress.
    clusters: label selectors of Ray, one a cluster. Each has a server that runs bsp and is a worker of the one above, which has
    the flags. labels: the selector of the server above, and without clusters of all.
    resources: of each worker, as Ray names them, {"CPU": 1} by default. strategy: of the placement group of a cluster's first
    workers.
    checkpoint_dir: on a disk that all nodes see. A server that is lost goes on from there, and a worker that comes again has
    its optimizer's state from there.
    keys: the folder of ps-serve keys, on such a disk, with members worker and, for each cluster, cluster0 and so on.
    host: where servers listen, the address of the node by default.
    restarts: how often a script that failed is started again.
    report: called with a Progress every `every_s` seconds.

    Raises UsageError, and NarrowsError with the last lines of what failed. A worker whose script fails is done without while
    `low` are left.
    """
    low, high = (workers, workers) if isinstance(workers, int) else workers
    if not 1 <= low <= high:
        raise UsageError(f"workers=({low}, {high}): give 1 <= low <= high")
    name, began = f"narrows-{uuid.uuid4().hex[:8]}", time.monotonic()
    folder = os.path.abspath(checkpoint_dir or f"checkpoints/{name}")
    need = dict(resources or {"CPU": 1})
    asks = command_of(script, args)
    flags = [word for key, value in run.items() for word in ("--" + key.replace("_", "-"), str(value))]
    trust = ["--keys", keys] if keys else ["--insecure"] if insecure or host.startswith(LOOPBACK) else []

    def server(label: str, more: Sequence[str], where: Mapping[str, str] | None, follows: Any = None) -> Any:
        own = folder if follows is None else f"{folder}/{label}"
        words = ["serve", *more, "--shards", str(shards), "--checkpoint-dir", own, "--resume"]
        options = {"lifetime": "detached", "name": f"{name}-{label}", "label_selector": dict(where or {}) or None}
        return _actor(options, {"CPU": 1}, words, "--parent", follows, label, own, host)

    def city(label: str, served: Any, where: Mapping[str, str] | None, key: str, kept: str) -> City:
        selector = dict(where or {})
        group = placement_group([need] * low, strategy, bundle_label_selector=[selector] * low if selector else None)
        words = ["work", *(["--key", f"{keys}/{key}.key"] if key else []), "--restarts", str(restarts)]
        words += ["--checkpoint-dir", kept, *asks]
        actors = []
        for index in range(high):
            inside = {
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            }
            options = inside if index < low else {"label_selector": selector or None}
            actors.append(_actor(options, need, words, "--server", served, f"{label}-{index}"))
        works = {index: actor.run.remote() for index, actor in enumerate(actors)}
        return City(served, served.run.remote(), actors, works, group, low)

    member = "worker" if keys else ""
    if clusters:
        top = server("above", [*trust, *flags, "--workers", str(len(clusters))], labels)
        cities = []
        for number, where in enumerate(clusters):
            key = ["--parent-key", f"{keys}/cluster{number}.key"] if keys else []
            more = [*trust, *key, "--sync", "bsp", "--workers", str(low)]
            below = server(f"city{number}", more, where, top)
            cities.append(city(f"city{number}", below, where, member, f"{folder}/city{number}"))
        above = top.run.remote()
    else:
        top = server("server", [*trust, *flags, "--workers", str(low)], labels)
        cities = [city("worker", top, labels, member, folder)]
        above = cities[0].serves
    try:
        last = _watch(top, above, cities, began, report, every_s)
    finally:
        _end(top, cities)
    model = Path(folder) / "model.safetensors"
    if not model.exists():
        raise NarrowsError(f"the run ended without a model in {folder}")
    return Result(str(model), folder, time.monotonic() - began, last.clock, last.values)


def _actor(options: Mapping[str, Any], need: Mapping[str, float], *words: Any) -> Any:
    """A Keeper that Ray starts again as often as it dies."""
    more = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU")}
    known = {name: value for name, value in options.items() if value is not None}
    return (
        ray.remote(Keeper)
        .options(
            num_cpus=need.get("CPU", 0), num_gpus=need.get("GPU", 0), resources=more, max_restarts=-1,
            max_task_retries=-1, max_concurrency=16, **known,
        )
        .remote(*words)
    )  # fmt: skip


def _watch(
    top: Any, above: Any, cities: list[City], began: float, report: Callable[[Progress], None] | None, every_s: float
) -> Progress:
    """Until the server above and the scripts have ended: these may evaluate and save after their last step. Returns the last
    progress."""
    shown = Progress(0.0, 0, {}, {}, {})
    actors = {("worker", i): actor for i, actor in enumerate(actor for city in cities for actor in city.workers)}
    actors |= {("server", i): actor for i, actor in enumerate(_servers(top, cities))}
    asked: dict[Any, tuple[str, int]] = {}
    waits = [above]  # and the workers that have a node: others may never have one
    while True:
        over = len(ray.wait(waits, num_returns=len(waits), timeout=every_s)[0]) == len(waits)
        shown = _progress(actors, asked, began, shown)
        if report is not None:
            report(shown)
        _ended(above, "the server")
        if over:
            return shown
        waits, first = [above], 0
        for city in cities:
            if city.serves is not above:
                _ended(city.serves, "the server of a cluster")
            for index, work in [*city.works.items()]:
                try:
                    _ended(work, f"worker {index}")
                except NarrowsError:
                    del city.works[index]
                    if len(city.works) < city.low:
                        raise
                else:
                    waits += [work] if first + index in shown.workers else []
            first += len(city.workers)


def _ended(reference: Any, who: str) -> None:
    """Raise NarrowsError where this command has ended with an error."""
    if ray.wait([reference], timeout=0)[0]:
        code, said = ray.get(reference)
        if code:
            raise NarrowsError(f"{who} ended with exit code {code}: {said}")


def _servers(top: Any, cities: Iterable[City]) -> list[Any]:
    """Each of them once, that of the run first."""
    return [top, *(city.server for city in cities if city.server is not top)]


def _progress(
    actors: Mapping[tuple[str, int], Any], asked: dict[Any, tuple[str, int]], began: float, before: Progress
) -> Progress:
    """Ask each actor how far it is, and wait for half a second: one that has no node yet does not answer."""
    for which, actor in actors.items():
        if which not in asked.values():
            asked[actor.facts.remote()] = which
    answered: dict[str, dict[int, Facts]] = {"worker": {}, "server": {}}
    for reference in ray.wait([*asked], num_returns=len(asked), timeout=0.5)[0]:
        kind, index = asked.pop(reference)
        with contextlib.suppress(ray.exceptions.RayError):
            answered[kind][index] = ray.get(reference)
    steps = [facts.last for facts in answered["worker"].values() if facts.last]
    names = [name for name in (steps[0] if steps else ()) if name not in OURS]
    return Progress(
        time.monotonic() - began,
        max([before.clock, *(int(step["clock"]) for step in steps)]),
        answered["worker"],
        answered["server"],
        {name: _mean(step[name] for step in steps if name in step) for name in names} or before.values,
    )


def _mean(values: Iterable[float]) -> float:
    each = [*values]
    return sum(each) / len(each)


def _end(top: Any, cities: Sequence[City]) -> None:
    """Nothing of the run is left."""
    for server in _servers(top, cities):
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(server.stop.remote(), timeout=END_S)
        ray.kill(server)
    for city in cities:
        for actor in city.workers:
            ray.kill(actor)
        remove_placement_group(city.group)
