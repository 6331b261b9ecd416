"""`auto`: chooses the SPEC for a link from a ladder, by the measured cost of clocks. Pure: no clock, no I/O.

How it works
1. A run begins on the sparsest rung. Each clock is measured (`Clock`): compute, encode, bytes and seconds each way.
2. From the medians of the newest WINDOW clocks predict.py computes the length of a clock with each rung (`step_s`). The
   cost of a rung is that length times its steps to a loss, as they were measured (losses.py).
3. After FIRST clocks `Auto` takes the densest rung whose cost is at most NEAR higher than the least.
4. Later it changes to a sparser rung only if the least cost is lower by MARGIN. Any later change needs PATIENCE
   decisions in a row that agree, and each change of direction doubles that number.

Rules
- Of rungs that cost the same the densest is best: values that a rung leaves out cost loss, also where nobody has measured
  how much, and traffic that computing hides costs no time.
- A choice is left only for a rung that is better by a margin, several times in a row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from narrows.compression.compressor import Compressor
from narrows.compression.ladder import Rung
from narrows.compression.losses import alike
from narrows.compression.predict import clock_s
from narrows.compression.spec import parse

NEAR = 0.05  # a cost that is so little above the least is as good: clocks are not measured better, nor are losses
# The present rung is left for a sparser one only if the least cost is lower by this share. It is four times NEAR: otherwise
# noise would soon bring the rung back.
MARGIN = 0.20
PATIENCE = 5  # decisions in a row that must agree; noise, of medians too, seldom agrees for so long
PATIENCE_MAX = 16 * PATIENCE  # on the edge between two rungs each way back doubles the patience, up to this
WINDOW = 9  # measurements of a median: 4 outliers do not move it, and noise of +-20 % becomes 6 % (one sigma)
FIRST = 3  # clocks before the first choice: one may be an outlier (first touch of memory), the median of three is not
# Nanoseconds for encoding a parameter with a SPEC that was not timed yet: about those of the slowest rungs
# (topk:0.5+2bit 3.2, topk:0.27+sign 2.1, int8 0.9 with its residual; a million values, one core of the machine in
# README.md).
ENCODE_NS = 2.0
# A SPEC that was not timed yet takes at most so many times the longest that was timed: on a GPU all take far less than
# ENCODE_NS. On a CPU topk:0.11+sign takes 3.9 times cycle:0.15+sign (bench/speed/pace.py --coding).
ENCODE_MOST = 4.0
LEAST_S = 1e-4  # the shortest transfer time that counts: delays of busy processes allow no finer measurement


@dataclass(frozen=True, slots=True)
class Clock:
    """The measured cost of one clock of a worker. 0 bytes: that direction was not timed."""

    compute_s: float  # without waits and encoding
    encode_s: float  # with the rung of this clock
    up_bytes: int
    up_s: float
    down_bytes: int
    down_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of the SPEC, from the next clock on."""

    before: str
    after: str
    reason: str  # one sentence with the measurements, for the user


