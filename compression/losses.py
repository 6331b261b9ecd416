"""The losses that were measured by mode, delay, code and number of optimizers: one table for `ps-plan`, `--replan`, `auto`.

Pure: no clock, no I/O. docs/modes.md and docs/planning.md show the table, with the source of each figure.

Rules
- Each worker that pushes updates has an optimizer of its own. A cluster with bsp inside has one. A run with one optimizer
  loses nothing.
- A loss is a share over the loss of bsp with as many workers, of the byte GPT after 400 steps. Each has its own best learning
  rate, and the better of .8 and .9 as AdamW's beta1: bsp and updates without delay want .8, late updates .9. Between two of
  COUNTS a loss is linear in the logarithm of the number of optimizers; beyond the last one it grows as from 8 to 16.
- A loss of p takes (1 + p)^STEPS_POWER as many steps to the same loss. A loss below bsp's counts as none.
- A code without a row (`by_size`) loses by its bytes: between two rows of the same delay its loss is linear in their
  logarithm. A denser or sparser code than any row of that delay differs from the nearest one by as much as the two differ
  with a clock of delay, where each kind of code was measured. A delay beyond LATEST loses as LATEST does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from narrows.compression.ladder import bytes_of

COUNTS = (2, 4, 8, 16)  # numbers of optimizers with which losses were measured
# Over bsp's of ssp with topk:0.11+sign for each of COUNTS. A row that was not measured with so many optimizers is taken to
# lose as much more from one count to the next.
GROWS = (0.018, 0.042, 0.094, 0.175)
# Steps to a loss of 2.1 over those of bsp are (1 + loss over bsp)^4.7: six rows of bench/contenders/wan.py agree within 13 %.
STEPS_POWER = 4.7
# Of the loss of a code both ways, what it costs one way alone: bench/loss/README.md, section 7.
ONE_WAY = 2 / 3


@dataclass(frozen=True)
class MeasuredLoss:
    """A way to train, by the flags of ps-serve, and its losses."""

    sync: str  # the mode, as in --sync
    over: tuple[float, ...]  # the loss over bsp's, as a share, for the first of COUNTS
    compress: str = "dense"  # the SPEC
    staleness: int = -1  # -1: the mode's default
    local_steps: int = -1  # -1: the mode's default
    push: str = ""  # "update": as --push has it; "": the mode's default
    outer: str = ""  # "iso": as --outer has it; "": the mode's default
    compress_down: str = ""  # the SPEC of states; "": as `compress`

    @property
    def own_optimizers(self) -> bool:
        """True if each child has an optimizer of its own, of whose updates the server takes the mean."""
        return self.sync != "bsp" or self.push == "update"

    @property
    def down(self) -> str:
        """The SPEC of states."""
        return self.compress_down or self.compress

    @property
    def delay(self) -> int | None:
        """Clocks of delay of updates of one step; None: no bound."""
        return None if self.sync == "async" else max(0, self.staleness)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss over bsp's for each of COUNTS."""
        last = len(self.over) - 1
        return *self.over, *(self.over[-1] + grows - GROWS[last] for grows in GROWS[last + 1 :])

    def steps(self, optimizers: int) -> float:
        """Return the steps to a loss with so many children, as a multiple of bsp's."""
        return steps_of(_among(self.losses, optimizers)) if self.own_optimizers else 1.0


def steps_of(loss: float) -> float:
    """Return how many times bsp's steps a run needs to the same loss.

    Args:
        loss: of this run over that of bsp after as many steps, as a share.
    """
    found: float = (1 + max(0.0, loss)) ** STEPS_POWER
    return found


def _among(losses: Sequence[float], optimizers: int) -> float:
    """Return the loss with so many optimizers; `losses` are those of COUNTS."""
    if optimizers < 2:
        return 0.0
    doublings = math.log2(optimizers) - 1
    low = min(int(doublings), len(losses) - 2)
    return losses[low] + (doublings - low) * (losses[low + 1] - losses[low])


