"""Checks that a trace follows the Trace Event Format (JSON), and finds overlap, stragglers and slow links in it.

The rules are those of "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU) and
of Perfetto's importer of it (perfetto.dev/docs/faq: slices of one thread have to be strictly nested).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from typing import Any

META = {"process_name": "name", "thread_name": "name", "process_labels": "labels"}
FIELDS = {
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
}
Event = dict[str, Any]


def ns(microseconds: float) -> int:
    return round(1000 * microseconds)


def checked(text: str) -> list[Event]:
    """Check the text of a trace. Returns its events."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    whole = json.loads(text, parse_constant=refuse)
    assert {*whole} == {"traceEvents", "displayTimeUnit", "otherData"} and whole["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = whole["traceEvents"]
    for event in events:
        assert {*event} == FIELDS[event["ph"]], event
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0, event
        assert type(event["name"]) is str and event["name"] and type(event.get("cat", "")) is str, event
        assert type(event["ts"]) in (int, float) and event["ts"] >= 0 and event.get("dur", 0) >= 0, event
        if event["ph"] == "M":
            assert {*event["args"]} == {META[event["name"]]} and type(event["args"][META[event["name"]]]) is str
        assert event.get("bp", "e") == "e"
    _named(events)
    _nested(events)
    _flows(events)
    return events


def _named(events: list[Event]) -> None:
    """Each process and each row has one name, and no tid is in two processes."""
    told = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert len(told) == len({*told})
    for event in events:
        if event["ph"] != "M":
            assert ("process_name", event["pid"], 0) in told and ("thread_name", event["pid"], event["tid"]) in told
    assert len({tid for _, _, tid in told if tid}) == len({(pid, tid) for _, pid, tid in told if tid})


def rows(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """Return the slices of each row, those that begin first first, an outer one before those in it."""
    found = defaultdict[tuple[int, int], list[Event]](list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return {key: sorted(each, key=lambda e: (ns(e["ts"]), -ns(e["dur"]))) for key, each in found.items()}


def _nested(events: list[Event]) -> None:
    for each in rows(events).values():
        open_: list[int] = []
        for event in each:
            begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1], f"{event} overlaps the end of the slice that it begins in"
            open_.append(end)


def flows(events: list[Event], name: str = "update") -> list[list[Event]]:
    """Return the points of each flow of this name, in the order of the file."""
    found = defaultdict[int, list[Event]](list)
    for event in events:
        if event["ph"] in "stf" and event["name"] == name:
            found[event["id"]].append(event)
    return [*found.values()]


def _flows(events: list[Event]) -> None:
    """Each flow begins once, ends at most once, never goes back in time, and each of its points is in a slice."""
    inside = rows(events)
    for name in {event["name"] for event in events if event["ph"] in "stf"}:
        for points in flows(events, name):
            ends = [point["ph"] for point in points]
            assert ends[0] == "s" and ends[-1] == "f" and {*ends[1:-1]} <= {"t"}, ends
            assert [ns(p["ts"]) for p in points] == sorted(ns(p["ts"]) for p in points)
            for point in points:
                at = ns(point["ts"])
                slices = inside[point["pid"], point["tid"]]
                assert any(ns(s["ts"]) <= at < ns(s["ts"]) + ns(s["dur"]) for s in slices), point


class Reading:
    """What a script tells from the events alone, by the number of a worker."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.workers = {
            pid: int(name.split()[1].rstrip(",")) for pid, name in names.items() if name.startswith("worker")
        }

    def _of(self, pid: int, *names: str) -> list[Event]:
        return [e for e in self.events if e["ph"] == "X" and e["pid"] == pid and e["name"].startswith(names)]

    def spent(self, name: str) -> dict[int, float]:
        """The median time of slices of this name, in us."""
        return {
            worker: statistics.median([e["dur"] for e in self._of(pid, name)] or [0.0])
            for pid, worker in self.workers.items()
        }

    def total(self, name: str) -> dict[int, float]:
        """The time of all slices of this name, in us."""
        return {worker: sum(e["dur"] for e in self._of(pid, name)) for pid, worker in self.workers.items()}

    def early(self) -> dict[int, float]:
        """The share of pushes that begin while the script computes: 0 without overlap."""
        found = {}
        for pid, worker in self.workers.items():
            computes, pushes = self._of(pid, "compute"), self._of(pid, "push ")
            inside = [p for p in pushes if any(c["ts"] <= p["ts"] < c["ts"] + c["dur"] for c in computes)]
            found[worker] = len(inside) / len(pushes)
        return found

    def transfer(self) -> dict[int, float]:
        """The median time from a push to the shard's having it, in us."""
        took = defaultdict[int, list[float]](list)
        for points in flows(self.events):
            if points[0]["pid"] in self.workers:
                took[self.workers[points[0]["pid"]]].append(points[1]["ts"] - points[0]["ts"])
        return {worker: statistics.median(each) for worker, each in took.items()}

    def slowest(self, figures: dict[int, float], factor: float = 3.0) -> list[int]:
        """The workers whose figure is over `factor` times that of the median worker of the others."""
        return [
            worker
            for worker, own in figures.items()
            if own > factor * statistics.median(value for other, value in figures.items() if other != worker)
        ]
