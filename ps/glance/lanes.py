"""The members of a run as its history knows them, each with a lane: what it did in each stretch of time. No I/O, no clock.

Rules
- Counters of a summary begin anew with each life of a member. What a lane has counted goes on: a counter that falls has begun
  anew, as Prometheus takes it.
- A lane has `CELLS` cells. Where they are all used, two become one: it always has the whole run.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from narrows.protocols.summary import Summary

CELLS = 120  # of a lane
CELL_S = 1.0  # that one is long at first
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"  # of a cell, as one character: 0 is nothing, z all of it
COUNTERS = (
    *("steps", "updates", "samples", "compute_seconds", "encode_seconds", "wait_seconds", "bytes_up", "bytes_down"),
    *("busy_up_seconds", "busy_down_seconds", "dropped", "seconds"),
)
NAMES = ("host", "runs", *(each.name for each in fields(Summary)))
TIMES = ("compute_seconds", "encode_seconds", "wait_seconds")
QUIET_S = 10.0  # no step for so long, and for three steps: its rate falls


class Cells:
    """Sums over stretches of time, of `names`; `start`: of the run, in seconds."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.width = CELL_S
        self.sums = {name: array("d", bytes(8 * CELLS)) for name in names}

    def fit(self, width: float) -> None:
        """Make cells so wide."""
        while self.width < width:
            self.width *= 2
            for sums in self.sums.values():
                halves = [sums[i] + sums[i + 1] for i in range(0, CELLS, 2)]
                sums[:] = array("d", [*halves, *[0.0] * (CELLS - len(halves))])

    @property
    def first(self) -> int:
        """The first that has something; CELLS: none has."""
        return next((i for i in range(CELLS) if any(sums[i] for sums in self.sums.values())), CELLS)

    def spread(self, begin_s: float, end_s: float, values: Mapping[str, float]) -> None:
        """These were gathered evenly from `begin_s` to `end_s`; both lie in the cells."""
        first, last = int(begin_s / self.width), min(int(end_s / self.width), CELLS - 1)
        for index in range(first, last + 1):
            low, high = max(begin_s, index * self.width), min(end_s, (index + 1) * self.width)
            share = (high - low) / (end_s - begin_s) if end_s > begin_s else 1.0 / (last + 1 - first)
            for name, sums in self.sums.items():
                sums[index] += values[name] * share


class Lane:
    """One member, by its path. `newest`: its last summary; `total`: what it has counted in all its lives."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path = path
        self.newest: dict[str, Any] = {}
        self.total = dict.fromkeys(COUNTERS, 0.0)
        self.stale: list[int] = []
        self.live = True
        self.began = self.heard = self.moved = 0.0  # seconds of the run: first, and newest, summary; newest step
        self.recent = dict.fromkeys(COUNTERS, 0.0)  # between the two newest summaries with steps between
        self.due = dict.fromkeys(COUNTERS, 0.0)  # since then
        self.ahead = 0  # clocks, of the slowest member of its server when it spoke last
        self.cells = Cells(("steps", *TIMES))

    def hear(self, summary: Mapping[str, Any], now_s: float, width: float) -> None:
        """A summary that came at `now_s`; cells are so wide."""
        before, anew = self.newest, summary["seconds"] < self.newest.get("seconds", 0.0)
        grown = {name: summary[name] - (0 if anew else before.get(name, 0)) for name in COUNTERS}
        grown = {name: summary[name] if value < 0 else value for name, value in grown.items()}
        counts = before.get("stale") if not anew else None
        counts = counts or [0] * len(summary["stale"])
        self.stale = self.stale or [0] * len(summary["stale"])
        self.stale = [
            total + max(0, now - then) for total, now, then in zip(self.stale, summary["stale"], counts, strict=True)
        ]
        if not before:
            self.began = now_s
        for name, value in grown.items():
            self.total[name] += value
            self.due[name] = value if anew else self.due[name] + value
        self.newest = {name: summary[name] for name in NAMES}
        self.heard, self.live = now_s, True
        self.cells.fit(width)
        if self.due["steps"] > 0:
            took = sum(self.due[name] for name in TIMES) or self.due["seconds"]
            self.cells.spread(max(0.0, now_s - max(took, 1e-9)), now_s, self.due)
            self.recent, self.due, self.moved = self.due, dict.fromkeys(COUNTERS, 0.0), now_s

    def rate(self, name: str, now_s: float) -> float:
        """Of a counter, a second; it falls while no step comes."""
        took, steps = self.recent["seconds"], self.recent["steps"]
        if not self.live or not took or not steps:
            return 0.0
        quiet = now_s - self.moved
        return self.recent[name] / (took if quiet < max(QUIET_S, 3 * took / steps) else max(took, quiet))

    @property
    def busy(self) -> tuple[float, float]:
        """Share of the time with payloads on their way: up, down."""
        recent = self.recent
        seconds = max(recent["seconds"], sum(recent[name] for name in TIMES))
        up, down = (min(1.0, recent[f"busy_{way}_seconds"] / seconds) if seconds else 0.0 for way in ("up", "down"))
        return up, down

    def each(self, name: str) -> float:
        """Of a counter, a step."""
        return self.recent[name] / self.recent["steps"] if self.recent["steps"] else 0.0

    def strip(self, width: float, most: float) -> dict[str, str]:
        """Its cells, a character each: steps beside `most`, those of a fast member; the share of the time that was computing,
        and that of encoding."""
        self.cells.fit(width)
        sums, rows = self.cells.sums, {"steps": "", "compute": "", "encode": ""}
        for index in range(CELLS):
            time = sum(sums[name][index] for name in TIMES)
            rows["steps"] += _level(sums["steps"][index], most)
            rows["compute"] += _level(sums["compute_seconds"][index], time)
            rows["encode"] += _level(sums["encode_seconds"][index], time)
        return {name: text.rstrip("0") for name, text in rows.items()}


def _level(part: float, whole: float) -> str:
    """A part that is there shows, however small."""
    return LEVELS[max(min(round(35 * part / whole), 35), 1)] if part > 1e-9 and whole > 0 else "0"
