"""Train on a Ray cluster: `train` starts the server and the workers of a run as actors, and waits for the model.

Rules
- Each actor keeps one command, ps-serve or ps-worker, running on its node (ray_actor.py).
- If an actor dies, alone or with its node, Ray starts it again, and the others go on. A server resumes from its newest
  checkpoint.
- If a worker loses its server, it asks the server's actor for the present address. So the server may move to another
  node.
- Ray pickles the arguments of actors, and nothing else is pickled. A function is called by its name in its file, which
  each node must have.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from narrows.protocols.config.checkpoint_names import MODEL
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.protocols.runtime.cli import flags
from narrows.protocols.runtime.cli.output import STDERR, set_aside
from narrows.worker.command.record import OURS
from narrows.worker.integrations.ray_actor import END_S, THREADS, WAITERS, CommandActor, NodeFacts
from narrows.worker.integrations.ray_cities import Bounds, RayLimits, cities_of, command_of, run_flags

LOOPBACK = ("127.", "localhost", "[::1]")
ANSWER_S = 0.5  # how long one question to all actors waits for their answers
PART_BYTES = 1 << 26  # bytes of a model that one call copies
LAST_S = 10.0  # how long the last question waits, once the run is over
SILENT_S = 30.0  # an actor that has not answered for so long counts as one without a node


@dataclass(frozen=True)
class Progress:
    """The progress of the run, for `report`.

    Attributes:
        seconds: time since train() began.
        clock: the clock of the run.
        workers: facts of the workers that have answered, by index.
        servers: facts of the servers that have answered, by index.
        values: means of the newest recorded values over the workers.
        nodeless: workers for which no node has room yet.
    """

    seconds: float
    clock: int
    workers: Mapping[int, NodeFacts]
    servers: Mapping[int, NodeFacts]
    values: Mapping[str, float]
    nodeless: int = 0

    @property
    def waits(self) -> str:
        """A clause that says for which workers the run waits; "": none."""
        said = dict.fromkeys(facts.waits for facts in self.servers.values() if facts.waits)
        without = (
            [f"{self.nodeless} worker{'s have' if self.nodeless > 1 else ' has'} no node"] if self.nodeless else []
        )
        return "; ".join([*said, *(without if said else [])])  # a run that has begun does not wait for more workers

    def __str__(self) -> str:
        text = "  ".join(f"{name} {value:.4f}" for name, value in self.values.items())
        waits = f"  {self.waits}" if self.waits else ""
        return f"[{self.seconds:6.1f} s] clock {self.clock}  {len(self.workers)} workers{waits}  {text}".rstrip()


@dataclass(frozen=True)
class Result:
    """The result of `train`.

    Attributes:
        model: the path of model.safetensors in `checkpoint_dir`.
        checkpoint_dir: the folder of the run's checkpoints.
        seconds: the time that train() took.
        clock: the last clock of the run.
        values: means of the last recorded values over the workers.
    """

    model: str
    checkpoint_dir: str
    seconds: float
    clock: int
    values: Mapping[str, float]


@dataclass(eq=False)
class KeptActor:
    """The handle of one `CommandActor`, which keeps one command running."""

    who: str  # the actor's name in errors
    actor: Any  # the handle that Ray returned
    city: int = 0  # the index of the actor's cluster
    ends: Any = field(init=False)  # reference of Ray to the result of the command
    asked: Any = None  # reference of Ray to the answer to the newest question; None: no question is open
    asked_s: float = 0.0  # the time of that question, monotonic seconds

    def __post_init__(self) -> None:
        self.ends = self.actor.run.remote()

    def ask(self, now: float) -> None:
        if self.asked is None:
            self.asked, self.asked_s = self.actor.facts.remote(), now

    def owes_s(self, now: float) -> float:
        """Return for how many seconds the actor has not answered."""
        return 0.0 if self.asked is None else now - self.asked_s

    def silent(self, now: float) -> bool:
        """Return whether the actor counts as one without a node."""
        return self.owes_s(now) > SILENT_S

    def ended(self) -> tuple[int, str] | None:
        """Return exit code and last lines of the command; None until the command has ended for good."""
        ended: tuple[int, str] | None = ray.get(self.ends) if ray.wait([self.ends], timeout=0)[0] else None
        return ended


@dataclass
class Actors:
    """All actors of a run: servers, the root first, and workers of all clusters. `Progress` uses the same indices.

    Attributes:
        lows: for each cluster, the number of workers that must not fail.
    """

    lows: Sequence[int]
    servers: list[KeptActor] = field(default_factory=list)
    workers: list[KeptActor] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)  # placement groups of Ray, removed at the end
    folder: str = ""  # the folder of the checkpoints

    def at_work(self, now: float) -> list[KeptActor]:
        """Return the workers whose scripts still run."""
        return [kept for kept in self.workers if not kept.silent(now) and kept.ended() is None]

    def check(self, now: float, room_s: float) -> None:
        """Check that the run can go on. An actor without a node for `room_s` seconds counts as failed.

        Raises:
            NarrowsError: a server has failed, or fewer workers than its `low` are left in a cluster.
        """
        failed: dict[KeptActor, str] = {}
        for kept in (*self.servers, *self.workers):
            if ended := kept.ended():
                failed |= {kept: f"ended with exit code {ended[0]}: {ended[1]}"} if ended[0] else {}
            elif kept.owes_s(now) > room_s:
                failed[kept] = (
                    f"has had no node for {room_s:.0f} s: add a node with its labels and room for it, or give a larger room_s"
                )
        for kept, why in failed.items():
            left = sum(other.city == kept.city and other not in failed for other in self.workers)
            if kept in self.servers or left < self.lows[kept.city]:
                raise NarrowsError(f"{kept.who} {why}")

    def progress(self, began: float, before: Progress, limit_s: float) -> Progress:
        """Ask each actor for its facts, and return the progress of the run.

        Args:
            began: the time at which train() began, monotonic seconds.
            before: the progress so far; its clock and values stand in for answers that are missing.
            limit_s: the longest wait for the actors. Silent actors are not waited for.
        """
        now, every = time.monotonic(), [*self.servers, *self.workers]
        for kept in every:
            kept.ask(now)
        awaited = [kept.asked for kept in every if not kept.silent(now)]
        ray.wait(awaited, num_returns=len(awaited), timeout=limit_s)
        workers, servers = _answers(self.workers), _answers(self.servers)
        steps = [facts.last for facts in workers.values() if facts.last]  # without a step: what the script recorded
        names = {name: None for step in steps for name in step if name not in OURS}
        return Progress(
            time.monotonic() - began,
            max([before.clock, *(int(step["clock"]) for step in steps if "clock" in step)]),
            workers,
            servers,
            {name: _mean(step[name] for step in steps if name in step) for name in names} or before.values,
            sum(kept.silent(now) for kept in self.workers),
        )

    def close(self) -> None:
        """End all actors and placement groups of the run. Servers that answer write a checkpoint first."""
        now = time.monotonic()
        for kept in self.servers:
            if not kept.silent(now):
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(kept.actor.stop.remote(), timeout=END_S)
            ray.kill(kept.actor)
        for kept in self.workers:
            ray.kill(kept.actor)
        for group in self.groups:
            remove_placement_group(group)


def train(
    script: str | Callable[[], Any],
    args: Sequence[str] = (),
    *,
    workers: Bounds | None = None,
    shards: int = 1,
    clusters: Sequence[Mapping[str, Any]] = (),
    labels: Mapping[str, str] | None = None,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    checkpoint_dir: str = "",
    steps: int = 0,
    keys: str = "",
    insecure: bool = False,
    host: str = "",
    restarts: int = 0,
    report: Callable[[Progress], None] | None = print,
    every_s: float = 2.0,
    room_s: float = 1800.0,
    after_s: float = 600.0,
    **run: Any,
) -> Result:
    """Train a script on a Ray cluster, and return where the model is.

    If a worker's script fails, the run goes on without that worker as long as `low` workers are left.

    Args:
        script: a path, or a function.
        workers: the number of workers, or (low, high): the run starts with low workers, and admits more as nodes have
            room for them. With `clusters` it holds for each cluster without a number of its own.
        shards, run: flags of ps-serve, such as sync and compress, and journal. None: not given.
        clusters: one {"labels": a label selector of Ray, "workers": a number, or (low, high)} for each cluster; both
            entries may be left out. Each cluster has a server that runs bsp, and is a worker of the root, which has the
            flags.
        labels: the label selector of the root; without clusters, of all actors.
        resources: the resources of each worker, as Ray names them; {"CPU": 1} by default.
        strategy: the strategy of the placement group of a cluster's first workers.
        checkpoint_dir: a folder on a disk of all nodes. A lost server resumes from it, and a restarted worker takes its
            optimizer's state from it. If a run has ended there, train() refuses it, unless that run has taken fewer
            than `steps` steps. If the server's node has another disk, a line on stderr says so at the start, and the
            model is copied at the end.
        keys: the folder of ps-serve keys, on such a disk, with members worker and, for each cluster, cluster0 and so
            on.
        host: the address on which servers listen; by default that of their node.
        restarts: how often a failed script is started again.
        report: called with a Progress every `every_s` seconds.
        room_s: seconds that a server, or one of the `low` workers of a cluster, may be without a node. A cluster that
            creates nodes on demand needs as long as that takes. If the caller of train() is killed, the server ends
            after as many seconds, with a checkpoint; so `report` must not take that long.
        after_s: seconds that scripts have to evaluate and save after the root has ended. After that, scripts that still
            run are ended, a line on stderr names their workers, and train() returns: the model is written by then.

    Raises:
        UsageError: an argument is wrong.
        NarrowsError: a server or too many workers have failed; it has their last lines.
    """
    cities, limits = cities_of(clusters, workers, labels), RayLimits(every_s, room_s, after_s)
    words = run_flags(run, workers=len(clusters) or cities[0].low, shards=shards)
    name, began = f"narrows-{uuid.uuid4().hex[:8]}", time.monotonic()
    if "://" in checkpoint_dir:
        raise UsageError(f"checkpoint_dir {checkpoint_dir}: on Ray name a folder on a disk that all nodes see")
    folder = os.path.abspath(checkpoint_dir or f"checkpoints/{name}")
    need = dict(resources or {"CPU": 1})
    named = flags.words({"name": run.get("name")})
    asks = command_of(script, args)
    trust = ["--keys", keys] if keys else ["--insecure"] if insecure or host.startswith(LOOPBACK) else []

    actors = Actors([city.low for city in cities], folder=folder)

    mark = _marked(folder, name)

    def server(label: str, who: str, more: Sequence[str], where: Mapping[str, str] | None, above: Any = None) -> Any:
        own = folder if above is None else f"{folder}/{label}"
        words = ["serve", *more, "--checkpoint-dir", own, "--resume", "--run-id", name, "--steps", str(steps)]
        options = {"lifetime": "detached", "name": f"{name}-{label}", "label_selector": dict(where or {}) or None}
        actor = _actor(options, {"CPU": 1}, words, "--parent", above, label, own, host, room_s, mark)
        actors.servers.append(KeptActor(who, actor))
        return actor

    def staff(number: int, label: str, served: Any, key: str, own: str) -> None:
        low, selector = cities[number].low, dict(cities[number].labels)
        group = placement_group([need] * low, strategy, bundle_label_selector=[selector] * low if selector else None)
        actors.groups.append(group)
        words = ["work", *(["--key", f"{keys}/{key}.key"] if key else []), "--restarts", str(restarts)]
        words += ["--checkpoint-dir", own, *named, *asks]
        for index in range(cities[number].high):
            inside = {
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            }
            options = inside if index < low else {"label_selector": selector or None}
            worker = len(actors.workers)
            actor = _actor(options, need, words, "--server", served, f"{label}-{worker}")
            actors.workers.append(KeptActor(f"worker {worker}", actor, number))

    member = "worker" if keys else ""
    above = [*trust, *words]
    try:
        if clusters:
            top = server("above", "the server", above, labels)
            for number, city in enumerate(cities):
                key = ["--parent-key", f"{keys}/cluster{number}.key"] if keys else []
                more = [*trust, *key, *named, *run_flags({"sync": "bsp"}, workers=city.low, shards=shards)]
                label = f"city{number}"
                below = server(label, f"the server of cluster {number}", more, city.labels, top)
                staff(number, label, below, member, f"{folder}/{label}")
        else:
            staff(0, "worker", server("server", "the server", above, labels), member, folder)
        last = _watch(actors, began, report, limits)
        model = Path(folder) / MODEL
        _fetch(actors.servers[0], last.servers.get(0), model)
    finally:
        actors.close()
        Path(mark).unlink(missing_ok=True)
    if not model.exists():
        raise NarrowsError(f"the run ended without a model in {folder}")
    return Result(str(model), folder, time.monotonic() - began, last.clock, last.values)


def _actor(options: Mapping[str, Any], need: Mapping[str, float], *words: Any) -> Any:
    """Start a `CommandActor`, which Ray starts again each time it dies.

    Args:
        options: options of Ray; a value of None is left out.
        need: the resources of the actor, as Ray names them.
        words: the arguments of the constructor of CommandActor.
    """
    more = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU")}
    known = {name: value for name, value in options.items() if value is not None}
    return (
        ray.remote(concurrency_groups=WAITERS)(CommandActor)
        .options(
            num_cpus=need.get("CPU", 0), num_gpus=need.get("GPU", 0), resources=more, max_restarts=-1,
            max_task_retries=-1, max_concurrency=THREADS, **known,
        )
        .remote(*words)
    )  # fmt: skip


def _marked(folder: str, name: str) -> str:
    """Make the folder, and a file in it. A server that sees the file is on a node with the same disk.

    Returns:
        The path of the file.

    Raises:
        UsageError: the folder cannot be written.
    """
    mark = Path(folder) / f".{name}"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UsageError(
            f"checkpoint_dir {folder}: {error.strerror}; name a folder on a disk that all nodes see"
        ) from None
    return str(mark)


def _warn(folder: str, facts: NodeFacts) -> None:
    STDERR.line(
        f"narrows: checkpoint_dir {folder} is on another disk on node {facts.node}, where the server is. The model is "
        "copied from there at the end. A server whose node is lost begins anew: name a folder that all nodes see"
    )


def _fetch(server: KeptActor, facts: NodeFacts | None, model: Path) -> None:
    """Copy the model from a server whose node has another disk. If the copy fails, no part of it stays."""
    if facts is None or facts.shares:
        return
    part, coming = server.actor.part, model.with_name(f"{model.name}.{os.getpid()}.tmp")
    try:
        with coming.open("wb") as file:
            while data := ray.get(part.remote(MODEL, file.tell(), PART_BYTES)):
                file.write(data)
            size = file.tell()
        set_aside(model)  # a model of an earlier run
        if size:
            coming.replace(model)
    finally:
        coming.unlink(missing_ok=True)


def _watch(actors: Actors, began: float, report: Callable[[Progress], None] | None, limits: RayLimits) -> Progress:
    """Wait until the root's server and the scripts have ended. Scripts may evaluate and save after their last step.

    Returns:
        The last progress.

    Raises:
        NarrowsError: a server or too many workers have failed.
    """
    shown, until, warned, ended = Progress(0.0, 0, {}, {}, {}), math.inf, False, False
    while True:
        now, server = time.monotonic(), actors.servers[0]
        at_work, served = actors.at_work(now), server.ended() is not None
        until = min(until, now + limits.after_s) if served else until
        if served and not ended:  # a worker that has not joined would ask for the server until its limit
            ended = True
            for kept in actors.workers:
                kept.actor.without_server.remote()
        over = served and (not at_work or now >= until)
        if over:  # ask again: an answer that is under way may be older than the script's last record
            for kept in actors.workers:
                kept.asked = kept.asked if kept.silent(now) else None
        shown = actors.progress(began, shown, LAST_S if over else ANSWER_S)
        if not warned and (facts := shown.servers.get(0)) is not None and not facts.shares:
            warned = True
            _warn(actors.folder, facts)
        if report is not None:
            report(shown)
        actors.check(now, math.inf if served else limits.room_s)  # after the server's end no worker needs a node
        if over and at_work:
            names = " and ".join(kept.who for kept in at_work)
            text = f"narrows: {names} went on for {limits.after_s:.0f} s after the server had ended."
            more = "train ends that; the model is written. A larger after_s gives scripts longer"
            STDERR.line(f"{text} {more}")
        if over:
            return shown
        waits = [server.ends, *(kept.ends for kept in at_work)]
        ray.wait(waits, num_returns=len(waits), timeout=max(0.0, min(limits.every_s, until - now)))


def _answers(every: Sequence[KeptActor]) -> dict[int, NodeFacts]:
    """Return the answers that have arrived, by index of the actor. Those actors are asked again next time."""
    facts: dict[int, NodeFacts] = {}
    for index, kept in enumerate(every):
        if ray.wait([kept.asked], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                facts[index] = ray.get(kept.asked)
            kept.asked = None
    return facts


def _mean(values: Iterable[float]) -> float:
    each = [*values]
    return sum(each) / len(each)
