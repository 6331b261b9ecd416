"""The members of a run as its history knows them, each with a lane: what it did in each stretch of time. No I/O, no clock.

Rules
- Counters of a summary begin anew with each life of a member. The counts of a lane go on: a counter that falls has
  begun anew, as Prometheus takes it.
- A lane has `CELLS` cells. Where they are all used, two become one: it always has the whole run.
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
    *("busy_up_seconds", "busy_down_seconds", "dropped", "skipped", "seconds"),
)
NAMES = ("host", "runs", *(each.name for each in fields(Summary)))
TIMES = ROWS[1:]
# Figures are means over so long, if so many summaries are enough: a heartbeat sees few whole steps.
RECENT_S, PARTS = 5.0, 16
TOOK_S = 1e-6  # a step takes longer: a member that says less has no rate
QUIET_S = 10.0  # no step for so long, and for three steps: its rate falls


class MemberTimeline:
    """One member, by its path. `newest`: its last summary; `total`: what it has counted in all its lives."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path = path
        self.newest: dict[str, Any] = {}
        self.total = dict.fromkeys(COUNTERS, 0.0)
        self.stale: list[int] = []
        self.live, self.how = True, ""  # and how it went, once that was said
        self.parting = "gone"  # how one below a cluster went: "left", "lost", or "gone": one of the two
        self.lost = 0  # members of this cluster that it has lost since the summary before
        self.began = self.heard = self.moved = 0.0  # seconds of the run: first, and newest, summary; newest step
        self.parts = deque[dict[str, float]](maxlen=PARTS)  # each between two summaries with steps between
        self.recent = dict.fromkeys(COUNTERS, 0.0)  # the newest of them together, of RECENT_S at least
        self.due = dict.fromkeys(COUNTERS, 0.0)  # since then
        self.ahead = 0  # clocks, of the slowest member of its server when it was told of last
        self.lost_loss = False  # the newest summary has none after a step, and the one before, of the same member, had
        self.skips = False  # it has left out steps, and that was said
        self.odd = False  # its newest loss was not finite, and that was said
        self.cells = TimeBuckets()

    def __str__(self) -> str:
        return f"rank {'.'.join(map(str, self.path))} ({self.newest['host']})".removesuffix(" ()")

    def hear(self, summary: Mapping[str, Any], now_s: float, width: float) -> None:
        """A summary that came at `now_s`; cells are so wide."""
        before, anew = self.newest, summary["seconds"] < self.newest.get("seconds", 0.0)
        grown = {name: summary[name] - (0 if anew else before.get(name, 0)) for name in COUNTERS}
        # Another member may have this path by now: its host is another one, or a counter falls.
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
            self.due[name] = value if anew else self.due[name] + value
        self.newest = {name: summary[name] for name in NAMES}
        self.heard, self.live, self.how = now_s, True, ""
        self.cells.fit(width)
        if self.due["steps"] > 0:
            took = sum(self.due[name] for name in TIMES) or self.due["seconds"]
            self.cells.spread(max(0.0, now_s - max(took, 1e-9)), now_s, [self.due[name] for name in ROWS])
            self._move(anew)
            self.moved = now_s

    def _move(self, anew: bool) -> None:
        """What was due is the newest part; older ones go once the others are long enough, and all that are of another life."""
        if anew:
            self.parts.clear()
        self.parts.append(self.due)
        while len(self.parts) > 1 and sum(part["seconds"] for part in islice(self.parts, 1, None)) >= RECENT_S:
            self.parts.popleft()
        self.recent = {name: sum(part[name] for part in self.parts) for name in COUNTERS}
        self.due = dict.fromkeys(COUNTERS, 0.0)

    def rate(self, name: str, now_s: float) -> float:
        """Return how much a counter grows in a second; this falls while no step comes."""
        took, steps = self.recent["seconds"], self.recent["steps"]
        if not self.live or took < TOOK_S or not steps:
            return 0.0
        quiet = now_s - self.moved
        return self.recent[name] / (took if quiet < max(QUIET_S, 3 * took / steps) else max(took, quiet))

    @property
    def busy(self) -> tuple[float, float]:
        """Share of the time with payloads on their way: up, down."""
        recent = self.recent
        seconds = max(recent["seconds"], sum(recent[name] for name in TIMES))
        up, down = (
            min(1.0, recent[f"busy_{way}_seconds"] / seconds) if seconds >= TOOK_S else 0.0 for way in ("up", "down")
        )
        return up, down

    def each(self, name: str) -> float:
        """Return how much a counter grows in a step."""
        return self.recent[name] / self.recent["steps"] if self.recent["steps"] else 0.0
