"""Makes a trace of records: events of Trace Event Format, which https://ui.perfetto.dev shows. No I/O.

How it works

    "trace" events of records -> TraceSources.take     a Source for each worker and each server
                              -> TraceSources.events   slices, flows, names: JSON

1. A `Source` is a worker or a server that wrote a record. Each of its batches (one event "trace") has rows: spans of
   steps, folds of clocks, and the way of updates (narrows.protocols.member.push_trace).
2. A child's rows have the times at the shard too. So a server without a record has rows of its own, as its children saw
   it. A worker and a server find each other by the epoch of the worker's place, else by the address.
3. All times are made times of the root: each batch has the offset of the child's clock to its server's, and its error.
   From a worker to the root the offsets are added, and so are the errors.
4. A process of the trace is a worker or a shard. A row of it ("thread") has slices that do not overlap; an update that
   would is on a further row of the same name.
5. A flow leads along one update: the push, the update at the shard, the fold of the clock, the state at the child. In a
   cluster one more leads from a fold to the push to the parent that follows from it.

Rules
- What was sent before it was received stays so: where the error of the offsets would turn that around, the time at the
  shard is moved to the nearest one that is possible. `otherData.moved` counts that.
- EVENTS_MAX: a trace with more is refused, because a browser would not open it.

The format: "Trace Event Format", Google, 2016 (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrows.protocols.errors import UsageError
from narrows.protocols.member.link_meter import WINDOW_NS
from narrows.protocols.member.push_trace import FIELDS

EVENTS_MAX = 2_000_000
MANY = f"the records have over {EVENTS_MAX} events of a trace: record with a greater --trace N"
US = 1000  # ns
POINT_NS = 1000  # length of a slice that stands for a moment
COMPUTE = "compute"
Key = tuple[str, str]  # what a server is known by: ("record", file) or ("address", address)


@dataclass
class Source:
    """One worker, or one server."""

    name: str
    file: str
    batches: list[dict[str, Any]] = field(default_factory=list)
    # time, offset to its server's clock and error, in ns: of each window of WINDOW_NS the one with the least error
    windows: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    offsets: list[tuple[int, int, int]] = field(default_factory=list)  # the same in the order of time
    server: Key | None = None  # of which it is a child

    def offset(self, at_ns: int) -> tuple[int, int] | None:
        """Return offset and error at the time nearest to this one, in ns; None: not measured."""
        if not self.offsets:
            return None
        index = bisect_right(self.offsets, (at_ns,))
        near = self.offsets[max(0, index - 1) : index + 1]
        return min(near, key=lambda each: abs(each[0] - at_ns))[1:]


class TraceSources:
    """The sources of all records of one run."""

    def __init__(self) -> None:
        self.workers: dict[tuple[str, int], Source] = {}  # by file and local rank
        self.servers: dict[Key, Source] = {}
        self.epochs: dict[int, Key] = {}  # the server that gave out this epoch
        self.rows = 0  # of all batches

    def take(self, file: str, event: Mapping[str, Any]) -> None:
        """Take one line of the record `file`. Lines of other events change nothing.

        Raises:
            UsageError: the records have more than EVENTS_MAX rows.
            ValueError, TypeError, KeyError, AttributeError: the line is not one of a record.
        """
        if event["event"] == "trace" and "local_rank" in event:
            rank = int(event["local_rank"])
            source = self.workers.setdefault((file, rank), Source(f"worker {event['worker']}", file))
        elif event["event"] == "trace" or (event["event"] == "server" and event.get("what") == "trace"):
            source = self.servers.setdefault(("record", file), Source("server", file))
            self.epochs |= dict.fromkeys(event["epochs"], ("record", file))
        else:
            return
        self.rows += sum(len(event.get(name, ())) for name in ("spans", "folds", "pushes"))
        if self.rows > EVENTS_MAX:
            raise UsageError(MANY)
        batch = dict(event) | {"pushes": [dict(zip(FIELDS, row, strict=True)) for row in event["pushes"]]}
        source.batches.append(batch)
        if event["offsets"]:
            at, (offset, error) = event["at"], event["offsets"].get("0") or next(iter(event["offsets"].values()))
            known = source.windows.get(at // WINDOW_NS)
            if known is None or error < known[2]:
                source.windows[at // WINDOW_NS] = at, offset, error

    def _join(self) -> None:
        """Find the server of each source."""
        for key, source in [*self.servers.items(), *((None, worker) for worker in self.workers.values())]:
            source.offsets = sorted(source.windows.values())
            epochs = [row["epoch"] for batch in source.batches for row in batch["pushes"]]
            epochs += [batch["epoch"] for batch in source.batches if "epoch" in batch]
            found = [self.epochs[epoch] for epoch in epochs if self.epochs.get(epoch, key) != key]
            firsts = [batch for batch in source.batches if not batch.get("shard")]
            addresses = [batch.get("server") or batch.get("parent") or "" for batch in firsts]
            if found:
                source.server = found[-1]
            elif key is None or any(addresses):
                address = next((each for each in addresses if each), "")
                source.server = ("address", address.removeprefix("tcp://"))

    def above(self, key: Key | None, at: int) -> tuple[int, int | None]:
        """Return what to add to times of the server `key` about `at` to have the root's, and the error of that, in ns.

        The error is None where a link on the way to the root was not measured.
        """
        ns, error, seen = at, 0, set[Key]()
        while key is not None and key not in seen and (source := self.servers.get(key)) and source.server is not None:
            if (found := source.offset(ns)) is None:
                return ns - at, None
            ns, error = ns + found[0], error + found[1]
            seen.add(key)
            key = source.server
        return ns - at, error

    def shifts(self, source: Source, at: int) -> tuple[int, int, int | None]:
        """Return what to add to times of this source about `at`, and to those of its server; and the error of the first."""
        found = source.offset(at)
        if found is None:
            more, error = self.above(source.server, at)
            return more, more, None if source.server is not None else error
        more, error = self.above(source.server, at + found[0])
        return found[0] + more, more, None if error is None else error + found[1]

    def events(self) -> dict[str, Any]:
        """Return the trace, as a value of JSON.

        Raises:
            UsageError: the records have no events of a trace, or too many.
        """
        self._join()
        drawn = _Drawing(self)
        for server in self.servers.values():
            drawn.folds(server)
        for source in (*self.workers.values(), *self.servers.values()):
            drawn.source(source)
        return drawn.whole()


class _Drawing:
    """The events of one trace, as they are made. Times are ns of the root until `whole`."""

    def __init__(self, sources: TraceSources) -> None:
        self.sources = sources
        self.made: list[dict[str, Any]] = []
        self.pids: dict[tuple[Any, ...], int] = {}
        self.rows: dict[tuple[int, str, int], int] = {}  # by process, name and number of the row, its tid
        self.ends: dict[tuple[int, str], list[int]] = {}  # by process and name, until when each of its rows is taken
        # by server and shard: of each fold of a clock begin, end and clock, in the order of the folds
        self.folded: dict[tuple[Key | None, int], list[tuple[int, int, int]]] = {}
        self.clocks: dict[tuple[Key | None, int, int], tuple[int, int]] = {}  # the same by clock; of several the last
        self.flows = self.moved = self.dropped = 0
        self.errors: dict[int, int | None] = {}  # by process, the greatest error of its times in ns; None: not known
        self.names: dict[int, str] = {}  # of processes
        self.until: dict[int, int] = {}  # by process of a worker, the end of its newest span

    # Processes and rows.

    def process(self, key: tuple[Any, ...], name: str) -> int:
        if key not in self.pids:
            self.pids[key] = len(self.pids) + 1
            self.names[self.pids[key]] = name
            self._name("process_name", self.pids[key], 0, name)
        return self.pids[key]

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self.add({"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}})

    def add(self, event: dict[str, Any]) -> None:
        self.made.append(event)
        if len(self.made) > EVENTS_MAX:
            raise UsageError(MANY)

    def _row(self, pid: int, name: str, begin: int, end: int) -> int:
        """Return the tid of a row of this name that is free in this time."""
        ends = self.ends.setdefault((pid, name), [])
        index = next((index for index, taken in enumerate(ends) if taken <= begin), len(ends))
        ends[index : index + 1] = [end]
        return self.tid(pid, name, index)

    def tid(self, pid: int, name: str, index: int = 0) -> int:
        if (pid, name, index) not in self.rows:
            self.rows[pid, name, index] = len(self.rows) + 1
            self._name("thread_name", pid, len(self.rows), f"{name} ({index + 1})" if index else name)
        return self.rows[pid, name, index]

    def slice(self, pid: int, tid: int, name: str, begin: int, end: int, kind: str, **more: Any) -> None:
        self.add(
            {
                "name": name,
                "cat": kind,
                "ph": "X",
                "ts": begin,
                "dur": end - begin,
                "pid": pid,
                "tid": tid,
                "args": more,
            }
        )

    def flow(self, name: str, points: list[tuple[int, int, int]]) -> None:
        """Draw a flow through these points, each a process, a row and a time that is in a slice there."""
        self.flows += 1
        for index, (pid, tid, at) in enumerate(points):
            step = "s" if not index else "f" if index == len(points) - 1 else "t"
            event = {"name": name, "cat": name, "ph": step, "id": self.flows, "ts": at, "pid": pid, "tid": tid}
            self.add(event | ({"bp": "e"} if step == "f" else {}))

    # Sources.

    def shard(self, server: Key | None, shard: int) -> int:
        source = self.sources.servers.get(server) if server is not None else None
        where = source.file if source is not None else server[1] if server is not None else ""
        return self.process((server, shard), f"shard {shard} of {where}" if where else f"shard {shard}")

    def folds(self, server: Source) -> None:
        """Draw when the shards of a server folded clocks."""
        key = ("record", server.file)
        for batch in server.batches:
            more, pid = self.sources.above(key, batch["at"])[0], self.shard(key, batch["shard"])
            for clock, begin, end in batch["folds"]:
                begin, end = begin + more, end + more
                self.slice(pid, self.tid(pid, "clock"), f"fold {clock}", begin, max(begin, end), "fold", clock=clock)
                self.folded.setdefault((key, batch["shard"]), []).append((begin, max(begin, end), clock))
                self.clocks[key, batch["shard"], clock] = begin, max(begin, end)
        for each in self.folded.values():
            each.sort()

    def source(self, source: Source) -> None:
        """Draw the spans and the updates of a worker, or the updates of a cluster."""
        lost = dict[int, int]()  # a count of the whole life of each process of a source
        for batch in source.batches:
            lost[batch.get("shard", 0)] = batch["dropped"]
            own, above, error = self.sources.shifts(source, batch["at"])
            if "spans" in batch:
                pid = self.process((source.file, batch["local_rank"]), f"{source.name}, {source.file}")
                row, until = self.tid(pid, "steps"), self.until.get(pid, 0)
                for name, begin, end in batch["spans"]:
                    # Another offset than that of the batch before must not turn the order of two steps around.
                    begin, end = max(until, begin + own), max(until, end + own)
                    label, kind = (name, COMPUTE) if name == COMPUTE else (f"narrows: {name}", "step")
                    self.slice(pid, row, label, begin, max(begin, end), kind)
                    self.until[pid] = max(self.until.get(pid, 0), end)
            else:
                pid = self.shard(("record", source.file), batch["shard"])
            before = self.errors.get(pid, 0)
            self.errors[pid] = None if error is None or before is None else max(before, error)
            for update in batch["pushes"]:
                self._update(source, pid, batch, update, own, above)
        self.dropped += sum(lost.values())

    def _update(
        self, source: Source, pid: int, batch: Mapping[str, Any], row: Mapping[str, int], own: int, above: int
    ) -> None:
        """Draw one update of a child: its push, its stay at the shard, and the state that contains it.

        Args:
            source: the child.
            pid: its process.
            batch: the batch of the row.
            row: the update, by FIELDS.
            own, above: what to add to times of the child, and to those of its server, to have the root's.
        """
        shard, clock = row["shard"], row["clock"]
        if "0" in batch["offsets"] and (found := batch["offsets"].get(str(shard))) is not None:
            above += batch["offsets"]["0"][0] - found[0]  # another machine than shard 0's has another clock

        def ours(name: str) -> int:
            return row[name] + own if row[name] else 0

        def theirs(name: str, low: int, high: int) -> int:
            """The time at the shard, in the bounds of what the child knows; 0 where it is not known."""
            if not row[name]:
                return 0
            there = row[name] + above
            held = max(low, min(there, high or there))
            self.moved += held != there
            return held

        sent, left, acked, arrived = map(ours, ("sent", "left", "acked", "arrived"))
        received = theirs("received", sent, acked or arrived)
        folded = theirs("folded", received, acked)
        published = theirs("published", folded or received or sent, arrived)
        facts = {"clock": clock, "bytes": row["bytes"]}
        end = max(acked, left, sent + POINT_NS)
        push = self._row(pid, f"to shard {shard}", sent, end)
        self.slice(pid, push, f"push {clock}", sent, end, "push", **facts, answered=bool(acked))
        points, there = [(pid, push, sent)], self.shard(source.server, shard)
        if received:
            end = max(folded or published or acked or received, received + POINT_NS)
            name = f"from {source.name}" if "spans" in batch else f"from cluster {row['worker']}"
            stay = self._row(there, name, received, end)
            self.slice(there, stay, f"update {clock}", received, end, "update", clock=clock)
            points.append((there, stay, received))
        begin, end = self.clocks.get((source.server, shard, clock), (0, -1))
        if end > points[-1][2] and (not arrived or begin <= arrived):
            points.append((there, self.tid(there, "clock"), max(begin, points[-1][2])))
        if arrived:
            begin = max(published or arrived, points[-1][2])
            state = self._row(pid, f"from shard {shard}", begin, max(arrived, begin + POINT_NS))
            self.slice(pid, state, f"state with {clock}", begin, max(arrived, begin + POINT_NS), "state", clock=clock)
            points.append((pid, state, begin))
        if len(points) > 1:
            self.flow("update", points)
        if "spans" not in batch:  # of a cluster: the fold in which this push was made
            folds = self.folded.get((("record", source.file), shard), [])
            begin, end, _ = folds[bisect_right(folds, (sent, sent, clock)) - 1] if folds else (0, -1, 0)
            if begin <= sent <= end > begin:
                self.flow("up", [(pid, self.tid(pid, "clock"), begin), (pid, push, sent)])

    def whole(self) -> dict[str, Any]:
        timed = [event for event in self.made if event["ph"] != "M"]
        if not timed:
            raise UsageError(
                "no event of a trace is in the records: give ps-worker and ps-serve --trace N and --record FILE"
            )
        began = min(event["ts"] for event in timed)
        for event in timed:
            event["ts"] = round((event["ts"] - began) / US, 3)
            if "dur" in event:
                event["dur"] = round(event["dur"] / US, 3)
        self.made.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0)))
        errors = {pid: None if error is None else error / US for pid, error in self.errors.items()}
        for pid, error in errors.items():
            label = "clock not aligned" if error is None else f"clock within {error:.0f} us"
            labels = {"name": "process_labels", "ph": "M", "ts": 0, "pid": pid, "tid": 0, "args": {"labels": label}}
            self.made.insert(0, labels)
        about = {"clock_error_us": {self.names[pid]: error for pid, error in errors.items()}}
        more = {"flows": self.flows, "moved": self.moved, "dropped": self.dropped}
        return {"traceEvents": self.made, "displayTimeUnit": "ms", "otherData": about | more}
