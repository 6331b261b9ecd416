"""The modes and SPECs that a plan may give to a level: the rows of compression/losses.py, as flags of ps-serve.

docs/planning.md has them.

Rules
- A level with one child costs no steps, because no updates are averaged there.
- Under `local` with `--outer iso` each shard computes for a while at the end of a round (`outer_s`), and workers wait.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any

from narrows.compression import ladder, losses
from narrows.compression.losses import MeasuredLoss
from narrows.protocols.config.key_ranges import TENSORS, VALUES
from narrows.protocols.config.modes import ISO, Mode
from narrows.protocols.config.settings import Settings

DEFAULTS = {field.name: field.default for field in fields(Settings)}  # of the flags
# Seconds of one core for equal singular values of a transformer's matrices, over parameters x width: the six matrices of a
# block of width 504 take 0.28 s. The width is about (ISO_SIDE x parameters)^(1/3): 1.3 M have 160, 31 M 504, 7 B 4,096.
ISO_S, ISO_SIDE = 1.8e-10, 5.0


@dataclass(frozen=True)
class ModeAndSpec(MeasuredLoss):
    """The mode and SPEC of one level, with its measured losses."""

    @classmethod
    def of(cls, row: MeasuredLoss) -> ModeAndSpec:
        return cls(*astuple(row))

    def flags(self, updates: bool = False) -> dict[str, Any]:
        """Return the flags of ps-serve, as Settings names them.

        `updates` is true where the server's children are clusters.
        """
        given = {"staleness": self.staleness, "local_steps": self.local_steps, "compress": self.compress}
        given |= {"outer": self.outer, "cut": self.cut}
        given["push"] = "update" if updates and self.sync == "bsp" else self.push
        given["compress_down"] = self.down if self.push else self.compress_down
        return {"sync": self.sync} | {name: value for name, value in given.items() if value != DEFAULTS[name]}

    @property
    def cut(self) -> str:
        """Where shards begin. A cluster's shards begin where those of its parent do."""
        return TENSORS if self.outer == ISO else VALUES

    @cached_property
    def mode(self) -> Mode:
        return Settings(**self.flags()).validated().mode()

    @cached_property
    def inside(self) -> int:
        """Updates of each worker that are in flight inside a cluster while the cluster waits for its parent.

        The value is 1 where the workers wait too. Dense states count as 1, because they overlap less than the closed
        form for several updates would say.
        """
        return 1 if ladder(self.down).raw else self.mode.window

    def outer_s(self, parameters: float) -> float:
        """Return the seconds that one core computes for the outer step of a round, beside adding: an estimate."""
        return ISO_S * parameters * (ISO_SIDE * parameters) ** (1 / 3) if self.outer == ISO else 0.0

    def __str__(self) -> str:
        bound = f", S = {self.staleness}" if self.staleness > 0 else ""
        steps = f", H = {self.local_steps}" if self.local_steps > 0 else ""
        push = f", push {self.push}" if self.push else ""
        outer = f", outer {self.outer}" if self.outer else ""
        down = f", {self.compress_down} down" if self.compress_down else ""
        return f"{self.sync}{bound}{steps}{push}{outer}, {self.compress}{down}"


# bsp as a run has it whose children push updates: clusters, or a run that changes to bsp while it runs.
DENSE_UPDATES = ModeAndSpec.of(losses.DENSE_UPDATES)
WAYS = tuple(map(ModeAndSpec.of, losses.LOSSES))
BELOW = tuple(way for way in WAYS if way.sync in ("bsp", "ssp"))  # inside a cluster
IN_RUN = (DENSE_UPDATES, *(way for way in BELOW if way.own_optimizers))  # to which a run changes while it runs
