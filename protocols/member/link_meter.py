"""Measures a link by the messages of a session: the round trip, and how long the bytes of each direction took. No I/O.

Rules
- A timed message has two times: when it was sent by its sender's clock, when it was received by its receiver's. The delay
  between them holds the difference of the clocks, which nobody knows; the least delay of late is that of an idle link.
- The bytes of a message took what it took beyond the least delay; its time behind earlier ones counts for those.
- The least delays of both directions are the round trip: the difference of the clocks cancels.
- All shards on one machine (Welcome.hosts) share its clock and the link to it: one `LinkMeter` for them all.
- The longest round trip of a heartbeat of late is what the road may take, with all that it waits for. A lease is longer by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.protocols.effects import NS, LinkSeen

# A least delay is of the last one to two of these: a dozen heartbeats, of which one finds the link idle. Not longer: a route
# may change, and two clocks that nobody steers drift apart by up to 3 ms in this time (50 ppm, two windows).
WINDOW_NS = 30 * NS
RATED_NS = NS // 10  # that payloads took, from one measured rate to the next


@dataclass(slots=True)
class RecentValues:
    """The least and the greatest of the values in this window and the one before it."""

    rows: list[list[int]] = field(default_factory=list)  # least and greatest, the newest window first
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
    """One way of the link. `bytes` took `busy_ns`, since both began to be counted."""

    bytes: int = 0
    busy_ns: int = 0
    rated_ns: int = 0  # what `busy_ns` and `bytes` were when the rate was taken
    rated_bytes: int = 0
    rate: float = 0.0  # bytes a second of late, while there were any on their way; 0: not measured
    free_ns: int = 0  # when the last payload had left, by the sender's clock
    delays: RecentValues = field(default_factory=RecentValues)  # by the receiver's clock

    def passed(self, sent_ns: int, received_ns: int, size: int = 0) -> None:
        """A message was timed that carried a payload of `size` bytes."""
        known = bool(self.delays.rows)
        self.delays.saw(received_ns - sent_ns, received_ns)
        left_ns = received_ns - self.delays.least
        if size and known:  # of the first message of all nobody can say how much of its delay was its bytes
            self.bytes += size
            self.busy_ns += max(0, left_ns - max(sent_ns, self.free_ns))
            self._rate()
        if size:
            self.free_ns = max(self.free_ns, left_ns)

    def _rate(self) -> None:
        """One message tells little where it is short: a rate is of so much time that they took."""
        busy_ns = self.busy_ns - self.rated_ns
        if busy_ns >= RATED_NS or not self.rated_ns:
            self.rate = (self.bytes - self.rated_bytes) * NS / busy_ns if busy_ns else 0.0
        if busy_ns >= RATED_NS:
            self.rated_ns, self.rated_bytes = self.busy_ns, self.bytes


@dataclass(slots=True)
class LinkMeter:
    """Both ways of the link of one session."""

    up: LinkDirection = field(default_factory=LinkDirection)
    down: LinkDirection = field(default_factory=LinkDirection)
    road: RecentValues = field(default_factory=RecentValues)  # round trips of heartbeats, by our own clock
    told: tuple[int, int, int, int] = (0, 0, 0, 0)  # bytes and time of both, when they were last read

    def anew(self) -> None:
        """The server's process is another one, and its clock may have stood still meanwhile."""
        self.up, self.down, self.told = LinkDirection(), LinkDirection(), (0, 0, 0, 0)

    @property
    def round_trip_ns(self) -> int:
        """0: not measured. The shortest heartbeat stands in where a clock stood still: then the sum is not positive."""
        up, down = self.up.delays, self.down.delays
        both = up.least + down.least if up.rows and down.rows else 0
        return both if both > 0 else self.road.least

    def beat(self, echo_ns: int, received_ns: int, sent_ns: int, now_ns: int) -> None:
        """An answer to a heartbeat, as HeartbeatAck has it; `echo_ns` 0: it was not asked for."""
        if echo_ns:
            self.up.passed(echo_ns, received_ns)
            self.road.saw(max(0, now_ns - echo_ns), now_ns)
        self.down.passed(sent_ns, now_ns)

    def read(self) -> LinkSeen:
        """Return what was seen since the last call."""
        up, down, told = self.up, self.down, self.told
        self.told = (up.bytes, up.busy_ns, down.bytes, down.busy_ns)
        since = (now - before for now, before in zip(self.told, told, strict=True))
        return LinkSeen(self.round_trip_ns, *since)
