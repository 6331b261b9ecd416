"""The modes and SPECs that a plan may give to a level, and how many more steps each takes to a loss.

docs/planning.md has both.

Rules
- Each row is a mode that docs/archive/results-0.1.md has measured: losses of the byte GPT with 2, 4, 8 and 16 children of
  a server.
- A level with one child costs no steps, because no updates are averaged there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from narrows.compression import ladder
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.settings import Settings

COUNTS = (2, 4, 8, 16)  # numbers of children with which losses were measured
# Loss over bsp's of ssp with topk:0.11+sign for each of COUNTS, after 400 steps, each at its best learning rate. A row
# that was not measured with so many children is taken to lose as much more from one count to the next.
GROWS = (0.0, 0.028, 0.077, 0.145)
# Likewise of bsp whose children push updates, with int4 both ways (bench/loss/run_jobs.py, over 1.827, bsp's loss there).
UPDATES = (0.0, 0.011, 0.017, 0.019)
# Steps to a loss of 2.1 over those of bsp are (1 + loss over bsp)^4.7: five rows of bench/contenders/wan.py agree within 13 %.
STEPS_POWER = 4.7


DEFAULTS = {field.name: field.default for field in fields(Settings)}  # of the flags


@dataclass(frozen=True)
class ModeAndSpec:
    """The mode and SPEC of one level, with its measured losses."""

    sync: str  # the mode, as in --sync
    over: tuple[float, ...]  # the loss over bsp's, as a share, for the first of COUNTS
    compress: str = "dense"  # the SPEC
    staleness: int = -1  # -1: the mode's default
    local_steps: int = -1  # -1: the mode's default
    push: str = ""  # "update": as --push has it, with the SPEC both ways; "": the mode's default

    def flags(self, updates: bool = False) -> dict[str, Any]:
        """Return the flags of ps-serve, as Settings names them.

        `updates` is true where the server's children are clusters.
        """
        given = {"staleness": self.staleness, "local_steps": self.local_steps, "compress": self.compress}
        given["push"] = "update" if updates and self.sync == "bsp" else self.push
        given["compress_down"] = self.compress if self.push else ""
        return {"sync": self.sync} | {name: value for name, value in given.items() if value != DEFAULTS[name]}

    @property
    def own_optimizers(self) -> bool:
        """True if each child has an optimizer of its own, of whose updates the server takes the mean."""
        return self.sync != "bsp" or self.push == "update"

    @cached_property
    def mode(self) -> Mode:
        return Settings(**self.flags()).validated().mode()

    @cached_property
    def inside(self) -> int:
        """Updates of each worker that are in flight inside a cluster while the cluster waits for its parent.

        The value is 1 where the workers wait too. Dense states count as 1, because they overlap less than the closed
        form for several updates would say.
        """
        return 1 if ladder(self.compress).raw else self.mode.window

    def steps(self, children: int) -> float:
        """Return the steps to a loss as a multiple of bsp's.

        Between two of COUNTS the loss is linear in the logarithm.
        """
        if children < 2 or not self.own_optimizers:
            return 1.0
        rest = len(self.over) - 1
        over = [*self.over, *(self.over[-1] + grows - GROWS[rest] for grows in GROWS[rest + 1 :])]
        doublings = math.log2(children) - 1
        low = min(int(doublings), len(over) - 2)  # above 16 children the loss grows as from 8 to 16
        found: float = (1 + over[low] + (doublings - low) * (over[low + 1] - over[low])) ** STEPS_POWER
        return found

    def __str__(self) -> str:
        bound = f", S = {self.staleness}" if self.staleness > 0 else ""
        steps = f", H = {self.local_steps}" if self.local_steps > 0 else ""
        push = f", push {self.push}" if self.push else ""
        return f"{self.sync}{bound}{steps}{push}, {self.compress}"


# bsp as a run has it whose children push updates: clusters, or a run that changes to bsp while it runs.
# With 16 children dense measured as int4 does, within what seeds differ by; with 4 it loses no more than a clock late.
DENSE_UPDATES = ModeAndSpec("bsp", (0.0, 0.002, *UPDATES[2:]), push="update")
WAYS = (
    ModeAndSpec("bsp", (0.0,)),  # equal to one process
    ModeAndSpec("ssp", (0.0, 0.002, 0.031, 0.077), staleness=1),
    ModeAndSpec("ssp", (0.0, 0.002, 0.031, 0.088), "int4", staleness=1),  # with 4 and 8 as dense
    ModeAndSpec("ssp", GROWS, "topk:0.11+sign", staleness=1),
    ModeAndSpec("ssp", (0.004,), "topk:0.11+sign", staleness=2),
    ModeAndSpec("ssp", (0.018,), "cycle:0.25/0.24+sign", staleness=1),
    ModeAndSpec("ssp", (0.041,), "cycle:0.15+sign", staleness=2),
    ModeAndSpec("ssp", (0.068,), "cycle:0.09+sign", staleness=4),
    ModeAndSpec("ssp", (0.079,), "cycle:0.06+sign", staleness=3),
    ModeAndSpec("ssp", (0.099,), "cycle:0.03+sign", staleness=2),
    # Without a link async measured -0.2 and 3.9 %. With a link four updates are in flight, as late as dense with four
    # clocks: 7.2 %.
    ModeAndSpec("async", (0.072, 0.111), "topk:0.11+sign"),
    ModeAndSpec("local", (0.083, 0.177, 0.26), local_steps=50),
    ModeAndSpec("bsp", UPDATES, "int4", push="update"),
    ModeAndSpec("bsp", (0.0, 0.03, 0.038, 0.048), "topk:0.5+sign", push="update"),
)
BELOW = tuple(way for way in WAYS if way.sync in ("bsp", "ssp"))  # inside a cluster
IN_RUN = (DENSE_UPDATES, *(way for way in BELOW if way.own_optimizers))  # to which a run changes while it runs
