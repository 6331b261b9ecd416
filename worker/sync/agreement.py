"""The worker's side of agree(): one number for all workers at one step (ps/coordinator/agreements.py).

The main thread owns it.

    worker                                 coordinator
    AgreeRequest(number, step, value)   ──>    waits for each live worker that is not past this step
    AgreementArrived(number, mean)        <──    answers all of them with the mean
"""

from __future__ import annotations

import struct
from functools import partial

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.sync.sync_step import RunEngine

DOUBLE = struct.Struct("<d")


class Agreement:
    """The calls of agree() of one worker. In a group, all ranks call together and the group's mean is sent."""

    def __init__(self, engine: RunEngine) -> None:
        self.engine = engine
        self.ask: m.AgreeRequest | None = None  # the newest request
        self.answer: e.AgreementArrived | None = None  # the newest answer
        self.at, self.calls = -1, 0  # the script's step, and earlier calls at this step
        self.alone = False  # the user was told that no server is left to agree by

    def agree(self, value: float, step: int) -> float:
        """Return the mean of the values of all workers that call agree() at this step.

        Args:
            value: this worker's value.
            step: the step of the script, alike in all workers.

        Raises:
            NarrowsError: the other workers have not called within WAIT_LIMIT_S.
        """
        engine = self.engine
        engine.waiting.poll()
        engine.meet("agree()")
        if engine.group is not None:
            told = engine.group.told(DOUBLE.pack(value))
            value = sum(DOUBLE.unpack(each)[0] for each in told) / len(told)
        self.at, self.calls = (step, 0) if step != self.at else (step, self.calls + 1)
        while not engine.sync.server_gone:
            here = partial(self._here, self._send(value))
            engine.waiting.until(here, WAIT_LIMIT_S, "the other workers to call agree()")
            if self.answer is not None and self.ask is not None and self.answer.number == self.ask.number:
                return self.answer.value
        if not self.alone:
            self.alone = True
            say("the server is lost, so agree() returns the value of this worker alone")
        return value

    def _send(self, value: float) -> int:
        """Send the request, and return the epoch in which it was sent. A rejoined worker asks at its new clock."""
        shards, number = self.engine.sync.shards, 1 + (self.ask.number if self.ask is not None else 0)
        # Under gossip the server sees no updates, and counts rounds.
        clock = max(shards.clock, self.engine.sync.clock)
        self.ask = m.AgreeRequest(shards.worker, shards.place, number, self.at, self.calls, clock, value, 1)
        self.engine.link.ask_agreed(self.ask)
        return shards.epoch

    def _here(self, place: int) -> bool:
        sync = self.engine.sync
        told = self.answer is not None and self.ask is not None and self.answer.number == self.ask.number
        return told or sync.server_gone or sync.shards.epoch != place

    def handle(self, event: MemberEffect) -> None:
        if isinstance(event, e.AgreementArrived):
            self.answer = event
        elif (
            isinstance(event, e.MemberResharded) and self.ask is not None
        ):  # the answer may have been for the place before
            ask = self.ask
            again = (ask.number, ask.at, ask.call, ask.clock, ask.value, ask.weight)
            self.engine.link.ask_agreed(m.AgreeRequest(event.worker, event.epoch, *again))
