"""The trace of one worker for ps-plot --trace: spans of sampled steps, and the way of their updates (ps-worker --trace).

How it works
1. N (`every`) divides the clock of a sampled step. From the end of the step before to its own end, `StepTrace` keeps a
   row of each span; the time before the step is the span "compute".
2. The link keeps a row of each sampled update (narrows.protocols.member.push_trace).
3. After each step the rows that there are go to ps-worker, as one event "trace" with the offsets of the clocks.

Times are of the link's clock, in ns, because the messages have these. A span is timed by the system clock and shifted by
the time that the link's clock has left out.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from narrows.protocols.effects import NS
from narrows.protocols.member.push_trace import offset
from narrows.worker.runtime import launcher_pipe
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.runtime.trace import StepTrace


class WorkerTrace:
    """Tells ps-worker the trace of this process.

    Args:
        spans: of the engine.
        link: of the session.
        every: N of --trace.
        clock: the first one that the worker computes.
    """

    def __init__(self, spans: StepTrace, link: MemberLink, every: int, clock: int) -> None:
        self.spans, self.link, self.every = spans, link, every
        self.pushes = link.trace(every)
        self.spans.keep(clock % every == 0)

    def stepped(self, clock: int, last: bool = False) -> None:
        """Tell the rows of the step that has ended.

        Args:
            clock: of the next step.
            last: the worker ends, and tells all rows that are left.
        """
        spans, pushes = self.spans.keep(not last and clock % self.every == 0), self.pushes.take(last)
        if not spans and not pushes:
            return
        now_ns = self.link.clock.now()
        shift = now_ns - int(monotonic() * NS)
        member = self.link.member
        offsets = {str(each.shard): found for each in member.sessions if (found := offset(each.meter)) is not None}
        told: dict[str, Any] = {
            "every": self.every,
            "server": self.link.address,
            "worker": member.worker,
            "epoch": member.epoch,
            "at": now_ns,
            "offsets": offsets,
            "spans": [[name, int(began * NS) + shift, int(ended * NS) + shift] for name, began, ended in spans],
            "pushes": pushes,
            "dropped": self.spans.lost + self.pushes.dropped,
        }
        launcher_pipe.tell("trace", **told)
