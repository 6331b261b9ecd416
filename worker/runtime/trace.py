"""The parts of a worker's step: the seconds of each, and a range of each in a trace. The main thread owns it.

How it works

    step         Engine.step, and in it:
      script       the closure and the script's optimizer
      difference   reads what the parameters moved by, or the gradients
      encode       error feedback, and values to payloads
      wait         for the shards, for peers, or for the other ranks of a group
      fold         adds a received state, or a peer's model, to the arrays; mostly within `wait`
      compose      makes the replica, and writes it to the parameters

1. The code of a part runs in its span: `with trace.encode:`.
2. While a span is open within another one, its seconds count for the inner one only. So the seconds of all spans add up
   to at most the seconds that have passed.
3. While torch.profiler or `torch.autograd.profiler.emit_nvtx` records, each span is also a range
   `narrows: encode` of `torch.profiler.record_function`. Both record such ranges, emit_nvtx as ranges of NVTX.

4. While `keep` is on, each span is also a row of its name and its times: `ps-worker --trace` writes them down.

Rules
- Without a profiler a span makes no object, and costs 0.5 to 0.9 us. While one records it costs about 10 us. To measure:
  python -m timeit -s "from narrows.worker.runtime.trace import StepTrace; t = StepTrace()" "with t.encode: pass"
- Seconds are those of the host. A GPU may work on after a span is closed; a trace shows its kernels beside the ranges.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

PARTS = ("script", "difference", "encode", "wait", "fold", "compose")
COMPUTE = "compute"  # a row: from `keep` to the step, what the script takes
ROWS_MAX = 4096  # rows that are kept, from one `keep` to the next


class Span:
    """One part of a step, a context manager. It may be entered again while it is open."""

    __slots__ = ("_trace", "label", "name")

    def __init__(self, trace: StepTrace, name: str) -> None:
        self._trace, self.name, self.label = trace, name, f"narrows: {name}"

    def __enter__(self) -> None:
        self._trace.begin(self)

    def __exit__(self, *error: object) -> None:
        self._trace.end()


class StepTrace:
    """The spans of one engine.

    Attributes:
        seconds: spent in each part and in no part within it since the worker began, by the name in PARTS; and "step", the
            rest of all steps.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*PARTS, "step"), 0.0)
        self.opened: list[Span] = []  # the innermost last
        self.since = 0.0  # when the newest span was opened or closed
        self.ranges: list[tuple[int, record_function]] = []  # and how many spans were open with it
        self.rows: list[list[Any]] = []  # kept: name, begin and end in seconds of time.monotonic()
        self.kept: list[tuple[int, list[Any]]] = []  # rows of open spans, and how many spans were open with each
        self.keeps = False
        self.computes_s = -1.0  # when the script began to compute the kept step; -1: a step has begun since
        self.lost = 0  # rows that had no room
        self.step = Span(self, "step")
        self.script, self.difference, self.encode = (Span(self, name) for name in PARTS[:3])
        self.wait, self.fold, self.compose = (Span(self, name) for name in PARTS[3:])

    def begin(self, span: Span) -> None:
        """Open a span within those that are open."""
        now, opened = monotonic(), self.opened
        if opened:
            self.seconds[opened[-1].name] += now - self.since
        self.since = now
        opened.append(span)
        # Of any thread; True under emit_nvtx too. torch has no public name for it; without it a trace has no ranges.
        if getattr(profiler, "_is_profiler_enabled", False):
            marked = record_function(span.label)
            marked.__enter__()
            self.ranges.append((len(opened), marked))
        if self.keeps:
            self._keep(span, now)

    def _keep(self, span: Span, now: float) -> None:
        """Keep a row of a span that opens now."""
        rows = [[span.name, now, now]]
        if span is self.step and self.computes_s >= 0:
            rows.insert(0, [COMPUTE, self.computes_s, now])
            self.computes_s = -1.0
        if len(self.rows) + len(rows) > ROWS_MAX:
            self.lost += len(rows)
            return
        self.rows += rows
        self.kept.append((len(self.opened), rows[-1]))

    def keep(self, keeps: bool) -> list[list[Any]]:
        """Keep rows of the spans from now on, or do not. Return those that were kept, and begin anew."""
        rows, self.rows, self.kept = self.rows, [], []
        self.keeps, self.computes_s = keeps, monotonic() if keeps else -1.0
        return rows

    def end(self) -> None:
        """Close the innermost span."""
        if self.ranges and self.ranges[-1][0] == len(self.opened):
            self.ranges.pop()[1].__exit__(None, None, None)
        now = monotonic()
        if self.kept and self.kept[-1][0] == len(self.opened):
            self.kept.pop()[1][2] = now
        self.seconds[self.opened.pop().name] += now - self.since
        self.since = now
