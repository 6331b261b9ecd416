"""What this process has asked of its teachers, and what it got from them.

How it works

    worker/distillation -- counts --> TeacherMeter -- totals --> worker/sync/metrics.py: each step, each heartbeat, the end

Rules
- The thread of the student's sockets counts bytes, the thread of the script all else. So each counter has one writer, and
  there is no lock: a reader may see one counter a moment before another.
- A worker without a teacher has only zeros, and neither its record nor its summary shows them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TeacherTotals:
    """Counters since the process began."""

    bytes_up: int = 0  # whole messages
    bytes_down: int = 0
    samples: int = 0  # whose soft targets the script has asked for, those of `cached` too
    cached: int = 0  # of these, samples whose answer was here already
    predictions: int = 0  # in the answers that came
    missed: int = 0  # batches without soft targets
    seconds: float = 0.0  # that `take` has waited for answers

    def told(self) -> dict[str, Any]:
        """Return the counters as fields of an event."""
        return asdict(self) | {"seconds": round(self.seconds, 6)}


class TeacherMeter:
    """The counters of one student."""

    def __init__(self) -> None:
        self._up = self._down = 0
        self._samples = self._cached = self._predictions = self._missed = 0
        self._seconds = 0.0
        self._before = TeacherTotals()  # at the newest step
        self.in_steps_s = 0.0  # of `_seconds`, those that steps took longer for

    # The thread of the sockets.

    def sent(self, nbytes: int) -> None:
        self._up += nbytes

    def received(self, nbytes: int) -> None:
        self._down += nbytes

    # The script's thread.

    def asked(self, samples: int, cached: int) -> None:
        """Count the samples of a batch, and of these the ones whose answers were in the cache."""
        self._samples += samples
        self._cached += cached

    def answered(self, predictions: int) -> None:
        self._predictions += predictions

    def waited(self, seconds: float) -> None:
        self._seconds += seconds

    def missed(self) -> None:
        """Count a batch without soft targets."""
        self._missed += 1

    def stepped(self, most_s: float) -> dict[str, float]:
        """Return what the newest step adds to the record: what was asked and came since the step before.

        Args:
            most_s: that the step may have waited: a thread of the script may wait beside the steps.

        Returns:
            {} without a teacher.
        """
        before, now = self._before, self.totals
        self._before = now
        if now == TeacherTotals():
            return {}
        waited = min(most_s, now.seconds - before.seconds)
        self.in_steps_s += waited
        return {
            "teacher_seconds": round(waited, 6),
            "teacher_bytes_up": now.bytes_up - before.bytes_up,
            "teacher_bytes_down": now.bytes_down - before.bytes_down,
            "teacher_missed": now.missed - before.missed,
        }

    @property
    def totals(self) -> TeacherTotals:
        return TeacherTotals(
            self._up, self._down, self._samples, self._cached, self._predictions, self._missed, self._seconds
        )


METER = TeacherMeter()  # of the teachers of this process, those of --teacher
