"""The worker's side of `ranges()`: takes ranges of samples from the coordinator. The main thread owns it.

How it works

    for batch in ranges(...):   take  ── RangeRequest(clock, holds) ──>  coordinator leases a range
                                      <────────── range ───────────     for the update of this clock
        loss.backward()
        optimizer.step()        the update of this clock holds the ranges that were taken for it

Rules
- The worker asks for a range right before it computes on it, with the clock of the update that will hold the range.
- If step() drops a gradient because this worker had to rejoin, its ranges no longer belong to this worker. Each request
  says how many ranges of its clock the update will hold (`holds`); the coordinator takes the others back.
- If no range is left, the worker takes part in the clocks of the others with updates of weight 0, because one of the
  other workers may die and its ranges come back. While the script has gradients that no step() has taken, the worker
  does not: the loop ends, so that the script steps.
"""

from __future__ import annotations

from typing import Protocol

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.worker.sync.shard_exchanges import ShardExchanges
from narrows.worker.sync.sync_step import StepEngine


class SamplingStep(Protocol):
    """The part of a `SyncStep` that `SampleClient` uses."""

    shards: ShardExchanges
    composed: int  # the epoch in which the replica was composed

    def resume(self) -> bool:
        """If this worker had to rejoin since its replica was composed, compose it anew. Returns whether it had."""

    def idle(self) -> None:
        """Take part in the present clock without samples."""


class SampleClient:
    """Takes ranges of samples for the steps of `sync`, in a mode with a server."""

    def __init__(self, engine: StepEngine, sync: SamplingStep) -> None:
        self.engine, self.sync = engine, sync
        self.ask: m.RangeRequest | None = None  # the newest request
        self.answer: e.RangeArrived | None = None  # the newest answer
        self.steps = -1  # the script's steps when the newest range was handed out
        self.holds, self.life = 0, (0, 0)  # ranges of the update of this (epoch, clock)
        self.fresh = 0  # of these, ranges that were taken since the newest step

    def serve(self, sync: SamplingStep) -> None:
        """Take samples for another kind of step from now on."""
        self.sync = sync

    @property
    def unstepped(self) -> bool:
        """True if the script has taken a range since its newest step(): it may have gradients that no step has."""
        return self.steps == self.engine.steps

    def take(self, samples: int, size: int, limit: int) -> int:
        """Take the next range.

        Args:
            samples: samples of an epoch.
            size: samples of a range; the last range of an epoch may be shorter.
            limit: the range has a number below this one. Ranges are numbered through all epochs.

        Returns:
            The number of the range; -1 if all ranges are done, or if the script must step first.

        Raises:
            NarrowsError: no answer within WAIT_LIMIT_S.
        """
        while True:
            self.engine.change_over()  # the answer is for the step of the plan that the run has now
            if not self.unstepped:
                self.sync.resume()  # else the next gradient would be dropped
            told = self._answer(samples, size, limit)
            if told is None:
                continue
            if told.index >= 0:
                self.fresh = self.fresh + 1 if self.unstepped else 1
                self.steps, self.holds = self.engine.steps, self.holds + 1
                return told.index
            if told.over or self.unstepped:
                return -1
            self.sync.idle()

    def give_back(self) -> None:
        """Give back the ranges that no step() has taken, at the end of the script."""
        if self.ask is not None and self.unstepped:
            self.holds = max(0, self.holds - self.fresh)
            self._answer(self.ask.samples, self.ask.size, 0)

    def _answer(self, samples: int, size: int, limit: int) -> e.RangeArrived | None:
        """Send a request, and return its answer; None if this worker had to rejoin meanwhile."""
        self.engine.waiting.calls("ranges()")
        self.engine.waiting.poll()
        shards = self.sync.shards
        if self.life != (self.sync.composed, shards.clock):
            self.holds, self.life = 0, (self.sync.composed, shards.clock)
        number, epoch = 1 + (self.ask.number if self.ask is not None else 0), shards.epoch
        self.ask = m.RangeRequest(shards.worker, shards.place, number, shards.clock, self.holds, samples, size, limit)
        self.engine.link.ask_range(self.ask)

        def told() -> bool:
            return shards.epoch != epoch or (self.answer is not None and self.answer.number == number)

        self.engine.waiting.until(told, WAIT_LIMIT_S, "samples to compute on")
        return self.answer if shards.epoch == epoch else None

    def handle(self, event: MemberEffect) -> None:
        if isinstance(event, e.RangeArrived):
            self.answer = event
        elif (
            isinstance(event, e.MemberResharded) and self.ask is not None
        ):  # the answer may have been for the place before
            self.engine.link.ask_range(m.RangeRequest(event.worker, event.epoch, *_rest(self.ask)))


def _rest(ask: m.RangeRequest) -> tuple[int, int, int, int, int, int]:
    return ask.number, ask.clock, ask.holds, ask.samples, ask.size, ask.limit
