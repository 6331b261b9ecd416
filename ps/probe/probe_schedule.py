"""What a probe knows of its machines and of the pairs that they make, and in which rounds these are visited. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from narrows.protocols.config.topology import edges
from narrows.ps.probe.flows import Flow
from narrows.ps.probe.messages import ProbeJoin
from narrows.ps.probe.shared_paths import Pair


@dataclass(slots=True)
class ProbedMachine:
    """One that has joined."""

    peer: bytes
    join: ProbeJoin
    came_ns: int
    heard_ns: int
    step_s: float | None = None  # None: it times its steps


@dataclass(slots=True)
class PairTry:
    """A pair that is being measured. Flows have the ways as the listener sees them: 0 is towards the dialler."""

    token: str
    listener: int
    dialler: int
    ends_ns: int
    again: bool  # it is the second one of this visit
    reports: dict[int, list[Flow]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PairVisit:
    """The first visit of a pair, its listener first: the shortest round trip, and what it has seen."""

    pair: Pair
    trip_s: float
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class ProbeFindings:
    """A pair that was measured: flows of `names`, way 0 is from the first to the second."""

    names: tuple[str, str]
    flows: tuple[Flow, ...]


def rounds(members: Sequence[int]) -> list[list[Pair]]:
    """Rounds of disjoint pairs in which every pair of `members` is once."""
    if len(members) < 2:
        return []
    half = (len(members) + 1) // 2
    across = [[(a, b) for a, b, _ in edges("shift-one", number, tuple(members))] for number in range(half)]
    within = zip_longest(rounds(members[:half]), rounds(members[half:]), fillvalue=list[Pair]())
    return [*across, *([*left, *right] for left, right in within)]


def again(count: int) -> int:
    """Pairs of so many machines that may be measured once more. Two pairs of a round are four machines."""
    return count if count > 3 else 0
