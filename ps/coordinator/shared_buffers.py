"""The module buffers (BatchNorm) of a run: those of the live worker with the lowest rank, the lead. No I/O.

Rules
- Each checkpoint contains them, and each worker that joins gets them.
- A worker that is about to show the shared model asks for them. It gets them at once if they are as new as its own
  updates, or as those of the lead. Otherwise the next acknowledgement asks the lead for newer ones.
- Under gossip the clock of buffers is 1 once all workers have done their last step, and 0 before.
"""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import unpack_arrays
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.effects import NS, Send, ServerEffect
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.run import Run, Seat


class SharedBuffers:
    """Holds the buffers of a run, and asks the lead for newer ones."""

    def __init__(self, run: Run, clocks: Clocks) -> None:
        self.run, self.clocks = run, clocks
        self.packed, self.clock, self.heard_ns = b"", -1, 0  # the newest, the lead's clock then, when they came
        self.asking: dict[int, int] = {}  # by worker that waits for newer ones, its clock

    def adopt(self, packed: bytes) -> None:
        """Take the buffers of a checkpoint or of the parent's run, unless there are some already."""
        self.packed = self.packed or packed

    def wanted(self, worker: int, now_ns: int) -> bool:
        """True if this worker is the lead and should send its buffers now."""
        seat = self.run.seats.get(worker)
        if seat is None or not self.run.leads(seat):
            return False
        given = self.run.settings.checkpoint_every  # 0: at the end, -1: adaptive
        every = given if given > 0 else self.run.settings.lease
        return bool(self.asking) or not self.heard_ns or now_ns - self.heard_ns >= every * NS / 2

    def hear(self, seat: Seat, message: m.Buffers | m.BuffersRequest, now_ns: int) -> list[ServerEffect]:
        """Take buffers from the lead, or an ask for them from another worker.

        Raises:
            RemoteProtocolError: the payload holds no buffers. They would end each worker that joins.
        """
        if isinstance(message, m.BuffersRequest):
            return self._ask(seat, message.clock)
        if not self.run.leads(seat):
            return []
        packed = bytes(message.payload)
        unpack_arrays(packed)
        self.packed, self.clock, self.heard_ns = packed, message.clock, now_ns
        waiting, self.asking = self.asking, {}
        return [self._told(self.run.seats[worker]) for worker in waiting if worker in self.run.seats]

    def _ask(self, seat: Seat, clock: int) -> list[ServerEffect]:
        """Send this worker the buffers if they are new enough; otherwise it gets them once they are here."""
        lead = min(self.run.declared, key=lambda each: each.rank, default=seat)
        counted = lead.epoch and self.run.mode.rule is not FoldRule.MIX  # gossip updates do not come to the server
        if self.clock >= min(clock, self.clocks.clock(lead) if counted else clock):
            return [self._told(seat)]
        if lead is seat:
            return [Send(seat.peer, m.Buffers(seat.worker, seat.epoch, -1, b""))]
        self.asking[seat.worker] = clock
        return []

    def _told(self, seat: Seat) -> Send:
        return Send(seat.peer, m.Buffers(seat.worker, seat.epoch, self.clock, self.packed))
