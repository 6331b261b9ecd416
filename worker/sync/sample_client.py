"""The ranges of samples that the coordinator hands out to a worker, and what becomes of them here. The main thread owns it.

Rules
- A range is asked for right before it is computed on, with the clock of the update that will hold it.
- A gradient that step() drops, since this worker had to join again, is of ranges that are no longer ours: the next ask gives
  back what was handed out for a clock and is in no step of it.
- Where there is none, the worker takes part in the clocks of the others with updates that have no values, for one of these may
  die. It does not while the script has gradients that no step() has taken: then the loop ends, and the script steps.
"""

from __future__ import annotations

from typing import Protocol

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.worker.sync.shards import ShardExchanges
from narrows.worker.sync.step import StepEngine


class SamplingStep(Protocol):
    """The part of a step that ranges of samples are taken for."""

    shards: ShardExchanges
    steps: int  # that the script has taken
    composed: int  # the epoch of the life that the replica is of

    def resume(self) -> bool:
        """Whether this worker had to join again since its replica was composed; then begin anew from the run's clock."""

    def idle(self) -> None:
        """Take part in the present clock without samples."""


class SampleClient:
    """Takes ranges for `sync`, in a mode with a server."""

    def __init__(self, engine: StepEngine, sync: SamplingStep) -> None:
        self.engine, self.sync = engine, sync
        self.ask: m.RangeAsk | None = None  # the newest
        self.told: e.RangeTold | None = None
        self.steps = -1  # that the script had taken when the newest range was handed out
        self.holds, self.life = 0, (0, 0)  # ranges that are to be in the update of this life and clock
        self.fresh = 0  # those since the newest step

    @property
    def unstepped(self) -> bool:
        """The script may have gradients that no step() has taken."""
        return self.steps == self.sync.steps

    def take(self, samples: int, size: int, limit: int) -> int:
        """The next range before `limit`, -1: all are done, or this script is to step first. Raises NarrowsError."""
        while True:
            if not self.unstepped:
                self.sync.resume()  # else what is computed now would be dropped
            told = self._answer(samples, size, limit)
            if told is None:
                continue
            if told.index >= 0:
                self.fresh = self.fresh + 1 if self.unstepped else 1
                self.steps, self.holds = self.sync.steps, self.holds + 1
                return told.index
            if told.over or self.unstepped:
                return -1
            self.sync.idle()

    def give_back(self) -> None:
        """The script ends here: ranges that no step() has taken are not done."""
        if self.ask is not None and self.unstepped:
            self.holds = max(0, self.holds - self.fresh)
            self._answer(self.ask.samples, self.ask.size, 0)

    def _answer(self, samples: int, size: int, limit: int) -> e.RangeTold | None:
        """None: this worker had to join again, and there is none."""
        self.engine.waiting.calls("ranges()")
        self.engine.waiting.poll()
        shards = self.sync.shards
        if self.life != (self.sync.composed, shards.clock):
            self.holds, self.life = 0, (self.sync.composed, shards.clock)
        number, epoch = 1 + (self.ask.number if self.ask is not None else 0), shards.epoch
        self.ask = m.RangeAsk(shards.worker, shards.place, number, shards.clock, self.holds, samples, size, limit)
        self.engine.link.ask_range(self.ask)

        def told() -> bool:
            return shards.epoch != epoch or (self.told is not None and self.told.number == number)

        self.engine.wait(told, WAIT_LIMIT_S, "samples to compute on")
        return self.told if shards.epoch == epoch else None

    def handle(self, event: MemberEffect) -> None:
        if isinstance(event, e.RangeTold):
            self.told = event
        elif isinstance(event, e.Moved) and self.ask is not None:  # its answer may be of the place before
            self.engine.link.ask_range(m.RangeAsk(event.worker, event.epoch, *_rest(self.ask)))


def _rest(ask: m.RangeAsk) -> tuple[int, int, int, int, int, int]:
    return ask.number, ask.clock, ask.holds, ask.samples, ask.size, ask.limit
