"""The feed of a standby: a shard's machine, and then each event before anything that follows from it is sent. No I/O.

Rules
- The standby has an event before anything that follows from it is sent. So what others have seen of a shard, the standby has
  the cause of.
- What is sent and not acknowledged is kept, and sent again where nothing moves. A standby that lags by TAIL_BYTES is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from narrows.protocols import messages as m
from narrows.protocols.config.timing import REPLICATION_CUT_NS, REPLICATION_RETRY
from narrows.protocols.effects import Send
from narrows.protocols.messages import RefuseCode
from narrows.ps.replication.events import MachineEvent

PART_BYTES = 1 << 20  # of a machine
PARTS_AHEAD = 16  # that were sent and are not acknowledged
TAIL_BYTES, TAIL_TIMES = 1 << 28, 2  # of events that are not acknowledged, or so often the machine where that is more


class ReplicatedMember(Protocol):
    """The part of a member that is known here."""

    worker: int
    peer: bytes
    name: bytes


class ReplicatedMachine(Protocol):
    """The part of a shard's machine that is asked for here."""

    view: int
    standby: str
    happened: int
    incarnation: int  # of the life in which they happened; that of a later life is greater
    viewed: int  # the event with which the present view began
    before: str

    @property
    def members(self) -> Sequence[ReplicatedMember]: ...


class ReplicationStream:
    """What the standby of this machine has, and what is on its way there. `lost_ns`: silence after which it is lost. `freeze`:
    the machine, as bytes."""

    def __init__(self, machine: ReplicatedMachine, lost_ns: int, freeze: Callable[[], bytes]) -> None:
        self.machine, self.lost_ns, self.freeze = machine, lost_ns, freeze
        self.peer, self.address = b"", ""  # of the standby of this shard, and where members find it
        self.heard_ns = self.progress_ns = 0
        self.tail: deque[m.ReplicationEntry] = deque()  # events that it has not acknowledged
        self.tail_bytes, self.streams = 0, False  # whether it has a machine, and gets each event
        self.acked = self.sent = 0  # events
        self.frozen, self.frozen_at, self.frozen_sent = b"", -1, 0  # a machine that is on its way; parts
        self.here = self.size = 0  # parts of it that are there; bytes of the newest one

    def note(self, event: MachineEvent, frames: Sequence[m.Buffer]) -> list[Send]:
        """Before an event is handled: the standby is to have it."""
        if not self.peer and not self.machine.standby:
            return []
        header, payload = bytes(frames[0]) if frames else b"", frames[1] if len(frames) > 1 else b""
        number = self.machine.happened + 1
        copied = m.ReplicationEntry(
            self.machine.incarnation, number, 0, 0, event.described(), len(frames), header, payload
        )
        self.tail.append(copied)
        self.tail_bytes += len(header) + len(payload)
        if self.tail_bytes > max(TAIL_BYTES, TAIL_TIMES * self.size):
            self.forget()
            return []
        if not self.streams:
            return []
        self.sent = number
        return [Send(self.peer, copied)]

    def forget(self) -> None:
        """The standby must begin anew."""
        self.peer, self.address, self.streams = b"", "", False
        self.tail.clear()
        self.tail_bytes, self.frozen, self.frozen_at = 0, b"", -1

    def copy(self, peer: bytes, copy: m.ReplicationFollow, now_ns: int) -> list[Send]:
        """Send a standby what it lacks, events or the machine; refuse it where another stands by."""
        other = self.machine.standby or (self.address if now_ns - self.heard_ns <= self.lost_ns else "")
        if other and copy.address != other:
            text = f"another server stands by already, at {other}"
            return [Send(peer, m.Refuse(RefuseCode.TAKEN, -1, 0, text))]
        self.peer, self.address, self.heard_ns = peer, copy.address, now_ns
        held = self.tail[0].number - 1 if self.tail else self.machine.happened
        if copy.life != self.machine.incarnation:
            copy = replace(copy, have=-1, machine=-1)  # of a life that is over
        if 0 <= copy.have < self.acked:
            return []  # a late one
        if not held <= copy.have <= self.machine.happened:
            return self._give_machine(copy, now_ns)
        if copy.have > self.acked:
            self.progress_ns = now_ns
        self.streams, self.frozen, self.frozen_at = True, b"", -1
        self.acked = copy.have
        while self.tail and self.tail[0].number <= copy.have:
            gone = self.tail.popleft()
            self.tail_bytes -= len(gone.header) + len(gone.payload)
        if REPLICATION_RETRY.due(self.progress_ns, now_ns, self.tail_bytes):
            self.sent, self.progress_ns = copy.have, now_ns
        missing = [copied for copied in self.tail if copied.number > self.sent]
        self.sent = missing[-1].number if missing else self.sent
        return [Send(peer, copied) for copied in missing]

    def _give_machine(self, copy: m.ReplicationFollow, now_ns: int) -> list[Send]:
        if not self.frozen:
            self.tail.clear()
            self.tail_bytes, self.streams = 0, False
            self.frozen, self.frozen_at, self.frozen_sent = self.freeze(), self.machine.happened, 0
            self.size = len(self.frozen)
        parts = -(-len(self.frozen) // PART_BYTES)
        here = copy.parts if copy.machine == self.frozen_at else 0
        if here > self.here:
            self.progress_ns = now_ns
        elif REPLICATION_RETRY.due(self.progress_ns, now_ns, (self.frozen_sent - here) * PART_BYTES):
            self.frozen_sent, self.progress_ns = here, now_ns
        self.here = here
        first, self.frozen_sent = self.frozen_sent, max(self.frozen_sent, min(parts, here + PARTS_AHEAD))
        of, view, size = (self.machine.incarnation, self.frozen_at), memoryview(self.frozen), PART_BYTES
        sent = range(first, self.frozen_sent)
        return [
            Send(self.peer, m.ReplicationEntry(*of, n, parts, b"", 0, b"", view[n * size : (n + 1) * size]))
            for n in sent
        ]

    def copied(self, now_ns: int) -> bool:
        """The standby follows this shard, was heard a moment ago, and knows of the present view."""
        return self.streams and self.acked >= self.machine.viewed and now_ns - self.heard_ns <= self.lost_ns

    def cut(self, now_ns: int) -> None:
        """The connection of the standby has ended: REPLICATION_CUT_NS of silence are enough."""
        self.heard_ns = min(self.heard_ns, now_ns - self.lost_ns + REPLICATION_CUT_NS)
