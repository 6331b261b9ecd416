"""`auto`: which SPEC of a ladder suits a link, by what a clock was measured to cost. Pure: no clock, no I/O.

Rules
- The densest rung that costs (nearly) nothing is best: what a rung leaves out costs loss, what is hidden costs no time.
- How long a clock takes with a rung says predict.py.
- A choice, once made, is left only for one that is better by a margin, time after time; a way back takes longer each time.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from statistics import median

from narrows.compression.errors import SpecError
from narrows.compression.predict import clock_s
from narrows.compression.spec import parse

FLOOR = 0.004  # of fp32's bytes, unless auto:FLOOR says another: docs/archive/results-0.1.md says what 1/210 costs
LEAST = 0.001  # the lowest FLOOR
WHOLE = 0.25  # pushed gradients go no lower: every value as int8
NEAR = 0.05  # a clock so little longer than the shortest is as good: the bytes are worth more
# The present rung is left for a sparser one only if the shortest clock is so much shorter: four times NEAR, or noise would
# find its way back.
MARGIN = 0.20
PATIENCE = 5  # decisions in a row that must agree, each on a median: noise agrees with itself for less long
PATIENCE_MAX = 16 * PATIENCE  # on the edge between two rungs every way back doubles the patience, up to this
WINDOW = 9  # measurements that a median is of: 4 outliers do not move it, +-20 % of noise become 6 % (one sigma)
FIRST = 3  # clocks before the first choice: one may be anything (first touch of memory), the median of three is not
# A parameter, of a SPEC that was not timed yet: that of the slowest rungs (topk:0.5+2bit 3.2, topk:0.27+sign 2.1, int8 0.9
# with its residual; a million values, one core of the machine in README.md).
ENCODE_NS = 2.0
LEAST_S = 1e-4  # bytes that took less count as this: the delays of busy processes tell no finer


@dataclass(frozen=True, slots=True)
class Rung:
    spec: str  # canonical
    bytes: float  # of a payload, per parameter

    @property
    def share(self) -> float:
        """The payload's bytes as a share of fp32's."""
        return self.bytes / 4


# Densest first, which is the order of loss too: a new row goes where its bytes put it. tests/runs/test_auto.py measures them.
# Bits beside selections: updates want many values and few bits. bench/loss/residual_by_spec.py ranks SPECs of equal bytes.
LADDER: tuple[Rung, ...] = (
    Rung("dense", 4.0),
    Rung("fp16", 2.0),
    Rung("int8", 1.008),
    Rung("int4", 0.531),
    Rung("topk:0.5+2bit", 0.253),
    Rung("topk:0.27+sign", 0.142),
    Rung("topk:0.11+sign", 0.0786),
    Rung("cycle:0.25/0.24+sign", 0.0333),
    Rung("cycle:0.15+sign", 0.0190),
    Rung("cycle:0.06+sign", 0.00783),
    Rung("cycle:0.03+sign", 0.00404),
)


class Ladder(tuple[Rung, ...]):
    """The rungs that a SPEC leaves open, densest first; one, where it names a compressor."""

    @property
    def specs(self) -> list[str]:
        return [rung.spec for rung in self]

    @property
    def lossless(self) -> bool:
        """Nothing is ever left out: what is published is a whole state, not a difference."""
        return all(parse(rung.spec).lossless for rung in self)

    @property
    def raw(self) -> bool:
        """Values always travel as they are."""
        return all(rung.spec == "dense" for rung in self)


_AUTO = re.compile(r"auto(?::((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))?", re.ASCII)
_COUNT = 1 << 20  # parameters that the bound on a fixed SPEC's bytes is taken of, until they are measured


def ladder(spec: str, sparse: bool = True) -> Ladder:
    """The rungs that `spec` leaves open: those of `auto` down to its floor, or one, `spec` itself.

    `sparse` false: only rungs that send every value. Raises SpecError, one sentence.
    """
    if re.split("[:+]", spec, maxsplit=1)[0] != "auto":
        fixed = parse(spec)
        return Ladder([Rung(fixed.spec, fixed.payload_bytes_max(_COUNT) / _COUNT)])
    written = _AUTO.fullmatch(spec)
    floor = FLOOR if written is None or written[1] is None else float(written[1])
    if written is None or not LEAST <= floor <= 1.0:
        raise SpecError(
            f"SPEC {spec!r}: auto chains with no stage and takes a FLOOR from {LEAST:g} to 1, the least share of the bytes of "
            "fp32; write auto or auto:FLOOR"
        )
    return Ladder(rung for rung in LADDER if rung.share >= (floor if sparse else max(floor, WHOLE)))


@dataclass(frozen=True, slots=True)
class Clock:
    """The measured cost of one clock of a worker. 0 bytes: nothing was timed that way."""

    compute_s: float  # neither waiting nor encoding
    encode_s: float  # with the rung of this clock
    up_bytes: int
    up_s: float
    down_bytes: int
    down_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """From the next clock on; `reason` is one sentence."""

    before: str
    after: str
    reason: str


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
    """The choice of one worker for what it pushes (`up`) and what it pulls (`down`): two ladders, one step on both.

    A ladder of one rung leaves that direction as it is; the shorter of two ends where it ends. It begins on the sparsest
    rung: until the link is known that costs least time, and what is left out is kept and sent later.
    """

    def __init__(self, up: tuple[Rung, ...], down: tuple[Rung, ...], count: int, window: int) -> None:
        """`count`: parameters. `window`: updates that may be in flight, the one that is computed included."""
        self.choices = [(up[min(i, len(up) - 1)], down[min(i, len(down) - 1)]) for i in range(max(len(up), len(down)))]
        self.named = 0 if len(up) > 1 else 1  # whose SPEC a switch is named by
        self.count, self.window = count, window
        self.at = len(self.choices) - 1
        self.compute, self.round_trip, self.up_rate, self.down_rate = _Median(), _Median(), _Median(), _Median()
        self.encode: dict[str, _Median] = {}  # by SPEC
        self.up_fixed, self.down_fixed = (
            _Median() if len(rungs) == 1 else None for rungs in (up, down)
        )  # bytes of a clock
        self.clocks = 0
        self.wanted: list[int] = []  # by the newest decisions in a row that want to go the same way
        self.patience = PATIENCE
        self.chosen = False
        self.went = 0  # the way of the last switch after the first choice: -1 denser, 1 sparser, 0 none yet

    @property
    def up(self) -> str:
        return self.choices[self.at][0].spec

    @property
    def down(self) -> str:
        return self.choices[self.at][1].spec

    def step_s(self, choice: int) -> float:
        """How long a clock takes, by what is known, with this one of `choices`."""
        up, down = self.choices[choice]
        timed = self.encode.get(up.spec)
        own = self.compute.value + (timed.value if timed else ENCODE_NS * 1e-9 * self.count)
        up_bytes = self.up_fixed.value if self.up_fixed else up.bytes * self.count
        down_bytes = self.down_fixed.value if self.down_fixed else down.bytes * self.count
        up_s = up_bytes / (self.up_rate or self.down_rate).value
        down_s = down_bytes / (self.down_rate or self.up_rate).value
        return clock_s(own, up_s, down_s, self.round_trip.value, self.window)

    def clock(self, seen: Clock) -> Switch | None:
        """Take in one more clock, and decide."""
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
        steps = [self.step_s(choice) for choice in range(len(self.choices))]
        best = min(steps)
        target = next(choice for choice, step in enumerate(steps) if step <= best * (1 + NEAR))
        if not self.chosen:
            self.chosen = True
            return self._switch(target, steps) if target != self.at else None
        if target > self.at and steps[self.at] <= best * (1 + MARGIN):
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
        return self._switch(min(self.wanted, key=lambda wanted: abs(wanted - self.at)), steps)

    def _switch(self, target: int, steps: list[float]) -> Switch:
        before, after = (self.choices[choice][self.named].spec for choice in (self.at, target))
        reason = (
            f"{_rate(self.up_rate or self.down_rate)} up, {_rate(self.down_rate or self.up_rate)} down, a round trip of "
            f"{_seconds(self.round_trip.value)} and {_seconds(self.compute.value)} of computing: a clock takes "
            f"{_seconds(steps[target])} with {after}, {_seconds(steps[self.at])} with {before}"
        )
        self.at = target
        self.wanted.clear()
        return Switch(before, after, reason)


def _rate(rate: _Median) -> str:
    return f"{rate.value / 1e6:.3g} MB/s"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"
