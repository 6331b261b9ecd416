"""The figures that a member sends with each heartbeat: its counters, and those of its link. No I/O."""

from __future__ import annotations

from dataclasses import replace

from narrows.protocols.effects import NS
from narrows.protocols.member.heartbeat_summary import Rows, packed
from narrows.protocols.member.link_meter import LinkMeter


class MemberMetrics:
    """The figures of one member.

    The counters go on when the member takes another place in the run.
    """

    def __init__(self) -> None:
        self.rows: Rows = tuple  # without the row of the member there is no summary
        self.began_ns: int | None = None  # time of the first summary
        self.size = 0  # bytes of the newest summary

    def read_from(self, rows: Rows) -> None:
        """Take the figures of each heartbeat from `rows`: it returns the member's row and those of all members below."""
        self.rows = rows

    def packed(self, meter: LinkMeter, streams: int, now_ns: int) -> bytes:
        """Return the summary for a heartbeat, packed; b"" without rows.

        Args:
            meter: of the link to the server.
            streams: number of shards of the server. A cluster has a connection to each, and `meter` sees one of them:
                the rates are multiplied. The meter of a worker sees all.
            now_ns: the time.
        """
        if not (rows := self.rows()):
            return b""
        first, *others = rows
        self.began_ns = now_ns if self.began_ns is None else self.began_ns
        streams = streams if first.runs else 1
        summary = replace(
            first.summary,
            seconds=(now_ns - self.began_ns) / NS,
            busy_up_seconds=meter.up.busy_ns / NS,
            busy_down_seconds=meter.down.busy_ns / NS,
            rate_up=meter.up.rate * streams,
            rate_down=meter.down.rate * streams,
            round_trip_seconds=meter.round_trip_ns / NS,
        )
        packed_rows = packed([replace(first, summary=summary), *others])
        self.size = len(packed_rows)
        return packed_rows
