"""The records that the director keeps of pairs, and the rounds in which pairs are visited. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from narrows.protocols.config.topology import edges
from narrows.ps.probe.flows import Flow
from narrows.ps.probe.shared_paths import Pair


@dataclass(slots=True)
class PairTry:
    """One attempt at a visit. In its flows, direction 0 is from the listener to the dialler."""

    token: str
    listener: int  # number of the machine
    dialler: int
    ends_ns: int  # both reports must have come by then
    again: bool  # the second attempt, with the roles changed
    reports: dict[int, list[Flow]] = field(default_factory=dict)  # by machine


@dataclass(frozen=True, slots=True)
class PairVisit:
    """The result of a pair's first visit."""

    pair: Pair  # (listener, dialler)
    trip_s: float  # the shortest round trip
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class ProbeFindings:
    """The result of a measured pair. In its flows, direction 0 is from the first of `names` to the second."""

    names: tuple[str, str]
    flows: tuple[Flow, ...]


def rounds(members: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs. Every pair of `members` is in exactly one round."""
    if len(members) < 2:
        return []
    half = (len(members) + 1) // 2
    across = [[(a, b) for a, b, _ in edges("shift-one", number, tuple(members))] for number in range(half)]
    within = zip_longest(rounds(members[:half]), rounds(members[half:]), fillvalue=list[Pair]())
    return [*across, *([*left, *right] for left, right in within)]


def again(count: int) -> int:
    """Return how many pairs may be measured once more; 0 below four machines, which two pairs of a round take."""
    return count if count > 3 else 0
