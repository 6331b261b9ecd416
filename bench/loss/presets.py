"""The runs of bench/loss/convergence.py: tasks, rows of a table, and the presets that name them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from lab import launch


@dataclass(frozen=True)
class Task:
    """A script of bench/tasks. It records the figure `metric`, and ends its last line with the value of it."""

    name: str
    metric: str
    steps: int
    steps_per_epoch: int = 0  # 0: the script takes --steps
    beta1: float | None = None  # of its AdamW; None: it has no such flag

    def arguments(self, steps: int, seed: int) -> list[str]:
        flag = ["--epochs", steps // self.steps_per_epoch] if self.steps_per_epoch else ["--steps", steps]
        return [str(launch.ROOT / "bench" / "tasks" / f"{self.name}.py"), *map(str, flag), "--seed", str(seed)]

    def rounded(self, steps: int) -> int:
        """Round down to whole epochs, one at least: the script runs nothing else."""
        whole = self.steps_per_epoch or 1
        return max(1, steps // whole) * whole


@dataclass(frozen=True)
class Row:
    """A row of the table: flags of ps-serve, a row of wan.py, or neither for the single process."""

    name: str
    flags: tuple[str, ...] = ()
    script: tuple[str, ...] = ()  # further arguments of the script
    wan: str = ""  # a row of wan.py, run without a link
    clusters: int = 0  # so many clusters with bsp inside, which share the workers evenly; 0: workers alone
    start: str = "0.0028"  # the rate at which a tuned row begins
    rate: str = ""  # its peak; "": the script's own


SINGLE, DENSE = Row("single process"), Row("bsp", ("--sync", "bsp"))


def ssp(staleness: int, compress: str) -> Row:
    flags = ("--sync", "ssp", "--staleness", str(staleness), "--compress", compress)
    return Row(f"ssp, s = {staleness}, {compress}", flags)


def between(clusters: int, row: Row, name: str) -> Row:
    """The mode and SPEC of `row` between clusters, instead of workers."""
    return replace(row, name=f"{clusters} clusters, {name}", clusters=clusters)


@dataclass(frozen=True)
class Preset:
    tasks: tuple[Task, ...]
    workers: int
    rows: tuple[Row, ...]
    tuned: bool = False  # each row at its own best rate


LOCAL_SGD = ("--outer-lr", "1", "--outer-momentum", "0")  # updates are added as they come, as in ssp


def pushed(compress: str, local_steps: int = 1, staleness: int = 1) -> Row:
    """A row with updates of the workers' own optimizers; `compress` codes both ways."""
    mode = ("ssp",) if local_steps == 1 else ("local", "--local-steps", str(local_steps), *LOCAL_SGD)
    flags = ("--sync", *mode, "--staleness", str(staleness), "--compress", compress)
    parts = [compress]
    if local_steps > 1:
        parts.append(f"H = {local_steps}")
    if staleness != 1:
        parts.append(f"s = {staleness}")
    return Row(", ".join(parts), flags)


TABLE = (
    *(pushed(spec) for spec in ("dense", "topk:0.05+int8", "sign", "topk:0.01+int8", "cycle:0.15+sign")),
    pushed("topk:123/4096+2bit", 4, 0),
)

# The rates that a tuned row may run at: each row is tuned by itself (`climb`).
RATES = (
    *("0.00035", "0.0005", "0.0007", "0.001", "0.0014", "0.002"),
    *("0.0028", "0.004", "0.0056", "0.008", "0.0113", "0.016"),
)


def climb(start: str, loss_at: Callable[[str], float | None]) -> None:
    """Call `loss_at` with rates of RATES, from `start` on up and down, until the best rate has a worse one on either side.

    A loss of None stands for a run that failed, and is worse than any other.
    """
    losses: dict[int, float] = {}
    todo = [RATES.index(start)]
    while todo:
        for place in todo:
            loss = loss_at(RATES[place])
            losses[place] = math.inf if loss is None else loss
        best = min(losses, key=lambda place: losses[place])
        todo = [place for place in (best - 1, best + 1) if 0 <= place < len(RATES) and place not in losses]


LOCAL = Row("local, H = 50", ("--sync", "local", "--local-steps", "50"), start="0.002")


def muon(row: Row) -> Row:
    return replace(row, name=f"{row.name}, muon", script=("--optimizer", "muon"), start="0.0056")


def at_rate(row: Row, rate: str) -> Row:
    return replace(row, rate=rate, script=(*row.script, "--lr", rate))


CONTENDERS = (
    SINGLE,
    DENSE,
    *(ssp(1, spec) for spec in ("dense", "topk:0.05+int8", "topk:0.11+sign")),
    ssp(2, "cycle:0.15+sign"),
    Row("async, topk:0.11+sign", ("--sync", "async", "--compress", "topk:0.11+sign")),
    LOCAL,
    replace(LOCAL, name="local, H = 50, 2bit", flags=(*LOCAL.flags, "--compress", "2bit")),
    replace(LOCAL, name="local, H = 50, 5 fragments", flags=(*LOCAL.flags, "--fragments", "5", "--merge-delay", "8")),
    Row("gossip, topk:0.05+int8", ("--sync", "gossip", "--compress", "topk:0.05+int8")),
    Row("PowerSGD, rank 4", wan="ddp powersgd-4"),
    Row("torchft DiLoCo, H = 50", wan="torchft diloco H=50", start="0.002"),
    Row("two cities of 2, topk:0.11+sign between", wan="two cities (README), 2 workers each"),
    *(muon(row) for row in (SINGLE, ssp(1, "topk:0.11+sign"), ssp(2, "cycle:0.15+sign"), LOCAL)),
)

START = ("--start-steps", "40", "--start-compress", "int4")  # as long as the warm-up of the rate


def without_delay(compress: str, *more: str) -> Row:
    """Each worker's own optimizer makes its updates, and all wait for the mean of them, both ways through `compress`."""
    flags = ("--sync", "bsp", "--push", "update", "--compress", compress, "--compress-down", compress)
    return Row(", ".join(("bsp, push update", compress, *["start of 40"] * bool(more))), (*flags, *more))


MANY = (
    replace(DENSE, start="0.004"),
    *(without_delay(spec, *start) for start in ((), START) for spec in ("int4", "topk:0.5+sign")),
    ssp(1, "topk:0.11+sign"),
    *(between(clusters, ssp(1, "topk:0.11+sign"), "topk:0.11+sign between") for clusters in (4, 2)),
    *(
        between(4, without_delay(spec), f"{spec} between, without delay")
        for spec in ("topk:0.11+sign", "topk:0.5+sign")
    ),
)

BYTELM = Task("bytelm", "loss", 400, beta1=0.9)
MNIST5K = Task("mnist5k", "accuracy", 744, steps_per_epoch=62)
MODES = (SINGLE, *(Row(mode, ("--sync", mode)) for mode in ("bsp", "ssp", "async", "local")))

PRESETS = {
    "modes": Preset(
        (MNIST5K, Task("digits", "accuracy", 600)),
        workers=4,
        rows=MODES,
    ),
    "compress": Preset(
        (BYTELM, MNIST5K),
        workers=2,
        rows=(SINGLE, DENSE, *TABLE),
    ),
    "many": Preset(
        (BYTELM,),
        workers=16,
        rows=MANY,
        tuned=True,
    ),
    "tuned": Preset(
        (BYTELM,),
        workers=2,
        rows=CONTENDERS,
        tuned=True,
    ),
}
