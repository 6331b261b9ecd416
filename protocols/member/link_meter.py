"""Measures a link by the messages of a session: the round trip, and how long the bytes of each direction took. No I/O.

"Clock" means the system clock of a machine here.

Rules
- A timed message has two times: its send time by the sender's clock, its receive time by the receiver's. The delay
  between the two contains the unknown difference of the clocks. The least recent delay is that of an idle link.
- The delay of a message beyond the least delay is the time that its bytes took. Time that the message waited behind an
  earlier one counts for the earlier one.
- The sum of the least delays of both directions is the round trip: the difference of the clocks cancels.
- All shards on one machine (Welcome.hosts) share its clock and the link to it, so one `LinkMeter` serves them all.
- `road` holds the round trips of heartbeats, with all queues that a heartbeat waits in. The longest recent one is added
  to the member's lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.protocols.effects import NS, LinkMeasured

# A least delay is taken over the last one to two windows. A window has a dozen heartbeats, of which one finds the link
# idle. The window is not longer, because a route may change, and because two clocks that nothing synchronizes drift
# apart by up to 3 ms in this time (50 ppm, two windows).
WINDOW_NS = 30 * NS
RATED_NS = NS // 10  # busy time of a direction from one measured rate to the next


@dataclass(slots=True)
class RecentValues:
    """The smallest and the largest value of this window and the one before it."""

    rows: list[list[int]] = field(default_factory=list)  # [least, greatest] of each window, the newest first; at most 2
    window_ns: int = 0  # when this window began

    def saw(self, value: int, now_ns: int) -> None:
        if not self.rows or now_ns - self.window_ns >= WINDOW_NS:
            self.rows, self.window_ns = [[value, value], *self.rows[:1]], now_ns
        row = self.rows[0]
        row[:] = min(row[0], value), max(row[1], value)

    @property
    def least(self) -> int:
        return min((row[0] for row in self.rows), default=0)

    @property
    def most(self) -> int:
        return max((row[1] for row in self.rows), default=0)


@dataclass(slots=True)
class LinkDirection:
    """One direction of the link."""

    bytes: int = 0  # of all payloads timed so far
    busy_ns: int = 0  # time that those bytes took
    rated_ns: int = 0  # `busy_ns` when `rate` was taken
    rated_bytes: int = 0  # `bytes` when `rate` was taken
    rate: float = 0.0  # bytes a second while payloads were on their way, recently; 0: not measured
    free_ns: int = 0  # when the last payload had left, by the sender's clock
    delays: RecentValues = field(default_factory=RecentValues)  # receive time minus send time, timed by the receiver

    def passed(self, sent_ns: int, received_ns: int, size: int = 0) -> None:
        """Note one timed message.

        Args:
            sent_ns: its send time, by the sender's clock.
            received_ns: its receive time, by the receiver's clock.
            size: bytes of its payload.
        """
        known = bool(self.delays.rows)
        self.delays.saw(received_ns - sent_ns, received_ns)
        left_ns = received_ns - self.delays.least
        if size and known:  # without an earlier delay, the part that the bytes took is unknown
            self.bytes += size
            self.busy_ns += max(0, left_ns - max(sent_ns, self.free_ns))
            self._rate()
        if size:
            self.free_ns = max(self.free_ns, left_ns)

    def _rate(self) -> None:
        """Take a new rate once the payloads since the last one took RATED_NS: one short message says little."""
        busy_ns = self.busy_ns - self.rated_ns
        if busy_ns >= RATED_NS or not self.rated_ns:
            self.rate = (self.bytes - self.rated_bytes) * NS / busy_ns if busy_ns else 0.0
        if busy_ns >= RATED_NS:
            self.rated_ns, self.rated_bytes = self.busy_ns, self.bytes


@dataclass(slots=True)
class LinkMeter:
    """Both directions of the link of one session."""

    up: LinkDirection = field(default_factory=LinkDirection)  # to the server
    down: LinkDirection = field(default_factory=LinkDirection)
    road: RecentValues = field(default_factory=RecentValues)  # round trips of heartbeats, by the member's own clock
    last_read: tuple[int, int, int, int] = (0, 0, 0, 0)  # bytes and busy time up, then down, at the last `read`

    def anew(self) -> None:
        """Forget all but `road`: the server's process may be a new one, and its clock may have stood still."""
        self.up, self.down, self.last_read = LinkDirection(), LinkDirection(), (0, 0, 0, 0)

    @property
    def round_trip_ns(self) -> int:
        """The round trip of an idle link; 0: not measured.

        If a clock stood still, the sum of the delays is not positive. The shortest heartbeat then stands in.
        """
        up, down = self.up.delays, self.down.delays
        both = up.least + down.least if up.rows and down.rows else 0
        return both if both > 0 else self.road.least

    def beat(self, echo_ns: int, received_ns: int, sent_ns: int, now_ns: int) -> None:
        """Note a HeartbeatAck: three of its fields, and the time now. `echo_ns` 0: it answers no heartbeat."""
        if echo_ns:
            self.up.passed(echo_ns, received_ns)
            self.road.saw(max(0, now_ns - echo_ns), now_ns)
        self.down.passed(sent_ns, now_ns)

    def read(self) -> LinkMeasured:
        """Return the round trip, and the bytes and busy time of both directions since the last call."""
        up, down, told = self.up, self.down, self.last_read
        self.last_read = (up.bytes, up.busy_ns, down.bytes, down.busy_ns)
        since = (now - before for now, before in zip(self.last_read, told, strict=True))
        return LinkMeasured(self.round_trip_ns, *since)
