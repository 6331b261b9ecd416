"""What a child, a worker or the server of a cluster, holds of one shard above it: the state it pulled, its residual, and
its own updates that this state lacks.

Rules
- replica = pulled + residual + sum over own clocks of stand_in * update (protocols/replica.py), made in `compose` and
  nowhere else.
- Each fragment of the keys (Streaming DiLoCo) is a stream with a residual of its own; most modes have one, all the keys.
- What comes from the server is looked at whole before any of it is taken over.
- Payloads are read by `coding`, which is narrows.compression: protocols/ does not import it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.keys import covers, fragment
from narrows.protocols.member.replica import stand_in
from narrows.protocols.modes import Mode

FloatArray = npt.NDArray[np.float32]
Coded = tuple[int, int, int, m.Buffer]  # codec, begin, end, payload


class Coding(Protocol):
    """Reads payloads; see narrows.compression."""

    def check(self, payload: m.Buffer, count: int, *, finite: bool = False) -> None:
        """Raise ValueError unless it is one of exactly `count` values, `finite` ones."""

    def accumulate(self, payload: m.Buffer, weight: float, out: FloatArray) -> None: ...

    def add_raw(self, raw: m.Buffer, weight: float, out: FloatArray) -> None: ...


class Feedback(Protocol):
    """What is kept back of what was sent."""

    residual: FloatArray | None


F = TypeVar("F", bound=Feedback)


def raw_values(state: m.State) -> FloatArray:
    """The values of a dense part. Raises RemoteProtocolError where it has other than its keys need."""
    if state.codec != m.RAW_FLOAT32 or len(state.payload) != 4 * (state.end - state.begin):
        raise RemoteProtocolError(
            f"the server sent {len(state.payload)} bytes of codec {state.codec} as the raw values of keys "
            f"[{state.begin}, {state.end})"
        )
    return np.frombuffer(state.payload, np.float32)


class ShardView(Generic[F]):
    """Keys [begin, end). `feedbacks`: one for each fragment. `pulled` is where the state goes, float32[end - begin], or
    None where the caller takes it."""

    def __init__(
        self, begin: int, end: int, feedbacks: Sequence[F], mode: Mode, pulled: FloatArray | None, coding: Coding
    ) -> None:
        self.begin, self.end, self.mode, self.pulled, self.coding = begin, end, mode, pulled, coding
        cuts = [fragment(begin, end, mode.fragments, index) for index in range(mode.fragments)]
        self.fragments = list(zip(cuts, feedbacks, strict=True))
        self.publication = self.min_clock = self.settled = -1
        self.contains: dict[int, float] = {}  # own clocks in the pulled state, and the weight each was folded at
        self.own: OrderedDict[int, list[Coded]] = OrderedDict()  # updates as sent
        self.pulls = 0  # under way
        self.in_flight: set[int] = set()
        self.master: FloatArray | None = None

    def turn(self, clock: int) -> tuple[tuple[int, int], F]:
        """Keys [begin, end) of the fragment that update `clock` carries, and its feedback."""
        return self.fragments[self.mode.fragment(clock)]

    @property
    def residuals(self) -> list[tuple[int, int, FloatArray]]:
        """Begin, end and values of each residual that there is."""
        return [(*keys, kept.residual) for keys, kept in self.fragments if kept.residual is not None]

    def _is_difference(self, part: m.State) -> bool:
        """Whether it may be what one publication changed: of all keys or one fragment, or values of keys of a fragment."""
        keys = (part.begin, part.end)
        if part.codec == m.RAW_FLOAT32:
            return len(self.fragments) > 1 and self.begin <= part.begin <= part.end <= self.end
        return keys == (self.begin, self.end) or any(keys == cut for cut, _ in self.fragments)

    def check(self, parts: tuple[m.State, ...]) -> None:
        """Raise RemoteProtocolError unless `parts` hold this shard's keys exactly once, or are what publications changed."""
        pieces = [(part.begin, part.end) for part in parts]
        delta = parts[-1].delta
        if not (all(map(self._is_difference, parts)) if delta else covers(pieces, self.begin, self.end)):
            raise RemoteProtocolError(
                f"the server sent a state that does not cover [{self.begin}, {self.end}) exactly once"
            )
        for part in parts:
            if part.delta != parts[-1].delta:
                raise RemoteProtocolError("the server sent a state that is half a difference")
            if not part.delta or part.codec == m.RAW_FLOAT32:
                raw_values(part)
                continue
            try:
                self.coding.check(part.payload, part.end - part.begin)
            except ValueError as error:
                raise RemoteProtocolError(f"the server sent a payload that is none: {error}") from None

    def arrived(self, event: e.StateArrived) -> None:
        """Take over the whole answer to a pull. Raises RemoteProtocolError; then nothing has changed."""
        self.check(event.parts)
        self.pulls = max(0, self.pulls - 1)
        if event.master:
            self.master = self._dense(event.parts, np.empty(self.end - self.begin, np.float32))
            return
        last = event.parts[-1]
        self.publication, self.min_clock, self.settled = last.publication, last.min_clock, last.settled
        self.contains = dict(last.contains)
        if self.pulled is None:
            return
        if not last.delta:
            self._dense(event.parts, self.pulled)
            return
        for part in event.parts:
            if part.codec == m.RAW_FLOAT32:
                self._dense((part,), self.pulled)
            else:
                self.coding.accumulate(part.payload, 1.0, self.pulled[part.begin - self.begin : part.end - self.begin])

    def _dense(self, parts: tuple[m.State, ...], out: FloatArray) -> FloatArray:
        for part in parts:
            np.copyto(out[part.begin - self.begin : part.end - self.begin], raw_values(part))
        return out

    def compose(self, own_clock: int, begin: int, end: int, out: FloatArray) -> None:
        """The replica of keys [begin, end), which are whole fragments, into `out`, float32[end - begin]; own updates that
        no longer stand in are forgotten."""
        assert self.pulled is not None
        np.copyto(out, self.pulled[begin - self.begin : end - self.begin])
        for low, high, residual in self.residuals:
            if begin <= low and high <= end:
                out[low - begin : high - begin] += residual
        for clock, coded in self.own.items():
            weight = stand_in(self.mode, clock, own_clock, self.settled, self.contains.get(clock))
            for codec, low, high, payload in coded if weight else ():
                if begin <= low and high <= end:
                    add = self.coding.accumulate if codec == m.CODED else self.coding.add_raw
                    add(payload, weight, out[low - begin : high - begin])
        oldest = self.settled if self.mode.bound is not None else max(self.settled, own_clock - self.mode.window)
        for clock in [c for c in self.own if c < oldest and c not in self.in_flight]:
            del self.own[clock]
