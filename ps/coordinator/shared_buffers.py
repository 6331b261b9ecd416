"""The module's buffers (BatchNorm) of a run: those of the live worker with the lowest rank. No I/O.

Rules
- They go along with checkpoints, and to whoever joins.
- A worker that shows the shared model asks for them. It has an answer at once where they are as new as that worker's own
  updates, or as the updates of the one that they come from. Else they are asked for with the next ack.
- Under gossip they count 1 once all have done their last step, and 0 before.
"""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import unpack_arrays
from narrows.protocols.config.modes import Rule
from narrows.protocols.effects import NS, Send, ServerEffect
from narrows.ps.coordinator.clock_quorum import Clocks
from narrows.ps.coordinator.run import Run, Seat


class SharedBuffers:
    """packed: the newest, after `clock` updates of the worker that sent them. asking: the workers that wait for newer ones."""

    def __init__(self, run: Run, rounds: Clocks) -> None:
        self.run, self.rounds = run, rounds
        self.packed, self.clock, self.heard_ns = b"", -1, 0
        self.asking: dict[int, int] = {}  # by worker, its clock

    def wanted(self, worker: int, now_ns: int) -> bool:
        """Whether this worker should send its own now."""
        seat = self.run.seats.get(worker)
        if seat is None or not self.run.leads(seat):
            return False
        told = self.run.settings.checkpoint_every  # 0: at the end, -1: adaptive
        every = told if told > 0 else self.run.settings.lease
        return bool(self.asking) or not self.heard_ns or now_ns - self.heard_ns >= every * NS / 2

    def hear(self, seat: Seat, message: m.Buffers | m.BuffersAsk, now_ns: int) -> list[ServerEffect]:
        """Raises RemoteProtocolError for buffers that are none: they would end each joiner."""
        if isinstance(message, m.BuffersAsk):
            return self._ask(seat, message.clock)
        if not self.run.leads(seat):
            return []
        packed = bytes(message.payload)
        unpack_arrays(packed)
        self.packed, self.clock, self.heard_ns = packed, message.clock, now_ns
        waiting, self.asking = self.asking, {}
        return [self._told(self.run.seats[worker]) for worker in waiting if worker in self.run.seats]

    def _ask(self, seat: Seat, clock: int) -> list[ServerEffect]:
        """Tell this worker the buffers now; where they are not here yet, it is told once they are."""
        lead = min(self.run.declared, key=lambda each: each.rank, default=seat)
        counted = lead.epoch and self.run.mode.rule is not Rule.MIX  # the updates of who mixes do not come here
        if self.clock >= min(clock, self.rounds.clock(lead) if counted else clock):
            return [self._told(seat)]
        if lead is seat:
            return [Send(seat.peer, m.Buffers(seat.worker, seat.epoch, -1, b""))]
        self.asking[seat.worker] = clock
        return []

    def _told(self, seat: Seat) -> Send:
        return Send(seat.peer, m.Buffers(seat.worker, seat.epoch, self.clock, self.packed))