class _Median:
    """The median of the newest WINDOW values."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)

    def __bool__(self) -> bool:
        return bool(self.values)

    def add(self, value: float) -> None:
        self.values.append(value)

    @property
    def value(self) -> float:
        return median(self.values)


class Auto:
    """The choice of one worker for its pushes (`up`) and its pulls (`down`): one step moves on both ladders.

    A ladder of one rung keeps its direction as it is. If one ladder is shorter, its last rung goes with all further
    rungs of the other. The first choice is the sparsest rung: until the link has been measured it takes the least time,
    and error feedback sends later what the rung leaves out.
    """

    def __init__(
        self,
        up: tuple[Rung, ...],
        down: tuple[Rung, ...],
        count: int,
        window: int,
        steps: Callable[[float, float], float] = alike,
    ) -> None:
        """Begin on the sparsest rungs.

        Args:
            up, down: the ladders of pushes and pulls, densest first.
            count: the parameters of an update.
            window: the most updates in flight, including the update that is being computed.
            steps: the steps to a loss, as a multiple of bsp's, by the bytes per parameter of pushes and of pulls.
        """
        self.choices = [(up[min(i, len(up) - 1)], down[min(i, len(down) - 1)]) for i in range(max(len(up), len(down)))]
        self.steps = [steps(up.bytes, down.bytes) for up, down in self.choices]  # to a loss, of each choice
        self.named = 0 if len(up) > 1 else 1  # the direction whose SPECs a Switch names: 0 up, 1 down
        self.count, self.window = count, window
        self.at = len(self.choices) - 1
        self.compute, self.round_trip, self.up_rate, self.down_rate = _Median(), _Median(), _Median(), _Median()
        self.encode: dict[str, _Median] = {}  # seconds by SPEC of pushes
        self.up_fixed, self.down_fixed = (
            _Median() if len(rungs) == 1 else None for rungs in (up, down)
        )  # measured bytes of a clock, of a direction with one rung
        self.clocks = 0  # measured clocks
        self.wanted: list[int] = []  # targets of the newest decisions in a row, which all want the same direction
        self.patience = PATIENCE  # decisions in a row that a switch needs
        self.chosen = False  # the first choice has been made
        self.went = 0  # the direction of the last switch after the first choice: -1 denser, 1 sparser, 0 none yet

    @property
    def up(self) -> str:
        return self.choices[self.at][0].spec

    @property
    def down(self) -> str:
        return self.choices[self.at][1].spec

    @property
    def compressor(self) -> Compressor:
        """The compressor of what is pushed, by the present choice."""
        return parse(self.up)

    def step_s(self, choice: int) -> float:
        """Predict the seconds of a clock with one of `choices`, from the medians so far."""
        up, down = self.choices[choice]
        timed = self.encode.get(up.spec)
        most_s = ENCODE_MOST * max((each.value for each in self.encode.values()), default=math.inf)
        own = self.compute.value + (timed.value if timed else min(ENCODE_NS * 1e-9 * self.count, most_s))
        up_bytes = self.up_fixed.value if self.up_fixed else up.bytes * self.count
        down_bytes = self.down_fixed.value if self.down_fixed else down.bytes * self.count
        up_s = up_bytes / (self.up_rate or self.down_rate).value
        down_s = down_bytes / (self.down_rate or self.up_rate).value
        return clock_s(own, up_s, down_s, self.round_trip.value, self.window)

    def clock(self, seen: Clock) -> Switch | None:
        """Take the measurements of one clock, and decide. Return the switch, if there is one."""
        self.compute.add(seen.compute_s)
        self.encode.setdefault(self.up, _Median()).add(seen.encode_s)
        for rate, fixed, size, took_s in (
            (self.up_rate, self.up_fixed, seen.up_bytes, seen.up_s),
            (self.down_rate, self.down_fixed, seen.down_bytes, seen.down_s),
        ):
            if size:
                rate.add(size / max(took_s, LEAST_S))
            if size and fixed is not None:
                fixed.add(size)
        if seen.up_bytes or seen.down_bytes:
            self.round_trip.add(seen.round_trip_s)
        self.clocks += 1
        if self.clocks < FIRST or not self.round_trip:
            return None
        clocks = [self.step_s(choice) for choice in range(len(self.choices))]
        costs = [step_s * steps for step_s, steps in zip(clocks, self.steps, strict=True)]
        best = min(costs)
        target = next(choice for choice, cost in enumerate(costs) if cost <= best * (1 + NEAR))
        if not self.chosen:
            self.chosen = True
            return self._switch(target, clocks) if target != self.at else None
        if target > self.at and costs[self.at] <= best * (1 + MARGIN):
            target = self.at
        way = (target > self.at) - (target < self.at)
        if self.wanted and (self.wanted[0] > self.at) - (self.wanted[0] < self.at) != way:
            self.wanted.clear()
        if not way:
            return None
        self.wanted.append(target)
        if len(self.wanted) < self.patience:
            return None
        if way == -self.went:
            self.patience = min(2 * self.patience, PATIENCE_MAX)
        self.went = way
        return self._switch(min(self.wanted, key=lambda wanted: abs(wanted - self.at)), clocks)

    def follow(self, at: int, chosen: int) -> None:
        """Take over `at` and `chosen` of the process that chooses for this one."""
        self.at, self.chosen = at, bool(chosen)

    def _switch(self, target: int, clocks: list[float]) -> Switch:
        before, after = (self.choices[choice][self.named].spec for choice in (self.at, target))
        reason = (
            f"{_rate(self.up_rate or self.down_rate)} up, {_rate(self.down_rate or self.up_rate)} down, a round trip of "
            f"{_seconds(self.round_trip.value)} and {_seconds(self.compute.value)} of computing: a clock takes "
            f"{_seconds(clocks[target])} with {after}, {_seconds(clocks[self.at])} with {before}"
        )
        if self.steps[target] != self.steps[self.at]:
            reason += (
                f", and a loss {self.steps[target]:.3g} and {self.steps[self.at]:.3g} times bsp's steps, as measured"
            )
        self.at = target
        self.wanted.clear()
        return Switch(before, after, reason)


def _rate(rate: _Median) -> str:
    return f"{rate.value / 1e6:.3g} MB/s"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"
