"""The record of one ps-worker: makes lines of --record and figures for the console of its workers' events."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from narrows.protocols.runtime.cli.output import as_json
from narrows.protocols.runtime.storage.record_file import open_record
from narrows.worker.runtime.launcher_pipe import FIGURES

OURS = {*FIGURES, "total_steps"}  # names of Narrows in a step's line; the script gave the others to record()

RANKS_MAX = 8  # the most ranks that the last line names


class WorkerRecord:
    """Writes each event of the workers as one JSON object a line, and sums them up for the console."""

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        """Open the record.

        Args:
            path: the file, or an address in a store; "": no file, only the figures are kept.
            say: prints one line on the console.
        """
        self.file = open_record(path, say) if path else None
        self.began = time.monotonic()
        self.settings: dict[str, Any] = {}  # the settings of the run; empty: no worker has joined yet
        self.parameters = 0  # the values of the model
        self.steps = 0  # steps of all workers
        self.updates = 0  # updates that all workers have pushed
        self.clocks: dict[int, int] = {}  # by local rank, here and below
        self.gone: set[int] = set()  # workers that have ended
        self.last: dict[int, dict[str, float]] = {}  # the newest value of each name that the script recorded
        self.up: dict[int, int] = {}  # bytes sent, including those of earlier starts of the worker
        self.down: dict[int, int] = {}  # bytes received, likewise
        self.before: dict[int, tuple[int, int]] = {}  # bytes up and down of a worker's earlier starts
        self.privacy = (0.0, 0.0)  # the largest epsilon of a worker, and its delta
        self.edges = [0, 0]  # bytes up and down before the first step and after the last one
        self.dropped: Counter[str] = Counter()  # messages dropped because a queue was full, by name
        self.skipped: Counter[int] = Counter()  # steps skipped because the gradient was not finite, by rank of the run
        self.taught: dict[
            int, Counter[str]
        ] = {}  # what workers asked of teachers and got, as teacher_meter.py counts it
        self.taught_before: dict[int, Counter[str]] = {}  # in a worker's earlier starts

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def note(self, event: str, /, **values: Any) -> None:
        """Write one line: the event, the seconds since the start, and these values."""
        if self.file is not None:
            self.file.line(as_json({"event": event, "seconds": round(self.seconds, 6), **values}))

    def take(self, local_rank: int, event: dict[str, Any]) -> None:
        """Take one event of a worker's session; its fields are those of docs/reference.md."""
        kind = event.pop("event")
        if kind == "hello":
            self.settings = self.settings or event["settings"]
        elif kind == "model":
            self._joined(local_rank, event["parameters"], event["clock"])
        elif kind == "bytes":
            before = self.before.get(local_rank, (0, 0))
            self.up[local_rank], self.down[local_rank] = before[0] + event["up"], before[1] + event["down"]
            self.edges = [here + more for here, more in zip(self.edges, event["edges"], strict=True)]
            self.dropped.update(event["dropped"])
            self.note("links", local_rank=local_rank, ways=event["ways"])
        elif kind == "privacy":
            self.privacy = max(self.privacy, (event["epsilon"], event["delta"]))
            self.note(kind, local_rank=local_rank, **event)
        elif kind == "teachers":  # all that this start of the worker has counted, in the place of what its steps had
            self.taught[local_rank] = Counter(self.taught_before.get(local_rank))
            self.taught[local_rank].update(event)
            self.note(kind, local_rank=local_rank, **event)
        elif kind in ("compress", "late", "mailbox", "trace"):
            self.note(kind, local_rank=local_rank, **event)
        elif kind == "skipped":
            self.skipped[event["rank"]] += 1
            self.note(kind, local_rank=local_rank, **event)
        elif kind in ("step", "last"):
            if kind == "step":
                self.steps += 1
                self.updates += event["clock"] > self.clocks.get(
                    local_rank, 0
                )  # one update, also if the clock grew by several because rounds closed without this worker
                self.clocks[local_rank] = event["clock"]
                self.up[local_rank] += event["push_bytes"]
                self.down[local_rank] += event["pull_bytes"]
                if "teacher_seconds" in event:
                    step = {name: event[f"teacher_{name}"] for name in ("bytes_up", "bytes_down", "missed", "seconds")}
                    self.taught.setdefault(local_rank, Counter()).update(step)
                self.note("step", local_rank=local_rank, **event)
            figures = {name: value for name, value in event.items() if name not in OURS}
            self.last.setdefault(local_rank, {}).update(figures)

    def _joined(self, local_rank: int, parameters: int, clock: int) -> None:
        if not self.parameters:
            self.parameters = parameters
            names = ["compress", "workers", "shards", "local_steps", "local_seconds", "fragments"]
            names += ["start_steps", "start_compress"] if self.settings.get("start_steps", -1) > 0 else []
            values = {name: self.settings[name] for name in names} | {"name": self.settings.get("name", "")}
            versions = {"python": sys.version.split()[0]}
            versions |= {name: version(name) for name in ("narrows", "torch", "pyzmq", "numpy")}
            self.note("start", mode=self.settings["sync"], **values, parameters=parameters, versions=versions)
        self.clocks[local_rank] = clock
        self.gone.discard(local_rank)
        self.before[local_rank] = self.up.get(local_rank, 0), self.down.get(local_rank, 0)
        self.up[local_rank], self.down[local_rank] = self.before[local_rank]
        self.taught_before[local_rank] = Counter(self.taught.get(local_rank))
        self.note("member", local_rank=local_rank, how="joined")

    def ended(self, local_rank: int, code: int) -> None:
        """Note that a worker's process has ended with this exit code."""
        self.gone.add(local_rank)
        if local_rank in self.clocks:
            self.note("member", local_rank=local_rank, how="stopped" if code else "left")

    def averages(self) -> dict[str, float]:
        """Return the newest value of each recorded name, averaged over the workers that recorded the name."""
        values: dict[str, list[float]] = {}
        for own in self.last.values():
            for name, value in own.items():
                values.setdefault(name, []).append(value)
        return {name: sum(each) / len(each) for name, each in sorted(values.items())}

    def progress(self) -> str:
        """Return the line of the console: seconds, the smallest clock of the live workers, the recorded values."""
        here = [
            clock for local_rank, clock in self.clocks.items() if local_rank not in self.gone
        ] or self.clocks.values()
        return f"[{self.seconds:6.1f} s] clock {min(here)}  {_figures(self.averages(), '  ')}".rstrip()

    def _edges(self) -> str:
        """Return a clause with the bytes of start and end: first weights, last updates, models that are shown."""
        size, (up, down) = 4 * self.parameters, self.edges
        if not size or not up + down:
            return ""
        return f", of which start and end {up / 1e6:.2f} and {down / 1e6:.2f} ({up / size:.1f} and {down / size:.1f} models)"

    def done(self, codes: list[int]) -> str:
        """Write the last line of the record; return the last one for the console."""
        up, down = sum(self.up.values()), sum(self.down.values())
        # An update has each parameter of its fragment once, and so has a state.
        raw = 4 * self.parameters * self.updates // self.settings.get("fragments", 1)
        self.note(
            "done",
            steps=self.steps,
            bytes_up=up,
            bytes_down=down,
            raw_bytes_up=raw,
            raw_bytes_down=raw,
            edge_bytes_up=self.edges[0],
            edge_bytes_down=self.edges[1],
            dropped=self.dropped,
            skipped=self.skipped,
            exit_codes=codes,
            last=self.averages(),
            **({"epsilon": self.privacy[0], "delta": self.privacy[1]} if self.privacy[1] else {}),
            **({"teachers": self._teachers()} if self.taught else {}),
        )
        less = f" ({raw / up:.0f}x less than fp32)" if up and raw > 1.5 * up else ""
        return "; ".join(
            (
                f"{codes.count(0)} of {len(codes)} workers done in {self.seconds:.1f} s",
                *([_figures(self.averages(), ", ")] if self.averages() else []),
                f"up {up / 1e6:.2f} MB{less}, down {down / 1e6:.2f} MB{self._edges()}",
                *([_taught(self._teachers())] if self.taught else []),
                *([self._skipped()] if self.skipped else []),
                *([f"epsilon {self.privacy[0]:.4g} at delta {self.privacy[1]:g}"] if self.privacy[1] else []),
            )
        )

    def _teachers(self) -> Counter[str]:
        """Return what all workers asked of their teachers and got."""
        total = Counter[str]()
        for own in self.taught.values():
            total.update(own)
        return total

    def _skipped(self) -> str:
        total, shown = sum(self.skipped.values()), sorted(self.skipped.items())[:RANKS_MAX]
        ranks = [f"{count} by rank {rank}" for rank, count in shown]
        more = ["others"] if len(self.skipped) > len(shown) else []
        return (
            f"{total} step{'s' * (total > 1)} skipped, for a gradient that was not finite: {', '.join([*ranks, *more])}"
        )


def _taught(total: Mapping[str, float]) -> str:
    """Return a clause on teachers. A worker that was killed has not said how many predictions it got."""
    up, down, count, missed = (total.get(name, 0) for name in ("bytes_up", "bytes_down", "predictions", "missed"))
    each = f" ({down / count:.0f} bytes a prediction)" if count else ""
    without = f", {missed:,} batch{'es' * (missed != 1)} without" if missed else ""
    return f"teachers: up {up / 1e6:.1f} MB, down {down / 1e6:.1f} MB{each}{without}"


def _figures(values: Mapping[str, float], between: str) -> str:
    return between.join(f"{name} {value:.4f}" for name, value in values.items())
