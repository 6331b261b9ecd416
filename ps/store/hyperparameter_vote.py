"""Decides whose hyper-parameters the server's optimizer steps with: one member must not lead all of them away. No I/O.

Rules
- A member agrees with another where each of its numbers is within FAR times what the other has said so far. A rate may be
  smaller by any factor, since schedules begin and end at 0, and beside one that has said 0 alone it may be anything.
- At a barrier those of the set hold that most of it agree with; of several, those of the longest-standing member.
- Folded at once, each member's own hold while half of the others agree with them; else those that most agree with.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from narrows.protocols.wire import unpack

FAR = 100.0  # members are some clocks apart, and no schedule goes so far in so few
ASKED_MAX = 64  # members whose values are compared: more would cost each push too much
RATE = "lr"
# How a step is computed on the worker's device, not what it computes: the server's device is its own.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})

Numbers = dict[tuple[int, str, int], float]  # group, name, place in a tuple


def numbers(packed: bytes) -> Numbers:
    """All numbers and flags of packed groups, which the optimizer has checked."""
    found: Numbers = {}
    groups = unpack(packed)
    assert isinstance(groups, list)
    for number, group in enumerate(groups):
        for name in group.keys() - IMPLEMENTATION:
            values = group[name] if isinstance(group[name], list) else [group[name]]
            found |= {(number, name, i): float(each) for i, each in enumerate(values) if isinstance(each, (int, float))}
    return found


@dataclass(slots=True)
class ReportedHyperparameters:
    """The hyper-parameters of one member: the newest, and the bounds of all that it has said."""

    packed: bytes = b""
    lowest: Numbers = field(default_factory=dict)
    highest: Numbers = field(default_factory=dict)

    def say(self, packed: bytes, said: Numbers) -> None:
        self.packed = packed
        self.lowest |= {key: min(value, self.lowest.get(key, value)) for key, value in said.items()}
        self.highest |= {key: max(value, self.highest.get(key, value)) for key, value in said.items()}


def agrees(said: Numbers, other: ReportedHyperparameters) -> bool:
    """Compare the numbers that both name; one that only one of them names counts for nothing."""
    return all(
        _near(key[1], said[key], other.lowest[key], other.highest[key]) for key in said.keys() & other.highest.keys()
    )


def _near(name: str, value: float, low: float, high: float) -> bool:
    if name == RATE:
        return not high or value <= FAR * high
    # A factor of decay matters by how far it is from 1.
    return low <= value <= high or (_within(value, low, high) and _within(1 - value, 1 - high, 1 - low))


def _within(value: float, low: float, high: float) -> bool:
    """Within FAR times these, with their sign."""
    bounds = sorted((abs(low), abs(high)))
    return min(value * low, value * high) > 0 and bounds[0] / FAR <= abs(value) <= FAR * bounds[1]


def most_agreed(packed: Sequence[bytes]) -> int:
    """The first of those that most of them agree with."""
    asked = packed[:ASKED_MAX]
    if len({*asked}) == 1:
        return 0
    said = []
    for each in asked:
        said.append(ReportedHyperparameters())
        said[-1].say(each, numbers(each))
    votes = [sum(agrees(each.highest, other) for other in said) for each in said]
    return votes.index(max(votes))


class HyperparameterVote:
    """The hyper-parameters that each member has said, where updates are folded at once."""

    def __init__(self) -> None:
        self.said: dict[int, ReportedHyperparameters] = {}
        self.struck: set[int] = set()  # members that others did not agree with

    def hold(self, worker: int, packed: bytes) -> bytes:
        """Those that an update of this member is stepped with, which says `packed`."""
        ours = numbers(packed)
        others = [other for other in sorted(self.said) if other != worker][: ASKED_MAX - 1]
        agreed = sum(agrees(ours, self.said[other]) for other in others)
        self.said.setdefault(worker, ReportedHyperparameters()).say(packed, ours)
        if 2 * agreed >= len(others):
            return packed
        newest = [self.said[each].packed for each in sorted([*others, worker])]
        return newest[most_agreed(newest)]

    def members(self, live: Container[int]) -> None:
        """Forget who left."""
        self.said = {worker: said for worker, said in self.said.items() if worker in live}
