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
from narrows.protocols.config.retry import NumberedStream
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
        self.events, self.parts = NumberedStream(), NumberedStream(PARTS_AHEAD)  # of a machine
        self.frozen, self.frozen_at = b"", -1  # a machine that is on its way
        self.size = 0  # bytes of the newest one

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
        self.events.sent = number
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
        self.streams, self.frozen, self.frozen_at = True, b"", -1
        while self.tail and self.tail[0].number <= copy.have:
            gone = self.tail.popleft()
            self.tail_bytes -= len(gone.header) + len(gone.payload)
        self._acknowledged(self.events, copy.have, self.tail_bytes, now_ns)
        missing = self.events.take(self.tail[-1].number if self.tail else 0)  # events count from 1: n is n - 1 there
        return [Send(peer, copied) for copied in self.tail if copied.number > missing.start]

    def _acknowledged(self, stream: NumberedStream, count: int, size: int, now_ns: int) -> None:
        """Take the standby's word that it has `count` events or parts. After a while without progress, the `size` bytes that
        are under way count as lost."""
        if stream.acknowledge(count):
            self.progress_ns = now_ns
        elif REPLICATION_RETRY.due(self.progress_ns, now_ns, size):
            stream.go_back()
            self.progress_ns = now_ns

    def _give_machine(self, copy: m.ReplicationFollow, now_ns: int) -> list[Send]:
        if not self.frozen:
            self.tail.clear()
            self.tail_bytes, self.streams = 0, False
            self.frozen, self.frozen_at, self.parts.sent = self.freeze(), self.machine.happened, 0
            self.size = len(self.frozen)
        parts = -(-len(self.frozen) // PART_BYTES)
        here = copy.parts if copy.machine == self.frozen_at else 0
        self._acknowledged(self.parts, here, (self.parts.sent - here) * PART_BYTES, now_ns)
        of, view, size = (self.machine.incarnation, self.frozen_at), memoryview(self.frozen), PART_BYTES
        return [
            Send(self.peer, m.ReplicationEntry(*of, n, parts, b"", 0, b"", view[n * size : (n + 1) * size]))
            for n in self.parts.take(parts)
        ]

    @property
    def acked(self) -> int:
        """Number of the newest event that the standby has, and all before it."""
        return self.events.acked

    def copied(self, now_ns: int) -> bool:
        """The standby follows this shard, was heard a moment ago, and knows of the present view."""
        return self.streams and self.acked >= self.machine.viewed and now_ns - self.heard_ns <= self.lost_ns

    def cut(self, now_ns: int) -> None:
        """The connection of the standby has ended: REPLICATION_CUT_NS of silence are enough."""
        self.heard_ns = min(self.heard_ns, now_ns - self.lost_ns + REPLICATION_CUT_NS)
