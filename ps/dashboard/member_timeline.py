"""The timeline of one member: its totals, its rates, and what it did in each time bucket. No I/O, no clock.

Rules
- The counters of a summary begin anew with each process of a member. The totals of a timeline go on: a counter that
  falls has begun anew, as in Prometheus.
- A timeline has `CELLS` buckets. Once all are used, each two become one, so they always cover the whole run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from typing import Any

from narrows.protocols.member.heartbeat_summary import Summary
from narrows.ps.dashboard.time_buckets import ROWS, TimeBuckets

COUNTERS = (
    *("steps", "updates", "samples", "compute_seconds", "encode_seconds", "wait_seconds", "bytes_up", "bytes_down"),
    *("busy_up_seconds", "busy_down_seconds", "dropped", "skipped", "launches", "replays", "seconds"),
    *("relay_bytes", "teacher_bytes_up", "teacher_bytes_down", "teacher_missed", "teacher_seconds"),
)
NAMES = ("host", "runs", *(each.name for each in fields(Summary)))
TIMES = ROWS[1:]
# Rates are means over at least RECENT_S, as far as PARTS summaries reach back: one heartbeat sees few whole steps.
RECENT_S, PARTS = 5.0, 16
TOOK_S = 1e-6  # a member whose steps took less than this in all has no rate
QUIET_S = 10.0  # the rate of a member falls once it has made no step for so long and for the time of three steps


class MemberTimeline:
    """The timeline of one member.

    Args:
        path: the ranks of the clusters above the member, and its own rank, from this server down.
    """

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path = path
        self.newest: dict[str, Any] = {}  # the last summary
        self.total = dict.fromkeys(COUNTERS, 0.0)  # counts of all processes that this member has had
        self.stale: list[int] = []  # steps by staleness, in the buckets of STALE
        self.live, self.how = True, ""  # `how`: the way in which a dead member ended, once an event has said it
        self.parting = "gone"  # how a member below a cluster ended: "left", "lost", or "gone" where either may be true
        self.lost = 0  # members that this cluster has lost since its summary before
        self.began = self.heard = self.moved = 0.0  # seconds of the run: first summary, newest summary, newest step
        self.parts = deque[dict[str, float]](maxlen=PARTS)  # growth of the counters between summaries with steps
        self.recent = dict.fromkeys(COUNTERS, 0.0)  # the sum of the newest parts, of RECENT_S at least
        self.growth = dict.fromkeys(COUNTERS, 0.0)  # growth since the newest part
        self.ahead = 0  # clocks ahead of the slowest member of its server, at the newest summary
        self.lost_loss = False  # the newest summary follows a step and has no loss, while the one before had a loss
        self.skips = False  # the history has reported that this member skips steps
        self.odd = False  # the history has reported that this member's loss is not finite
        self.cells = TimeBuckets()

    def __str__(self) -> str:
        return f"rank {'.'.join(map(str, self.path))} ({self.newest['host']})".removesuffix(" ()")

    def hear(self, summary: Mapping[str, Any], now_s: float, width: float) -> None:
        """Take a summary.

        Args:
            summary: the figures.
            now_s: when the summary came, seconds of the run.
            width: seconds of a time bucket.
        """
        before, anew = self.newest, summary["seconds"] < self.newest.get("seconds", 0.0)
        grown = {name: summary[name] - (0 if anew else before.get(name, 0)) for name in COUNTERS}
        # Another member may have taken this path: then the host differs, or a counter falls.
        same = not anew and summary["host"] == before.get("host") and min(grown.values()) >= 0
        gone = summary["loss"] is None and before.get("loss") is not None
        self.lost_loss = gone and same and grown["steps"] > 0 and not summary["runs"]
        grown = {name: summary[name] if value < 0 else value for name, value in grown.items()}
        self.odd = self.odd and summary["loss"] is None
        counts = before.get("stale") if not anew else None
        counts = counts or [0] * len(summary["stale"])
        self.stale = self.stale or [0] * len(summary["stale"])
        self.stale = [
            total + max(0, now - then) for total, now, then in zip(self.stale, summary["stale"], counts, strict=True)
        ]
        self.lost = summary["lost"] - (summary["lost"] if not before else 0 if anew else before["lost"])
        if not before:
            self.began = now_s
        for name, value in grown.items():
            self.total[name] += value
            self.growth[name] = value if anew else self.growth[name] + value
        self.newest = {name: summary[name] for name in NAMES}
        self.heard, self.live, self.how = now_s, True, ""
        self.cells.fit(width)
        if self.growth["steps"] > 0:
            took = sum(self.growth[name] for name in TIMES) or self.growth["seconds"]
            self.cells.spread(max(0.0, now_s - max(took, 1e-9)), now_s, [self.growth[name] for name in ROWS])
            self._move(anew)
            self.moved = now_s

    def leads(self, clocks: int) -> None:
        """Note by how many clocks the member is ahead of the slowest one of its server."""
        self.ahead = clocks

    def end(self, how: str) -> None:
        """Note that the member is dead. `how`: the way in which it ended, "" while that is not known."""
        self.live, self.how = False, how

    def supposes(self, parting: str) -> None:
        """Note how a member that its cluster no longer names has probably ended."""
        self.parting = parting

    def begins_to_skip(self) -> bool:
        """True once: the member has skipped its first step."""
        before, self.skips = self.skips, self.skips or bool(self.total["skipped"])
        return self.skips and not before

    def turns_odd(self) -> bool:
        """Note that the member's loss is not finite. True if that was not known."""
        before, self.odd = self.odd, True
        return not before

    def _move(self, anew: bool) -> None:
        """Make the growth since the newest part a part of its own.

        Older parts are dropped once the rest is RECENT_S long; parts of an earlier process are dropped always (`anew`).
        """
        if anew:
            self.parts.clear()
        self.parts.append(self.growth)
        while len(self.parts) > 1 and sum(part["seconds"] for part in islice(self.parts, 1, None)) >= RECENT_S:
            self.parts.popleft()
        self.recent = {name: sum(part[name] for part in self.parts) for name in COUNTERS}
        self.growth = dict.fromkeys(COUNTERS, 0.0)

    def rate(self, name: str, now_s: float) -> float:
        """Return the growth of a counter in a second. The rate falls while the member makes no step."""
        took, steps = self.recent["seconds"], self.recent["steps"]
        if not self.live or took < TOOK_S or not steps:
            return 0.0
        quiet = now_s - self.moved
        return self.recent[name] / (took if quiet < max(QUIET_S, 3 * took / steps) else max(took, quiet))

    @property
    def busy(self) -> tuple[float, float]:
        """Share of the time in which payloads were on their way: (up, down)."""
        recent = self.recent
        seconds = max(recent["seconds"], sum(recent[name] for name in TIMES))
        up, down = (
            min(1.0, recent[f"busy_{way}_seconds"] / seconds) if seconds >= TOOK_S else 0.0 for way in ("up", "down")
        )
        return up, down

    @property
    def taught(self) -> bool:
        """True if the member has teachers."""
        return any(self.total[name] for name in ("teacher_bytes_up", "teacher_bytes_down", "teacher_missed"))

    def each(self, name: str) -> float:
        """Return the growth of a counter in a step."""
        return self.recent[name] / self.recent["steps"] if self.recent["steps"] else 0.0
