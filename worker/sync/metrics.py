"""The counters of a worker, for its record and for the summary that its heartbeats carry.

The main thread counts. The I/O thread reads the counters at each heartbeat, so that a step only pays for the counting.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

from narrows.compression.home import HOST
from narrows.protocols.member.heartbeat_summary import STALE, WAYS, Summary, SummaryRow
from narrows.worker.runtime import launcher_pipe
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.runtime.teacher_meter import METER, TeacherTotals
from narrows.worker.runtime.trace import PARTS
from narrows.worker.runtime.worker_trace import WorkerTrace

if TYPE_CHECKING:
    from narrows.worker.sync.engine import Engine

# Unit: updates, as the length of the residual over that of one update. Of the runs that are known to train, a GPT holds
# back 17 (docs/archive/results-0.1.md). The digits of README hold back 20, and 60 at their end, where the learning rate
# falls and updates are short.
HELD_BACK_MAX = 100.0
HELD_BACK_OF = 8  # samples of which the median is taken: a single update may be short
MERGING_EVERY = 8  # steps between two samples: on a GPU one takes three kernels and two copies
SHOWN = ("loss", "total_steps")  # the values of record() that a summary carries


class WorkerMetrics:
    """The counters of one engine's steps, since this worker began.

    Args:
        host_bytes: the memory of the host.
    """

    def __init__(self, engine: Engine, link: MemberLink, host_bytes: int) -> None:
        self.engine, self.link = engine, link
        self.steps = self.updates = 0
        self.samples = 0  # samples of these steps, as loaders gave them
        self.clock, self.step_count = engine.sync.clock, engine.step_count
        self.staleness = 0
        self.stale = [0] * (len(STALE) + 1)
        self.merging: dict[str, float] = {}
        self.held = deque[float](maxlen=HELD_BACK_OF)
        self.warned = False
        self.shown: dict[str, float] = {}
        self.spent = (0.0, 0.0)  # seconds of waiting and of encoding, from the first step to the newest one
        self.began_s = self.stepped_s = time.monotonic()
        self.parts = dict(engine.trace.seconds)
        self.memory_bytes = host_bytes if engine.home is HOST else 0  # of where this worker's arrays live
        every = engine.config.trace
        self.trace = WorkerTrace(engine.trace, link, every, self.clock) if every else None
        self.device = engine.home.figures()  # at the newest step: the main thread alone may ask

    def stepped(self, batch: int) -> dict[str, float]:
        """Count one step.

        Args:
            batch: samples of the step in each process of the group; 0: unknown.

        Returns:
            For the record, "step_seconds" since the step before, and of these the seconds of each part of
            narrows.worker.runtime.trace. Those of "script_seconds" are all that Narrows did not take. With a teacher also
            the part that the step waited for answers, "teacher_seconds", and its traffic since the step before.
        """
        now_s, before_s, before, parts = time.monotonic(), self.stepped_s, self.parts, dict(self.engine.trace.seconds)
        sync = self.engine.sync
        self.steps += 1
        self.samples += batch * (1 if self.engine.group is None else self.engine.group.size)
        self.updates += sync.clock > self.clock  # at most one a step, also if rounds closed without this worker
        self.clock, self.step_count = sync.clock, self.engine.step_count
        if self.steps % MERGING_EVERY == 1:
            self.merging = sync.merging
            self.held.append(self.merging.get("held_back", 0.0))
        self.staleness = max(0, sync.staleness)
        self.stale[sum(self.staleness > end for end in STALE)] += 1
        self.stepped_s, self.parts, self.device = now_s, parts, self.engine.home.figures()
        took = {"step": now_s - before_s} | {name: parts[name] - before[name] for name in PARTS}
        if self.trace is not None:
            self.trace.stepped(self.clock)
        rest = parts["step"] - before["step"]  # messages, checks of the weights, module buffers
        took["script"] = max(0.0, took["step"] - rest - sum(took[name] for name in PARTS if name != "script"))
        taught = METER.stepped(took["script"])
        waited = taught.get("teacher_seconds", 0.0)
        took["script"] -= waited
        self.spent = self.spent[0] + took["wait"] + waited, self.spent[1] + took["encode"]
        return {f"{name}_seconds": round(value, 6) for name, value in took.items()} | taught

    def end(self) -> None:
        """Tell ps-worker what is left of the trace, and all that was asked of teachers."""
        if self.trace is not None:
            self.trace.stepped(self.clock, last=True)
        if (taught := METER.totals) != TeacherTotals():
            launcher_pipe.tell("teachers", **taught.told())

    def warning(self) -> str:
        """Return a sentence, once, if compression holds back more than in any run that is known to train; else ""."""
        if self.warned or len(self.held) < HELD_BACK_OF or (held := statistics.median(self.held)) <= HELD_BACK_MAX:
            return ""
        self.warned = True
        return (
            f"holding back {held:.0f} times what one update moves: --compress {self.engine.settings.compress} lets too little "
            "through, and the run may drift; take a denser SPEC"
        )

    def record(self, values: dict[str, float]) -> None:
        self.shown |= {name: values[name] for name in SHOWN if name in values}

    @property
    def left_steps(self) -> int:
        return int(max(0.0, min(self.shown.get("total_steps", 0.0), 1e15) - self.step_count))

    def rows(self) -> tuple[SummaryRow, ...]:
        """The summary row of this worker alone."""
        (waited, encoded), (relayed, relay_bytes), taught = self.spent, self.link.relayed, METER.totals
        summary = Summary(
            clock=self.clock,
            steps=self.steps,
            updates=self.updates,
            samples=self.engine.tuning.sampled or self.samples,
            compute_seconds=max(0.0, self.stepped_s - self.began_s - waited - encoded),
            encode_seconds=encoded,
            wait_seconds=waited,
            bytes_up=self.link.bytes_up,
            bytes_down=self.link.bytes_down,
            way=min(map(WAYS.index, self.link.ways), default=0),
            relayed=int(relayed),
            relay_bytes=relay_bytes,
            teacher_bytes_up=taught.bytes_up,
            teacher_bytes_down=taught.bytes_down,
            teacher_missed=taught.missed,
            teacher_seconds=METER.in_steps_s,
            staleness=self.staleness,
            stale=tuple(self.stale),
            held_back=self.merging.get("held_back", 0.0),
            dropped=sum(self.link.drops.counts.values()),
            loss=self.shown.get("loss"),
            left_steps=self.left_steps,
            skipped=self.engine.skips.steps,
            memory_bytes=self.memory_bytes,
            **self.device._asdict(),
        )
        return (SummaryRow((), "", "", summary),)
