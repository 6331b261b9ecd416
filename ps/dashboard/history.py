"""The history of a run, made from the events of its record. No I/O, no clock.

How it works

    events of ps-serve or of ps-worker, a line of the record each
        |
      take ---- "summary" --> _heard: a row of figures for a member and for each member below it
        |                       |
        |                     MemberTimeline.hear: totals, rates and time buckets of that member
        |------ "step" -----> _stepped: the step as the summary that its worker would have sent
        |------ "member", "waits", "run", "done", ...
        |
      frame -> one JSON object: the page, the terminal (screen.py) and ps-plot show it

1. A record of ps-serve has "summary" events: the figures that heartbeats carry. A record of ps-worker has "step"
   events. Both end in `_heard`.
2. A cluster sends the rows of all members below it. A member without a row is gone, and `_below` names it after GONE_S.
3. A curve of the loss gets a point each POINT_S, and half as many points once it has POINTS.

Rules
- `take` is the only way in, and the record has every event that it takes. So the page of a live run and the page of its
  record show the same.
- Everything is bounded: `LANES_MAX`, `POINTS`, `EVENTS`, and the time buckets of a member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from narrows.protocols.member.heartbeat_summary import STALE, WAYS, Summary, SummaryRow
from narrows.ps.dashboard.event_texts import sentence
from narrows.ps.dashboard.member_timeline import TIMES, MemberTimeline
from narrows.ps.dashboard.time_buckets import CELL_S, CELLS
from narrows.ps.dashboard.time_buckets import strips as strips_of

LANES_MAX = 4096  # members with a timeline, live or dead; further members are not shown
POINTS = 512  # points of a curve; once there are more, every second point is dropped
EVENTS = 200  # the newest events are kept
TEXT = 300  # characters of an event
POINT_S = 0.5  # from one point of a curve to the next, at first
RAW_BYTES = 4  # bytes of an fp32 value
COLUMNS = ("steps", "seconds", "bytes", "loss")
# A member below a cluster is gone if the cluster has not named it for so long. A restarted cluster names few at first.
GONE_S = 5.0
NAMED = 8  # members that one event names
PARTED = {  # by how a member below a cluster left: the words for one member, and for several
    "left": ("left", "left"),
    "lost": ("is lost", "are lost"),
    "gone": ("is gone", "are gone"),
}
TEACHER = ("teacher_bytes_up", "teacher_bytes_down", "teacher_missed", "teacher_seconds")  # of a summary, and of a step
FIGURES = asdict(Summary())  # of a row of an older record, which lacks the newest figures
SILENT = (
    "summary",
    "step",
    "server",
    "counted",
    "tree",
    "skipped",
    "waits",
    "trace",
    "teachers",
)  # events that are figures: no text
COUNTED = ("checkpoint", "mailbox")  # the newest of each says all
REPEATED = (
    *COUNTED,
    "compress",
    "void",
    "long",
    "against",
    "hyper",
    "late",
    "disk",
    "relay",
)  # events of which only the newest of a kind and member is shown
DIED = ("died", "restart")  # a shard was restarted, or the run went back to a checkpoint


class LossCurve:
    """Points of `COLUMNS` that cover the whole run, however long it is."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self.spacing = POINT_S  # seconds between points; doubles when points are dropped

    def due(self, now_s: float) -> bool:
        """Return True if it is time for another point."""
        seconds = self.columns["seconds"]
        return not seconds or now_s >= seconds[-1] + self.spacing

    def add(self, point: Mapping[str, float]) -> None:
        for name, values in self.columns.items():
            values.append(round(point[name], 6))
        if len(self.columns["seconds"]) > POINTS:
            self.spacing *= 2
            for values in self.columns.values():
                del values[1::2]


