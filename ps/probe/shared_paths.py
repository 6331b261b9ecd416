"""Shared paths: pairs of one round that used a wire at once, and the rate that each has alone. No I/O.

Rules
- Machines of one place have one path out of it. Two pairs of a round that leave a place at once have a part of that
  path each.
- A machine counts to the smallest of its places (`step_prices.places`). For each two places whose pairs shared a round,
  one pair is measured once more, alone.
- If that pair then has GAINS times its rate, the other pairs get its rate too, because their path is the same. Else the
  path was not shared.
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
    """Pairs of machines between two places, the fastest first. The first pair is measured alone."""

    pairs: tuple[Pair, ...]
    places: tuple[int, int]


def shared(count: int, rounds: Sequence[Sequence[Pair]], rates: Mapping[Pair, float]) -> list[SharedPath]:
    """Return the shared paths of all rounds, by their two places.

    Args:
        count: the number of machines.
        rounds: the pairs of each round.
        rates: by (sender, receiver), bit/s, where measured.
    """
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
    """Return rounds of the first pair of each path, `most` pairs at most.

    No two pairs of a round have a place in common.
    """
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
    """Return the links of the other pairs, with the rates that the first pair has alone.

    Args:
        each: the shared path.
        before: links as measured in the rounds.
        alone: links as measured last.
        name: the names of the first pair, for network.json.
    """
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
