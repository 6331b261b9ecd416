"""The modes and SPECs that a plan may give to a level, and how many more steps each takes to a loss. docs/planning.md has both.

Rules
- A row is a mode that docs/results.md has measured: losses of the byte GPT with 2, 4, 8 and 16 children of a server.
- A level of one child costs no steps: nobody is averaged with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from narrows.protocols.config.modes import Mode
from narrows.protocols.config.settings import Settings

COUNTS = (2, 4, 8, 16)  # children that a loss was measured with
# ssp, topk:0.11+sign: 400 steps over bsp, each at its best rate. Who was not measured with so many children loses as much more.
GROWS = (0.0, 0.028, 0.077, 0.145)
# Steps to a loss of 2.1 over those of bsp are (1 + loss over bsp)^4.7: five rows of bench/contenders/wan.py agree within 13 %.
STEPS_POWER = 4.7


@dataclass(frozen=True)
class ModeAndSpec:
    """One row. `over`: the loss over bsp's, of the first of COUNTS."""

    sync: str
    over: tuple[float, ...]
    compress: str = "dense"
    staleness: int = -1
    local_steps: int = -1

    def flags(self, updates: bool = False) -> dict[str, Any]:
        """Flags of ps-serve, as Settings names them. `updates`: the server's children are clusters."""
        given = {"sync": self.sync, "staleness": self.staleness, "local_steps": self.local_steps}
        given |= {"compress": self.compress if self.compress != "dense" else -1}
        given |= {"push": "update" if updates and self.sync == "bsp" else -1}
        return {name: value for name, value in given.items() if value != -1}

    @cached_property
    def mode(self) -> Mode:
        return Settings(**self.flags()).validated().mode()

    @cached_property
    def inside(self) -> int:
        """Updates of each worker in flight inside a cluster of this way, while it waits for the level above. 1: workers wait,
        too. States that come whole overlap less than the closed form of more would say."""
        return self.mode.window if self.compress != "dense" else 1

    def steps(self, children: int) -> float:
        """How many times the steps of bsp it takes to a loss. Between two of COUNTS a loss is linear in the logarithm."""
        if children < 2 or self.sync == "bsp":
            return 1.0
        rest = len(self.over) - 1
        over = [*self.over, *(self.over[-1] + grows - GROWS[rest] for grows in GROWS[rest + 1 :])]
        doublings = math.log2(children) - 1
        low = min(int(doublings), len(over) - 2)  # above 16 it goes on as from 8 to 16
        found: float = (1 + over[low] + (doublings - low) * (over[low + 1] - over[low])) ** STEPS_POWER
        return found

    def __str__(self) -> str:
        bound = f", S = {self.staleness}" if self.staleness > 0 else ""
        steps = f", H = {self.local_steps}" if self.local_steps > 0 else ""
        return f"{self.sync}{bound}{steps}, {self.compress}"


WAYS = (
    ModeAndSpec("bsp", (0.0,)),  # equal to one process
    ModeAndSpec("ssp", (0.0, 0.002, 0.031, 0.077), staleness=1),
    ModeAndSpec("ssp", (0.0,), "int4", staleness=1),
    ModeAndSpec("ssp", GROWS, "topk:0.11+sign", staleness=1),
    ModeAndSpec("ssp", (0.004,), "topk:0.11+sign", staleness=2),
    ModeAndSpec("ssp", (0.018,), "cycle:0.25/0.24+sign", staleness=1),
    ModeAndSpec("ssp", (0.041,), "cycle:0.15+sign", staleness=2),
    ModeAndSpec("ssp", (0.068,), "cycle:0.09+sign", staleness=4),
    ModeAndSpec("ssp", (0.079,), "cycle:0.06+sign", staleness=3),
    ModeAndSpec("ssp", (0.099,), "cycle:0.03+sign", staleness=2),
    # Measured without a link: -0.2 and 3.9 %. With one, four updates are under way: as late as dense with four clocks, 7.2 %.
    ModeAndSpec("async", (0.072, 0.111), "topk:0.11+sign"),
    ModeAndSpec("local", (0.083, 0.177, 0.26), local_steps=50),
)
BELOW = tuple(way for way in WAYS if way.sync in ("bsp", "ssp"))  # inside a cluster
