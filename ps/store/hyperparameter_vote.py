"""Decides whose hyper-parameters the server steps with, so that one member cannot mislead the others. No I/O.

Rules
- A member agrees with another if each of its numbers is within a factor FAR of the numbers that the other has named so
  far. A learning rate may be smaller by any factor, since schedules begin and end at 0. If the other has named only the
  rate 0 so far, any rate agrees.
- At a barrier the shard steps with the values that most members of the set agree with; among equals, those of the
  longest-standing member.
- Without a barrier each member's own values hold while half of the others agree with them; else those that most agree
  with.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from narrows.protocols.wire import unpack

FAR = 100.0  # members are some clocks apart, and no schedule changes by this factor in so few clocks
ASKED_MAX = 64  # members whose values are compared; more would make each push too slow
RATE = "lr"
# These say how a step is computed on the worker's device, not what it computes: the server's device is another.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})

Numbers = dict[tuple[int, str, int], float]  # (group, name, place in a tuple) -> number


def numbers(packed: bytes) -> Numbers:
    """Return all numbers and flags of packed groups that the optimizer has checked."""
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
    """What one member has named: its newest hyper-parameters, and the bounds of all numbers so far."""

    packed: bytes = b""
    lowest: Numbers = field(default_factory=dict)
    highest: Numbers = field(default_factory=dict)

    def report(self, packed: bytes, said: Numbers) -> None:
        """Take the member's newest hyper-parameters."""
        self.packed = packed
        self.lowest |= {key: min(value, self.lowest.get(key, value)) for key, value in said.items()}
        self.highest |= {key: max(value, self.highest.get(key, value)) for key, value in said.items()}


def agrees(said: Numbers, other: ReportedHyperparameters) -> bool:
    """True if the numbers that both name are near each other. A number that only one of them names does not count."""
    return all(
        _near(key[1], said[key], other.lowest[key], other.highest[key]) for key in said.keys() & other.highest.keys()
    )


def _near(name: str, value: float, low: float, high: float) -> bool:
    if name == RATE:
        return not high or value <= FAR * high
    # A decay factor, such as a beta, matters by its distance from 1.
    return low <= value <= high or (_within(value, low, high) and _within(1 - value, 1 - high, 1 - low))


def _within(value: float, low: float, high: float) -> bool:
    """True if the value has the sign of the bounds, and is within a factor FAR of them."""
    bounds = sorted((abs(low), abs(high)))
    return min(value * low, value * high) > 0 and bounds[0] / FAR <= abs(value) <= FAR * bounds[1]


def most_agreed(packed: Sequence[bytes]) -> int:
    """Return the index of the first hyper-parameters that most of `packed` agree with."""
    asked = packed[:ASKED_MAX]
    if len({*asked}) == 1:
        return 0
    said = []
    for each in asked:
        said.append(ReportedHyperparameters())
        said[-1].report(each, numbers(each))
    votes = [sum(agrees(each.highest, other) for other in said) for each in said]
    return votes.index(max(votes))


class HyperparameterVote:
    """The hyper-parameters that each member has named, in a run that folds updates at once."""

    def __init__(self) -> None:
        self.said: dict[int, ReportedHyperparameters] = {}  # by worker
        self.struck: set[int] = set()  # members whose hyper-parameters were replaced; each is logged once

    def hold(self, worker: int, packed: bytes) -> bytes:
        """Return the hyper-parameters to step with for an update of this member, which names `packed`."""
        ours = numbers(packed)
        others = [other for other in sorted(self.said) if other != worker][: ASKED_MAX - 1]
        agreed = sum(agrees(ours, self.said[other]) for other in others)
        self.said.setdefault(worker, ReportedHyperparameters()).report(packed, ours)
        if 2 * agreed >= len(others):
            return packed
        newest = [self.said[each].packed for each in sorted([*others, worker])]
        return newest[most_agreed(newest)]

    def members(self, live: Container[int]) -> None:
        """Forget members that have left."""
        self.said = {worker: said for worker, said in self.said.items() if worker in live}
