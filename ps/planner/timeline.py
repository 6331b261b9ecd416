"""Virtual time: one heap of events, and wires that bytes pass. No I/O.

Rules
- Events of the same time are carried out in the order in which they were made.
- A wire has a rate and a delay: bytes pass one message after the other, and arrive after the delay.
- A message on several wires in a row is on all of them at once, and has passed when the slowest wire has passed its
  bytes. Each wire is busy only for its own time, so a message that waits for a slow wire does not hold up a fast wire
  that others share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from narrows.protocols.effects import NS


@dataclass(slots=True)
class Wire:
    """One direction of the connection between two places. All links over the wire share its rate."""

    delay_ns: int  # one way
    bytes_per_second: int
    free_ns: int = 0  # time at which the last byte so far has passed
    passed: int = 0  # bytes so far

    def pass_ns(self, size: int) -> int:
        """Return how long `size` bytes keep the wire busy."""
        return size * NS // self.bytes_per_second

    def arrival_ns(self, now_ns: int, size: int) -> int:
        """Send a message of `size` bytes now; return when it arrives. The wire is busy until the bytes have passed."""
        return arrival_ns((self,), now_ns, size)


def arrival_ns(wires: Sequence[Wire], now_ns: int, size: int) -> int:
    """Send a message of `size` bytes over these wires now; return when it arrives."""
    return passed_ns(wires, now_ns, size) + delay_ns(wires)


def passed_ns(wires: Sequence[Wire], now_ns: int, size: int) -> int:
    """Send `size` bytes over these wires now; return when the last wire has passed them.

    Each is busy for its own time.
    """
    end_ns = now_ns
    for wire in wires:
        free_ns = wire.free_ns
        wire.free_ns = there_ns = (free_ns if free_ns > now_ns else now_ns) + size * NS // wire.bytes_per_second
        if there_ns > end_ns:
            end_ns = there_ns
        wire.passed += size
    return end_ns


def delay_ns(wires: Sequence[Wire]) -> int:
    """Return the sum of the delays of these wires."""
    return sum(wire.delay_ns for wire in wires)


class Timeline:
    """Carries out events in the order of their times."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, time_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Add an event: call `action` with `arguments` at `time_ns`."""
        self._made += 1
        heappush(self._events, (time_ns, self._made, action, arguments))

    def step(self) -> bool:
        """Carry out the next event. Return False if no event is left."""
        if not self._events:
            return False
        self.now_ns, _, action, arguments = heappop(self._events)
        action(*arguments)
        return True