# bsp whose children push updates, each child with its own optimizer: no clock of delay. With 2 int4 lost 1.5 % and with 4
# 0.8: both count as 1.0. The sparser codes lost 2.6 and 0.9 % with 2, less than seeds differ by: both count as 1.5. Dense
# counts as int4, from which it differed by less than seeds do.
DENSE_UPDATES = MeasuredLoss("bsp", (0.01, 0.01, 0.029, 0.042), push="update")
LOSSES = (
    MeasuredLoss("bsp", (0.0,)),  # equal to one process
    # With 2 1.8 % in real runs and -0.6 in lockstep, with 4 1.5 and 2.6: both count as their mean.
    MeasuredLoss("ssp", (0.006, 0.02, 0.047, 0.105), staleness=1),
    MeasuredLoss("ssp", (0.006, 0.02, 0.047, 0.116), "int4", staleness=1),  # with 4 and 8 as dense
    MeasuredLoss("ssp", GROWS, "topk:0.11+sign", staleness=1),
    MeasuredLoss("ssp", (0.022,), "topk:0.11+sign", staleness=2),
    MeasuredLoss("ssp", (0.037,), "cycle:0.25/0.24+sign", staleness=1),
    MeasuredLoss("ssp", (0.058,), "cycle:0.15+sign", staleness=1),
    MeasuredLoss("ssp", (0.085,), "cycle:0.06+sign", staleness=1),
    MeasuredLoss("ssp", (0.123,), "cycle:0.03+sign", staleness=1),
    MeasuredLoss("ssp", (0.06,), "cycle:0.15+sign", staleness=2),
    MeasuredLoss("ssp", (0.088,), "cycle:0.09+sign", staleness=4),
    MeasuredLoss("ssp", (0.099,), "cycle:0.06+sign", staleness=3),
    MeasuredLoss("ssp", (0.119,), "cycle:0.03+sign", staleness=2),
    # Without a link async measured 1.6 and 5.3 %. With a link four updates are in flight, as late as dense with four
    # clocks: 9.2 %.
    MeasuredLoss("async", (0.092, 0.126), "topk:0.11+sign"),
    MeasuredLoss("local", (0.103, 0.193, 0.28), local_steps=50),
    MeasuredLoss("bsp", DENSE_UPDATES.over, "int4", push="update"),
    MeasuredLoss("bsp", (0.015, 0.025, 0.031, 0.058), "topk:0.5+sign", push="update"),
    MeasuredLoss("bsp", (0.015, 0.033, 0.072, 0.137), "topk:0.11+sign", push="update"),
    # Of lockstep runs, one to five rates each; H = 50 with beta1 = .9 alone.
    MeasuredLoss("local", (-0.046, 0.027, 0.147), local_steps=20, outer="iso"),
    MeasuredLoss("local", (0.079, 0.196, 0.259), local_steps=50, outer="iso"),
    MeasuredLoss("local", (-0.036, 0.055, 0.159), "2bit", local_steps=20, outer="iso", compress_down="int4"),
    MeasuredLoss("local", (0.106, 0.196, 0.262), "2bit", local_steps=50, outer="iso", compress_down="int4"),
)
LATE = 1  # clocks of delay with which each kind of code was measured
LATEST = max(row.staleness for row in LOSSES)


def _rows(delay: int | None) -> list[MeasuredLoss]:
    """Return the rows of updates of one step with this delay, the sparsest first."""
    steps = (row for row in (DENSE_UPDATES, *LOSSES) if row.own_optimizers and row.sync != "local")
    return sorted((row for row in steps if row.delay == delay), key=lambda row: bytes_of(row.compress))


def _between(rows: Sequence[MeasuredLoss], size: float) -> list[float]:
    """Return the losses of a code for each of COUNTS, interpolated by its bytes.

    A code with more bytes than any row has the losses of the densest row, one with fewer those of the sparsest.
    """
    sizes, table = [math.log(bytes_of(row.compress)) for row in rows], zip(*(row.losses for row in rows), strict=True)
    return [float(np.interp(math.log(size), sizes, column)) for column in table]


def by_size(delay: int | None, size: float) -> tuple[float, ...]:
    """Return the losses of a code for each of COUNTS, where workers push the updates of one step and servers add them.

    Args:
        delay: the bound on staleness, in clocks; None: no bound (async).
        size: bytes of a payload, per parameter.
    """
    rows = _rows(delay if delay is None else min(delay, LATEST))
    nearest = min(max(size, bytes_of(rows[0].compress)), bytes_of(rows[-1].compress))
    own, late, late_nearest = _between(rows, size), _between(_rows(LATE), size), _between(_rows(LATE), nearest)
    return tuple(one + more - less for one, more, less in zip(own, late, late_nearest, strict=True))


def of_codes(delay: int | None, up: float, down: float) -> tuple[float, ...]:
    """Return the losses of two codes for each of COUNTS, by the bytes per parameter of updates and of states."""
    pairs = zip(by_size(delay, up), by_size(delay, down), strict=True)
    return tuple(min(pair) + ONE_WAY * (max(pair) - min(pair)) for pair in pairs)


def steps_by_codes(delay: int | None, optimizers: int) -> Callable[[float, float], float]:
    """Return a function of the bytes per parameter of updates and of states: the steps to a loss beside bsp's.

    Args:
        delay: as in `by_size`.
        optimizers: the number of the server's children.
    """
    return lambda up, down: steps_of(_among(of_codes(delay, up, down), optimizers))


def alike(up: float, down: float) -> float:
    """Return the steps to a loss where no code is known to lose more than another: those of bsp."""
    return 1.0
