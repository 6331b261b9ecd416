"""How long things may take: the limits of every wait of a session, and when what was sent is sent again."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.effects import NS

BYTES_PER_SECOND = 125_000  # of the slowest link: n bytes get n / this on top of every wait
PATIENCE_MAX = 8
BEATS, SILENT_BEATS = (
    4,
    2,
)  # heartbeats in a lease, at least; so many of these without a word of the server are a silence
SHOWN_NS = NS  # who looks at a run sees no figure that is much older: a summary goes with each heartbeat
SUMMARY_BYTES_PER_SECOND = 13_000  # of summaries, where a lease allows it: those of 80 members below a cluster
CHECKPOINT_COST_TIMES = 50  # the time that a checkpoint takes, from one to the next: 2 % of the run
CHECKPOINT_LEAST_NS = 5 * NS  # so much work is lost gladly
START_LIMIT_S = 600.0  # a worker waits so long for the other workers of a run to join
WAIT_LIMIT_S = (
    3600.0  # a worker waits for no barrier longer; a dead worker costs a lease, a dead server is found sooner
)
LONG_AGO_NS = -(1 << 62)  # in the place of when something was sent: it is to be repeated with the next tick


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of every wait, in ns."""

    join_retry_ns: int = NS // 2
    request_retry_ns: int = 5 * NS
    bytes_per_second: int = BYTES_PER_SECOND
    lost_ns: int = 30 * NS  # no sign of the server for so long: it is lost
    connect_ns: int = 30 * NS  # no first answer for so long: it cannot be reached

    def answer_ns(self, size: int) -> int:
        """How long the answer to so many bytes may take."""
        return self.request_retry_ns + size * NS // self.bytes_per_second

    def beat_ns(self, lease: float, size: int = 0) -> int:
        """From one heartbeat, whose summary has so many bytes, to the next. `lease`: in seconds."""
        return min(self.lease_ns(lease) // BEATS, max(SHOWN_NS, size * NS // SUMMARY_BYTES_PER_SECOND))

    def silent_ns(self, lease: float) -> int:
        """Without a word of the server for so long, what was said may have been lost."""
        return SILENT_BEATS * self.lease_ns(lease) // BEATS

    def lease_ns(self, lease: float) -> int:
        return min(int(lease * NS), self.lost_ns)


@dataclass(slots=True)
class RetryTimer:
    """When bytes that are not acknowledged are sent again. A link that is slower than the limit would carry nothing but
    copies: where an answer to what was sent twice shows how long one takes there, the next ones are waited for as long."""

    timing: Timing
    factor: int = 1

    def over(self, sent_ns: int, size: int, now_ns: int) -> bool:
        return now_ns - sent_ns >= self.factor * self.timing.answer_ns(size)

    def answered(self, sent_ns: int, size: int, now_ns: int) -> None:
        """The answer to what was sent first at `sent_ns`, and once more since, is here."""
        took = -(-(now_ns - sent_ns) // self.timing.answer_ns(size))
        self.factor = min(max(self.factor, took), PATIENCE_MAX)
