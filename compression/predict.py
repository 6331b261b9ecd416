"""Predicts the seconds of a clock on a link by closed forms (docs/modes.md, "ssp"). Pure: no clock, no I/O.

Rules
- A clock of a worker with at most `window` updates in flight takes

      max(own, up, down, (own + round trip + up + down) / window),   own = compute + encode

  because it overlaps with window - 1 others. With window 1 (staleness bound 0) it is the sum. With a window that hides
  the rest, it is the largest of own, up and down.
- The workers of a cluster go on while the cluster waits for its parent. If both levels code, and states inside the
  cluster may be stale, `cluster_clock_s` holds.
- States that are published whole, not as differences, overlap less: `whole_clock_s`, fitted to simulated runs.
- The link belongs to one worker. Its rates are equal both ways, and the server's own work counts as zero.
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
    """The link between a worker and its server."""

    rate: float  # bytes a second, each way
    delay_s: float  # one way

    @staticmethod
    def parse(text: str) -> Link:
        """Parse a rate and a one-way delay, such as `100mbit,20ms`. Raises ValueError, in one sentence."""
        found = _LINK.fullmatch(text)
        if found is None or not float(found[1]):
            raise ValueError(f"{text!r} is no link: give its rate and one way's delay, as in 100mbit,20ms")
        return Link(float(found[1]) * _BITS[found[2].lower()] / 8, float(found[3]) * _SECONDS[found[4].lower()])


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of one worker."""

    compute_s: float  # of an inner step
    encode_s: float  # of an update
    up_bytes: float  # of an exchange
    down_bytes: float  # of an exchange


def clock_s(own_s: S, up_s: S, down_s: S, round_trip_s: S, window: int) -> S:
    """Return the seconds of a clock.

    Args:
        own_s: seconds of computing and encoding, a float or float64[...] like all times here.
        up_s, down_s: seconds that the bytes take at the rate of the link.
        round_trip_s: the delay of the link, there and back.
        window: the most updates in flight, including the update that is being computed.
    """
    found: S = _longest(own_s, up_s, down_s, (own_s + round_trip_s + up_s + down_s) / window)
    return found


def cluster_clock_s(
    own_s: S, encode_s: float, up_s: S, down_s: S, round_trip_s: S, window: int, inside: npt.NDArray[np.intp] | int
) -> S:
    """Return the seconds of a clock of a cluster whose workers have more than one update in flight.

    A worker computes update c on a state of clock c + 1 - inside. The cluster published that state with a state of the
    parent that is window - 1 clocks older. So one update passes both levels in inside + window - 1 clocks.

    Args:
        own_s: seconds of a clock of the cluster alone.
        encode_s: seconds that the cluster takes to encode its update.
        up_s, down_s, round_trip_s: of the link to the parent, as in `clock_s`.
        window: the most updates of the cluster in flight to its parent.
        inside: the most updates of a worker in flight to the cluster, > 1.
    """
    above_s = encode_s + round_trip_s + up_s + down_s
    found: S = _longest(
        own_s, encode_s, up_s, down_s, above_s / window, (inside * own_s + above_s) / (window + inside - 1)
    )
    return found


def whole_clock_s(own_s: S, up_s: S, down_s: S, round_trip_s: S, window: int) -> S:
    """Return the seconds of a clock if states are published whole. Arguments as in `clock_s`."""
    found: S = _longest(up_s, down_s, own_s + (round_trip_s + up_s + down_s) / window)
    return found


def _longest(*parts: Any) -> Any:
    return reduce(np.maximum, parts)


def step_s(link: Link, cost: Cost, window: int = 1, local_steps: int = 1) -> float:
    """Return the seconds of an inner step.

    Args:
        link: the worker's link.
        cost: the worker's costs.
        window: the most updates in flight, as in `clock_s`.
        local_steps: the inner steps of an exchange.
    """
    own_s = local_steps * cost.compute_s + cost.encode_s
    up_s, down_s = cost.up_bytes / link.rate, cost.down_bytes / link.rate
    return clock_s(own_s, up_s, down_s, 2 * link.delay_s, window) / local_steps


def staleness(link: Link, cost: Cost, most: int) -> int:
    """Return the smallest staleness bound from 1 to `most` beyond which no step gets shorter.

    The bound S satisfies S t >= 2 d + (up + down) / r for a step of t seconds on a link of rate r and delay d.
    """
    whole_s, least_s = step_s(link, cost), step_s(link, cost, window=1 << 30)
    return min(most, max(1, math.ceil(whole_s / least_s - 1 - 1e-9)))
