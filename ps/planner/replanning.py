"""The costs of modes and SPECs for a running server, from the figures that its children measure now. docs/planning.md.

No I/O.

Rules
- The prices are those of `ps-plan` (step_prices.py). The network is a star: the server is host 0, and children send
  nothing to each other.
- A child measures its rate while the others send too. So prices do not divide the rate once more, and the server's port
  carries the sum of all rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrows.compression.losses import of_codes
from narrows.protocols.config.modes import ISO
from narrows.protocols.config.settings import Settings
from narrows.ps.planner.codec_costs import CodecCost
from narrows.ps.planner.modes_and_specs import DENSE_UPDATES, WAYS, ModeAndSpec
from narrows.ps.planner.network import Network
from narrows.ps.planner.step_prices import StepPrices, TrainingWork

FAST = 1e10  # bytes a second of a link that is too fast to measure


@dataclass(frozen=True, slots=True)
class ChildRates:
    """The figures that one child has measured."""

    own_s: float  # seconds of computing in a step
    up: float  # bytes a second; 0: the bytes took no time that was measured
    down: float  # bytes a second, as `up`
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class WayPrice:
    """The price of one mode and SPEC."""

    way: ModeAndSpec
    step_s: float
    cost: float  # step_s, times the steps to a loss beside those of bsp


def star(children: Sequence[ChildRates]) -> Network:
    """Return the network of a server, host 0, and its children.

    No message takes the link between two children; its rate is the lower one of theirs.
    """
    n = len(children) + 1
    up, down = (
        np.array([each or FAST for each in way]) for way in zip(*((c.up, c.down) for c in children), strict=True)
    )
    slower, rates, delay = np.minimum(up, down), np.ones((n, n)), np.zeros((n, n))
    rates[1:, 1:] = np.minimum.outer(slower, slower)
    rates[1:, 0], rates[0, 1:] = up, down
    delay[1:, 0] = delay[0, 1:] = [child.round_trip_s / 2 for child in children]
    alike, names = np.ones(n), tuple(map(str, range(n)))
    return Network(names, delay, rates[None], (1.0,), alike, alike, np.zeros((n, n)))


def prices(
    children: Sequence[ChildRates], parameters: float, coded: Mapping[str, CodecCost], ways: Iterable[ModeAndSpec]
) -> list[WayPrice]:
    """Return the price of each way, in their order.

    Args:
        children: the figures of each child.
        parameters: the number of the model's parameters.
        coded: the cost of each SPEC.
        ways: the modes and SPECs to price.
    """
    network = star(children)
    priced = StepPrices(network, TrainingWork(parameters, 1.0, coded))
    priced.port_in[0], priced.port_out[0] = network.rates[0, 1:, 0].sum(), network.rates[0, 0, 1:].sum()
    own_s = np.array([0.0, *(child.own_s for child in children)])
    groups, root = tuple((host,) for host in range(1, len(own_s))), np.array([0])
    found = [(way, priced.above_s(way, own_s, groups, root)[0]) for way in ways]
    return [WayPrice(way, step_s, step_s * way.steps(len(children))) for way, step_s in found]


def in_turn(children: Sequence[ChildRates]) -> list[ChildRates]:
    """Return these children as if a step took each of them equally long, and all together made as many a second.

    So a round by the clock costs: each child makes as many steps in it as it can, and none waits for another.
    """
    even_s = len(children) / sum(1 / child.own_s for child in children)
    return [replace(child, own_s=even_s) for child in children]


def unmeasured(settings: Settings, own_s: float = 0.0) -> ModeAndSpec:
    """Return the mode and SPEC of these settings, without losses.

    Args:
        settings: of the run.
        own_s: seconds of a step, by which a round by the clock has its number of steps; 0: not measured.
    """
    steps = settings.local_steps if settings.sync == "local" else -1
    if settings.local_seconds > 0 and own_s:
        steps = min(steps, max(1, round(settings.local_seconds / own_s)))
    staleness = settings.staleness if settings.staleness > 0 or settings.sync == "ssp" else -1
    push = settings.push if settings.sync == "bsp" and settings.push == "update" else ""
    outer = settings.outer if settings.outer == ISO else ""
    down = settings.compress_down if settings.compress_down != settings.compress else ""
    return ModeAndSpec(settings.sync, (), settings.compress, staleness, steps, push, outer, down)


def present(settings: Settings, coded: Mapping[str, CodecCost], own_s: float = 0.0) -> ModeAndSpec:
    """Return the mode and SPEC of these settings.

    The losses are those of their row of WAYS, if there is one. Else those of updates of one step are by the bytes of the
    SPECs (`losses.of_codes`), and those of rounds are of the rounds with the same outer step and the nearest number of steps,
    then the nearest bytes.
    `own_s` is that of `unmeasured`.
    """
    way = unmeasured(settings, own_s)
    for row in (DENSE_UPDATES, *WAYS):
        if replace(way, over=row.over) == row:
            return row
    if settings.sync == "local":
        rounds = [row for row in WAYS if (row.sync, row.outer) == (way.sync, way.outer)]

        def far(row: ModeAndSpec) -> tuple[float, float]:
            sizes = coded[row.compress].bytes / coded[way.compress].bytes
            return abs(math.log(row.local_steps / way.local_steps)), abs(math.log(sizes))

        return replace(way, over=min(rounds, key=far).over)
    if not way.own_optimizers:
        return replace(way, over=WAYS[0].over)
    return replace(way, over=of_codes(way.delay, coded[way.compress].bytes, coded[way.down].bytes))
