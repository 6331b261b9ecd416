"""How long a clock takes on a link, by arithmetic (docs/modes.md, "ssp"). Pure: no clock, no I/O.

Rules
- A clock of a worker with at most `window` updates in flight takes

      max(own, up, down, (own + round trip + up + down) / window),   own = computing + encoding

  for it overlaps with window - 1 others: with window 1 (bound 0) it is the sum, with more the greatest once that hides it.
- The workers of a cluster go on while it waits for the level above, where both levels code and states may be late inside:
  `cluster_clock_s`.
- States that come whole, and not as differences, overlap less: `whole_clock_s`, fitted to simulated runs.
- The link is one worker's. The rates both ways are alike, and a server's own work is taken for nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

S = TypeVar("S", float, npt.NDArray[np.float64])

_LINK = re.compile(r"(\d+\.?\d*)([kmg])bit(?:/s)?,(\d+\.?\d*)(us|ms|s)", re.ASCII | re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Link:
    """Between a worker and its server. rate: bytes a second, each way. delay_s: one way."""

    rate: float
    delay_s: float

    @staticmethod
    def parse(text: str) -> Link:
        """`100mbit,20ms`: the rate and one way's delay. Raises ValueError, one sentence."""
        found = _LINK.fullmatch(text)
        if found is None or not float(found[1]):
            raise ValueError(f"{text!r} is no link: give its rate and one way's delay, as in 100mbit,20ms")
        return Link(float(found[1]) * _BITS[found[2].lower()] / 8, float(found[3]) * _SECONDS[found[4].lower()])


@dataclass(frozen=True, slots=True)
class Cost:
    """One worker's cost: seconds of an inner step, seconds to encode one update, bytes of an exchange each way."""

    compute_s: float
    encode_s: float
    up_bytes: float
    down_bytes: float


def clock_s(own_s: S, up_s: S, down_s: S, round_trip_s: S, window: int) -> S:
    """Seconds of a clock; `up_s`, `down_s`: that the bytes take at the rate of the link. All are floats, or float64[...]."""
    found: S = _longest(own_s, up_s, down_s, (own_s + round_trip_s + up_s + down_s) / window)
    return found


def cluster_clock_s(
    own_s: S, encode_s: float, up_s: S, down_s: S, round_trip_s: S, window: int, inside: npt.NDArray[np.intp] | int
) -> S:
    """Seconds of a clock of a cluster that takes `own_s` alone, and whose workers have `inside` updates in flight: more than 1.

    A worker's update c is computed on a state of c + 1 - inside, which the cluster publishes with a state from above of
    window - 1 clocks before. So inside + window - 1 clocks have one update's way through both levels in them."""
    above_s = encode_s + round_trip_s + up_s + down_s
    found: S = _longest(
        own_s, encode_s, up_s, down_s, above_s / window, (inside * own_s + above_s) / (window + inside - 1)
    )
    return found


def whole_clock_s(own_s: S, up_s: S, down_s: S, round_trip_s: S, window: int) -> S:
    """The same where states come whole."""
    found: S = _longest(up_s, down_s, own_s + (round_trip_s + up_s + down_s) / window)
    return found


def _longest(*parts: Any) -> Any:
    return reduce(np.maximum, parts)


def step_s(link: Link, cost: Cost, window: int = 1, local_steps: int = 1) -> float:
    """Seconds of an inner step, where every `local_steps` of them an update is exchanged."""
    own_s = local_steps * cost.compute_s + cost.encode_s
    up_s, down_s = cost.up_bytes / link.rate, cost.down_bytes / link.rate
    return clock_s(own_s, up_s, down_s, 2 * link.delay_s, window) / local_steps


def staleness(link: Link, cost: Cost, most: int) -> int:
    """The least bound from 1 to `most` with which more of it makes no step shorter: S t >= 2 d + (up + down) / r."""
    whole_s, least_s = step_s(link, cost), step_s(link, cost, window=1 << 30)
    return min(most, max(1, math.ceil(whole_s / least_s - 1 - 1e-9)))
