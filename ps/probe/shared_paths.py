"""Pairs of one round that shared a way, and what they have without each other. Pure.

Rules
- Machines of one place have one way out. Two pairs of a round that leave a place at once have a part of it each.
- A machine is in the smallest of its places by `levels.places`. For each two places whose pairs shared a round one pair is
  measured once more, alone.
- Where that pair has GAINS times its rate then, the others have as much: the way is the same. Else nothing was shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from narrows.ps.planner.network import FORMAT, Network
from narrows.ps.planner.step_prices import places
from narrows.ps.probe.measured_network import MeasuredLink

GAINS = 1.25
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SharedPath:
    """Pairs from one place to another, the faster one first; the first one is measured alone."""

    pairs: tuple[Pair, ...]
    places: tuple[int, int]


def shared(count: int, rounds: Sequence[Sequence[Pair]], rates: Mapping[Pair, float]) -> list[SharedPath]:
    """Those of the rounds, by their two places. `rates`: bit/s of each way that is known, of `count` machines."""
    table = [[rates.get((a, b), 1.0) for b in range(count)] for a in range(count)]
    delay = [[0.0] * count for _ in range(count)]
    document = {"format": FORMAT, "hosts": [*map(str, range(count))], "delay_s": delay}
    place = places(Network.parse(document | {"rates": [{"message_bytes": 1, "bits_per_second": table}]}))
    level = np.array([[(row == number).sum() > 1 for number in row] for row in place]).cumsum(0).argmax(0)
    place = (place + count * np.arange(len(place))[:, None])[level, np.arange(count)]
    found: dict[tuple[int, int], list[Pair]] = {}
    for row in rounds:
        crossing = [
            sorted(pair, key=lambda machine: place[machine]) for pair in row if place[pair[0]] != place[pair[1]]
        ]
        ends = [int(place[machine]) for pair in crossing for machine in pair]
        for a, b in crossing:
            at = int(place[a]), int(place[b])
            if max(map(ends.count, at)) > 1 and (a, b) in rates and (b, a) in rates:
                found.setdefault(at, []).append((a, b))
    return [
        SharedPath(tuple(sorted(pairs, key=lambda pair: -min(rates[pair], rates[pair[::-1]]))), at)
        for at, pairs in sorted(found.items())
    ]


def rounds_alone(all_shared: Sequence[SharedPath], most: int) -> list[list[Pair]]:
    """Rounds of the first pairs, at most so many of them, in which no two have a place in common."""
    made: list[tuple[set[int], list[Pair]]] = []
    for each in all_shared[:most]:
        free = next((row for row in made if not row[0].intersection(each.places)), None)
        if free is None:
            made.append(free := (set(), []))
        free[0].update(each.places)
        free[1].append(each.pairs[0])
    return [pairs for _, pairs in made]


def shares(
    each: SharedPath, before: Mapping[Pair, MeasuredLink], alone: Mapping[Pair, MeasuredLink], name: str
) -> dict[Pair, MeasuredLink]:
    """The ways that have as much as the first pair had alone. `name`: its names, for people."""
    found = {}
    for turn in permutations((0, 1)):
        first = each.pairs[0][turn[0]], each.pairs[0][turn[1]]
        if first not in alone or max(alone[first].rates.values()) < GAINS * max(before[first].rates.values()):
            continue
        for pair in each.pairs[1:]:
            way = pair[turn[0]], pair[turn[1]]
            own = before[way]
            rates = {size: max(rate, alone[first].rates.get(size, rate)) for size, rate in own.rates.items()}
            found[way] = replace(own, rates=rates, raw=own.raw | {"measured_by": f"{name}, alone"})
    return found
