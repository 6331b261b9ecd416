"""The figures that a member tells: its own, and those of its link. No I/O."""

from __future__ import annotations

from dataclasses import replace

from narrows.protocols.effects import NS
from narrows.protocols.member.heartbeat_summary import Rows, packed
from narrows.protocols.member.link_meter import LinkMeter


class MemberMetrics:
    """`rows`: of the member and all below it; whoever runs it sets that, and its counters go on at another place."""

    def __init__(self) -> None:
        self.rows: Rows = tuple
        self.began_ns: int | None = None
        self.size = 0  # bytes of the newest summary

    def packed(self, meter: LinkMeter, streams: int, now_ns: int) -> bytes:
        """For a heartbeat. `streams`: of a cluster to the server, of which the meter has seen one; a worker's sees all."""
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
        told = packed([replace(first, summary=summary), *others])
        self.size = len(told)
        return told
