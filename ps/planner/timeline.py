"""Virtual time: one heap of events, and wires that bytes pass. Pure.

Rules
- Events of one time come in the order in which they were made.
- A wire has a rate: bytes pass one message after the other, then take the delay.
- On several wires in a row a message is on all of them at once: its bytes are there when the slowest has passed them. Each is
  busy for as long as it takes itself: who waits for a slow wire does not hold up a fast one that others share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from narrows.protocols.effects import NS


@dataclass(slots=True)
class Wire:
    """One direction of what joins two places: `delay_ns` one way, and a rate that all links laid over it share."""

    delay_ns: int
    bytes_per_second: int
    free_ns: int = 0  # when the last byte so far has passed
    passed: int = 0  # bytes so far

    def pass_ns(self, size: int) -> int:
        """How long `size` bytes keep it busy."""
        return size * NS // self.bytes_per_second

    def arrival_ns(self, now_ns: int, size: int) -> int:
        """When a message of `size` bytes that is sent now is there; the wire is busy until its bytes have passed."""
        return arrival_ns((self,), now_ns, size)


def arrival_ns(wires: Sequence[Wire], now_ns: int, size: int) -> int:
    """When a message of `size` bytes that is sent now over these wires is there."""
    return passed_ns(wires, now_ns, size) + delay_ns(wires)


def passed_ns(wires: Sequence[Wire], now_ns: int, size: int) -> int:
    """When the last of these wires has passed it. Each is busy for as long as it takes itself."""
    end_ns = now_ns
    for wire in wires:
        free_ns = wire.free_ns
        wire.free_ns = there_ns = (free_ns if free_ns > now_ns else now_ns) + size * NS // wire.bytes_per_second
        if there_ns > end_ns:
            end_ns = there_ns
        wire.passed += size
    return end_ns


def delay_ns(wires: Sequence[Wire]) -> int:
    """That all these add."""
    return sum(wire.delay_ns for wire in wires)


class Timeline:
    """Carries out events in the order of their times."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, time_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` then; an event like any other."""
        self._made += 1
        heappush(self._events, (time_ns, self._made, action, arguments))

    def step(self) -> bool:
        """One event. False where there is none left."""
        if not self._events:
            return False
        self.now_ns, _, action, arguments = heappop(self._events)
        action(*arguments)
        return True