class RunHistory:
    """The history of one run. `take` adds an event, `frame` returns what a page shows."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}  # the fields of the "run" or "start" event
        self.lanes: dict[tuple[int, ...], MemberTimeline] = {}  # by path: the ranks of a member down the tree
        self.hidden: dict[tuple[int, ...], int] = {}  # by member of this server, its rows that have no timeline
        self.curve = LossCurve()
        self.events: deque[list[Any]] = deque(maxlen=EVENTS)  # [seconds, name, text]
        self.repeated: dict[tuple[Any, ...], tuple[list[Any], int]] = {}  # by kind and member: the event, its count
        self.seconds = 0.0  # time of the newest event, since the run began
        self.moved = 0.0  # when the clock last moved
        self.parameters = 0
        self.died = 0  # events of DIED
        self.finished = False
        self.waits = ""  # the coordinator's sentence on the members that the run waits for
        self.clock = 0  # clock that all live members have reached
        self.steppers: dict[int, dict[str, Any]] = {}  # in a record of ps-worker, by local rank: the summary so far

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event: one line of a record."""
        name, self.seconds = event["event"], max(self.seconds, float(event["seconds"]))
        if name == "summary":
            self.parameters = event["parameters"] or self.parameters
            self._heard(event["rows"], event["clock"])
        elif name == "step":
            self._stepped(event)
        elif name == "skipped" and "local_rank" in event:  # in ps-worker's record; a server counts them in summaries
            self.steppers.setdefault(event["local_rank"], _blank(event["local_rank"]))["skipped"] += 1
        elif name in ("run", "start"):
            self._started(event)
        elif name == "replan" and "summary" in event:  # the plan has changed
            self.run |= {each: event[each] for each in ("mode", "compress", "summary")}
        elif name == "member":
            self._member(event)
        elif name == "waits":
            self.waits = str(event.get("waits", ""))[:TEXT]
        elif name == "done":
            self.finished = True
        self.died += name in DIED
        if name not in SILENT and (text := event.get("text") or sentence(name, event)):
            member = event.get("worker", event.get("local_rank", event.get("shard", -1) if name == "mailbox" else -1))
            self._add(name, str(text), -1 if name == "checkpoint" else member)

    def _add(self, name: str, text: str, member: Any = -1) -> None:
        """Add an event.

        An event of REPEATED replaces the one of the same kind and member, and counts how often it came.
        """
        text, times = text[:TEXT], 0
        if name in REPEATED:
            before, times = self.repeated.pop((name, member), ([], 0))
            if before in self.events:
                self.events.remove(before)
            times += 1
        entry = [self.seconds, name, text if times < 2 or name in COUNTED else f"{text} ({times} times)"]
        if times:
            self.repeated[name, member] = entry, times
            if len(self.repeated) > EVENTS:
                del self.repeated[next(iter(self.repeated))]
        self.events.append(entry)

    def _started(self, event: Mapping[str, Any]) -> None:
        self.run = {name: value for name, value in event.items() if name not in ("event", "seconds", "text")}
        self.parameters = event.get("parameters", 0)

    # Members.

    def _heard(self, rows: Iterable[Mapping[str, Any]], clock: int) -> None:
        """Take the rows of one heartbeat: those of a member and of all members below it.

        Args:
            rows: the rows; the first is that of the heartbeat's sender.
            clock: the clock that all members of this server had reached; 0 in a record of ps-worker, where none is
                known.
        """
        rows_by_path = {tuple(row["path"]): row for row in rows}
        for path, row in rows_by_path.items():
            if path in self.lanes or len(self.lanes) < LANES_MAX:
                lane = self.lanes.setdefault(path, MemberTimeline(path))
                lane.hear({**FIGURES, **row}, self.seconds, self.width)
                if lane.lost_loss:
                    self._not_finite(lane)
                if lane.begins_to_skip():
                    self._add("skipped", f"{lane} skips steps whose gradient is not finite")
        first = next(iter(rows_by_path))
        if first in self.lanes:
            slowest = clock or min(each.newest["clock"] for each in self.near if each.live)
            self.lanes[first].leads(max(0, rows_by_path[first]["clock"] - slowest))
            self.clock, before = max(self.clock, slowest), self.clock
            self.moved = self.seconds if self.clock > before else self.moved
        if rows_by_path[first]["runs"]:
            self._below(first, rows_by_path)
        self.hidden[first] = len(rows_by_path.keys() - self.lanes.keys())
        self._point()

    def _below(self, first: tuple[int, ...], told: Mapping[tuple[int, ...], Mapping[str, Any]]) -> None:
        """Update the members below a cluster: how far each is ahead of the slowest one, and which are gone.

        Args:
            first: the path of the cluster.
            told: the rows of its heartbeat, by path. Their clocks are those of one moment.
        """
        slowest = dict[tuple[int, ...], int]()
        for path, row in told.items():
            slowest[path[:-1]] = min(row["clock"], slowest.get(path[:-1], row["clock"]))
        below = [lane for path, lane in self.lanes.items() if path != first and path[: len(first)] == first]
        missed, gone = dict[tuple[int, ...], list[MemberTimeline]](), dict[str, list[MemberTimeline]]()
        for lane in below:
            if lane.path in told:
                lane.leads(told[lane.path]["clock"] - slowest[lane.path[:-1]])
            elif lane.live:
                lane.end("")
                missed.setdefault(lane.path[:-1], []).append(lane)
        for above, lanes in missed.items():  # the parent counts its lost members: none, all or some of these
            lost = self.lanes[above].lost if above in told and above in self.lanes else -1
            for lane in lanes:
                lane.supposes({0: "left", len(lanes): "lost"}.get(lost, "gone"))
        whole = not any(row["hidden"] for row in told.values())
        for lane in below:
            if whole and not lane.live and not lane.how and self.seconds - lane.heard >= GONE_S:
                lane.end(lane.parting)
                gone.setdefault(lane.how, []).append(lane)
        for how, lanes in gone.items():
            more = f" and {len(lanes) - NAMED} more" if len(lanes) > NAMED else ""
            self._add("gone", f"{', '.join(map(str, lanes[:NAMED]))}{more} {PARTED[how][len(lanes) > 1]}")

    def _not_finite(self, lane: MemberTimeline) -> None:
        """Note that a member's loss is not finite, once until it is finite again."""
        if lane.turns_odd():
            self._add("loss", f"the loss of {lane} is not finite")

    def _member(self, event: Mapping[str, Any]) -> None:
        rank = event["local_rank" if "local_rank" in event else "rank"]  # records of ps-worker have local ranks
        if event["how"] != "joined":
            for path, lane in self.lanes.items():
                if path[0] == rank and lane.live:
                    lane.end(event["how"])

    def _stepped(self, event: Mapping[str, Any]) -> None:
        """Take a step from a record of ps-worker, as the summary that its worker would have sent."""
        event, given = {name: value for name, value in event.items() if value is not None}, event
        known = self.steppers.setdefault(event["local_rank"], _blank(event["local_rank"]))
        wait = event["wait_seconds"] + event.get("teacher_seconds", 0.0)
        took = event.get("step_seconds", wait)
        encode = event.get("encode_seconds", 0.0)
        known["steps"] += 1
        known["updates"] += event["clock"] > known["clock"]
        known["seconds"] += took
        known["compute_seconds"] += max(0.0, took - encode - wait)
        known["encode_seconds"] += encode
        known["wait_seconds"] += wait
        for name in TEACHER:
            known[name] += event.get(name, 0)
        known["bytes_up"] += event["push_bytes"]
        known["bytes_down"] += event["pull_bytes"]
        known["stale"][sum(event["staleness"] > end for end in STALE)] += 1
        for name in ("clock", "staleness", "held_back"):
            known[name] = event.get(name, known[name])
        taken = known["steps"] if self.by_time else self.steps_at(event["clock"])
        known["left_steps"] = max(0, int(event.get("total_steps", 0)) - taken)
        known["loss"] = given.get("loss", known["loss"])  # None: the loss is not finite
        self._heard([known | {"stale": [*known["stale"]]}], 0)
        if "loss" in given and given["loss"] is None and (lane := self.lanes.get((event["local_rank"],))):
            self._not_finite(lane)

    @property
    def width(self) -> float:
        """Seconds of a time bucket now: they double as the run gets longer."""
        width = CELL_S
        while self.seconds >= CELLS * width:
            width *= 2
        return width

    # The run as a whole.

    @property
    def near(self) -> list[MemberTimeline]:
        """The timelines of this server's own members, without those below them."""
        return [lane for lane in self.lanes.values() if len(lane.path) == 1]

    @property
    def workers(self) -> list[MemberTimeline]:
        return [lane for lane in self.lanes.values() if not lane.newest["runs"]]

    @property
    def loss(self) -> float | None:
        """The mean of the newest losses of live workers, or of all where none is live; None where none has a loss."""
        found = [lane for lane in self.workers if lane.newest["loss"] is not None]
        found = [lane for lane in found if lane.live] or found
        return sum(lane.newest["loss"] / len(found) for lane in found) if found else None

    def total(self, name: str) -> float:
        """Return the sum of a counter over this server's own members."""
        return sum((lane.total[name] for lane in self.near), 0.0)

    def of_workers(self, name: str) -> float:
        """Return the sum of a counter over all workers, those below clusters too."""
        return sum((lane.total[name] for lane in self.workers), 0.0)

    def _point(self) -> None:
        if self.curve.due(self.seconds) and (loss := self.loss) is not None:
            moved = self.total("bytes_up") + self.total("bytes_down")
            self.curve.add({"steps": self.steps, "seconds": self.seconds, "bytes": moved, "loss": loss})

    @property
    def by_time(self) -> bool:
        """True if rounds end by time (--local-seconds), so that the steps of a round differ between workers."""
        return bool(self.run.get("local_seconds", -1) > 0)

    @property
    def steps(self) -> float:
        """Optimizer steps of the run: its clock times the local steps of a round; by time, the most of one worker."""
        if self.by_time:
            return max((float(lane.total["steps"]) for lane in self.workers), default=0.0)
        return float(self.steps_at(self.clock))

    def steps_at(self, clock: int) -> int:
        """Return the steps of the run before `clock`; a clock of a start is one step."""
        start = min(clock, max(0, int(self.run.get("start_steps", 0))))
        return start + (clock - start) * int(self.run.get("local_steps", 1))

    @property
    def ratio(self) -> float:
        """The bytes of the same updates as fp32, over the bytes pushed; 0: not known."""
        up = self.total("bytes_up")
        raw = RAW_BYTES * self.parameters * self.total("updates") / self.run.get("fragments", 1)
        return raw / up if up else 0.0

    @property
    def samples_rate(self) -> float | None:
        """Samples a second of all workers; None if no script has given the samples of a step."""
        rates = [lane.rate("samples", self.seconds) for lane in self.workers if lane.total["samples"]]
        return sum(rates) if rates else None

    @property
    def left_seconds(self) -> float | None:
        """Seconds until the slowest worker has made the steps that its script announced; None: none known."""
        left = [lane.newest["left_steps"] / rate for lane in self.workers if (rate := lane.rate("steps", self.seconds))]
        return max(left, default=0.0) or None

    def frame(self, now_s: float | None = None) -> dict[str, Any]:
        """Return what a page shows at `now_s` seconds of the run, as values of JSON."""
        self.seconds = max(self.seconds, now_s or 0.0)
        width, lanes = self.width, [self.lanes[path] for path in sorted(self.lanes)]
        cells = min(CELLS, int(self.seconds / width) + 1)
        workers = [lane for lane in lanes if not lane.newest["runs"]]
        for lane in lanes:
            lane.cells.fit(width)
        begun, strips = strips_of([lane.cells for lane in workers])
        shown = dict(zip((lane.path for lane in workers), strips, strict=True))
        fastest = dict[tuple[int, ...], int]()  # by the path of the server, how far its fastest member is ahead
        for lane in lanes:
            if lane.live:
                fastest[lane.path[:-1]] = max(lane.ahead, fastest.get(lane.path[:-1], 0))
        return {
            "run": self.run,
            "seconds": round(self.seconds, 3),
            "over": self.finished,
            "waits": "" if self.finished else self.waits,
            "clock": self.clock,
            "loss": self.loss,
            "samples_rate": self.samples_rate,
            "steps_rate": max((lane.rate("steps", self.seconds) for lane in self.workers), default=0.0),
            "left_seconds": self.left_seconds,
            "bytes_up": self.total("bytes_up"),
            "bytes_down": self.total("bytes_down"),
            "relay_bytes": self.total("relay_bytes"),
            "teacher_bytes": [self.of_workers(f"teacher_bytes_{way}") for way in ("up", "down")],
            "teacher_missed": self.of_workers("teacher_missed"),
            "ratio": self.ratio,
            "parameters": self.parameters,
            "live": sum(lane.live for lane in self.workers),
            "died": self.died,
            "hidden": sum(self.hidden.values()) + sum(lane.newest["hidden"] for lane in lanes),
            "cell_seconds": width,
            "first_cell": begun,  # the first bucket with a step
            "cells": cells,
            "members": [self._shown(lane, fastest.get(lane.path[:-1], 0), shown.get(lane.path)) for lane in lanes],
            "curve": self.curve.columns,
            "events": list(self.events),
        }

    def _shown(self, lane: MemberTimeline, fastest: int, strip: dict[str, str] | None) -> dict[str, Any]:
        newest = lane.newest
        return {
            "path": lane.path,
            "host": newest["host"],
            "runs": newest["runs"],
            "live": lane.live,
            "how": "" if lane.live else lane.how or lane.parting,
            "quiet_seconds": round(self.seconds - lane.moved, 1),
            "clock": newest["clock"],
            "lag": max(0, fastest - lane.ahead),
            "step_seconds": [round(lane.each(name), 6) for name in TIMES],
            "staleness": newest["staleness"],
            "held_back": newest["held_back"],
            "loss": newest["loss"],
            "samples_rate": lane.rate("samples", self.seconds),
            "round_trip_seconds": newest["round_trip_seconds"],
            "rate": [newest["rate_up"], newest["rate_down"]],
            "way": dict(enumerate(WAYS)).get(newest.get("way", 0), ""),
            "busy": [round(share, 4) for share in lane.busy],
            "step_bytes": [round(lane.each("bytes_up")), round(lane.each("bytes_down"))],
            "bytes": [lane.total["bytes_up"], lane.total["bytes_down"]],
            "relayed": bool(newest["relayed"]),
            "relay_bytes": lane.total["relay_bytes"],
            "teacher": {name.removeprefix("teacher_"): lane.total[name] for name in TEACHER} if lane.taught else None,
            "dropped": lane.total["dropped"],
            "skipped": lane.total["skipped"],
            "gpu": [lane.total["launches"], lane.total["replays"], newest["graphs"], newest["scratch_bytes"]],
            "strip": strip,
        }


def _blank(worker: int) -> dict[str, Any]:
    row = SummaryRow((worker,), "", "", Summary()).told()
    return row | {"stale": list(row["stale"])}
