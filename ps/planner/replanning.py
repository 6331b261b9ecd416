"""The costs of the ways of a level for a running server, by what its children measure now. Pure; docs/planning.md.

Rules
- The prices are those of `ps-plan` (step_prices.py). The network is a star: the server is host 0, and no child sends
  to another.
- A rate is what a child measured while the others sent too. So links are not shared once more, and the server's port takes what
  all of them carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from narrows.protocols.config.settings import Settings
from narrows.ps.planner.modes_and_specs import WAYS, ModeAndSpec
from narrows.ps.planner.network import Network
from narrows.ps.planner.step_prices import CodecCost, StepPrices, TrainingWork

FAST = 1e10  # bytes a second, of a link whose bytes take no time that can be seen


@dataclass(frozen=True, slots=True)
class ChildRates:
    """A child's figures: seconds of computing in a step; bytes a second of its link, 0: they took no time; seconds."""

    own_s: float
    up: float
    down: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class WayPrice:
    way: ModeAndSpec
    step_s: float
    cost: float  # step_s, times the steps to a loss beside those of bsp


def star(children: Sequence[ChildRates]) -> Network:
    """Host 0 is the server. The link between two children does not matter: it is as slow as the slower one's."""
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
    """Return the price of each way, in their order. `coded`: the costs of each SPEC."""
    network = star(children)
    priced = StepPrices(network, TrainingWork(parameters, 1.0, coded))
    priced.port_in[0], priced.port_out[0] = network.rates[0, 1:, 0].sum(), network.rates[0, 0, 1:].sum()
    own_s = np.array([0.0, *(child.own_s for child in children)])
    groups, root = tuple((host,) for host in range(1, len(own_s))), np.array([0])
    found = [(way, priced.above_s(way, own_s, groups, root)[0]) for way in ways]
    return [WayPrice(way, step_s, step_s * way.steps(len(children))) for way, step_s in found]


def present(settings: Settings, coded: Mapping[str, CodecCost]) -> ModeAndSpec:
    """The way of these settings. Where WAYS has no such row, the one of its mode with the nearest bytes says what it loses."""
    steps = settings.local_steps if settings.sync == "local" else -1
    way = ModeAndSpec(settings.sync, (), settings.compress, settings.staleness if settings.staleness > 0 else -1, steps)

    def far(row: ModeAndSpec) -> tuple[bool, float, int]:
        wide = abs(math.log(coded[row.compress].bytes / coded[way.compress].bytes))
        return row.sync != way.sync, wide, abs(row.staleness - way.staleness)

    return ModeAndSpec(way.sync, min(WAYS, key=far).over, way.compress, way.staleness, way.local_steps)
